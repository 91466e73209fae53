"""A rank that meets a fault: `faulty_rank.py SCENE WAY STORE RANK SIZE`.

WAY is `tenfold` (arrays) or `torch` (torch.distributed); STORE is a file. What a rank has to say it says in
lines on standard output, and it goes on when the test writes a line to its standard input.
"""

import os
import signal
import sys
import time
from collections.abc import Callable

SCENE, WAY, STORE = sys.argv[1:4]
RANK, SIZE = map(int, sys.argv[4:6])
TIMEOUT = 100.0  # seconds: only a test that fails waits for it
CHILDREN = 3


def say(text: str) -> None:
    print(text.replace("\n", " | "), flush=True)


def usual_time() -> float:
    """How long it takes a forked child to exit that has no group."""
    start = time.monotonic()
    if (child := os.fork()) == 0:
        sys.exit()
    os.waitpid(child, 0)
    return time.monotonic() - start


if WAY == "tenfold":
    import numpy
    import tenfold

    USUAL = usual_time()
    group = tenfold.init(tenfold.FileStore(STORE, SIZE), RANK, SIZE, TIMEOUT)

    def shared(count: int) -> "numpy.ndarray":
        return numpy.frombuffer(group.shared_memory(4 * count), numpy.float32)

    def add(values: "numpy.ndarray", async_op: bool = False) -> object:
        return group.all_reduce(values, async_op=async_op)

    def end() -> None:
        group.close()
else:
    from datetime import timedelta

    import tenfold.torch
    import torch
    import torch.distributed as dist

    USUAL = usual_time()
    limit = timedelta(seconds=TIMEOUT)
    dist.init_process_group(
        "tenfold", init_method=f"file://{STORE}", rank=RANK, world_size=SIZE, timeout=limit
    )

    def shared(count: int) -> "torch.Tensor":
        return tenfold.torch.empty(count, dtype=torch.float32).zero_()

    def add(values: "torch.Tensor", async_op: bool = False) -> object:
        return dist.all_reduce(values, async_op=async_op)

    def end() -> None:
        dist.destroy_process_group()


def sum_until(is_over: Callable[[], bool]) -> None:
    """Sums until rank 0 says that it is over; all ranks hear of it in the same sum."""
    values = shared(2)
    while True:
        values[0], values[1] = 1.0, float(RANK == 0 and is_over())
        add(values)
        assert values[0] == SIZE, values
        if values[1] > 0:
            return


def fork() -> None:
    """Rank 0 forks children that leave by `sys.exit`, while it holds shared memory and works."""
    kept = shared(1 << 16)
    kept[:] = 7.0
    longest = 0.0
    for _ in range(CHILDREN):
        child = 0
        if RANK == 0:
            work = add(shared(1 << 20), async_op=True)
            child = os.fork()
            if child == 0:
                sys.exit(5)
            work.wait()
        else:
            add(shared(1 << 20))
        start = time.monotonic()
        status: list[int] = []

        def is_over(child: int = child, status: list[int] = status) -> bool:
            ended, code = os.waitpid(child, os.WNOHANG)
            status.extend([code] if ended else [])
            return bool(ended)

        sum_until(is_over)
        if RANK == 0:
            longest = max(longest, time.monotonic() - start)
            assert os.waitstatus_to_exitcode(status[0]) == 5, status
        assert (kept == 7).all(), "a child gave back its parent's memory"
    say(f"children took {longest:.3f} {USUAL:.3f}")
    end()


def leave_block() -> None:
    """As `fork`, but the child leaves a `with` block of the group by `sys.exit`."""
    with group:
        child = 0
        if RANK == 0:
            child = os.fork()
            if child == 0:
                sys.exit(5)
        sum_until(lambda: bool(os.waitpid(child, os.WNOHANG)[0]))
    say("left")


def load() -> None:
    """Rank 1 is killed while the workers of its DataLoader live."""
    import torch.utils.data

    # Workers that never look whether their parent lives.
    torch.utils.data._utils.worker.MP_STATUS_CHECK_INTERVAL = 1000.0
    loader = torch.utils.data.DataLoader(
        range(64), batch_size=4, num_workers=2, persistent_workers=True, multiprocessing_context="fork"
    )
    values = torch.zeros(1 << 16)
    dist.all_reduce(values)  # so that the workers, which are forked now, inherit streams
    for _ in loader:
        dist.all_reduce(values)
    say("loaded")
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    sum_until_error()


def sum_until_error() -> None:
    values = shared(1 << 12)
    try:
        while True:
            add(values)
    except Exception as error:
        say(f"raised {type(error).__name__}: {error}")
    sys.stdin.readline()  # lingers, as a trainer does that saves what it has


def part() -> None:
    """Sums until the network to the other rank is cut."""
    values = shared(1 << 12)
    for _ in range(3):
        add(values)
    say("sums")
    sum_until_error()


def fill() -> None:
    """Sums far more than the small /dev/shm of these ranks holds, in memory that peers read."""
    for _ in range(3):
        values = shared(1 << 22)
        values[:] = 1.0
        add(values)
        assert (values == SIZE).all()
    room = os.statvfs("/dev/shm")  # noqa: S108, it is measured and not used
    say(f"summed beside {room.f_blocks * room.f_frsize} bytes")
    end()


SCENES = {"fork": fork, "leave_block": leave_block, "load": load, "part": part, "fill": fill}
SCENES[SCENE]()
