"""Jobs on tenfold that hang or fail on purpose: their dumps, read by `tenfold trace` and PyTorch's analyser.

Real processes run every case twice: with `tenfold.init` on arrays, and through PyTorch. Only the scene
`asked` asks for the dumps. In the others, ranks write them when a group fails, also a rank that sleeps or
computes, because its peers report the failure to it.
"""

import os
import pickle
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from analysers import FINE, TROUBLE, Verdict, torch_analyser, torch_analyser_of_json, trace
from browser import Browser, missing
from launchers import Launcher
from processes import python, run_together
from ranks import ENVIRONMENT
from servers import ROOT, tenfold_binary

pytestmark = pytest.mark.tenfold_only("has nothing to do with it")

FOOT = "3 dumps (format 2.10), 1 group, 5 collectives\n"

# What `tenfold trace` says of each; "GROUP" is what the group is called there.
SAID = {
    "sleeps": f"""\
✗ rank 1 has not entered all_reduce #5 of GROUP
    ranks 0 and 2 entered it <time> before their dumps and failed (timeout 5.0 s), \
called at programs/hang_scenes.py in all_reduce
    rank 1's last call in this group was broadcast #4, completed <time> before its dump
    rank 1 made that call at programs/hang_scenes.py in broadcast ← programs/hang_scenes.py in warm_up \
← programs/hang_scenes.py in act
{FOOT}""",
    "computes": f"""\
✗ rank 1 has not entered all_reduce #5 of GROUP
    ranks 0 and 2 entered it <time> before their dumps and failed (timeout 5.0 s)
    rank 1's last call in this group was broadcast #4, completed <time> before its dump
{FOOT}""",
    "wrong-collective": f"""\
✗ rank 1 called broadcast #5 of GROUP where ranks 0 and 2 called all_reduce
    rank 1: broadcast, Float [4], root 0, called at programs/hang_scenes.py in broadcast
    ranks 0 and 2: all_reduce, Float [4], sum, called at programs/hang_scenes.py in all_reduce
{FOOT}""",
    "wrong-size": f"""\
✗ rank 1 called all_reduce #5 of GROUP with other sizes than ranks 0 and 2
    rank 1: all_reduce, Float [5], sum
    ranks 0 and 2: all_reduce, Float [4], sum
{FOOT}""",
    "wrong-op": f"""\
✗ rank 1 called all_reduce #5 of GROUP with max where ranks 0 and 2 have sum
    rank 1: all_reduce, Float [4], max
    ranks 0 and 2: all_reduce, Float [4], sum
{FOOT}""",
    "wrong-root": f"""\
✗ rank 1 called broadcast #5 of GROUP with root 2 where ranks 0 and 2 have root 0
    rank 1: broadcast, Float [4], root 2
    ranks 0 and 2: broadcast, Float [4], root 0
{FOOT}""",
    "dies": """\
✗ rank 1 has no dump here: 2 of 3 ranks do
    all_reduce #5 of GROUP needs rank 1: ranks 0 and 2 entered it <time> before their dumps and failed \
(timeout 90.0 s)
    it died, was killed, or hangs where it cannot write: see its log
2 dumps (format 2.10), 1 group, 5 collectives
""",
    "no-sender": """\
✗ rank 0 receives from rank 1, which does not send (GROUP)
    rank 0 entered it <time> before its dump and failed (timeout 5.0 s), Float [2]
    rank 1's last call in this group was broadcast #4, completed <time> before its dump
3 dumps (format 2.10), 1 group, 4 collectives, 1 message call
""",
    "no-receiver": """\
✗ rank 0 sends to rank 1, which does not receive (GROUP)
    rank 0 entered it <time> before its dump and failed (timeout 5.0 s), Float [4194304]
    rank 1's last call in this group was broadcast #4, completed <time> before its dump
3 dumps (format 2.10), 1 group, 4 collectives, 1 message call
""",
    "asked": f"""\
✗ rank 1 has not entered all_reduce #5 of GROUP
    ranks 0 and 2 have been waiting in it for <time> (timeout 90.0 s)
    rank 1's last call in this group was broadcast #4, completed <time> before its dump
{FOOT}""",
    "healthy": """\
✓ no problem found: all ranks have reached all_reduce #6 of GROUP
4 dumps (format 2.10), 1 group, 6 collectives, 8 message calls
""",
}
LANGUAGES = ["arrays", "torch"]


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of them, run at the same time."""
    folder = tmp_path_factory.mktemp("scenes")
    titles = [f"{language}/{name}" for language in LANGUAGES for name in SAID]
    run_together([python("hang_scenes.py", folder, *titles)], folder, [ENVIRONMENT])
    return folder


def without_notes(said: str) -> str:
    """Removes what differs between runs.

    On a busy machine a rank may be late for the warm-up, which is reported. Any rank may be the first to
    report the error, so its text differs, too.
    """
    said = re.sub(r"^! .*\n(    .*\n)*", "", said, flags=re.MULTILINE)
    return re.sub(r"^    rank \d's error: .*\n", "", said, flags=re.MULTILINE)


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("name", SAID)
def test_the_culprit_is_named(scenes: Path, language: str, name: str) -> None:
    verdict = trace(scenes / language / name / "dumps")
    group = r"group (default_pg|0)" if language == "torch" else "group default"
    expected = re.escape(SAID[name]).replace("GROUP", group)
    said = without_notes(verdict.plain)
    assert re.fullmatch(expected, said), f"{said}\n--- expected:\n{SAID[name]}"
    assert (verdict.code, verdict.complained) == (FINE if name == "healthy" else TROUBLE, "")


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("name", [name for name in SAID if name != "asked"])
def test_json_says_the_same_but_for_call_sites(scenes: Path, language: str, name: str) -> None:
    dumps, json = trace(scenes / language / name / "dumps"), trace(scenes / language / name / "json")
    assert (json.code, json.head) == (dumps.code, dumps.head)


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize(
    ("name", "findings"),
    [
        ("sleeps", ["Not all ranks joining collective, sequence number: 5", "missing ranks: {1}"]),
        ("computes", ["missing ranks: {1}"]),
        ("asked", ["missing ranks: {1}"]),
        ("wrong-collective", ["Culprit rank 1; Error type: COLLECTIVE_TYPE_MISMATCH"]),
        ("wrong-size", ["Culprit rank 1; Error type: SIZE_OR_SYNTAX_MISMATCH", "'[[5]]'"]),
        ("dies", ["Missing dump files from ranks {1}"]),
    ],
)
def test_pytorchs_analyser_finds_the_same(
    scenes: Path, language: str, name: str, findings: list[str]
) -> None:
    said = torch_analyser(scenes / language / name / "dumps")
    for finding in findings:
        assert finding in said, said
    if name not in ("asked", "dies"):
        said, _ = torch_analyser_of_json(scenes / language / name / "json")
        for finding in findings:
            assert finding in said, said


@pytest.mark.parametrize("name", ["sleeps", "wrong-collective", "wrong-size", "dies"])
def test_pytorchs_recorder_has_a_file_of_its_own_and_says_the_same(scenes: Path, name: str) -> None:
    """With the backend `tenfold` there are two recorders; theirs knows of no ends, and of no messages."""
    scene = scenes / "torch" / name
    ours, theirs = trace(scene / "dumps"), trace(scene / "hook")
    assert theirs.code == TROUBLE
    assert theirs.head.replace("default_pg", "0") == ours.head.replace("default_pg", "0")
    for file in (scene / "dumps").iterdir():
        dump = pickle.loads(file.read_bytes())
        assert dump["rank"] == int(file.name.removeprefix("trace_"))
    assert all("host" not in pickle.loads(file.read_bytes()) for file in (scene / "hook").iterdir())


def test_what_is_left_of_a_dump_is_named_and_the_others_are_analysed(scenes: Path, tmp_path: Path) -> None:
    source = scenes / "arrays" / "sleeps" / "dumps"
    whole = {rank: (source / f"trace_{rank}").read_bytes() for rank in range(3)}
    for rank in (0, 1):
        (tmp_path / f"trace_{rank}").write_bytes(whole[rank])
    cut = tmp_path / "trace_2"
    for length in [*range(12), *range(12, len(whole[2]), len(whole[2]) // 40), len(whole[2]) - 1]:
        cut.write_bytes(whole[2][:length])
        verdict = trace(tmp_path)
        assert verdict.complained.startswith(f"error: {cut}: "), (length, verdict)
        assert verdict.head == "✗ rank 2 has no dump here: 2 of 3 ranks do"
        assert "✗ rank 1 has not entered all_reduce #5 of group default" in verdict.said
        assert verdict.code == TROUBLE
    json = (scenes / "arrays" / "sleeps" / "json" / "trace_2").read_bytes()
    for length in range(1, len(json), len(json) // 20):
        cut.write_bytes(json[:length])
        assert f"error: {cut}: at byte " in trace(tmp_path).complained


def test_the_page_of_our_own_dumps(scenes: Path, tmp_path: Path) -> None:
    if missing() is not None:
        pytest.skip(str(missing()))
    page = tmp_path / "trace.html"
    assert trace(scenes / "torch" / "sleeps" / "dumps", "--html", page).code == TROUBLE
    with Browser() as browser:
        browser.resize(1280, 640)
        browser.open(page.as_uri())
        drawn = browser.until("document.querySelector('canvas').dataset.drawn")
        assert int(drawn) >= 5 + 4 + 5, "every operation of every rank"
        verdict = browser.run("return document.querySelector('#verdict').textContent")
        assert re.fullmatch(r"✗ rank 1 has not entered all_reduce #5 of group (default_pg|0)", verdict)
        assert browser.requested() == [page.as_uri()]
        assert browser.complaints() == []


def test_the_page_about_hangs_can_be_typed(tmp_path: Path) -> None:
    """The three commands from a job that hangs to the rank to blame, and what the last one says."""
    page = (ROOT / "docs" / "debugging-hangs.md").read_text()
    job = tmp_path / "job"
    job.mkdir()
    (job / "hangs.py").write_text(re.search(r"```python\n(# hangs\.py\n.*?)```", page, re.DOTALL)[1])
    (job / "tenfold").symlink_to(tenfold_binary())
    blocks = dict(re.findall(r"<!-- test: (\w+).*? -->\n```console\n\$ (.*?)```", page, re.DOTALL))
    answer, expected = blocks["answers"].split("\n", 1)
    # By its whole path, so that only ranks of this job are asked, and no job that runs the same program.
    start, ask = (blocks[name].replace("hangs.py", f"{job}/hangs.py") for name in ("hangs", "asks"))
    environment = {"PATH": f"{job}:{os.environ['PATH']}", "PYTHON_EXEC": sys.executable}
    command = ("bash", "-c", f"cd {job} && {start}")
    with Launcher(command=command, environment=environment) as launcher:
        launcher.until("step 6")
        give_up = time.monotonic() + 60
        while True:  # until the wait is long enough to be called trouble, and all have answered
            subprocess.run(shlex.split(ask), check=True, timeout=60)
            said = trace(job / shlex.split(answer)[-1])
            if said.head.startswith("✗ rank 2 has not entered") and "4 dumps" in said.said:
                break
            assert time.monotonic() < give_up, said
            time.sleep(0.1)
    assert without_notes(said.plain) == Verdict(TROUBLE, expected, "").plain
