"""Our stores and PyTorch's of the same kinds, for tests that make the same calls on both."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as torch_dist
from tenfold import _tenfold

PATIENCE = timedelta(seconds=30)


SHORT = timedelta(milliseconds=20)


KINDS = ["tcp", "hash", "file", "prefix"]


LIBRARIES = {"tenfold": _tenfold, "torch": torch_dist}


def make(library: Any, kind: str, folder: Path) -> Any:
    match kind:
        case "tcp":
            store = library.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        case "hash":
            store = library.HashStore()
        case "file":
            store = library.FileStore(str(folder / library.__name__), -1)
        case "prefix":
            store = library.PrefixStore("prefix", library.HashStore())
    store.set_timeout(PATIENCE)
    return store


class Pair:
    """Our store and PyTorch's of the same kind."""

    def __init__(self, ours: Any, theirs: Any) -> None:
        self.ours, self.theirs = ours, theirs

    def agree(self, *calls: Callable[[Any], Any]) -> None:
        """Makes each call on both: both return the same, or ours raises what theirs raises, or a subclass."""
        for number, call in enumerate(calls):
            expected, found = outcome(call, self.theirs), outcome(call, self.ours)
            if isinstance(expected, Exception):
                assert isinstance(found, type(expected)), f"call {number}: {found!r}, not {expected!r}"
            else:
                assert (type(found), found) == (type(expected), expected), f"call {number}"


def outcome(call: Callable[[Any], Any], store: Any) -> Any:
    try:
        return call(store)
    except Exception as error:
        return error
