"""Stock PyTorch's clients through `tenfold relay`.

`pytest --server relay` runs all tests of the store server through a relay.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from conftest import connect_to
from servers import TenfoldRelay
from tap import PATIENCE
from torch.distributed import DistStoreError

pytestmark = pytest.mark.tenfold_only("has no relays")


@pytest.fixture
def relay(tmp_path) -> Iterator[TenfoldRelay]:
    running = TenfoldRelay(tmp_path / "server.log", "--drain", "0s")
    yield running
    running.stop()


def test_every_operation_of_a_stock_client_passes_through(relay):
    here, there = connect_to(relay.address), connect_to(relay.server.address)
    here.set("k", "v")
    assert here.get("k") == b"v"
    assert there.get("k") == b"v"
    assert here.add("n", 41) == 41
    assert there.add("n", 1) == 42
    assert here.compare_set("k", "v", "w") == b"w"
    here.append("k", "x")
    here.multi_set(["a", "b"], ["1", "2"])
    assert here.multi_get(["a", "b", "k"]) == [b"1", b"2", b"wx"]
    assert here.check(["a", "b"])
    assert not here.check(["never"])
    assert here.num_keys() == there.num_keys() == 4
    assert sorted(here.list_keys()) == sorted(there.list_keys())
    assert here.delete_key("a")
    assert not here.delete_key("a")
    here.queue_push("q", b"item")
    assert here.queue_len("q") == 1
    assert there.queue_pop("q") == b"item"
    with pytest.raises(DistStoreError):
        here.wait(["never"], timedelta(milliseconds=50))
    assert here.get("k") == b"wx"


def test_many_stock_clients_count_and_wait_together(relay):
    stores = [connect_to(relay.address) for _ in range(16)]
    with ThreadPoolExecutor(len(stores)) as threads:
        numbers = list(threads.map(lambda store: store.add("n", 1), stores))
        assert sorted(numbers) == list(range(1, 17))
        values = [threads.submit(store.get, "key") for store in stores]
        connect_to(relay.server.address).set("key", "value")
        assert [value.result(PATIENCE) for value in values] == [b"value"] * 16
