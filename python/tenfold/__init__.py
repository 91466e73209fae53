"""Collective communication for machine learning: c10d in Rust.

`tenfold.init` and `Group` are the short way to collectives on arrays. `tenfold.c10d` has the names of c10d,
the library under `torch.distributed`, and behaves as it does there. `tenfold.torch` is the backend of
`torch.distributed`. Only `tenfold.torch` needs PyTorch; nothing needs NumPy.
"""

import atexit
import importlib
import os
from typing import TYPE_CHECKING, Any

from tenfold import _tenfold
from tenfold._tenfold import (
    FileStore,
    HashStore,
    PrefixStore,
    SharedMemory,
    Store,
    TCPStore,
    __version__,
)
from tenfold.api import Group, alone, init
from tenfold.exceptions import (
    DistArgumentError,
    DistBackendError,
    DistError,
    DistNetworkError,
    DistQueueEmptyError,
    DistStoreError,
    DistStoreTimeoutError,
    DistTimeoutError,
)
from tenfold.reduce_op import ReduceOp
from tenfold.statistics import metrics, prometheus, straggler_report, stragglers
from tenfold.work import Future, Work

if TYPE_CHECKING:
    from tenfold import c10d, ddp

__all__ = [
    "DistArgumentError",
    "DistBackendError",
    "DistError",
    "DistNetworkError",
    "DistQueueEmptyError",
    "DistStoreError",
    "DistStoreTimeoutError",
    "DistTimeoutError",
    "FileStore",
    "Future",
    "Group",
    "HashStore",
    "PrefixStore",
    "ReduceOp",
    "SharedMemory",
    "Store",
    "TCPStore",
    "Work",
    "__version__",
    "alone",
    "c10d",
    "ddp",
    "init",
    "metrics",
    "prometheus",
    "straggler_report",
    "stragglers",
]

# A process that exits because of an error writes its dump first. The error itself does not wait for the disk.
atexit.register(_tenfold.recorder_wait)

if os.environ.get("TENFOLD_WORKER_SERVER"):
    import tenfold.c10d.control  # noqa: F401, starts the threads that answer requests


def __getattr__(name: str) -> Any:
    """Imports `tenfold.c10d` and `tenfold.ddp` when they are first used: most programs need neither."""
    if name in ("c10d", "ddp"):
        return importlib.import_module(f"tenfold.{name}")
    raise AttributeError(f"module `tenfold` has no attribute `{name}`")
