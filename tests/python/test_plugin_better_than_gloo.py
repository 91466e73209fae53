"""What Gloo gets wrong and is right with tenfold: refusals, mismatches, deaths, works that need no wait.

Each test has a function that the ranks run, in a group of its own; many groups are of no use afterwards.
`--backend gloo` shows what Gloo does instead. Gloo's mistakes about strides, lists of different lengths and
dtypes are among the cases of operations.py.
"""

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bits import plain
from operation_cases import everybody, numbers
from ranks import Rank, RankServer

LONG = timedelta(seconds=10)


def count_of(dtype: str, elements: int) -> str:
    """As tenfold's messages write it."""
    return f"{dtype} \N{MULTIPLICATION SIGN} {elements}"


def error_of(call: Callable[[], Any]) -> BaseException | None:
    try:
        call()
    except Exception as error:
        return error
    return None


# ---------------------------------------------------------------------------------- refusals


def average_integers(me: Rank) -> Any:
    tensor = torch.arange(5) + me.rank
    before = everybody()._get_sequence_number_for_group()
    error = error_of(lambda: dist.all_reduce(tensor, dist.ReduceOp.AVG, async_op=True))
    advanced = everybody()._get_sequence_number_for_group() - before
    dist.all_reduce(again := numbers(me, 3))
    return type(error).__mro__[:-1] if error else None, str(error), plain(tensor), advanced, plain(again)


def test_an_average_of_integers_is_refused_by_the_call_before_anything_happens(ranks: RankServer) -> None:
    for outcome in ranks.run(average_integers):
        classes, text, tensor, advanced, again = outcome.returned
        assert classes is not None, "the call was accepted"
        assert ValueError in classes
        assert dist.DistBackendError in classes
        assert "`avg` does not work on int64" in text
        assert tensor == plain(torch.arange(5) + outcome.rank), "the tensor was changed"
        assert advanced == 0, "the refused call counts"
        assert again == plain(numbers(0, 3) + numbers(1, 3)), "the group was harmed"


def reduce_dtypes_unknown_to_gloo(me: Rank) -> Any:
    results = {}
    for dtype in (
        torch.int16,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ):
        tensor = torch.tensor([1, 2, 4, 8]).to(dtype)
        dist.reduce(reduced := tensor.clone(), 0)
        dist.reduce_scatter_tensor(scattered := torch.zeros(2).to(dtype), tensor)
        dist.all_reduce_coalesced(coalesced := [tensor.clone(), tensor.clone()])
        results[str(dtype)] = [each.double().tolist() for each in (reduced, scattered, *coalesced)]
    return results


def test_dtypes_that_gloo_does_not_know_are_reduced_by_every_operation(ranks: RankServer) -> None:
    total = [2.0, 4.0, 8.0, 16.0]
    for outcome in ranks.run(reduce_dtypes_unknown_to_gloo):
        assert len(outcome.returned) == 6
        for dtype, (reduced, scattered, *coalesced) in outcome.returned.items():
            assert scattered == total[2 * outcome.rank :][:2], dtype
            assert coalesced == [total, total], dtype
            if outcome.rank == 0:
                assert reduced == total, dtype


def sum_truths(me: Rank) -> Any:
    tensor = torch.tensor([True, True, False]) if me.rank == 0 else torch.tensor([True, False, False])
    dist.all_reduce(tensor)
    return tensor.view(torch.uint8).tolist()


def test_a_sum_of_truths_is_a_truth(ranks: RankServer) -> None:
    for outcome in ranks.run(sum_truths):
        assert outcome.returned == [1, 1, 0]


def reduce_to_one(me: Rank) -> Any:
    dist.reduce(tensor := numbers(me, 100), 1)
    dist.reduce(strided := numbers(me, 10, 10).t(), 1)
    return plain(tensor), plain(strided)


