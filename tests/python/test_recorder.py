"""The flight recorder: PyTorch's own analyser reads what it leaves, and finds what went wrong."""

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tenfold
from analysers import torch_analyser, torch_analyser_of_json
from processes import python, run_together

SIZE = 4
CASES = ["clean", "mismatch", "missing", "size"]

# What the analyser says of each case; c10d's words.
FINDINGS = {
    "clean": [],
    "mismatch": ["Culprit rank 2", "COLLECTIVE_TYPE_MISMATCH", "'all_reduce'", "'broadcast'"],
    "missing": ["Not all ranks joining collective", "missing ranks: {3}"],
    "size": ["Culprit rank 1", "SIZE_OR_SYNTAX_MISMATCH", "[[8]]", "[[5]]"],
}


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dumps of real processes, of every case."""
    folder = Path(os.environ.get("TENFOLD_KEEP_DUMPS") or tmp_path_factory.mktemp("dumps"))
    for case in CASES:
        commands = [python("recorder_rank.py", case, folder, rank, SIZE) for rank in range(SIZE)]
        run_together(commands, folder)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_the_analyser_of_pytorch_finds_in_the_pickles_what_went_wrong(dumps: Path, case: str) -> None:
    said = torch_analyser(dumps / case / "pickle", "rank_")
    for finding in FINDINGS[case]:
        assert finding in said
    if case == "clean":
        assert not [word for word in ("errors", "missing", "Not all", "Error") if word in said], said


@pytest.mark.parametrize("case", CASES)
def test_it_finds_the_same_in_the_json(dumps: Path, case: str) -> None:
    said, database = torch_analyser_of_json(dumps / case / "json", "rank_")
    for finding in FINDINGS[case]:
        assert finding in said
    wrong = [each for each in database.collectives if not each.pass_check or each.missing_ranks]
    assert bool(wrong) == (case != "clean")


@pytest.fixture
def clean(dumps: Path) -> Iterator[dict[str, Any]]:
    with (dumps / "clean/pickle/rank_1").open("rb") as file:
        yield pickle.load(file)


def test_a_dump_has_every_field_of_c10ds(clean: dict[str, Any]) -> None:
    script = """
