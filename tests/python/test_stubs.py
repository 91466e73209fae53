"""The type stubs say what the extension module has: names, parameters, defaults."""

import os
import site
import subprocess
import sys
from pathlib import Path

import tenfold


def run_mypy_tool(module: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    # mypy looks into the installed packages by itself, and refuses them in MYPYPATH.
    package = str(Path(tenfold.__file__).parents[1])
    environment = os.environ | ({} if package in site.getsitepackages() else {"MYPYPATH": package})
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def test_the_stubs_agree_with_the_module(tmp_path):
    checked = run_mypy_tool("mypy.stubtest", "tenfold._tenfold", folder=tmp_path)
    assert checked.returncode == 0, checked.stdout


PROGRAM = """
from datetime import timedelta
from tenfold._tenfold import Group, HashStore, PrefixStore, Store, TCPStore, Work

class Mine(Store):
    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

store = TCPStore("localhost", 29500, 2, is_master=True, timeout=timedelta(seconds=30))
value: bytes = PrefixStore("mine", store).get("key")
mine = Mine("/tmp/mine")
group = Group(mine, 0, 1, timeout=30.0)
work: Work | None = group.all_reduce(bytearray(8), "sum", async_op=True)
"""


def test_a_program_that_uses_the_package_rightly_passes_a_strict_type_checker(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    checked = run_mypy_tool("mypy", "--strict", str(program), folder=tmp_path)
    assert checked.returncode == 0, checked.stdout


def test_a_program_that_uses_the_package_wrongly_does_not(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM + 'store.wait("key", 3)\ngroup.all_reduce(bytearray(8), 1.5)\nHashStore(1)\n')
    checked = run_mypy_tool("mypy", "--strict", str(program), folder=tmp_path)
    lines = [line for line in checked.stdout.splitlines() if "error:" in line]
    assert len(lines) == 3, checked.stdout
