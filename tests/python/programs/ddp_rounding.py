"""Gradients of many ranks, with all that is needed to say how far they may be from the exact average.

Every step begins with parameters from a seed, not with those that the step before has left: so nothing adds
up, losses are the same to the bit, and each reduction can be judged alone. Each rank returns the gradients
that it computed by itself, and the averages.
"""

import torch
from ddp_models import MODELS, loss_of
from torch import nn
from training_case import CASES, Results, Scene, batches
from training_ddp import SMALL_BUCKET_MB

STEPS = 4
OPTIONS: dict[str, dict[str, object]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "one_bucket": {"bucket_cap_mb": 25},
}


def set_parameters(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)


def add(model: str, options: str) -> None:
    make, needed = MODELS[model]

    def rounding_case(scene: Scene) -> Results:
        bare = make(scene.rank)
        replicated = scene.ddp(
            make(scene.rank), **({"bucket_cap_mb": SMALL_BUCKET_MB} | needed | OPTIONS[options])
        )
        results: Results = {}
        for step, (inputs, labels) in enumerate(batches(scene, count=STEPS)):
            for each in (bare, replicated):
                each.zero_grad()
                set_parameters(each, step)
                loss = loss_of(each, inputs, labels)
                loss.backward()
            results[f"loss {step}"] = loss.item()
            for name, parameter in bare.named_parameters():
                gradient = parameter.grad
                results[f"own {step} {name}"] = torch.zeros_like(parameter) if gradient is None else gradient
            for name, parameter in replicated.module.named_parameters():
                if parameter.grad is not None:
                    results[f"average {step} {name}"] = (
                        parameter.grad.clone()
                    )  # the next step's may lie there
        return results

    CASES[f"rounding-{model}-{options}"] = rounding_case


for each in ["perceptron", "transformer", "fork", "batch_norm"]:
    for option in OPTIONS:
        add(each, option)
