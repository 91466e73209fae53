"""Who waits, who is woken, and what a timeout says.

Wherever a client must be blocked first, `block` has made sure that the server has parked it (see tap.py).
"""

from datetime import timedelta

import pytest
from tap import barrier_request, wait_request
from torch.distributed import DistNetworkError, DistStoreError

SHORT = timedelta(milliseconds=300)

KINDS = pytest.mark.parametrize("use_libuv", [True, False], ids=["libuv", "legacy"])


def assert_times_out(call, text):
    with pytest.raises(DistStoreError) as timeout:
        call()
    assert type(timeout.value) is DistStoreError
    assert str(timeout.value) == text


@KINDS
@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda s: s.get("a"), "wait timeout after 300ms, keys: /a"),
        (lambda s: s.wait(["a", "b"]), "wait timeout after 300ms, keys: /a, /b"),
        (lambda s: s.wait(["a"], timedelta(milliseconds=50)), "wait timeout after 50ms, keys: /a"),
        (lambda s: s.wait(["a"], timedelta(0)), "wait timeout after 0ms, keys: /a"),
        (lambda s: s.wait(["present", "a"]), "wait timeout after 300ms, keys: /present, /a"),
        (lambda s: s.multi_get(["a", "present"]), "wait timeout after 300ms, keys: /a, /present"),
        (lambda s: s.barrier("b", 2), "barrier timeout after 300ms, key: b"),
        (lambda s: s.barrier("b", 2, timedelta(milliseconds=50)), "barrier timeout after 50ms, key: b"),
    ],
)
def test_a_timeout_is_a_store_error_that_names_the_keys_and_leaves_the_client_usable(
    connect, use_libuv, call, text
):
    store = connect(timeout=SHORT.total_seconds(), use_libuv=use_libuv)
    store.set("present", "")
    assert_times_out(lambda: call(store), text)
    assert_times_out(lambda: call(store), text) if "barrier" not in text else None
    store.set_timeout(timedelta(seconds=30))
    store.set("a", "value")
    assert store.get("a") == b"value"
    assert store.check(["a", "b"]) is ("barrier" in text)


def test_a_blocking_pop_times_out_like_a_wait(connect):
    store = connect(timeout=SHORT.total_seconds())
    assert_times_out(lambda: store.queue_pop("queue"), "wait timeout after 300ms, keys: /queue")
    store.queue_push("queue", "x")
    assert store.queue_pop("queue") == b"x"


def test_a_timed_out_wait_is_forgotten_by_the_server(connect):
    store, writer = connect(timeout=SHORT.total_seconds()), connect()
    assert_times_out(lambda: store.get("a"), "wait timeout after 300ms, keys: /a")
    store.set_timeout(timedelta(seconds=30))
    # Were the old wait still registered, this write would answer it in the middle of the next request.
    writer.set("a", "late")
    assert store.add("n", 1) == 1
    assert store.get("a") == b"late"
    assert store.num_keys() == 2


def test_a_timed_out_popper_does_not_swallow_an_item(connect):
    gone, popper = connect(timeout=SHORT.total_seconds()), connect()
    assert_times_out(lambda: gone.queue_pop("queue"), "wait timeout after 300ms, keys: /queue")
    popper.queue_push("queue", "item")
    assert popper.queue_len("queue") == 1
    assert popper.queue_pop("queue") == b"item"


def test_a_timed_out_barrier_arrival_stays_counted(connect):
    store = connect(timeout=SHORT.total_seconds())
    assert_times_out(lambda: store.barrier("b", 2), "barrier timeout after 300ms, key: b")
    assert store.get("b") == b"1"
    store.barrier("b", 2)
    assert store.get("b") == b"2"


@KINDS
@pytest.mark.parametrize(
    ("write", "value"),
    [
        (lambda s: s.set("key", "value"), b"value"),
        (lambda s: s.set("key", ""), b""),
        (lambda s: s.add("key", 7), b"7"),
        (lambda s: s.append("key", "tail"), b"tail"),
        (lambda s: s.multi_set(["other", "key"], ["", "many"]), b"many"),
        (lambda s: s.compare_set("key", "", "swapped"), b"swapped"),
        (lambda s: s.barrier("key", 1), b"1"),
    ],
    ids=["set", "set empty", "add", "append", "multi_set", "compare_set", "barrier"],
)
def test_a_blocked_get_is_woken_by_whatever_creates_the_key(connect, block, use_libuv, write, value):
    blocked = block(lambda s: s.get("key"), wait_request("key"), use_libuv=use_libuv)
    write(connect())
    assert blocked.result() == value


def test_other_keys_leave_a_blocked_get_alone(connect, block):
    blocked = block(lambda s: s.get("key"), wait_request("key"))
    writer = connect()
    writer.set("ke", "")
    writer.set("key2", "")
    writer.multi_set(["", "Key"], ["", ""])
    writer.delete_key("key")
    writer.queue_push("key2", "")
    assert writer.check(["key"]) is False
    assert blocked.is_still_parked()
    writer.set("key", "value")
    assert blocked.result() == b"value"


def test_a_wait_for_several_keys_ends_with_the_last_of_them(connect, block):
    writer = connect()
    writer.set("b", "")
    blocked = block(lambda s: s.wait(["a", "b", "c", "a"]), wait_request("a", "b", "c", "a"))
    writer.set("a", "")
    writer.set("a", "again")
    assert writer.num_keys() == 2
    assert blocked.is_still_parked()
    writer.set("c", "")
    assert blocked.result() is None


def test_a_blocked_multi_get_returns_all_values(connect, block):
    blocked = block(lambda s: s.multi_get(["a", "b"]), wait_request("a", "b"))
    connect().multi_set(["b", "a"], ["2", "1"])
    assert blocked.result() == [b"1", b"2"]


