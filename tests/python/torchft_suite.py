#!/usr/bin/env python3
"""The tests in torchft's wheel, with tenfold in Gloo's place and Gloo as the measure.

Whatever passes with Gloo has to pass with tenfold, or be in REASONS: a test that does not is listed by name,
and makes the exit code 1. Replicas are threads of one process there, so this also tests several ranks of one
group in one process. How tenfold takes Gloo's place is in torchft_stand_in/.

The wheel is fetched once, into the cache of `./test`. If it cannot be fetched, nothing is tested, and the
output says why. Gloo's results are recorded in wheel_results/, per version of torchft and PyTorch.

    torchft_suite.py                      the modules in which groups are reconfigured (QUICK)
    torchft_suite.py --all                all modules
    torchft_suite.py --only manager       tests with `manager` in their name
    torchft_suite.py --check-recording    runs Gloo too, and fails if its results are not those recorded
    torchft_suite.py --record             runs Gloo with all modules, and records its results
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

from wheel_suite import ENVIRONMENT, OUTCOMES, RECORDINGS, Run, SuiteError, read_recording

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "torchft_requirements.txt"
STAND_IN = HERE / "torchft_stand_in"

# Their groups are replaced, and they are quick. The others wait for timeouts of their own, or use no group.
QUICK = [
    "manager_integ_test.py",
    "manager_test.py",
    "reconfigure_test.py",
    "parameter_server_test.py",
    "lighthouse_test.py",
    "checkpointing/pg_transport_test.py",
]

# Tests that pass with Gloo and cannot with tenfold: parts of their names, and why.
REASONS = {
    f"PGTransportTimeoutTest::test_stalled_peer_{number}_send": (
        "a short message is sent once it is in the receiver's mailbox, so a send does not wait for a receiver"
    )
    for number in range(3)
}


@dataclass
class Suite:
    """torchft, where it is installed."""

    folder: Path
    limit: float

    def run(self, backend: str, modules: list[str], only: str, tests: list[str]) -> Run:
        """Runs the tests in a process of their own, and prints what pytest prints."""
        folders = [self.folder, *([] if backend == "gloo" else [STAND_IN])]
        inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        # Some names have numbers that come from the order of a set.
        environment = ENVIRONMENT | os.environ | {"PYTHONHASHSEED": "0", "GLOO_SOCKET_IFNAME": "lo"}
        environment["PYTHONPATH"] = os.pathsep.join([*map(str, reversed(folders)), *inherited])
        chosen = [str(self.folder / "torchft" / module) for module in modules]
        if tests:
            chosen = [f"{self.folder}/{test}" for test in tests]
        with tempfile.TemporaryDirectory(prefix="torchft-") as folder:
            results = Path(folder, "results.xml")
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "--no-header",
                "--tb=short",
                "-p",
                "no:cacheprovider",
            ]
            command += [f"--rootdir={self.folder}", "-o", "python_files=*_test.py", f"--timeout={self.limit}"]
            command += [f"--junitxml={results}", *(["-k", only] if only else [])]
            command += [*([] if backend == "gloo" else ["-p", "gloo_stand_in"]), *chosen]
            code = subprocess.run(command, cwd=folder, env=environment, check=False).returncode
            if code not in (0, 1) or not results.exists():
                raise SuiteError(f"pytest ended with {code} with {backend}; see above")
            return read_results(results)


def read_results(results: Path) -> Run:
    run = Run()
    for case in ElementTree.parse(results).getroot().iter("testcase"):
        *folders, kind = case.get("classname").split(".")
        name = f"{'/'.join(folders)}.py::{kind}::{case.get('name')}"
        problem = case.find("failure") if case.find("error") is None else case.find("error")
        if problem is not None:
            run.outcomes[name] = "failed"
            run.reasons[name] = problem.text or problem.get("message") or ""
        elif run.outcomes.get(name) != "failed":
            run.outcomes[name] = "passed" if case.find("skipped") is None else "skipped"
    return run


class NotFetchedError(Exception):
    """torchft is not installed and cannot be fetched."""


def install() -> Path:
    """Returns the folder with torchft, which is filled if it is not there."""
    caches = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    cache = Path(os.environ.get("TENFOLD_CACHE", caches / "tenfold"))
    wanted = REQUIREMENTS.read_bytes() + sys.version.encode()
    folder = cache / f"torchft-{hashlib.sha256(wanted).hexdigest()[:16]}"
    if folder.exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="torchft-") as unfinished:
        print(f"installing torchft into {folder}", flush=True)
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
        ]
        command += ["--retries=1", "--target", f"{unfinished}/all", "--requirement", str(REQUIREMENTS)]
        if (code := subprocess.run(command, check=False).returncode) != 0:
            raise NotFetchedError(f"`{' '.join(command)}` ended with {code}")
        # Another process may have been quicker.
        if not folder.exists():
            shutil.move(f"{unfinished}/all", folder)
    return folder


def recording() -> Path:
    torchft = re.search(r"^torchft-nightly==(.+)$", REQUIREMENTS.read_text(), re.MULTILINE)[1]
    return RECORDINGS / f"torchft-{torchft}-gloo-{importlib.metadata.version('torch')}.json"


def record(run: Run) -> None:
    """Writes the names of the tests by outcome. Some fail with Gloo: the wheel lacks files that they need."""
    by_outcome = {
        wanted: sorted(name for name, outcome in run.outcomes.items() if outcome == wanted)
        for wanted in OUTCOMES
    }
    recording().write_text(json.dumps(by_outcome, indent=1) + "\n")
    print(f"recorded in {recording()}", flush=True)


def worse(reference: Run, tested: Run) -> list[str]:
    """What passes with Gloo, was run and does not pass, without what is excused."""
    return [
        name
        for name, outcome in tested.outcomes.items()
        if reference.outcomes.get(name) == "passed" and outcome != "passed" and reason_of(name) is None
    ]


def reason_of(test: str) -> str | None:
    return next((reason for part, reason in REASONS.items() if part in test), None)


def stale(tested: Run) -> list[str]:
    """What passes although there is a reason why it cannot."""
    return [name for name, outcome in tested.outcomes.items() if outcome == "passed" and reason_of(name)]


def print_table(reference: Run, tested: Run, backend: str, seconds: float) -> None:
    same = reference.only(tested.outcomes)
    print("\ntorchft's tests: passed / failed / skipped\n")
    print(f"gloo     {same.counts()}{' recorded' if reference.recorded else ''}")
    print(f"{backend:<7}  {tested.counts()}   in {seconds:.0f} s")
    for name, outcome in tested.outcomes.items():
        if reference.outcomes.get(name) == "passed" and outcome != "passed" and reason_of(name):
            print(f"\nexcused: {name}\n    {reason_of(name)}")
    for name in worse(reference, tested):
        reason = tested.reasons.get(name, "").strip().replace("\n", "\n    ")
        print(f"\ngloo passes, tenfold {tested.outcomes[name]}: {name}\n    {reason}")
    for name in stale(tested) if backend != "gloo" else []:
        print(f"\nexcused, but it passes: {name}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", default="tenfold", choices=["tenfold", "gloo"], help="what is tested")
    parser.add_argument("--all", action="store_true", help="all modules, not only those that are quick")
    parser.add_argument("--only", default="", metavar="EXPRESSION", help="as pytest's -k")
    parser.add_argument("--test", action="append", default=[], metavar="NAME", help="only this test")
    parser.add_argument(
        "--record", action="store_true", help="run Gloo with all modules and record its results"
    )
    parser.add_argument(
        "--check-recording", action="store_true", help="run Gloo too; fail if its results have changed"
    )
    parser.add_argument("--results", type=Path, help="a file for what became of each test, for tests/harness")
    parser.add_argument("--limit", type=float, default=120, metavar="SECONDS", help="for each test")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    try:
        suite = Suite(install(), options.limit)
    except NotFetchedError as reason:
        print(f"skipped: torchft's tests are not here: {reason}")
        return 0
    modules = ["."] if options.all or options.record else QUICK
    chosen = (modules, options.only, options.test)
    if options.record:
        record(suite.run("gloo", *chosen))
        return 0
    reference = read_recording(recording()) if recording().exists() else suite.run("gloo", *chosen)
    if options.check_recording:
        gloo = suite.run("gloo", *chosen)
        if changed := sorted(
            name for name in gloo.outcomes if gloo.outcomes[name] != reference.outcomes.get(name)
        ):
            raise SuiteError(f"{recording()} is out of date: {', '.join(changed)}")
    started = time.monotonic()
    tested = suite.run(options.backend, *chosen)
    print_table(reference, tested, options.backend, time.monotonic() - started)
    if options.results:
        write_results(reference, tested, options.results)
    is_good = tested.count("passed") > 0 and not worse(reference, tested)
    return 0 if is_good and (options.backend == "gloo" or not stale(tested)) else 1


def write_results(reference: Run, tested: Run, file: Path) -> None:
    failures = worse(reference, tested)
    with file.open("a") as lines:
        for name in tested.outcomes:
            if reference.outcomes.get(name) == "passed":
                text = tested.reasons.get(name, "")
                print(json.dumps({"test": name, "passed": name not in failures, "text": text}), file=lines)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SuiteError as error:
        print(f"torchft_suite.py: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit("torchft_suite.py: interrupted")
