"""DDP with every hook that PyTorch has, and with hooks as users write them."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from ddp_features import prefixed, sgd, small
from ddp_models import Mixed, Transformer, loss_of, plainly
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import (
    DDPCommHookType,
    debugging_hooks,
    default_hooks,
    optimizer_overlap_hooks,
    quantization_hooks,
    register_ddp_comm_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import (
    hook_with_zero_step,
)
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.optim import ZeroRedundancyOptimizer, functional_sgd
from torch.nn.parallel import DistributedDataParallel
from training_case import CASES, Results, Scene, batches, case, contents, perceptron, train
from training_ddp import SMALL_BUCKET_MB, Bag, Fork

Future = torch.futures.Future[Tensor]
Register = Callable[[DistributedDataParallel], object]

ONE_BUCKET_MB = 25  # with several buckets PowerSGD waits on Gloo's threads for what only they could do


def power_state(**options: object) -> power_sgd.PowerSGDState:
    return power_sgd.PowerSGDState(
        None, **({"matrix_approximation_rank": 2, "start_powerSGD_iter": 2} | options)
    )


def by_hook(hook: object, state: Callable[[], object] = lambda: None) -> Register:
    return lambda model: model.register_comm_hook(state(), hook)


def by_type(hook: dist.BuiltinCommHookType) -> Register:
    return lambda model: model._register_builtin_comm_hook(hook)


HOOKS: dict[str, Register] = {
    "builtin_all_reduce": by_type(dist.BuiltinCommHookType.ALLREDUCE),
    "builtin_fp16": by_type(dist.BuiltinCommHookType.FP16_COMPRESS),
    "all_reduce": by_hook(default_hooks.allreduce_hook),
    "all_reduce_in_the_world": by_hook(default_hooks.allreduce_hook, lambda: dist.group.WORLD),
    "fp16": by_hook(default_hooks.fp16_compress_hook),
    "bf16": by_hook(default_hooks.bf16_compress_hook),
    "fp16_around_all_reduce": by_hook(default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "bf16_around_all_reduce": by_hook(default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)),
    "quantized_per_tensor": by_hook(quantization_hooks.quantization_pertensor_hook),
    "quantized_per_channel": by_hook(quantization_hooks.quantization_perchannel_hook),
    "power_sgd": by_hook(power_sgd.powerSGD_hook, power_state),
    # Once it compresses, that of 2.15 fails an assertion about its own matrices: see below.
    "batched_power_sgd": by_hook(power_sgd.batched_powerSGD_hook, lambda: power_state(start_powerSGD_iter=9)),
    "power_sgd_without_error_feedback": by_hook(
        power_sgd.powerSGD_hook, lambda: power_state(use_error_feedback=False)
    ),
    "power_sgd_without_warm_start": by_hook(
        power_sgd.powerSGD_hook, lambda: power_state(warm_start=False, use_error_feedback=False)
    ),
    "fp16_around_power_sgd": by_hook(
        default_hooks.fp16_compress_wrapper(power_sgd.powerSGD_hook), power_state
    ),
    "noop": by_hook(debugging_hooks.noop_hook),
}
OF_LARGE_BUCKETS = {name for name in HOOKS if "power_sgd" in name or "quantized" in name}

OPTIONS: dict[str, dict[str, object]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
}


def add(name: str, register: Register, options: str) -> None:
    def hook_case(scene: Scene) -> Results:
        cap = ONE_BUCKET_MB if name in OF_LARGE_BUCKETS else SMALL_BUCKET_MB
        model = small(scene, bucket_cap_mb=cap, **OPTIONS[options])
        register(model)
        return plainly(model, scene, sgd(model)) | contents(model)

    CASES[f"hook-{name}-{options}"] = hook_case


WITH_A_STATIC_GRAPH = {"builtin_all_reduce", "builtin_fp16", "all_reduce", "bf16", "power_sgd"}

for each, register in HOOKS.items():
    for option in OPTIONS:
        if option != "static" or each in WITH_A_STATIC_GRAPH:
            add(each, register, option)


def add_to_bag(name: str) -> None:
    """Hooks of ours see no sparse gradients, which are averaged all the same."""

    def bag_case(scene: Scene) -> Results:
        model = small(scene, Bag())
        HOOKS[name](model)
        return plainly(model, scene, sgd(model)) | contents(model)

    CASES[f"hook-{name}-with-sparse-gradients"] = bag_case


for each in ["builtin_all_reduce", "all_reduce"]:
    add_to_bag(each)


@case
def a_hook_that_asks_the_reducer(scene: Scene) -> Results:
    """As PyTorch's optimizers in backward do: the reducer adds up, and the hook divides."""
    model = small(scene)

    def halved(_: object, bucket: dist.GradBucket) -> Future:
        added = model.reducer._run_allreduce_hook(bucket)
        return added.then(lambda future: future.value()[0] / scene.world)

    model.register_comm_hook(None, halved)
    return plainly(model, scene, sgd(model)) | contents(model)


