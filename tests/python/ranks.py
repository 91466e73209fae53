"""Runs a function of a test module on several ranks of a fresh group, and says what became of each rank.

The ranks are forked by programs/rank_server.py; here are both ends of it: what a test calls, and what
the function is given.
"""

import json
import os
import pickle
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from processes import end_family, python

# For PyTorch programs with many small processes on one machine.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",  # some virtual machines advertise AMX and trap on it
}


@dataclass
class Rank:
    """What a rank's function is given: who it is, and a store in which ranks can tell each other things."""

    rank: int
    world: int
    backend: str
    timeout: float
    store: dist.Store
    groups: int = field(default=0, repr=False)

    def peers(self) -> list[int]:
        return [rank for rank in range(self.world) if rank != self.rank]

    def tell(self, what: str) -> None:
        self.store.set(f"told/{what}", b"")

    def until_told(self, *what: str) -> None:
        self.store.wait([f"told/{each}" for each in what])

    def join(self, **options: Any) -> None:
        """Makes the default group, again if there was one; `options` are those of `init_process_group`."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self.groups += 1
        dist.init_process_group(
            self.backend,
            store=dist.PrefixStore(f"group {self.groups}", self.store),
            rank=self.rank,
            world_size=self.world,
            timeout=timedelta(seconds=self.timeout),
            **options,
        )


@dataclass
class Outcome:
    """What became of one rank."""

    rank: int
    code: int | None  # its exit code, minus the signal that killed it; None if it timed out
    said: str
    report: dict[str, Any]  # empty if it did not live to write it

    @property
    def returned(self) -> Any:
        assert "returned" in self.report, self.story()
        return self.report["returned"]

    @property
    def error(self) -> str:
        """The text of the exception that its function ended with."""
        assert "text" in self.report, self.story()
        return self.report["text"]

    def raised(self, name: str) -> bool:
        """Did it raise an exception of a class of this name, or of one derived from it?"""
        assert "raised" in self.report, self.story()
        return name in self.report["raised"]

    def story(self) -> str:
        fate = "timed out and was killed" if self.code is None else f"ended with {self.code}"
        ended = self.report.get("traceback", f"its report is {self.report}")
        return f"rank {self.rank} {fate}; {ended}\nit said:\n{self.said}"


class RankServer:
    def __init__(self, backend: str) -> None:
        self.backend = backend
        self._program = subprocess.Popen(
            python("rank_server.py"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=ENVIRONMENT | os.environ,
            text=True,
            start_new_session=True,
        )

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        world: int = 2,
        backend: str | None = None,
        timeout: float = 15,
        limit: float = 60,
    ) -> list[Outcome]:
        """Calls `function(rank, *arguments)` on every rank; the arguments have to survive JSON."""
        with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
            job = {
                "module": function.__module__,
                "function": function.__name__,
                "arguments": arguments,
                "backend": backend or self.backend,
                "world": world,
                "timeout": timeout,
                "limit": limit,
                "folder": folder,
            }
            self._program.stdin.write(json.dumps(job) + "\n")
            self._program.stdin.flush()
            line = self._program.stdout.readline()
            assert line, f"the rank server ended with {self._program.wait()}"
            answer = json.loads(line)
            assert "error" not in answer, answer["error"]
            return [outcome(Path(folder), rank, code) for rank, code in enumerate(answer["codes"])]

    def close(self) -> None:
        self._program.stdin.close()
        end_family(self._program)
        self._program.stdout.close()


def outcome(folder: Path, rank: int, code: int | None) -> Outcome:
    log, report = folder / f"{rank}.log", folder / f"{rank}.pickle"
    said = log.read_text(errors="replace") if log.exists() else ""
    return Outcome(rank, code, said, pickle.loads(report.read_bytes()) if report.exists() else {})
