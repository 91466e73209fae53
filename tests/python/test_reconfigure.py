"""The contract of PyTorch 2.15 for groups whose ranks change: `enable_reconfigure` and `reconfigure`.

Each function is run by the ranks of a group, over shared memory and over TCP. `--backend gloo` shows that the
contract is Gloo's, too, except where a test says so.
"""

import gc
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import tenfold.torch
import torch
import torch.distributed as dist
from ranks import Outcome, Rank, RankServer
from regroup import SOON, TRANSPORTS, barrier, become, begin, begin_together, exchange, options, works
from torch._C._distributed_c10d import ErrorType

Run = Callable[[Callable[..., object]], list[Outcome]]


@pytest.fixture(params=TRANSPORTS)
def run(ranks: RankServer, request: pytest.FixtureRequest) -> Run:
    """Runs a function on three ranks, all of which have to return."""

    def call(function: Callable[..., object], world: int = 3) -> list[Outcome]:
        outcomes = ranks.run(function, request.param, world=world)
        assert all(outcome.returned is not outcome for outcome in outcomes)
        return outcomes

    return call


@pytest.fixture
def ours(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--backend") != "tenfold":
        pytest.skip("not a part of the contract")


# ---------------------------------------------------------------------------------- the first group


def call_too_early(me: Rank, transport: str) -> tuple[list[str], int, int]:
    begin(me, transport)
    assert dist._supports_reconfigure()
    errors = []
    group = dist.group.WORLD
    for call in (
        lambda: dist.all_reduce(torch.ones(1)),
        lambda: dist.broadcast(torch.ones(1), 0),
        lambda: dist.all_reduce(torch.ones(1), async_op=True),
        lambda: dist.send(torch.ones(1), (me.rank + 1) % 3),
        lambda: dist.barrier(),
        lambda: group.allreduce([torch.ones(1), torch.ones(1)]).wait(),
    ):
        with pytest.raises(RuntimeError) as raised:
            call()
        errors.append(str(raised.value))
    place = dist.get_rank(), dist.get_world_size()
    become(7, exchange(me, "now"))
    works(me.rank, 3)
    return errors, *place


def test_nothing_is_connected_before_the_first_reconfigure_and_collectives_raise(
    run: Run, ours: None
) -> None:
    for outcome in run(call_too_early):
        errors, rank, size = outcome.returned
        assert (rank, size) == (outcome.rank, 3), "as the program said"
        for error, name in zip(
            errors, ["all_reduce", "broadcast", "all_reduce", "send", "barrier", "all_reduce"], strict=True
        ):
            assert error.startswith(f"{name}: group `0` is not connected yet"), error
            assert "call `reconfigure`" in error


def begin_one_without_the_others(me: Rank, _: str) -> bool:
    if me.rank == 0:
        begin(me)  # with no other process to meet
    return True


def test_making_the_group_does_not_wait_for_others(run: Run) -> None:
    run(begin_one_without_the_others)


def basic(me: Rank, transport: str) -> tuple[int, int]:
    begin_together(me, transport)
    return dist.get_rank(), dist.get_world_size()


def test_basic(run: Run) -> None:
    assert [outcome.returned for outcome in run(basic)] == [(0, 3), (1, 3), (2, 3)]


def all_reduce_and_send(me: Rank, transport: str) -> bool:
    begin_together(me, transport)
    works(me.rank, 3)
    # By the backend's own interface, too.
    backend = dist.get_backend_impl(dist.group.WORLD, torch.device("cpu"))
    assert backend.supports_reconfigure
    received = torch.zeros(4)
    sent = backend.send([torch.full((4,), me.rank + 1.0)], (me.rank + 1) % 3, 0)
    backend.recv([received], (me.rank - 1) % 3, 0).wait()
    sent.wait()
    assert received.tolist() == [(me.rank - 1) % 3 + 1.0] * 4
    return True


def test_all_reduce_and_send_and_recv_work_afterwards(run: Run) -> None:
    run(all_reduce_and_send)


# ---------------------------------------------------------------------------------- other members


def exclude_last(me: Rank, transport: str) -> tuple[int, int]:
    handles = begin_together(me, transport)
    if me.rank < 2:
        become(2, handles[:2])
        works(me.rank, 2)
    barrier(me, "done")
    return dist.get_rank(), dist.get_world_size()


def test_the_last_rank_is_excluded(run: Run) -> None:
    assert [outcome.returned for outcome in run(exclude_last)][:2] == [(0, 2), (1, 2)]


def exclude_middle(me: Rank, transport: str) -> tuple[int, int]:
    handles = begin_together(me, transport)
    if me.rank != 1:
        become(2, [handles[0], handles[2]])
        works(me.rank // 2, 2)
    barrier(me, "done")
    return dist.get_rank(), dist.get_world_size()


def test_a_rank_in_the_middle_is_excluded_and_the_others_close_up(run: Run) -> None:
    assert [outcome.returned for outcome in run(exclude_middle)] == [(0, 2), (1, 3), (1, 2)]


def alone_all_alone(me: Rank, transport: str) -> bool:
    begin(me, transport)
    become(10 + me.rank, [dist._get_reconfigure_handle()])
    works(0, 1)
    become(2, exchange(me, "all"))
    works(me.rank, 3)
    become(20 + me.rank, [dist._get_reconfigure_handle()])
    works(0, 1)
    barrier(me, "done")
    return True


def test_each_alone_then_all_then_each_alone(run: Run) -> None:
    run(alone_all_alone)


def alone_to_all(me: Rank, transport: str) -> bool:
    begin(me, transport)
    become(10 + me.rank, [dist._get_reconfigure_handle()])
    become(2, exchange(me, "all"))
    works(me.rank, 3)
    return True


def test_ranks_that_are_alone_become_all(run: Run) -> None:
    run(alone_to_all)


def identity(me: Rank, transport: str) -> bool:
    begin_together(me, transport)
    become(2, exchange(me, "again"))
    works(me.rank, 3)
    return True


def test_the_same_ranks_again(run: Run) -> None:
    run(identity)


def join_late(me: Rank, transport: str) -> bool:
    begin(me, transport)
    handles = exchange(me, "two")
    if me.rank < 2:
        become(1, handles[:2])
        works(me.rank, 2)
    become(2, exchange(me, "three"))
    works(me.rank, 3)
    return True


def test_a_rank_joins_later(run: Run) -> None:
    run(join_late)


def merge(me: Rank, transport: str) -> bool:
    begin(me, transport)
    handles = exchange(me, "halves")
    become(1 + me.rank // 2, handles[:2] if me.rank < 2 else handles[2:])
    works(me.rank % 2, 2)
    become(3, exchange(me, "whole"))
    works(me.rank, 4)
    return True


def test_two_groups_merge(ranks: RankServer) -> None:
    for transport in TRANSPORTS:
        assert all(outcome.returned for outcome in ranks.run(merge, transport, world=4))


def change_places(me: Rank, transport: str) -> bool:
    handles = begin_together(me, transport)
    become(2, handles[::-1])
    works(2 - me.rank, 3)
    return True


def test_the_position_in_a_list_is_the_rank(run: Run, ours: None) -> None:
    run(change_places)


def given_as_a_set(me: Rank, transport: str) -> list[int]:
    begin(me, transport)
    handles = exchange(me, "set")
    become(1, set(handles[me.rank :] + handles[: me.rank]))
    works(dist.get_rank(), 3)
    dist.all_gather(places := [torch.tensor(0) for _ in range(3)], torch.tensor(me.rank))
    return [place.item() for place in places]


def test_for_a_set_all_choose_the_same_order(run: Run) -> None:
    orders = [outcome.returned for outcome in run(given_as_a_set)]
    assert orders[0] == orders[1] == orders[2]
    assert sorted(orders[0]) == [0, 1, 2]


# ---------------------------------------------------------------------------------- abort


def abort(me: Rank, transport: str) -> tuple[str, str]:
    begin_together(me, transport)
    works(me.rank, 3)
    group = dist.group.WORLD
    pending = dist.all_reduce(torch.ones(3), async_op=True) if me.rank != 1 else None
    barrier(me, "pending")
    if me.rank == 1:
        group.abort()
        told = "aborted it"
    else:
        with pytest.raises(RuntimeError) as raised:
            pending.wait()
        told = str(raised.value)
    code = dist.get_backend_impl(group, torch.device("cpu")).get_error()
    become(2, exchange(me, "recover"))
    works(me.rank, 3)
    assert dist.get_backend_impl(group, torch.device("cpu")).get_error() == ErrorType.SUCCESS
    return told, code.name


def test_abort_is_a_revoke_and_a_fresh_uuid_recovers(run: Run, ours: None) -> None:
    zero, one, two = (outcome.returned for outcome in run(abort))
    assert one == ("aborted it", "COMM_ERROR")
    for told, code in (zero, two):
        assert "rank 1" in told, told
        assert "aborted the group: torch.distributed was asked to" in told
        assert code == "REMOTE_ERROR"


def all_abort(me: Rank, transport: str) -> bool:
    begin_together(me, transport)
    dist.get_backend_impl(dist.group.WORLD, torch.device("cpu")).abort()
    become(2, exchange(me, "recover"))
    works(me.rank, 3)
    return True


def test_all_abort_and_recover(run: Run) -> None:
    run(all_abort)


def abort_before_anything(me: Rank, transport: str) -> bool:
    begin(me, transport)
    backend = dist.get_backend_impl(dist.group.WORLD, torch.device("cpu"))
    backend.abort()
    assert backend.get_error() == ErrorType.SUCCESS
    become(1, exchange(me, "first"))
    works(me.rank, 3)
    return True


def test_abort_before_anything_was_connected_does_nothing(run: Run, ours: None) -> None:
    run(abort_before_anything)


# ---------------------------------------------------------------------------------- what is refused


def reuse(me: Rank, transport: str) -> str:
    begin(me, transport)
    become(10 + me.rank, [dist._get_reconfigure_handle()])
    with pytest.raises(RuntimeError) as raised:
        become(10 + me.rank, [dist._get_reconfigure_handle()])
    works(0, 1)
    return str(raised.value)


def test_a_uuid_that_was_used_is_refused(run: Run) -> None:
    for outcome in run(reuse):
        assert "already used" in outcome.returned


def several_backends(_: Rank, __: str) -> list[str]:
    group = dist.ProcessGroup(0, 1)
    timeout = timedelta(seconds=5)
    for device in ("cpu", "cuda"):
        backend = tenfold.torch.Backend(None, 0, 1, timeout, device, enable_reconfigure=True)
        kind = dist.ProcessGroup.BackendType.CUSTOM if device == "cpu" else dist.ProcessGroup.BackendType.NCCL
        group._register_backend(torch.device(device), kind, backend)
    # And in a group of ours with a second backend.
    store = dist.HashStore()
    mine = tenfold.torch.ProcessGroup(
        store, tenfold.torch.Backend(store, 0, 1, timeout, "mine", enable_reconfigure=True)
    )
    gloo = dist.ProcessGroupGloo(store, 0, 1)
    mine._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.GLOO, gloo)
    errors = []
    for each in (group, mine):
        for call in (
            lambda group=each: group.supports_reconfigure,
            each.get_reconfigure_handle,
            lambda group=each: group.reconfigure(options(1, [])),
        ):
            with pytest.raises(RuntimeError) as raised:
                call()
            errors.append(str(raised.value))
    return errors


def test_a_group_with_several_backends_is_refused(ranks: RankServer, ours: None) -> None:
    for error in ranks.run(several_backends, "auto", world=1)[0].returned:
        assert "multiple backends" in error


def attempt_without_one(me: Rank, transport: str) -> str:
    handles = begin_together(me, transport)
    told = ""
    if me.rank != 2:
        with pytest.raises(RuntimeError) as raised:
            become(2, handles[::-1], timedelta(seconds=2))
        told = str(raised.value)
    barrier(me, "failed")
    works(me.rank, 3)  # all are where they were
    become(3, handles[::-1])
    works(2 - me.rank, 3)
    return told


def test_a_failed_attempt_leaves_all_on_the_old_group_and_can_be_repeated(run: Run, ours: None) -> None:
    told = [outcome.returned for outcome in run(attempt_without_one)]
    assert told[2] == ""
    for text in told[:2]:
        reason, _, rest = text.partition("; each process keeps its group")
        assert "rank 0" in reason, "the process that took no part would be rank 0"
        assert "check that all processes of the list call with the same id" in rest


def wrong_handles(me: Rank, transport: str) -> list[str]:
    handles = begin_together(me, transport)
    errors = []
    others = [handle for rank, handle in enumerate(handles) if rank != me.rank]
    for uuid, wrong in enumerate([others, [*handles, handles[0]], [*handles[:2], "gloo:1:2"]]):
        with pytest.raises(RuntimeError) as raised:
            become(20 + uuid, wrong)
        errors.append(str(raised.value))
    works(me.rank, 3)
    return errors


def test_handles_that_cannot_be_meant_are_refused_and_the_group_goes_on(run: Run, ours: None) -> None:
    for outcome in run(wrong_handles):
        absent, twice, foreign = outcome.returned
        assert "does not contain this process" in absent
        assert "handles 0 and 3 are the same" in twice
        assert "handle 2 is invalid" in foreign


# ---------------------------------------------------------------------------------- threads of one process


def thread_ranks(_: Rank, transport: str) -> list[list[float]]:
    """Three ranks that are threads, each with its own group: all, without the first, all again."""
    os.environ["TENFOLD_TRANSPORT"] = transport
    together = threading.Barrier(3)
    handles = [""] * 3

    def be(rank: int) -> list[float]:
        store = dist.HashStore()
        backend = tenfold.torch.Backend(
            store, 0, 1, timedelta(seconds=30), f"thread {rank}", enable_reconfigure=True
        )
        group = tenfold.torch.ProcessGroup(store, backend)
        handles[rank] = group.get_reconfigure_handle()
        together.wait()
        seen = []
        for uuid, members in enumerate([[0, 1, 2], [1, 2], [2, 0, 1]]):
            if rank in members:
                group.reconfigure(options(uuid, [handles[member] for member in members])).wait()
                assert (group.rank(), group.size()) == (members.index(rank), len(members))
                tensor = torch.full((100_000,), float(rank + 1))
                group.allreduce([tensor]).wait()
                seen.append(tensor[-1].item())
            together.wait()
        group.shutdown()
        return seen

    with ThreadPoolExecutor(3) as threads:
        return list(threads.map(be, range(3)))


def test_ranks_can_be_threads_of_one_process(ranks: RankServer, ours: None) -> None:
    for transport in TRANSPORTS:
        (outcome,) = ranks.run(thread_ranks, transport, world=1)
        assert outcome.returned == [[6, 6], [6, 5, 6], [6, 5, 6]]


def reconfigure_often(_: Rank) -> list[tuple[int, int, int]]:
    """Three threads, which become groups of two and of three in turn. Descriptors, threads, kilobytes."""
    groups = []
    for number in range(3):
        backend = tenfold.torch.Backend(None, 0, 1, SOON, f"thread {number}", enable_reconfigure=True)
        groups.append(tenfold.torch.ProcessGroup(dist.HashStore(), backend))
    handles = [group.get_reconfigure_handle() for group in groups]
    tensors = [torch.ones(20_000).share_memory_() for _ in groups]

    def take_part(number: int, uuid: int, members: list[int]) -> None:
        if number in members:
            groups[number].reconfigure(options(uuid, [handles[member] for member in members])).wait()
            groups[number].allreduce([tensors[number]]).wait()
            assert (tensors[number] == len(members)).all()
            tensors[number].fill_(1)

    footprints = []
    with ThreadPoolExecutor(3) as threads:
        for uuid in range(400):
            members = [[0, 1, 2], [0, 1], [2, 0, 1], [1, 2]][uuid % 4]
            list(threads.map(lambda number: take_part(number, uuid, members), range(3)))  # noqa: B023, it waits
            if uuid in (99, 399):
                gc.collect()
                fields = dict(
                    line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines()
                )
                resident = int(fields["VmRSS"].split()[0])
                footprints.append((len(os.listdir("/proc/self/fd")), int(fields["Threads"]), resident))
    return footprints


def test_old_groups_leave_nothing_behind(ranks: RankServer, ours: None) -> None:
    before, after = ranks.run(reconfigure_often, world=1)[0].returned
    assert after[0] <= before[0], "descriptors"
    assert after[1] <= before[1], "threads"
    assert after[2] - before[2] < 10_000, f"{after[2] - before[2]} KB for 300 groups"
