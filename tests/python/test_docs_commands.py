"""Every command that the launcher's and the operator's pages show is run, as a reader would type it.

A block of kind `console` holds commands behind `$ `. They are run one after another in a folder of the
page's own, unless a comment before the block says otherwise:

    <!-- test: together -->    at the same time, as on several machines
    <!-- test: background -->  started, and left running until the page is through; after its first line
    <!-- test: fails 1 -->     they end with this exit code

A block of Python that begins with the name of a file is that file. `node-a` is this machine, and the
well-known ports become free ones: pages are tested at the same time.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from launchers import Launcher, free_port
from ranks import ENVIRONMENT
from servers import ROOT, tenfold_binary

PAGES = ["control-plane.md", "debugging.md", "migrating-from-torchrun.md", "operating.md", "stuck-ranks.md"]
PORTS = ["29400", "29500", "29580"]

TRAIN = """\
import argparse
import torch
import torch.distributed as dist
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
epochs = parser.parse_args().epochs
dist.init_process_group("gloo")
total = torch.ones(1) * epochs
dist.all_reduce(total)
assert total.item() == epochs * dist.get_world_size()
dist.destroy_process_group()
"""
FAILS = """\
import os
if os.environ["RANK"] == "1":
    raise ValueError("no data")
"""


@dataclass
class Block:
    how: str
    commands: list[str]
    # The first line of what is shown behind it, if it is what the command says.
    sample: str


def blocks(page: str) -> Iterator[Block]:
    text = (ROOT / "docs" / page).read_text()
    pattern = r"(?:<!-- test: (?P<how>.*?) -->\n)? *```console\n(?P<body>.*?)```"
    pattern += r"(?:\n\n```\n(?P<sample>error: .*?)\n)?"
    for found in re.finditer(pattern, text, re.DOTALL):
        lines = [line.strip() for line in found["body"].splitlines()]
        commands = [line[2:] for line in lines if line.startswith("$ ")]
        assert commands, f"a block without a command in {page}: {found['body']}"
        yield Block(found["how"] or "", commands, found["sample"] or "")


def without_numbers(said: str) -> str:
    return re.sub(r"\d+(\.\d+)? s |pid \d+", "# ", said)


def test_a_block_is_read_with_what_is_said_about_it() -> None:
    assert list(blocks("migrating-from-torchrun.md"))[1].how == "together"
    assert any(block.how == "background" for block in blocks("operating.md"))
    samples = [block.sample for block in blocks("migrating-from-torchrun.md") if block.sample]
    assert [without_numbers(sample) for sample in samples] == [
        "error: rank 1 of 2 failed first: exit code 1 after # (# )"
    ]


@pytest.mark.timeout(1800)  # a page has a dozen jobs, each of which starts PyTorch on a few ranks
@pytest.mark.parametrize("page", PAGES)
def test_a_page_can_be_typed(page: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "fails.py").write_text(FAILS)
    for name, program in re.findall(
        r"```python\n(?=# (\w+\.py)\n)(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL
    ):
        (tmp_path / name).write_text(program)
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "tenfold").symlink_to(tenfold_binary())
    # No link: a Python that is called by a link does not find the packages beside it.
    (bin_folder / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (bin_folder / "python3").chmod(0o755)
    environment = {"PATH": f"{bin_folder}:{os.environ['PATH']}", "PYTHON_EXEC": sys.executable}
    ports = {port: str(free_port()) for port in PORTS}
    running: list[Launcher] = []

    def start(command: str) -> Launcher:
        for port, free in ports.items():
            command = command.replace(port, free)
        command = command.replace("node-a", "127.0.0.1")
        shell = ("bash", "-euo", "pipefail", "-c", f"cd {tmp_path} && exec {command}")
        if re.search(r"[|;&]|^\w+=", command):
            shell = (*shell[:-1], f"cd {tmp_path} && {command}")
        return Launcher(command=shell, environment=environment)

    try:
        for block in blocks(page):
            how, _, code = block.how.partition(" ")
            if how == "background":
                for command in block.commands:
                    running.append(start(command))
                    running[-1].until(".")
                continue
            launchers = []
            for command in block.commands:
                launchers.append(start(command))
                if how != "together":
                    launchers[-1].ended()
            for launcher in launchers:
                with launcher:
                    assert launcher.ended() == int(code or 0), str(launcher)
                if sample := block.sample:
                    assert without_numbers(sample) in without_numbers(str(launcher))
    finally:
        for launcher in running:
            with launcher:
                pass


@pytest.mark.timeout(600)
def test_every_flag_of_torchrun_is_in_the_table() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--help"],
        capture_output=True,
        text=True,
        env=ENVIRONMENT | os.environ,
        check=True,
    ).stdout
    flags = set(re.findall(r"^  (?:-\w,? ?\S*, )?(--[a-z-]+)", shown, re.MULTILINE)) - {"--help"}
    assert "--nproc-per-node" in flags
    page = (ROOT / "docs" / "migrating-from-torchrun.md").read_text()
    table = page[page.index("## Flags") : page.index("## What is different")]
    assert not {flag for flag in flags if flag not in table}
