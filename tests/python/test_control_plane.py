"""The worker control plane: beside PyTorch's for the same requests, under its front end, and in trouble."""

import http.client
import json
import os
import pickle
import re
import socket
import stat
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import tenfold
import tenfold.torch
from control_clients import Answer, ask, post, said, worker
from launchers import PATIENCE, Launcher, free_port
from tenfold import _tenfold
from tenfold.c10d import control
from torch._C import _distributed_c10d as c10d


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("ours") / "s.sock"
    server = tenfold.c10d._WorkerServer(str(path))
    yield path
    server.shutdown()


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("theirs") / "s.sock"
    server = c10d._WorkerServer(str(path))
    yield path
    server.shutdown()


# ── the same requests to PyTorch's server and to ours ──────────────────────────────────────────────────────


def show(request: Any, response: Any) -> None:
    told = (request.body(), request.get_param("a"), request.get_param("b"))
    response.set_content(repr(told), "text/x-told")
    response.set_status(201)


def raise_error(request: Any, response: Any) -> None:
    raise ValueError("bad thing\nin two lines")


def say_nothing(request: Any, response: Any) -> None:
    pass


def only_status(request: Any, response: Any) -> None:
    response.set_status(418)


def give_bytes(request: Any, response: Any) -> None:
    response.set_content(b"\x00\xff", "x/y")


def inject(request: Any, response: Any) -> None:
    response.set_content("x", "text/plain\r\nX-Evil: 1")


for handler in [show, raise_error, say_nothing, only_status, give_bytes, inject]:
    tenfold.c10d._register_handler(f"test_{handler.__name__}", handler)
    _tenfold.control_keep(handler)  # PyTorch lets go of it too late
    c10d._register_handler(f"test_{handler.__name__}", handler)

# What is answered alike, to the byte.
SAME = [
    ("POST", "/handler/ping", None),
    ("POST", "/handler/ping/", None),
    ("POST", "/handler/p%69ng", None),
    ("POST", "/handler/nope", None),
    ("POST", "/handler/nope%20%3Cb%3E", None),
    ("POST", "/handler/c10d_health_check", None),
    ("POST", "/handler/dump_nccl_trace_json", None),
    ("POST", "/handler/dump_nccl_trace_json?onlyactive=true", None),
    ("POST", "/handler/dump_nccl_trace_json?onlyactive=maybe", None),
    ("POST", "/handler/dump_nccl_trace_json?other=1", None),
    ("POST", "/handler/dump_nccl_trace_pickle?includestacktraces=maybe", None),
    ("POST", "/handler/dump_nccl_trace_pickle?other=1", None),
    ("POST", "/handler/test_show", None),
    ("POST", "/handler/test_show?a=1%202&a=3&b=x+y", None),
    ("POST", "/handler/test_show?a&b=1=2", None),
    ("POST", "/handler/test_show?a=%C3%BC", b"\xc3\xa9 and more"),
    ("POST", "/handler/test_raise_error", None),
    ("POST", "/handler/test_give_bytes", None),
    ("POST", "/handler/test_inject", None),
]

# Other tests may have made groups in this process, so this one asks a process of its own.
ASK_WITHOUT_A_GROUP = """
import sys
import tenfold
from test_control_plane import c10d, post
for number, library in enumerate([tenfold.c10d, c10d]):
    path = f"{sys.argv[1]}/{number}"
    server = library._WorkerServer(path)
    print(post(path, "fr_dump_file"))
    server.shutdown()
"""


def test_without_a_group_the_dump_is_refused_alike(tmp_path):
    command = [sys.executable, "-c", ASK_WITHOUT_A_GROUP, str(tmp_path)]
    folder = Path(__file__).parent
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    ours, theirs = done.stdout.splitlines()
    assert ours == theirs
    assert "status=503" in ours
    assert "no process group has registered" in ours


