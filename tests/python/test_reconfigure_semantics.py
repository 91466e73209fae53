"""What else changes with the ranks of a group: after deaths, by shrinking, in subgroups, DDP, dumps."""

import copy
import json
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import tenfold.torch
import torch
import torch.distributed as dist
from ranks import Rank, RankServer
from regroup import (
    SOON,
    TRANSPORTS,
    barrier,
    become,
    begin,
    begin_together,
    die,
    exchange,
    options,
    works,
)
from tenfold import _tenfold
from torch._C._distributed_c10d import ErrorType
from torch.distributed.distributed_c10d import SHRINK_ABORT
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.skipif(
    "config.getoption('--backend') != 'tenfold'", reason="Gloo leaves all of this open"
)


def error_of(call: Callable[[], Any]) -> str:
    with pytest.raises(RuntimeError) as raised:
        call()
    return str(raised.value)


# ---------------------------------------------------------------------------------- deaths


def lose_one(me: Rank, transport: str) -> str:
    begin_together(me, transport)
    works(me.rank, 4)
    if me.rank == 2:
        die()
    told = error_of(lambda: [dist.all_reduce(torch.ones(1000)) for _ in range(1000)])
    assert dist.get_backend_impl(dist.group.WORLD, torch.device("cpu")).get_error() != ErrorType.SUCCESS
    become(2, exchange(me, "survivors", [0, 1, 3]))
    works([0, 1, -1, 2][me.rank], 3)
    return told


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_survivors_of_a_kill_learn_of_it_and_go_on(transport: str, ranks: RankServer) -> None:
    outcomes = ranks.run(lose_one, transport, world=4)
    assert outcomes[2].code == -9
    for survivor in (0, 1, 3):
        assert "rank 2" in outcomes[survivor].returned, outcomes[survivor].returned


def lose_one_and_replace_it(me: Rank, transport: str) -> bool:
    if me.rank == 3:  # the replacement, which meets the others only later
        begin(me, transport)
        become(2, exchange(me, "new", [0, 3, 2]))
        works(1, 3)
        return True
    begin(me, transport)
    become(1, exchange(me, "old", [0, 1, 2]))
    if me.rank == 1:
        die()
    error_of(lambda: [dist.barrier() for _ in range(1000)])
    become(2, exchange(me, "new", [0, 3, 2]))
    works(me.rank, 3)
    return True


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_dead_rank_is_replaced(transport: str, ranks: RankServer) -> None:
    outcomes = ranks.run(lose_one_and_replace_it, transport, world=4)
    assert [outcome.code for outcome in outcomes] == [0, -9, 0, 0]
    assert all(outcomes[rank].returned for rank in (0, 2, 3))


# ---------------------------------------------------------------------------------- dist.shrink_group


def shrink_after_a_death(me: Rank, transport: str) -> tuple[str, str]:
    begin_together(me, transport)
    if me.rank == 1:
        die()
    told = error_of(lambda: [dist.barrier() for _ in range(1000)])
    group = dist.shrink_group([1])
    assert group is dist.group.WORLD
    works([0, -1, 1, 2][me.rank], 3)
    dist.all_reduce(numbers := torch.ones(200_000), async_op=True).wait()
    assert numbers.sum().item() == 600_000
    again = dist.shrink_group([0]) if me.rank else None  # rank 0 is alive, and does not call
    if me.rank:
        works([-1, -1, 0, 1][me.rank], 2, again)
    barrier(me, "done", [0, 2, 3])
    return told, group.name()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_shrink_group_continues_without_the_dead_and_again_without_the_living(
    transport: str, ranks: RankServer
) -> None:
    outcomes = ranks.run(shrink_after_a_death, transport, world=4)
    assert outcomes[1].code == -9
    for rank in (0, 2, 3):
        told, _ = outcomes[rank].returned
        assert "rank 1" in told


