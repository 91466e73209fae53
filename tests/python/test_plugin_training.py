"""Training under the plug-in computes what it computes under Gloo, bit for bit.

With two ranks the order of a sum does not matter, so there is nothing to tolerate. The cases are in
`programs/training_*.py`; one job of two processes runs all of them under both backends, and each test here
looks at one case.
"""

import fcntl
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from servers import PROGRAMS
from torch import Tensor
from training_jobs import run_ranks

sys.path.append(str(PROGRAMS))

from training import CASES

WORLD = 2
JOB_TIMEOUT = 240.0  # seconds, for a busy machine

pytestmark = pytest.mark.timeout(JOB_TIMEOUT + 60)  # whichever test comes first waits for the whole job


@dataclass(frozen=True)
class Job:
    """A job that has ended."""

    folder: Path
    failure: str  # what its processes said if it did not end well, else nothing

    def outcome(self, role: str, case: str, rank: int) -> dict[str, Tensor | float]:
        """What a case returned on one rank; fails the test if it returned nothing."""
        file = self.folder / role / case / f"{rank}.pt"
        assert file.exists(), f"the job ended before the {role} of `{case}` did:\n{self.failure}"
        outcome = torch.load(file)
        assert isinstance(outcome, dict), f"the {role} of `{case}` failed on rank {rank}:\n{outcome}"
        return outcome


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Job:
    """Run by the first worker of pytest that needs it; the others wait for it and share what it left."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "training"
    folder.mkdir(exist_ok=True)
    failure = folder / "failure"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not failure.exists():
            failure.write_text(run_job(folder, pytestconfig.getoption("--backend")))
    return Job(folder, failure.read_text())


def run_job(folder: Path, backend: str) -> str:
    """Each test judges its own case; what else went wrong is kept for those that find nothing to judge."""
    try:
        program = PROGRAMS / "training.py"
        run_ranks(program, folder, "gloo", backend, world=WORLD, folder=folder, timeout=JOB_TIMEOUT)
    except AssertionError as failure:
        return str(failure)
    return ""


@pytest.mark.parametrize("case", CASES)
def test_training_equals_gloo_bit_for_bit(case: str, job: Job) -> None:
    for rank in range(WORLD):
        expected = job.outcome("reference", case, rank)
        actual = job.outcome("candidate", case, rank)
        assert expected, "a case that returns nothing shows nothing"
        assert list(actual) == list(expected)
        different = [name for name in expected if not same_bits(actual[name], expected[name])]
        report = "\n".join(f"{name}: {actual[name]} is not {expected[name]}" for name in different)
        assert not different, f"rank {rank}:\n{report}"


def test_the_job_of_all_cases_ends_well(job: Job) -> None:
    assert not job.failure, job.failure


def same_bits(left: Tensor | float, right: Tensor | float) -> bool:
    """Equal down to the signs of zeros, except that any NaN equals any other."""
    if not isinstance(left, Tensor):
        return left == right or (math.isnan(left) and math.isnan(right))
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if not left.is_floating_point():
        return torch.equal(left, right)
    numbers, others = left.nan_to_num(), right.nan_to_num()
    return (
        torch.equal(left.isnan(), right.isnan())
        and torch.equal(numbers, others)
        and torch.equal(numbers.signbit(), others.signbit())
    )
