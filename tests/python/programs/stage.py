"""Plays scenes: jobs whose ranks are forked from this process, because importing torch costs seconds.

A scene is a function that every rank of it calls with an `Actor`. All scenes run at the same time: they
mostly wait. What a rank says is in `<folder>/<rank>.log`. If a rank ends otherwise than it should, the
program does so with what all ranks of that scene said; ranks that are meant to die are named by the scene.
"""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

LIMIT = 90.0  # seconds; only a hang takes that long
GLANCE = 0.01


def until(condition: Callable[[], bool], what: object) -> None:
    """Waits for something that another process does."""
    give_up = time.monotonic() + LIMIT
    while not condition():
        if time.monotonic() > give_up:
            raise TimeoutError(f"timed out: {what} did not happen")
        time.sleep(GLANCE)


@dataclass
class Actor:
    """A rank of a scene; how it tells the others where it is."""

    folder: Path
    rank: int
    world: int

    def told(self, what: str, rank: int) -> Path:
        return self.folder / f"{rank}.{what}"

    def tell(self, what: str) -> None:
        self.told(what, self.rank).touch()

    def until_told(self, what: str, *ranks: int) -> None:
        until(lambda: all(self.told(what, rank).exists() for rank in ranks), f"{what} of {ranks}")

    def meet(self, what: str, ranks: Iterable[int] | None = None) -> None:
        """Goes on when all these ranks have come here."""
        self.tell(what)
        self.until_told(what, *(range(self.world) if ranks is None else ranks))

    def file(self, kind: str = "dumps") -> Path:
        return self.folder / kind / f"trace_{self.rank}"


@dataclass
class Scene:
    folder: Path
    play: Callable[[Actor], None]
    world: int = 3
    doomed: tuple[int, ...] = ()  # ranks that are meant to be killed
    direct: Callable[["Scene"], None] | None = None  # what happens from outside, once the ranks run
    pids: list[int] = field(default_factory=list)

    def start(self) -> None:
        self.folder.mkdir(parents=True)
        for kind in ("dumps", "json", "hook"):
            (self.folder / kind).mkdir()
        self.pids = [self._fork(rank) for rank in range(self.world)]

    def _fork(self, rank: int) -> int:
        child = os.fork()
        if child:
            return child
        code = 1
        try:
            log = os.open(self.folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
            self.play(Actor(self.folder, rank, self.world))
            code = 0
        except BaseException:  # whatever it is: this process must not go on as its parent does
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)  # not by way of operations that never end

    def end(self) -> str | None:
        """Waits for the ranks; what they said, if any ended otherwise than it was meant to."""
        wrong = []
        for rank, pid in enumerate(self.pids):
            expected = -signal.SIGKILL if rank in self.doomed else 0
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if code != expected:
                wrong.append(f"rank {rank} ended with {code}")
        if not wrong:
            return None
        logs = [f"--- rank {rank}\n{(self.folder / f'{rank}.log').read_text()}" for rank in range(self.world)]
        return "\n".join([f"{self.folder}: {', '.join(wrong)}", *logs])


def perform(*acts: list[Scene]) -> None:
    """Plays the scenes of an act together, and acts one after the other; exits with 1 if one fails."""
    failures = []
    for scenes in acts:
        for scene in scenes:
            scene.start()
        for scene in scenes:
            if scene.direct:
                scene.direct(scene)
        failures += [failure for scene in scenes if (failure := scene.end())]
    print("\n".join(failures))
    sys.exit(1 if failures else 0)
