"""What little must be known of arrays in Python: how to make one like another, and how to copy one.

NumPy and PyTorch are imported only by who uses them; all that is asked here is asked of the object itself.
"""

from collections.abc import Sequence
from typing import Any

__all__ = ["as_array", "concatenated", "contiguous_copy", "copy_into", "empty_like", "is_torch", "parts"]


def is_torch(array: Any) -> bool:
    """Is it a PyTorch tensor?"""
    return hasattr(type(array), "data_ptr")


def as_array(array: Any) -> Any:
    """Itself if it is a tensor or an array; a buffer as an array of NumPy's."""
    if hasattr(array, "shape") and hasattr(array, "dtype"):
        return array
    import numpy as np

    return np.asarray(array)


def contiguous_copy(array: Any) -> Any:
    """A new array with the same elements."""
    if is_torch(array):
        return array.detach().clone().contiguous()
    import numpy as np

    return np.array(array, order="C")


def empty_like(array: Any, shape: Sequence[int] | None = None) -> Any:
    """A new array of the same kind and dtype, with the same shape or another."""
    shape = tuple(array.shape if shape is None else shape)
    if is_torch(array):
        return array.detach().new_empty(shape)
    import numpy as np

    return np.empty(shape, array.dtype)


def parts(array: Any, count: int) -> list[Any]:
    """Views of `count` equal parts, cut along the first dimension."""
    rows = len(array)
    if rows % count:
        raise ValueError(f"{rows} rows cannot be cut into {count} equal parts")
    step = rows // count
    if not hasattr(array, "shape"):
        array = memoryview(array)
    return [array[i * step : (i + 1) * step] for i in range(count)]


def copy_into(target: Any, source: Any) -> None:
    """Copies elements, whatever the two are."""
    if is_torch(target):
        target.copy_(source)
    elif hasattr(target, "shape") and not isinstance(target, memoryview):
        target[...] = source
    else:
        memoryview(target).cast("B")[:] = memoryview(source).cast("B")


def concatenated(arrays: Sequence[Any], dim: int) -> Any:
    """A new array of several, one after the other along a dimension."""
    if is_torch(arrays[0]):
        import torch

        return torch.cat(list(arrays), dim)
    import numpy as np

    return np.concatenate(arrays, dim)
