"""Values that behave as c10d's: every expression here is evaluated with PyTorch's classes and with tenfold's.

Each list is of expressions in the names of c10d; the answers, or the classes of the errors, must be the same.
"""

import copy
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import tenfold
import torch
from tenfold.reduce_op import code_of
from torch._C import _distributed_c10d as c10d

REDUCE_OPS = """
    repr(ReduceOp.SUM)
    str(ReduceOp.SUM)
    ReduceOp.SUM.name
    ReduceOp.SUM.value
    int(ReduceOp.BXOR)
    hash(ReduceOp.AVG)
    hash(ReduceOp(ReduceOp.AVG))
    hash(PREMUL)
    ReduceOp.SUM == ReduceOp(ReduceOp.SUM)
    ReduceOp(ReduceOp.SUM) == ReduceOp.SUM
    ReduceOp(ReduceOp.SUM) == ReduceOp(ReduceOp.SUM)
    ReduceOp(ReduceOp.SUM) != ReduceOp.MAX
    isinstance(ReduceOp.SUM, ReduceOp)
    isinstance(ReduceOp(ReduceOp.SUM), ReduceOp)
    isinstance(PREMUL, ReduceOp)
    isinstance('SUM', ReduceOp)
    isinstance(0, ReduceOp)
    isinstance(ReduceOp(ReduceOp.SUM), ReduceOp.RedOpType)
    pickle.dumps(ReduceOp(ReduceOp.PREMUL_SUM))
    ReduceOp(ReduceOp.SUM) == 0
    ReduceOp.SUM == 0
    ReduceOp.SUM == 'SUM'
    ReduceOp.SUM in (ReduceOp(ReduceOp.SUM),)
    ReduceOp.SUM < ReduceOp.AVG
    ReduceOp.RedOpType(3) is ReduceOp.MIN or ReduceOp.RedOpType(3) == ReduceOp.MIN
    ReduceOp(0)
    ReduceOp('sum')
    ReduceOp(ReduceOp.SUM).factor
    ReduceOp(ReduceOp.SUM).SUM == ReduceOp.SUM
    ReduceOp.SUM(2.0)
    ReduceOp.PREMUL_SUM(2).factor
    PREMUL.factor
    repr(PREMUL.op)
    PREMUL == ReduceOp.PREMUL_SUM
    PREMUL == _make_nccl_premul_sum(3.0)
    _make_nccl_premul_sum('x')
    ReduceOp(ReduceOp.PREMUL_SUM).factor
    repr(copy.copy(ReduceOp.SUM))
    copy.deepcopy(PREMUL).factor
    copy.copy(ReduceOp(ReduceOp.MAX)) == ReduceOp.MAX
    repr(pickle.loads(pickle.dumps(ReduceOp.SUM)))
    pickle.loads(pickle.dumps(ReduceOp(ReduceOp.MIN))) == ReduceOp(ReduceOp.MIN)
    pickle.loads(pickle.dumps(PREMUL)).factor
    repr(ReduceOp(ReduceOp.SUM).__getstate__())
    repr(PREMUL.__getstate__())
"""

ENUMERATIONS = """
    repr(OpType.GATHER)
    str(OpType._ALLGATHER_BASE)
    OpType.BROADCAST == 0
    OpType.BROADCAST == WorkResult.SUCCESS
    int(OpType.UNKNOWN)
    hash(OpType.GATHER)
    [10, 20, 30][DebugLevel.INFO]
    repr(DebugLevel(1))
    repr(pickle.loads(pickle.dumps(WorkResult.TIMEOUT)))
    sorted(ErrorType.__members__)
    ProcessGroup.BackendType.CUSTOM == ProcessGroup.CUSTOM
"""