def test_a_reduction_leaves_the_tensors_of_all_but_the_root_alone(ranks: RankServer) -> None:
    outcomes = ranks.run(reduce_to_one, world=3)
    for rank in (0, 2):
        assert outcomes[rank].returned == (plain(numbers(rank, 100)), plain(numbers(rank, 10, 10).t()))
    everyone = sum(numbers(rank, 100) for rank in range(3))
    assert outcomes[1].returned == (plain(everyone), plain(everyone.reshape(10, 10).t()))


# ---------------------------------------------------------------------------------- ranks that disagree


def call_as_told(me: Rank, calls: str) -> Any:
    """Each rank makes its own call, and then one more, which is the last that may still succeed."""
    CALLS[calls](me)
    dist.barrier()


# What each rank calls, and the words by which the error has to tell them apart.
CALLS: dict[str, Callable[[Rank], Any]] = {
    "lengths": lambda me: dist.all_reduce(torch.ones(1000 * (1 + me.rank))),
    "operations": lambda me: dist.all_reduce(torch.ones(4)) if me.rank else dist.broadcast(torch.ones(4), 0),
    "reductions": lambda me: dist.all_reduce(
        torch.ones(4), dist.ReduceOp.MAX if me.rank else dist.ReduceOp.SUM
    ),
    "dtypes": lambda me: dist.all_reduce(torch.ones(4, dtype=torch.float64 if me.rank else torch.float32)),
    "broadcasts": lambda me: dist.broadcast(torch.ones(4 + me.rank), 0),
    "roots": lambda me: dist.broadcast(torch.ones(4), me.rank),
    "gathers": lambda me: dist.all_gather_into_tensor(
        torch.ones(me.world * (2 + me.rank)), torch.ones(2 + me.rank)
    ),
}
WORDS = {
    "lengths": [count_of("float32", 1000), count_of("float32", 2000)],
    "operations": ["all_reduce", "broadcast"],
    "reductions": ["sum", "max"],
    "dtypes": [count_of("float32", 4), count_of("float64", 4)],
    "broadcasts": [count_of("float32", 4), count_of("float32", 5)],
    "roots": ["root 0", "root 1"],
    "gathers": [count_of("float32", 2), count_of("float32", 3)],
}


@pytest.mark.parametrize("calls", CALLS)
def test_ranks_that_call_different_things_all_learn_who_called_what(calls: str, ranks: RankServer) -> None:
    for outcome in ranks.run(call_as_told, calls):
        assert outcome.raised("DistBackendError"), outcome.story()
        for word in ["rank 0", "rank 1", *WORDS[calls]]:
            assert word in outcome.error, outcome.story()


def disagree_in_the_world_only(me: Rank) -> Any:
    other = dist.new_group()
    first = error_of(lambda: dist.all_reduce(torch.ones(1 + me.rank)))
    second = error_of(lambda: dist.all_reduce(torch.ones(1)))
    dist.all_reduce(tensor := numbers(me, 3), group=other)
    return str(first), str(second), plain(tensor)


def test_a_group_that_failed_says_why_to_every_call_and_other_groups_go_on(ranks: RankServer) -> None:
    for outcome in ranks.run(disagree_in_the_world_only):
        first, second, total = outcome.returned
        for text in (first, second):
            assert "called different operations" in text
        assert total == plain(numbers(0, 3) + numbers(1, 3))


def exchange_unequally(me: Rank) -> Any:
    splits = [[1, 1], [2, 1]][me.rank]  # rank 0 sends one row, rank 1 wants two
    dist.all_to_all_single(torch.zeros(sum(splits)), torch.ones(2), splits, [1, 1])
    dist.barrier()


def test_an_exchange_in_which_one_wants_more_than_the_other_gives_is_an_error(ranks: RankServer) -> None:
    outcomes = ranks.run(exchange_unequally)
    for outcome in outcomes:
        assert outcome.raised("RuntimeError"), outcome.story()
        assert "rank" in outcome.error


