"""How each operation of c10d is started on a group of the extension module.

Each operation has a function. Its arguments are the group, the arguments of the operation's first form, its
options, and `how`, which is `async_op` and `timeout`. c10d's lists "of several devices", which mostly have
one element, are unpacked here. An operation that has completed when the function returns has no work.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from tenfold._tenfold import Group, Work
from tenfold.arrays import is_torch
from tenfold.exceptions import DistArgumentError
from tenfold.reduce_op import as_reduce_op, code_of

__all__ = ["STARTS"]

# With `async_op` always a work, except for operations that cannot run in the background.
Started: TypeAlias = Work | None


def _only(items: Sequence[Any], what: str) -> Any:
    if len(items) != 1:
        raise DistArgumentError(f"{what} must be a list of one element, one per device; it has {len(items)}")
    return items[0]


def _at_root(group: Group, options: Any, lists: Sequence[Any], what: str) -> Sequence[Any]:
    """Returns an argument that only the root passes, and that is empty on other ranks."""
    if group.rank == options.rootRank:
        return _only(lists, what)
    if any(len(inner) for inner in lists):
        raise DistArgumentError(
            f"{what} must be empty on all ranks but the root, which is rank {options.rootRank}"
        )
    return []


def _broadcast(group: Group, tensors: Sequence[Any], options: Any, **how: Any) -> Started:
    root, root_tensor = options.rootRank, options.rootTensor
    if len(tensors) == 1 and root_tensor == 0:
        return group.broadcast(tensors[0], root, **how)
    if not 0 <= root_tensor < len(tensors):
        raise DistArgumentError(f"invalid root tensor: {root_tensor}: there are {len(tensors)} tensors")
    return group.broadcast_several(tensors, root, root_tensor, **how)


def _allreduce(group: Group, tensors: Sequence[Any], options: Any, **how: Any) -> Started:
    op = code_of(options.reduceOp)
    if len(tensors) == 1:
        return group.all_reduce(tensors[0], op, **how)
    if not tensors:
        raise DistArgumentError("tensors is empty: allreduce requires non-empty tensor list")
    return group.all_reduce_several(tensors, op, **how)


def _allreduce_sparse(group: Group, tensors: Sequence[Any], options: Any, **how: Any) -> Started:
    if not tensors:
        raise DistArgumentError("tensors is empty: allreduce_sparse requires non-empty tensor list")
    if not all(is_torch(tensor) for tensor in tensors):
        raise DistArgumentError("allreduce_sparse takes sparse tensors of PyTorch")
    from tenfold.torch import sparse

    sparse.all_reduce(group, list(tensors), as_reduce_op(options.reduceOp), how["timeout"])
    return None


def _allreduce_coalesced(group: Group, tensors: Sequence[Any], options: Any, **how: Any) -> Started:
    return group.all_reduce_coalesced(tensors, code_of(options.reduceOp), **how)


def _reduce(group: Group, tensors: Sequence[Any], options: Any, **how: Any) -> Started:
    return group.reduce(_only(tensors, "tensors"), options.rootRank, code_of(options.reduceOp), **how)


def _allgather(
    group: Group, outputs: Sequence[Any], inputs: Sequence[Any], options: Any, **how: Any
) -> Started:
    if len(inputs) == 1 and len(outputs) == 1:
        return group.all_gather(outputs[0], inputs[0], **how)
    if not inputs:
        raise DistArgumentError("input_tensors is empty: allgather requires non-empty input tensor list")
    count, expected = len(inputs), len(inputs) * group.size
    if len(outputs) != count:
        lengths = f"{len(outputs)} lists of outputs for {count} inputs"
        raise DistArgumentError(f"{lengths}: requires input/output tensor lists to have the same length")
    for place, targets in enumerate(outputs):
        if len(targets) != expected:
            lengths = f"(expected length {expected}, got {len(targets)})"
            raise DistArgumentError(f"invalid output tensor list at index {place} {lengths}")
    # Ordered by rank: each list gets all inputs of all ranks.
    targets = [list(outputs[which][place::count]) for which in range(count) for place in range(count)]
    return group.all_gather_coalesced(targets, list(inputs) * count, **how)


def _all_gather_single(group: Group, output: Any, source: Any, options: Any, **how: Any) -> Started:
    return group.all_gather_into(output, source, **how)


def _all_gather_single_coalesced(
    group: Group, outputs: Sequence[Any], inputs: Sequence[Any], options: Any, **how: Any
) -> Started:
    return group.all_gather_into_coalesced(outputs, inputs, **how)


def _allgather_coalesced(
    group: Group, lists: Sequence[Any], inputs: Sequence[Any], options: Any, **how: Any
) -> Started:
    if len(lists) != group.size or any(len(of_rank) != len(inputs) for of_rank in lists):
        shape = f"{group.size} lists, one per rank, of {len(inputs)} tensors, one per input"
        raise DistArgumentError(f"output_lists must have {shape}")
    by_input = [list(of_ranks) for of_ranks in zip(*lists, strict=True)]
    return group.all_gather_coalesced(by_input, inputs, **how)


def _gather(group: Group, outputs: Sequence[Any], inputs: Sequence[Any], options: Any, **how: Any) -> Started:
    targets = _at_root(group, options, outputs, "output_tensors")
    return group.gather(targets, _only(inputs, "input_tensors"), options.rootRank, **how)


def _gather_single(group: Group, output: Any, source: Any, options: Any, **how: Any) -> Started:
    target = output if group.rank == options.rootRank else None
    return group.gather_into(target, source, options.rootRank, **how)


def _scatter(
    group: Group, outputs: Sequence[Any], inputs: Sequence[Any], options: Any, **how: Any
) -> Started:
    sources = _at_root(group, options, inputs, "input_tensors")
    return group.scatter(_only(outputs, "output_tensors"), sources, options.rootRank, **how)


def _reduce_scatter(
    group: Group, outputs: Sequence[Any], inputs: Sequence[Any], options: Any, **how: Any
) -> Started:
    target, sources = _only(outputs, "output_tensors"), _only(inputs, "input_tensors")
    return group.reduce_scatter(target, sources, code_of(options.reduceOp), **how)


def _reduce_scatter_single(group: Group, output: Any, source: Any, options: Any, **how: Any) -> Started:
    return group.reduce_scatter_into(output, source, code_of(options.reduceOp), **how)


def _reduce_scatter_single_coalesced(
    group: Group, outputs: Sequence[Any], inputs: Sequence[Any], options: Any, **how: Any
) -> Started:
    return group.reduce_scatter_into_coalesced(outputs, inputs, code_of(options.reduceOp), **how)


def _all_to_all_single(
    group: Group,
    output: Any,
    source: Any,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    options: Any,
    **how: Any,
) -> Started:
    return group.all_to_all_single(output, source, output_splits or None, input_splits or None, **how)


def _alltoall(
    group: Group, outputs: Sequence[Any], inputs: Sequence[Any], options: Any, **how: Any
) -> Started:
    return group.all_to_all(outputs, inputs, **how)


def _send(group: Group, tensors: Sequence[Any], to: int, tag: int, options: None, **how: Any) -> Started:
    return group.send(_only(tensors, "tensors"), to, tag, **how)


def _recv(group: Group, tensors: Sequence[Any], source: int, tag: int, options: None, **how: Any) -> Started:
    return group.recv(_only(tensors, "tensors"), source, tag, **how)


def _recv_anysource(
    group: Group, tensors: Sequence[Any], tag: int, options: None, async_op: bool, timeout: float
) -> Started:
    return group.recv_any(_only(tensors, "tensors"), tag, timeout)


def _barrier(group: Group, options: Any, **how: Any) -> Started:
    return group.barrier(**how)


STARTS: dict[str, Callable[..., Started]] = {
    "broadcast": _broadcast,
    "allreduce": _allreduce,
    "allreduce_coalesced": _allreduce_coalesced,
    "allreduce_sparse": _allreduce_sparse,
    "reduce": _reduce,
    "allgather": _allgather,
    "all_gather_single": _all_gather_single,
    "all_gather_single_coalesced": _all_gather_single_coalesced,
    "allgather_coalesced": _allgather_coalesced,
    "gather": _gather,
    "gather_single": _gather_single,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter_single,
    "reduce_scatter_single_coalesced": _reduce_scatter_single_coalesced,
    "all_to_all_single": _all_to_all_single,
    "alltoall": _alltoall,
    "send": _send,
    "recv": _recv,
    "recv_anysource": _recv_anysource,
    "barrier": _barrier,
}
