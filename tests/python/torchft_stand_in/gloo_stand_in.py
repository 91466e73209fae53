"""Tenfold under the names of Gloo, for torchft's tests; also their pytest plugin.

torchft makes `dist.ProcessGroupGloo`, or PyTorch's backend `gloo`. Tests of native groups put the former into
a `dist.ProcessGroup`, whose rank and size only tenfold's subclass can change.
"""

from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest
import tenfold.torch
import torch
import torch.distributed as dist

_DEFAULT = timedelta(minutes=30)

# Test modules that make native groups.
_NATIVE = {"torchft.manager_test", "torchft.manager_integ_test"}


class Gloo(tenfold.torch.Backend):
    """`dist.ProcessGroupGloo`, with its constructor."""

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta = _DEFAULT,
        enable_reconfigure: bool = False,
    ) -> None:
        super().__init__(store, rank, size, timeout, "", (), enable_reconfigure)

    def getBackendName(self) -> str:  # noqa: N802, the name that PyTorch looks for
        return "gloo"


class Group(tenfold.torch.ProcessGroup):
    """`dist.ProcessGroup`, which is given its backend later."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        dist.ProcessGroup.__init__(self, store, rank, size)

    def _register_backend(self, device: torch.device, kind: Any, backend: Gloo) -> None:
        self._hold(backend)
        dist.ProcessGroup._register_backend(self, device, kind, backend)

    def getBackendName(self) -> str:  # noqa: N802, the name that PyTorch looks for
        return "gloo"


class Distributed(ModuleType):
    """`torch.distributed` as a test module of torchft sees it."""

    ProcessGroup = Group

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)


def create(options: Any, _: Any = None) -> tenfold.torch.ProcessGroup:
    place = (options.group_rank, options.group_size, options.timeout, options.enable_reconfigure)
    return tenfold.torch.ProcessGroup(options.store, Gloo(options.store, *place))


def install() -> None:
    dist.ProcessGroupGloo = Gloo
    dist.Backend._ensure_backend_registered("gloo")
    plugin = dist.Backend._plugins["TENFOLD"]
    dist.Backend._plugins["GLOO"] = plugin._replace(creator_fn=create)


def pytest_sessionfinish() -> None:
    assert dist.ProcessGroupGloo is Gloo, "these results are Gloo's: sitecustomize.py was not imported"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for module in {item.module for item in items if item.module.__name__ in _NATIVE}:
        module.dist = Distributed("torch.distributed")
