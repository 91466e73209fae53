"""Checks the prose of this repository: phrases that docs/style.md asks to avoid, and the width of Markdown.

    python3 tests/lint/words.py            prints `file:line: phrase: what to write instead`
    python3 tests/lint/words.py --write    lowers the allowances in tests/lint/words.allow

Prose is the text of Markdown outside code, comments and string literals of Python and Rust. Text in
backticks is never checked. The phrases are those of the table "Phrases to avoid" in docs/style.md.

Files that are not rewritten yet have an allowance, `count path`, in tests/lint/words.allow. A file with more
findings than allowed fails the check. `--write` moves allowances along with files that were renamed, but
refuses to raise their sum.
"""

import argparse
import io
import os
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STYLE = Path("docs", "style.md")
ALLOWANCES = Path("tests", "lint", "words.allow")

FOLDERS = ["adapters", "crates", "docs", "examples", "fuzz", "python", "tests"]
SKIPPED_FOLDERS = {"target", "node_modules", "__pycache__", "wheel_results"}
COLUMNS_MAX = 100

HIDDEN = "\0"  # stands for each character that is not prose, so that no phrase reaches across code


@dataclass(frozen=True)
class Phrase:
    """Words to avoid, what to write instead, and the expressions in which the words are fine."""

    words: str
    instead: str
    fine: tuple[str, ...] = ()

    def found_in(self, prose: str) -> Iterator[re.Match[str]]:
        """Where the phrase is in a text in lower case."""
        if max(self.words.split(), key=len) not in prose:  # ten times as fast as the pattern
            return
        for match in pattern_of(self.words).finditer(prose):
            if not any(is_inside(match, fine) for fine in self.fine):
                yield match


@dataclass(frozen=True, order=True)
class Finding:
    path: str
    line: int
    phrase: str
    instead: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.phrase}: {self.instead}"


def is_inside(match: re.Match[str], expression: str) -> bool:
    """Whether the match is a part of the longer expression."""
    around = pattern_of(expression).finditer(match.string, max(0, match.start() - 40), match.end() + 40)
    return any(found.start() <= match.start() and match.end() <= found.end() for found in around)


@cache
def pattern_of(words: str) -> re.Pattern[str]:
    """Matches the words also where a line ends between them."""
    return re.compile(r"\b" + r"\s+".join(map(re.escape, words.split())) + r"\b")


def phrases_of(style: str) -> list[Phrase]:
    """The rows of the table under "Phrases to avoid"."""
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|(.*)\|$", style.partition("\n## Phrases to avoid\n")[2], re.M)
    return [
        Phrase(words, instead, tuple(re.findall("`(.*?)`", allowed)))
        for phrases, instead, allowed in rows
        for words in re.findall("`(.*?)`", phrases)
    ]


# ------------------------------------------------------------------------------------ where the prose is


def hidden(text: str) -> str:
    """Line ends and spaces stay, so that positions and words that follow each other do."""
    return re.sub(r"\S", HIDDEN, text)


def without_quotes(prose: str) -> str:
    """Hides what stands in backticks: values, names, and what programs print."""
    return re.sub(r"`[^`\n]+`", lambda match: hidden(match[0]), prose)


def without_escapes(literal: str) -> str:
    """Blanks line ends of a string literal, written or continued, which would hide the next word."""
    return literal.replace("\\\n", " \n").replace("\\n", "  ")


def prose_of_markdown(text: str) -> str:
    """Everything but code blocks, code in backticks, the targets of links, and comments."""
    text = re.sub(r"^( *)(```+).*?^ *\2 *$", lambda match: hidden(match[0]), text, flags=re.M | re.S)
    text = re.sub(r"<!--.*?-->", lambda match: hidden(match[0]), text, flags=re.S)
    text = re.sub(r"\]\([^)\s]*\)|https?://\S+", lambda match: hidden(match[0]), text)
    # Code in backticks may go on in the next line, but not in the next paragraph.
    text = re.sub(r"(?<!`)(`+)(?!`)(?:(?!\n\s*\n).)+?(?<!`)\1(?!`)", lambda m: hidden(m[0]), text, flags=re.S)
    return re.sub(r"^( *)(?:>|[-*]|\d+\.)(?= )", lambda match: " " * len(match[0]), text, flags=re.M)


