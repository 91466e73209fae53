"""Many clients in one process: adders.py HOST PORT CLIENTS ROUNDS WORLD.

Each client, in a thread of its own, adds 1 to a shared counter and its round to another, then meets the
clients of all processes at a barrier and checks the totals there.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from torch.distributed import TCPStore

host, port = sys.argv[1], int(sys.argv[2])
clients, rounds, world = map(int, sys.argv[3:6])


def work(_: int) -> None:
    store = TCPStore(host, port, timeout=timedelta(seconds=60))
    for i in range(rounds):
        store.add("count", 1)
        store.add("sum", i)
    store.barrier("done", world)
    assert store.get("count") == str(world * rounds).encode()
    assert store.get("sum") == str(world * rounds * (rounds - 1) // 2).encode()


if __name__ == "__main__":
    with ThreadPoolExecutor(clients) as threads:
        list(threads.map(work, range(clients)))
