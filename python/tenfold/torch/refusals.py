"""What c10d's Gloo backend refuses, in its phrases, because programs match on them.

Functions that are named after an operation take the backend and the arguments of the operation. They return
the phrase for the first mistake, or None. Tenfold's own message comes first and the phrase follows; see
`explained`. All of this runs only if an operation is refused or has several tensors. A valid call does not
pay for it.
"""

from collections.abc import Sequence
from typing import Any

import torch

from tenfold.torch.exceptions import DistArgumentError

Tensors = Sequence[torch.Tensor]
Lists = Sequence[Tensors]


def explained(refused: DistArgumentError, words: str | None) -> DistArgumentError:
    """Returns the same exception with c10d's phrase appended."""
    if words is None or words in str(refused):
        return refused
    both = type(refused)(f"{refused} ({words})")
    both.__dict__.update(refused.__dict__)
    return both


def allreduce(backend: Any, tensors: Tensors, opts: Any) -> str | None:
    if not tensors:
        return "requires non-empty tensor list"
    return _unlike_layout(tensors) or _unlike(tensors, tensors[0])


def allreduce_coalesced(backend: Any, tensors: Tensors, opts: Any) -> str | None:
    if not tensors:
        return "requires non-empty tensor list"
    if any(tensor.dtype != tensors[0].dtype for tensor in tensors):
        return "tensors must all have the same type"
    if any(tensor.layout is not torch.strided for tensor in tensors):
        return "unsupported layout"
    return reduction(tensors, opts.reduceOp)


def broadcast(backend: Any, tensors: Tensors, opts: Any) -> str | None:
    return (
        _bad_root(backend, opts)
        or _bad_root_tensor(tensors, opts)
        or _not_dense(tensors)
        or _unlike(tensors, tensors[0])
    )


def reduce(backend: Any, tensors: Tensors, opts: Any) -> str | None:
    if (mistake := _bad_root(backend, opts) or _bad_root_tensor(tensors, opts)) is not None:
        return mistake
    if len(tensors) != 1:
        return "requires a single-element tensor list"
    return _not_dense(tensors) or reduction(tensors, opts.reduceOp)


def allgather(backend: Any, outputs: Lists, inputs: Tensors, opts: Any) -> str | None:
    if not inputs:
        return "requires non-empty input tensor list"
    if len(outputs) != len(inputs):
        return "requires input/output tensor lists to have the same length"
    for place, targets in enumerate(outputs):
        if len(targets) != (expected := len(inputs) * backend.size()):
            got = len(targets)
            return f"invalid output tensor list at index {place} (expected length {expected}, got {got})"
    if (mistake := _not_dense(inputs) or _unlike(inputs, inputs[0])) is not None:
        return mistake
    mistakes = (_unlike(targets, inputs[0]) for targets in outputs)
    return next((mistake for mistake in mistakes if mistake is not None), None)


def all_gather_single(backend: Any, output: torch.Tensor, source: torch.Tensor, opts: Any) -> str | None:
    if output.dim() == 0 or source.dim() == 0:
        return None
    return allgather(backend, [output.tensor_split(backend.size())], [source], opts)


def all_gather_single_coalesced(backend: Any, outputs: Tensors, inputs: Tensors, opts: Any) -> str | None:
    return _pairs(outputs, inputs)


def allgather_coalesced(backend: Any, lists: Lists, inputs: Tensors, opts: Any) -> str | None:
    if not inputs:
        return "requires non-empty input tensor list"
    if len(lists) != backend.size():
        return "output lists should be equal to world size"
    for targets in lists:
        if len(targets) != len(inputs):
            return f"invalid output size: (expected length {len(inputs)}, got {len(targets)})"
        for place, (target, tensor) in enumerate(zip(targets, inputs, strict=True)):
            if (mistake := _unlike_at(place, target, tensor)) is not None:
                return mistake
    return _not_dense(inputs)


def gather(backend: Any, outputs: Lists, inputs: Tensors, opts: Any) -> str | None:
    if (mistake := _bad_root(backend, opts)) is not None:
        return mistake
    if len(inputs) != 1:
        return "requires a single-element input tensor list"
    if (mistake := _not_dense(inputs)) is not None:
        return mistake
    if backend.rank() != opts.rootRank:
        return "requires empty output on non-root" if outputs else None
    return _list_for_all("output", outputs, backend.size()) or _unlike(outputs[0], inputs[0])