# Where we say more, or something else: the reason, and what is the same all the same.
SAME_STATUS = {
    ("GET", "/"): "the page of another program",
    ("GET", "/handler"): "we say where to look; c10d says nothing",
    ("GET", "/handler/ping"): "we say that it is run by POST; c10d says nothing",
    ("GET", "/nope"): "we say where to look; c10d says nothing",
    ("POST", "/"): "we say where to look; c10d says nothing",
    ("POST", "/handler/test_say_nothing"): "c10d sends no type with nothing",
    ("POST", "/handler/test_only_status"): "c10d sends no type with nothing",
    ("POST", "/handler/dump_traceback"): "stacks differ",
    ("POST", "/handler/fr_trace_json"): "the recorder of another library",
    ("POST", "/handler/pyspy_dump"): "c10d asks a shell, which says that there is no py-spy in its own words",
}


@pytest.mark.parametrize(("method", "target", "body"), SAME)
def test_the_same_request_has_the_same_answer(ours, theirs, method, target, body):
    kind = {"Content-Type": "text/plain"}
    assert ask(ours, method, target, body, **kind) == ask(theirs, method, target, body, **kind)


@pytest.mark.parametrize(("method", "target"), SAME_STATUS)
def test_where_the_answer_differs_its_status_does_not(ours, theirs, method, target):
    our, their = ask(ours, method, target), ask(theirs, method, target)
    assert our.status == their.status
    assert our != their, "it no longer differs: it belongs to SAME"


def test_py_spy_is_asked_and_told_as_by_c10d(ours, theirs, tmp_path, monkeypatch):
    fake = tmp_path / "py-spy"
    fake.write_text('#!/bin/sh\necho "$@"; echo complaint >&2; echo more; exit "$PY_SPY_EXIT"\n')
    fake.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    flags = "native=1&nonblocking=true&subprocesses=0"
    for status, query in [(0, ""), (0, f"?{flags}&other=1"), (0, "?native="), (3, "")]:
        monkeypatch.setenv("PY_SPY_EXIT", str(status))
        our, their = (ask(path, "POST", f"/handler/pyspy_dump{query}") for path in (ours, theirs))
        assert our == their
        asked = " --native --subprocesses --nonblocking" if flags in query else ""
        said = f"dump --pid {os.getpid()}{asked}\ncomplaint\nmore\n"
        assert our == Answer(500 if status else 200, "text/plain", said)


def test_a_form_is_taken_for_parameters_as_by_c10d(ours, theirs):
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    for body in [b"a=5&b=6", b"a=%C3%BC"]:
        answers = [ask(path, "POST", "/handler/test_show", body, **form) for path in (ours, theirs)]
        assert answers[0] == answers[1]


@pytest.mark.smoke
def test_c10ds_handlers_are_ours(ours, theirs):
    names = [set(json.loads(ask(path, "GET", "/handler/").text)) for path in (ours, theirs)]
    assert set(tenfold.c10d._get_handler_names()) == names[0]
    # Of ours in theirs: what tenfold.torch offers.
    their_own = {name for name in names[1] if not name.startswith("tenfold_")}
    assert their_own - names[0] == set()
    assert names[0] - names[1] == {"fr_trace_pickle", "metrics", "stragglers", "torch_profile"}


def test_a_trace_of_no_nccl_is_empty_as_a_pickle_too(ours, theirs):
    name = "dump_nccl_trace_pickle?includestacktraces=true"
    answers = [post(path, name) for path in (ours, theirs)]
    assert [(answer.status, answer.kind) for answer in answers] == [(200, "application/octet-stream")] * 2
    mine, other = (pickle.loads(answer.text.encode("latin-1")) for answer in answers)
    assert mine == {key: value for key, value in other.items() if key in mine}
    assert not other.get("entries")


def test_a_dump_with_call_sites_can_be_fetched(ours):
    group = tenfold.init(store=tenfold.HashStore(), rank=0, world_size=1, name="fetched")
    group.all_reduce(bytearray(8))
    group.close()
    dump = pickle.loads(post(ours, "fr_trace_pickle").text.encode("latin-1"))
    entry = next(entry for entry in dump["entries"] if entry["process_group"][0] == "fetched")
    assert isinstance(entry["frames"], list)
    assert pickle.loads(tenfold.c10d._dump_nccl_trace()).keys() == dump.keys()


