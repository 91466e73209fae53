"""Every operation of torch's TCPStore client, one client at a time."""

from datetime import timedelta

import pytest
from torch.distributed import DistNetworkError, DistStoreError, QueueEmptyError

MAX = 2**63 - 1


def assert_connection_lost(store):
    with pytest.raises(DistNetworkError) as lost:
        store.num_keys()
    assert str(lost.value) in (
        "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",
        "Connection reset by peer",
        "Broken pipe",
    )


@pytest.mark.smoke
def test_get_returns_what_set_stored_and_set_overwrites(store):
    store.set("key", "one")
    assert store.get("key") == b"one"
    store.set("key", b"two")
    assert store.get("key") == b"two"


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/",
        "a/b//c",
        "ключ",
        "鍵🔑",
        "with space",
        "nul\0inside",
        b"\0",
        b"\xff\xfe not UTF-8",
        b"\x80" * 100,
    ],
)
def test_any_bytes_make_a_key(store, key):
    other = key + (b"." if isinstance(key, bytes) else ".")
    store.set(key, "value")
    assert store.check([key]) is True
    assert store.check([other]) is False
    assert store.get(key) == b"value"
    assert store.add(other, 1) == 1
    assert store.num_keys() == 2
    assert store.delete_key(key) is True
    assert store.check([key]) is False


@pytest.mark.parametrize("value", [b"", b"\0", bytes(range(256)), b"\r\n", b"\0" * 1000], ids=repr)
def test_any_bytes_make_a_value(store, value):
    store.set("key", value)
    assert store.get("key") == value
    store.set("key", bytearray(value))
    assert store.get("key") == value


def test_a_text_value_is_stored_as_utf_8(store):
    store.set("key", "zwölf 🔟")
    assert store.get("key") == "zwölf 🔟".encode()


