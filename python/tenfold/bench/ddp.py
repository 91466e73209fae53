"""How long a step of DDP takes, and how much of it is communication that computation does not hide.

    python -m tenfold.bench ddp --against gloo

This measures tenfold's DistributedDataParallel, PyTorch's on the backend `tenfold`, and PyTorch's on the
peer. One job measures all of them by turns, so that other load on the machine affects all of them. A round is
a few steps of computation alone (`no_sync`), then as many with averaged gradients. A step is forward and
backward; its time is that of the slowest rank. *Exposed* is the difference of the medians of the two.

The computation is the same for all, so its time is taken from all rounds together.

PyTorch is imported only in the ranks.
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

RANKS = [2, 4]  # by default
WARM_UP_STEPS = 3  # DDP reorders its buckets after the first
ROUND_MS = 50.0  # small models take several steps a round, so that the common start costs little


@dataclass(frozen=True)
class Kind:
    """A DistributedDataParallel, tenfold's or PyTorch's, and a backend."""

    ddp: str
    backend: str

    @property
    def title(self) -> str:
        return "tenfold's DDP" if self.ddp == "tenfold" else f"PyTorch's on {self.backend}"


OURS, PLUGGED_IN = Kind("tenfold", "tenfold"), Kind("torch", "tenfold")


@dataclass(frozen=True)
class Row:
    """The times of one kind of DDP with one model, as medians over the rounds."""

    model_mb: int
    ranks: int
    ddp: str
    backend: str
    compute_ms: float
    step_ms: float
    exposed_share: float  # of the step

    @property
    def kind(self) -> Kind:
        return Kind(self.ddp, self.backend)

    @property
    def exposed_ms(self) -> float:
        return max(0.0, self.step_ms - self.compute_ms)


@dataclass(frozen=True)
class Settings:
    """The settings of all ranks of a job."""

    ranks: int
    megabytes: list[int]
    against: str
    rounds: int
    bucket_views: bool = False
    shared_hook: bool = False

    def kinds(self) -> list[Kind]:
        return list(dict.fromkeys([OURS, PLUGGED_IN, Kind("torch", self.against)]))


@dataclass(frozen=True)
class Shape:
    """A perceptron with matrices of one size."""

    layers: int
    width: int
    batch: int

    @classmethod
    def of(cls, megabytes: int) -> Shape:
        """A shape with about `megabytes` of float32 parameters. The batch size sets the computation."""
        layers = 4 if megabytes < 10 else 6
        width = round((megabytes * 1e6 / 4 / layers) ** 0.5)
        return cls(layers, width, BATCHES.get(megabytes, 64))


# Chosen by counting operations, so that computation and gradients are in proportion; not tuned.
BATCHES = {1: 64, 25: 160, 100: 48}


def run(
    ranks: int,
    megabytes: list[int],
    against: str,
    rounds: int,
    *,
    bucket_views: bool = False,
    shared_hook: bool = False,
) -> list[Row]:
    """Measures every model with every kind of DDP, in one job of processes on this host.

    `shared_hook` gives PyTorch's DDP on `tenfold` the hook that moves its buckets to shared memory. The
    buckets of tenfold's own DDP are always there.
    """
    settings = Settings(ranks, megabytes, against, rounds, bucket_views, shared_hook)
    return [Row(**row) for row in job.run("tenfold.bench.ddp", settings, ranks)]


def rank_main(rank: int, folder: Path) -> None:
    """Runs one rank: measures every model, one after the other."""
    settings = Settings(**job.settings_of(folder))

    def measure_all(groups: dict[str, dist.ProcessGroup]) -> list[Row]:
        return [row for size in settings.megabytes for row in measure(size, groups, settings)]

    backends = list(dict.fromkeys([settings.against, "tenfold"]))
    job.be_a_rank(rank, settings.ranks, folder, backends, measure_all)


def measure(size: int, groups: dict[str, dist.ProcessGroup], settings: Settings) -> list[Row]:
    """Measures one model with every kind of DDP, with rounds that take turns."""
    import torch

    shape = Shape.of(size)
    models = {kind: replicated(shape, kind, groups[kind.backend], settings) for kind in settings.kinds()}
    batch = torch.randn(shape.batch, shape.width)
    steps = warm_up(list(models.values()), batch)
    computing: list[float] = []
    stepping: dict[Kind, list[float]] = {kind: [] for kind in models}
    for turn in range(settings.rounds):
        for kind in job.rotated(list(models), turn):  # another kind is first each time
            model = models[kind]
            computing.append(milliseconds_a_step(model, batch, steps, model.no_sync()))
            stepping[kind].append(milliseconds_a_step(model, batch, steps, nullcontext()))
    compute_ms = statistics.median(job.slowest_rank(computing))
    medians = {kind: statistics.median(job.slowest_rank(rounds)) for kind, rounds in stepping.items()}
    return [
        Row(
            size,
            settings.ranks,
            kind.ddp,
            kind.backend,
            compute_ms,
            step_ms,
            max(0.0, 1 - compute_ms / step_ms),
        )
        for kind, step_ms in medians.items()
    ]


def replicated(
    shape: Shape, kind: Kind, group: dist.ProcessGroup, settings: Settings
) -> DistributedDataParallel:
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import tenfold.torch

    wrapper = tenfold.torch.DistributedDataParallel if kind == OURS else DistributedDataParallel
    layers: list[nn.Module] = []
    for _ in range(shape.layers):
        layers += [nn.Linear(shape.width, shape.width, bias=False), nn.ReLU()]
    model = wrapper(
        nn.Sequential(*layers), process_group=group, gradient_as_bucket_view=settings.bucket_views
    )
    if settings.shared_hook and kind == PLUGGED_IN:
        model.register_comm_hook(group, tenfold.torch.shared_buckets_hook)
    return model


def warm_up(models: list[DistributedDataParallel], batch: Tensor) -> int:
    """Warms up until buckets are ordered. Returns how many steps fill a round, the same on all ranks."""
    for model in models:
        milliseconds_a_step(model, batch, WARM_UP_STEPS, nullcontext())
    computing = [milliseconds_a_step(model, batch, WARM_UP_STEPS, model.no_sync()) for model in models]
    return max(1, round(ROUND_MS / min(job.slowest_rank(computing))))


def milliseconds_a_step(
    model: DistributedDataParallel, batch: Tensor, steps: int, synchronisation: AbstractContextManager[None]
) -> float:
    """Measures this rank, after a barrier."""
    import torch.distributed as dist

    dist.barrier()  # always of the same group, whichever backend is measured
    started = time.perf_counter()
    with synchronisation:
        for _ in range(steps):
            model.zero_grad()
            model(batch).sum().backward()
    return (time.perf_counter() - started) * 1000 / steps


def table(rows: list[Row], against: str) -> str:
    """Formats a line for each model, with columns for each kind. The last ones are the peer's ratios."""
    kinds = list(dict.fromkeys(row.kind for row in rows))
    peer = Kind("torch", against)
    compared = [kind for kind in kinds if kind != peer]
    titles = "".join(f"   {kind.title:^27}" for kind in kinds)
    columns = f"   {'step':>10} {'exposed':>10} {'share':>5}" * len(kinds)
    ratios = "".join(f" {'ours' if kind == OURS else 'plug-in':>8}" for kind in compared)
    lines = [
        f"{'':>25}{titles}   {against} exposes, against".rstrip(),
        f"{'model':>8} {'ranks':>5} {'compute':>10}{columns}  {ratios}".rstrip(),
    ]
    found = {(row.ranks, row.model_mb, row.kind): row for row in rows}
    for ranks, megabytes in dict.fromkeys((row.ranks, row.model_mb) for row in rows):
        measured = {kind: found[ranks, megabytes, kind] for kind in kinds}
        line = f"{megabytes:>5} MB {ranks:>5} {measured[kinds[0]].compute_ms:>7.2f} ms"
        for row in measured.values():
            line += f"   {row.step_ms:>7.2f} ms {row.exposed_ms:>7.2f} ms {row.exposed_share:>5.0%}"
        line += "  "
        for kind in compared:
            line += f" {ratio(measured[peer], measured[kind]):>8}"
        lines.append(line)
    return "\n".join(lines)


