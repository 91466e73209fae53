"""The package as its users have it without PyTorch: `package_ranks.py CASE RANK FILE` is one of two ranks.

A case is a function here, named as a sentence; test_package.py runs each in two processes that meet at FILE.
"""

import array
import os
import sys
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta

import numpy as np
import tenfold
from tenfold import Group, ReduceOp
from tenfold.c10d import AllreduceOptions, BarrierOptions, OpType, functional

SIZE = 2
CASES: dict[str, Callable[[Group], None]] = {}


def case(function: Callable[[Group], None]) -> Callable[[Group], None]:
    CASES[function.__name__] = function
    return function


def mine(group: Group, count: int = 4) -> np.ndarray:
    return np.full(count, group.rank + 1.0)


def refused(kind: type[BaseException], words: str, call: Callable[[], object]) -> None:
    said = None
    try:
        call()
    except kind as error:
        said = str(error)
    assert said is not None, f"nothing was raised, but {kind.__name__} was expected"
    assert words in said, f"{words!r} is not in {said}"


@case
def a_group_reduces_and_moves_arrays_in_place(group: Group) -> None:
    rank, other = group.rank, 1 - group.rank
    summed = mine(group)
    assert group.all_reduce(summed) is None
    assert summed.tolist() == [3, 3, 3, 3]
    for op, expected in {"max": 2, ReduceOp.MIN: 1, "product": 2, ReduceOp.PREMUL_SUM(0.5): 1.5}.items():
        array_of_mine = mine(group)
        group.all_reduce(array_of_mine, op)
        assert array_of_mine[0] == expected
    root_only = mine(group)
    group.reduce(root_only, root=1)
    assert rank == 0 or root_only[0] == 3
    so_far = mine(group)
    assert group.scan(so_far) is None
    assert so_far.tolist() == [[1] * 4, [3] * 4][rank]
    work = group.scan(so_far, "avg", async_op=True)
    assert work is not None
    assert work.wait()
    assert so_far.tolist() == [[1] * 4, [2] * 4][rank]
    copied = mine(group)
    group.broadcast(copied, root=1)
    assert copied[0] == 2
    outputs = [np.zeros(4), np.zeros(4)]
    group.all_gather(outputs, mine(group))
    assert [output[0] for output in outputs] == [1, 2]
    whole = np.zeros(8)
    group.all_gather_into(whole, mine(group))
    assert whole.tolist() == [1] * 4 + [2] * 4
    group.gather([np.zeros(4), np.zeros(4)] if rank == 0 else None, mine(group))
    group.gather_into(whole if rank == 0 else None, mine(group))
    part = np.zeros(1)
    group.scatter(part, [np.array([5.0]), np.array([6.0])] if rank == 0 else None)
    assert part[0] == 5 + rank
    group.reduce_scatter(part, [np.array([1.0]), np.array([2.0])])
    assert part[0] == 2 * (rank + 1)
    group.reduce_scatter_into(part, np.array([1.0, 2.0]), "max")
    assert part[0] == rank + 1
    group.all_to_all_single(pair := np.zeros(2), np.array([10.0 * rank, 10.0 * rank + 1]))
    assert pair.tolist() == [rank, 10 + rank]
    outputs = [np.zeros(1), np.zeros(2)]
    group.all_to_all(outputs, [np.full(rank + 1, 7.0)] * 2)
    assert outputs[1].tolist() == [7, 7]
    if rank == 0:
        group.send(np.array([42.0]), other)
        group.send(np.array([43.0]), other, tag=1)
    else:
        assert group.recv(part, 0) == 0
        assert part[0] == 42
        assert group.recv(part, tag=1) == 0
    group.barrier()
    group.monitored_barrier(timeout=20)


@case
def any_writable_buffer_will_do(group: Group) -> None:
    numbers = array.array("d", [1.0, 2.0])
    group.all_reduce(numbers)
    assert numbers.tolist() == [2, 4]
    raw = bytearray([group.rank, 1])
    group.all_reduce(memoryview(raw), "max")
    assert raw == bytearray([1, 1])

    class OnlyDlpack:
        def __init__(self, owner: np.ndarray) -> None:
            self.owner = owner

        def __dlpack__(self, **options: object) -> object:
            return self.owner.__dlpack__()

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.owner.__dlpack_device__()

    behind = np.ones(3)
    group.all_reduce(OnlyDlpack(behind))
    assert behind.tolist() == [2, 2, 2]
    columns = np.zeros((4, 2))
    columns[:, 0] = 1
    group.all_reduce(columns[:, 0])
    assert columns.tolist() == [[2, 0]] * 4


@case
def objects_travel_by_pickle(group: Group) -> None:
    value = {"rank": group.rank, "text": "x" * group.rank * 1000}
    assert [item["rank"] for item in group.all_gather_object(value)] == [0, 1]
    gathered = group.gather_object(group.rank, root=1)
    assert gathered == ([0, 1] if group.rank == 1 else None)
    values = [1, "two"] if group.rank == 0 else [None, None]
    group.broadcast_object_list(values)
    assert values == [1, "two"]
    assert group.scatter_object_list(["a", "bbb"] if group.rank == 0 else None) == ["a", "bbb"][group.rank]
    if group.rank == 0:
        group.send_object([1, 2], 1)
        group.send_object("from anybody", 1, tag=3)
    else:
        assert group.recv_object(0) == [1, 2]
        assert group.recv_object(tag=3) == "from anybody"


@case
def a_process_group_takes_every_form_of_c10d(group: Group) -> None:
    process_group, rank = group.process_group, group.rank
    second = timedelta(seconds=20)
    for call in [
        lambda tensor: process_group.allreduce(tensor),
        lambda tensor: process_group.allreduce([tensor]),
        lambda tensor: process_group.allreduce(tensor, ReduceOp.SUM, second),
        lambda tensor: process_group.allreduce([tensor], AllreduceOptions()),
        lambda tensor: process_group.allreduce(tensors=[tensor], op="sum"),
        lambda tensor: process_group.allreduce_coalesced([tensor]),
    ]:
        tensor = mine(group)
        assert call(tensor).wait()
        assert tensor[0] == 3
    process_group.broadcast(tensor := mine(group), 1).wait()
    assert tensor[0] == 2
    for call in [
        lambda outputs: process_group.allgather(outputs, mine(group, 1)),
        lambda outputs: process_group.allgather([outputs], [mine(group, 1)]),
        lambda outputs: process_group.allgather_coalesced([[outputs[0]], [outputs[1]]], [mine(group, 1)]),
    ]:
        outputs = [np.zeros(1), np.zeros(1)]
        call(outputs).wait()
        assert [output[0] for output in outputs] == [1, 2]
    for name in ["all_gather_single", "_allgather_base"]:
        getattr(process_group, name)(whole := np.zeros(2), mine(group, 1)).wait()
        assert whole.tolist() == [1, 2]
    for name in ["all_gather_single_coalesced", "allgather_into_tensor_coalesced"]:
        getattr(process_group, name)([whole := np.zeros(2)], [mine(group, 1)]).wait()
        assert whole.tolist() == [1, 2]
    outputs = [np.zeros(1), np.zeros(1)] if rank == 0 else []
    process_group.gather(outputs, mine(group, 1), 0).wait()
    process_group.gather_single(whole := np.zeros(2), mine(group, 1)).wait()
    assert rank == 1 or (outputs[1][0] == 2 and whole[1] == 2)
    inputs = [np.array([1.0]), np.array([2.0])]
    process_group.scatter(part := np.zeros(1), inputs if rank == 0 else [], 0).wait()
    assert part[0] == rank + 1
    for call in [
        lambda output: process_group.reduce_scatter(output, inputs),
        lambda output: process_group.reduce_scatter([output], [inputs]),
        lambda output: process_group.reduce_scatter_single(output, np.array([1.0, 2.0])),
        lambda output: process_group._reduce_scatter_base(output, np.array([1.0, 2.0])),
        lambda output: process_group.reduce_scatter_tensor_coalesced([output], [np.array([1.0, 2.0])]),
    ]:
        call(part := np.zeros(1)).wait()
        assert part[0] == 2 * (rank + 1)
    process_group.alltoall_base(pair := np.zeros(2), np.array([rank, rank + 2.0]), [], []).wait()
    assert pair.tolist() == [2 * rank, 2 * rank + 1]
    process_group.alltoall([np.zeros(1), np.zeros(1)], inputs).wait()
    process_group.reduce(tensor := mine(group), 0).wait()
    assert rank == 1 or tensor[0] == 3
    if rank == 0:
        work = process_group.recv_anysource([tensor], 3)
        work.wait()
        assert work.source_rank() == work._source_rank() == 1
        process_group.recv([tensor], 1, 4).wait()
    else:
        process_group.send([tensor], 0, 3).wait()
        process_group.send([tensor], 0, 4).wait()
    for call in [
        process_group.barrier,
        lambda: process_group.barrier(opts=BarrierOptions()),
        lambda: process_group.barrier(second),
    ]:
        call().wait()
    process_group.monitored_barrier(second, wait_all_ranks=True)
    refused(TypeError, "allreduce(tensors, opts=...)", lambda: process_group.allreduce("text"))
    refused(TypeError, "but was given (int)", lambda: process_group.barrier(3))


@case
def operations_can_be_coalesced_and_watched(group: Group) -> None:
    process_group = group.process_group
    process_group._start_coalescing("cpu")
    first, second = mine(group), mine(group, 2)
    process_group.allreduce(first)
    process_group.allreduce(second)
    work = process_group._end_coalescing("cpu")
    future = work.get_future()
    work.wait()
    assert future.done()
    assert [tensor is mine for tensor, mine in zip(future.value(), [first, second], strict=True)] == [
        True,
        True,
    ]
    assert first[0] == second[0] == 3
    infos: list = []
    process_group._register_on_completion_hook(infos.append)
    before: list = []
    after: list = []
    process_group.register_pre_hook(7, before.append)
    process_group.register_post_hook(7, after.append)
    process_group.all_gather_single(np.zeros(2), mine(group, 1)).wait()
    process_group._wait_for_pending_works()
    assert [info.op_type for info in infos] == [OpType._ALLGATHER_BASE]
    assert [args.name.name for args in before] == [args.name.name for args in after] == ["ALLGATHER_BASE"]
    assert before[0].op_id == after[0].op_id
    process_group.unregister_pre_hook(7)
    process_group.barrier().wait()
    assert (len(before), len(after)) == (1, 2)


@case
def groups_split_and_merge(group: Group) -> None:
    process_group = group.process_group
    reversed_ranks = process_group.split_group([1, 0], group_desc="the other way round")
    assert (reversed_ranks.rank(), reversed_ranks.size()) == (1 - group.rank, 2)
    assert reversed_ranks.group_desc == "the other way round"
    reversed_ranks.broadcast(tensor := mine(group), 0).wait()
    assert tensor[0] == 2
    alone = process_group.split_group([1])
    assert (alone is None) == (group.rank == 0)
    part = group.split(colour=group.rank, name="alone")
    assert (part.rank, part.size) == (0, 1)
    assert (group.subgroup([0], name="first") is None) == (group.rank == 1)


@case
def futures_lead_to_callbacks_that_may_communicate(group: Group) -> None:
    process_group = group.process_group

    def again(depth: int, future: tenfold.Future) -> float:
        if depth == 0:
            return future.value()[0][0]
        return (
            process_group.allreduce(future.value()[0]).get_future().then(lambda f: again(depth - 1, f)).wait()
        )

    tensor = mine(group)
    outcome = process_group.allreduce(tensor).get_future().then(lambda future: again(4, future))
    assert outcome.wait() == 3 * 2**4
    failing = process_group.allreduce(mine(group)).get_future().then(lambda future: 1 / 0)
    refused(ZeroDivisionError, "division", failing.wait)
    assert (
        process_group.allreduce(mine(group)).get_future_result().wait()
        == tenfold.c10d.WorkResult.SUCCESS.value
    )


@case
def functional_collectives_leave_their_arguments_alone(group: Group) -> None:
    rank = group.rank
    table = np.arange(4.0).reshape(2, 2) + 10 * rank
    kept = table.copy()
    both = [np.arange(4.0).reshape(2, 2), np.arange(4.0).reshape(2, 2) + 10]
    total = both[0] + both[1]
    assert np.array_equal(functional.all_reduce(table, "sum", group), total)
    assert np.array_equal(functional.all_reduce_coalesced([table, table], "max", group)[1], both[1])
    assert np.array_equal(functional.broadcast(table, 1, group), both[1])
    for dim in [0, 1]:
        assert np.array_equal(functional.all_gather_tensor(table, dim, group), np.concatenate(both, dim))
        mine_of_total = np.split(total, 2, dim)[rank]
        assert np.array_equal(functional.reduce_scatter_tensor(table, "sum", dim, group), mine_of_total)
    assert np.array_equal(functional.permute_tensor(table, [1, 0], group), both[1 - rank])
    gathered = functional.all_gather_into_tensor_coalesced([table], group)[0]
    assert np.array_equal(gathered, np.concatenate(both))
    rows = functional.all_to_all_single(table, [1, 1], [1, 1], group, wait=False)
    assert tenfold.c10d._get_work_registry_size() == 1
    assert np.array_equal(functional.wait_tensor(rows), np.stack([both[0][rank], both[1][rank]]))
    assert tenfold.c10d._get_work_registry_size() == 0
    tenfold.c10d._register_process_group("by name", group.process_group)
    assert functional.all_reduce(table, "sum", "by name")[0, 0] == 10
    tenfold.c10d._unregister_all_process_groups()
    assert np.array_equal(table, kept)


@case
def tensors_are_broadcast_in_bunches(group: Group) -> None:
    tensors = [np.full(3, float(group.rank)), np.full(5, group.rank), bytearray([group.rank] * 7)]
    tenfold.c10d._broadcast_coalesced(group.process_group, tensors, 40, 1)
    assert tensors[0][0] == tensors[1][4] == tensors[2][6] == 1


@case
def several_arrays_of_a_rank_are_as_those_of_several_ranks(group: Group) -> None:
    process_group = group.process_group
    first, second = mine(group), 10 * mine(group)
    process_group.allreduce([first, second]).wait()
    assert first.tolist() == second.tolist() == [33.0] * 4
    options = tenfold.c10d.BroadcastOptions()
    options.rootRank, options.rootTensor = 1, 1
    arrays = [mine(group), 10 * mine(group), 100 * mine(group)]
    process_group.broadcast(arrays, options).wait()
    assert [array.tolist() for array in arrays] == [[20.0] * 4] * 3
    outputs = [[np.zeros(2) for _ in range(4)] for _ in range(2)]
    process_group.allgather(outputs, [mine(group, 2), 10 * mine(group, 2)]).wait()
    assert [[array[0] for array in each] for each in outputs] == [[1.0, 10.0, 2.0, 20.0]] * 2


@case
def wrong_arguments_are_named_before_anything_is_sent(group: Group) -> None:
    error = tenfold.DistArgumentError
    read_only = np.ones(3)
    read_only.flags.writeable = False
    refused(error, "tensor is read-only", lambda: group.all_reduce(read_only))
    refused(TypeError, "tensor must be a tensor", lambda: group.all_reduce(3))
    refused(ValueError, "nonsense", lambda: group.all_reduce(np.ones(1), "nonsense"))
    refused(
        ValueError, "PREMUL_SUM needs a factor", lambda: group.all_reduce(np.ones(1), ReduceOp.PREMUL_SUM)
    )
    process_group = group.process_group
    refused(error, "one element", lambda: process_group.reduce([np.ones(1), np.ones(1)]))
    refused(error, "requires non-empty tensor list", lambda: process_group.allreduce([]))
    refused(error, "has 2 elements", lambda: process_group.allreduce([np.ones(1), np.ones(2)]))
    refused(error, "same length", lambda: process_group.allgather([], [np.ones(1)]))
    refused(error, "at index 0", lambda: process_group.allgather([[np.ones(1)]] * 2, [np.ones(1)] * 2))
    refused(error, "invalid root rank: -1", lambda: process_group.broadcast(np.ones(1), -1))
    refused(error, "rank -1 is out of range", lambda: process_group.send([np.ones(1)], -1, 0))
    options = tenfold.c10d.BroadcastOptions()
    options.rootTensor = 2
    refused(error, "invalid root tensor: 2", lambda: process_group.broadcast([np.ones(1)] * 2, options))
    not_root = 1 - group.rank
    outputs = [np.zeros(1), np.zeros(1)]
    refused(error, "must be empty", lambda: process_group.gather(outputs, np.ones(1), not_root))
    refused(RuntimeError, "does not support new_window", process_group.new_window)
    group.barrier()


@case
def arrays_are_free_once_their_operation_is_over(group: Group) -> None:
    tensor = mine(group)
    alive = weakref.ref(tensor)
    work = group.all_reduce(tensor, async_op=True)
    future = work.get_future()
    future.result(timeout=20)
    del tensor, work, future
    group.barrier()
    # The pool's thread may be in the middle of letting go; whatever it does next makes it finish that.
    group.all_reduce(np.ones(1), async_op=True).get_future().result(timeout=20)
    assert alive() is None


@case
def a_fork_is_told_that_the_group_is_not_its_own(group: Group) -> None:
    work = group.all_reduce(mine(group), async_op=True)
    work.get_future().result(timeout=20)
    child = os.fork()
    if child == 0:
        refused(RuntimeError, "this is its forked child", lambda: group.all_reduce(np.ones(1)))
        refused(KeyError, "lost", lambda: fail_inside(group))
        group.close()
        alone = tenfold.init(store=tenfold.HashStore(), rank=0, world_size=1)
        alone.all_reduce(np.ones(1), async_op=True).get_future().result(timeout=20)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    group.barrier()


@case
def a_failed_block_tells_the_other_rank_why(group: Group) -> None:
    why = "KeyError on rank 0: 'lost'"
    process_group = group.process_group
    store = process_group.get_group_store()
    if group.rank == 0:
        store.wait(["receiving"])
        refused(KeyError, "lost", lambda: fail_inside(group))
        refused(tenfold.DistBackendError, why, group.barrier)
        store.wait(["told"])
        group.close()
        refused(RuntimeError, "shut down", group.barrier)
        assert repr(group) == "Group(closed)"
    else:
        work = group.recv(np.ones(1), 0, async_op=True)
        future = work.get_future()
        store.set("receiving", "")
        refused(tenfold.DistBackendError, why, work.wait)
        assert future.done()
        assert why in str(future.exception())
        assert why in str(work.exception())
        assert work.is_completed()
        assert not work.is_success()
        assert work.get_future_result().wait() == tenfold.c10d.WorkResult.COMM_ERROR.value
        assert process_group.get_backend("cpu").get_error() is not tenfold.c10d.ErrorType.SUCCESS
        store.set("told", "")


@case
def a_wait_that_was_too_short_lets_the_operation_go_on(group: Group) -> None:
    store = group.process_group.get_group_store()
    if group.rank == 0:
        received = np.zeros(1)
        work = group.process_group.recv([received], 1, 0)
        future = work.get_future()
        refused(tenfold.DistTimeoutError, "", lambda: work.wait(timedelta(milliseconds=1)))
        assert not work.is_completed()
        assert not future.done()
        refused(RuntimeError, "under way", work.result)
        store.set("was too short", "")
        assert work.wait()
        assert (received[0], future.value()[0] is received) == (7, True)
        assert work._get_op_type() == OpType.RECV.value
        assert work.timeout == timedelta(seconds=60)
    else:
        store.wait(["was too short"])
        group.send(np.array([7.0]), 0)


@case
def other_threads_run_while_one_waits(group: Group) -> None:
    word = np.zeros(1)
    if group.rank == 1:
        group.recv(word, 0)
        group.send(np.ones(1), 0)
        return
    waiting = threading.Event()

    def let_the_other_rank_answer() -> None:
        waiting.wait()
        group.send(np.ones(1), 1)

    thread = threading.Thread(target=let_the_other_rank_answer)
    thread.start()
    waiting.set()
    group.recv(word, 1)  # if it kept the interpreter's lock, it would wait forever
    thread.join()
    assert word[0] == 1


def fail_inside(group: Group) -> None:
    with group:
        raise KeyError("lost")


def main() -> None:
    name, rank, path = sys.argv[1:]
    store = tenfold.FileStore(path, SIZE)
    group = tenfold.init(store=store, rank=int(rank), world_size=SIZE, timeout=60)
    CASES[name](group)
    assert "torch" not in sys.modules, "something imported PyTorch"


if __name__ == "__main__":
    main()
