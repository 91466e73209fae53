"""A rank that plays every scene of test_debug_levels.py, each in its own group, and writes the errors it got.

Called with `numpy` or `torch`, a folder, the port of a store, its rank and the number of ranks. Rank 1 errs.
"""

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import tenfold

PATIENCE = 60.0  # only bounds a hang
SHORT = 5.0  # of a call that no other rank joins


class Numpy:
    """tenfold's own groups, of arrays."""

    def __init__(self, store: tenfold.Store, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size

    def join(self, name: str) -> None:
        store = tenfold.PrefixStore(name, self.store)
        self.group = tenfold.init(
            store=store, rank=self.rank, world_size=self.size, name=name, timeout=PATIENCE
        )
        self.limit: float | None = None

    def hurry(self) -> None:
        """What is called from now on ends soon."""
        self.limit = SHORT

    def leave(self) -> None:
        self.group.close()

    def all_reduce(self, *shape: int) -> None:
        self.group.all_reduce(numpy.zeros(shape, dtype=numpy.float32), timeout=self.limit)

    def barrier(self) -> None:
        self.group.barrier()

    def recv(self) -> None:
        self.group.recv(numpy.zeros((2, 2)), (self.rank + 1) % self.size, timeout=self.limit)


class Torch(Numpy):
    """The same through `torch.distributed`."""

    def join(self, name: str) -> None:
        import tenfold.torch
        import torch.distributed as dist

        assert tenfold.torch  # makes the backend known
        self.dist = dist
        store = dist.TCPStore("127.0.0.1", self.store.port, is_master=False, wait_for_workers=False)
        dist.init_process_group(
            "tenfold",
            store=dist.PrefixStore(name, store),
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=PATIENCE),
        )

    def hurry(self) -> None:
        self.dist.set_timeout(timedelta(seconds=SHORT))

    def leave(self) -> None:
        self.dist.destroy_process_group()

    def all_reduce(self, *shape: int) -> None:
        import torch

        self.dist.all_reduce(torch.zeros(shape))

    def barrier(self) -> None:
        self.dist.barrier()

    def recv(self) -> None:
        import torch

        self.dist.recv(torch.zeros(2, 2, dtype=torch.float64), (self.rank + 1) % self.size)


def operation(me: Numpy) -> None:
    me.barrier() if me.rank == 1 else me.all_reduce(2, 3)


def size(me: Numpy) -> None:
    me.all_reduce(7 if me.rank == 1 else 6)


def shape(me: Numpy) -> None:
    me.all_reduce(6)
    me.all_reduce(*((3, 2) if me.rank == 1 else (2, 3)))


def missing(me: Numpy) -> None:
    if me.rank == 1:
        me.store.wait([f"gave up/{rank}" for rank in range(me.size) if rank != 1])
        return
    me.hurry()
    try:
        me.all_reduce(2, 3)
    finally:
        me.store.set(f"gave up/{me.rank}", "")


def message(me: Numpy) -> None:
    me.hurry()
    me.recv()


def mixed(me: Numpy) -> None:
    """Rank 1 does not report its shapes, so that no rank can detect that they differ."""
    if me.rank == 1:
        tenfold.c10d.set_debug_level(tenfold.c10d.DebugLevel.OFF)
    me.all_reduce(*((3, 2) if me.rank == 1 else (2, 3)))
    tenfold.c10d.set_debug_level(tenfold.c10d.DebugLevel.DETAIL)


def play(scene: Any, me: Numpy) -> dict[str, Any]:
    me.join(scene.__name__)
    try:
        scene(me)
        told = {}
    except tenfold.DistError as error:
        lines = str(error).splitlines()
        called = [line.strip() for line in lines if line.startswith("  called ")]
        told = {"class": type(error).__name__, "reason": error.reason, "peer": error.peer, "called": called}
    # No rank leaves before all are done, which would be another reason to fail.
    if me.store.add(f"done/{scene.__name__}", 1) == me.size:
        me.store.set(f"over/{scene.__name__}", "")
    me.store.wait([f"over/{scene.__name__}"])
    me.leave()
    return told


def main() -> None:
    kind, folder, (port, rank, ranks) = sys.argv[1], Path(sys.argv[2]), map(int, sys.argv[3:])
    store = tenfold.TCPStore("127.0.0.1", port, wait_for_workers=False)
    me = (Torch if kind == "torch" else Numpy)(store, rank, ranks)
    scenes = [operation, size, shape, missing, message, *([mixed] if kind == "numpy" else [])]
    told = {scene.__name__: play(scene, me) for scene in scenes}
    told["dump"] = json.loads(tenfold.c10d._dump_fr_trace_json())
    (folder / f"told-{rank}").write_text(json.dumps(told))


main()
