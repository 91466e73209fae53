"""Groups over two hosts, through every door, with no variable that names an interface.

The hosts are network namespaces that this test makes and removes, joined by one cable.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from processes import python, run_together
from servers import PROGRAMS, tenfold_binary

PORT = 29400  # free in a namespace of its own
PATIENCE = 110.0
INTERFACES = ("TENFOLD_INTERFACE", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


@dataclass(frozen=True)
class Host:
    namespace: str
    address: str

    def command(self, *words: object) -> list[str]:
        """The same command line, on this host."""
        unset = [word for name in INTERFACES for word in ("-u", name)]
        return ["ip", "netns", "exec", self.namespace, "env", *unset, *map(str, words)]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    names = [f"tenfold-{os.getpid()}-{index}" for index in range(2)]
    try:
        ip("netns", "add", names[0])
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {error}")
    try:
        ip("netns", "add", names[1])
        # Both ends are made inside, so that the machine's own network never has them.
        ip("-n", names[0], "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", names[1])
        hosts = [Host(name, f"10.77.0.{index + 1}") for index, name in enumerate(names)]
        for host in hosts:
            ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", host.namespace, "link", "set", device, "up")
        yield hosts
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.mark.parametrize("method", ["env://", "tcp://", "file://"])
def test_torch_distributed_joins_ranks_on_two_hosts(method: str, hosts: list[Host], tmp_path: Path) -> None:
    commands, environments = [], []
    where = {"env://": "", "tcp://": f"{hosts[0].address}:{PORT}", "file://": f"{tmp_path}/store"}[method]
    for rank, host in enumerate(hosts):
        place = [] if method == "env://" else [rank]
        commands.append(host.command(*python("two_hosts.py", method + where, *place)))
        master = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(PORT)}
        environments.append(master | {"RANK": str(rank), "WORLD_SIZE": "2"})
    run_together(commands, tmp_path, environments, timeout=PATIENCE)


@pytest.mark.parametrize("what", ["array", "env://"])
@pytest.mark.parametrize("meeting", ["static", "elastic"])
@pytest.mark.parametrize("relay_from", [0, 1])
def test_tenfold_run_joins_two_nodes(
    what: str, meeting: str, relay_from: int, hosts: list[Host], tmp_path: Path
) -> None:
    """With a relay, the store of the second host's rank is on loopback, which shows no way to the first."""
    commands = []
    for node, host in enumerate(hosts):
        where = [f"--rdzv-endpoint={hosts[0].address}:{PORT}"]
        where += [f"--node-rank={node}"] if meeting == "static" else ["--rdzv-backend=c10d", "--rdzv-id=job"]
        where += [f"--relay-from={relay_from}", "--python", sys.executable]
        launcher = [tenfold_binary(), "run", "--nnodes=2", "-n", 1, *where]
        commands.append(host.command(*launcher, PROGRAMS / "two_hosts.py", what))
    run_together(commands, tmp_path, timeout=PATIENCE)


def test_two_agents_of_torchrun_join_ranks_on_two_hosts(hosts: list[Host], tmp_path: Path) -> None:
    commands = []
    for node, host in enumerate(hosts):
        agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
        where = [f"--node-rank={node}", f"--master-addr={hosts[0].address}", f"--master-port={PORT}"]
        commands.append(host.command(*agent, *where, PROGRAMS / "two_hosts.py", "env://"))
    run_together(commands, tmp_path, timeout=PATIENCE)
