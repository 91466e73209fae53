"""One rank of a small gloo job: gloo.py FOLDER [HOST PORT RANK WORLD_SIZE].

With an address it is an explicit client of the store there; without one it finds everything in the
environment, as under torchrun. Each rank writes what it computed to FOLDER/<rank>.json.
"""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

TIMEOUT = timedelta(seconds=60)

folder, *where = sys.argv[1:]
if where:
    host, port, rank, world = where[0], *map(int, where[1:])
    store = dist.TCPStore(host, port, world_size=world, is_master=False, timeout=TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=TIMEOUT)
else:
    dist.init_process_group("gloo", timeout=TIMEOUT)
rank, world = dist.get_rank(), dist.get_world_size()

everybody = torch.arange(1000) * (rank + 1)
dist.all_reduce(everybody)

halves = [dist.new_group(list(range(start, world, 2))) for start in (0, 1)]
half = torch.tensor([rank])
dist.all_reduce(half, group=halves[rank % 2])

ranks = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
dist.all_gather(ranks, torch.tensor([rank]))
dist.barrier()

result = {"everybody": everybody.sum().item(), "half": half.item(), "ranks": [r.item() for r in ranks]}
Path(folder, f"{rank}.json").write_text(json.dumps(result))
dist.destroy_process_group()
