"""`tenfold bench recover`: Gloo beside tenfold, and hosts; what is reported, not how fast anything is."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from servers import tenfold_binary

PATIENCE = 220.0


def recover(file: Path, *arguments: str) -> tuple[str, list[dict[str, Any]]]:
    """What it prints, and its rows."""
    line = [tenfold_binary(), "bench", "recover", *arguments, "--rounds", "1", "--json", str(file)]
    environment = os.environ | {"TENFOLD_PYTHON": sys.executable}
    ran = subprocess.run(line, capture_output=True, text=True, check=False, timeout=PATIENCE, env=environment)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout, json.loads(file.read_text())


@pytest.mark.timeout(240)
def test_gloo_recovers_while_its_store_lives_and_tenfold_always(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    text, rows = recover(
        tmp_path / "rows.json", "--ranks", "3", "--size", "64K", "--timeout", "5s", "--against", "gloo"
    )
    found = [(row["victim"], row["implementation"], row["recovered"]) for row in rows]
    assert found == [
        ("other", "tenfold", 1),
        ("other", "gloo", 1),
        ("store", "tenfold", 1),
        ("store", "gloo", 0),
    ]
    (_, gloo, _, gloo_without_store) = rows
    assert gloo["transport"] == "tcp"
    assert gloo["ratio"] > 0
    assert gloo_without_store["median_us"] is gloo_without_store["ratio"] is None
    assert gloo_without_store["error_us"] > 0
    assert "gloo, the store's host killed: never: rank " in text


@pytest.mark.timeout(240)
def test_survivors_on_other_hosts_continue(tmp_path: Path) -> None:
    trial = "ip link add bridge type bridge && ip link add port0 type veth peer name end0"
    if shutil.which("unshare") is None:
        pytest.skip("unshare is missing")
    ran = subprocess.run(["unshare", "--net", "--uts", "sh", "-c", trial], capture_output=True, check=False)
    if ran.returncode != 0:
        pytest.skip(f"no network namespaces here: {ran.stderr.decode().strip()}")
    _, rows = recover(tmp_path / "rows.json", "--hosts", "2x2,3x1", "--size", "64K")
    found = [(row["hosts"], row["ranks"], row["victim"], row["recovered"]) for row in rows]
    assert found == [(2, 4, "other", 1), (2, 4, "store", 1), (3, 3, "other", 1), (3, 3, "store", 1)]
    assert {row["transport"] for row in rows} == {"shm+tcp"}


@pytest.mark.timeout(240)
def test_a_python_without_pytorch_excludes_gloo_alone(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('not for this test')")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    arguments = ["--ranks", "3", "--against", "gloo", "--python", str(python)]
    text, rows = recover(tmp_path / "rows.json", *arguments)
    assert "gloo: not measured: ImportError: not for this test; name a Python" in text
    # What the ranks of Gloo send late does not disturb the next case.
    found = [(row["victim"], row["implementation"], row["rounds"]) for row in rows]
    assert found == [
        ("other", "tenfold", 1),
        ("other", "gloo", 0),
        ("store", "tenfold", 1),
        ("store", "gloo", 0),
    ]
