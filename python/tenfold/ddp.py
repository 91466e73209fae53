"""Data-parallel training: `Reducer` and `GradBucket`, as c10d has them. See `tenfold.c10d.ddp` for the rest.

The reducer itself is in Rust. It owns the memory of the gradients, in buckets that peers on the same host
read in place, and averages a bucket as soon as its gradients are ready. Parameters are PyTorch tensors, whose
gradients come from autograd, or NumPy arrays, whose gradients the caller writes.

>>> import numpy, tenfold
>>> group = tenfold.init(tenfold.HashStore(), 0, 1)
>>> weights = [numpy.ones((2, 3)), numpy.ones(2)]
>>> buckets, limits = tenfold.c10d._compute_bucket_assignment_by_size(weights, [2**20])
>>> reducer = tenfold.ddp.Reducer(weights, buckets, limits, group)
>>> reducer.prepare_for_backward([])
>>> for number in (1, 0):
...     reducer.gradient(number)[...] = number
...     reducer._autograd_hook(number)
>>> reducer.finish()
>>> reducer.gradient(1)
array([1., 1.])
"""

import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tenfold import _tenfold, gradients
from tenfold.api import Group
from tenfold.arrays import is_torch
from tenfold.numbered import Numbered

if TYPE_CHECKING:
    from tenfold.c10d.ddp import Logger

__all__ = ["BuiltinCommHookType", "GradBucket", "Reducer", "group_of", "specs_of"]


class BuiltinCommHookType(Numbered):
    """The communication hooks that are written in Rust."""

    ALLREDUCE = 1
    FP16_COMPRESS = 2


class GradBucket:
    """Gradients that are sent together, as a communication hook sees them."""

    def __init__(self, index: int, is_last: bool, flat: Any, parts: Sequence[tuple[Any, int, int]]) -> None:
        self._index = index
        self._is_last = is_last
        self._buffer = flat
        self._parts = parts

    def index(self) -> int:
        """Returns the number of the bucket. Buckets are reduced in this order."""
        return self._index

    def buffer(self) -> Any:
        """Returns all its gradients as a flat array. If there is a hook, they are not divided."""
        return self._buffer

    def gradients(self) -> list[Any]:
        """Returns the gradient of each parameter, as views of the buffer."""
        return [self._buffer[start:end].reshape(param.shape) for param, start, end in self._parts]

    def parameters(self) -> list[Any]:
        """Returns the parameters, in the order of the buffer."""
        return [param for param, _, _ in self._parts]

    def is_last(self) -> bool:
        """Whether this is the last bucket of its iteration."""
        return self._is_last

    def set_buffer(self, buffer: Any) -> None:
        """Replaces the buffer that later calls return."""
        self._buffer = buffer

    def __repr__(self) -> str:
        return f"GradBucket({self._index}, {len(self._parts)} gradients)"


