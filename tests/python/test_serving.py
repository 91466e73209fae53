"""The life of `tenfold serve` as PyTorch's clients see it."""

import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import connect_to
from servers import TenfoldServer, tenfold_binary
from tap import PATIENCE, Tap, wait_request
from torch.distributed import DistNetworkError

pytestmark = pytest.mark.tenfold_only("has no command line")


@pytest.fixture
def serve(tmp_path):
    """Starts `tenfold serve` with options; whatever is left of it ends with the test."""
    started = []

    def start(*options):
        started.append(TenfoldServer(tmp_path / f"server-{len(started)}.log", *options))
        return started[-1]

    yield start
    for server in started:
        with server.process as process:
            process.kill()


def until_refused(address):
    """Returns once the server takes no new clients."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            socket.create_connection((address.host, address.port), timeout=PATIENCE).close()
        except ConnectionError:
            return
    pytest.fail("the server still takes new clients")


def test_asked_to_stop_it_serves_the_clients_it_has_and_ends_with_the_last(serve):
    server = serve("--drain", "60s")
    one, two = connect_to(server.address), connect_to(server.address)
    one.set("key", "value")
    server.process.send_signal(signal.SIGTERM)
    until_refused(server.address)
    assert two.get("key") == b"value"
    assert one.add("n", 1) == 1
    del one
    assert two.add("n", 1) == 2
    assert server.process.poll() is None
    del two
    assert server.process.wait(PATIENCE) == 0


@pytest.mark.smoke
def test_asked_twice_it_stops_at_once(serve):
    server = serve("--drain", "60s")
    store = connect_to(server.address)
    store.set("key", "value")
    server.process.send_signal(signal.SIGINT)
    until_refused(server.address)
    assert store.get("key") == b"value"
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(PATIENCE) == 128 + signal.SIGINT
    with pytest.raises(DistNetworkError):
        store.num_keys()


def test_a_blocked_get_fails_as_soon_as_the_server_is_killed(serve):
    server = serve()
    tap = Tap(server.address)
    store = connect_to(tap.address)
    with ThreadPoolExecutor(1) as thread:
        blocked = thread.submit(store.get, "key")
        tap.until_served(wait_request("key"))
        server.process.kill()
        with pytest.raises(DistNetworkError) as lost:
            blocked.result(PATIENCE)
    tap.close()
    assert str(lost.value) in (
        "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",
        "Connection reset by peer",
    )


def test_a_busy_port_is_named_and_nothing_is_served(serve):
    server = serve()
    command = [tenfold_binary(), "serve", "--host", "127.0.0.1", "--port", str(server.address.port)]
    second = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert second.returncode != 0
    assert second.stdout == ""
    # The words that torchrun looks for to try another port.
    assert "address already in use" in second.stderr.lower()
    assert str(server.address.port) in second.stderr
    assert connect_to(server.address).num_keys() == 0
