"""Starts the ranks of a job as torchrun would, without its seconds: plain processes and one store."""

import os
from pathlib import Path

from processes import run_together
from torch.distributed import TCPStore


def run_ranks(command: list[str], world: int, folder: Path, timeout: float = 100) -> None:
    """Runs `command` once for each rank; fails unless all end well in time.

    The store is PyTorch's own and lives in this process, so its port is free, known, and open before any rank
    asks for it.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environments = [
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 is a client of the store, too
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        }
        for rank in range(world)
    ]
    run_together([command] * world, folder, environments, timeout)
