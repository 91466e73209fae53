# ruff: noqa: N803  c10d's parameters are named in its own way
"""The flight recorder: the last operations of this process and their state.

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
>>> group.close()
"""

from tenfold import _tenfold

__all__ = [
    "_dump_fr_trace",
    "_dump_fr_trace_file",
    "_dump_fr_trace_json",
    "_dump_nccl_trace",
    "_dump_nccl_trace_json",
    "_reset_fr_recording_nccl",
    "_reset_fr_trace",
]


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
