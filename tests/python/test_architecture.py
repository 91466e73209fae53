"""ARCHITECTURE.md and the README of each crate are compared with the sources."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()
CRATES = sorted(path.parent for path in ROOT.glob("crates/*/Cargo.toml"))


def section(title: str) -> str:
    """The text of a section, up to the next heading."""
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#)", ARCHITECTURE, re.MULTILINE | re.DOTALL)
    assert found, title
    return found[1]


def names(text: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", text))


def sources(folder: Path) -> list[Path]:
    files = [*folder.rglob("*.rs"), *folder.rglob("*.py")]
    return [file for file in files if file.name != "tests.rs"]


def without_tests(file: Path) -> str:
    return file.read_text().split("#[cfg(test)]\nmod tests {")[0]


@pytest.mark.parametrize("crate", CRATES, ids=lambda crate: crate.name)
def test_the_readme_of_a_crate_names_all_of_its_files_and_no_others(crate: Path) -> None:
    listed = {
        name.rsplit("/", 1)[-1] for name in names((crate / "README.md").read_text()) if name.endswith(".rs")
    }
    assert listed == {file.name for file in sources(crate / "src") if file.suffix == ".rs"}


def test_the_list_of_files_of_the_package_is_complete() -> None:
    text = (ROOT / "crates" / "python" / "README.md").read_text()
    listed = {name.rsplit("/", 1)[-1] for name in names(text) if name.endswith(".py")}
    package = ROOT / "python" / "tenfold"
    assert listed == {file.name for file in sources(package) if file.parent.name != "bench"}


def test_every_crate_is_in_the_table() -> None:
    listed = re.findall(r"crates/([a-z]+)/README.md", section("Crates"))
    assert sorted(listed) == [crate.name for crate in CRATES]


def test_every_thread_is_in_the_table() -> None:
    rust = r"\.name\((?:format!\()?\"([a-z-]+)|on_a_thread\(\s*py,\s*\"([a-z-]+)"
    python = r"Thread\([^)]*?name=f?\"([a-z-]+)"
    started = set()
    for crate in CRATES:
        if crate.name != "bench":
            started |= {
                a or b for file in sources(crate / "src") for a, b in re.findall(rust, without_tests(file))
            }
    for file in sources(ROOT / "python" / "tenfold"):
        started |= set(re.findall(python, file.read_text(), re.DOTALL))
    # The name has a number, and is made before the thread.
    started |= {name.rstrip("-") for name in re.findall(r"\"(tenfold-completion-)", completions())}
    assert started == names(section("Threads"))


def completions() -> str:
    return (ROOT / "python" / "tenfold" / "completions.py").read_text()


def test_unsafe_code_is_where_the_documents_say() -> None:
    crates = {crate.name for crate in CRATES if 'unsafe_code = "forbid"' not in lints(crate)}
    assert crates == {"memory", "python"}
    folder = ROOT / "crates" / "python" / "src"
    files = {
        str(file.relative_to(folder))
        for file in sources(folder)
        if "#![expect(unsafe_code" in file.read_text()
    }
    assert files == {name for name in names(section("Unsafe code")) if name.endswith(".rs")}


def lints(crate: Path) -> str:
    manifest = (crate / "Cargo.toml").read_text()
    if "[lints]\nworkspace = true" in manifest:
        return (ROOT / "Cargo.toml").read_text()
    return manifest


def test_errors_are_made_where_the_documents_say() -> None:
    files = set()
    for crate in ("runtime", "store"):
        folder = ROOT / "crates" / crate / "src"
        for file in sources(folder):
            if re.search(r"(?<![:\w])Error::new\(", without_tests(file)):
                files.add(str(file.relative_to(folder)))
    assert files == {name for name in names(section("Where errors are made")) if name.endswith(".rs")}
