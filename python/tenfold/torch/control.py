"""tenfold's control plane and PyTorch's: each is offered what the other has.

PyTorch's `torch_profile` can be asked of tenfold's worker servers, and tenfold's recorder, health and metrics
of PyTorch's, under names that begin with `tenfold_`: PyTorch's own recorder knows when a collective was
called, but not when it ended. `start_debug_server` is PyTorch's web front end over tenfold's workers.
"""

import importlib.util
from typing import Any

from torch._C import _distributed_c10d

from tenfold import _tenfold, control

__all__ = ["start_debug_server"]

# What PyTorch's servers are offered. Their own of these names know nothing of tenfold.
_OFFERED = ("c10d_health_check", "fr_dump_file", "fr_trace_json", "metrics", "wait_counter_values")


def start_debug_server(*arguments: Any, **options: Any) -> None:
    """`torch.distributed.debug.start_debug_server`, with a tenfold worker server in every rank.

    Its pages then show tenfold's flight recorder, health and waits. Takes PyTorch's arguments; what it
    started ends with `torch.distributed.debug.stop_debug_server`. As PyTorch's, the workers' servers listen
    on all addresses, without a password: for networks whose users trust each other.
    """
    from torch.distributed import debug

    theirs = debug._WorkerServer
    debug._WorkerServer = control._WorkerServer
    try:
        debug.start_debug_server(*arguments, **options)
    finally:
        debug._WorkerServer = theirs


def register() -> None:
    """Offers each the other's handlers; more than once does no harm."""
    if not hasattr(_distributed_c10d, "_get_handler_names"):
        return  # a PyTorch from before the registry could be asked
    for name in _OFFERED:
        if f"tenfold_{name}" not in _distributed_c10d._get_handler_names():
            handler = control._get_handler(name)
            # PyTorch lets go of it when the interpreter is gone: that kills the process if it is the last to.
            _tenfold.control_keep(handler)
            _distributed_c10d._register_handler(f"tenfold_{name}", handler)
    has_profiler = importlib.util.find_spec("torch.distributed.debug") is not None
    if has_profiler and "torch_profile" not in control._get_handler_names():
        control._register_handler("torch_profile", _torch_profile)


class _Request(_distributed_c10d._Request):
    """A request to tenfold as PyTorch's handlers want it. Those in Python see this very object."""

    def __init__(self, request: control._Request) -> None:
        super().__init__()
        self._request = request

    def body(self) -> str:
        return self._request.body()

    def get_param(self, name: str) -> str:
        return self._request.get_param(name)


class _Response(_distributed_c10d._Response):
    """The same of a response."""

    def __init__(self, response: control._Response) -> None:
        super().__init__()
        self._response = response

    def set_content(self, content: str | bytes, content_type: str) -> None:
        self._response.set_content(content, content_type)

    def set_status(self, status: int) -> None:
        self._response.set_status(status)


def _torch_profile(request: control._Request, response: control._Response) -> None:
    """PyTorch's profiler for some seconds (`duration`), as a trace of Chrome's."""
    # Registers it with PyTorch; not before it is wanted, since it brings the profiler.
    import torch.distributed.debug  # noqa: F401

    _distributed_c10d._get_handler("torch_profile")(_Request(request), _Response(response))
