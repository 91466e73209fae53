"""Jobs on PyTorch's own backends that go wrong on purpose: trace_scenes.py FOLDER BACKEND/SCENE...

Every rank makes a few calls that all make, then what the scene says, and when all have done so it writes what
PyTorch's own recorder knows as a pickle to FOLDER/BACKEND/SCENE/dumps/trace_<rank> and as JSON to `json`.
Ranks tell each other when that is, so that nothing depends on time but the wait that is to be seen.
"""

import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch._C._distributed_c10d as c10d
import torch._dynamo  # else every rank would import it
import torch.distributed as dist
from stage import LIMIT, Actor, Scene, perform

CULPRIT = 1
WORLD = 3
SEEN_S = 1.2  # `tenfold trace` calls shorter waits "on their way"
TIMEOUT = timedelta(seconds=60)


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


def join(backend: str, me: Actor) -> None:
    if backend == "relay":
        dist.Backend.register_backend("relay", Relay, devices=["cpu"])
    store = dist.FileStore(str(me.folder / "store"), me.world)
    store.set_timeout(timedelta(seconds=LIMIT))
    dist.init_process_group(backend, store=store, rank=me.rank, world_size=me.world, timeout=TIMEOUT)


def warm_up() -> None:
    for _ in range(3):
        dist.all_reduce(torch.ones(4))
    dist.barrier()


def enter(work: dist.Work | None) -> None:
    """Keeps an operation that does not end from being waited for when it is collected."""
    pending.append(work)


pending: list[dist.Work | None] = []


# What each scene does on the culprit, and on the others. No rank waits for an operation that will not end.
def train_step(tensor: torch.Tensor) -> None:
    enter(dist.all_reduce(tensor, async_op=True))


def sleeps(me: Actor) -> None:
    if me.rank != CULPRIT:
        train_step(torch.ones(4))


def wrong_collective(me: Actor) -> None:
    if me.rank == CULPRIT:
        enter(dist.broadcast(torch.ones(4), src=0, async_op=True))
    else:
        train_step(torch.ones(4))


def wrong_size(me: Actor) -> None:
    train_step(torch.ones(5 if me.rank == CULPRIT else 4))


def no_partner(me: Actor) -> None:
    exchange = torch.zeros(2)
    if me.rank == 0:
        dist.send(exchange, CULPRIT)
    if me.rank == CULPRIT:
        dist.recv(exchange, 0)
    if me.rank == 0:
        enter(dist.irecv(exchange, CULPRIT))


def healthy(me: Actor) -> None:
    for _ in range(3):
        dist.all_reduce(torch.ones(4))


def straggler(me: Actor) -> None:
    """The culprit comes when the others are known to have come, and a little later than that."""
    for turn in range(12):
        if me.rank == CULPRIT:
            me.until_told(f"turn {turn}", 0, 2)
            time.sleep(0.01)
        work = dist.all_reduce(torch.ones(4), async_op=True)
        me.tell(f"turn {turn}")
        work.wait()


def pairs(me: Actor) -> None:
    """Two groups: one waits for the culprit, the other for one that waits in the first."""
    first = dist.new_group([0, CULPRIT], group_desc="first")
    second = dist.new_group([0, 2], group_desc="second")
    for group in (first, second):
        if me.rank in dist.get_process_group_ranks(group):
            dist.all_reduce(torch.ones(4), group=group)
    if me.rank == 0:
        enter(dist.all_reduce(torch.ones(4), group=first, async_op=True))
    if me.rank == 2:
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


def act(backend: str, name: str, me: Actor) -> None:
    join(backend, me)
    warm_up()
    SCENES[name](me)
    me.meet("acted")
    time.sleep(SEEN_S)  # the wait that the dumps are to show
    if not (name == "missing" and me.rank == CULPRIT):
        me.file().write_bytes(c10d._dump_fr_trace(backend=backend))
        me.file("json").write_bytes(c10d._dump_fr_trace_json(backend=backend))
    me.meet("wrote")  # no rank exits while others could notice that


def scene(folder: Path, title: str) -> Scene:
    backend, name = title.split("/")
    return Scene(folder / title, lambda me: act(backend, name, me), WORLD)


if __name__ == "__main__":
    scenes = {title: scene(Path(sys.argv[1]), title) for title in sys.argv[2:]}
    alone = "gloo/straggler"  # it shows when ranks arrive, so no other scene may run beside it
    perform([scenes[title] for title in scenes if title != alone], [scenes[alone]] if alone in scenes else [])
