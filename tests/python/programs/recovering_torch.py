"""A rank that trains with PyTorch and goes on when others die.

Its arguments are those of recovering.py; CASE has the kind of the model in front, as in `ours/one`.
"""

import json
import os
import signal
import sys
from pathlib import Path

import tenfold.torch
import torch
from tenfold.recovery import Members
from tenfold.torch.recovery import Training
from torch import nn

SIZE, STEPS = 4, 24

DEATHS = {
    "undisturbed": [],
    "one": [(1, 7)],
    "rank 0": [(0, 7)],
    "before the first update": [(2, 0)],
    "one after the other": [(3, 5), (2, 6), (3, 20)],
}

WRAPS = {
    "torch": nn.parallel.DistributedDataParallel,
    "ours": tenfold.torch.DistributedDataParallel,
}


def main() -> None:
    host, port, seat, kind, folder = sys.argv[1:]
    wrap, case = kind.split("/")
    store = tenfold.TCPStore(host, int(port))
    if seat == "spare":
        members = Members.join(store, timeout=60)
    else:
        members = Members.connect(store, int(seat), SIZE, replaced=True, timeout=60)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(20, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 1))
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.7)
    training = Training(module, optimizer, scheduler, wrap=WRAPS[wrap], members=members)
    losses: dict[int, float] = {}

    def step(number: int) -> None:
        rank = torch.distributed.get_rank()
        marker = Path(folder, f"dead-{rank}-{number}")
        if (rank, number) in DEATHS[case] and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        generator = torch.Generator().manual_seed(1000 * rank + number)
        inputs = torch.randn(16, 20, generator=generator)
        loss = (training.model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        losses[number] = float(mean)

    training.run(step, steps=STEPS, commit_every=2)
    weights = [parameter.tolist() for parameter in module.parameters()]
    result = {
        "weights": weights,
        "losses": losses,
        "rate": scheduler.get_last_lr(),
        "joined": members.has_joined,
    }
    Path(folder, f"rank-{torch.distributed.get_rank()}.json").write_text(json.dumps(result))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