def test_the_registry_refuses_in_c10ds_words():
    def refusals(of: Any) -> Iterator[tuple[type, str]]:
        for name in ["test_show", "ping", "dump_traceback"]:
            with pytest.raises(ValueError, match="already registered") as caught:
                of._register_handler(name, show)
            yield caught.type, str(caught.value)
        with pytest.raises(ValueError, match="Failed") as caught:
            of._get_handler("nope")
        yield caught.type, str(caught.value)

    assert list(refusals(tenfold.c10d)) == list(refusals(c10d))
    with pytest.raises(TypeError, match="a handler can be called, 5 cannot"):
        tenfold.c10d._register_handler("test_five", 5)
    assert "test_five" not in tenfold.c10d._get_handler_names()


def test_a_handler_can_be_had_and_called_without_a_server():
    class Response(tenfold.c10d._Response):
        def set_content(self, content: str | bytes, content_type: str) -> None:
            self.told = (content, content_type)

    response = Response()
    tenfold.c10d._get_handler("ping")(tenfold.c10d._Request(), response)
    assert (response.told, response.status) == (("pong", "text/plain"), 200)
    assert tenfold.c10d._get_handler("test_show") is show


# ── where ours is stricter or kinder than c10d's ───────────────────────────────────────────────────────────


def test_a_socket_is_for_its_owner_and_goes_at_the_end(tmp_path):
    path = tmp_path / "s.sock"
    before = os.umask(0)
    try:
        server = tenfold.c10d._WorkerServer(str(path))
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert server.port == 0
    with pytest.raises(RuntimeError, match="already exists, and a process listens on it"):
        tenfold.c10d._WorkerServer(str(path))
    server.shutdown()
    server.shutdown()
    assert not path.exists()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.exists()
    tenfold.c10d._WorkerServer(str(path)).shutdown()
    path.write_text("a file")
    with pytest.raises(RuntimeError, match="already exists and is not a socket"):
        tenfold.c10d._WorkerServer(str(path))
    with pytest.raises(RuntimeError, match=r"cannot listen on .*/missing/s: No such file or directory"):
        tenfold.c10d._WorkerServer(str(tmp_path / "missing" / "s"))


def test_tcp_is_for_those_who_know_its_name_and_for_no_foreign_page():
    server = tenfold.c10d._WorkerServer("127.0.0.1", 0)
    try:

        def status(host: str, **headers: str) -> int:
            client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
            with closing(client):
                client.request("POST", "/handler/ping", headers={"Host": host, **headers})
                return client.getresponse().status

        assert status("localhost") == status(f"{socket.gethostname()}:80") == 200
        assert status("evil.example") == 421
        assert status("localhost", Origin="http://evil.example") == 403
        with pytest.raises(RuntimeError, match=rf"cannot listen on 127.0.0.1:{server.port}: Address already"):
            tenfold.c10d._WorkerServer("127.0.0.1", server.port)
        for port in [-2, 65536]:
            with pytest.raises(ValueError, match=f"{port} is not a port"):
                tenfold.c10d._WorkerServer("127.0.0.1", port)
    finally:
        server.shutdown()


