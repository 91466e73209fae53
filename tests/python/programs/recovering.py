"""A rank that trains on arrays and goes on when others die: `recovering.py HOST PORT RANK CASE FOLDER`.

RANK is a number, or `spare`. The result goes into FOLDER. CASE says which ranks kill themselves, and when.
"""

import json
import os
import random
import signal
import sys
from pathlib import Path

import tenfold
from tenfold.recovery import Members, train

SIZE, STEPS, LENGTH = 4, 40, 1000

# The rank and the step of each death, by case.
DEATHS = {
    "undisturbed": [],
    "one": [(1, 7)],
    "rank 0": [(0, 7)],
    "two together": [(1, 7), (2, 7)],
    "one after the other": [(1, 7), (2, 12), (1, 20)],
    "in the first step": [(3, 0)],
    "in the last step": [(3, STEPS - 1)],
}


class Model:
    """Weights as a buffer of 64-bit numbers, and a random generator."""

    def __init__(self) -> None:
        self.weights = memoryview(bytearray(8 * LENGTH)).cast("d")
        self.random = random.Random(17)
        self.curve: list[float] = []

    def tensors(self) -> list:
        return [self.weights]

    def objects(self) -> object:
        return self.random.getstate(), self.curve

    def load_objects(self, objects) -> None:
        state, self.curve = objects
        self.random.setstate(state)


def main() -> None:
    host, port, seat, case, folder = sys.argv[1:]
    store = tenfold.TCPStore(host, int(port))
    if seat == "spare":
        members = Members.join(store, timeout=60)
    else:
        members = Members.connect(store, int(seat), SIZE, replaced=True, timeout=60)
    model = Model()

    def step(group: tenfold.Group, number: int) -> None:
        noise = model.random.random()
        values = [(group.rank + 1) * noise * (at % 7) - 0.1 * model.weights[at] for at in range(LENGTH)]
        gradients = memoryview(bytearray(8 * LENGTH)).cast("d")
        for at, value in enumerate(values):
            gradients[at] = value
        deaths = [rank for rank, at in DEATHS[case] if at == number]
        # Each death happens once: a rank that took the place of a dead one lives.
        if group.rank in deaths and not Path(folder, f"dead-{group.rank}-{number}").exists():
            Path(folder, f"dead-{group.rank}-{number}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        group.all_reduce(gradients)
        for at in range(LENGTH):
            model.weights[at] += 0.01 * gradients[at]
        model.curve.append(sum(model.weights))

    changes = []
    train(
        members,
        model,
        step,
        steps=STEPS,
        on_recovery=lambda recovered, number: changes.append([recovered.left, recovered.joined, number]),
    )
    result = {
        "curve": model.curve,
        "weights": model.weights.tolist(),
        "changes": changes,
        "generation": members.generation,
        "joined": members.has_joined,
    }
    Path(folder, f"rank-{members.group.rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
