"""Data parallelism: every rank has the whole model and a share of the data, and DDP averages the gradients.

    tenfold run -n 2 examples/ddp.py
    torchrun --nproc-per-node 2 examples/ddp.py --backend gloo

A small network learns to distinguish two interleaved half-moons. Only the name of the backend is specific to
tenfold.
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def two_moons(count: int, seed: int) -> TensorDataset:
    """Makes points near two interleaved half circles. The label says which of the two."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.arange(count) % 2
    angle = torch.rand(count, generator=generator) * torch.pi
    upper = torch.stack([angle.cos(), angle.sin()], dim=1)
    lower = torch.stack([1 - angle.cos(), 0.5 - angle.sin()], dim=1)
    points = torch.where(label.bool().unsqueeze(1), lower, upper)
    return TensorDataset(points + 0.1 * torch.randn(count, 2, generator=generator), label)


def mean_over_ranks(value: Tensor) -> float:
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def train(epochs: int, rank: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    replica = DistributedDataParallel(model)  # from here on, `backward` averages the gradients of all ranks
    optimizer = torch.optim.AdamW(replica.parameters(), lr=0.01)
    data = two_moons(2048, seed=1)
    share = DistributedSampler(data, seed=2)
    loader = DataLoader(data, batch_size=64, sampler=share)
    for epoch in range(epochs):
        share.set_epoch(epoch)  # a different order in each epoch
        losses = []
        for points, labels in loader:
            loss = nn.functional.cross_entropy(replica(points), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        loss = mean_over_ranks(torch.stack(losses).mean())
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {loss:.4f}", flush=True)
    return model


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    points, labels = two_moons(1000, seed=3).tensors
    return (model(points).argmax(dim=1) == labels).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description="trains a small network with DistributedDataParallel")
    parser.add_argument("--backend", choices=["tenfold", "gloo"], default="tenfold")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--save", metavar="FILE", help="write the parameters here; `{rank}` becomes the rank")
    options = parser.parse_args()

    if options.backend == "tenfold":
        import tenfold.torch  # noqa: F401 (registers the backend; where tenfold is installed, PyTorch finds it)
    dist.init_process_group(options.backend)
    rank = dist.get_rank()
    model = train(options.epochs, rank)
    if rank == 0:
        print(f"accuracy {accuracy(model):.1%}", flush=True)
    if options.save:
        torch.save(model.state_dict(), options.save.format(rank=rank))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
