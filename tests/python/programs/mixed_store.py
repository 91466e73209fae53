"""One rank of a world in which some are PyTorch's and some tenfold's: STORE LIBRARY RANK WORLD FOLDER.

All meet on one store, write, read, count, race, and pass items along queues.
"""

import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

PATIENCE = timedelta(seconds=60)


def main(kind: str, library: str, rank: int, world: int, folder: Path) -> None:
    if library == "torch":
        import torch.distributed as stores
    else:
        from tenfold import _tenfold as stores
    store = {"tcp": open_tcp, "file": open_file}[kind](stores, rank, world, folder)
    store.set_timeout(PATIENCE)
    meet(store, rank, world)
    if kind == "tcp":
        pass_along(store, rank, world)
    # No rank leaves before all are done: the server ends with rank 0.
    if rank == 0:
        store.wait([f"bye/{other}" for other in range(1, world)], PATIENCE)
    else:
        store.set(f"bye/{rank}", "")


def open_file(stores: Any, rank: int, world: int, folder: Path) -> Any:
    return stores.FileStore(str(folder / "store"), world)


def open_tcp(stores: Any, rank: int, world: int, folder: Path) -> Any:
    """Rank 0 hosts on a socket of its own, and tells the port by a FileStore that all share."""
    port_file = stores.FileStore(str(folder / "port"), world)
    if rank != 0:
        return stores.TCPStore("127.0.0.1", int(port_file.get("port")), world, False, PATIENCE)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    port_file.set("port", str(port))
    return stores.TCPStore("127.0.0.1", port, world, True, PATIENCE, master_listen_fd=listener.detach())


def meet(store: Any, rank: int, world: int) -> None:
    ranks = [f"rank/{number}" for number in range(world)]
    store.set(ranks[rank], f"value of {rank}")
    assert store.multi_get(ranks) == [f"value of {number}".encode() for number in range(world)]
    winner = store.compare_set("leader", "", f"rank {rank}")
    store.add("counter", rank + 1)
    store.append("log", f"{rank} ")
    store.barrier("written", world, PATIENCE)
    assert store.get("leader") == winner
    assert store.add("counter", 0) == world * (world + 1) // 2
    assert sorted(store.get("log").split()) == [str(number).encode() for number in range(world)]
    assert store.check([*ranks, "leader"])
    assert not store.check([*ranks, "nobody"])
    # One rank deletes what all have read.
    store.barrier("read", world, PATIENCE)
    if rank == world - 1:
        assert store.delete_key("leader")
        store.set("deleted", "")
    store.wait(["deleted"], PATIENCE)
    assert not store.check(["leader"])


def pass_along(store: Any, rank: int, world: int) -> None:
    """An item goes round twice, each rank waiting in its own queue."""
    for lap in range(2):
        if rank == 0:
            store.queue_push("to 1", f"lap {lap}")
        assert store.queue_pop(f"to {rank}") == f"lap {lap}".encode()
        if rank != 0:
            store.queue_push(f"to {(rank + 1) % world}", f"lap {lap}")
    assert store.queue_len(f"to {rank}") == 0


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
