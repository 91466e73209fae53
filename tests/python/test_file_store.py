"""One file, shared by stock PyTorch's FileStore and tenfold's.

The tenfold side is the example `file_store_peer`, driven over a pipe:

    cargo build -p tenfold-store --examples && pytest tests/python/test_file_store.py

`TENFOLD_EXAMPLES_DIR` says where the example was built, if not in target/debug/examples.
"""

import os
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as torch_dist

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = Path(os.environ.get("TENFOLD_EXAMPLES_DIR", ROOT / "target/debug/examples"))
PEER = EXAMPLES / "file_store_peer"
LIMIT = 60  # seconds after which a peer that says nothing has failed the test


class Process:
    """A process that answers each line with one line, and is killed if it does not."""

    def __init__(self, *command):
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.watchdog = threading.Timer(LIMIT, self.process.kill)
        self.watchdog.daemon = True
        self.watchdog.start()
        assert self.answer() == "ready"

    def ask(self, line):
        self.tell(line)
        return self.answer()

    def tell(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self):
        return self.process.stdout.readline().rstrip("\n")

    def quit(self):
        """Leaves the store and ends."""
        self.process.stdin.close()
        assert self.process.wait(LIMIT) == 0
        self.watchdog.cancel()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.watchdog.cancel()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class Tenfold(Process):
    def __init__(self, path, world_size=-1):
        super().__init__(PEER, str(path), str(world_size))


class Torch(Process):
    """Stock PyTorch in a process of its own, with the same commands as far as a test needs them."""

    PROGRAM = """
import sys
from datetime import timedelta
from torch.distributed import FileStore
store = FileStore(sys.argv[1], int(sys.argv[2]))
store.set_timeout(timedelta(seconds=50))
print("ready", flush=True)
for line in sys.stdin:
    match line.rstrip("\\n").split(" "):
        case ["set", key, value]: store.set(key, value); print("ok", flush=True)
        case ["get", key]: print(store.get(key).decode(), flush=True)
        case ["add_many", key, number, times]:
            for _ in range(int(times)): total = store.add(key, int(number))
            print(total, flush=True)
        case ["wait", *keys]: store.wait(keys); print("ok", flush=True)
        case ["barrier", key, world]: store.barrier(key, int(world)); print("ok", flush=True)
"""

    def __init__(self, path, world_size=-1):
        super().__init__(sys.executable, "-c", self.PROGRAM, str(path), str(world_size))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "store"


def stock(path, world_size=-1):
    store = torch_dist.FileStore(str(path), world_size)
    store.set_timeout(timedelta(seconds=30))
    return store


def test_each_reads_what_the_other_wrote(path):
    torch_store = stock(path)
    with Tenfold(path) as tenfold:
        torch_store.set("from_torch", "blue")
        assert tenfold.ask("get from_torch") == "blue"
        assert tenfold.ask("set from_tenfold green") == "ok"
        assert torch_store.get("from_tenfold") == b"green"
        torch_store.append("both", "a")
        assert tenfold.ask("append both b") == "ok"
        torch_store.append("both", "c")
        assert tenfold.ask("get both") == "abc"
        big = "x" * 1_000_000
        torch_store.set("big", big)
        assert tenfold.ask("get big") == big


def test_both_write_the_same_bytes(path, tmp_path):
    """The same program on both leaves the same file, destructors included."""
    torch_store = stock(path)
    torch_store.set("k", "v")
    torch_store.add("n", 5)
    torch_store.add("n", -7)
    torch_store.compare_set("k", "v", "w")
    torch_store.delete_key("k")
    del torch_store
    other = tmp_path / "other"
    with Tenfold(other) as tenfold:
        for line in ["set k v", "add n 5", "add n -7", "compare_set k v w", "delete k"]:
            tenfold.ask(line)
        tenfold.quit()
    assert other.read_bytes() == path.read_bytes()


def test_compare_set_agrees(path):
    torch_store = stock(path)
    with Tenfold(path) as tenfold:
        assert tenfold.ask('compare_set k "" one') == "one"
        assert torch_store.compare_set("k", "zero", "two") == b"one"
        assert torch_store.compare_set("k", "one", "two") == b"two"
        assert tenfold.ask("compare_set k one three") == "two"
        assert tenfold.ask("compare_set none some more") == "some"
        assert torch_store.compare_set("none", "some", "more") == b"some"


def test_deletion_reaches_the_other_side(path):
    torch_store = stock(path)
    with Tenfold(path) as tenfold:
        torch_store.set("a", "1")
        torch_store.set("b", "2")
        assert tenfold.ask("keys") == "a b"
        assert torch_store.delete_key("a")
        assert tenfold.ask("check a") == "false"
        assert tenfold.ask("delete a") == "false"
        assert tenfold.ask("delete b") == "true"
        assert not torch_store.check(["b"])
        assert int(tenfold.ask("num_keys")) == torch_store.num_keys() == 1


def test_adds_at_once_lose_nothing(path):
    with Torch(path) as torch_one, Torch(path) as torch_two, Tenfold(path) as one, Tenfold(path) as two:
        everybody = [torch_one, torch_two, one, two]
        for process in everybody:
            process.tell("barrier start 4")
            process.tell("add_many n 1 500")
            process.tell("barrier end 4")
        for process in everybody:
            assert process.answer() == "ok"
            assert 500 <= int(process.answer()) <= 2000
            assert process.answer() == "ok"
        assert one.ask("get n") == torch_one.ask("get n") == "2000"


def test_each_waits_for_the_other(path):
    with Torch(path) as torch, Tenfold(path) as tenfold:
        tenfold.tell("get from_torch")
        assert torch.ask("set from_torch now") == "ok"
        assert tenfold.answer() == "now"
        torch.tell("wait x y")
        assert tenfold.ask("set x 1") == "ok"
        assert tenfold.ask("set y 1") == "ok"
        assert torch.answer() == "ok"


def test_a_wait_that_nobody_ends_ends_in_time(path):
    stock_store = stock(path)
    with Tenfold(path) as tenfold:
        assert tenfold.ask("timeout 0.05") == "ok"
        assert tenfold.ask("wait never").startswith("error Timeout: store wait `never` at file ")
    del stock_store


@pytest.mark.parametrize("last", ["torch", "tenfold"])
def test_the_last_to_leave_removes_the_file(path, last):
    torch, tenfold = Torch(path, 2), Tenfold(path, 2)
    with torch, tenfold:
        assert tenfold.ask("clone") == "ok"
        first, second = (tenfold, torch) if last == "torch" else (torch, tenfold)
        first.quit()
        assert path.exists()
        second.quit()
        assert not path.exists()


def test_the_file_stays_until_every_rank_has_come(path):
    with Tenfold(path, 2) as tenfold:
        tenfold.quit()
    assert path.exists()
    with Torch(path, 2) as torch:
        torch.quit()
    assert not path.exists()


def test_a_record_that_pytorch_tore_is_passed_over_and_cut_off(path):
    """Stock PyTorch would spin here without end."""
    torch_store = stock(path)
    torch_store.set("k", "v")
    with Tenfold(path) as tenfold:
        whole = path.read_bytes()
        with path.open("ab") as file:
            file.write(b"\x05\0\0\0/k")
        assert tenfold.ask("get k") == "v"
        assert path.read_bytes() != whole
        assert tenfold.ask("set l w") == "ok"  # removes it, so that PyTorch's destructor does not hang
        assert path.read_bytes().startswith(whole + b"\x02\0\0\0/l")
        assert torch_store.get("l") == b"w"
