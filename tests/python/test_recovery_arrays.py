"""Recovery with `tenfold.Group` and the package's own c10d layer, on NumPy's arrays, after a `kill -9`."""

import os
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tenfold
from ranks import Rank, RankServer
from regroup import SOON, TRANSPORTS, barrier, die
from tenfold.c10d import (
    Backend,
    ErrorType,
    HealthCheckHook,
    ProcessGroup,
    ProcessGroupTenfold,
    ReconfigureOptions,
    ReduceOp,
)
from tenfold.c10d.hooks import unhealthy_backends

pytestmark = pytest.mark.skipif(
    "config.getoption('--backend') != 'tenfold'", reason="the package's own groups are tested"
)


def error_of(call: Callable[[], Any]) -> tenfold.DistError:
    with pytest.raises(tenfold.DistError) as raised:
        call()
    return raised.value


def works(group: tenfold.Group, rank: int, size: int) -> None:
    assert (group.rank, group.size) == (rank, size)
    group.all_reduce(numbers := np.full(1000, rank + 1))
    assert (numbers == size * (size + 1) // 2).all()
    assert group.all_gather_object(rank) == list(range(size))


def until_it_fails(group: tenfold.Group) -> tenfold.DistError:
    return error_of(lambda: [group.barrier() for _ in range(1000)])


def exchange(me: Rank, step: str, handle: str, ranks: list[int]) -> list[str]:
    me.store.set(f"{step}/{me.rank}", handle)
    return [me.store.get(f"{step}/{rank}").decode() for rank in ranks]


def shrink(me: Rank, transport: str) -> dict[str, Any]:
    with_store = tenfold.init(store=me.store, rank=me.rank, world_size=4, timeout=SOON, transport=transport)
    works(with_store, me.rank, 4)
    if me.rank == 1:
        die()
    error = until_it_fails(with_store)
    # Rank 3 has not completed the step, and so all know.
    agreed = with_store.agree(0b10 if me.rank == 3 else 0b11)
    smaller = with_store.shrink()
    works(smaller, [0, -1, 1, 2][me.rank], 3)
    if me.rank != 2:
        pair = smaller.shrink(without=[1])  # which is alive, and does not call
        works(pair, me.rank // 3, 2)
    barrier(me, "done", [0, 2, 3])
    return {"peer": error.peer, "error": str(error), "agreed": agreed, "name": smaller.name}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_survivors_of_a_kill_agree_and_shrink(transport: str, ranks: RankServer) -> None:
    outcomes = ranks.run(shrink, transport, world=4)
    assert outcomes[1].code == -9
    for rank in (0, 2, 3):
        told = outcomes[rank].returned
        assert told["peer"] == 1, told["error"]
        assert told["agreed"] == 0b10
        assert told["name"] == "default@2"


def replace(me: Rank, transport: str) -> str:
    """Processes 0 to 2 begin. 1 dies, and 3 takes its place. The store is not used for that."""
    group = tenfold.alone(timeout=SOON, transport=transport)
    works(group, 0, 1)
    if me.rank < 3:
        group = group.reconfigure(exchange(me, "begin", group.handle(), [0, 1, 2]), 1)
        works(group, me.rank, 3)
        if me.rank == 1:
            die()
        until_it_fails(group)
    group = group.reconfigure(exchange(me, "again", group.handle(), [0, 3, 2]), 2)
    works(group, {0: 0, 3: 1, 2: 2}[me.rank], 3)
    barrier(me, "done", [0, 2, 3])
    return str(error_of(lambda: group.reconfigure([group.handle()], 2)))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_killed_process_is_replaced_by_one_that_was_alone(transport: str, ranks: RankServer) -> None:
    outcomes = ranks.run(replace, transport, world=4)
    assert outcomes[1].code == -9
    for rank in (0, 2, 3):
        assert "the id 2 was already used" in outcomes[rank].returned


def revoke(me: Rank) -> tuple[str, int]:
    group = tenfold.init(store=me.store, rank=me.rank, world_size=3, timeout=SOON)
    if me.rank == 0:
        me.until_told("waiting/1", "waiting/2")
        group.revoke("the loss is not a number")
        error = until_it_fails(group)
    else:
        work = group.barrier(async_op=True)
        me.tell(f"waiting/{me.rank}")
        error = error_of(work.wait)
    works(group.shrink(), me.rank, 3)
    return str(error), group.failure() is not None


def test_a_revoked_group_fails_everywhere_and_all_of_it_continues(ranks: RankServer) -> None:
    for outcome in ranks.run(revoke, world=3):
        told, has_failed = outcome.returned
        assert re.search(r"rank 0 .*revoked the group: the loss is not a number", told), told
        assert has_failed


# ---------------------------------------------------------------------------------- the package's c10d


def options(uuid: int, handles: Any) -> ReconfigureOptions:
    made = ReconfigureOptions()
    made.uuid, made.handles, made.timeout = uuid, handles, SOON
    return made


def sums(group: ProcessGroup | Backend, size: int) -> None:
    numbers = np.full(1000, group.rank() + 1)
    group.allreduce([numbers], ReduceOp.SUM).wait()
    assert group.size() == size
    assert (numbers == size * (size + 1) // 2).all()


def of_c10d(me: Rank, transport: str) -> tuple[list[str], str]:
    os.environ["TENFOLD_TRANSPORT"] = transport
    backend = ProcessGroupTenfold(me.store, me.rank, 3, SOON, name="c10d")
    group = ProcessGroup._around(backend, me.store, "c10d", None)
    assert (group.supports_reconfigure, backend.supports_shrinking, backend.supports_abort_hooks) == (
        True,
    ) * 3
    called: list[str] = []
    group.register_abort_hook(7, lambda: called.append("hook"))
    HealthCheckHook.attach(group)
    assert not unhealthy_backends()
    sums(group, 3)
    if me.rank == 1:
        die()
    error = error_of(lambda: [group.barrier().wait() for _ in range(1000)])
    assert error.peer == 1
    assert backend.get_error() is ErrorType.REMOTE_ERROR
    handles = exchange(me, "c10d", group.get_reconfigure_handle(), [0, 2])
    group.reconfigure(options(1, set(handles))).wait()
    assert backend.get_error() is ErrorType.SUCCESS
    sums(group, 2)
    reused = str(error_of(lambda: group.reconfigure(options(1, handles))))
    barrier(me, "aborting", [0, 2])
    group.abort()
    group.reconfigure(options(2, handles)).wait()
    sums(group, 2)
    if group.rank() == 0:
        smaller = backend.shrink([1])
        sums(smaller, 1)
        assert smaller.options.global_ranks_in_group == [0]
    assert unhealthy_backends() == ["tenfold"]
    barrier(me, "done", [0, 2])
    return called, reused


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_groups_of_the_packages_c10d_are_reconfigured_and_shrunk(transport: str, ranks: RankServer) -> None:
    outcomes = ranks.run(of_c10d, transport, world=3)
    assert outcomes[1].code == -9
    for rank in (0, 2):
        called, reused = outcomes[rank].returned
        assert called == ["hook", "hook"], "one death, one abort"
        assert "already used" in reused


def test_several_backends_in_one_group_are_refused() -> None:
    group = ProcessGroup(tenfold.HashStore(), 0, 1)
    group._register_backend("cuda", ProcessGroup.CUSTOM, Backend(0, 1))
    for call in (
        lambda: group.supports_reconfigure,
        group.get_reconfigure_handle,
        lambda: group.reconfigure(options(1, [])),
    ):
        with pytest.raises(RuntimeError, match="multiple backends"):
            call()


def test_a_backend_that_is_not_connected_is_alone() -> None:
    backend = ProcessGroupTenfold(None, 0, 1, enable_reconfigure=True)
    assert backend.options.enable_reconfigure
    sums(backend, 1)
    backend.reconfigure(options(1, [backend.get_reconfigure_handle()])).wait()
    sums(backend, 1)


def both_layers(me: Rank) -> list[int]:
    group = tenfold.init(store=me.store, rank=me.rank, world_size=2, timeout=SOON)
    of_c10d = group.process_group
    handles = exchange(me, "swap", of_c10d.get_reconfigure_handle(), [1, 0])
    of_c10d.reconfigure(options(1, handles)).wait()
    works(group, 1 - me.rank, 2)
    sums(of_c10d, 2)
    return [of_c10d.rank(), group.rank]


def test_a_group_for_arrays_follows_its_process_group(ranks: RankServer) -> None:
    assert [outcome.returned for outcome in ranks.run(both_layers)] == [[1, 1], [0, 0]]
