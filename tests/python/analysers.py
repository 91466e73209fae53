"""What the two analysers say about a folder of dumps: `tenfold trace`, and PyTorch's own."""

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from servers import tenfold_binary
from torch.distributed.flight_recorder import fr_trace
from torch.distributed.flight_recorder.components.builder import build_db
from torch.distributed.flight_recorder.components.config_manager import JobConfig
from torch.distributed.flight_recorder.components.fr_logger import FlightRecorderLogger
from torch.distributed.flight_recorder.components.types import Database

FINE, TROUBLE, UNSURE = 0, 1, 2


@dataclass
class Verdict:
    code: int
    said: str
    complained: str

    @property
    def head(self) -> str:
        return self.said.partition("\n")[0]

    @property
    def plain(self) -> str:
        """What it said, without what differs from run to run: times, and the lines of programs."""
        times = re.sub(r"\d+(\.\d+)? (µs|ms|s|min)\b(?!\))", "<time>", self.said)
        return re.sub(r"(\.py):\d+", r"\1", times)


def trace(*arguments: object) -> Verdict:
    """`tenfold trace`."""
    command = [tenfold_binary(), "trace", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "panicked" not in done.stderr, done.stderr
    return Verdict(done.returncode, done.stdout, done.stderr)


def torch_analyser(folder: Path, prefix: str = "trace_") -> str:
    """`torchfrtrace`, in this process since it costs seconds to import; a crash of it is said too."""
    with heard() as said:
        try:
            fr_trace.main([str(folder), "-p", prefix])
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return "\n".join(said)


def torch_analyser_of_json(folder: Path, prefix: str = "trace_") -> tuple[str, Database]:
    """The same of JSON: its loader reads pickles only, but what it loads from them is what our JSON has."""
    details: dict[str, dict[str, Any]] = {}
    for file in sorted(folder.glob(f"{prefix}*")):
        rank = int(file.name.removeprefix(prefix))
        details[file.name] = json.loads(file.read_text()) | {"rank": rank, "host_name": f"host_rank{rank}"}
    with heard() as said:
        database = build_db(details, JobConfig().parse_args([str(folder)]), "2.10")
    return "\n".join(said), database


@contextmanager
def heard() -> Iterator[list[str]]:
    """All that PyTorch's analyser logs meanwhile."""
    said: list[str] = []

    def log(_: object, text: str, *values: object) -> None:
        said.append(text % values if values else text)

    with pytest.MonkeyPatch.context() as patch:
        for level in ("info", "warning", "error"):
            patch.setattr(FlightRecorderLogger, level, log)
        yield said
