"""Groups, works and registries that behave as c10d's: the same calls with PyTorch's classes and with ours."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy
import pytest
import tenfold
import torch
from torch._C import _distributed_c10d as c10d


def test_a_group_without_a_backend_says_so():
    for library in [c10d, tenfold.c10d]:
        group = library.ProcessGroup(1, 2)
        assert (group.rank(), group.size(), group.name(), group.group_desc) == (1, 2, "undefined", "")
        with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
            group.allreduce([torch.ones(1)])
        with pytest.raises(RuntimeError, match="ProcessGroup name not set"):
            group.group_name  # noqa: B018
        with pytest.raises(TypeError):
            library.ProcessGroup(1)


def test_a_backend_written_in_python_is_used():
    class Doubling(tenfold.c10d.Backend):
        def allreduce(self, tensors, opts):
            for tensor in tensors:
                tensor *= self.size()
            return tenfold.c10d.FakeWork()

    group = tenfold.c10d.ProcessGroup(0, 2)
    group._register_backend("cpu", group.CUSTOM, Doubling(0, 2))
    tensor = torch.ones(2)
    group.allreduce(tensor).wait()
    assert tensor.tolist() == [2, 2]
    with pytest.raises(RuntimeError, match="Backend Doubling does not support barrier"):
        group.barrier()


def test_the_registry_answers_as_c10ds():
    for library in [c10d, tenfold.c10d]:
        group = library.ProcessGroup(0, 1)
        library._register_process_group("registered once", group)
        assert library._resolve_process_group("registered once") is group
        with pytest.raises(RuntimeError, match="already registered under the name"):
            library._register_process_group("registered once", group)
        library._unregister_process_group("registered once")
        library._unregister_process_group("registered once")
        assert not library._is_process_group_registered("registered once")
        with pytest.raises(RuntimeError, match="Could not resolve the process group registered under"):
            library._resolve_process_group("registered once")


def test_a_work_of_a_callback_is_over_when_the_callback_says_so():
    for library in [c10d, tenfold.c10d]:
        asked: list[timedelta] = []
        work = library.PythonCallbackWork(lambda timeout, asked=asked: bool(asked.append(timeout) or True))
        assert work.wait(timedelta(seconds=3))
        assert asked == [timedelta(seconds=3)]
        failing = library.PythonCallbackWork(lambda timeout: 1 / 0)
        with pytest.raises(Exception, match="division by zero"):
            failing.wait()


def test_a_work_of_a_future_is_over_when_the_future_is():
    for library, future in [(c10d, torch.futures.Future()), (tenfold.c10d, tenfold.Future())]:
        work = library._create_work_from_future(future)
        assert not work.is_completed()
        future.set_result([torch.ones(1)])
        assert work.is_completed()
        assert work.wait()
        assert work.get_future().value()[0].item() == 1


SPLITS: list[dict[str, Any]] = [
    {},
    {"timeout": timedelta(seconds=7)},
    {"group_name": "part"},
    {"group_desc": "described"},
    {"timeout": timedelta(seconds=8), "group_name": "last"},
]


def with_a_backend(library: Any) -> Any:
    """A group of one rank, in c10d with Gloo."""
    store = library.HashStore()
    if library is tenfold.c10d:
        group = tenfold.c10d.ProcessGroup(0, 1)
        backend = tenfold.c10d.ProcessGroupTenfold(store, 0, 1, timedelta(seconds=50), name="whole")
        group._register_backend("cpu", group.CUSTOM, backend)
        group._store = store
    else:
        group = c10d.ProcessGroup(store, 0, 1)
        group._set_default_backend(c10d.ProcessGroup.BackendType.GLOO)
        backend = c10d.ProcessGroupGloo(c10d.PrefixStore("gloo", store), 0, 1, timedelta(seconds=50))
        group._register_backend(torch.device("cpu"), c10d.ProcessGroup.BackendType.GLOO, backend)
    group._set_group_name("whole")
    group._set_group_desc("of one rank")
    return group, store


def told_of(group: Any) -> list[Any]:
    options = group._get_backend(torch.device("cpu")).options
    return [group.group_name, group.group_desc, options._timeout, options.group_name]


def test_a_group_is_split_as_c10ds_is(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    answers = []
    for library in [c10d, tenfold.c10d]:
        group, store = with_a_backend(library)
        parts = [group.split_group([0], **options) for options in SPLITS]
        parts[-1].get_group_store().set("of the part", "")
        refusals = []
        for ranks in [[], [0, 0], [0, 1]]:
            with pytest.raises(RuntimeError) as refused:
                group.split_group(ranks)
            refusals.append(
                "cannot be empty" in str(refused.value) or "should be no larger" in str(refused.value)
            )
        keys = [key for key in store.list_keys() if "of the part" in key]
        answers.append(([told_of(part) for part in parts], told_of(group)[:3], refusals, keys))
    assert answers[0] == answers[1]


def test_options_given_to_a_split_have_their_timeout_unless_one_is_given():
    group, _ = with_a_backend(tenfold.c10d)
    options = tenfold.c10d.Backend.Options("tenfold", timedelta(seconds=9))
    assert told_of(group.split_group([0], opts=options))[2] == timedelta(seconds=9)
    part = group.split_group([0], opts=options, timeout=timedelta(seconds=8), group_name="other")
    assert told_of(part)[2] == timedelta(seconds=8)
    assert (options._timeout, options.group_name) == (timedelta(seconds=9), ""), "options are not written to"


def test_groups_merge_into_one_whose_ranks_are_drawn(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for library in [c10d, tenfold.c10d]:
        store, ranks = library.HashStore(), []

        def merge(library=library, store=store, ranks=ranks) -> None:
            group, _ = with_a_backend(library)
            whole = group.merge_remote_group(store, 3, timedelta(seconds=60), "merged")
            tensor = torch.tensor([1 << whole.rank()])
            whole.allreduce([tensor]).wait()
            ranks.append((whole.rank(), whole.size(), tensor.item(), whole.group_name, whole.group_desc))

        threads = [threading.Thread(target=merge) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(ranks) == [(rank, 3, 7, "merged", "of one rank:merge") for rank in range(3)]


def test_a_rank_too_many_is_told_so_when_groups_merge():
    group, _ = with_a_backend(tenfold.c10d)
    store = tenfold.HashStore()
    group.merge_remote_group(store, 1)
    with pytest.raises(RuntimeError, match="2 ranks joined a group of 1"):
        group.merge_remote_group(store, 1)


def in_a_thread(call: Any) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def test_the_current_group_is_one_of_each_thread():
    for library in [c10d, tenfold.c10d]:
        mine, theirs = library.ProcessGroup(0, 1), library.ProcessGroup(0, 1)
        before = library._current_process_group()
        library._set_process_group(mine)

        def other(library=library, group=theirs) -> Any:
            first = library._current_process_group()
            library._set_process_group(group)
            return first, library._current_process_group()

        assert in_a_thread(other) == (None, theirs)
        assert library._current_process_group() is mine
        library._set_process_group(before)


def test_threads_that_are_isolated_have_names_of_their_own():
    for library in [c10d, tenfold.c10d]:
        first, second = library.ProcessGroup(0, 1), library.ProcessGroup(1, 2)  # c10d does not keep them
        library._set_thread_isolation_mode(True)
        try:
            library._register_process_group("of this thread", first)
            assert library._resolve_process_group("of this thread").rank() == 0

            def other(library=library, group=second) -> Any:
                known = library._is_process_group_registered("of this thread")
                library._register_process_group("of this thread", group)
                return known, library._resolve_process_group("of this thread").rank()

            assert in_a_thread(other) == (False, 1)
            assert library._resolve_process_group("of this thread").rank() == 0
            library._unregister_process_group("of this thread")
        finally:
            library._set_thread_isolation_mode(False)


class Counted(tenfold.Work):
    """A work that counts how often it was waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self.waits += 1
        return True


