"""A whole program, for `tenfold run`: prints the sum of all ranks' numbers."""

import sys

import tenfold

with tenfold.init(timeout=60) as group:
    numbers = bytearray([group.rank + 1])
    group.all_reduce(numbers)
    print(f"rank {group.rank} of {group.size}: {numbers[0]}")
    group.barrier()
assert "torch" not in sys.modules
