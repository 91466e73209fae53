"""Wrong tensors and wrong arguments: an exception of the class PyTorch raises, which names the argument.

Each is refused by the rank that gets it, before any other rank is involved. So one job tries all of them in
one group, which must still work after each.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from operation_cases import everybody, numbers
from ranks import Rank, RankServer


@dataclass
class Refusal:
    call: Callable[[Rank], Any]
    raised: str  # the name of the class
    words: list[str]  # in the text


def sparse() -> torch.Tensor:
    return torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], (3,))


def other(me: Rank) -> int:
    return 1 - me.rank


def list_of(count: int, *shape: int, **options: Any) -> list[torch.Tensor]:
    return [torch.zeros(shape, **options) for _ in range(count)]


REFUSALS = {
    # Tensors that are somewhere else, or laid out otherwise.
    "a meta tensor to send": Refusal(
        lambda me: dist.send(torch.ones(3, device="meta"), other(me)), "ValueError", ["meta"]
    ),
    "a meta tensor to receive into": Refusal(
        lambda me: dist.recv(torch.ones(3, device="meta"), other(me)), "ValueError", ["meta"]
    ),
    "a sparse tensor to gather": Refusal(
        lambda me: dist.all_gather(list_of(me.world, 3), sparse()), "RuntimeError", ["sparse"]
    ),
    "a sparse tensor to broadcast": Refusal(
        lambda me: dist.broadcast(sparse(), 0), "RuntimeError", ["sparse"]
    ),
    "a sparse tensor to send": Refusal(lambda me: dist.send(sparse(), other(me)), "ValueError", ["sparse"]),
    "a compressed sparse tensor to reduce": Refusal(
        lambda me: dist.all_reduce(torch.eye(3).to_sparse_csr()), "RuntimeError", ["sparse"]
    ),
    "a maximum of sparse tensors": Refusal(
        lambda me: dist.all_reduce(sparse(), dist.ReduceOp.MAX), "ValueError", ["sparse", "sum"]
    ),
    "a strided tensor to send": Refusal(
        lambda me: dist.send(torch.ones(4, 4).t()[1:, :], other(me)), "ValueError", ["contiguous"]
    ),
    "a strided tensor to receive into": Refusal(
        lambda me: dist.recv(torch.ones(4, 4)[:, 0], other(me)), "ValueError", ["contiguous"]
    ),
    "no tensor at all": Refusal(lambda me: dist.all_reduce([1, 2]), "TypeError", ["tensor"]),
    "a number in a list of tensors": Refusal(
        lambda me: dist.all_gather([1.0] * me.world, torch.ones(1)), "TypeError", ["tensor_list"]
    ),
    # Lengths and dtypes that do not fit.
    "too few tensors to gather into": Refusal(
        lambda me: dist.all_gather(list_of(me.world - 1, 3), torch.ones(3)), "ValueError", ["outputs"]
    ),
    "a tensor too short to gather into": Refusal(
        lambda me: dist.all_gather_into_tensor(torch.zeros(5), torch.ones(3)),
        "ValueError",
        ["output", "input"],
    ),
    "tensors of another dtype to gather into": Refusal(
        lambda me: dist.all_gather(list_of(me.world, 3, dtype=torch.int64), torch.ones(3)),
        "ValueError",
        ["dtype"],
    ),
    "a tensor of another dtype to gather all into": Refusal(
        lambda me: dist.all_gather_into_tensor(torch.zeros(6, dtype=torch.float64), torch.ones(3)),
        "ValueError",
        ["dtype"],
    ),
    "too short an input to reduce and scatter": Refusal(
        lambda me: dist.reduce_scatter_tensor(torch.zeros(3), torch.ones(5)),
        "ValueError",
        ["input", "output"],
    ),
    "too short a list to reduce and scatter": Refusal(
        lambda me: dist.reduce_scatter(torch.zeros(3), list_of(me.world + 1, 3)), "ValueError", ["inputs"]
    ),
    "inputs that do not fit the output to reduce and scatter": Refusal(
        lambda me: dist.reduce_scatter(torch.zeros(3), list_of(me.world, 4)),
        "ValueError",
        ["input", "output"],
    ),
    "too few tensors to scatter": Refusal(
        lambda me: dist.scatter(torch.zeros(3), list_of(me.world - 1, 3), src=me.rank),
        "ValueError",
        ["inputs"],
    ),
    "tensors to scatter that do not fit": Refusal(
        lambda me: dist.scatter(torch.zeros(3), list_of(me.world, 4), src=me.rank), "ValueError", ["inputs"]
    ),
    "too few tensors to gather on the root": Refusal(
        lambda me: dist.gather(torch.zeros(3), list_of(me.world - 1, 3), dst=me.rank),
        "ValueError",
        ["outputs"],
    ),
    "a list to gather into where there is no root": Refusal(
        lambda me: dist.gather(torch.zeros(3), list_of(me.world, 3), dst=other(me)),
        "ValueError",
        ["gather_list"],
    ),
    "splits that do not add up": Refusal(
        lambda me: dist.all_to_all_single(torch.zeros(4), torch.ones(4), [2, 2], [1, 1]),
        "ValueError",
        ["input", "split"],
    ),
    "rows that cannot be split evenly": Refusal(
        lambda me: dist.all_to_all_single(torch.zeros(5), torch.ones(5)), "ValueError", ["5", "2"]
    ),
    "an output that does not fit the input to exchange": Refusal(
        lambda me: dist.all_to_all_single(torch.zeros(6), torch.ones(4)), "RuntimeError", ["input", "output"]
    ),
    "splits that disagree about this rank's own part": Refusal(
        lambda me: dist.all_to_all_single(
            torch.zeros(4), torch.ones(4), [1, 3] if me.rank == 0 else [3, 1], [2, 2]
        ),
        "RuntimeError",
        ["input", "output"],
    ),
    "negative splits": Refusal(
        lambda me: dist.all_to_all_single(torch.zeros(4), torch.ones(4), [2, 2], [5, -1]),
        "ValueError",
        ["split"],
    ),
    "too few tensors to exchange": Refusal(
        lambda me: dist.all_to_all(list_of(me.world, 3), list_of(me.world - 1, 3)), "ValueError", ["inputs"]
    ),
    "tensors of two dtypes as one": Refusal(
        lambda me: dist.all_reduce_coalesced([torch.ones(3), torch.ones(3, dtype=torch.int64)]),
        "ValueError",
        ["dtype"],
    ),
    # Reductions that there are not.
    "bits of floats": Refusal(
        lambda me: dist.all_reduce(torch.ones(3), dist.ReduceOp.BXOR), "ValueError", ["bxor", "float32"]
    ),
    "a maximum of complex numbers": Refusal(
        lambda me: dist.all_reduce(torch.ones(3, dtype=torch.complex64), dist.ReduceOp.MAX),
        "ValueError",
        ["complex"],
    ),
    "a sum of bits": Refusal(
        lambda me: dist.all_reduce(torch.empty(3, dtype=torch.bits8)), "ValueError", ["bits8"]
    ),
    # Ranks and tags.
    "a root that there is not": Refusal(
        lambda me: everybody().broadcast(torch.ones(3), 7).wait(), "ValueError", ["7", "root"]
    ),
    "a target that there is not": Refusal(
        lambda me: everybody().send([torch.ones(3)], 7, 0).wait(), "ValueError", ["7", "rank"]
    ),
    "a message to oneself": Refusal(lambda me: dist.send(torch.ones(3), me.rank), "ValueError", []),
    "a negative tag": Refusal(lambda me: dist.send(torch.ones(3), other(me), tag=-1), "ValueError", ["tag"]),
    "an enormous tag": Refusal(
        lambda me: dist.send(torch.ones(3), other(me), tag=1 << 40), "ValueError", ["tag"]
    ),
    "several tensors in one message": Refusal(
        lambda me: everybody().send([torch.ones(3), torch.ones(3)], other(me), 0).wait(),
        "ValueError",
        ["tensors", "2"],
    ),
}


def try_all(me: Rank) -> Any:
    """{name: (the classes and the text of the error if there was one, whether the group works after it)}."""
    results = {}
    for name, refusal in REFUSALS.items():
        print(f"refusal: {name}", flush=True)  # the last one is to blame if this process dies
        error = None
        try:
            refusal.call(me)
        except Exception as raised:
            error = [each.__name__ for each in type(raised).__mro__], str(raised)
        works = group_works(me)
        results[name] = error, works
        me.store.set(f"{name}/{me.rank}", str(works))
        if any(me.store.get(f"{name}/{rank}") != b"True" for rank in range(me.world)):
            me.join()
    return results


def group_works(me: Rank) -> bool:
    tensor = numbers(me, 5)
    try:
        dist.all_reduce(tensor)
    except dist.DistBackendError:
        return False
    return torch.equal(tensor, numbers(0, 5) + numbers(1, 5))


@pytest.fixture(scope="session")
def refused(ranks: RankServer) -> list[dict[str, Any]]:
    return [outcome.returned for outcome in ranks.run(try_all)]


@pytest.mark.parametrize("name", REFUSALS)
def test_what_makes_no_sense_is_refused_in_words_that_name_it(name: str, refused: list) -> None:
    for results in refused:
        error, works = results[name]
        assert error is not None, "it was accepted"
        classes, text = error
        assert REFUSALS[name].raised in classes, f"{classes}: {text}"
        for word in REFUSALS[name].words:
            assert word.lower() in text.lower(), text
        assert works, f"the group does not work any more after: {text}"


def reduce_meta_tensors(me: Rank) -> Any:
    dist.all_reduce(torch.ones(3, device="meta"))
    return group_works(me)


def test_a_collective_of_meta_tensors_does_nothing_as_on_every_backend(ranks: RankServer) -> None:
    """PyTorch has a kernel of its own for these, before any backend; programs are traced with it."""
    for outcome in ranks.run(reduce_meta_tensors):
        assert outcome.returned
