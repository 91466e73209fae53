"""`tenfold bench --hosts`: hosts made of network namespaces, what passes their links, and what is left over.

Every process of a benchmark inherits a mark in its environment, so that none can hide.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from servers import tenfold_binary

MARK = "TENFOLD_TEST_MARK"
PATIENCE = 200.0
QUICK = ["--sizes", "8,64K", "--rounds", "1"]
# More than any test waits for.
LONG = ["--sizes", "64K", "--rounds", "1000"]
TWO_HOSTS = "2 hosts \N{MULTIPLICATION SIGN} 2 ranks"
HAS_MPI = shutil.which("mpirun.openmpi") and shutil.which("mpicc.openmpi")
PEERS = "gloo,openmpi" if HAS_MPI else "gloo"


@pytest.fixture(scope="module")
def namespaces() -> None:
    """Skips the tests that need what this machine does not allow."""
    trial = "ip link add bridge type bridge && ip link add port0 type veth peer name end0"
    ran = subprocess.run(["unshare", "--net", "--uts", "sh", "-c", trial], capture_output=True, check=False)
    if ran.returncode != 0:
        pytest.skip(f"no network namespaces here: {ran.stderr.decode().strip()}")


class Benchmark:
    """A `tenfold bench` that is running, and what it must not leave behind."""

    def __init__(self, *arguments: str) -> None:
        self.mark = uuid.uuid4().hex
        self.names_before = names()
        command = [tenfold_binary(), "bench", *arguments]
        environment = os.environ | {MARK: self.mark, "TENFOLD_PYTHON": sys.executable}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)

    def output(self) -> tuple[int, str, str]:
        stdout, stderr = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, stdout, stderr

    def processes(self) -> dict[int, str]:
        """Those that run, with the first words of their command lines."""
        entry = f"{MARK}={self.mark}".encode()
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if entry in (folder / "environ").read_bytes().split(b"\0"):
                    line = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(folder.name)] = line[:80].decode(errors="replace")
        return found

    def leaves_nothing(self) -> None:
        # A network without a name ends with its last process.
        wait_until(lambda: not self.processes(), f"processes are left over: {self.processes()}")
        assert names() == self.names_before


@pytest.fixture
def benchmark(namespaces: None) -> Iterator[Callable[..., Benchmark]]:
    started = []

    def start(*arguments: str) -> Benchmark:
        started.append(Benchmark(*arguments))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.communicate()


def names() -> tuple[set[str], set[str]]:
    """Interfaces of the machine itself, and named networks, except those of `test_two_hosts.py`."""
    interfaces, networks = Path("/sys/class/net"), Path("/run/netns")
    named = {path.name for path in networks.glob("*") if not path.name.startswith("tenfold-")}
    return {path.name for path in interfaces.iterdir()}, named


def wait_until(condition: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.02)


@pytest.mark.timeout(240)
def test_all_implementations_run_on_the_same_hosts_and_their_bytes_pass_the_links(
    benchmark: Callable[..., Benchmark], tmp_path: Path
) -> None:
    file = tmp_path / "rows.json"
    run = benchmark("all_reduce", "--hosts", "2x2", *QUICK, "--against", PEERS, "--json", str(file))
    code, text, errors = run.output()
    assert code == 0, errors
    names = ["tenfold", *PEERS.split(",")]
    lines = text.splitlines()
    assert lines[0] == f"all_reduce f32, {TWO_HOSTS}, µs"
    assert lines[1].split() == ["size", *names, "best", "peer", "ratio"]
    links = lines.index(f"all_reduce, {TWO_HOSTS}, the busiest link in one direction, bytes of an operation")
    assert lines[links + 1].split() == ["size", "least", *names]
    rows = json.loads(file.read_text())
    assert [(row["implementation"], row["bytes"]) for row in rows] == [
        (name, size) for size in (8, 65536) for name in names
    ]
    for row in rows:
        assert (row["hosts"], row["ranks"]) == (2, 4)
        # Each host has a part of the sum that the other one needs.
        assert row["link_bytes"] > row["link_bytes_least"] == row["bytes"], row
        assert row["link_share"] is None
    # Ranks of one host share memory: less than if all four exchanged what they have through the link.
    assert rows[len(names)]["link_bytes"] < 3 * 65536
    run.leaves_nothing()


@pytest.mark.timeout(240)
def test_a_link_carries_no_more_than_its_rate(benchmark: Callable[..., Benchmark], tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    limits = ["--link-rate", "200M", "--sizes", "4M", "--rounds", "1", "--json", str(file)]
    run = benchmark("all_reduce", "--hosts", "3x1", *limits)
    code, text, errors = run.output()
    assert code == 0, errors
    assert "shares of 200 Mbit/s" in text
    (row,) = json.loads(file.read_text())
    assert row["link_bytes"] > row["link_bytes_least"] > 5_592_405
    # The bucket of 1 ms may be full when the clock starts.
    assert 0 < row["useful_share"] < row["link_share"] < 1.02
    run.leaves_nothing()


@pytest.mark.timeout(240)
def test_several_links_share_the_bytes_out(benchmark: Callable[..., Benchmark], tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    limits = ["--links", "2", "--link-rate", "200M", "--sizes", "4M", "--rounds", "1", "--json", str(file)]
    run = benchmark("all_reduce", "--hosts", "2x1", *limits, "--against", PEERS)
    code, text, errors = run.output()
    assert code == 0, errors
    assert "links of a host: 2; each link: 200 Mbit/s" in text
    row = json.loads(file.read_text())[0]
    # Each link needs to carry half of the bytes, and neither carries much more.
    assert row["link_bytes_least"] == 2 << 20
    assert row["link_bytes_least"] < row["link_bytes"] < 1.25 * row["link_bytes_least"], row
    assert 0 < row["useful_share"] < row["link_share"] < 1.02
    run.leaves_nothing()


@pytest.mark.timeout(240)
def test_a_delay_counts_on_both_links_of_the_way(benchmark: Callable[..., Benchmark], tmp_path: Path) -> None:
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        pytest.skip("no /dev/net/tun here")
    file = tmp_path / "rows.json"
    flags = ["--link-delay", "5ms", "--sizes", "8", "--rounds", "1", "--json", str(file)]
    run = benchmark("send_recv", "--hosts", "2x1", *flags)
    code, text, errors = run.output()
    assert code == 0, errors
    assert "5ms of delay" in text
    (row,) = json.loads(file.read_text())
    assert row["min_us"] > 10_000
    assert row["link_bytes"] > 8
    run.leaves_nothing()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_over_when_it_is_stopped(end: int, benchmark: Callable[..., Benchmark]) -> None:
    run = benchmark("all_reduce", "--hosts", "2x2", *LONG, "--against", PEERS)
    # The command and two times four ranks; an MPI's launcher, a shell and a daemon on each host, four ranks.
    count = 9 + (9 if HAS_MPI else 0)

    def all_have_started() -> bool:
        assert run.process.poll() is None, run.output()
        return len(run.processes()) >= count

    wait_until(all_have_started, f"the ranks did not start: {run.processes()}")
    run.process.send_signal(end)
    code, _, errors = run.output()
    if end == signal.SIGINT:
        assert code == 1
        assert "interrupted" in errors
    run.leaves_nothing()


@pytest.mark.timeout(240)
def test_nothing_is_left_over_when_a_peer_cannot_start(benchmark: Callable[..., Benchmark]) -> None:
    run = benchmark("--hosts", "2x1", *QUICK, "--against", "gloo", "--python", "/nowhere/python")
    code, _, errors = run.output()
    assert code == 1
    assert "starting gloo: a process ended early" in errors
    run.leaves_nothing()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--hosts", "0x2"], "expected hosts x ranks of each host, such as 2x2 or 4x2"),
        (["--hosts", "2"], "expected hosts x ranks of each host, such as 2x2 or 4x2"),
        (["--hosts", "2x"], "expected hosts x ranks of each host, such as 2x2 or 4x2"),
        (["--hosts", "1x4"], "use `--ranks` instead"),
        (["--hosts", "2x64"], "at most 64 ranks in all"),
        (["--hosts", "2x2", "--ranks", "2"], "cannot be used with"),
        (["--hosts", "2x2", "--transport", "tcp"], "cannot be used with"),
        (["--link-rate", "1G"], "--hosts <HxR,…>"),
        (["--link-delay", "1ms"], "--hosts <HxR,…>"),
        (["--links", "2"], "--hosts <HxR,…>"),
        (["--hosts", "2x2", "--links", "9"], "9 is not in 1..=8"),
        (["--hosts", "2x2", "--link-rate", "1X"], "invalid rate `1X`"),
        (["--hosts", "2x2", "--link-delay", "5"], "invalid delay `5`"),
        (["send_recv", "--hosts", "2x2"], "use hosts with one rank each, such as `--hosts 2x1`"),
    ],
)
def test_invalid_hosts_are_refused_with_a_reason(arguments: list[str], reason: str) -> None:
    ran = subprocess.run(
        [tenfold_binary(), "bench", *arguments], capture_output=True, text=True, check=False, timeout=60
    )
    assert ran.returncode != 0
    assert reason in ran.stderr, ran.stderr
    assert not ran.stdout


@pytest.mark.usefixtures("namespaces")
def test_a_missing_tool_is_named(tmp_path: Path) -> None:
    for name in ("unshare", "cat", "true"):
        (tmp_path / name).symlink_to(shutil.which(name))
    ran = subprocess.run(
        [tenfold_binary(), "bench", "--hosts", "2x1"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=os.environ | {"PATH": str(tmp_path)},
    )
    assert ran.returncode == 1
    assert "cannot start `ip`, which makes the network of the hosts" in ran.stderr
    assert "apt-get install iproute2" in ran.stderr
