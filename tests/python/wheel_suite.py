#!/usr/bin/env python3
"""The distributed test class inside the PyTorch wheel, with tenfold as the backend and Gloo as the measure.

Whatever Gloo passes on this machine, tenfold has to pass: a test that Gloo passes and tenfold fails or skips
is listed by name, and makes the exit code 1. Each backend runs in a process of its own (see
programs/wheel_tests.py) for each number of ranks. Gloo's results are kept in a file: they do not change.

    wheel_suite.py                        2 ranks
    wheel_suite.py --ranks 2,3,4,8        all that have tests of their own
    wheel_suite.py --only barrier         tests with `barrier` in their name
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).parent / "programs" / "wheel_tests.py"

# For PyTorch programs with many small processes on one machine.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "RES_OPTIONS": "timeout:1 attempts:1",  # torch looks up names of peers, for its log
    # Some virtual machines advertise AMX and trap on it.
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
}


@dataclass
class Run:
    """What became of every test with one backend and one number of ranks."""

    outcomes: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    cached: bool = False

    def count(self, outcome: str) -> int:
        return Counter(self.outcomes.values())[outcome]

    def counts(self) -> str:
        return f"{self.count('passed'):>4} / {self.count('failed'):>3} / {self.count('skipped'):>3}"

    def only(self, part: str) -> "Run":
        chosen = {name: outcome for name, outcome in self.outcomes.items() if part in name}
        return Run(chosen, {name: self.reasons[name] for name in chosen if name in self.reasons}, self.cached)


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
    """The lines that the program writes: the names of the tests at once, the results one by one."""

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


def cache_file(backend: str, ranks: int) -> Path:
    """Where the results of a backend that never changes are kept: per version of torch, ranks, machine."""
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "tenfold"
    machine = f"{platform.node()} {platform.machine()} {platform.release()} {os.cpu_count()}"
    code = hashlib.sha256(machine.encode() + PROGRAM.read_bytes()).hexdigest()[:16]
    version = importlib.metadata.version("torch")
    return (
        Path(os.environ.get("TENFOLD_CACHE", home))
        / "wheel-suite"
        / f"{backend}-{version}-{ranks}-{code}.json"
    )


def reference_run(backend: str, ranks: int, only: str, limit: float, fresh: bool) -> Run:
    file = cache_file(backend, ranks)
    if file.exists() and not fresh:
        run = Run(**json.loads(file.read_text()), cached=True)
        print(f"[{ranks} ranks, {backend}] cached: {run.counts().strip()}, from {file}", flush=True)
        return run.only(only)
    run = run_suite(backend, ranks, only, limit)
    # A failure of the reference may be an accident, and would excuse tenfold from that test for ever.
    if not only and run.count("passed") and not run.count("failed"):
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps({"outcomes": run.outcomes, "reasons": run.reasons}))
        partial.replace(file)
    return run


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
    print(f"{'ranks':>5}  {reference:<22}  {tested:<18}  worse than {reference}   seconds")
    for each in comparisons:
        theirs = each.reference.counts() + (" cached" if each.reference.cached else "")
        ours = f"{each.tested.counts():<18}  {len(each.worse()):<16}  {each.seconds:.0f}"
        print(f"{each.ranks:>5}  {theirs:<22}  {ours}")
    for each in comparisons:
        for name in each.worse():
            outcome = each.tested.outcomes.get(name, "missing")
            reason = each.tested.reasons.get(name, "").strip().replace("\n", "\n    ")
            print(f"\n{each.ranks} ranks: {reference} passes, {tested} {outcome}: {name}\n    {reason}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="2", help="numbers of ranks, such as 2,3,4,8 (default: 2)")
    parser.add_argument("--backend", default="tenfold", help="what is tested (default: tenfold)")
    parser.add_argument("--against", default="gloo", help="the measure (default: gloo)")
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="only tests with this in their name")
    parser.add_argument("--list", action="store_true", help="print the names of the tests and end")
    parser.add_argument(
        "--fresh", action="store_true", help="run the measure again even if its results are kept"
    )
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
    sizes = [int(ranks) for ranks in options.ranks.split(",")]
    if options.list:
        with answers_of(options.against, sizes[0], options.limit, options.only, "--list") as answers:
            print("\n".join(answers.tests))
        return 0
    comparisons = []
    for ranks in sizes:
        reference = reference_run(options.against, ranks, options.only, options.limit, options.fresh)
        started = time.monotonic()
        tested = run_suite(options.backend, ranks, options.only, options.limit)
        comparisons.append(Comparison(ranks, reference, tested, time.monotonic() - started))
    print_table(comparisons, options.against, options.backend)
    return 0 if all(each.is_good() for each in comparisons) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SuiteError as error:
        sys.exit(f"wheel_suite.py: {error}")
    except KeyboardInterrupt:
        sys.exit("wheel_suite.py: interrupted")
