"""Training with replicated models: DDP and its options, its hooks, and the optimizers that go with it."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel
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

SMALL_BUCKET_MB = 0.001  # about one layer of `perceptron`, so that there are several buckets


@case
def ddp(scene: Scene) -> Results:
    return train(scene.ddp(perceptron()), scene)


@case
def ddp_with_small_buckets(scene: Scene) -> Results:
    return train(scene.ddp(perceptron(), bucket_cap_mb=SMALL_BUCKET_MB), scene)


@case
def ddp_with_bucket_views(scene: Scene) -> Results:
    model = scene.ddp(perceptron(), gradient_as_bucket_view=True, bucket_cap_mb=SMALL_BUCKET_MB)
    return train(model, scene)


class Fork(nn.Module):
    """Two ways through, of which each rank takes another; a third is never taken."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        seeded()
        self.rank = rank
        self.stem = nn.Linear(FEATURES, 16)
        self.ways = nn.ModuleList([nn.Linear(16, CLASSES) for _ in range(3)])

    def forward(self, inputs: Tensor) -> Tensor:
        return self.ways[self.rank % 2](self.stem(inputs).relu())


@case
def ddp_with_unused_parameters(scene: Scene) -> Results:
    return train(scene.ddp(Fork(scene.rank), find_unused_parameters=True), scene)


@case
def ddp_with_a_static_graph(scene: Scene) -> Results:
    return train(scene.ddp(Fork(0), static_graph=True, bucket_cap_mb=SMALL_BUCKET_MB), scene)


@case
def ddp_with_no_sync(scene: Scene) -> Results:
    model = scene.ddp(perceptron())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (inputs, labels) in enumerate(batches(scene)):
        if step % 2 == 0:
            with model.no_sync():
                F.cross_entropy(model(inputs), labels).backward()
        else:
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    return contents(model)


def sum_of_halves(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A hook as users write them: changes what is sent, and what came back."""
    halves = bucket.buffer().div_(2)
    work = dist.all_reduce(halves, async_op=True)
    return work.get_future().then(lambda future: future.value()[0].mul(1.0))


def hooked(
    scene: Scene,
    hook: object,
    state: object = None,
    bucket_cap_mb: float = SMALL_BUCKET_MB,
    **options: object,
) -> DistributedDataParallel:
    model = scene.ddp(perceptron(), bucket_cap_mb=bucket_cap_mb, **options)
    model.register_comm_hook(state, hook)
    return model


@case
def ddp_with_a_python_hook(scene: Scene) -> Results:
    return train(hooked(scene, sum_of_halves), scene)


@case
def ddp_with_a_python_hook_and_bucket_views(scene: Scene) -> Results:
    return train(hooked(scene, sum_of_halves, gradient_as_bucket_view=True), scene)


@case
def ddp_with_the_all_reduce_hook(scene: Scene) -> Results:
    return train(hooked(scene, default_hooks.allreduce_hook), scene)


@case
def ddp_with_the_bf16_hook(scene: Scene) -> Results:
    return train(hooked(scene, default_hooks.bf16_compress_hook), scene)


@case
def ddp_with_the_fp16_hook(scene: Scene) -> Results:
    return train(hooked(scene, default_hooks.fp16_compress_hook), scene)


@case
def ddp_with_the_power_sgd_hook(scene: Scene) -> Results:
    """Starts collectives inside the callbacks of others.

    One bucket: with several, Gloo's two threads wait forever in callbacks, for what only they could do.
    """
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    return train(hooked(scene, powerSGD_hook.powerSGD_hook, state, bucket_cap_mb=25), scene)


@case
def ddp_with_an_optimizer_after_the_hook(scene: Scene) -> Results:
    model = scene.ddp(perceptron(), bucket_cap_mb=SMALL_BUCKET_MB)
    model._register_fused_optim(torch.optim.SGD, 0.1)  # each bucket's parameters change as its sum arrives
    for inputs, labels in batches(scene):
        F.cross_entropy(model(inputs), labels).backward()
    return contents(model)


def train_unevenly(model: nn.Module, optimizer: torch.optim.Optimizer, scene: Scene, joined: list) -> None:
    """Rank 1 has two batches more than rank 0, which shadows its collectives meanwhile."""
    with Join(joined):
        for inputs, labels in batches(scene, count=2 + 2 * scene.rank):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()


@case
def ddp_joined_with_uneven_inputs(scene: Scene) -> Results:
    model = scene.ddp(perceptron(), bucket_cap_mb=SMALL_BUCKET_MB)
    train_unevenly(model, torch.optim.SGD(model.parameters(), lr=0.1), scene, [model])
    return contents(model)


@case
def ddp_and_zero_joined_with_uneven_inputs(scene: Scene) -> Results:
    model = scene.ddp(perceptron())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    train_unevenly(model, optimizer, scene, [model, optimizer])
    return contents(model)


class Bag(nn.Module):
    """A classifier of bags of words whose embedding has sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        seeded()
        self.words = nn.Embedding(50, 8, sparse=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        words = (inputs.abs() * 20).long().clamp_(max=49)
        return self.head(self.words(words).mean(dim=1))


@case
def ddp_with_sparse_gradients(scene: Scene) -> Results:
    model = scene.ddp(Bag())
    return train(model, scene, torch.optim.SGD(model.parameters(), lr=0.5))


def normalised() -> nn.Sequential:
    seeded()
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES))


@case
def ddp_with_batch_norm_buffers(scene: Scene) -> Results:
    return train(scene.ddp(normalised()), scene)


@case
def ddp_in_double_precision_and_bfloat16(scene: Scene) -> Results:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            model = perceptron()
            self.first, self.rest = model[0].double(), model[1:].bfloat16()

        def forward(self, inputs: Tensor) -> Tensor:
            return self.rest(self.first(inputs.double()).bfloat16())

    return train(scene.ddp(Mixed()), scene)


@case
def ddp_compiled(scene: Scene) -> Results:
    torch._dynamo.reset()
    model = scene.ddp(perceptron())  # the compiler refuses buckets below a megabyte
    return train(torch.compile(model, backend="aot_eager"), scene)


@case
def zero_redundancy_optimizer(scene: Scene) -> Results:
    model = scene.ddp(perceptron())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.Adam, parameters_as_bucket_view=True, lr=0.01
    )
    results = train(model, scene, optimizer)
    optimizer.consolidate_state_dict(to=0)
    if scene.rank == 0:
        for index, state in optimizer.state_dict()["state"].items():
            results |= {f"optimizer {index} {name}": value for name, value in state.items()}
    return results


@case
def post_local_sgd(scene: Scene) -> Results:
    subgroup, _ = dist.new_subgroups(group_size=1)
    state = PostLocalSGDState(process_group=None, subgroup=subgroup, start_localSGD_iter=2)
    model = hooked(scene, post_localSGD_hook, state)
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), PeriodicModelAverager(period=2, warmup_steps=1)
    )
    return train(model, scene, optimizer)


@case
def periodic_model_averaging(scene: Scene) -> Results:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averager = PeriodicModelAverager(period=2, warmup_steps=1)
    for inputs, labels in batches(scene, count=5):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        averager.average_parameters(model.parameters())
    return contents(model)