def receive_too_much(me: Rank) -> Any:
    if me.rank == 0:
        dist.send(torch.arange(100.0), 1)
        return None
    error = error_of(lambda: dist.recv(torch.zeros(3), 0))
    return type(error).__name__, str(error)


def test_a_message_too_long_for_its_buffer_is_an_error_and_not_the_end_of_the_process(
    ranks: RankServer,
) -> None:
    outcomes = ranks.run(receive_too_much)
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes[1].story()
    _, text = outcomes[1].returned
    for word in ("rank 0", count_of("float32", 100), count_of("float32", 3)):
        assert word in text


def receive_another_dtype(me: Rank) -> Any:
    if me.rank == 0:
        dist.send(torch.arange(4.0), 1)
        return None
    return str(error_of(lambda: dist.recv(torch.zeros(4, dtype=torch.int32), 0)))


def test_a_message_of_another_dtype_is_an_error(ranks: RankServer) -> None:
    text = ranks.run(receive_another_dtype)[1].returned
    for word in ("rank 0", count_of("float32", 4), count_of("int32", 4)):
        assert word in text


# ---------------------------------------------------------------------------------- ranks that are not there


def outlive(me: Rank, what: str) -> Any:
    """The last rank is killed once the others have called."""
    victim = me.world - 1
    if me.rank == victim:
        me.until_told(*(f"{rank} is about to call" for rank in range(victim)))
        os.kill(os.getpid(), signal.SIGKILL)
    me.tell(f"{me.rank} is about to call")
    error = error_of(lambda: WAITS[what](me, victim))
    again = error_of(dist.barrier)
    classes = [each.__name__ for each in type(error).__mro__]
    return classes, str(error), getattr(error, "peer", None), str(again)


WAITS: dict[str, Callable[[Rank, int], Any]] = {
    "all_reduce": lambda me, victim: dist.all_reduce(torch.ones(1000)),
    "barrier": lambda me, victim: dist.barrier(),
    "broadcast": lambda me, victim: dist.broadcast(torch.ones(10), victim),
    "recv": lambda me, victim: dist.recv(torch.ones(10), victim),
    "future": lambda me, victim: dist.all_reduce(torch.ones(9), async_op=True).get_future().wait(),
    "functional": lambda me, victim: dist._functional_collectives.wait_tensor(
        dist._functional_collectives.all_reduce(torch.ones(9), "sum", everybody())
    ),
}


@pytest.mark.parametrize("what", WAITS)
def test_a_rank_that_is_killed_is_named_to_all_that_wait_for_it(what: str, ranks: RankServer) -> None:
    *survivors, victim = ranks.run(outlive, what, world=3)
    assert victim.code == -signal.SIGKILL
    for survivor in survivors:
        classes, text, peer, again = survivor.returned
        assert "RuntimeError" in classes
        assert "rank 2" in text, text
        assert "died" in text, text
        assert "rank 2" in again, again
        if what not in ("future", "functional"):  # PyTorch's futures carry texts, not exceptions
            assert "DistBackendError" in classes
            assert peer == 2


def receive_from_the_dead(me: Rank) -> Any:
    if me.rank > 0:
        me.until_told("waiting")
        os.kill(os.getpid(), signal.SIGKILL)
    work = dist.irecv(torch.zeros(1))
    me.tell("waiting")
    return str(error_of(work.wait))


def test_who_receives_from_anybody_learns_that_nobody_is_left(ranks: RankServer) -> None:
    text = ranks.run(receive_from_the_dead, world=3)[0].returned
    assert "every rank that could send is gone" in text


def receive_from_the_last_one_alive(me: Rank) -> Any:
    if me.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if me.rank == 2:
        me.until_told("waiting")
        dist.send(numbers(me, 4), 0)
        return None
    work = dist.irecv(tensor := torch.zeros(4))
    me.tell("waiting")
    work.wait()
    return work._source_rank(), plain(tensor)


