"""The README's Python runs, under the command that it names."""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import ENVIRONMENT

ROOT = Path(__file__).parents[2]


def tenfold_run(*words: str | Path) -> list[str]:
    """The lines that the ranks of `tenfold run` wrote, in the order of ranks."""
    ended = subprocess.run(
        [sys.executable, "-m", "tenfold", "run", *words],
        env=ENVIRONMENT | os.environ,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return sorted(ended.stdout.splitlines())


@pytest.mark.smoke
def test_the_five_lines_do_what_the_readme_shows(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    program = re.search(r"<!-- tests/python/test_readme.py .*?```python\n(.*?)```", readme, re.DOTALL)
    shown = re.search(r"\$ tenfold run -n 2 example.py\n(.*?)```", readme, re.DOTALL)
    example = tmp_path / "example.py"
    example.write_text(program[1])
    assert len(program[1].splitlines()) == 5
    assert tenfold_run("-n", "2", example) == shown[1].splitlines()


def test_the_reducer_of_the_ddp_guide_averages(tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "ddp.md").read_text()
    program = re.search(r"<!-- tests/python/test_readme.py .*?```python\n(.*?)```", guide, re.DOTALL)
    example = tmp_path / "example.py"
    example.write_text(program[1])
    # Three steps of 0.1 along the average of ranks 0 and 1.
    assert tenfold_run("-n", "2", example) == ["[0] [-0.15 -0.15]", "[1] [-0.15 -0.15]"]


def test_an_example_runs_under_the_launcher() -> None:
    lines = tenfold_run("-n", "2", ROOT / "examples" / "ddp.py", "--epochs", "1")
    assert any("loss" in line for line in lines), lines


def test_arrays_train_without_pytorch() -> None:
    lines = tenfold_run("-n", "4", ROOT / "examples" / "numpy_regression.py", "--epochs", "200")
    assert any("4 replicas agree to the last bit" in line for line in lines), lines


def test_the_package_installs_the_command_and_the_backend() -> None:
    backends = importlib.metadata.entry_points(group="torch.distributed.backends", name="tenfold")
    installed = importlib.metadata.files("tenfold") or []
    assert [file for file in map(str, installed) if file.endswith("bin/tenfold")], installed
    assert [backend.value for backend in backends] == ["tenfold.torch:register"]
