"""`ProcessGroup`: the object that users of `torch.distributed` hold, and `create`, which makes it.

Its operations go through PyTorch's dispatcher to `Backend`, so that PyTorch's flight recorder, its hooks and
its debug modes see every operation. They return the `Work` that `Backend` made, because the work that comes
out of the dispatcher only has `wait`. They are made from the table of c10d's operations.

In a group of several devices, such as "cpu:tenfold,cuda:nccl", PyTorch's own process group holds the backends
of all of them, and only `Backend` is tenfold's.
"""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.autograd import _profiler_enabled

from tenfold import _tenfold
from tenfold.c10d.collectives import COLLECTIVES, Collective
from tenfold.torch.backend import Backend
from tenfold.torch.profiling import ProfiledCall
from tenfold.torch.reconfigure import with_global_rank
from tenfold.torch.work import Work

__all__ = ["ProcessGroup", "create"]

_c10d = torch._C._distributed_c10d
_CPU = torch.device("cpu")
_CUSTOM = dist.ProcessGroup.BackendType.CUSTOM

# At level DETAIL PyTorch puts its `_ProcessGroupWrapper` around a backend that shares its group with others.
# The wrapper holds only the C++ half of the backend, which does not work without its Python half. So this
# keeps the Python half alive as long as the group.
_in_groups_of_pytorch: "WeakKeyDictionary[dist.ProcessGroup, list[Backend]]" = WeakKeyDictionary()


def create(options: Any, backend_options: Any = None) -> "Backend | ProcessGroup":
    """Makes a group of this backend. `torch.distributed` calls it."""
    # Both read the same variable, but a program may have set a higher level in PyTorch alone.
    if (level := int(dist.get_debug_level())) > _tenfold.debug_level():
        _tenfold.set_debug_level(level)
    backend = Backend(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        options.group_id,
        options.global_ranks_in_group,  # empty for the default group
        getattr(options, "enable_reconfigure", False),
    )
    # "custom" is this backend. Another name means that the group is PyTorch's, with several backends.
    group = options.process_group
    if group is not None and group.name() != "custom":
        backend.is_beside_others = True
        _in_groups_of_pytorch.setdefault(group, []).append(backend)
        return backend
    return ProcessGroup(options.store, backend)


class ProcessGroup(dist.ProcessGroup):
    """A group of ranks whose CPU tensors tenfold moves."""

    def __init__(self, store: Any, backend: Backend) -> None:
        super().__init__(store, backend.rank(), backend.size())
        self._hold(backend)
        self._set_default_backend(_CUSTOM)
        self._register_backend(_CPU, _CUSTOM, backend)

    def _hold(self, backend: Backend) -> None:
        self._backend = backend
        backend.is_in_our_group = True

    def getBackendName(self) -> str:  # noqa: N802, the name that PyTorch looks for
        return "tenfold"

    def _set_group_desc(self, desc: str) -> None:
        """Stores PyTorch's description of the group, which is set after it is made, for dumps as well."""
        super()._set_group_desc(desc)
        self._backend.describe(desc)

    # Under both names, those of PyTorch's C++ and Python: the inherited ones do not change.

    def rank(self) -> int:
        return self._backend.rank()

    def size(self) -> int:
        return self._backend.size()

    getRank, getSize = rank, size  # noqa: N815

    @property
    def supports_reconfigure(self) -> bool:
        return super().supports_reconfigure  # raises an error in a group with several backends

    def _check_backends(self) -> None:
        _ = self.supports_reconfigure

    def get_reconfigure_handle(self) -> str:
        """Returns what other processes need to connect to this one, and in a subgroup its global rank."""
        self._check_backends()
        handle, world = self._backend.get_reconfigure_handle(), dist.group.WORLD
        if world is None or self is world or self not in dist.distributed_c10d._world.pg_group_ranks:
            return handle
        return with_global_rank(handle, world.rank())

    def reconfigure(self, opts: Any) -> Work:
        """Makes this the group of the processes with these handles; see `Backend.reconfigure`."""
        self._check_backends()
        work = self._backend.reconfigure(opts)
        self._renumber()
        return work

    def adopt(self, group: _tenfold.Group, global_ranks: Sequence[int] | None = None) -> None:
        """Continues with another tenfold group; see `Backend.adopt`."""
        self._backend.adopt(group, global_ranks)
        self._renumber()

    def _renumber(self) -> None:
        """Tells `torch.distributed` which processes are in the group now.

        Other groups consist of ranks of the default group. If that changes, they end.
        """
        world = dist.distributed_c10d._world
        if self in world.pg_group_ranks:
            ranks = self._backend.global_ranks()
            world.pg_group_ranks[self] = {rank: place for place, rank in enumerate(ranks)}
        if self is not dist.group.WORLD:
            return
        for other in [group for group in world.pg_map if group is not self]:
            ours = (
                [other._backend] if isinstance(other, ProcessGroup) else _in_groups_of_pytorch.get(other, [])
            )
            for backend in ours:
                backend.retire(
                    "ended, because the default group was reconfigured and ranks have other numbers now\n"
                    "  hint: make it again, with `new_group`"
                )

    supports_abort_hooks = property(lambda self: True)

    def register_abort_hook(self, hook_id: int, hook: Callable[[], None]) -> None:
        self._backend.register_abort_hook(hook_id, hook)

    def unregister_abort_hook(self, hook_id: int) -> None:
        self._backend.unregister_abort_hook(hook_id)

    def gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Work | None:
        return self._backend.gather_single(output, input, opts)  # the dispatcher has no route yet

    def split_group(self, ranks: list[int], *arguments: Any, **options: Any) -> "ProcessGroup | None":
        if ranks and self.rank() not in ranks:
            return None  # PyTorch's own code fails with a backend in Python that supports this
        return self._ours(super().split_group(ranks, *arguments, **options))

    def merge_remote_group(self, *arguments: Any, **options: Any) -> "ProcessGroup | None":
        return self._ours(super().merge_remote_group(*arguments, **options))

    def _ours(self, made: dist.ProcessGroup | None) -> "ProcessGroup | None":
        """Makes a group of this class from PyTorch's group, which was made from tenfold's backend."""
        if made is None:
            return None
        group = ProcessGroup(made.get_group_store(), made._get_backend(_CPU))
        group._set_group_name(made.group_name)
        group._set_group_desc(made.group_desc)
        return group


