"""How much is checked: c10d's debug level, from the variable that PyTorch reads, too."""

import os

from tenfold.enums import DebugLevel

__all__ = ["DebugLevel", "get_debug_level", "set_debug_level", "set_debug_level_from_env"]

_level: DebugLevel | None = None


def get_debug_level() -> DebugLevel:
    """The level that was set, or that of `TORCH_DISTRIBUTED_DEBUG`."""
    if _level is None:
        set_debug_level_from_env()
    assert _level is not None
    return _level


def set_debug_level(level: DebugLevel, /) -> None:
    """Sets the level.

    >>> set_debug_level(DebugLevel.INFO)
    >>> get_debug_level()
    <DebugLevel.INFO: 1>
    >>> set_debug_level(DebugLevel.OFF)
    """
    global _level
    if not isinstance(level, DebugLevel):
        raise TypeError(f"the debug level must be a DebugLevel, not {type(level).__name__}")
    _level = level


def set_debug_level_from_env() -> None:
    """Sets the level to that of the environment variable `TORCH_DISTRIBUTED_DEBUG`."""
    name = os.environ.get("TORCH_DISTRIBUTED_DEBUG", "OFF")
    if name.upper() not in DebugLevel.__members__:
        raise ValueError("The value of TORCH_DISTRIBUTED_DEBUG must be OFF, INFO, or DETAIL.")
    set_debug_level(DebugLevel[name.upper()])
