"""What Gloo and PyTorch's stores refuse: tenfold raises an exception of the same class, with the same phrase.

Programs look for phrases of c10d. Every misuse here runs with PyTorch's own and with ours: the phrase must be
in both texts, which shows that it is c10d's. Ours says more.
"""

import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import tenfold
import torch
import torch.distributed as dist
from operation_cases import everybody
from ranks import Rank, RankServer
from torch._C import _distributed_c10d as c10d


@dataclass
class Misuse:
    call: Callable[[Rank], Any]
    phrase: str


def ones(count: int = 1, *shape: int, **options: Any) -> list[torch.Tensor]:
    return [torch.ones(shape or (2,), **options) for _ in range(count)]


def sparse() -> torch.Tensor:
    return torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], (3,))


def with_root(kind: str, root: int, root_tensor: int = 0) -> Any:
    options = getattr(dist, kind)() if hasattr(dist, kind) else getattr(c10d, kind)()
    options.rootRank = root
    if hasattr(options, "rootTensor"):
        options.rootTensor = root_tensor
    return options


def reducing(kind: str, op: Any) -> Any:
    options = getattr(c10d, kind)()
    options.reduceOp = op
    return options


def backend() -> Any:
    """Without PyTorch's dispatcher before it, which refuses a call without tensors by itself."""
    return everybody()._get_backend(torch.device("cpu"))


def other(me: Rank) -> int:
    return 1 - me.rank


LONGS = torch.ones(2, dtype=torch.int64)