class CountedByC10d(c10d.Work):
    def __init__(self) -> None:
        super().__init__()
        self.waits = 0

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self.waits += 1
        return True


def test_memory_has_all_works_that_were_registered_for_views_of_it():
    answers = []
    for library, kind, wait in [
        (c10d, CountedByC10d, torch.ops._c10d_functional.wait_tensor),
        (tenfold.c10d, Counted, tenfold.c10d.functional.wait_tensor),
    ]:
        before = library._get_work_registry_size()
        whole, other, works = torch.ones(4), torch.ones(4), [kind(), kind(), kind()]
        library._register_work(whole, works[0])
        library._register_work(whole[2:], works[1])
        library._register_work(other, works[2])
        sizes = [library._get_work_registry_size() - before]
        wait(whole[:2])
        sizes.append(library._get_work_registry_size() - before)
        wait(whole)
        counts = [work.waits for work in works]
        wait(other)
        sizes.append(library._get_work_registry_size() - before)
        answers.append((sizes, counts, [work.waits for work in works]))
    assert answers[0] == answers[1] == ([3, 1, 0], [1, 1, 0], [1, 1, 1])


def test_works_are_registered_for_buffers_of_every_kind_and_forgotten_with_them():
    before = tenfold.c10d._get_work_registry_size()
    buffer, array = bytearray(8), numpy.zeros(4)
    works = [Counted() for _ in range(4)]
    tenfold.c10d._register_work(buffer, works[0])
    tenfold.c10d._register_work(memoryview(buffer)[2:], works[1])
    tenfold.c10d._register_work(array, works[2])
    tenfold.c10d._register_work(array.reshape(2, 2)[1], works[3])
    assert tenfold.c10d._get_work_registry_size() == before + 4
    tenfold.c10d.functional.wait_tensor(buffer)
    tenfold.c10d.functional.wait_tensor(array[1:])
    assert [work.waits for work in works] == [1, 1, 1, 1]
    tenfold.c10d._register_work(array, Counted())
    del array
    assert tenfold.c10d._get_work_registry_size() == before


