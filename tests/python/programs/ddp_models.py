"""Models under DDP, each with many options and trained in many ways. All combinations are cases.

A model brings the options without which DDP cannot train it; a way of training is a function from a
replicated model to what came of it. Buckets are small, so that each model has several.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from training_case import CASES, CLASSES, FEATURES, Results, Scene, batches, contents, perceptron, seeded
from training_ddp import SMALL_BUCKET_MB, Bag, Fork, normalised

WORDS = 40


class Transformer(nn.Module):
    """Two encoder layers between an embedding and a head that is the same matrix."""

    def __init__(self) -> None:
        super().__init__()
        seeded()
        width = 16
        self.words = nn.Embedding(WORDS, width)
        self.places = nn.Parameter(torch.randn(FEATURES, width) * 0.1)
        layer = nn.TransformerEncoderLayer(width, nhead=2, dim_feedforward=32, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, inputs: Tensor) -> Tensor:
        words = (inputs.abs() * 20).long().clamp_(max=WORDS - 1)
        return self.head(self.layers(self.words(words) + self.places)).mean(dim=1)[:, :CLASSES]


class Mixed(nn.Module):
    """Parameters of three dtypes, in turns."""

    def __init__(self) -> None:
        super().__init__()
        seeded()
        self.first = nn.Linear(FEATURES, 16).double()
        self.second = nn.Linear(16, 16).bfloat16()
        self.third = nn.Linear(16, 16)
        self.fourth = nn.Linear(16, CLASSES).double()

    def forward(self, inputs: Tensor) -> Tensor:
        inner = self.second(self.first(inputs.double()).relu().bfloat16())
        return self.fourth(self.third(inner.float()).relu().double())


# What makes each model, on which rank, and the options that DDP needs for it.
MODELS: dict[str, tuple[Callable[[int], nn.Module], dict[str, object]]] = {
    "perceptron": (lambda rank: perceptron(), {}),
    "transformer": (lambda rank: Transformer(), {}),
    "fork": (Fork, {"find_unused_parameters": True}),
    "bag": (lambda rank: Bag(), {}),
    "batch_norm": (lambda rank: normalised(), {}),
    "mixed": (lambda rank: Mixed(), {}),
}

OPTIONS: dict[str, dict[str, object]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "static_views": {"static_graph": True, "gradient_as_bucket_view": True},
    "one_bucket": {"bucket_cap_mb": 25},
    "defaults": {"bucket_cap_mb": None},
    "list_of_caps": {"bucket_cap_mb": None, "bucket_cap_mb_list": [0.0005, 0.002, 0.001]},
    "batched_copies": {"batched_grad_copy": True},
    "lazy_buckets": {"lazy_bucket_allocation": True},
    "searching": {"find_unused_parameters": True},
    "searching_views": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
}

Way = Callable[[nn.Module, Scene, torch.optim.Optimizer], Results]


def loss_of(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs).float(), labels)


def plainly(model: nn.Module, scene: Scene, optimizer: torch.optim.Optimizer, keep: bool = False) -> Results:
    results: Results = {}
    for step, (inputs, labels) in enumerate(batches(scene, count=5)):
        optimizer.zero_grad(set_to_none=not keep)
        loss = loss_of(model, inputs, labels)
        loss.backward()
        optimizer.step()
        results[f"loss {step}"] = loss.item()
    return results


def without_sync(
    model: nn.Module, scene: Scene, optimizer: torch.optim.Optimizer, keep: bool = False
) -> Results:
    """A batch with all ranks, as a static graph needs it, then three times two alone and one with all."""
    for step, (inputs, labels) in enumerate(batches(scene, count=10)):
        if step % 3 > 0:
            with model.no_sync():
                loss_of(model, inputs, labels).backward()
        else:
            loss_of(model, inputs, labels).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=not keep)
    return {}


def accumulating(model: nn.Module, scene: Scene, optimizer: torch.optim.Optimizer) -> Results:
    """Every backward is synchronised, and only every other one is followed by an update."""
    for step, (inputs, labels) in enumerate(batches(scene, count=6)):
        loss_of(model, inputs, labels).backward()
        if step % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
    return {}


def in_low_precision(model: nn.Module, scene: Scene, optimizer: torch.optim.Optimizer) -> Results:
    results: Results = {}
    for step, (inputs, labels) in enumerate(batches(scene)):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            output = model(inputs)
        loss = F.cross_entropy(output.float(), labels)
        loss.backward()
        optimizer.step()
        results[f"loss {step}"] = loss.item()
    return results


def clipped(model: nn.Module, scene: Scene, optimizer: torch.optim.Optimizer) -> Results:
    results: Results = {}
    for step, (inputs, labels) in enumerate(batches(scene)):
        optimizer.zero_grad()
        loss_of(model, inputs, labels).backward()
        results[f"norm {step}"] = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return results


WAYS: dict[str, Way] = {
    "without_sync": without_sync,
    "without_sync_keeping_gradients": partial(without_sync, keep=True),
    "keeping_gradients": partial(plainly, keep=True),
    "accumulating": accumulating,
    "in_low_precision": in_low_precision,
    "clipped": clipped,
}

# With which options models are trained in all ways.
TRAINED_IN_ALL_WAYS = {
    "perceptron": ["plain", "views", "static_views"],
    "fork": ["plain", "views"],
    "bag": ["plain", "views"],
    "transformer": ["views"],
    "batch_norm": ["plain"],
    "mixed": ["views"],
}


def add(model: str, options: str, way: str, train: Way) -> None:
    make, needed = MODELS[model]

    def case(scene: Scene) -> Results:
        replicated = scene.ddp(
            make(scene.rank), **({"bucket_cap_mb": SMALL_BUCKET_MB} | needed | OPTIONS[options])
        )
        optimizer = torch.optim.SGD(replicated.parameters(), lr=0.1)
        results = train(replicated, scene, optimizer)
        return results | contents(replicated)

    CASES[f"{model}-{options}" + (f"-{way}" if way else "")] = case


# With which options two models are trained, the others not.
RARE = {"one_bucket", "list_of_caps", "batched_copies", "lazy_buckets", "searching_views"}

for each, favourites in TRAINED_IN_ALL_WAYS.items():
    for option in OPTIONS:
        if option not in RARE or each in ("perceptron", "mixed"):
            add(each, option, "", plainly)
    for way, train in WAYS.items():
        for option in favourites:
            add(each, option, way, train)
