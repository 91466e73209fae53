"""One rank of a process group of PyTorch over a store of tenfold: STORE BACKEND RANK WORLD FOLDER.

Makes and destroys the group twice, at the same address, so that nothing of the first may be left; but once
where torchrun's agent hosts the store, which then keeps what the first one wrote.
"""

import gc
import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import tenfold.torch.rendezvous
import tenfold.torch.store as ours
import torch
import torch.distributed as dist

PATIENCE = timedelta(seconds=60)
IS_AGENTS = "TORCHELASTIC_USE_AGENT_STORE" in os.environ


def main(kind: str, backend: str, rank: int, world: int, folder: Path) -> None:
    tenfold.torch.rendezvous.register()
    tenfold.torch.rendezvous.register()  # once is enough, and twice no error
    port = agreed_port(rank, world, folder)
    for lap in range(1 if IS_AGENTS else 2):
        dist.init_process_group(backend, timeout=PATIENCE, **place(kind, rank, world, port, folder, lap))
        gc.collect()  # objects that only C++ still refers to are freed by now, if they can be
        use(rank, world)
        dist.barrier()
        # Rank 0 hosts the server: it leaves last.
        if rank != 0:
            dist.destroy_process_group()
            (folder / f"left-{lap}-{rank}").touch()
        else:
            wait_for([folder / f"left-{lap}-{other}" for other in range(1, world)])
            dist.destroy_process_group()
            (folder / f"left-{lap}-0").touch()
        gc.collect()
        wait_for([folder / f"left-{lap}-0"])
        assert not [one for one in gc.get_objects() if type(one) is ours.TCPStore], "a store stayed"


def agreed_port(rank: int, world: int, folder: Path) -> int:
    if IS_AGENTS:
        return int(os.environ["MASTER_PORT"])
    if rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        part = folder / "port.part"
        part.write_text(str(port))
        part.rename(folder / "port")
    wait_for([folder / "port"])
    return int((folder / "port").read_text())


def wait_for(files: list[Path]) -> None:
    """Until all are there. The event is a file of another process; a store would be what is tested."""
    while not all(file.exists() for file in files):
        time.sleep(0.01)


def place(kind: str, rank: int, world: int, port: int, folder: Path, lap: int) -> dict[str, Any]:
    ranks = {"rank": rank, "world_size": world}
    match kind:
        case "url":
            return {"init_method": f"tenfold://127.0.0.1:{port}", **ranks}
        case "url with ranks":
            return {"init_method": f"tenfold://127.0.0.1:{port}?rank={rank}&world_size={world}"}
        case "file":
            return {"store": ours.FileStore(folder / f"store-{lap}", world), **ranks}
        case "tcp":
            return {"store": ours.TCPStore("127.0.0.1", port, world, rank == 0, PATIENCE), **ranks}
        case "mixed":  # rank 0 hosts tenfold's, the others are clients of PyTorch's own
            kinds = ours.TCPStore if rank == 0 else dist.TCPStore
            return {"store": kinds("127.0.0.1", port, world, rank == 0, PATIENCE), **ranks}
    raise ValueError(kind)


def use(rank: int, world: int) -> None:
    tensor = torch.full((3,), float(rank + 1))
    dist.all_reduce(tensor)
    assert tensor.tolist() == [world * (world + 1) / 2] * 3
    last = dist.new_group([world - 1, 0])  # asks the store again, long after the first group was made
    if rank in (0, world - 1):
        gathered: list[Any] = [None, None]
        dist.all_gather_object(gathered, rank, group=last)
        assert sorted(gathered) == [0, world - 1]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
