"""The ranks of a benchmark: processes on this host that measure together and write their results."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch.distributed as dist

Item = TypeVar("Item")

RANK_PATIENCE = timedelta(seconds=60)  # of a collective: a rank that lost its peers exits by itself
JOB_PATIENCE = 1800.0  # seconds


def run(module: str, settings: Any, ranks: int) -> list[dict[str, Any]]:
    """Runs `module` as a program on every rank with `settings`, a dataclass. Returns its rows."""
    with tempfile.TemporaryDirectory(prefix="tenfold-bench-") as name:
        folder = Path(name)
        (folder / "settings.json").write_text(json.dumps(dataclasses.asdict(settings)))
        _start_and_wait([sys.executable, "-m", module, "--folder", name, "--rank"], ranks)
        return json.loads((folder / "rows.json").read_text())


def _start_and_wait(command: list[str], ranks: int) -> None:
    """Starts the ranks, and ends them all if one fails."""
    environment = {
        "OMP_NUM_THREADS": "1",  # one core for each rank, if there are enough
        "GLOO_SOCKET_IFNAME": "lo",
    } | os.environ
    processes: list[subprocess.Popen[bytes]] = []
    deadline = time.monotonic() + JOB_PATIENCE
    try:
        for rank in range(ranks):
            processes.append(subprocess.Popen([*command, str(rank)], env=environment))
        for rank, process in enumerate(processes):
            code = process.wait(deadline - time.monotonic())
            if code != 0:
                raise RuntimeError(
                    f"rank {rank} of the benchmark exited with code {code}; see its output above"
                )
    finally:
        for process in processes:
            process.kill()
            process.wait()


def be_a_rank(
    rank: int,
    ranks: int,
    folder: Path,
    backends: list[str],
    measure: Callable[[dict[str, dist.ProcessGroup]], Iterable[Any]],
) -> None:
    """Runs one rank: measures with a group of every backend. Rank 0 writes the rows."""
    import torch
    import torch.distributed as dist

    import tenfold.torch  # noqa: F401, registers the backend

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group(backends[0], store=store, rank=rank, world_size=ranks, timeout=RANK_PATIENCE)
    rows = list(measure({backend: dist.new_group(backend=backend) for backend in backends}))
    if rank == 0:
        (folder / "rows.json").write_text(json.dumps([dataclasses.asdict(row) for row in rows]))
    dist.destroy_process_group()


def settings_of(folder: Path) -> dict[str, Any]:
    """Returns the settings of this rank."""
    return json.loads((folder / "settings.json").read_text())


def slowest_rank(times: list[float]) -> list[float]:
    """Returns, for each time, that of the slowest rank."""
    import torch
    import torch.distributed as dist

    slowest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.tolist()


def rotated(items: list[Item], turn: int) -> list[Item]:
    """Rotates the list, so that another item is first each turn."""
    turn %= len(items)
    return items[turn:] + items[:turn]
