"""Where the gradients of a `Reducer` are, for arrays: in its buckets, written there by the caller.

`tenfold.torch.gradients` is the same for PyTorch, whose autograd has gradients of its own.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tenfold import _tenfold
from tenfold.work import Work

Spec = tuple[str, Sequence[int], str, bool]


class Gradients:
    """The buckets of a reducer as flat arrays, and the gradient of each parameter as a view of one."""

    # The caller writes into buckets between forward and backward: they must not move there.
    move_before_forward = True

    def __init__(self, params: Sequence[Any], _as_views: bool) -> None:
        self.params = list(params)
        self._memory: list[_tenfold.SharedMemory] = []
        self.places: list[tuple[int, int, int]] = []
        self.flats: list[Any] = []
        self.views: list[Any] = []
        self.all_are_used = True  # by every rank in every iteration
        self.names: Mapping[int, str] = {}
        self.narrow_dtype: Any = None  # in which gradients may come besides their own

    def described(self, index: int) -> str:
        """A parameter, for messages."""
        name = self.names.get(index)
        return f"parameter {index}" + (f" `{name}`" if name else "")

    @staticmethod
    def spec(param: Any, name: str, sparse: bool) -> Spec:
        return name, tuple(param.shape), param.dtype.name, sparse

    def place(self, reducer: _tenfold.Reducer, layout: list[list[int]]) -> None:
        """Makes arrays on the memory of the buckets, which were just cut."""
        self._memory = [reducer.bucket_memory(number) for number in range(len(layout))]
        self.places = [reducer.place(number) for number in range(len(self.params))]
        self.flats = [
            self.array(memory, self.params[members[0]])
            for memory, members in zip(self._memory, layout, strict=True)
        ]
        self.views = [self.view(number) for number in range(len(self.params))]

    def array(self, memory: _tenfold.SharedMemory, like: Any, start: int = 0, count: int = -1) -> Any:
        """A flat array on a part of a bucket."""
        import numpy as np

        return np.frombuffer(memory, like.dtype, count, start * like.dtype.itemsize)

    def view(self, index: int) -> Any:
        param, (bucket, start, end) = self.params[index], self.places[index]
        array = self.array(self._memory[bucket], param, start, end - start)
        return array.reshape(param.shape) if array.size == param.size else array  # a sparse one has no memory

    def zeros(self, bucket: int) -> Any:
        import numpy as np

        return np.zeros_like(self.flats[bucket])

    def attach(self, ready: Callable[[int], None]) -> None:
        """Nobody computes gradients here but the caller, who says when they are ready."""

    def detach(self) -> None: ...

    def has(self, index: int) -> bool:
        """Is there something in the gradient that may not be lost?"""
        return False

    def is_absent(self, index: int) -> bool:
        """Had the parameter its turn without getting a gradient?"""
        return False

    def are_kept(self) -> bool:
        """Does somebody still look at a gradient of the last iteration, in its bucket?"""
        return False

    def load(self, index: int, divisor: int) -> None:
        """The gradient goes into its bucket, divided."""
        if divisor != 1:
            self.views[index] /= divisor

    def sparse(self, index: int, divisor: int) -> tuple[list[int], Any]:
        """Rows and values of a sparse gradient, divided."""
        raise NotImplementedError("an array's gradient cannot be sparse")

    def kept(self) -> AbstractContextManager[None]:
        """Has gradients afterwards what they were before, whatever happens to their buckets."""
        return nullcontext()

    def store(self, indices: Iterable[int], reducer: _tenfold.Reducer) -> None:
        """The averages go where the caller looks for them."""

    def unused(self, outputs: Sequence[Any]) -> list[int]:
        """Parameters that these outputs do not depend on."""
        return []

    def when_backward_ends(self, callback: Callable[[], None]) -> None:
        """The caller finishes by hand."""

    def put_result(self, bucket: int, result: Any) -> None:
        """What a hook made of a bucket becomes its content."""
        flat = self.flats[bucket]
        if getattr(result, "shape", None) != flat.shape:
            raise TypeError(
                f"the future of a communication hook must hold an array of {flat.size} elements, as the "
                f"bucket has; it holds {_described(result)}"
            )
        if result is not flat:
            flat[...] = result

    def used_map(self, used: Sequence[int]) -> Any:
        import numpy as np

        return np.array(used, dtype=np.int32)

    def future(self, work: _tenfold.Work, tensor: Any) -> Any:
        return Work([work], [tensor]).get_future()


def _described(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}" + (f" of shape {tuple(shape)}" if shape is not None else "")
