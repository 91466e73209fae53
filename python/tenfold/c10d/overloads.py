"""Operations that can be called in several ways, as c10d's can.

c10d's methods have a first form with lists of tensors and an options object, and shorter forms:
`allreduce(tensor, op, timeout)`. The forms are declared by `typing.overload`, so that type checkers and
`typing.get_overloads` know them. The default of an options object is written `...` and means a new object.
`operation` tries the forms in turn, as pybind11 does, and calls `_perform` with the arguments of the first
form.
"""

import functools
import inspect
import typing
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

from tenfold.arrays import Tensor, TensorLists, Tensors
from tenfold.c10d.options import Fields
from tenfold.reduce_op import ReduceOp, Reduction, code_of
from tenfold.work import Work

__all__ = ["operation", "renamed"]

# The field of the options that each parameter of the shorter forms sets.
_OPTION_FIELDS = {"root": "rootRank", "op": "reduceOp", "timeout": "timeout"}


Method = TypeVar("Method", bound=Callable[..., Any])


def operation(method: Method) -> Method:
    """Makes a method that calls `self._perform(name, arguments, options)`, documented as `method` is."""
    forms = [_Form(overload) for overload in typing.get_overloads(method) or [method]]
    first, name = forms[0], method.__name__

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        for form in forms:
            given = form.match(args, kwargs)
            if given is not None:
                return self._perform(name, *form.as_in(first, given))
        raise TypeError(_complaint(name, forms, args, kwargs))

    return cast(Method, call)


def renamed(method: Method, name: str) -> Method:
    """Makes an alias of `method` by another name of c10d's. A subclass needs to override only one of them."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Work:
        return getattr(self, method.__name__)(*args, **kwargs)

    call.__name__ = name
    call.__doc__ = f"The older name of `{method.__name__}`."
    return cast(Method, call)


class _Form:
    """One way to call an operation."""

    def __init__(self, overload: Callable) -> None:
        hints = typing.get_type_hints(overload)
        parameters = list(inspect.signature(overload).parameters.values())[1:]
        self.names = [parameter.name for parameter in parameters]
        self.defaults = [parameter.default for parameter in parameters]
        self.kinds = [hints[name] for name in self.names]
        self.tests = [_test_of(kind) for kind in self.kinds]
        self.options = next(
            (kind for kind in self.kinds if inspect.isclass(kind) and issubclass(kind, Fields)), None
        )

    def __str__(self) -> str:
        optional = [default is not inspect.Parameter.empty for default in self.defaults]
        return ", ".join(
            name + "=..." * has_default for name, has_default in zip(self.names, optional, strict=True)
        )

    def match(self, args: tuple, kwargs: dict[str, Any]) -> list[Any] | None:
        """Returns the arguments in order, or None if they do not match this form."""
        if len(args) > len(self.names):
            return None
        given = list(args)
        taken = 0
        for name, default in zip(self.names[len(args) :], self.defaults[len(args) :], strict=True):
            if name in kwargs:
                given.append(kwargs[name])
                taken += 1
            elif default is inspect.Parameter.empty:
                return None
            else:
                given.append(self.options() if default is ... and self.options else default)
        if taken < len(kwargs):
            return None
        for value, fits in zip(given, self.tests, strict=True):
            if not fits(value):
                return None
        return given

    def as_in(self, first: "_Form", given: list[Any]) -> tuple[list[Any], Fields | None]:
        """Returns the arguments of the first form, and its options separately."""
        if self is first:
            options = given[-1] if self.options else None
            return given[: len(given) - (self.options is not None)], options
        options = first.options() if first.options else None
        arguments: list[Any] = []
        for name, kind, value in zip(self.names, self.kinds, given, strict=True):
            field = _OPTION_FIELDS.get(name)
            if field is None:
                arguments.append(_deepened(value, kind, first.kinds[len(arguments)]))
            elif value is not None:
                setattr(options, field, value)
        return arguments, options


def _deepened(value: Any, kind: Any, wanted: Any) -> Any:
    return [value] if _DEPTHS.get(kind, 0) < _DEPTHS.get(wanted, 0) else value


_DEPTHS = {Tensors: 1, TensorLists: 2}


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _test_of(kind: Any) -> Callable[[Any], bool]:
    """Returns a check whether a value is valid for a parameter with this annotation."""
    known: dict[Any, Callable[[Any], bool]] = {
        Tensor: lambda value: not isinstance(value, _NO_TENSORS),
        Tensors: lambda value: _is_list(value) and not any(map(_is_list, value)),
        TensorLists: lambda value: _is_list(value) and all(map(_is_list, value)),
        Reduction: _is_reduction,
        Sequence[int]: lambda value: value is None or _is_list(value),
        int: lambda value: hasattr(value, "__index__"),
    }
    if kind in known:
        return known[kind]
    if inspect.isclass(kind) and issubclass(kind, Fields):
        # PyTorch's options have the same fields.
        return lambda value: isinstance(value, kind) or type(value).__name__ == kind.__name__
    return lambda value: isinstance(value, kind)


_NO_TENSORS = (list, tuple, str, int, float, timedelta, Fields)


def _is_reduction(value: Any) -> bool:
    if isinstance(value, ReduceOp | ReduceOp.RedOpType | str):
        return True
    try:
        return not isinstance(value, int | tuple) and code_of(value) is not None
    except TypeError:
        return False
    except ValueError:  # PREMUL_SUM without a factor is reported later
        return True


def _complaint(name: str, forms: list[_Form], args: tuple, kwargs: dict[str, Any]) -> str:
    ways = "".join(f"\n    {name}({form})" for form in forms)
    kinds = [type(value).__name__ for value in args] + [f"{k}={type(v).__name__}" for k, v in kwargs.items()]
    wrong = f"but was given ({', '.join(kinds)})"
    return f"{name}(): incompatible function arguments. It can be called as{ways}\n{wrong}"
