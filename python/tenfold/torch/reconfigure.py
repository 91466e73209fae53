"""Ranks that come and go: `reconfigure` and `shrink`, as PyTorch 2.15 has them, and `adopt`.

Only the tenfold group behind a backend changes; the objects that programs hold stay the same. All calls
block, and return works that are complete already.

Not here: how ranks agree (see `crates/runtime/src/recovery`), and how PyTorch learns of the new ranks (see
`process_group.py`).
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tenfold import _tenfold
from tenfold.c10d.reconfigure import SHRINK_ABORT, AbortHooks, Shrinking, in_order, reconfigured
from tenfold.torch.exceptions import DistBackendError
from tenfold.torch.memory import SharedStorages
from tenfold.torch.work import Work

if TYPE_CHECKING:
    from tenfold.torch.backend import Backend

__all__ = ["Absent", "Reconfigurable", "Unconnected", "with_global_rank"]

_Base = getattr(dist, "BackendBase", torch._C._distributed_c10d.Backend)


# What follows a handle of a subgroup: the process's rank in the default group.
_RANK = " is global rank "


def with_global_rank(handle: str, rank: int) -> str:
    return f"{handle}{_RANK}{rank}"


def _global_ranks(handles: Sequence[str]) -> list[int] | None:
    """Returns the global ranks of processes with these handles, or None if they do not say so."""
    ranks = [int(rank) for _, mark, rank in (handle.rpartition(_RANK) for handle in handles) if mark]
    return ranks if len(set(ranks)) == len(handles) else None


class Absent:
    """Replaces the group of a backend that has none. Every operation raises an error."""

    def __init__(self, name: str, reason: str) -> None:
        self._name, self._reason = name, reason

    def error(self, operation: str) -> DistBackendError:
        return DistBackendError(f"{operation}: group `{self._name}` {self._reason}")

    def __getattr__(self, operation: str) -> Any:
        raise self.error(operation)


class Unconnected(Absent):
    """Before the first `reconfigure` there is only this process, alone."""

    def __init__(self, name: str, alone: _tenfold.Group) -> None:
        super().__init__(
            name,
            "is not connected yet, because it was made with enable_reconfigure=True\n"
            "  hint: give all processes the handles of all of them, and call `reconfigure`",
        )
        self.alone = alone


class Reconfigurable:
    """The part of `Backend` that replaces its tenfold group."""

    group: Any  # a tenfold group, or `Absent`
    shared_storages: SharedStorages
    _name: str
    _options: Any
    _seconds: float | None
    _rank: int
    _size: int
    _global_ranks: list[int]

    supports_reconfigure = property(lambda self: True)
    supports_shrinking = property(lambda self: True)
    supports_abort_hooks = property(lambda self: True)

    # Held by a `ProcessGroup` of ours, which asks for rank and size. PyTorch's own remembers the first ones.
    is_in_our_group = False

    # PyTorch's, for dumps.
    _description: str | None = None

    abort_hooks: AbortHooks
    _shrinking: Shrinking | None = None

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def global_ranks(self) -> list[int]:
        """Returns which rank of the whole job each rank is."""
        return list(self._global_ranks)

    def describe(self, description: str | None) -> None:
        """Sets PyTorch's description of the group, for dumps, and which global rank each rank is."""
        self._description = description or self._description
        if not isinstance(self.group, Absent):
            self.group.describe(self._description, self._global_ranks)

    # Reconfigure.

    def get_reconfigure_handle(self) -> str:
        """Returns what other processes need to connect to this one. It does not change with the group."""
        return self._own_group("get_reconfigure_handle").handle()

    def reconfigure(self, opts: Any) -> Work:
        """Makes a group of the processes with these handles, which all call it with the same ones.

        If it raises an error, all of them keep the group that they have, and may try again.
        """
        group = self._own_group("reconfigure")
        given = in_order(opts.handles)
        handles = [handle.rpartition(_RANK)[0] or handle for handle in given]
        if (own := group.handle()) in handles:  # otherwise the group raises the error
            self._check_place(handles.index(own), len(handles))
        self.adopt(reconfigured(group, handles, opts, self._seconds), _global_ranks(given))
        return Work([], [])

    def adopt(self, group: _tenfold.Group, global_ranks: Sequence[int] | None = None) -> None:
        """Continues with another group of other processes, rank and size. The old one is dropped.

        `global_ranks` are those of its ranks in the whole job, by default the ranks themselves. Call
        `ProcessGroup.adopt` if there is one, so that PyTorch learns of the new ranks as well.
        """
        self._check_place(group.rank, group.size)
        # Addresses registered with the old group mean nothing to the peers of the new one.
        self.shared_storages.clear()
        self.shared_storages = SharedStorages()
        self._rank, self._size = group.rank, group.size
        self._global_ranks = list(range(group.size) if global_ranks is None else global_ranks)
        self.abort_hooks.begin()
        self.group, self._shrinking = group, None
        self.describe(None)

    def _own_group(self, operation: str) -> _tenfold.Group:
        """Returns the group that this process is in, even if it is there alone and not connected."""
        if isinstance(self.group, Unconnected):
            return self.group.alone
        if isinstance(self.group, Absent):
            raise self.group.error(operation)
        return self.group

    def _check_place(self, rank: int, size: int) -> None:
        """Raises an error if a `ProcessGroup` of PyTorch would not notice a new rank or size."""
        known = _Base.rank(self), _Base.size(self)
        if self.is_in_our_group or (rank, size) == known:
            return
        raise DistBackendError(
            f"reconfigure: group `{self._name}` is held by a ProcessGroup of PyTorch, which cannot change "
            f"from rank {known[0]} of {known[1]} to rank {rank} of {size}\n"
            '  hint: make the group by init_process_group("tenfold", enable_reconfigure=True), or put this '
            "backend into a `tenfold.torch.ProcessGroup`"
        )

    def retire(self, reason: str) -> None:
        """Leaves the group. Later calls raise an error with this reason."""
        self.shared_storages.clear()
        if not isinstance(self.group, Absent):
            self.group, self._shrinking = Absent(self._name, reason), None

    def shutdown(self) -> None:
        """Leaves the group. Memory that other ranks still read stays readable."""
        self.shared_storages.clear()
        self.group, self._shrinking = Absent(self._name, "was shut down"), None

    # Shrink.

    def shrink(
        self, ranks_to_exclude: Sequence[int], shrink_flags: int = 0, opts_override: Any = None
    ) -> "Backend":
        """Makes a backend of all other ranks, which all call it. The excluded ranks may be dead or alive."""
        if isinstance(self.group, Absent):
            raise self.group.error("shrink")
        if shrink_flags & SHRINK_ABORT:
            self.abort_hooks.call()
            self.group.revoke("shrink_group was called with SHRINK_ABORT")
        if self._shrinking is None:
            self._shrinking = Shrinking(self.group)
        timeout = getattr(opts_override, "_timeout", None) or self._options._timeout
        smaller, ranks = self._shrinking.without(ranks_to_exclude, timeout.total_seconds())
        self._shrinking = None
        global_ranks = [self._global_ranks[rank] for rank in ranks]
        return type(self).of(smaller, timeout, smaller.name, global_ranks)

    # Abort.

    def abort(self) -> None:
        """Fails all pending operations, here and on all other ranks. `reconfigure` works afterwards."""
        self.abort_hooks.call()
        if not isinstance(self.group, Absent):
            self.group.abort("torch.distributed was asked to")

    def register_abort_hook(self, hook_id: int, hook: Callable[[], None]) -> None:
        """Calls `hook` once for each group that fails: before `abort`, or when an operation has failed.

        A group that fails while this rank does nothing is noticed at its next operation.
        """
        self.abort_hooks.register(hook_id, hook)

    def unregister_abort_hook(self, hook_id: int) -> None:
        self.abort_hooks.unregister(hook_id)

    # The names that PyTorch's C++ looks for.
    registerAbortHook, unregisterAbortHook = register_abort_hook, unregister_abort_hook  # noqa: N815
