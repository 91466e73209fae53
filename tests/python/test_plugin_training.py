"""Training under the plug-in computes what it computes under Gloo, bit for bit.

With two ranks the order of a sum does not matter, so there is nothing to tolerate. The cases are in
`programs/training_*.py`; one job of two processes runs all of them under both backends, and each test here
looks at one case.
"""

import pytest
from training_case import cases_of
from training_jobs import JOB_TIMEOUT, Job, shared_job

MODULES = ["training_ddp", "training_sharded"]

pytestmark = pytest.mark.timeout(JOB_TIMEOUT + 60)  # whichever test comes first waits for the whole job


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Job:
    candidate = f"candidate={pytestconfig.getoption('--backend')}"
    return shared_job(tmp_path_factory, "training", 2, MODULES, "reference=gloo", candidate)


@pytest.mark.parametrize("case", cases_of(*MODULES))
def test_training_equals_gloo_bit_for_bit(case: str, job: Job) -> None:
    job.assert_alike(case)


def test_the_job_of_all_cases_ends_well(job: Job) -> None:
    assert not job.failure, job.failure