@case
def hook_types(scene: Scene) -> Results:
    """By PyTorch's own list of them."""
    results: Results = {}
    for kind in DDPCommHookType:
        model = small(scene, bucket_cap_mb=ONE_BUCKET_MB)
        register_ddp_comm_hook(kind, model, None)
        results |= prefixed(kind.name, train(model, scene))
    return results


@case
def post_local_sgd_with_a_subgroup(scene: Scene) -> Results:
    model = small(scene)
    subgroup, _ = dist.new_subgroups(group_size=scene.world)
    state = PostLocalSGDState(process_group=None, subgroup=subgroup, start_localSGD_iter=2)
    model.register_comm_hook(state, post_localSGD_hook)
    return train(model, scene)


@case
def batched_power_sgd_that_compresses(scene: Scene) -> Results:
    """In PyTorch 2.15 it fails an assertion about its own matrices, in the third backward.

    With ours it fails a little earlier in it: it wants to make the bucket longer, which shared memory is not.
    """
    model = small(scene, bucket_cap_mb=ONE_BUCKET_MB)
    model.register_comm_hook(power_state(), power_sgd.batched_powerSGD_hook)
    results: Results = {}
    for step, (inputs, labels) in enumerate(batches(scene)):
        loss = loss_of(model, inputs, labels)
        try:
            loss.backward()
        except (AssertionError, RuntimeError):
            return results | {"failed": float(step)}
        results[f"loss {step}"] = loss.item()
    return results | contents(model)


@case
def an_optimizer_behind_a_hook(scene: Scene) -> Results:
    """Each parameter changes as its bucket arrives."""
    model = small(scene)
    optimizer = functional_sgd._FunctionalSGD([], lr=0.1, momentum=0.9, _allow_empty_param_list=True)
    state = optimizer_overlap_hooks._OptimizerHookState(optimizer)
    model.register_comm_hook(
        None, optimizer_overlap_hooks._hook_then_optimizer(default_hooks.allreduce_hook, state)
    )
    for inputs, labels in batches(scene):
        loss_of(model, inputs, labels).backward()
    return contents(model)


@case
def zero_step_behind_a_hook(scene: Scene) -> Results:
    """Shards of the optimizer run behind buckets. PyTorch refuses that on Gloo: there it is plain momentum.

    It begins only when buckets are known, which a static graph's are in the third step. The interleaved
    variant calls collectives in callbacks, which on the CPU come in no order: no case can be made of it.
    """
    model = small(scene, static_graph=True, gradient_as_bucket_view=True)
    if dist.get_backend() == "gloo":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    else:
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1, momentum=0.9
        )
        hook = hook_with_zero_step(default_hooks.allreduce_hook, model, optimizer, shard_buckets=True)
        model.register_comm_hook(None, hook)
    for step, (inputs, labels) in enumerate(batches(scene, count=6)):
        loss_of(model, inputs, labels).backward()
        if step >= ZERO_BEGINS or dist.get_backend() != "gloo":
            optimizer.step()
            model.zero_grad()
        else:
            model.zero_grad()
    return {name: value for name, value in contents(model).items() if "gradient" not in name}


ZERO_BEGINS = 3


# ---------------------------------------------------------------------------------- hooks of users


