# ruff: noqa: RUF001  the sign for "times" is one
"""Debug levels: what is logged, what errors tell, and what is checked, by `TORCH_DISTRIBUTED_DEBUG`."""

import json
import os
import re
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import pytest
import tenfold
from processes import python, run_together
from tenfold.c10d.hooks import unhealthy_backends

# A group that fails, and cannot leave its dump: reason for a warning, and for all there is to know at INFO.
ONE_RANK = """
import tenfold
group = tenfold.init(store=tenfold.HashStore(), rank=0, world_size=1, name="alone")
group.abort("for a test")
group.close()
"""

WARNING = (
    "tenfold: rank 0: no dump of the flight recorder: cannot write /proc/none/0: "
    "No such file or directory (os error 2)"
)
LIFE = [
    "tenfold: rank 0: made group `alone`: rank 0 of 1, alone",
    "tenfold: rank 0: group `alone` failed: rank 0 (host H, pid P) aborted the group: for a test",
    WARNING,
    "tenfold: rank 0: left group `alone`, which had failed; operations called: 0",
]


def told(program: str, **variables: str) -> list[str]:
    """What one process writes to standard error."""
    kept = {name: value for name, value in os.environ.items() if name != "TORCH_DISTRIBUTED_DEBUG"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=kept | {"TORCH_FR_DUMP_TEMP_FILE": "/proc/none/"} | variables,
        stderr=subprocess.PIPE,
        text=True,
        timeout=100,
        check=False,
    )
    return done.stderr.splitlines()


def normal(lines: list[str]) -> list[str]:
    """Sorted, since a dump is written by a thread of its own."""
    return sorted(re.sub(r"host \S+, pid \d+", "host H, pid P", line) for line in lines)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, [WARNING]),
        ({"TENFOLD_LOG": "off"}, []),
        ({"TENFOLD_LOG": "info"}, LIFE),
        ({"TORCH_DISTRIBUTED_DEBUG": "INFO"}, LIFE),
        ({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, LIFE),
        ({"TORCH_DISTRIBUTED_DEBUG": "INFO", "TENFOLD_LOG": "warn"}, [WARNING]),
    ],
)
def test_warnings_are_lines_on_standard_error_and_more_is_said_if_asked_for(variables, expected):
    assert normal(told(ONE_RANK, **variables)) == sorted(expected)


def test_the_level_can_be_changed_while_a_group_lives():
    program = ONE_RANK.replace(
        "group.abort", "tenfold.c10d.set_debug_level(tenfold.c10d.DebugLevel.INFO)\ngroup.abort"
    )
    assert normal(told(program)) == sorted(LIFE[1:])


def test_a_filter_that_is_none_is_refused():
    said = told(ONE_RANK, TENFOLD_LOG="a=b=c")
    assert said[-2].startswith("ValueError: invalid log filter TENFOLD_LOG=`a=b=c`: ")
    assert said[-1] == "  hint: try `info` or `tenfold_store=debug`"


def test_a_level_that_is_none_is_refused_when_a_group_is_made():
    said = told(ONE_RANK, TORCH_DISTRIBUTED_DEBUG="LOUD")
    assert said[-1] == (
        "tenfold.exceptions.DistArgumentError: connect in group `alone` failed on rank 0 of 1: "
        "The value of TORCH_DISTRIBUTED_DEBUG must be OFF, INFO, or DETAIL."
    )


def test_where_standard_error_is_closed_nothing_is_told_and_nothing_breaks(tmp_path: Path):
    done = tmp_path / "done"
    program = f"import os; os.close(2)\n{ONE_RANK}\nopen({str(done)!r}, 'w').close()"
    assert told(program) == []
    assert done.exists()


# ── what errors tell at DETAIL ─────────────────────────────────────────────────────────────────────────────

SIZE = 3


