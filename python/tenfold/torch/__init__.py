"""tenfold under PyTorch: the backend `tenfold` of `torch.distributed`.

Nothing needs to be imported if the package is installed: PyTorch finds the backend by its entry point.

    import torch.distributed as dist
    dist.init_process_group("tenfold")

Importing this module registers the backend too, and with it `init_method="tenfold://host:port"`. The module
also has:

- `DistributedDataParallel`: PyTorch's class with tenfold's reducer, which averages gradients in shared
memory;
- `empty`: makes tensors that peers on this host read in place; `shared_buckets_hook` does this for the
  gradients of `DistributedDataParallel`;
- `start_debug_server`: PyTorch's web page about all ranks, with tenfold's worker servers;
- `TCPStore`, `FileStore`, `HashStore` and `PrefixStore`: tenfold's, for use wherever PyTorch expects a store.
"""

import torch.distributed as dist

import tenfold.torch.exceptions  # noqa: F401, from here on errors are PyTorch's too
from tenfold.torch import control, rendezvous
from tenfold.torch.backend import Backend
from tenfold.torch.control import start_debug_server
from tenfold.torch.ddp import DistributedDataParallel
from tenfold.torch.memory import empty, shared_buckets_hook
from tenfold.torch.process_group import ProcessGroup, create
from tenfold.torch.store import FileStore, HashStore, PrefixStore, Store, TCPStore
from tenfold.torch.work import Work

__all__ = [
    "Backend",
    "DistributedDataParallel",
    "FileStore",
    "HashStore",
    "PrefixStore",
    "ProcessGroup",
    "Store",
    "TCPStore",
    "Work",
    "empty",
    "register",
    "shared_buckets_hook",
    "start_debug_server",
]


def register() -> None:
    """Registers the backend with `torch.distributed`. It may be called more than once."""
    if "TENFOLD" not in dist.Backend._plugins:
        dist.Backend.register_backend("tenfold", create, extended_api=True, devices=["cpu"])
    rendezvous.register()
    control.register()


register()
