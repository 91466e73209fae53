"""Training with models that are spread over ranks, and what such models rest on.

FSDP, DTensor, tensor and pipeline parallelism, meshes, checkpoints; then collectives that autograd and the
compiler see through.
"""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
import torch.distributed.nn.functional as differentiable
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F  # noqa: N812
from training_case import FEATURES, Results, Scene, batches, case, contents, perceptron, seeded, train

CPU = torch.device("cpu")


def fsdp1(**options: object) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(
        perceptron(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), device_id=CPU, **options
    )


@case
def fsdp1_full_shard(scene: Scene) -> Results:
    model = fsdp1()
    return train(model, scene, before_update=lambda: model.clip_grad_norm_(0.5))


@case
def fsdp1_shard_of_gradients_with_original_parameters(scene: Scene) -> Results:
    return train(fsdp1(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, use_orig_params=True), scene)


@case
def fsdp1_mixed_precision(scene: Scene) -> Results:
    low = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)
    return train(fsdp1(mixed_precision=low), scene)


def fsdp2(mesh: DeviceMesh | None = None, **options: object) -> nn.Module:
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    model = perceptron()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


@case
def fsdp2_full_shard(scene: Scene) -> Results:
    return train(fsdp2(), scene)


@case
def fsdp2_kept_after_forward(scene: Scene) -> Results:
    return train(fsdp2(reshard_after_forward=False), scene)


@case
def fsdp2_mixed_precision(scene: Scene) -> Results:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return train(fsdp2(mp_policy=policy), scene)


@case
def fsdp2_reduced_in_low_precision(scene: Scene) -> Results:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    return train(fsdp2(mp_policy=policy), scene)


@case
def fsdp2_with_clipped_gradients(scene: Scene) -> Results:
    model = fsdp2()

    def clip() -> Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor()

    return train(model, scene, torch.optim.Adam(model.parameters(), lr=0.01), before_update=clip)


@case
def fsdp2_with_accumulated_gradients(scene: Scene) -> Results:
    model = fsdp2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (inputs, labels) in enumerate(batches(scene)):
        last = step % 2 == 1
        model.set_requires_gradient_sync(last)
        F.cross_entropy(model(inputs), labels).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return contents(model)


@case
def fsdp2_hybrid(scene: Scene) -> Results:
    """Sharded in one dimension of the mesh, replicated in the other, both ways round."""
    results: Results = {}
    for shape in [(scene.world, 1), (1, scene.world)]:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
        results |= {f"{shape} {name}": value for name, value in train(fsdp2(mesh), scene).items()}
    return results


@case
def dtensor_redistribution(scene: Scene) -> Results:
    mesh = init_device_mesh("cpu", (scene.world,))
    whole = torch.arange(7.0 * 6).reshape(7, 6)  # 7 rows: the ranks have uneven shares
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    partial = DTensor.from_local(torch.full((4, 4), scene.rank + 1.5), mesh, [Partial()])
    partial_mean = DTensor.from_local(torch.full((4, 4), scene.rank + 1.5), mesh, [Partial("avg")])
    return {
        "rows": rows,
        "columns": columns,
        "columns to rows": columns.redistribute(mesh, [Shard(0)]),
        "whole": columns.full_tensor(),
        "summed": partial.redistribute(mesh, [Replicate()]),
        "summed and shared": partial.redistribute(mesh, [Shard(0)]),
        "averaged": partial_mean.full_tensor(),
    }


@case
def dtensor_arithmetic_with_gradients(scene: Scene) -> Results:
    mesh = init_device_mesh("cpu", (scene.world,))
    results: Results = {}
    placements = {"rows": Shard(0), "columns": Shard(1), "whole": Replicate()}
    for left in placements:
        for right in placements:
            seeded()
            a, b = torch.randn(8, 6), torch.randn(6, 10)
            a = distribute_tensor(a, mesh, [placements[left]]).requires_grad_()
            b = distribute_tensor(b, mesh, [placements[right]]).requires_grad_()
            product = (a @ b).softmax(dim=1)
            product.square().sum().backward()
            results[f"{left} @ {right}"] = product.full_tensor()
            results[f"gradient of a, {left} @ {right}"] = a.grad
            results[f"gradient of b, {left} @ {right}"] = b.grad
    return results


