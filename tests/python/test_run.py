"""Stock PyTorch programs under `tenfold run`: one node, several, and an elastic number of them."""

import os
import re
import select
import signal
import sys
from pathlib import Path

import pytest
import torch
from launchers import PATIENCE, Launcher, free_port
from servers import PROGRAMS, ROOT
from torch import Tensor

DDP = ROOT / "examples" / "ddp.py"
ELASTIC = PROGRAMS / "elastic.py"
PYTHON = ("--python", sys.executable)
# So that nodes do not wait long for stragglers, and a dead node is noticed soon; but not so soon that a node
# whose processor is busy with other things for a few seconds counts as dead.
QUICK = "last_call_timeout=1,keep_alive_interval=0.2,keep_alive_max_attempt=50,join_timeout=600"

BACKENDS = pytest.mark.parametrize("backend", ["gloo", "tenfold"])


def parameters(folder: Path, world: int) -> list[dict[str, Tensor]]:
    return [torch.load(folder / f"{rank}.pt") for rank in range(world)]


def assert_all_learned(launchers: list[Launcher], folder: Path, world: int) -> None:
    assert [launcher.ended() for launcher in launchers] == [0] * len(launchers), "\n\n".join(
        map(str, launchers)
    )
    said = "\n".join(line for launcher in launchers for line in launcher.said)
    assert float(re.search(r"accuracy (.+)%", said)[1]) > 90
    replicas = parameters(folder, world)
    for replica in replicas[1:]:
        torch.testing.assert_close(replica, replicas[0], rtol=0, atol=0)


@BACKENDS
@pytest.mark.parametrize("world", [2, 4])
def test_ddp_learns(backend: str, world: int, tmp_path: Path) -> None:
    options = ["--backend", backend, "--save", tmp_path / "{rank}.pt", "--epochs", 3]
    with Launcher("-n", world, *PYTHON, DDP, *options) as launcher:
        assert_all_learned([launcher], tmp_path, world)


@pytest.mark.parametrize("spelling", ["--nproc-per-node", "--nproc_per_node"])
def test_a_command_line_of_torchrun_works_as_it_is(spelling: str, tmp_path: Path) -> None:
    words = ["--standalone", "--nnodes=1", f"{spelling}=2", "--max_restarts=0", "--rdzv_backend", "c10d"]
    options = ["--backend", "gloo", "--save", tmp_path / "{rank}.pt", "--epochs", 3]
    command = (sys.executable, "-m", "tenfold", "run")
    with Launcher(*words, DDP, *options, command=command) as launcher:
        assert_all_learned([launcher], tmp_path, 2)


@BACKENDS
@pytest.mark.parametrize("meeting", ["static", "elastic"])
def test_two_nodes_train_together(backend: str, meeting: str, tmp_path: Path) -> None:
    port = free_port("127.0.0.1")
    nodes = []
    for node in range(2):
        words: list[object] = ["--nnodes", 2, "-n", 2, "--local-addr", f"127.0.0.{node + 1}", *PYTHON]
        if meeting == "static":
            words += ["--node-rank", node, "--master-addr", "127.0.0.1", "--master-port", port]
        else:
            words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "job"]
        options = ["--backend", backend, "--save", tmp_path / "{rank}.pt", "--epochs", 3]
        nodes.append(Launcher(*words, DDP, *options))
    with nodes[0], nodes[1]:
        assert_all_learned(nodes, tmp_path, 4)
    hosts = [line for node in nodes for line in node.said if "hosts the store" in line]
    assert len(hosts) == 1, "\n".join(map(str, nodes))


