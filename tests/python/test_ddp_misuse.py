"""Mistakes in the use of DistributedDataParallel: each is an error on every rank that says what was wrong.

`--ddp torch --backend gloo` shows what PyTorch's does instead: often it names no parameter, leaves other
ranks waiting, or goes on with gradients that differ between ranks.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bits import plain
from ddp_class import under_test
from ddp_features import Checkpointed
from ranks import Outcome, Rank, RankServer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training_case import FEATURES, Scene, batches, perceptron, seeded
from training_ddp import SMALL_BUCKET_MB, Fork

Future = torch.futures.Future[Tensor]

ROUNDING = 1e-6  # a sum of averages is rounded otherwise than the average of sums, in each of its two terms


def small(model: nn.Module, **options: object) -> DistributedDataParallel:
    return under_test()(model, **({"bucket_cap_mb": SMALL_BUCKET_MB} | options))


def train(me: Rank, model: nn.Module, steps: int = 4) -> None:
    for inputs, labels in batches(Scene(me.rank, me.world, None), count=steps):
        nn.functional.cross_entropy(model(inputs), labels).backward()


def error_of(call: Callable[[], Any]) -> tuple[list[str], str]:
    """The names of the classes of an exception, and its text."""
    try:
        call()
    except Exception as error:
        return [each.__name__ for each in type(error).__mro__], str(error)
    return [], ""


def assert_all_raised(outcomes: list[Outcome], *words: str) -> None:
    for outcome in outcomes:
        assert outcome.raised("RuntimeError") or outcome.raised("ValueError"), outcome.story()
        for word in words:
            assert word in outcome.error, f"no `{word}` in what rank {outcome.rank} said:\n{outcome.story()}"


# ---------------------------------------------------------------------------------- models that differ


def model_of(rank: int, difference: str) -> nn.Module:
    """Rank 1's differs."""
    model = perceptron()
    if rank != 1:
        return model
    if difference == "fewer":
        return model[:-1]
    if difference == "more":
        return model.append(nn.Linear(5, 5))
    if difference == "shape":
        model[2], model[4] = nn.Linear(32, 31), nn.Linear(31, 5)
    elif difference == "turned":
        model[4] = nn.Linear(5, 32)
    elif difference == "dtype":
        model[4] = model[4].double()
    return model


MODELS = {
    "fewer": ["rank 1 has 4 parameters", "rank 0 has 6", "only rank 0 has `4.weight`"],
    "more": ["rank 1 has 8 parameters", "rank 0 has 6", "only rank 1 has `5.weight`"],
    "shape": ["rank 1", "parameter 2 is `2.weight` [31, 32] float32 there, and `2.weight` [32, 32]"],
    "turned": ["rank 1", "parameter 4 is `4.weight` [32, 5] float32 there, and `4.weight` [5, 32]"],
    "dtype": ["rank 1", "parameter 4 is `4.weight` [5, 32] float64 there, and `4.weight` [5, 32] float32"],
}


def build_differently(me: Rank, difference: str, options: dict[str, Any]) -> None:
    small(model_of(me.rank, difference), **options)


@pytest.mark.parametrize("difference", MODELS)
def test_ranks_with_different_models_all_hear_which_parameter_and_where(
    difference: str, ranks: RankServer
) -> None:
    # PyTorch compares only what it then synchronises.
    options = {"init_sync": False} if difference == "shape" else {}
    assert_all_raised(ranks.run(build_differently, difference, options, world=3), *MODELS[difference])


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ([{"find_unused_parameters": True}, {}], "find_unused_parameters"),
        ([{"static_graph": True}, {}], "static_graph"),
        ([{"bucket_cap_mb": 1}, {"bucket_cap_mb": 2}], "2097152"),
    ],
)
def test_ranks_with_different_options_all_hear_of_it(
    options: list[dict[str, Any]], word: str, ranks: RankServer
) -> None:
    assert_all_raised(ranks.run(build_and_train_with, options), word, "rank 1")


def build_and_train_with(me: Rank, options: list[dict[str, Any]]) -> None:
    train(me, small(perceptron(), **options[me.rank]))


# ---------------------------------------------------------------------------------- missing gradients


