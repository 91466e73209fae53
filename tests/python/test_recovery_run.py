"""`tenfold run --on-failure=recover` with programs that recover: ranks die, others take their places.

`TENFOLD_CHURN_STEPS=30000 TENFOLD_CHURN_EVERY=100` makes the test of many deaths a long one.
"""

import json
import os
import re
import sys
from pathlib import Path

import pytest
from launchers import Launcher
from programs.churn import SURVIVOR
from servers import PROGRAMS

PYTHON = ("--python", sys.executable)
CHURN = PROGRAMS / "churn.py"
SIZE = 8
STEPS = int(os.environ.get("TENFOLD_CHURN_STEPS", "240"))
EVERY = int(os.environ.get("TENFOLD_CHURN_EVERY", "30"))


@pytest.mark.timeout(max(120, STEPS))
@pytest.mark.parametrize("spares", [0, 1])
def test_ranks_die_and_are_replaced_again_and_again(spares: int, tmp_path: Path) -> None:
    deaths = STEPS // EVERY
    flags = ["-n", SIZE, "--on-failure=recover", "--max-restarts", deaths, "--spares", spares]
    with Launcher(*flags, *PYTHON, CHURN, STEPS, EVERY, tmp_path) as launcher:
        code = launcher.ended(timeout=max(100, STEPS))
    said = str(launcher)
    assert code == 0, said
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(SIZE)]
    total = sum(range(1, SIZE + 1)) * sum(number % 13 for number in range(STEPS))
    assert [rank["weight"] for rank in ranks] == [total] * SIZE, "that of an undisturbed run"
    assert {rank["generation"] for rank in ranks} == {deaths + 1}
    assert len(list(tmp_path.glob("dead-*"))) == deaths
    notes = re.findall(r"generation (\d+) after [\d.]+ s: rank \d \(pid \d+, killed by SIGKILL\)", said)
    assert int(notes[-1]) == deaths + 1, said
    survivor = ranks[SURVIVOR]
    assert len(survivor["recoveries"]) == deaths
    memory = survivor["memory"]
    print(f"{deaths} deaths; at most {max(survivor['recoveries']):.3f} s; {memory[0]} to {memory[-1]} KiB")
    # A rank remembers its last 256 groups, two for each death. After that it does not grow.
    if deaths >= 300:
        assert memory[-1] < 1.05 * memory[len(memory) // 2], memory


def test_a_program_that_does_not_recover_is_restarted(tmp_path: Path) -> None:
    marker = tmp_path / "died"
    program = tmp_path / "program.py"
    program.write_text(
        "import os, pathlib, signal, tenfold\n"
        "group = tenfold.init(timeout=60)\n"
        f"marker = pathlib.Path({str(marker)!r})\n"
        "if group.rank == 1 and not marker.exists():\n"
        "    marker.touch()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "group.barrier()\n"
        "print('done', os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
    )
    with Launcher("-n", 2, "--on-failure=recover", *PYTHON, program) as launcher:
        code = launcher.ended()
    assert code == 0, str(launcher)
    assert "the ranks cannot recover: the program has not begun to use recovery" in str(launcher)
    assert str(launcher).count("done 1") == 2, str(launcher)