def ratio(peer: Row, row: Row) -> str:
    """Returns how many times as much communication the peer exposes."""
    return f"{peer.exposed_ms / row.exposed_ms:.2f}x" if row.exposed_ms > 0 else "-"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tenfold.bench.ddp",
        description="measure steps of DistributedDataParallel, tenfold's and PyTorch's",
    )
    parser.add_argument(
        "--against", metavar="BACKEND", default="gloo", help="compare with this (default: gloo)"
    )
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=RANKS, help="processes on this host (default: 2 4)"
    )
    parser.add_argument(
        "--megabytes", type=int, nargs="+", default=[1, 25, 100], help="sizes of models (default: 1 25 100)"
    )
    parser.add_argument("--rounds", type=int, default=15, help="of each kind (default: 15)")
    parser.add_argument("--bucket-views", action="store_true", help="with gradient_as_bucket_view")
    parser.add_argument(
        "--hook", choices=["shared"], help="shared: PyTorch's DDP on tenfold has its buckets in shared memory"
    )
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)  # this process is one of the ranks …
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # … and finds its settings here
    options = parser.parse_args(arguments)
    if options.rank is not None:
        rank_main(options.rank, options.folder)
        return
    for ranks in options.ranks:
        rows = run(
            ranks,
            options.megabytes,
            options.against,
            options.rounds,
            bucket_views=options.bucket_views,
            shared_hook=options.hook == "shared",
        )
        print(table(rows, options.against), "\n", flush=True)


if __name__ == "__main__":
    main()
