"""`init_method="tenfold://host:port"`: as `tcp://`, over tenfold's store.

Rank 0 hosts the server at that address, unless the agent of torchrun already does. All ranks are clients.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist

from tenfold.torch.store import TCPStore

__all__ = ["register"]

SCHEME = "tenfold"


def register() -> None:
    """Registers `tenfold://` with `torch.distributed`. It may be called more than once.

    >>> register()
    >>> store, rank, world_size = next(dist.rendezvous("tenfold://127.0.0.1:0", 0, 1))
    >>> store.set("color", "blue")
    """
    with suppress(RuntimeError):  # it is registered already
        dist.register_rendezvous_handler(SCHEME, rendezvous)


def rendezvous(url: str, timeout: timedelta | None = None, **_: Any) -> Iterator[tuple[TCPStore, int, int]]:
    """Yields store, rank and world size for a URL such as `tenfold://host:port?rank=0&world_size=2`."""
    address = urlparse(url)
    host, port = address.hostname, address.port  # raises ValueError for an invalid port
    if host is None:
        raise _error("host name missing")
    if port is None:
        raise _error("port number missing")
    query = parse_qs(address.query)
    rank, world_size = _number(query, "rank", "rank"), _number(query, "world_size", "world size")

    served = _agent_serves(host, port)
    store = TCPStore(
        host,
        port,
        world_size if world_size > 0 else None,
        is_master=rank == 0 and not served,
        timeout=dist.constants.default_pg_timeout if timeout is None else timeout,
        multi_tenant=True,
    )
    # PyTorch drops this iterator after the group was made, and not before: see `Store.__del__`.
    yield store, rank, world_size
    raise RuntimeError(f"Unable to perform re-rendezvous using {SCHEME}:// method")


def _number(query: dict[str, list[str]], name: str, words: str) -> int:
    if name not in query:
        raise _error(f"{words} parameter missing")
    return int(query[name][0])


def _agent_serves(host: str, port: int) -> bool:
    """Whether torchrun's agent hosts a store there. It does so only at the address it gives its workers."""
    return (
        os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
        and os.environ.get("MASTER_ADDR") == host
        and os.environ.get("MASTER_PORT") == str(port)
    )


def _error(reason: str) -> ValueError:
    return ValueError(f"Error initializing torch.distributed using {SCHEME}:// rendezvous: {reason}")