@BACKENDS
def test_a_worker_that_fails_is_restarted_from_its_checkpoint(backend: str, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint.pt"
    options = ["--backend", backend, "--checkpoint", checkpoint, "--steps", 6]
    with Launcher("-n", 2, "--max-restarts", 2, *PYTHON, ELASTIC, *options, "--fail-at", 3) as launcher:
        launcher.until(r"round 0: rank \d of 2 begins at step 0")
        launcher.until(r"round 1: rank \d of 2 begins at step 3")
        launcher.until("done: 2 ranks")
        assert launcher.ended() == 0, launcher
    interrupted = torch.load(checkpoint)
    checkpoint.unlink()
    with Launcher("-n", 2, *PYTHON, ELASTIC, *options) as launcher:
        assert launcher.ended() == 0, launcher
    assert interrupted["step"] == 6
    torch.testing.assert_close(interrupted, torch.load(checkpoint), rtol=0, atol=0)


@BACKENDS
def test_a_program_that_always_fails_ends_the_job_with_its_traceback(backend: str, tmp_path: Path) -> None:
    options = ["--backend", backend, "--checkpoint", tmp_path / "checkpoint.pt", "--steps", 6]
    with Launcher("-n", 2, *PYTHON, ELASTIC, *options, "--fail-at", 0) as launcher:
        assert launcher.ended() == 1
    said = str(launcher)
    assert re.search(r"error: rank 1 of 2 failed first: exit code 1 after .* s \(pid \d+\)", said), said
    summary = said[said.index("error: rank 1 of 2") :]
    assert "Traceback (most recent call last):" in summary
    assert "ValueError: rank 1 was told to fail at step 0" in summary


@pytest.mark.timeout(900)  # PyTorch is started five times in a row
@BACKENDS
def test_a_node_joins_and_a_node_dies_within_min_and_max(backend: str, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    words = ["--nnodes", "1:2", "-n", 1, "--max-restarts", 5, "--rdzv-backend", "c10d", "--rdzv-id", "job"]
    words += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-conf", QUICK, *PYTHON, ELASTIC]
    words += ["--backend", backend, "--checkpoint", tmp_path / "checkpoint.pt", "--until", stop]
    alone, together = r"round \d+: rank 0 of 1 ", r"round \d+: rank \d of 2 "
    with Launcher(*words) as first:
        first.until(alone)
        with Launcher(*words) as second:
            first.until(together)
            second.until(together)
            second.kill()
            assert second.ended() != 0
        first.until(alone)
        with Launcher(*words) as third:
            third.until(together)
            third.interrupt()
            assert third.ended() == 1, third
        first.until(alone)
        stop.touch()
        first.until("done: 1 ranks")
        assert first.ended() == 0, first


def test_a_signal_to_the_launcher_has_every_rank_write_its_dump(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, time, pathlib, tenfold\n"
        "group = tenfold.init()\n"
        "group.barrier()\n"
        "print('ready', flush=True)\n"
        "while not pathlib.Path(sys.argv[1]).exists():\n"
        "    time.sleep(0.01)\n"
    )
    gate, dumps = tmp_path / "gate", tmp_path / "dumps"
    environment = {"TENFOLD_FR_SIGNAL": "SIGUSR1", "TORCH_FR_DUMP_TEMP_FILE": f"{dumps}/rank_"}
    with Launcher("-n", 2, *PYTHON, program, gate, environment=environment) as launcher:
        launcher.until(r"\] ready$")
        launcher.until(r"\] ready$")
        launcher.process.send_signal(signal.SIGUSR1)
        launcher.until("^tenfold: SIGUSR1: passed on to ranks 0, 1$")
        ranks = [launcher.until(r"the last operations of rank (\d) are in")[1] for _ in range(2)]
        gate.touch()
        assert launcher.ended() == 0, launcher
    assert sorted(ranks) == ["0", "1"]
    assert sorted(path.name for path in dumps.iterdir()) == ["rank_0", "rank_1"]


@pytest.mark.parametrize("command", ["binary", "package"])
def test_a_launcher_that_is_killed_leaves_nobody_and_nothing_behind(command: str, tmp_path: Path) -> None:
    program = tmp_path / "family.py"
    program.write_text(
        "import os, signal, subprocess\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        "print('family', os.getpid(), child.pid, flush=True)\n"
        "child.wait()\n"
    )
    words = (sys.executable, "-m", "tenfold", "run") if command == "package" else None
    environment = {"TMPDIR": str(tmp_path)}
    with Launcher("-n", 2, *PYTHON, program, command=words, environment=environment) as launcher:
        families = [launcher.until(r"family (\d+) (\d+)") for _ in range(2)]
        members = [os.pidfd_open(int(number)) for family in families for number in family.groups()]
        folders = [path for path in tmp_path.iterdir() if path.name.startswith("tenfold-run-")]
        assert folders
        guard = os.pidfd_open(guard_of(launcher.process.pid))
        launcher.kill()
        for member in [*members, guard]:  # the guard removes the folders before it ends
            ended, _, _ = select.select([member], [], [], PATIENCE)
            os.close(member)
            assert ended, f"a process is left:\n{launcher}"
    assert not any(path.exists() for path in folders)


def guard_of(launcher: int) -> int:
    """The process that a launcher has started to watch over its own end."""
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        if b"run-guard" in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(child)
    raise AssertionError(f"the launcher {launcher} has no guard")
