"""c10d's hooks for a `ProcessGroup`: `NanCheckHook`, `HealthCheckHook`, `FlightRecorderHook`.

They are attached to a group from outside, by `register_pre_hook` and similar methods. So they work with any
backend. With tenfold's own backend two of them have little to do: it always records every operation, and with
`TORCH_DIST_NAN_CHECK=1` it refuses NaN by itself.
"""

import itertools
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from tenfold import _tenfold
from tenfold.c10d.backend import Backend, ProcessGroupTenfold
from tenfold.c10d.enums import HookOpName
from tenfold.c10d.options import PreHookArgs
from tenfold.c10d.process_group import ProcessGroup
from tenfold.exceptions import refused

__all__ = ["FlightRecorderHook", "HealthCheckHook", "NanCheckHook", "unhealthy_backends"]

# Ids that hooks of users are unlikely to have. Hooks are called in the order of registration.
_ids = itertools.count(1 << 32)


class _Place(NamedTuple):
    """A group of any backend, for errors."""

    name: str
    rank: int
    size: int


class NanCheckHook:
    """Refuses operations whose inputs have a NaN in them, before anything is sent; see `attach`.

    >>> from tenfold.c10d import HashStore, ProcessGroup
    >>> group = ProcessGroup(HashStore(), 0, 1)
    >>> hook = NanCheckHook.attach(group)
    >>> from array import array
    >>> group.allreduce(array("f", [1.0, float("nan")]))
    Traceback (most recent call last):
        ...
    tenfold.exceptions.DistArgumentError: allreduce in group `default` failed on rank 0 of 1: NaN found in...
    >>> hook.remove()
    >>> group.allreduce(array("f", [1.0, float("nan")])).wait()
    True
    """

    def __init__(self) -> None:
        raise TypeError("NanCheckHook: No constructor defined!")

    @classmethod
    def attach(cls, pg: ProcessGroup) -> "NanCheckHook":
        """Checks all inputs of the group from now on. The group keeps the hook alive."""
        hook = cls.__new__(cls)
        hook._group = weakref.ref(pg)
        hook._id = next(_ids)
        pg.register_pre_hook(hook._id, hook._check)
        return hook

    def remove(self) -> None:
        """Stops checking."""
        if (group := self._group()) is not None:
            group.unregister_pre_hook(self._id)

    _group: Any
    _id: int

    def _check(self, call: PreHookArgs) -> None:
        group = self._group()
        is_sent = call.name not in (HookOpName.RECV, HookOpName.BARRIER)
        if group is None or (call.name is HookOpName.BROADCAST and call.root != group.rank()) or not is_sent:
            return
        for index, tensor in enumerate(call.input_tensors):
            if (element := _tenfold.find_nan(tensor)) is not None:
                place = _Place(group._name or "default", group.rank(), group.size())
                mistake = f"NaN found in input tensor {index}, which has it at element {element}"
                raise refused(place, call.name.name.lower(), mistake)


class HealthCheckHook:
    """Records which backends have aborted; see `unhealthy_backends`."""

    def __init__(self) -> None:
        raise TypeError("HealthCheckHook: No constructor defined!")

    @staticmethod
    def attach(pg: ProcessGroup) -> None:
        """Watches every backend of the group that has abort hooks, as long as the group exists."""
        for _, _, backend in pg._backends.values():
            if backend.supports_abort_hooks:
                backend.register_abort_hook(next(_ids), _noting(backend))


_unhealthy: set[str] = set()


def _noting(backend: Backend) -> Any:
    name = backend.name()
    return lambda: _unhealthy.add(name)


def unhealthy_backends() -> list[str]:
    """Returns the names of backends that have aborted."""
    return sorted(_unhealthy)


class FlightRecorderHook:
    """Records a group's operations, which tenfold always does; see `attach`."""

    def __init__(self) -> None:
        raise TypeError("FlightRecorderHook: No constructor defined!")

    @classmethod
    def attach(cls, pg: ProcessGroup, global_ranks: Sequence[int] = ()) -> "FlightRecorderHook":
        """Sets the number in the job of each rank, for dumps of the flight recorder."""
        for _, _, backend in pg._backends.values():
            if isinstance(backend, ProcessGroupTenfold):
                backend.group().describe(pg.group_desc or None, list(global_ranks) or None)
        return cls.__new__(cls)

    def remove(self) -> None:
        """Removes the hook. The recorder continues, because it does not depend on the hook."""
