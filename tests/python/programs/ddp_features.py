"""What DDP can do beyond a plain step: uneven inputs, buffers, odd graphs and parameters, states, its log."""

import copy
import dataclasses
import io

import torch
import torch.distributed as dist
from ddp_models import Transformer, loss_of, plainly
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from training_case import (
    CLASSES,
    FEATURES,
    Results,
    Scene,
    batches,
    case,
    contents,
    perceptron,
    seeded,
    train,
)
from training_ddp import SMALL_BUCKET_MB, Fork, normalised


def small(scene: Scene, model: nn.Module | None = None, **options: object) -> DistributedDataParallel:
    return scene.ddp(model or perceptron(), **({"bucket_cap_mb": SMALL_BUCKET_MB} | options))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def prefixed(prefix: str, results: Results) -> Results:
    return {f"{prefix} {name}": value for name, value in results.items()}


# ---------------------------------------------------------------------------------- beginnings and buffers


class Different(nn.Module):
    """Every rank begins with other parameters and buffers."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.inner = normalised()
        with torch.no_grad():
            for number, tensor in enumerate([*self.inner.parameters(), *self.inner.buffers()]):
                tensor.add_(rank * (number + 1))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs)


@case
def different_beginnings_become_rank_0s(scene: Scene) -> Results:
    model = small(scene, Different(scene.rank))
    return prefixed("at first", contents(model)) | train(model, scene)


@case
def different_beginnings_that_stay(scene: Scene) -> Results:
    model = small(scene, Different(scene.rank), init_sync=False, forward_sync_buffers=False)
    return prefixed("at first", contents(model)) | train(model, scene)


@case
def buffers_that_are_not_synchronised(scene: Scene) -> Results:
    return train(small(scene, normalised(), forward_sync_buffers=False), scene)


@case
def buffers_that_are_synchronised_by_the_old_name(scene: Scene) -> Results:
    return train(small(scene, normalised(), broadcast_buffers=False), scene)


@case
def buffers_with_a_hook(scene: Scene) -> Results:
    model = small(scene, normalised())

    def average(_: object, buffers: dict[str, Tensor]) -> list[torch.futures.Future]:
        floats = [buffer for buffer in buffers.values() if buffer.is_floating_point()]
        return [dist.all_reduce(buffer.div_(scene.world), async_op=True).get_future() for buffer in floats]

    model._register_buffer_comm_hook(None, average)
    return train(model, scene)


@case
def forward_in_evaluation(scene: Scene) -> Results:
    model = small(scene, normalised())
    results = train(model, scene)
    model.eval()
    with torch.no_grad():
        for step, (inputs, _) in enumerate(batches(scene)):
            results[f"output {step}"] = model(inputs)
    model.train()
    return results | prefixed("afterwards", train(model, scene))


# ---------------------------------------------------------------------------------- parameters


@case
def a_frozen_parameter(scene: Scene) -> Results:
    inner = perceptron()
    inner[2].weight.requires_grad_(False)
    return train(small(scene, inner), scene)


@case
def a_parameter_that_is_ignored(scene: Scene) -> Results:
    inner = perceptron()
    scene.ddp._set_params_and_buffers_to_ignore_for_model(inner, ["2.weight"])
    return train(small(scene, inner), scene)


@case
def parameters_that_are_reduced_later(scene: Scene) -> Results:
    inner = perceptron()
    delayed = [("2.weight", inner[2].weight), ("2.bias", inner[2].bias)]
    model = small(
        scene, inner, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=inner[0].weight
    )
    optimizer = sgd(model)
    results: Results = {}
    for step, (inputs, labels) in enumerate(batches(scene)):
        optimizer.zero_grad(set_to_none=False)
        loss = loss_of(model, inputs, labels)
        loss.backward()
        dist.barrier()  # nothing waits for the late reduction; collectives of a group end in their order
        optimizer.step()
        results[f"loss {step}"] = loss.item()
    return results | contents(model)


@case
def buckets_of_unused_parameters_that_are_not_reduced(scene: Scene) -> Results:
    return train(
        small(scene, Fork(0), find_unused_parameters=True, skip_all_reduce_unused_params=True), scene
    )


class Strided(nn.Module):
    """Parameters that are not contiguous, of no dimension, and empty."""

    def __init__(self) -> None:
        super().__init__()
        seeded()
        self.turned = nn.Parameter(torch.randn(CLASSES, FEATURES).t())
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.zeros(0, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.turned * self.scale + self.nothing.sum()


@case
def parameters_of_odd_shapes(scene: Scene) -> Results:
    return train(small(scene, Strided()), scene) | prefixed(
        "views", train(small(scene, Strided(), gradient_as_bucket_view=True), scene)
    )


@case
def parameters_in_channels_last(scene: Scene) -> Results:
    seeded()
    inner = nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 6, 2), nn.ReLU(), nn.Conv2d(6, CLASSES, 3), nn.Flatten()
    ).to(memory_format=torch.channels_last)
    results: Results = {}
    for views in [False, True]:
        model = small(scene, copy.deepcopy(inner), gradient_as_bucket_view=views)
        results |= prefixed(f"views {views}", train(model, scene))
        for name, parameter in model.named_parameters():
            results[f"views {views} strides of {name}"] = str(parameter.grad.stride())
    return results


def gradients_of(model: nn.Module) -> Results:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@case
def gradients_that_the_program_keeps(scene: Scene) -> Results:
    """As tensors, as views, as NumPy's arrays: what was kept stays what it was in its step."""
    model = small(scene)
    results: Results = {}
    kept: dict[str, Tensor] = {}
    for step, (inputs, labels) in enumerate(batches(scene, count=6)):
        model.zero_grad()
        loss_of(model, inputs, labels).backward()
        results |= prefixed(f"step {step}", gradients_of(model))
        # Nothing at first; then one way after the other, from one step to the next or to the end.
        first, second, *_ = model.parameters()
        if step == 2:
            kept["tensor"] = first.grad
        if step == 3:
            kept["array"] = torch.from_numpy(second.grad.numpy())
        if step >= 4:
            kept[f"view {step}"] = first.grad.view(-1)[1:4]
    return results | kept


