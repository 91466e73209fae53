# ruff: noqa: N803  c10d's parameters are named in its own way
"""The flight recorder: what this process called last, and how far it got; and numbers about all of it.

Every operation of every group is recorded, always. `_dump_fr_trace` and its relatives have c10d's names and
formats, so that `torchfrtrace` and `tenfold trace` read what they give. A group that fails leaves a file by
itself: `TORCH_FR_DUMP_TEMP_FILE` with the rank behind it.

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

# A process that ends because of an error leaves its dump first; no error waits for the disk.
atexit.register(_tenfold.recorder_wait)


def _dump_fr_trace(
    includeCollectives: bool | None = None,
    includeStackTraces: bool | None = None,
    onlyActive: bool | None = None,
    backend: str = "gloo",
) -> bytes:
    """What is recorded, pickled as c10d does it. All groups are in it, whatever the backend's name."""
    return _tenfold.recorder_pickle(includeCollectives, includeStackTraces, onlyActive)


def _dump_fr_trace_json(
    includeCollectives: bool | None = None, onlyActive: bool | None = None, backend: str = "gloo"
) -> bytes:
    """What is recorded, as c10d's JSON."""
    return _tenfold.recorder_json(includeCollectives, onlyActive).encode()


def _dump_fr_trace_file(
    rank: int,
    includeCollectives: bool | None = None,
    includeStackTraces: bool | None = None,
    onlyActive: bool | None = None,
    backend: str = "gloo",
) -> None:
    """Writes the pickle to the file of a rank: `TORCH_FR_DUMP_TEMP_FILE` with the rank behind it.

    Stacks are left out unless asked for, as by c10d. Raises `OSError`, which names the file, if that is not
    possible.
    """
    _tenfold.recorder_file(rank, includeCollectives, bool(includeStackTraces), onlyActive)


def _reset_fr_trace(backend: str = "gloo") -> None:
    """Forgets what was recorded so far: later dumps begin with the next operation."""
    _tenfold.recorder_reset()


def _dump_nccl_trace(
    includeCollectives: bool | None = None,
    includeStackTraces: bool | None = None,
    onlyActive: bool | None = None,
) -> bytes:
    """c10d's older name of `_dump_fr_trace`. There is no NCCL here: all groups are in it."""
    return _dump_fr_trace(includeCollectives, includeStackTraces, onlyActive)


def _dump_nccl_trace_json(includeCollectives: bool | None = None, onlyActive: bool | None = None) -> bytes:
    """c10d's older name of `_dump_fr_trace_json`."""
    return _dump_fr_trace_json(includeCollectives, onlyActive)


def _reset_fr_recording_nccl() -> None:
    """c10d's older name of `_reset_fr_trace`."""
    _reset_fr_trace()


def metrics() -> list[dict[str, Any]]:
    """What this process did of each operation in each group.

    Each has `group`, `rank` (in the whole job), `operation`, `count`, `failed`, `bytes`, and in seconds
    `duration`, `wait` (how long it stood still because of other ranks) and `wait_max`; and of a sample of
    collectives `skew` (how long the last rank came after the first, summed up) and `skew_max`; `durations`,
    `waits` and `skews` are histograms: how many took up to each of `bounds`, in seconds, and more than the
    one before; the last counts the rest.
    """
    return _tenfold.metrics_snapshot()


def prometheus() -> str:
    """The same in the text format of Prometheus.

    >>> prometheus().splitlines()[1]
    '# TYPE tenfold_operations_total counter'
    """
    return _tenfold.metrics_prometheus()


def stragglers() -> list[dict[str, Any]]:
    """Who comes late to the collectives of each group, the latest first.

    Twice a second a rank looks when the others began their last collective. Each entry has `group`,
    `seen_by` and `rank` (ranks of the whole job), `samples`, `last` (how often it was the last of all), and
    in seconds `mean`, `max` and `recent` (how long after the first rank it came: on average, at most, and on
    average of what was seen lately).
    """
    return _tenfold.metrics_stragglers()


def straggler_report() -> str:
    """The same as a table to read: a few lines for each group."""
    return _tenfold.metrics_straggler_report()
