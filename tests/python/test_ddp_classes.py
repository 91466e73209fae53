"""c10d's classes of DDP: on arrays without PyTorch, driven by hand, and beside PyTorch's own functions."""

import json
import random
import subprocess
from typing import Any

import pytest
import tenfold
import torch
import torch.distributed as dist
from bits import plain
from processes import python
from ranks import Rank, RankServer

Outcomes = dict[str, list[Any]]


@pytest.fixture(scope="module")
def arrays() -> Outcomes:
    """What every rank of every case in programs/ddp_arrays.py returned, or its error."""
    ran = subprocess.run(python("ddp_arrays.py"), capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


# What each rank returns.
RETURNED: dict[str, Any] = {
    "averages_of_several_steps": 0.0,
    "buckets_are_cut_along_the_order_of_gradients": [[False, True, False], "2, 0 3, 1", "64, 128, 64"],
    "unused_parameters_are_named_by_the_caller": [[1.0] * 4, [3.0] * 4, [0.0] * 4],
    "a_static_graph_learns_from_its_first_iteration": [[[step + 1.0] * 4] * 2 for step in range(3)],
    "a_hook_reduces_buckets": [
        ["state", 0, False, 20, [[4, 5]], [True]],
        ["state", 1, False, 5, [[5]], [True]],
        ["state", 2, True, 6, [[2, 3]], [True]],
    ],
    "a_hook_may_return_other_memory": True,
    "the_numbers_of_builtin_hooks": [1, 2],
    "parameters_that_are_alike": 0,
    "a_coalesced_broadcast": "alike",
}

RAISED: dict[str, str] = {
    "a_parameter_that_is_ready_twice": "parameter 2 `the last` was made ready twice in iteration 1",
    "parameters_that_are_missing": "1 parameter has no gradient at the end of iteration 1: `the first` on "
    "rank 1",
    "parameters_of_different_shapes": "rank 2 has another model than rank 0: parameter 1 is `params[1]` [6] "
    "float64 there, and `params[1]` [5] float64 on rank 0",
    "parameters_of_different_numbers": "rank 1 has 3 parameters, and rank 0 has 2: only rank 1 has "
    "`params[2]`",
}


@pytest.mark.parametrize("case", RETURNED)
def test_a_reducer_of_arrays(case: str, arrays: Outcomes) -> None:
    for outcome in arrays[case]:
        assert outcome == RETURNED[case], outcome


@pytest.mark.parametrize("case", RAISED)
def test_a_mistake_with_arrays_is_an_error_on_all_ranks(case: str, arrays: Outcomes) -> None:
    for outcome in arrays[case]:
        assert isinstance(outcome, dict), outcome
        assert "DistBackendError" in outcome["error"], outcome["trace"]
        assert RAISED[case] in outcome["text"], outcome["trace"]


def test_the_builtin_hooks_average_arrays_in_their_precision(arrays: Outcomes) -> None:
    for whole, half in zip(arrays["the_builtin_all_reduce"], arrays["the_builtin_fp16"], strict=True):
        assert whole < 2**-22
        assert 2**-16 < half < 2**-9, "that was not float16"


def test_the_log_of_arrays(arrays: Outcomes) -> None:
    for rank, outcome in enumerate(arrays["the_log"]):
        assert outcome == ["Model", 3, rank, 3, 4 * 20 + 8 * 5 + 4 * 6]


def test_every_case_of_arrays_is_looked_at(arrays: Outcomes) -> None:
    others = {"the_builtin_all_reduce", "the_builtin_fp16", "the_log"}
    assert set(arrays) == set(RETURNED) | set(RAISED) | others


# ---------------------------------------------------------------------------------- beside PyTorch's

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def model_of(generator: random.Random) -> list[torch.Tensor]:
    dtypes = DTYPES[: generator.randint(1, len(DTYPES))]
    return [
        torch.empty(generator.choice([0, 1, 7, 64, 100, 1000]), dtype=generator.choice(dtypes))
        for _ in range(generator.randint(1, 30))
    ]


@pytest.mark.parametrize("seed", range(10))
def test_buckets_are_assigned_as_pytorch_does(seed: int) -> None:
    generator = random.Random(seed)
    for _ in range(100):
        tensors = model_of(generator)
        limits = [generator.choice([0, 1, 50, 400, 4000, 2**40]) for _ in range(generator.randint(1, 4))]
        sparse = [generator.random() < 0.2 for _ in tensors] if generator.random() < 0.5 else []
        order = list(range(len(tensors)))
        generator.shuffle(order)
        order = order if generator.random() < 0.5 else []
        given = (tensors, limits, sparse, order)
        assert assigned(tenfold.c10d, *given) == assigned(dist, *given), (tensors, limits, sparse, order)


def assigned(module: Any, *given: Any) -> tuple[list[list[int]], list[int]]:
    buckets, limits = module._compute_bucket_assignment_by_size(*given)
    return [list(bucket) for bucket in buckets], list(limits)


def test_no_tensors_and_wrong_numbers_of_indices_are_refused() -> None:
    for arguments in [([], [1]), ([torch.ones(1)], [1], [], [0, 1]), ([torch.ones(1)], [])]:
        with pytest.raises((ValueError, RuntimeError)):
            tenfold.c10d._compute_bucket_assignment_by_size(*arguments)


def broadcast(me: Rank) -> Any:
    """The same tensors by PyTorch's function and by ours, of all dtypes and shapes, from any rank."""
    different = []
    for root in range(me.world):
        for size in [1, 1000, 250 * 1024 * 1024]:

            def tensors() -> list[torch.Tensor]:
                generator = torch.Generator().manual_seed(me.rank)
                dense = [torch.randn(3, 4, generator=generator).to(dtype) for dtype in DTYPES]
                odd = [torch.randn(4, 6, generator=generator).t(), torch.tensor(me.rank), torch.ones(0)]
                return [*dense, *odd, torch.full((500,), me.rank), torch.tensor([me.rank > 0])]

            ours, theirs = tensors(), tensors()
            dist._broadcast_coalesced(dist.group.WORLD, theirs, size, root)
            tenfold.c10d._broadcast_coalesced(dist.group.WORLD, ours, size, root)
            different += [plain(a) != plain(b) for a, b in zip(ours, theirs, strict=True)]
    return different


def test_a_coalesced_broadcast_of_tensors_equals_pytorchs(ranks: RankServer) -> None:
    for outcome in ranks.run(broadcast, world=3):
        assert outcome.returned == [False] * (3 * 3 * 9)


def verify(me: Rank, kind: str) -> None:
    tensors = [torch.ones(2, 3), torch.ones(4)]
    if me.rank == 2:
        if kind == "shape":
            tensors[1] = torch.ones(5)
        elif kind == "number":
            tensors.append(torch.ones(1))
    tenfold.c10d._verify_params_across_processes(dist.group.WORLD, tensors)


def test_parameters_that_differ_are_named_on_all_ranks(ranks: RankServer) -> None:
    for kind, text in {
        "shape": "rank 2 has another model than rank 0: parameter 1 is `params[1]` [5] float32 there",
        "number": "rank 2 has 3 parameters, and rank 0 has 2: only rank 2 has `params[2]`",
    }.items():
        for outcome in ranks.run(verify, kind, world=3):
            assert outcome.raised("DistBackendError"), outcome.story()
            assert text in outcome.error
    assert [outcome.returned for outcome in ranks.run(verify, "", world=3)] == [None] * 3


def drive(me: Rank) -> Any:
    """A reducer of PyTorch's tensors, by the calls that PyTorch's DDP makes of its own."""
    linear = torch.nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.fill_(0.5)
    params = list(linear.parameters())
    buckets, limits = tenfold.c10d._compute_bucket_assignment_by_size(params, [2**20])
    reducer = tenfold.c10d.Reducer(params, buckets, limits, dist.group.WORLD)
    results = []
    for step in range(3):
        linear.zero_grad()
        reducer._rebuild_buckets()
        reducer.prepare_for_forward()
        output = linear(torch.full((1, 3), me.rank + step + 1.0))
        reducer.prepare_for_backward([output])
        output.sum().backward()
        results.append([params[0].grad.tolist(), params[1].grad.tolist()])
    with_zeros = [bucket.buffer().sum().item() for bucket in reducer._get_zeros_like_grad_buckets()]
    times = reducer.get_backward_stats()
    return results, with_zeros, [time > 0 for time in times], reducer._ddp_graph_static()


@pytest.mark.smoke
def test_a_reducer_of_tensors_can_be_driven_by_hand(ranks: RankServer) -> None:
    for outcome in ranks.run(drive):
        results, zeros, times, static = outcome.returned
        assert results == [[[[step + 1.5] * 3] * 2, [1.0, 1.0]] for step in range(3)]
        assert set(zeros) == {0.0}
        assert times == [True, True]
        assert static
