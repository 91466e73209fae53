"""The package's stores do what PyTorch's do: the same calls on both, the same values and classes of errors.

Where PyTorch's are known to be wrong, the test says what is right and asks only ours.
"""

import copy
import doctest
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import tenfold.torch.rendezvous
import tenfold.torch.store
import torch.distributed as torch_dist
from package_programs import Waiting
from store_pairs import KINDS, PATIENCE, SHORT, Pair, make
from tenfold import _tenfold
from torch._C._distributed_c10d import FakeStore


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def pair(kind: str, tmp_path: Path) -> Pair:
    return Pair(make(_tenfold, kind, tmp_path), make(torch_dist, kind, tmp_path))


@pytest.fixture
def store(kind: str, tmp_path: Path) -> Any:
    return make(_tenfold, kind, tmp_path)


@pytest.mark.smoke
def test_set_and_get_take_text_and_bytes_and_give_bytes(pair):
    for value in ["text", "zwölf 🔟", b"", b"\0\xff", bytearray(b"array")]:
        pair.agree(lambda s, value=value: s.set("key", value), lambda s: s.get("key"))
    for key in ["", "/", "ключ", b"bytes", b"\xff not UTF-8"]:
        pair.agree(lambda s, key=key: s.set(key, "value"), lambda s, key=key: s.get(key))


def test_add_counts_and_reads_numbers_as_c_does(pair):
    pair.agree(lambda s: s.add("n", 5), lambda s: s.add("n", -7), lambda s: s.get("n"))
    for text in ["41", "  8", "12abc", "007"]:
        pair.agree(lambda s, text=text: s.set("n", text), lambda s: s.add("n", 1), lambda s: s.get("n"))


@pytest.mark.parametrize("kind", ["hash", "file", "prefix"], indirect=True)
def test_add_to_what_is_no_number_is_a_value_error(pair):
    pair.agree(lambda s: s.set("n", "five"), lambda s: s.add("n", 1))


def test_compare_set_writes_if_the_expectation_holds_and_tells_what_is_there(pair):
    for stored in [None, "", "old"]:
        for expected in ["", "old", "other"]:
            key = f"{stored}-{expected}"
            if stored is not None:
                pair.agree(lambda s, key=key, stored=stored: s.set(key, stored))
            pair.agree(
                lambda s, key=key, expected=expected: s.compare_set(key, expected, b"new"),
                lambda s, key=key: s.check([key]),
            )


def test_check_wait_and_delete_see_what_is_there(pair):
    pair.agree(
        lambda s: s.check(["a"]),
        lambda s: s.check([]),
        lambda s: s.wait([]),
        lambda s: s.multi_set(["a", "b"], ["1", b"2"]),
        lambda s: s.check(["a", "b"]),
        lambda s: s.check(["a", "c"]),
        lambda s: s.wait(["a", "b"]),
        lambda s: s.wait(["a"], SHORT),
        lambda s: s.num_keys(),
        lambda s: s.delete_key("a"),
        lambda s: s.check(["a"]),
    )


def test_deleting_what_is_not_there_is_false(store):
    assert store.delete_key("never") is False  # PyTorch's FileStore says True


def test_append_and_the_calls_for_many_keys(pair):
    pair.agree(
        lambda s: s.append("word", "po"),
        lambda s: s.append("word", b"tato"),
        lambda s: s.get("word"),
        lambda s: s.multi_set(["a", "b"], ["1", "2"]),
        lambda s: s.multi_get(["b", "word", "a"]),
        lambda s: s.multi_get([]),
        lambda s: s.has_extended_api(),
    )


def test_lists_of_different_lengths_are_an_error(store):
    with pytest.raises(ValueError, match="2 keys but 1 values"):  # PyTorch's HashStore reads out of bounds
        store.multi_set(["a", "b"], ["1"])


def test_queues(pair):
    pair.agree(
        lambda s: s.queue_len("q"),
        lambda s: s.queue_push("q", "first"),
        lambda s: s.queue_push("q", b"second"),
        lambda s: s.queue_len("q"),
        lambda s: s.queue_pop("q"),
        lambda s: s.queue_pop("q", block=False),
        lambda s: s.queue_pop("q", block=False),
        lambda s: s.queue_pop("q", False),
    )


