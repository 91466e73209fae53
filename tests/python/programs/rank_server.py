"""Ranks on demand: importing torch costs seconds, forking a process that has it costs milliseconds.

Reads jobs, one JSON object per line, and answers each with a line {"codes": [...]}, the exit codes of the
ranks. A job says which function of which module every rank is to call, with a group of which backend. What a
rank returned or raised is in the job's folder, pickled, and beside it what it printed.

A job is a process group: a leader, forked from here, forks the ranks and hosts their store, which so outlives
every rank that is meant to die. When the job's limit is reached, or the leader ends, what is left of the
group is killed. Forking is safe because nothing here starts a thread; a leader does so after its last fork.
"""

import importlib
import json
import os
import pickle
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch._dynamo  # noqa: F401, else the first functional collective of every rank would import it
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))  # where the tests are
from ranks import Rank

PATIENCE = timedelta(seconds=60)  # of the store; jobs end earlier


@dataclass
class Job:
    module: str
    function: str
    arguments: list[Any]
    backend: str
    world: int
    timeout: float  # of the group's operations, in seconds
    limit: float  # of the whole job, in seconds
    folder: str


def run(job: Job) -> list[int | None]:
    """The exit codes of the ranks; None for those that had to be killed."""
    function = getattr(importlib.import_module(job.module), job.function)
    if job.backend == "tenfold":
        importlib.import_module("tenfold.torch")
    leader = fork(lambda: lead(job, function))
    end = os.pidfd_open(leader)
    try:
        select.select([end], [], [], job.limit)
    finally:
        os.close(end)
        with suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)  # before it is reaped, so that the number is still its own
        os.waitpid(leader, 0)
    codes = [Path(job.folder, f"{rank}.code") for rank in range(job.world)]
    return [int(code.read_text()) if code.exists() else None for code in codes]


def fork(body: Callable[[], None]) -> int:
    """The number of a new process that does nothing but `body`."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        body()
        code = 0
    except BaseException:  # whatever it is: this process must not go on as its parent does
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def lead(job: Job, function: Callable[[Rank], Any]) -> None:
    os.setpgid(0, 0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        ranks = {fork(partial(be_rank, rank, port, job, function)): rank for rank in range(job.world)}
        store = dist.TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=os.dup(listener.fileno()),
        )
        while ranks:
            child, status = os.wait()
            code = os.waitstatus_to_exitcode(status)
            Path(job.folder, f"{ranks.pop(child)}.code").write_text(str(code))
        del store


def be_rank(rank: int, port: int, job: Job, function: Callable[..., Any]) -> None:
    output = os.open(Path(job.folder, f"{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    me = Rank(rank, job.world, job.backend, job.timeout, dist.TCPStore("127.0.0.1", port, timeout=PATIENCE))
    if job.backend == "gloo":
        # What we compare with. At DETAIL every call through PyTorch's wrapper waits for all ranks, so that
        # ranks which use two groups in different orders would wait forever.
        dist.set_debug_level(dist.DebugLevel.OFF)
    try:
        me.join()
        outcome = {"returned": function(me, *job.arguments)}
    except Exception as error:
        classes = [each.__name__ for each in type(error).__mro__]
        outcome = {"raised": classes, "text": str(error), "traceback": traceback.format_exc()}
    Path(job.folder, f"{rank}.pickle").write_bytes(pickle.dumps(outcome))
    if dist.is_initialized():
        dist.destroy_process_group()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            answer = {"codes": run(Job(**json.loads(line)))}
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