def scatter(backend: Any, outputs: Tensors, inputs: Lists, opts: Any) -> str | None:
    if (mistake := _bad_root(backend, opts)) is not None:
        return mistake
    if len(outputs) != 1:
        return "requires a single-element output tensor list"
    if (mistake := _not_dense(outputs)) is not None:
        return mistake
    if backend.rank() != opts.rootRank:
        return "requires empty input on non-root" if inputs else None
    return _list_for_all("input", inputs, backend.size()) or _unlike(inputs[0], outputs[0])


def alltoall(backend: Any, outputs: Tensors, inputs: Tensors, opts: Any) -> str | None:
    for what, tensors in [("input", inputs), ("output", outputs)]:
        if len(tensors) != backend.size():
            return f"{what} tensor list size {len(tensors)} does not match world size {backend.size()}"
    if any(tensor.dtype != inputs[0].dtype for tensor in (*outputs, *inputs)):
        return "input and output tensors must have the same type"
    return None


def all_to_all_single(
    backend: Any,
    output: torch.Tensor,
    source: torch.Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    opts: Any,
) -> str | None:
    size = backend.size()
    return _splits(source, input_splits, size) or _splits(output, output_splits, size)


def reduce_scatter(backend: Any, outputs: Tensors, inputs: Lists, opts: Any) -> str | None:
    if len(outputs) != 1:
        return "reduce_scatter only supports 1 output"
    if len(inputs) != 1 or len(inputs[0]) != backend.size():
        return "invalid input tensor list size, must be world size"
    return reduction(outputs, opts.reduceOp)


def reduce_scatter_single(backend: Any, output: torch.Tensor, source: torch.Tensor, opts: Any) -> str | None:
    return reduction([source], opts.reduceOp)


def reduce_scatter_single_coalesced(backend: Any, outputs: Tensors, inputs: Tensors, opts: Any) -> str | None:
    return _pairs(outputs, inputs) or reduction(inputs, opts.reduceOp)


def send(backend: Any, tensors: Tensors, peer: int, tag: int) -> str | None:
    return recv_anysource(backend, tensors, tag)


recv = send


def recv_anysource(backend: Any, tensors: Tensors, tag: int) -> str | None:
    if tag < 0:
        return "Tag must be nonnegative"
    if len(tensors) != 1:
        return "takes a single tensor"
    if tensors[0].layout is not torch.strided:
        return "input tensor has to be dense"
    return None if tensors[0].is_contiguous() else "input tensor has to be contiguous"


def reduction(tensors: Tensors, op: Any) -> str | None:
    """Checks the reduce operation of all operations that combine elements."""
    is_bitwise = op.op.name in ("BAND", "BOR", "BXOR")
    is_integral = all(not tensor.is_floating_point() and not tensor.is_complex() for tensor in tensors)
    return (
        f"Cannot use ReduceOp.{op.op.name} with non-integral dtype"
        if is_bitwise and not is_integral
        else None
    )


def _bad_root(backend: Any, opts: Any) -> str | None:
    return None if 0 <= opts.rootRank < backend.size() else f"invalid root rank: {opts.rootRank}"


def _bad_root_tensor(tensors: Tensors, opts: Any) -> str | None:
    return None if 0 <= opts.rootTensor < len(tensors) else f"invalid root tensor: {opts.rootTensor}"


def _splits(tensor: torch.Tensor, sizes: Sequence[int], ranks: int) -> str | None:
    """Checks the splits of an input or an output."""
    rows = tensor.size(0) if tensor.dim() else 1
    if not sizes:
        return "Tensor's dim 0 does not divide equally across group size" if rows % ranks else None
    if len(sizes) != ranks:
        return "Number of tensor splits not equal to group size"
    if min(sizes) < 0:
        return "Split sizes must be non-negative"
    return None if sum(sizes) == rows else "Split sizes doesn't match total dim 0 size"


def _pairs(outputs: Tensors, inputs: Tensors) -> str | None:
    """Checks operations that take an output for each input."""
    if len(outputs) == len(inputs):
        return None
    return "requires input/output tensor lists to have the same length"


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
