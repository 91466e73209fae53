"""Runs several programs at the same time, ends them all in time, and shows their output if any failed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

from servers import PROGRAMS
from warm import WarmProcess, can_be_warm


def python(program: str, *arguments: object) -> list[str]:
    """The command line of one of our programs."""
    return [sys.executable, str(PROGRAMS / program), *map(str, arguments)]


def run_together(
    commands: list[list[str]],
    folder: Path,
    environments: list[dict[str, str]] | None = None,
    timeout: float = 100,
    cold: bool = False,
) -> None:
    """Fails, with all that was written, unless every program ends well in time. Leaves none behind.

    The tests' own programs are forks of a process that has imported PyTorch, unless they are to start `cold`.
    """
    logs = [folder / f"process-{i}.log" for i in range(len(commands))]
    processes: list[subprocess.Popen | WarmProcess] = []
    deadline = time.monotonic() + timeout
    try:
        for i, command in enumerate(commands):
            environment = os.environ | (environments[i] if environments else {})
            with logs[i].open("wb") as output:
                processes.append(start(command, output, environment, cold))
        for process in processes:
            process.wait(max(0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass  # reported below: its return code is None
    finally:
        codes = [process.poll() for process in processes]
        for process in processes:
            end_family(process)
    report = ""
    for command, code, log in zip(commands, codes, logs, strict=True):
        fate = "was still running" if code is None else f"ended with {code}"
        report += f"--- {' '.join(command)}\n--- {fate}; it said:\n{log.read_text(errors='replace')}\n"
    assert codes == [0] * len(commands), report


def start(
    command: list[str], output: IO[bytes], environment: Mapping[str, str], cold: bool
) -> subprocess.Popen | WarmProcess:
    """Starts a program in a session of its own, so that it can be ended with all its children."""
    if not cold and can_be_warm(command, environment):
        with open(os.devnull) as nothing:
            return WarmProcess(command, nothing, output, output, environment)
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=environment,
        start_new_session=True,
    )


def end_family(process: subprocess.Popen | WarmProcess) -> None:
    """Kills a process and all its children: their group bears its number, which is ours until we `wait`."""
    if isinstance(process, WarmProcess):
        process.end()
        return
    with suppress(ProcessLookupError):  # no process is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
