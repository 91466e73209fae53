"""Works by the memory that they fill, for who has an array and not the work: `wait_tensor`.

Memory has as many works as operations were called on it: views of one array share it, and all are waited for.
A work is forgotten when it was waited for, by either way. The registry of each thread is its own while
`_set_thread_isolation_mode` is on, which is for ranks that are threads.
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

# For each memory: what keeps it alive or tells that it is gone, and its works.
_Works = dict[int, tuple[Any, list[Any]]]

_lock = threading.RLock()  # an array may be collected, and its works forgotten, at any line below
_shared: _Works = {}


class _Isolated(threading.local):
    def __init__(self) -> None:
        self.works: _Works = {}


_isolated = _Isolated()
_is_isolated = False
_allowed = False


def isolate(enable: bool) -> None:
    """Gives each thread a registry of its own, or all threads the same."""
    global _is_isolated
    _is_isolated = enable


def _works() -> _Works:
    return _isolated.works if _is_isolated else _shared


def _memory(tensor: Any) -> tuple[int, Any]:
    """A number for the memory of an array, equal for all views of it; and the object that owns it."""
    storage = getattr(tensor, "untyped_storage", None)
    if storage is not None:
        return storage()._cdata, tensor if tensor._base is None else tensor._base
    if isinstance(tensor, memoryview):
        return _memory(tensor.obj)
    while (base := getattr(tensor, "base", None)) is not None:
        tensor = base.obj if isinstance(base, memoryview) else base
    return id(tensor), tensor


def _register_work(tensor: Any, work: Any) -> None:
    """`wait_tensor(tensor)` waits for `work`, and for all others of the same memory."""
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
    """An array that nobody keeps cannot be waited for: its works go with it. What cannot tell is kept."""

    def gone(_: Any) -> None:
        with _lock:
            works.pop(key, None)

    try:
        return weakref.ref(owner, gone)
    except TypeError:
        return owner


def take_works(tensor: Any) -> list[Any]:
    """The works of an array's memory, which are forgotten."""
    key, _ = _memory(tensor)
    with _lock:
        _, works = _works().pop(key, (None, []))
    for work in works:
        if hasattr(work, "is_registered"):
            work.is_registered = False
    return works


def unregister_work(work: Any) -> None:
    """Forgets one work, whatever memory it fills."""
    with _lock:
        works = _works()
        for key, (_, known) in list(works.items()):
            known[:] = [other for other in known if other is not work]
            if not known:
                del works[key]


def _get_work_registry_size() -> int:
    """How many works nobody has waited for."""
    with _lock:
        return sum(len(known) for _, known in _works().values())


def _set_allow_inflight_collective_as_graph_input(value: bool) -> None:
    """With True, `wait_tensor` waits for every operation of a `ProcessGroup` from now on.

    >>> from tenfold import HashStore, ProcessGroup, _get_work_registry_size, functional
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