import json, pickle, torch, torch.distributed as dist
from torch._C import _distributed_c10d as c10d
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(2))
theirs = pickle.loads(c10d._dump_fr_trace())
theirs["entries"] = theirs["entries"][:1]
print("@", json.dumps([theirs, json.loads(c10d._dump_fr_trace_json())]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=True
    )
    theirs, their_json = json.loads(
        next(line[2:] for line in done.stdout.splitlines() if line.startswith("@ "))
    )
    assert clean["version"] == theirs["version"]
    assert clean.keys() == theirs.keys() | {"rank", "host", "time_dumped_ns"}
    assert (clean["rank"], clean["host"]) == (1, os.uname().nodename)
    assert abs(clean["time_dumped_ns"] / 1e9 - time.time()) < 3600
    ours = clean["entries"][0]
    # Theirs of Gloo has no durations, because it never hears of the end.
    assert ours.keys() == theirs["entries"][0].keys() - {"frames"} | {"duration_ms", "reduce_op"}
    for key in ours.keys() & theirs["entries"][0].keys() - {"process_group"}:
        if theirs["entries"][0][key] is not None:
            assert type(ours[key]) is type(theirs["entries"][0][key]), key
    assert next(iter(clean["pg_status"].values())).keys() == next(iter(theirs["pg_status"].values())).keys()
    assert next(iter(clean["pg_config"].values())).keys() == next(iter(theirs["pg_config"].values())).keys()
    our_json = json.loads(tenfold.c10d._dump_fr_trace_json())
    assert our_json.keys() - {"rank"} | {"entries"} == their_json.keys() | {"host", "time_dumped_ns"}


def test_groups_are_told_with_the_ranks_of_the_job(clean: dict[str, Any]) -> None:
    config = clean["pg_config"]
    assert config["world"] == {"name": "world", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}
    assert config["half 1"]["ranks"] == "[1, 3]"
    names = [entry["profiling_name"] for entry in clean["entries"] if entry["process_group"][0] == "half 1"]
    assert names == ["tenfold:all_reduce"]
    last = clean["pg_status"][str(clean["entries"][0]["pg_id"])]
    assert last["last_enqueued_collective"] == last["last_completed_collective"] >= 6
    for entry in clean["entries"]:
        assert (entry["state"], entry["retired"]) == ("completed", True)
        assert entry["duration_ms"] >= 0
        created, ended = entry["time_created_ns"], entry["time_discovered_completed_ns"]
        assert created <= entry["time_discovered_started_ns"] <= ended
        assert abs(ended / 1e9 - time.time()) < 3600


@pytest.mark.smoke
def test_the_dumps_in_the_tests_of_the_crate_are_read_and_say_the_same() -> None:
    golden = Path(__file__).parents[2] / "crates/runtime/tests/golden"
    dump = pickle.loads((golden / "recorder.pickle").read_bytes())
    text = json.loads((golden / "recorder.json").read_text())
    first, waiting, message = dump["entries"]
    assert first["frames"] == [{"name": "train", "filename": "/home/me/train.py", "line": 70}]
    assert (first["duration_ms"], first["input_sizes"], first["input_dtypes"]) == (1.25, [[3, 2]], ["Float"])
    assert (waiting["time_discovered_started_ns"], waiting["output_sizes"]) == (None, [[300], [300]])
    assert (first["reduce_op"], "root" in first) == ("sum", False)
    assert (waiting["root"], "reduce_op" in waiting) == (1, False)
    assert (dump["rank"], dump["host"], dump["time_dumped_ns"]) == (1, "node7", 1_794_830_280_000_000_000)
    assert (message["profiling_name"], message["is_p2p"], message["output_sizes"]) == (
        "tenfold:send 1->0",
        True,
        [],
    )
    for entry, other in zip(dump["entries"], text["entries"], strict=True):
        without_frames = {key: value for key, value in entry.items() if key != "frames"}
        plain = {key: 0 if value is None else value for key, value in without_frames.items()}
        assert plain | {"process_group": list(entry["process_group"])} == other
    status = {  # c10d's numbers are text there, ours are numbers
        key: str(value) if key.startswith("last_") else value for key, value in dump["pg_status"]["0"].items()
    }
    assert text["pg_status"] == {"0": status}
    assert (status["failed_at_ns"], status["failure_rank"]) == (1794830279999000000, 0)
    assert status["failure"] == "rank 0 (host node6, pid 4711) did not answer for 4.6 s"
    assert (
        dump["pg_config"]
        == text["pg_config"]
        == {"world": {"name": "world", "desc": "default_pg", "ranks": "[0, 1]"}}
    )


def test_what_failed_keeps_its_state_and_is_retired(dumps: Path) -> None:
    for rank in range(SIZE):
        entries = pickle.loads((dumps / "size/pickle" / f"rank_{rank}").read_bytes())["entries"]
        *before, last = entries
        assert (last["state"], last["retired"], last["time_discovered_completed_ns"]) == (
            "started",
            True,
            None,
        )
        assert "duration_ms" not in last
        assert {entry["state"] for entry in before} == {"completed"}


def alone(script: str, folder: Path, **environment: str) -> str:
    """What a process said that is the only rank of its group."""
    start = "import tenfold, pickle, os, json\n"
    start += "group = tenfold.init(store=tenfold.HashStore(), rank=0, world_size=1)\n"
    variables = os.environ | {"TORCH_FR_DUMP_TEMP_FILE": str(folder / "rank_")} | environment
    done = subprocess.run(
        [sys.executable, "-c", start + script],
        capture_output=True,
        text=True,
        timeout=100,
        env=variables,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_stack_of_the_python_caller_is_there_where_asked_for(tmp_path: Path) -> None:
    script = """
def train():
    group.all_reduce(bytearray(2))
train()
frames = pickle.loads(tenfold.c10d._dump_fr_trace())["entries"][-1]["frames"]
print([frame["name"] for frame in frames if frame["filename"] == "<string>"])
"""
    assert alone(script, tmp_path) == "[]"
    assert alone(script, tmp_path, TORCH_FR_CPP_STACK="1") == "['train', '<module>']"
    assert (
        alone(script, tmp_path, TORCH_FR_CPP_STACK="1", TORCH_INCLUDE_STACK_TRACE="1")
        == "['train', '<module>']"
    )


def test_the_ring_is_as_long_as_asked_for_and_0_turns_it_off(tmp_path: Path) -> None:
    script = """
for _ in range(20):
    group.barrier()
print([entry["record_id"] for entry in pickle.loads(tenfold.c10d._dump_fr_trace())["entries"]])
"""
    assert alone(script, tmp_path, TORCH_FR_BUFFER_SIZE="3") == "[17, 18, 19]"
    assert alone(script, tmp_path, TORCH_NCCL_TRACE_BUFFER_SIZE="2") == "[18, 19]"
    assert alone(script, tmp_path, TORCH_FR_BUFFER_SIZE="0") == "[]"


def test_the_filters_and_the_reset_are_c10ds(tmp_path: Path) -> None:
    script = """
group.barrier()
dump = lambda *words, **named: pickle.loads(tenfold.c10d._dump_fr_trace(*words, **named))
count = lambda *words, **named: len(dump(*words, **named).get("entries", "no"))
print(count(), count(False), count(onlyActive=True), end=" ")
print("frames" in pickle.loads(tenfold.c10d._dump_fr_trace(includeStackTraces=False))["entries"][0], end=" ")
tenfold.c10d._reset_fr_trace()
print(count(), "entries" in json.loads(tenfold.c10d._dump_fr_trace_json()))
"""
    assert alone(script, tmp_path) == "1 2 0 False 0 False"
    script = 'group.barrier(); print(len(pickle.loads(tenfold.c10d._dump_fr_trace())["entries"]))'
    assert alone(script, tmp_path, TORCH_INCLUDE_ONLY_ACTIVE="1") == "0"


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    script = """
try:
    tenfold.c10d._dump_fr_trace_file(0)
except OSError as error:
    print(error)
group.abort("to see what becomes of it")
"""
    said = alone(script, tmp_path, TORCH_FR_DUMP_TEMP_FILE=str(tmp_path / "file" / "rank_"))
    assert said.startswith(f"cannot write {tmp_path}/file/rank_0: ")


def test_an_abort_leaves_a_dump_unless_that_is_switched_off(tmp_path: Path) -> None:
    script = "group.barrier(); group.abort('enough'); "
    script += "print(os.path.exists(os.environ['TORCH_FR_DUMP_TEMP_FILE'] + '0'))"
    assert alone(script, tmp_path, TORCH_FR_DUMP_ON_TIMEOUT="0") == "False"
    assert alone(script, tmp_path) == "True"


def test_the_prefix_is_looked_up_again_where_asked_for(tmp_path: Path) -> None:
    script = f"""
os.environ["TORCH_FR_DUMP_TEMP_FILE"] = {str(tmp_path / "other_")!r}
group.barrier()
tenfold.c10d._dump_fr_trace_file(7)
"""
    alone(script, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["rank_7"]
    alone(script, tmp_path, TORCH_FR_DUMP_DYNAMIC_FILE_NAME="1")
    assert (tmp_path / "other_7").exists()


def test_a_signal_asks_for_a_dump(tmp_path: Path) -> None:
    script = """
import signal, time
group.barrier()
os.kill(os.getpid(), signal.SIGUSR2)
path = os.environ["TORCH_FR_DUMP_TEMP_FILE"] + "0"
while not os.path.exists(path):
    time.sleep(0.01)
print(len(pickle.load(open(path, "rb"))["entries"]))
"""
    assert alone(script, tmp_path, TENFOLD_FR_SIGNAL="SIGUSR2") == "1"
    assert signal.SIGUSR2 == 12


def test_a_setting_that_means_nothing_is_refused(tmp_path: Path) -> None:
    variables = os.environ | {"TORCH_FR_BUFFER_SIZE": "many"}
    script = "import tenfold; tenfold.init(store=tenfold.HashStore(), rank=0, world_size=1)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=100,
        env=variables,
        check=False,
    )
    assert "`TORCH_FR_BUFFER_SIZE=many` is not a number" in done.stderr
