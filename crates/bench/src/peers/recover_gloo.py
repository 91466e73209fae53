"""One rank of Gloo as PyTorch ships it, with its reconfiguration, for `tenfold bench recover`.

usage: python -c PROGRAM COORDINATOR TEAM RANK RANKS BYTES VICTIM TIMEOUT

Reduces in a loop until a rank dies, then aborts, exchanges handles through the store and continues. Nothing
in Gloo finds out which rank that was, so the survivors know it beforehand. What the lines mean is in
`recover/protocol.rs`.
"""

import ctypes
import datetime
import os
import signal
import socket
import sys
import time

TURNS_BEFORE = 20
PR_SET_PDEATHSIG = 1

ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
path, team = sys.argv[1:3]
rank, ranks, size, victim = map(int, sys.argv[3:7])
patience = datetime.timedelta(seconds=float(sys.argv[7]))
coordinator = socket.socket(socket.AF_UNIX)
coordinator.connect(path)
orders = coordinator.makefile("r")


def say(line):
    coordinator.sendall(line.replace("\n", " ").encode() + b"\n")


def give_up(line):
    """Reports, and waits until the coordinator ends this process."""
    say(line)
    signal.pause()


try:
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_group

    reconfigure = dist._reconfigure
except Exception as error:
    give_up(f"missing {team} {type(error).__name__}: {error}")


class Rank:
    """A rank of a group that is configured again and again."""

    def __init__(self):
        self.store = dist.PrefixStore(team, self.server())
        options = {"store": self.store, "rank": rank, "world_size": ranks, "timeout": patience}
        dist.init_process_group("gloo", **options, enable_reconfigure=True)
        self.generation = 0
        self.elements = torch.zeros(size // 8, dtype=torch.float64)

    def server(self):
        """The server that was named, or one of our own, whose port the others get."""
        _store, host, port = orders.readline().split()
        if port != "0":
            return dist.TCPStore(host, int(port), None, False, patience, wait_for_workers=False)
        server = dist.TCPStore(host, 0, None, True, patience, wait_for_workers=False)
        say(f"store {server.port}")
        return server

    def configure(self, members):
        """Makes the group of these ranks, which all call it."""
        self.generation += 1
        key = f"{self.generation}/"
        self.store.set(f"{key}{rank}", dist._get_reconfigure_handle())
        handles = [self.store.get(f"{key}{member}").decode() for member in members]
        reconfigure(self.generation, handles, timeout=patience).wait()

    def all_reduce(self):
        """Each rank adds a power of two, so the sum says which ranks took part."""
        self.elements.fill_(2**rank)
        dist.all_reduce(self.elements)

    def sum(self):
        """The result, if all elements are the same; otherwise the coordinator hears about it."""
        first = self.elements[0].item()
        if not bool((self.elements == first).all()):
            give_up(f"wrong rank {rank} has other values than {first}")
        return int(first)

    def work(self):
        """Until an operation fails."""
        turn = 0
        while True:
            self.all_reduce()
            if self.sum() != 2**ranks - 1:
                give_up(f"wrong rank {rank} has {self.elements[0]}")
            turn += 1
            if turn == TURNS_BEFORE:
                say("running")

    def recover(self):
        _get_default_group()._get_backend(torch.device("cpu")).abort()
        self.configure([member for member in range(ranks) if member != victim])
        self.all_reduce()


def main():
    torch.set_num_threads(1)
    say(f"hello {team} {rank} {os.getpid()} PyTorch {torch.__version__}")
    member = Rank()
    member.configure(list(range(ranks)))
    try:
        member.work()
    except RuntimeError:
        failed = time.monotonic_ns()
    try:
        member.recover()
    except RuntimeError as error:
        give_up(f"failed {failed} {str(error).splitlines()[0]}")
    done = time.monotonic_ns()
    say(f"recovered {failed} {done} {member.sum()}")
    while True:  # until the coordinator ends this process
        member.all_reduce()


main()
