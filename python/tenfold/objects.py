"""Python objects between ranks, by pickle: lengths first, then bytes.

A rank that receives an object runs the code that its sender put into the pickle. Use these functions only
among ranks that trust each other, and arrays for everything else.
"""

import pickle
from array import array
from collections.abc import Sequence
from typing import Any

from tenfold._tenfold import Group

__all__ = ["all_gather", "broadcast", "gather", "receive", "scatter", "send"]


def _length(value: int = 0) -> array:
    return array("q", [value])


def _padded(data: bytes, length: int) -> bytearray:
    return bytearray(data).ljust(length, b"\0")


def _lengths(group: Group, data: bytes) -> array:
    lengths = array("q", bytes(8 * group.size))
    group.all_gather_into(lengths, _length(len(data)))
    return lengths


def all_gather(group: Group, value: Any) -> list[Any]:
    data = pickle.dumps(value)
    lengths = _lengths(group, data)
    buffers = [bytearray(max(lengths)) for _ in lengths]
    group.all_gather(buffers, _padded(data, max(lengths)))
    return [pickle.loads(buffer) for buffer in buffers]


def gather(group: Group, value: Any, root: int) -> list[Any] | None:
    data = pickle.dumps(value)
    lengths = _lengths(group, data)
    buffers = [bytearray(max(lengths)) for _ in lengths] if group.rank == root else []
    group.gather(buffers, _padded(data, max(lengths)), root)
    return [pickle.loads(buffer) for buffer in buffers] if group.rank == root else None


def broadcast(group: Group, value: Any, root: int) -> Any:
    data = pickle.dumps(value) if group.rank == root else b""
    length = _length(len(data))
    group.broadcast(length, root)
    buffer = bytearray(data) if group.rank == root else bytearray(length[0])
    group.broadcast(buffer, root)
    return value if group.rank == root else pickle.loads(buffer)


def scatter(group: Group, values: Sequence[Any] | None, root: int) -> Any:
    pickles: list[bytes] = []
    if group.rank == root:
        if values is None or len(values) != group.size:
            count = "none" if values is None else len(values)
            raise ValueError(f"the root must give {group.size} objects, one per rank; it gave {count}")
        pickles = [pickle.dumps(value) for value in values]
    length = _length(max(map(len, pickles), default=0))
    group.broadcast(length, root)
    buffer = bytearray(length[0])
    group.scatter(buffer, [_padded(data, length[0]) for data in pickles], root)
    return pickle.loads(buffer)


def send(group: Group, value: Any, to: int, tag: int) -> None:
    data = pickle.dumps(value)
    group.send(_length(len(data)), to, tag)
    group.send(data, to, tag)


def receive(group: Group, source: int | None, tag: int) -> Any:
    """Receives an object from a rank, or from any rank."""
    length = _length()
    if source is None:
        work = group.recv_any(length, tag)
        work.wait()
        source = work.source_rank()
        assert source is not None, "what was received has a sender"
    else:
        group.recv(length, source, tag)
    buffer = bytearray(length[0])
    group.recv(buffer, source, tag)
    return pickle.loads(buffer)
