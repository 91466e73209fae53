"""The table of c10d's operations: how each one starts on a group of the extension, and what else is to know.

Each function here is an operation, by c10d's name. Its arguments are the group, the arguments of the
operation's first form, its options (None for messages), and `how`: whether it is asynchronous, and its
timeout in seconds. c10d's lists "of several devices", which mostly have one element, are unpacked here. An
operation that has completed when the function returns has no work.

`Backend`, `ProcessGroup`, the fake group, the wrapper, and the plug-in for PyTorch make their methods from
this table. Only the forms in which an operation can be called are declared elsewhere, in `operations.py`,
where type checkers find them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tenfold._tenfold import Group, Work
from tenfold.arrays import is_torch
from tenfold.c10d.enums import HookOpName
from tenfold.exceptions import refused
from tenfold.reduce_op import as_reduce_op, code_of

__all__ = ["COLLECTIVES", "Collective"]

# With `async_op` always a work, except for operations that cannot run in the background.
Started: TypeAlias = Work | None


@dataclass(frozen=True, slots=True)
class Collective:
    """One operation of c10d."""

    name: str
    start: Callable[..., Started]
    hook: HookOpName  # its name for hooks
    title: str  # its name in PyTorch's profiler, which is Gloo's
    fill: str | None = None  # how a fake group fills the outputs, if it does: see `fake.py`
    same_shapes: tuple[int, ...] = ()  # arguments whose shapes are equal on all ranks, for the wrapper
    shared: int | None = None  # the argument that is worth reading in place, if it is in shared memory
    unpacks: bool = False  # the first argument is a list of lists, usually of one list
    is_message: bool = False  # between two ranks, without options


COLLECTIVES: dict[str, Collective] = {}


def _collective(hook: HookOpName, title: str = "", **facts: Any) -> Callable[[Callable], Callable]:
    def enter(start: Callable[..., Started]) -> Callable[..., Started]:
        name = start.__name__
        COLLECTIVES[name] = Collective(name, start, hook, title or name, **facts)
        return start

    return enter


def _only(group: Group, operation: str, items: Sequence[Any], what: str) -> Any:
    if len(items) != 1:
        mistake = f"{what} must be a list of one element, one per device; it has {len(items)}"
        raise refused(group, operation, mistake)
    return items[0]


def _at_root(group: Group, operation: str, options: Any, lists: Sequence[Any], what: str) -> Sequence[Any]:
    """Returns an argument that only the root passes, and that is empty on other ranks."""
    root = options.rootRank
    if group.rank == root or not 0 <= root < group.size:  # the group refuses a root that does not exist
        return _only(group, operation, lists, what)
    if any(len(inner) for inner in lists):
        mistake = f"{what} must be empty on all ranks but the root, which is rank {root}"
        raise refused(group, operation, mistake)
    return []


@_collective(HookOpName.BROADCAST, fill="nothing", same_shapes=(0,), shared=0)
def broadcast(group: Group, tensors: Sequence[Any], options: Any, *how: Any) -> Started:
    root, root_tensor = options.rootRank, options.rootTensor
    if len(tensors) == 1 and root_tensor == 0:
        return group.broadcast(tensors[0], root, *how)
    if not 0 <= root_tensor < len(tensors):
        mistake = f"invalid root tensor: {root_tensor}: there are {len(tensors)} tensors"
        raise refused(group, "broadcast", mistake)
    return group.broadcast_several(tensors, root, root_tensor, *how)


@_collective(HookOpName.ALLREDUCE, "all_reduce", fill="reduce", same_shapes=(0,), shared=0)
def allreduce(group: Group, tensors: Sequence[Any], options: Any, *how: Any) -> Started:
    op = code_of(options.reduceOp)
    if len(tensors) == 1:
        return group.all_reduce(tensors[0], op, *how)
    if not tensors:
        raise refused(group, "all_reduce", "tensors is empty: allreduce requires non-empty tensor list")
    return group.all_reduce_several(tensors, op, *how)


@_collective(HookOpName.UNKNOWN, "all_reduce")
def allreduce_sparse(group: Group, tensors: Sequence[Any], options: Any, *how: Any) -> Started:
    if not tensors:
        mistake = "tensors is empty: allreduce_sparse requires non-empty tensor list"
        raise refused(group, "all_reduce", mistake)
    if not all(is_torch(tensor) for tensor in tensors):
        raise refused(group, "all_reduce", "allreduce_sparse takes sparse tensors of PyTorch")
    from tenfold.torch import sparse

    sparse.all_reduce(group, list(tensors), as_reduce_op(options.reduceOp), how[1])
    return None


@_collective(HookOpName.ALLREDUCE_COALESCED, "all_reduce", fill="reduce")
def allreduce_coalesced(group: Group, tensors: Sequence[Any], options: Any, *how: Any) -> Started:
    return group.all_reduce_coalesced(tensors, code_of(options.reduceOp), *how)


@_collective(HookOpName.REDUCE, fill="reduce", same_shapes=(0,))
def reduce(group: Group, tensors: Sequence[Any], options: Any, *how: Any) -> Started:
    tensor = _only(group, "reduce", tensors, "tensors")
    return group.reduce(tensor, options.rootRank, code_of(options.reduceOp), *how)


@_collective(HookOpName.ALLGATHER, "all_gather", fill="gather", unpacks=True)
def allgather(
    group: Group, outputs: Sequence[Any], inputs: Sequence[Any], options: Any, *how: Any
) -> Started:
    if len(inputs) == 1 and len(outputs) == 1:
        return group.all_gather(outputs[0], inputs[0], *how)
    if not inputs:
        mistake = "input_tensors is empty: allgather requires non-empty input tensor list"
        raise refused(group, "all_gather", mistake)
    count, expected = len(inputs), len(inputs) * group.size
    if len(outputs) != count:
        lengths = f"{len(outputs)} lists of outputs for {count} inputs"
        mistake = f"{lengths}: requires input/output tensor lists to have the same length"
        raise refused(group, "all_gather", mistake)
    for place, targets in enumerate(outputs):
        if len(targets) != expected:
            lengths = f"(expected length {expected}, got {len(targets)})"
            raise refused(group, "all_gather", f"invalid output tensor list at index {place} {lengths}")
    # Ordered by rank: each list gets all inputs of all ranks.
    targets = [list(outputs[which][place::count]) for which in range(count) for place in range(count)]
    return group.all_gather_coalesced(targets, list(inputs) * count, *how)


@_collective(HookOpName.ALLGATHER_BASE, "all_gather", fill="gather_parts", same_shapes=(0, 1), shared=1)
def all_gather_single(group: Group, output: Any, source: Any, options: Any, *how: Any) -> Started:
    return group.all_gather_into(output, source, *how)


@_collective(HookOpName.ALLGATHER_INTO_TENSOR_COALESCED, "all_gather", fill="gather_parts")
def all_gather_single_coalesced(
    group: Group, outputs: Sequence[Any], inputs: Sequence[Any], options: Any, *how: Any
) -> Started:
    return group.all_gather_into_coalesced(outputs, inputs, *how)


@_collective(HookOpName.ALLGATHER_COALESCED, "all_gather", fill="gather_lists")
def allgather_coalesced(
    group: Group, lists: Sequence[Any], inputs: Sequence[Any], options: Any, *how: Any
) -> Started:
    if len(lists) != group.size or any(len(of_rank) != len(inputs) for of_rank in lists):
        shape = f"{group.size} lists, one per rank, of {len(inputs)} tensors, one per input"
        raise refused(group, "all_gather", f"output_lists must have {shape}")
    by_input = [list(of_ranks) for of_ranks in zip(*lists, strict=True)]
    return group.all_gather_coalesced(by_input, inputs, *how)


@_collective(HookOpName.GATHER, fill="gather_at_root", same_shapes=(1,), unpacks=True)
def gather(group: Group, outputs: Sequence[Any], inputs: Sequence[Any], options: Any, *how: Any) -> Started:
    targets = _at_root(group, "gather", options, outputs, "output_tensors")
    return group.gather(targets, _only(group, "gather", inputs, "input_tensors"), options.rootRank, *how)


@_collective(HookOpName.GATHER, same_shapes=(1,))
def gather_single(group: Group, output: Any, source: Any, options: Any, *how: Any) -> Started:
    target = output if group.rank == options.rootRank else None
    return group.gather_into(target, source, options.rootRank, *how)


@_collective(HookOpName.SCATTER, fill="scatter", same_shapes=(0,))
def scatter(group: Group, outputs: Sequence[Any], inputs: Sequence[Any], options: Any, *how: Any) -> Started:
    sources = _at_root(group, "scatter", options, inputs, "input_tensors")
    target = _only(group, "scatter", outputs, "output_tensors")
    return group.scatter(target, sources, options.rootRank, *how)


@_collective(HookOpName.REDUCE_SCATTER, fill="reduce_scatter")
def reduce_scatter(
    group: Group, outputs: Sequence[Any], inputs: Sequence[Any], options: Any, *how: Any
) -> Started:
    target = _only(group, "reduce_scatter", outputs, "output_tensors")
    sources = _only(group, "reduce_scatter", inputs, "input_tensors")
    return group.reduce_scatter(target, sources, code_of(options.reduceOp), *how)


@_collective(
    HookOpName.REDUCE_SCATTER_BASE,
    "reduce_scatter",
    fill="reduce_scatter_parts",
    same_shapes=(0, 1),
    shared=1,
)
def reduce_scatter_single(group: Group, output: Any, source: Any, options: Any, *how: Any) -> Started:
    return group.reduce_scatter_into(output, source, code_of(options.reduceOp), *how)


@_collective(HookOpName.REDUCE_SCATTER_TENSOR_COALESCED, "reduce_scatter", fill="reduce_scatter_parts")
def reduce_scatter_single_coalesced(
    group: Group, outputs: Sequence[Any], inputs: Sequence[Any], options: Any, *how: Any
) -> Started:
    return group.reduce_scatter_into_coalesced(outputs, inputs, code_of(options.reduceOp), *how)


@_collective(HookOpName.ALLTOALL_BASE, "all_to_all", fill="exchange_parts", shared=1)
def all_to_all_single(
    group: Group,
    output: Any,
    source: Any,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    options: Any,
    *how: Any,
) -> Started:
    return group.all_to_all_single(output, source, output_splits or None, input_splits or None, *how)


@_collective(HookOpName.ALLTOALL, "all_to_all", fill="exchange")
def alltoall(group: Group, outputs: Sequence[Any], inputs: Sequence[Any], options: Any, *how: Any) -> Started:
    return group.all_to_all(outputs, inputs, *how)


@_collective(HookOpName.SEND, fill="nothing", is_message=True)
def send(group: Group, tensors: Sequence[Any], to: int, tag: int, options: None, *how: Any) -> Started:
    return group.send(_only(group, "send", tensors, "tensors"), to, tag, *how)


@_collective(HookOpName.RECV, fill="nothing", is_message=True)
def recv(group: Group, tensors: Sequence[Any], source: int, tag: int, options: None, *how: Any) -> Started:
    return group.recv(_only(group, "recv", tensors, "tensors"), source, tag, *how)


@_collective(HookOpName.RECV, "recvAnySource", fill="nothing", is_message=True)
def recv_anysource(
    group: Group, tensors: Sequence[Any], tag: int, options: None, async_op: bool, timeout: float
) -> Started:
    return group.recv_any(_only(group, "recv", tensors, "tensors"), tag, timeout)


@_collective(HookOpName.BARRIER, fill="nothing")
def barrier(group: Group, options: Any, *how: Any) -> Started:
    return group.barrier(*how)
