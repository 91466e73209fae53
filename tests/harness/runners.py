"""The test runners that `./test` starts: how to run all of their tests or a few, and what became of each.

Every runner writes its own output as usual, closing line included. What became of each test is read from a
file that the runner writes, never from that output.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Protocol

ROOT = Path(__file__).parents[2]
ON_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}  # for the tests with PyTorch; those in Rust choose for themselves
LINES_MAX = 12  # of a failure: the place, the message, some values


@dataclass
class Report:
    """How one run ended."""

    code: int
    outcomes: dict[str, bool] = field(
        default_factory=dict
    )  # did it pass? Tests that were skipped are not here
    texts: dict[str, str] = field(default_factory=dict)  # the first lines of each failure
    is_complete: bool = True  # False: the runner stopped for another reason than a failed test

    def failures(self) -> list[str]:
        return [test for test, passed in self.outcomes.items() if not passed]

    def passed(self, test: str) -> bool:
        return self.code == 0 and self.outcomes.get(test, False)


class Runner(Protocol):
    def run(self, tests: Sequence[str] = ()) -> Report:
        """Runs these tests one at a time, or all of the runner's tests side by side."""


@dataclass
class Nextest:
    """A test's name is nextest's own: `package::binary test`."""

    arguments: Sequence[str] = ()
    workspace: Path = ROOT

    def build(self) -> None:
        command = ["cargo", "nextest", "run", "--workspace", "--profile", "full", "--no-run"]
        subprocess.run(command, cwd=self.workspace, check=True)

    def run(self, tests: Sequence[str] = ()) -> Report:
        results = self.workspace / "target" / "nextest" / "full" / "junit.xml"
        results.unlink(missing_ok=True)
        command = ["cargo", "nextest", "run", "--workspace", "--profile", "full"]
        if tests:
            command += ["--test-threads", "1", "-E", " | ".join(map(nextest_filter, tests))]
        else:
            command += self.arguments
        code = subprocess.run(command, cwd=self.workspace, check=False).returncode
        report = Report(code, is_complete=code in (0, 100))  # 100: tests ran and some failed
        if results.exists():
            for suite in ElementTree.parse(results).getroot().iter("testsuite"):
                for case in suite.iter("testcase"):
                    note_junit_case(report, f"{suite.get('name')} {case.get('name')}", case)
        return report


def nextest_filter(test: str) -> str:
    binary, _, name = test.partition(" ")
    return f"(binary_id(={binary}) & test(={name}))"


def note_junit_case(report: Report, test: str, case: ElementTree.Element) -> None:
    problem = next((case.find(tag) for tag in ("failure", "error") if case.find(tag) is not None), None)
    report.outcomes[test] = problem is None
    if problem is not None:
        said = problem.text or problem.get("message") or problem.get("type") or ""
        report.texts[test] = first_lines(said)


@dataclass
class Pytest:
    """A test's name is its node ID, which begins below tests/python. conftest.py writes the results."""

    arguments: Sequence[str] = ()
    workers: int = 2

    def run(self, tests: Sequence[str] = ()) -> Report:
        with results_file() as results:
            command = [sys.executable, "-m", "pytest", "--timeout", "120", f"--results={results.name}"]
            if tests:
                command += ["-n", "0", *self.arguments, *(f"tests/python/{test}" for test in tests)]
            else:
                command += ["-n", str(self.workers), *self.arguments, "tests/python"]
            code = subprocess.run(command, cwd=ROOT, env=os.environ | ON_LOOPBACK, check=False).returncode
            return read_results(results, code)


@dataclass
class Suite:
    """Tests of another project: PyTorch's (a name is `2 ranks: test_all_reduce_sum`), or torchft's."""

    arguments: Sequence[str] = ()
    program: str = "wheel_suite.py"

    def run(self, tests: Sequence[str] = ()) -> Report:
        with results_file() as results:
            command = [
                sys.executable,
                f"tests/python/{self.program}",
                "--results",
                results.name,
                *self.arguments,
            ]
            for test in tests:
                command += ["--test", test]
            code = subprocess.run(command, cwd=ROOT, env=os.environ | ON_LOOPBACK, check=False).returncode
            return read_results(results, code)


@dataclass
class DocTests:
    """The examples in the documentation. They are cheap, so all of them run again if one fails."""

    arguments: Sequence[str] = ()

    def run(self, tests: Sequence[str] = ()) -> Report:
        command = ["cargo", "test", "--workspace", "--doc", "--no-fail-fast", *self.arguments]
        program = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        outcomes: dict[str, bool] = {}
        texts: dict[str, list[str]] = {}
        about = None
        for line in program.stdout:
            print(line, end="", flush=True)
            if found := re.match(r"test (.+) \.\.\. (ok|FAILED)$", line):
                outcomes[found[1]] = found[2] == "ok"
            elif found := re.match(r"---- (.+) stdout ----$", line):
                about = texts.setdefault(found[1], [])
            elif line.startswith("failures:"):
                about = None
            elif about is not None:
                about.append(line)
        code = program.wait()
        said = {test: first_lines("".join(lines)) for test, lines in texts.items()}
        return Report(code, outcomes, said, is_complete=code == 0 or not all(outcomes.values()))


RUNNERS = {
    "nextest": Nextest,
    "example": partial(Nextest, workspace=ROOT / "examples" / "train_rust"),
    "pytest": Pytest,
    "wheel": Suite,
    "torchft": partial(Suite, program="torchft_suite.py"),
    "doctest": DocTests,
}


def results_file() -> "tempfile._TemporaryFileWrapper[str]":
    return tempfile.NamedTemporaryFile("r", prefix="tenfold-results-", suffix=".jsonl")


def read_results(results: "tempfile._TemporaryFileWrapper[str]", code: int) -> Report:
    """Reads lines such as {"test": "…", "passed": false, "text": "…"}; a test may have several lines."""
    report = Report(code, is_complete=code in (0, 1))
    for line in results:
        result = json.loads(line)
        test = result["test"]
        report.outcomes[test] = result["passed"] and report.outcomes.get(test, True)
        if not result["passed"]:
            report.texts.setdefault(test, first_lines(result["text"]))
    return report


def first_lines(text: str) -> str:
    """What a failure says first, without colours: pytest marks it by `E`, Rust by `panicked at`."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in text.splitlines()]
    lines = [line for line in lines if line]
    marked = [line for line in lines if line.startswith("E  ")]
    if not marked:
        start = next((place for place, line in enumerate(lines) if " panicked at " in line), 0)
        marked = list(takewhile(lambda line: "stack backtrace:" not in line, lines[start:]))
    return "\n".join(line[:200] for line in marked[:LINES_MAX])
