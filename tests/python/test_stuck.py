"""A rank that lives and keeps the others waiting: what ranks and the launcher say of it."""

import re
import sys
from pathlib import Path

import pytest
import tenfold
from launchers import Launcher
from servers import PROGRAMS

PROGRAM = PROGRAMS / "stuck.py"
WORDS = ("-n", 3, "--rdzv-conf", "keep_alive_interval=0.2", "--python", sys.executable, PROGRAM)

SUM = r"all_reduce\(sum, float32 . 8\)"
SENTENCE = (
    rf"rank 2 \(host \S+, pid \d+\) is alive and has not entered {SUM} #4 of group `[^`]+` for (\d+) s; "
    rf"rank 2 last finished #3 {SUM} and has called nothing since; the others wait$"
)
CONFESSION = (
    r"^\[2\] tenfold: rank 2: the other ranks of group `[^`]+` wait for this one, which has not entered "
    rf"{SUM} #4 for \d+ s; this rank last finished #3 {SUM}"
)


@pytest.mark.parametrize("way", ["tenfold", "torch"])
def test_ranks_and_the_launcher_name_the_rank_that_does_not_come(way: str, tmp_path: Path) -> None:
    environment = {"TENFOLD_STUCK_AFTER": "0.5"}
    gate = tmp_path / "gate"
    with Launcher(*WORDS, way, gate, environment=environment) as launcher:
        launcher.until("^tenfold: warning: " + SENTENCE)
        gate.touch()
        assert launcher.ended() == 0, str(launcher)
        said = "\n".join(launcher.said)
    lines = said.splitlines()
    for rank in range(2):
        mine = [line for line in lines if line.startswith(f"[{rank}] tenfold: rank {rank}: rank 2 ")]
        assert mine, said
    assert any(re.search(CONFESSION, line) for line in lines), said
    told = [re.search("^tenfold: warning: " + SENTENCE, line) for line in lines]
    seconds = [int(one[1]) for one in told if one]
    # After 0.5, 1, 2, 4, … s, each a little later or not at all: not with every beat.
    most = max(seconds, default=0).bit_length() + 2
    assert len(seconds) <= most, f"once, and when it has doubled: {seconds}"


def test_a_job_that_is_told_to_gives_up_on_it(tmp_path: Path) -> None:
    environment = {
        "TENFOLD_STUCK_AFTER": "5",  # longer than ranks take to find each other on a busy machine
        "TENFOLD_STUCK_POLICY": "abort",
        "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/dump_",
    }
    with Launcher(*WORDS, "tenfold", tmp_path / "never", environment=environment) as launcher:
        assert launcher.ended() == 1, str(launcher)
        said = "\n".join(launcher.said)
    beginning = "tenfold.exceptions.DistTimeoutError: all_reduce #4 in group `default` failed on rank"
    assert beginning in said, said
    assert re.search(rf"is alive and has not entered {SUM} #4", said), said


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"TENFOLD_STUCK_AFTER": "soon"}, "`TENFOLD_STUCK_AFTER=soon` is not a time"),
        ({"TENFOLD_STUCK_AFTER": "-1"}, "`TENFOLD_STUCK_AFTER=-1` is not a time"),
        ({"TENFOLD_STUCK_POLICY": "kill"}, "`TENFOLD_STUCK_POLICY=kill` is not a policy"),
    ],
)
def test_what_makes_no_sense_is_refused(
    variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=expected):
        tenfold.init(store=tenfold.HashStore(), rank=0, world_size=1)


def test_a_policy_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no policy `kill`; there are warn, dump and abort"):
        tenfold.init(store=tenfold.HashStore(), rank=0, world_size=1, on_stuck="kill")
