"""Runs tests; runs those that failed again, alone, up to twice.

    again.py [--strict] [--flaky FILE] RUNNER [-- ARGUMENTS OF THE RUNNER]

A test that passes when it runs again is flaky: it does not fail the run, and is written to FILE with the
first lines of its failure, so that `./test` can show it at the end. A test that fails three times is a
failure. The reruns start after everything else has finished, so that a test has the machine to itself. With
--strict nothing runs again.

Not here: how the runners are started and read (runners.py).
"""

import argparse
import sys
from pathlib import Path

from runners import RUNNERS, Report, Runner

TRIES_MAX = 3
# More failures than this have a common cause: running each of them again would take long and change nothing.
FAILURES_MAX = 20


def run_again(runner: Runner, report: Report, flaky: Path | None) -> bool:
    """Runs the failed tests again. Returns whether each of them passed in the end."""
    failed = []
    for test in report.failures():
        for attempt in range(2, TRIES_MAX + 1):
            print(f"\n--> again, alone, attempt {attempt} of {TRIES_MAX}: {test}", flush=True)
            if runner.run([test]).passed(test):
                note(flaky, test, attempt - 1, report.texts.get(test, ""))
                break
        else:
            failed.append(test)
    print()
    for test in report.failures():
        fate = f"failed {TRIES_MAX} times" if test in failed else "is FLAKY: it passed when it ran again"
        print(f"--> {test} {fate}")
    return not failed


def note(file: Path | None, test: str, failures: int, text: str) -> None:
    if file is None:
        return
    times = "once" if failures == 1 else f"{failures} times"
    with file.open("a") as lines:
        print(f"{test} (failed {times}, then passed)", file=lines)
        for line in text.splitlines():
            print(f"  | {line}", file=lines)


def main() -> int:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--strict", action="store_true")
    parser.add_argument("--flaky", type=Path)
    parser.add_argument("runner", choices=RUNNERS)
    parser.add_argument("arguments", nargs="*")
    options = parser.parse_args()
    runner = RUNNERS[options.runner](options.arguments)
    report = runner.run()
    if report.code == 0:
        return 0
    failures = report.failures()
    if options.strict or not report.is_complete or not failures:
        return report.code
    if len(failures) > FAILURES_MAX:
        print(f"\n--> {len(failures)} tests failed: too many to run each of them again")
        return report.code
    return 0 if run_again(runner, report, options.flaky) else report.code


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
