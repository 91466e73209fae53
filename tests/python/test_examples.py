"""The examples learn, end alike on all ranks, and compute what they compute under Gloo."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from servers import ROOT
from torch import Tensor
from torchft_suite import NotFetchedError, install
from training_jobs import run_ranks
from wheel_suite import ENVIRONMENT

# With two ranks there is one way to add two numbers, up to a swap that changes no bit. With four, (a+b)+(c+d)
# and ((a+b)+c)+d may differ in the last place, and training carries that on: the bound is chosen,
# not measured.
TOLERANCE = {2: 0.0, 4: 1e-5}


@dataclass(frozen=True)
class Training:
    losses: list[float]  # by epoch
    accuracy: float
    parameters: list[dict[str, Tensor]]  # by rank


def train(example: str, backend: str, world: int, folder: Path) -> Training:
    folder.mkdir()
    options = ["--backend", backend, "--save", folder / "{rank}.pt"]
    run_ranks(ROOT / "examples" / example, *options, world=world, folder=folder)
    said = (folder / "0.log").read_text()
    return Training(
        [float(loss) for loss in re.findall(r"^epoch \d+: loss (.+)$", said, re.MULTILINE)],
        float(re.search(r"^accuracy (.+)%$", said, re.MULTILINE)[1]) / 100,
        [torch.load(folder / f"{rank}.pt") for rank in range(world)],
    )


@pytest.mark.timeout(240)  # two jobs, each with a limit of its own, on a machine that may be busy
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("example", ["ddp.py", "fsdp2.py", "dtensor.py"])
def test_an_example_learns_on_all_ranks_what_it_learns_under_gloo(
    example: str, world: int, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    expected = train(example, "gloo", world, tmp_path / "expected")
    actual = train(example, pytestconfig.getoption("--backend"), world, tmp_path / "actual")
    for training in (expected, actual):
        assert len(training.losses) == 5
        assert training.losses[-1] < training.losses[0] / 2
        assert training.accuracy > 0.9
        for parameters in training.parameters:
            torch.testing.assert_close(parameters, training.parameters[0], rtol=0, atol=0)
    torch.testing.assert_close(
        actual.parameters[0], expected.parameters[0], rtol=TOLERANCE[world], atol=TOLERANCE[world]
    )


def test_the_example_in_rust_runs_under_stock_torchrun(tmp_path: Path) -> None:
    program = (
        Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "examples/train_rust/target")) / "debug/train_rust"
    )
    assert program.exists(), (
        f"no program at {program}: run `cargo build` in examples/train_rust, or `./test python`"
    )
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "--no-python",
    ]
    ended = subprocess.run(
        [*torchrun, program, "--epochs=1"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert re.search(
        r"^replicas bit-identical: 2 of 2, fingerprint [0-9a-f]{16}$", ended.stdout, re.MULTILINE
    )


@pytest.mark.timeout(240)
def test_the_example_with_torchft_loses_a_replica_and_goes_on(tmp_path: Path) -> None:
    try:
        torchft = install()
    except NotFetchedError as reason:
        pytest.skip(f"torchft is not here: {reason}")
    environment = os.environ | ENVIRONMENT
    environment["PYTHONPATH"] = f"{os.environ.get('PYTHONPATH', '')}{os.pathsep}{torchft}"
    ended = subprocess.run(
        [sys.executable, ROOT / "examples" / "torchft_ddp.py", "--steps=12", "--kill=1:4"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    steps = re.findall(r"replica (\d): step (\d+) of 12, (\d) replicas", ended.stdout)
    assert {("0", "4", "3"), ("1", "4", "3"), ("2", "4", "3")} <= set(steps), ended.stdout
    assert {("0", "12", "2"), ("2", "12", "2")} <= set(steps), "two go on"
    assert max(int(step) for replica, step, _ in steps if replica == "1") == 4
    weights = dict(re.findall(r"replica (\d): weights ([0-9a-f]{16})", ended.stdout))
    assert weights.keys() == {"0", "2"}
    assert weights["0"] == weights["2"], "the replicas differ"
    assert "2 of 3 replicas have trained to the end" in ended.stdout
