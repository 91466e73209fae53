"""Builds the Python package: maturin makes the extension module, and this adds the command `tenfold`.

The command is a native program: it starts ten times as fast as a Python script. maturin cannot build a
module and a program in one go, but it installs the files in `tenfold.data/scripts` as programs. So the
program is built first and copied there. pip calls the functions below, as PEP 517 says.

`MATURIN_PEP517_ARGS` goes to maturin; a `--profile` in it is used for the program, too.
"""

import contextlib
import io
import json
import os
import pathlib
import shlex
import shutil
import subprocess
import tarfile
import tomllib

import maturin
from maturin import (  # noqa: F401  (pip calls them)
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
)

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAM = "tenfold-in-wheel"
DATA = ROOT / "python" / "tenfold.data"


def build_wheel(folder, config_settings=None, metadata_directory=None):
    with command(config_settings):
        return maturin.build_wheel(folder, config_settings, metadata_directory)


def build_editable(folder, config_settings=None, metadata_directory=None):
    with command(config_settings):
        return maturin.build_editable(folder, config_settings, metadata_directory)


def prepare_metadata_for_build_wheel(folder, config_settings=None):
    with data_folder():
        return maturin.prepare_metadata_for_build_wheel(folder, config_settings)


prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel


def build_sdist(folder, config_settings=None):
    """All files that git knows: maturin would leave out the crates that only the command needs."""
    files = run(["git", "ls-files", "-z", "--cached"], capture_output=True).stdout.decode().split("\0")
    version = workspace_version()
    name = f"tenfold-{version}"
    about = f"Metadata-Version: 2.1\nName: tenfold\nVersion: {version}\n".encode()
    with tarfile.open(pathlib.Path(folder) / f"{name}.tar.gz", "w:gz") as archive:
        for file in filter(None, files):
            archive.add(ROOT / file, f"{name}/{file}", recursive=False)
        entry = tarfile.TarInfo(f"{name}/PKG-INFO")
        entry.size = len(about)
        archive.addfile(entry, io.BytesIO(about))
    return f"{name}.tar.gz"


@contextlib.contextmanager
def command(config_settings):
    """The native program where maturin looks for it, as long as maturin needs it."""
    given = (config_settings or {}).get("build-args", os.environ.get("MATURIN_PEP517_ARGS", ""))
    words = shlex.split(given) if isinstance(given, str) else list(given)
    profile = option(words, "--profile") or "release"
    target = option(words, "--target") or os.environ.get("CARGO_BUILD_TARGET")
    build = ["cargo", "build", "--locked", "-p", "tenfold-cli", "--bin", PROGRAM, "--profile", profile]
    # Benchmarks need a checkout around them; they are not part of the package.
    run([*build, "--no-default-features", "--features", "wheel", *(["--target", target] if target else [])])
    made = target_folder() / (target or "") / ("debug" if profile == "dev" else profile) / PROGRAM
    with data_folder() as scripts:
        shutil.copy2(made, scripts / "tenfold")
        strip(scripts / "tenfold")
        yield


@contextlib.contextmanager
def data_folder():
    """The folder that pyproject.toml names; maturin refuses to do anything without it."""
    scripts = DATA / "scripts"
    scripts.mkdir(parents=True, exist_ok=True)
    try:
        yield scripts
    finally:
        shutil.rmtree(DATA)


def option(words, name):
    """The value of `--name value` or `--name=value`."""
    for word, after in zip(words, [*words[1:], None], strict=True):
        if word == name:
            return after
        if word.startswith(f"{name}="):
            return word.removeprefix(f"{name}=")
    return None


def strip(program):
    """Without its symbols it is half as large. Where there is no `strip`, it stays as it is."""
    if shutil.which("strip"):
        subprocess.run(["strip", program], check=False)


def target_folder():
    found = run(["cargo", "metadata", "--format-version", "1", "--no-deps", "--locked"], capture_output=True)
    return pathlib.Path(json.loads(found.stdout)["target_directory"])


def workspace_version():
    return tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]


def run(words, **options):
    return subprocess.run(words, cwd=ROOT, check=True, **options)