def prose_of_python(text: str) -> str:
    """Comments and string literals."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    in_newer_python = ("FSTRING_MIDDLE", "TSTRING_MIDDLE")
    strings = {tokenize.STRING} | {getattr(tokenize, name, -2) for name in in_newer_python}
    pieces, end_before = [], 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in strings and token.type != tokenize.COMMENT:
            continue
        start, end = starts[token.start[0] - 1] + token.start[1], starts[token.end[0] - 1] + token.end[1]
        piece = text[start:end]
        if token.type == tokenize.COMMENT:
            piece = re.sub(r"^#+", lambda marks: " " * len(marks[0]), piece)
        elif token.type == tokenize.STRING:
            opening = re.match(r"\w*(\"\"\"|'''|\"|')", piece)
            inner = without_escapes(piece[opening.end() : -len(opening[1])])
            piece = hidden(opening[0]) + inner + hidden(opening[1])
        pieces += [hidden(text[end_before:start]), piece]
        end_before = end
    return without_quotes("".join([*pieces, hidden(text[end_before:])]))


# In the order in which they are tried. A lifetime looks like the beginning of a character.
RUST = re.compile(
    r"""
      (?P<comment>//[^\n]*)
    | (?P<block>/\*)
    | (?P<raw>\b[bc]?r(?P<marks>\#*)".*?"(?P=marks))
    | (?P<string>\b[bc]?"(?:\\.|[^"\\])*"|"(?:\\.|[^"\\])*")
    | (?P<character>b?'(?:\\(?:x..|u\{[^}]*\}|.)|[^\\'])')
    """,
    re.VERBOSE | re.DOTALL,
)


def prose_of_rust(text: str) -> str:
    """Comments and string literals."""
    pieces, position = [], 0
    while found := RUST.search(text, position):
        pieces.append(hidden(text[position : found.start()]))
        position = found.end()
        if found["comment"]:
            pieces.append(re.sub(r"^//[/!]*", lambda marks: " " * len(marks[0]), found[0]))
        elif found["block"]:
            position = end_of_block(text, found.start())
            pieces.append(re.sub(r"/\*+!?|\*+/", lambda m: " " * len(m[0]), text[found.start() : position]))
        elif found["string"] or found["raw"]:
            opening, closing = re.match(r'[^"]*"', found[0])[0], f'"{found["marks"] or ""}'
            inner = without_escapes(found[0][len(opening) : -len(closing)])
            pieces += [hidden(opening), inner, hidden(closing)]
        else:
            pieces.append(hidden(found[0]))
    return without_quotes("".join([*pieces, hidden(text[position:])]))


def end_of_block(text: str, start: int) -> int:
    """Block comments nest."""
    depth = 0
    for mark in re.finditer(r"/\*|\*/", text[start:]):
        depth += 1 if mark[0] == "/*" else -1
        if depth == 0:
            return start + mark.end()
    return len(text)


PROSE = {".md": prose_of_markdown, ".py": prose_of_python, ".pyi": prose_of_python, ".rs": prose_of_rust}


# ------------------------------------------------------------------------------------ what is found


def wide_lines(path: str, text: str) -> Iterator[Finding]:
    """Lines of Markdown that are too wide and could be broken, at a space outside of backticks."""
    prose = re.sub(r"^( *)(```+).*?^ *\2 *$", lambda match: hidden(match[0]), text, flags=re.M | re.S)
    for number, line in enumerate(prose.splitlines(), start=1):
        width = len(re.sub(r"\]\([^)\s]*\)|https?://\S+", "", line))
        can_be_broken = " " in re.sub(r"`[^`]+`", HIDDEN, re.sub(r"^ *([-*] )? *", "", line))
        if width > COLUMNS_MAX and can_be_broken and not line.lstrip().startswith(("|", "<!--", HIDDEN)):
            yield Finding(path, number, f"{width} columns", f"wrap at {COLUMNS_MAX}")


def findings_in(path: str, text: str, phrases: list[Phrase]) -> list[Finding]:
    prose = PROSE[Path(path).suffix](text).lower()
    found = [
        Finding(path, prose.count("\n", 0, match.start()) + 1, phrase.words, phrase.instead)
        for phrase in phrases
        for match in phrase.found_in(prose)
    ]
    if path.endswith(".md"):
        found += wide_lines(path, text)
    return sorted(found)


def files(root: Path) -> Iterator[str]:
    """The files to check, as paths below `root`."""
    yield from (path.name for path in root.glob("*.md"))
    for top in FOLDERS:
        for folder, names, contents in os.walk(root / top):
            names[:] = [name for name in names if name not in SKIPPED_FOLDERS and not name.startswith(".")]
            for name in contents:
                if Path(name).suffix in PROSE:
                    yield (Path(folder) / name).relative_to(root).as_posix()


def check(root: Path) -> dict[str, list[Finding]]:
    """What is found in each file that has findings."""
    phrases = phrases_of((root / STYLE).read_text(encoding="utf-8"))
    if not phrases:
        raise SystemExit(f"error: {STYLE} has no table under `## Phrases to avoid`")
    found = {
        path: findings_in(path, (root / path).read_text(encoding="utf-8"), phrases)
        for path in sorted(files(root))
    }
    return {path: findings for path, findings in found.items() if findings}


def allowances(root: Path) -> dict[str, int]:
    path = root / ALLOWANCES
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    pairs = (line.split(maxsplit=1) for line in lines if line and not line.startswith("#"))
    return {name: int(count) for count, name in pairs}


def write_allowances(root: Path, found: dict[str, list[Finding]], allowed: dict[str, int]) -> int:
    sum_now, sum_allowed = sum(map(len, found.values())), sum(allowed.values())
    if sum_now > sum_allowed and (root / ALLOWANCES).exists():
        more = [
            str(finding)
            for path, findings in found.items()
            if len(findings) > allowed.get(path, 0)
            for finding in findings
        ]
        print("\n".join(more))
        print(f"error: {sum_now} findings, but {ALLOWANCES} allows {sum_allowed}; rewrite those above")
        return 1
    lines = [
        "# How many findings tests/lint/words.py allows in which file. `--write` lowers them.",
        *(f"{len(findings)} {path}" for path, findings in found.items()),
    ]
    (root / ALLOWANCES).write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{ALLOWANCES}: {sum_now} findings in {len(found)} files (before: {sum_allowed})")
    return 0


def report(found: dict[str, list[Finding]], allowed: dict[str, int]) -> int:
    failed = False
    for path, findings in found.items():
        if len(findings) > allowed.get(path, 0):
            failed = True
            print("\n".join(map(str, findings)))
            if path in allowed:
                print(f"{path}: {len(findings)} findings, {allowed[path]} allowed")
    lower = [path for path, count in allowed.items() if len(found.get(path, [])) < count]
    if lower:
        print(f"{len(lower)} allowances can be lowered with `python3 tests/lint/words.py --write`:")
        print("\n".join(f"  {path}: {allowed[path]} -> {len(found.get(path, []))}" for path in lower))
    if failed:
        print(f"error: rewrite these sentences; {STYLE} says how")
    return int(failed)


def main(arguments: list[str], root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description="Check the prose of this repository by docs/style.md.")
    parser.add_argument("--write", action="store_true", help="lower the allowances to what is found")
    options = parser.parse_args(arguments)
    found, allowed = check(root), allowances(root)
    return write_allowances(root, found, allowed) if options.write else report(found, allowed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
