"""Stock PyTorch under `tenfold run`, with a relay between the ranks of the second node and the store."""

import re
import sys
from pathlib import Path

import pytest
import torch
from launchers import Launcher, free_port
from servers import PROGRAMS, ROOT
from torch.distributed import TCPStore

DDP = ROOT / "examples" / "ddp.py"
ELASTIC = PROGRAMS / "elastic.py"
PYTHON = ("--python", sys.executable)
QUICK = "keep_alive_interval=0.2,keep_alive_max_attempt=50"

BACKENDS = pytest.mark.parametrize("backend", ["gloo", "tenfold"])


def two_nodes(*words: object) -> list[Launcher]:
    """Node 0 hosts the store; the ranks of node 1 reach it through a relay."""
    port = free_port()
    nodes = []
    for node in range(2):
        place = ["--nnodes", 2, "--node-rank", node, "--master-addr", "127.0.0.1", "--master-port", port]
        place += ["--local-addr", f"127.0.0.{node + 1}", "--relay-from", 2, "--rdzv-conf", QUICK]
        nodes.append(Launcher(*place, "-n", 2, *PYTHON, *words))
    return nodes


def assert_only_the_second_used_a_relay(nodes: list[Launcher]) -> None:
    used = ["through a relay in this launcher" in str(node) for node in nodes]
    assert used == [False, True], "\n\n".join(map(str, nodes))


@BACKENDS
def test_two_nodes_train_together(backend: str, tmp_path: Path) -> None:
    nodes = two_nodes(DDP, "--backend", backend, "--save", tmp_path / "{rank}.pt", "--epochs", 3)
    with nodes[0], nodes[1]:
        codes = [node.ended() for node in nodes]
    said = "\n\n".join(map(str, nodes))
    assert codes == [0, 0], said
    assert float(re.search(r"accuracy (.+)%", said)[1]) > 90
    replicas = [torch.load(tmp_path / f"{rank}.pt") for rank in range(4)]
    for replica in replicas[1:]:
        torch.testing.assert_close(replica, replicas[0], rtol=0, atol=0)
    assert_only_the_second_used_a_relay(nodes)


@BACKENDS
def test_ranks_are_restarted_behind_a_relay(backend: str, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint.pt"
    words = [ELASTIC, "--backend", backend, "--checkpoint", checkpoint, "--steps", 6, "--fail-at", 3]
    nodes = two_nodes("--max-restarts", 2, *words)
    with nodes[0], nodes[1]:
        for node in nodes:
            node.until(r"round 0: rank \d of 4 begins at step 0")
            node.until(r"round 1: rank \d of 4 begins at step 3")
        codes = [node.ended() for node in nodes]
    assert codes == [0, 0], "\n\n".join(map(str, nodes))
    assert torch.load(checkpoint)["step"] == 6
    assert_only_the_second_used_a_relay(nodes)


def test_stock_stores_count_and_wait_together(tmp_path: Path) -> None:
    """Rank 0 starts no server of its own, and no rank of the second node tries to."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os\n"
        "import torch.distributed as dist\n"
        "rank, world = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])\n"
        "store, _, _ = next(dist.rendezvous('env://'))\n"
        "numbers = [store.add('n', 1) for _ in range(100)]\n"
        "assert numbers == sorted(set(numbers))\n"
        "store.set(f'numbers/{rank}', repr(numbers))\n"
        "every = [number for other in range(world) for number in eval(store.get(f'numbers/{other}'))]\n"
        "assert sorted(every) == list(range(1, 100 * world + 1))\n"
        "print('counted', os.environ['MASTER_PORT'], os.environ.get('TENFOLD_STORE'), flush=True)\n"
        "store.wait(['end'])\n"
    )
    nodes = two_nodes(program)
    with nodes[0], nodes[1]:
        (here, store), (relay, behind) = (
            (said[1], said[2]) for said in [node.until(r"counted (\d+) (\S+)") for node in nodes]
        )
        assert (store, behind) == ("None", f"127.0.0.1:{here}")
        assert relay != here
        TCPStore("127.0.0.1", int(here), is_master=False, wait_for_workers=False).set("end", "")
        codes = [node.ended() for node in nodes]
    assert codes == [0, 0], "\n\n".join(map(str, nodes))
