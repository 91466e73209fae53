"""The single operations that test_plugin_operations.py runs with two backends: a table of cases.

A case is a function from a rank to what that rank got. It must give the same with Gloo and with tenfold, to
the last bit; `gloo=...` says why it may not, and then the value by hand is given. To add a case, write the
function and put `@case()` above it.
"""

import dataclasses
import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from bits import COMPLEX, FLOATS, FLOATS_OF_8_BITS, INTEGERS, Refused, plain
from ranks import Rank
from torch.distributed import ReduceOp


@dataclasses.dataclass
class Case:
    name: str
    body: Callable[[Rank], Any]
    gloo: str  # "agrees", or what it does instead
    by_hand: Callable[[int, int], Any] | None  # of rank and world


CASES: dict[str, Case] = {}
WRONG_PLACE = "writes the elements one after the other, whatever the strides"
HARMFUL = "writes outside the tensor"  # so Gloo is not asked


def case(gloo: str = "agrees", by_hand: Callable[[int, int], Any] | None = None) -> Callable:
    def register(body: Callable[[Rank], Any]) -> Callable[[Rank], Any]:
        assert gloo == "agrees" or by_hand, "what Gloo does not do needs a value by hand"
        name = body.__name__
        assert name not in CASES, name
        CASES[name] = Case(name, body, gloo, by_hand)
        return body

    return register


def run_cases(me: Rank, names: list[str]) -> dict[str, Any]:
    """Runs on every rank: {name: {"returned": value} or {"raised": text}}.

    A case that fails on any rank gets everybody a new group, so that each case can fail only for itself. The
    ranks tell each other through the store, which has no part in what is tested.
    """
    results = {}
    for name in names:
        if me.backend == "gloo" and CASES[name].gloo == HARMFUL:
            continue
        print(f"case {name}", flush=True)  # the last one is to blame if this process dies
        try:
            results[name] = {"returned": plain(CASES[name].body(me))}
        except Exception as error:
            results[name] = {"raised": f"{type(error).__name__}: {error}"}
        fine = "returned" in results[name]
        me.store.set(f"{name}/{me.rank}", str(fine))
        if any(me.store.get(f"{name}/{rank}") != b"True" for rank in range(me.world)):
            me.join()
    return results