OPTIONS = """
    put('BroadcastOptions', 'rootRank', 1)
    put('BroadcastOptions', 'rootRank', 1.5)
    put('BroadcastOptions', 'rootRank', 'a')
    put('BroadcastOptions', 'nonsense', 1)
    put('BroadcastOptions', 'asyncOp', False)
    put('AllreduceOptions', 'timeout', timedelta(seconds=3))
    put('AllreduceOptions', 'timeout', 2.5)
    put('AllreduceOptions', 'timeout', 'x')
    put('AllreduceOptions', 'reduceOp', ReduceOp.MAX) == ReduceOp.MAX
    put('AllreduceOptions', 'reduceOp', PREMUL).factor
    put('AllreduceOptions', 'reduceOp', 1)
    put('BarrierOptions', 'device_ids', [1, 2])
    put('PutOptions', 'hints', {'a': 'b'})
    put('PutOptions', 'hints', {'a': 1})
    put('_DistributedBackendOptions', 'group_id', 'name')
    put('_DistributedBackendOptions', 'global_ranks_in_group', [0, 2])
    BroadcastOptions(rootRank=1)
    Backend.Options('x').backend
    Backend.Options('x')._timeout
    Backend.Options('x', timedelta(seconds=3))._timeout
    Backend.Options()
"""


def evaluate(expression: str, library: Any) -> Any:
    names = {name: getattr(library, name) for name in dir(library) if not name.startswith("__")}

    def put(options: str, field: str, value: Any) -> Any:
        made = names[options]()
        setattr(made, field, value)
        return getattr(made, field)

    premul = library._make_nccl_premul_sum(2.0)
    helpers = {"copy": copy, "pickle": pickle, "timedelta": timedelta, "put": put, "PREMUL": premul}
    try:
        return eval(expression, names | helpers)
    except Exception as error:
        return type(error)


EXPRESSIONS = [line.strip() for line in (REDUCE_OPS + ENUMERATIONS + OPTIONS).splitlines() if line.strip()]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_the_answer_is_c10ds(expression):
    assert evaluate(expression, tenfold.c10d) == evaluate(expression, c10d)


@pytest.mark.parametrize("name", sorted(name for name in dir(c10d) if name.endswith(("Options", "HookArgs"))))
def test_the_defaults_of_options_are_c10ds(name):
    theirs, ours = getattr(c10d, name)(), getattr(tenfold.c10d, name)()
    fields = [field for field in dir(theirs) if not field.startswith("_")]
    assert fields
    for field in fields:
        expected, value = getattr(theirs, field), getattr(ours, field)
        if isinstance(expected, c10d.ReduceOp):
            expected, value = expected.op.name, value.op.name
        elif isinstance(expected, c10d.HookOpName):
            expected, value = int(expected), int(value)
        assert value == expected, field


@pytest.mark.parametrize("op", sorted(c10d.ReduceOp.RedOpType.__members__))
def test_pytorchs_reductions_are_understood(op):
    theirs = c10d.ReduceOp.RedOpType.__members__[op]
    if op == "PREMUL_SUM":
        assert code_of(c10d._make_nccl_premul_sum(0.5)) == (8, 0.5)
        assert code_of(c10d._make_nccl_premul_sum(torch.tensor([0.5]))) == (8, 0.5)
        with pytest.raises(ValueError, match="PREMUL_SUM needs a factor"):
            code_of(theirs)
    else:
        assert code_of(theirs) == code_of(c10d.ReduceOp(theirs)) == theirs.value
    options = tenfold.c10d.AllreduceOptions()
    options.reduceOp = theirs
    assert options.reduceOp.op.name == op


def test_pytorchs_options_and_tensors_are_taken_by_a_process_group():
    group = tenfold.c10d.ProcessGroup(tenfold.HashStore(), 0, 1)
    options = c10d.AllreduceOptions()
    options.reduceOp = c10d.ReduceOp.MAX
    tensor = torch.ones(3, dtype=torch.bfloat16)
    work = group.allreduce([tensor], options)
    assert work.wait()
    assert work.result()[0] is tensor