def shrink_with_too_few_excluded(me: Rank) -> str:
    begin_together(me)
    if me.rank in (1, 2):
        die()
    error_of(lambda: [dist.barrier() for _ in range(1000)])
    me.tell(f"failed/{me.rank}")
    me.until_told("failed/0", "failed/3")
    told = error_of(lambda: dist.shrink_group([1]))
    dist.shrink_group([1, 2])
    works(me.rank // 3, 2)
    return told


def test_shrink_group_names_dead_ranks_that_were_not_excluded(ranks: RankServer) -> None:
    outcomes = ranks.run(shrink_with_too_few_excluded, world=4)
    for rank in (0, 3):
        told = outcomes[rank].returned
        assert f"shrink in group `0@1` failed on rank {rank} of 4: rank 2 is lost, too" in told, told
        assert "exclude [2] as well" in told


def shrink_with_abort(me: Rank) -> tuple[str, list[str]]:
    begin_together(me)
    called: list[str] = []
    dist.group.WORLD.register_abort_hook(1, lambda: called.append("hook"))
    told = ""
    if me.rank == 2:
        barrier(me, "done")
        return told, called
    if me.rank == 1:
        pending = dist.all_reduce(torch.ones(1), async_op=True)
        me.tell("pending")
        told = error_of(pending.wait)
    else:
        me.until_told("pending")
    dist.shrink_group([2], shrink_flags=SHRINK_ABORT)
    works(me.rank, 2)
    barrier(me, "done")
    return told, called


def test_shrink_abort_ends_what_is_under_way(ranks: RankServer) -> None:
    outcomes = ranks.run(shrink_with_abort, world=3)
    told, _ = outcomes[1].returned
    assert "revoked the group: shrink_group was called with SHRINK_ABORT" in told, told
    assert [outcome.returned[1] for outcome in outcomes] == [["hook"], ["hook"], []]


def shrink_a_subgroup(me: Rank) -> bool:
    me.join()
    some = dist.new_group(
        [0, 1, 2]
    )  # PyTorch mixes up global ranks and the group's own: here they are the same
    if me.rank in (0, 2):
        smaller = dist.shrink_group([1], group=some)
        works(me.rank // 2, 2, smaller)
    works(me.rank, 4)  # the default group is what it was
    barrier(me, "done")
    return True


def test_shrink_group_of_a_subgroup_leaves_the_default_group(ranks: RankServer) -> None:
    assert all(outcome.returned for outcome in ranks.run(shrink_a_subgroup, world=4))


# ---------------------------------------------------------------------------------- what was derived


def numbers_of_ranks(me: Rank) -> list[Any]:
    me.join()  # connected from the start
    old = dist.new_group([0, 1])
    handles = exchange(me, "all")
    if me.rank == 0:
        barrier(me, "done")
        return []
    group = dist.group.WORLD
    become(1, handles[1:])
    assert group is dist.group.WORLD
    works(me.rank - 1, 2)
    seen: list[Any] = [
        dist.get_rank(),
        group.rank(),
        dist.get_world_size(),
        group.size(),
        dist.get_process_group_ranks(group),
        dist.get_global_rank(group, 1),
        dist.get_group_rank(group, 1),
        dist.get_node_local_rank(0),
    ]
    seen.append(error_of(lambda: dist.all_reduce(torch.ones(1), group=old)) if me.rank == 1 else "")
    pair = dist.new_group([1, 0])
    works(me.rank - 1, 2, pair)
    barrier(me, "done")
    return seen


def test_ranks_and_sizes_are_the_new_ones_and_old_subgroups_are_refused(ranks: RankServer) -> None:
    zero, one, two = ranks.run(numbers_of_ranks, world=3)
    assert zero.returned == []
    *seen, old = one.returned
    assert seen == [0, 0, 2, 2, [0, 1], 1, 1, 0]
    assert two.returned[:4] == [1, 1, 2, 2]
    assert "ended, because the default group was reconfigured and ranks have other numbers now" in old
    assert "make it again, with `new_group`" in old


def subgroup_of_its_own(me: Rank) -> list[int]:
    me.join()
    some = dist.new_group([0, 2, 3])
    if me.rank == 1:
        barrier(me, "done")
        return []
    me.store.set(f"sub/{me.rank}", dist._get_reconfigure_handle(some))
    handles = [me.store.get(f"sub/{rank}").decode() for rank in (0, 2, 3)]
    if me.rank != 0:
        dist._reconfigure(5, handles[1:], group=some, timeout=SOON).wait()
        works(me.rank - 2, 2, some)
        assert dist.get_process_group_ranks(some) == [2, 3]
    barrier(me, "done")
    assert (dist.get_rank(), dist.get_world_size()) == (me.rank, 4)
    return [dist.get_rank(some), dist.get_world_size(some)]


def test_a_subgroup_is_reconfigured_and_the_default_group_goes_on(ranks: RankServer) -> None:
    outcomes = ranks.run(subgroup_of_its_own, world=4)
    assert [outcome.returned for outcome in outcomes[2:]] == [[0, 2], [1, 2]]


def in_a_group_of_pytorch(me: Rank) -> tuple[str, bool]:
    begin(me)
    timeout = timedelta(seconds=30)
    theirs = dist.ProcessGroup(dist.HashStore(), me.rank, 2)
    backend = tenfold.torch.Backend(None, me.rank, 2, timeout, "theirs", enable_reconfigure=True)
    theirs._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    theirs._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, backend)
    me.store.set(f"theirs/{me.rank}", theirs.get_reconfigure_handle())
    handles = [me.store.get(f"theirs/{rank}").decode() for rank in range(2)]
    told = error_of(lambda: theirs.reconfigure(options(me.rank, [handles[me.rank]])))
    theirs.reconfigure(options(9, handles)).wait()  # rank and size as they were
    theirs.allreduce([tensor := torch.ones(1)]).wait()
    return told, tensor.item() == 2


def test_a_group_of_pytorch_keeps_its_rank_and_size(ranks: RankServer) -> None:
    for outcome in ranks.run(in_a_group_of_pytorch):
        told, works = outcome.returned
        assert works
        assert f"cannot change from rank {outcome.rank} of 2 to rank 0 of 1" in told
        assert "tenfold.torch.ProcessGroup" in told


# ---------------------------------------------------------------------------------- memory, DDP, dumps


def shared_memory(me: Rank, transport: str) -> list[int]:
    handles = begin_together(me, transport)
    backend = tenfold.torch.memory.backend_of(None)
    registered = torch.full((50_000,), 1.0).share_memory_()
    of_tenfold = tenfold.torch.empty(50_000)
    of_tenfold += 1
    counts = []
    members = [[0, 1, 2], [2, 0]]
    for uuid, ranks in enumerate(members):
        if me.rank not in ranks:
            continue
        if uuid:
            old = backend.shared_storages
            become(10, [handles[rank] for rank in ranks])
            assert not old._known, "the old group's storages are let go of"
            assert backend.shared_storages is not old
        for tensor in (registered, of_tenfold):
            dist.all_reduce(tensor)
        counts.append(len(backend.shared_storages._known))
        expected = 3.0 if uuid == 0 else 6.0
        assert (registered[0].item(), of_tenfold[-1].item()) == (expected, expected)
    barrier(me, "done")
    return counts


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_shared_storages_of_the_old_group_are_dropped(transport: str, ranks: RankServer) -> None:
    outcomes = ranks.run(shared_memory, transport, world=3)
    assert [outcome.returned for outcome in outcomes] == [[1, 1], [1], [1, 1]]


def train(me: Rank, ours: bool) -> list[float]:
    handles = begin_together(me)
    torch.manual_seed(1)
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    wrapper = tenfold.torch.DistributedDataParallel if ours else DistributedDataParallel
    data = torch.arange(64.0).view(8, 8) / 64
    # What the two survivors have to compute, alone.
    expected = copy.deepcopy(module)
    for model, steps in ((wrapper(module), 2), (expected, 2)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            model(data).sum().backward()
            optimizer.step()
    if me.rank == 1:
        die()
    error_of(lambda: [dist.barrier() for _ in range(1000)])
    become(2, [handles[0], handles[2]])
    again = wrapper(module)  # made again, on the new group
    for model in (again, expected):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.zero_grad()
        model(data).sum().backward()
        optimizer.step()
    pairs = zip(module.parameters(), expected.parameters(), strict=True)
    return [(one - other).abs().max().item() for one, other in pairs]


@pytest.mark.parametrize("ours", [True, False], ids=["tenfold's", "PyTorch's"])
def test_ddp_made_again_trains_on(ours: bool, ranks: RankServer) -> None:
    outcomes = ranks.run(train, ours, world=3)
    for rank in (0, 2):
        assert all(difference < 1e-5 for difference in outcomes[rank].returned)


def dump(me: Rank) -> tuple[list[tuple[str, str]], dict[str, Any]]:
    handles = begin_together(me)
    dist.all_reduce(torch.ones(1))
    if me.rank < 2:
        become(2, handles[:2])
        dist.broadcast(torch.ones(1), 0)
    barrier(me, "done")
    dumped = json.loads(_tenfold.recorder_json(None, None))
    return [(each["process_group"][0], each["profiling_name"]) for each in dumped["entries"]], dumped[
        "pg_config"
    ]


def test_dumps_have_the_operations_of_both_groups(ranks: RankServer) -> None:
    entries, groups = ranks.run(dump, world=3)[0].returned
    names = [name for name, _ in entries]
    assert names == sorted(names), "the older group's operations are first"
    assert [entry for entry in entries if "all_reduce" in entry[1]], entries
    assert [entry for entry in entries if "broadcast" in entry[1]], entries
    assert len(set(names)) == 2
    assert groups


def hooks(me: Rank) -> list[str]:
    begin(me)
    group = dist.group.WORLD
    assert group.supports_abort_hooks
    called: list[str] = []
    event = threading.Event()
    group.register_abort_hook(1, lambda: called.append("one"))
    group.register_abort_hook(2, event.set)
    group.register_abort_hook(3, lambda: called.append("never"))
    group.unregister_abort_hook(3)
    become(1, exchange(me, "first"))
    work = dist.all_reduce(torch.ones(1), async_op=True) if me.rank == 0 else None
    barrier(me, "pending")
    if me.rank == 1:
        group.abort()
        group.abort()
    elif me.rank == 0:
        assert event.wait(30), "the operation failed, but the hook was not called"
        error_of(work.wait)
    else:
        error_of(lambda: [dist.barrier() for _ in range(1000)])
    event.clear()
    become(2, exchange(me, "second"))
    works(me.rank, 3)
    barrier(me, "worked")
    group.abort()
    return [*called, "set" if event.is_set() else "not set"]


def test_abort_hooks_are_called_once_for_each_group_that_fails(ranks: RankServer) -> None:
    assert [outcome.returned for outcome in ranks.run(hooks, world=3)] == [["one", "one", "set"]] * 3


def take_over(me: Rank) -> tuple[bool, str]:
    me.join()
    group = dist.group.WORLD
    alone = _tenfold.Group.alone(name="other", timeout=30)
    me.store.set(f"alone/{me.rank}", alone.handle())
    handles = [me.store.get(f"alone/{rank}").decode() for rank in range(3)]
    if me.rank == 0:
        barrier(me, "done")
        return True, ""
    group.adopt(alone.reconfigure(handles[1:], 1))
    works(me.rank - 1, 2)
    barrier(me, "done")
    dist.destroy_process_group()
    return True, error_of(group.get_reconfigure_handle)


def test_a_group_takes_over_another_tenfold_group(ranks: RankServer) -> None:
    outcomes = ranks.run(take_over, world=3)
    assert [outcome.returned[0] for outcome in outcomes] == [True] * 3
    assert outcomes[2].returned[1] == "get_reconfigure_handle: group `0` was shut down"