def test_list_keys_lists_the_users_keys(store):
    store.multi_set(["a", "b/c", ""], ["1", "2", "3"])
    assert sorted(store.list_keys()) == ["", "a", "b/c"]  # PyTorch's FileStore and PrefixStore get it wrong


def test_what_does_not_come_in_time_is_a_store_error(pair):
    pair.ours.set_timeout(SHORT)
    pair.theirs.set_timeout(SHORT)
    pair.agree(
        lambda s: s.get("never"),
        lambda s: s.wait(["never"]),
        lambda s: s.wait(["never"], SHORT),
        lambda s: s.multi_get(["never"]),
        lambda s: s.barrier("never", 2, SHORT),
    )
    with pytest.raises(TimeoutError):
        pair.ours.barrier("nor this", 2)  # PyTorch's PrefixStore goes on waiting


def test_a_timeout_is_also_pythons_and_knows_what_it_was_about(store):
    with pytest.raises(TimeoutError) as raised:
        store.wait(["never"], SHORT)
    error = raised.value
    assert isinstance(error, torch_dist.DistStoreError)
    assert (error.operation, error.reason) == ("wait", "timed out: the key was never set")
    assert error.elapsed >= SHORT.total_seconds()
    assert error.store in str(error)
    assert error.hint in str(error)


def test_the_timeout_is_a_timedelta_that_can_be_changed(pair):
    pair.agree(
        lambda s: s.timeout,
        lambda s: s.set_timeout(timedelta(milliseconds=1234)),
        lambda s: s.timeout,
        lambda s: setattr(s, "timeout", PATIENCE),
    )


def test_a_barrier_of_one_or_nobody_passes(pair):
    pair.agree(lambda s: s.barrier("one", 1))
    for size in [0, -1]:  # of PyTorch's only the TCPStore lets these pass, the others wait
        pair.ours.barrier(f"size {size}", size)


def test_arguments_of_the_wrong_type_are_type_errors(pair):
    pair.agree(
        lambda s: s.set("key", 3),
        lambda s: s.set(3, "value"),
        lambda s: s.set("key"),
        lambda s: s.get(None),
        lambda s: s.add("key", 1.5),
        lambda s: s.add("key", 2**63),
        lambda s: s.check("key"),
        lambda s: s.check(3),
        lambda s: s.wait(["key"], 3),
        lambda s: s.set_timeout(3),
        lambda s: s.multi_set(["key"], "value"),
    )


def test_a_store_cannot_be_pickled_or_copied(pair):
    pair.agree(pickle.dumps, copy.copy, copy.deepcopy)


def test_a_clone_is_another_handle_on_the_same_data(pair):
    pair.agree(
        lambda s: s.set("key", "value"),
        lambda s: s.clone().get("key"),
        lambda s: type(s.clone()) is type(s),
    )


def test_constructors_refuse_what_pytorchs_refuse():
    for call in [
        lambda library: library.TCPStore("127.0.0.1", 70000),
        lambda library: library.TCPStore("127.0.0.1", 0, 0, True),
        lambda library: library.TCPStore(),
        lambda library: library.TCPStore("127.0.0.1", 0, timeout=3),
        lambda library: library.PrefixStore("prefix", None),
        lambda library: library.PrefixStore("prefix", 3),
        lambda library: library.FileStore(3),
        lambda library: library.HashStore(1),
    ]:
        Pair(_tenfold, torch_dist).agree(call)


def test_a_store_that_cannot_be_opened_is_an_error_in_time(tmp_path):
    with pytest.raises(torch_dist.DistNetworkError, match=r"127\.0\.0\.1:1"):
        _tenfold.TCPStore("127.0.0.1", 1, timeout=SHORT)
    with pytest.raises(torch_dist.DistStoreError, match="No such file or directory"):
        _tenfold.FileStore(tmp_path / "missing" / "store")  # PyTorch's tries for 300 s and blocks all threads


def test_a_tcp_store_tells_where_its_server_is():
    host = _tenfold.TCPStore("127.0.0.1", 0, is_master=True)
    other = _tenfold.TCPStore(host_name="127.0.0.1", port=host.port, use_libuv=False)
    assert host.port > 0
    assert (other.host, other.port) == (host.host, host.port) == ("127.0.0.1", host.port)
    assert (host.libuvBackend, other.libuvBackend) == (True, False)


