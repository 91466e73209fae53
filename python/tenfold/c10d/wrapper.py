"""`_ProcessGroupWrapper`: a backend around a backend, which compares the calls of all ranks first.

Tenfold's own backend does not need it: each of its messages says what its sender called. The wrapper is for
other backends that are used through tenfold's classes. Point-to-point calls are not compared, as in c10d.
"""

import hashlib
import re
from collections.abc import Iterator
from typing import Any

from tenfold.c10d.backend import Backend
from tenfold.c10d.collectives import COLLECTIVES, Collective
from tenfold.c10d.options import Fields
from tenfold.c10d.process_group import _flat, _perform_by

__all__ = ["_ProcessGroupWrapper"]

# How many bytes are compared. A longer text is cut, and ends with a hash of the whole text.
_TEXT = 512

# c10d's names for the differing parts of a fingerprint.
_ASPECTS = {
    "SequenceNumber": "\t Sequence number: ",
    "OpType": "  Op type: ",
    "TensorShape": "  Tensor Tensor shapes: ",
    "TensorDtypes": "  Tensor Tensor dtypes: ",
}


class _ProcessGroupWrapper(Backend):
    """Calls `backend` after `gloo_backend`, of any kind, has confirmed that all ranks made the same call.

    >>> from tenfold.c10d import HashStore, ProcessGroupTenfold
    >>> first, second = (ProcessGroupTenfold(HashStore(), 0, 1) for _ in range(2))
    >>> wrapper = _ProcessGroupWrapper(first, second)
    >>> wrapper.allreduce([bytearray(4)]).wait()
    True
    >>> wrapper.wrapped_pg is first
    True
    """

    def __init__(self, backend: Backend, gloo_backend: Backend) -> None:
        super().__init__(backend.rank(), backend.size())
        self._wrapped = backend
        self._checker = gloo_backend
        self._compared = 0

    @property
    def wrapped_pg(self) -> Backend:
        return self._wrapped

    @property
    def options(self) -> Any:
        return self._wrapped.options

    def get_error(self) -> Any:
        return self._wrapped.get_error()

    def _get_backend_name(self) -> str:
        return self._wrapped.name()

    def _perform(self, name: str, arguments: list[Any], options: Fields | None) -> Any:
        if name in COLLECTIVES and not COLLECTIVES[name].is_message:
            self._compare(COLLECTIVES[name], arguments)
        return _perform_by(self._wrapped, name, arguments, options)

    def _compare(self, collective: Collective, arguments: list[Any]) -> None:
        self._checker.monitored_barrier(wait_all_ranks=True)
        own = bytearray(_TEXT)
        text = _shortened(self._fingerprint(collective, arguments).encode())
        own[: len(text)] = text
        all_texts = [bytearray(_TEXT) for _ in range(self.size())]
        self._checker.allgather([all_texts], [own]).wait()
        self._compared += 1
        for rank, theirs in enumerate(all_texts):
            if theirs != all_texts[0]:
                first, other = (
                    bytes(text).rstrip(b"\0").decode(errors="replace") for text in (all_texts[0], theirs)
                )
                raise RuntimeError(
                    "Detected mismatch between collectives on ranks. "
                    f"Rank 0 is running collective: {first}, but Rank {rank} is running collective: {other}."
                    f"{_difference(first, other)}"
                )

    def _fingerprint(self, collective: Collective, arguments: list[Any]) -> str:
        """Describes a call. Shapes are described only where they must be equal on all ranks."""
        facts = [f"SequenceNumber={self._compared}", f"OpType={collective.name.upper()}"]
        tensors = [tensor for place in collective.same_shapes for tensor in _flat(arguments[place])]
        if tensors:
            facts.append(f"TensorShape=[{', '.join(map(_shape, tensors))}]")
            facts.append(f"TensorDtypes={', '.join(map(_dtype, tensors))}")
        return f"CollectiveFingerPrint({', '.join(facts)})"


def _shortened(text: bytes) -> bytes:
    if len(text) <= _TEXT:
        return text
    end = f"… hash {hashlib.sha256(text).hexdigest()[:16]})".encode()
    return text[: _TEXT - len(end)] + end


def _difference(first: str, other: str) -> str:
    """Returns c10d's text about the differences, as far as a cut text shows them."""
    ours, theirs = (dict(re.findall(r"(\w+)=(.*?)(?=, [A-Z]\w+=|\)$|…|$)", text)) for text in (first, other))
    differing = [
        f"{words}{ours.get(fact, '')}vs {theirs.get(fact, '')}"
        for fact, words in _ASPECTS.items()
        if ours.get(fact) != theirs.get(fact)
    ]
    return "Collectives differ in the following aspects: " + "".join(differing) if differing else ""


def _shape(tensor: Any) -> str:
    return str(list(tensor.shape if hasattr(tensor, "shape") else memoryview(tensor).shape or ()))


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype if hasattr(tensor, "dtype") else memoryview(tensor).format)


def _questions() -> Iterator[str]:
    """Other methods of a backend, which the wrapped one answers."""
    own = set(vars(_ProcessGroupWrapper)) | {"rank", "size", "name", "bound_device_id", "Options"}
    return (name for name in vars(Backend) if name not in own and not name.startswith(("__", "_unsupported")))


def _passed_on(name: str) -> Any:
    if isinstance(vars(Backend)[name], property):
        return property(lambda self: getattr(self._wrapped, name))
    return lambda self, *arguments, **named: getattr(self._wrapped, name)(*arguments, **named)


for _name in list(_questions()):
    setattr(_ProcessGroupWrapper, _name, _passed_on(_name))
