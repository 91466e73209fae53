"""tenfold under PyTorch: the backend `tenfold` of `torch.distributed`.

Nothing needs to be imported if the package is installed: PyTorch finds the backend by its entry point.

    import torch.distributed as dist
    dist.init_process_group("tenfold")

Importing this module registers it too. Besides: `empty` makes tensors that peers on this host read in place,
`shared_buckets_hook` does that for the gradients of `DistributedDataParallel`.
"""

import torch.distributed as dist

from tenfold.torch import exceptions as _exceptions  # its import is what matters: errors become PyTorch's
from tenfold.torch.backend import Backend, ProcessGroup, create
from tenfold.torch.memory import empty, shared_buckets_hook
from tenfold.torch.work import Work

__all__ = ["Backend", "ProcessGroup", "Work", "empty", "register", "shared_buckets_hook"]


def register() -> None:
    """Makes the backend known to `torch.distributed`; more than once does no harm."""
    if "TENFOLD" not in dist.Backend._plugins:
        dist.Backend.register_backend("tenfold", create, extended_api=True, devices=["cpu"])


register()
