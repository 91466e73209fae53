"""Three ranks sum; rank 2 comes to the fourth sum when a file is there: `stuck.py tenfold|torch FILE`."""

import os
import sys
import time
from pathlib import Path

import numpy

way, gate = sys.argv[1], Path(sys.argv[2])

if way == "tenfold":
    import tenfold

    group = tenfold.init()
    rank, values = group.rank, numpy.ones(8, numpy.float32)

    def add() -> None:
        group.all_reduce(values)
else:
    import tenfold.torch
    import torch
    import torch.distributed as dist

    dist.init_process_group("tenfold")
    rank, tensor = dist.get_rank(), torch.ones(8)

    def add() -> None:
        dist.all_reduce(tensor)


for _ in range(3):
    add()
if rank == 2:
    while not gate.exists():  # busy with something else
        time.sleep(0.01)
        if os.getppid() == 1:
            sys.exit("the launcher has exited")
add()