MISUSES = {
    "broadcast from a negative root": Misuse(
        lambda me: everybody().broadcast(ones(), with_root("BroadcastOptions", -1)), "invalid root rank: -1"
    ),
    "broadcast from a root that is too large": Misuse(
        lambda me: everybody().broadcast(ones(), with_root("BroadcastOptions", me.world)),
        "invalid root rank: 2",
    ),
    "broadcast a negative root tensor": Misuse(
        lambda me: everybody().broadcast(ones(), with_root("BroadcastOptions", 0, -1)),
        "invalid root tensor: -1",
    ),
    "broadcast a root tensor that there is not": Misuse(
        lambda me: everybody().broadcast(ones(), with_root("BroadcastOptions", 0, 1)),
        "invalid root tensor: 1",
    ),
    "broadcast no tensor": Misuse(
        lambda me: backend().broadcast([], with_root("BroadcastOptions", 0)), "invalid root tensor: 0"
    ),
    "broadcast tensors of two dtypes": Misuse(
        lambda me: everybody().broadcast([*ones(), LONGS], with_root("BroadcastOptions", 0)),
        "invalid tensor type",
    ),
    "broadcast tensors of two sizes": Misuse(
        lambda me: everybody().broadcast(ones() + ones(1, 3), with_root("BroadcastOptions", 0)),
        "invalid tensor size",
    ),
    "reduce no tensor": Misuse(
        lambda me: backend().allreduce([], c10d.AllreduceOptions()), "requires non-empty tensor list"
    ),
    "reduce tensors of two dtypes": Misuse(
        lambda me: everybody().allreduce([*ones(), LONGS]), "invalid tensor type"
    ),
    "reduce tensors of two sizes": Misuse(
        lambda me: everybody().allreduce(ones() + ones(1, 3)), "invalid tensor size"
    ),
    "reduce tensors of two layouts": Misuse(
        lambda me: everybody().allreduce([*ones(1, 3), sparse()]), "invalid tensor layout"
    ),
    "reduce sparse tensors to the largest": Misuse(
        lambda me: everybody().allreduce([sparse()], dist.ReduceOp.MAX),
        "unsupported reduction operation (allreduce of sparse tensors only works with ReduceOp.SUM)",
    ),
    "coalesce no tensors": Misuse(
        lambda me: backend().allreduce_coalesced([], c10d.AllreduceCoalescedOptions()),
        "requires non-empty tensor list",
    ),
    "coalesce tensors of two dtypes": Misuse(
        lambda me: everybody().allreduce_coalesced([*ones(), LONGS], c10d.AllreduceCoalescedOptions()),
        "tensors must all have the same type",
    ),
    "reduce to a negative root": Misuse(
        lambda me: everybody().reduce(ones(), with_root("ReduceOptions", -1)), "invalid root rank: -1"
    ),
    "reduce to a root that is too large": Misuse(
        lambda me: everybody().reduce(ones(), with_root("ReduceOptions", me.world)), "invalid root rank: 2"
    ),
    "reduce another root tensor": Misuse(
        lambda me: everybody().reduce(ones(), with_root("ReduceOptions", 0, 1)), "invalid root tensor: 1"
    ),
    "reduce two tensors to a root": Misuse(
        lambda me: everybody().reduce(ones(2), with_root("ReduceOptions", 0)),
        "requires a single-element tensor list",
    ),
    "gather nothing for all": Misuse(
        lambda me: backend().allgather([], [], c10d.AllgatherOptions()),
        "requires non-empty input tensor list",
    ),
    "gather for all without outputs": Misuse(
        lambda me: everybody().allgather([], ones()),
        "requires input/output tensor lists to have the same length",
    ),
    "gather for all into too few": Misuse(
        lambda me: everybody().allgather([ones(me.world - 1)], ones()),
        "invalid output tensor list at index 0",
    ),
    "gather for all into too many": Misuse(
        lambda me: everybody().allgather([ones(me.world + 1)], ones()),
        "invalid output tensor list at index 0",
    ),
    "gather for all into another dtype": Misuse(
        lambda me: everybody().allgather([[LONGS, LONGS]], ones()), "invalid tensor type"
    ),
    "gather for all into another size": Misuse(
        lambda me: everybody().allgather([ones(me.world, 5)], ones()), "invalid tensor size"
    ),
    "gather coalesced without inputs": Misuse(
        lambda me: backend().allgather_coalesced([], [], c10d.AllgatherOptions()),
        "requires non-empty input tensor list",
    ),
    "gather coalesced into too few lists": Misuse(
        lambda me: everybody().allgather_coalesced([ones()], ones()),
        "output lists should be equal to world size",
    ),
    "gather coalesced into too short lists": Misuse(
        lambda me: everybody().allgather_coalesced([ones(), ones()], ones(2)),
        "invalid output size: (expected length 2, got 1)",
    ),
    "gather at a negative root": Misuse(
        lambda me: everybody().gather([], ones(), with_root("GatherOptions", -1)), "invalid root rank: -1"
    ),
    "gather at a root that is too large": Misuse(
        lambda me: everybody().gather([], ones(), with_root("GatherOptions", me.world)),
        "invalid root rank: 2",
    ),
    "gather no tensor": Misuse(
        lambda me: backend().gather([], [], with_root("GatherOptions", 0)),
        "requires a single-element input tensor list",
    ),
    "gather two tensors": Misuse(
        lambda me: everybody().gather([], ones(2), with_root("GatherOptions", 0)),
        "requires a single-element input tensor list",
    ),
    "gather without a list on the root": Misuse(
        lambda me: everybody().gather([], ones(), with_root("GatherOptions", me.rank)),
        "requires a single-element output list containing a list with",
    ),
    "gather into two lists": Misuse(
        lambda me: everybody().gather([ones(2), ones(2)], ones(), with_root("GatherOptions", me.rank)),
        "requires a single-element output list containing a list with",
    ),
    "gather into too few": Misuse(
        lambda me: everybody().gather([ones(me.world - 1)], ones(), with_root("GatherOptions", me.rank)),
        "Incorrect output list size 1. Output list size should be 2, same as size of the process group.",
    ),
    "gather into another dtype": Misuse(
        lambda me: everybody().gather([[LONGS, LONGS]], ones(), with_root("GatherOptions", me.rank)),
        "invalid tensor type",
    ),
    "gather into another size": Misuse(
        lambda me: everybody().gather([ones(2, 5)], ones(), with_root("GatherOptions", me.rank)),
        "invalid tensor size",
    ),
    "gather with outputs where there is no root": Misuse(
        lambda me: everybody().gather([ones(2)], ones(), with_root("GatherOptions", other(me))),
        "requires empty output on non-root",
    ),
    "scatter from a negative root": Misuse(
        lambda me: everybody().scatter(ones(), [], with_root("ScatterOptions", -1)), "invalid root rank: -1"
    ),
    "scatter into no tensor": Misuse(
        lambda me: backend().scatter([], [], with_root("ScatterOptions", 0)),
        "requires a single-element output tensor list",
    ),
    "scatter into two tensors": Misuse(
        lambda me: everybody().scatter(ones(2), [], with_root("ScatterOptions", 0)),
        "requires a single-element output tensor list",
    ),
    "scatter without a list on the root": Misuse(
        lambda me: everybody().scatter(ones(), [], with_root("ScatterOptions", me.rank)),
        "requires a single-element input list containing a list with",
    ),
    "scatter too few": Misuse(
        lambda me: everybody().scatter(ones(), [ones(me.world - 1)], with_root("ScatterOptions", me.rank)),
        "Incorrect input list size 1. Input list size should be 2, same as size of the process group.",
    ),
    "scatter another dtype": Misuse(
        lambda me: everybody().scatter(ones(), [[LONGS, LONGS]], with_root("ScatterOptions", me.rank)),
        "invalid tensor type",
    ),
    "scatter another size": Misuse(
        lambda me: everybody().scatter(ones(), [ones(2, 5)], with_root("ScatterOptions", me.rank)),
        "invalid tensor size",
    ),
    "scatter with inputs where there is no root": Misuse(
        lambda me: everybody().scatter(ones(), [ones(2)], with_root("ScatterOptions", other(me))),
        "requires empty input on non-root",
    ),
    "exchange rows that cannot be cut": Misuse(
        lambda me: dist.all_to_all_single(torch.zeros(5), torch.ones(5)),
        "Tensor's dim 0 does not divide equally across group size",
    ),
    "exchange with too few splits": Misuse(
        lambda me: dist.all_to_all_single(torch.zeros(4), torch.ones(4), [4], [2, 2]),
        "Number of tensor splits not equal to group size",
    ),
    "exchange with splits that do not add up": Misuse(
        lambda me: dist.all_to_all_single(torch.zeros(4), torch.ones(4), [2, 2], [1, 1]),
        "Split sizes doesn't match total dim 0 size",
    ),
    "exchange with negative splits": Misuse(
        lambda me: dist.all_to_all_single(torch.zeros(4), torch.ones(4), [2, 2], [5, -1]),
        "Split sizes must be non-negative",
    ),
    "exchange too few tensors": Misuse(
        lambda me: everybody().alltoall(ones(2), ones(1), c10d.AllToAllOptions()),
        "input tensor list size 1 does not match world size 2",
    ),
    "exchange into too few tensors": Misuse(
        lambda me: everybody().alltoall(ones(1), ones(2), c10d.AllToAllOptions()),
        "output tensor list size 1 does not match world size 2",
    ),
    "exchange tensors of two dtypes": Misuse(
        lambda me: everybody().alltoall([LONGS, LONGS], ones(2), c10d.AllToAllOptions()),
        "input and output tensors must have the same type",
    ),
    "combine the bits of floats": Misuse(
        lambda me: everybody().allreduce(ones(), dist.ReduceOp.BAND),
        "Cannot use ReduceOp.BAND with non-integral dtype",
    ),
    "combine the bits of floats for a root": Misuse(
        lambda me: everybody().reduce(ones(), reducing("ReduceOptions", dist.ReduceOp.BXOR)),
        "Cannot use ReduceOp.BXOR with non-integral dtype",
    ),
    "combine the bits of several floats": Misuse(
        lambda me: everybody().allreduce_coalesced(
            ones(2), reducing("AllreduceCoalescedOptions", dist.ReduceOp.BOR)
        ),
        "Cannot use ReduceOp.BOR with non-integral dtype",
    ),
    "combine the bits of floats for each rank": Misuse(
        lambda me: everybody().reduce_scatter(
            ones(), [ones(2)], reducing("ReduceScatterOptions", dist.ReduceOp.BOR)
        ),
        "Cannot use ReduceOp.BOR with non-integral dtype",
    ),
    "reduce and scatter into two tensors": Misuse(
        lambda me: everybody().reduce_scatter(ones(2), [ones(2), ones(2)]),
        "reduce_scatter only supports 1 output",
    ),
    "reduce and scatter too few": Misuse(
        lambda me: everybody().reduce_scatter(ones(), [ones()]),
        "invalid input tensor list size, must be world size",
    ),
    "reduce and scatter pairs that are none": Misuse(
        lambda me: everybody().reduce_scatter_tensor_coalesced(ones(2), ones()),
        "requires input/output tensor lists to have the same length",
    ),
    "gather for all into a tensor that is too short": Misuse(
        lambda me: dist.all_gather_into_tensor(torch.zeros(5), torch.ones(3)),
        "invalid tensor size at index 1",
    ),
    "gather for all into a tensor of another dtype": Misuse(
        lambda me: dist.all_gather_into_tensor(torch.zeros(4, dtype=torch.int64), torch.ones(2)),
        "invalid tensor type at index 0",
    ),
    "broadcast a sparse tensor": Misuse(
        lambda me: backend().broadcast([sparse()], with_root("BroadcastOptions", 0)),
        "only supports dense tensors",
    ),
    "gather sparse tensors for all": Misuse(
        lambda me: backend().allgather([[sparse(), sparse()]], [sparse()], c10d.AllgatherOptions()),
        "only supports dense tensors",
    ),
    "reduce a sparse tensor to a root": Misuse(
        lambda me: backend().reduce([sparse()], with_root("ReduceOptions", 0)), "only supports dense tensors"
    ),
    "reduce a compressed sparse tensor": Misuse(
        lambda me: backend().allreduce([torch.eye(3).to_sparse_csr()], c10d.AllreduceOptions()),
        "unsupported layout",
    ),
    "ask a collective for its source": Misuse(
        lambda me: everybody().allreduce(ones()).source_rank(),
        "sourceRank() may only be called on work objects that correspond to a recv or recv-from-any call.",
    ),
    "receive two tensors from any rank": Misuse(
        lambda me: everybody().recv_anysource(ones(2), 0), "takes a single tensor"
    ),
    "receive from any rank with a negative tag": Misuse(
        lambda me: everybody().recv_anysource(ones(), -1), "Tag must be nonnegative"
    ),
    "send two tensors": Misuse(lambda me: everybody().send(ones(2), other(me), 0), "takes a single tensor"),
    "send no tensor": Misuse(lambda me: backend().send([], other(me), 0), "takes a single tensor"),
    "send with a negative tag": Misuse(
        lambda me: everybody().send(ones(), other(me), -1), "Tag must be nonnegative"
    ),
    "receive with a negative tag": Misuse(
        lambda me: everybody().recv(ones(), other(me), -1), "Tag must be nonnegative"
    ),
    "send a tensor with gaps": Misuse(
        lambda me: everybody().send([torch.ones(4, 4)[:, 0]], other(me), 0), "has to be contiguous"
    ),
    "receive into a tensor with gaps": Misuse(
        lambda me: everybody().recv([torch.ones(4, 4)[:, 0]], other(me), 0), "has to be contiguous"
    ),
    "wait too short a time": Misuse(
        lambda me: dist.irecv(torch.ones(2), other(me), tag=99).wait(timedelta(milliseconds=1)),
        "Timed out waiting 1ms for recv operation to complete",
    ),
    "split off no ranks": Misuse(lambda me: everybody().split_group([]), "Split ranks cannot be empty"),
    "split off ranks twice": Misuse(
        lambda me: everybody().split_group([0, 1, 1]), "the split group's size should be no larger"
    ),
    "split off the same rank": Misuse(
        lambda me: everybody().split_group([me.rank, me.rank]), "Split ranks should not have duplicates"
    ),
}


