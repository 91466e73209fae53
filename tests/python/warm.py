"""Starts Python programs as forks of a process that has imported PyTorch: see programs/warm_server.py.

For programs that use PyTorch, where how they start is not what is tested. A fork differs from a new
interpreter in this: variables that PyTorch reads while it is imported come too late, so does PYTHONPATH,
and destructors of C++ are not run at the end. Programs that depend on these take `cold=True`.
"""

import json
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import IO

from servers import PROGRAMS

# Read while PyTorch is imported, or by the libraries that are loaded then.
READ_AT_IMPORT = ("PYTHON", "LD_", "OMP_", "MKL_", "ONEDNN_", "TORCH_", "KMP_", "GLIBC_")


class WarmServer:
    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="warm-")
        self.path = Path(self._folder.name, "socket")
        self.environment = dict(os.environ)
        command = [sys.executable, str(PROGRAMS / "warm_server.py"), str(self.path)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)
        if not self._process.stdout.readline():
            raise RuntimeError(f"the warm server exited with {self._process.wait()}")

    def serves(self, environment: Mapping[str, str]) -> bool:
        """Would a fork see this environment as a new interpreter does?"""
        names = environment.keys() | self.environment.keys()
        changed = [name for name in names if environment.get(name) != self.environment.get(name)]
        return not any(name.startswith(READ_AT_IMPORT) for name in changed)


@cache
def warm_server() -> WarmServer:
    """One per process that runs tests. It ends with this process, whose end closes its standard input."""
    return WarmServer()


class WarmProcess:
    """What `subprocess.Popen` is for a new interpreter, as far as tests need it."""

    def __init__(
        self, args: list[str], stdin: int | IO, stdout: int | IO, stderr: int | IO, env: Mapping[str, str]
    ) -> None:
        self.args = args
        self.returncode: int | None = None
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(str(warm_server().path))
        job = {"argv": args[1:], "env": dict(env), "cwd": os.getcwd()}
        files = [each if isinstance(each, int) else each.fileno() for each in (stdin, stdout, stderr)]
        message = json.dumps(job).encode() + b"\n"
        sent = socket.send_fds(self._connection, [message], files)
        self._connection.sendall(message[sent:])
        self._answers = self._connection.makefile("r")
        self.pid = int(self._answers.readline())

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._connection], [], [], 0)[0]:
            self.returncode = int(self._answers.readline())
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout)
            self.returncode = int(self._answers.readline())
        return self.returncode

    def end(self) -> None:
        """Kills what is left of it and of its children."""
        self._answers.close()
        self._connection.close()


def can_be_warm(command: list[str], environment: Mapping[str, str]) -> bool:
    """Is it one of the tests' own programs, with nothing that a fork would see differently?"""
    own = len(command) > 1 and command[0] == sys.executable and Path(command[1]).parent == PROGRAMS
    return own and warm_server().serves(environment)
