"""How long a step of PyTorch's DDP takes, and how much of it is communication that no computation hides.

    python -m tenfold.bench.ddp --against gloo

One job measures all backends: their groups exist side by side, and the rounds of one alternate with those of
the others, so that whatever else the machine does hits all of them. A round is a few steps computed alone
(`no_sync`), then as many with their gradients averaged; a step is forward and backward, and takes what its
slowest rank needs. *Exposed* is the difference of the medians of the two.

The computation is the same under every backend, so all rounds of all backends together say what it costs.

PyTorch is imported in the ranks alone.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tenfold.bench import job

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor
    from torch.nn.parallel import DistributedDataParallel

WARM_UP_STEPS = 3  # DDP orders its buckets anew after the first
ROUND_MS = 50.0  # small models take several steps a round, so that starting together costs little of it


@dataclass(frozen=True)
class Row:
    """What one backend did with one model. Times are medians over the rounds."""

    model_mb: int
    ranks: int
    backend: str
    compute_ms: float
    step_ms: float
    exposed_share: float  # of the step

    @property
    def exposed_ms(self) -> float:
        return self.step_ms - self.compute_ms


@dataclass(frozen=True)
class Settings:
    """What all ranks of a job are told."""

    ranks: int
    megabytes: list[int]
    backends: list[str]
    rounds: int
    bucket_views: bool = False
    shared_hook: bool = False


@dataclass(frozen=True)
class Shape:
    """A perceptron with matrices of one size."""

    layers: int
    width: int
    batch: int

    @classmethod
    def of(cls, megabytes: int) -> Shape:
        """About `megabytes` of float32 parameters; the batch makes the computation, not the gradients."""
        layers = 4 if megabytes < 10 else 6
        width = round((megabytes * 1e6 / 4 / layers) ** 0.5)
        return cls(layers, width, BATCHES.get(megabytes, 64))


# Chosen by counting operations, so that computation and gradients are in proportion; not tuned by measuring.
BATCHES = {1: 64, 25: 160, 100: 48}


def run(
    ranks: int,
    megabytes: list[int],
    backends: list[str],
    rounds: int,
    *,
    bucket_views: bool = False,
    shared_hook: bool = False,
) -> list[Row]:
    """Measures every model under every backend, in one job of processes on this host.

    `shared_hook` gives the backend `tenfold` its hook that moves DDP's buckets into shared memory.
    """
    settings = Settings(ranks, megabytes, backends, rounds, bucket_views, shared_hook)
    return [Row(**row) for row in job.run("tenfold.bench.ddp", settings, ranks)]


def rank_main(rank: int, folder: Path) -> None:
    """One rank: measures every model, one after the other."""
    settings = Settings(**job.settings_of(folder))

    def measure_all(groups: dict[str, dist.ProcessGroup]) -> list[Row]:
        return [row for size in settings.megabytes for row in measure(size, groups, settings)]

    job.be_a_rank(rank, settings.ranks, folder, settings.backends, measure_all)


def measure(size: int, groups: dict[str, dist.ProcessGroup], settings: Settings) -> list[Row]:
    """One model under every backend, with rounds that take turns."""
    import torch

    shape = Shape.of(size)
    models = {backend: replicated(shape, group, settings) for backend, group in groups.items()}
    batch = torch.randn(shape.batch, shape.width)
    steps = warm_up(list(models.values()), batch)
    computing: list[float] = []
    stepping: dict[str, list[float]] = {backend: [] for backend in models}
    for turn in range(settings.rounds):
        for backend in job.rotated(list(models), turn):  # nobody always comes first
            model = models[backend]
            computing.append(milliseconds_a_step(model, batch, steps, model.no_sync()))
            stepping[backend].append(milliseconds_a_step(model, batch, steps, nullcontext()))
    compute_ms = statistics.median(job.slowest_rank(computing))
    medians = {backend: statistics.median(job.slowest_rank(rounds)) for backend, rounds in stepping.items()}
    return [
        Row(size, settings.ranks, backend, compute_ms, step_ms, max(0.0, 1 - compute_ms / step_ms))
        for backend, step_ms in medians.items()
    ]


def replicated(shape: Shape, group: dist.ProcessGroup, settings: Settings) -> DistributedDataParallel:
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    layers: list[nn.Module] = []
    for _ in range(shape.layers):
        layers += [nn.Linear(shape.width, shape.width, bias=False), nn.ReLU()]
    model = DistributedDataParallel(
        nn.Sequential(*layers), process_group=group, gradient_as_bucket_view=settings.bucket_views
    )
    if settings.shared_hook and dist.get_backend(group) == "tenfold":
        import tenfold.torch

        model.register_comm_hook(group, tenfold.torch.shared_buckets_hook)
    return model


def warm_up(models: list[DistributedDataParallel], batch: Tensor) -> int:
    """Until everything has its memory and its order; how many steps fill a round, the same on all ranks."""
    for model in models:
        milliseconds_a_step(model, batch, WARM_UP_STEPS, nullcontext())
    computing = [milliseconds_a_step(model, batch, WARM_UP_STEPS, model.no_sync()) for model in models]
    return max(1, round(ROUND_MS / min(job.slowest_rank(computing))))


def milliseconds_a_step(
    model: DistributedDataParallel, batch: Tensor, steps: int, synchronisation: AbstractContextManager[None]
) -> float:
    """Of this rank, after all have come together."""
    import torch.distributed as dist

    dist.barrier()  # of the same group, whichever backend is measured
    started = time.perf_counter()
    with synchronisation:
        for _ in range(steps):
            model.zero_grad()
            model(batch).sum().backward()
    return (time.perf_counter() - started) * 1000 / steps


def table(rows: list[Row], against: str) -> str:
    """One line a row; the last column compares its exposed communication with that of `against`."""
    columns = ("compute", "step", "exposed")
    header = f"{'model':>8} {'ranks':>5}  {'backend':<10}" + "".join(f" {name:>10}" for name in columns)
    lines = [f"{header} {'share':>6}  {against} exposes"]
    for row in rows:
        peer = next((r for r in rows if (r.model_mb, r.backend) == (row.model_mb, against)), None)
        line = f"{row.model_mb:>5} MB {row.ranks:>5}  {row.backend:<10} {row.compute_ms:>7.2f} ms"
        line += f" {row.step_ms:>7.2f} ms {row.exposed_ms:>7.2f} ms {row.exposed_share:>6.0%}"
        if peer and peer is not row and row.exposed_ms > 0:
            line += f"  {peer.exposed_ms / row.exposed_ms:.2f} times as much"
        lines.append(line)
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tenfold.bench.ddp", description="measures the steps of DistributedDataParallel"
    )
    parser.add_argument(
        "--against", metavar="BACKEND", default="gloo", help="compare with this (default: gloo)"
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes on this host (default: 2)")
    parser.add_argument(
        "--megabytes", type=int, nargs="+", default=[1, 25, 100], help="sizes of models (default: 1 25 100)"
    )
    parser.add_argument("--rounds", type=int, default=15, help="of each backend (default: 15)")
    parser.add_argument("--bucket-views", action="store_true", help="with gradient_as_bucket_view")
    parser.add_argument(
        "--hook", choices=["shared"], help="shared: tenfold moves DDP's buckets into shared memory"
    )
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)  # this process is one of the ranks …
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # … and finds its settings here
    options = parser.parse_args(arguments)
    if options.rank is not None:
        rank_main(options.rank, options.folder)
        return
    backends = list(dict.fromkeys([options.against, "tenfold"]))
    rows = run(
        options.ranks,
        options.megabytes,
        backends,
        options.rounds,
        bucket_views=options.bucket_views,
        shared_hook=options.hook == "shared",
    )
    print(table(rows, options.against))


if __name__ == "__main__":
    main()
