"""Cases of DDP with mixed precision."""

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from ddp_features import sgd, small
from ddp_models import Transformer, loss_of
from torch import Tensor, nn
from torch.nn.parallel.distributed import _MixedPrecision
from training_case import (
    Results,
    Scene,
    batches,
    case,
    contents,
    perceptron,
)
from training_ddp import Bag


def trained_in(
    scene: Scene, precision: _MixedPrecision, build: Callable[[], nn.Module] = perceptron
) -> Results:
    """PyTorch's `mixed_precision` needs an accelerator, so the reference is done by hand.

    Forward and backward are in `param_dtype`; gradients are divided and added up in `reduce_dtype`, and come
    back in the dtype of the parameters, which the optimizer changes.
    """
    by_hand = dist.get_backend() == "gloo"
    model = build()
    replicated = model if by_hand else small(scene, model, mixed_precision=precision)
    optimizer = sgd(model)
    results: Results = {}
    for step, (inputs, labels) in enumerate(batches(scene)):
        optimizer.zero_grad()
        if by_hand:
            loss = backward_by_hand(model, inputs, labels, precision, scene.world)
        else:
            loss = loss_of(replicated, inputs, labels)
            loss.backward()
        optimizer.step()
        results[f"loss {step}"] = loss.item()
    return results | contents(model)


def backward_by_hand(
    model: nn.Module, inputs: Tensor, labels: Tensor, precision: _MixedPrecision, world: int
) -> Tensor:
    computing = precision.param_dtype or torch.float32
    narrow = copy.deepcopy(model).to(computing)
    loss = loss_of(narrow, inputs.to(computing), labels)
    loss.backward()
    for parameter, low in zip(model.parameters(), narrow.parameters(), strict=True):
        # A sparse one is reduced as the parameter is.
        reducing = parameter.dtype if low.grad.is_sparse else precision.reduce_dtype or computing
        gradient = low.grad.to(reducing).div(world)
        dist.all_reduce(gradient)
        parameter.grad = gradient.to(parameter.dtype)
    return loss


@case
def mixed_precision_in_bfloat16(scene: Scene) -> Results:
    return trained_in(scene, _MixedPrecision(param_dtype=torch.bfloat16))


@case
def mixed_precision_reduced_in_float32(scene: Scene) -> Results:
    return trained_in(scene, _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


@case
def mixed_precision_of_the_reduction_alone(scene: Scene) -> Results:
    return trained_in(scene, _MixedPrecision(reduce_dtype=torch.bfloat16))


@case
def mixed_precision_of_a_transformer(scene: Scene) -> Results:
    return trained_in(scene, _MixedPrecision(param_dtype=torch.bfloat16), Transformer)


@case
def mixed_precision_with_sparse_gradients(scene: Scene) -> Results:
    return trained_in(scene, _MixedPrecision(param_dtype=torch.bfloat16), Bag)
