"""What tests of reconfigured groups share: how ranks exchange their handles, and whether a group works.

Handles go through the store of the tests, which is not tested here.
"""

import os
import signal
from collections.abc import Collection, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from ranks import Rank
from torch._C._distributed_c10d import ReconfigureOptions

SOON = timedelta(seconds=30)

TRANSPORTS = ["auto", "tcp"]


def begin(me: Rank, transport: str = "auto") -> None:
    """Makes the default group, which is not connected."""
    os.environ["TENFOLD_TRANSPORT"] = transport
    me.join(enable_reconfigure=True)


def exchange(me: Rank, step: str, ranks: Collection[int] | None = None) -> list[str]:
    """The handles of these processes, by the numbers with which they began."""
    me.store.set(f"{step}/{me.rank}", dist._get_reconfigure_handle())
    return [me.store.get(f"{step}/{rank}").decode() for rank in (range(me.world) if ranks is None else ranks)]


def become(uuid: int, handles: Collection[str], timeout: timedelta = SOON) -> None:
    dist._reconfigure(uuid, handles, timeout=timeout).wait()


def begin_together(me: Rank, transport: str = "auto") -> list[str]:
    """Makes the default group of all ranks, and returns their handles, which with Gloo change each time."""
    begin(me, transport)
    become(1, exchange(me, "begin"))
    return exchange(me, "begun")


def works(rank: int, size: int, group: dist.ProcessGroup | None = None) -> None:
    """Raises an error unless this is the rank, and all ranks reduce, send and broadcast what they should."""
    assert (dist.get_rank(group), dist.get_world_size(group)) == (rank, size)
    numbers = torch.full((4,), rank + 1.0)
    dist.all_reduce(numbers, group=group)
    assert numbers.tolist() == [size * (size + 1) / 2] * 4
    if size > 1:
        sent = dist.isend(torch.tensor([rank]), group=group, group_dst=(rank + 1) % size)
        dist.recv(received := torch.tensor([-1]), group=group, group_src=(rank - 1) % size)
        sent.wait()
        assert received.item() == (rank - 1) % size
    dist.broadcast(said := torch.tensor([rank + 42]), group=group, group_src=size - 1)
    assert said.item() == size + 41


def barrier(me: Rank, step: str, ranks: Sequence[int] | None = None) -> None:
    """Waits for these processes, through the store."""
    me.tell(f"{step}/{me.rank}")
    me.until_told(*(f"{step}/{rank}" for rank in (range(me.world) if ranks is None else ranks)))


def options(uuid: int, handles: Collection[str]) -> ReconfigureOptions:
    """The options of `reconfigure`, for groups that are not `torch.distributed`'s own."""
    made = ReconfigureOptions()
    made.uuid, made.handles, made.timeout = uuid, handles, SOON
    return made


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
