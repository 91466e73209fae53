"""What the tests are given: a fresh server, clients of it, and clients known to be blocked in it."""

import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import launchers
import pytest
from ranks import RankServer
from servers import PROGRAMS, Address, TenfoldRelay, TenfoldServer, TorchServer, TorchServers
from tap import PATIENCE, Tap
from torch.distributed import TCPStore

sys.path.append(str(PROGRAMS))
from ddp_class import CHOICES, VARIABLE

# torch's client asks the DNS for the name of every peer, for its log. Where a packet gets lost this costs 5 s
# a time; the C library reads this setting, here and in every process the tests start.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # many small processes on few cores


# Groups that fail leave dumps: here, for every process the tests start, and not in the user's cache.
DUMPS = tempfile.TemporaryDirectory(prefix="tenfold-dumps-")
os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", f"{DUMPS.name}/trace_")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--server",
        choices=["tenfold", "relay", "torch"],
        default="tenfold",
        help="whose server to test: ours, ours through a relay, or PyTorch's, which shows if tests are right",
    )
    parser.addoption(
        "--backend",
        default="tenfold",
        help="which backend of torch.distributed to test; `gloo` shows whether the tests are right",
    )
    parser.addoption(
        "--ddp",
        choices=CHOICES,
        default=CHOICES[0],
        help="whose DistributedDataParallel to test; PyTorch's own shows whether the tests are right",
    )
    parser.addoption("--results", help="a file for what became of each test, for tests/harness/runners.py")


class Results:
    """Writes a line for each phase of a test that failed, and for each test that passed."""

    def __init__(self, path: str) -> None:
        self._file = Path(path).open("a", buffering=1)  # noqa: SIM115, open until pytest ends

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or (report.passed and report.when == "call"):
            result = {"test": report.nodeid, "passed": report.passed, "text": report.longreprtext}
            print(json.dumps(result), file=self._file)


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts what runs in its background with SIGINT ignored, and so would be what tests interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ[VARIABLE] = config.getoption("--ddp")  # for every process the tests start
    results = config.getoption("--results")
    if results and not hasattr(
        config, "workerinput"
    ):  # workers send their reports to the process that writes them
        config.pluginmanager.register(Results(results))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if hasattr(item.module, "Launcher") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(2 * launchers.PATIENCE))  # it starts PyTorch, again and again
    if config.getoption("--server") == "torch":
        for item in items:
            if marker := item.get_closest_marker("tenfold_only"):
                item.add_marker(pytest.mark.skip(reason=f"PyTorch's server: {marker.args[0]}"))


@pytest.fixture(scope="session")
def start_server(pytestconfig: pytest.Config) -> Iterator[Callable[[Path], TenfoldServer | TorchServer]]:
    if pytestconfig.getoption("--server") == "tenfold":
        # A test is over before its clients have disconnected: the server must not wait for them.
        yield lambda folder: TenfoldServer(folder / "server.log", "--drain", "0s")
    elif pytestconfig.getoption("--server") == "relay":
        yield lambda folder: TenfoldRelay(folder / "server.log", "--drain", "0s")
    else:
        servers = TorchServers()
        yield lambda _: TorchServer(servers)
        servers.close()


@pytest.fixture
def server(start_server: Callable, tmp_path: Path) -> Iterator[Address]:
    """The address of a new server."""
    running = start_server(tmp_path)
    yield running.address
    running.stop()


def connect_to(address: Address, timeout: float = PATIENCE, use_libuv: bool = True) -> TCPStore:
    """A client; `timeout` is in seconds. Without a world size it adds no `init/` key."""
    return TCPStore(address.host, address.port, timeout=timedelta(seconds=timeout), use_libuv=use_libuv)


@pytest.fixture
def connect(server: Address) -> Callable[..., TCPStore]:
    return partial(connect_to, server)


@pytest.fixture(params=["libuv", "legacy"])
def store(connect: Callable[..., TCPStore], request: pytest.FixtureRequest) -> TCPStore:
    """A client of either of torch's two kinds; on the wire they differ in queues only."""
    return connect(use_libuv=request.param == "libuv")


@pytest.fixture(scope="session")
def ranks(pytestconfig: pytest.Config) -> Iterator[RankServer]:
    """Runs functions on several ranks of the backend under test."""
    server = RankServer(pytestconfig.getoption("--backend"))
    yield server
    server.close()


@dataclass
class Blocked:
    """A call that the server has parked."""

    future: Future
    tap: Tap
    replies: bytes

    def is_still_parked(self) -> bool:
        """Has the server, in answer to all that happened up to now, left this client alone?"""
        return self.tap.replies() == self.replies

    def result(self) -> Any:
        return self.future.result(PATIENCE)


@pytest.fixture
def block(server: Address) -> Iterator[Callable[..., Blocked]]:
    """block(call, request): a new client makes `call(store)`, and the server has parked its `request`."""
    taps: list[Tap] = []
    with ThreadPoolExecutor(max_workers=16) as threads:

        def start(call: Callable[[TCPStore], Any], request: bytes, **options: Any) -> Blocked:
            tap = Tap(server)
            taps.append(tap)
            future = threads.submit(call, connect_to(tap.address, **options))
            tap.until_served(request)
            return Blocked(future, tap, tap.replies())

        yield start
        for tap in taps:
            tap.close()
