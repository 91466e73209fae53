# ruff: noqa: N803  c10d's parameters are named in its own way
"""The flight recorder: the last operations of this process and their state. Also metrics of all operations.

Every operation of every group is always recorded. `_dump_fr_trace` and its variants have c10d's names and
formats, so that `torchfrtrace` and `tenfold trace` can read their results. When a group fails, it writes a
file: `TORCH_FR_DUMP_TEMP_FILE`, with the rank appended.

>>> import json, tenfold
>>> group = tenfold.init(store=tenfold.HashStore(), rank=0, world_size=1, name="example")
>>> _reset_fr_trace()
>>> group.all_reduce(bytearray(8))
>>> entry = json.loads(_dump_fr_trace_json())["entries"][0]
>>> entry["profiling_name"], entry["state"], entry["input_sizes"]
('tenfold:all_reduce', 'completed', [[8]])
>>> [(one["operation"], one["count"], one["bytes"]) for one in metrics() if one["group"] == "example"]
[('all_reduce', 1, 8)]
>>> [len(one["durations"]) - len(one["bounds"]) for one in metrics() if one["group"] == "example"]
[1]
>>> group.close()
"""

import atexit
from typing import Any

from tenfold import _tenfold

__all__ = [
    "_dump_fr_trace",
    "_dump_fr_trace_file",
    "_dump_fr_trace_json",
    "_dump_nccl_trace",
    "_dump_nccl_trace_json",
    "_reset_fr_recording_nccl",
    "_reset_fr_trace",
    "metrics",
    "prometheus",
    "straggler_report",
    "stragglers",
]

# A process that exits because of an error writes its dump first. The error itself does not wait for the disk.
atexit.register(_tenfold.recorder_wait)


def _dump_fr_trace(
    includeCollectives: bool | None = None,
    includeStackTraces: bool | None = None,
    onlyActive: bool | None = None,
    backend: str = "gloo",
) -> bytes:
    """Returns the record of all groups, pickled as c10d does it. The backend's name has no effect."""
    return _tenfold.recorder_pickle(includeCollectives, includeStackTraces, onlyActive)


def _dump_fr_trace_json(
    includeCollectives: bool | None = None, onlyActive: bool | None = None, backend: str = "gloo"
) -> bytes:
    """Returns the record as c10d's JSON."""
    return _tenfold.recorder_json(includeCollectives, onlyActive).encode()


def _dump_fr_trace_file(
    rank: int,
    includeCollectives: bool | None = None,
    includeStackTraces: bool | None = None,
    onlyActive: bool | None = None,
    backend: str = "gloo",
) -> None:
    """Writes the pickle to the file of a rank: `TORCH_FR_DUMP_TEMP_FILE`, with the rank appended.

    Stacks are left out by default, as in c10d. Raises `OSError` with the name of the file if it cannot be
    written.
    """
    _tenfold.recorder_file(rank, includeCollectives, bool(includeStackTraces), onlyActive)


def _reset_fr_trace(backend: str = "gloo") -> None:
    """Clears the record. Later dumps start with the next operation."""
    _tenfold.recorder_reset()


def _dump_nccl_trace(
    includeCollectives: bool | None = None,
    includeStackTraces: bool | None = None,
    onlyActive: bool | None = None,
) -> bytes:
    """c10d's older name of `_dump_fr_trace`. It has all groups; there is no NCCL here."""
    return _dump_fr_trace(includeCollectives, includeStackTraces, onlyActive)


def _dump_nccl_trace_json(includeCollectives: bool | None = None, onlyActive: bool | None = None) -> bytes:
    """c10d's older name of `_dump_fr_trace_json`."""
    return _dump_fr_trace_json(includeCollectives, onlyActive)


def _reset_fr_recording_nccl() -> None:
    """c10d's older name of `_reset_fr_trace`."""
    _reset_fr_trace()


def metrics() -> list[dict[str, Any]]:
    """Returns metrics of this process, one entry for each group and operation.

    An entry has `group`, `rank` (in the whole job), `operation`, `count`, `failed` and `bytes`. In seconds it
    has `duration`, `wait` (how long operations made no progress because of other ranks) and `wait_max`. From
    a sample of collectives it has `skew` (how long after the first rank the last one arrived, summed) and
    `skew_max`. `durations`, `waits` and `skews` are histograms: each number counts values up to one of
    `bounds`, in seconds, and above the bound before it; the last number counts the rest.
    """
    return _tenfold.metrics_snapshot()


def prometheus() -> str:
    """Returns the same in the text format of Prometheus.

    >>> prometheus().splitlines()[1]
    '# TYPE tenfold_operations_total counter'
    """
    return _tenfold.metrics_prometheus()


def stragglers() -> list[dict[str, Any]]:
    """Returns how late each rank is for the collectives of each group, the latest first.

    Twice a second a rank checks when the others started their last collective. An entry has `group`,
    `seen_by` and `rank` (ranks of the whole job), `samples` and `last` (how often it was the last of all). In
    seconds it has `mean`, `max` and `recent`: how long after the first rank it arrived, on average, at most,
    and on average of recent samples.
    """
    return _tenfold.metrics_stragglers()


def straggler_report() -> str:
    """Returns the same as a text table, with a few lines for each group."""
    return _tenfold.metrics_straggler_report()