def _hide_from_compiler(function: Any) -> None:
    """Hides a collective, and what it calls, from `torch.compile`.

    Does what `torch.compiler.disable` does, without importing the compiler in every program.
    """
    frames = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))


_INT_MAX = (1 << 31) - 1  # the limit of ranks and tags in PyTorch

# Whether asynchronous operations are kept in PyTorch's registry of works, for `wait_tensor`.
_is_registered = _c10d._allow_inflight_collective_as_graph_input


def _is_for_dispatcher(arguments: tuple, options: dict[str, Any]) -> bool:
    """Whether the dispatcher can pass a message to `Backend`. If not, `Backend` reports the error itself."""
    tensors = arguments[0] if arguments else options.get("tensors", ())
    numbers = (*arguments[1:], *options.values())
    return all(
        isinstance(tensor, torch.Tensor) and tensor.is_cpu and tensor.layout is torch.strided
        for tensor in tensors
    ) and not any(isinstance(number, int) and abs(number) > _INT_MAX for number in numbers)


def _dispatched(collective: Collective) -> Any:
    """Makes an operation of PyTorch's group, which goes through the dispatcher to `Backend`.

    The dispatcher returns a handle that only has `wait`. Python callers get the handle that `Backend` made,
    which also has the state and the error of the operation.
    """
    name, is_message = collective.name, collective.is_message
    inherited = getattr(dist.ProcessGroup, name)
    title = f"tenfold:{collective.title}"

    def call(self: ProcessGroup, *arguments: Any, **options: Any) -> Any:
        if is_message and not _is_for_dispatcher(arguments, options):
            return getattr(self._backend, name)(*arguments, **options)
        made = self._backend.made
        made.work = None
        if _profiler_enabled():
            record = ProfiledCall(title)
            try:
                work = inherited(self, *arguments, **options)
            finally:
                record.end_with(made.work)
        else:
            work = inherited(self, *arguments, **options)
        ours, made.work = made.work, None  # its tensors must not live until the next call
        if ours is None:
            return work
        if _is_registered():
            ours.is_registered = True
        return ours

    # PyTorch distinguishes a call of the inherited method from one of this method by the caller's name.
    call.__code__ = call.__code__.replace(co_name=name)
    _hide_from_compiler(call)
    call.__name__, call.__doc__ = name, inherited.__doc__
    return call


# PyTorch's dispatcher has no route for these.
_NOT_DISPATCHED = {"allreduce_sparse", "gather_single"}

# By the names that PyTorch's C++ looks for; its other names for them call these.
for _collective in COLLECTIVES.values():
    if _collective.name not in _NOT_DISPATCHED and hasattr(dist.ProcessGroup, _collective.name):
        setattr(ProcessGroup, _collective.name, _dispatched(_collective))