def test_one_write_wakes_every_blocked_get(connect, block):
    blocked = [block(lambda s: s.get("key"), wait_request("key")) for _ in range(8)]
    connect().set("key", "value")
    assert [b.result() for b in blocked] == [b"value"] * 8


@pytest.mark.tenfold_only("every COMPARE_SET releases the waiters, so that a get returns b''")
def test_a_failed_compare_set_wakes_nobody(connect, block):
    blocked = block(lambda s: s.get("key"), wait_request("key"))
    writer = connect()
    assert writer.compare_set("key", "expected", "new") == b"expected"
    assert blocked.is_still_parked()
    assert writer.compare_set("key", "", "new") == b"new"
    assert blocked.result() == b"new"


def test_a_key_deleted_during_a_wait_does_not_take_it_back(connect, block):
    writer = connect()
    writer.set("a", "")
    blocked = block(lambda s: s.wait(["a", "b"]), wait_request("a", "b"))
    writer.delete_key("a")
    assert blocked.is_still_parked()
    writer.set("b", "")
    assert blocked.result() is None


def test_a_blocked_pop_takes_the_pushed_item(connect, block):
    blocked = block(lambda s: s.queue_pop("queue"), wait_request("queue"))
    pusher = connect()
    pusher.queue_push("queue", "item")
    assert blocked.result() == b"item"
    assert pusher.queue_len("queue") == 0


def test_each_push_wakes_one_of_two_poppers_and_the_oldest_first(connect, block):
    older = block(lambda s: s.queue_pop("queue"), wait_request("queue"))
    younger = block(lambda s: s.queue_pop("queue"), wait_request("queue"))
    pusher = connect()
    pusher.queue_push("queue", "first")
    assert older.result() == b"first"
    assert younger.is_still_parked()
    pusher.queue_push("queue", "second")
    assert younger.result() == b"second"
    assert pusher.queue_len("queue") == 0


def test_two_pushes_in_a_row_serve_two_poppers(connect, block):
    poppers = [block(lambda s: s.queue_pop("queue"), wait_request("queue")) for _ in range(2)]
    pusher = connect()
    pusher.queue_push("queue", "a")
    pusher.queue_push("queue", "b")
    assert {p.result() for p in poppers} == {b"a", b"b"}


def test_a_popper_that_dies_leaves_the_item_to_the_next(connect, block):
    dead = block(lambda s: s.queue_pop("queue"), wait_request("queue"))
    heir = block(lambda s: s.queue_pop("queue"), wait_request("queue"))
    dead.tap.close()
    with pytest.raises(DistNetworkError):
        dead.result()
    pusher = connect()
    # Should the server not have noticed yet, it wakes the dead one first, and the item stays queued.
    pusher.queue_push("queue", "one")
    pusher.queue_push("queue", "two")
    first = heir.result()
    rest = [pusher.queue_pop("queue", block=False) for _ in range(pusher.queue_len("queue"))]
    assert [first, *rest] == [b"one", b"two"]


def test_a_push_also_satisfies_a_wait_for_that_name(connect, block):
    blocked = block(lambda s: s.wait(["name"]), wait_request("name"))
    pusher = connect()
    pusher.queue_push("name", "item")
    assert blocked.result() is None
    assert pusher.queue_len("name") == 1


@pytest.mark.tenfold_only("counts the non-empty queue as missing, and the key does not end the wait")
def test_a_wait_for_a_full_queue_and_a_missing_key_ends_with_the_key(connect, block):
    writer = connect()
    writer.queue_push("queue", "item")
    blocked = block(lambda s: s.wait(["queue", "key"]), wait_request("queue", "key"))
    assert writer.check(["queue"]) is True
    writer.set("key", "")
    assert blocked.result() is None
    assert writer.queue_pop("queue") == b"item"


def test_a_wait_for_an_empty_queue_and_a_missing_key_needs_both(connect, block):
    blocked = block(lambda s: s.wait(["queue", "key"]), wait_request("queue", "key"))
    writer = connect()
    writer.set("key", "")
    assert writer.check(["key"]) is True
    assert blocked.is_still_parked()
    writer.queue_push("queue", "item")
    assert blocked.result() is None


@pytest.mark.tenfold_only("a woken popper stays registered, and a later push ends its next, unrelated wait")
def test_a_popper_once_served_is_not_woken_by_later_pushes(connect, block):
    def pop_then_get(store):
        return store.queue_pop("queue"), store.get("unrelated")

    blocked = block(pop_then_get, wait_request("queue"))
    writer = connect()
    writer.queue_push("queue", "item")
    blocked.tap.until_served(wait_request("unrelated"))
    before = blocked.tap.replies()
    writer.queue_push("queue", "another")
    assert writer.queue_len("queue") == 1
    assert blocked.tap.replies() == before
    writer.set("unrelated", "value")
    assert blocked.result() == (b"item", b"value")


@KINDS
def test_a_barrier_opens_with_the_last_arrival(connect, block, use_libuv):
    first, second = (
        block(lambda s: s.barrier("b", 3), barrier_request("b", 3), use_libuv=use_libuv) for _ in range(2)
    )
    last = connect()
    assert last.get("b") == b"2"
    assert first.is_still_parked()
    assert second.is_still_parked()
    last.barrier("b", 3)
    assert [first.result(), second.result()] == [None, None]
    assert last.get("b") == b"3"
    last.barrier("b", 3)  # once open, always open


def test_a_blocked_client_does_not_hinder_others(connect, block):
    blocked = block(lambda s: s.get("key"), wait_request("key"))
    other = connect()
    for i in range(1000):
        assert other.add("n", 1) == i + 1
    assert blocked.is_still_parked()
    other.set("key", "value")
    assert blocked.result() == b"value"
