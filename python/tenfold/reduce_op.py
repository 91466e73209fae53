"""`ReduceOp`: how the elements of all ranks are combined.

c10d has two kinds: `ReduceOp.SUM` and so on are members of the enumeration `ReduceOp.RedOpType`; a `ReduceOp`
is one of them, with a factor if it is `PREMUL_SUM`. All functions here accept both, PyTorch's own, and names.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

from tenfold.numbered import Numbered

__all__ = ["ReduceOp", "Reduction", "_make_nccl_premul_sum", "_make_premul_sum", "as_reduce_op", "code_of"]


class _ReduceOpMeta(type):
    """Makes the members instances of `ReduceOp`, as in c10d: `isinstance(ReduceOp.SUM, ReduceOp)`."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return issubclass(type(instance), cls) or isinstance(instance, cls.RedOpType)


class ReduceOp(metaclass=_ReduceOpMeta):
    """A reduction, for options and for operations.

    >>> ReduceOp.SUM
    <RedOpType.SUM: 0>
    >>> ReduceOp(ReduceOp.MAX) == ReduceOp.MAX
    True
    >>> ReduceOp.PREMUL_SUM(0.5).factor
    0.5
    >>> isinstance(ReduceOp.SUM, ReduceOp)
    True
    """

    class RedOpType(Numbered):
        """The kind of a reduction."""

        SUM = 0
        AVG = 1
        PRODUCT = 2
        MIN = 3
        MAX = 4
        BAND = 5
        BOR = 6
        BXOR = 7
        PREMUL_SUM = 8
        UNUSED = 9

        def __call__(self, factor: Any) -> "ReduceOp":
            """`ReduceOp.PREMUL_SUM(factor)`: every rank's elements times its factor, then their sum."""
            if self is not ReduceOp.PREMUL_SUM:
                raise RuntimeError(f"Only PREMUL_SUM supports calling with a factor, got {self}")
            return _make_premul_sum(factor)

        def __eq__(self, other: object) -> bool:
            # Equal to plain numbers too, as in c10d for this one enumeration.
            if isinstance(other, int):
                return self.value == other
            return self is other

        __hash__ = Numbered.__hash__

    SUM = RedOpType.SUM
    AVG = RedOpType.AVG
    PRODUCT = RedOpType.PRODUCT
    MIN = RedOpType.MIN
    MAX = RedOpType.MAX
    BAND = RedOpType.BAND
    BOR = RedOpType.BOR
    BXOR = RedOpType.BXOR
    PREMUL_SUM = RedOpType.PREMUL_SUM
    UNUSED = RedOpType.UNUSED

    __slots__ = ("_factor", "op")

    op: RedOpType

    def __init__(self, op: RedOpType) -> None:
        if not isinstance(op, ReduceOp.RedOpType):
            raise TypeError(f"ReduceOp takes one of its members, such as ReduceOp.SUM, not {op!r}")
        self.op = op
        self._factor: Any = None

    @property
    def factor(self) -> Any:
        """The factor of `PREMUL_SUM`."""
        if self.op is not ReduceOp.PREMUL_SUM:
            raise RuntimeError("Only PREMUL_SUM supports accessing factor")
        if self._factor is None:
            raise RuntimeError("PREMUL_SUM has no factor; make it by `ReduceOp.PREMUL_SUM(factor)`")
        return self._factor

    def boxed(self) -> "ReduceOp":
        """Returns itself: there is no TorchScript here."""
        return self

    @staticmethod
    def unbox(obj: "ReduceOp") -> "ReduceOp":
        return obj

    def __eq__(self, other: object) -> bool:
        # The factor is ignored, as in c10d.
        return self.op is getattr(other, "op", other)

    def __hash__(self) -> int:
        return hash(self.op)

    def __copy__(self) -> "ReduceOp":
        copy = ReduceOp(self.op)
        copy._factor = self._factor
        return copy

    def __deepcopy__(self, memo: Mapping) -> "ReduceOp":
        return self.__copy__()

    def __getstate__(self) -> tuple[RedOpType, Any]:
        if self.op is ReduceOp.PREMUL_SUM and self._factor is None:
            raise RuntimeError("Invalid PREMUL_SUM ReduceOp: it has no factor, and cannot be pickled")
        return self.op, self._factor

    def __setstate__(self, state: tuple[RedOpType, Any]) -> None:
        op, self._factor = state
        self.op = ReduceOp.RedOpType(op)

    def __reduce__(self) -> tuple:
        return ReduceOp, (self.op,), self.__getstate__()


# What callers may give for a reduction.
Reduction: TypeAlias = ReduceOp | ReduceOp.RedOpType | str


def _make_premul_sum(factor: Any) -> ReduceOp:
    """Makes `PREMUL_SUM` with a factor, which is a number or a tensor with one element."""
    if isinstance(factor, str | bytes):
        raise TypeError(f"the factor of PREMUL_SUM must be a number or a tensor, not {factor!r}")
    op = ReduceOp(ReduceOp.PREMUL_SUM)
    op._factor = float(factor) if isinstance(factor, int) else factor
    return op


def _make_nccl_premul_sum(factor: Any) -> ReduceOp:
    """c10d's older name of `_make_premul_sum`, from when only NCCL had it."""
    return _make_premul_sum(factor)


def code_of(op: Any) -> int | tuple[int, float] | str:
    """Returns what the extension takes: the number, with the factor for `PREMUL_SUM`, or the name.

    >>> code_of(ReduceOp.MAX)
    4
    >>> code_of(ReduceOp.PREMUL_SUM(2))
    (8, 2.0)
    """
    if isinstance(op, str | int | tuple):
        return op
    kind = getattr(op, "op", op)
    try:
        code = int(kind)
    except TypeError:
        raise TypeError(f"op must be a ReduceOp or the name of one, not {type(op).__name__}") from None
    if code != ReduceOp.PREMUL_SUM.value:
        return code
    if kind is op:
        raise ValueError("PREMUL_SUM needs a factor: `ReduceOp.PREMUL_SUM(factor)`")
    return code, float(op.factor)


def as_reduce_op(op: Any) -> ReduceOp:
    """Converts any value for a reduction, tenfold's or PyTorch's, to a `ReduceOp` of tenfold."""
    if type(op) is ReduceOp:
        return op
    if isinstance(op, str):
        if op.upper() not in ReduceOp.RedOpType.__members__:
            raise ValueError(f"unknown reduce operation `{op}`")
        return ReduceOp(ReduceOp.RedOpType[op.upper()])
    kind = getattr(op, "op", op)
    if isinstance(op, int) or not hasattr(kind, "value"):
        raise TypeError(f"this must be a ReduceOp, not {type(op).__name__}")
    has_factor = int(kind) == ReduceOp.PREMUL_SUM.value and kind is not op
    return _make_premul_sum(op.factor) if has_factor else ReduceOp(ReduceOp.RedOpType(int(kind)))
