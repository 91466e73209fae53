"""Programs that rely on what Gloo does, run by Gloo and by tenfold: both give the same.

Each function here is such a program; what it returns on each rank must be equal. Where a program shows that
it was refused, see `test_gloo_refusals.py`.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from operation_cases import everybody
from ranks import Rank, RankServer
from torch._C import _distributed_c10d as c10d
from torch.distributed import _functional_collectives as functional

PROGRAMS: list[Callable[[Rank], Any]] = []


def program(function: Callable[[Rank], Any]) -> Callable[[Rank], Any]:
    PROGRAMS.append(function)
    return function


def backend_of(group: Any = None) -> Any:
    return (group or everybody())._get_backend(torch.device("cpu"))


def pair(me: Rank, *shape: int) -> list[torch.Tensor]:
    """Two tensors that differ, and differ between ranks."""
    return [torch.full(shape, float(10 * me.rank + number)) for number in (1, 2)]


def listed(tensors: Any) -> Any:
    if isinstance(tensors, torch.Tensor):
        return tensors.to_dense().tolist() if tensors.layout is not torch.strided else tensors.tolist()
    return [listed(tensor) for tensor in tensors]


# ---------------------------------------------------------------------------------- several tensors per rank


@program
def reduce_several_tensors(me: Rank) -> Any:
    results = {}
    for name in ["SUM", "PRODUCT", "MIN", "MAX"]:
        everybody().allreduce(tensors := pair(me, 3), dist.AllreduceOptions()).wait()
        options = dist.AllreduceOptions()
        options.reduceOp = getattr(dist.ReduceOp, name)
        work = everybody().allreduce(tensors, options)
        work.wait()
        results[name] = listed(tensors), listed(work.get_future().value())
    everybody().allreduce(bits := [torch.tensor([1 << me.rank]), torch.tensor([4])], dist.ReduceOp.BOR).wait()
    return results, listed(bits)


@program
def average_several_tensors(me: Rank) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.AVG
    everybody().allreduce(tensors := pair(me, 3), options).wait()
    return listed(tensors[0])  # Gloo divides no other one


@program
def reduce_several_sparse_tensors(me: Rank) -> Any:
    def sparse(place: int, value: float) -> torch.Tensor:
        return torch.sparse_coo_tensor([[place]], [value + me.rank], (4,))

    everybody().allreduce(tensors := [sparse(me.rank, 1.0), sparse(2, 5.0)]).wait()
    return listed(tensors), [tensor.is_coalesced() for tensor in tensors]


@program
def broadcast_one_of_several_tensors(me: Rank) -> Any:
    results = []
    for root_tensor in (0, 1):
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 1, root_tensor
        work = everybody().broadcast(tensors := pair(me, 2, 2), options)
        work.wait()
        results.append(listed(tensors))
    return results


@program
def gather_several_tensors(me: Rank) -> Any:
    outputs = [[torch.zeros(2) for _ in range(2 * me.world)] for _ in range(2)]
    work = everybody().allgather(outputs, pair(me, 2))
    work.wait()
    try:
        work.result()
    except RuntimeError as error:
        refusal = str(error)
    return listed(outputs), listed(work.get_future().value()), "list of lists" in refusal


# ---------------------------------------------------------------------------------- timeouts and options


@program
def set_timeouts(me: Rank) -> Any:
    backend, seen = backend_of(), []
    seen.append(backend.options._timeout)
    dist.set_timeout(timedelta(seconds=31))
    seen.append(backend.options._timeout)
    backend._set_default_timeout(timedelta(seconds=32))
    seen.append(backend.options._timeout)
    everybody().set_timeout(timedelta(seconds=33))
    seen.append(backend_of().options._timeout)
    backend.options._timeout = timedelta(seconds=34)
    seen.append(backend_of().options._timeout)
    work = dist.all_reduce(torch.ones(1), async_op=True)
    seen.append(work.timeout)  # not what was put into the options: those are to be looked at
    work.wait()
    return seen


@program
def look_at_options(me: Rank) -> Any:
    part = dist.new_group([1, 0] if me.world == 2 else [2, 0], sort_ranks=False)
    seen = []
    for group in (everybody(), part):
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            options = backend_of(group).options
            seen.append((options.global_ranks_in_group, options.group_name == group.group_name))
    return seen


@program
def split_a_group(me: Rank) -> Any:
    whole = everybody()
    part = dist.split_group(None, [[0, me.world - 1]], timeout=timedelta(seconds=77), group_desc="a part")
    seen: list[Any] = [backend_of().options._timeout, backend_of().options.global_ranks_in_group]
    if part == dist.GroupMember.NON_GROUP_MEMBER:
        return seen
    own = backend_of(part).options
    seen += [own._timeout, list(own.global_ranks_in_group), own.group_name == part.group_name]
    seen += [part.rank(), part.size(), part.group_desc, dist.get_process_group_ranks(part)]
    dist.all_reduce(tensor := torch.ones(1) + me.rank, group=part)
    work = dist.all_reduce(tensor, group=part, async_op=True)
    work.wait()
    seen += [listed(tensor), work.is_completed()]
    if part.rank() == 0:
        dist.send(tensor, group_dst=1, group=part)
    else:
        seen.append(dist.recv(torch.zeros(1), group=part))
    backend_of(part).set_timeout(timedelta(seconds=78))
    assert whole is everybody()
    return [*seen, backend_of(part).options._timeout, backend_of().options._timeout]


@program
def split_a_part_of_a_part(me: Rank) -> Any:
    first = dist.split_group(None, [[rank for rank in range(me.world) if rank > 0]])
    if first == dist.GroupMember.NON_GROUP_MEMBER:
        return None
    last = dist.split_group(first, [[first.size() - 1]])
    if last == dist.GroupMember.NON_GROUP_MEMBER:
        return "no part of it"
    return list(backend_of(last).options.global_ranks_in_group)


@program
def split_by_the_group_itself(me: Rank) -> Any:
    part = everybody().split_group([0, me.world - 1], group_name="by itself")
    if part is None:
        return None
    part.allreduce(tensor := torch.ones(1) + me.rank).wait()
    return part.rank(), part.size(), part.group_name, listed(tensor), backend_of(part).options._timeout


# ---------------------------------------------------------------------------------- hooks


@program
def hook_everything(me: Rank) -> Any:
    told: list[Any] = []

    def before(call: Any) -> None:
        shapes = [
            [list(tensor.shape) for tensor in tensors]
            for tensors in (call.input_tensors, call.output_tensors)
        ]
        told.append(("before", call.name.name, call.async_op, *shapes, call.root))

    def after(call: Any) -> None:
        told.append(("after", call.name.name, call.async_op))

    group = everybody()
    group.register_pre_hook(1, before)
    group.register_post_hook(1, after)
    to, source = (me.rank + 1) % me.world, (me.rank - 1) % me.world
    for receive in (lambda tensor: dist.irecv(tensor, source), lambda tensor: dist.irecv(tensor)):
        sent = dist.isend(torch.ones(3), to)
        received = receive(torch.zeros(3))
        received.wait()
        sent.wait()
    if me.rank == 0:
        dist.send(torch.ones(2, 2), 1, tag=5)
    elif me.rank == 1:
        dist.recv(torch.zeros(2, 2), 0, tag=5)
    dist.all_reduce(torch.ones(2))
    group.unregister_pre_hook(1)
    group.unregister_post_hook(1)
    dist.barrier()
    return told


@program
def receive_from_any_rank(me: Rank) -> Any:
    if me.rank > 0:
        dist.send(torch.full((2,), float(me.rank)), 0)
        return None
    received = []
    for _ in range(me.world - 1):
        source = dist.recv(tensor := torch.zeros(2))
        received.append((source, listed(tensor)))
    return sorted(received)


# ---------------------------------------------------------------------------------- works


@program
def register_works(me: Rank) -> Any:
    sizes = [c10d._get_work_registry_size()]
    with functional.allow_inflight_collective_as_graph_input_ctx():
        first, second = torch.ones(4), torch.ones(4)
        works = [dist.all_reduce(first, async_op=True), dist.all_reduce(second, async_op=True)]
        sizes.append(c10d._get_work_registry_size())
        works[0].wait()
        sizes.append(c10d._get_work_registry_size())
        torch.ops._c10d_functional.wait_tensor(second)
        sizes.append(c10d._get_work_registry_size())
        works[1].wait()
        halves = torch.ones(4)
        works = [dist.all_reduce(half, async_op=True) for half in halves.chunk(2)]
        sizes.append(c10d._get_work_registry_size())
        works[1].wait()
        sizes.append(c10d._get_work_registry_size())
        works[0].wait()
        sizes.append(c10d._get_work_registry_size())
    work = dist.all_reduce(first, async_op=True)
    sizes.append(c10d._get_work_registry_size())
    work.wait()
    result = functional.all_reduce(second, "sum", everybody())
    sizes.append(c10d._get_work_registry_size())
    functional.wait_tensor(result)
    sizes.append(c10d._get_work_registry_size())
    return sizes, listed([first, second, halves, result])


@program
def leave_many_waited_works(me: Rank) -> Any:
    with functional.allow_inflight_collective_as_graph_input_ctx():
        for _ in range(50):
            dist.all_reduce(torch.ones(4), async_op=True).wait()
    return c10d._get_work_registry_size()


@program
def ask_works_of_coalesced_calls(me: Rank) -> Any:
    group = everybody()
    outputs = [[torch.zeros(2) for _ in range(2)] for _ in range(me.world)]
    works = [
        group.allreduce(torch.ones(2)),
        group.allgather_coalesced(outputs, [torch.ones(2), torch.ones(2)]),
        group.broadcast(torch.ones(2), 0),
    ]
    for work in works:
        work.wait()
    return [(int(work._get_op_type()), listed(work.get_future().value())) for work in works]


@program
def look_at_results_too_early(me: Rank) -> Any:
    """A work whose peer has not called it yet has no result."""
    answers = []
    if me.rank == 0:
        work = dist.all_reduce(tensor := torch.ones(1), async_op=True)
        try:
            work.result()
        except RuntimeError as error:
            answers.append("Work needs to be completed before calling result()" in str(error))
        me.tell("rank 0 has asked")
    else:
        me.until_told("rank 0 has asked")
        work = dist.all_reduce(tensor := torch.ones(1), async_op=True)
    work.wait()
    return answers, listed(work.result()), work.is_completed(), work.is_success(), listed(tensor)


# ---------------------------------------------------------------------------------- debugging


@program
def meet_in_a_monitored_barrier(me: Rank) -> Any:
    dist.monitored_barrier(timeout=timedelta(seconds=40), wait_all_ranks=True)
    backend_of().monitored_barrier(timeout=timedelta(seconds=40), wait_all_ranks=True)
    backend_of().monitored_barrier(timedelta(seconds=40))
    backend_of().monitored_barrier(wait_all_ranks=True)
    return "all are here"


@program
def meet_in_a_wrapped_group(me: Rank) -> Any:
    """PyTorch's own wrapper at level DETAIL, around the backend and beside Gloo's."""
    store = dist.PrefixStore("checks", me.store)
    checks = dist.ProcessGroupGloo(store, me.rank, me.world, timedelta(seconds=40))
    wrapper = c10d._ProcessGroupWrapper(backend_of(), checks)
    group = dist.ProcessGroup(store, me.rank, me.world)
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, wrapper)
    group.allreduce(tensor := torch.ones(2) + me.rank).wait()
    group.monitored_barrier(timedelta(seconds=40), True)
    wrapper.monitored_barrier(timeout=timedelta(seconds=40), wait_all_ranks=True)
    return listed(tensor)


def profiled(me: Rank) -> Any:
    """The rows of PyTorch's profiler that are named after the backend: how many of each."""
    whole = torch.zeros(2 * me.world)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(torch.ones(4))
        dist.all_reduce(torch.ones(4), async_op=True).wait()
        dist.broadcast(torch.ones(4), 0)
        dist.reduce(torch.ones(4), 0)
        dist.all_gather([torch.zeros(2) for _ in range(me.world)], torch.ones(2))
        dist.all_gather_into_tensor(whole, torch.ones(2))
        dist.all_to_all_single(torch.zeros_like(whole), whole)
        dist.gather(torch.ones(2), [torch.zeros(2) for _ in range(me.world)] if me.rank == 0 else None, 0)
        dist.scatter(torch.ones(2), [torch.zeros(2) for _ in range(me.world)] if me.rank == 0 else None, 0)
        dist.barrier()
        if me.rank == 0:
            dist.send(torch.ones(2), 1)
            dist.send(torch.ones(2), 1)
        elif me.rank == 1:
            dist.recv(torch.zeros(2), 0)
            dist.recv(torch.zeros(2))
    prefix = f"{me.backend}:"
    rows = {
        row.key.removeprefix(prefix): row.count
        for row in profile.key_averages()
        if row.key.startswith(prefix)
    }
    return dict(sorted(rows.items()))


