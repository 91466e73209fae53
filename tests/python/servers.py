"""The server under test: tenfold's, or PyTorch's own to prove that a test asks for the right thing.

Each test gets a fresh server on a free port. Starting is an event, a line on standard output, never a sleep.
"""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"


@dataclass(frozen=True)
class Address:
    host: str
    port: int

    @classmethod
    def announced(cls, line: str) -> "Address":
        """Reads `listening on HOST:PORT`."""
        words, _, endpoint = line.strip().rpartition(" ")
        assert words == "listening on", f"the server's first line is {line!r}"
        host, _, port = endpoint.rpartition(":")
        return cls(host.strip("[]"), int(port))


class TenfoldServer:
    """`tenfold serve` in a process of its own."""

    def __init__(self, log: Path, *options: str) -> None:
        self.log = log
        command = [tenfold_binary(), "serve", "--host", "127.0.0.1", "--port", "0", *options]
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
        try:
            self.address = Address.announced(self.process.stdout.readline())
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"{command} did not start; it said:\n{log.read_text()}") from None

    def stop(self) -> None:
        """Asks it to end, and fails the test if it had ended already or does not end well."""
        with self.process as process:
            already = process.poll()
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
        said = self.log.read_text(errors="replace")
        assert already is None, f"the server ended by itself with {already}; it said:\n{said}"
        assert process.returncode == 0, (
            f"on SIGTERM the server ended with {process.returncode}; it said:\n{said}"
        )
        assert "panicked" not in said, said


class TenfoldRelay:
    """`tenfold serve`, and a `tenfold relay` through which clients reach it."""

    def __init__(self, log: Path, *options: str) -> None:
        self.server = TenfoldServer(log, *options)
        upstream = f"{self.server.address.host}:{self.server.address.port}"
        self.log = log.with_suffix(".relay.log")
        flags = ["--upstream", upstream, "--listen", "127.0.0.1:0", "--drain", "0s"]
        command = [tenfold_binary(), "relay", *flags]
        with self.log.open("wb") as stderr:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
        self.address = Address.announced(self.process.stdout.readline())

    def stop(self) -> None:
        with self.process as process:
            assert process.poll() is None, f"the relay ended by itself:\n{self.log.read_text()}"
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=10) == 0, self.log.read_text()
        assert "panicked" not in self.log.read_text(errors="replace"), self.log.read_text()
        self.server.stop()


def tenfold_binary() -> str:
    default = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "debug" / "tenfold"
    binary = os.environ.get("TENFOLD_BINARY", str(default))
    assert os.access(binary, os.X_OK), f"no program at {binary}: set TENFOLD_BINARY, or run `./test python`"
    return binary


class TorchServers:
    """Hosts PyTorch's servers, all in one other process: see programs/torch_server.py."""

    def __init__(self) -> None:
        command = [sys.executable, PROGRAMS / "torch_server.py"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tell(self, line: str) -> None:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def close(self) -> None:
        with self.process as process:
            process.stdin.close()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()


class TorchServer:
    def __init__(self, servers: TorchServers) -> None:
        self.servers = servers
        servers.tell("start")
        self.address = Address.announced(servers.process.stdout.readline())

    def stop(self) -> None:
        self.servers.tell(f"stop {self.address.port}")