@case
def gradients_that_are_the_programs_own(scene: Scene) -> Results:
    """Parts of one flat tensor, as optimizers that fuse their steps like them: averages must arrive there."""
    model = small(scene)
    parameters = list(model.parameters())
    flat = torch.zeros(sum(parameter.numel() for parameter in parameters))
    parts = flat.split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter)
    results: Results = {}
    for step, (inputs, labels) in enumerate(batches(scene, count=4)):
        flat.zero_()
        loss_of(model, inputs, labels).backward()
        results[f"step {step}"] = flat.clone()
    return results


@case
def gradients_that_add_up_and_are_kept(scene: Scene) -> Results:
    """A reference to a gradient that is not taken away sees what is added to it, until it is."""
    model = small(scene)
    parameter = next(model.parameters())
    results: Results = {}
    kept = None
    for step, (inputs, labels) in enumerate(batches(scene, count=6)):
        if step == 4:
            parameter.grad = None
        loss_of(model, inputs, labels).backward()
        kept = kept if kept is not None else parameter.grad.view(-1) if step == 1 else None
        if kept is not None:
            results[f"kept {step}"] = kept.clone()
        results |= prefixed(f"step {step}", gradients_of(model))
    return results


@case
def gradients_that_are_replaced(scene: Scene) -> Results:
    """A gradient that the program puts elsewhere is found there."""
    model = small(scene, gradient_as_bucket_view=True)
    optimizer = sgd(model)
    for step, (inputs, labels) in enumerate(batches(scene, count=6)):
        loss_of(model, inputs, labels).backward()
        optimizer.step()
        for number, parameter in enumerate(model.parameters()):
            if (number + step) % 3 == 0:
                parameter.grad = parameter.grad.clone() * 0.5
            elif (number + step) % 3 == 1:
                parameter.grad = None
    return contents(model)


# ---------------------------------------------------------------------------------- graphs


