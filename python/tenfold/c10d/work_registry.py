"""A registry of works by the memory that they fill, for `wait_tensor`, which has an array and not the work.

Memory has one work for each operation that was called on it. Views of one array share the memory, and
`wait_tensor` waits for all its works. A work is removed once the program has waited for it, in either way.
With `_set_thread_isolation_mode`, each thread has its own registry, for ranks that are threads.
"""

import threading
import weakref
from typing import Any

__all__ = [
    "_allow_inflight_collective_as_graph_input",
    "_get_work_registry_size",
    "_register_work",
    "_set_allow_inflight_collective_as_graph_input",
    "take_works",
    "unregister_work",
]

# For each memory: a reference that keeps it alive or reports its deletion, and its works.
_Works = dict[int, tuple[Any, list[Any]]]

_lock = threading.RLock()  # an array may be collected, and its works removed, at any line below
_shared: _Works = {}


class _Isolated(threading.local):
    def __init__(self) -> None:
        self.works: _Works = {}


_isolated = _Isolated()
_is_isolated = False
_allowed = False


def isolate(enable: bool) -> None:
    """Gives each thread its own registry, or all threads a common one."""
    global _is_isolated
    _is_isolated = enable


def _works() -> _Works:
    return _isolated.works if _is_isolated else _shared


def _memory(tensor: Any) -> tuple[int, Any]:
    """Returns a number for the memory of an array, equal for all its views, and the owner of the memory."""
    storage = getattr(tensor, "untyped_storage", None)
    if storage is not None:
        return storage()._cdata, tensor if tensor._base is None else tensor._base
    if isinstance(tensor, memoryview):
        return _memory(tensor.obj)
    while (base := getattr(tensor, "base", None)) is not None:
        tensor = base.obj if isinstance(base, memoryview) else base
    return id(tensor), tensor


def _register_work(tensor: Any, work: Any) -> None:
    """Makes `wait_tensor(tensor)` wait for `work`, and for all other works of the same memory."""
    key, owner = _memory(tensor)
    if hasattr(work, "is_registered"):
        work.is_registered = True
    with _lock:
        works = _works()
        known = works.get(key)
        if known is not None:
            known[1].append(work)
            return
        works[key] = (_reference(owner, works, key), [work])


def _reference(owner: Any, works: _Works, key: int) -> Any:
    """Removes the works of an array when it is deleted. Keeps an object that has no weak references."""

    def gone(_: Any) -> None:
        with _lock:
            works.pop(key, None)

    try:
        return weakref.ref(owner, gone)
    except TypeError:
        return owner


def take_works(tensor: Any) -> list[Any]:
    """Removes and returns the works of an array's memory."""
    key, _ = _memory(tensor)
    with _lock:
        _, works = _works().pop(key, (None, []))
    for work in works:
        if hasattr(work, "is_registered"):
            work.is_registered = False
    return works


def unregister_work(work: Any) -> None:
    """Removes one work, whatever memory it fills."""
    with _lock:
        works = _works()
        for key, (_, known) in list(works.items()):
            known[:] = [other for other in known if other is not work]
            if not known:
                del works[key]


def _get_work_registry_size() -> int:
    """Returns the number of works that the program has not waited for."""
    with _lock:
        return sum(len(known) for _, known in _works().values())


def _set_allow_inflight_collective_as_graph_input(value: bool) -> None:
    """Sets whether `wait_tensor` waits for every operation of a `ProcessGroup` from now on.

    >>> from tenfold.c10d import HashStore, ProcessGroup, _get_work_registry_size, functional
    >>> group, numbers = ProcessGroup(HashStore(), 0, 1), bytearray([1, 2])
    >>> _set_allow_inflight_collective_as_graph_input(True)
    >>> work = group.allreduce(numbers)
    >>> _set_allow_inflight_collective_as_graph_input(False)
    >>> _get_work_registry_size()
    1
    >>> functional.wait_tensor(numbers)
    bytearray(b'\\x01\\x02')
    >>> _get_work_registry_size()
    0
    """
    global _allowed
    _allowed = value


def _allow_inflight_collective_as_graph_input() -> bool:
    return _allowed
