"""What c10d's Gloo backend refuses, in its phrases, because programs match on them.

Each function is named after an operation and returns the phrase for the first mistake in its arguments, or
None. Tenfold's own message comes first and the phrase follows; see `error` and `explained`. All of this runs
only if an operation is refused or has several tensors. A valid call does not pay for it.
"""

from collections.abc import Sequence
from typing import Any

import torch

from tenfold.torch.exceptions import DistArgumentError

Tensors = Sequence[torch.Tensor]
Lists = Sequence[Tensors]


def error(group: Any, operation: str, mistake: str) -> DistArgumentError:
    """Returns the exception for a call that was refused before it reached the group."""
    where = f"{operation} in group `{group.name}` failed on rank {group.rank} of {group.size}"
    refused = DistArgumentError(f"{where}: {mistake}")
    refused.operation, refused.group, refused.reason = operation, group.name, mistake
    refused.rank, refused.world_size = group.rank, group.size
    return refused


def explained(refused: DistArgumentError, words: str | None) -> DistArgumentError:
    """Returns the same exception with c10d's phrase appended."""
    if words is None or words in str(refused):
        return refused
    both = type(refused)(f"{refused} ({words})")
    both.__dict__.update(refused.__dict__)
    return both


def allreduce(tensors: Tensors) -> str | None:
    if not tensors:
        return "requires non-empty tensor list"
    return _unlike_layout(tensors) or _unlike(tensors, tensors[0])


def allreduce_coalesced(tensors: Tensors) -> str | None:
    if not tensors:
        return "requires non-empty tensor list"
    if any(tensor.dtype != tensors[0].dtype for tensor in tensors):
        return "tensors must all have the same type"
    if any(tensor.layout is not torch.strided for tensor in tensors):
        return "unsupported layout"
    return None


def broadcast(tensors: Tensors, root: int, root_tensor: int, size: int) -> str | None:
    if not 0 <= root < size:
        return f"invalid root rank: {root}"
    if not 0 <= root_tensor < len(tensors):
        return f"invalid root tensor: {root_tensor}"
    return _not_dense(tensors) or _unlike(tensors, tensors[0])


def reduce(tensors: Tensors, root: int, root_tensor: int, size: int) -> str | None:
    if not 0 <= root < size:
        return f"invalid root rank: {root}"
    if not 0 <= root_tensor < len(tensors):
        return f"invalid root tensor: {root_tensor}"
    if len(tensors) != 1:
        return "requires a single-element tensor list"
    return _not_dense(tensors)


def allgather(outputs: Lists, inputs: Tensors, size: int) -> str | None:
    if not inputs:
        return "requires non-empty input tensor list"
    if len(outputs) != len(inputs):
        return "requires input/output tensor lists to have the same length"
    for place, targets in enumerate(outputs):
        if len(targets) != (expected := len(inputs) * size):
            got = len(targets)
            return f"invalid output tensor list at index {place} (expected length {expected}, got {got})"
    if (mistake := _not_dense(inputs) or _unlike(inputs, inputs[0])) is not None:
        return mistake
    mistakes = (_unlike(targets, inputs[0]) for targets in outputs)
    return next((mistake for mistake in mistakes if mistake is not None), None)


def all_gather_single(output: torch.Tensor, source: torch.Tensor, size: int) -> str | None:
    if output.dim() == 0 or source.dim() == 0:
        return None
    return allgather([output.tensor_split(size)], [source], size)


def allgather_coalesced(lists: Lists, inputs: Tensors, size: int) -> str | None:
    if not inputs:
        return "requires non-empty input tensor list"
    if len(lists) != size:
        return "output lists should be equal to world size"
    for targets in lists:
        if len(targets) != len(inputs):
            return f"invalid output size: (expected length {len(inputs)}, got {len(targets)})"
        for place, (target, tensor) in enumerate(zip(targets, inputs, strict=True)):
            if (mistake := _unlike_at(place, target, tensor)) is not None:
                return mistake
    return _not_dense(inputs)


def gather(outputs: Lists, inputs: Tensors, root: int, rank: int, size: int) -> str | None:
    if not 0 <= root < size:
        return f"invalid root rank: {root}"
    if len(inputs) != 1:
        return "requires a single-element input tensor list"
    if (mistake := _not_dense(inputs)) is not None:
        return mistake
    if rank != root:
        return "requires empty output on non-root" if outputs else None
    return _list_for_all("output", outputs, size) or _unlike(outputs[0], inputs[0])


