"""Runs a Python program as several ranks: training_ranks.py PORT WORLD FOLDER PROGRAM ARGUMENTS...

As torchrun would, without its seconds: importing PyTorch is most of what a small training run costs, so this
process imports it once, and every rank is a fork of it. Nothing has been started when it forks: no thread, no
group, and the store at PORT belongs to another process.

What a rank says is in FOLDER/<rank>.log. When one fails the others are ended, and all of it is shown.
"""

import os
import runpy
import signal
import sys
from pathlib import Path

import torch._dynamo  # the first optimizer and the first DDP import it
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
import torch.nn.parallel  # noqa: F401


def main() -> None:
    port, world, folder, program = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    ranks: dict[int, int] = {}
    for rank in range(world):
        child = os.fork()
        if child == 0:
            become(rank, world, port, folder / f"{rank}.log")
            sys.argv = sys.argv[4:]
            runpy.run_path(program, run_name="__main__")
            return  # and ends as any program does
        ranks[child] = rank
    if failure := wait_for(ranks):
        said = [f"rank {rank} said:\n{(folder / f'{rank}.log').read_text()}" for rank in range(world)]
        sys.exit("\n".join([failure, *said]))


def become(rank: int, world: int, port: str, log: Path) -> None:
    """Makes this process a rank, with the environment that torchrun would give it."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 is a client of the store, too
    }
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)


def wait_for(ranks: dict[int, int]) -> str:
    """Waits for all children. If one fails, ends the others and says which rank it was."""
    failure = ""
    while ranks:
        child, status = os.wait()
        rank = ranks.pop(child)
        code = os.waitstatus_to_exitcode(status)
        if code != 0 and not failure:
            failure = f"rank {rank} ended with {code}"
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    return failure


if __name__ == "__main__":
    main()
