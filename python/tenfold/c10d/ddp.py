"""c10d's names around `Reducer`: `Logger`, and functions that make buckets and set hooks."""

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tenfold import _tenfold
from tenfold.ddp import BuiltinCommHookType, GradBucket, Reducer, group_of, specs_of

__all__ = [
    "BuiltinCommHookType",
    "DDPLoggingData",
    "GradBucket",
    "Logger",
    "Reducer",
    "_compute_bucket_assignment_by_size",
    "_register_builtin_comm_hook",
    "_register_comm_hook",
    "_verify_params_across_processes",
    "verify_named",
]


class DDPLoggingData:
    """The data of a `Logger`, by c10d's names."""

    __slots__ = ("ints_map", "strs_map")

    def __init__(self) -> None:
        self.strs_map: dict[str, str] = {}
        self.ints_map: dict[str, int] = {}


# The names of dtypes in c10d's logs.
_NAMES_IN_C = {
    "bfloat16": "c10::BFloat16",
    "complex64": "c10::complex<float>",
    "complex128": "c10::complex<double>",
    "float16": "c10::Half",
    "float32": "float",
    "float64": "double",
}


class Logger:
    """Statistics of a reducer, by c10d's names."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = weakref.ref(reducer)
        self._data = DDPLoggingData()

    def set_construction_data_and_log(
        self,
        module_name: str,
        device_ids: Sequence[int],
        output_device: int,
        broadcast_buffers: bool,
        has_sync_bn: bool,
        static_graph: bool,
    ) -> None:
        """Records what is known when the model is wrapped."""
        reducer = self._reducer()
        strings, integers = self._data.strs_map, self._data.ints_map
        strings["module_name"] = module_name
        strings["device_ids"] = ", ".join(map(str, device_ids))
        strings["torch_distributed_debug"] = os.environ.get("TORCH_DISTRIBUTED_DEBUG", "N/A")
        strings["master_addr"] = os.environ.get("MASTER_ADDR", "N/A")
        strings["master_port"] = os.environ.get("MASTER_PORT", "N/A")
        strings["cuda_visible_devices"] = os.environ.get("CUDA_VISIBLE_DEVICES", "N/A")
        integers["output_device"] = output_device
        integers["broadcast_buffers"] = int(broadcast_buffers)
        integers["has_sync_bn"] = int(has_sync_bn)
        integers["static_graph"] = int(static_graph)
        integers["is_multi_device_module"] = 0
        if reducer is not None:
            integers["gradient_as_bucket_view"] = int(reducer._gradient_as_bucket_view)

    def set_runtime_stats_and_log(self) -> None:
        """Does nothing: every iteration is measured."""

    def set_error_and_log(self, error: str, /) -> None:
        """Records an error."""
        self._data.strs_map["error"] = error
        self._data.ints_map["has_error"] = 1

    def _set_comm_hook_name(self, comm_hook: str) -> None:
        self._data.strs_map["comm_hook"] = comm_hook

    def _set_uneven_input_join(self) -> None:
        self._data.ints_map["join_uneven_inputs"] = 1

    def _set_static_graph(self) -> None:
        self._data.ints_map["static_graph"] = 1

    def _get_ddp_logging_data(self) -> DDPLoggingData:
        data, reducer = DDPLoggingData(), self._reducer()
        if reducer is not None:
            strings, integers = reducer._native.logging_data()
            data.strs_map.update(strings)
            data.ints_map.update(integers)
            dtypes = data.strs_map["dtypes"].split(", ")
            data.strs_map["dtypes"] = ", ".join(sorted(_NAMES_IN_C.get(name, name) for name in dtypes))
            data.ints_map["can_set_static_graph"] = int(reducer._ddp_graph_static())
        data.strs_map.update(self._data.strs_map)
        data.ints_map.update(self._data.ints_map)
        return data


def _register_comm_hook(reducer: Reducer, state: Any, comm_hook: Callable[[Any, GradBucket], Any]) -> None:
    """Sets the hook that reduces buckets: `comm_hook(state, bucket)` returns a future of the content."""
    reducer._register_hook(state, comm_hook)


def _register_builtin_comm_hook(reducer: Reducer, comm_hook_type: BuiltinCommHookType) -> None:
    """Sets a hook that is written in Rust."""
    reducer._register_builtin_hook(BuiltinCommHookType(int(comm_hook_type)))


def _compute_bucket_assignment_by_size(
    tensors: Sequence[Any],
    bucket_size: Sequence[int],
    expect_sparse_gradient: Sequence[bool] = (),
    tensor_indices: Sequence[int] = (),
    logger: Logger | None = None,
) -> tuple[list[list[int]], list[int]]:
    """Returns which tensors share a bucket, and the size that closed each bucket.

    >>> import numpy
    >>> _compute_bucket_assignment_by_size([numpy.zeros(100, numpy.float32)] * 5, [500])
    ([[0, 1], [2, 3], [4]], [500, 500, 500])
    """
    if not tensors:
        raise ValueError("there are no tensors to assign to buckets")
    # `tensor_indices` numbers the tensors, which are in the wanted order.
    numbers = list(tensor_indices) or list(range(len(tensors)))
    if len(numbers) != len(tensors):
        raise ValueError(f"there are {len(tensors)} tensors and {len(numbers)} indices")
    sparse = [bool(expect_sparse_gradient) and expect_sparse_gradient[number] for number in numbers]
    order = list(range(len(tensors))) if tensor_indices else None
    buckets, limits = _tenfold.assign_by_size(specs_of(tensors, sparse, {}), list(bucket_size), order)
    return [[numbers[place] for place in bucket] for bucket in buckets], limits


def _verify_params_across_processes(
    process_group: Any, params: Sequence[Any], logger: Logger | None = None
) -> None:
    """Fails on all ranks if one has other parameters than rank 0, and names the parameter and the rank."""
    try:
        verify_named(process_group, {f"params[{number}]": param for number, param in enumerate(params)})
    except Exception as error:
        if logger is not None:
            logger.set_error_and_log(str(error))
        raise


def verify_named(process_group: Any, params: Mapping[str, Any]) -> None:
    """Does the same for parameters that have names."""
    names = dict(enumerate(params))
    specs = specs_of(list(params.values()), [False] * len(params), names)
    _tenfold.verify_params(group_of(process_group), specs)
