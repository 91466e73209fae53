"""One rank of Gloo as PyTorch ships it, measured by `tenfold bench`.

usage: python -c PROGRAM COORDINATOR TEAM RANK RANKS STORE_HOST STORE_PORT

Says hello to the coordinator, a Unix socket, then sleeps in a read until told what to run. The process
group is called directly, without `torch.distributed`'s checks and dispatcher: what is measured is Gloo and
one Python call. What the lines mean is in `collectives/protocol.rs`; the values by which results are checked
are those of `collectives/values.rs`.
"""

import ctypes
import datetime
import gc
import os
import signal
import socket
import sys
import time

path, team, rank, ranks, store_host, store_port = sys.argv[1:7]
rank, ranks, store_port = int(rank), int(ranks), int(store_port)
coordinator = socket.socket(socket.AF_UNIX)
coordinator.connect(path)


def answer(line):
    coordinator.sendall(line.encode() + b"\n")


try:
    import torch
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d
except Exception as error:
    answer(f"missing {type(error).__name__}: {error}")
    sys.exit(3)

DTYPES = {
    "f32": torch.float32,
    "f64": torch.float64,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i32": torch.int32,
    "i64": torch.int64,
    "u8": torch.uint8,
}
TAG = 7
PR_SET_PDEATHSIG = 1


def values(of_rank, indices, modulus):
    """Small whole numbers: exact in every dtype, and so are their sums over 64 ranks."""
    mixed = (indices * 2654435761 + of_rank * 2246822519) & 0xFFFFFFFF
    return (mixed >> 16) % modulus


class Case:
    """Buffers of one case, and the call that is measured."""

    def __init__(self, group, op, dtype, size):
        self.group, self.op, self.dtype = group, op, DTYPES[dtype]
        self.count = size // self.dtype.itemsize
        self.block = max(self.count // ranks, 1)
        self.run = getattr(self, op)()

    def tensor(self, count):
        return torch.zeros(count, dtype=self.dtype)

    def in_place(self):
        self.input = self.output = self.tensor(self.count)
        return self.input

    def pair(self, input_count, output_count):
        self.input, self.output = self.tensor(input_count), self.tensor(output_count)
        return self.input, self.output

    def all_reduce(self):
        tensors, options, call = [self.in_place()], c10d.AllreduceOptions(), self.group.allreduce
        return lambda: call(tensors, options).wait()

    def broadcast(self):
        tensors, options, call = [self.in_place()], c10d.BroadcastOptions(), self.group.broadcast
        return lambda: call(tensors, options).wait()

    def reduce(self):
        tensors, options, call = [self.in_place()], c10d.ReduceOptions(), self.group.reduce
        return lambda: call(tensors, options).wait()

    def reduce_scatter(self):
        source, target = self.pair(self.count, self.block)
        options, call = c10d.ReduceScatterOptions(), self.group._reduce_scatter_base
        return lambda: call(target, source, options).wait()

    def all_gather(self):
        source, target = self.pair(self.block, self.count)
        options, call = c10d.AllgatherOptions(), self.group._allgather_base
        return lambda: call(target, source, options).wait()

    def all_to_all(self):
        source, target = self.pair(self.count, self.count)
        options, call = c10d.AllToAllOptions(), self.group.alltoall_base
        return lambda: call(target, source, [], [], options).wait()

    def gather(self):
        source, target = self.pair(self.block, self.count if rank == 0 else 0)
        targets = [list(target.split(self.block))] if rank == 0 else []
        options, call = c10d.GatherOptions(), self.group.gather
        return lambda: call(targets, [source], options).wait()

    def scatter(self):
        source, target = self.pair(self.count if rank == 0 else 0, self.block)
        sources = [list(source.split(self.block))] if rank == 0 else []
        options, call = c10d.ScatterOptions(), self.group.scatter
        return lambda: call([target], sources, options).wait()

    def send_recv(self):
        source, target = self.pair(self.count, self.count)
        send, recv = self.group.send, self.group.recv
        if rank == 0:

            def bounce():
                send([source], 1, TAG).wait()
                recv([target], 1, TAG).wait()
        elif rank == 1:

            def bounce():
                recv([target], 0, TAG).wait()
                send([target], 0, TAG).wait()
        else:

            def bounce():
                pass

        return bounce

    def barrier(self):
        self.in_place()
        options, call = c10d.BarrierOptions(), self.group.barrier
        return lambda: call(options).wait()

    def expected(self):
        """What this rank should have as its result; None where it has no say."""
        block, at = self.block, torch.arange
        if self.op in ("all_reduce", "reduce", "reduce_scatter"):
            if self.op == "reduce" and rank != 0:
                return None
            indices = at(block) + rank * block if self.op == "reduce_scatter" else at(self.count)
            return sum(values(source, indices, 3) for source in range(ranks))
        if self.op in ("all_gather", "gather"):
            if self.op == "gather" and rank != 0:
                return None
            return torch.cat([values(source, at(block), 127) for source in range(ranks)])
        if self.op == "all_to_all":
            return torch.cat([values(source, at(block) + rank * block, 127) for source in range(ranks)])
        if self.op == "scatter":
            return values(0, at(block) + rank * block, 127)
        if self.op == "barrier" or (self.op == "send_recv" and rank > 1):
            return None
        return values(0, at(self.count), 127)

    def verify(self):
        reduction = self.op in ("all_reduce", "reduce", "reduce_scatter")
        if self.output is not self.input:
            self.output.fill_(255 if self.dtype == torch.uint8 else -1)
        self.input.copy_(values(rank, torch.arange(self.input.numel()), 3 if reduction else 127))
        self.run()
        expected = self.expected()
        if expected is not None and not torch.equal(self.output, expected.to(self.dtype)):
            return f"rank {rank} has other values than expected"
        # Zeros stay zeros however often they are added.
        self.input.zero_()
        self.output.zero_()
        return None

    def measure(self, warmup, batches, iterations):
        run, clock, times = self.run, time.perf_counter_ns, []
        self.group.barrier(c10d.BarrierOptions()).wait()
        for _ in range(warmup):
            run()
        for _ in range(batches):
            start = clock()
            for _ in range(iterations):
                run()
            times.append(clock() - start)
        return times


def main():
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # our parent may die while we work
    torch.set_num_threads(1)  # filling a tensor must not leave a pool of threads awake
    day = datetime.timedelta(days=1)
    store = dist.TCPStore(store_host, store_port, is_master=False, wait_for_workers=False)
    group = dist.ProcessGroupGloo(dist.PrefixStore(team, store), rank, ranks, day)
    gc.disable()
    answer(f"hello {team} {rank} PyTorch {torch.__version__}")

    known, case = None, None
    for line in coordinator.makefile("r"):
        if line.startswith("bye"):
            break
        _run, op, dtype, size, _memory, check, warmup, batches, iterations = line.split()
        try:
            if known != (op, dtype, size):
                case, known = None, None  # gives the memory back first
                case, known = Case(group, op, dtype, int(size)), (op, dtype, size)
            wrong = case.verify() if check == "1" else None
            if wrong:
                answer(f"wrong {wrong}")
                continue
            times = case.measure(int(warmup), int(batches), int(iterations))
            answer("done - " + ",".join(map(str, times)))
        except RuntimeError as error:
            answer(f"cannot {str(error).splitlines()[0]}")
    os._exit(0)  # nothing here is worth an orderly end, and Gloo's may wait for a peer


main()
