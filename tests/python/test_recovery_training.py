"""Training that goes on when ranks die, without PyTorch: the results are those of an undisturbed run."""

import json
import signal
import subprocess
import sys

import pytest
import tenfold
from processes import end_family, python
from programs.recovering import DEATHS, SIZE, STEPS
from tenfold.recovery import Members, train


def run(case, folder):
    """Runs the ranks, and as many spares as ranks die. Returns what each rank ended with."""
    store = tenfold.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    seats = [*range(SIZE), *["spare"] * len(DEATHS[case])]
    logs = [folder / f"log-{number}" for number in range(len(seats))]
    programs = []
    try:
        for seat, log in zip(seats, logs, strict=True):
            command = python("recovering.py", "127.0.0.1", store.port, seat, case, folder)
            with log.open("wb") as output:
                programs.append(
                    subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
                )
        codes = [program.wait(100) for program in programs]
    finally:
        for program in programs:
            end_family(program)
    said = "\n".join(log.read_text() for log in logs)
    assert codes.count(-signal.SIGKILL) == len(DEATHS[case]), said
    assert codes.count(0) == SIZE, said
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(SIZE)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return run("undisturbed", tmp_path_factory.mktemp("undisturbed"))[0]


@pytest.mark.parametrize("case", [case for case in DEATHS if DEATHS[case]])
def test_ranks_that_die_leave_no_trace_in_the_result(case, tmp_path, undisturbed):
    assert len(undisturbed["curve"]) == STEPS
    ranks = run(case, tmp_path)
    for rank in ranks:
        assert rank["curve"] == undisturbed["curve"]
        assert rank["weights"] == undisturbed["weights"]
    assert sum(rank["joined"] for rank in ranks) == len({rank for rank, _ in DEATHS[case]})


def test_all_ranks_hear_of_the_same_changes(tmp_path):
    ranks = run("one after the other", tmp_path)
    first = ranks[0]["changes"]
    assert [change[:2] for change in first] == [[[1], [1]], [[2], [2]], [[1], [1]]]
    assert all(
        abs(change[2] - death[1]) <= 1
        for change, death in zip(first, DEATHS["one after the other"], strict=True)
    )
    assert ranks[3]["changes"] == first
    assert {rank["generation"] for rank in ranks} == {4}


def alone():
    return Members.connect(tenfold.HashStore(), 0, 1, replaced=False)


def test_an_exception_of_a_step_is_raised_and_a_mistake_is_not_repeated():
    calls = []

    def mistaken(group, number):
        calls.append(number)
        group.broadcast(bytearray(1), root=7)

    with pytest.raises(tenfold.DistArgumentError, match="root 7 is out of range"):
        train(alone(), [bytearray(1)], mistaken, steps=3)
    assert calls == [0]

    def failing(group, number):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(alone(), [bytearray(1)], failing, steps=1)


def test_a_step_that_fails_again_although_no_rank_died_is_raised():
    calls = []

    def revoking(group, number):
        calls.append(number)
        if number == 2:
            group.revoke("a test")
        group.barrier()

    weights = bytearray(4)
    with pytest.raises(tenfold.DistBackendError, match="revoked the group: a test"):
        train(alone(), [weights], revoking, steps=3)
    assert calls == [0, 1, 2, 2], "it is tried once more"


def test_state_returns_to_what_was_committed():
    weights, failed = bytearray(4), []

    def step(group, number):
        weights[0] += 1
        if number == 5 and not failed:
            failed.append(number)
            group.revoke("a test")
        group.barrier()

    changes = []
    train(
        alone(), [weights], step, steps=7, commit_every=3, on_recovery=lambda *change: changes.append(change)
    )
    assert weights[0] == 7
    assert [number for _, number in changes] == [3], "the last commit"


def test_invalid_arguments_are_refused():
    with pytest.raises(ValueError, match="commit_every is 0, expected 1 or more"):
        train(alone(), [], lambda group, number: None, steps=1, commit_every=0)
    with pytest.raises(ValueError, match="contiguous and writable"):
        train(alone(), [b"constant"], lambda group, number: None, steps=1)


def test_nothing_of_this_imports_pytorch_or_numpy():
    program = "import tenfold.recovery, sys; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"