def test_stores_of_one_process_share_a_server_if_they_ask_for_it():
    first = _tenfold.TCPStore("127.0.0.1", 0, is_master=True, multi_tenant=True)
    second = _tenfold.TCPStore("127.0.0.1", first.port, is_master=True, multi_tenant=True)
    first.set("key", "value")
    assert second.get("key") == b"value"
    with pytest.raises(torch_dist.DistNetworkError):
        _tenfold.TCPStore("127.0.0.1", first.port, is_master=True)


def test_a_file_store_tells_its_path_as_given(tmp_path):
    for path in [tmp_path / "store", str(tmp_path / "store")]:
        assert _tenfold.FileStore(path).path == str(path)


def test_a_prefix_store_tells_what_is_below():
    below = _tenfold.HashStore()
    outer = _tenfold.PrefixStore("out", below)
    inner = _tenfold.PrefixStore("in", outer)
    assert inner.underlying_store is outer
    assert inner._underlying_non_prefix_store is below
    inner.set("key", "value")
    assert below.list_keys() == ["out/in/key"]
    theirs = torch_dist.PrefixStore("theirs", torch_dist.HashStore())
    mixed = _tenfold.PrefixStore("ours", theirs)
    assert mixed._underlying_non_prefix_store is theirs.underlying_store
    mixed.set("key", "value")
    assert theirs.get("ours/key") == b"value"


def test_a_fake_store_is_as_fake_as_pytorchs():
    Pair(_tenfold.FakeStore(), FakeStore()).agree(
        lambda s: s.set("key", "value"),
        lambda s: s.get("key"),
        lambda s: s.add("key", 7),
        lambda s: s.check(["key"]),
        lambda s: s.wait(["key"]),
        lambda s: s.delete_key("key"),
        lambda s: s.num_keys(),
        lambda s: s.multi_get(["key"]),
        lambda s: s.multi_set(["key"], ["value"]),
        lambda s: s.append("key", "value"),
        lambda s: s.compare_set("key", "a", "b"),
        lambda s: s.queue_push("key", "value"),
        lambda s: s.barrier("key", 3),
        lambda s: s.has_extended_api(),
    )


# ── waiting ────────────────────────────────────────────────────────────────────────────────────────────────


def blocking(kind: str) -> dict[str, Callable[[Any], Any]]:
    calls = {
        "get": lambda s: s.get("late"),
        "wait": lambda s: s.wait(["late"]),
        "multi_get": lambda s: s.multi_get(["late"]),
        "barrier": lambda s: s.barrier("meeting", 2),
        "queue_pop": lambda s: s.queue_pop("late"),
    }
    if kind == "file":
        del calls["queue_pop"]  # it has no queues
    return calls


def test_a_thread_that_waits_lets_the_others_work(store, kind):
    ends = {
        "barrier": lambda s: s.barrier("meeting", 2),
        "queue_pop": lambda s: s.queue_push("late", "item"),
    }
    for name, call in blocking(kind).items():
        with ThreadPoolExecutor() as threads:
            # On a handle of its own: a TCPStore is a connection, which a thread that waits has to itself.
            waits = threads.submit(call, store.clone())
            ends.get(name, lambda s: s.set("late", "value"))(store)
            waits.result(PATIENCE.total_seconds())
        store.delete_key("late")


@pytest.mark.parametrize(("kind", "call"), [(kind, call) for kind in KINDS for call in blocking(kind)])
def test_ctrl_c_ends_a_wait_and_the_store_can_be_used_again(kind, call, tmp_path):
    waiting = Waiting("interrupted_wait.py", kind, call, tmp_path / "store")
    assert waiting.interrupt() == "interrupted, then value\n"


def test_ctrl_c_ends_a_host_that_waits_for_its_workers(tmp_path):
    waiting = Waiting("interrupted_wait.py", "tcp", "open", tmp_path / "store")
    assert waiting.interrupt() == "interrupted, then value\n"


# ── collectives ────────────────────────────────────────────────────────────────────────────────────────────