def test_who_receives_from_anybody_waits_on_while_somebody_is_left(ranks: RankServer) -> None:
    source, tensor = ranks.run(receive_from_the_last_one_alive, world=3)[0].returned
    assert source == 2
    assert tensor == plain(numbers(2, 4))


def leave(me: Rank) -> Any:
    if me.rank == 1:
        me.until_told("waiting")
        dist.destroy_process_group()
        return None
    work = dist.all_reduce(torch.ones(3), async_op=True)
    me.tell("waiting")
    return str(error_of(work.wait))


def test_a_rank_that_leaves_the_group_is_named_to_those_that_wait_for_it(ranks: RankServer) -> None:
    text = ranks.run(leave)[0].returned
    assert "rank 1" in text
    assert "left" in text


def do_not_come(me: Rank) -> Any:
    dist.set_timeout(timedelta(seconds=1))
    if me.rank == 1:
        me.until_told("done")
        return None
    error = error_of(lambda: dist.all_reduce(torch.ones(3)))
    me.tell("done")
    return [each.__name__ for each in type(error).__mro__], str(error)


def test_a_rank_that_does_not_come_is_named_when_the_time_is_up(ranks: RankServer) -> None:
    classes, text = ranks.run(do_not_come)[0].returned
    assert "TimeoutError" in classes
    assert "DistBackendError" in classes
    assert "rank 1" in text
    assert re.search(r"did not answer for \d+\.\d s", text), text
    assert "has called nothing in this group" in text


def abort(me: Rank) -> Any:
    if me.rank == 1:
        me.until_told("waiting")
        everybody().abort()
        return str(error_of(dist.barrier))
    work = dist.all_reduce(torch.ones(3), async_op=True)
    me.tell("waiting")
    return str(error_of(work.wait))


def test_an_abort_ends_what_is_under_way_on_all_ranks(ranks: RankServer) -> None:
    for outcome in ranks.run(abort):
        assert "rank 1" in outcome.returned
        assert "aborted the group" in outcome.returned


# ---------------------------------------------------------------------------------- works


ASYNC: dict[str, Callable[[Rank, torch.Tensor], dist.Work]] = {
    "all_reduce": lambda me, out: dist.all_reduce(out.fill_(1), async_op=True),
    "reduce_scatter": lambda me, out: dist.reduce_scatter(out, [torch.ones(4)] * me.world, async_op=True),
    "reduce_scatter_tensor": lambda me, out: dist.reduce_scatter_tensor(
        out, torch.ones(4 * me.world), async_op=True
    ),
    "message": lambda me, out: dist.irecv(out, 0) if me.rank else dist.isend(out.fill_(2), 1),
}


def never_wait(me: Rank, what: str) -> Any:
    output = torch.zeros(4)
    over = threading.Event()
    work = ASYNC[what](me, output)
    work.get_future().add_done_callback(lambda _: over.set())
    came = over.wait(LONG.total_seconds())
    return came, output.tolist(), work.is_completed(), work.is_success()


@pytest.mark.parametrize("what", ASYNC)
def test_an_operation_ends_without_a_wait_and_its_work_says_so(what: str, ranks: RankServer) -> None:
    for outcome in ranks.run(never_wait, what):
        came, output, completed, success = outcome.returned
        assert came, "the callback never came"
        assert output == [2.0] * 4
        assert completed, "is_completed() is False after the end"
        assert success


def work_before_and_after(me: Rank) -> Any:
    if me.rank == 1:
        me.until_told("not there yet")
    work = dist.all_reduce(tensor := numbers(me, 4), async_op=True)
    early = work.is_completed()
    if me.rank == 0:
        me.tell("not there yet")
    work.wait()
    return early, work.is_completed(), work.exception(), plain(work.result()), plain(tensor)


