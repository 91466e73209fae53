"""Hundreds of clients at the same time: nothing is lost, nothing is counted twice, all clients pass."""

from concurrent.futures import ThreadPoolExecutor

from processes import python, run_together

CLIENTS = 200
ROUNDS = 25


def test_200_clients_in_threads_add_up_exactly_and_meet_at_a_barrier(connect):
    def work(client):
        store = connect(timeout=60)
        answers = [store.add("count", 1) for _ in range(ROUNDS)]
        store.set(f"client/{client}", str(client))
        store.queue_push("arrivals", str(client))
        store.barrier("done", CLIENTS)
        assert store.get("count") == str(CLIENTS * ROUNDS).encode()
        assert store.get(f"client/{(client + 1) % CLIENTS}") == str((client + 1) % CLIENTS).encode()
        return answers, int(store.queue_pop("arrivals"))

    with ThreadPoolExecutor(CLIENTS) as threads:
        results = list(threads.map(work, range(CLIENTS)))
    # Each sum was seen by exactly one client, and by each client in rising order.
    assert sorted(sum for answers, _ in results for sum in answers) == list(range(1, CLIENTS * ROUNDS + 1))
    assert all(answers == sorted(answers) for answers, _ in results)
    assert sorted(popped for _, popped in results) == list(range(CLIENTS))
    store = connect()
    assert store.num_keys() == CLIENTS + 2
    assert store.queue_len("arrivals") == 0


def test_200_clients_in_4_processes_add_up_exactly_and_meet_at_a_barrier(server, connect, tmp_path):
    command = python("adders.py", server.host, server.port, CLIENTS // 4, ROUNDS, CLIENTS)
    run_together([command] * 4, tmp_path)
    store = connect()
    assert store.get("done") == str(CLIENTS).encode()
    assert store.get("count") == str(CLIENTS * ROUNDS).encode()


def test_a_lock_made_of_compare_set_lets_one_in_at_a_time(connect):
    def work(client):
        store = connect(timeout=60)
        for _ in range(10):
            while store.compare_set("lock", "free", f"client {client}") != f"client {client}".encode():
                pass
            # Read, then write: only a holder that is alone makes this exact.
            store.set("n", str(int(store.get("n")) + 1))
            assert store.compare_set("lock", f"client {client}", "free") == b"free"

    store = connect()
    store.multi_set(["lock", "n"], ["free", "0"])
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    assert store.multi_get(["n", "lock"]) == [b"80", b"free"]
