"""Jobs on tenfold that go wrong on purpose: hang_scenes.py FOLDER LANGUAGE/SCENE...

LANGUAGE is `arrays` (`tenfold.init` and NumPy) or `torch` (`init_process_group("tenfold")`). Every rank makes
a few calls that all make, then what the scene says. In FOLDER/LANGUAGE/SCENE, the recorder leaves
`dumps/trace_<rank>` by itself; the same as JSON is in `json`, what PyTorch's own recorder writes in `hook`.
"""

import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import tenfold
import tenfold.torch
import torch
import torch._dynamo  # else every rank would import it
import torch.distributed as dist
from stage import LIMIT, Actor, Scene, perform, until

CULPRIT = 1
WRONG = 5  # the number of the call that goes wrong: warm_up makes four
PATIENCE = 5.0  # of a call whose time is to run out, longer than a busy machine lets a rank stand; else LIMIT
SEEN_NS = 1.1e9  # `tenfold trace` calls shorter waits "on their way"
LARGE = 4 << 20  # elements that no mailbox takes before they are received

ERRORS = (tenfold.DistError, dist.DistError, RuntimeError)


class Arrays:
    """A group of tenfold's own."""

    def __init__(self, actor: Actor) -> None:
        store = tenfold.FileStore(str(actor.folder / "store"), actor.world)
        self.group = tenfold.init(store, actor.rank, actor.world, timeout=LIMIT)
        self.limit: float | None = None

    def all_reduce(self, elements: int = 4, op: str = "sum") -> None:
        self.group.all_reduce(numpy.ones(elements, numpy.float32), op, timeout=self.limit)

    def broadcast(self, elements: int = 4, root: int = 0) -> None:
        self.group.broadcast(numpy.ones(elements, numpy.float32), root, timeout=self.limit)

    def send(self, to: int, elements: int) -> None:
        self.group.send(numpy.ones(elements, numpy.float32), to, timeout=self.limit)

    def recv(self, source: int, elements: int) -> None:
        self.group.recv(numpy.ones(elements, numpy.float32), source, timeout=self.limit)

    def coalesced(self, peer: int) -> None:
        self.group.all_reduce_coalesced([numpy.ones(n, numpy.float32) for n in (2, 3)])
        works = [
            self.group.send(numpy.ones(2, numpy.float32), peer, async_op=True),
            self.group.recv(numpy.ones(2, numpy.float32), peer, async_op=True),
        ]
        for work in works:
            work.wait()


class Torch:
    """The default group of PyTorch."""

    def __init__(self, actor: Actor) -> None:
        store = dist.FileStore(str(actor.folder / "store"), actor.world)
        store.set_timeout(timedelta(seconds=LIMIT))
        limit = timedelta(seconds=LIMIT)
        dist.init_process_group(
            "tenfold", store=store, rank=actor.rank, world_size=actor.world, timeout=limit
        )

    @property
    def limit(self) -> None: ...

    @limit.setter
    def limit(self, seconds: float) -> None:
        dist.set_timeout(timedelta(seconds=seconds))

    def all_reduce(self, elements: int = 4, op: str = "sum") -> None:
        dist.all_reduce(torch.ones(elements), getattr(dist.ReduceOp, op.upper()))

    def broadcast(self, elements: int = 4, root: int = 0) -> None:
        dist.broadcast(torch.ones(elements), root)

    def send(self, to: int, elements: int) -> None:
        dist.send(torch.ones(elements), to)

    def recv(self, source: int, elements: int) -> None:
        dist.recv(torch.ones(elements), source)

    def coalesced(self, peer: int) -> None:
        with dist._coalescing_manager(async_ops=True) as both:
            dist.all_reduce(torch.ones(2))
            dist.all_reduce(torch.ones(3))
        both.wait()
        swap = [dist.P2POp(dist.isend, torch.ones(2), peer), dist.P2POp(dist.irecv, torch.ones(2), peer)]
        for work in dist.batch_isend_irecv(swap):
            work.wait()


LANGUAGES: dict[str, Callable[[Actor], Any]] = {"arrays": Arrays, "torch": Torch}


def warm_up(job: Any) -> None:
    for _ in range(3):
        job.all_reduce()
    job.broadcast(root=2)


def others(me: Actor) -> list[int]:
    return [rank for rank in range(me.world) if rank != CULPRIT]


def tell_when_inside(me: Actor) -> None:
    """From a thread, since the call itself waits. One on a group that has failed is not recorded."""

    def is_inside() -> bool:
        entries = pickle.loads(tenfold.c10d._dump_fr_trace())["entries"]
        return any(entry["collective_seq_id"] == WRONG for entry in entries)

    def look() -> None:
        until(is_inside, f"call #{WRONG}")
        me.tell("inside")

    threading.Thread(target=look, daemon=True).start()


def after_the_others(me: Actor, mistake: Callable[[], None], call: Callable[[], None]) -> None:
    """The culprit's mistake fails the group, so the others must have entered their calls before."""
    if me.rank == CULPRIT:
        me.until_told("inside", *others(me))
        mistake()
    else:
        tell_when_inside(me)
        call()


# What the scenes do, on the culprit and on the others.


