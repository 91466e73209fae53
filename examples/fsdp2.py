"""Sharded data parallelism: every rank has a part of each layer, and FSDP2 gathers a layer while it is used.

    tenfold run -n 2 examples/fsdp2.py
    torchrun --nproc-per-node 2 examples/fsdp2.py --backend gloo

A residual network learns to read the digits of a noisy seven-segment display. Parameters, gradients and the
optimizer's state are all sharded over the ranks, so that larger models fit into memory.
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

#         ─1─
#        2   3
#         ─4─
#        5   6
#         ─7─
SEGMENTS = ["123567", "36", "13457", "13467", "2346", "12467", "124567", "136", "1234567", "123467"]


def digits(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Makes the brightness of the seven segments, and the digit that they show."""
    lit = torch.tensor([[float(str(segment) in digit) for segment in range(1, 8)] for digit in SEGMENTS])
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    return lit[labels] + 0.25 * torch.randn(count, 7, generator=generator), labels


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def sharded_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 48), Block(48), Block(48), nn.Linear(48, 10))
    for layer in model:
        fully_shard(layer)  # each layer is gathered before its use and freed after it
    return fully_shard(model)


def train(epochs: int, rank: int, world: int) -> nn.Module:
    model = sharded_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)  # of this rank's shards only
    inputs, labels = digits(2048, seed=1)
    mine = slice(rank, None, world)
    for epoch in range(epochs):
        losses = []
        for x, y in zip(inputs[mine].split(64), labels[mine].split(64), strict=True):
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the norm over all shards of all ranks
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        loss = torch.stack(losses).mean()
        dist.all_reduce(loss)
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {loss.item() / world:.4f}", flush=True)
    return model


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """Must be called on all ranks: using the model gathers its layers, which needs all ranks."""
    inputs, labels = digits(1000, seed=2)
    return (model(inputs).argmax(dim=1) == labels).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description="trains a small network with fully_shard")
    parser.add_argument("--backend", choices=["tenfold", "gloo"], default="tenfold")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--save", metavar="FILE", help="write the parameters here; `{rank}` becomes the rank")
    options = parser.parse_args()

    if options.backend == "tenfold":
        import tenfold.torch  # noqa: F401 (registers the backend; where tenfold is installed, PyTorch finds it)
    dist.init_process_group(options.backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    model = train(options.epochs, rank, world)
    share = accuracy(model)
    if rank == 0:
        print(f"accuracy {share:.1%}", flush=True)
    parameters = {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}
    if options.save:
        torch.save(parameters, options.save.format(rank=rank))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
