"""Ranks that die or hang in backward: the others raise, and say who it was and what they waited for.

Ranks are real processes. Those that are to live say in the store how far they are, so that nothing here waits
for time; the group's time limit is long where a death is to be noticed, and short where only it can end.
"""

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_class import under_test
from ranks import Rank, RankServer
from test_ddp_misuse import error_of
from torch import Tensor, nn
from training_case import FEATURES, perceptron, seeded
from training_ddp import SMALL_BUCKET_MB

LONG = 60.0  # seconds: a death that is found by it alone is found too late for the job
SHORT = 10.0  # warming up must fit into it, too
WARM_UP = 3  # steps until buckets are final


class Trap(torch.autograd.Function):
    """Does something in the middle of backward, when some gradients are on their way and some are not."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, spring: Callable[[], None]) -> Tensor:
        ctx.spring = spring
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.spring()
        return gradient, None


class Trapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        seeded()
        self.stem = nn.Linear(FEATURES, 32)
        self.rest = perceptron(64)[2:]
        self.middle = nn.Linear(32, 64)
        self.spring: Callable[[], None] = lambda: None

    def forward(self, inputs: Tensor) -> Tensor:
        return self.rest(self.middle(Trap.apply(self.stem(inputs), lambda: self.spring())))


def warmed_up(**options: object) -> nn.Module:
    model = under_test()(Trapped(), **({"bucket_cap_mb": SMALL_BUCKET_MB} | options))
    for _ in range(WARM_UP):
        model(torch.ones(2, FEATURES)).sum().backward()
    return model


def average(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def die_in_backward(me: Rank, step: int, options: dict[str, Any], hooked: bool) -> Any:
    """The last rank is killed when all others are in the same backward."""
    victim = me.world - 1
    model = under_test()(Trapped(), **({"bucket_cap_mb": SMALL_BUCKET_MB} | options))
    if hooked:
        model.register_comm_hook(None, average)
    if me.rank == victim:
        me.store.set("pid", str(os.getpid()))

    def spring() -> None:
        if me.rank == victim:
            me.until_told(*(f"{rank} is in backward" for rank in range(victim)))
            os.kill(os.getpid(), signal.SIGKILL)
        me.tell(f"{me.rank} is in backward")

    for _ in range(step):
        model(torch.ones(2, FEATURES)).sum().backward()
    model.module.spring = spring
    loss = model(torch.ones(2, FEATURES)).sum()
    first = error_of(loss.backward)
    again = error_of(lambda: model(torch.ones(2, FEATURES)).sum().backward())
    return first, again, int(me.store.get("pid")), model._get_ddp_logging_data()


KINDS: dict[str, tuple[int, dict[str, Any], bool]] = {
    "plain": (WARM_UP, {}, False),
    "first step": (0, {}, False),
    "views": (WARM_UP, {"gradient_as_bucket_view": True}, False),
    "static": (WARM_UP, {"static_graph": True}, False),
    "searching": (WARM_UP, {"find_unused_parameters": True}, False),
    "hook": (WARM_UP, {}, True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_is_killed_in_backward_is_named_to_all_others(kind: str, ranks: RankServer) -> None:
    *survivors, victim = ranks.run(die_in_backward, *KINDS[kind], world=3, timeout=LONG, limit=LONG)
    assert victim.code == -signal.SIGKILL
    for survivor in survivors:
        (classes, text), (again, after), pid, log = survivor.returned
        assert "RuntimeError" in classes, text
        assert "rank 2" in text, text
        assert "died" in text, text
        assert str(pid) in text, text
        assert again, "a model whose reducer has failed was trained on"
        assert "rank 2" in after, after
        assert log["has_error"] == 1
        assert "rank 2" in log["error"], log["error"]


def test_the_only_other_rank_that_is_killed_in_backward_is_named(ranks: RankServer) -> None:
    survivor, victim = ranks.run(die_in_backward, *KINDS["plain"], world=2, timeout=LONG, limit=LONG)
    assert victim.code == -signal.SIGKILL
    (classes, text), _, pid, _ = survivor.returned
    assert "DistBackendError" in classes, text
    for word in ["rank 1", "died", str(pid), "bucket"]:
        assert word in text, text


def hang_in_backward(me: Rank) -> Any:
    """The last rank sits in its backward until the others have given up."""
    victim = me.world - 1
    model = warmed_up()

    def spring() -> None:
        if me.rank == victim:
            me.until_told(*(f"{rank} gave up" for rank in range(victim)))

    model.module.spring = spring
    first = error_of(model(torch.ones(2, FEATURES)).sum().backward)
    me.tell(f"{me.rank} gave up")
    model.module.spring = lambda: None
    return first, error_of(lambda: model(torch.ones(2, FEATURES)).sum().backward())


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_hangs_in_backward_is_named_when_the_time_is_up(world: int, ranks: RankServer) -> None:
    *others, victim = ranks.run(hang_in_backward, world=world, timeout=SHORT)
    for other in others:
        (classes, text), (again, _) = other.returned
        assert "DistBackendError" in classes, text
        assert f"rank {world - 1}" in text, text
        assert "bucket" in text, text
        assert again, "a model whose reducer has failed was trained on"
    errors = [other.returned[0] for other in others]
    assert any("TimeoutError" in classes for classes, _ in errors), errors
    assert any("did not answer for" in text for _, text in errors), errors
    # It may have all that it needs of the others to end this one backward; then it hears of it in the next.
    assert victim.returned[1][0], "it continued as if no rank had given up"


def leave_before_backward(me: Rank) -> Any:
    """The last rank ends well, one step too early."""
    model = warmed_up()
    if me.rank == me.world - 1:
        return None
    # Forward does not begin if the group is known to have failed by then.
    return error_of(lambda: model(torch.ones(2, FEATURES)).sum().backward())


def test_a_rank_that_ends_too_early_is_named_to_those_that_wait_for_its_gradients(ranks: RankServer) -> None:
    *others, _ = ranks.run(leave_before_backward, world=3, timeout=LONG, limit=LONG)
    for other in others:
        classes, text = other.returned
        assert "RuntimeError" in classes
        assert "rank 2" in text, text


def go_on_in_the_group(me: Rank) -> Any:
    """One rank makes a mistake; the reducer is lost and the caller's group is not."""
    model = warmed_up()

    def spring() -> None:
        if me.rank == 1:
            raise LookupError("a mistake in backward")

    model.module.spring = spring
    error = error_of(model(torch.ones(2, FEATURES)).sum().backward)
    forward = error_of(lambda: model(torch.ones(2, FEATURES)))
    dist.all_reduce(total := torch.tensor([me.rank + 1.0]))
    again = warmed_up()
    gradients = [parameter.grad.sum().item() for parameter in again.parameters()]
    return error, forward, total.item(), gradients


def test_an_exception_in_one_ranks_backward_fails_the_others_and_a_new_model_trains_on(
    ranks: RankServer,
) -> None:
    """What PyTorch's does instead: the other rank waits in backward until it times out."""
    first, second = ranks.run(go_on_in_the_group, timeout=30)
    assert "a mistake in backward" in second.returned[0][1]
    assert "rank 1" in first.returned[0][1], first.returned
    assert first.returned[2:] == second.returned[2:], "a new model does not train alike"
    assert first.returned[2] == 3.0