def tensors() -> SimpleNamespace:
    """Fresh tensors by name, for operations to be called with."""
    one = torch.tensor
    return SimpleNamespace(
        three=one([1.0, 2.0, 3.0]),
        zeros=one([0.0, 0.0, 0.0]),
        parts=[one([1.0]), one([2.0]), one([3.0])],
        empty=[one([0.0]), one([0.0]), one([0.0])],
        single=one([5.0]),
        out=one([0.0]),
    )


FAKE_CALLS = {
    "allreduce sum": lambda group, t, library: group.allreduce([t.three]),
    "allreduce average": lambda group, t, library: group.allreduce(t.three, library.ReduceOp.AVG),
    "allreduce product": lambda group, t, library: group.allreduce(t.three, library.ReduceOp.PRODUCT),
    "allreduce maximum": lambda group, t, library: group.allreduce(t.three, library.ReduceOp.MAX),
    "allreduce with a factor": lambda group, t, library: group.allreduce(
        t.three, library._make_nccl_premul_sum(2.0)
    ),
    "allreduce coalesced": lambda group, t, library: group.allreduce_coalesced(t.parts),
    "broadcast": lambda group, t, library: group.broadcast([t.three]),
    "reduce": lambda group, t, library: group.reduce([t.three]),
    "allgather": lambda group, t, library: group.allgather([t.empty], [t.single]),
    "allgather single": lambda group, t, library: group.all_gather_single(t.zeros, t.single),
    "allgather coalesced": lambda group, t, library: group.allgather_coalesced([t.empty] * 3, t.parts),
    "gather": lambda group, t, library: group.gather([t.empty], [t.single]),
    "scatter": lambda group, t, library: group.scatter([t.out], [t.parts]),
    "scatter without inputs": lambda group, t, library: group.scatter([t.out], []),
    "reduce_scatter": lambda group, t, library: group.reduce_scatter([t.out], [t.parts]),
    "reduce_scatter single": lambda group, t, library: group.reduce_scatter_single(t.out, t.three),
    "alltoall": lambda group, t, library: group.alltoall(t.empty, t.parts),
    "alltoall single": lambda group, t, library: group.all_to_all_single(t.zeros, t.three, [], []),
    "send": lambda group, t, library: group.send([t.single], 0, 0),
    "recv": lambda group, t, library: group.recv([t.single], 0, 0),
    "barrier": lambda group, t, library: group.barrier(),
    "gather single": lambda group, t, library: group.gather_single(t.zeros, t.single),
    "monitored barrier": lambda group, t, library: group.monitored_barrier(),
}


def fake_outcome(call: str, rank: int, simulate: bool, library: Any) -> list[Any]:
    options = library.FakeProcessGroup.Options()
    options.simulate_uniform_ranks = simulate
    group = library.FakeProcessGroup._create_internal(rank, 3, options)
    given = tensors()
    try:
        FAKE_CALLS[call](group, given, library).wait()
    except (RuntimeError, ValueError):
        return ["refused"]
    flat = [value if isinstance(value, list) else [value] for value in vars(given).values()]
    return [tensor.tolist() for tensors in flat for tensor in tensors]


@pytest.mark.parametrize("simulate", [False, True], ids=["something", "as if all ranks were alike"])
@pytest.mark.parametrize("call", FAKE_CALLS)
def test_a_fake_group_fills_outputs_as_c10ds_does(call, simulate):
    for rank in range(3):
        expected = fake_outcome(call, rank, simulate, c10d)
        assert fake_outcome(call, rank, simulate, tenfold.c10d) == expected, f"rank {rank}"


def test_a_fake_group_refuses_if_it_was_told_to():
    for library in [c10d, tenfold.c10d]:
        options = library.FakeProcessGroup.Options()
        options.error_on_collective = True
        group = library.FakeProcessGroup._create_internal(0, 2, options)
        with pytest.raises(RuntimeError, match="error_on_collective=true"):
            group.allreduce([torch.ones(1)])


