"""A group is dropped while another one's dump keeps it waiting; a Python thread has to run to end that.

The file by which the launcher learns about dumps is a FIFO: a writer waits until another thread reads it, and
a thread that leaves a group meanwhile waits for that. The reader is a Python thread.
"""

import os
import sys
import threading
from pathlib import Path

import tenfold

folder = Path(sys.argv[1])
marker = folder / f"{os.getpid()}.dumping"
os.mkfifo(marker)
dropped = tenfold.init(store=tenfold.HashStore(), rank=0, world_size=1, name="dropped")
failing = tenfold.init(store=tenfold.HashStore(), rank=0, world_size=1, name="failing")
is_dropping = threading.Event()


def read() -> None:
    is_dropping.wait()
    marker.read_bytes()


reader = threading.Thread(target=read)
reader.start()
aborting = threading.Thread(target=failing.abort)
aborting.start()
# Until the other thread waits in `open`. On a kernel that does not show this, the test checks less.
for _ in range(500):
    if any("wait_for_partner" in (task / "wchan").read_text() for task in Path("/proc/self/task").iterdir()):
        break
    aborting.join(0.01)
sys.setswitchinterval(60)  # between the next two lines no other thread gets the interpreter by itself
is_dropping.set()
del dropped
sys.setswitchinterval(0.005)
reader.join()
aborting.join()
print("left", flush=True)