def test_what_a_handler_does_wrong_is_told_and_nothing_more_happens(ours):
    def leave(request: Any, response: Any) -> None:
        sys.exit(3)

    def give_number(request: Any, response: Any) -> None:
        response.set_content(5, "text/plain")

    def odd_status(request: Any, response: Any) -> None:
        response.set_status(99999)

    kept = []
    for handler in [leave, give_number, odd_status]:
        tenfold.c10d._register_handler(f"test_{handler.__name__}", handler)
    tenfold.c10d._register_handler("test_keep", lambda request, response: kept.append((request, response)))
    assert post(ours, "test_leave").text.startswith("Handler test_leave failed: SystemExit: 3\n\nAt:\n")
    told = post(ours, "test_give_number")
    assert (told.status, "content is str or bytes, not int" in told.text) == (500, True)
    told = post(ours, "test_odd_status")
    assert (told.status, "99999 is not a status of an answer" in told.text) == (500, True)
    told = ask(ours, "POST", "/handler/test_show", b"\xff")
    assert (told.status, "UnicodeDecodeError" in told.text) == (500, True)
    # c10d's dies of this.
    assert post(ours, "test_keep").status == 200
    assert kept[0][0].body() == ""


def test_handlers_that_take_long_keep_neither_others_nor_the_end_waiting(tmp_path):
    path = tmp_path / "s.sock"
    server = tenfold.c10d._WorkerServer(str(path))
    begun, go_on = threading.Event(), threading.Event()

    def wait(request: Any, response: Any) -> None:
        begun.set()
        go_on.wait(PATIENCE)

    def end_server(request: Any, response: Any) -> None:
        server.shutdown()
        go_on.set()

    tenfold.c10d._register_handler("test_wait", wait)
    tenfold.c10d._register_handler("test_end_server", end_server)
    answers: list[Answer | Exception] = []

    def ask_and_keep(name: str) -> None:
        try:
            answers.append(post(path, name))
        except (OSError, http.client.HTTPException) as error:
            answers.append(error)

    clients = [threading.Thread(target=ask_and_keep, args=("test_wait",))]
    clients[0].start()
    assert begun.wait(PATIENCE)
    assert post(path, "ping").text == "pong"
    # The server is ended by one of its own handlers, while another runs; both clients see it go.
    clients.append(threading.Thread(target=ask_and_keep, args=("test_end_server",)))
    clients[1].start()
    assert go_on.wait(PATIENCE)
    for client in clients:
        client.join(PATIENCE)
    assert [isinstance(answer, ConnectionError) for answer in answers] == [True] * 2, answers
    assert not path.exists()


# ── trouble in a process of its own ────────────────────────────────────────────────────────────────────────

ENDS = """
import sys, threading, time
import tenfold

running = threading.Event()

def sleep(request, response):
    running.set()
    time.sleep(600)

tenfold.c10d._register_handler("sleep", sleep)
server = tenfold.c10d._WorkerServer(sys.argv[1])
print("ready", flush=True)
running.wait()
"""

STUCK = """
import ctypes, sys
import tenfold

server = tenfold.c10d._WorkerServer(sys.argv[1])
tenfold.c10d._register_handler("mine", lambda request, response: None)
sys.setswitchinterval(1000.0)  # so that no other thread gets the lock between these two calls
libc = ctypes.PyDLL(None)
libc.write(1, b"ready\\n", 6)
libc.pause()
"""


def started(program: str, path: Path) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", program, path], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout.readline() == b"ready\n"
    return process


def test_a_process_ends_well_while_one_of_its_handlers_runs(tmp_path):
    path = tmp_path / "s.sock"
    with started(ENDS, path) as process:
        with suppress(OSError, http.client.HTTPException):  # it may end before it can say so
            assert post(path, "sleep") == Answer(500, "text/plain", "Handler sleep failed: Python is ending")
        assert (process.wait(PATIENCE), process.stderr.read()) == (0, b"")
    assert not path.exists()


def test_an_interpreter_that_is_stuck_is_told_of_and_its_threads_are_shown(tmp_path):
    path = tmp_path / "s.sock"
    with started(STUCK, path) as process:
        try:
            stuck = "Python did not begin with it within 5 s: some thread holds the interpreter's lock"
            answers: dict[str, Answer] = {}
            names = ["dump_traceback", "mine"]
            clients = [
                threading.Thread(target=lambda name=name: answers.update({name: post(path, name)}))
                for name in names
            ]
            for client in clients:
                client.start()
            assert post(path, "ping").text == "pong", "what needs no Python goes on"
            for client in clients:
                client.join(PATIENCE)
            traceback = answers["dump_traceback"]
            assert (traceback.status, traceback.text.splitlines()[0]) == (200, stuck)
            assert re.search(r"^Thread \d+ `tenfold-http`: \w+", traceback.text, re.MULTILINE), traceback.text
            assert answers["mine"] == Answer(500, "text/plain", f"Handler mine failed: {stuck}")
        finally:
            process.kill()


