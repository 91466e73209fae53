"""Repeats tests while all cores are busy, and counts how often each of them failed.

    flaky.py [--rounds N] [--busy N] [--only rust|python|wheel] [-- FILTER]

Runs round after round until Ctrl-C, or N rounds. --busy says how many processes keep the machine busy: one
per core, or 0 where other work does. FILTER is a part of the names of the tests; without it all tests run.
The table at the end lists the tests that failed at least once, or all of them if they are few.
"""

import argparse
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from runners import Nextest, Pytest, Report, Runner, Suite

ROWS_MAX = 40  # so many tests are listed even if none of them failed
NO_TESTS = 5  # pytest's exit code if the filter matches nothing


def runners(only: str | None, filters: list[str]) -> Iterator[tuple[str, Runner]]:
    if only in (None, "rust"):
        yield "rust", Nextest(["--no-tests", "pass", *filters])
    if only in (None, "python"):
        yield "python", Pytest(["-k", " or ".join(filters)] if filters else [])
    if only == "wheel" or (only is None and not filters):
        yield "wheel", Suite(["--only", filters[0]] if filters else [])


@contextmanager
def load(processes: int) -> Iterator[None]:
    """Processes that compute. They also end if this process is killed."""
    start = multiprocessing.get_context("spawn").Process
    busy = [start(target=spin, args=(os.getpid(),), daemon=True) for _ in range(processes)]
    for process in busy:
        process.start()
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.join()


def spin(parent: int) -> None:
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C goes to the whole terminal; the parent ends this process
    while os.getppid() == parent:
        for _ in range(1_000_000):
            pass


class Tally:
    def __init__(self) -> None:
        self.runs: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.texts: dict[str, str] = {}
        self.broken: list[str] = []

    def add(self, kind: str, report: Report) -> None:
        for test, passed in report.outcomes.items():
            self.runs[test] += 1
            self.failures[test] += not passed
            if not passed:
                self.texts[test] = report.texts.get(test, "")
        if not report.is_complete and report.code != NO_TESTS:
            self.broken.append(f"{kind}: the runner ended with exit code {report.code}")

    def is_clean(self) -> bool:
        return not self.broken and not any(self.failures.values())

    def show(self, rounds: int, seconds: float) -> None:
        failed = [test for test, count in self.failures.most_common() if count]
        rows = list(self.runs) if len(self.runs) <= ROWS_MAX else failed
        done = f"{rounds} rounds under load in {seconds:.0f} s"
        print(f"\n==> {done}: {len(self.runs)} tests, {len(failed)} of them failed at least once")
        if rows:
            print(f"{'runs':>6} {'failures':>9}  test")
        for test in sorted(rows, key=lambda test: -self.failures[test]):
            print(f"{self.runs[test]:>6} {self.failures[test]:>9}  {test}")
        for test in failed:
            print(f"\n{test}\n  | " + self.texts[test].replace("\n", "\n  | "))
        for line in self.broken:
            print(line)
        sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--busy", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", choices=["rust", "python", "wheel"])
    parser.add_argument("filters", nargs="*")
    options = parser.parse_args()
    if options.only in (None, "rust"):
        Nextest().build()  # not under load
    tally, started, rounds = Tally(), time.monotonic(), 0
    try:
        with load(options.busy):
            while not options.rounds or rounds < options.rounds:
                for kind, runner in runners(options.only, options.filters):
                    tally.add(kind, runner.run())
                rounds += 1
                tally.show(rounds, time.monotonic() - started)
                if not tally.runs:
                    print("no test matches")
                    return 1
    except KeyboardInterrupt:
        tally.show(rounds, time.monotonic() - started)
    return 0 if tally.is_clean() else 1


if __name__ == "__main__":
    sys.exit(main())
