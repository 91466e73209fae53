"""Takes the documentation's pictures of the dashboard: a lively store, and a job with a rank missing.

    TENFOLD_BINARY=target/release/tenfold python tests/python/dashboard_screenshots.py docs/images

The server and its clients are real, the job is made up (see made_up_job.py). It takes as long as the charts
are wide, five minutes; `--seconds 20` is enough to try it.
"""

import argparse
import math
import socket
import tempfile
import threading
import time
from contextlib import closing, suppress
from pathlib import Path

from browser import Browser
from made_up_job import MadeUpJob, Wire
from servers import Address
from test_dashboard_page import Dashboard

SIZE_MAX = 300_000  # bytes of one picture


def main() -> None:
    parser = argparse.ArgumentParser(description="Takes the pictures of the dashboard for the documentation")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=300, help="of load before the pictures are taken")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as logs:
        server = Dashboard(Path(logs) / "server.log", "--dashboard-values", "--max-memory", "256M")
        ended = threading.Event()
        load = threading.Thread(target=make_load, args=(server.address, ended))
        try:
            fill(server.address)
            load.start()
            ended.wait(max(0.0, options.seconds - 60))
            with closing(MadeUpJob(server.address)):
                ended.wait(min(60.0, options.seconds))
                take(server.url, options.folder)
        finally:
            ended.set()
            load.join()
            server.process.kill()
            server.process.wait()


def fill(server: Address) -> None:
    """Keys as PyTorch's process groups leave them, large ones, and visitors that had to be turned away."""
    with closing(Wire(server)) as client:
        client.set_many(
            [(f"default_pg/0//cpu//0/{rank}", bytes(180)) for rank in (0, 1, 2, 3, 4, 6, 7)]
            + [(f"default_pg/0//cpu//{rank}/addresses", bytes(900)) for rank in range(64)]
            + [(f"torchelastic/role_info/{rank}", bytes(90)) for rank in range(64)]
            + [
                (f"checkpoint/step_{step}/shard_{shard}", bytes(30_000))
                for step in range(8)
                for shard in range(16)
            ]
        )
        client.set("epoch", "17")
        client.set("vocabulary", bytes(3_000_000))
        client.ping()
    for _ in range(3):
        with closing(socket.create_connection((server.host, server.port))) as visitor:
            visitor.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with suppress(OSError):
                visitor.recv(1)


def make_load(server: Address, ended: threading.Event) -> None:
    """Steps of a job as the store sees them: rises, falls and bursts."""
    clients = [Wire(server) for _ in range(6)]
    try:
        start, step = time.monotonic(), 0
        while not ended.wait(0.1):
            step += 1
            at = time.monotonic() - start
            size = int(30 + 22 * math.sin(at / 17) + 14 * math.sin(at / 5) + (60 if step % 300 < 25 else 0))
            for number in range(max(4, size)):
                client = clients[number % len(clients)]
                client.set(f"metrics/rank{number % 8}/loss", f"{at:.3f}")
                client.get("checkpoint/step_0/shard_0" if number % 9 == 0 else "default_pg/0//cpu//0/0")
                if number % 3 == 0:
                    client.add("barrier/count", 1)
            if step % 70 == 0:
                clients[0].list_keys()
            if step % 40 == 0:
                clients[1].get("vocabulary")
            if step % 13 == 0:
                clients[2].set(f"checkpoint/step_{8 + step // 130}/shard_{step}", bytes(40_000))
    except OSError:
        pass  # the server has ended
    finally:
        for client in clients:
            client.close()


def take(url: str, folder: Path) -> None:
    with Browser() as browser:
        browser.resize(1360, 1000)
        browser.prefer("light")
        browser.open(url)
        browser.until(
            "document.querySelector('.ranks tr.absent') && document.querySelector('#keys-table tbody tr')"
        )
        # A few beats, so that there is a share of CPU to show.
        browser.until("/\\b(9\\d|100) %/.test(document.querySelector('.ranks tr.absent').innerText)")
        pictures = [
            ("light", "light", (1360, 1000, 1.0, False)),
            ("dark", "dark", (1360, 1000, 1.0, False)),
            ("phone", "light", (390, 844, 1.5, True)),
        ]
        for name, scheme, size in pictures:
            browser.prefer(scheme)
            browser.resize(*size)
            browser.until("new Promise(requestAnimationFrame) && document.querySelector('#pulse.live')")
            file = folder / f"dashboard-{name}.png"
            browser.screenshot(file)
            length = file.stat().st_size
            print(f"{file}: {length} bytes")
            assert length < SIZE_MAX, f"{file} has {length} bytes, more than {SIZE_MAX}"


if __name__ == "__main__":
    main()
