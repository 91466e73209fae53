"""Signatures of c10d's methods and of tenfold's, in a form in which they can be compared.

pybind11 writes its overloads into docstrings; Python's are known to `typing` and `inspect`.
"""

import inspect
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any

REQUIRED = "required"
# c10d says "that of the group" by None in some places and by -1 ms in others; tenfold takes either in all.
GROUPS_TIMEOUT = "the group's"
# A new options object.
NEW_OPTIONS = "new options"


@dataclass(frozen=True)
class Parameter:
    name: str | None  # None: by position only
    default: str = REQUIRED

    def __str__(self) -> str:
        name = self.name or "_"
        return name if self.default == REQUIRED else f"{name}={self.default}"


Signature = tuple[Parameter, ...]


def of_c10d(method: Any) -> list[Signature]:
    """What the docstring of a method or function of pybind11's says."""
    lines = (method.__doc__ or "").splitlines()
    found = [re.match(r"(?:\d+\. )?\w+\((.*)\) -> .*$", line.strip()) for line in lines]
    overloads = [match.group(1) for match in found if match and match.group(1) != "*args, **kwargs"]
    return [_parsed(parameters) for parameters in overloads]


def _parsed(text: str) -> Signature:
    parameters = []
    for part in _split(text):
        if part in ("*", "/"):
            continue
        declared, _, default = part.partition(" = ")
        name = declared.partition(":")[0].strip()
        if name == "self":
            continue
        is_optional_timeout = "timedelta | None" in declared
        parameters.append(
            Parameter(None if re.fullmatch(r"arg\d+", name) else name, _default(default, is_optional_timeout))
        )
    return tuple(parameters)


def _split(text: str) -> list[str]:
    """At the commas that are not in brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += letter in "([{<"
        depth -= letter in ")]}>"
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def _default(text: str, is_optional_timeout: bool) -> str:
    if not text:
        return REQUIRED
    if re.match(r"<.*Options object at", text):
        return NEW_OPTIONS
    if text.startswith("datetime.timedelta("):
        value = eval(text, {"datetime": __import__("datetime")})
        return GROUPS_TIMEOUT if value == timedelta(milliseconds=-1) else repr(value)
    return GROUPS_TIMEOUT if text == "None" and is_optional_timeout else text


def of_tenfold(method: Callable) -> list[Signature]:
    """What a function, a method, or for its constructor a class, can be called with."""
    forms = typing.get_overloads(method) if inspect.isfunction(method) else []
    return [_of_form(form) for form in forms or [method]]


def _of_form(form: Callable) -> Signature:
    parameters = list(inspect.signature(form).parameters.values())
    return tuple(
        Parameter(
            None if parameter.kind is parameter.POSITIONAL_ONLY else parameter.name,
            _python_default(parameter),
        )
        for parameter in parameters
        if parameter.name not in ("self", "cls", "$self")
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    )


def _python_default(parameter: inspect.Parameter) -> str:
    value = parameter.default
    if value is inspect.Parameter.empty:
        return REQUIRED
    if value is ...:
        return NEW_OPTIONS if parameter.name == "opts" else "..."
    if parameter.name == "timeout" and value is None:
        return GROUPS_TIMEOUT
    # Python's defaults are shared between calls, so ours are immutable.
    if isinstance(value, tuple | MappingProxyType) and not value:
        return "[]" if isinstance(value, tuple) else "{}"
    return repr(value)


def accepts(ours: Signature, theirs: Signature) -> bool:
    """Can everything that was written for `theirs` be passed to `ours`, and mean the same?

    What c10d takes by position only may have a name here, what it requires may have a default, and there may
    be more parameters if those have defaults.
    """
    if len(ours) < len(theirs):
        return False
    same = all(
        theirs_one.name in (None, ours_one.name) and theirs_one.default in (REQUIRED, ours_one.default)
        for ours_one, theirs_one in zip(ours, theirs, strict=False)
    )
    return same and all(extra.default != REQUIRED for extra in ours[len(theirs) :])


def shown(signatures: list[Signature]) -> str:
    return " | ".join(f"({', '.join(map(str, signature))})" for signature in signatures)
