"""The distributed test class inside the PyTorch wheel, run: wheel_tests.py BACKEND RANKS LIMIT PART [--list].

Runs the tests with PART in their name, or the one test NAME if PART is `=NAME`. Writes one JSON object per
line: first {"tests": [names]}, then for each of them {"test", "outcome", "seconds", "reason"}, unless only
the list is wanted.

torch is imported once, here. Each test gets a process that is forked from this one and leads a process group;
it forks the ranks, as the wheel's own base class does with slow, fresh processes. Forking is safe because
nothing here starts a thread. When the leader ends, or has used up its LIMIT of seconds, whatever is left of
its group is killed, so no test can harm the next one.

The class compares the backend's name with "gloo" in some 250 places to decide what to run and what to expect.
So the name that it sees is a string that equals "gloo" too; torch itself always makes a plain string of it.
"""

import importlib
import json
import os
import select
import signal
import sys
import tempfile
import time
import traceback
import unittest
from collections import UserDict
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import TextIO

LAST_LINES = 25  # of a log, enough for a traceback of one rank


class Alias(str):
    """Prints as one name, equals another one as well."""

    other = "gloo"

    def __eq__(self, value: object) -> bool:
        return str.__eq__(self, value) or self.other == value

    def __ne__(self, value: object) -> bool:
        return not self == value

    # In a set or dict it is to be found where the other name is; str's own sets list that one.
    def __hash__(self) -> int:
        return hash(self.other)


class AliasedEnvironment(UserDict):
    """`os.environ`, except that BACKEND is an Alias; a real environment holds plain strings only."""

    def __init__(self, environment: os._Environ, backend: str) -> None:
        self.data = environment
        self.backend = Alias(backend)

    def __getitem__(self, key: str) -> str:
        return self.backend if key == "BACKEND" else self.data[key]


@contextmanager
def environment_seen_by_import(backend: str):
    real = os.environ
    if backend != Alias.other:
        os.environ = AliasedEnvironment(real, backend)  # noqa: B003, this is the point: putenv is not wanted
    try:
        yield
    finally:
        os.environ = real  # noqa: B003


def import_tests(backend: str, ranks: int, limit: float) -> type[unittest.TestCase]:
    """The wheel's class, ready to run: it has the tests and the base class, but nothing that joins them."""
    os.environ |= {
        "BACKEND": backend,
        "WORLD_SIZE": str(ranks),
        # A little before we would kill it, the base class asks the ranks that hang for their tracebacks.
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(max(1, int(limit) - 10)),
    }
    if backend == "tenfold":
        importlib.import_module("tenfold.torch")  # the entry point would do, but not from a source tree
    common = importlib.import_module("torch.testing._internal.common_distributed")
    common.TIMEOUT_OVERRIDE.clear()  # they are longer than our limit
    for feature, backends in common.DistTestCases.backend_feature.items():
        if "gloo" in backends or feature == "plugin":
            backends.add(backend)
    with environment_seen_by_import(backend):
        module = importlib.import_module("torch.testing._internal.distributed.distributed_test")
    return runnable(module)


def runnable(module: ModuleType) -> type[unittest.TestCase]:
    import torch.multiprocessing

    class WheelTests(module.TestDistBackend, module.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._spawn_processes()

        def _spawn_processes(self) -> None:
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        # The base class looks at the first rank only; a crash of another one is a failure as well.
        def _check_return_codes(self, fn, elapsed_time: float) -> None:
            super()._check_return_codes(fn, elapsed_time)
            codes = [process.exitcode for process in self.processes]
            if fn not in self.skip_return_code_checks and len(set(codes)) > 1:
                raise RuntimeError(f"the ranks ended with different exit codes: {codes}")

    return WheelTests


def run_alone(test: unittest.TestCase, limit: float) -> tuple[str, str]:
    """Runs it in a process group and a folder of its own: the outcome, and the reason if it did not pass."""
    with tempfile.TemporaryDirectory(prefix="wheel-test-") as folder:
        log, report = Path(folder, "log"), Path(folder, "report")
        leader = os.fork()
        if leader == 0:
            lead(test, Path(folder), log, report)
        end = os.pidfd_open(leader)
        try:
            in_time, _, _ = select.select([end], [], [], limit)
        finally:
            os.close(end)
            # Before it is reaped, so that the number is still its own.
            with suppress(ProcessLookupError):
                os.killpg(leader, signal.SIGKILL)
            _, status = os.waitpid(leader, 0)
        said = "\n".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:]) if log.exists() else ""
        if not in_time:
            return "failed", f"{said}\nkilled after its limit of {limit:.0f} s"
        if not report.exists():
            return "failed", f"{said}\nits leading process ended with {os.waitstatus_to_exitcode(status)}"
        outcome, reason = json.loads(report.read_text())
        return outcome, reason if outcome != "failed" else f"{said}\n{reason}"


def lead(test: unittest.TestCase, folder: Path, log: Path, report: Path) -> None:
    """What the forked process does; never returns."""
    code = 1
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the base class ends ranks by it
        output = os.open(log, os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        tempfile.tempdir = str(folder)  # what a killed test leaves behind goes with the folder
        result = unittest.TestResult()
        test.run(result)
        report.write_text(json.dumps(verdict(result)))
        code = 0
    except BaseException:  # whatever it is: this process must not go on as its parent does
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def verdict(result: unittest.TestResult) -> tuple[str, str]:
    if bad := result.errors + result.failures:
        return "failed", "\n".join(text for _, text in bad)
    if result.skipped:
        return "skipped", "; ".join(reason for _, reason in result.skipped)
    return "passed", ""


def main(answers: TextIO, backend: str, ranks: str, limit_text: str, part: str, *wishes: str) -> None:
    def answer(**line: object) -> None:
        print(json.dumps(line), file=answers, flush=True)

    limit = float(limit_text)
    tests = import_tests(backend, int(ranks), limit)
    names = [
        name for name in unittest.TestLoader().getTestCaseNames(tests) if part in name or part == f"={name}"
    ]
    answer(tests=names)
    if "--list" in wishes:
        return
    tests.setUpClass()
    for name in names:
        started = time.monotonic()
        outcome, reason = run_alone(tests(name), limit)
        answer(test=name, outcome=outcome, seconds=round(time.monotonic() - started, 2), reason=reason)


if __name__ == "__main__":
    # The answers keep the standard output for themselves; what torch prints there goes to the errors.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the test under way is ended as well
    main(answers, *sys.argv[1:])
