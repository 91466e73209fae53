"""How much is checked and told: c10d's debug level, from the variable that PyTorch reads, too.

It is the process's, and the same for Python and Rust. `INFO` logs the life of every group; `DETAIL` also
puts shapes and call sites into errors, and has all ranks agree about shapes: see docs/debugging.md. What is
logged goes to standard error, in lines that begin with `tenfold: rank N: `; `TENFOLD_LOG` says what (`off`,
`warn`, `info`).
"""

from tenfold import _tenfold
from tenfold.enums import DebugLevel

__all__ = ["DebugLevel", "get_debug_level", "set_debug_level", "set_debug_level_from_env"]


def get_debug_level() -> DebugLevel:
    """The level that was set, or that of `TORCH_DISTRIBUTED_DEBUG`."""
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
