"""`tenfold.init` and `Group`: collectives on arrays in a few lines.

>>> import tenfold
>>> with tenfold.init(store=tenfold.HashStore(), rank=0, world_size=1) as group:
...     numbers = bytearray([1, 2, 3])
...     group.all_reduce(numbers)

Arrays are those of NumPy and PyTorch, and any object with a writable buffer or DLPack. Operations work in
place. Every operation waits until it has completed, unless `async_op` is set: then it returns a `Work`.
"""

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tenfold import _tenfold, objects
from tenfold._tenfold import PrefixStore, TCPStore
from tenfold.arrays import Tensor, Tensors
from tenfold.reduce_op import Reduction, code_of
from tenfold.work import Work

if TYPE_CHECKING:
    from tenfold.c10d import ProcessGroup, ProcessGroupTenfold

__all__ = ["Group", "alone", "init"]

Seconds = float | timedelta

# How long operations wait by default, as in c10d.
DEFAULT_TIMEOUT = timedelta(minutes=30)


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
    quorum: str | int | None = None,
    patience: Seconds | None = None,
) -> "Group":
    """Joins the group of all ranks of this program. Returns once all ranks have joined.

    Arguments that are not given come from the environment, which `tenfold run` and `torchrun` set: `RANK`,
    `WORLD_SIZE` and, for the address of the store, `MASTER_ADDR` and `MASTER_PORT`.

    A rank that is unresponsive for `heartbeat` seconds (15, or `TENFOLD_HEARTBEAT`) is given up.

    If a rank is alive but keeps the others waiting in a collective for `stuck_after` seconds (30, or
    `TENFOLD_STUCK_AFTER`; 0 turns this off), all ranks name it on standard error. If `on_stuck` (or
    `TENFOLD_STUCK_POLICY`) is `"dump"` instead of `"warn"`, they also write their flight recorders to files
    for `tenfold trace`. If it is `"abort"`, the group fails.

    `quorum` and `patience` are for `Group.shrink` and `Group.agree`: which ranks may continue after
    failures (`"living"`, `"majority"`, `"all_reachable"` or a number of ranks), and after how long a rank
    that is alive but does not call them is left out (half of `timeout`).
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
        quorum=quorum,
        patience=_seconds(patience),
    )
    return Group(inner, store, limit)


def alone(
    timeout: Seconds | None = None,
    *,
    name: str = "default",
    heartbeat: Seconds | None = None,
    transport: str | None = None,
    deterministic: bool = False,
    stuck_after: Seconds | None = None,
    on_stuck: str | None = None,
    quorum: str | int | None = None,
    patience: Seconds | None = None,
) -> "Group":
    """Makes a group of this process alone, which `Group.reconfigure` makes larger. Needs no store.

    The arguments are those of `init`.

    >>> group = alone()
    >>> group = group.reconfigure([group.handle()], 1)
    >>> group.rank, group.size
    (0, 1)
    """
    limit = _seconds(timeout)
    inner = _tenfold.Group.alone(
        name=name,
        timeout=limit,
        heartbeat=_seconds(heartbeat),
        transport=transport,
        deterministic=deterministic,
        stuck_after=_seconds(stuck_after),
        on_stuck=on_stuck,
        quorum=quorum,
        patience=_seconds(patience),
    )
    return Group(inner, None, limit)


def _from_environment(variable: str, argument: str) -> int:
    value = os.environ.get(variable)
    if value is None:
        hint = f"pass `{argument}`, or start the program by `tenfold run`"
        raise ValueError(f"the environment variable {variable} is not set; {hint}")
    if not value.isdecimal():
        raise ValueError(f"the environment variable {variable} is `{value}`, which is not a number")
    return int(value)


def _store_from_environment(rank: int, world_size: int, limit: float | None) -> Any:
    host = os.environ.get("MASTER_ADDR")
    if host is None:
        hint = "pass `store`, or start the program by `tenfold run`"
        raise ValueError(f"the environment variable MASTER_ADDR is not set; {hint}")
    port = _from_environment("MASTER_PORT", "store")
    # The launcher's store outlives its ranks, so the keys of each round have their own prefix.
    is_of_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    wait = DEFAULT_TIMEOUT if limit is None else timedelta(seconds=limit)
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

    A group is a context manager. It is closed at the end of the block. If the block raises, the group is
    aborted, and the error on all ranks says why.

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
        self._group: _tenfold.Group | None = inner
        # Made when c10d's group is first asked for. It then holds the group instead.
        self._backend: ProcessGroupTenfold | None = None
        self._timeout = DEFAULT_TIMEOUT if timeout is None else timedelta(seconds=timeout)
        self._rank, self._size = inner.rank, inner.size
        self._store = store

    def _is_open(self) -> bool:
        return self._group is not None if self._backend is None else self._backend.is_open()

    @property
    def _inner(self) -> _tenfold.Group:
        if self._backend is not None:
            return self._backend.group()
        if self._group is None:
            raise RuntimeError("the group was shut down")
        return self._group

    @property
    def rank(self) -> int:
        """Returns the rank of this process."""
        return self._rank if self._backend is None else self._backend.rank()

    @property
    def size(self) -> int:
        """Returns the number of ranks."""
        return self._size if self._backend is None else self._backend.size()

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def process_group(self) -> "ProcessGroup":
        """Returns the same ranks as c10d's `ProcessGroup`."""
        from tenfold.c10d import ProcessGroup, ProcessGroupTenfold

        if self._backend is None:
            self._backend = ProcessGroupTenfold._of(self._inner, self._timeout)
            self._group = None
        return ProcessGroup._around(self._backend, self._store, self.name, None)

    def hosts(self) -> list[int]:
        """Returns the host of every rank, as a number."""
        return self._inner.hosts()

    def sequence_number(self) -> int:
        """Returns the number of operations that this rank has called."""
        return self._inner.sequence_number()

    def failure(self) -> BaseException | None:
        """Returns why the group can no longer be used, or None."""
        return self._inner.failure()

    def shared_memory(self, size: int) -> _tenfold.SharedMemory:
        """Returns zeroed bytes that peers on this host read in place. See `numpy.frombuffer` for arrays."""
        return self._inner.shared_memory(size)

    def abort(self, reason: str = "by request") -> None:
        """Fails the group on all ranks. Their errors contain the reason."""
        self._inner.abort(reason)

    def describe(self, description: str | None = None, global_ranks: Sequence[int] | None = None) -> None:
        """Sets a description, and the number in the job of each rank, for dumps of the flight recorder."""
        self._inner.describe(description, global_ranks)

    def close(self) -> None:
        """Leaves the group."""
        if self._backend is not None:
            self._backend.shutdown()
        self._group = self._store = None

    def __enter__(self) -> "Group":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None or not self._is_open():
            self.close()
        else:
            # Not closed: a peer that first sees this rank leave would not learn the reason.
            self.abort(f"{type(error).__name__} on rank {self.rank}: {error}")

    def __repr__(self) -> str:
        return repr(self._inner) if self._is_open() else "Group(closed)"

    def subgroup(self, ranks: Sequence[int], *, name: str, timeout: Seconds | None = None) -> "Group | None":
        """Makes a group of some ranks. All ranks must call it; it returns None on the other ranks."""
        inner = self._inner.subgroup(list(ranks), name=name, timeout=_seconds(timeout))
        return None if inner is None else Group(inner, self._store, _seconds(timeout))

    def split(
        self, colour: int | None, key: int = 0, *, name: str, timeout: Seconds | None = None
    ) -> "Group | None":
        """Makes a group of the ranks with the same colour, ordered by key. Returns None without a colour."""
        inner = self._inner.split(colour, key, name=name, timeout=_seconds(timeout))
        return None if inner is None else Group(inner, self._store, _seconds(timeout))

    # After failures: see docs/recovery.md. The groups that these return have the same options as this one.

    def revoke(self, reason: str = "by request") -> None:
        """Fails everything that is under way on any rank. `shrink` and `reconfigure` work afterwards."""
        self._inner.revoke(reason)

    def shrink(self, without: Sequence[int] = (), timeout: Seconds | None = None) -> "Group":
        """Makes a smaller group of the ranks that are alive. All of them call it, also if this group works.

        Their numbers are closed up in order. `without` are ranks that are alive and left out; they do not
        call it. All ranks that return have the same members. This group is not used afterwards.
        """
        return self._become(self._inner.shrink(list(without), _seconds(timeout)))

    def agree(self, value: int, timeout: Seconds | None = None) -> int:
        """Returns the bitwise AND of the numbers (0 to 2**64 - 1) of all ranks that are alive.

        It works in a group that has failed, too, for example to find out whether all have completed a step.
        """
        return self._inner.agree(value, _seconds(timeout))

    def hand_over(
        self,
        tensors: Tensors,
        sources: Sequence[int],
        targets: Sequence[int],
        progress: Callable[[int, int], None] | None = None,
        timeout: Seconds | None = None,
    ) -> None:
        """Copies arrays from the ranks in `sources`, which all have the same, to those in `targets`.

        All ranks call it. Each source sends a part. What arrived is compared by a hash. `progress` gets the
        bytes that this rank has sent or received, and how many there are in all, about ten times per second.
        """
        parts = (list(tensors), list(sources), list(targets))
        self._inner.hand_over(*parts, progress, _seconds(timeout))

    def handle(self) -> str:
        """Returns what other processes need to make a group with this one. Treat it as a secret."""
        return self._inner.handle()

    def reconfigure(self, handles: Sequence[str], id: int, timeout: Seconds | None = None) -> "Group":
        """Makes a group of the processes with these handles, in this order, which all give the same `id`.

        Either all of them return the new group, or each keeps the one that it has, and the error says which
        process did not take part. A process uses an `id` once. This group is not used after a success.
        """
        return self._become(self._inner.reconfigure(list(handles), id, _seconds(timeout)))

    def _become(self, made: _tenfold.Group) -> "Group":
        return Group(made, self._store, self._timeout.total_seconds())

    # Operations.

    def all_reduce(
        self, tensor: Tensor, op: Reduction = "sum", async_op: bool = False, timeout: Seconds | None = None
    ) -> Work | None:
        """Reduces the arrays of all ranks, in place on all ranks."""
        return _work(self._inner.all_reduce(tensor, code_of(op), async_op, _seconds(timeout)))

    def all_reduce_coalesced(
        self, tensors: Tensors, op: Reduction = "sum", async_op: bool = False, timeout: Seconds | None = None
    ) -> Work | None:
        """Does `all_reduce` on several arrays in one operation."""
        return _work(self._inner.all_reduce_coalesced(tensors, code_of(op), async_op, _seconds(timeout)))

    def reduce(
        self,
        tensor: Tensor,
        root: int = 0,
        op: Reduction = "sum",
        async_op: bool = False,
        timeout: Seconds | None = None,
    ) -> Work | None:
        """Reduces the arrays of all ranks into the root's. The arrays of other ranks are then undefined."""
        return _work(self._inner.reduce(tensor, root, code_of(op), async_op, _seconds(timeout)))

    def scan(
        self, tensor: Tensor, op: Reduction = "sum", async_op: bool = False, timeout: Seconds | None = None
    ) -> Work | None:
        """Reduces the arrays of ranks 0 to r on rank r, in place on all ranks."""
        return _work(self._inner.scan(tensor, code_of(op), async_op, _seconds(timeout)))

    def broadcast(
        self, tensor: Tensor, root: int = 0, async_op: bool = False, timeout: Seconds | None = None
    ) -> Work | None:
        """Copies the root's array to all ranks."""
        return _work(self._inner.broadcast(tensor, root, async_op, _seconds(timeout)))

    def all_gather(
        self, outputs: Tensors, tensor: Tensor, async_op: bool = False, timeout: Seconds | None = None
    ) -> Work | None:
        """Collects the arrays of all ranks on all ranks, in a list by rank."""
        return _work(self._inner.all_gather(outputs, tensor, async_op, _seconds(timeout)))

    def all_gather_into(
        self, output: Tensor, tensor: Tensor, async_op: bool = False, timeout: Seconds | None = None
    ) -> Work | None:
        """Concatenates the arrays of all ranks on all ranks."""
        return _work(self._inner.all_gather_into(output, tensor, async_op, _seconds(timeout)))

    def gather(
        self,
        outputs: Tensors | None,
        tensor: Tensor,
        root: int = 0,
        async_op: bool = False,
        timeout: Seconds | None = None,
    ) -> Work | None:
        """Collects the arrays of all ranks on the root, in a list by rank. Other ranks pass no outputs."""
        return _work(self._inner.gather(outputs or [], tensor, root, async_op, _seconds(timeout)))

    def gather_into(
        self,
        output: Tensor | None,
        tensor: Tensor,
        root: int = 0,
        async_op: bool = False,
        timeout: Seconds | None = None,
    ) -> Work | None:
        """Concatenates the arrays of all ranks on the root. Other ranks pass None."""
        return _work(self._inner.gather_into(output, tensor, root, async_op, _seconds(timeout)))

    def scatter(
        self,
        output: Tensor,
        tensors: Tensors | None,
        root: int = 0,
        async_op: bool = False,
        timeout: Seconds | None = None,
    ) -> Work | None:
        """Distributes the root's arrays, one to each rank. Other ranks pass none."""
        return _work(self._inner.scatter(output, tensors or [], root, async_op, _seconds(timeout)))

    def reduce_scatter(
        self,
        output: Tensor,
        tensors: Tensors,
        op: Reduction = "sum",
        async_op: bool = False,
        timeout: Seconds | None = None,
    ) -> Work | None:
        """Reduces lists of arrays over all ranks. Each rank gets the result at its own index."""
        return _work(self._inner.reduce_scatter(output, tensors, code_of(op), async_op, _seconds(timeout)))

    def reduce_scatter_into(
        self,
        output: Tensor,
        tensor: Tensor,
        op: Reduction = "sum",
        async_op: bool = False,
        timeout: Seconds | None = None,
    ) -> Work | None:
        """Reduces the arrays of all ranks. Each rank gets an equal part of the result."""
        return _work(
            self._inner.reduce_scatter_into(output, tensor, code_of(op), async_op, _seconds(timeout))
        )

    def all_to_all(
        self, outputs: Tensors, tensors: Tensors, async_op: bool = False, timeout: Seconds | None = None
    ) -> Work | None:
        """Sends one array to each rank, and receives one from each."""
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
        """Sends a part of an array to each rank. Parts are given in rows; by default they are equal."""
        splits = (output_splits, input_splits)
        return _work(self._inner.all_to_all_single(output, tensor, *splits, async_op, _seconds(timeout)))

    def send(
        self, tensor: Tensor, to: int, tag: int = 0, async_op: bool = False, timeout: Seconds | None = None
    ) -> Work | None:
        """Sends an array to another rank."""
        return _work(self._inner.send(tensor, to, tag, async_op, _seconds(timeout)))

    def recv(
        self,
        tensor: Tensor,
        source: int | None = None,
        tag: int = 0,
        async_op: bool = False,
        timeout: Seconds | None = None,
    ) -> "Work | int | None":
        """Receives an array from `source`, or from any rank. Returns the sender, or a `Work` that has it."""
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
        """Waits until all ranks have called it."""
        return _work(self._inner.barrier(async_op, _seconds(timeout)))

    def monitored_barrier(self, timeout: Seconds, wait_for_all: bool = False) -> None:
        """Waits for all ranks, as `barrier`. If it times out, rank 0 names the missing ranks."""
        self._inner.monitored_barrier(_seconds(timeout) or 0.0, wait_for_all)

    # Objects, by pickle: only among ranks that trust each other.

    def all_gather_object(self, value: Any) -> list[Any]:
        """Returns the objects of all ranks on all ranks, in a list by rank."""
        return objects.all_gather(self._inner, value)

    def gather_object(self, value: Any, root: int = 0) -> list[Any] | None:
        """Returns the objects of all ranks on the root, in a list by rank. Returns None on other ranks."""
        return objects.gather(self._inner, value, root)

    def broadcast_object_list(self, values: list[Any], root: int = 0) -> None:
        """Replaces the objects of the list by the root's, on all ranks."""
        received = objects.broadcast(self._inner, values, root)
        if len(received) != len(values):
            raise ValueError(f"the root sent {len(received)} objects, but this rank expects {len(values)}")
        values[:] = received

    def scatter_object_list(self, values: Sequence[Any] | None, root: int = 0) -> Any:
        """Distributes the root's objects, one to each rank. Other ranks pass None."""
        return objects.scatter(self._inner, values, root)

    def send_object(self, value: Any, to: int, tag: int = 0) -> None:
        """Sends an object to another rank."""
        objects.send(self._inner, value, to, tag)

    def recv_object(self, source: int | None = None, tag: int = 0) -> Any:
        """Receives an object from another rank, or from any rank."""
        return objects.receive(self._inner, source, tag)


def _work(part: _tenfold.Work | None) -> Work | None:
    return None if part is None else Work((part,))
