"""Python programs on demand: importing torch costs seconds, forking a process that has it costs milliseconds.

    warm_server.py SOCKET

Each connection is one program. The first message says what to run (a JSON object with `argv`, `env`, `cwd`)
and brings the program's standard input, output and error. The answers are two lines: its process number,
and when it has ended its exit code. A program leads a session of its own. When the connection is closed,
what is left of its process group is killed, and only then is its number given back.

The server prints a line when it can be connected to. Forking is safe because nothing here starts a thread.
The server ends when its standard input does.
"""

import atexit
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from dataclasses import dataclass

# What ranks of a training need, too; else the first optimizer of every program would import it.
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
import torch.nn.parallel  # noqa: F401

MESSAGE_MAX = 1 << 20


@dataclass
class Program:
    connection: socket.socket
    number: int
    ended: int  # a descriptor that is readable when it has ended


def start(connection: socket.socket) -> Program | None:
    message, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_MAX, 3)
    if not message:
        return None
    while not message.endswith(b"\n"):
        message += connection.recv(MESSAGE_MAX)
    number = os.fork()
    if number == 0:
        become(json.loads(message), descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    connection.sendall(b"%d\n" % number)
    return Program(connection, number, os.pidfd_open(number))


def become(job: dict, descriptors: list[int]) -> None:
    """Makes this process the program; never returns."""
    code = 1
    try:
        os.setsid()
        for place, descriptor in enumerate(descriptors):
            os.dup2(descriptor, place)
        os.closerange(3, 1 << 16)  # of the server, and the connections of other programs
        os.chdir(job["cwd"])
        os.environ.clear()
        os.environ |= job["env"]
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code = run(job["argv"])
    finally:
        os._exit(code)


def run(argv: list[str]) -> int:
    """As `python argv...`: its exit code."""
    sys.argv = argv
    sys.path[0] = os.path.dirname(os.path.abspath(argv[0]))
    code: object = 0
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    # What the interpreter does at its end.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else int(code is not None)


def tell_end(program: Program) -> None:
    status = os.waitid(os.P_PID, program.number, os.WEXITED | os.WNOWAIT)
    code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
    with suppress(OSError):  # the other side has gone
        program.connection.sendall(b"%d\n" % code)


def forget(program: Program) -> None:
    with suppress(ProcessLookupError):
        os.killpg(program.number, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(program.number, signal.SIGKILL)  # it may not have become a leader yet
    os.waitpid(program.number, 0)
    os.close(program.ended)
    program.connection.close()


def serve(listener: socket.socket) -> None:
    events = selectors.DefaultSelector()
    events.register(0, selectors.EVENT_READ, "the parent has ended")
    events.register(listener, selectors.EVENT_READ, listener)
    while True:
        for key, _ in events.select():
            if key.fileobj == 0:
                return
            if key.data is listener:
                connection, _ = listener.accept()
                if program := start(connection):
                    events.register(connection, selectors.EVENT_READ, program)
                    events.register(program.ended, selectors.EVENT_READ, program)
            elif key.fileobj == key.data.ended:
                events.unregister(key.fileobj)
                tell_end(key.data)
            else:
                events.unregister(key.fileobj)
                with suppress(KeyError):  # it has ended before
                    events.unregister(key.data.ended)
                forget(key.data)


if __name__ == "__main__":
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(sys.argv[1])
        listener.listen(64)
        print("ready", flush=True)
        serve(listener)