# ── ranks ──────────────────────────────────────────────────────────────────────────────────────────────────

RANKS = """
import os, sys, time
import numpy
import tenfold
from tenfold.c10d import control

def hello(request, response):
    response.set_content(f"hello from rank {os.environ['RANK']}", "text/plain")

def wait_for_the_test():
    print("place", control.place(), flush=True)
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.02)
    group.barrier()

tenfold.c10d._register_handler("hello", hello)
group = tenfold.init()
group.broadcast(numpy.ones(3))
wait_for_the_test()
group.close()
assert control.place() is None
"""


def test_ranks_of_the_launcher_can_be_asked_by_the_command(tmp_path):
    program, over = tmp_path / "program.py", tmp_path / "over"
    program.write_text(RANKS)
    folder = tmp_path / "sockets"
    sockets = [folder / f"rank-{rank}.sock" for rank in range(2)]
    words = [f"--worker-server={folder}", "-n", 2, "--python", sys.executable, program, over]
    with Launcher(*words) as launcher:
        launcher.until(re.escape(f"inspect ranks with: tenfold worker {folder}/rank-N.sock"))
        for _ in range(2):
            launcher.until(r"\] place ")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert [stat.S_IMODE(path.stat().st_mode) for path in sockets] == [0o600] * 2
        for rank, path in enumerate(sockets):
            assert f"[{rank}] place {path}" in launcher.said
            names = said(path).splitlines()
            assert {"hello", "ping", "dump_traceback", "metrics"} <= set(names)
            assert "torch_profile" not in names, "only with PyTorch"
            assert said(path, "hello") == f"hello from rank {rank}"
            assert "in wait_for_the_test\n" in said(path, "dump_traceback")
            trace = json.loads(said(path, "fr_trace_json"))
            assert any(entry["profiling_name"] == "tenfold:broadcast" for entry in trace["entries"])
            assert json.loads(said(path, "c10d_health_check"))["healthy"] is True
            counters = json.loads(said(path, "wait_counter_values"))
            assert counters["tenfold.wait_counter.broadcast"]["total_calls"] == 1
            metrics = f'tenfold_operations_total{{group="default",rank="{rank}",op="broadcast"}} 1\n'
            assert metrics in said(path, "metrics")
            assert metrics in ask(path, "GET", "/metrics").text
        ran = worker(sockets[0], "nope", "a=b")
        expected = "404: Handler nope not found: Failed to find handler nope"
        expected = f"error: the worker at {sockets[0]} answered {expected}\n"
        assert (ran.returncode, ran.stderr) == (1, expected)
        over.touch()
        assert launcher.ended() == 0, launcher
    assert list(folder.iterdir()) == []
    ran = worker(sockets[0])
    expected = f"error: no answer from the worker at {sockets[0]}: the file does not exist\n  hint: "
    assert (ran.returncode, ran.stderr.startswith(expected)) == (1, True), ran.stderr


def test_the_command_asks_pytorchs_workers_too(theirs):
    assert "ping" in said(theirs).splitlines()
    assert said(theirs, "ping") == "pong"
    assert said(theirs, "test_show", "a=1 2", "--body", "text") == "('text', '1 2', '')"