def misuse(me: Rank, names: list[str]) -> Any:
    """{name: (the classes and the text of the error)}; each in a group of its own, which may break."""
    results = {}
    for name in names:
        print(f"misuse: {name}", flush=True)
        try:
            work = MISUSES[name].call(me)
            if work is not None and hasattr(work, "wait"):
                work.wait()
            results[name] = None
        except Exception as error:
            results[name] = [each.__name__ for each in type(error).__mro__], str(error)
        me.tell(f"{name} on {me.rank}")
        me.until_told(
            *(f"{name} on {rank}" for rank in range(me.world))
        )  # no rank leaves before all have tried
        me.join()
    return results


@pytest.fixture(scope="session")
def misused(ranks: RankServer) -> dict[str, Any]:
    names = list(MISUSES)
    return {
        backend: [
            outcome.returned for outcome in ranks.run(misuse, names, backend=backend, timeout=60, limit=120)
        ]
        for backend in ("gloo", "tenfold")
    }


@pytest.mark.parametrize("name", MISUSES)
def test_what_gloo_refuses_is_refused_with_its_class_and_phrase(name: str, misused: dict[str, Any]) -> None:
    phrase = MISUSES[name].phrase
    for theirs, ours in zip(misused["gloo"], misused["tenfold"], strict=True):
        assert theirs[name] is not None, "Gloo accepts it"
        assert phrase in theirs[name][1], "not what Gloo says"
        assert ours[name] is not None, "tenfold accepts it"
        classes, text = ours[name]
        assert phrase in text, text
        assert theirs[name][0][0] in classes, f"{theirs[name][0][0]} is not among {classes}"


