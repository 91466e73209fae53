"""A rank of a job in which ranks die all the time: `churn.py STEPS EVERY FOLDER`.

Runs under `tenfold run --on-failure=recover`. At every EVERY-th step another rank kills itself. Each step
compares its sum with what it must be.
"""

import json
import os
import random
import signal
import sys
from pathlib import Path

from tenfold import Group
from tenfold.recovery import Members, Recovered, train

LENGTH = 4096


# It never dies: what deaths cost the survivors shows in its memory.
SURVIVOR = 2


def victim(number: int, size: int) -> int:
    return random.Random(number).choice([rank for rank in range(size) if rank != SURVIVOR])


def resident() -> int:
    """The memory of this process, in KiB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


def main() -> None:
    steps, every, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    members = Members.from_environment(timeout=60)
    weights = memoryview(bytearray(8 * LENGTH)).cast("d")
    gradients = memoryview(bytearray(8 * LENGTH)).cast("d")
    memory: list[int] = []
    recoveries: list[float] = []

    def step(group: Group, number: int) -> None:
        marker = folder / f"dead-{number}"
        if number % every == every - 1 and group.rank == victim(number, group.size) and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        for at in range(0, LENGTH, 64):
            gradients[at] = (group.rank + 1) * (number % 13)
        group.all_reduce(gradients)
        expected = sum(range(1, group.size + 1)) * (number % 13)
        wrong = [at for at in range(0, LENGTH, 64) if gradients[at] != expected]
        assert not wrong, f"step {number}: {gradients[wrong[0]]} at {wrong[0]}, expected {expected}"
        for at in range(0, LENGTH, 64):
            weights[at] += gradients[at]
        if number % 50 == 0:
            memory.append(resident())

    def note(recovered: Recovered, number: int) -> None:
        assert len(recovered.left) == len(recovered.joined) == 1, recovered
        recoveries.append(recovered.seconds)

    train(members, [weights], step, steps=steps, on_recovery=note)
    result = {
        "weight": weights[0],
        "memory": memory,
        "recoveries": recoveries,
        "generation": members.generation,
    }
    (folder / f"rank-{members.group.rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
