"""What every training case is made of: a place to run in, a model, data, and steps.

A case is a function from a `Scene` to named tensors and numbers. It runs once for each backend, in the same
two processes, and must compute the same bits each time: whatever is random comes from a seed set before the
case. Each rank has data of its own, so that a collective which moves nothing is noticed.
"""

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (PyTorch's own name for it)
from torch.nn.parallel import DistributedDataParallel

STEPS = 4
FEATURES = 16
CLASSES = 5

Results = dict[str, Tensor | float | str]


@dataclass(frozen=True)
class Scene:
    """Where one rank runs one case."""

    rank: int
    world: int
    folder: Path  # for this case and backend alone, the same on all ranks
    ddp: type[DistributedDataParallel] = DistributedDataParallel  # whose cases of DDP are to use


Case = Callable[[Scene], Results]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    """Adds a function to the list of cases, under its own name."""
    CASES[function.__name__] = function
    return function


def cases_of(*modules: str) -> dict[str, Case]:
    """Those that these modules define, in their order."""
    for module in modules:
        importlib.import_module(module)
    return {name: function for name, function in CASES.items() if function.__module__ in modules}


def seeded() -> None:
    """Every rank builds the same model: some wrappers rely on it, the others have nothing to hide behind."""
    torch.manual_seed(2026)


def perceptron(width: int = 32) -> nn.Sequential:
    seeded()
    return nn.Sequential(
        nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES)
    )


def batches(scene: Scene, count: int = STEPS, size: int = 8) -> Iterable[tuple[Tensor, Tensor]]:
    """This rank's own inputs and labels."""
    generator = torch.Generator().manual_seed(100 + scene.rank)
    for _ in range(count):
        inputs = torch.randn(size, FEATURES, generator=generator)
        yield inputs, torch.randint(CLASSES, (size,), generator=generator)


def train(
    model: nn.Module,
    scene: Scene,
    optimizer: torch.optim.Optimizer | None = None,
    before_update: Callable[[], Tensor] | None = None,
) -> Results:
    """A few steps; the losses, what `before_update` returned, and all that the model then holds."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    results: Results = {}
    for step, (inputs, labels) in enumerate(batches(scene)):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs).float(), labels)
        loss.backward()
        if before_update:
            results[f"before update {step}"] = before_update()
        optimizer.step()
        results[f"loss {step}"] = loss.item()
    return results | contents(model)


def contents(model: nn.Module) -> Results:
    """Parameters with their gradients, and buffers."""
    held = dict(model.named_parameters()) | dict(model.named_buffers())
    gradients = {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    layouts = {f"layout of {name}": str(gradient.layout) for name, gradient in gradients.items()}
    return held | gradients | layouts