# ---------------------------------------------------------------------------------- stores


def tcp(library: Any, **options: Any) -> Any:
    return library.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, **options)


def hashed(library: Any) -> Any:
    store = library.HashStore()
    store.set_timeout(MOMENT)
    return store


def filed(library: Any, folder: Path) -> Any:
    store = library.FileStore(str(folder / library.__name__), 1)
    store.set_timeout(MOMENT)
    return store


def on_a_taken_port(library: Any) -> Any:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        return library.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)


def where_no_server_is(library: Any) -> Any:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # not listening: connections are refused
        port = closed.getsockname()[1]
        return library.TCPStore("127.0.0.1", port, 2, timeout=timedelta(seconds=1))


MOMENT = timedelta(milliseconds=100)

# What is done with a library and a folder, and the phrase as a regular expression.
STORE_MISUSES: dict[str, tuple[Callable[[Any, Path], Any], str]] = {
    "listen on a taken port": (
        lambda library, _: on_a_taken_port(library),
        r"The server socket has failed to listen on any local network address.*address already in use",
    ),
    "connect where no server is": (
        lambda library, _: where_no_server_is(library),
        r"The client socket has timed out after 1000ms while trying to connect to \(127.0.0.1, \d+\)",
    ),
    "wait for clients that do not join": (
        lambda library, _: library.TCPStore("127.0.0.1", 0, 2, is_master=True, timeout=timedelta(seconds=1)),
        r"Timed out after \d+ seconds waiting for clients. 1/2 clients joined.",
    ),
    "wait for a key": (
        lambda library, _: tcp(library).wait(["the_key"], MOMENT),
        r"wait timeout after 100ms, keys: /the_key",
    ),
    "wait for two keys": (
        lambda library, _: tcp(library).wait(["one", "two"], MOMENT),
        r"wait timeout after 100ms, keys: /one, /two",
    ),
    "wait for a key below prefixes": (
        lambda library, _: library.PrefixStore("outer", library.PrefixStore("inner", tcp(library))).wait(
            ["the_key"], MOMENT
        ),
        r"wait timeout after 100ms, keys: /inner/outer/the_key",
    ),
    "get a key": (
        lambda library, _: tcp(library, timeout=MOMENT).get("the_key"),
        r"wait timeout after 100ms, keys: /the_key",
    ),
    "get two keys": (
        lambda library, _: tcp(library, timeout=MOMENT).multi_get(["one", "two"]),
        r"wait timeout after 100ms, keys: /one, /two",
    ),
    "take from an empty queue": (
        lambda library, _: tcp(library).queue_pop("queue", False),
        r"queue is empty",
    ),
    "wait for an empty queue": (
        lambda library, _: tcp(library, timeout=MOMENT).queue_pop("queue"),
        r"wait timeout after 100ms, keys: /queue",
    ),
    "wait in a barrier": (
        lambda library, _: tcp(library).barrier("the_key", 2, MOMENT),
        r"barrier timeout after 100ms, key: the_key",
    ),
    "set two keys to one value": (
        lambda library, _: tcp(library).multi_set(["one", "two"], ["value"]),
        r"multiSet keys and values vectors must be of same size",
    ),
    "wait for a key in memory": (lambda library, _: hashed(library).wait(["the_key"]), r"Wait timeout"),
    "get a key in memory": (lambda library, _: hashed(library).get("the_key"), r"Wait timeout"),
    "wait for a key in a file": (
        lambda library, folder: filed(library, folder).wait(["the_key"]),
        r"Wait timeout",
    ),
    "get a key in a file": (
        lambda library, folder: filed(library, folder).get("the_key"),
        r"Timeout waiting for key: the_key after 100 ms",
    ),
    "push to a queue in a file": (
        lambda library, folder: filed(library, folder).queue_push("queue", "item"),
        r"queue support is not implemented.",
    ),
    "have no workers": (
        lambda library, _: library.TCPStore("127.0.0.1", 0, 0, is_master=True),
        r"TCPStore world size cannot be 0",
    ),
    "put a prefix before nothing": (
        lambda library, _: library.PrefixStore("prefix", None),
        r"store argument cannot be None",
    ),
    "keep keys in a folder": (
        lambda library, folder: library.FileStore(str(folder), 1).set("key", "value"),
        r"Is a directory",
    ),
}


