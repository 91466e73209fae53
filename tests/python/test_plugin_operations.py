"""Single operations through torch.distributed: the results are Gloo's, to the last bit, or right by hand."""

from typing import Any

import pytest
from bits import PACKED, QUANTIZED, Refused, plain
from operations import CASES, HARMFUL, run_cases
from operations_of_dtypes import (
    DTYPES,
    MOVEMENTS,
    OPERATIONS,
    move_every_dtype,
    moved_by_hand,
    of_every_dtype,
    reduce_every_dtype,
    reduced_by_hand,
)
from ranks import RankServer

# PyTorch warns of dtypes that it has not finished, or wants to drop; they count all the same.
pytestmark = [
    pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support is experimental:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
]

WORLD = 2
Results = list[dict[str, Any]]  # by rank


@pytest.fixture(scope="session", params=[2, 3], ids="{} ranks".format)
def cases(ranks: RankServer, request: pytest.FixtureRequest) -> tuple[Results, Results]:
    """What Gloo made of every case, and what the backend under test made of it."""
    world, names = request.param, list(CASES)
    theirs = ranks.run(run_cases, names, world=world, backend="gloo", limit=90)
    return results_of(theirs), results_of(ranks.run(run_cases, names, world=world, limit=90))


def results_of(outcomes: list) -> Results:
    return [outcome.returned for outcome in outcomes]


@pytest.mark.parametrize("name", CASES)
def test_an_operation_gives_what_gloo_gives(name: str, cases: tuple[Results, Results]) -> None:
    case = CASES[name]
    for rank, (theirs, ours) in enumerate(zip(*cases, strict=True)):
        result = ours[name]
        assert "returned" in result, f"rank {rank}: {result['raised']}"
        if case.by_hand:
            assert result["returned"] == plain(case.by_hand(rank, len(cases[0]))), f"rank {rank}, by hand"
        if case.gloo == "agrees":
            assert result == theirs[name], f"rank {rank}, compared with Gloo"
    if case.gloo not in ("agrees", HARMFUL):
        same = all(theirs[name] == ours[name] for theirs, ours in zip(*cases, strict=True))
        assert not same, f"`{case.gloo}` is no longer true of Gloo"


@pytest.fixture(scope="session")
def their_reductions(ranks: RankServer) -> Results:
    return results_of(ranks.run(reduce_every_dtype, world=WORLD, backend="gloo"))


@pytest.fixture(scope="session")
def our_reductions(ranks: RankServer) -> Results:
    return results_of(ranks.run(reduce_every_dtype, world=WORLD))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_reduction_of_a_dtype_is_right_or_refused_with_the_tensor_as_it_was(
    dtype: str, their_reductions: Results, our_reductions: Results
) -> None:
    for rank in range(WORLD):
        for op in OPERATIONS:
            by_hand = reduced_by_hand(WORLD, dtype, op)
            expected = plain(Refused(of_every_dtype(rank, dtype)) if by_hand is None else by_hand)
            result, theirs = our_reductions[rank][dtype][op], their_reductions[rank][dtype][op]
            assert result == expected, f"{op} on rank {rank}"
            gloo_is_wrong = dtype == "bool" and op == "SUM"  # it adds bytes
            if not isinstance(theirs, Refused) and not gloo_is_wrong:
                assert result == theirs, f"{op} on rank {rank}, compared with Gloo"


@pytest.fixture(scope="session")
def our_movements(ranks: RankServer) -> Results:
    return results_of(ranks.run(move_every_dtype, world=WORLD))


@pytest.mark.parametrize("dtype", sorted(set(DTYPES) - {*QUANTIZED, *PACKED}))
def test_every_movement_takes_every_dtype(dtype: str, our_movements: Results) -> None:
    for rank in range(WORLD):
        for name in MOVEMENTS:
            expected = plain(moved_by_hand(rank, WORLD, dtype, name))
            assert our_movements[rank][dtype][name] == expected, f"{name} on rank {rank}"


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_a_quantized_tensor_arrives_or_is_refused_by_the_dispatcher(
    dtype: str, our_movements: Results
) -> None:
    """PyTorch's operators for collectives have no kernels for these, so no backend gets to see them."""
    for rank in range(WORLD):
        for name in MOVEMENTS:
            result = our_movements[rank][dtype][name]
            if isinstance(result, str):
                assert result.startswith("NotImplementedError: Could not run 'c10d::"), (
                    f"{name} on rank {rank}"
                )
            else:
                assert result == plain(moved_by_hand(rank, WORLD, dtype, name)), f"{name} on rank {rank}"


@pytest.mark.parametrize("dtype", PACKED)
def test_a_packed_tensor_is_refused(dtype: str, our_movements: Results) -> None:
    """Its storage is shorter than its number of elements: code that trusts the number writes past its end."""
    for rank in range(WORLD):
        for name in MOVEMENTS:
            result = our_movements[rank][dtype][name]
            assert isinstance(result, str), f"{name} on rank {rank} was accepted"
            assert result.startswith(("NotImplementedError: ", "DistArgumentError: ")), result