def miss(me: Rank, options: dict[str, Any]) -> None:
    train(me, small(Fork(me.rank), **options))


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 25}], ids=str)
def test_parameters_without_gradients_are_named_with_the_ranks_that_miss_them(
    options: dict[str, Any], ranks: RankServer
) -> None:
    outcomes = ranks.run(miss, options)
    assert_all_raised(
        outcomes,
        "6 parameters",
        "`ways.0.weight` on rank 1",
        "`ways.1.weight` on rank 0",
        "`ways.2.bias` on all ranks",
        "find_unused_parameters",
    )


class Forgetful(nn.Module):
    """From some step on, one rank does not use its last layer."""

    def __init__(self, forgets: bool, step: int) -> None:
        super().__init__()
        seeded()
        self.stem, self.head = nn.Linear(FEATURES, 5), nn.Linear(5, 5)
        self.forgets, self.step = forgets, step

    def forward(self, inputs: Tensor) -> Tensor:
        self.step -= 1
        inner = self.stem(inputs)
        return inner if self.forgets and self.step < 0 else self.head(inner)


def miss_later(me: Rank, step: int, options: dict[str, Any]) -> None:
    train(me, small(Forgetful(me.rank == 1, step), **options), steps=6)


@pytest.mark.parametrize("step", [0, 1, 3])
def test_a_parameter_that_one_rank_alone_misses_is_named_to_the_rank_that_waits_for_it(
    step: int, ranks: RankServer
) -> None:
    outcomes = ranks.run(miss_later, step, {})
    assert_all_raised(outcomes, "`head.weight` on rank 1", "`head.bias` on rank 1")


