"""Collective communication for machine learning: c10d in Rust."""

from tenfold._tenfold import Group, SharedMemory, Work, __version__

__all__ = ["Group", "SharedMemory", "Work", "__version__"]
