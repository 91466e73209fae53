"""Runs a program of PyTorch's as several ranks that meet in one store."""

from pathlib import Path

from processes import python, run_together
from torch.distributed import TCPStore


def run_ranks(program: Path, *arguments: object, world: int, folder: Path, timeout: float = 100) -> None:
    """Fails, with all that was said, unless every rank ends well in time; `folder` has a log of each.

    The store is PyTorch's own and in this process: its port is free, and open before any rank asks for it.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = python("training_ranks.py", store.port, world, folder, program, *arguments)
    run_together([command], folder, timeout=timeout)
