"""`tenfold.init` and `Group`: communication for who has arrays and wants to get on.

>>> import tenfold
>>> with tenfold.init(store=tenfold.HashStore(), rank=0, world_size=1) as group:
...     numbers = bytearray([1, 2, 3])
...     group.all_reduce(numbers)

Arrays are NumPy's, PyTorch's, anything with a writable buffer or DLPack, and are worked on in place. Every
operation waits until it is over, unless `async_op` is set: then it returns a `Work` to wait for.
"""

import os
from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any

from tenfold import _tenfold, objects
from tenfold.backend import ProcessGroupTenfold
from tenfold.options import _DEFAULT_PG_TIMEOUT
from tenfold.overloads import Reduction, Tensor, Tensors
from tenfold.process_group import ProcessGroup
from tenfold.reduce_op import code_of
from tenfold.work import Work

__all__ = ["Group", "init"]

Seconds = float | timedelta


def init(
    store: Any = None,
    rank: int | None = None,
    world_size: int | None = None,
    timeout: Seconds | None = None,
    *,
    name: str = "default",
    heartbeat: Seconds | None = None,
    transport: str | None = None,
    deterministic: bool = False,
    stuck_after: Seconds | None = None,
    on_stuck: str | None = None,
) -> "Group":
    """Joins the ranks of this program: returns once all have.

    What is not given comes from the environment, which `tenfold run` and `torchrun` set: `RANK`, `WORLD_SIZE`
    and, for where the store is, `MASTER_ADDR` and `MASTER_PORT`.

    A rank that shows no sign of life for `heartbeat` seconds (15, or `TENFOLD_HEARTBEAT`) is given up.

    A rank that lives and keeps the others waiting in a collective for `stuck_after` seconds (30, or
    `TENFOLD_STUCK_AFTER`; 0 for ever) is named by all of them on standard error. With `on_stuck` (or
    `TENFOLD_STUCK_POLICY`) `"dump"` instead of `"warn"` they also write what they did to files for
    `tenfold trace`, with `"abort"` the group fails.
    """
    rank = _from_environment("RANK", "rank") if rank is None else rank
    world_size = _from_environment("WORLD_SIZE", "world_size") if world_size is None else world_size
    limit = _seconds(timeout)
    if store is None:
        store = _store_from_environment(rank, world_size, limit)
    inner = _tenfold.Group(
        store,
        rank,
        world_size,
        name=name,
        timeout=limit,
        heartbeat=_seconds(heartbeat),
        transport=transport,
        deterministic=deterministic,
        stuck_after=_seconds(stuck_after),
        on_stuck=on_stuck,
    )
    return Group(inner, store, limit)


def _from_environment(variable: str, argument: str) -> int:
    value = os.environ.get(variable)
    if value is None:
        hint = f"pass `{argument}`, or start the program by `tenfold run`"
        raise ValueError(f"the environment variable {variable} is not set; {hint}")
    if not value.isdecimal():
        raise ValueError(f"the environment variable {variable} is `{value}`, which is not a number")
    return int(value)


def _store_from_environment(rank: int, world_size: int, limit: float | None) -> Any:
    from tenfold import PrefixStore, TCPStore

    host = os.environ.get("MASTER_ADDR")
    if host is None:
        hint = "pass `store`, or start the program by `tenfold run`"
        raise ValueError(f"the environment variable MASTER_ADDR is not set; {hint}")
    port = _from_environment("MASTER_PORT", "store")
    # The launcher's own store outlives its workers: each attempt to run them has its own names there.
    is_of_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    wait = _DEFAULT_PG_TIMEOUT if limit is None else timedelta(seconds=limit)
    is_master = rank == 0 and not is_of_launcher
    store = TCPStore(host, port, world_size, is_master=is_master, timeout=wait, multi_tenant=True)
    if not is_of_launcher:
        return store
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"/worker/attempt_{attempt}", store)


def _seconds(time: Seconds | None) -> float | None:
    return time.total_seconds() if isinstance(time, timedelta) else time


