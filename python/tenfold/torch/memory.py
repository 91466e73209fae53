"""Tensors that peers on this host read in place.

Memory that PyTorch has shared (`tensor.share_memory_()`) is a file that other processes can map. When such a
tensor is first used in a collective, its file is registered with the group: peers map it once, and read it in
place from then on. A registered storage is kept alive, so that its addresses cannot be reused. It is released
if there are no other references when the next one is registered, or when the group ends.
"""

import math
import os
import warnings
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from tenfold import _tenfold, exceptions

if TYPE_CHECKING:
    from tenfold.torch.backend import Backend

# Tensors with fewer elements are not checked for shared memory.
WORTH_SHARING = 16 * 1024


class SharedStorages:
    """The storages that a group has registered, by their addresses."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[torch.UntypedStorage, _tenfold.Registration | None]] = {}

    def note(self, group: _tenfold.Group, tensor: torch.Tensor) -> None:
        """Registers the memory of a tensor, if PyTorch has shared it. Called before every large
        operation.
        """
        if not tensor.is_shared():
            return
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._known:
            return
        self._let_go_of_what_nobody_has()
        self._known[storage.data_ptr()] = (storage, _register(group, storage))

    def _let_go_of_what_nobody_has(self) -> None:
        # A storage to which only `_known` refers has one reference.
        unused = [address for address, (storage, _) in self._known.items() if uses(storage) == 1]
        for address in unused:
            del self._known[address]

    def clear(self) -> None:
        self._known.clear()


def uses(storage: torch.UntypedStorage) -> int:
    """Returns the number of references: tensors, and the object that counts."""
    return torch._C._storage_Use_Count(storage._cdata)


def _register(group: _tenfold.Group, storage: torch.UntypedStorage) -> _tenfold.Registration | None:
    """Registers a storage, or returns None if it cannot: then the tensor is staged, now and later."""
    if torch.multiprocessing.get_sharing_strategy() != "file_descriptor":
        return None  # the memory has a name instead of a descriptor
    try:
        address = storage.data_ptr()
        file, length = storage._share_fd_cpu_()
        if storage.data_ptr() != address:
            return None  # it was shared by name, and has just been moved
        return group.register(address, length, file, storage)
    except (exceptions.DistError, OSError, ValueError) as error:
        warnings.warn(f"tenfold stages a shared tensor instead of reading it in place: {error}", stacklevel=2)
        return None


def empty(
    *size: int, dtype: torch.dtype | None = None, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Returns a tensor of zeros that peers on this host read in place. Collectives need not copy it first.

    `group` is a process group of the backend `tenfold`, by default the default group. For everything else,
    including other groups, the tensor is an ordinary tensor; only `group` reads it in place. Its memory is an
    unnamed file, so a small `/dev/shm` does not matter, and a process that is killed leaves nothing behind.
    """
    shape = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
    dtype = dtype or torch.get_default_dtype()
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    shared = backend_of(group).group.shared_memory(count * dtype.itemsize)
    return torch.frombuffer(shared, dtype=dtype).view(shape)


def backend_of(group: dist.ProcessGroup | None) -> "Backend":
    """Returns the tenfold backend of a process group."""
    group = group or dist.distributed_c10d._get_default_group()
    backend = group._get_backend(torch.device("cpu"))
    backend = getattr(backend, "wrapped_pg", backend)  # PyTorch's wrapper at level DETAIL
    if not isinstance(getattr(backend, "shared_storages", None), SharedStorages):
        raise ValueError(f"this needs a process group of the backend tenfold; this one is {group.name()}")
    return backend


def shared_buckets_hook(
    state: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """A hook for `DistributedDataParallel.register_comm_hook` that averages gradients in place.

    When it first sees a bucket, it moves the bucket's memory to shared memory, in place: views of it, such as
    gradients with `gradient_as_bucket_view`, move along. `state` is the process group, or None for the
    default group.

        model = DistributedDataParallel(module)
        model.register_comm_hook(None, tenfold.torch.shared_buckets_hook)
    """
    gradients = bucket.buffer()
    storage = gradients.untyped_storage()
    if not storage.is_shared() and _fits(storage.nbytes()):
        storage.share_memory_()
    group = state or dist.distributed_c10d._get_default_group()
    work = dist.all_reduce(gradients, op=dist.ReduceOp.AVG, group=group, async_op=True)
    return work.get_future().then(lambda reduced: reduced.value()[0])


def _fits(size: int) -> bool:
    """Whether /dev/shm has room. Containers often have little, and writing beyond it kills the process."""
    folder = os.statvfs("/dev/shm")  # noqa: S108, nothing is made there under a name
    if folder.f_bavail * folder.f_frsize > 2 * size:
        return True
    warnings.warn(
        f"not enough shared memory for a bucket of {size} bytes, so its gradients are staged; "
        "give the container a larger /dev/shm to read them in place",
        stacklevel=3,
    )
    return False