def tensor_parallel(mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(perceptron(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


@case
def tensor_parallel_perceptron(scene: Scene) -> Results:
    same_data = Scene(0, scene.world, scene.folder)
    return train(tensor_parallel(init_device_mesh("cpu", (scene.world,))), same_data)


@case
def sequence_parallel_with_a_parallel_loss(scene: Scene) -> Results:
    mesh = init_device_mesh("cpu", (scene.world,))
    seeded()
    model = nn.Sequential(nn.LayerNorm(FEATURES), nn.Linear(FEATURES, 24), nn.ReLU(), nn.Linear(24, 6))
    plan = {
        "0": SequenceParallel(sequence_dim=0),
        "1": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
        "3": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results: Results = {}
    for step, (inputs, labels) in enumerate(batches(Scene(0, scene.world, scene.folder))):
        optimizer.zero_grad()
        with loss_parallel():
            loss = F.cross_entropy(model(inputs.chunk(scene.world)[scene.rank]), labels)
            loss.backward()
        optimizer.step()
        results[f"loss {step}"] = loss.full_tensor().item()
    return results | contents(model)


@case
def mesh_of_two_dimensions(scene: Scene) -> Results:
    """FSDP2 over tensor parallelism; with two ranks one of the dimensions has a single rank, so both ways."""
    results: Results = {}
    for shape in [(scene.world, 1), (1, scene.world)]:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
        model = fully_shard(tensor_parallel(mesh["tensor"]), mesh=mesh["data"])
        own_data = Scene(mesh["data"].get_local_rank(), scene.world, scene.folder)
        results |= {f"{shape} {name}": value for name, value in train(model, own_data).items()}
    return results


def pipelined(scene: Scene, schedule: type[PipelineScheduleSingle]) -> Results:
    """Each rank has one half of the model; micro-batches go forth and their gradients back."""
    model = perceptron()
    half = model[:2] if scene.rank == 0 else model[2:]
    stage = PipelineStage(half, scene.rank, scene.world, CPU)
    pipeline = schedule(stage, n_microbatches=4, loss_fn=F.cross_entropy)
    optimizer = torch.optim.SGD(half.parameters(), lr=0.1)
    results: Results = {}
    for step, (inputs, labels) in enumerate(batches(Scene(0, scene.world, scene.folder))):
        optimizer.zero_grad()
        if scene.rank == 0:
            pipeline.step(inputs)
        else:
            losses: list[Tensor] = []
            pipeline.step(target=labels, losses=losses)
            results[f"losses {step}"] = torch.stack(losses)
        optimizer.step()
    return results | contents(half)


@case
def pipeline_one_forward_one_backward(scene: Scene) -> Results:
    return pipelined(scene, Schedule1F1B)


@case
def pipeline_all_forward_then_backward(scene: Scene) -> Results:
    return pipelined(scene, ScheduleGPipe)


def trained_for_a_checkpoint(scene: Scene) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = fsdp2()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, scene, optimizer)
    return model, optimizer


def restored(folder: str) -> Results:
    """A new model, filled from a checkpoint."""
    model = fsdp2()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    results = contents(model)
    for index, moments in enumerate(optimizer.state.values()):
        results |= {f"optimizer {index} {name}": value for name, value in moments.items()}
    return results


@case
def checkpoint_saved_and_loaded(scene: Scene) -> Results:
    model, optimizer = trained_for_a_checkpoint(scene)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(state, checkpoint_id=str(scene.folder / "checkpoint"))
    return contents(model) | {
        f"restored {k}": v for k, v in restored(str(scene.folder / "checkpoint")).items()
    }


@case
def checkpoint_saved_in_the_background(scene: Scene) -> Results:
    """The saving thread has collectives of its own while training goes on."""
    model, optimizer = trained_for_a_checkpoint(scene)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    group = dist.new_group()  # the thread's: two threads must not share an order of collectives
    saved = dcp.async_save(state, checkpoint_id=str(scene.folder / "checkpoint"), process_group=group)
    after = train(model, scene, optimizer)
    saved.result()
    return after | {f"restored {k}": v for k, v in restored(str(scene.folder / "checkpoint")).items()}


@case
def state_dict_gathered_and_spread_again(scene: Scene) -> Results:
    model, _ = trained_for_a_checkpoint(scene)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    results: Results = {f"full {name}": value for name, value in full.items()}  # on rank 0 alone
    other = fsdp2()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    set_model_state_dict(
        other, full, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    )
    return results | contents(other)


@case
def collectives_with_gradients(scene: Scene) -> Results:
    """`torch.distributed.nn`: the gradient of a collective is a collective."""
    results: Results = {}

    def differentiate(name: str, inputs: Tensor, output: Tensor) -> None:
        (output * torch.linspace(1, 2, output.numel()).view_as(output)).sum().backward()
        results[name], results[f"gradient of {name}"] = output, inputs.grad

    def fresh() -> Tensor:
        return (torch.randn(6) * (scene.rank + 1)).requires_grad_()

    x = fresh()
    differentiate("all_reduce", x, differentiable.all_reduce(x * x))
    x = fresh()
    differentiate("all_gather", x, torch.stack(differentiable.all_gather(x.exp())))
    x = fresh()
    halves = [half.contiguous() for half in x.sin().chunk(scene.world)]
    differentiate("reduce_scatter", x, differentiable.reduce_scatter(torch.empty(3), halves))
    x = fresh()
    halves = [half.contiguous() for half in x.sin().chunk(scene.world)]
    received = differentiable.all_to_all([torch.empty(3) for _ in range(scene.world)], halves)
    differentiate("all_to_all", x, torch.cat(list(received)))
    x = fresh()
    differentiate("all_to_all_single", x, differentiable.all_to_all_single(torch.empty(6), x.cos()))
    x = fresh()
    differentiate("broadcast", x, differentiable.broadcast(x * 3, src=1))
    x = fresh()
    differentiate("gather", x, torch.stack(differentiable.gather(x.exp(), dst=0)))
    return results


@case
def functional_collectives_with_gradients(scene: Scene) -> Results:
    group = dist.group.WORLD
    x = (torch.randn(4, 6) * (scene.rank + 1)).requires_grad_()
    gathered = functional.all_gather_tensor_autograd(x.exp(), 0, group)
    shared = functional.reduce_scatter_tensor_autograd(gathered.sin(), "sum", 0, group)
    splits = [3, 1] if scene.rank == 0 else [1, 3]  # as many go as come
    swapped = functional.all_to_all_single_autograd(shared, splits, splits, group)
    swapped.square().sum().backward()
    return {"output": swapped, "gradient": x.grad}


@case
def collectives_compiled(scene: Scene) -> Results:
    torch._dynamo.reset()
    group = dist.group.WORLD

    @torch.compile(backend="aot_eager", fullgraph=True)
    def normalise(x: Tensor) -> Tensor:
        mean = functional.all_reduce(x.mean(dim=0), "avg", group)
        everything = functional.all_gather_tensor(x - mean, 0, group)
        return functional.reduce_scatter_tensor(everything.square(), "sum", 0, group)

    @torch.compile(backend="aot_eager")
    def plainly(x: Tensor) -> Tensor:
        y = x * 2
        dist.all_reduce(y)
        return y + 1

    x = torch.randn(4, 6) * (scene.rank + 1)
    return {"normalised": normalise(x), "in place": plainly(x)}