class Group:
    """Ranks that communicate. Made by `tenfold.init`, or from another group by `subgroup` and `split`.

    As a context manager it is closed at the end; if the block fails it is aborted and all ranks are told why.

    >>> import tenfold
    >>> group = tenfold.init(store=tenfold.HashStore(), rank=0, world_size=1)
    >>> group
    Group(`default`, rank 0 of 1)
    >>> group.all_gather_object({"loss": 0.5})
    [{'loss': 0.5}]
    >>> work = group.broadcast(bytearray(4), root=0, async_op=True)
    >>> work.wait()
    True
    >>> group.close()
    """

    def __init__(self, inner: _tenfold.Group, store: Any = None, timeout: float | None = None) -> None:
        limit = _DEFAULT_PG_TIMEOUT if timeout is None else timedelta(seconds=timeout)
        self._backend = ProcessGroupTenfold._of(inner, limit)
        self._store = store

    @property
    def _inner(self) -> _tenfold.Group:
        return self._backend.group()

    @property
    def rank(self) -> int:
        """This process's place among the ranks."""
        return self._backend.rank()

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._backend.size()

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def process_group(self) -> ProcessGroup:
        """The same ranks as c10d has them."""
        return ProcessGroup._around(self._backend, self._store, self.name, None)

    def hosts(self) -> list[int]:
        """The host of every rank, as a number."""
        return self._inner.hosts()

    def sequence_number(self) -> int:
        """How many operations this rank has called."""
        return self._inner.sequence_number()

    def failure(self) -> BaseException | None:
        """Why the group can no longer be used, or None."""
        return self._inner.failure()

    def shared_memory(self, size: int) -> _tenfold.SharedMemory:
        """Zeroed bytes that peers on this host read in place; make arrays of it by `numpy.frombuffer`."""
        return self._inner.shared_memory(size)

    def abort(self, reason: str = "by request") -> None:
        """Gives the group up on all ranks, which are told the reason."""
        self._inner.abort(reason)

    def describe(self, description: str | None = None, global_ranks: Sequence[int] | None = None) -> None:
        """Says what the group is for, and which rank of the job each member is, in dumps of the recorder."""
        self._inner.describe(description, global_ranks)

    def close(self) -> None:
        """Leaves the group."""
        self._backend.shutdown()
        self._store = None

    def __enter__(self) -> "Group":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None or not self._backend.is_open():
            self.close()
        else:
            # Not closed: a peer that learns first that this rank is gone would not learn why.
            self.abort(f"{type(error).__name__} on rank {self.rank}: {error}")

    def __repr__(self) -> str:
        return repr(self._inner) if self._backend.is_open() else "Group(closed)"

    def subgroup(self, ranks: Sequence[int], *, name: str, timeout: Seconds | None = None) -> "Group | None":
        """A group of some ranks, which all ranks must ask for; None for the others."""
        inner = self._inner.subgroup(list(ranks), name=name, timeout=_seconds(timeout))
        return None if inner is None else Group(inner, self._store, _seconds(timeout))

    def split(
        self, colour: int | None, key: int = 0, *, name: str, timeout: Seconds | None = None
    ) -> "Group | None":
        """Ranks with the same colour form a group, in the order of their keys; None without a colour."""
        inner = self._inner.split(colour, key, name=name, timeout=_seconds(timeout))
        return None if inner is None else Group(inner, self._store, _seconds(timeout))

    # Operations.

    def all_reduce(
        self, tensor: Tensor, op: Reduction = "sum", async_op: bool = False, timeout: Seconds | None = None
    ) -> Work | None:
        """Everybody's elements reduced, for everybody."""
        return _work(self._inner.all_reduce(tensor, code_of(op), async_op, _seconds(timeout)))

    def all_reduce_coalesced(
        self, tensors: Tensors, op: Reduction = "sum", async_op: bool = False, timeout: Seconds | None = None
    ) -> Work | None:
        """`all_reduce` of several arrays at once."""
        return _work(self._inner.all_reduce_coalesced(tensors, code_of(op), async_op, _seconds(timeout)))

    def reduce(
        self,
        tensor: Tensor,
        root: int = 0,
        op: Reduction = "sum",
        async_op: bool = False,
        timeout: Seconds | None = None,
    ) -> Work | None:
        """Everybody's elements reduced, for the root; what the others' arrays hold then is undefined."""
        return _work(self._inner.reduce(tensor, root, code_of(op), async_op, _seconds(timeout)))

    def broadcast(
        self, tensor: Tensor, root: int = 0, async_op: bool = False, timeout: Seconds | None = None
    ) -> Work | None:
        """The root's elements for everybody."""
        return _work(self._inner.broadcast(tensor, root, async_op, _seconds(timeout)))

    def all_gather(
        self, outputs: Tensors, tensor: Tensor, async_op: bool = False, timeout: Seconds | None = None
    ) -> Work | None:
        """Everybody's array for everybody, in a list by rank."""
        return _work(self._inner.all_gather(outputs, tensor, async_op, _seconds(timeout)))

    def all_gather_into(
        self, output: Tensor, tensor: Tensor, async_op: bool = False, timeout: Seconds | None = None
    ) -> Work | None:
        """Everybody's array for everybody, in one array one after the other."""
        return _work(self._inner.all_gather_into(output, tensor, async_op, _seconds(timeout)))

    def gather(
        self,
        outputs: Tensors | None,
        tensor: Tensor,
        root: int = 0,
        async_op: bool = False,
        timeout: Seconds | None = None,
    ) -> Work | None:
        """Everybody's array for the root, in a list by rank; the others give no outputs."""
        return _work(self._inner.gather(outputs or [], tensor, root, async_op, _seconds(timeout)))

    def gather_into(
        self,
        output: Tensor | None,
        tensor: Tensor,
        root: int = 0,
        async_op: bool = False,
        timeout: Seconds | None = None,
    ) -> Work | None:
        """Everybody's array for the root, in one array one after the other; the others give None."""
        return _work(self._inner.gather_into(output, tensor, root, async_op, _seconds(timeout)))

    def scatter(
        self,
        output: Tensor,
        tensors: Tensors | None,
        root: int = 0,
        async_op: bool = False,
        timeout: Seconds | None = None,
    ) -> Work | None:
        """One of the root's arrays for each rank; the others give none."""
        return _work(self._inner.scatter(output, tensors or [], root, async_op, _seconds(timeout)))

    def reduce_scatter(
        self,
        output: Tensor,
        tensors: Tensors,
        op: Reduction = "sum",
        async_op: bool = False,
        timeout: Seconds | None = None,
    ) -> Work | None:
        """Everybody's arrays reduced, one for each rank."""
        return _work(self._inner.reduce_scatter(output, tensors, code_of(op), async_op, _seconds(timeout)))

    def reduce_scatter_into(
        self,
        output: Tensor,
        tensor: Tensor,
        op: Reduction = "sum",
        async_op: bool = False,
        timeout: Seconds | None = None,
    ) -> Work | None:
        """Everybody's array reduced, an equal part for each rank."""
        return _work(
            self._inner.reduce_scatter_into(output, tensor, code_of(op), async_op, _seconds(timeout))
        )

    def all_to_all(
        self, outputs: Tensors, tensors: Tensors, async_op: bool = False, timeout: Seconds | None = None
    ) -> Work | None:
        """One of everybody's arrays for each rank."""
        return _work(self._inner.all_to_all(outputs, tensors, async_op, _seconds(timeout)))

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        async_op: bool = False,
        timeout: Seconds | None = None,
    ) -> Work | None:
        """A part of everybody's array for each rank; the parts are counted in rows, or equal without."""
        splits = (output_splits, input_splits)
        return _work(self._inner.all_to_all_single(output, tensor, *splits, async_op, _seconds(timeout)))

    def send(
        self, tensor: Tensor, to: int, tag: int = 0, async_op: bool = False, timeout: Seconds | None = None
    ) -> Work | None:
        """An array to another rank."""
        return _work(self._inner.send(tensor, to, tag, async_op, _seconds(timeout)))

    def recv(
        self,
        tensor: Tensor,
        source: int | None = None,
        tag: int = 0,
        async_op: bool = False,
        timeout: Seconds | None = None,
    ) -> "Work | int | None":
        """An array from another rank, or from whoever sends first; returns who, or a `Work` that knows."""
        limit = _seconds(timeout)
        if source is not None:
            part = self._inner.recv(tensor, source, tag, async_op, limit)
            return source if part is None else Work((part,))
        received = self._inner.recv_any(tensor, tag, limit)
        if async_op:
            return Work((received,))
        received.wait()
        return received.source_rank()

    def barrier(self, async_op: bool = False, timeout: Seconds | None = None) -> Work | None:
        """Over when all ranks have called it."""
        return _work(self._inner.barrier(async_op, _seconds(timeout)))

    def monitored_barrier(self, timeout: Seconds, wait_for_all: bool = False) -> None:
        """A barrier in which rank 0 finds out who is missing."""
        self._inner.monitored_barrier(_seconds(timeout) or 0.0, wait_for_all)

    # Objects, by pickle: only among ranks that trust each other.

    def all_gather_object(self, value: Any) -> list[Any]:
        """Everybody's object for everybody, in a list by rank."""
        return objects.all_gather(self._inner, value)

    def gather_object(self, value: Any, root: int = 0) -> list[Any] | None:
        """Everybody's object for the root, in a list by rank; None for the others."""
        return objects.gather(self._inner, value, root)

    def broadcast_object_list(self, values: list[Any], root: int = 0) -> None:
        """The root's objects for everybody, in place."""
        received = objects.broadcast(self._inner, values, root)
        if len(received) != len(values):
            raise ValueError(f"the root sent {len(received)} objects, and there is room for {len(values)}")
        values[:] = received

    def scatter_object_list(self, values: Sequence[Any] | None, root: int = 0) -> Any:
        """One of the root's objects for each rank; the others give None."""
        return objects.scatter(self._inner, values, root)

    def send_object(self, value: Any, to: int, tag: int = 0) -> None:
        """An object to another rank."""
        objects.send(self._inner, value, to, tag)

    def recv_object(self, source: int | None = None, tag: int = 0) -> Any:
        """An object from another rank, or from whoever sends first."""
        return objects.receive(self._inner, source, tag)


def _work(part: _tenfold.Work | None) -> Work | None:
    return None if part is None else Work((part,))