def test_a_fake_group_takes_buffers_of_any_kind():
    group = tenfold.c10d.FakeProcessGroup._create_internal(0, 2)
    group.all_gather_single(whole := bytearray(4), b"ab").wait()
    assert whole == b"abab"


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


@pytest.mark.parametrize("value", ["OFF", "info", "DETAIL", "", "nonsense"])
def test_the_debug_level_comes_from_pytorchs_variable(value, monkeypatch):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", value)
    before = c10d.get_debug_level()
    answers = []
    for library in [c10d, tenfold.c10d]:
        try:
            library.set_debug_level_from_env()
            answers.append(int(library.get_debug_level()))
        except ValueError as error:
            answers.append(str(error))
    c10d.set_debug_level(before)
    tenfold.c10d.set_debug_level(tenfold.c10d.DebugLevel(int(before)))
    assert answers[0] == answers[1]


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


SPLITS: list[dict[str, Any]] = [
    {},
    {"timeout": timedelta(seconds=7)},
    {"group_name": "part"},
    {"group_desc": "described"},
    {"timeout": timedelta(seconds=8), "group_name": "last"},
]


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


class Remembering:
    """The methods of a store, in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, bytes] = {}
        self.waited: list[list[str]] = []

    def set(self, key, value):
        self.kept[key] = value

    def get(self, key):
        return self.kept[key]

    def add(self, key, value):
        now = int(self.kept.get(key, b"0")) + value
        self.kept[key] = str(now).encode()
        return now

    def check(self, keys):
        return all(key in self.kept for key in keys)

    def clone(self):
        return self

    def wait(self, keys):
        """Without a timeout, which c10d does not ask for."""
        self.waited.append(list(keys))


def test_a_store_written_in_python_is_checked_as_by_c10d():
    kept = []
    for library in [c10d, tenfold.c10d]:
        store = type("Kept", (Remembering, library.Store), {})()
        library._test_python_store(store)
        kept.append(store.kept)
        forgetful = type("Forgetful", (Remembering, library.Store), {"get": lambda self, key: b"nothing"})()
        with pytest.raises(RuntimeError):
            library._test_python_store(forgetful)
    assert kept[0] == kept[1]


def test_a_store_whose_wait_takes_no_timeout_is_waited_for():
    for library in [c10d, tenfold.c10d]:
        store = type("Kept", (Remembering, library.Store), {})()
        library.PrefixStore("below", store).wait(["key"])
        assert store.waited == [["below/key"]], library.__name__


def sparse(place: int, value: float) -> torch.Tensor:
    return torch.sparse_coo_tensor([[place]], [value], (3,), check_invariants=True)


def test_sparse_tensors_are_reduced_by_a_group_of_the_package():
    store, sums = tenfold.HashStore(), {}

    def reduce(rank: int) -> None:
        group = tenfold.c10d.ProcessGroup(store, rank, 2)
        tensors = [sparse(rank, 1.0 + rank), sparse(2, 5.0)]
        work = group._get_backend("cpu").allreduce_sparse(tensors)
        assert work.wait()
        sums[rank] = [tensor.to_dense().tolist() for tensor in work.result()]

    threads = [threading.Thread(target=reduce, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == {rank: [[1.0, 2.0, 10.0]] * 2 for rank in range(2)}
    backend = tenfold.c10d.ProcessGroupTenfold(tenfold.HashStore(), 0, 1)
    with pytest.raises(ValueError, match="sparse tensors of PyTorch"):
        backend.allreduce_sparse([bytearray(4)])
    options = tenfold.c10d.AllreduceOptions()
    options.reduceOp = tenfold.ReduceOp.MAX
    with pytest.raises(ValueError, match=r"works with ReduceOp\.SUM"):
        backend.allreduce_sparse([sparse(0, 1.0)], options)


def test_coalesced_operations_have_c10ds_kinds():
    group = tenfold.c10d.ProcessGroup(tenfold.HashStore(), 0, 1)
    one, two = [torch.ones(2)], [torch.ones(2)]
    works = {
        tenfold.c10d.OpType.ALLREDUCE_COALESCED: group.allreduce_coalesced([torch.ones(2), torch.ones(3)]),
        tenfold.c10d.OpType.ALLGATHER_COALESCED: group.allgather_coalesced([one], two),
        tenfold.c10d.OpType.ALLGATHER_INTO_TENSOR_COALESCED: group.all_gather_single_coalesced(one, two),
        tenfold.c10d.OpType.REDUCE_SCATTER_TENSOR_COALESCED: group.reduce_scatter_single_coalesced(one, two),
    }
    assert {kind: tenfold.c10d.OpType(work._get_op_type()) for kind, work in works.items()} == {
        kind: kind for kind in works
    }


def test_many_tensors_are_broadcast_in_a_few_pieces():
    store, calls, values = tenfold.HashStore(), {}, {}

    def broadcast(rank: int) -> None:
        group = tenfold.c10d.ProcessGroup(store, rank, 2)
        tensors = [torch.full((3,), float(10 * rank + number)) for number in range(40)]
        tensors.append(torch.tensor([rank]))
        before = group._get_sequence_number_for_group()
        tenfold.c10d._broadcast_coalesced(group, tensors, 1000, 1)
        calls[rank] = group._get_sequence_number_for_group() - before
        values[rank] = [tensor.tolist() for tensor in tensors]

    threads = [threading.Thread(target=broadcast, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert values[0] == values[1] == [[10.0 + number] * 3 for number in range(40)] + [[1]]
    assert calls[0] == calls[1] <= 3, "one for each dtype, and no more than one is not full"


def test_works_of_completion_hooks_are_timed_by_a_clock_that_does_not_jump():
    group = tenfold.c10d.ProcessGroup(tenfold.HashStore(), 0, 1)
    told: list[Any] = []
    group._register_on_completion_hook(told.append)
    before = timedelta(seconds=time.monotonic())
    group.allreduce(torch.ones(2)).wait()
    group._wait_for_pending_works()
    after = timedelta(seconds=time.monotonic())
    assert before <= told[0].time_started <= told[0].time_finished <= after


def of_an_embedding(names: dict[int, str]) -> tuple[Any, Any]:
    """A table of five rows whose gradients are sparse, and its reducer, of one rank."""
    table = torch.nn.Embedding(5, 2, sparse=True)
    params = list(table.parameters())
    group = tenfold.c10d.ProcessGroup(tenfold.HashStore(), 0, 1)
    return table, tenfold.c10d.Reducer(params, [[0]], [1000], group, [True], param_to_name_mapping=names)


def step(table: Any, reducer: Any, rows: list[int]) -> Any:
    table.weight.grad = None
    reducer.prepare_for_forward()
    loss = table(torch.tensor(rows)).sum()
    reducer.prepare_for_backward(loss)
    loss.backward()
    return table.weight.grad.coalesce().indices()[0].tolist()


def test_rows_that_are_known_in_advance_change_no_gradient_and_others_are_refused():
    table, reducer = of_an_embedding({0: "table"})
    assert step(table, reducer, [1, 3]) == [1, 3]
    reducer._set_sparse_metadata({"table": torch.tensor([1, 3, 4])})
    assert step(table, reducer, [3, 1, 3]) == [1, 3]
    with pytest.raises(RuntimeError, match=r"the gradient of table has rows \[0\]"):
        step(table, reducer, [0, 4])
    table, reducer = of_an_embedding({0: "table"})
    reducer._set_sparse_metadata({"another": torch.tensor([1])})
    with pytest.raises(RuntimeError, match="param: table not found in sparse metadata"):
        step(table, reducer, [1])
    table, reducer = of_an_embedding({})
    reducer._set_sparse_metadata({"table": torch.tensor([1])})
    with pytest.raises(RuntimeError, match="No parameter names were found"):
        step(table, reducer, [1])
