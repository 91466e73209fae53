"""`tests/lint/words.py` finds the phrases of docs/style.md in prose, and only there."""

import importlib
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "lint"))
words = importlib.import_module("words")

pytestmark = pytest.mark.smoke

STYLE = """
| word | means |
|---|---|
| `is no` | not in the table of phrases |

## Phrases to avoid

| phrase | write instead | allowed in |
|---|---|---|
| `is no` | is not a | `there is no`, `is no longer` |
| `whoever`, `whom` | name the rank | |
"""
PHRASES = words.phrases_of(STYLE)


def found(path: str, text: str) -> list[tuple[int, str]]:
    return [(finding.line, finding.phrase) for finding in words.findings_in(path, text, PHRASES)]


def test_phrases_are_read_from_the_table() -> None:
    assert [phrase.words for phrase in PHRASES] == ["is no", "whoever", "whom"]
    assert PHRASES[0].instead == "is not a"
    assert PHRASES[0].fine == ("there is no", "is no longer")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It is no file.\n", [(1, "is no")]),
        ("It is\nno file.\n", [(1, "is no")]),
        ("- It is\n  no file.\n", [(1, "is no")]),
        ("Whoever waits\n\nwith whom\n", [(1, "whoever"), (3, "whom")]),
        ("There is no file, and it is no\nlonger needed.\n", []),
        ("It is nothing. This nor that is northern.\n", []),
        ("`is no` and [here](https://x.org/whom)\n", []),
        ("```text\nis no\n```\nwhom\n", [(4, "whom")]),
        ("<!-- is no -->\n", []),
    ],
)
def test_markdown_is_checked_outside_code(text: str, expected: list[tuple[int, str]]) -> None:
    assert found("page.md", text) == expected


def test_wide_markdown_is_found_but_for_tables_code_and_targets_of_links() -> None:
    wide = "word " * 20 + "end"
    assert found("page.md", f"short\n{wide}\n") == [(2, "103 columns")]
    assert found("page.md", f"| {wide} |\n") == []
    assert found("page.md", f"```text\n{wide}\n```\n") == []
    assert found("page.md", f"- `{wide}`,\n") == []
    assert found("page.md", f"before `{wide}`\n") == [(1, "112 columns")]
    assert found("page.md", f"[page](https://example.org/{'x' * 100})\n") == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('"""A module whom\nnobody reads."""\n', [(1, "whom")]),
        ("value = 1  # it is\n#     no file\n", [(1, "is no")]),
        ("error = f'{x} is no number'\n", [(1, "is no")]),
        ("error = 'first\\nwhoever'\n", [(1, "whoever")]),
        ("whom = whoever.is_no\n", []),
        ("# `whom`\n", []),
        ("a = 'it is'\nno = 1\n", []),
    ],
)
def test_python_is_checked_in_comments_and_strings(text: str, expected: list[tuple[int, str]]) -> None:
    assert found("module.py", text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("//! It is\n//! no file.\n", [(1, "is no")]),
        ("let whom = 1; // whom\n", [(1, "whom")]),
        ("/* a /* whom */ whoever */ let whom = 1;\n", [(1, "whoever"), (1, "whom")]),
        ('let x = "it is \\\n    no file";\n', [(1, "is no")]),
        ('let x = r#"a "whom" b"#;\n', [(1, "whom")]),
        ("fn f<'a>(x: &'a str) { let y = '\"'; whom(y) } // ok\n", []),
        ('println!("`{x}` is no size: \\"1X\\"");\n', [(1, "is no")]),
        ("let x = \"`whom`\";\nlet y = b'\\'';\nwhoever();\n", []),
    ],
)
def test_rust_is_checked_in_comments_and_strings(text: str, expected: list[tuple[int, str]]) -> None:
    assert found("lib.rs", text) == expected


def repository(root: Path, **pages: str) -> Path:
    (root / "docs").mkdir(exist_ok=True)
    (root / "tests" / "lint").mkdir(parents=True, exist_ok=True)
    (root / "docs" / "style.md").write_text(STYLE)
    for name, text in pages.items():
        (root / f"{name}.md").write_text(text)
    return root


def test_a_file_may_have_as_many_findings_as_it_is_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = repository(tmp_path, old="whom\n\nwhom\n", new="fine\n")
    assert words.main([], root) == 1
    assert "old.md:3: whom: name the rank\n" in capsys.readouterr().out
    (root / words.ALLOWANCES).write_text("# comment\n2 old.md\n")
    assert words.main([], root) == 0
    assert capsys.readouterr().out == ""
    repository(root, old="whom\n\nwhom\n\nwhom\n")
    assert words.main([], root) == 1
    assert "old.md: 3 findings, 2 allowed" in capsys.readouterr().out
    repository(root, old="whom\n")
    assert words.main([], root) == 0
    assert "old.md: 2 -> 1" in capsys.readouterr().out


def test_allowances_move_with_their_files_but_their_sum_only_falls(tmp_path: Path) -> None:
    root = repository(tmp_path, old="whom\n\nwhom\n", other="whom\n")
    assert words.main(["--write"], root) == 0, "the first time, all are written down"
    assert words.allowances(root) == {"old.md": 2, "other.md": 1}
    (root / "old.md").rename(root / "moved.md")
    assert words.main([], root) == 1
    assert words.main(["--write"], root) == 0
    assert words.allowances(root) == {"moved.md": 2, "other.md": 1}
    repository(root, other="fine\n")
    assert words.main(["--write"], root) == 0
    assert words.allowances(root) == {"moved.md": 2}
    repository(root, other="whom\n")
    assert words.main(["--write"], root) == 1
    assert words.allowances(root) == {"moved.md": 2}


def test_the_table_of_the_style_guide_can_be_read() -> None:
    phrases = words.phrases_of((words.ROOT / words.STYLE).read_text())
    assert {"is no", "whoever", "makes no sense"} <= {phrase.words for phrase in phrases}
    assert all(phrase.instead for phrase in phrases)
