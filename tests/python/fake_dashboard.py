"""A dashboard with made-up facts, with any number of ranks, waiters and clients.

It serves the page of this checkout, and the API as it is documented, so that the page can be tried without
building anything and with jobs that no single machine can run:

    python tests/python/fake_dashboard.py --ranks 512 --waiters 1000 --clients 5000

Not here: whether the real API is like this one. tests/python/test_dashboard_page.py asks the real server too.
"""

import argparse
import json
import math
import random
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

PAGE = Path(__file__).parents[2] / "crates" / "dashboard" / "src" / "page"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = "default-src 'self'; base-uri 'none'; frame-ancestors 'none'; form-action 'none'"


class Facts:
    """What the made-up store and job look like at a given second."""

    def __init__(self, ranks: int = 8, nodes: int = 2, waiters: int = 0, clients: int = 12) -> None:
        self.ranks, self.nodes, self.waiters_count, self.clients_count = ranks, nodes, waiters, clients
        self.started = time.time() - 300
        self.is_counting = False

    def overview(self) -> dict:
        up = time.time() - self.started
        rates = {"get": 4100, "set": 2300, "wait": 610, "add": 820, "check": 90, "compare_set": 14}
        return {
            "version": "0.1.0",
            "values_allowed": True,
            "process": {"pid": 4711, "memory_bytes": 96 << 20, "cpu_seconds": up * 0.11},
            "server": {
                "address": "10.0.0.1:29500",
                "uptime_seconds": up,
                "connections": self.clients_count,
                "connections_max": 10000,
                "accepted": self.clients_count + 41,
                "closed": {"handshake": 3, "write_timeout": 1},
                "operations": {name: int(rate * up) for name, rate in rates.items()},
                "bytes_in": int(up * 1e6),
                "bytes_out": int(up * 2e6),
                "keys": 5120,
                "keys_max": 1_000_000,
                "queue_items": 12,
                "queue_items_max": 1_000_000,
                "table_bytes": 310 << 20,
                "buffer_bytes": 11 << 20,
                "memory_max": 1 << 30,
                "waiters_count": len(self.waiters()),
            },
        }

    def history(self) -> dict:
        now = int(time.time())
        seconds = range(now - 300, now)

        def wave(size: float, period: float, noise: float = 0.15) -> list[int]:
            return [
                int(size * (1 + 0.6 * math.sin(at / period)) * (1 + noise * random.Random(at).uniform(-1, 1)))
                for at in seconds
            ]

        by_operation = {
            "get": wave(4100, 31),
            "set": wave(2300, 31),
            "add": wave(820, 11),
            "wait": wave(610, 47),
            "check": wave(90, 5),
            "compare_set": wave(14, 9),
        }
        return {
            "step_seconds": 1,
            "now_unix": time.time(),
            "operations": [sum(each) for each in zip(*by_operation.values(), strict=True)],
            "by_operation": by_operation,
            "bytes_in": wave(1.1e6, 31),
            "bytes_out": wave(2.3e6, 29),
            "connections": [self.clients_count] * 300,
            "keys": [5120] * 300,
            "memory_bytes": [(200 << 20) + (at - now + 300) * 400_000 for at in seconds],
            "waiters": [len(self.waiters())] * 300,
        }

    def runs(self) -> list[dict]:
        waited = time.time() - self.started - 259
        absent = 5
        per_node = self.ranks // self.nodes
        nodes = []
        for node in range(self.nodes):
            ranks = [
                self.rank(rank, rank - node * per_node, rank != absent, waited)
                for rank in range(node * per_node, (node + 1) * per_node)
            ]
            info = {"id": f"b{node}-1-x", "host": f"b{node}", "ranks": per_node, "role": "default"}
            beat = time.time() % 5
            spares = [{"pid": 9000, "state": "running", "started_unix": self.started}] if node == 0 else []
            joined = {"node": info, "rank": node, "status": "joined", "beat_seconds": beat}
            nodes.append({**joined, "ranks": ranks, "spares": spares})
        state = {
            "version": 12,
            "round": 1,
            "phase": "running",
            "nodes_min": self.nodes,
            "nodes_max": self.nodes + 2,
            "max_restarts": 3,
            "restarts_used": 1,
            "members": [],
            "spares": [],
            "failure": None,
            "outcome": None,
            "reason": "",
        }
        host = f"b{absent // per_node}"
        verdict = (
            f"job llama-7b: {self.ranks - 1} of {self.ranks} ranks joined — rank 5 (host {host}) "
            f"has not joined, {self.ranks - 2} have waited up to {waited:.0f} s"
        )
        what = "rank 3 (pid 903, killed by SIGKILL) was replaced by pid 4003"
        times = {"seconds": 0.31, "at_unix": self.started}
        first = {"round": 1, "generation": 1, **times, "what": "", "left": [], "joined": []}
        left = {"rank": 3, "pid": 903, "host": "b0", "end": "killed by SIGKILL"}
        joined = {"rank": 3, "pid": 4003, "host": "b0", "end": None}
        second = {"round": 1, "generation": 2, **times, "what": what, "left": [left], "joined": [joined]}
        run = {"id": "llama-7b", "state": state, "nodes": nodes, "generations": [first, second]}
        return [{**run, "verdict": verdict, "verdict_level": "bad"}]

    def rank(self, rank: int, local_rank: int, joined: bool, waited: float) -> dict:
        waits = joined and rank % 7 != 6
        operation = {"operation": "wait", "keys": "`default_pg/0//cpu//0/5`", "seconds": waited}
        return {
            "rank": rank,
            "local_rank": local_rank,
            "pid": 20_000 + rank,
            "state": "running",
            "end": None,
            "store_connections": [f"10.0.0.7:{40_000 + rank}"] if joined else [],
            "cpu_seconds": (time.time() - self.started) * (0.02 if waits else 0.98),
            "memory_bytes": (2 << 30) + rank * 12_345_678,
            "last_output_seconds": waited + 1 if joined else None,
            "started_unix": self.started,
            "joined": joined,
            "stuck": waits,
            "why": f"waits for `default_pg/0//cpu//0/5` for {waited:.0f} s" if waits else "",
            "store_operation": operation if waits else None,
            "store_last": {"operation": "wait" if waits else "set", "seconds": waited} if joined else None,
        }

    def waiters(self) -> list[dict]:
        waited = time.time() - self.started - 259
        of_ranks = [
            {
                "peer": f"10.0.0.7:{40_000 + rank}",
                "rank": str(rank),
                "operation": "wait",
                "keys": "`default_pg/0//cpu//0/5`",
                "keys_count": 1,
                "seconds": waited - rank / 100,
            }
            for rank in range(self.ranks)
            if rank != 5 and rank % 7 != 6
        ]
        others = [
            {
                "peer": f"10.0.1.{number % 250}:{30_000 + number}",
                "rank": None,
                "operation": "get" if number % 2 else "wait",
                "keys": f"`job/{number}/<img src=x onerror=alert(1)>`",
                "keys_count": 1 + number % 3,
                "seconds": waited / 2,
            }
            for number in range(self.waiters_count)
        ]
        return (of_ranks + others)[:1000]

    def clients(self, limit: int) -> dict:
        clients = [
            {
                "peer": f"10.0.{number // 250}.{number % 250}:{30_000 + number}",
                "connected_seconds": 290.5,
                "last_operation": "get",
                "idle_seconds": number / 10,
                "bytes_in": 1000 * number,
                "bytes_out": 3000 * number,
                "waits": number % 3 == 0,
            }
            for number in range(min(limit, self.clients_count))
        ]
        return {"count": self.clients_count, "clients": clients}

    def slow(self) -> list[dict]:
        return [
            {
                "operation": "multi_get" if number % 2 else "list_keys",
                "key": f"default_pg/0//cpu//{number}",
                "keys_count": number,
                "bytes": 1 << number,
                "microseconds": 90_000 // (number + 1),
                "peer": "10.0.0.7:40000",
                "seconds_ago": 3.5 * number,
            }
            for number in range(12)
        ]

    def keys(self, prefix: str) -> dict:
        if self.is_counting:
            return {"counting": True}
        answer = {
            "counting": False,
            "prefix": prefix,
            "queue_items": 0,
            "truncated": False,
            "seconds_ago": 0.0,
        }
        if not prefix:
            names = ["/default_pg/", "/worker/", "/tenfold/", "/<script>alert(1)<\u2044script>/"]
            groups = [
                {
                    "prefix": name,
                    "keys": 4000 // (at + 1),
                    "bytes": 40_000_000 // (at + 1),
                    "newest_seconds": at,
                    "oldest_seconds": 290,
                }
                for at, name in enumerate(names)
            ]
            entries = [
                {"key": "/<img src=x onerror=alert(1)>", "bytes": 4, "age_seconds": 0, "kind": "value"}
            ]
            return {**answer, "keys": 5120, "bytes": 90_000_000, "groups": groups, "entries": entries}
        entries = [
            {"key": f"{prefix}{at:05}", "bytes": 17 * at, "age_seconds": at, "kind": "value"}
            for at in range(500)
        ]
        group = {
            "prefix": f"{prefix}0/",
            "keys": 300,
            "bytes": 12_000,
            "newest_seconds": 1,
            "oldest_seconds": 9,
        }
        return {
            **answer,
            "keys": 1000,
            "bytes": 50_000,
            "groups": [group],
            "entries": entries,
            "truncated": True,
        }

    def value(self, key: str) -> dict:
        text = f"the value of {key}"
        return {
            "key": key,
            "bytes": len(text),
            "text": text,
            "hex": text.encode().hex(),
            "truncated": False,
        }

    def answer(self, path: str, query: dict[str, list[str]]) -> object:
        one = {name: values[0] for name, values in query.items()}
        match path:
            case "overview" | "history" | "runs" | "waiters" | "slow":
                return getattr(self, path)()
            case "clients":
                return self.clients(int(one.get("limit", 200)))
            case "keys":
                return self.keys(one.get("prefix", ""))
            case "value":
                return self.value(one.get("key", ""))
        return None


