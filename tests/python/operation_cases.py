"""How cases of operations are written down; see `operations.py`."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from ranks import Rank


@dataclasses.dataclass
class Case:
    name: str
    body: Callable[[Rank], Any]
    gloo: str  # "agrees", or what it does instead
    by_hand: Callable[[int, int], Any] | None  # of rank and world


CASES: dict[str, Case] = {}
WRONG_PLACE = "writes the elements one after the other, whatever the strides"
HARMFUL = "writes outside the tensor"  # so Gloo is not asked


def case(gloo: str = "agrees", by_hand: Callable[[int, int], Any] | None = None) -> Callable:
    def register(body: Callable[[Rank], Any]) -> Callable[[Rank], Any]:
        assert gloo == "agrees" or by_hand, "what Gloo does not do needs a value by hand"
        name = body.__name__
        assert name not in CASES, name
        CASES[name] = Case(name, body, gloo, by_hand)
        return body

    return register


def numbers(me: Rank | int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small whole numbers, different on each rank and at each place: their sums are exact in every order."""
    rank = me if isinstance(me, int) else me.rank
    count = math.prod(shape)
    return (torch.arange(count) % 13 + 1 + 3 * rank).to(dtype).reshape(shape)


def rough(me: Rank, *shape: int) -> torch.Tensor:
    """Numbers whose sum shows how it was rounded; of three it would show the order, so those are whole."""
    if me.world > 2:
        return numbers(me, *shape)
    return torch.randn(shape, generator=torch.Generator().manual_seed(me.rank))


def everybody() -> dist.ProcessGroup:
    return dist.group.WORLD
