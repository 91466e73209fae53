"""Training with PyTorch that goes on when ranks die: `Training`.

    from tenfold.torch.recovery import Training

    training = Training(module, optimizer, scheduler, wrap=DistributedDataParallel)

    def step(number):
        loss = loss_function(training.model(inputs(number)), targets(number))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()

    training.run(step, steps=1000, commit_every=10)

Start it with `tenfold run --on-failure=recover`. If a rank dies, the others keep their processes and memory.
They return to the last state that all of them have committed, a new process takes the place of the dead rank
and gets the state from the others, and the step is repeated.
"""

import gc
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tenfold.recovery import Members, Plan, Recovered, run
from tenfold.torch.process_group import ProcessGroup

__all__ = ["Training"]


class Training:
    """What a training consists of, on ranks that may die and be replaced.

    `parts` are everything else that a step changes: optimizers, schedulers, data loaders, any object with
    `state_dict` and `load_state_dict`. Their tensors must be on the CPU. The states of the random generators
    of PyTorch, Python and NumPy are kept, too; a rank that joins begins with those of another rank.

    `wrap` makes the model that steps use from the module, such as `DistributedDataParallel`. It is called
    again after each recovery, because PyTorch's class does not work after a failure.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *parts: Any,
        wrap: Callable[[torch.nn.Module], torch.nn.Module] | None = None,
        members: Members | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self._module = module
        self._wrap = wrap
        self._model: torch.nn.Module | None = None
        self._state = _State([module, *parts])
        self._timeout = timeout
        self.members = Members.from_environment(timeout) if members is None else members

    @property
    def model(self) -> torch.nn.Module:
        """The module as `wrap` made it."""
        if self._model is None:
            raise RuntimeError("the model is there while `run` runs")
        return self._model

    def run(
        self,
        step: Callable[[int], None],
        *,
        steps: int,
        commit_every: int = 1,
        on_recovery: Callable[[Recovered, int], None] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Calls `step(number)` for each number below `steps`, and repeats steps after failures.

        The arguments are those of `tenfold.recovery.train`. While it runs, the default process group of
        PyTorch consists of the members; it is made if there is none.
        """
        run(self.members, self._state, step, Plan(steps, commit_every, on_recovery, progress), self._begin)

    def _begin(self) -> None:
        # What is left of the model before: its hooks on the parameters go with it.
        self._model = None
        gc.collect()
        for parameter in self._module.parameters():
            parameter.grad = None
        self._group().adopt(self.members._inner.group())
        self._model = self._module if self._wrap is None else self._wrap(self._module)

    def _group(self) -> ProcessGroup:
        if not dist.is_initialized():
            group = self.members.group
            dist.init_process_group(
                "tenfold",
                store=dist.HashStore(),
                rank=group.rank,
                world_size=group.size,
                timeout=self._timeout,
                enable_reconfigure=True,
            )
        world = dist.group.WORLD
        if not isinstance(world, ProcessGroup):
            raise RuntimeError(
                f"the default process group is of the backend {dist.get_backend()}, not tenfold"
            )
        return world


class _Tensor(NamedTuple):
    """Stands for a tensor in a state that is pickled."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


def _without_tensors(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return _Tensor(state.size(), state.stride(), state.dtype)
    if isinstance(state, dict):
        return {key: _without_tensors(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(_without_tensors(value) for value in state)
    return state


def _with_tensors(state: Any) -> Any:
    """The same with new tensors, which hold anything."""
    if isinstance(state, _Tensor):
        return torch.empty_strided(state.size, state.stride, dtype=state.dtype)
    if isinstance(state, dict):
        return {key: _with_tensors(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(_with_tensors(value) for value in state)
    return state


def _tensors_of(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from _tensors_of(value)
    elif type(state) in (list, tuple):
        for value in state:
            yield from _tensors_of(value)


def _bytes_of(tensor: torch.Tensor) -> Any:
    """Returns an array of the bytes of a tensor, in the order in which they lie in memory."""
    if not tensor.is_cpu or tensor.layout is not torch.strided:
        raise ValueError(f"state must be in dense tensors on the CPU, not {tensor.layout} on {tensor.device}")
    flat = torch.as_strided(tensor.detach(), (tensor.numel(),), (1,), tensor.storage_offset())
    steps = sorted(
        (step, size) for size, step in zip(tensor.size(), tensor.stride(), strict=True) if size > 1
    )
    dense = 1
    for step, size in steps:
        if step != dense and tensor.numel() > 0:
            raise ValueError(
                "state must be in tensors without gaps: a view of a larger one cannot be handed over"
            )
        dense *= size
    return flat.view(torch.uint8).numpy()


class _State:
    """The state of all parts, as `tenfold.recovery` wants it."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = list(parts)
        for part in parts:
            if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
                raise TypeError(f"{type(part).__name__} has no `state_dict` and `load_state_dict`")

    def _states(self) -> list[Any]:
        return [part.state_dict() for part in self._parts]

    def tensors(self) -> list[Any]:
        return [_bytes_of(tensor) for tensor in _tensors_of(self._states())]

    def objects(self) -> Any:
        generators = {"torch": torch.get_rng_state(), "random": random.getstate()}
        if "numpy" in sys.modules:
            generators["numpy"] = sys.modules["numpy"].random.get_state()
        return [_without_tensors(state) for state in self._states()], generators

    def load_objects(self, objects: Any) -> None:
        states, generators = objects
        for part, state in zip(self._parts, states, strict=True):
            # The tensors of a module stay where they are: an optimizer knows them.
            if _without_tensors(part.state_dict()) != state or not isinstance(part, torch.nn.Module):
                part.load_state_dict(_with_tensors(state))
        torch.set_rng_state(generators["torch"])
        random.setstate(generators["random"])
        if "numpy" in generators and "numpy" in sys.modules:
            sys.modules["numpy"].random.set_state(generators["numpy"])
