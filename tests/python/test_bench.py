"""`python -m tenfold.bench ddp`: what it measures and how it says so; not how fast anything is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tenfold.bench import __main__ as command
from tenfold.bench import ddp
from tenfold.bench.ddp import OURS, PLUGGED_IN, Kind, Row, Settings

GLOO = Kind("torch", "gloo")


def row(kind: Kind, step_ms: float, megabytes: int = 1) -> Row:
    return Row(megabytes, 2, kind.ddp, kind.backend, 10.0, step_ms, max(0.0, 1 - 10.0 / step_ms))


def test_three_kinds_of_ddp_are_measured_and_none_twice() -> None:
    assert Settings(2, [1], "gloo", 1).kinds() == [OURS, PLUGGED_IN, GLOO]
    assert Settings(2, [1], "tenfold", 1).kinds() == [OURS, PLUGGED_IN]


def test_the_table_has_columns_for_each_kind_and_says_what_the_peer_exposes() -> None:
    rows = [row(OURS, 12.0), row(PLUGGED_IN, 15.0), row(GLOO, 20.0)]
    titles, columns, line = ddp.table(rows, "gloo").splitlines()
    for title in ["tenfold's DDP", "PyTorch's on tenfold", "PyTorch's on gloo", "gloo exposes"]:
        assert title in titles
    assert columns.split() == [
        "model",
        "ranks",
        "compute",
        *["step", "exposed", "share"] * 3,
        "ours",
        "plug-in",
    ]
    assert line.split() == [
        *["1", "MB", "2", "10.00", "ms"],
        *["12.00", "ms", "2.00", "ms", "17%"],
        *["15.00", "ms", "5.00", "ms", "33%"],
        *["20.00", "ms", "10.00", "ms", "50%"],
        *["5.00x", "2.00x"],
    ]


def test_a_step_that_exposes_nothing_has_no_ratio() -> None:
    rows = [row(OURS, 9.0), row(PLUGGED_IN, 15.0), row(GLOO, 20.0)]
    assert ddp.table(rows, "gloo").splitlines()[-1].split()[-2:] == ["-", "2.00x"]


def test_every_model_has_a_line() -> None:
    rows = [row(kind, 20.0, size) for size in (1, 25, 100) for kind in (OURS, PLUGGED_IN, GLOO)]
    lines = ddp.table(rows, "gloo").splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["1", "25", "100"]


@pytest.mark.parametrize("size", [1, 25, 100])
def test_models_are_as_large_as_they_say(size: int) -> None:
    shape = ddp.Shape.of(size)
    assert abs(shape.layers * shape.width**2 * 4 / 1e6 - size) < size * 0.02


def test_the_command_takes_the_flags_it_took() -> None:
    options = command.parser().parse_args(
        [
            "ddp",
            "--against",
            "gloo",
            "--ranks",
            "2,4",
            "--megabytes",
            "1",
            "--bucket-views",
            "--hook",
            "shared",
        ]
    )
    assert options.ranks == [2, 4]
    assert options.bucket_views
    assert options.hook == "shared"
    assert ddp.RANKS == [2, 4]


@pytest.mark.timeout(240)  # a busy machine
def test_a_short_run_measures_every_kind(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    flags = ["--ranks", "2", "--megabytes", "1", "--rounds", "1", "--bucket-views", "--json", str(file)]
    run = [sys.executable, "-m", "tenfold.bench", "ddp", *flags]
    ran = subprocess.run(run, capture_output=True, text=True, timeout=200, check=False)
    assert ran.returncode == 0, ran.stderr
    rows = [Row(**each) for each in json.loads(file.read_text())]
    assert [each.kind for each in rows] == [OURS, PLUGGED_IN, GLOO]
    assert all(each.step_ms > 0 for each in rows)
    assert "tenfold's DDP" in ran.stdout
