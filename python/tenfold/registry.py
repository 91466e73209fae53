"""Groups by name, for those who can pass a name around but not a group; and the group meant by default."""

import threading
from typing import Any

__all__ = [
    "_current_process_group",
    "_is_process_group_registered",
    "_register_process_group",
    "_resolve_process_group",
    "_set_process_group",
    "_unregister_all_process_groups",
    "_unregister_process_group",
]

_lock = threading.Lock()
_groups: dict[str, Any] = {}
_current: Any = None


def _register_process_group(group_name: str, group: Any) -> None:
    """Makes `group` known by a name.

    >>> from tenfold import ProcessGroup
    >>> group = ProcessGroup(0, 1)
    >>> _register_process_group("trainers", group)
    >>> _resolve_process_group("trainers") is group
    True
    >>> _unregister_process_group("trainers")
    """
    with _lock:
        if group_name in _groups:
            raise RuntimeError(f"A process group is already registered under the name {group_name}")
        _groups[group_name] = group


def _resolve_process_group(group_name: str) -> Any:
    """The group with a name."""
    with _lock:
        if group_name not in _groups:
            text = "Could not resolve the process group registered under the name"
            raise RuntimeError(f"{text} {group_name}")
        return _groups[group_name]


def _is_process_group_registered(group_name: str) -> bool:
    with _lock:
        return group_name in _groups


def _unregister_process_group(group_name: str) -> None:
    with _lock:
        _groups.pop(group_name, None)


def _unregister_all_process_groups() -> None:
    with _lock:
        _groups.clear()


def _current_process_group() -> Any:
    """The group that is meant when none is named, or None."""
    return _current


def _set_process_group(group: Any, /) -> None:
    global _current
    _current = group
