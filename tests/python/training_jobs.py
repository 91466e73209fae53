"""Runs training cases as several ranks that meet in one store, once for all tests that look at them."""

import fcntl
import math
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from processes import python, run_together
from servers import PROGRAMS
from torch import Tensor
from torch.distributed import TCPStore

JOB_TIMEOUT = 240.0  # seconds, for a busy machine

Result = Tensor | float | str


def run_ranks(program: Path, *arguments: object, world: int, folder: Path, timeout: float = 100) -> None:
    """Fails, with all that was said, unless every rank ends well in time; `folder` has a log of each.

    The store is PyTorch's own and in this process: its port is free, and open before any rank asks for it.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = python("training_ranks.py", store.port, world, folder, program, *arguments)
    run_together([command], folder, timeout=timeout)


@dataclass(frozen=True)
class Job:
    """A job that has ended."""

    folder: Path
    world: int
    failure: str  # what its processes said if it did not end well, else nothing

    def outcome(self, role: str, case: str, rank: int) -> dict[str, Result]:
        """What a case returned on one rank; fails the test if it returned nothing."""
        file = self.folder / role / case / f"{rank}.pt"
        assert file.exists(), f"the job ended before the {role} of `{case}` did:\n{self.failure}"
        outcome = torch.load(file)
        assert isinstance(outcome, dict), f"the {role} of `{case}` failed on rank {rank}:\n{outcome}"
        assert outcome, "a case that returns nothing shows nothing"
        return outcome

    def assert_alike(self, case: str) -> None:
        """The candidate of a case returned what its reference did, bit for bit, on every rank."""
        for rank in range(self.world):
            expected = self.outcome("reference", case, rank)
            actual = self.outcome("candidate", case, rank)
            lacking, extra = expected.keys() - actual.keys(), actual.keys() - expected.keys()
            assert not lacking | extra, f"rank {rank} lacks {sorted(lacking)} and has {sorted(extra)} besides"
            different = [name for name in expected if not same_bits(actual[name], expected[name])]
            report = "\n".join(difference(name, actual[name], expected[name]) for name in different)
            assert not different, f"rank {rank}:\n{report}"


def difference(name: str, actual: Result, expected: Result) -> str:
    if isinstance(actual, Tensor) and isinstance(expected, Tensor) and actual.shape == expected.shape:
        places = actual != expected
        apart = (actual.double() - expected.double()).abs().max().item()
        found = f"{actual[places][:3].tolist()} is not {expected[places][:3].tolist()}"
        return f"{name}: {int(places.sum())} of {places.numel()} differ, by at most {apart:.3g}: {found}"
    return f"{name}: {actual} is not {expected}"


def shared_job(
    factory: pytest.TempPathFactory, name: str, world: int, modules: list[str], *roles: str
) -> Job:
    """Run by the first worker of pytest that needs it; the others wait for it and share what it left."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(exist_ok=True)
    failure = folder / "failure"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not failure.exists():
            failure.write_text(run_job(folder, world, modules, *roles))
    return Job(folder, world, failure.read_text())


def run_job(folder: Path, world: int, modules: list[str], *roles: str) -> str:
    """Each test judges its own case; what else went wrong is kept for those that find nothing to judge."""
    arguments = [PROGRAMS / "training.py", folder, ",".join(modules), *roles]
    try:
        run_ranks(*arguments, world=world, folder=folder, timeout=JOB_TIMEOUT)
    except AssertionError as failure:
        return str(failure)
    return ""


def same_bits(left: Result, right: Result) -> bool:
    """Equal down to the signs of zeros, except that any NaN equals any other."""
    if isinstance(left, float) and isinstance(right, float) and math.isnan(left):
        return math.isnan(right)
    if not isinstance(left, Tensor) or not isinstance(right, Tensor):
        return type(left) is type(right) and left == right
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
