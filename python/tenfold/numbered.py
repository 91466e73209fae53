"""`Numbered`: enumerations that behave as those of pybind11, which c10d has."""

import enum

__all__ = ["Numbered"]


class Numbered(enum.Enum):
    """An enumeration whose members can be converted to their numbers.

    `int(OpType.GATHER)` is the number and so is its hash, but `OpType.GATHER == 7` is false.
    """

    def __int__(self) -> int:
        return self.value

    def __index__(self) -> int:
        return self.value

    def __hash__(self) -> int:
        return self.value
