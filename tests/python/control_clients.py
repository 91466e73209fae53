"""Clients of worker servers: on Unix sockets, and the command."""

import http.client
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

from launchers import PATIENCE
from servers import tenfold_binary


class Client(http.client.HTTPConnection):
    """A client of a Unix socket."""

    def __init__(self, path: str | Path) -> None:
        super().__init__("worker", timeout=PATIENCE)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(PATIENCE)
        self.sock.connect(self._path)


@dataclass(frozen=True)
class Answer:
    status: int
    kind: str
    text: str


def ask(path: str | Path, method: str, target: str, body: bytes | None = None, **headers: str) -> Answer:
    client = Client(path)
    try:
        client.request(method, target, body, headers)
        response = client.getresponse()
        kind = response.getheader("Content-Type", "")
        return Answer(response.status, kind, response.read().decode("latin-1"))
    finally:
        client.close()


def post(path: str | Path, name: str) -> Answer:
    return ask(path, "POST", f"/handler/{name}")


def worker(*words: object) -> subprocess.CompletedProcess[str]:
    command = [tenfold_binary(), "worker", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)


def said(*words: object) -> str:
    ran = worker(*words)
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout
