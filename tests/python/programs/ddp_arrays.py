"""c10d's classes of DDP on arrays of NumPy's, without PyTorch: runs every case and says how it went.

A case is a function that every rank calls with a group of its own; ranks are threads of this process. What
they return, or the error of each, is written as JSON: {case: [outcome of rank 0, …]}.
"""

import json
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tenfold
from tenfold.c10d import ProcessGroup, Reducer

WORLD = 3

Case = Callable[[ProcessGroup], Any]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def weights() -> list[np.ndarray]:
    return [np.ones((4, 5), np.float32), np.ones(5, np.float64), np.ones((2, 3), np.float32)]


def reducer_of(
    group: ProcessGroup, params: list[np.ndarray], limits: tuple[int, ...] = (64,), **options: Any
) -> Reducer:
    buckets, sizes = tenfold.c10d._compute_bucket_assignment_by_size(params, list(limits))
    return Reducer(params, buckets, sizes, group, **options)


def write(
    reducer: Reducer, params: list[np.ndarray], rank: int, step: int, skip: tuple[int, ...] = ()
) -> None:
    """One backward, from the last parameter to the first."""
    for number in reversed(range(len(params))):
        if number not in skip:
            gradient = reducer.gradient(number)
            gradient[...] = np.arange(gradient.size).reshape(gradient.shape) * (rank + 1) + number + step
            reducer._autograd_hook(number)


def expected(params: list[np.ndarray], number: int, step: int, world: int = WORLD) -> np.ndarray:
    """The average of what `write` wrote."""
    of_ranks = [
        np.arange(params[number].size).reshape(params[number].shape) * (rank + 1) + number + step
        for rank in range(world)
    ]
    return np.mean(of_ranks, axis=0)


@case
def averages_of_several_steps(group: ProcessGroup) -> Any:
    params = weights()
    reducer = reducer_of(group, params)
    apart = []
    for step in range(4):
        reducer.prepare_for_forward()
        reducer.prepare_for_backward([])
        write(reducer, params, group.rank(), step)
        reducer.finish()
        for number in range(len(params)):
            found = reducer.gradient(number)
            assert found.dtype == params[number].dtype
            apart.append(float(np.abs(found - expected(params, number, step)).max()))
    return max(apart)


@case
def buckets_are_cut_along_the_order_of_gradients(group: ProcessGroup) -> Any:
    params = [np.zeros(16, np.float32) for _ in range(4)]
    reducer = Reducer(params, [[0, 1, 2, 3]], [2**20], group, bucket_bytes_cap=128, first_bucket_bytes_cap=64)
    logger = tenfold.c10d.Logger(reducer)
    rebuilt = []
    for step in range(3):
        rebuilt.append(reducer._rebuild_buckets())
        reducer.prepare_for_backward([])
        for number in [2, 0, 3, 1]:
            reducer.gradient(number)[...] = group.rank() + step
            reducer._autograd_hook(number)
        reducer.finish()
    data = logger._get_ddp_logging_data()
    values = [reducer.gradient(number).tolist() for number in range(4)]
    assert values == [[group.size() / 2 - 0.5 + 2] * 16] * 4
    return rebuilt, data.strs_map["rebuilt_per_bucket_param_indices"], data.strs_map["rebuilt_bucket_sizes"]


@case
def unused_parameters_are_named_by_the_caller(group: ProcessGroup) -> Any:
    """The first is used by rank 0 alone, the last by no rank."""
    params = [np.zeros(4, np.float32) for _ in range(3)]
    reducer = reducer_of(group, params, find_unused_parameters=True)
    unused = [2] if group.rank() == 0 else [0, 2]
    for _ in range(2):
        for number in range(3):
            reducer.gradient(number)[...] = 0
        reducer.prepare_for_backward([], unused=unused)
        for number in {0, 1, 2} - set(unused):
            reducer.gradient(number)[...] = 3.0
            reducer._autograd_hook(number)
        reducer.finish()
    return [reducer.gradient(number).tolist() for number in range(3)]


@case
def a_static_graph_learns_from_its_first_iteration(group: ProcessGroup) -> Any:
    params = [np.zeros(4, np.float32) for _ in range(3)]
    reducer = reducer_of(group, params)
    reducer._set_static_graph()
    seen = []
    for step in range(3):
        reducer.prepare_for_backward([])
        for number in [1, 0]:  # the last one is never used
            reducer.gradient(number)[...] = step + group.rank()
            reducer._autograd_hook(number)
        if step == 0:
            reducer._delay_all_reduce()
        else:
            reducer.finish()
        seen.append([reducer.gradient(number).tolist() for number in range(2)])
    return seen


@case
def a_hook_reduces_buckets(group: ProcessGroup) -> Any:
    params = weights()
    reducer = reducer_of(group, params)
    shown: list[Any] = []

    def hook(state: Any, bucket: tenfold.c10d.GradBucket) -> Any:
        shown.append(
            [
                state,
                bucket.index(),
                bucket.is_last(),
                bucket.buffer().size,
                [list(g.shape) for g in bucket.gradients()],
                [p is params[n] for p in bucket.parameters() for n in range(3) if p.shape == params[n].shape],
            ]
        )
        return group.allreduce([bucket.buffer()]).get_future()

    tenfold.c10d._register_comm_hook(reducer, "state", hook)
    reducer.prepare_for_backward([])
    write(reducer, params, group.rank(), 0)
    reducer.finish()
    for number in range(3):
        assert np.allclose(reducer.gradient(number), expected(params, number, 0) * WORLD), (
            "only the caller divides"
        )
    return shown


@case
def a_hook_may_return_other_memory(group: ProcessGroup) -> Any:
    params = weights()
    reducer = reducer_of(group, params)

    def hook(_: Any, bucket: tenfold.c10d.GradBucket) -> Any:
        copy = bucket.buffer() / group.size()
        return group.allreduce([copy]).get_future().then(lambda future: future.value()[0])

    tenfold.c10d._register_comm_hook(reducer, None, hook)
    reducer.prepare_for_backward([])
    write(reducer, params, group.rank(), 0)
    reducer.finish()
    return all(np.allclose(reducer.gradient(n), expected(params, n, 0)) for n in range(3))


def builtin(group: ProcessGroup, kind: tenfold.c10d.BuiltinCommHookType) -> Any:
    """How far the average of thirds is off, relatively: they have no end in binary."""
    params = [np.zeros(50, np.float32), np.zeros(20, np.float64)]
    reducer = reducer_of(group, params)
    tenfold.c10d._register_builtin_comm_hook(reducer, kind)
    reducer.prepare_for_backward([])
    for number in (1, 0):
        reducer.gradient(number)[...] = (group.rank() + 1) / 3
        reducer._autograd_hook(number)
    reducer.finish()
    right = sum(range(1, WORLD + 1)) / 3 / WORLD
    return float(max(np.abs(reducer.gradient(number) / right - 1).max() for number in range(2)))


@case
def the_builtin_all_reduce(group: ProcessGroup) -> Any:
    return builtin(group, tenfold.c10d.BuiltinCommHookType.ALLREDUCE)


@case
def the_builtin_fp16(group: ProcessGroup) -> Any:
    return builtin(group, tenfold.c10d.BuiltinCommHookType.FP16_COMPRESS)


@case
def the_numbers_of_builtin_hooks(group: ProcessGroup) -> Any:
    kinds = tenfold.c10d.BuiltinCommHookType
    return [int(kind) for kind in (kinds.ALLREDUCE, kinds.FP16_COMPRESS)]


@case
def the_log(group: ProcessGroup) -> Any:
    params = weights()
    reducer = reducer_of(group, params)
    logger = tenfold.c10d.Logger(reducer)
    reducer.set_logger(logger)
    logger.set_construction_data_and_log("Model", [], -1, False, False, False)
    for step in range(2):
        reducer.prepare_for_forward()
        reducer.prepare_for_backward([])
        write(reducer, params, group.rank(), step)
        reducer.finish()
    data = logger._get_ddp_logging_data()
    names = ["module_name", "world_size", "rank", "num_parameter_tensors", "total_parameter_size_bytes"]
    everything = {**data.strs_map, **data.ints_map}
    assert everything["backward_comm_time"] > 0
    return [everything[name] for name in names]


@case
def a_parameter_that_is_ready_twice(group: ProcessGroup) -> Any:
    params = weights()
    reducer = reducer_of(group, params, param_to_name_mapping={2: "the last"})
    reducer.prepare_for_backward([])
    reducer._autograd_hook(2)
    reducer._autograd_hook(2)


@case
def parameters_that_are_missing(group: ProcessGroup) -> Any:
    params = weights()
    reducer = reducer_of(group, params, param_to_name_mapping={0: "the first"})
    reducer.prepare_for_backward([])
    write(reducer, params, group.rank(), 0, skip=(0,) if group.rank() == 1 else ())
    reducer.finish()


@case
def parameters_of_different_shapes(group: ProcessGroup) -> Any:
    params = weights()
    if group.rank() == 2:
        params[1] = np.ones(6)
    tenfold.c10d._verify_params_across_processes(group, params)


@case
def parameters_of_different_numbers(group: ProcessGroup) -> Any:
    tenfold.c10d._verify_params_across_processes(group, weights()[: 2 + group.rank() % 2])


@case
def parameters_that_are_alike(group: ProcessGroup) -> Any:
    tenfold.c10d._verify_params_across_processes(group, weights())
    logger = tenfold.c10d.Logger(reducer_of(group, weights()))
    tenfold.c10d._verify_params_across_processes(group, weights(), logger)
    return logger._get_ddp_logging_data().ints_map.get("has_error", 0)


@case
def a_coalesced_broadcast(group: ProcessGroup) -> Any:
    """Of several dtypes, an empty array, one that is not contiguous, in pieces of any size, from any rank."""
    for root in range(group.size()):
        for size in [1, 100, 250 * 1024 * 1024]:
            own = [
                np.full((3, 4), group.rank(), np.float32),
                np.full(7, group.rank(), np.int64),
                np.zeros(0, np.float64),
                np.full((4, 6), group.rank(), np.float64)[:, ::2],
                np.full(300, group.rank(), np.float32),
            ]
            tenfold.c10d._broadcast_coalesced(group, own, size, root)
            assert all((array == root).all() for array in own), f"root {root}, pieces of {size}"
    return "alike"


def run(function: Case) -> list[Any]:
    store = tenfold.HashStore()

    def be_rank(rank: int) -> Any:
        group = ProcessGroup(tenfold.PrefixStore(function.__name__, store), rank, WORLD)
        try:
            return function(group)
        except Exception as error:
            return {
                "error": [each.__name__ for each in type(error).__mro__],
                "text": str(error),
                "trace": traceback.format_exc(),
            }

    with ThreadPoolExecutor(WORLD) as threads:
        return list(threads.map(be_rank, range(WORLD)))


def main() -> None:
    outcomes = {}
    for name, function in CASES.items():
        outcomes[name] = run(function)
    assert "torch" not in sys.modules
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
