"""What a call through `torch.distributed` costs if it moves no data: a group of one rank."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta

BATCH = 200
PEER_PATIENCE = timedelta(seconds=30)


@dataclass(frozen=True)
class Row:
    """The minimum of some batches: the time on an otherwise idle machine."""

    backend: str
    call: str
    least_us: float


def run(backends: list[str], rounds: int) -> list[Row]:
    """Measures in this process, with backends by turns."""
    import torch
    import torch.distributed as dist

    import tenfold.torch  # noqa: F401, registers the backend

    dist.init_process_group(backends[0], store=dist.HashStore(), rank=0, world_size=1, timeout=PEER_PATIENCE)
    groups = {backend: dist.new_group(backend=backend) for backend in backends}
    tensor = torch.zeros(2)
    calls = {
        (backend, name): call
        for backend, group in groups.items()
        for name, call in {
            "all_reduce": lambda group=group: dist.all_reduce(tensor, group=group),
            "all_reduce, async": lambda group=group: dist.all_reduce(
                tensor, group=group, async_op=True
            ).wait(),
            "barrier": lambda group=group: dist.barrier(group=group),
        }.items()
    }
    least = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            started = time.perf_counter()
            for _ in range(BATCH):
                call()
            least[name] = min(least[name], (time.perf_counter() - started) / BATCH * 1e6)
    dist.destroy_process_group()
    return [Row(backend, name, us) for (backend, name), us in least.items()]


def table(rows: list[Row]) -> str:
    lines = [f"{'one rank':<20} {'backend':<10} {'least':>11}"]
    lines += [f"{row.call:<20} {row.backend:<10} {row.least_us:>8.1f} µs" for row in rows]
    return "\n".join(lines)
