"""How programs with operations in flight end: `package_alone.py CASE`, two ranks in one process."""

import atexit
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import tenfold
from tenfold import Group, HashStore, Work


def both_ranks() -> list[Group]:
    store = HashStore()
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(lambda rank: tenfold.init(store, rank, 2, timeout=60), range(2)))


def interrupted_while_waiting() -> None:
    """Prints what Ctrl-C does to a wait for something that never comes."""
    first, _ = both_ranks()
    work = first.recv(bytearray(8), 1, async_op=True)
    main = threading.main_thread().ident

    def interrupt() -> None:
        # The wait of the extension has no frame of its own: its caller's is what can be seen.
        while sys._current_frames()[main].f_code is not Work.wait.__code__:
            os.sched_yield()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    try:
        work.wait()
    except KeyboardInterrupt:
        print("interrupted")


def over_with_work_in_flight() -> None:
    """Ends while an operation is under way, with a callback on it."""
    first, second = both_ranks()
    # Kept to the end of the program: operations of a group that was dropped have failed, and are over.
    globals().update(kept=[first, second])
    work = first.recv(bytearray(8), 1, async_op=True)
    work.get_future().then(lambda future: print("this never happens"))
    done = first.all_reduce(bytearray(8), async_op=True)
    done.get_future()
    print("the end")


def over_in_a_callback() -> None:
    """Ends while a callback runs."""
    first, second = both_ranks()
    running, may_end = threading.Event(), threading.Event()

    def callback() -> None:
        running.set()
        may_end.wait()
        print("the callback ended")

    first.barrier(async_op=True).notify(callback)
    second.barrier()
    running.wait()
    atexit.register(may_end.set)
    print("the end")


def deep_callbacks() -> None:
    """Callbacks within callbacks, deeper than any fixed number of threads."""
    first, second = both_ranks()

    def descend(depth: int) -> int:
        if depth == 0:
            return 0
        future = first.barrier(async_op=True).get_future().then(lambda _: descend(depth - 1))
        second.barrier()
        return 1 + future.wait()

    print(descend(40))


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    assert "torch" not in sys.modules
    assert "numpy" not in sys.modules
