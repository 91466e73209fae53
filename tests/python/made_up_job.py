"""A made-up job: what launchers and ranks leave in a store, without launchers and ranks.

The store, its connections and its waiters are real, so a dashboard shows such a job as it would any other, in
any state one likes: with a rank that never joins, or one that was stopped.
"""

import json
import os
import socket
import struct
import threading
import time
from contextlib import suppress

from servers import Address
from tap import text

PATIENCE = 100.0  # reached only when a test fails


class Wire:
    """A client of the store that sends only what the test says, and knows its own address."""

    def __init__(self, server: Address) -> None:
        self.socket = socket.create_connection((server.host, server.port), timeout=PATIENCE)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        host, port = self.socket.getsockname()[:2]
        self.name = f"{host}:{port}"
        self.socket.sendall(struct.pack("<BI", 0, 0x3C85F7CE))
        self.ping()

    def ping(self) -> None:
        """Returns when the server has done all that it was sent before."""
        self.socket.sendall(struct.pack("<BI", 13, os.getpid()))
        self.receive(4)

    def receive(self, length: int) -> bytes:
        data = b""
        while len(data) < length:
            piece = self.socket.recv(length - len(data))
            assert piece, "the server hung up"
            data += piece
        return data

    def set(self, key: str, value: str | bytes) -> None:
        self.socket.sendall(b"\x01" + text("/" + key) + text(value))

    def set_many(self, pairs: list[tuple[str, str | bytes]]) -> None:
        body = b"".join(text("/" + key) + text(value) for key, value in pairs)
        self.socket.sendall(b"\x0b" + struct.pack("<Q", len(pairs)) + body)

    def get(self, key: str) -> bytes:
        self.socket.sendall(b"\x03" + text("/" + key))
        (length,) = struct.unpack("<Q", self.receive(8))
        return self.receive(length)

    def add(self, key: str, number: int) -> int:
        self.socket.sendall(b"\x04" + text("/" + key) + struct.pack("<q", number))
        return struct.unpack("<q", self.receive(8))[0]

    def list_keys(self) -> int:
        """How many keys there are; their names are read and thrown away."""
        self.socket.sendall(b"\x11")
        (count,) = struct.unpack("<q", self.receive(8))
        for _ in range(count):
            self.receive(struct.unpack("<Q", self.receive(8))[0])
        return count

    def wait_for(self, *keys: str) -> None:
        """Begins to wait, and returns when the server has noted it."""
        names = b"".join(text("/" + key) for key in keys)
        self.socket.sendall(b"\x06" + struct.pack("<Q", len(keys)) + names)
        self.ping()

    def close(self) -> None:
        with suppress(OSError):
            self.socket.close()


class MadeUpJob:
    """Ranks on hosts; those that have joined wait for `key`, but for those that are `busy`."""

    def __init__(
        self,
        server: Address,
        name: str = "llama-7b",
        hosts: tuple[str, ...] = ("a1", "b7"),
        ranks_per_node: int = 4,
        absent: tuple[int, ...] = (5,),
        busy: tuple[int, ...] = (6,),
        stopped: tuple[int, ...] = (),
        key: str = "default_pg/0//cpu//0/5",
    ) -> None:
        self.name, self.hosts, self.ranks_per_node = name, hosts, ranks_per_node
        self.absent, self.stopped, self.started = absent, stopped, time.time()
        self.launcher = Wire(server)
        self.ranks: dict[int, Wire] = {}
        for rank in range(len(hosts) * ranks_per_node):
            if rank in absent:
                continue
            self.ranks[rank] = Wire(server)
            if rank not in busy and rank not in stopped:
                self.ranks[rank].wait_for(key)
        self.beats = 0
        self.beat()
        self.launcher.set(f"tenfold/run/{name}/page/0/1.1", json.dumps(self.members()))
        self.launcher.set(f"tenfold/run/{name}/state", json.dumps(self.state()))
        self.launcher.set("tenfold/runs", f"{name}\n")
        self.launcher.ping()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._beat_on)
        self.thread.start()

    def node(self, number: int) -> dict:
        host = self.hosts[number]
        return {"id": f"{host}-{number}-x", "host": host, "ranks": self.ranks_per_node, "role": "default"}

    def members(self) -> list[dict]:
        return [
            {"node": self.node(number), "rank": number, "ready": True, "done": False}
            for number in range(len(self.hosts))
        ]

    def state(self) -> dict:
        return {
            "version": 12,
            "round": 1,
            "phase": "running",
            "nodes_min": len(self.hosts),
            "nodes_max": len(self.hosts) + 2,
            "max_restarts": 3,
            "restarts_used": 1,
            "pages": [[1, 1]],
            "failure": None,
            "outcome": None,
            "reason": "",
        }

    def status(self, rank: int) -> dict:
        spent = time.time() - self.started
        share = 0.97 if rank not in self.ranks or rank == max(self.ranks) - 1 else 0.01
        return {
            "rank": rank,
            "local_rank": rank % self.ranks_per_node,
            "pid": 20_011 + 7 * rank,
            "state": "stopped" if rank in self.stopped else "running",
            "end": None,
            "store_connections": [self.ranks[rank].name] if rank in self.ranks else [],
            "cpu_seconds": 41.0 + share * spent,
            "memory_bytes": (2 << 30) + rank * 41_234_567,
            "last_output_seconds": None if rank in self.absent else spent + 0.7 + rank / 9,
            "started_unix": self.started - 40,
        }

    def beat(self) -> None:
        self.beats += 1
        for number in range(len(self.hosts)):
            first = number * self.ranks_per_node
            ranks = [self.status(rank) for rank in range(first, first + self.ranks_per_node)]
            beat = {"beat": self.beats, "node": self.node(number), "ranks": ranks}
            self.launcher.set(f"tenfold/run/{self.name}/node/{self.node(number)['id']}", json.dumps(beat))

    def _beat_on(self) -> None:
        while not self.ended.wait(1.0):
            try:
                self.beat()
            except OSError:
                return  # the server has ended

    def close(self) -> None:
        self.ended.set()
        self.thread.join()
        for wire in [self.launcher, *self.ranks.values()]:
            wire.close()
