"""A rank of a group over two hosts: two_hosts.py array, or two_hosts.py METHOD [RANK] for torch.distributed.

No variable says which interface to use. Fails unless sums over both ranks are right, also in a second group.
"""

import sys
from datetime import timedelta

PATIENCE = timedelta(seconds=60)


def with_arrays() -> None:
    import numpy
    import tenfold

    with tenfold.init() as group:
        array = numpy.full(1000, group.rank + 1.0)
        group.all_reduce(array)
        assert group.size == 2
        assert (array == 3).all(), array


def with_pytorch(method: str, *rank: str) -> None:
    import torch
    import torch.distributed as dist

    place = {"rank": int(rank[0]), "world_size": 2} if rank else {}
    dist.init_process_group("tenfold", init_method=method, timeout=PATIENCE, **place)
    for group in (dist.group.WORLD, dist.new_group([0, 1])):
        tensor = torch.full((100_000,), dist.get_rank() + 1.0)
        dist.all_reduce(tensor, group=group)
        assert (tensor == 3).all(), tensor
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "array":
        with_arrays()
    else:
        with_pytorch(*sys.argv[1:])