@case
def backward_twice_without_sync(scene: Scene) -> Results:
    """Two losses of one forward, summed up before the gradients of all ranks are."""
    model = small(scene)
    optimizer = sgd(model)
    results: Results = {}
    for step, (inputs, labels) in enumerate(batches(scene)):
        optimizer.zero_grad()
        with model.no_sync():
            loss = loss_of(model, inputs, labels)
            loss.backward(retain_graph=True)
            loss.square().backward()
        loss = loss_of(model, inputs, labels)
        loss.backward()
        optimizer.step()
        results[f"loss {step}"] = loss.item()
    return results | contents(model)


class Checkpointed(nn.Module):
    """Computes its middle again in backward; used twice, so that parameters are ready more than once."""

    def __init__(self, reentrant: bool, times: int) -> None:
        super().__init__()
        seeded()
        self.stem, self.middle = nn.Linear(FEATURES, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, CLASSES)
        self.reentrant, self.times = reentrant, times

    def forward(self, inputs: Tensor) -> Tensor:
        inner = self.stem(inputs)
        for _ in range(self.times):
            inner = checkpoint(lambda x: self.middle(x).relu(), inner, use_reentrant=self.reentrant)
        return self.head(inner)


@case
def checkpoints_of_activations(scene: Scene) -> Results:
    return train(small(scene, Checkpointed(reentrant=False, times=2)), scene)


@case
def reentrant_checkpoints_with_a_static_graph(scene: Scene) -> Results:
    results: Results = {}
    for times in [1, 2]:
        for views in [False, True]:
            inner = Checkpointed(reentrant=True, times=times)
            model = small(scene, inner, static_graph=True, gradient_as_bucket_view=views)
            results |= prefixed(f"{times} {views}", train(model, scene))
    return results


@case
def a_static_graph_that_is_declared_later(scene: Scene) -> Results:
    model = small(scene, Checkpointed(reentrant=True, times=2))
    model._set_static_graph()
    return train(model, scene)


@case
def a_static_graph_in_which_a_parameter_is_unused(scene: Scene) -> Results:
    results: Results = {}
    for views in [False, True]:
        model = small(scene, Fork(0), static_graph=True, gradient_as_bucket_view=views)
        results |= prefixed(f"views {views}", plainly(model, scene, sgd(model)) | contents(model))
    return results


class Talkative(nn.Module):
    """Returns more than one tensor, in several kinds of containers, and never uses a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = perceptron()
        self.aside, self.unused = nn.Linear(FEATURES, 3), nn.Linear(3, 3)

    def forward(self, inputs: Tensor, *, kind: str) -> object:
        output, aside = self.inner(inputs), self.aside(inputs)
        if kind == "dict":
            return {"logits": output, "more": [aside]}
        if kind == "tuple":
            return output, aside
        return Answer(output, aside)


@dataclasses.dataclass
class Answer:
    logits: Tensor
    aside: Tensor


@case
def outputs_in_containers(scene: Scene) -> Results:
    results: Results = {}
    for kind in ["dict", "tuple", "dataclass"]:
        seeded()
        model = small(scene, Talkative(), find_unused_parameters=True)
        optimizer = sgd(model)
        for inputs, labels in batches(scene):
            output = model(inputs, kind=kind)
            if kind == "dict":
                output = output["logits"], output["more"][0]
            logits, aside = output if kind != "dataclass" else (output.logits, output.aside)
            (F.cross_entropy(logits, labels) + aside.square().mean()).backward()
            optimizer.step()
        results |= prefixed(kind, contents(model))
    return results


class Changing(nn.Module):
    """Takes another way in every step, the same on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        seeded()
        self.stem = nn.Linear(FEATURES, 16)
        self.ways = nn.ModuleList([nn.Linear(16, CLASSES) for _ in range(3)])
        self.step = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.step += 1
        return self.ways[self.step % 3](self.stem(inputs).relu())


@case
def a_graph_that_changes_with_every_step(scene: Scene) -> Results:
    results: Results = {}
    for views in [False, True]:
        model = small(scene, Changing(), find_unused_parameters=True, gradient_as_bucket_view=views)
        results |= prefixed(f"views {views}", plainly(model, scene, sgd(model)) | contents(model))
    return results


