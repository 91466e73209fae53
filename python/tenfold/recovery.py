"""Training that goes on when ranks die: `Members`, and `train`, which runs the steps.

>>> import numpy, tenfold
>>> from tenfold.recovery import Members, train
>>> weights = numpy.zeros(3)
>>> members = Members.connect(tenfold.HashStore(), 0, 1, replaced=False)
>>> def step(group, number):
...     gradients = numpy.ones(3)
...     group.all_reduce(gradients)
...     weights.__iadd__(gradients)
>>> train(members, [weights], step, steps=2)
>>> weights.tolist()
[2.0, 2.0, 2.0]

A step that fails because a rank died is repeated: all ranks return to the state after the last step that all
of them have completed, and ranks that joined get it from the others. With PyTorch, use
`tenfold.torch.recovery`.
"""

import os
import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from tenfold import _tenfold
from tenfold.api import DEFAULT_TIMEOUT, Group, Seconds, _seconds
from tenfold.exceptions import DistBackendError

__all__ = ["Members", "Recovered", "State", "train"]

# Ranks differ by one step at most: none completes a step that another has not begun.
_KEPT = 2


class Recovered(NamedTuple):
    """What a recovery has changed."""

    generation: int
    left: list[int]
    joined: list[int]
    seconds: float


class Members:
    """The ranks of a job that outlives the death of some of them."""

    def __init__(self, inner: _tenfold.Members, timeout: Seconds | None = None) -> None:
        self._inner = inner
        self._timeout = _seconds(timeout)
        self._group: Group | None = None

    @classmethod
    def from_environment(
        cls,
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
    ) -> "Members":
        """Joins the ranks of this program. The arguments are those of `tenfold.init`.

        A process that `tenfold run --on-failure=recover` started in place of a rank that died, or as a spare,
        waits here until the others have admitted it. `RANK` and `LOCAL_RANK` are set then.
        """
        inner = _tenfold.Members.from_environment(
            name=name,
            timeout=_seconds(timeout),
            heartbeat=_seconds(heartbeat),
            transport=transport,
            deterministic=deterministic,
            stuck_after=_seconds(stuck_after),
            on_stuck=on_stuck,
            quorum=quorum,
            patience=_seconds(patience),
        )
        members = cls(inner, timeout)
        if inner.has_joined:
            os.environ["RANK"] = str(members.group.rank)
            if inner.local_rank is not None:
                os.environ["LOCAL_RANK"] = str(inner.local_rank)
        return members

    @classmethod
    def connect(
        cls,
        store: Any,
        rank: int,
        world_size: int,
        *,
        replaced: bool,
        name: str = "default",
        timeout: Seconds | None = None,
    ) -> "Members":
        """Joins through a store. If `replaced`, other processes call `join` in place of ranks that die."""
        seconds = _seconds(timeout)
        inner = _tenfold.Members.connect(
            store, rank, world_size, replaced=replaced, name=name, timeout=seconds
        )
        return cls(inner, timeout)

    @classmethod
    def join(
        cls, store: Any, rank: int | None = None, *, name: str = "default", timeout: Seconds | None = None
    ) -> "Members":
        """Waits until the others admit this process in place of rank `rank`, or of any rank that died."""
        return cls(_tenfold.Members.join(store, rank, name=name, timeout=_seconds(timeout)), timeout)

    @property
    def group(self) -> Group:
        """The group of all members. Each recovery makes another."""
        if self._group is None:
            timeout = DEFAULT_TIMEOUT.total_seconds() if self._timeout is None else self._timeout
            self._group = Group(self._inner.group(), None, timeout)
        return self._group

    @property
    def generation(self) -> int:
        """How many groups there were, counted from 1."""
        return self._inner.generation

    @property
    def has_joined(self) -> bool:
        """Whether this process has taken the place of one that died."""
        return self._inner.has_joined

    def with_state(self) -> list[int]:
        """Returns the ranks that can hand over what training needs."""
        return self._inner.with_state()

    def without_state(self) -> list[int]:
        """Returns the ranks that have joined and do not have it yet. It is the same on all ranks."""
        return self._inner.without_state()

    def state_is_complete(self) -> None:
        """Notes that all ranks have it. All ranks call it after the hand-over."""
        self._inner.state_is_complete()

    def recover(self) -> Recovered:
        """Continues after a failure with the ranks that are left, and others in place of the dead.

        All survivors call it. It returns when the new group is made.
        """
        # The object that the caller may still hold does not keep the old group alive.
        old, self._group = self._group, None
        if old is not None:
            old.close()
        return Recovered(*self._inner.recover())