def sleeps(job: Any, me: Actor) -> None:
    job.limit = PATIENCE
    if me.rank == CULPRIT:
        until(me.file().exists, "the dump that it leaves although it sleeps")
    else:
        job.all_reduce()


def computes(job: Any, me: Actor) -> None:
    """Something of its own, in which it holds Python's lock most of the time."""
    job.limit = PATIENCE
    if me.rank != CULPRIT:
        job.all_reduce()
    give_up = time.monotonic() + LIMIT
    while not me.file().exists() and time.monotonic() < give_up:
        sum(range(200_000))


def wrong_collective(job: Any, me: Actor) -> None:
    after_the_others(me, job.broadcast, job.all_reduce)


def wrong_size(job: Any, me: Actor) -> None:
    after_the_others(me, lambda: job.all_reduce(5), job.all_reduce)


def wrong_op(job: Any, me: Actor) -> None:
    after_the_others(me, lambda: job.all_reduce(op="max"), job.all_reduce)


def wrong_root(job: Any, me: Actor) -> None:
    after_the_others(me, lambda: job.broadcast(root=2), job.broadcast)


def dies(job: Any, me: Actor) -> None:
    after_the_others(me, lambda: os.kill(os.getpid(), signal.SIGKILL), job.all_reduce)


def no_sender(job: Any, me: Actor) -> None:
    job.limit = PATIENCE
    if me.rank == 0:
        job.recv(CULPRIT, 2)
    else:
        until(me.file().exists, "its dump")


def no_receiver(job: Any, me: Actor) -> None:
    job.limit = PATIENCE
    if me.rank == 0:
        job.send(CULPRIT, LARGE)
    else:
        until(me.file().exists, "its dump")


def asked(job: Any, me: Actor) -> None:
    """No rank times out: the dumps are asked for from outside."""
    me.tell("there")
    if me.rank == CULPRIT:
        time.sleep(LIMIT)
    job.all_reduce()


def ask(scene: Scene) -> None:
    """What a user does: a signal to every rank. They go on as before, so they are ended then."""
    dumps = [scene.folder / "dumps" / f"trace_{rank}" for rank in range(scene.world)]

    def dump() -> bool:
        for file, pid in zip(dumps, scene.pids, strict=True):
            file.unlink(missing_ok=True)
            os.kill(pid, signal.SIGUSR2)
        until(lambda: all(file.exists() for file in dumps), "dumps by signal")
        return all(is_waiting(pickle.loads(dumps[rank].read_bytes())) for rank in (0, 2))

    until(lambda: all((scene.folder / f"{rank}.there").exists() for rank in range(scene.world)), "the ranks")
    until(dump, "dumps of ranks that wait")
    for pid in scene.pids:
        os.kill(pid, signal.SIGKILL)


def is_waiting(dump: dict[str, Any]) -> bool:
    last = dump["entries"][-1]
    waited = dump["time_dumped_ns"] - last["time_created_ns"]
    return last["state"] != "completed" and waited > SEEN_NS


def healthy(job: Any, me: Actor) -> None:
    job.coalesced(peer=me.rank ^ 1)
    job.all_reduce()
    me.meet("called")
    tenfold.c10d._dump_fr_trace_file(me.rank)


SCENES: dict[str, Callable[[Any, Actor], None]] = {
    "sleeps": sleeps,
    "computes": computes,
    "wrong-collective": wrong_collective,
    "wrong-size": wrong_size,
    "wrong-op": wrong_op,
    "wrong-root": wrong_root,
    "dies": dies,
    "no-sender": no_sender,
    "no-receiver": no_receiver,
    "asked": asked,
    "healthy": healthy,
}


def act(language: str, name: str, me: Actor) -> None:
    os.environ["TENFOLD_FR_DUMP_TEMP_FILE"] = str(me.folder / "dumps" / "trace_")
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = str(me.folder / "hook" / "trace_")
    os.environ["TENFOLD_FR_SIGNAL"] = "SIGUSR2"
    if name in ("wrong-collective", "sleeps"):
        os.environ["TENFOLD_FR_STACK"] = "1"
    job = LANGUAGES[language](me)
    warm_up(job)
    me.meet("warm")
    try:
        SCENES[name](job, me)
    except ERRORS as error:
        print(error)
    until(me.file().exists, "its dump")
    me.file("json").write_bytes(tenfold.c10d._dump_fr_trace_json())
    assert not me.file("hook").exists(), "PyTorch's recorder does nothing unless asked"
    if language == "torch":
        torch._C._distributed_c10d._dump_fr_trace_file(me.rank, includeStackTraces=True, backend="tenfold")
    me.meet("done", others(me) if name == "dies" else None)


def scene(folder: Path, title: str) -> Scene:
    language, name = title.split("/")
    doomed = {"dies": (CULPRIT,), "asked": (0, 1, 2)}.get(name, ())
    world = 4 if name == "healthy" else 3
    direct = ask if name == "asked" else None
    return Scene(folder / title, lambda me: act(language, name, me), world, doomed, direct)


if __name__ == "__main__":
    perform([scene(Path(sys.argv[1]), title) for title in sys.argv[2:]])
