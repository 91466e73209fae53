"""More cases for `operations.py`: messages, objects, groups, functional collectives, coalescing and works."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from operation_cases import case, everybody, numbers, rough
from ranks import Rank

# ---------------------------------------------------------------------------------- messages


def neighbours(me: Rank) -> tuple[int, int]:
    """Who comes after and who comes before, round the ring."""
    return (me.rank + 1) % me.world, (me.rank - 1) % me.world


@case()
def send_and_recv(me):
    tensor = numbers(me, 10)
    if me.rank == 0:
        dist.send(tensor, 1)
    elif me.rank == 1:
        source = dist.recv(tensor, 0)
        return [source, tensor]
    return None


@case()
def tags_choose_among_messages(me):
    if me.rank == 0:
        works = [dist.isend(numbers(me, 4) * tag, 1, tag=tag) for tag in (5, 6, 7)]
        for work in works:
            work.wait()
    elif me.rank == 1:
        received = {}
        for tag in (7, 5, 6):
            received[tag] = torch.zeros(4)
            dist.recv(received[tag], 0, tag=tag)
        return received
    return None


@case()
def messages_with_one_tag_keep_their_order(me):
    if me.rank == 0:
        for index in range(20):
            dist.send(torch.tensor([float(index)]), 1)
    elif me.rank == 1:
        received = [torch.zeros(1) for _ in range(20)]
        for tensor in received:
            dist.recv(tensor, 0)
        return received
    return None


@case()
def isend_and_irecv_round_a_ring(me):
    after, before = neighbours(me)
    tensor = torch.zeros(1000)
    works = [dist.isend(numbers(me, 1000), after), dist.irecv(tensor, before)]
    for work in works:
        work.wait()
    return [tensor, [work.is_completed() for work in works]]


@case()
def recv_from_anybody(me):
    if me.rank > 0:
        dist.send(numbers(me, 3), 0)
        return None
    received = {}
    for _ in me.peers():
        tensor = torch.zeros(3)
        received[dist.recv(tensor)] = tensor
    return dict(sorted(received.items()))


@case()
def a_short_message_leaves_the_rest(me):
    if me.rank == 0:
        dist.send(numbers(me, 3), 1)
    elif me.rank == 1:
        tensor = torch.full((5,), -1.0)
        dist.recv(tensor, 0)
        return tensor
    return None


@case()
def an_empty_message(me):
    if me.rank == 0:
        dist.send(torch.zeros(0), 1)
    elif me.rank == 1:
        return [dist.recv(torch.zeros(0), 0)]
    return None


@case()
def batch_isend_irecv(me):
    after, before = neighbours(me)
    tensors = [torch.zeros(4), torch.zeros(2, 2)]
    batch = [
        dist.P2POp(dist.isend, numbers(me, 4), after, tag=1),
        dist.P2POp(dist.irecv, tensors[0], before, tag=1),
        dist.P2POp(dist.isend, numbers(me, 2, 2), after, tag=2),
        dist.P2POp(dist.irecv, tensors[1], before, tag=2),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    return tensors


# ---------------------------------------------------------------------------------- barriers and objects


@case()
def barrier(me):
    dist.barrier()
    return dist.barrier(async_op=True).wait()


@case()
def monitored_barrier(me):
    dist.monitored_barrier(timeout=timedelta(seconds=10))
    dist.monitored_barrier(timeout=timedelta(seconds=10), wait_all_ranks=True)
    return "passed"


OBJECTS = [{"key": [1, 2]}, "text", None, 3.5, ("tuple", b"bytes")]


@case()
def all_gather_object(me):
    gathered = [None] * me.world
    dist.all_gather_object(gathered, {"rank": me.rank, "text": "x" * 1000 * me.rank})
    return gathered


@case()
def gather_object(me):
    gathered = [None] * me.world if me.rank == 1 else None
    dist.gather_object(OBJECTS[me.rank], gathered, dst=1)
    return gathered


@case()
def broadcast_object_list(me):
    objects = OBJECTS[:3] if me.rank == 1 else [None] * 3
    dist.broadcast_object_list(objects, src=1)
    return objects


@case()
def scatter_object_list(me):
    received = [None]
    dist.scatter_object_list(received, OBJECTS[: me.world] if me.rank == 0 else None, src=0)
    return received


@case()
def send_and_recv_object_list(me):
    objects = list(OBJECTS) if me.rank == 0 else [None] * len(OBJECTS)
    if me.rank == 0:
        dist.send_object_list(objects, dst=1)
    elif me.rank == 1:
        return [dist.recv_object_list(objects, src=0), objects]
    return None


# ---------------------------------------------------------------------------------- groups


@case()
def groups_of_one_and_of_all(me):
    alone = [dist.new_group([rank]) for rank in range(me.world)]
    together = dist.new_group(list(reversed(range(me.world))))
    tensors = [numbers(me, 4), numbers(me, 4)]
    dist.all_reduce(tensors[0], group=alone[me.rank])
    dist.all_reduce(tensors[1], group=together)
    outside = [group is dist.GroupMember.NON_GROUP_MEMBER for group in alone]
    return [
        tensors,
        outside,
        dist.get_process_group_ranks(together),
        dist.get_backend(together) == me.backend,
    ]


@case()
def ranks_in_a_group_that_is_not_the_world(me):
    group = dist.new_group([1])
    if me.rank != 1:
        return None
    tensor = numbers(me, 3)
    dist.broadcast(tensor, src=1, group=group)
    return [tensor, dist.get_rank(group), dist.get_global_rank(group, 0), dist.get_group_rank(group, 1)]


@case()
def groups_that_are_destroyed_can_be_made_again(me):
    sums = []
    for _ in range(3):
        group = dist.new_group()
        tensor = numbers(me, 2)
        dist.all_reduce(tensor, group=group)
        sums.append(tensor)
        dist.destroy_process_group(group)
    return sums


@case()
def operations_of_two_groups_at_once(me):
    groups = [dist.new_group() for _ in range(2)]
    tensors = [rough(me, 100), rough(me, 100) * 2]
    order = (0, 1) if me.rank == 0 else (1, 0)
    works = [dist.all_reduce(tensors[each], group=groups[each], async_op=True) for each in order]
    for work in works:
        work.wait()
    return tensors


@case()
def new_subgroups(me):
    group, _ = dist.new_subgroups(group_size=1)
    tensor = numbers(me, 2)
    dist.all_reduce(tensor, group=group)
    return [tensor, dist.get_world_size(group)]


@case()
def split_group(me):
    group = dist.split_group(split_ranks=[[rank] for rank in range(me.world)])
    tensor = numbers(me, 2)
    dist.all_reduce(tensor, group=group)
    return [tensor, dist.get_process_group_ranks(group)]


@case()
def split_group_with_everybody(me):
    group = dist.split_group(split_ranks=[list(range(me.world))])
    tensor = rough(me, 20)
    dist.all_reduce(tensor, group=group)
    return [tensor, dist.get_process_group_ranks(group)]


# ---------------------------------------------------------------------------------- functional collectives


@case()
def functional_all_reduce(me):
    tensor = rough(me, 7)
    result = functional.all_reduce(tensor, "sum", everybody())
    return [functional.wait_tensor(result), tensor]


@case()
def functional_all_reduce_average(me):
    return functional.wait_tensor(functional.all_reduce(rough(me, 7), "avg", everybody()))


@case()
def functional_all_gather_along_the_second_dimension(me):
    return functional.wait_tensor(functional.all_gather_tensor(numbers(me, 2, 3), 1, everybody()))


@case()
def functional_reduce_scatter_along_the_second_dimension(me):
    tensor = rough(me, 2, 3 * me.world)
    return functional.wait_tensor(functional.reduce_scatter_tensor(tensor, "sum", 1, everybody()))


@case()
def functional_all_to_all_single(me):
    return functional.wait_tensor(
        functional.all_to_all_single(numbers(me, 2 * me.world), None, None, everybody())
    )


@case()
def functional_all_to_all_single_uneven(me):
    splits = [1 + rank + me.rank for rank in range(me.world)]
    return functional.wait_tensor(
        functional.all_to_all_single(numbers(me, sum(splits)), splits, splits, everybody())
    )


@case()
def functional_broadcast(me):
    return functional.wait_tensor(functional.broadcast(numbers(me, 5), 1, everybody()))


@case()
def functional_permute(me):
    to = [(rank + 1) % me.world for rank in range(me.world)]
    return functional.wait_tensor(functional.permute_tensor(numbers(me, 5), to, everybody()))


@case()
def functional_all_reduce_coalesced(me):
    results = functional.all_reduce_coalesced([rough(me, 3), rough(me, 2, 2)], "sum", everybody())
    return [functional.wait_tensor(result) for result in results]


@case()
def functional_all_gather_coalesced(me):
    tensors = [numbers(me, 3), numbers(me, 2, 2, dtype=torch.int64)]
    results = functional.all_gather_into_tensor_coalesced(tensors, everybody())
    return [functional.wait_tensor(result) for result in results]


@case()
def functional_reduce_scatter_coalesced(me):
    tensors = [rough(me, 3 * me.world), rough(me, 2, 2 * me.world)]
    results = functional.reduce_scatter_tensor_coalesced(tensors, "sum", [0, 1], everybody())
    return [functional.wait_tensor(result) for result in results]


@case()
def functional_gradients(me):
    tensor = numbers(me, 2 * me.world).requires_grad_()
    gathered = functional.wait_tensor(functional.all_gather_tensor_autograd(tensor, 0, everybody()))
    scattered = functional.wait_tensor(
        functional.reduce_scatter_tensor_autograd(gathered * (1 + me.rank), "sum", 0, everybody())
    )
    exchanged = functional.wait_tensor(
        functional.all_to_all_single_autograd(scattered, None, None, everybody())
    )
    (exchanged * numbers(me, 2 * me.world)).sum().backward()
    return [exchanged, tensor.grad]


# ---------------------------------------------------------------------------------- coalescing


@case()
def coalesced_all_reduces(me):
    tensors = [rough(me, length) for length in (1, 10, 100)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    return tensors


@case()
def coalesced_all_gathers(me):
    outputs = [torch.zeros(length * me.world) for length in (1, 10, 100)]
    with dist._coalescing_manager():
        for output in outputs:
            dist.all_gather_into_tensor(output, numbers(me, len(output) // me.world))
    return outputs


@case()
def coalesced_reduce_scatters(me):
    outputs = [torch.zeros(length) for length in (1, 10, 100)]
    with dist._coalescing_manager():
        for output in outputs:
            dist.reduce_scatter_tensor(output, rough(me, len(output) * me.world))
    return outputs


@case(
    gloo="cannot mix operations in one batch",
    by_hand=lambda rank, world: [
        *(sum(numbers(each, length) for each in range(world)) for length in (1, 10)),
        numbers(0, 5),
    ],
)
def coalesced_mixture_on_the_cpu(me):
    tensors = [numbers(me, 1), numbers(me, 10), numbers(me, 5)]
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        dist.all_reduce(tensors[0])
        dist.all_reduce(tensors[1])
        dist.broadcast(tensors[2], 0)
    manager.wait()
    return tensors


# ---------------------------------------------------------------------------------- works and futures


@case()
def a_work_that_was_waited_for(me):
    tensor = numbers(me, 50)
    work = dist.all_reduce(tensor, async_op=True)
    returned = work.wait()
    return [returned, tensor, work.get_future().done(), work.exception() is None]


@case()
def a_wait_with_enough_time(me):
    tensor = numbers(me, 50)
    return [dist.all_reduce(tensor, async_op=True).wait(timedelta(seconds=10)), tensor]


@case()
def a_chain_of_futures(me):
    tensor = numbers(me, 6)
    future = dist.all_reduce(tensor, async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    shifted = doubled.then(lambda done: done.value() + 1)
    return [shifted.wait(), tensor]


@case()
def a_callback_that_waits_for_another_collective(me):
    first, second = numbers(me, 4), numbers(me, 4)

    def again(done: torch.futures.Future) -> torch.Tensor:
        second.add_(done.value()[0])
        return dist.all_reduce(second, async_op=True).get_future().wait()[0]

    return dist.all_reduce(first, async_op=True).get_future().then(again).wait()


@case()
def futures_of_many_collectives(me):
    tensor, gathered, exchanged = numbers(me, 3), torch.zeros(me.world), torch.zeros(me.world)
    outputs = [torch.zeros(2) for _ in range(me.world)]
    works = [
        dist.broadcast(tensor, 0, async_op=True),
        dist.all_gather(outputs, numbers(me, 2), async_op=True),
        dist.all_gather_into_tensor(gathered, numbers(me, 1), async_op=True),
        dist.all_to_all_single(exchanged, numbers(me, me.world), async_op=True),
        dist.barrier(async_op=True),
    ]
    for work in works:
        work.get_future().wait()
    return [tensor, outputs, gathered, exchanged]


@case()
def many_in_flight_waited_for_backwards(me):
    tensors = [rough(me, 1 + index % 50) for index in range(200)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    return tensors


@case()
def many_in_flight_of_many_kinds(me):
    sums, gathered = [], []
    works = []
    for index in range(40):
        sums.append(rough(me, 3 + index))
        gathered.append(torch.zeros(2 * me.world))
        works.append(dist.all_reduce(sums[-1], async_op=True))
        works.append(dist.all_gather_into_tensor(gathered[-1], numbers(me, 2), async_op=True))
        works.append(dist.barrier(async_op=True))
    for work in works:
        work.wait()
    return [sums, gathered]


@case()
def a_work_nobody_waits_for(me):
    tensor = numbers(me, 5)
    dist.all_reduce(tensor, async_op=True)
    dist.barrier()  # it comes later, so the sum is there now
    return tensor


@case()
def sequence_numbers(me):
    def advanced_by(call: Callable[[], Any]) -> int:
        before = everybody()._get_sequence_number_for_group()
        call()
        return everybody()._get_sequence_number_for_group() - before

    tensor = numbers(me, me.world)
    return {
        "all_reduce": advanced_by(lambda: dist.all_reduce(tensor)),
        "broadcast": advanced_by(lambda: dist.broadcast(tensor, 0)),
        "all_gather": advanced_by(lambda: dist.all_gather_into_tensor(torch.zeros(me.world**2), tensor)),
        "barrier": advanced_by(dist.barrier),
        "message": advanced_by(lambda: (dist.send if me.rank == 0 else dist.recv)(tensor, 1 - me.rank))
        if me.rank < 2
        else 1,
    }


@case()
def names_and_sizes(me):
    group = everybody()
    return {
        "rank": [group.rank(), dist.get_rank(), dist.get_group_rank(group, me.rank)],
        "size": [group.size(), dist.get_world_size()],
        "backend": dist.get_backend() == me.backend,
        "name": group.group_name,
        "description": group.group_desc,
    }