class State(Protocol):
    """What `train` commits, rolls back and hands over."""

    def tensors(self) -> Sequence[Any]:
        """Returns the arrays that training changes: on all ranks the same number, dtypes and lengths.

        The arrays may be others after `load_objects`.
        """

    def objects(self) -> Any:
        """Returns everything else, which is pickled: counters, the states of random generators."""

    def load_objects(self, objects: Any) -> None:
        """Restores what `objects` returned, here or on another rank."""


class Arrays:
    """The state of a program that has nothing but arrays."""

    def __init__(self, arrays: Iterable[Any]) -> None:
        self._arrays = list(arrays)

    def tensors(self) -> Sequence[Any]:
        return self._arrays

    def objects(self) -> Any:
        return None

    def load_objects(self, objects: Any) -> None:
        pass


class _Snapshot(NamedTuple):
    """The state after so many steps."""

    steps: int
    tensors: list[bytearray]
    objects: bytes


class _Commits:
    """The last snapshots of this rank. Their memory is used again."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._kept: list[_Snapshot] = []

    def commit(self, steps: int) -> None:
        """Copies the state. The oldest of the snapshots is given up for it."""
        arrays = [_bytes(array) for array in self._state.tensors()]
        memory = self._kept.pop(0).tensors if len(self._kept) == _KEPT else []
        if [len(copy) for copy in memory] != [len(array) for array in arrays]:
            memory = [bytearray(len(array)) for array in arrays]
        for copy, array in zip(memory, arrays, strict=True):
            memoryview(copy)[:] = array
        self._kept.append(_Snapshot(steps, memory, pickle.dumps(self._state.objects())))

    def last(self) -> int:
        return self._kept[-1].steps if self._kept else -1

    def roll_back(self, steps: int) -> None:
        """Returns to the state after so many steps."""
        found = [snapshot for snapshot in self._kept if snapshot.steps == steps]
        if not found:
            kept = ", ".join(str(snapshot.steps) for snapshot in self._kept) or "none"
            raise DistBackendError(
                f"cannot return to the state after {steps} steps: this rank has only that after {kept}\n"
                "  hint: every step needs an operation that all ranks take part in, such as all_reduce"
            )
        self._state.load_objects(pickle.loads(found[0].objects))
        for array, copy in zip(self._state.tensors(), found[0].tensors, strict=True):
            _bytes(array)[:] = memoryview(copy)
        self._kept = found


def _bytes(array: Any) -> memoryview:
    """Returns the bytes of an array, which must be contiguous and writable."""
    view = memoryview(array)
    if view.readonly or not view.c_contiguous:
        raise ValueError("state must be in arrays that are contiguous and writable")
    return view.cast("B") if view.nbytes else memoryview(bytearray())


def train(
    members: Members,
    state: "State | Sequence[Any]",
    step: Callable[[Group, int], None],
    *,
    steps: int,
    commit_every: int = 1,
    on_recovery: Callable[[Recovered, int], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Calls `step(group, number)` for each number below `steps`, and repeats steps after failures.

    `state` is all that a step changes: arrays, or an object with the methods of `State`. After every
    `commit_every` steps, each rank copies it in memory. If a step raises an error because the group has
    failed, the ranks that are left recover (see `Members.recover`), return to the last state that all of them
    have, hand it to ranks that joined, call `on_recovery(recovered, number)`, and go on with step `number`.
    What `step` has done outside of `state` since then is not undone.

    `progress` gets the bytes of state that this rank has handed over or received, and how many there are.
    """
    given = state if hasattr(state, "tensors") else Arrays(state)
    plan = Plan(steps, commit_every, on_recovery, progress)
    run(members, given, lambda number: step(members.group, number), plan)