def numbers(me: Rank | int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small whole numbers, different on each rank and at each place: their sums are exact in every order."""
    rank = me if isinstance(me, int) else me.rank
    count = math.prod(shape)
    return (torch.arange(count) % 13 + 1 + 3 * rank).to(dtype).reshape(shape)


def rough(me: Rank, *shape: int) -> torch.Tensor:
    """Numbers whose sum shows how it was rounded; of three it would show the order, so those are whole."""
    if me.world > 2:
        return numbers(me, *shape)
    return torch.randn(shape, generator=torch.Generator().manual_seed(me.rank))


def everybody() -> dist.ProcessGroup:
    return dist.group.WORLD


# ---------------------------------------------------------------------------------- all_reduce


@case()
def all_reduce(me):
    tensor = rough(me, 1000)
    dist.all_reduce(tensor)
    return tensor


@case()
def all_reduce_of_every_length_up_to_64(me):
    tensors = [rough(me, length) for length in range(65)]
    for tensor in tensors:
        dist.all_reduce(tensor)
    return tensors


@case()
def all_reduce_of_a_million_numbers(me):
    tensor = rough(me, 1 << 20)
    dist.all_reduce(tensor)
    return tensor


@case()
def all_reduce_average(me):
    tensor = rough(me, 100)
    dist.all_reduce(tensor, ReduceOp.AVG)
    return tensor


@case()
def all_reduce_bfloat16_maximum(me):
    tensor = rough(me, 100).bfloat16()
    dist.all_reduce(tensor, ReduceOp.MAX)
    return tensor


@case()
def all_reduce_transposed(me):
    tensor = rough(me, 6, 10).t()
    dist.all_reduce(tensor)
    return tensor


def with_part(whole: torch.Tensor, part: torch.Tensor, *place: slice | int) -> torch.Tensor:
    """By hand: the tensor with one part of it replaced."""
    whole[place] = part
    return whole


@case(
    gloo=WRONG_PLACE,
    by_hand=lambda rank, world: with_part(
        numbers(rank, 8, 9),
        sum(numbers(each, 8, 9)[:, ::3] for each in range(world)),
        *(slice(None), slice(None, None, 3)),
    ),
)
def all_reduce_every_third_column_leaves_the_others(me):
    whole = numbers(me, 8, 9)
    dist.all_reduce(whole[:, ::3])
    return whole


@case(
    gloo=HARMFUL,
    by_hand=lambda rank, world: sum(numbers(each, 5, 1) for each in range(world)).expand(5, 4),
)
def all_reduce_expanded(me):
    tensor = numbers(me, 5, 1).expand(5, 4)
    dist.all_reduce(tensor)
    return tensor


@case()
def all_reduce_zero_dimensional(me):
    tensor = torch.tensor(1.5 + me.rank)
    dist.all_reduce(tensor)
    return tensor


@case()
def all_reduce_empty(me):
    tensor = torch.empty(0, 3)
    dist.all_reduce(tensor)
    return tensor


@case()
def all_reduce_of_a_parameter(me):
    parameter = torch.nn.Parameter(numbers(me, 7))
    dist.all_reduce(parameter)
    return [parameter, parameter.requires_grad]


@case()
def all_reduce_of_a_view_with_an_offset(me):
    whole = numbers(me, 20)
    dist.all_reduce(whole[3:11])
    return whole


@case()
def all_reduce_of_several_tensors_at_once(me):
    tensors = [numbers(me, 5), numbers(me, 2, 3)]
    dist.all_reduce_coalesced(tensors)
    return tensors


@case()
def all_reduce_by_the_group_without_options(me):
    tensor = numbers(me, 9)
    everybody().allreduce([tensor]).wait()
    other = numbers(me, 4)
    everybody().allreduce(other).wait()
    return [tensor, other]


@case()
def all_reduce_of_nan_and_infinity(me):
    values = [[1, math.nan, math.inf, -0.0], [math.nan, 2, -math.inf, 0.0]]
    results = []
    for op in (ReduceOp.SUM, ReduceOp.PRODUCT):
        tensor = torch.tensor(values[me.rank % 2])
        dist.all_reduce(tensor, op)
        results.append([tensor.isnan(), tensor.nan_to_num(7)])
    return results


@case()
def all_reduce_in_shared_memory(me):
    tensor = rough(me, 300_000).share_memory_()
    dist.all_reduce(tensor)
    return tensor


@case()
def all_reduce_channels_last(me):
    tensor = rough(me, 2, 3, 4, 5).to(memory_format=torch.channels_last)
    dist.all_reduce(tensor)
    return [tensor, tensor.is_contiguous(memory_format=torch.channels_last)]


@case()
def all_reduce_sparse(me):
    indices = torch.tensor([[0, 2 + me.rank, 5]])
    tensor = torch.sparse_coo_tensor(indices, numbers(me, 3, 2), (9, 2))
    dist.all_reduce(tensor)
    return tensor


@case()
def all_reduce_sparse_with_nothing_on_one_rank(me):
    count = 0 if me.rank == 0 else 2
    tensor = torch.sparse_coo_tensor(torch.arange(count).reshape(1, -1), numbers(me, count), (4,))
    dist.all_reduce(tensor)
    return tensor


# ---------------------------------------------------------------------------------- broadcast and reduce


@case()
def broadcast_from_every_root(me):
    results = []
    for root in range(me.world):
        tensor = numbers(me, 33)
        dist.broadcast(tensor, root)
        results.append(tensor)
    return results


@case()
def broadcast_by_rank_in_the_group(me):
    tensor = numbers(me, 8)
    dist.broadcast(tensor, group_src=me.world - 1)
    return tensor


@case(
    gloo=WRONG_PLACE,
    by_hand=lambda rank, world: with_part(
        numbers(rank, 6, 6), numbers(0, 6, 6)[::2, 1:4], slice(None, None, 2), slice(1, 4)
    ),
)
def broadcast_strided(me):
    whole = numbers(me, 6, 6)
    dist.broadcast(whole[::2, 1:4], 0)
    return whole


@case()
def reduce_to_every_root(me):
    results = []
    for root in range(me.world):
        tensor = rough(me, 33)
        dist.reduce(tensor, root)
        results.append(tensor if me.rank == root else None)  # elsewhere it is scratch
    return results


@case()
def reduce_product_of_a_strided_tensor(me):
    tensor = numbers(me, 4, 6, dtype=torch.int64).t()
    dist.reduce(tensor, 1, ReduceOp.PRODUCT)
    return tensor if me.rank == 1 else None


# ---------------------------------------------------------------------------------- gathering and scattering


@case()
def all_gather_list(me):
    outputs = [torch.zeros(3, 4) for _ in range(me.world)]
    dist.all_gather(outputs, numbers(me, 3, 4))
    return outputs


@case()
def all_gather_strided_list(me):
    whole = torch.zeros(me.world, 4, 6)
    dist.all_gather([each.t() for each in whole], numbers(me, 4, 6).t())
    return whole


@case(
    gloo="refuses lists of different lengths",
    by_hand=lambda rank, world: [numbers(each, 2 + 3 * each) for each in range(world)],
)
def all_gather_uneven_list(me):
    outputs = [torch.zeros(2 + 3 * rank) for rank in range(me.world)]
    dist.all_gather(outputs, numbers(me, 2 + 3 * me.rank))
    return outputs


@case()
def all_gather_into_tensor(me):
    output = torch.zeros(3 * me.world, 2)
    dist.all_gather_into_tensor(output, numbers(me, 3, 2))
    return output


@case(
    gloo="wants the concatenated shape",
    by_hand=lambda rank, world: torch.stack([numbers(each, 3, 2) for each in range(world)]),
)
def all_gather_into_stacked_tensor(me):
    output = torch.zeros(me.world, 3, 2)
    dist.all_gather_into_tensor(output, numbers(me, 3, 2))
    return output


@case()
def all_gather_into_strided_tensor(me):
    whole = torch.zeros(3 * me.world, 4)
    dist.all_gather_into_tensor(whole[:, 1:3], numbers(me, 3, 2))
    return whole


# FSDP's way: the shard is already where it goes.
@case()
def all_gather_in_place(me):
    whole = torch.zeros(5 * me.world)
    shard = whole[5 * me.rank :][:5].copy_(numbers(me, 5))
    dist.all_gather_into_tensor(whole, shard)
    return whole


@case()
def all_gather_single_by_its_new_name(me):
    output = torch.zeros(2 * me.world)
    dist.all_gather_single(output, numbers(me, 2))
    return output


@case()
def all_gather_coalesced(me):
    outputs = [[torch.zeros(2), torch.zeros(3, 2)] for _ in range(me.world)]
    dist.all_gather_coalesced(outputs, [numbers(me, 2), numbers(me, 3, 2)])
    return outputs


@case()
def all_gather_empty(me):
    outputs = [torch.zeros(0, 2) for _ in range(me.world)]
    dist.all_gather(outputs, torch.zeros(0, 2))
    return outputs


@case()
def gather_to_every_root(me):
    results = []
    for root in range(me.world):
        outputs = [torch.zeros(5) for _ in range(me.world)] if me.rank == root else None
        dist.gather(numbers(me, 5), outputs, dst=root)
        results.append(outputs)
    return results


@case(
    gloo="does not implement it",
    by_hand=lambda rank, world: torch.cat([numbers(each, 5) for each in range(world)]) if rank == 0 else None,
)
def gather_single(me):
    output = torch.zeros(5 * me.world) if me.rank == 0 else None
    dist.gather_single(numbers(me, 5), output, dst=0)
    return output


@case()
def scatter_from_every_root(me):
    results = []
    for root in range(me.world):
        inputs = [numbers(rank, 4) * 10 for rank in range(me.world)] if me.rank == root else None
        output = torch.zeros(4)
        dist.scatter(output, inputs, src=root)
        results.append(output)
    return results


@case(
    gloo=WRONG_PLACE,
    by_hand=lambda rank, world: with_part(torch.zeros(4, 3), numbers(rank, 4), slice(None), 1),
)
def scatter_into_a_strided_tensor(me):
    whole = torch.zeros(4, 3)
    inputs = [numbers(rank, 4) for rank in range(me.world)] if me.rank == 1 else None
    dist.scatter(whole[:, 1], inputs, src=1)
    return whole


@case()
def reduce_scatter_list(me):
    output = torch.zeros(6)
    dist.reduce_scatter(output, [rough(me, 6) * (1 + rank) for rank in range(me.world)])
    return output


@case()
def reduce_scatter_tensor(me):
    output = torch.zeros(3, 2)
    dist.reduce_scatter_tensor(output, rough(me, 3 * me.world, 2))
    return output


@case()
def reduce_scatter_tensor_average(me):
    output = torch.zeros(5)
    dist.reduce_scatter_tensor(output, rough(me, 5 * me.world), ReduceOp.AVG)
    return output


@case()
def reduce_scatter_strided_tensors(me):
    whole = torch.zeros(3, 4)
    dist.reduce_scatter_tensor(whole[:, ::2], numbers(me, 2, 3 * me.world).t())
    return whole


@case()
def reduce_scatter_in_place(me):
    whole = rough(me, 5 * me.world)
    shard = whole[5 * me.rank :][:5]
    dist.reduce_scatter_tensor(shard, whole)
    return shard


@case()
def reduce_scatter_leaves_its_input(me):
    tensor = numbers(me, 4 * me.world)
    dist.reduce_scatter_tensor(torch.zeros(4), tensor)
    return tensor


# ---------------------------------------------------------------------------------- all_to_all


@case()
def all_to_all_list(me):
    outputs = [torch.zeros(3) for _ in range(me.world)]
    dist.all_to_all(outputs, [numbers(me, 3) + 100 * rank for rank in range(me.world)])
    return outputs


@case(
    gloo="refuses lists of different lengths",
    by_hand=lambda rank, world: [numbers(each, 1 + 2 * rank + each) + 100 * rank for each in range(world)],
)
def all_to_all_uneven_list(me):
    outputs = [torch.zeros(1 + 2 * me.rank + rank) for rank in range(me.world)]
    dist.all_to_all(outputs, [numbers(me, 1 + 2 * rank + me.rank) + 100 * rank for rank in range(me.world)])
    return outputs


@case()
def all_to_all_single(me):
    output = torch.zeros(2 * me.world, 3)
    dist.all_to_all_single(output, numbers(me, 2 * me.world, 3))
    return output


@case()
def all_to_all_single_uneven(me):
    sent = [1 + rank + me.rank for rank in range(me.world)]
    output = torch.zeros(sum(sent), 2)
    dist.all_to_all_single(output, numbers(me, sum(sent), 2), sent, sent)
    return output


@case()
def all_to_all_single_with_nothing_for_some(me):
    sent = [3 if rank == 0 else 0 for rank in range(me.world)]
    received = [3 if me.rank == 0 else 0 for _ in range(me.world)]
    output = torch.zeros(sum(received))
    dist.all_to_all_single(output, numbers(me, 3), received, sent)
    return output


@case(
    gloo=WRONG_PLACE,
    by_hand=lambda rank, world: with_part(
        torch.zeros(2 * world, 2),
        torch.cat([numbers(each, 2 * world)[2 * rank :][:2] for each in range(world)]),
        *(slice(None), 0),
    ),
)
def all_to_all_single_into_a_strided_tensor(me):
    whole = torch.zeros(2 * me.world, 2)
    dist.all_to_all_single(whole[:, 0], numbers(me, 2 * me.world))
    return whole


@case(
    gloo="refuses it",
    by_hand=lambda rank, world: torch.cat(
        [numbers(each, 3, 2 * world).t()[2 * rank : 2 * rank + 2] for each in range(world)]
    ),
)
def all_to_all_single_from_a_strided_tensor(me):
    output = torch.zeros(2 * me.world, 3)
    dist.all_to_all_single(output, numbers(me, 3, 2 * me.world).t())
    return output


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


# ---------------------------------------------------------------------------------- every dtype

OPERATIONS = {
    "SUM": ReduceOp.SUM,
    "AVG": ReduceOp.AVG,
    "PRODUCT": ReduceOp.PRODUCT,
    "MIN": ReduceOp.MIN,
    "MAX": ReduceOp.MAX,
    "BAND": ReduceOp.BAND,
    "BOR": ReduceOp.BOR,
    "BXOR": ReduceOp.BXOR,
    "PREMUL_SUM": None,  # made with a factor
}
FACTOR = 0.5
DTYPES = sorted(
    {str(each).removeprefix("torch.") for each in vars(torch).values() if isinstance(each, torch.dtype)}
)


def family(dtype: str) -> str:
    """What kind of numbers it has; `bytes` are moved, not reduced."""
    families = {"float": FLOATS + FLOATS_OF_8_BITS, "integer": INTEGERS, "complex": COMPLEX, "bool": ["bool"]}
    return next((name for name, dtypes in families.items() if dtype in dtypes), "bytes")


def of_every_dtype(rank: int, name: str) -> torch.Tensor:
    """Eight elements of any dtype: numbers that every float has exactly, or else just bytes."""
    dtype = getattr(torch, name)
    kind = family(name)
    if kind == "float":
        return torch.tensor([[0.5, 1, -2, 3, 0, 1.5, -1, 4], [2, -1, 0.5, 1, 3, -2, 1, -4]][rank % 2]).to(
            dtype
        )
    if kind == "integer":
        return torch.tensor([[1, 2, 3, 100, 0, 7, 12, 9], [5, 3, 3, 100, 1, 0, 10, 6]][rank % 2]).to(dtype)
    if kind == "complex":
        return torch.complex(torch.arange(8.0) - rank, torch.arange(8.0) * 2 + rank).to(dtype)
    if kind == "bool":
        return torch.tensor([[1, 1, 0, 0, 1, 1, 0, 0], [1, 0, 1, 0, 1, 0, 1, 0]][rank % 2]).bool()
    return raw(bytes(range(1 + 50 * rank, 1 + 50 * rank + 8 * dtype.itemsize)), dtype)


def blank(name: str) -> torch.Tensor:
    dtype = getattr(torch, name)
    return raw(bytes(8 * dtype.itemsize), dtype)


def raw(data: bytes, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of whatever dtype with these bytes."""
    shape = [len(data) // dtype.itemsize]
    if str(dtype).startswith("torch.q"):
        tensor = torch._empty_affine_quantized(shape, scale=1.0, zero_point=0, dtype=dtype)
    else:
        tensor = torch.empty(shape, dtype=dtype)
    storage = tensor.untyped_storage()  # some dtypes put several elements into a byte
    for index, byte in enumerate(data[: storage.nbytes()]):
        storage[index] = byte
    return tensor


def reduced_by_hand(world: int, dtype: str, op: str) -> torch.Tensor | None:
    """What all ranks should have, in exact arithmetic, rounded once; None if there is no such thing."""
    kind = family(dtype)
    tensors = [of_every_dtype(rank, dtype) for rank in range(world)]
    has = {
        "float": {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "PREMUL_SUM"},
        "integer": {"SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"},
        "bool": {"SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"},
        "complex": {"SUM", "AVG", "PREMUL_SUM"},  # PyTorch itself refuses the product
        "bytes": set(),
    }
    if op not in has[kind]:
        return None
    if kind == "integer":
        return integers_by_hand([tensor.tolist() for tensor in tensors], getattr(torch, dtype), op)
    if kind == "bool":
        either, both = tensors[0] | tensors[1], tensors[0] & tensors[1]
        return {"SUM": either, "MAX": either, "BOR": either, "BXOR": tensors[0] ^ tensors[1]}.get(op, both)
    wide = torch.stack(
        [tensor.to(torch.complex128 if kind == "complex" else torch.float64) for tensor in tensors]
    )
    result = {
        "SUM": lambda: wide.sum(0),
        "AVG": lambda: wide.sum(0) / world,
        "PRODUCT": lambda: wide.prod(0),
        "MIN": lambda: wide.amin(0),
        "MAX": lambda: wide.amax(0),
        "PREMUL_SUM": lambda: (wide * FACTOR).sum(0),
    }[op]()
    return result.to(getattr(torch, dtype))


def integers_by_hand(rows: list[list[int]], dtype: torch.dtype, op: str) -> torch.Tensor:
    combine = {
        "SUM": lambda a, b: a + b,
        "PRODUCT": lambda a, b: a * b,
        "MIN": min,
        "MAX": max,
        "BAND": lambda a, b: a & b,
        "BOR": lambda a, b: a | b,
        "BXOR": lambda a, b: a ^ b,
    }[op]
    width = dtype.itemsize
    columns = [
        (combine(a, b) % (1 << 8 * width)).to_bytes(width, "little") for a, b in zip(*rows, strict=True)
    ]
    return torch.frombuffer(bytearray(b"".join(columns)), dtype=dtype)


def reduce_every_dtype(me: Rank) -> dict[str, dict[str, Any]]:
    """{dtype: {op: the result, or Refused with what the tensor holds after that}}."""
    ops = OPERATIONS | {"PREMUL_SUM": dist._make_nccl_premul_sum(FACTOR)}
    results: dict[str, dict[str, Any]] = {}
    for dtype in DTYPES:
        results[dtype] = {}
        for name, op in ops.items():
            tensor = of_every_dtype(me.rank, dtype)
            try:
                dist.all_reduce(tensor, op)
                results[dtype][name] = plain(tensor)
            except (RuntimeError, ValueError, TypeError):
                results[dtype][name] = plain(Refused(tensor))
    return results


MOVEMENTS: dict[str, Callable[[Rank, str], list[torch.Tensor]]] = {}


def movement(body: Callable[[Rank, str], list[torch.Tensor]]) -> Callable:
    MOVEMENTS[body.__name__.removesuffix("_of")] = body
    return body


@movement
def broadcast_of(me, dtype):
    tensor = of_every_dtype(me.rank, dtype)
    dist.broadcast(tensor, 1)
    return [tensor]


@movement
def all_gather_of(me, dtype):
    outputs = [blank(dtype) for _ in range(me.world)]
    dist.all_gather(outputs, of_every_dtype(me.rank, dtype))
    return outputs


@movement
def gather_of(me, dtype):
    outputs = [blank(dtype) for _ in range(me.world)] if me.rank == 0 else None
    dist.gather(of_every_dtype(me.rank, dtype), outputs, dst=0)
    return outputs or []


@movement
def scatter_of(me, dtype):
    output = blank(dtype)
    inputs = [of_every_dtype(rank, dtype) for rank in range(me.world)] if me.rank == 0 else None
    dist.scatter(output, inputs, src=0)
    return [output]


@movement
def all_to_all_of(me, dtype):
    outputs = [blank(dtype) for _ in range(me.world)]
    dist.all_to_all(outputs, [of_every_dtype(me.rank, dtype) for _ in range(me.world)])
    return outputs


@movement
def message_of(me, dtype):
    tensor = of_every_dtype(me.rank, dtype)
    if me.rank == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(tensor, 0)
    return [tensor]


def moved_by_hand(rank: int, world: int, dtype: str, name: str) -> list[torch.Tensor]:
    everyone = [of_every_dtype(each, dtype) for each in range(world)]
    return {
        "broadcast": [everyone[1]],
        "all_gather": everyone,
        "gather": everyone if rank == 0 else [],
        "scatter": [everyone[rank]],
        "all_to_all": everyone,
        "message": [everyone[0]],
    }[name]


def move_every_dtype(me: Rank) -> dict[str, dict[str, Any]]:
    """{dtype: {movement: what arrived, or the text of the exception}}."""
    results: dict[str, dict[str, Any]] = {}
    for dtype in DTYPES:
        results[dtype] = {}
        for name, body in MOVEMENTS.items():
            try:
                results[dtype][name] = plain(body(me, dtype))
            except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
                results[dtype][name] = f"{type(error).__name__}: {error}"
    return results
