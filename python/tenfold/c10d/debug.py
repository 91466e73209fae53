"""c10d's debug level: how much is checked and logged. PyTorch reads the same variable.

The level belongs to the process and is the same for Python and Rust. `INFO` logs the life of every group.
`DETAIL` also puts shapes and call sites into errors, and compares the shapes of all ranks: see
docs/debugging.md. Log lines go to standard error and begin with `tenfold: rank N: `. `TENFOLD_LOG` sets what
is logged (`off`, `warn`, `info`).
"""

from tenfold import _tenfold
from tenfold.c10d.enums import DebugLevel

__all__ = ["DebugLevel", "get_debug_level", "set_debug_level", "set_debug_level_from_env"]


def get_debug_level() -> DebugLevel:
    """Returns the level that was set, or that of `TORCH_DISTRIBUTED_DEBUG`."""
    return DebugLevel(_tenfold.debug_level())


def set_debug_level(level: DebugLevel, /) -> None:
    """Sets the level.

    >>> set_debug_level(DebugLevel.INFO)
    >>> get_debug_level()
    <DebugLevel.INFO: 1>
    >>> set_debug_level(DebugLevel.OFF)
    """
    if not isinstance(level, DebugLevel):
        raise TypeError(f"the debug level must be a DebugLevel, not {type(level).__name__}")
    _tenfold.set_debug_level(int(level))


def set_debug_level_from_env() -> None:
    """Sets the level to that of the environment variable `TORCH_DISTRIBUTED_DEBUG`."""
    _tenfold.set_debug_level_from_env()
