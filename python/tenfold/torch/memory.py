"""Tensors that peers on this host read where they lie."""

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from tenfold.torch.backend import Backend


def note(backend: "Backend", tensor: torch.Tensor) -> None:
    """Called with every tensor that is reduced."""


def empty(
    *size: int, dtype: torch.dtype | None = None, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """A tensor of zeroes in memory that peers on this host read in place, so that collectives on it need not stage.

    `group` is a process group of the backend `tenfold`, by default the default one; the tensor can be used with its
    sub-groups and with any other backend too, but only `group` reads it in place.
    """
    shape = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
    dtype = dtype or torch.get_default_dtype()
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    shared = backend_of(group).group.shared_memory(count * dtype.itemsize)
    return torch.frombuffer(shared, dtype=dtype).view(shape)


def backend_of(group: dist.ProcessGroup | None) -> "Backend":
    """The tenfold backend of a process group."""
    group = group or dist.distributed_c10d._get_default_group()
    backend = group._get_backend(torch.device("cpu"))
    if not hasattr(backend, "group"):
        raise ValueError(f"this needs a process group of the backend tenfold; this one is {group.name()}")
    return backend


def shared_buckets_hook(state: dist.ProcessGroup | None, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """A hook for `DistributedDataParallel.register_comm_hook`: gradients are averaged where they lie.

    On the first step each bucket's memory is moved into shared memory, and stays there. `state` is the process group, or
    None for the default one.
    """
    raise NotImplementedError
