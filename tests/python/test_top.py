"""`tenfold top` on a real terminal: what is drawn, and that the terminal is given back however it ends."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator

import pytest
from fake_dashboard import Facts, FakeDashboard
from servers import tenfold_binary

pytestmark = pytest.mark.tenfold_only("has no dashboard")

PATIENCE = 100.0  # reached only when a test fails
ALTERNATE, ORIGINAL = b"\x1b[?1049h", b"\x1b[?1049l"
SHOW = b"\x1b[?25h"
ROWS, COLUMNS = 30, 110
SEQUENCE = re.compile(
    r"\x1b\[(?P<position>\d+;\d+)H|(?P<clear>\x1b\[2J)|\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x1f]|(?P<letter>.)",
    re.DOTALL,
)


class Terminal:
    """`tenfold top` on a pseudo-terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.before = termios.tcgetattr(theirs)
        self.theirs = theirs
        command = [tenfold_binary(), "top", *arguments]
        environment = {**os.environ, "TERM": "xterm-256color"}
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
        )
        self.written = b""

    def screen(self) -> str:
        """What a person sees: only changed letters are written, each after a move of the cursor."""
        cells: dict[tuple[int, int], str] = {}
        row, column = 0, 0
        for part in SEQUENCE.finditer(self.written.decode(errors="replace")):
            if position := part["position"]:
                row, column = (int(number) - 1 for number in position.split(";"))
            elif part["clear"]:
                cells.clear()
            elif part["letter"]:
                cells[row, column] = part["letter"]
                column += 1
        rows = [[cells.get((row, column), " ") for column in range(COLUMNS)] for row in range(ROWS)]
        return "\n".join("".join(row).rstrip() for row in rows)

    def until(self, wanted: str | bytes) -> None:
        """Returns once these words are on the screen, or these bytes were written."""
        end = time.monotonic() + PATIENCE
        while wanted not in (self.screen() if isinstance(wanted, str) else self.written):
            ready, _, _ = select.select([self.ours], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"{wanted!r} did not come; the screen is\n{self.screen()}"
            self.written += os.read(self.ours, 65536)

    def press(self, keys: bytes) -> None:
        os.write(self.ours, keys)

    def end(self) -> int:
        """Its exit code, once all that it wrote has been read."""
        self.until(ORIGINAL)
        code = self.process.wait(PATIENCE)
        while select.select([self.ours], [], [], 0)[0]:
            self.written += os.read(self.ours, 65536)
        return code

    def is_as_before(self) -> bool:
        return termios.tcgetattr(self.theirs) == self.before

    def close(self) -> None:
        with self.process:
            self.process.kill()
        os.close(self.ours)
        os.close(self.theirs)


@pytest.fixture
def dashboard() -> Iterator[FakeDashboard]:
    fake = FakeDashboard(Facts())
    yield fake
    fake.stop()


@pytest.fixture
def top(dashboard: FakeDashboard) -> Iterator[Callable[..., Terminal]]:
    started: list[Terminal] = []

    def start(*options: str) -> Terminal:
        started.append(Terminal(dashboard.url.removeprefix("http://").rstrip("/"), *options))
        started[-1].until(ALTERNATE)
        started[-1].until("q quit")
        return started[-1]

    yield start
    for terminal in started:
        terminal.close()


def test_it_draws_the_verdict_and_the_ranks_and_switches_panes(top):
    terminal = top()
    for text in ["7 of 8 ranks joined", "rank 5 (host b1)", "not joined", "default_pg/0//cpu//0/5", "█"]:
        terminal.until(text)
    assert not terminal.is_as_before()
    assert "[Ranks 8] Waiting 6  Operations  Slowest  Keys 5120  Limits" in terminal.screen()
    terminal.press(b"\t")
    terminal.until("for up to")
    terminal.press(b"\t\t")
    terminal.until("list_keys")
    terminal.press(b"q")
    assert terminal.end() == 0


@pytest.mark.parametrize("key", [b"q", b"\x1b", b"\x03"], ids=["q", "escape", "control-c"])
def test_a_key_ends_it_and_the_terminal_is_as_it_was(top, key):
    terminal = top()
    terminal.press(key)
    assert terminal.end() == 0
    assert terminal.is_as_before()
    assert SHOW in terminal.written


def test_sigterm_ends_it_and_the_terminal_is_as_it_was(top):
    terminal = top()
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.end() == 128 + signal.SIGTERM
    assert terminal.is_as_before()
    assert SHOW in terminal.written


def test_a_dashboard_that_goes_away_is_said_and_what_was_known_stays(top, dashboard):
    terminal = top("--interval", "100ms")
    dashboard.stop()
    terminal.until("✗ no answer for")
    terminal.until("connection refused; showing the last known state")
    terminal.until("rank 5 (host b1) has not joined")
    terminal.press(b"q")
    assert terminal.end() == 0
