"""The single operations that test_plugin_operations.py runs with two backends: a table of cases.

A case is a function from a rank to what that rank got. It must give the same with Gloo and with tenfold, to
the last bit; `gloo=...` says why it may not, and then the value by hand is given. To add a case, write the
function and put `@case()` above it.
"""

import math
from typing import Any

import operations_of_groups  # noqa: F401, registers its cases
import torch
import torch.distributed as dist
from bits import plain
from operation_cases import CASES, HARMFUL, WRONG_PLACE, case, everybody, numbers, rough
from ranks import Rank
from torch.distributed import ReduceOp


def run_cases(me: Rank, names: list[str]) -> dict[str, Any]:
    """Runs on every rank: {name: {"returned": value} or {"raised": text}}.

    After a case that fails on any rank, all ranks make a new group, so that each case can fail only for
    itself. The ranks tell each other through the store, which has no part in what is tested.
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
