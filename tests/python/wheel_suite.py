#!/usr/bin/env python3
"""The distributed test class inside the PyTorch wheel, with tenfold as the backend and Gloo as the measure.

Whatever Gloo passes, tenfold has to pass: a test that Gloo passes and tenfold fails or skips is listed by
name, and makes the exit code 1. Each backend runs in a process of its own (see programs/wheel_tests.py) for
each number of ranks.

Gloo's results change only with PyTorch. They are recorded in wheel_results/, per version of PyTorch and
number of ranks, and Gloo itself runs only where there is no recording.

    wheel_suite.py                        2 ranks
    wheel_suite.py --ranks 2,3,4,8        all that have tests of their own
    wheel_suite.py --only barrier         tests with `barrier` in their name
    wheel_suite.py --check-recording      runs Gloo too, and fails if its results are not those recorded
    wheel_suite.py --record               runs Gloo and records its results
"""

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).parent / "programs" / "wheel_tests.py"
RECORDINGS = Path(__file__).parent / "wheel_results"

# For PyTorch programs with many small processes on one machine.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "RES_OPTIONS": "timeout:1 attempts:1",  # torch looks up names of peers, for its log
    # Some virtual machines advertise AMX and trap on it.
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
}


OUTCOMES = ("passed", "failed", "skipped")


@dataclass
class Run:
    """What became of every test with one backend and one number of ranks."""

    outcomes: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    recorded: bool = False

    def count(self, outcome: str) -> int:
        return Counter(self.outcomes.values())[outcome]

    def counts(self) -> str:
        return f"{self.count('passed'):>4} / {self.count('failed'):>3} / {self.count('skipped'):>3}"

    def only(self, names: Collection[str]) -> "Run":
        chosen = {name: outcome for name, outcome in self.outcomes.items() if name in names}
        return Run(
            chosen, {name: self.reasons[name] for name in chosen if name in self.reasons}, self.recorded
        )


class SuiteError(Exception):
    """The tests could not be run at all."""


def run_suite(backend: str, ranks: int, only: str, limit: float) -> Run:
    run = Run()
    with answers_of(backend, ranks, limit, only) as answers:
        for result in answers:
            name, outcome = result["test"], result["outcome"]
            run.outcomes[name] = outcome
            if result["reason"]:
                run.reasons[name] = result["reason"]
            place = f"{ranks} ranks, {backend}, {len(run.outcomes)} of {len(answers.tests)}"
            print(f"[{place}] {outcome:<7} {result['seconds']:6.2f} s  {name}", flush=True)
        if missing := set(answers.tests) - set(run.outcomes):
            raise SuiteError(f"{backend} at {ranks} ranks: no outcome of {', '.join(sorted(missing))}")
    return run


class Answers:
    """The lines that the program writes: first the names of all tests, then the results one by one."""

    def __init__(self, program: subprocess.Popen) -> None:
        self._lines = program.stdout
        first = self._lines.readline()
        if not first:
            raise SuiteError(f"`{' '.join(program.args)}` ended with {program.wait()}; see above")
        self.tests: list[str] = json.loads(first)["tests"]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(json.loads, self._lines)


@contextmanager
def answers_of(backend: str, ranks: int, limit: float, only: str, *wishes: str) -> Iterator[Answers]:
    command = [sys.executable, str(PROGRAM), backend, str(ranks), str(limit), only, *wishes]
    program = subprocess.Popen(
        command, env=ENVIRONMENT | os.environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    try:
        yield Answers(program)
    except BaseException:
        program.terminate()  # it ends the test under way
        raise
    finally:
        program.wait()
        program.stdout.close()


def recording_of(backend: str, ranks: int) -> Path:
    version = importlib.metadata.version("torch")
    return RECORDINGS / f"{backend}-{version}-{ranks}-ranks.json"


def record(file: Path, run: Run) -> None:
    """Writes the names of the tests by outcome. A failure would excuse tenfold from that test."""
    if failed := [name for name, outcome in run.outcomes.items() if outcome == "failed"]:
        raise SuiteError(f"not recorded, because these tests failed: {', '.join(failed)}")
    by_outcome = {
        wanted: sorted(name for name, outcome in run.outcomes.items() if outcome == wanted)
        for wanted in ("passed", "skipped")
    }
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(by_outcome, indent=1) + "\n")
    print(f"recorded in {file}", flush=True)


def read_recording(file: Path) -> Run:
    by_outcome = json.loads(file.read_text())
    outcomes = {name: outcome for outcome, names in by_outcome.items() for name in names}
    return Run(outcomes, recorded=True)


