"""Ranks that fork, are killed beside their children, or lose each other: what the others see.

Tests wait for what ranks say, and tell causes apart by the words of errors: what is not noticed as it should
be is noticed by a timeout, in other words.
"""

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from launchers import Spoken
from processes import end_family, python
from test_two_hosts import Host, hosts  # noqa: F401, a fixture

PATIENCE = 150.0  # seconds; PyTorch alone takes half a minute to start on a busy machine
pytestmark = pytest.mark.timeout(400)


class Process(Spoken):
    """A rank, which goes on as long as its standard input is open."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        super().__init__(command, environment, stdin=subprocess.PIPE)

    def line(self, beginning: str) -> str:
        """The next line that begins like this."""
        return self.until(f"^{re.escape(beginning)}", PATIENCE).string

    def ended(self) -> int:
        self.process.stdin.close()
        return self.process.wait(PATIENCE)


@contextmanager
def ranks(
    scene: str,
    way: str,
    folder: Path,
    size: int = 2,
    places: list[Host] | None = None,
    environment: dict[str, str] | None = None,
    before: tuple[str, ...] = (),
) -> Iterator[list[Process]]:
    """Ranks of one scene of programs/faulty_rank.py, on these hosts; ended with all their children."""
    processes: list[Process] = []
    try:
        for rank in range(size):
            command = python("faulty_rank.py", scene, way, folder / "store", rank, size)
            place = places[rank % len(places)] if places else None
            command = [*before, *(place.command(*command) if place else command)]
            processes.append(Process(command, environment or {}))
        yield processes
    finally:
        for process in processes:
            end_family(process.process)


@pytest.mark.parametrize("way", ["tenfold", "torch"])
def test_a_forked_child_that_exits_neither_hangs_nor_disturbs_its_parent(way: str, tmp_path: Path) -> None:
    took = []
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        with ranks("fork", way, folder) as processes:
            slowest, usual = map(float, processes[0].line("children took ").split()[2:])
            assert [process.ended() for process in processes] == [0, 0], "\n".join(map(str, processes))
        took.append((slowest, usual))
        # It takes far less, unless the machine is busy; then a child without groups takes long, too.
        if slowest < 2.0 + 4 * usual:
            return
    raise AssertionError(f"children with groups took too long: {took}")


def test_a_forked_child_that_leaves_the_block_of_a_group_does_not_abort_it(tmp_path: Path) -> None:
    with ranks("leave_block", "tenfold", tmp_path) as processes:
        for process in processes:
            process.line("left")
        assert [process.ended() for process in processes] == [0, 0], "\n".join(map(str, processes))


@pytest.mark.parametrize("way", ["tenfold", "torch"])
def test_a_container_with_64_kb_of_dev_shm_is_enough(way: str, tmp_path: Path) -> None:
    mount = 'mount -t tmpfs -o size=64k none /dev/shm && exec "$@"'
    inside = ("unshare", "--mount", "sh", "-c", mount, "sh")
    if subprocess.run([*inside, "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("no mount namespaces here")
    with ranks("fill", way, tmp_path, before=inside) as processes:
        for process in processes:
            process.line("summed beside 65536 bytes")
        assert [process.ended() for process in processes] == [0, 0], "\n".join(map(str, processes))


# Long enough that nothing but the end of the process, or of its streams, can have been noticed.
NEVER = {"TENFOLD_HEARTBEAT": "1000"}


def test_a_rank_that_is_killed_beside_its_data_loader_is_known_to_have_died(tmp_path: Path) -> None:
    with ranks("load", "torch", tmp_path, size=3, environment=NEVER) as processes:
        for rank in (0, 2):
            error = processes[rank].line("raised ")
            assert "rank 1 (host " in error, error
            assert "died: its process ended" in error, error


def test_the_same_is_known_on_another_host(hosts: list[Host], tmp_path: Path) -> None:  # noqa: F811
    with ranks("load", "torch", tmp_path, places=hosts, environment=NEVER) as processes:
        error = processes[0].line("raised ")
        assert "rank 1 (host " in error, error
        assert "died: its process ended" in error, error


@contextmanager
def cut(hosts: list[Host]) -> Iterator[None]:  # noqa: F811
    """No packet reaches a host; no host gets an error. ARP passes: the network is broken in the middle."""
    rules = (
        "table netdev cut {\nchain arriving {\ntype filter hook ingress device eth0 priority 0\n"
        "meta protocol ip drop\n}\n}\n"
    )
    nft = ["nft", "-f", "-"]
    try:
        for host in hosts:
            subprocess.run(host.command(*nft), input=rules, text=True, check=True)
        yield
    finally:
        for host in hosts:
            subprocess.run(host.command(*nft), input="delete table netdev cut\n", text=True, check=True)


@pytest.mark.parametrize("way", ["tenfold", "torch"])
def test_the_variable_sets_when_a_rank_that_is_cut_off_is_given_up(
    way: str,
    hosts: list[Host],  # noqa: F811
    tmp_path: Path,
) -> None:
    with ranks("part", way, tmp_path, places=hosts, environment={"TENFOLD_HEARTBEAT": "4"}) as processes:
        for process in processes:
            process.line("sums")
        with cut(hosts):
            for rank, process in enumerate(processes):
                error = process.line("raised ")
                assert f"rank {1 - rank} (host " in error, error
                silence = re.search(r"shows no sign of life for ([\d.]+) s", error)
                assert silence, error
                assert 4 <= float(silence[1]) < 14, f"not by the default of 15 s: {error}"