PROGRAMS.append(profiled)


def until_all_are_done(me: Rank, name: str) -> Any:
    """Runs a program; no rank leaves before all have ended theirs, which Gloo would take for a crash."""
    programs = {program.__name__: program for program in PROGRAMS}
    returned = programs[name](me)
    me.tell(f"{me.rank} is done")
    me.until_told(*(f"{rank} is done" for rank in range(me.world)))
    return returned


def reduce_several_tensors_with_gaps(me: Rank) -> Any:
    tensors = [torch.arange(8.0).add(me.rank)[::2], torch.ones(4, 4)[:, 1]]
    everybody().allreduce(tensors).wait()
    return listed(tensors)


def test_several_tensors_with_gaps_are_reduced_where_gloo_mixes_them_up(ranks: RankServer) -> None:
    expected = [3.0, 7.0, 11.0, 15.0]
    for outcome in ranks.run(reduce_several_tensors_with_gaps):
        assert outcome.returned == [expected, expected]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_the_program_does_what_it_does_with_gloo(program: Callable, world: int, ranks: RankServer) -> None:
    how = {"world": world, "timeout": 60, "limit": 120}
    ours = ranks.run(until_all_are_done, program.__name__, **how)
    theirs = ranks.run(until_all_are_done, program.__name__, backend="gloo", **how)
    for our, their in zip(ours, theirs, strict=True):
        expected = their.returned
        assert our.returned == expected, f"rank {our.rank}"
