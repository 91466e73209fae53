"""Trains as PyTorch's elastic programs do: from its checkpoint, on however many ranks there are this time.

A small model is trained with DDP by stock PyTorch code, for `--steps` or until the file `--until` is there.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel


@record
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1_000_000_000)
    parser.add_argument("--until", type=Path)
    parser.add_argument("--fail-at", type=int, help="rank 1 raises here, in the first round")
    options = parser.parse_args()

    if options.backend == "tenfold":
        import tenfold.torch  # noqa: F401
    dist.init_process_group(options.backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])

    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    step = 0
    if options.checkpoint.exists():
        saved = torch.load(options.checkpoint)
        model.load_state_dict(saved["model"])
        step = saved["step"]
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.01)
    print(f"round {attempt}: rank {rank} of {world} begins at step {step}", flush=True)

    while step < options.steps:
        if attempt == 0 and rank == 1 and step == options.fail_at:
            raise ValueError(f"rank 1 was told to fail at step {step}")
        generator = torch.Generator().manual_seed(step)
        points = torch.randn(8, 4, generator=generator)
        loss = (replica(points) - points.sum(dim=1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        # All ranks look at the same moment, through rank 0's eyes, and so agree.
        over = torch.tensor([int(options.until is not None and options.until.exists())])
        dist.broadcast(over, 0)
        if rank == 0:
            unfinished = options.checkpoint.with_suffix(f".{attempt}")
            torch.save({"model": model.state_dict(), "step": step}, unfinished)
            unfinished.replace(options.checkpoint)
        if over.item():
            break
    if rank == 0:
        print(f"done: {world} ranks", flush=True)
    dist.destroy_process_group()


main()
