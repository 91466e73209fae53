"""Collectives that do not change their arguments and return new arrays, named as PyTorch's functional ones.

Each returns a complete array. With `wait=False` it returns immediately, and the array belongs to the
operation until you call `wait_tensor` with it. `group` is a group of any kind, or the name of a registered
group.
"""

from collections.abc import Sequence
from typing import Any

from tenfold.api import Group
from tenfold.arrays import Tensor, as_array, concatenated, contiguous_copy, empty_like, parts
from tenfold.c10d.options import AllreduceCoalescedOptions, ReduceScatterOptions
from tenfold.c10d.registry import _resolve_process_group
from tenfold.c10d.work_registry import _register_work, take_works
from tenfold.reduce_op import Reduction, as_reduce_op
from tenfold.work import Work

__all__ = [
    "all_gather_into_tensor_coalesced",
    "all_gather_tensor",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all_single",
    "broadcast",
    "permute_tensor",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
    "wait_tensor",
]


def all_reduce(tensor: Tensor, op: Reduction, group: Any, *, wait: bool = True) -> Tensor:
    """Returns the reduction of the arrays of all ranks.

    >>> import numpy, tenfold
    >>> group = tenfold.init(store=tenfold.HashStore(), rank=0, world_size=1)
    >>> all_reduce(numpy.array([1.0, 2.0]), "sum", group)
    array([1., 2.])
    """
    result = contiguous_copy(as_array(tensor))
    return _finished(result, _group(group).allreduce(result, op), wait)


def all_reduce_coalesced(
    tensors: Sequence[Tensor], op: Reduction, group: Any, *, wait: bool = True
) -> list[Tensor]:
    """Does `all_reduce` on several arrays in one operation."""
    results = [contiguous_copy(as_array(tensor)) for tensor in tensors]
    options = AllreduceCoalescedOptions()
    options.reduceOp = as_reduce_op(op)
    return _all_finished(results, _group(group).allreduce_coalesced(results, options), wait)


def broadcast(tensor: Tensor, src: int, group: Any, *, wait: bool = True) -> Tensor:
    """Returns the array of rank `src`."""
    result = contiguous_copy(as_array(tensor))
    return _finished(result, _group(group).broadcast(result, src), wait)


def all_gather_tensor(tensor: Tensor, gather_dim: int, group: Any, *, wait: bool = True) -> Tensor:
    """Returns the arrays of all ranks, concatenated along a dimension."""
    group = _group(group)
    source = contiguous_copy(as_array(tensor))
    result = empty_like(source, [source.shape[0] * group.size(), *source.shape[1:]])
    work = group.all_gather_single(result, source)
    if gather_dim == 0:
        return _finished(result, work, wait)
    # Parts along another dimension are not contiguous; they can be concatenated only after all have arrived.
    work.wait()
    return concatenated(parts(result, group.size()), gather_dim)


def all_gather_into_tensor_coalesced(
    tensors: Sequence[Tensor], group: Any, *, wait: bool = True
) -> list[Tensor]:
    """Does `all_gather_tensor` on several arrays in one operation, along the first dimension."""
    group = _group(group)
    sources = [contiguous_copy(as_array(tensor)) for tensor in tensors]
    results = [empty_like(source, [len(source) * group.size(), *source.shape[1:]]) for source in sources]
    return _all_finished(results, group.all_gather_single_coalesced(results, sources), wait)


def reduce_scatter_tensor(
    tensor: Tensor, op: Reduction, scatter_dim: int, group: Any, *, wait: bool = True
) -> Tensor:
    """Returns this rank's equal part, along a dimension, of the reduction of all arrays."""
    return reduce_scatter_tensor_coalesced([tensor], op, [scatter_dim], group, wait=wait)[0]


def reduce_scatter_tensor_coalesced(
    tensors: Sequence[Tensor], op: Reduction, scatter_dims: Sequence[int], group: Any, *, wait: bool = True
) -> list[Tensor]:
    """Does `reduce_scatter_tensor` on several arrays in one operation."""
    group = _group(group)
    cut = [
        _cut_along(as_array(tensor), dim, group.size())
        for tensor, dim in zip(tensors, scatter_dims, strict=True)
    ]
    sources = [concatenated(pieces, 0) for pieces in cut]
    results = [empty_like(pieces[0]) for pieces in cut]
    options = ReduceScatterOptions()
    options.reduceOp = as_reduce_op(op)
    return _all_finished(results, group.reduce_scatter_single_coalesced(results, sources, options), wait)


def all_to_all_single(
    tensor: Tensor,
    output_split_sizes: Sequence[int] | None,
    input_split_sizes: Sequence[int] | None,
    group: Any,
    *,
    wait: bool = True,
) -> Tensor:
    """Sends a part of an array to each rank. Parts are given in rows; by default they are equal."""
    source = contiguous_copy(as_array(tensor))
    rows = len(source) if output_split_sizes is None else sum(output_split_sizes)
    result = empty_like(source, [rows, *source.shape[1:]])
    splits = (list(output_split_sizes or []), list(input_split_sizes or []))
    return _finished(result, _group(group).all_to_all_single(result, source, *splits), wait)


def permute_tensor(tensor: Tensor, src_dst: Sequence[int], group: Any, *, wait: bool = True) -> Tensor:
    """Returns the array of the rank that sends to this one: rank `r` sends to rank `src_dst[r]`."""
    group = _group(group)
    if sorted(src_dst) != list(range(group.size())):
        raise ValueError(f"src_dst must name each of the {group.size()} ranks once; it is {list(src_dst)}")
    source = contiguous_copy(as_array(tensor)).reshape(-1)
    sends = [source.shape[0] if rank == src_dst[group.rank()] else 0 for rank in range(group.size())]
    receives = [source.shape[0] if src_dst[rank] == group.rank() else 0 for rank in range(group.size())]
    result = empty_like(source)
    work = group.all_to_all_single(result, source, receives, sends)
    return _finished(result.reshape(as_array(tensor).shape), work, wait)


def wait_tensor(tensor: Tensor) -> Tensor:
    """Waits until the operations that fill the memory of `tensor` have completed."""
    for work in take_works(tensor):
        work.wait()
    return tensor


def _finished(tensor: Tensor, work: Work, wait: bool) -> Tensor:
    return _all_finished([tensor], work, wait)[0]


def _all_finished(tensors: list[Tensor], work: Work, wait: bool) -> list[Tensor]:
    if wait:
        work.wait()
    else:
        for tensor in tensors:
            _register_work(tensor, work)
    return tensors


def _group(group: Any) -> Any:
    if isinstance(group, str):
        return _resolve_process_group(group)
    return group.process_group if isinstance(group, Group) else group


def _cut_along(tensor: Tensor, dim: int, count: int) -> list[Tensor]:
    """Returns views of equal parts along a dimension."""
    size = tensor.shape[dim]
    if size % count:
        raise ValueError(f"dimension {dim} has size {size}, which cannot be divided into {count} equal parts")
    before = (slice(None),) * (dim % len(tensor.shape))
    step = size // count
    return [tensor[(*before, slice(i * step, (i + 1) * step))] for i in range(count)]
