"""The sum of sparse tensors: all ranks gather all coordinates and values, and add them in the order of
ranks.
"""

from typing import Any

import torch
import torch.distributed as dist

from tenfold import _tenfold
from tenfold.torch.exceptions import DistArgumentError

_SUM = dist.ReduceOp.RedOpType.SUM.value  # also of tenfold's own ReduceOp


def all_reduce(group: _tenfold.Group, tensors: list[torch.Tensor], op: Any, timeout: float | None) -> None:
    """Replaces each tensor, in COO layout, by the sum of all tensors of all ranks; blocks."""
    tensor = tensors[0]
    if tensor.layout is not torch.sparse_coo:
        takes = "all_reduce takes strided and sparse_coo"
        raise DistArgumentError(f"tensor has layout {tensor.layout}; {takes} (unsupported layout)")
    if op.op.value != _SUM:
        raise DistArgumentError(
            f"sparse tensors can be reduced with SUM only, not with {op.op.name} (unsupported reduction "
            "operation (allreduce of sparse tensors only works with ReduceOp.SUM))"
        )
    own = sum(tensors[1:], tensor).coalesce()
    shapes = _gather_shapes(group, own, timeout)
    for rank, shape in enumerate(shapes):
        if shape[1:] != shapes[group.rank][1:]:
            raise DistArgumentError(
                f"rank {rank} has a sparse tensor of shape {shape[3:]} with {shape[1]} sparse dimensions, "
                f"rank {group.rank} one of {shapes[group.rank][3:]} with {shapes[group.rank][1]} (Sparse "
                "dimensions do not match)"
            )
    counts = [shape[0] for shape in shapes]
    indices = [own.indices().new_empty((own.sparse_dim(), count)) for count in counts]
    values = [own.values().new_empty((count, *own.values().shape[1:])) for count in counts]
    group.all_gather(indices, own.indices().contiguous(), False, timeout)
    group.all_gather(values, own.values().contiguous(), False, timeout)
    total = torch.sparse_coo_tensor(torch.cat(indices, dim=1), torch.cat(values), own.shape).coalesce()
    for tensor in tensors:
        tensor.copy_(total)


def _gather_shapes(group: _tenfold.Group, own: torch.Tensor, timeout: float | None) -> list[list[int]]:
    """Returns for every rank: the numbers of values, sparse dimensions and dimensions, and their lengths."""
    shape = [own._nnz(), own.sparse_dim(), own.dim(), *own.shape]
    lengths = torch.zeros(group.size, dtype=torch.int64)
    group.all_gather_into(lengths, torch.tensor([len(shape)]), False, timeout)
    shapes = [torch.zeros(int(length), dtype=torch.int64) for length in lengths]
    group.all_gather(shapes, torch.tensor(shape), False, timeout)
    return [shape.tolist() for shape in shapes]
