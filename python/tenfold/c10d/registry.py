"""A registry of groups by name, for code that can pass a name but not a group. Also the default group.

Each thread has its own default group, because ranks may be threads. Names are shared by all threads, unless
`_set_thread_isolation_mode` is on.
"""

import threading
from typing import Any

from tenfold.c10d import work_registry

__all__ = [
    "_current_process_group",
    "_is_process_group_registered",
    "_register_process_group",
    "_resolve_process_group",
    "_set_process_group",
    "_set_thread_isolation_mode",
    "_unregister_all_process_groups",
    "_unregister_process_group",
]

_lock = threading.Lock()
_shared: dict[str, Any] = {}


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.current: Any = None
        self.groups: dict[str, Any] = {}


_thread = _OfThread()
_is_isolated = False


def _groups() -> dict[str, Any]:
    return _thread.groups if _is_isolated else _shared


def _set_thread_isolation_mode(enable: bool) -> None:
    """Gives each thread its own registry of groups and works, for ranks that are threads.

    >>> _set_thread_isolation_mode(True)
    >>> from tenfold.c10d import ProcessGroup
    >>> _register_process_group("of this thread", ProcessGroup(0, 1))
    >>> _set_thread_isolation_mode(False)
    >>> _is_process_group_registered("of this thread")
    False
    """
    global _is_isolated
    _is_isolated = enable
    work_registry.isolate(enable)


def _register_process_group(group_name: str, group: Any) -> None:
    """Registers `group` under a name.

    >>> from tenfold.c10d import ProcessGroup
    >>> group = ProcessGroup(0, 1)
    >>> _register_process_group("trainers", group)
    >>> _resolve_process_group("trainers") is group
    True
    >>> _unregister_process_group("trainers")
    """
    with _lock:
        if group_name in _groups():
            raise RuntimeError(f"A process group is already registered under the name {group_name}")
        _groups()[group_name] = group


def _resolve_process_group(group_name: str) -> Any:
    """Returns the group with this name."""
    with _lock:
        if group_name not in _groups():
            text = "Could not resolve the process group registered under the name"
            raise RuntimeError(f"{text} {group_name}")
        return _groups()[group_name]


def _is_process_group_registered(group_name: str) -> bool:
    with _lock:
        return group_name in _groups()


def _unregister_process_group(group_name: str) -> None:
    with _lock:
        _groups().pop(group_name, None)


def _unregister_all_process_groups() -> None:
    with _lock:
        _groups().clear()


def _current_process_group() -> Any:
    """Returns the default group of this thread, or None."""
    return _thread.current


def _set_process_group(group: Any, /) -> None:
    """Sets the default group of this thread."""
    _thread.current = group
