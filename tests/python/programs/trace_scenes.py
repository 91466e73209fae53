"""One rank of a job that goes wrong on purpose: trace_scenes.py SCENE FOLDER BACKEND RANK WORLD.

Every rank makes a few calls that all make, then what the scene says, and when all have done so it writes
what PyTorch's own recorder knows as a pickle to FOLDER/trace_<rank> and as JSON to
FOLDER/json/trace_<rank>.json. Ranks agree by a store of files on when that is, so that nothing depends on
time but the wait that is to be seen in the dumps.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist

CULPRIT = 1
SEEN_S = 1.2  # `tenfold trace` calls shorter waits "on their way"

scene, folder, backend = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
rank, world = int(sys.argv[4]), int(sys.argv[5])
others = [other for other in range(world) if other != CULPRIT]


class Relay(c10d.Backend):
    """Gloo by another name: PyTorch's hook records messages too, which Gloo's recorder does not."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:  # noqa: N802, c10d's name
        return "relay"

    def allreduce(self, tensors, opts=None):
        return self.gloo.allreduce(tensors, opts or dist.AllreduceOptions())

    def barrier(self, opts=None):
        return self.gloo.barrier(opts or dist.BarrierOptions())

    def send(self, tensors, dst, tag=0):
        return self.gloo.send(tensors, dst, tag)

    def recv(self, tensors, src, tag=0):
        return self.gloo.recv(tensors, src, tag)


def join() -> dist.Store:
    if backend == "relay":
        dist.Backend.register_backend("relay", Relay, devices=["cpu"])
    if backend == "tenfold":
        import tenfold.torch  # noqa: F401, registers the backend
    store = dist.FileStore(str(folder / "store"), world)
    store.set_timeout(timedelta(seconds=90))
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    return store


def warm_up() -> None:
    for _ in range(3):
        dist.all_reduce(torch.ones(4))
    dist.barrier()


def enter(work: dist.Work | None) -> None:
    """Keeps an operation that does not end from being waited for when it is collected."""
    pending.append(work)


pending: list[dist.Work | None] = []


# What each scene does on the culprit, and on the others. Nobody waits for an operation that will not end.
def train_step(tensor: torch.Tensor) -> None:
    enter(dist.all_reduce(tensor, async_op=True))


def sleeps() -> None:
    if rank != CULPRIT:
        train_step(torch.ones(4))


def wrong_collective() -> None:
    if rank == CULPRIT:
        enter(dist.broadcast(torch.ones(4), src=0, async_op=True))
    else:
        train_step(torch.ones(4))


def wrong_size() -> None:
    train_step(torch.ones(5 if rank == CULPRIT else 4))


def no_partner() -> None:
    exchange = torch.zeros(2)
    if rank == 0:
        dist.send(exchange, CULPRIT)
    if rank == CULPRIT:
        dist.recv(exchange, 0)
    if rank == 0:
        enter(dist.irecv(exchange, CULPRIT))


def healthy() -> None:
    for _ in range(3):
        dist.all_reduce(torch.ones(4))


def straggler() -> None:
    """The culprit comes when the others are known to have come, and a little later than that."""
    for turn in range(12):
        if rank == CULPRIT:
            store.wait([f"turn {turn} of {other}" for other in others])
            time.sleep(0.01)
        work = dist.all_reduce(torch.ones(4), async_op=True)
        store.set(f"turn {turn} of {rank}", b"")
        work.wait()


def pairs() -> None:
    """Two groups: one waits for the culprit, the other for one that waits in the first."""
    first = dist.new_group([0, CULPRIT], group_desc="first")
    second = dist.new_group([0, 2], group_desc="second")
    for group in (first, second):
        if rank in dist.get_process_group_ranks(group):
            dist.all_reduce(torch.ones(4), group=group)
    if rank == 0:
        enter(dist.all_reduce(torch.ones(4), group=first, async_op=True))
    if rank == 2:
        enter(dist.all_reduce(torch.ones(4), group=second, async_op=True))


SCENES = {
    "sleeps": sleeps,
    "wrong-collective": wrong_collective,
    "wrong-size": wrong_size,
    "missing": sleeps,
    "no-partner": no_partner,
    "healthy": healthy,
    "straggler": straggler,
    "pairs": pairs,
}


def write(store: dist.Store) -> None:
    (folder / "json").mkdir(exist_ok=True)
    (folder / f"trace_{rank}").write_bytes(c10d._dump_fr_trace(backend=backend))
    (folder / "json" / f"trace_{rank}.json").write_bytes(c10d._dump_fr_trace_json(backend=backend))


store = join()
warm_up()
SCENES[scene]()
store.set(f"acted {rank}", b"")
store.wait([f"acted {other}" for other in range(world)])
time.sleep(SEEN_S)  # the wait that the dumps are to show
if not (scene == "missing" and rank == CULPRIT):
    write(store)
store.set(f"wrote {rank}", b"")
store.wait([f"wrote {other}" for other in range(world)])  # nobody goes while others may notice
os._exit(0)  # not by way of operations that never end
