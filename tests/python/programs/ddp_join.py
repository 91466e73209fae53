"""Cases of DDP in which ranks have different numbers of batches."""

import torch.distributed as dist
from ddp_features import prefixed, sgd, small
from ddp_models import loss_of
from torch import Tensor, nn
from training_case import (
    Results,
    Scene,
    batches,
    case,
    contents,
    train,
)
from training_ddp import Fork, normalised


def joined(scene: Scene, model: nn.Module, *, least: int = 2, **options: object) -> Results:
    """Rank 0 has the least batches, every next rank three more."""
    optimizer = sgd(model)
    results: Results = {}
    with model.join(**options):
        for step, (inputs, labels) in enumerate(batches(scene, count=least + 3 * scene.rank)):
            optimizer.zero_grad()
            loss = loss_of(model, inputs, labels)
            loss.backward()
            optimizer.step()
            results[f"loss {step}"] = loss.item()
    return results | contents(model)


@case
def join_divided_by_all_ranks(scene: Scene) -> Results:
    return joined(scene, small(scene), divide_by_initial_world_size=True)


@case
def join_divided_by_live_ranks(scene: Scene) -> Results:
    return joined(scene, small(scene), divide_by_initial_world_size=False)


@case
def join_of_a_rank_without_batches(scene: Scene) -> Results:
    return joined(scene, small(scene), least=0)


@case
def join_of_a_rank_with_one_batch(scene: Scene) -> Results:
    """Buckets are cut again when it has already run out of inputs."""
    return joined(scene, small(scene), least=1)


@case
def join_of_a_rank_with_two_batches_of_a_static_graph(scene: Scene) -> Results:
    return joined(scene, small(scene, static_graph=True), least=2)


@case
def join_with_bucket_views(scene: Scene) -> Results:
    return joined(scene, small(scene, gradient_as_bucket_view=True), divide_by_initial_world_size=False)


@case
def join_with_unused_parameters(scene: Scene) -> Results:
    """When a rank has run out of inputs, no rank uses the parameters that only this rank used.

    PyTorch then makes zeros of such a gradient, which momentum and weight decay act upon. With ours the
    gradient does not exist, as in every other iteration in which no rank uses a parameter.
    """
    results = joined(scene, small(scene, Fork(scene.rank), find_unused_parameters=True))
    nothing = {name for name, value in results.items() if "gradient" in name and not is_something(value)}
    return {name: value for name, value in results.items() if name.removeprefix("layout of ") not in nothing}


def is_something(value: object) -> bool:
    return not isinstance(value, Tensor) or bool(value.count_nonzero())


@case
def join_with_buffers(scene: Scene) -> Results:
    return joined(scene, small(scene, normalised()))


@case
def join_with_a_hook(scene: Scene) -> Results:
    model = small(scene)
    model.register_comm_hook(None, dist.algorithms.ddp_comm_hooks.default_hooks.allreduce_hook)
    return joined(scene, model)


@case
def join_with_batches_without_sync(scene: Scene) -> Results:
    """A rank that has run out of inputs learns in every step whether the others synchronise in it."""
    model = small(scene)
    optimizer = sgd(model)
    with model.join():
        for step, (inputs, labels) in enumerate(batches(scene, count=3 + 3 * scene.rank)):
            if step % 3 < 2:
                with model.no_sync():
                    loss_of(model, inputs, labels).backward()
            else:
                loss_of(model, inputs, labels).backward()
                optimizer.step()
                optimizer.zero_grad()
    return contents(model)


@case
def join_disabled(scene: Scene) -> Results:
    model = small(scene)
    with model.join(enable=False):
        return train(model, scene)


@case
def join_that_ends_early(scene: Scene) -> Results:
    model = small(scene)
    text = ""
    try:
        joined(scene, model, throw_on_early_termination=True)
    except RuntimeError as error:
        text = str(error)
    return {"text": text} | contents(model)


@case
def join_and_training_afterwards(scene: Scene) -> Results:
    model = small(scene)
    return joined(scene, model) | prefixed("afterwards", train(model, scene))
