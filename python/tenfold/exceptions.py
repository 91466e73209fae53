"""Errors, in c10d's classes.

`DistError` and its four subclasses have the names and the hierarchy of `torch.distributed`'s. The others are
subclasses of them and of Python's own class for such an error: an invalid argument is a `ValueError`, a
timeout is a `TimeoutError`. Every exception of a group has attributes: see `DistError`.

If PyTorch is loaded, `tenfold.torch` makes these classes subclasses of PyTorch's as well. So `except
torch.distributed.DistBackendError` catches them.
"""

from typing import Any

__all__ = [
    "DistArgumentError",
    "DistBackendError",
    "DistError",
    "DistNetworkError",
    "DistQueueEmptyError",
    "DistStoreArgumentError",
    "DistStoreError",
    "DistStoreTimeoutError",
    "DistTimeoutError",
    "refused",
]


class DistError(RuntimeError):
    """Communication failed.

    Errors of groups have attributes: `operation`, `sequence_number`, `group`, `rank`, `world_size`, `elapsed`
    (seconds), `peer` (the rank at fault, or None), `hint` and `reason`. Errors of stores have
    `operation`, `store`, `elapsed`, `hint` and `reason`. `kind` is the kind of failure, such as "PeerLost".

    >>> try:
    ...     raise DistError("rank 3 died")
    ... except RuntimeError as error:
    ...     print(error)
    rank 3 died
    """

    kind: str | None = None
    operation: str | None = None
    sequence_number: int | None = None
    group: str | None = None
    store: str | None = None
    rank: int | None = None
    world_size: int | None = None
    elapsed: float | None = None
    peer: int | None = None
    hint: str | None = None
    reason: str | None = None


class DistBackendError(DistError):
    """An operation of a group failed."""


class DistNetworkError(DistError):
    """A rank or a server could not be reached."""


class DistStoreError(DistError):
    """A store failed."""


class DistQueueEmptyError(DistStoreError):
    """`queue_pop` found no item."""


class DistStoreArgumentError(DistStoreError, ValueError):
    """An invalid argument of a store: lists of different lengths, a counter that is not a number."""


class DistArgumentError(DistBackendError, ValueError):
    """An invalid argument: mismatched lengths, a rank out of range, a dtype that cannot be reduced."""


class DistTimeoutError(DistBackendError, TimeoutError):
    """An operation timed out, or a rank is unresponsive."""


class DistStoreTimeoutError(DistStoreError, TimeoutError):
    """An operation of a store timed out."""


# The class for each kind of fault: its name in Rust, for stores with the prefix `Store`.
_CLASSES: dict[str, type[BaseException]] = {
    "Argument": DistArgumentError,
    "Connect": DistNetworkError,
    "PeerSilent": DistTimeoutError,
    "Store": DistStoreError,
    "Timeout": DistTimeoutError,
    "StoreArgument": DistStoreArgumentError,
    "StoreConnect": DistNetworkError,
    "StoreLost": DistNetworkError,
    "StoreQueueEmpty": DistQueueEmptyError,
    "StoreTimeout": DistStoreTimeoutError,
    "StoreUnsupported": NotImplementedError,
}


# The classes that are raised: these, or subclasses of them and PyTorch's.
_ADOPTED: dict[type[BaseException], type[BaseException]] = {}


def _adopt(classes: dict[type[BaseException], type[BaseException]]) -> None:
    """Sets subclasses to be raised instead of the classes of this file."""
    _ADOPTED.update(classes)


def _from_rust(kind: str, text: str, fields: dict[str, Any]) -> BaseException:
    plain = _CLASSES.get(kind, DistStoreError if kind.startswith("Store") else DistBackendError)
    error = _ADOPTED.get(plain, plain)(text)
    error.kind = kind  # type: ignore[attr-defined]
    for name, value in fields.items():
        setattr(error, name, value)
    return error


def refused(group: Any, operation: str, mistake: str) -> BaseException:
    """Returns the error for a call that was refused before it reached the group.

    `group` has a name, a rank and a size, as those of the extension have.
    """
    place = {"group": group.name, "rank": group.rank, "world_size": group.size}
    text = f"{operation} in group `{group.name}` failed on rank {group.rank} of {group.size}: {mistake}"
    return _from_rust("Argument", text, place | {"operation": operation, "reason": mistake})