def test_collectives_over_a_store(store):
    world = 3

    def rank(number: int) -> list[Any]:
        ranks = _tenfold._StoreCollectives(store.clone(), number, world)
        ranks.barrier("meeting", PATIENCE, True)
        root = number == 1
        return [
            ranks.all_sum("sum", number, PATIENCE),
            ranks.all_gather("all", f"rank {number}", PATIENCE),
            ranks.broadcast_send("b", "news") if root else ranks.broadcast_recv("b", timeout=PATIENCE),
            ranks.gather_recv("g", b"1", PATIENCE) if root else ranks.gather_send("g", str(number), PATIENCE),
            ranks.scatter_send("s", ["a", "b", "c"]) if root else ranks.scatter_recv("s"),
        ]

    with ThreadPoolExecutor(world) as threads:
        results = list(threads.map(rank, range(world)))
    names = [b"rank 0", b"rank 1", b"rank 2"]
    assert results == [
        [3, names, b"news", None, b"a"],
        [3, names, None, [b"0", b"1", b"2"], b"b"],
        [3, names, b"news", None, b"c"],
    ]


def test_a_barrier_that_is_not_complete_names_the_missing_ranks():
    ranks = _tenfold._StoreCollectives(_tenfold.HashStore(), 0, 3)
    with pytest.raises(TimeoutError, match="missing ranks: 1, 2"):
        ranks.barrier("meeting", timeout=SHORT)
    ranks.barrier("another", SHORT, block=False)


# ── under PyTorch ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def adapter(kind: str, tmp_path: Path) -> Any:
    module = tenfold.torch.store
    return {
        "tcp": lambda: module.TCPStore("127.0.0.1", 0, is_master=True),
        "hash": module.HashStore,
        "file": lambda: module.FileStore(tmp_path / "adapter"),
        "prefix": lambda: module.PrefixStore("prefix", _tenfold.HashStore()),
    }[kind]()


def test_pytorchs_own_code_uses_a_store_of_ours(adapter, kind, tmp_path):
    assert isinstance(adapter, torch_dist.Store)
    theirs = make(torch_dist, kind, tmp_path)
    Pair(torch_dist.PrefixStore("p", adapter), torch_dist.PrefixStore("p", theirs)).agree(
        lambda s: s.set("key", "value"),
        lambda s: s.get("key"),
        lambda s: s.add("n", 2),
        lambda s: s.check(["key", "n"]),
        lambda s: s.wait(["key"]),
        lambda s: s.wait(["key"], PATIENCE),
        lambda s: s.compare_set("key", "value", "other"),
        lambda s: s.append("key", "more"),
        lambda s: s.multi_set(["a", "b"], ["1", "2"]),
        lambda s: s.multi_get(["a", "key"]),
        lambda s: s.num_keys(),
        lambda s: s.delete_key("key"),
        lambda s: s.has_extended_api(),
        lambda s: s.barrier("meeting", 1),
        lambda s: s.set_timeout(SHORT),
        lambda s: s.get("never"),
    )
    assert adapter.timeout == SHORT


def test_python_code_gets_the_whole_of_a_store_of_ours(adapter, kind, tmp_path):
    adapter.set_timeout(PATIENCE)
    adapter.set("key", "value")
    assert adapter.clone().get("key") == b"value"
    assert adapter.list_keys() == ["key"]
    pair = Pair(adapter, make(torch_dist, kind, tmp_path))
    test_queues(pair)
    test_set_and_get_take_text_and_bytes_and_give_bytes(pair)
    test_the_timeout_is_a_timedelta_that_can_be_changed(pair)
    test_a_store_cannot_be_pickled_or_copied(pair)


def test_queues_under_pytorchs_prefix_are_what_its_code_does_not_pass_on(adapter):
    with pytest.raises(NotImplementedError):
        torch_dist.PrefixStore("p", adapter).queue_push("q", "item")


@pytest.mark.parametrize(
    "module", [_tenfold, tenfold.torch.store, tenfold.torch.rendezvous], ids=lambda module: module.__name__
)
def test_the_examples_in_the_docstrings_run(module):
    # With PyTorch there the exceptions are of other modules.
    results = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL)
    assert results.attempted > 0
    assert results.failed == 0
