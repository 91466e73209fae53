"""Debug levels: what is logged, what errors tell, and what is checked, by `TORCH_DISTRIBUTED_DEBUG`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

# A group that fails, and cannot leave its dump: reason for a warning, and for all there is to know at INFO.
ONE_RANK = """
import tenfold
group = tenfold.init(store=tenfold.HashStore(), rank=0, world_size=1, name="alone")
group.abort("for a test")
group.close()
"""

WARNING = (
    "tenfold: rank 0: no dump of the flight recorder: cannot write /proc/none/0: "
    'No such file or directory (os error 2) cause="alone"'
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
    return [re.sub(r"host \S+, pid \d+", "host H, pid P", line) for line in lines]


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
    assert normal(told(ONE_RANK, **variables)) == expected


def test_the_level_can_be_changed_while_a_group_lives():
    program = ONE_RANK.replace("group.abort", "tenfold.set_debug_level(tenfold.DebugLevel.INFO)\ngroup.abort")
    assert normal(told(program)) == LIFE[1:]


def test_a_filter_that_is_none_is_refused():
    said = told(ONE_RANK, TENFOLD_LOG="a=b=c")
    assert said[-2].startswith("ValueError: TENFOLD_LOG=`a=b=c` is no log filter: ")
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
