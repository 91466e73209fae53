"""Ranks that come and go: `reconfigure`, `shrink` and abort hooks of tenfold's backend.

All calls block, and return works that are complete already. PyTorch's layer uses the same parts; see
`tenfold/torch/reconfigure.py`. Not here: how ranks agree, which is in the runtime.
"""

from array import array
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from tenfold import _tenfold
from tenfold.c10d.options import ReconfigureOptions
from tenfold.exceptions import refused
from tenfold.work import Work

if TYPE_CHECKING:
    from tenfold.c10d.backend import ProcessGroupTenfold

__all__ = ["SHRINK_ABORT", "AbortHooks", "Reconfigurable", "Shrinking", "reconfigured"]

SHRINK_ABORT = 1

_U64 = (1 << 64) - 1


def in_order(handles: Collection[str]) -> list[str]:
    """Returns a list as it is, and a set in an order that is the same on all ranks."""
    return list(handles) if isinstance(handles, Sequence) else sorted(handles)


def reconfigured(group: _tenfold.Group, handles: list[str], opts: Any, limit: float | None) -> _tenfold.Group:
    """Returns the group that `group` becomes. `limit` is used if the options have no timeout."""
    if opts.timeout is not None:
        limit = opts.timeout.total_seconds()
    return group.reconfigure(handles, opts.uuid & _U64, limit)


class AbortHooks:
    """Functions that are called once for each group that fails."""

    def __init__(self) -> None:
        self._hooks: dict[int, Callable[[], None]] = {}
        self._were_called = False

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def register(self, hook_id: int, hook: Callable[[], None]) -> None:
        self._hooks[hook_id] = hook

    def unregister(self, hook_id: int) -> None:
        self._hooks.pop(hook_id, None)

    def begin(self) -> None:
        """Begins again, for another group."""
        self._were_called = False

    def call(self) -> None:
        if self._hooks and not self._were_called:
            self._were_called = True
            for hook in list(self._hooks.values()):
                hook()

    def call_if_failed(self, group: _tenfold.Group) -> None:
        if self._hooks and group.failure() is not None:
            self.call()


class Shrinking:
    """Makes a smaller group, with exactly the ranks that are not excluded.

    c10d's callers number those ranks themselves. So if another rank has died, the result cannot be used: the
    error names that rank, and what the others have agreed on is kept for the next attempt.
    """

    def __init__(self, group: _tenfold.Group) -> None:
        self._whole = group
        self._group, self._ranks = group, list(range(group.size))

    def without(self, excluded: Collection[int], limit: float | None) -> tuple[_tenfold.Group, list[int]]:
        """Returns the smaller group, and the number that each of its ranks had."""
        whole = self._whole
        smaller = self._group.shrink(
            [place for place, rank in enumerate(self._ranks) if rank in excluded], limit
        )
        ranks = array("q", bytes(8 * smaller.size))
        smaller.all_gather_into(ranks, array("q", [whole.rank]))
        self._group, self._ranks = smaller, list(ranks)
        if missing := sorted(set(range(whole.size)) - set(excluded) - set(ranks)):
            names = f"rank {missing[0]} is" if len(missing) == 1 else f"ranks {missing} are"
            hint = f"call it again, and exclude {missing} as well"
            raise refused(whole, "shrink", f"{names} lost, too\n  hint: {hint}")
        return self._group, self._ranks


class Reconfigurable:
    """The part of `ProcessGroupTenfold` that replaces its group."""

    _group: _tenfold.Group | None
    _rank: int
    _size: int
    _options: Any
    _abort_hooks: AbortHooks
    _shrinking: Shrinking | None
    group: Callable[[], _tenfold.Group]

    @property
    def supports_reconfigure(self) -> bool:
        return True

    def get_reconfigure_handle(self) -> str:
        """Returns what other processes need to connect to this one."""
        return self.group().handle()

    def reconfigure(self, opts: ReconfigureOptions) -> Work:
        """Makes a group of the processes with these handles, which all call it with the same ones.

        If it raises an error, all of them keep the group that they have, and may try again.
        """
        limit = self._options._timeout.total_seconds()
        self.adopt(reconfigured(self.group(), in_order(opts.handles), opts, limit))
        return Work((), [])

    def adopt(self, group: _tenfold.Group) -> None:
        """Continues with another group of other processes, rank and size. The old one is dropped."""
        self._rank, self._size = group.rank, group.size
        self._options.global_ranks_in_group = []
        self._abort_hooks.begin()
        self._group, self._shrinking = group, None

    @property
    def supports_shrinking(self) -> bool:
        return True

    def shrink(
        self, ranks_to_exclude: Sequence[int], shrink_flags: int = 0, opts_override: Any = None
    ) -> "ProcessGroupTenfold":
        """Makes a backend of all other ranks, which all call it. The excluded ranks may be dead or alive."""
        group = self.group()
        if shrink_flags & SHRINK_ABORT:
            self._abort_hooks.call()
            group.revoke("shrink was called with SHRINK_ABORT")
        timeout = getattr(opts_override, "_timeout", None) or self._options._timeout
        if self._shrinking is None:
            self._shrinking = Shrinking(group)
        smaller, ranks = self._shrinking.without(ranks_to_exclude, timeout.total_seconds())
        self._shrinking = None
        backend = type(self)._of(smaller, timeout)  # type: ignore[attr-defined]
        own = self._options.global_ranks_in_group or list(range(self._size))
        backend._options.global_ranks_in_group = [own[rank] for rank in ranks]
        return backend

    @property
    def supports_abort_hooks(self) -> bool:
        return True

    def register_abort_hook(self, hook_id: int, hook: Callable[[], None]) -> None:
        """Calls `hook` once for each group that fails: before `abort`, or when an operation has failed.

        A group that fails while this rank does nothing is noticed at its next operation.
        """
        self._abort_hooks.register(hook_id, hook)

    def unregister_abort_hook(self, hook_id: int) -> None:
        self._abort_hooks.unregister(hook_id)