@pytest.mark.parametrize("size", [1, 1439, 1440, 1441, 65535, 65536, 65537, 8 << 20])
def test_values_of_every_size_come_back_whole(store, size):
    value = bytes(range(251)) * (size // 251 + 1)
    value = value[:size]
    store.set("key", value)
    assert store.get("key") == value


def test_add_counts_from_zero_and_takes_negative_steps(store):
    assert store.add("counter", 0) == 0
    assert store.add("counter", 5) == 5
    assert store.add("counter", -7) == -2
    assert store.get("counter") == b"-2"
    assert store.add("other", -1) == -1


@pytest.mark.parametrize(
    ("value", "total"),
    [("41", 42), ("-1", 0), ("  8", 9), ("\t\n+5", 6), ("12abc", 13), ("007", 8), ("0x10", 1), ("3 4", 4)],
)
def test_add_reads_a_number_as_c_does(store, value, total):
    store.set("key", value)
    assert store.add("key", 1) == total
    assert store.get("key") == str(total).encode()


def test_add_wraps_around_at_64_bits(store):
    assert store.add("key", MAX) == MAX
    assert store.add("key", 1) == -MAX - 1
    assert store.get("key") == str(-MAX - 1).encode()
    assert store.add("key", -1) == MAX


@pytest.mark.parametrize("value", ["", "abc", "-", " ", str(MAX + 1), str(-MAX - 2), "\0" + "1"], ids=repr)
def test_add_to_what_is_no_number_costs_that_client_its_connection_and_nothing_else(connect, value):
    store, witness = connect(), connect()
    store.set("key", value)
    with pytest.raises(DistNetworkError):
        store.add("key", 1)
    assert_connection_lost(store)
    assert witness.get("key") == value.encode()


def test_check_wants_every_key(store):
    assert store.check([]) is True
    assert store.check(["a"]) is False
    store.set("a", "")
    assert store.check(["a"]) is True
    assert store.check(["a", "b"]) is False
    store.set("b", "")
    assert store.check(["b", "a", "b"]) is True


def test_wait_for_keys_that_exist_returns_at_once(store):
    store.multi_set(["a", "b"], ["", ""])
    store.wait(["a"])
    store.wait(["b", "a", "b"], timedelta(seconds=30))
    store.wait([])


def test_compare_set_on_a_missing_key_creates_it_if_nothing_is_expected(store):
    assert store.compare_set("key", "", "new") == b"new"
    assert store.get("key") == b"new"


def test_compare_set_on_a_missing_key_returns_the_expectation_if_there_is_one(store):
    assert store.compare_set("key", "old", "new") == b"old"
    assert store.check(["key"]) is False


def test_compare_set_replaces_the_expected_value(store):
    store.set("key", "old")
    assert store.compare_set("key", "old", "new") == b"new"
    assert store.get("key") == b"new"
    store.set("key", "")
    assert store.compare_set("key", "", "newer") == b"newer"
    assert store.get("key") == b"newer"


def test_compare_set_returns_an_unexpected_value_and_leaves_it(store):
    store.set("key", "other")
    assert store.compare_set("key", "old", "new") == b"other"
    assert store.compare_set("key", "", "new") == b"other"
    assert store.compare_set("key", "othe", "new") == b"other"
    assert store.get("key") == b"other"


def test_compare_set_takes_any_bytes(store):
    # torch's binding takes str only here; UTF-8 and NUL get through.
    assert store.compare_set("key", "", "\0ü") == "\0ü".encode()
    assert store.compare_set("key", "\0ü", "") == b""
    assert store.get("key") == b""


def test_delete_key_says_whether_there_was_one(store):
    store.set("key", "")
    assert store.delete_key("key") is True
    assert store.delete_key("key") is False
    assert store.num_keys() == 0


def test_num_keys_counts_keys_but_not_queues(connect):
    store = connect()
    assert store.num_keys() == 0
    store.set("a", "")
    store.add("b", 1)
    store.append("c", "x")
    store.multi_set(["c", "d"], ["", ""])
    store.compare_set("e", "", "x")
    store.queue_push("queue", "x")
    assert store.num_keys() == 5


def test_append_creates_and_extends(store):
    store.append("key", "ab")
    store.append("key", "")
    store.append("key", "cd")
    assert store.get("key") == b"abcd"
    store.append("empty", "")
    assert store.get("empty") == b""


def test_multi_get_answers_in_the_order_asked(store):
    store.multi_set(["a", "b", "c", "a"], ["1", "2", "", "3"])
    assert store.multi_get(["c", "a", "b", "a"]) == [b"", b"3", b"2", b"3"]
    assert store.multi_get([]) == []
    store.multi_set([], [])
    assert store.num_keys() == 3


def test_multi_set_and_multi_get_carry_thousands_of_keys(store):
    keys = [f"key {i}" for i in range(5000)]
    values = [str(i).encode() * (i % 50) for i in range(5000)]
    store.multi_set(keys, values)
    assert store.multi_get(keys) == values
    assert store.num_keys() == 5000


def test_multi_set_of_unequal_lists_sends_nothing(store):
    with pytest.raises(DistStoreError, match=r"^multiSet keys and values vectors must be of same size$"):
        store.multi_set(["a", "b"], ["1"])
    assert store.num_keys() == 0


def test_list_keys_lists_what_clients_wrote(store):
    assert store.list_keys() == []
    store.multi_set(["a", "b/c", "", "ключ"], ["", "", "", ""])
    store.add("n", 1)
    assert sorted(store.list_keys()) == sorted(["a", "b/c", "", "ключ", "n"])
    store.delete_key("a")
    assert "a" not in store.list_keys()


def test_list_keys_of_a_key_that_is_no_text_fails_in_the_client_alone(store):
    store.set(b"\xff", "")
    with pytest.raises(UnicodeDecodeError):
        store.list_keys()
    assert store.num_keys() == 1


def test_a_world_size_counts_the_client_under_a_hidden_key(server, connect):
    from torch.distributed import TCPStore

    clients = [TCPStore(server.host, server.port, world_size=2) for _ in range(2)]
    assert clients[0].num_keys() == 1
    assert clients[0].list_keys() == []
    assert connect().num_keys() == 1


def test_queues_are_first_in_first_out(connect):
    store = connect()
    assert store.queue_len("queue") == 0
    for item in (b"one", b"", b"\0three", b"x" * 100_000):
        store.queue_push("queue", item)
    assert store.queue_len("queue") == 4
    assert store.queue_pop("queue") == b"one"
    assert store.queue_pop("queue", block=False) == b""
    assert store.queue_pop("queue", True) == b"\0three"
    assert store.queue_len("queue") == 1
    assert store.queue_pop("queue") == b"x" * 100_000
    assert store.queue_len("queue") == 0


def test_popping_an_empty_queue_without_blocking_says_so(connect):
    store = connect()
    for _ in range(2):
        with pytest.raises(QueueEmptyError, match=r"^queue is empty$"):
            store.queue_pop("queue", block=False)
    store.queue_push("queue", "x")
    assert store.queue_pop("queue", block=False) == b"x"
    with pytest.raises(QueueEmptyError):
        store.queue_pop("queue", block=False)


def test_a_queue_and_a_key_of_one_name_are_two_things(connect):
    store = connect()
    store.queue_push("name", "item")
    assert store.check(["name"]) is True
    assert store.num_keys() == 0
    assert store.list_keys() == []
    assert store.delete_key("name") is False
    store.set("name", "value")
    assert store.delete_key("name") is True
    assert store.queue_len("name") == 1
    store.set("name", "value")
    assert store.get("name") == b"value"
    assert store.queue_pop("name") == b"item"
    with pytest.raises(QueueEmptyError):
        store.queue_pop("name")  # the key of that name satisfies the wait; the queue is empty all the same
    assert store.get("name") == b"value"


def test_an_emptied_queue_no_longer_counts_as_present(connect):
    store = connect()
    store.queue_push("queue", "x")
    store.queue_pop("queue")
    assert store.check(["queue"]) is False


def test_a_legacy_client_refuses_queues_itself_and_stays_usable(connect):
    store = connect(use_libuv=False)
    for call in (
        lambda: store.queue_push("q", "x"),
        lambda: store.queue_pop("q"),
        lambda: store.queue_len("q"),
    ):
        with pytest.raises(NotImplementedError, match=r"^queues not implemented on legacy TCPStore backend$"):
            call()
    assert store.num_keys() == 0


def test_a_barrier_of_one_passes_and_counts_as_a_key(store):
    store.barrier("barrier", 1)
    assert store.get("barrier") == b"1"
    store.barrier("barrier", 1)
    store.barrier("barrier", 3)
    assert store.get("barrier") == b"3"
    store.barrier("another", 0)
    store.barrier("another", -5, timedelta(seconds=30))
    assert store.get("another") == b"2"


def test_a_barrier_on_what_is_no_number_costs_the_connection(connect):
    store, witness = connect(), connect()
    store.set("key", "junk")
    with pytest.raises(DistNetworkError):
        store.barrier("key", 1)
    assert witness.get("key") == b"junk"


def test_clone_is_another_connection_to_the_same_data(store):
    store.set_timeout(timedelta(seconds=7))
    clone = store.clone()
    assert clone.timeout == timedelta(seconds=7)
    assert (clone.host, clone.port) == (store.host, store.port)
    clone.set("key", "value")
    assert store.get("key") == b"value"
    del store
    assert clone.clone().get("key") == b"value"


def test_the_client_knows_its_api_and_its_timeout(store, server):
    assert store.has_extended_api() is True
    assert store.timeout == timedelta(seconds=30)
    store.set_timeout(timedelta(milliseconds=1234))
    assert store.timeout == timedelta(milliseconds=1234)
    assert (store.host, store.port) == (server.host, server.port)
    assert store.num_keys() == 0


def test_what_one_client_leaves_the_next_one_finds(connect):
    first = connect()
    first.set("key", "value")
    first.queue_push("queue", "item")
    first.num_keys()  # an answer: the writes before it have been served
    del first
    second = connect()
    assert second.get("key") == b"value"
    assert second.queue_pop("queue", block=False) == b"item"
