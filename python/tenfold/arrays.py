"""Helpers for arrays: how to make an array like another, and how to copy one.

NumPy and PyTorch are imported only if the program uses them. All checks here are made on the object itself.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

__all__ = [
    "Tensor",
    "TensorLists",
    "Tensors",
    "as_array",
    "concatenated",
    "contiguous_copy",
    "copy_into",
    "empty_like",
    "is_torch",
    "parts",
]

# Anything whose memory can be lent: NumPy arrays, PyTorch tensors, writable buffers, objects with DLPack.
Tensor: TypeAlias = Any
Tensors: TypeAlias = Sequence[Any]
TensorLists: TypeAlias = Sequence[Sequence[Any]]


def is_torch(array: Any) -> bool:
    """Whether the array is a PyTorch tensor."""
    return hasattr(type(array), "data_ptr")


def as_array(array: Any) -> Any:
    """Returns a tensor or an array as it is, and a buffer as a NumPy array."""
    if hasattr(array, "shape") and hasattr(array, "dtype"):
        return array
    import numpy as np

    return np.asarray(array)


def contiguous_copy(array: Any) -> Any:
    """Returns a new array with the same elements."""
    if is_torch(array):
        return array.detach().clone().contiguous()
    import numpy as np

    return np.array(array, order="C")


def empty_like(array: Any, shape: Sequence[int] | None = None) -> Any:
    """Returns a new array of the same kind and dtype, with the same shape or `shape`."""
    shape = tuple(array.shape if shape is None else shape)
    if is_torch(array):
        return array.detach().new_empty(shape)
    import numpy as np

    return np.empty(shape, array.dtype)


def parts(array: Any, count: int) -> list[Any]:
    """Returns views of `count` equal parts along the first dimension."""
    rows = len(array)
    if rows % count:
        raise ValueError(f"{rows} rows cannot be divided into {count} equal parts")
    step = rows // count
    if not hasattr(array, "shape"):
        array = memoryview(array)
    return [array[i * step : (i + 1) * step] for i in range(count)]


def copy_into(target: Any, source: Any) -> None:
    """Copies elements between arrays of any kind."""
    if is_torch(target):
        target.copy_(source)
    elif hasattr(target, "shape") and not isinstance(target, memoryview):
        target[...] = source
    else:
        memoryview(target).cast("B")[:] = memoryview(source).cast("B")


def concatenated(arrays: Sequence[Any], dim: int) -> Any:
    """Returns a new array: all arrays concatenated along a dimension."""
    if is_torch(arrays[0]):
        import torch

        return torch.cat(list(arrays), dim)
    import numpy as np

    return np.concatenate(arrays, dim)
