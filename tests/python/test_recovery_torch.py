"""Training with PyTorch that goes on when ranks die: the results are those of an undisturbed run."""

import json
import os
import signal

import pytest
import tenfold
import torch
from processes import end_family, python, start
from programs.recovering_torch import DEATHS, SIZE, STEPS, WRAPS
from ranks import ENVIRONMENT
from tenfold.recovery import Members
from tenfold.torch.recovery import Training, _State


def run(kind, folder, environment):
    """Runs the ranks, and as many spares as ranks die. Returns what each rank ended with."""
    deaths = DEATHS[kind.split("/")[1]]
    store = tenfold.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    seats = [*range(SIZE), *["spare"] * len(deaths)]
    logs = [folder / f"log-{number}" for number in range(len(seats))]
    programs = []
    try:
        for seat, log in zip(seats, logs, strict=True):
            command = python("recovering_torch.py", "127.0.0.1", store.port, seat, kind, folder)
            with log.open("wb") as output:
                programs.append(start(command, output, environment, cold=False))
        codes = [program.wait(90) for program in programs]
    finally:
        for program in programs:
            end_family(program)
    said = "\n".join(log.read_text() for log in logs)
    assert codes.count(-signal.SIGKILL) == len(deaths), said
    assert codes.count(0) == SIZE, said
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(SIZE)]


@pytest.fixture(scope="module")
def environment():
    return os.environ | ENVIRONMENT


@pytest.fixture(scope="module", params=list(WRAPS))
def undisturbed(request, tmp_path_factory, environment):
    folder = tmp_path_factory.mktemp("undisturbed")
    return request.param, run(f"{request.param}/undisturbed", folder, environment)


@pytest.mark.parametrize("case", [case for case in DEATHS if DEATHS[case]])
def test_ranks_that_die_leave_no_trace_in_the_result(case, tmp_path, undisturbed, environment):
    wrap, expected = undisturbed
    ranks = run(f"{wrap}/{case}", tmp_path, environment)
    for rank, (now, before) in enumerate(zip(ranks, expected, strict=True)):
        assert now["rate"] == before["rate"]
        for step, loss in now["losses"].items():
            assert loss == before["losses"][step], f"step {step} on rank {rank}"
        assert str(STEPS - 1) in now["losses"]
        # The running averages of batch norm are not compared: each rank has its own.
        assert now["weights"] == before["weights"]


def alone():
    return Members.connect(tenfold.HashStore(), 0, 1, replaced=False)


def test_parts_without_a_state_are_refused():
    with pytest.raises(TypeError, match="list has no `state_dict` and `load_state_dict`"):
        Training(torch.nn.Linear(1, 1), [], members=alone())


def test_the_model_is_there_only_while_steps_run():
    training = Training(torch.nn.Linear(1, 1), members=alone())
    with pytest.raises(RuntimeError, match="while `run` runs"):
        _ = training.model


def changed(module, optimizer):
    module(torch.ones(2, 3, 8, 8)).sum().backward()
    optimizer.step()


def test_a_state_returns_bit_by_bit_also_to_one_without_the_tensors_of_an_optimizer():
    torch.manual_seed(3)
    module = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(module.parameters(), amsgrad=True)
    state = _State([module, optimizer])

    def copy():
        return state.objects(), [bytes(tensor) for tensor in state.tensors()]

    def restore(objects, tensors):
        state.load_objects(objects)
        for array, given in zip(state.tensors(), tensors, strict=True):
            memoryview(array)[:] = given

    snapshots = [copy()]
    for _ in range(2):
        changed(module, optimizer)
        snapshots.append(copy())
    weights = [parameter.data_ptr() for parameter in module.parameters()]
    following = None
    for _ in range(2):
        restore(*snapshots[1])
        assert copy()[1] == snapshots[1][1]
        module.zero_grad()
        changed(module, optimizer)
        following = following or copy()[1]
        assert copy()[1] == following
    restore(*snapshots[0])
    assert not optimizer.state, "before the first step it has none"
    assert [parameter.data_ptr() for parameter in module.parameters()] == weights, "the optimizer knows them"


def test_random_generators_are_part_of_the_state():
    state = _State([torch.nn.Linear(1, 1)])
    before = state.objects()
    numbers = torch.rand(3)
    state.load_objects(before)
    assert torch.equal(torch.rand(3), numbers)


def test_tensors_that_cannot_be_handed_over_are_refused():
    module = torch.nn.Module()
    module.register_buffer("part", torch.zeros(4, 4)[:, :2])
    with pytest.raises(ValueError, match="without gaps"):
        _State([module]).tensors()
    module.register_buffer("part", torch.zeros(2, 2).to_sparse())
    with pytest.raises(ValueError, match="dense tensors on the CPU"):
        _State([module]).tensors()