def raised_by(call: Callable[[Any, Path], Any], library: Any, folder: Path) -> Exception:
    try:
        call(library, folder)
    except Exception as error:
        return error
    pytest.fail(f"{library.__name__} accepts it")


@pytest.mark.parametrize("name", STORE_MISUSES)
def test_what_pytorchs_stores_refuse_is_refused_with_their_class_and_phrase(
    name: str, tmp_path: Path
) -> None:
    call, phrase = STORE_MISUSES[name]
    theirs, ours = raised_by(call, dist, tmp_path), raised_by(call, tenfold, tmp_path)
    assert re.search(phrase, str(theirs)), "not what PyTorch says"
    assert re.search(phrase, str(ours)), str(ours)
    classes = [each.__name__.removeprefix("Dist") for each in type(ours).__mro__]
    assert type(theirs).__name__.removeprefix("Dist") in classes, classes


def test_the_phrase_is_on_the_first_line_and_the_hint_below_it() -> None:
    with pytest.raises(tenfold.DistStoreTimeoutError) as raised:
        tcp(tenfold).wait(["the_key"], MOMENT)
    first, *rest = str(raised.value).splitlines()
    assert first.endswith(" (wait timeout after 100ms, keys: /the_key)")
    assert rest[0].startswith("  hint: ")
    assert raised.value.reason in first
