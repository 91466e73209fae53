# ruff: noqa: N815  c10d's fields are named in its own way
"""c10d's options: one class for each operation, each with a few fields and defaults.

A field takes what c10d's takes and converts it to its own type. An unknown name or another type is refused in
the assignment, not later. A timeout of -1 ms, which is the default, means the group's.
"""

import copy
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar, get_type_hints

from tenfold.api import DEFAULT_TIMEOUT
from tenfold.c10d.enums import HookOpName
from tenfold.numbered import Numbered
from tenfold.reduce_op import ReduceOp, as_reduce_op

__all__ = [
    "_DEFAULT_FIRST_BUCKET_BYTES",
    "_DEFAULT_NO_TIMEOUT",
    "_DEFAULT_PG_NCCL_TIMEOUT",
    "_DEFAULT_PG_TIMEOUT",
    "AllToAllOptions",
    "AllgatherOptions",
    "AllreduceCoalescedOptions",
    "AllreduceOptions",
    "BarrierOptions",
    "BroadcastOptions",
    "GatherOptions",
    "PostHookArgs",
    "PreHookArgs",
    "PutOptions",
    "ReconfigureOptions",
    "ReduceOptions",
    "ReduceScatterOptions",
    "ScatterOptions",
    "SignalOptions",
    "WaitSignalOptions",
    "WindowAccessType",
    "WindowAttr",
    "_DistributedBackendOptions",
    "default_pg_timeout",
]

_DEFAULT_PG_TIMEOUT = DEFAULT_TIMEOUT
_DEFAULT_PG_NCCL_TIMEOUT = timedelta(minutes=10)
_DEFAULT_NO_TIMEOUT = timedelta(0)
_DEFAULT_FIRST_BUCKET_BYTES = 1024 * 1024
default_pg_timeout = _DEFAULT_PG_TIMEOUT

# c10d's value for "the timeout of the group".
UNSET_TIMEOUT = timedelta(milliseconds=-1)


def _as_timedelta(value: Any) -> timedelta:
    return value if isinstance(value, timedelta) else timedelta(seconds=value)


def _as_int(value: Any) -> int:
    return value.__index__()


def _as_str(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


_CONVERSIONS: dict[Any, Callable[[Any], Any]] = {
    bool: bool,
    int: _as_int,
    str: _as_str,
    timedelta: _as_timedelta,
    timedelta | None: lambda value: None if value is None else _as_timedelta(value),
    ReduceOp: as_reduce_op,
    list[int]: lambda value: [_as_int(item) for item in value],
    dict[str, str]: lambda value: {_as_str(key): _as_str(item) for key, item in value.items()},
}


class Fields:
    """Attributes as the class declares them: a type, which converts or refuses values, and a default."""

    _fields: ClassVar[dict[str, tuple[Any, Any]]] = {}
    # Mutable defaults, of which every instance gets a copy.
    _to_copy: ClassVar[list[tuple[str, Any]]] = []

    def __init_subclass__(cls) -> None:
        inherited = cls._fields
        hints = get_type_hints(cls)
        declared = {name: (hints[name], getattr(cls, name)) for name in cls.__annotations__}
        cls._fields = inherited | declared
        changeable = list | dict | set | ReduceOp
        defaults = {name: default for name, (_, default) in cls._fields.items()}
        cls._to_copy = [(name, value) for name, value in defaults.items() if isinstance(value, changeable)]

    def __init__(self) -> None:
        for name, default in self._to_copy:
            object.__setattr__(self, name, copy.copy(default))

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._fields:
            raise AttributeError(
                f"{type(self).__name__} has no field {name}; it has {', '.join(self._fields)}"
            )
        kind, _ = self._fields[name]
        try:
            value = _CONVERSIONS.get(kind, lambda value: value)(value)
        except (TypeError, AttributeError) as error:
            expected = getattr(kind, "__name__", kind)
            text = f"{type(self).__name__}.{name} must be a {expected}, not {type(value).__name__}"
            raise TypeError(text) from error
        object.__setattr__(self, name, value)


class _OperationOptions(Fields):
    timeout: timedelta = UNSET_TIMEOUT
    asyncOp: bool = True


class BroadcastOptions(_OperationOptions):
    """For `broadcast`.

    >>> options = BroadcastOptions()
    >>> options.rootRank = 1
    >>> options.asyncOp
    True
    """

    rootRank: int = 0
    rootTensor: int = 0


class AllreduceOptions(_OperationOptions):
    """For `allreduce`."""

    reduceOp: ReduceOp = ReduceOp(ReduceOp.SUM)


class AllreduceCoalescedOptions(_OperationOptions):
    """For `allreduce_coalesced`."""

    reduceOp: ReduceOp = ReduceOp(ReduceOp.SUM)


class ReduceOptions(_OperationOptions):
    """For `reduce`."""

    reduceOp: ReduceOp = ReduceOp(ReduceOp.SUM)
    rootRank: int = 0
    rootTensor: int = 0


class AllgatherOptions(_OperationOptions):
    """For `allgather` and its variants."""


class GatherOptions(_OperationOptions):
    """For `gather` and `gather_single`."""

    rootRank: int = 0


class ScatterOptions(_OperationOptions):
    """For `scatter`."""

    rootRank: int = 0


class ReduceScatterOptions(_OperationOptions):
    """For `reduce_scatter` and its variants."""

    reduceOp: ReduceOp = ReduceOp(ReduceOp.SUM)


class AllToAllOptions(_OperationOptions):
    """For `alltoall` and `all_to_all_single`."""


class BarrierOptions(_OperationOptions):
    """For `barrier`. Devices have no effect on a CPU."""

    device_ids: list[int] = []  # noqa: RUF012  every instance gets a copy
    device: Any = None


class ReconfigureOptions(Fields):
    """For `reconfigure`."""

    uuid: int = 0
    handles: Any = set()  # noqa: RUF012
    timeout: timedelta | None = None
    hints: dict[str, str] = {}  # noqa: RUF012


class PutOptions(Fields):
    """For `Window.put`."""

    timeout: timedelta = UNSET_TIMEOUT
    hints: dict[str, str] = {}  # noqa: RUF012


class SignalOptions(PutOptions):
    """For `Window.signal`."""


class WaitSignalOptions(PutOptions):
    """For `Window.wait_signal`."""


class WindowAccessType(Numbered):
    """Whether a window's memory is the same for local and remote access."""

    UNIFIED = 0
    SEPARATE = 1


class WindowAttr(Fields):
    """The attributes of a peer's window."""

    access_type: Any = WindowAccessType.UNIFIED


class PreHookArgs(Fields):
    """The argument of a hook that is called before an operation."""

    name: Any = HookOpName.UNKNOWN
    async_op: bool = False
    input_tensors: Any = []  # noqa: RUF012
    output_tensors: Any = []  # noqa: RUF012
    root: int = -1
    op_id: int = 0


class PostHookArgs(Fields):
    """The argument of a hook that is called after an operation was called; it may be pending."""

    name: Any = HookOpName.UNKNOWN
    async_op: bool = False
    work: Any = None
    op_id: int = 0


class _DistributedBackendOptions(Fields):
    """The argument of a function that makes a backend."""

    store: Any = None
    group_rank: int = 0
    group_size: int = 0
    timeout: timedelta = _DEFAULT_NO_TIMEOUT
    group_id: str = ""
    global_ranks_in_group: list[int] = []  # noqa: RUF012
    process_group: Any = None
    split_from: Any = None
    enable_reconfigure: bool = False