class Reducer:
    """Averages the gradients of a model over all ranks while they are computed; see `tenfold.ddp`.

    The arguments are c10d's. Buckets are in shared memory and stay there; gradients are copied in one by one.
    `lazy_bucket_allocation`, `batched_grad_copy` and `skip_all_reduce_unused_params`, which save time or
    memory without changing results, have no effect here. Beyond c10d, a static graph can be declared in the
    constructor, and gradients can be sent in another dtype.
    """

    def __init__(
        self,
        params: Sequence[Any],
        bucket_indices: Sequence[Sequence[int]],
        per_bucket_size_limits: Sequence[int],
        process_group: Any,
        expect_sparse_gradients: Sequence[bool] = (),
        bucket_bytes_cap: int = 26214400,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        param_to_name_mapping: Mapping[int, str] = MappingProxyType({}),
        first_bucket_bytes_cap: int = 1024 * 1024,
        skip_all_reduce_unused_params: bool = False,
        use_python_reducer: bool = False,
        bucket_bytes_cap_list: Sequence[int] = (),
        batched_grad_copy: bool = False,
        lazy_bucket_allocation: bool = False,
        *,
        static_graph: bool = False,
        reduce_dtype: Any = None,
    ) -> None:
        self._sparse = list(expect_sparse_gradients) or [False] * len(params)
        self._names = param_to_name_mapping
        self._limits = list(bucket_bytes_cap_list) or [first_bucket_bytes_cap, bucket_bytes_cap]
        self._reduce_dtype = None if reduce_dtype is None else str(reduce_dtype).removeprefix("torch.")
        self._first_buckets = [list(bucket) for bucket in bucket_indices]
        self._gradients = _gradients_of(params)(params, gradient_as_bucket_view)
        self._gradients.names = self._names
        self._gradients.all_are_used = not static_graph and not find_unused_parameters
        self._gradient_as_bucket_view = gradient_as_bucket_view
        self._hook: tuple[Any, Callable[[Any, GradBucket], Any]] | None = None
        self._builtin_hook: BuiltinCommHookType | None = None
        self._futures: dict[int, Any] = {}  # of a hook, by bucket
        self._post_backward_futures: list[Any] = []
        self._optimizer_in_backward = False
        self._forward_pass: tuple[Any, bool] | None = None
        self._divisor = 1
        self._divisor_sparse = 1
        self._rows: dict[str, set[int]] | None = None  # rows that may have gradients, by parameter name
        self._backward_start = 0
        self._ready_times = [0] * len(params)
        self._logger: Callable[[], Logger | None] = lambda: None
        self._native = self._connect(
            process_group, find_unused_parameters=find_unused_parameters, static_graph=static_graph
        )
        self._place()
        # The hooks of autograd must not keep the reducer alive.
        itself = weakref.ref(self)

        def ready(number: int) -> None:
            if (reducer := itself()) is not None:
                reducer._autograd_hook(number)

        if not use_python_reducer:
            self._gradients.attach(ready)

    def _connect(self, process_group: Any, **options: Any) -> _tenfold.Reducer:
        return _tenfold.Reducer(
            group_of(process_group),
            specs_of(self._gradients.params, self._sparse, self._names),
            limits=self._limits,
            first_buckets=self._first_buckets,
            reduce_dtype=self._reduce_dtype,
            **options,
        )

    def _place(self) -> None:
        self._group = self._native.group()
        self._layout = self._native.layout()
        dense = [index for index, members in enumerate(self._layout) if not self._sparse[members[0]]]
        self._last_bucket = dense[-1] if dense else -1
        self._gradients.place(self._native, self._layout)

    def __del__(self) -> None:
        if hasattr(self, "_gradients"):
            self._gradients.detach()

    # An iteration.

    def gradient(self, index: int) -> Any:
        """Returns a parameter's gradient in its bucket.

        For arrays, the caller writes the gradient there, and finds the average there after `finish`. Buckets
        move once, before the second iteration.
        """
        return self._gradients.views[index]

    def prepare_for_forward(self) -> None:
        """Starts forward. Fails if the last iteration has not been finished."""
        if self._gradients.move_before_forward:
            self._rebuild()
        self._logged(self._native.start_forward)

    def _rebuild_buckets(self) -> bool:
        """Orders buckets by when gradients became ready, once. Returns whether this call did it."""
        self._rebuild()
        return self._native.rest()

    def _rebuild(self) -> None:
        if self._logged(self._native.rebuild):
            self._place()

    def prepare_for_backward(self, outputs: Any, *, unused: Sequence[int] = ()) -> None:
        """Starts backward.

        With `find_unused_parameters`, the reducer does not wait for parameters on which no output depends.
        For arrays, the caller names them.
        """
        if unused or not self._native.finds_unused:
            self._native.prepare(list(unused))
        else:
            outputs = outputs if isinstance(outputs, list | tuple) else [outputs]
            self._native.prepare(self._gradients.unused(outputs) if outputs else [], found=True)
        self._backward_start = time.perf_counter_ns()

    def _autograd_hook(self, index: int, /) -> None:
        """Marks a parameter's gradient as ready."""
        step = self._logged(self._native.gradient, index)
        if step == "begin":
            self._begin()
            step = self._logged(self._native.gradient, index)
        if step is None:  # it only accumulates
            return
        self._ready_times[index] = time.perf_counter_ns() - self._backward_start
        if step != "counted" and self._ready(index, may_be_absent=step == "look"):
            self._gradients.when_backward_ends(self._finish)

    def _begin(self) -> None:
        self._rebuild()
        if self._gradients.are_kept():
            self._native.renew()
            self._place()
        self._divisor_sparse = self._current_divisor()
        # A hook divides what it sees, and sees no sparse gradients.
        has_hook = self._hook is not None or self._builtin_hook is not None
        self._divisor = 1 if has_hook else self._divisor_sparse
        for number in self._native.unused():
            if self._gradients.has(number):
                self._keep(number)
        self._logged(self._native.start_backward)

    def _keep(self, index: int) -> None:
        """Includes the earlier content of a gradient, although the parameter gets no new one."""
        if self._sparse[index]:
            self._native.keep_sparse(index, *self._sparse_gradient(index))
        else:
            self._gradients.load(index, self._divisor)
            self._native.keep(index)

    def _current_divisor(self) -> int:
        if self._forward_pass is not None:
            work, by_initial_size = self._forward_pass
            if not by_initial_size:
                work.wait()
                return int(work.result()[0][0])
        return self._group.size

    def _ready(self, index: int, may_be_absent: bool) -> bool:
        """Puts a gradient into its bucket. Returns whether it was the last, and autograd must finish."""
        if may_be_absent and self._gradients.is_absent(index):
            return self._logged(self._native.ready_without_gradient, index)
        if self._sparse[index]:
            return self._logged(self._native.grad_ready_sparse, index, *self._sparse_gradient(index))
        self._gradients.load(index, self._divisor)
        return self._logged(self._native.grad_ready, index)

    def _delay_all_reduce(self) -> None:
        """Ends the first backward of a static graph, in which nothing has been reduced."""
        if self._native.has_learned:
            return
        if not self._native.is_running:
            self._begin()
        for index in range(len(self._sparse)):
            if self._native.was_counted(index) or self._gradients.has(index):
                self._keep(index)
        self._finish()

    def finish(self) -> None:
        """Waits until all gradients are averaged. For PyTorch tensors, autograd calls it."""
        self._finish()

    def _finish(self) -> None:
        for future in self._post_backward_futures:
            future.wait()
        self._post_backward_futures.clear()
        self._logged(self._native.finish)
        self._forward_pass = None
        indices: Iterable[int] = range(len(self._sparse))
        if not self._gradients.all_are_used:
            indices = [index for index in indices if self._native.is_used_anywhere(index)]
        if self._optimizer_in_backward:
            indices = [index for index in indices if self._gradients.has(index)]
        self._gradients.store(indices, self._native)

    def _logged(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except Exception as error:
            if (logger := self._logger()) is not None:
                logger.set_error_and_log(str(error))
            raise

    def _check_reducer_finalized(self) -> None:
        if self._native.is_running:
            raise RuntimeError("the last backward has not made all gradients ready, and was not finished")

    def _set_manual_finalization_required(self, required: bool) -> None:
        self._native.set_manual(required)

    def _should_finalize_after_backward(self) -> bool:
        return self._native.is_manual and self._native.learns

    def _finalize_backward_manual(self) -> None:
        if not self._native.is_manual:
            raise RuntimeError("finalize_backward() needs require_manual_backward_finalization to be set")
        if not self._native.is_running:
            raise RuntimeError("there is no gradient reduction to finalize")
        self._finish()

    # Static graphs, and ranks with different numbers of batches.

    def _set_static_graph(self) -> None:
        if self._logged(self._native.set_static_graph):
            self._gradients.all_are_used = False

    def _ddp_graph_static(self) -> bool:
        """Whether the graph has been static so far."""
        return self._native.seems_static

    def _set_forward_pass_work_handle(self, work: Any, use_static_world_size: bool, /) -> None:
        self._forward_pass = (work, use_static_world_size)

    def _take_part(self) -> None:
        """Takes part in an iteration of the other ranks with zeros, because this rank has no data left."""
        self._rebuild_buckets()
        with self._gradients.kept():
            self._logged(self._native.take_part)

    def _push_all_rebuilt_params(self) -> None:
        """Does nothing: rank 0 alone decides the order of buckets."""

    def _get_zeros_like_grad_buckets(self) -> list[GradBucket]:
        return [
            self._bucket(index, self._gradients.zeros(index))
            for index, members in enumerate(self._layout)
            if not self._sparse[members[0]]
        ]

    def _get_local_used_map(self) -> Any:
        used = set(self._native.used())
        return self._gradients.used_map([int(number in used) for number in range(len(self._sparse))])

    # Hooks.

    def _bucket(self, index: int, flat: Any) -> GradBucket:
        parts = [
            (self._gradients.params[number], *self._gradients.places[number][1:])
            for number in self._layout[index]
        ]
        return GradBucket(index, index == self._last_bucket, flat, parts)

    def _register_hook(self, state: Any, hook: Callable[[Any, GradBucket], Any]) -> None:
        self._check_no_hook()
        if self._reduce_dtype is not None:
            raise RuntimeError(
                f"gradients are reduced as {self._reduce_dtype} here (`mixed_precision`, `reduce_dtype`), "
                "which cannot be combined with a communication hook; convert in the hook instead"
            )
        itself = weakref.ref(self)

        def launch(index: int) -> None:
            reducer = itself()
            assert reducer is not None, "the reducer calls this"
            bucket = reducer._bucket(index, reducer._gradients.flats[index])
            future = hook(state, bucket)
            if not callable(getattr(future, "wait", None)):
                raise RuntimeError(
                    "DDP communication hook's callback must return a torch.futures.Future object, or one "
                    f"of tenfold's; this one returned a {type(future).__name__}"
                )
            reducer._futures[index] = future

        def land(index: int) -> None:
            reducer = itself()
            assert reducer is not None, "the reducer calls this"
            result = reducer._futures.pop(index).wait()
            if isinstance(result, list | tuple):
                result = result[0]
            reducer._gradients.put_result(index, result)

        self._native.set_hook(getattr(hook, "__qualname__", type(hook).__name__), launch, land)
        self._hook = (state, hook)

    def _register_builtin_hook(self, kind: BuiltinCommHookType) -> None:
        self._check_no_hook()
        names = {
            BuiltinCommHookType.ALLREDUCE: "all_reduce",
            BuiltinCommHookType.FP16_COMPRESS: "fp16_compress",
        }
        self._native.set_builtin_hook(names[kind])
        self._builtin_hook = kind

    def _check_no_hook(self) -> None:
        if self._hook is not None or self._builtin_hook is not None:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")

    def _run_comm_hook(self, bucket: GradBucket, /) -> Any:
        """Reduces a bucket. Returns a future of its content."""
        if self._hook is not None:
            state, hook = self._hook
            return hook(state, bucket)
        return self._run_allreduce_hook(bucket)

    def _run_allreduce_hook(self, bucket: GradBucket, /) -> Any:
        """Sums a bucket over all ranks, also from within a hook. The hook is responsible for dividing."""
        work = self._group.all_reduce(bucket.buffer(), "sum", async_op=True)
        return self._gradients.future(work, bucket.buffer())

    def _install_post_backward_futures(self, futures: Sequence[Any], /) -> None:
        """Makes the end of backward wait for these futures."""
        self._post_backward_futures += futures

    def _set_optimizer_in_backward(self) -> None:
        """Says that a hook steps the optimizer and removes gradients, which must not reappear."""
        self._optimizer_in_backward = True

    # Other methods of c10d.

    def set_logger(self, logger: "Logger", /) -> None:
        """Reports errors to a logger. Does not keep the logger alive."""
        self._logger = weakref.ref(logger)

    def get_backward_stats(self) -> list[int]:
        """Returns when each parameter's gradient was ready, in nanoseconds since backward started."""
        return list(self._ready_times)

    def _remove_autograd_hooks(self) -> None:
        self._gradients.detach()

    def _reset_state(self) -> None:
        self._native.reset()
        self._futures.clear()

    def _update_process_group(self, process_group: Any, /) -> None:
        """Continues with another group, and with the initial buckets."""
        self._native = self._connect(process_group, successor_of=self._native)
        self._place()
        if self._hook is not None:
            hook, self._hook = self._hook, None
            self._register_hook(*hook)
        if self._builtin_hook is not None:
            builtin, self._builtin_hook = self._builtin_hook, None
            self._register_builtin_hook(builtin)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Does nothing: every iteration is measured, at a negligible cost."""
        if sample_rate < 1:
            raise ValueError(f"the sample rate of DDP's logging must be at least 1, not {sample_rate}")

    def _set_mixed_precision_param_dtype(self, dtype: Any, /) -> None:
        """Accepts gradients in this dtype, and converts them as they are copied in."""
        self._gradients.narrow_dtype = dtype

    def _set_sparse_metadata(self, metadata: Mapping[str, Any], /) -> None:
        """Sets which rows of each sparse parameter may have gradients, by the name of the parameter.

        c10d then sends values without their rows. tenfold always sends the rows, so the average is the same.
        A gradient with other rows is an error, and so is a parameter that is not in `metadata`.
        """
        self._rows = {name: {int(row) for row in rows} for name, rows in metadata.items()}

    def _sparse_gradient(self, index: int) -> tuple[list[int], Any]:
        rows, values = self._gradients.sparse(index, self._divisor_sparse)
        if self._rows is not None and rows:
            name = self._names.get(index)
            if name is None:
                raise RuntimeError(f"No parameter names were found: parameter {index} has none")
            if name not in self._rows:
                raise RuntimeError(f"param: {name} not found in sparse metadata")
            if unknown := sorted(set(rows) - self._rows[name]):
                raise RuntimeError(
                    f"the gradient of {name} has rows {unknown}, which are not in its metadata"
                )
        return rows, values

    def __repr__(self) -> str:
        return repr(self._native)


def _gradients_of(params: Sequence[Any]) -> type[gradients.Gradients]:
    if params and is_torch(params[0]):
        from tenfold.torch.gradients import Gradients

        return Gradients
    return gradients.Gradients


def specs_of(params: Sequence[Any], sparse: Sequence[bool], names: Mapping[int, str]) -> list[gradients.Spec]:
    """Describes parameters for the extension."""
    if len(sparse) != len(params):
        raise ValueError(f"there are {len(params)} tensors, but {len(sparse)} flags for sparse ones")
    spec = _gradients_of(params).spec
    return [spec(param, names.get(i, f"params[{i}]"), sparse[i]) for i, param in enumerate(params)]


def group_of(process_group: Any) -> _tenfold.Group:
    """Returns the extension's group of a group of c10d, tenfold or PyTorch."""
    if isinstance(process_group, Group):
        return process_group._inner
    backend = getattr(process_group, "_backend", None)
    if hasattr(backend, "group"):  # PyTorch's group of the plug-in
        return backend.group
    if callable(backend):
        return backend().group()
    from tenfold.torch.memory import backend_of

    return backend_of(process_group).group
