"""Values that behave as c10d's: every expression here is evaluated with PyTorch's classes and with tenfold's.

Each list is of expressions in the names of c10d; the answers, or the classes of the errors, must be the same.
"""

import copy
import pickle
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

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
