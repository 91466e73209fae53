"""Every dtype in every operation, with the results by hand."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from bits import COMPLEX, FLOATS, FLOATS_OF_8_BITS, INTEGERS, Refused, plain
from ranks import Rank
from torch.distributed import ReduceOp

# ---------------------------------------------------------------------------------- every dtype

OPERATIONS = {
    "SUM": ReduceOp.SUM,
    "AVG": ReduceOp.AVG,
    "PRODUCT": ReduceOp.PRODUCT,
    "MIN": ReduceOp.MIN,
    "MAX": ReduceOp.MAX,
    "BAND": ReduceOp.BAND,
    "BOR": ReduceOp.BOR,
    "BXOR": ReduceOp.BXOR,
    "PREMUL_SUM": None,  # made with a factor
}
FACTOR = 0.5
DTYPES = sorted(
    {str(each).removeprefix("torch.") for each in vars(torch).values() if isinstance(each, torch.dtype)}
)


def family(dtype: str) -> str:
    """What kind of numbers it has; `bytes` are moved, not reduced."""
    families = {"float": FLOATS + FLOATS_OF_8_BITS, "integer": INTEGERS, "complex": COMPLEX, "bool": ["bool"]}
    return next((name for name, dtypes in families.items() if dtype in dtypes), "bytes")


def of_every_dtype(rank: int, name: str) -> torch.Tensor:
    """Eight elements of any dtype: numbers that every float has exactly, or else just bytes."""
    dtype = getattr(torch, name)
    kind = family(name)
    if kind == "float":
        return torch.tensor([[0.5, 1, -2, 3, 0, 1.5, -1, 4], [2, -1, 0.5, 1, 3, -2, 1, -4]][rank % 2]).to(
            dtype
        )
    if kind == "integer":
        return torch.tensor([[1, 2, 3, 100, 0, 7, 12, 9], [5, 3, 3, 100, 1, 0, 10, 6]][rank % 2]).to(dtype)
    if kind == "complex":
        return torch.complex(torch.arange(8.0) - rank, torch.arange(8.0) * 2 + rank).to(dtype)
    if kind == "bool":
        return torch.tensor([[1, 1, 0, 0, 1, 1, 0, 0], [1, 0, 1, 0, 1, 0, 1, 0]][rank % 2]).bool()
    return raw(bytes(range(1 + 50 * rank, 1 + 50 * rank + 8 * dtype.itemsize)), dtype)


def blank(name: str) -> torch.Tensor:
    dtype = getattr(torch, name)
    return raw(bytes(8 * dtype.itemsize), dtype)


def raw(data: bytes, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of whatever dtype with these bytes."""
    shape = [len(data) // dtype.itemsize]
    if str(dtype).startswith("torch.q"):
        tensor = torch._empty_affine_quantized(shape, scale=1.0, zero_point=0, dtype=dtype)
    else:
        tensor = torch.empty(shape, dtype=dtype)
    storage = tensor.untyped_storage()  # some dtypes put several elements into a byte
    for index, byte in enumerate(data[: storage.nbytes()]):
        storage[index] = byte
    return tensor


def reduced_by_hand(world: int, dtype: str, op: str) -> torch.Tensor | None:
    """What all ranks should have, in exact arithmetic, rounded once; None if there is no such thing."""
    kind = family(dtype)
    tensors = [of_every_dtype(rank, dtype) for rank in range(world)]
    has = {
        "float": {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "PREMUL_SUM"},
        "integer": {"SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"},
        "bool": {"SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"},
        "complex": {"SUM", "AVG", "PREMUL_SUM"},  # PyTorch itself refuses the product
        "bytes": set(),
    }
    if op not in has[kind]:
        return None
    if kind == "integer":
        return integers_by_hand([tensor.tolist() for tensor in tensors], getattr(torch, dtype), op)
    if kind == "bool":
        either, both = tensors[0] | tensors[1], tensors[0] & tensors[1]
        return {"SUM": either, "MAX": either, "BOR": either, "BXOR": tensors[0] ^ tensors[1]}.get(op, both)
    wide = torch.stack(
        [tensor.to(torch.complex128 if kind == "complex" else torch.float64) for tensor in tensors]
    )
    result = {
        "SUM": lambda: wide.sum(0),
        "AVG": lambda: wide.sum(0) / world,
        "PRODUCT": lambda: wide.prod(0),
        "MIN": lambda: wide.amin(0),
        "MAX": lambda: wide.amax(0),
        "PREMUL_SUM": lambda: (wide * FACTOR).sum(0),
    }[op]()
    return result.to(getattr(torch, dtype))


def integers_by_hand(rows: list[list[int]], dtype: torch.dtype, op: str) -> torch.Tensor:
    combine = {
        "SUM": lambda a, b: a + b,
        "PRODUCT": lambda a, b: a * b,
        "MIN": min,
        "MAX": max,
        "BAND": lambda a, b: a & b,
        "BOR": lambda a, b: a | b,
        "BXOR": lambda a, b: a ^ b,
    }[op]
    width = dtype.itemsize
    columns = [
        (combine(a, b) % (1 << 8 * width)).to_bytes(width, "little") for a, b in zip(*rows, strict=True)
    ]
    return torch.frombuffer(bytearray(b"".join(columns)), dtype=dtype)


def reduce_every_dtype(me: Rank) -> dict[str, dict[str, Any]]:
    """{dtype: {op: the result, or Refused with what the tensor holds after that}}."""
    ops = OPERATIONS | {"PREMUL_SUM": dist._make_nccl_premul_sum(FACTOR)}
    results: dict[str, dict[str, Any]] = {}
    for dtype in DTYPES:
        results[dtype] = {}
        for name, op in ops.items():
            tensor = of_every_dtype(me.rank, dtype)
            try:
                dist.all_reduce(tensor, op)
                results[dtype][name] = plain(tensor)
            except (RuntimeError, ValueError, TypeError):
                results[dtype][name] = plain(Refused(tensor))
    return results


MOVEMENTS: dict[str, Callable[[Rank, str], list[torch.Tensor]]] = {}


def movement(body: Callable[[Rank, str], list[torch.Tensor]]) -> Callable:
    MOVEMENTS[body.__name__.removesuffix("_of")] = body
    return body


@movement
def broadcast_of(me, dtype):
    tensor = of_every_dtype(me.rank, dtype)
    dist.broadcast(tensor, 1)
    return [tensor]


@movement
def all_gather_of(me, dtype):
    outputs = [blank(dtype) for _ in range(me.world)]
    dist.all_gather(outputs, of_every_dtype(me.rank, dtype))
    return outputs


@movement
def gather_of(me, dtype):
    outputs = [blank(dtype) for _ in range(me.world)] if me.rank == 0 else None
    dist.gather(of_every_dtype(me.rank, dtype), outputs, dst=0)
    return outputs or []


@movement
def scatter_of(me, dtype):
    output = blank(dtype)
    inputs = [of_every_dtype(rank, dtype) for rank in range(me.world)] if me.rank == 0 else None
    dist.scatter(output, inputs, src=0)
    return [output]


@movement
def all_to_all_of(me, dtype):
    outputs = [blank(dtype) for _ in range(me.world)]
    dist.all_to_all(outputs, [of_every_dtype(me.rank, dtype) for _ in range(me.world)])
    return outputs


@movement
def message_of(me, dtype):
    tensor = of_every_dtype(me.rank, dtype)
    if me.rank == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(tensor, 0)
    return [tensor]


def moved_by_hand(rank: int, world: int, dtype: str, name: str) -> list[torch.Tensor]:
    everyone = [of_every_dtype(each, dtype) for each in range(world)]
    return {
        "broadcast": [everyone[1]],
        "all_gather": everyone,
        "gather": everyone if rank == 0 else [],
        "scatter": [everyone[rank]],
        "all_to_all": everyone,
        "message": [everyone[0]],
    }[name]


def move_every_dtype(me: Rank) -> dict[str, dict[str, Any]]:
    """{dtype: {movement: what arrived, or the text of the exception}}."""
    results: dict[str, dict[str, Any]] = {}
    for dtype in DTYPES:
        results[dtype] = {}
        for name, body in MOVEMENTS.items():
            try:
                results[dtype][name] = plain(body(me, dtype))
            except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
                results[dtype][name] = f"{type(error).__name__}: {error}"
    return results