class FakeDashboard:
    """Serves the page and made-up facts until it is stopped."""

    def __init__(self, facts: Facts, port: int = 0) -> None:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.0"  # a connection for each request: none is left when it stops

            def do_GET(self) -> None:
                url = urlsplit(self.path)
                if url.path.startswith("/api/"):
                    answer = facts.answer(url.path.removeprefix("/api/"), parse_qs(url.query))
                    status = 404 if answer is None else 200
                    self.reply(status, "application/json", json.dumps(answer).encode())
                    return
                file = PAGE / (url.path.strip("/") or "index.html")
                if file.parent == PAGE and file.is_file():
                    self.reply(200, TYPES[file.suffix], file.read_bytes())
                else:
                    self.reply(404, "text/plain", b"no such page")

            def reply(self, status: int, kind: str, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", f"{kind}; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Content-Security-Policy", POLICY)
                self.send_header("Cache-Control", "no-store")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.facts = facts
        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/"
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def stop(self) -> None:
        """May be said twice."""
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


def main() -> None:
    parser = argparse.ArgumentParser(description="A dashboard with made-up facts, to work on its page")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--waiters", type=int, default=0)
    parser.add_argument("--clients", type=int, default=12)
    options = parser.parse_args()
    facts = Facts(options.ranks, options.nodes, options.waiters, options.clients)
    fake = FakeDashboard(facts, options.port)
    print(f"dashboard on {fake.url}", flush=True)
    try:
        fake.thread.join()
    except KeyboardInterrupt:
        fake.stop()


if __name__ == "__main__":
    main()
