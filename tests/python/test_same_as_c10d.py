"""Values that behave as c10d's: every expression here is evaluated with PyTorch's classes and with tenfold's.

Each list is of expressions in the names of c10d; the answers, or the classes of the errors, must be the same.
"""

import copy
import pickle
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
    assert evaluate(expression, tenfold) == evaluate(expression, c10d)


@pytest.mark.parametrize("name", sorted(name for name in dir(c10d) if name.endswith(("Options", "HookArgs"))))
def test_the_defaults_of_options_are_c10ds(name):
    theirs, ours = getattr(c10d, name)(), getattr(tenfold, name)()
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
    options = tenfold.AllreduceOptions()
    options.reduceOp = theirs
    assert options.reduceOp.op.name == op


def test_pytorchs_options_and_tensors_are_taken_by_a_process_group():
    group = tenfold.ProcessGroup(tenfold.HashStore(), 0, 1)
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
        assert fake_outcome(call, rank, simulate, tenfold) == expected, f"rank {rank}"


def test_a_fake_group_refuses_if_it_was_told_to():
    for library in [c10d, tenfold]:
        options = library.FakeProcessGroup.Options()
        options.error_on_collective = True
        group = library.FakeProcessGroup._create_internal(0, 2, options)
        with pytest.raises(RuntimeError, match="error_on_collective=true"):
            group.allreduce([torch.ones(1)])


def test_a_fake_group_takes_buffers_of_any_kind():
    group = tenfold.FakeProcessGroup._create_internal(0, 2)
    group.all_gather_single(whole := bytearray(4), b"ab").wait()
    assert whole == b"abab"


def test_a_group_without_a_backend_says_so():
    for library in [c10d, tenfold]:
        group = library.ProcessGroup(1, 2)
        assert (group.rank(), group.size(), group.name(), group.group_desc) == (1, 2, "undefined", "")
        with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
            group.allreduce([torch.ones(1)])
        with pytest.raises(RuntimeError, match="ProcessGroup name not set"):
            group.group_name  # noqa: B018
        with pytest.raises(TypeError):
            library.ProcessGroup(1)


def test_a_backend_written_in_python_is_used():
    class Doubling(tenfold.Backend):
        def allreduce(self, tensors, opts):
            for tensor in tensors:
                tensor *= self.size()
            return tenfold.FakeWork()

    group = tenfold.ProcessGroup(0, 2)
    group._register_backend("cpu", group.CUSTOM, Doubling(0, 2))
    tensor = torch.ones(2)
    group.allreduce(tensor).wait()
    assert tensor.tolist() == [2, 2]
    with pytest.raises(RuntimeError, match="Backend Doubling does not support barrier"):
        group.barrier()


def test_the_registry_answers_as_c10ds():
    for library in [c10d, tenfold]:
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
    for library in [c10d, tenfold]:
        try:
            library.set_debug_level_from_env()
            answers.append(int(library.get_debug_level()))
        except ValueError as error:
            answers.append(str(error))
    c10d.set_debug_level(before)
    tenfold.set_debug_level(tenfold.DebugLevel(int(before)))
    assert answers[0] == answers[1]


def test_a_work_of_a_callback_is_over_when_the_callback_says_so():
    for library in [c10d, tenfold]:
        asked: list[timedelta] = []
        work = library.PythonCallbackWork(lambda timeout, asked=asked: bool(asked.append(timeout) or True))
        assert work.wait(timedelta(seconds=3))
        assert asked == [timedelta(seconds=3)]
        failing = library.PythonCallbackWork(lambda timeout: 1 / 0)
        with pytest.raises(Exception, match="division by zero"):
            failing.wait()


def test_a_work_of_a_future_is_over_when_the_future_is():
    for library, future in [(c10d, torch.futures.Future()), (tenfold, tenfold.Future())]:
        work = library._create_work_from_future(future)
        assert not work.is_completed()
        future.set_result([torch.ones(1)])
        assert work.is_completed()
        assert work.wait()
        assert work.get_future().value()[0].item() == 1
