"""Where the gradients of a `Reducer` are, for arrays: in its buckets, written there by the caller.

`tenfold.torch.gradients` is the same for PyTorch, whose autograd has its own gradients.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tenfold import _tenfold
from tenfold.work import Work

Spec = tuple[str, Sequence[int], str, bool]


class Gradients:
    """The buckets of a reducer as flat arrays, and the gradient of each parameter as a view of one."""

    # The caller writes to buckets between forward and backward: they must not move in between.
    move_before_forward = True

    def __init__(self, params: Sequence[Any], _as_views: bool) -> None:
        self.params = list(params)
        self._memory: list[_tenfold.SharedMemory] = []
        self.places: list[tuple[int, int, int]] = []
        self.flats: list[Any] = []
        self.views: list[Any] = []
        self.all_are_used = True  # by every rank in every iteration
        self.names: Mapping[int, str] = {}
        self.narrow_dtype: Any = None  # a dtype in which gradients may come besides their own

    def described(self, index: int) -> str:
        """Describes a parameter, for messages."""
        name = self.names.get(index)
        return f"parameter {index}" + (f" `{name}`" if name else "")

    @staticmethod
    def spec(param: Any, name: str, sparse: bool) -> Spec:
        return name, tuple(param.shape), param.dtype.name, sparse

    def place(self, reducer: _tenfold.Reducer, layout: list[list[int]]) -> None:
        """Makes arrays on the memory of the new buckets."""
        self._memory = [reducer.bucket_memory(number) for number in range(len(layout))]
        self.places = [reducer.place(number) for number in range(len(self.params))]
        self.flats = [
            self.array(memory, self.params[members[0]])
            for memory, members in zip(self._memory, layout, strict=True)
        ]
        self.views = [self.view(number) for number in range(len(self.params))]

    def array(self, memory: _tenfold.SharedMemory, like: Any, start: int = 0, count: int = -1) -> Any:
        """Makes a flat array on a part of a bucket."""
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
        """Does nothing: the caller computes gradients and says when they are ready."""

    def detach(self) -> None: ...

    def has(self, index: int) -> bool:
        """Whether the gradient has content that must not be lost."""
        return False

    def is_absent(self, index: int) -> bool:
        """Whether autograd reached the parameter without computing a gradient."""
        return False

    def are_kept(self) -> bool:
        """Whether a gradient of the last iteration is still in use, in its bucket."""
        return False

    def load(self, index: int, divisor: int) -> None:
        """Puts the gradient into its bucket, divided."""
        if divisor != 1:
            self.views[index] /= divisor

    def sparse(self, index: int, divisor: int) -> tuple[list[int], Any]:
        """Returns rows and values of a sparse gradient, divided."""
        raise NotImplementedError("an array's gradient cannot be sparse")

    def kept(self) -> AbstractContextManager[None]:
        """Preserves gradient values while their buckets change."""
        return nullcontext()

    def store(self, indices: Iterable[int], reducer: _tenfold.Reducer) -> None:
        """Puts the averages where the caller expects them."""

    def unused(self, outputs: Sequence[Any]) -> list[int]:
        """Returns the parameters that these outputs do not depend on."""
        return []

    def when_backward_ends(self, callback: Callable[[], None]) -> None:
        """Does nothing: the caller calls `finish`."""

    def put_result(self, bucket: int, result: Any) -> None:
        """Stores the result of a hook in its bucket."""
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
