"""`ProcessGroup`: the group object of c10d's users.

It has a backend for each kind of device. On the CPU this is tenfold's, made if the group is given a store.
Operations go to the backend, with the hooks of the group before and after.
"""

import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias, overload

from tenfold._tenfold import PrefixStore
from tenfold.arrays import Tensor
from tenfold.c10d import enums, work_registry
from tenfold.c10d.backend import Backend, ProcessGroupTenfold
from tenfold.c10d.collectives import COLLECTIVES
from tenfold.c10d.enums import HookOpName
from tenfold.c10d.operations import Operations
from tenfold.c10d.options import _DEFAULT_PG_TIMEOUT, Fields, PostHookArgs, PreHookArgs, ReconfigureOptions
from tenfold.c10d.work_registry import _register_work
from tenfold.exceptions import DistArgumentError
from tenfold.work import Work

__all__ = ["ProcessGroup", "_broadcast_coalesced"]


class ProcessGroup(Operations):
    """Ranks that communicate, as c10d has them.

    With a store, the constructor joins the other ranks with tenfold's backend. Without one, the group has no
    backend until one is registered.

    >>> from tenfold import HashStore, ReduceOp
    >>> group = ProcessGroup(HashStore(), 0, 1)
    >>> numbers = bytearray([1, 2, 3])
    >>> group.allreduce(numbers, ReduceOp.SUM).wait()
    True
    >>> group.rank(), group.size(), group.name()
    (0, 1, 'tenfold')
    """

    BackendType: TypeAlias = enums.BackendType

    UNDEFINED = enums.BackendType.UNDEFINED
    GLOO = enums.BackendType.GLOO
    NCCL = enums.BackendType.NCCL
    UCC = enums.BackendType.UCC
    MPI = enums.BackendType.MPI
    XCCL = enums.BackendType.XCCL
    CUSTOM = enums.BackendType.CUSTOM

    bound_device_id: Any = None
    use_pg_for_symm_mem_rendezvous: bool = False

    @overload
    def __init__(self, rank: int, size: int) -> None: ...

    @overload
    def __init__(self, store: Any, rank: int, size: int) -> None: ...

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        store, self._rank, self._size = _constructor_arguments(args, kwargs)
        self._store = store
        self._name: str | None = None
        self._description = ""
        self._default_type = enums.BackendType.UNDEFINED
        self._backends: dict[str, tuple[Any, enums.BackendType, Backend]] = {}
        self._pre_hooks: dict[int, Callable[[PreHookArgs], None]] = {}
        self._post_hooks: dict[int, Callable[[PostHookArgs], None]] = {}
        self._op_ids = itertools.count(1)
        self._splits = 0
        if store is not None:
            backend = ProcessGroupTenfold(store, self._rank, self._size)
            self._register_backend("cpu", enums.BackendType.CUSTOM, backend)

    @classmethod
    def _around(
        cls, backend: Backend, store: Any, name: str | None, description: str | None
    ) -> "ProcessGroup":
        group = cls(backend.rank(), backend.size())
        group._store = store
        group._name = name
        group._description = description or ""
        group._register_backend("cpu", enums.BackendType.CUSTOM, backend)
        return group

    def rank(self) -> int:
        """Returns the rank of this process."""
        return self._rank

    def size(self) -> int:
        """Returns the number of ranks."""
        return self._size

    def name(self) -> str:
        """Returns the kind of the group's backend."""
        return self._get_backend_name()

    def _get_backend_name(self) -> str:
        return self._backend().name() if self._backends else "undefined"

    @property
    def group_name(self) -> str:
        if self._name is None:
            raise RuntimeError("ProcessGroup name not set")
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    def _set_group_name(self, name: str, /) -> None:
        self._name = name

    def _set_group_desc(self, desc: str, /) -> None:
        self._description = desc

    def get_group_store(self) -> Any:
        """Returns the store that the group was made with."""
        return self._store

    def _id(self) -> int:
        return id(self)

    def boxed(self) -> "ProcessGroup":
        """Returns itself: there is no TorchScript here."""
        return self

    @staticmethod
    def unbox(obj: "ProcessGroup") -> "ProcessGroup":
        return obj

    # Backends.

    def _register_backend(
        self, device: Any, backend_type: enums.BackendType, backend: Backend | None = None
    ) -> None:
        if backend is None:
            raise RuntimeError(f"there is no backend to register for {device}")
        self._backends[_device_type(device)] = (device, backend_type, backend)
        if self._default_type is enums.BackendType.UNDEFINED:
            self._default_type = backend_type

    def _set_default_backend(self, backend_type: enums.BackendType) -> None:
        self._default_type = backend_type

    def get_backend(self, device: Any) -> Backend:
        """Returns the backend for a kind of device."""
        kind = _device_type(device)
        if kind not in self._backends:
            raise RuntimeError(f"No backend type associated with device type {kind}")
        return self._backends[kind][2]

    def _get_backend(self, device: Any) -> Backend:
        return self.get_backend(device)

    def _backend_id(self, backend_type: enums.BackendType) -> int:
        return id(self._backend(backend_type))

    @property
    def _device_types(self) -> list[Any]:
        return [device for device, _, _ in self._backends.values()]

    def _backend(self, backend_type: enums.BackendType | None = None) -> Backend:
        wanted = backend_type or self._default_type
        for _, kind, backend in self._backends.values():
            if kind is wanted:
                return backend
        raise RuntimeError(f"Could not find backend type {wanted.value} for this ProcessGroup; register one")

    # Operations.

    def _perform(self, name: str, arguments: list[Any], options: Fields | None) -> Any:
        if not self._backends:
            raise RuntimeError("No backend type associated with device type cpu")
        backend = self._backend()
        if not self._has_hooks():
            work = _perform_by(backend, name, arguments, options)
            return self._registered(work, arguments) if work_registry._allowed else work
        op_id, told = next(self._op_ids), _hook_name(name)
        is_async = getattr(options, "asyncOp", True)
        self._tell_pre_hooks(told, is_async, name, arguments, options, op_id)
        work = _perform_by(backend, name, arguments, options)
        after = PostHookArgs()
        after.name, after.async_op, after.work, after.op_id = told, is_async, work, op_id
        for hook in list(self._post_hooks.values()):
            hook(after)
        return self._registered(work, arguments) if work_registry._allowed else work

    def _registered(self, work: Any, arguments: list[Any]) -> Any:
        """Registers it for `wait_tensor`; see `_set_allow_inflight_collective_as_graph_input`."""
        if work is not None and arguments:
            for tensor in _flat(arguments[0]):
                _register_work(tensor, work)
        return work

    def _tell_pre_hooks(
        self, told: HookOpName, is_async: bool, name: str, arguments: list[Any], options: Any, op_id: int
    ) -> None:
        before = PreHookArgs()
        before.name, before.async_op, before.op_id = told, is_async, op_id
        before.root = getattr(options, "rootRank", -1)
        lists = [_flat(argument) for argument in arguments if not isinstance(argument, int | Fields)]
        # In place unless there are outputs and inputs. A send has no output, and a barrier has neither.
        before.output_tensors = [] if name == "send" or not lists else lists[0]
        before.input_tensors = lists[1] if len(lists) > 1 else (lists[0] if lists else [])
        for hook in list(self._pre_hooks.values()):
            hook(before)

    def _start_coalescing(self, device_type: Any) -> None:
        self.get_backend(device_type)._start_coalescing()

    def _end_coalescing(self, device_type: Any) -> Work:
        return self.get_backend(device_type)._end_coalescing()

    def _get_sequence_number_for_group(self) -> int:
        return self._backend()._get_sequence_number_for_group()

    # Hooks.

    def _has_hooks(self) -> bool:
        return bool(self._pre_hooks or self._post_hooks)

    def register_pre_hook(self, hook_id: int, hook: Callable[[PreHookArgs], None]) -> None:
        """Calls `hook` before every operation."""
        self._pre_hooks[hook_id] = hook

    def unregister_pre_hook(self, hook_id: int) -> None:
        self._pre_hooks.pop(hook_id, None)

    def register_post_hook(self, hook_id: int, hook: Callable[[PostHookArgs], None]) -> None:
        """Calls `hook` after every call of an operation, which may still be pending."""
        self._post_hooks[hook_id] = hook

    def unregister_post_hook(self, hook_id: int) -> None:
        self._post_hooks.pop(hook_id, None)

    @property
    def supports_abort_hooks(self) -> bool:
        return self._backend().supports_abort_hooks

    def register_abort_hook(self, hook_id: int, hook: Callable[[], None]) -> None:
        self._backend().register_abort_hook(hook_id, hook)

    def unregister_abort_hook(self, hook_id: int) -> None:
        self._backend().unregister_abort_hook(hook_id)

    @property
    def supports_completion_hooks(self) -> bool:
        return self._backend().supports_completion_hooks

    def _register_on_completion_hook(self, hook: Callable[[Any], None]) -> None:
        """Calls `hook` with a `WorkInfo` on another thread whenever an operation has completed."""
        self._backend()._register_on_completion_hook(hook)

    def _wait_for_pending_works(self) -> None:
        """Waits until the completion hook was called for all operations."""
        self._backend()._wait_for_pending_works()

    # Lifetime.

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of all operations that are called from now on."""
        for _, _, backend in self._backends.values():
            backend.set_timeout(timeout)

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        for _, _, backend in self._backends.values():
            backend._add_ephemeral_timeout(timeout)

    def _enable_collectives_timing(self) -> None:
        for _, _, backend in self._backends.values():
            backend._enable_collectives_timing()

    def abort(self) -> None:
        """Fails the group on all ranks."""
        for _, _, backend in self._backends.values():
            backend.abort()

    def shutdown(self) -> None:
        """Leaves the group. Later calls raise an error."""
        for _, _, backend in self._backends.values():
            backend.shutdown()

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[Any] | None = None,
    ) -> "ProcessGroup | None":
        """Makes a group of some of the ranks. All ranks must call it; it returns None on the other ranks.

        Settings that are not given are this group's, except for the name. The new group has its own store:
        the keys of this group's store that begin with the new group's name.
        """
        ranks = list(ranks)
        _check_split(ranks, self._size)
        if device_types is not None and "cpu" not in map(_device_type, device_types):
            return None
        parent = self._backend()
        name = group_name or f"{self._name or 'default'}:split:{ranks}"
        if group_desc is None:
            group_desc = f"{self._description}:split:{self._splits}"
            self._splits += 1
        given = parent.options if opts is None else opts
        options = Backend.Options(given.backend, given._timeout if timeout is None else timeout)
        options.group_name, options.enable_reconfigure = name, given.enable_reconfigure
        store = None if self._store is None else PrefixStore(f"{name}/", self._store)
        part = parent.split(store, ranks, options)
        return None if part is None else ProcessGroup._around(part, store, name, group_desc)

    def merge_remote_group(
        self,
        store: Any,
        size: int,
        timeout: timedelta = _DEFAULT_PG_TIMEOUT,
        group_name: str | None = None,
        group_desc: str | None = None,
    ) -> "ProcessGroup":
        """Makes a group of `size` ranks of any groups. They join through `store`, numbered on arrival."""
        name = group_name or f"{self._name or 'default'}:merge"
        options = Backend.Options("tenfold", timeout)
        options.group_name = name
        rank = store.add("mergeGroupRank", 1) - 1
        if rank >= size:
            hint = "pass the same size on all ranks, and use a separate store or prefix for each merge"
            raise RuntimeError(f"merge_remote_group: {rank + 1} ranks joined a group of {size}; {hint}")
        whole = self._backend().merge(store, options, rank, size)
        desc = f"{self._description}:merge" if group_desc is None else group_desc
        return ProcessGroup._around(whole, store, name, desc)

    @property
    def supports_reconfigure(self) -> bool:
        return self._only_backend().supports_reconfigure

    def get_reconfigure_handle(self) -> str:
        return self._only_backend().get_reconfigure_handle()

    def reconfigure(self, opts: ReconfigureOptions) -> Work:
        """Makes this the group of the processes with these handles; its rank and size change."""
        backend = self._only_backend()
        work = backend.reconfigure(opts)
        self._rank, self._size = backend.rank(), backend.size()
        return work

    def _only_backend(self) -> Backend:
        if len({id(backend) for _, _, backend in self._backends.values()}) > 1:
            raise RuntimeError("groups with multiple backends cannot be reconfigured")
        return self._backend()

    @property
    def supports_window(self) -> bool:
        return self._backend().supports_window

    def new_window(self, tensor: Tensor | None = None) -> Any:
        return self._backend().new_window(tensor)


def _constructor_arguments(args: tuple, kwargs: dict[str, Any]) -> tuple[Any, int, int]:
    names = ("rank", "size") if len(args) + len(kwargs) == 2 else ("store", "rank", "size")
    given = dict(zip(names, args, strict=False)) | kwargs
    if set(given) != set(names):
        raise TypeError("ProcessGroup takes (rank, size) or (store, rank, size)")
    return given.get("store"), given["rank"], given["size"]


def _perform_by(backend: Backend, name: str, arguments: list[Any], options: Fields | None) -> Any:
    """Calls an operation of a backend. If it is not overridden, its form need not be matched again."""
    if getattr(type(backend), name) is getattr(Operations, name):
        return backend._perform(name, arguments, options)
    return getattr(backend, name)(*arguments, *([] if options is None else [options]))


def _device_type(device: Any) -> str:
    return getattr(device, "type", None) or str(device).split(":")[0]


def _check_split(ranks: list[int], size: int) -> None:
    if not ranks:
        raise DistArgumentError(
            "Split ranks cannot be empty. Please provide a non-empty list of ranks to split the group."
        )
    if len(ranks) > size:
        raise DistArgumentError(
            f"{len(ranks)} ranks of a group of {size}: the split group's size should be no larger than the "
            "world_size set by init_process_group"
        )
    if len(set(ranks)) != len(ranks):
        raise DistArgumentError(
            f"ranks are {ranks}: Split ranks should not have duplicates. Please provide a list of unique "
            "ranks to split the group."
        )
    if not all(0 <= rank < size for rank in ranks):
        raise DistArgumentError(f"ranks are {ranks}, but the group has ranks 0 to {size - 1}")


def _flat(tensors: Any) -> list[Any]:
    if not isinstance(tensors, list | tuple):
        return [tensors]
    return [tensor for item in tensors for tensor in _flat(item)]


def _hook_name(operation: str) -> HookOpName:
    return COLLECTIVES[operation.removeprefix("monitored_")].hook


def _broadcast_coalesced(
    process_group: ProcessGroup, tensors: Sequence[Tensor], buffer_size: int, src: int = 0
) -> None:
    """Copies the root's tensors to all ranks, in flat pieces of about `buffer_size` bytes.

    Other backends, and hooks, get one broadcast for each tensor; `buffer_size` then bounds the pending bytes.
    """
    backend = process_group._backend() if isinstance(process_group, ProcessGroup) else None
    if isinstance(backend, ProcessGroupTenfold) and not process_group._has_hooks():
        backend.group().broadcast_coalesced(list(tensors), src, buffer_size)
        return
    under_way: list[Work] = []
    bytes_under_way = 0
    for tensor in tensors:
        size = memoryview(tensor).nbytes if not hasattr(tensor, "nbytes") else tensor.nbytes
        if under_way and bytes_under_way + size > buffer_size:
            _wait_for_all(under_way)
            bytes_under_way = 0
        under_way.append(process_group.broadcast(tensor, src))
        bytes_under_way += size
    _wait_for_all(under_way)


def _wait_for_all(works: list[Work]) -> None:
    while works:
        works.pop(0).wait()