def reference_run(options: argparse.Namespace, ranks: int, part: str) -> Run:
    """What the measure does: as recorded, or by running it where there is no recording."""
    file = recording_of(options.against, ranks)
    if options.record:
        run = run_suite(options.against, ranks, "", options.limit)
        record(file, run)
        return run
    if not file.exists():
        print(
            f"no recording of {options.against} in {file}: it runs now (--record keeps its results)",
            flush=True,
        )
        return run_suite(options.against, ranks, part, options.limit)
    recorded = read_recording(file)
    if options.check_recording:
        run = run_suite(options.against, ranks, part, options.limit)
        names = run.outcomes.keys() if part else run.outcomes.keys() | recorded.outcomes.keys()
        if changed := sorted(name for name in names if recorded.outcomes.get(name) != run.outcomes.get(name)):
            raise SuiteError(f"{file} is out of date: {', '.join(changed)}")
    return recorded


@dataclass
class Comparison:
    ranks: int
    reference: Run
    tested: Run
    seconds: float

    def worse(self) -> list[str]:
        """What the reference passes and the tested backend does not."""
        passed = (name for name, outcome in self.reference.outcomes.items() if outcome == "passed")
        return [name for name in passed if self.tested.outcomes.get(name) != "passed"]

    def is_good(self) -> bool:
        return self.reference.count("passed") > 0 and not self.worse()


def print_table(comparisons: list[Comparison], reference: str, tested: str) -> None:
    print("\npassed / failed / skipped\n")
    print(f"{'ranks':>5}  {reference:<24}  {tested:<18}  worse than {reference}   seconds")
    for each in comparisons:
        theirs = each.reference.counts() + (" recorded" if each.reference.recorded else "")
        ours = f"{each.tested.counts():<18}  {len(each.worse()):<16}  {each.seconds:.0f}"
        print(f"{each.ranks:>5}  {theirs:<24}  {ours}")
    for each in comparisons:
        for name in each.worse():
            outcome = each.tested.outcomes.get(name, "missing")
            reason = each.tested.reasons.get(name, "").strip().replace("\n", "\n    ")
            print(f"\n{each.ranks} ranks: {reference} passes, {tested} {outcome}: {name}\n    {reason}")
    totals = [sum(each.tested.count(outcome) for each in comparisons) for outcome in OUTCOMES]
    print("\n" + ", ".join(f"{total} {outcome}" for total, outcome in zip(totals, OUTCOMES, strict=True)))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="2", help="numbers of ranks, such as 2,3,4,8 (default: 2)")
    parser.add_argument("--backend", default="tenfold", help="what is tested (default: tenfold)")
    parser.add_argument("--against", default="gloo", help="the measure (default: gloo)")
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="only tests with this in their name")
    parser.add_argument("--list", action="store_true", help="print the names of the tests and end")
    parser.add_argument("--record", action="store_true", help="run the measure and record its results")
    parser.add_argument(
        "--check-recording", action="store_true", help="run the measure too; fail if its results have changed"
    )
    parser.add_argument(
        "--test",
        action="append",
        default=[],
        metavar="NAME",
        help="only this test, such as `2 ranks: test_barrier`",
    )
    parser.add_argument("--results", type=Path, help="a file for what became of each test, for tests/harness")
    parser.add_argument(
        "--limit",
        type=float,
        default=120,
        metavar="SECONDS",
        help="a test that takes longer is killed (default: 120)",
    )
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if options.list:
        ranks, part = chosen(options)[0]
        with answers_of(options.against, ranks, options.limit, part, "--list") as answers:
            print("\n".join(answers.tests))
        return 0
    comparisons = []
    for ranks, part in chosen(options):
        reference = reference_run(options, ranks, part)
        started = time.monotonic()
        tested = run_suite(options.backend, ranks, part, options.limit)
        reference = reference.only(tested.outcomes) if part else reference
        comparisons.append(Comparison(ranks, reference, tested, time.monotonic() - started))
    print_table(comparisons, options.against, options.backend)
    if options.results:
        write_results(comparisons, options.results)
    return 0 if all(each.is_good() for each in comparisons) else 1


def chosen(options: argparse.Namespace) -> list[tuple[int, str]]:
    """Which tests to run, with how many ranks: `=name` is one test, else a part of the names."""
    if not options.test:
        return [(int(ranks), options.only) for ranks in options.ranks.split(",")]
    names = [test.partition(" ranks: ") for test in options.test]
    return [(int(ranks), f"={name}") for ranks, _, name in names]


def write_results(comparisons: list[Comparison], file: Path) -> None:
    with file.open("a") as lines:
        for each in comparisons:
            worse = each.worse()
            for name, outcome in each.reference.outcomes.items():
                if outcome == "passed":
                    text = each.tested.reasons.get(name, each.tested.outcomes.get(name, "missing"))
                    result = {
                        "test": f"{each.ranks} ranks: {name}",
                        "passed": name not in worse,
                        "text": text,
                    }
                    print(json.dumps(result), file=lines)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SuiteError as error:
        print(f"wheel_suite.py: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit("wheel_suite.py: interrupted")
