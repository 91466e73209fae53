"""`tenfold run` as a user starts it, read line by line."""

import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Self

from ranks import ENVIRONMENT
from servers import tenfold_binary

# Reached only when a test fails: on a busy machine PyTorch alone takes half a minute to start. Tests that
# import `Launcher` have a limit to match (see conftest.py); pytest.ini's is for what takes milliseconds.
PATIENCE = 300.0


class Spoken:
    """A running program that is read line by line.

    Standard output and standard error are one pipe, so that lines keep their order.
    """

    def __init__(
        self, command: list[str], environment: Mapping[str, str], stdin: int = subprocess.DEVNULL
    ) -> None:
        self.process = subprocess.Popen(
            command,
            env=ENVIRONMENT | os.environ | environment,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.said: list[str] = []
        self._unread: deque[str] = deque()
        self._news = threading.Condition()
        self._ended = False
        # A child that is left behind may keep the pipe open.
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            with self._news:
                self.said.append(line.rstrip("\n"))
                self._unread.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()

    def until(self, pattern: str, timeout: float = PATIENCE) -> re.Match[str]:
        """The next line in which `pattern` is found."""
        deadline = time.monotonic() + timeout
        with self._news:
            while True:
                while self._unread:
                    if found := re.search(pattern, self._unread.popleft()):
                        return found
                left = deadline - time.monotonic()
                assert left > 0, f"no line with {pattern!r} in {timeout} s:\n{self}"
                assert not self._ended, f"it ended without a line with {pattern!r}:\n{self}"
                self._news.wait(left)

    def __str__(self) -> str:
        return f"$ {' '.join(self.process.args)}\n" + "\n".join(self.said)


class Launcher(Spoken):
    """A running `tenfold run`: what it and its ranks say, in order, and how it ends."""

    def __init__(
        self,
        *words: object,
        environment: Mapping[str, str] | None = None,
        command: tuple[str, ...] | None = None,
        before: tuple[str, ...] = (),
    ) -> None:
        command = command or (tenfold_binary(), "run")
        super().__init__([*before, *command, *map(str, words)], environment or {})

    def ended(self, timeout: float = PATIENCE) -> int:
        """Waits for its end; its exit code."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it still runs after {timeout} s:\n{self}") from None
        self._reader.join()
        return code

    def kill(self) -> None:
        self.process.kill()

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        self.process.kill()
        self.process.wait()
        self._reader.join()


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago: all nodes must be given the same one before the first starts."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]
