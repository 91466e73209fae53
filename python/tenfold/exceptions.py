"""What can go wrong, in c10d's classes.

`DistError` and its four subclasses have the names and the hierarchy of `torch.distributed`'s. The others are
subclasses of them that are also what Python calls such a thing: a wrong argument is a `ValueError`, a timeout
is a `TimeoutError`. Every exception of a group knows more than its text: see `DistError`.

When PyTorch is there, `tenfold.torch` makes these classes subclasses of PyTorch's as well, so that `except
torch.distributed.DistBackendError` catches what it should.
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
]


class DistError(RuntimeError):
    """Something about communication failed.

    Errors of groups have attributes: `operation`, `sequence_number`, `group`, `rank`, `world_size`, `elapsed`
    (seconds), `peer` (the rank whose fault it is, or None), `hint` and `reason`. Errors of stores have
    `operation`, `store`, `elapsed`, `hint` and `reason`. `kind` is a word for what broke, such as "PeerLost".

    >>> try:
    ...     raise DistError("rank 3 is gone")
    ... except RuntimeError as error:
    ...     print(error)
    rank 3 is gone
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
    """Somebody could not be reached."""


class DistStoreError(DistError):
    """A store failed."""


class DistQueueEmptyError(DistStoreError):
    """`queue_pop` found nothing."""


class DistStoreArgumentError(DistStoreError, ValueError):
    """The caller's mistake with a store: lists of different lengths, a counter that is not a number."""


class DistArgumentError(DistBackendError, ValueError):
    """The caller's mistake: lengths that do not fit, a rank out of range, a dtype that cannot be reduced."""


class DistTimeoutError(DistBackendError, TimeoutError):
    """The time is up, or a rank shows no sign of life."""


class DistStoreTimeoutError(DistStoreError, TimeoutError):
    """The time is up for a store."""


# The class for each kind of fault: of groups by its name in Rust, of stores with `Store` before it.
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


# What is raised where these are meant: themselves, or PyTorch's children of them.
_ADOPTED: dict[type[BaseException], type[BaseException]] = {}


def _adopt(classes: dict[type[BaseException], type[BaseException]]) -> None:
    """Has subclasses raised instead of the classes of this file."""
    _ADOPTED.update(classes)


def _from_rust(kind: str, text: str, fields: dict[str, Any]) -> BaseException:
    plain = _CLASSES.get(kind, DistStoreError if kind.startswith("Store") else DistBackendError)
    error = _ADOPTED.get(plain, plain)(text)
    error.kind = kind  # type: ignore[attr-defined]
    for name, value in fields.items():
        setattr(error, name, value)
    return error
