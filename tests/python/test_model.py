"""Random programs of one client, compared step by step with a dictionary and some lists.

Hypothesis shrinks a program that differs to the shortest one. The programs are the same in every run.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed import DistNetworkError, DistStoreError, QueueEmptyError, TCPStore

CLOSED, EMPTY, ABSENT = "connection closed", "queue is empty", "timed out"
READABLE = re.compile(rb"[ \t\n\v\f\r]*([+-]?[0-9]+)")


class Model:
    """What the server should hold, and what it should answer. The method names are torch's."""

    def __init__(self) -> None:
        self.map: dict[str, bytes] = {}
        self.queues: dict[str, list[bytes]] = defaultdict(list)

    def set(self, key, value):
        self.map[key] = value

    def get(self, key):
        # A queue satisfies the wait in front of the read, which then finds no such key.
        return self.map.get(key, b"") if self.check([key]) else ABSENT

    def add(self, key, delta):
        text = READABLE.match(self.map.get(key, b"0"))
        if text is None or not -(2**63) <= int(text[1]) < 2**63:
            return CLOSED
        total = (int(text[1]) + delta + 2**63) % 2**64 - 2**63
        self.map[key] = str(total).encode()
        return total

    def check(self, keys):
        return all(key in self.map or self.queues[key] for key in keys)

    def wait(self, keys):
        return None if self.check(keys) else ABSENT

    def compare_set(self, key, expected, desired):
        expected, desired = expected.encode(), desired.encode()
        if self.map.get(key, b"") == expected:
            self.map[key] = desired
        return self.map.get(key, expected)

    def delete_key(self, key):
        return self.map.pop(key, None) is not None

    def append(self, key, value):
        self.map[key] = self.map.get(key, b"") + value

    def multi_set(self, keys, values):
        self.map.update(zip(keys, values, strict=True))

    def multi_get(self, keys):
        return [self.map.get(key, b"") for key in keys] if self.check(keys) else ABSENT

    def queue_push(self, key, value):
        self.queues[key].append(value)

    def queue_pop(self, key, block):
        if self.queues[key]:
            return self.queues[key].pop(0)
        return ABSENT if block and key not in self.map else EMPTY

    def queue_len(self, key):
        return len(self.queues[key])

    def num_keys(self):
        return len(self.map)

    def list_keys(self):
        return sorted(self.map)

    def barrier(self, key, world_size):
        """There are no other clients, so a barrier for more than one more client is never complete."""
        count = self.add(key, 1)
        return CLOSED if count == CLOSED else None if count >= world_size else ABSENT


KEYS = st.sampled_from(["", "a", "b", "ключ", "nul\0"])
LISTS = st.lists(KEYS, max_size=4)
TEXTS = st.sampled_from(["", "0", "41", "-2", " +7", "12abc", "junk", str(2**63 - 1), str(2**63), "x" * 2000])
VALUES = st.one_of(TEXTS.map(str.encode), st.binary(max_size=8))
DELTAS = st.sampled_from([0, 1, -1, 1000, 2**63 - 1, -(2**63)])


def step(name: str, *arguments: st.SearchStrategy) -> st.SearchStrategy:
    return st.tuples(st.just(name), *arguments)


PLAIN = [
    step("set", KEYS, VALUES),
    step("get", KEYS),
    step("add", KEYS, DELTAS),
    step("check", LISTS),
    step("wait", LISTS),
    step("compare_set", KEYS, TEXTS, TEXTS),
    step("delete_key", KEYS),
    step("append", KEYS, VALUES),
    st.lists(st.tuples(KEYS, VALUES), max_size=4).map(
        lambda pairs: ("multi_set", [key for key, _ in pairs], [value for _, value in pairs])
    ),
    step("multi_get", LISTS),
    step("num_keys"),
    step("list_keys"),
    step("barrier", KEYS, st.integers(-1, 3)),
]
QUEUES = [
    step("queue_push", KEYS, VALUES),
    step("queue_pop", KEYS, st.booleans()),
    step("queue_len", KEYS),
]


class Reality:
    """A client whose keys live in a folder of their own, so that many programs can share a server."""

    def __init__(self, connect: Callable[..., TCPStore], use_libuv: bool, folder: str) -> None:
        self.connect = lambda: connect(use_libuv=use_libuv)
        self.store = self.connect()
        self.folder = folder
        self.keys_before = self.store.num_keys()

    def do(self, name: str, *arguments: object, times_out: bool) -> object:
        if arguments and name not in ("num_keys", "list_keys"):
            first, *rest = arguments
            prefixed = (
                [self.folder + key for key in first] if isinstance(first, list) else self.folder + first
            )
            arguments = (prefixed, *rest)
        # An answer takes some time even if the value exists, so the timeout is zero only if none is expected.
        self.store.set_timeout(timedelta(milliseconds=0 if times_out else 30_000))
        try:
            answer = getattr(self.store, name)(*arguments)
        except QueueEmptyError:
            return EMPTY
        except DistNetworkError:
            self.store = self.connect()
            return CLOSED
        except DistStoreError as error:
            return ABSENT if " timeout after 0ms, key" in str(error) else error
        if name == "num_keys":
            return answer - self.keys_before
        if name == "list_keys":
            return sorted(key.removeprefix(self.folder) for key in answer if key.startswith(self.folder))
        return answer


@pytest.mark.parametrize("use_libuv", [True, False], ids=["libuv", "legacy"])
def test_random_programs_do_what_a_dictionary_would(connect, use_libuv):
    folders = (f"program {i}/" for i in itertools.count())
    steps = st.one_of(*PLAIN, *(QUEUES if use_libuv else []))

    @settings(
        max_examples=300,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(steps, min_size=1, max_size=40))
    def agree(program):
        model, reality = Model(), Reality(connect, use_libuv, next(folders))
        for name, *arguments in program:
            expected = getattr(model, name)(*arguments)
            answer = reality.do(name, *arguments, times_out=expected == ABSENT)
            assert answer == expected, f"{name}{tuple(arguments)}"
        assert reality.do("list_keys", times_out=False) == model.list_keys()
        for key, value in model.map.items():
            assert reality.do("get", key, times_out=False) == value

    agree()
