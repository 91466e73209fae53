"""Stores that are written in Python, on our base class and on PyTorch's, and stores across fork."""

import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any, Self

import pytest
import torch.distributed as torch_dist
from store_pairs import PATIENCE, SHORT, Pair
from tenfold import _tenfold

FORK = """
import os, sys
from tenfold import _tenfold
host = _tenfold.TCPStore("127.0.0.1", 0, is_master=True)
table = _tenfold.HashStore()
table.set("key", "before")
if os.fork() == 0:
    assert host.get("never set by anybody else") == b"parent"
    host.set("answer", "child")
    assert table.get("key") == b"before"
    sys.exit(7)  # ends the interpreter in order: every object goes
host.set("never set by anybody else", "parent")
assert host.get("answer") == b"child"
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_a_forked_child_uses_its_parents_stores_and_ends():
    ended = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr) == ("7\n", "")


# A process that has a store, and then a child that does nothing but live.
WITH_CHILD = """
import os, signal, sys
from tenfold import _tenfold
role, port = sys.argv[1], int(sys.argv[2])
store = _tenfold.TCPStore("127.0.0.1", port, is_master=role == "server", wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.readline()
if (child := os.fork()) == 0:
    signal.pause()
print(child, flush=True)
signal.pause()
"""


class WithChild:
    """A process with a store that forks a child, is killed, and leaves the child behind."""

    def __init__(self, role: str, port: int) -> None:
        command = [sys.executable, "-c", WITH_CHILD, role, str(port)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def said(self) -> int:
        return int(self.process.stdout.readline())

    def fork_and_die(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.said()
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def test_a_forked_child_does_not_hide_that_its_parent_which_was_the_server_is_dead():
    with WithChild("server", 0) as host, ThreadPoolExecutor() as threads:
        port = host.said()
        client = _tenfold.TCPStore("127.0.0.1", port, is_master=False, timeout=PATIENCE)
        waits = threads.submit(client.wait, ["key"])
        host.fork_and_die()
        with pytest.raises(torch_dist.DistNetworkError):  # and not that the key was never set
            waits.result()
        with pytest.raises(torch_dist.DistNetworkError, match="refused"):
            _tenfold.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=1))


def test_a_forked_child_does_not_hide_from_the_server_that_its_parent_is_dead():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENCE.total_seconds())
        with WithChild("client", listener.getsockname()[1]) as host:
            connection, _ = listener.accept()
            connection.settimeout(PATIENCE.total_seconds())
            greeting = b""
            while len(greeting) < 10:  # VALIDATE and PING, each with a number
                greeting += connection.recv(10 - len(greeting))
            connection.sendall(greeting[6:])
            host.said()
            host.fork_and_die()
            assert connection.recv(1) == b"", "the connection has ended"


def notes(base: type) -> Any:
    """A store that is a dict and a lock, on top of our base class or PyTorch's."""

    class Notes(base):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name
            self.values: dict[str, bytes] = {}
            self.changed = threading.Condition()

        def set(self, key, value):
            with self.changed:
                self.values[key] = value if isinstance(value, bytes) else value.encode()
                self.changed.notify_all()

        def get(self, key):
            self.wait([key])
            return self.values[key]

        def add(self, key, amount):
            with self.changed:
                total = int(self.values.get(key, b"0")) + amount
                self.values[key] = str(total).encode()
                self.changed.notify_all()
                return total

        def check(self, keys):
            return all(key in self.values for key in keys)

        def wait(self, keys, timeout=PATIENCE):
            with self.changed:
                if not self.changed.wait_for(lambda: self.check(keys), timeout.total_seconds()):
                    raise TimeoutError(f"no {keys} in {self.name}")

        def compare_set(self, key, expected, desired):
            with self.changed:
                if self.values.get(key, b"") == expected:
                    self.values[key] = desired
                return self.values.get(key, expected)

        def deleteKey(self, key):  # noqa: N802, C++'s name
            return self.values.pop(key, None) is not None

        def getNumKeys(self):  # noqa: N802, C++'s name
            return len(self.values)

    return Notes("notes")


@pytest.fixture
def written() -> Pair:
    """A store written in Python under a prefix: of ours in ours, and of PyTorch's in PyTorch's."""
    pair = Pair(notes(_tenfold.Store), notes(torch_dist.Store))
    pair.below = (pair.ours, pair.theirs)  # C++ does not keep it
    pair.ours, pair.theirs = (
        _tenfold.PrefixStore("p", pair.ours),
        torch_dist.PrefixStore("p", pair.theirs),
    )
    return pair


def test_a_store_written_in_python_does_all_that_its_methods_make_possible(written):
    written.agree(
        lambda s: s.set("key", "value"),
        lambda s: s.get("key"),
        lambda s: s.add("n", 2),
        lambda s: s.check(["key", "n"]),
        lambda s: s.wait(["key"]),
        lambda s: s.compare_set("key", "value", "other"),
        lambda s: s.append("key", "more"),
        lambda s: s.multi_set(["a", "b"], ["1", "2"]),
        lambda s: s.multi_get(["a", "key"]),
        lambda s: s.barrier("meeting", 1),
        lambda s: s.num_keys(),
        lambda s: s.delete_key("key"),
        lambda s: s.has_extended_api(),
        lambda s: s.queue_push("q", "item"),
        lambda s: s.list_keys(),
        lambda s: s.wait(["never"], SHORT),
        lambda s: s.timeout,
        lambda s: s.set_timeout(SHORT),
        lambda s: s.timeout,
    )
    ours, theirs = written.below
    assert ours.values == theirs.values


def test_what_a_store_written_in_python_lacks_is_not_implemented_and_inherited_ways_around_work():
    bare = Pair(_tenfold.Store(), torch_dist.Store())
    bare.agree(
        lambda s: s.set("key", "value"),
        lambda s: s.get("key"),
        lambda s: s.add("key", 1),
        lambda s: s.check(["key"]),
        lambda s: s.wait(["key"]),
        lambda s: s.compare_set("key", "a", "b"),
        lambda s: s.delete_key("key"),
        lambda s: s.num_keys(),
        lambda s: s.append("key", "value"),
        lambda s: s.multi_get(["key"]),
        lambda s: s.multi_set(["key"], ["value"]),
        lambda s: s.queue_pop("key"),
        lambda s: s.list_keys(),
        lambda s: s.barrier("key", 1),
        lambda s: s.clone(),
        lambda s: s.has_extended_api(),
    )
    written = notes(_tenfold.Store)
    written.append("word", "po")
    written.append("word", "tato")
    assert written.multi_get(["word"]) == [b"potato"]
    assert (written.num_keys(), written.delete_key("word"), written.num_keys()) == (1, True, 0)


def test_what_a_store_written_in_python_raises_comes_out_as_it_is():
    class Broken(_tenfold.Store):
        def set(self, key, value):
            raise ZeroDivisionError(key)

        def check(self, keys):
            return self.nothing  # an AttributeError of its own, and no missing method

    broken = _tenfold.PrefixStore("p", Broken())
    with pytest.raises(ZeroDivisionError, match="p/key"):
        broken.set("key", "value")
    with pytest.raises(AttributeError, match="nothing"):
        broken.check(["key"])


def test_a_subclass_of_one_of_our_stores_overrides_some_and_inherits_the_rest():
    class Loud(_tenfold.HashStore):
        def set(self, key, value):
            super().set(key, bytes(value).upper())

    loud = Loud()
    prefixed = _tenfold.PrefixStore("p", loud)
    prefixed.set("key", b"value")
    prefixed.queue_push("q", "item")
    assert loud.get("p/key") == prefixed.get("key") == b"VALUE"
    assert prefixed.queue_pop("q") == b"item"


def test_what_is_no_store_is_a_type_error_that_names_it():
    for call in [
        lambda wrong: _tenfold.PrefixStore("p", wrong),
        lambda wrong: _tenfold._StoreCollectives(wrong, 0, 1),
        lambda wrong: _tenfold.Group(wrong, 0, 1),
    ]:
        with pytest.raises(TypeError, match="a store is expected, not dict, which has no method `set`"):
            call({})