def test_operations_are_registered_while_that_is_allowed():
    group = tenfold.c10d.ProcessGroup(tenfold.HashStore(), 0, 1)
    before = tenfold.c10d._get_work_registry_size()
    assert tenfold.c10d._allow_inflight_collective_as_graph_input() is False
    tenfold.c10d._set_allow_inflight_collective_as_graph_input(True)
    try:
        first, second = torch.ones(2), torch.ones(2)
        works = [group.allreduce(first), group.broadcast(second, 0)]
        sizes = [tenfold.c10d._get_work_registry_size() - before]
        works[0].wait()
        sizes.append(tenfold.c10d._get_work_registry_size() - before)
        tenfold.c10d.functional.wait_tensor(second)
        sizes.append(tenfold.c10d._get_work_registry_size() - before)
    finally:
        tenfold.c10d._set_allow_inflight_collective_as_graph_input(False)
    assert sizes == [2, 1, 0]
    group.allreduce(first).wait()
    assert tenfold.c10d._get_work_registry_size() == before


def test_works_without_parts_tell_when_they_are_over():
    future = tenfold.Future()
    of_future = tenfold.c10d._create_work_from_future(future)
    of_callback = tenfold.c10d.PythonCallbackWork(lambda timeout: True)
    failing = tenfold.c10d.PythonCallbackWork(lambda timeout: 1 / 0)
    of_torch = torch.futures.Future()
    works = [of_future, of_callback, failing, tenfold.c10d._create_work_from_future(of_torch)]
    told: list[int] = []
    results = [work.get_future_result() for work in works]
    for number, work in enumerate(works):
        work.notify(lambda number=number: told.append(number))
    assert told == []
    future.set_result([torch.ones(1)])
    of_callback.wait()
    with pytest.raises(ZeroDivisionError):
        failing.wait()
    of_torch.set_result(torch.ones(1))
    assert sorted(told) == [0, 1, 2, 3]
    outcomes = [tenfold.c10d.WorkResult(result.value()) for result in results]
    ok = tenfold.c10d.WorkResult.SUCCESS
    assert outcomes == [ok, ok, tenfold.c10d.WorkResult.COMM_ERROR, ok]
    with pytest.raises(RuntimeError, match="cannot be aborted"):
        of_future.abort()
