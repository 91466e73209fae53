"""How long calls of `torch.distributed` take, from the call to its return.

Every operation is measured under every backend by turns: a round of one, a round of the other, and so on. So
other load on the machine affects all of them. A round is as many calls as take some milliseconds. The result
is the median over the rounds of the slowest rank's time for a call.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tenfold.bench import job

if TYPE_CHECKING:
    import torch.distributed as dist

OPERATIONS = ["all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "barrier"]
SIZES = [8, 512, 4096, 32 * 1024, 256 * 1024, 2 * 1024**2, 16 * 1024**2, 64 * 1024**2]

ROUND_SECONDS = 0.02
CALLS_MAX = 2000  # a round


@dataclass(frozen=True)
class Row:
    """The time of one operation under one backend."""

    operation: str
    ranks: int
    bytes: int
    backend: str
    median_us: float


@dataclass(frozen=True)
class Settings:
    """The settings of all ranks of a job."""

    ranks: int
    operations: list[str]
    sizes: list[int]
    backends: list[str]
    rounds: int


def run(ranks: int, operations: list[str], sizes: list[int], backends: list[str], rounds: int) -> list[Row]:
    """Measures every operation with every size under every backend, in one job of processes on this host."""
    settings = Settings(ranks, operations, sizes, backends, rounds)
    return [Row(**row) for row in job.run("tenfold.bench.operations", settings, ranks)]


def rank_main(rank: int, folder: Path) -> None:
    settings = Settings(**job.settings_of(folder))

    def measure_all(groups: dict[str, dist.ProcessGroup]) -> Iterator[Row]:
        for operation in settings.operations:
            for size in settings.sizes if operation != "barrier" else [0]:
                yield from measure(operation, size, groups, settings)

    job.be_a_rank(rank, settings.ranks, folder, settings.backends, measure_all)


def measure(
    operation: str, size: int, groups: dict[str, dist.ProcessGroup], settings: Settings
) -> Iterator[Row]:
    calls = {backend: call_of(operation, size, group) for backend, group in groups.items()}
    counts = {backend: calls_a_round(call) for backend, call in calls.items()}
    times: dict[str, list[float]] = {backend: [] for backend in calls}
    for turn in range(settings.rounds):
        for backend in job.rotated(list(calls), turn):
            times[backend].append(seconds_a_call(calls[backend], counts[backend]))
    for backend, seconds in times.items():
        median = statistics.median(job.slowest_rank(seconds)) * 1e6
        yield Row(operation, settings.ranks, size, backend, median)


def call_of(operation: str, size: int, group: dist.ProcessGroup) -> Callable[[], object]:
    """Makes a call that moves `size` bytes: those of the larger tensor of a rank."""
    import torch
    import torch.distributed as dist

    ranks, rank = group.size(), group.rank()
    count = max(size // 4, 1)
    part = max(count // ranks, 1)
    whole, other = torch.zeros(count), torch.zeros(part * ranks)
    own, spread = torch.zeros(part), torch.zeros(part * ranks)
    following, preceding = (rank + 1) % ranks, (rank - 1) % ranks

    def send_recv() -> None:
        """Sends to the next rank and receives from the previous one, concurrently."""
        works = [
            dist.isend(whole, group_dst=following, group=group),
            dist.irecv(received, group_src=preceding, group=group),
        ]
        for work in works:
            work.wait()

    received = torch.zeros(count)
    return {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, group_src=0, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(other, own, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(own, other, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, spread, group=group),
        "send_recv": send_recv,
        "barrier": lambda: dist.barrier(group=group),
    }[operation]


def calls_a_round(call: Callable[[], object]) -> int:
    """Returns how many calls fill a round, the same on all ranks. Finding this out is the warm-up."""
    count = 3
    for _ in range(3):  # ranks do not start at the same moment, so the time of few calls is not accurate
        seconds = job.slowest_rank([seconds_a_call(call, count)])[0]
        count = max(1, min(CALLS_MAX, round(ROUND_SECONDS / seconds)))
    return count


def seconds_a_call(call: Callable[[], object], count: int) -> float:
    """Measures this rank, after a barrier."""
    import torch.distributed as dist

    dist.barrier()  # always of the same group, whichever backend is measured
    started = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - started) / count


def table(rows: list[Row], against: str) -> str:
    """Formats a line for each operation and size, with the ratio. Above 1, tenfold is faster."""
    lines = [f"{'operation':<15} {'ranks':>5} {'size':>8} {'tenfold':>11} {against:>11} {'ratio':>8}"]
    found = {(row.operation, row.ranks, row.bytes, row.backend): row.median_us for row in rows}
    for operation, ranks, size, backend in found:
        if backend != "tenfold":
            continue
        ours, theirs = found[operation, ranks, size, "tenfold"], found.get((operation, ranks, size, against))
        line = f"{operation:<15} {ranks:>5} {show_size(size):>8} {ours:>8.1f} µs"
        if theirs is not None and against != "tenfold":
            line += f" {theirs:>8.1f} µs {theirs / ours:>7.2f}x"
        lines.append(line)
    return "\n".join(lines)


def show_size(size: int) -> str:
    if size == 0:
        return "-"
    for unit, name in ((1024**2, "MiB"), (1024, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


def main() -> None:
    """Runs one rank. Users call `python -m tenfold.bench`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    rank_main(options.rank, options.folder)


if __name__ == "__main__":
    main()