def ignore_an_output(me: Rank) -> Any:
    """The search finds a parameter by an output that the loss then does not use."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            seeded()
            self.used, self.aside = nn.Linear(FEATURES, 5), nn.Linear(FEATURES, 5)

        def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
            return self.used(inputs), self.aside(inputs)

    model = small(Two(), find_unused_parameters=True)

    def train() -> None:
        for _ in range(3):
            model.zero_grad()
            model(torch.full((2, FEATURES), me.rank + 1.0))[0].sum().backward()

    error = error_of(train)
    aside = model.module.aside.weight.grad
    return error, model.module.used.weight.grad, None if aside is None else aside.abs().sum().item()


def test_an_output_that_the_loss_ignores_is_no_harm(ranks: RankServer) -> None:
    for outcome in ranks.run(ignore_an_output):
        (classes, text), used, aside = outcome.returned
        assert not classes, text
        assert torch.equal(used, torch.full((5, FEATURES), 3.0))
        assert aside is None, "as in PyTorch"


def hook_beside_mixed_precision(me: Rank) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel.distributed import _MixedPrecision

    model = small(perceptron(), mixed_precision=_MixedPrecision(reduce_dtype=torch.bfloat16))
    return error_of(lambda: model.register_comm_hook(None, allreduce_hook))


def test_a_hook_beside_mixed_precision_is_refused_as_in_pytorch(ranks: RankServer) -> None:
    for outcome in ranks.run(hook_beside_mixed_precision):
        classes, text = outcome.returned
        assert "RuntimeError" in classes, classes
        assert "gradients are reduced as bfloat16 here" in text


# ---------------------------------------------------------------------------------- gradients come twice


def come_twice(me: Rank, who: int | None, options: dict[str, Any]) -> None:
    """The middle layer of one rank, or of all, is computed again within backward."""
    times = 2 if who in (None, me.rank) else 1
    train(me, small(Checkpointed(reentrant=True, times=times), **options))


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 25}], ids=str)
def test_a_parameter_that_is_ready_twice_is_named(options: dict[str, Any], ranks: RankServer) -> None:
    outcomes = ranks.run(come_twice, None, options)
    assert_all_raised(outcomes, "parameter 3 `middle.bias` was made ready twice", "static_graph")


def test_a_parameter_that_the_search_overlooked_is_named(ranks: RankServer) -> None:
    outcomes = ranks.run(come_twice, None, {"find_unused_parameters": True})
    assert_all_raised(outcomes, "parameter 3 `middle.bias` was named unused", "and then got a gradient")


def test_a_parameter_that_is_ready_twice_on_one_rank_fails_the_others_with_the_reason(
    ranks: RankServer,
) -> None:
    outcomes = ranks.run(come_twice, 1, {})
    assert_all_raised(outcomes, "`middle.bias` was made ready twice")
    assert "rank 1" in outcomes[0].error, outcomes[0].story()


class Ends(nn.Module):
    """What is used last in backward is used a second time, when all gradients have been there once."""

    def __init__(self) -> None:
        super().__init__()
        seeded()
        self.layer = nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        for _ in range(2):
            inputs = torch.utils.checkpoint.checkpoint(self.layer, inputs, use_reentrant=True)
        return inputs


def contribute_after_the_end(me: Rank) -> Any:
    inputs = torch.full((2, 4), me.rank + 1.0, requires_grad=True)
    bare = Ends()
    bare(inputs).sum().backward()
    model = small(Ends())
    error = error_of(lambda: model(inputs).sum().backward())
    own = [parameter.grad for parameter in bare.parameters()]
    for gradient in own:
        dist.all_reduce(gradient)
    return error, [g / me.world for g in own], [p.grad for p in model.parameters()]


def test_a_contribution_after_all_gradients_were_there_is_reduced_or_refused(ranks: RankServer) -> None:
    outcomes = ranks.run(contribute_after_the_end)
    for outcome in outcomes:
        (classes, text), expected, found = outcome.returned
        if classes:
            assert "`layer." in text, text
        else:
            torch.testing.assert_close(found, expected, rtol=ROUNDING, atol=0)
    assert plain(outcomes[0].returned[2]) == plain(outcomes[1].returned[2]), "ranks differ"


def backward_twice(me: Rank) -> Any:
    def loss_of(model: nn.Module) -> Tensor:
        return model(torch.full((2, FEATURES), me.rank + 1.0)).square().mean()

    bare = perceptron()
    loss = loss_of(bare)
    loss.backward(retain_graph=True)
    loss.backward()
    own = [parameter.grad for parameter in bare.parameters()]
    model = small(perceptron())
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    error = error_of(loss.backward)
    for gradient in own:
        dist.all_reduce(gradient)
    return error, [g / me.world for g in own], [p.grad for p in model.parameters()]


def test_a_second_backward_without_a_forward_is_reduced_or_refused(ranks: RankServer) -> None:
    outcomes = ranks.run(backward_twice)
    assert len({bool(outcome.returned[0][0]) for outcome in outcomes}) == 1, "ranks are not alike"
    for outcome in outcomes:
        (classes, text), expected, found = outcome.returned
        if classes:
            assert "backward" in text, text
        else:
            torch.testing.assert_close(found, expected, rtol=ROUNDING, atol=0)
    assert plain(outcomes[0].returned[2]) == plain(outcomes[1].returned[2]), "ranks differ"


def differ_in_order(me: Rank) -> Any:
    """Each rank computes its two halves in another order; buckets go in one order on all."""

    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            seeded()
            self.halves = nn.ModuleList([nn.Linear(FEATURES, 40) for _ in range(4)])

        def forward(self, inputs: Tensor) -> Tensor:
            order = list(self.halves) if me.rank == 0 else list(self.halves)[::-1]
            inner = inputs
            outputs = []
            for half in order:
                outputs.append(half(inner))
                inner = inputs + outputs[-1].mean() * 0.1
            return torch.stack(outputs).sum(dim=0)

    bare, model = Halves(), small(Halves())
    apart = []
    for step in range(4):
        inputs = torch.full((2, FEATURES), me.rank + step + 1.0)
        bare.zero_grad()
        model.zero_grad()
        bare(inputs).sum().backward()
        model(inputs).sum().backward()
        for parameter, replica in zip(bare.parameters(), model.parameters(), strict=True):
            dist.all_reduce(parameter.grad.div_(me.world))
            apart.append(plain(parameter.grad) != plain(replica.grad))
    return apart


def test_gradients_may_come_in_another_order_on_each_rank(ranks: RankServer) -> None:
    for outcome in ranks.run(differ_in_order):
        assert outcome.returned == [False] * 32


# ---------------------------------------------------------------------------------- static graphs


def change_a_static_graph(me: Rank, who: int | None, step: int) -> None:
    forgets = who in (None, me.rank)
    train(me, small(Forgetful(forgets, step), static_graph=True), steps=step + 3)


@pytest.mark.parametrize("step", [1, 3])
def test_a_static_graph_that_changes_is_an_error_that_names_the_parameter(
    step: int, ranks: RankServer
) -> None:
    assert_all_raised(ranks.run(change_a_static_graph, None, step), "`head.", "static")


def test_a_static_graph_that_changes_on_one_rank_is_an_error_on_all(ranks: RankServer) -> None:
    assert_all_raised(ranks.run(change_a_static_graph, 1, 2), "`head.", "rank 1")


def declare_too_late(me: Rank) -> Any:
    model = small(perceptron())
    train(me, model, steps=2)
    error = error_of(model._set_static_graph)
    return error, error_of(lambda: train(me, model))


def test_a_static_graph_that_is_declared_too_late_is_refused_and_training_goes_on(ranks: RankServer) -> None:
    for outcome in ranks.run(declare_too_late):
        (classes, text), (harmed, story) = outcome.returned
        assert "RuntimeError" in classes or "ValueError" in classes
        assert "before" in text, text
        assert not harmed, story


# ---------------------------------------------------------------------------------- hooks


def average(_: object, bucket: dist.GradBucket) -> Future:
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


REGISTRATIONS: dict[str, Callable[[DistributedDataParallel], Any]] = {
    "hook": lambda model: model.register_comm_hook(None, average),
    "builtin": lambda model: model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE),
}


def register_twice(me: Rank, first: str, second: str) -> Any:
    model = small(perceptron())
    REGISTRATIONS[first](model)
    return error_of(lambda: REGISTRATIONS[second](model)), error_of(lambda: train(me, model))


@pytest.mark.parametrize("first", REGISTRATIONS)
@pytest.mark.parametrize("second", REGISTRATIONS)
def test_a_second_hook_is_refused_and_the_first_goes_on(first: str, second: str, ranks: RankServer) -> None:
    for outcome in ranks.run(register_twice, first, second):
        (classes, text), (harmed, story) = outcome.returned
        assert "RuntimeError" in classes
        assert "can only be called once" in text, text
        assert not harmed, story


def register_wrongly(me: Rank) -> Any:
    def wrong_bucket(state: object, bucket: int) -> Future:
        raise AssertionError

    def wrong_return(state: object, bucket: dist.GradBucket) -> int:
        raise AssertionError

    def wrong_name(state: object, gradients: dist.GradBucket) -> Future:
        raise AssertionError

    model = small(perceptron())
    hooks = {"bucket": wrong_bucket, "return": wrong_return, "name": wrong_name, "number": 3}
    errors = {
        name: error_of(lambda hook=hook: model.register_comm_hook(None, hook)) for name, hook in hooks.items()
    }
    model.register_comm_hook(None, average)
    train(me, model)
    return errors


def test_hooks_of_a_wrong_kind_are_refused_as_pytorch_does(ranks: RankServer) -> None:
    for outcome in ranks.run(register_wrongly):
        errors = outcome.returned
        assert errors["bucket"][0][0] == "ValueError"
        assert errors["bucket"][1] == "Communication hook: bucket annotation should be dist.GradBucket."
        assert errors["return"][0][0] == "ValueError"
        assert errors["return"][1] == (
            "Communication hook: return annotation should be torch.futures.Future[torch.Tensor]."
        )
        assert errors["number"] == (
            ["TypeError", "Exception", "BaseException", "object"],
            "Communication hook must be callable.",
        )
        assert "bucket" in errors["name"][1]


def returns_a_tensor(_: object, bucket: dist.GradBucket) -> Future:
    return bucket.buffer()


def returns_nothing(_: object, bucket: dist.GradBucket) -> Future:
    return None


def raises(_: object, bucket: dist.GradBucket) -> Future:
    raise LookupError("the hook lost its way")


def raises_in_a_callback(_: object, bucket: dist.GradBucket) -> Future:
    def fail(future: Future) -> Tensor:
        raise LookupError("the callback lost its way")

    return average(_, bucket).then(fail)


def holds_a_number(_: object, bucket: dist.GradBucket) -> Future:
    return average(_, bucket).then(lambda future: 3)


def holds_another_size(_: object, bucket: dist.GradBucket) -> Future:
    return average(_, bucket).then(lambda future: future.value()[:-1])


HOOKS = {
    "returns_a_tensor": (returns_a_tensor, "must return a torch.futures.Future object"),
    "returns_nothing": (returns_nothing, "must return a torch.futures.Future object"),
    "raises": (raises, "the hook lost its way"),
    "raises_in_a_callback": (raises_in_a_callback, "the callback lost its way"),
    "holds_a_number": (holds_a_number, "ensor"),
    "holds_another_size": (holds_another_size, "elements"),
}


def train_with(me: Rank, hook: str, who: list[int]) -> None:
    model = small(perceptron())
    model.register_comm_hook(None, HOOKS[hook][0] if me.rank in who else average)
    train(me, model)


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_fails_on_all_ranks_fails_backward_with_its_words(hook: str, ranks: RankServer) -> None:
    for outcome in ranks.run(train_with, hook, [0, 1]):
        assert HOOKS[hook][1] in outcome.error, outcome.story()


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_fails_on_one_rank_fails_backward_on_the_others(hook: str, ranks: RankServer) -> None:
    outcomes = ranks.run(train_with, hook, [1])
    assert HOOKS[hook][1] in outcomes[1].error, outcomes[1].story()
    assert "rank 1" in outcomes[0].error, outcomes[0].story()


# ---------------------------------------------------------------------------------- gradients of a wrong kind


def detach_a_view(me: Rank) -> Any:
    model = small(perceptron(), gradient_as_bucket_view=True)
    train(me, model, steps=3)
    error = error_of(next(model.parameters()).grad.detach_)
    return error, error_of(lambda: train(me, model))


def test_a_gradient_that_is_a_view_cannot_be_detached_in_place(ranks: RankServer) -> None:
    for outcome in ranks.run(detach_a_view):
        (classes, text), (harmed, story) = outcome.returned
        assert "RuntimeError" in classes
        assert "Can't detach views in-place" in text, text
        assert not harmed, story


class Undeclared(nn.Module):
    """A table with a sparse gradient that no `Embedding` announces."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(10, 4))

    def forward(self, inputs: Tensor) -> Tensor:
        return nn.functional.embedding(inputs, self.table, sparse=True)