class Recorder:
    """A hook that notes what it is shown, and reduces by an average."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def hook(self, state: object, bucket: dist.GradBucket) -> Future:
        gradients, parameters = bucket.gradients(), bucket.parameters()
        buffer = bucket.buffer()
        same = all(
            g.shape == p.shape and g.dtype == p.dtype for g, p in zip(gradients, parameters, strict=True)
        )
        inside = all(
            buffer.data_ptr() <= g.data_ptr() < buffer.data_ptr() + max(buffer.nbytes, 1) for g in gradients
        )
        whole = torch.equal(torch.cat([g.flatten() for g in gradients]), buffer)
        shapes = [list(g.shape) for g in gradients]
        self.seen.append(
            f"{bucket.index()} {bucket.is_last()} {list(buffer.shape)} {buffer.dtype} {shapes} "
            f"{same} {inside} {whole} {state}"
        )
        return averaged(state, bucket)


@case
def what_hooks_are_shown(scene: Scene) -> Results:
    results: Results = {}
    for name, inner in {"perceptron": perceptron(), "mixed": Mixed(), "transformer": Transformer()}.items():
        for views in [False, True]:
            recorder = Recorder()
            model = small(scene, inner, gradient_as_bucket_view=views)
            model.register_comm_hook("the state", recorder.hook)
            trained = train(model, scene)
            results |= prefixed(f"{name} {views}", trained | {"seen": "\n".join(recorder.seen)})
    return results


def other_tensor(_: object, bucket: dist.GradBucket) -> Future:
    """Neither in place nor of the same memory."""
    work = dist.all_reduce(bucket.buffer() / dist.get_world_size(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0].clone())


def set_buffer(_: object, bucket: dist.GradBucket) -> Future:
    bucket.set_buffer(torch.full_like(bucket.buffer(), 0.25))
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def averaged(_: object, bucket: dist.GradBucket) -> Future:
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def waits_at_once(_: object, bucket: dist.GradBucket) -> Future:
    dist.all_reduce(bucket.buffer().div_(dist.get_world_size()))
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def several_collectives(_: object, bucket: dist.GradBucket) -> Future:
    """The norm of the gradients of all ranks first, then the gradients."""
    norm = bucket.buffer().norm().reshape(1)
    dist.all_reduce(norm, dist.ReduceOp.MAX)
    work = dist.all_reduce(bucket.buffer().div_(norm), async_op=True)
    return work.get_future().then(lambda future: future.value()[0].mul_(norm / dist.get_world_size()))


def in_place_by_gradient(_: object, bucket: dist.GradBucket) -> Future:
    for gradient in bucket.gradients():
        gradient.clamp_(-0.01, 0.01)
    return waits_at_once(_, bucket)


def unannotated(state, bucket):
    return averaged(state, bucket)


def of_lower_precision(_: object, bucket: dist.GradBucket) -> Future:
    """What comes back is of another dtype than the bucket."""
    low = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    return dist.all_reduce(low, async_op=True).get_future().then(lambda future: future.value()[0])


for hook in [
    other_tensor,
    set_buffer,
    waits_at_once,
    several_collectives,
    in_place_by_gradient,
    unannotated,
    of_lower_precision,
]:
    add(hook.__name__, by_hook(hook), "plain")
    add(hook.__name__, by_hook(hook), "views")


@case
def a_hook_with_unused_parameters(scene: Scene) -> Results:
    model = small(scene, Fork(scene.rank), find_unused_parameters=True)
    model.register_comm_hook(None, averaged)
    return train(model, scene)


@case
def a_hook_with_batches_without_sync(scene: Scene) -> Results:
    model = small(scene)
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    optimizer = sgd(model)
    for step, (inputs, labels) in enumerate(batches(scene, count=6)):
        if step % 2 == 0:
            with model.no_sync():
                loss_of(model, inputs, labels).backward()
        else:
            loss_of(model, inputs, labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    return contents(model)


def clipped_by(limit: float) -> Callable[[object, dist.GradBucket], Future]:
    def hook(_: object, bucket: dist.GradBucket) -> Future:
        return averaged(_, bucket).then(lambda done: done.value().clamp_(-limit, limit))

    return hook


@case
def a_hook_that_clips(scene: Scene) -> Results:
    model = small(scene)
    model.register_comm_hook(None, clipped_by(0.005))
    results = train(model, scene)
    largest = max(parameter.grad.abs().max().item() for parameter in model.parameters())
    return results | {"largest": largest}
