"""Results of ranks as plain data that can be sent, compared to the last bit, and read by people."""

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

FLOATS = ["float64", "float32", "float16", "bfloat16"]
FLOATS_OF_8_BITS = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]
INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
COMPLEX = ["complex32", "bcomplex32", "complex64", "complex128"]
QUANTIZED = ["qint8", "quint8", "qint32"]
PACKED = ["quint4x2", "quint2x4"]  # several elements in a byte, though their `itemsize` is 1
NUMBERS = [*FLOATS, *FLOATS_OF_8_BITS, *INTEGERS, *COMPLEX, "bool"]


@dataclass(frozen=True)
class Bits:
    """A dense tensor: equal means the same dtype, the same shape and the same bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    data: bytes

    def __repr__(self) -> str:
        start = self.data[:32].hex(" ", self.dtype.itemsize)
        return f"Bits({self.dtype}, {list(self.shape)}, {self.values()} = {start})"

    def values(self) -> str:
        """Its first numbers, where torch can show them."""
        if not self.data or str(self.dtype).removeprefix("torch.") not in NUMBERS:
            return "…"
        tensor = torch.frombuffer(bytearray(self.data[: 8 * self.dtype.itemsize]), dtype=self.dtype)
        return str(tensor.tolist() if self.dtype.is_complex else tensor.double().tolist())


@dataclass(frozen=True)
class SparseBits:
    """A sparse tensor, and whether it is coalesced."""

    shape: tuple[int, ...]
    indices: Bits
    values: Bits
    coalesced: bool


@dataclass(frozen=True)
class Refused:
    """A call that raised, and what it left behind. Words may differ between backends: they do not count."""

    left: Any = None


def plain(value: Any) -> Any:
    """Tensors in lists, tuples and dicts become Bits."""
    if isinstance(value, torch.Tensor):
        return plain_tensor(value.detach())
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, Refused):
        return Refused(plain(value.left))
    return value


def plain_tensor(tensor: torch.Tensor) -> Bits | SparseBits:
    if tensor.is_sparse:
        parts = plain_tensor(tensor._indices()), plain_tensor(tensor._values())
        return SparseBits(tuple(tensor.shape), *parts, tensor.is_coalesced())
    dense = dense_copy(tensor)
    storage = dense.untyped_storage()
    data = ctypes.string_at(storage.data_ptr(), storage.nbytes()) if storage.nbytes() else b""
    return Bits(tensor.dtype, tuple(tensor.shape), data)


def dense_copy(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in order, nothing else in the storage."""
    if tensor.is_contiguous() and tensor.untyped_storage().nbytes() <= tensor.nbytes:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
