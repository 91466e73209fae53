"""tenfold's stores, for use wherever PyTorch expects one.

    store = tenfold.torch.TCPStore("10.0.0.1", 29500, world_size=2, is_master=rank == 0)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)

PyTorch's C++ calls some methods of a store that is written in Python, partly by its own names: `deleteKey`,
`getNumKeys`. It does not call the methods for queues, `list_keys` and `barrier`. So inside PyTorch's own
`PrefixStore` there are no queues, and a barrier is made of ordinary keys. Python callers get the store's own
methods. The timeout is the one that C++ keeps, because a `PrefixStore` around this store sets it only there.

C++ does not keep the Python object alive, but cannot call its methods without it. A default process group
keeps it alive here. A program that uses a store without a default group must hold a reference to it.
"""

import os
import sys
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

from tenfold import _tenfold
from tenfold.torch import exceptions as _exceptions  # noqa: F401, errors become PyTorch's by its import

__all__ = ["FileStore", "HashStore", "PrefixStore", "Store", "TCPStore"]

_Text = str | bytes | bytearray


class Store(dist.Store):
    """Wraps a store of tenfold, or any object with c10d's methods, as a store of PyTorch.

    >>> import torch.distributed as dist
    >>> from tenfold._tenfold import HashStore
    >>> inner = HashStore()
    >>> store = Store(inner)
    >>> dist.PrefixStore("group", store).set("color", "blue")
    >>> inner.get("group/color")
    b'blue'
    """

    def __init__(self, store: Any) -> None:
        super().__init__()
        if not isinstance(store, _tenfold.Store):
            raise TypeError(f"expected a store of tenfold, not {type(store).__name__}")
        self._store = store
        super().set_timeout(store.timeout)

    def __del__(self) -> None:
        # C++ may still use it, for example in a PrefixStore: keep it as long as a group that may need it.
        if not sys.is_finalizing() and dist.is_initialized():
            weakref.finalize(dist.group.WORLD, _let_go, self).atexit = False

    @property
    def store(self) -> _tenfold.Store:
        """Returns the wrapped store of tenfold."""
        return self._store

    def _in_time(self) -> _tenfold.Store:
        """Returns the wrapped store, with the timeout that PyTorch last set."""
        if self._store.timeout != self.timeout:
            self._store.set_timeout(self.timeout)
        return self._store

    def set(self, key: _Text, value: _Text) -> None:
        self._store.set(key, value)

    def get(self, key: _Text) -> bytes:
        return self._in_time().get(key)

    def add(self, key: _Text, value: int) -> int:
        return self._store.add(key, value)

    def check(self, keys: Sequence[_Text]) -> bool:
        return self._store.check(keys)

    def compare_set(self, key: _Text, expected_value: _Text, desired_value: _Text) -> bytes:
        return self._store.compare_set(key, expected_value, desired_value)

    def delete_key(self, key: _Text) -> bool:
        return self._store.delete_key(key)

    def num_keys(self) -> int:
        return self._store.num_keys()

    def list_keys(self) -> list[str]:
        return self._store.list_keys()

    def wait(self, keys: Sequence[_Text], timeout: timedelta | None = None) -> None:
        self._in_time().wait(keys, timeout)

    def append(self, key: _Text, value: _Text) -> None:
        self._store.append(key, value)

    def multi_get(self, keys: Sequence[_Text]) -> list[bytes]:
        return self._in_time().multi_get(keys)

    def multi_set(self, keys: Sequence[_Text], values: Sequence[_Text]) -> None:
        self._store.multi_set(keys, values)

    def queue_push(self, key: _Text, value: _Text) -> None:
        self._store.queue_push(key, value)

    def queue_pop(self, key: _Text, block: bool = True) -> bytes:
        return self._in_time().queue_pop(key, block)

    def queue_len(self, key: _Text) -> int:
        return self._store.queue_len(key)

    def barrier(self, key: _Text, world_size: int, timeout: timedelta | None = None) -> None:
        self._in_time().barrier(key, world_size, timeout)

    def clone(self) -> "Store":
        clone = self._in_time().clone()
        return self if clone is self._store else Store(clone)

    def has_extended_api(self) -> bool:
        return self._store.has_extended_api()

    # C++'s names for these methods.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    def __reduce__(self) -> NoReturn:
        self._store.__reduce__()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} around {self._store!r}>"


def _let_go(store: Store) -> None:
    """Runs when the object that kept the store alive is deleted."""


class TCPStore(Store):
    """A store on a server that all ranks reach over TCP. One of them hosts it. See `tenfold.TCPStore`.

    >>> host = TCPStore("127.0.0.1", 0, is_master=True)
    >>> other = dist.TCPStore("127.0.0.1", host.port)
    >>> other.set("who", "PyTorch")
    >>> host.get("who")
    b'PyTorch'
    """

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: timedelta = timedelta(seconds=300),
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool = True,
    ) -> None:
        self._tcp = _tenfold.TCPStore(
            host_name,
            port,
            world_size,
            is_master,
            timeout,
            wait_for_workers,
            multi_tenant,
            master_listen_fd,
            use_libuv,
        )
        super().__init__(self._tcp)

    @property
    def host(self) -> str:
        """Returns the server's host, as it was given."""
        return self._tcp.host

    @property
    def port(self) -> int:
        """Returns the server's port."""
        return self._tcp.port

    @property
    def libuvBackend(self) -> bool:  # noqa: N802, c10d's name
        """Returns the value of `use_libuv`."""
        return self._tcp.libuvBackend


class HashStore(Store):
    """A store for the threads of one process."""

    def __init__(self) -> None:
        super().__init__(_tenfold.HashStore())


class FileStore(Store):
    """A store in a file that all ranks can access. See `tenfold.FileStore`."""

    def __init__(self, file_name: str | os.PathLike[str], world_size: int = -1) -> None:
        self._file = _tenfold.FileStore(file_name, world_size)
        super().__init__(self._file)

    @property
    def path(self) -> str:
        """Returns the path, as it was given."""
        return self._file.path


class PrefixStore(Store):
    """The part of a store, tenfold's or PyTorch's, whose keys begin with `prefix/`.

    >>> store = HashStore()
    >>> PrefixStore("group", store).queue_push("jobs", "first")
    >>> store.queue_pop("group/jobs")
    b'first'
    """

    def __init__(self, prefix: str, store: Any) -> None:
        self._underlying = store
        super().__init__(_tenfold.PrefixStore(prefix, store))

    @property
    def underlying_store(self) -> Any:
        """Returns the store that this is a part of."""
        return self._underlying

    @property
    def _underlying_non_prefix_store(self) -> Any:
        return getattr(self._underlying, "_underlying_non_prefix_store", self._underlying)
