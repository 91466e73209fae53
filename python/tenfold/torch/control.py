"""Connects tenfold's control plane and PyTorch's: each offers the handlers of the other.

tenfold's worker servers offer PyTorch's `torch_profile`. PyTorch's servers offer tenfold's recorder, health
and metrics, by names that begin with `tenfold_`: PyTorch's own recorder knows when a collective was called,
but not when it ended. `start_debug_server` starts PyTorch's web front end with tenfold's worker servers.
"""

import importlib.util
from typing import Any

from torch._C import _distributed_c10d

from tenfold import _tenfold
from tenfold.c10d import control

__all__ = ["start_debug_server"]

# The handlers offered to PyTorch's servers, whose own handlers of these names do not see tenfold.
_OFFERED = ("c10d_health_check", "fr_dump_file", "fr_trace_json", "metrics", "wait_counter_values")


def start_debug_server(*arguments: Any, **options: Any) -> None:
    """`torch.distributed.debug.start_debug_server`, with a tenfold worker server in every rank.

    Its pages then show tenfold's flight recorder, health and waits. It takes PyTorch's arguments. Stop it
    with `torch.distributed.debug.stop_debug_server`. As with PyTorch's, the worker servers listen on all
    addresses, without a password: use it only on networks whose users trust each other.
    """
    from torch.distributed import debug

    theirs = debug._WorkerServer
    debug._WorkerServer = control._WorkerServer
    try:
        debug.start_debug_server(*arguments, **options)
    finally:
        debug._WorkerServer = theirs


def register() -> None:
    """Offers each server the other's handlers. It may be called more than once."""
    if not hasattr(_distributed_c10d, "_get_handler_names"):
        return  # an older PyTorch, whose registry cannot be queried
    for name in _OFFERED:
        if f"tenfold_{name}" not in _distributed_c10d._get_handler_names():
            handler = control._get_handler(name)
            # PyTorch drops its reference after the interpreter has shut down; dropping the last one crashes.
            _tenfold.control_keep(handler)
            _distributed_c10d._register_handler(f"tenfold_{name}", handler)
    has_profiler = importlib.util.find_spec("torch.distributed.debug") is not None
    if has_profiler and "torch_profile" not in control._get_handler_names():
        control._register_handler("torch_profile", _torch_profile)


class _Request(_distributed_c10d._Request):
    """Adapts a request to tenfold for PyTorch's handlers. Handlers in Python get this object itself."""

    def __init__(self, request: control._Request) -> None:
        super().__init__()
        self._request = request

    def body(self) -> str:
        return self._request.body()

    def get_param(self, name: str) -> str:
        return self._request.get_param(name)


class _Response(_distributed_c10d._Response):
    """Adapts a response in the same way."""

    def __init__(self, response: control._Response) -> None:
        super().__init__()
        self._response = response

    def set_content(self, content: str | bytes, content_type: str) -> None:
        self._response.set_content(content, content_type)

    def set_status(self, status: int) -> None:
        self._response.set_status(status)


def _torch_profile(request: control._Request, response: control._Response) -> None:
    """Runs PyTorch's profiler for some seconds (`duration`). Answers with a Chrome trace."""
    # Registers it with PyTorch, only on demand, because this imports the profiler.
    import torch.distributed.debug  # noqa: F401

    _distributed_c10d._get_handler("torch_profile")(_Request(request), _Response(response))
