"""What `./test` does with tests that fail: they run again, and the output says that they had to."""

import importlib
import os
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

import pytest
from servers import ROOT

sys.path.append(str(ROOT / "tests" / "harness"))
again = importlib.import_module("again")
compiled = importlib.import_module("compiled")
flaky = importlib.import_module("flaky")
runners = importlib.import_module("runners")
Report = runners.Report

pytestmark = pytest.mark.smoke


class Scripted:
    """A runner whose tests pass or fail as told, run after run."""

    def __init__(self, **tests: list[bool]) -> None:
        self.tests = tests
        self.ran: list[list[str]] = []

    def run(self, tests: Sequence[str] = ()) -> Report:
        self.ran.append(list(tests))
        outcomes = {test: self.tests[test].pop(0) for test in tests or self.tests}
        texts = {test: f"{test} broke\nbadly" for test, passed in outcomes.items() if not passed}
        return Report(0 if all(outcomes.values()) else 1, outcomes, texts)


def test_what_passes_on_a_retry_is_flaky_and_written_down(tmp_path: Path) -> None:
    runner = Scripted(good=[True], second=[False, True], third=[False, False, True])
    assert again.run_again(runner, runner.run(), tmp_path / "flaky")
    assert runner.ran == [[], ["second"], ["third"], ["third"]], "each alone, and what passed not again"
    assert (tmp_path / "flaky").read_text().splitlines() == [
        "second (failed once, then passed)",
        "  | second broke",
        "  | badly",
        "third (failed 2 times, then passed)",
        "  | third broke",
        "  | badly",
    ]


def test_what_fails_three_times_is_a_failure_and_not_flaky(tmp_path: Path) -> None:
    runner = Scripted(broken=[False] * 3, second=[False, True])
    assert not again.run_again(runner, runner.run(), tmp_path / "flaky")
    assert "broken" not in (tmp_path / "flaky").read_text()


def test_a_rerun_that_ran_nothing_or_broke_elsewhere_does_not_count_as_passed() -> None:
    assert not Report(0, {}).passed("test")
    assert not Report(1, {"test": True}).passed("test")
    assert Report(0, {"test": True}).passed("test")


@pytest.mark.parametrize(
    ("words", "report", "code", "runs"),
    [
        ([], Report(0, {"a": True}), 0, 1),
        ([], Report(1, {"a": False}), 0, 2),
        (["--strict"], Report(1, {"a": False}), 1, 1),
        ([], Report(101, {}, is_complete=False), 101, 1),  # it did not compile
        ([], Report(2, {"a": False}, is_complete=False), 2, 1),  # a file could not be imported
        ([], Report(1, {"a": True}), 1, 1),  # the runner itself failed
        ([], Report(1, {str(number): False for number in range(21)}), 1, 1),
    ],
)
def test_only_failed_tests_run_again(
    words: list[str], report: Report, code: int, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []

    class Runner:
        def __init__(self, arguments: list[str]) -> None:
            assert arguments == ["-k", "x"]

        def run(self, tests: Sequence[str] = ()) -> Report:
            ran.append(tests)
            return Report(0, dict.fromkeys(tests, True)) if tests else report

    monkeypatch.setitem(again.RUNNERS, "pytest", Runner)
    monkeypatch.setattr(sys, "argv", ["again.py", *words, "pytest", "--", "-k", "x"])
    assert (again.main(), len(ran)) == (code, runs)


def test_nextests_results_are_read_with_the_first_lines_of_a_failure() -> None:
    case = ElementTree.fromstring(
        '<testcase name="mod::it_holds"><failure message="m" type="test failure">noise\n'
        "thread 'it_holds' panicked at src/x.rs:1:2:\nleft is not right\n"
        "stack backtrace:\n 0: noise</failure></testcase>"
    )
    report = Report(100)
    runners.note_junit_case(report, "crate::bin mod::it_holds", case)
    runners.note_junit_case(report, "crate::bin fine", ElementTree.fromstring('<testcase name="fine"/>'))
    assert report.failures() == ["crate::bin mod::it_holds"]
    said = report.texts["crate::bin mod::it_holds"]
    assert said == "thread 'it_holds' panicked at src/x.rs:1:2:\nleft is not right"
    assert (
        runners.nextest_filter("crate::bin mod::it_holds")
        == "(binary_id(=crate::bin) & test(=mod::it_holds))"
    )


def test_a_test_whose_teardown_fails_has_failed(tmp_path: Path) -> None:
    with runners.results_file() as results:
        Path(results.name).write_text(
            '{"test": "a", "passed": true, "text": ""}\n{"test": "a", "passed": false, "text": "E   late"}\n'
            '{"test": "b", "passed": true, "text": ""}\n'
        )
        report = runners.read_results(results, 1)
    assert report.outcomes == {"a": False, "b": True}
    assert report.texts == {"a": "E   late"}


def test_the_table_counts_runs_and_failures(capsys: pytest.CaptureFixture[str]) -> None:
    tally = flaky.Tally()
    tally.add("rust", Report(0, {"a": True, "b": True}))
    assert tally.is_clean()
    tally.add("rust", Report(1, {"a": True, "b": False}, {"b": "why"}))
    assert not tally.is_clean()
    tally.show(2, 3.0)
    shown = capsys.readouterr().out.splitlines()
    assert shown[1] == "==> 2 rounds under load in 3 s: 2 tests, 1 of them failed at least once"
    assert [line.split() for line in shown[3:5]] == [["2", "1", "b"], ["2", "0", "a"]]
    assert shown[-1] == "  | why"


def test_only_what_a_registry_has_is_kept_for_other_checkouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "own_names", lambda _: {"attacks", "_tenfold"})
    hashed = "0123456789abcdef"
    target = tmp_path / "target"
    theirs = [
        f"debug/.fingerprint/serde-{hashed}/lib-serde",
        f"debug/build/libc-{hashed}/output",
        f"debug/deps/libserde-{hashed}.rlib",
        f"debug/deps/serde-{hashed}.d",
        f"loom/release/deps/libloom-{hashed}.rmeta",
    ]
    ours = [
        f"debug/.fingerprint/tenfold-store-{hashed}/lib",
        f"debug/deps/libtenfold_store-{hashed}.rlib",
        f"debug/deps/lib_tenfold-{hashed}.so",
        f"debug/deps/attacks-{hashed}",
        "debug/tenfold",
    ]
    for file in [*theirs, *ours, "loom/release/.fingerprint/x"]:
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        (target / file).write_text(file)
    cache = tmp_path / "cache" / "key"
    compiled.keep(cache, {".": target})
    compiled.seed(cache, {".": tmp_path / "clone"})
    for file in theirs:
        assert (tmp_path / "clone" / file).read_text() == file
        assert (tmp_path / "clone" / file).stat().st_mtime == (target / file).stat().st_mtime
    assert not [file for file in ours if (tmp_path / "clone" / file).exists()]


def test_a_checkout_that_was_built_is_left_alone_and_old_keys_are_removed(tmp_path: Path) -> None:
    for age, key in enumerate(["new", "newer", "newest", "oldest"]):
        (tmp_path / key / "0/debug/.fingerprint").mkdir(parents=True)
        (tmp_path / key / "0/debug/.fingerprint/theirs").touch()
        moment = 1000 + (0 if key == "oldest" else age + 1)
        os.utime(tmp_path / key, (moment, moment))
    compiled.prune(tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["new", "newer", "newest"]
    target = tmp_path / "clone"
    (target / "debug/.fingerprint").mkdir(parents=True)
    compiled.seed(tmp_path / "new", {".": target})
    assert not (target / "debug/.fingerprint/theirs").exists()
