"""Worlds of both: PyTorch's ranks and tenfold's on one store, PyTorch's groups on tenfold's stores."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import numpy as np
import pytest
import tenfold.torch.rendezvous
import tenfold.torch.store
import torch.distributed as dist
from processes import python, run_together
from tenfold import _tenfold

GLOO = {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}


@pytest.mark.parametrize("host", ["torch", "tenfold"])
@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_ranks_of_pytorch_and_of_tenfold_share_a_store(kind, host, tmp_path):
    guest = "tenfold" if host == "torch" else "torch"
    libraries = [host, guest, guest, host]
    run_together(
        [
            python("mixed_store.py", kind, library, rank, len(libraries), tmp_path)
            for rank, library in enumerate(libraries)
        ],
        tmp_path,
    )
    assert not (tmp_path / "store").exists(), "the last rank that leaves removes the file"


@pytest.mark.parametrize("backend", ["gloo", "tenfold"])
@pytest.mark.parametrize("kind", ["url", "url with ranks", "file", "tcp", "mixed"])
def test_a_process_group_of_pytorch_over_a_store_of_tenfold(kind, backend, tmp_path):
    world = 2
    commands = [python("mixed_group.py", kind, backend, rank, world, tmp_path) for rank in range(world)]
    run_together(commands, tmp_path, [GLOO] * world)


def test_a_url_where_torchruns_agent_hosts_the_store_makes_every_rank_a_client(tmp_path):
    world = 2
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = GLOO | {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(agent.port),
    }
    commands = [python("mixed_group.py", "url", "gloo", rank, world, tmp_path) for rank in range(world)]
    run_together(commands, tmp_path, [environment] * world)
    assert agent.num_keys() > 0


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("tenfold://127.0.0.1?rank=0&world_size=1", "port number missing"),
        ("tenfold://:29500?rank=0&world_size=1", "host name missing"),
        ("tenfold://127.0.0.1:29500?world_size=1", "rank parameter missing"),
        ("tenfold://127.0.0.1:29500?rank=0", "world size parameter missing"),
        ("tenfold://127.0.0.1:70000?rank=0&world_size=1", "Port out of range"),
    ],
)
def test_a_url_that_lacks_something_says_what(url, reason):
    tenfold.torch.rendezvous.register()
    with pytest.raises(ValueError, match=reason):
        next(dist.rendezvous(url))


class Shelf(_tenfold.Store):
    """A store that is written in Python and can do the least that a group needs."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, bytes] = {}
        self.lock = threading.Lock()

    def set(self, key, value):
        self.values[key] = bytes(value)

    def get(self, key):
        return self.values[key]

    def add(self, key, amount):
        with self.lock:
            total = int(self.values.get(key, b"0")) + amount
            self.values[key] = str(total).encode()
            return total

    def check(self, keys):
        return all(key in self.values for key in keys)


STORES = {
    "written in Python": lambda shelf, adapted, theirs: shelf,
    "PyTorch's": lambda shelf, adapted, theirs: theirs,
    "PyTorch's around ours": lambda shelf, adapted, theirs: dist.PrefixStore("theirs", adapted),
    "ours around PyTorch's": lambda shelf, adapted, theirs: _tenfold.PrefixStore("ours", theirs),
}


@pytest.mark.parametrize("kind", STORES)
def test_a_group_meets_on_any_store(kind):
    world = 2
    shelf, theirs = Shelf(), dist.HashStore()
    adapted = tenfold.torch.store.Store(shelf)
    store = STORES[kind](shelf, adapted, theirs)

    def rank(number: int) -> list[float]:
        group = _tenfold.Group(store, number, world, timeout=60.0)
        array = np.full(4, number + 1.0)
        group.all_reduce(array, "sum")
        return array.tolist()

    with ThreadPoolExecutor(world) as threads:
        assert list(threads.map(rank, range(world))) == [[3.0] * 4] * world


def test_what_a_store_written_in_python_raises_fails_the_group_that_asked_it():
    class Broken(Shelf):
        def set(self, key, value):
            raise ZeroDivisionError("this shelf is broken")

    with pytest.raises(dist.DistError, match="ZeroDivisionError: this shelf is broken"):
        _tenfold.Group(Broken(), 0, 2, timeout=timedelta(seconds=5).total_seconds())
