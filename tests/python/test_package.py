"""The package without PyTorch: two ranks in two processes, and how programs that use it end."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tenfold
from processes import python, run_together
from programs.package_ranks import CASES

STRICT = ["-X", "dev", "-W", "error"]


def strictly(program: str, *arguments: object) -> list[str]:
    interpreter, *rest = python(program, *arguments)
    return [interpreter, *STRICT, *rest]


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_without_pytorch(case, tmp_path):
    commands = [strictly("package_ranks.py", case, rank, tmp_path / "store") for rank in range(2)]
    run_together(commands, tmp_path, timeout=60)


def said_by(case: str, folder: Path) -> str:
    """What a program says that must end well, and without a word on standard error."""
    ran = subprocess.run(
        strictly("package_alone.py", case),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout


@pytest.mark.smoke
def test_importing_the_package_imports_neither_pytorch_nor_numpy():
    program = "import tenfold, sys; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, *STRICT, "-c", program], capture_output=True, text=True, check=True)
    assert (ran.stdout, ran.stderr) == ("[]\n", "")


def test_importing_the_package_does_not_import_c10ds_names_before_they_are_used():
    used = "tenfold.c10d.OpType.SEND.name, tenfold.ddp.Reducer.__name__"
    program = f"import tenfold, sys; print('tenfold.c10d' in sys.modules, {used})"
    ran = subprocess.run([sys.executable, *STRICT, "-c", program], capture_output=True, text=True, check=True)
    assert (ran.stdout, ran.stderr) == ("False SEND Reducer\n", "")


def test_control_c_ends_a_wait(tmp_path):
    assert said_by("interrupted_while_waiting", tmp_path) == "interrupted\n"


def test_a_program_ends_while_an_operation_is_under_way(tmp_path):
    assert said_by("over_with_work_in_flight", tmp_path) == "the end\n"


def test_a_program_ends_after_the_callback_that_is_running(tmp_path):
    assert said_by("over_in_a_callback", tmp_path) == "the end\nthe callback ended\n"


def test_callbacks_may_wait_for_callbacks_without_end(tmp_path):
    assert said_by("deep_callbacks", tmp_path) == "40\n"


def test_init_says_what_is_missing_in_the_environment(monkeypatch):
    for variable in ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]:
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(
        ValueError, match="RANK is not set; pass `rank`, or start the program by `tenfold run`"
    ):
        tenfold.init()
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ValueError, match="RANK is `first`, which is not a number"):
        tenfold.init()


def command(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tenfold", *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_the_package_brings_the_command_as_a_native_program(tmp_path):
    assert command("--version").stdout == f"tenfold {tenfold.__version__}\n"
    ran = command("bench", "--ops", "barrier")
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.startswith("error: this build of tenfold has no benchmarks\n")
    # Ranks are run by the Python that started the command, or by the one that the user chose.
    program = tmp_path / "who.py"
    program.write_text("import sys\nprint(sys.executable)\n")
    assert command("run", "-n", "1", str(program)).stdout == f"{sys.executable}\n"
    chosen = tmp_path / "python"
    chosen.symlink_to(Path(sys.executable).resolve())
    assert command("run", "-n", "1", str(program), PYTHON_EXEC=str(chosen)).stdout == f"{chosen}\n"
    # Python ignores SIGPIPE and SIGXFSZ; other programs must not inherit that.
    ignored = command("run", "-n", "1", "grep", "SigIgn", "/proc/self/status").stdout.split()[-1]
    assert int(ignored, 16) & (1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1) == 0


def test_a_script_of_an_older_package_is_not_taken_for_the_command(tmp_path):
    # The script would call the module, and the module the script, without end.
    package = Path(tenfold.__file__).parent
    (tmp_path / "tenfold").mkdir()
    for file in package.glob("*"):
        (tmp_path / "tenfold" / file.name).symlink_to(file)
    (tmp_path / "tenfold" / "__main__.py").unlink()
    shutil.copy(package / "__main__.py", tmp_path / "tenfold")
    script = tmp_path / "bin" / "tenfold"
    script.parent.mkdir()
    script.write_text(f"#!{sys.executable}\nfrom tenfold.__main__ import main\nmain()\n")
    script.chmod(0o755)
    ran = command("--version", PYTHONPATH=str(tmp_path))
    assert ran.returncode == 1
    assert ran.stderr.startswith("error: the command `tenfold` is not installed; looked for ")
    assert str(script) in ran.stderr


def test_init_joins_the_ranks_that_tenfold_run_started():
    launcher = [sys.executable, "-m", "tenfold", "run", "-n", "3", *strictly("package_sum.py")]
    ran = subprocess.run(launcher, capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == 0, ran.stderr
    assert sorted(ran.stdout.splitlines()) == [f"[{rank}] rank {rank} of 3: 6" for rank in range(3)]


def test_rank_0_hosts_the_store_if_no_launcher_does(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    with tenfold.init(timeout=20) as group:
        store = group.process_group.get_group_store()
        client = tenfold.TCPStore("127.0.0.1", store.port)
        client.set("who hosts", "rank 0")
        assert store.get("who hosts") == b"rank 0"


def test_init_meets_where_the_environment_says(monkeypatch):
    server = tenfold.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # As under a launcher whose store it is: rank 0 is a client, too.
    environment = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(server.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "3",
    }
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    with tenfold.init(timeout=20) as group:
        assert (group.rank, group.size) == (0, 1)
    assert any(key.startswith("/worker/attempt_3/") for key in server.list_keys())


def test_other_threads_run_while_a_group_is_dropped(tmp_path):
    environment = {"TENFOLD_PROGRESS": str(tmp_path)}
    run_together([strictly("drop_group.py", tmp_path)], tmp_path, [environment], timeout=60, cold=True)
