"""Where the gradients of a `Reducer` are, for PyTorch: in `.grad`, which autograd fills, and in the buckets.

Results equal those of PyTorch's own reducer to the bit: a gradient that is copied to its bucket is multiplied
by the inverse of the number of ranks; one that is in the bucket already is divided.

Without `gradient_as_bucket_view`, a `.grad` belongs to the program. References to it must keep their values
during the next backward. Copying averages out of the buckets for this costs as much as reducing them. So if
only the parameter refers to its gradient, the view in the bucket replaces it, and autograd can reuse the
memory of the original for the next gradient. If the program turns out to have kept such a view, it keeps the
whole memory of the buckets. The buckets then get new memory, and from then on averages are copied.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from tenfold import _tenfold, gradients
from tenfold.torch.memory import uses
from tenfold.torch.work import Work


class Gradients(gradients.Gradients):
    """As for arrays, with `.grad` in addition: a separate tensor, or a view of the bucket."""

    # DDP decides when, after it knows which ranks have no data left: these do not call forward any more.
    move_before_forward = False

    def __init__(self, params: Sequence[Tensor], as_views: bool) -> None:
        super().__init__(params, as_views)
        self._as_views = as_views
        self._takes = not as_views
        self._incoming: Tensor | None = None  # what autograd has just added to a gradient, or used as one
        self._taken: set[int] = set()  # parameters whose `.grad` was replaced
        self._numbers = {param: number for number, param in enumerate(self.params)}
        # Autograd's node for each parameter has the hook. A node lives as long as there is a reference to it.
        self._nodes: list[Any] = []
        self._handles: list[Any] = []

    @staticmethod
    def spec(param: Tensor, name: str, sparse: bool) -> gradients.Spec:
        return name, tuple(param.shape), str(param.dtype).removeprefix("torch."), sparse

    def place(self, reducer: _tenfold.Reducer, layout: list[list[int]]) -> None:
        lie_there = [number for number in range(len(self.views)) if self._lies_there(number)]
        super().place(reducer, layout)
        for number in lie_there:
            self.params[number].grad = self.views[number] if self._as_views else self.views[number].data

    def array(self, memory: _tenfold.SharedMemory, like: Tensor, start: int = 0, count: int = -1) -> Tensor:
        if len(memory) == 0 or count == 0:
            return torch.empty(0, dtype=like.dtype)
        return torch.frombuffer(memory, dtype=like.dtype, count=count, offset=start * like.dtype.itemsize)

    def view(self, index: int) -> Tensor:
        param, (bucket, start, end) = self.params[index], self.places[index]
        array = self.array(self._memory[bucket], param, start, end - start)
        if array.numel() != param.numel():
            return array  # a sparse one has no memory
        # With the layout of autograd's own gradients: the strides of a parameter that has no holes.
        if torch._prims_common.is_non_overlapping_and_dense_or_false(param):
            array = array.as_strided(param.size(), param.stride())
        else:
            array = array.view(param.shape)
        # A separate storage, to which only this refers, so that other references can be counted.
        return array if self._as_views else array.data

    def zeros(self, bucket: int) -> Tensor:
        return torch.zeros_like(self.flats[bucket])

    def attach(self, ready: Callable[[int], None]) -> None:
        for number, param in enumerate(self.params):
            with torch.enable_grad():
                node = param.expand_as(param).grad_fn.next_functions[0][0]

            def hook(_: Any, incoming: tuple[Tensor | None], number: int = number) -> None:
                self._incoming = incoming[0]
                ready(number)
                self._incoming = None

            self._nodes.append(node)
            self._handles.append(node.register_hook(hook))

    def detach(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._nodes.clear()

    def has(self, index: int) -> bool:
        return self.params[index].grad is not None

    def is_absent(self, index: int) -> bool:
        return self.params[index].grad is None

    def _lies_there(self, index: int) -> bool:
        gradient = self.params[index].grad
        return (
            gradient is not None
            and not gradient.is_sparse
            and gradient.data_ptr() == self.views[index].data_ptr()
            and gradient.numel() > 0
        )

    def load(self, index: int, divisor: int) -> None:
        param, view = self.params[index], self.views[index]
        gradient = param.grad
        if gradient is None:
            view.zero_()
            return
        if gradient.is_sparse:
            raise NotImplementedError(
                f"the gradient of {self.described(index)} is sparse and was expected to be dense; only those "
                "of `Embedding` and `EmbeddingBag` with `sparse=True` are known to be sparse"
            )
        # An unused gradient must not change, whatever its bucket is reduced to: then none is replaced.
        takes = self._takes and self.all_are_used and sys.getrefcount(gradient) == _REFERENCES
        if gradient.requires_grad:  # of a backward with `create_graph`
            gradient, takes = gradient.detach(), False
        if gradient.data_ptr() == view.data_ptr():
            if divisor != 1:
                gradient.div_(divisor)
            return
        if gradient.dtype == self.narrow_dtype:
            gradient = gradient.to(view.dtype)
        if gradient.dtype != view.dtype or gradient.shape != view.shape:
            raise RuntimeError(
                f"the gradient of {self.described(index)} has shape {tuple(gradient.shape)} and dtype "
                f"{gradient.dtype}, the parameter shape {tuple(view.shape)} and dtype {view.dtype}"
            )
        if divisor == 1:
            view.copy_(gradient)
        else:
            torch.mul(gradient, 1.0 / divisor, out=view)
        if self._as_views:
            param.grad = view
        elif takes and self._is_alone(gradient):
            param.grad = view.data
            self._taken.add(index)

    def _is_alone(self, gradient: Tensor) -> bool:
        """Whether it is the only tensor on its memory, except for those from which autograd just made it."""
        storage, incoming = gradient.untyped_storage(), self._incoming
        is_new = incoming is not None and incoming.data_ptr() == gradient.data_ptr()
        return uses(storage) <= (4 if is_new else 2) and not gradient._backward_hooks

    def are_kept(self) -> bool:
        for index in self._taken:
            # A storage without other users has two references: its tensor, and the object that counts.
            if not self._lies_there(index) and uses(self.views[index].untyped_storage()) > 2:
                self._takes = False
                self._taken.clear()
                return True
        return False

    @contextmanager
    def kept(self) -> Iterator[None]:
        kept = {
            index: self.views[index].clone() for index in range(len(self.views)) if self._lies_there(index)
        }
        yield
        for index, gradient in kept.items():
            self.views[index].copy_(gradient)

    def sparse(self, index: int, divisor: int) -> tuple[list[int], Tensor]:
        gradient = self.params[index].grad
        if gradient is None:
            return [], self.params[index].detach().new_empty(0)
        if not gradient.is_sparse:
            raise RuntimeError(
                f"the gradient of {self.described(index)} is dense and was expected to be sparse"
            )
        gradient = gradient.detach()
        if divisor != 1:
            gradient.div_(divisor)
        if gradient.sparse_dim() != 1:
            raise NotImplementedError(
                f"the gradient of {self.described(index)} has {gradient.sparse_dim()} sparse dimensions, "
                "but only one is supported"
            )
        gradient = gradient.coalesce()
        return gradient.indices()[0].tolist(), gradient.values()

    def store(self, indices: Iterable[int], reducer: _tenfold.Reducer) -> None:
        targets, sources = [], []
        for index in indices:
            param, view = self.params[index], self.views[index]
            gradient = param.grad
            if view.numel() != param.numel():
                self._store_sparse(index, reducer)
            elif self._as_views:
                if not self._lies_there(index):
                    param.grad = view
            elif gradient is None:
                param.grad = view.clone()
            elif gradient.data_ptr() != view.data_ptr():
                targets.append(gradient.detach() if gradient.requires_grad else gradient)
                sources.append(view)
        if targets:
            torch._foreach_copy_(targets, sources)

    def _store_sparse(self, index: int, reducer: _tenfold.Reducer) -> None:
        average, param = reducer.sparse_gradient(index), self.params[index]
        if average is None:
            return
        rows, values = average
        empty = param.detach().new_empty(0)
        values = torch.frombuffer(bytearray(values), dtype=param.dtype) if values else empty
        with torch.no_grad():
            param.grad = torch.sparse_coo_tensor(
                torch.tensor([rows], dtype=torch.int64),
                values.view(len(rows), *param.shape[1:]),
                param.shape,
                check_invariants=False,
                is_coalesced=True,
            )

    def unused(self, outputs: Sequence[Tensor]) -> list[int]:
        used: set[int] = set()
        seen: set[Any] = set()
        nodes = [output.grad_fn for output in outputs if output.grad_fn is not None]
        # An output may be a parameter itself.
        used.update(self._numbers[output] for output in outputs if output in self._numbers)
        while nodes:
            node = nodes.pop()
            if node in seen:
                continue
            seen.add(node)
            variable = getattr(node, "variable", None)
            if variable is not None and variable in self._numbers:
                used.add(self._numbers[variable])
            nodes += [following for following, _ in node.next_functions if following is not None]
        return [number for number in range(len(self.params)) if number not in used]

    def when_backward_ends(self, callback: Callable[[], None]) -> None:
        Variable._execution_engine.queue_callback(callback)

    def put_result(self, bucket: int, result: Any) -> None:
        flat = self.flats[bucket]
        if not isinstance(result, Tensor):
            raise TypeError(
                f"the future of a communication hook must hold a tensor of {flat.numel()} elements, as the "
                f"bucket has; it holds a {type(result).__name__}"
            )
        if result.numel() != flat.numel():
            raise RuntimeError(
                f"the future of a communication hook holds a tensor of {result.numel()} elements, and the "
                f"bucket has {flat.numel()}"
            )
        if result.data_ptr() != flat.data_ptr() or result.dtype != flat.dtype:
            flat.copy_(result.detach().view(-1))

    def used_map(self, used: Sequence[int]) -> Tensor:
        return torch.tensor(used, dtype=torch.int32)

    def future(self, work: _tenfold.Work, tensor: Tensor) -> Any:
        return Work([work], [tensor]).get_future()


def _references() -> int:
    """Counts the references to a gradient that only its parameter has: versions of PyTorch differ."""
    param = torch.nn.Parameter(torch.zeros(1))
    param.grad = torch.zeros(1)
    gradient = param.grad
    return sys.getrefcount(gradient)


_REFERENCES = _references()
