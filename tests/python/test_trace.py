"""`tenfold trace` on dumps of PyTorch's own recorder, made by jobs that go wrong on purpose; and its page."""

import gzip
import itertools
import json
import os
import pickle
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from analysers import FINE, TROUBLE, UNSURE, torch_analyser, trace
from browser import Browser, missing
from processes import python, run_together
from ranks import ENVIRONMENT
from servers import ROOT, tenfold_binary

pytestmark = pytest.mark.tenfold_only("has nothing to do with it")

WORLD = 3
SCENES = [
    *(f"gloo/{name}" for name in ("sleeps", "wrong-collective", "wrong-size", "missing")),
    *(f"gloo/{name}" for name in ("healthy", "pairs", "straggler")),
    "relay/no-partner",
]


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dumps of jobs that did this and that. One program runs all of them at the same time."""
    folder = tmp_path_factory.mktemp("scenes")
    run_together([python("trace_scenes.py", folder, *SCENES)], folder, [ENVIRONMENT])
    return folder


@pytest.fixture
def scene(scenes: Path) -> Callable[..., Path]:
    """scene(name, backend): the folder with the dumps of one."""
    return lambda name, backend="gloo", kind="dumps": scenes / backend / name / kind


# ---------------------------------------------------------------------------- provoked hangs


def test_a_rank_that_does_not_come_is_named(scene) -> None:
    verdict = trace(scene("sleeps"))
    assert verdict.head == "✗ rank 1 has not entered all_reduce #5 of group default_pg", verdict
    assert re.search(
        r"ranks 0 and 2 have been waiting in it for [\d.]+ \w+ \(timeout 60\.0 s\), "
        r"called at .*\.py:\d+ in train_step",
        verdict.said,
    ), verdict.said
    assert "rank 1's last call in this group was barrier #4" in verdict.said
    assert "in warm_up ←" in verdict.said, "where the rank was last"
    assert verdict.code == TROUBLE


def test_a_rank_that_calls_another_collective_is_named_with_both_call_sites(scene) -> None:
    verdict = trace(scene("wrong-collective"))
    said = "✗ rank 1 called broadcast #5 of group default_pg where ranks 0 and 2 called all_reduce"
    assert verdict.head == said, verdict
    assert re.search(r"rank 1: broadcast, Float \[4\], called at .* in wrong_collective", verdict.said), (
        verdict.said
    )
    assert re.search(r"ranks 0 and 2: all_reduce, Float \[4\], called at .* in train_step", verdict.said)
    assert verdict.code == TROUBLE


def test_a_rank_with_another_size_is_named(scene) -> None:
    verdict = trace(scene("wrong-size"))
    said = "✗ rank 1 called all_reduce #5 of group default_pg with other sizes than ranks 0 and 2"
    assert verdict.head == said, verdict
    assert "rank 1: all_reduce, Float [5]" in verdict.said


def test_a_rank_without_a_dump_is_named(scene) -> None:
    verdict = trace(scene("missing"))
    assert verdict.head == "✗ rank 1 has no dump here: 2 of 3 ranks do", verdict
    needed = "all_reduce #5 of group default_pg needs rank 1: ranks 0 and 2 have been waiting in it for"
    assert needed in verdict.said


def test_a_message_without_a_partner_is_named(scene) -> None:
    verdict = trace(scene("no-partner", "relay"))
    assert verdict.head == "✗ rank 0 receives from rank 1, which does not send (group default_pg)", verdict
    assert "rank 1's last call of all was a receive from rank 0" in verdict.said


def test_the_first_cause_comes_before_what_follows_from_it(scene) -> None:
    verdict = trace(scene("pairs"))
    heads = [line for line in verdict.said.splitlines() if line.startswith("✗")]
    assert heads == [
        "✗ rank 1 has not entered all_reduce #2 of group first",
        "✗ rank 0 has not entered all_reduce #2 of group second (follows from the above)",
    ]
    only = trace(scene("pairs"), "--group", "second")
    assert only.head == "✗ rank 0 has not entered all_reduce #2 of group second"
    nobody = trace(scene("pairs"), "--group", "third")
    assert "no group is named `third`" in nobody.complained
    assert "first, second" in nobody.complained


def test_a_job_in_order_is_said_to_be(scene) -> None:
    verdict = trace(scene("healthy"))
    assert verdict.head.startswith(
        "✓ no problem found: all ranks have reached all_reduce #7 of group default_pg"
    )
    assert verdict.code == FINE


def test_a_straggler_is_named(scene) -> None:
    verdict = trace(scene("straggler"))
    assert verdict.code == FINE, verdict
    assert re.search(r"! rank 1 is a straggler: the last to reach 1\d of 16 collectives", verdict.said), (
        verdict.said
    )


@pytest.mark.parametrize("name", ["sleeps", "wrong-collective", "wrong-size", "missing", "healthy"])
def test_json_tells_the_same_as_the_pickle(name: str, scene) -> None:
    pickled = trace(scene(name))
    as_json = trace(scene(name, kind="json"))
    assert as_json.head == pickled.head, "JSON has no call sites, and says the same otherwise"
    assert as_json.code == pickled.code


@pytest.mark.parametrize(
    ("name", "finding"),
    [
        ("sleeps", r"missing ranks: \{1\}"),
        ("wrong-collective", r"Culprit rank 1; Error type: COLLECTIVE_TYPE_MISMATCH"),
        ("wrong-size", r"Culprit rank 1; Error type: SIZE_OR_SYNTAX_MISMATCH"),
    ],
)
def test_pytorchs_analyser_finds_the_same_where_it_does_not_crash(
    name: str, finding: str, scene, tmp_path: Path
) -> None:
    as_written, named = tmp_path / "as-written", tmp_path / "named"
    as_written.mkdir()
    named.mkdir()
    for file in scene(name).glob("trace_*"):
        (as_written / file.name).write_bytes(file.read_bytes())
        # With the group's name, which Gloo's recorder does not know yet when it writes it down.
        dump = pickle.loads(file.read_bytes())
        dump["pg_config"] = {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(WORLD)))}}
        (named / file.name).write_bytes(pickle.dumps(dump, protocol=2))
    crash = torch_analyser(as_written)
    assert "KeyError" in crash, f"Gloo's own dumps crash it; if no more, compare them directly\n{crash}"
    said = torch_analyser(named)
    assert re.search(finding, said), said
    assert "rank 1 " in trace(named).head
    assert trace(named).head == trace(as_written).head


# ---------------------------------------------------------------------------- damaged files, JSON, timeline


def test_a_damaged_file_is_named_and_the_others_are_analysed(scene, tmp_path: Path) -> None:
    source = scene("sleeps")
    whole = [(source / f"trace_{rank}").read_bytes() for rank in range(WORLD)]
    (tmp_path / "trace_0").write_bytes(whole[0])
    (tmp_path / "trace_1").write_bytes(whole[1])
    for broken, problem in [
        (whole[2][:100], "at byte "),
        (gzip.compress(whole[2]), "it is compressed"),
        (b"", "the file is empty"),
        (b"import os", "not a flight-recorder dump"),
        (
            pickle.dumps({"version": "2.10", "entries": [os.getcwd]}, protocol=2),
            "opcode GLOBAL would create an object",
        ),
        (pickle.dumps({"version": "9.0", "entries": []}, protocol=4), "format version `9.0`"),
    ]:
        (tmp_path / "trace_2").write_bytes(broken)
        verdict = trace(tmp_path)
        assert f"error: {tmp_path}/trace_2: " in verdict.complained, verdict
        assert problem in verdict.complained, verdict
        assert verdict.head == "✗ rank 2 has no dump here: 2 of 3 ranks do"
        assert "✗ rank 1 has not entered all_reduce #5 of group default_pg" in verdict.said
        assert verdict.code == TROUBLE
    alone = trace(tmp_path / "trace_2", tmp_path / "gone_7")
    assert (alone.code, alone.said) == (UNSURE, ""), alone
    assert "gone_7: No such file" in alone.complained


def test_fine_dumps_beside_a_broken_one_are_not_called_fine(scene, tmp_path: Path) -> None:
    foreign = tmp_path / "notes_9"
    foreign.write_text("groceries")
    assert trace(scene("healthy"), foreign).code == UNSURE


def test_a_program_reads_the_verdict_as_json(scene) -> None:
    verdict = trace(scene("sleeps"), "--json")
    report = json.loads(verdict.said)
    assert report["verdict"] == "rank 1 has not entered all_reduce #5 of group default_pg"
    first = report["findings"][0]
    assert (first["kind"], first["ranks"], first["waiting"], first["sequence"]) == ("behind", [1], [0, 2], 5)
    standing = {rank["rank"]: rank["last_entered"] for rank in report["groups"][0]["ranks"]}
    assert standing == {0: 5, 1: 4, 2: 5}
    assert verdict.code == TROUBLE


def test_the_timeline_is_a_trace_that_perfetto_reads(tmp_path: Path) -> None:
    file = made_up(tmp_path, steps=5)[1]
    events = json.loads(file.read_text())["traceEvents"]
    boxes = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in boxes} == {0, 1, 2, 3}
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {"group default_pg", "group default_pg (2)", "group tp0", "group tp1"}
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in boxes)
    hung = [event for event in boxes if event["args"]["state"] == "in progress when the dump was written"]
    assert [(event["pid"], event["name"]) for event in hung] == [
        (rank, "all_reduce #9") for rank in (0, 1, 3)
    ]
    # Boxes of one thread do not cross, and every arrow has its beginning and its end.
    for thread in {(event["pid"], event["tid"]) for event in boxes}:
        own = sorted(
            (box["ts"], box["ts"] + box["dur"]) for box in boxes if (box["pid"], box["tid"]) == thread
        )
        assert all(before[1] <= after[0] + 1e-3 for before, after in itertools.pairwise(own)), own
    arrows = [event for event in events if event["ph"] in "stf"]
    ends = [
        {event["ph"] for event in arrows if event["id"] == flow} >= {"s", "f"}
        for flow in {event["id"] for event in arrows}
    ]
    assert ends
    assert all(ends)


def test_every_command_of_the_documentation_runs(tmp_path: Path) -> None:
    made_up(tmp_path)
    page = (ROOT / "docs" / "debugging-hangs.md").read_text()
    blocks = re.findall(r"<!-- test: fails 1 -->\n```console\n(.*?)```", page, re.DOTALL)
    commands = [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]
    assert len(commands) == 6
    for command in commands:
        words = shlex.split(command)
        assert words[0] == "tenfold"
        done = subprocess.run(
            [tenfold_binary(), *words[1:]], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stderr) == (TROUBLE, ""), command
    shown = blocks[0].splitlines()[1:]
    assert trace(tmp_path / "dumps").said.splitlines()[: len(shown)] == shown, "the page shows what it says"


# ---------------------------------------------------------------------------- the page


def made_up(folder: Path, **options: int) -> tuple[Path, Path]:
    """The page and the timeline of a made-up job."""
    dumps = folder / "dumps"
    dumps.mkdir(exist_ok=True)
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    subprocess.run(python("trace_made_up.py", dumps, *words), check=True, timeout=60)
    page, timeline = folder / "trace.html", folder / "trace.json"
    assert trace(dumps, "--html", page, "--timeline", timeline).code == TROUBLE
    return page, timeline


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    if missing() is not None:
        pytest.skip(str(missing()))
    with Browser() as browser:
        yield browser


@pytest.fixture
def browser(window: Browser) -> Browser:
    window.open("about:blank")
    window.resize(1280, 640)
    window.prefer("light")
    window.complaints()
    window.requested()
    return window


def look(browser: Browser, page: Path) -> int:
    """Opens the page; how many operations it has drawn."""
    browser.open(page.as_uri())
    return int(browser.until("document.querySelector('canvas').dataset.drawn"))


def pixel(browser: Browser) -> str:
    """All that the canvas shows."""
    return browser.run("return document.querySelector('canvas').toDataURL()")


def test_the_page_names_the_verdict_and_asks_nobody(browser: Browser, tmp_path: Path) -> None:
    page, _ = made_up(tmp_path, steps=40)
    assert look(browser, page) > 300
    assert browser.run("return document.querySelector('#verdict').textContent") == (
        "✗ rank 2 has not entered all_reduce #79 of group default_pg"
    )
    text = browser.text()
    waiting = "ranks 0, 1 and 3 have been waiting in it for 1.3 s (timeout 30.0 s)"
    assert f"{waiting}, called at job/train.py:88" in text
    assert browser.requested() == [page.as_uri()]
    assert browser.complaints() == []
    light = pixel(browser)
    browser.prefer("dark")
    browser.until("document.querySelector('canvas').toDataURL() !== args[0]", light)


def test_an_operation_tells_its_fields_and_a_finding_shows_its_own(browser: Browser, tmp_path: Path) -> None:
    look(browser, made_up(tmp_path, steps=40)[0])
    before = browser.run("return document.querySelector('#range').textContent")
    browser.click("details button")
    browser.until("document.querySelector('#range').textContent !== args[0]", before)
    # The middle of rank 0's first row is the operation that hangs, now that it is in view.
    browser.run(
        """
        const canvas = document.querySelector("canvas"), bounds = canvas.getBoundingClientRect();
        const at = { clientX: bounds.left + bounds.width / 2, clientY: bounds.top + 26 + 11 };
        canvas.dispatchEvent(new PointerEvent("pointermove", { ...at, pointerType: "mouse" }));
        """
    )
    browser.until("document.querySelector('#info').style.display === 'block'")
    told = browser.run("return document.querySelector('#info').innerText")
    assert told.startswith("all_reduce #79 on rank 0\n"), told
    for part in [
        "group default_pg",
        "tensors: Float [25600]",
        "state: in progress",
        "called at: job/train.py:88 in train_step",
    ]:
        assert part in told, told
    browser.click("#all")
    browser.until("document.querySelector('#range').textContent === args[0]", before)
    browser.click("#closer")
    browser.until("document.querySelector('#range').textContent !== args[0]", before)
    assert browser.complaints() == []


def test_a_phone_shows_it_without_scrolling_sideways(browser: Browser, tmp_path: Path) -> None:
    page, _ = made_up(tmp_path, steps=10)
    browser.resize(360, 740, 2.0, True)
    assert look(browser, page) > 0
    assert browser.run("return document.documentElement.scrollWidth") <= 360
    assert browser.run("return document.querySelector('canvas').clientHeight") > 200, (
        "there is room for the timeline"
    )


def test_tens_of_thousands_of_operations_are_merged_where_they_cannot_be_told_apart(
    browser: Browser, tmp_path: Path
) -> None:
    page, _ = made_up(tmp_path, steps=1000, ranks=16)
    drawn = look(browser, page)
    boxes = browser.run("return data.boxes.length")
    assert boxes > 45_000
    assert drawn < 25_000, "one box a few pixels wide per place and row, whatever the number of operations"
    assert browser.complaints() == []


def test_what_a_dump_says_is_text_and_nothing_else(browser: Browser, tmp_path: Path) -> None:
    hostile = '</script><img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'
    entry = {
        "record_id": 0,
        "process_group": ("0", hostile),
        "collective_seq_id": 1,
        "profiling_name": f"x:{hostile.replace(' ', '')}",
        "state": "started",
        "time_created_ns": 5,
        "frames": [{"name": hostile, "filename": hostile, "line": 1}],
    }
    config = {"0": {"name": "0", "desc": hostile, "ranks": "[0, 1]"}}
    for rank, entries in enumerate([[entry], []]):
        dump = {"version": "2.10", "pg_config": config, "entries": entries}
        (tmp_path / f"trace_{rank}").write_bytes(pickle.dumps(dump, protocol=2))
    page = tmp_path / "page.html"
    trace(tmp_path / "trace_0", tmp_path / "trace_1", "--html", page)
    look(browser, page)
    assert browser.run("return window.hacked") is None
    assert "onerror" in browser.text(), "it is shown as it is"
    assert browser.requested() == [page.as_uri()]