@pytest.fixture(scope="module", params=["numpy", "torch"])
def told_in_detail(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each rank reported in each scene of detail_rank.py."""
    folder = tmp_path_factory.mktemp(request.param)
    level = {
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
        "TORCH_FR_DUMP_TEMP_FILE": str(folder / "dump-"),
        # What PyTorch would need for its own checks; here is nothing that answers.
        "GLOO_SOCKET_IFNAME": "none0",
        "TENFOLD_INTERFACE": "lo",
    }
    store = tenfold.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    commands = [
        python("detail_rank.py", request.param, folder, store.port, rank, SIZE) for rank in range(SIZE)
    ]
    run_together(commands, folder, [level] * SIZE)
    return [json.loads((folder / f"told-{rank}").read_text()) for rank in range(SIZE)]


def without_lines(text: str) -> str:
    """Without what is not the same each time, or in each version of detail_rank.py."""
    text = re.sub(r"detail_rank\.py:\d+ in (\w+)", r"\1", text)
    text = re.sub(r"host \S+, pid \d+", "host H, pid P", text)
    return re.sub(r"(?<=did not answer for )[0-9.]+ s", "T", text)


MISMATCHES = {
    "operation": (
        "ranks called different operations as #1: ranks 0, 2 called all_reduce(sum, float32 × 6) "
        "[input 2×3, at all_reduce ← operation ← play]; rank 1 called barrier "
        "[at barrier ← operation ← play]"
    ),
    "size": (
        "ranks called different operations as #1: ranks 0, 2 called all_reduce(sum, float32 × 6) "
        "[input 6, at all_reduce ← size ← play]; rank 1 called all_reduce(sum, float32 × 7) "
        "[input 7, at all_reduce ← size ← play]"
    ),
    "shape": (
        "ranks called different operations as #2: ranks 0, 2 called all_reduce(sum, float32 × 6) "
        "[input 2×3, at all_reduce ← shape ← play]; rank 1 called all_reduce(sum, float32 × 6) "
        "[input 3×2, at all_reduce ← shape ← play]"
    ),
}


@pytest.mark.parametrize("scene", list(MISMATCHES))
def test_a_mismatch_is_told_with_shapes_and_places(told_in_detail: Any, scene: str) -> None:
    for told in told_in_detail:
        assert without_lines(told[scene]["reason"]) == MISMATCHES[scene]
        assert told[scene]["peer"] == 1
        assert "DistBackendError" in told[scene]["class"]


def test_an_error_says_where_the_own_call_was_made(told_in_detail: Any) -> None:
    called = [without_lines(told["shape"]["called"][0]) for told in told_in_detail]
    assert called == [
        "called with input 2×3 at all_reduce ← shape ← play",
        "called with input 3×2 at all_reduce ← shape ← play",
        "called with input 2×3 at all_reduce ← shape ← play",
    ]


def test_ranks_that_wait_for_one_that_does_not_come_say_where_they_wait(told_in_detail: Any) -> None:
    waited, absent, _ = (told["missing"] for told in told_in_detail)
    assert absent == {}
    for told in (waited, told_in_detail[2]["missing"]):
        reason = without_lines(told["reason"])
        assert reason.removesuffix(" (seen by rank 0)").removesuffix(" (seen by rank 2)") == (
            "rank 1 (host H, pid P) did not answer for T"
        )
        assert [without_lines(line) for line in told["called"]] == [
            "called with input 2×3 at all_reduce ← missing ← play"
        ]
        assert told["class"] == "DistTimeoutError"


def test_a_message_that_nobody_sends_says_where_it_is_waited_for(told_in_detail: Any) -> None:
    for told in told_in_detail:
        assert [without_lines(line) for line in told["message"]["called"]] == [
            "called with output 2×2 at recv ← message ← play"
        ]


def test_a_rank_at_another_level_is_no_mismatch(told_in_detail: Any) -> None:
    for told in told_in_detail:
        assert told.get("mixed", {}) == {}  # played by NumPy's ranks


def test_dumps_have_shapes_c10ds_names_and_the_ranks_of_the_job(told_in_detail: Any) -> None:
    for told in told_in_detail:
        shapes = [entry["input_sizes"][0] for entry in told["dump"]["entries"] if entry["input_sizes"]]
        assert [2, 3] in shapes or [3, 2] in shapes
        assert {group["ranks"] for group in told["dump"]["pg_config"].values()} == {"[0, 1, 2]"}


# ── what is not a number ───────────────────────────────────────────────────────────────────────────────────

# Two ranks as threads. Rank 1 has the NaN; rank 0 must not be sent anything until rank 1 calls again.
TWO_RANKS = """
import json, sys, threading, numpy, tenfold
store, told = tenfold.HashStore(), [[], []]

def attempt(me, call):
    try:
        call()
        told[me].append("done")
    except tenfold.DistArgumentError as error:
        told[me].append(str(error).splitlines()[0])

def rank(me):
    group = tenfold.init(store=store, rank=me, world_size=2, name="pair", timeout=60)
    nan = lambda: numpy.array([[0, 1], [2, float("nan")]], dtype=sys.argv[1])
    fine = lambda: numpy.zeros((2, 2), dtype=sys.argv[1])
    if me == 1:
        attempt(me, lambda: group.all_reduce(nan()))
        attempt(me, lambda: group.all_gather([fine(), fine()], nan()))
        attempt(me, lambda: group.reduce_scatter(fine(), [fine(), nan()]))
        attempt(me, lambda: group.send(nan(), 0))
        attempt(me, lambda: group.all_reduce(fine().astype(numpy.int32)))
    else:
        attempt(me, lambda: group.all_reduce(numpy.zeros((2, 2), dtype=numpy.int32)))
    attempt(me, lambda: group.broadcast(nan() if me == 1 else fine(), 0))  # where it is only received
    group.close()

threads = [threading.Thread(target=rank, args=[me]) for me in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(json.dumps(told))
"""


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_what_is_not_a_number_is_not_sent(dtype: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TWO_RANKS, dtype],
        env=os.environ | {"TORCH_DIST_NAN_CHECK": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = (
        "in group `pair` failed on rank 1 of 2: NaN found in input tensor {}, which has it at element 3 of 4"
    )
    assert json.loads(done.stdout) == [
        ["done", "done"],
        [
            f"all_reduce {found.format(0)}",
            f"all_gather {found.format(0)}",
            f"reduce_scatter {found.format(1)}",
            f"send {found.format(0)}",
            "done",
            "done",
        ],
    ]


def test_a_switch_that_is_none_is_refused() -> None:
    said = told(ONE_RANK, TORCH_DIST_NAN_CHECK="perhaps")
    assert "`TORCH_DIST_NAN_CHECK=perhaps` is neither yes nor no" in said[-2]


# ── hooks and the wrapper ──────────────────────────────────────────────────────────────────────────────────


def nan() -> numpy.ndarray:
    return numpy.array([1, float("nan")], dtype=numpy.float32)


def test_a_nan_hook_checks_what_is_sent_until_it_is_removed() -> None:
    group = tenfold.c10d.ProcessGroup(tenfold.HashStore(), 0, 1)
    hook = tenfold.c10d.NanCheckHook.attach(group)
    with pytest.raises(tenfold.DistArgumentError) as refused:
        group.allgather([[nan()]], [nan()])
    assert str(refused.value) == (
        "allgather in group `default` failed on rank 0 of 1: "
        "NaN found in input tensor 0, which has it at element 1"
    )
    group.all_gather_single(nan(), numpy.zeros(2, dtype=numpy.float32)).wait()  # only received there
    hook.remove()
    group.allreduce(nan()).wait()
    with pytest.raises(TypeError, match="No constructor defined"):
        tenfold.c10d.NanCheckHook()


def test_a_health_hook_notes_backends_that_abort() -> None:
    class Fragile(tenfold.c10d.Backend):
        supports_abort_hooks = True

        def register_abort_hook(self, hook_id: int, hook: Any) -> None:
            self.hook = hook

    backend = Fragile(0, 1)
    group = tenfold.c10d.ProcessGroup(0, 1)
    group._register_backend("cpu", tenfold.c10d.BackendType.CUSTOM, backend)
    assert tenfold.c10d.HealthCheckHook.attach(group) is None
    assert "Fragile" not in unhealthy_backends()
    backend.hook()
    assert "Fragile" in unhealthy_backends()


def test_a_recorder_hook_says_who_the_members_are() -> None:
    group = tenfold.c10d.ProcessGroup(tenfold.HashStore(), 0, 1)
    group._set_group_desc("of a test")
    tenfold.c10d.FlightRecorderHook.attach(group, [5]).remove()
    config = json.loads(tenfold.c10d._dump_fr_trace_json())["pg_config"].values()
    expected = {"desc": "of a test", "ranks": "[5]"}.items()
    assert any(expected <= each.items() for each in config), config  # other tests have made groups, too


def wrapped(shapes: list[tuple[int, ...]], before: int = 0) -> list[str]:
    """What two ranks report that reduce tensors of such shapes in a backend that checks nothing.

    Before that, they reduce `before` tensors of the same shape.
    """

    class Careless(tenfold.c10d.Backend):
        def allreduce(self, tensors: Any, opts: Any = None) -> str:
            return "done"

        def broadcast(self, tensors: Any, opts: Any = None) -> str:
            return "done"

    store, told = tenfold.HashStore(), ["", ""]

    def rank(me: int) -> None:
        wrapper = tenfold.c10d._ProcessGroupWrapper(
            Careless(me, 2), tenfold.c10d.ProcessGroupTenfold(store, me, 2, timedelta(seconds=60))
        )
        assert wrapper.name() == "Careless"
        wrapper.broadcast([numpy.zeros(1, dtype=numpy.float32)])
        same = [numpy.zeros(1, dtype=numpy.float32)] * before
        try:
            told[me] = str(wrapper.allreduce([*same, numpy.zeros(shapes[me], dtype=numpy.float32)]))
        except RuntimeError as error:
            told[me] = str(error)

    threads = [threading.Thread(target=rank, args=[me]) for me in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return told


def test_a_wrapper_compares_what_ranks_call_before_a_backend_does_it() -> None:
    assert wrapped([(2, 3), (2, 3)]) == ["done", "done"]
    first, second = (
        f"CollectiveFingerPrint(SequenceNumber=1, OpType=ALLREDUCE, TensorShape=[{shape}], "
        "TensorDtypes=float32)"
        for shape in ("[2, 3]", "[3, 2]")
    )
    expected = (
        f"Detected mismatch between collectives on ranks. Rank 0 is running collective: {first}, "
        f"but Rank 1 is running collective: {second}."
        "Collectives differ in the following aspects:   Tensor Tensor shapes: [[2, 3]]vs [[3, 2]]"
    )
    assert wrapped([(2, 3), (3, 2)]) == [expected, expected]


def test_a_wrapper_finds_differences_beyond_what_fits_into_its_message() -> None:
    told = wrapped([(2, 3), (3, 2)], before=200)
    assert told[0] == told[1]
    assert told[0].startswith("Detected mismatch between collectives on ranks. Rank 0 "), told
    hashes = re.findall(r"… hash ([0-9a-f]{16})\)", told[0])
    assert len(set(hashes)) == 2, told
    assert wrapped([(2, 3), (2, 3)], before=200) == ["done", "done"]


# ── statistics of training ─────────────────────────────────────────────────────────────────────────────────

TRAINING = """
import torch, torch.distributed as dist, tenfold.torch
dist.init_process_group("tenfold", store=dist.HashStore(), rank=0, world_size=1)
model = tenfold.torch.DistributedDataParallel(torch.nn.Linear(3, 2))
for _ in range(2):
    model(torch.zeros(1, 3)).sum().backward()
dist.destroy_process_group()
"""


def test_at_info_training_tells_how_long_its_parts_take() -> None:
    said = [re.sub(r"[0-9.]+ m?s\b", "T", line) for line in told(TRAINING, TORCH_DISTRIBUTED_DEBUG="INFO")]
    expected = (
        "tenfold: rank 0: iteration {} of data-parallel training: forward T, backward T, communication T, "
        "of which T while backward computed; buckets: 1, bytes: 32"
    )
    assert [line for line in said if "iteration" in line] == [expected.format(1), expected.format(2)], said
