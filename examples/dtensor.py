"""Tensor parallelism with DTensor: matrices are sharded within pairs of ranks, batches across the pairs.

    tenfold run -n 2 examples/dtensor.py
    tenfold run -n 4 examples/dtensor.py
    torchrun --nproc-per-node 4 examples/dtensor.py --backend gloo

The program is written as if one process had all the data. The placement of a tensor is given once, when it is
made: the ranks form a mesh with two columns; matrices are sharded over the columns, batches over the rows
(with two ranks there is one row). DTensor calls the collectives that this requires.

A network learns whether x₀·x₁ + x₂·x₃ is positive.
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

WIDTH = 128

# One placement for each dimension of the mesh: (over its rows, over its columns).
CUT_BATCH = (Shard(0), Replicate())
CUT_OUTPUTS = (Replicate(), Shard(1))
CUT_INPUTS = (Replicate(), Shard(0))


def products(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Makes samples of four numbers, each with the label 1 or -1."""
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] * x[:, 1] + x[:, 2] * x[:, 3]).sign()


class Perceptron(nn.Module):
    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(0)
        # A matrix sharded by outputs may be followed by one sharded by inputs without communication. Each
        # rank then has one summand of the product, and DTensor adds them up.
        self.up = nn.Parameter(distribute_tensor(torch.randn(4, WIDTH) / 2, mesh, CUT_OUTPUTS))
        self.offset = nn.Parameter(distribute_tensor(torch.randn(1, WIDTH), mesh, CUT_OUTPUTS))
        self.down = nn.Parameter(distribute_tensor(torch.randn(WIDTH, 1) / WIDTH**0.5, mesh, CUT_INPUTS))

    def forward(self, x: DTensor) -> DTensor:
        return (torch.relu(x @ self.up + self.offset) @ self.down).redistribute(placements=CUT_BATCH)


def train(epochs: int, mesh: DeviceMesh) -> nn.Module:
    model = Perceptron(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    inputs, labels = products(2048, seed=1)
    for epoch in range(epochs):
        losses = []
        for x, y in zip(inputs.split(128), labels.split(128), strict=True):
            x, y = distribute_tensor(x, mesh, CUT_BATCH), distribute_tensor(y, mesh, CUT_BATCH)
            loss = nn.functional.softplus(-y * model(x).squeeze(1)).mean()
            optimizer.zero_grad()
            loss.backward()
            for parameter in model.parameters():
                # Each row of the mesh has the gradient of its part of the batch. This combines them.
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
            optimizer.step()
            losses.append(loss.detach().full_tensor())
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {torch.stack(losses).mean():.4f}", flush=True)
    return model


@torch.no_grad()
def accuracy(model: nn.Module, mesh: DeviceMesh) -> float:
    x, y = products(1000, seed=2)
    outputs = model(distribute_tensor(x, mesh, CUT_BATCH)).full_tensor().squeeze(1)
    return (outputs.sign() == y).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description="trains a small network with DTensor")
    parser.add_argument("--backend", choices=["tenfold", "gloo"], default="tenfold")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--save", metavar="FILE", help="write the parameters here; `{rank}` becomes the rank")
    options = parser.parse_args()

    if options.backend == "tenfold":
        import tenfold.torch  # noqa: F401 (registers the backend; where tenfold is installed, PyTorch finds it)
    dist.init_process_group(options.backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    if world % 2:
        parser.error(f"the mesh has two columns, so the number of ranks must be even; it is {world}")
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("rows", "columns"))
    model = train(options.epochs, mesh)
    share = accuracy(model, mesh)
    if rank == 0:
        print(f"accuracy {share:.1%}", flush=True)
    parameters = {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}
    if options.save:
        torch.save(parameters, options.save.format(rank=rank))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
