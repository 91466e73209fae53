"""tenfold's DistributedDataParallel computes what PyTorch's does on Gloo, bit for bit.

With two ranks the order of a sum does not matter, so there is nothing to tolerate; with four it does, and how
much is said below. The cases are in
`programs/ddp_*.py`; one job of two processes runs all of them both ways, and each test looks at one case.
`--ddp torch` puts PyTorch's DDP in our place, on `--backend`.
"""

import pytest
import torch
from training_case import cases_of
from training_jobs import JOB_TIMEOUT, Job, same_bits, shared_job

MODULES = [
    "training_ddp",
    "ddp_models",
    "ddp_features",
    "ddp_join",
    "ddp_log",
    "ddp_precision",
    "ddp_hooks",
    "ddp_examples",
]
ROUNDING = ["ddp_rounding"]

pytestmark = pytest.mark.timeout(JOB_TIMEOUT + 60)  # whichever test comes first waits for the whole job


def job_of(
    factory: pytest.TempPathFactory, config: pytest.Config, name: str, world: int, modules: list[str]
) -> Job:
    candidate = f"candidate={config.getoption('--backend')}/{config.getoption('--ddp')}"
    return shared_job(factory, name, world, modules, "reference=gloo/torch", candidate)


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Job:
    return job_of(tmp_path_factory, pytestconfig, "ddp", 2, MODULES)


@pytest.fixture(scope="session")
def job_of_four(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Job:
    return job_of(tmp_path_factory, pytestconfig, "ddp-of-four", 4, ROUNDING)


@pytest.mark.parametrize("case", cases_of(*MODULES))
def test_training_equals_that_of_pytorchs_ddp_bit_for_bit(case: str, job: Job) -> None:
    job.assert_alike(case)


def test_the_job_of_all_cases_ends_well(job: Job) -> None:
    assert not job.failure, job.failure


@pytest.mark.parametrize("role", ["reference", "candidate"])
@pytest.mark.parametrize("case", cases_of(*ROUNDING))
def test_averages_of_four_ranks_are_within_a_rounding_of_each_addition(
    case: str, role: str, job_of_four: Job
) -> None:
    """An average of n terms takes n - 1 additions, whatever their order, and each rounds once.

    So it is off by at most (n - 1) u / (1 - (n - 1) u) times the sum of the terms' magnitudes, where u is
    half a unit in the last place of 1; a division by 4 rounds nothing. All ranks have the same bits.
    """
    world = job_of_four.world
    outcomes = [job_of_four.outcome(role, case, rank) for rank in range(world)]
    averages = [name for name in outcomes[0] if name.startswith("average")]
    assert averages
    for name in averages:
        found = outcomes[0][name]
        for rank in range(1, world):
            assert same_bits(found, outcomes[rank][name]), f"{name} on rank {rank} is not that of rank 0"
        terms = [outcome[name.replace("average", "own")].double() / world for outcome in outcomes]
        unit = torch.finfo(found.dtype).eps / 2
        error = (world - 1) * unit / (1 - (world - 1) * unit)
        apart, allowed = (found.double() - sum(terms)).abs(), error * sum(term.abs() for term in terms)
        assert (apart <= allowed).all(), f"{name} is off by {(apart - allowed).max():.3g} more than allowed"


@pytest.mark.parametrize("case", cases_of(*ROUNDING))
def test_losses_and_gradients_of_four_ranks_are_those_of_pytorchs_ddp(case: str, job_of_four: Job) -> None:
    """The losses and each rank's own gradients to the bit; the same parameters have averages."""
    for rank in range(job_of_four.world):
        expected = job_of_four.outcome("reference", case, rank)
        actual = job_of_four.outcome("candidate", case, rank)
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            if not name.startswith("average"):
                assert same_bits(actual[name], value), f"{name} on rank {rank}"


def test_the_job_of_four_ends_well(job_of_four: Job) -> None:
    assert not job_of_four.failure, job_of_four.failure
