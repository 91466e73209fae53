"""Whole PyTorch programs that meet in the store: gloo jobs and torchrun's rendezvous."""

import json
import sys

from processes import python, run_together
from servers import PROGRAMS

WORLD = 4
ON_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}


def assert_all_ranks_computed(folder):
    everybody = sum(range(1000)) * WORLD * (WORLD + 1) // 2
    for rank in range(WORLD):
        assert json.loads((folder / f"{rank}.json").read_text()) == {
            "everybody": everybody,
            "half": sum(range(rank % 2, WORLD, 2)),
            "ranks": list(range(WORLD)),
        }


def test_a_gloo_job_meets_in_a_store_given_to_it(server, connect, tmp_path):
    commands = [python("gloo.py", tmp_path, server.host, server.port, rank, WORLD) for rank in range(WORLD)]
    run_together(commands, tmp_path, [ON_LOOPBACK] * WORLD)
    assert_all_ranks_computed(tmp_path)
    keys = connect().list_keys()
    assert {f"0//cpu//0/{rank}" for rank in range(WORLD)} <= set(keys), keys


def test_a_gloo_job_finds_the_store_in_its_environment(server, connect, tmp_path):
    environments = [
        ON_LOOPBACK
        | {
            "MASTER_ADDR": server.host,
            "MASTER_PORT": str(server.port),
            "RANK": str(rank),
            "WORLD_SIZE": str(WORLD),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 is a client too
        }
        for rank in range(WORLD)
    ]
    run_together([python("gloo.py", tmp_path)] * WORLD, tmp_path, environments)
    assert_all_ranks_computed(tmp_path)
    keys = connect().list_keys()
    assert {f"default_pg/0//cpu//0/{rank}" for rank in range(WORLD)} <= set(keys), keys


def test_two_agents_of_torchrun_rendezvous_and_run_a_gloo_job(server, connect, tmp_path):
    # Two workers each, as on two machines; both agents are clients of the server.
    command = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-id=job"),
        *(f"--rdzv-endpoint={server.host}:{server.port}", "--rdzv-conf=is_host=0", "--local-addr=127.0.0.1"),
        *(str(PROGRAMS / "gloo.py"), str(tmp_path)),
    ]
    run_together([command] * 2, tmp_path, [ON_LOOPBACK] * 2)
    assert_all_ranks_computed(tmp_path)
    keys = connect().list_keys()
    assert "torch.rendezvous.job" in keys, keys
    assert "torch.rendezvous.job.0/torchelastic/agent/terminal_state/last_member" in keys, keys