def have_an_undeclared_sparse_gradient(me: Rank) -> Any:
    model = small(Undeclared())
    error = error_of(lambda: model(torch.tensor([1, 2 + me.rank])).sum().backward())
    return error, model.module.table.grad.to_dense()


def test_a_sparse_gradient_that_nobody_announced_is_reduced_or_refused(ranks: RankServer) -> None:
    for outcome in ranks.run(have_an_undeclared_sparse_gradient):
        (classes, text), found = outcome.returned
        if classes:
            assert "NotImplementedError" in classes or "RuntimeError" in classes
            assert "`table`" in text, text
            assert "sparse" in text, text
        else:
            assert found[:, 0].tolist() == [0, 1, 0.5, 0.5, 0, 0, 0, 0, 0, 0]


# ---------------------------------------------------------------------------------- the constructor


def build_nonsense(me: Rank) -> Any:
    frozen = perceptron().requires_grad_(False)
    other = dist.new_group(backend="gloo")
    calls: dict[str, Callable[[], Any]] = {
        "nothing to train": lambda: under_test()(frozen),
        "devices": lambda: under_test()(perceptron(), device_ids=[0, 1]),
        "lazy": lambda: under_test()(nn.LazyLinear(3)),
        "group": lambda: under_test()(perceptron(), process_group=other),
        "delayed": lambda: under_test()(perceptron(), delay_all_reduce_named_params=[]),
        "rate": lambda: small(perceptron())._set_ddp_runtime_logging_sample_rate(0),
        "finalize": lambda: small(perceptron()).finalize_backward(),
    }
    errors = {name: error_of(call) for name, call in calls.items()}
    train(me, small(perceptron()))  # the group is not harmed
    return errors


def test_nonsense_is_refused_before_anything_happens(ranks: RankServer) -> None:
    words = {
        "nothing to train": "no parameter that requires a gradient|any parameter that requires a gradient",
        "devices": "device_ids",
        "lazy": "uninitialized parameters",
        "group": "tenfold",
        "delayed": "need to be set at the same time",
        "rate": "rate",
        "finalize": "require_manual_backward_finalization",
    }
    for outcome in ranks.run(build_nonsense):
        for name, (classes, text) in outcome.returned.items():
            assert classes, f"{name} was accepted"
            assert re.search(words[name], text), f"{name}: {text}"
