"""Keeps compiled dependencies outside the checkout, so that a clean clone need not compile them again.

    compiled.py seed CACHE TARGET...     before a build: fills target folders that are missing or empty
    compiled.py keep CACHE TARGET...     after a build: puts the dependencies that are in them into the cache

A TARGET is a workspace and its target folder, such as `.=target`. CACHE is a folder for one key (toolchain,
lock files, manifests); `./test` makes the key. Only packages from a registry are kept: a package of the
checkout is known to cargo by its place in the workspace and the age of its files, so that one checkout
could take another's for its own.

Files are copied, not linked: cargo rewrites some of them in place.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

KEPT = (".fingerprint", "build", "deps")  # what cargo has in the folder of a profile, besides what it links
KEYS_MAX = 3  # older ones are removed: a set of dependencies has about a gigabyte


def profiles(target: Path) -> Iterator[Path]:
    """The folders of profiles below a target folder, such as `debug` and `loom/release`."""
    for depth in ("*", "*/*", "*/*/*"):
        for fingerprints in sorted(target.glob(f"{depth}/.fingerprint")):
            yield fingerprints.parent.relative_to(target)


def own_names(workspace: Path) -> set[str]:
    """The names of the packages and targets of a workspace, as they are in file names."""
    command = ["cargo", "metadata", "--no-deps", "--format-version", "1"]
    said = subprocess.run(command, cwd=workspace, check=True, capture_output=True).stdout
    packages = json.loads(said)["packages"]
    names = {package["name"] for package in packages}
    names |= {target["name"] for package in packages for target in package["targets"]}
    return names | {name.replace("-", "_") for name in names}


def is_own(entry: str, own: set[str]) -> bool:
    """Is it of a package of this repository? Those of other workspaces are known by their first letters."""
    stem = re.sub(r"-[0-9a-f]{16}(\..*)?$", "", entry)
    return stem in own or stem.removeprefix("lib") in own or stem.removeprefix("lib").startswith("tenfold")


def keep(cache: Path, targets: dict[str, Path]) -> None:
    if cache.exists():
        return
    partial = cache.with_name(f"{cache.name}.{os.getpid()}.partial")
    for number, (workspace, target) in enumerate(targets.items()):
        own = own_names(Path(workspace))
        for profile in profiles(target):
            for kind in KEPT:
                for entry in (
                    (target / profile / kind).iterdir() if (target / profile / kind).is_dir() else ()
                ):
                    if not is_own(entry.name, own):
                        copy(entry, partial / str(number) / profile / kind / entry.name)
    if partial.exists():
        partial.rename(cache)
    prune(cache.parent)


def seed(cache: Path, targets: dict[str, Path]) -> None:
    if not cache.exists():
        return
    os.utime(cache)  # used now
    for number, target in enumerate(targets.values()):
        kept = cache / str(number)
        if kept.exists() and not any(profiles(target)):
            copy(kept, target)


def copy(source: Path, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, place, symlinks=True, dirs_exist_ok=True)
    else:
        shutil.copy2(source, place)


def prune(folder: Path) -> None:
    for partial in folder.glob("*.partial"):
        with suppress(ValueError, OSError):
            os.kill(int(partial.suffixes[-2][1:]), 0)
            continue  # still being written
        shutil.rmtree(partial, ignore_errors=True)
    keys = sorted(folder.iterdir(), key=lambda each: each.stat().st_mtime)
    for old in keys[:-KEYS_MAX]:
        shutil.rmtree(old, ignore_errors=True)


def main(action: str, cache: str, *targets: str) -> None:
    pairs = dict(target.split("=", 1) for target in targets)
    {"keep": keep, "seed": seed}[action](Path(cache), {name: Path(path) for name, path in pairs.items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
