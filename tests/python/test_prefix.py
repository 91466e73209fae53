"""torch's PrefixStore over a client: it sees its own names only, and the server sees the whole ones."""

from datetime import timedelta

import pytest
from tap import wait_request
from torch.distributed import DistStoreError, PrefixStore, QueueEmptyError


def test_every_operation_works_under_a_prefix(store):
    prefixed = PrefixStore("p", store)
    prefixed.set("a", "1")
    assert store.get("p/a") == b"1"
    assert prefixed.get("a") == b"1"
    assert prefixed.add("n", 3) == 3
    assert prefixed.check(["a", "n"]) is True
    assert prefixed.check(["p/a"]) is False
    prefixed.wait(["a"], timedelta(seconds=30))
    assert prefixed.compare_set("a", "1", "2") == b"2"
    prefixed.append("a", "3")
    prefixed.multi_set(["x", "y"], ["10", "20"])
    assert prefixed.multi_get(["y", "a", "x"]) == [b"20", b"23", b"10"]
    assert sorted(prefixed.list_keys()) == ["a", "n", "x", "y"]
    assert prefixed.delete_key("x") is True
    assert prefixed.delete_key("x") is False
    assert prefixed.num_keys() == store.num_keys() == 3
    assert prefixed.has_extended_api() is True
    assert sorted(store.list_keys()) == ["p/a", "p/n", "p/y"]


def test_prefixes_nest(store):
    nested = PrefixStore("in", PrefixStore("out", store))
    nested.set("key", "value")
    assert store.list_keys() == ["out/in/key"]
    assert nested.get("key") == b"value"
    store.set("out/in/other", "too")
    assert nested.get("other") == b"too"
    assert nested.clone().get("key") == b"value"


def test_two_prefixes_do_not_meet(store):
    one, two = PrefixStore("one", store), PrefixStore("two", store)
    one.set("key", "1")
    two.set("key", "2")
    assert (one.get("key"), two.get("key")) == (b"1", b"2")
    one.delete_key("key")
    assert two.check(["key"]) is True


def test_queues_take_the_prefix_too(connect):
    store = connect()
    prefixed = PrefixStore("p", store)
    prefixed.queue_push("queue", "item")
    assert store.queue_len("p/queue") == prefixed.queue_len("queue") == 1
    assert prefixed.queue_pop("queue") == b"item"
    with pytest.raises(QueueEmptyError, match=r"^queue is empty$"):
        prefixed.queue_pop("queue", block=False)


def test_a_timeout_names_the_whole_key(connect):
    store = connect(timeout=0.3)
    nested = PrefixStore("in", PrefixStore("out", store))
    for call, text in (
        (lambda: nested.get("key"), "wait timeout after 300ms, keys: /out/in/key"),
        (lambda: nested.wait(["a", "b"]), "wait timeout after 300ms, keys: /out/in/a, /out/in/b"),
        (lambda: nested.queue_pop("queue"), "wait timeout after 300ms, keys: /out/in/queue"),
        (
            # Without a timeout of its own it would take PrefixStore's 300 s, not the client's.
            lambda: nested.barrier("b", 2, timedelta(milliseconds=50)),
            "wait timeout after 50ms, keys: /out/in/b/last_member",
        ),
    ):
        with pytest.raises(DistStoreError) as timeout:
            call()
        assert type(timeout.value) is DistStoreError
        assert str(timeout.value) == text


def test_a_barrier_under_a_prefix_uses_plain_keys(connect, block):
    blocked = block(lambda s: PrefixStore("p", s).barrier("b", 2), wait_request("p/b/last_member"))
    store = connect()
    assert store.get("p/b/num_members") == b"1"
    PrefixStore("p", store).barrier("b", 2)
    assert blocked.result() is None
    assert store.get("p/b/last_member") == b"1"


def test_a_get_under_a_prefix_is_woken_through_another(connect, block):
    blocked = block(lambda s: PrefixStore("a/b", s).get("key"), wait_request("a/b/key"))
    PrefixStore("b", PrefixStore("a", connect())).set("key", "value")
    assert blocked.result() == b"value"