@case
def finalization_by_hand(scene: Scene) -> Results:
    model = small(scene)
    model.require_manual_backward_finalization = True
    optimizer = sgd(model)
    results: Results = {}
    for step, (inputs, labels) in enumerate(batches(scene)):
        optimizer.zero_grad()
        loss = loss_of(model, inputs, labels)
        loss.backward()
        model.finalize_backward()
        optimizer.step()
        results[f"loss {step}"] = loss.item()
    return results | contents(model)


@case
def models_that_take_turns(scene: Scene) -> Results:
    """As the two of a GAN: each learns from the output of the other, in buckets of the same group."""
    seeded()
    maker = small(scene, nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, FEATURES)))
    judge = small(scene, perceptron(), gradient_as_bucket_view=True)
    optimizers = [sgd(maker), sgd(judge)]
    results: Results = {}
    for step, (inputs, labels) in enumerate(batches(scene)):
        made = maker(inputs[:, :4])
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = F.cross_entropy(judge(made), labels)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        results[f"loss {step}"] = loss.item()
    return results | prefixed("maker", contents(maker)) | prefixed("judge", contents(judge))


# ---------------------------------------------------------------------------------- groups


@case
def a_group_of_its_own(scene: Scene) -> Results:
    return train(small(scene, process_group=dist.new_group()), scene)


@case
def a_group_of_one_rank(scene: Scene) -> Results:
    groups = [dist.new_group([rank]) for rank in range(scene.world)]
    return train(small(scene, process_group=groups[scene.rank]), scene)


@case
def a_mesh(scene: Scene) -> Results:
    return train(small(scene, device_mesh=init_device_mesh("cpu", (scene.world,))), scene)


@case
def a_group_that_is_replaced(scene: Scene) -> Results:
    model = small(scene)
    results = prefixed("before", train(model, scene))
    model._update_process_group(dist.new_group())
    return results | train(model, scene)


# ---------------------------------------------------------------------------------- states


@case
def states_that_others_load(scene: Scene) -> Results:
    """From the DDP under test into PyTorch's and into the bare module, and back from both."""
    ours = small(scene, Transformer())
    train(ours, scene)
    theirs = DistributedDataParallel(Transformer())
    theirs.load_state_dict(ours.state_dict())
    bare = Transformer()
    bare.load_state_dict(ours.module.state_dict())
    results = prefixed("theirs", train(theirs, scene)) | prefixed("bare", train(bare, scene))
    back = small(scene, Transformer())
    back.load_state_dict(theirs.state_dict())
    results |= prefixed("back", train(back, scene))
    back.module.load_state_dict(bare.state_dict())
    return results | prefixed("bare and back", contents(back)) | {"keys": " ".join(ours.state_dict())}


@case
def states_saved_by_torch(scene: Scene) -> Results:
    model = small(scene, normalised(), gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, scene, optimizer)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    again = small(scene, normalised())
    again.load_state_dict(saved["model"])
    optimizer = torch.optim.Adam(again.parameters(), lr=0.01)
    optimizer.load_state_dict(saved["optimizer"])
    return train(again, scene, optimizer)


@case
def models_saved_whole(scene: Scene) -> Results:
    """DDP with a default group can be pickled; a copy makes a reducer of its own."""
    model = small(scene)
    train(model, scene)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    return train(again, scene) | {"class": str(type(again) is scene.ddp)}


# --------------------------------------------------------------------------------- gradients that are missing


class Aside(nn.Module):
    """Has a second output, which the loss need not use."""

    def __init__(self) -> None:
        super().__init__()
        seeded()
        self.head, self.aside = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.head(inputs), self.aside(inputs)


def trained_aside(scene: Scene, uses: bool) -> Results:
    """Momentum and weight decay act upon zeros, and not upon a gradient that does not exist."""
    model = small(scene, Aside(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    for step, (inputs, labels) in enumerate(batches(scene)):
        optimizer.zero_grad()
        output, aside = model(inputs)
        if uses and step % 2 == 0:
            output = output + aside
        F.cross_entropy(output, labels).backward()
        optimizer.step()
    return contents(model)


@case
def an_output_that_the_loss_never_uses(scene: Scene) -> Results:
    return trained_aside(scene, uses=False)


@case
def an_output_that_one_rank_uses_at_times(scene: Scene) -> Results:
    return trained_aside(scene, uses=scene.rank == 1)