def test_the_variable_is_enough_and_a_wrong_one_is_an_error():
    program = """
import tenfold, urllib.request
from tenfold.c10d import control
group = tenfold.init(store=tenfold.HashStore(), rank=0, world_size=1)
place = control.place()
print(urllib.request.urlopen(f"http://{place}/handler/ping", data=b"").read().decode(), place)
"""

    def run(value: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"TENFOLD_WORKER_SERVER": value}
        command = [sys.executable, "-c", program]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
        )

    ran = run("127.0.0.1:0")
    assert re.fullmatch(r"pong 127\.0\.0\.1:\d+\n", ran.stdout), ran.stderr
    ran = run("nowhere")
    assert (
        "`TENFOLD_WORKER_SERVER=nowhere`: `nowhere` is neither the path of a socket nor a host" in ran.stderr
    )
    assert "hint: say a path with a slash in it" in ran.stderr


# ── PyTorch's front end ────────────────────────────────────────────────────────────────────────────────────

FRONT_END = """
import os, sys, time
import torch, torch.distributed as dist
import tenfold.torch
from torch.distributed.debug import stop_debug_server

def wait_for_the_test():
    while not os.path.exists(sys.argv[2]):
        time.sleep(0.02)
    dist.barrier()

if __name__ == "__main__":
    dist.init_process_group("tenfold")
    tenfold.torch.start_debug_server(port=int(sys.argv[1]))
    dist.broadcast(torch.ones(3), 0)
    dist.barrier()
    print("up", flush=True)
    wait_for_the_test()
    if dist.get_rank() == 0:
        stop_debug_server()
    dist.destroy_process_group()
"""


@pytest.mark.timeout(300)
def test_pytorchs_front_end_shows_what_our_workers_tell(tmp_path):
    program, over = tmp_path / "program.py", tmp_path / "over"
    program.write_text(FRONT_END)
    port = free_port()
    dumps = {"TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "dump_")}
    words = ["-n", 2, "--python", sys.executable, program, port, over]
    with Launcher(*words, environment=dumps) as launcher:
        for _ in range(2):
            launcher.until(r"\] up$")

        def page(target: str) -> str:
            for _ in range(600):
                try:
                    with urllib.request.urlopen(
                        f"http://127.0.0.1:{port}{target}", timeout=PATIENCE
                    ) as answer:
                        return answer.read().decode()
                except urllib.error.HTTPError as error:
                    raise AssertionError(f"{target}: {error} {error.read().decode()}\n{launcher}") from None
                except urllib.error.URLError:  # its process may not listen yet
                    assert launcher.process.poll() is None, launcher
                    threading.Event().wait(0.1)
            raise AssertionError(f"no front end:\n{launcher}")

        assert "FlightRecorder CPU" in page("/")
        stacks = page("/stacks")
        assert stacks.count("in wait_for_the_test\n") == 2, stacks
        # The recorder says what PyTorch's own cannot: that a collective is over.
        trace = page("/fr_trace_json")
        assert trace.count("tenfold:broadcast") == 2, trace
        assert "completed" in trace
        tables = page("/fr_trace")
        assert "broadcast" in tables, tables
        assert "PARTIAL DATA" not in tables, tables
        assert "NCCL" in page("/fr_trace_nccl")
        health = page("/c10d_health_check")
        assert re.sub("&#34;", '"', health).count('{"healthy":true,"unhealthy_backends":[]}') == 2, health
        assert page("/wait_counters").count("tenfold.wait_counter.broadcast") == 2
        assert page("/fr_dump_file").count("Flight Recorder dump written to") == 2
        assert sorted(path.name for path in tmp_path.glob("dump_*")) == ["dump_0", "dump_1"]
        profile = page("/profile?duration=0.1")
        assert profile.count("traceEvents") == 2, profile[:2000]
        assert "Failed to fetch" not in page("/tcpstore")
        over.touch()
        assert launcher.ended() == 0, launcher


def test_pytorchs_own_workers_tell_of_tenfold_too(theirs):
    for name in ["c10d_health_check", "metrics", "wait_counter_values"]:
        answer = post(theirs, f"tenfold_{name}")
        response = tenfold.c10d._Response()
        control._get_handler(name)(tenfold.c10d._Request(), response)
        assert (answer.status, answer.text) == (response.status, response.content.decode())
