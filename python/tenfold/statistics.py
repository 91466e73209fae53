"""Metrics of all operations of this process, and which ranks arrive late.

>>> import tenfold
>>> group = tenfold.init(store=tenfold.HashStore(), rank=0, world_size=1, name="example")
>>> group.all_reduce(bytearray(8))
>>> [(one["operation"], one["count"], one["bytes"]) for one in metrics() if one["group"] == "example"]
[('all_reduce', 1, 8)]
>>> [len(one["durations"]) - len(one["bounds"]) for one in metrics() if one["group"] == "example"]
[1]
>>> group.close()
"""

from typing import Any

from tenfold import _tenfold

__all__ = ["metrics", "prometheus", "straggler_report", "stragglers"]


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