def test_a_work_tells_before_from_after(ranks: RankServer) -> None:
    outcomes = ranks.run(work_before_and_after)
    assert outcomes[0].returned[0] is False
    total = plain(numbers(0, 4) + numbers(1, 4))
    for outcome in outcomes:
        _, late, exception, result, tensor = outcome.returned
        assert late is True
        assert exception is None
        assert result == [total]
        assert tensor == total


def wait_too_short(me: Rank, kind: str) -> Any:
    if me.rank == 1:
        me.until_told("gave up")
        if kind == "message":
            dist.send(numbers(me, 4), 0)
        else:
            dist.all_reduce(numbers(me, 4))
        return None
    tensor = numbers(me, 4)
    work = dist.irecv(tensor, 1) if kind == "message" else dist.all_reduce(tensor, async_op=True)
    error = error_of(lambda: work.wait(timedelta(milliseconds=50)))
    me.tell("gave up")
    return type(error).__name__, work.wait(), plain(tensor)


@pytest.mark.parametrize("kind", ["collective", "message"])
def test_a_wait_that_was_too_short_harms_nothing(kind: str, ranks: RankServer) -> None:
    raised, waited, tensor = ranks.run(wait_too_short, kind)[0].returned
    assert raised != "NoneType", "a wait of 50 ms succeeded before any rank had sent anything"
    assert waited
    assert tensor == plain(numbers(1, 4) if kind == "message" else numbers(0, 4) + numbers(1, 4))


def receive_while_waits_look_for_signals(me: Rank, rounds: int, messages: int) -> Any:
    """Many threads wait for a message each; they come around the time at which waits look for Ctrl-C."""
    errors: list[BaseException | None] = []
    for number in range(rounds):
        if me.rank == 1:
            me.until_told(f"round {number}")
            time.sleep(0.095)  # waits are cut into slices of 0.1 s, and only their ends are of interest
            for tag in range(messages):
                dist.send(torch.ones(1), 0, tag=tag)
                time.sleep(0.0002)
            continue
        works = [dist.irecv(torch.zeros(1), 1, tag=tag) for tag in range(messages)]
        threads = [
            threading.Thread(target=lambda work=work: errors.append(error_of(work.wait))) for work in works
        ]
        for thread in threads:
            thread.start()
        me.tell(f"round {number}")
        for thread in threads:
            thread.join()
    return [str(error) for error in errors if error]


def test_a_message_that_comes_when_a_wait_looks_for_signals_is_received(ranks: RankServer) -> None:
    outcome = ranks.run(receive_while_waits_look_for_signals, 8, 48)[0]
    assert outcome.returned == []


def fail_a_future(me: Rank) -> Any:
    if me.rank == 1:
        me.until_told("waiting")
        os.kill(os.getpid(), signal.SIGKILL)
    work = dist.all_reduce(torch.ones(3), async_op=True)
    chained = work.get_future().then(lambda done: done.value()[0] + 1)
    me.tell("waiting")
    return str(error_of(chained.wait)), str(error_of(work.wait)), str(work.exception())


def test_a_failure_reaches_the_future_its_chain_and_the_work(ranks: RankServer) -> None:
    for text in ranks.run(fail_a_future)[0].returned:
        assert "rank 1" in text
        assert "died" in text


def receive_from_anybody_asynchronously(me: Rank) -> Any:
    if me.rank == 1:
        dist.send(numbers(me, 4), 0, tag=3)
        return None
    work = dist.irecv(tensor := torch.zeros(4), tag=3)
    value = work.get_future().wait()
    return work._source_rank(), plain(tensor), plain(value)


def test_the_future_of_a_receive_from_anybody_has_the_tensor_and_its_work_the_source(
    ranks: RankServer,
) -> None:
    source, tensor, value = ranks.run(receive_from_anybody_asynchronously)[0].returned
    assert source == 1
    assert tensor == plain(numbers(1, 4))
    assert value == [tensor]
