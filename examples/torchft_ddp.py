"""Fault tolerance with torchft: three replicas train, one is killed, and the others go on without it.

    pip install torchft-nightly
    python examples/torchft_ddp.py

torchft's lighthouse decides in each step which replicas take part. `tenfold` moves the gradients. When a
replica dies, the others learn it in milliseconds, discard the step, and become a smaller group: no process
starts again, and no store is needed.

Here all replicas are processes of this machine. Each prints its steps and, at the end, a hash of its weights.
"""

import argparse
import hashlib
import os
import signal
import subprocess
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torchft import DistributedDataParallel, Manager, Optimizer
from torchft.coordination import LighthouseServer

REPLICAS = 3


def wait_for_all(number: int, port: int) -> None:
    """Waits until all replicas are ready, so that there is one to lose."""
    store = dist.TCPStore("localhost", port, is_master=False)
    store.set(f"ready/{number}", b"")
    store.wait([f"ready/{replica}" for replica in range(REPLICAS)])


def train(number: int, steps: int, kill: tuple[int, int], port: int) -> None:
    """Is one replica: the one with this number."""
    timeout = timedelta(seconds=30)
    # A group of this process alone. torchft makes it larger and smaller.
    dist.init_process_group(
        "tenfold", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout, enable_reconfigure=True
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 1))
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)

    def load(state: dict) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    # For the processes of this replica, which here is only one.
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=dist.group.WORLD,
        min_replica_size=REPLICAS - 1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        replica_id=f"replica-{number}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        timeout=timeout,
        hostname="localhost",
    )
    replica, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    generator = torch.Generator().manual_seed(number)
    wait_for_all(number, port)
    while manager.current_step() < steps:
        if (number, manager.current_step()) == kill:
            os.kill(os.getpid(), signal.SIGKILL)
        points = torch.rand(64, 2, generator=generator)
        optimizer.zero_grad()  # begins a step: who takes part?
        loss = (replica(points).squeeze() - points.prod(dim=1)).square().mean()
        loss.backward()
        optimizer.step()  # only if no replica has failed meanwhile
        done = f"step {manager.current_step()} of {steps}, {manager.num_participants()} replicas"
        print(f"replica {number}: {done}, loss {loss.item():.4f}", flush=True)
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    print(f"replica {number}: weights {hashlib.sha256(weights).hexdigest()[:16]}", flush=True)
    manager.shutdown(wait=False)
    dist.destroy_process_group()


def start(steps: int, kill: str) -> int:
    """Starts the lighthouse and all replicas, and waits for them. Returns how many of them ended well."""
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=REPLICAS - 1, heartbeat_timeout_ms=1000)
    environment = os.environ | {"TORCHFT_LIGHTHOUSE": lighthouse.address()}
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, __file__, f"--steps={steps}", f"--kill={kill}", f"--port={store.port}"]
    replicas = [
        subprocess.Popen([*command, f"--replica={number}"], env=environment) for number in range(REPLICAS)
    ]
    try:
        codes = [replica.wait() for replica in replicas]
    finally:
        for replica in replicas:
            replica.kill()
            replica.wait()
        lighthouse.shutdown()
    print(f"{codes.count(0)} of {REPLICAS} replicas have trained to the end", flush=True)
    return codes.count(0)


def main() -> None:
    parser = argparse.ArgumentParser(description="trains a small network on replicas, of which one is killed")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kill", default="1:5", metavar="REPLICA:STEP", help="`-1:0` kills none")
    parser.add_argument("--replica", type=int, help="be this replica only, with the store at --port")
    parser.add_argument("--port", type=int)
    options = parser.parse_args()
    number, step = map(int, options.kill.split(":"))
    if options.replica is not None:
        train(options.replica, options.steps, (number, step), options.port)
    elif start(options.steps, options.kill) < REPLICAS - 1:
        sys.exit(1)


if __name__ == "__main__":
    main()