class Plan(NamedTuple):
    """How many steps there are, and what happens between them. See `train`."""

    steps: int
    commit_every: int = 1
    on_recovery: Callable[[Recovered, int], None] | None = None
    progress: Callable[[int, int], None] | None = None


def run(
    members: Members,
    state: State,
    step: Callable[[int], None],
    plan: Plan,
    begin: Callable[[], None] | None = None,
) -> None:
    """Does what `train` does. All ranks call `begin` before the first step in each group."""
    if plan.commit_every < 1:
        raise ValueError(f"commit_every is {plan.commit_every}, expected 1 or more")
    committed = _Commits(state)
    failure: Exception | None = None
    recovered, number, futile = None, 0, -1
    is_new = True
    if not members.has_joined:
        committed.commit(0)
    while True:
        try:
            if recovered is not None or members.without_state():
                number = _agree_on_state(members, committed, plan.progress)
            if recovered is not None:
                if not recovered.left and number == futile:
                    raise _FutileError  # no rank died, and the same step has failed before
                futile = -1 if recovered.left else number
                if plan.on_recovery is not None:
                    plan.on_recovery(recovered, number)
            if is_new and begin is not None:
                begin()
            recovered, is_new = None, False
            while number < plan.steps:
                step(number)
                number += 1
                if number % plan.commit_every == 0 or number == plan.steps:
                    committed.commit(number)
            # No rank returns before all have completed the last step, because another may need its state.
            members.group.barrier()
            return
        except _FutileError:
            assert failure is not None
            raise failure from None
        except Exception as error:
            if not _is_of_communication(error, members.group):
                raise
            # A traceback would keep alive what the failed step has used.
            failure = error.with_traceback(None)
            failure.__context__ = failure.__cause__ = None
            recovered, is_new = members.recover(), True


# What an error of another group says: of one that was made from the members', such as that of a reducer.
_LOST = {"PeerLost", "PeerSilent", "Aborted", "Timeout", "Closed"}


def _is_of_communication(error: Exception, group: Group) -> bool:
    """Whether a step failed because a rank died. Frameworks have exceptions of their own for that."""
    if group.failure() is not None:
        return True
    if getattr(error, "kind", None) not in _LOST:
        return False
    group.revoke(f"a step failed on rank {group.rank}: {error}")  # other ranks may wait in this group
    return True


class _FutileError(Exception):
    pass


def _agree_on_state(
    members: Members, committed: _Commits, progress: Callable[[int, int], None] | None
) -> int:
    """All ranks return to the last steps that all have committed. Returns how many there were."""
    group, sources, targets = members.group, members.with_state(), members.without_state()
    known = group.all_gather_object(committed.last())
    steps = min(known[rank] for rank in sources) if sources else -1
    if steps < 0:
        raise DistBackendError("all ranks that had the state of the training have died: start it again")
    state = committed._state
    if group.rank in sources:
        committed.roll_back(steps)
    if targets:
        objects = [pickle.dumps(state.objects()) if group.rank == sources[0] else b""]
        group.broadcast_object_list(objects, root=sources[0])
        if group.rank in targets:
            state.load_objects(pickle.loads(objects[0]))
        tensors = [_bytes(array) for array in state.tensors()]
        group.hand_over(tensors, sources, targets, progress)
        if group.rank in targets:
            committed.commit(steps)
        members.state_is_complete()
    return steps