def scatter(outputs: Tensors, inputs: Lists, root: int, rank: int, size: int) -> str | None:
    if not 0 <= root < size:
        return f"invalid root rank: {root}"
    if len(outputs) != 1:
        return "requires a single-element output tensor list"
    if (mistake := _not_dense(outputs)) is not None:
        return mistake
    if rank != root:
        return "requires empty input on non-root" if inputs else None
    return _list_for_all("input", inputs, size) or _unlike(inputs[0], outputs[0])


def alltoall(outputs: Tensors, inputs: Tensors, size: int) -> str | None:
    for what, tensors in [("input", inputs), ("output", outputs)]:
        if len(tensors) != size:
            return f"{what} tensor list size {len(tensors)} does not match world size {size}"
    if any(tensor.dtype != inputs[0].dtype for tensor in (*outputs, *inputs)):
        return "input and output tensors must have the same type"
    return None


def splits(tensor: torch.Tensor, sizes: Sequence[int], ranks: int) -> str | None:
    """Checks the splits of `all_to_all_single`, for its input or its output."""
    rows = tensor.size(0) if tensor.dim() else 1
    if not sizes:
        return "Tensor's dim 0 does not divide equally across group size" if rows % ranks else None
    if len(sizes) != ranks:
        return "Number of tensor splits not equal to group size"
    if min(sizes) < 0:
        return "Split sizes must be non-negative"
    return None if sum(sizes) == rows else "Split sizes doesn't match total dim 0 size"


def reduction(tensors: Tensors, op: Any) -> str | None:
    """Checks the reduce operation of all operations that combine elements."""
    is_bitwise = op.op.name in ("BAND", "BOR", "BXOR")
    is_integral = all(not tensor.is_floating_point() and not tensor.is_complex() for tensor in tensors)
    return (
        f"Cannot use ReduceOp.{op.op.name} with non-integral dtype"
        if is_bitwise and not is_integral
        else None
    )


def reduce_scatter(outputs: Tensors, inputs: Lists, size: int) -> str | None:
    if len(outputs) != 1:
        return "reduce_scatter only supports 1 output"
    if len(inputs) != 1 or len(inputs[0]) != size:
        return "invalid input tensor list size, must be world size"
    return None


def pairs(outputs: Tensors, inputs: Tensors) -> str | None:
    """Checks operations that take an output for each input."""
    if len(outputs) == len(inputs):
        return None
    return "requires input/output tensor lists to have the same length"


def message(tensors: Tensors, tag: int) -> str | None:
    """Checks `send` and both kinds of receive."""
    if tag < 0:
        return "Tag must be nonnegative"
    if len(tensors) != 1:
        return "takes a single tensor"
    if tensors[0].layout is not torch.strided:
        return "input tensor has to be dense"
    return None if tensors[0].is_contiguous() else "input tensor has to be contiguous"


def _list_for_all(what: str, lists: Lists, size: int) -> str | None:
    if len(lists) != 1:
        return f"requires a single-element {what} list containing a list with {size} tensors."
    if len(lists[0]) != size:
        expected = f"{what.capitalize()} list size should be {size}, same as size of the process group."
        return f"Incorrect {what} list size {len(lists[0])}. {expected}"
    return None


def _not_dense(tensors: Tensors) -> str | None:
    return None if tensors[0].layout is torch.strided else "only supports dense tensors"


def _unlike_layout(tensors: Tensors) -> str | None:
    expected = tensors[0].layout
    for place, tensor in enumerate(tensors):
        if tensor.layout is not expected:
            return f"invalid tensor layout at index {place} (expected {expected}, got {tensor.layout})"
    return None


def _unlike(tensors: Tensors, expected: torch.Tensor) -> str | None:
    mistakes = (_unlike_at(place, tensor, expected) for place, tensor in enumerate(tensors))
    return next((mistake for mistake in mistakes if mistake is not None), None)


def _unlike_at(place: int, tensor: torch.Tensor, expected: torch.Tensor) -> str | None:
    if tensor.dtype != expected.dtype or tensor.layout is not expected.layout:
        return f"invalid tensor type at index {place} (expected {expected.type()}, got {tensor.type()})"
    if tensor.shape != expected.shape:
        sizes = f"(expected {list(expected.shape)}, got {list(tensor.shape)})"
        return f"invalid tensor size at index {place} {sizes}"
    return None
