"""The limits on what one request may carry: exactly reached they hold, one more costs only that client."""

import pytest
from torch.distributed import DistNetworkError

KEY_MAX = 8192 - 1  # the client's slash is the first byte
VALUE_MAX = 8 << 20
KEYS_MAX = 131_072


@pytest.fixture
def witness(connect):
    """Another client, which must not notice."""
    store = connect()
    store.set("witness", "before")
    yield store
    assert store.get("witness") == b"before"
    assert store.add("witness count", 1) == 1
    assert connect().get("witness") == b"before"


def refused(store, call):
    # Writing needs no answer, so that the client may notice with its next request only.
    with pytest.raises(DistNetworkError):  # noqa: PT012
        call(store)
        store.num_keys()


@pytest.mark.parametrize("use_libuv", [True, False], ids=["libuv", "legacy"])
@pytest.mark.parametrize(
    "write",
    [
        lambda s, value: s.set("key", value),
        lambda s, value: s.append("key", value),
        lambda s, value: s.multi_set(["key"], [value]),
        lambda s, value: s.compare_set("key", "", value.decode()),
    ],
    ids=["set", "append", "multi_set", "compare_set"],
)
def test_a_value_of_8_mib_is_taken_and_one_byte_more_is_not(connect, witness, write, use_libuv):
    store = connect(use_libuv=use_libuv)
    write(store, b"x" * VALUE_MAX)
    assert store.get("key") == b"x" * VALUE_MAX
    store.delete_key("key")
    refused(store, lambda s: write(s, b"x" * (VALUE_MAX + 1)))
    assert witness.check(["key"]) is False


def test_a_pushed_item_of_8_mib_is_taken_and_one_byte_more_is_not(connect, witness):
    store = connect()
    store.queue_push("queue", b"x" * VALUE_MAX)
    assert store.queue_pop("queue") == b"x" * VALUE_MAX
    refused(store, lambda s: s.queue_push("queue", b"x" * (VALUE_MAX + 1)))
    assert witness.queue_len("queue") == 0


def test_a_key_of_8_kib_is_taken_and_one_byte_more_is_not(connect, witness):
    store = connect()
    key = "k" * KEY_MAX
    store.set(key, "value")
    assert store.get(key) == b"value"
    assert store.list_keys().count(key) == 1
    refused(store, lambda s: s.set(key + "k", "value"))
    refused(connect(), lambda s: s.check(["short", key + "k"]))
    refused(connect(), lambda s: s.add(key + "k", 1))
    assert witness.num_keys() == 2


def test_a_list_of_131072_keys_is_taken_and_one_more_is_not(connect, witness):
    store = connect()
    keys = ["witness"] * KEYS_MAX
    assert store.check(keys) is True
    store.wait(keys)
    refused(store, lambda s: s.check([*keys, "witness"]))
    refused(connect(), lambda s: s.multi_set(["a"] * (KEYS_MAX + 1), [""] * (KEYS_MAX + 1)))
    assert witness.check(["a"]) is False


def test_appending_grows_a_value_past_what_one_request_may_carry(connect, witness):
    store = connect()
    for part in (b"a", b"b", b"c"):
        store.append("key", part * (4 << 20))
    assert store.get("key") == b"a" * (4 << 20) + b"b" * (4 << 20) + b"c" * (4 << 20)


def test_an_answer_may_be_larger_than_any_request(connect, witness):
    store = connect()
    values = [bytes([i]) * VALUE_MAX for i in range(3)]
    for i, value in enumerate(values):
        store.set(f"key {i}", value)
    assert store.multi_get([f"key {i}" for i in (2, 0, 1)]) == [values[2], values[0], values[1]]
