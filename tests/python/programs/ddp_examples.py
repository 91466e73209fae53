"""The examples of PyTorch's documentation of communication hooks, run as they stand in the installed PyTorch.

They are read from the docstrings. What they take for granted is given to them by name: `ddp_model`,
`process_group`, `state`, … Each registers a hook with a model that is then trained past the hook's beginning.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from ddp_features import prefixed, sgd
from ddp_models import loss_of
from torch import Tensor, nn
from torch.distributed.algorithms import ddp_comm_hooks
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.nn.parallel import DistributedDataParallel
from training_case import CASES, Results, Scene, batches, case, contents, perceptron, seeded

STEPS = 13  # the examples of PowerSGD and post-local SGD begin after 10


def examples_of(documented: Any) -> list[str]:
    """The programs in a docstring."""
    programs: list[list[str]] = []
    for line in (documented.__doc__ or "").splitlines():
        code = line.strip()
        if code.startswith("Example"):
            programs.append([])
        elif not programs:
            continue
        elif code.startswith(">>>"):
            programs[-1].append(code.removeprefix(">>>").removeprefix(" "))
        elif code and programs[-1] and is_open("\n".join(programs[-1])):
            programs[-1].append(code)
    return ["\n".join(lines) for lines in programs if lines]


def is_open(program: str) -> bool:
    return program.count("(") > program.count(")")


def names_for(model: DistributedDataParallel) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for module in [
        debugging_hooks,
        default_hooks,
        post_localSGD_hook,
        powerSGD_hook,
        quantization_hooks,
        ddp_comm_hooks,
    ]:
        names |= vars(module)
    subgroup, _ = dist.new_subgroups(group_size=1)
    return names | {
        "torch": torch,
        "dist": dist,
        "ddp": model,
        "ddp_model": model,
        "model": model,
        "process_group": dist.group.WORLD,
        "subgroup": subgroup,
        "state": None,
        "powerSGD_hook": powerSGD_hook.powerSGD_hook,
        "post_localSGD_hook": post_localSGD_hook.post_localSGD_hook,
        "encode": lambda tensor: tensor / (2 * dist.get_world_size()),
        "decoded": lambda tensor: tensor * 2,
    }


def trained(model: DistributedDataParallel, scene: Scene) -> Results:
    optimizer = sgd(model)
    for inputs, labels in batches(scene, count=STEPS):
        optimizer.zero_grad()
        loss_of(model, inputs, labels).backward()
        optimizer.step()
    return contents(model)


# Where the text itself cannot run, on any backend: an all-reduce that has ended has no future, and the inner
# function hides the one that it calls.
MENDED = {
    "all_reduce(encoded_tensor)": "all_reduce(encoded_tensor, async_op=True)",
    "decoded_tensor = decode(": "decoded_tensor = decoded(",
}


def add(documented: Callable[..., Any], number: int, program: str) -> None:
    def example(scene: Scene) -> Results:
        model = scene.ddp(perceptron())
        text = program
        for before, after in MENDED.items():
            text = text.replace(before, after)
        exec(compile(text, documented.__name__, "exec"), names_for(model))  # noqa: S102
        return trained(model, scene)

    CASES[f"example-{documented.__name__}-{number}"] = example


DOCUMENTED = [
    DistributedDataParallel.register_comm_hook,
    DistributedDataParallel._register_builtin_comm_hook,
    ddp_comm_hooks.register_ddp_comm_hook,
    debugging_hooks.noop_hook,
    default_hooks.allreduce_hook,
    default_hooks.fp16_compress_hook,
    default_hooks.bf16_compress_hook,
    default_hooks.fp16_compress_wrapper,
    default_hooks.bf16_compress_wrapper,
    post_localSGD_hook.post_localSGD_hook,
    powerSGD_hook.powerSGD_hook,
    powerSGD_hook.batched_powerSGD_hook,
    quantization_hooks.quantization_pertensor_hook,
    quantization_hooks.quantization_perchannel_hook,
]
for each in DOCUMENTED:
    found = examples_of(each)
    assert found, f"{each.__name__} has no example: has its docstring another form now?"
    for number, program in enumerate(found):
        add(each, number, program)


class Simple(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        seeded()
        self.first, self.second = nn.Linear(16, 24), nn.Linear(24, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(self.first(inputs).relu())


@case
def checkpoint_of_a_hook_and_its_state(scene: Scene) -> Results:
    """As the page on hooks has it for PowerSGD: model, hook and state are saved, and go on in a new model."""
    file = scene.folder / "checkpoint.pt"
    model = scene.ddp(Simple())
    state = powerSGD_hook.PowerSGDState(process_group=None, start_powerSGD_iter=3)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    results = prefixed("before", trained(model, scene))
    checkpoint = {
        "state_dict": model.state_dict(),
        "comm_hook": powerSGD_hook.powerSGD_hook,
        "comm_hook_state": state,
    }
    if scene.rank == 0:
        torch.save(checkpoint, file)
    dist.barrier()
    checkpoint = torch.load(file, weights_only=False)
    again = scene.ddp(Simple())
    again.load_state_dict(checkpoint["state_dict"])
    again.register_comm_hook(checkpoint["comm_hook_state"], checkpoint["comm_hook"])
    return results | prefixed("after", trained(again, scene))
