"""The plug-in itself: how it is found, memory in place, who sees what it does, leaving, leaks."""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import tenfold.torch
import torch
import torch.distributed as dist
from bits import plain
from operation_cases import everybody
from ranks import ENVIRONMENT, Rank, RankServer
from tenfold import _tenfold
from tenfold.torch.memory import SharedStorages

LARGE = 256 * 1024  # elements: enough for memory to be worth sharing


def ramp(me: Rank, count: int) -> torch.Tensor:
    """Of two ranks the sum is 2 * arange + 1."""
    return torch.arange(float(count)) + me.rank


def run(program: str, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A program of one rank, in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, *flags, "-c", program],
        env=ENVIRONMENT | os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


# ---------------------------------------------------------------------------------- being found

ONE_RANK = """
import sys, torch, torch.distributed as dist
dist.init_process_group({spelling!r}, store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(3)
dist.all_reduce(tensor)
group = dist.group.WORLD
print(type(group).__name__, group._get_backend(torch.device("cpu")).name(), tensor.tolist())
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("spelling", "group"),
    [
        ("tenfold", "ProcessGroup"),
        ("TENFOLD", "ProcessGroup"),
        ("cpu:tenfold", "ProcessGroup"),
        ("cpu:tenfold,cuda:gloo", "ProcessGroup"),
    ],
)
def test_the_backend_is_found_by_its_entry_point_under_every_spelling(spelling: str, group: str) -> None:
    ended = run(ONE_RANK.format(spelling=spelling))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == f"{group} tenfold [1.0, 1.0, 1.0]"


def beside_another_backend(me: Rank) -> Any:
    group = dist.new_group(backend="cpu:tenfold,cuda:gloo")
    tensor = ramp(me, 4)
    dist.all_reduce(tensor, group=group)
    kinds = {str(device): group._get_backend(device).name() for device in group._device_types}
    return plain(tensor), kinds, type(group) is dist.ProcessGroup


def test_in_a_group_of_several_devices_every_device_keeps_its_backend(ranks: RankServer) -> None:
    for outcome in ranks.run(beside_another_backend):
        tensor, kinds, is_of_pytorch = outcome.returned
        assert tensor == plain(2 * torch.arange(4.0) + 1)
        assert kinds == {"cpu": "tenfold", "cuda": "gloo"}
        assert is_of_pytorch, "a group of ours would have replaced that of the other device"


def test_errors_are_pytorchs_and_pythons_at_once(ranks: RankServer) -> None:
    for outcome in ranks.run(broadcast_from_nowhere):
        assert outcome.raised("DistBackendError")
        assert outcome.raised("ValueError")
    assert issubclass(tenfold.torch.exceptions.DistTimeoutError, dist.DistBackendError)
    assert issubclass(tenfold.torch.exceptions.DistTimeoutError, TimeoutError)
    assert issubclass(tenfold.torch.exceptions.DistStoreError, dist.DistStoreError)


def broadcast_from_nowhere(me: Rank) -> None:
    everybody()._backend.group.broadcast(torch.zeros(1), 7)


# ---------------------------------------------------------------------------------- memory in place


def reduce_in_place(me: Rank, kind: str) -> Any:
    by_pytorch = kind == "shared by PyTorch"
    tensor = torch.empty(LARGE).share_memory_() if by_pytorch else tenfold.torch.empty(LARGE)
    tensor[:] = torch.arange(LARGE, dtype=torch.float32) + me.rank
    half = tensor[LARGE // 4 : LARGE // 4 * 3]
    for _ in range(3):
        dist.all_reduce(half, dist.ReduceOp.MAX)
    dist.broadcast(half, src=1)
    gathered = torch.zeros(2 * half.numel())
    dist.all_gather_into_tensor(gathered, half)
    expected = torch.arange(LARGE // 4, LARGE // 4 * 3, dtype=torch.float32) + me.world - 1
    return torch.equal(half, expected), torch.equal(gathered, expected.repeat(2)), tensor[0].item()


@pytest.mark.smoke
@pytest.mark.parametrize("kind", ["shared by PyTorch", "made by tenfold"])
def test_tensors_in_shared_memory_give_what_others_give(kind: str, ranks: RankServer) -> None:
    for outcome in ranks.run(reduce_in_place, kind):
        assert outcome.returned == (True, True, float(outcome.rank))


def read_where_pytorch_shared(me: Rank) -> Any:
    """As `reduce_in_place`, on processors too where tenfold thinks that copies are quicker."""
    group = _tenfold.Group(me.store, me.rank, me.world, name="in place", timeout=15, read_in_place=True)
    storages = SharedStorages()
    tensor = (torch.arange(LARGE, dtype=torch.float32) + me.rank).share_memory_()
    part = tensor[1000 : LARGE - 1000]
    storages.note(group, part)
    registered = [registration is not None for _, registration in storages._known.values()]
    group.all_reduce(part, 0)
    expected = torch.arange(1000, LARGE - 1000) * me.world + sum(range(me.world))
    sums = torch.equal(part, expected.float())
    group.broadcast(part, me.world - 1)
    group.barrier()
    mapped = Path("/proc/self/maps").read_text().count("torch_")
    return registered, sums, torch.equal(part, expected.float()), mapped


def test_storages_that_pytorch_shared_are_mapped_by_the_other_rank(ranks: RankServer) -> None:
    for outcome in ranks.run(read_where_pytorch_shared):
        registered, sums, broadcast, mapped = outcome.returned
        assert registered == [True]
        assert sums
        assert broadcast
        assert mapped >= 2, "PyTorch's own mapping, and that of the other rank's"


def share_and_forget(me: Rank) -> Any:
    known = everybody()._backend.shared_storages._known
    seen = []
    for turn in range(20):
        tensor = torch.full((LARGE,), float(turn)).share_memory_()
        dist.all_reduce(tensor)
        assert tensor[-1] == turn * me.world, turn
        seen.append(len(known))
        del tensor
    return max(seen)


def test_a_storage_that_nobody_has_any_more_is_let_go(ranks: RankServer) -> None:
    for outcome in ranks.run(share_and_forget):
        assert outcome.returned <= 2


def train(me: Rank, hooked: bool, views: bool) -> Any:
    torch.manual_seed(1)
    layers = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.ReLU(), torch.nn.Linear(300, 1))
    model = torch.nn.parallel.DistributedDataParallel(layers, gradient_as_bucket_view=views)
    if hooked:
        model.register_comm_hook(None, tenfold.torch.shared_buckets_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        torch.manual_seed(10 * step + me.rank)
        optimizer.zero_grad()
        model(torch.randn(8, 300)).square().mean().backward()
        optimizer.step()
    shared = [parameter.grad.is_shared() for parameter in model.parameters()]
    return plain(torch.cat([parameter.detach().flatten() for parameter in model.parameters()])), all(shared)


@pytest.mark.parametrize("views", [False, True])
def test_the_hook_that_shares_buckets_trains_as_without_it(views: bool, ranks: RankServer) -> None:
    hooked, plainly = ranks.run(train, True, views), ranks.run(train, False, views)
    for ours, theirs in zip(hooked, plainly, strict=True):
        assert ours.returned[0] == theirs.returned[0]
        assert ours.returned[1] is views, "gradients that are views of a bucket have moved with it"


# ---------------------------------------------------------------------------------- who sees it


def record(me: Rank) -> Any:
    dist.all_reduce(torch.ones(5))
    dist.broadcast(torch.ones(7), 0)
    dist.all_reduce(torch.ones(3), async_op=True).wait()
    trace = torch._C._distributed_c10d._dump_fr_trace_json(backend="tenfold")
    return [
        (entry["profiling_name"], entry["input_sizes"], entry["state"])
        for entry in json.loads(trace)["entries"]
    ]


def configured(me: Rank) -> Any:
    """What PyTorch's flight recorder, asked by the backend's name, knows of groups and messages."""
    part = dist.new_group([0, me.world - 1], group_desc="the ends")
    if me.rank == 0:
        dist.send(torch.ones(2), me.world - 1)
    elif me.rank == me.world - 1:
        dist.recv(torch.ones(2), 0)
    dist.barrier()
    trace = json.loads(torch._C._distributed_c10d._dump_fr_trace_json(backend="tenfold"))
    groups = {config["desc"]: json.loads(config["ranks"]) for config in trace["pg_config"].values()}
    messages = [entry["profiling_name"] for entry in trace["entries"] if entry["is_p2p"]]
    me.tell(f"{me.rank} has asked")
    me.until_told(*(f"{rank} has asked" for rank in range(me.world)))
    return groups, messages, part != dist.GroupMember.NON_GROUP_MEMBER


def test_pytorchs_own_flight_recorder_knows_groups_and_messages(ranks: RankServer) -> None:
    for outcome in ranks.run(configured, world=3):
        groups, messages, is_member = outcome.returned
        assert groups["default_pg"] == [0, 1, 2]
        assert groups.get("the ends") == ([0, 2] if is_member else None)
        assert len(messages) == (1 if outcome.rank in (0, 2) else 0), messages


def test_pytorchs_own_flight_recorder_sees_every_collective(ranks: RankServer) -> None:
    for outcome in ranks.run(record):
        seen = [(name.split(":")[-1], sizes) for name, sizes, _ in outcome.returned]
        assert seen == [("all_reduce", [[5]]), ("broadcast", [[7]]), ("all_reduce", [[3]])]


def hooked_calls(me: Rank) -> Any:
    seen: list[str] = []
    everybody().register_pre_hook(1, lambda arguments: seen.append(str(arguments.name)))
    dist.all_reduce(torch.ones(2))
    dist.barrier()
    everybody().unregister_pre_hook(1)
    dist.all_reduce(torch.ones(2))
    return [name.rsplit(".", 1)[-1].lower() for name in seen]


def test_hooks_of_a_group_see_its_collectives(ranks: RankServer) -> None:
    for outcome in ranks.run(hooked_calls):
        assert outcome.returned == ["allreduce", "barrier"]


def count_calls(me: Rank) -> Any:
    from torch.distributed.tensor.debug import CommDebugMode

    mode = CommDebugMode()
    with mode:
        dist.all_reduce(torch.ones(2))
    return mode.get_total_counts()


def test_pytorchs_debug_mode_counts_collectives(ranks: RankServer) -> None:
    assert [outcome.returned for outcome in ranks.run(count_calls)] == [1, 1]


def in_detail(me: Rank) -> Any:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    group = dist.new_group()
    dist.all_reduce(tensor := ramp(me, 3), group=group)
    return plain(tensor), tenfold.c10d.get_debug_level().name


def test_it_works_in_pytorchs_most_careful_debug_level(ranks: RankServer) -> None:
    for outcome in ranks.run(in_detail):
        assert outcome.returned == (plain(2 * torch.arange(3.0) + 1), "DETAIL")


def beside_another_backend_in_detail(me: Rank) -> Any:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    group = dist.new_group(backend="cpu:tenfold,cuda:gloo")
    gc.collect()  # PyTorch's wrapper keeps what it wraps alive by half
    wrapper = group._get_backend(torch.device("cpu"))
    ours = weakref.ref(wrapper.wrapped_pg)
    shared = tenfold.torch.empty(3, group=group)
    shared[:] = ramp(me, 3)
    dist.all_reduce(shared, group=group)
    with pytest.raises(RuntimeError) as by_pytorch:
        dist.all_reduce(torch.ones(2 + me.rank), group=group)
    dist.all_reduce(again := ramp(me, 3), group=group)
    with pytest.raises(dist.DistBackendError) as by_tenfold:
        dist.all_reduce(torch.ones(2), [dist.ReduceOp.SUM, dist.ReduceOp.MAX][me.rank], group=group)
    errors = str(by_pytorch.value), str(by_tenfold.value)
    dist.destroy_process_group(group)
    del group, wrapper, by_pytorch, by_tenfold  # the tracebacks have a group in their frames
    gc.collect()
    return plain(shared), plain(again), errors, ours() is None


def test_beside_another_backend_pytorch_compares_shapes_and_tenfold_the_rest(ranks: RankServer) -> None:
    for outcome in ranks.run(beside_another_backend_in_detail):
        shared, again, (by_pytorch, by_tenfold), is_gone = outcome.returned
        assert shared == again == plain(2 * torch.arange(3.0) + 1)
        assert by_pytorch.startswith("Detected mismatch between collectives on ranks."), by_pytorch
        assert "ranks called different operations" in by_tenfold, by_tenfold
        assert "called all_reduce(max, float32 × 2) [input 2, at " in by_tenfold, by_tenfold  # noqa: RUF001
        assert is_gone, "a group that was left keeps its backend alive"


def reduce_two_at_once(me: Rank) -> Any:
    tensors = [ramp(me, 3), 10 * ramp(me, 3)]
    work = everybody().allreduce(tensors)
    work.wait()
    return [plain(tensor) for tensor in work.result()], work.is_completed()


def test_the_work_of_several_tensors_has_all_of_them(ranks: RankServer) -> None:
    for outcome in ranks.run(reduce_two_at_once):
        assert outcome.returned == ([plain(11 * (2 * torch.arange(3.0) + 1))] * 2, True)


def forget_tensor(me: Rank) -> Any:
    tensor = ramp(me, 4)
    gone = weakref.ref(tensor)
    dist.all_reduce(tensor, async_op=True).wait()
    everybody()._backend.group.sequence_number()  # the extension gives back what it kept at its next call
    del tensor
    gc.collect()
    return gone() is None


def test_a_tensor_is_let_go_when_its_operation_is_over(ranks: RankServer) -> None:
    assert [outcome.returned for outcome in ranks.run(forget_tensor)] == [True, True]


# ---------------------------------------------------------------------------------- splitting and leaving


def split(me: Rank) -> Any:
    half = dist.split_group(split_ranks=[[0, 1], [2, 3]])
    dist.all_reduce(tensor := torch.tensor([float(me.rank)]), group=half)
    return tensor.item(), half.size(), half.rank(), half.name()


def test_a_group_can_be_split(ranks: RankServer) -> None:
    returned = [outcome.returned for outcome in ranks.run(split, world=4)]
    sums, sizes, places, _ = zip(*returned, strict=True)
    assert sums == (1.0, 1.0, 5.0, 5.0)
    assert sizes == (2, 2, 2, 2)
    assert places == (0, 1, 0, 1)


def time_out(me: Rank) -> Any:
    group = dist.new_group()
    group._get_backend(torch.device("cpu")).set_timeout(timedelta(seconds=0.2))
    if me.rank == 0:
        with pytest.raises(TimeoutError) as error:
            dist.all_reduce(torch.ones(1), group=group)
        me.tell("it timed out")
        return str(error.value)
    me.until_told("it timed out")
    return None


def test_a_timeout_can_be_changed(ranks: RankServer) -> None:
    text = ranks.run(time_out)[0].returned
    assert "rank 1" in text
    assert "timeout 200.0 ms" in text, text


def be_used_after_shutdown(me: Rank) -> None:
    group = dist.new_group()
    group._get_backend(torch.device("cpu")).shutdown()
    dist.all_reduce(torch.ones(1), group=group)


def test_a_group_that_was_shut_down_says_so(ranks: RankServer) -> None:
    for outcome in ranks.run(be_used_after_shutdown):
        assert "was shut down" in outcome.error


# ---------------------------------------------------------------------------------- processes


def be_interrupted(me: Rank) -> Any:
    if me.rank == 1:
        me.until_told("interrupted")
        return None
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        dist.all_reduce(torch.ones(1))
    me.tell("interrupted")
    return "interrupted"


def test_control_c_ends_a_collective_that_waits_for_a_peer(ranks: RankServer) -> None:
    assert ranks.run(be_interrupted)[0].returned == "interrupted"


def fork_and_call(me: Rank) -> Any:
    dist.all_reduce(torch.ones(1))
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            dist.all_reduce(torch.ones(1))
            text = "it worked"
        except Exception as error:
            text = str(error)
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answers:
        text = answers.read()
    os.waitpid(child, 0)
    dist.all_reduce(tensor := ramp(me, 2))
    return text, plain(tensor)


def test_a_forked_child_is_told_that_the_group_is_its_parents_which_goes_on(ranks: RankServer) -> None:
    for outcome in ranks.run(fork_and_call):
        text, tensor = outcome.returned
        assert "fork" in text
        assert tensor == plain(2 * torch.arange(2.0) + 1)


IN_FLIGHT = """
import sys, threading, torch, torch.distributed as dist
rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("tenfold", init_method=f"file://{path}", rank=rank, world_size=2)
if rank == 0:
    work = dist.all_reduce(torch.ones(1000), async_op=True)
    work.get_future().then(lambda future: None)
    threading.Thread(target=work.wait, daemon=True).start()
    print("left", flush=True)
else:
    sys.stdin.read()
"""


def test_an_interpreter_ends_cleanly_with_work_in_flight(tmp_path: Path) -> None:
    command = [sys.executable, "-X", "dev", "-c", IN_FLIGHT]
    environment = ENVIRONMENT | os.environ
    peer = subprocess.Popen(
        [*command, "1", tmp_path / "store"], env=environment, stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        ended = subprocess.run(
            [*command, "0", tmp_path / "store"], env=environment, capture_output=True, text=True, timeout=60
        )
    finally:
        peer.communicate()
    assert ended.stdout == "left\n", ended.stderr
    assert ended.returncode == 0, ended.stderr


STRICT = """
import torch, torch.distributed as dist, tenfold.torch
dist.init_process_group("tenfold", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(3))
dist.all_reduce(torch.ones(3), async_op=True).get_future().then(lambda future: None).wait()
dist.destroy_process_group()
"""


def test_nothing_is_to_be_warned_of_in_development_mode() -> None:
    ended = run(STRICT, "-X", "dev", "-W", "error:::tenfold", "-W", "error::ResourceWarning")
    assert ended.returncode == 0, ended.stderr
    assert "Warning" not in ended.stderr


# ---------------------------------------------------------------------------------- leaks


def made_and_destroyed(count: int) -> None:
    store = dist.HashStore()
    for number in range(count):
        backend = tenfold.torch.Backend(
            dist.PrefixStore(str(number), store), 0, 1, timedelta(seconds=30), f"group {number}"
        )
        backend.group.all_reduce(torch.ones(1), 0)
        backend.shutdown()


def footprint() -> tuple[int, int, int]:
    """Descriptors, threads and kilobytes of this process."""
    gc.collect()
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    resident = int(fields["VmRSS"].split()[0])
    return len(os.listdir("/proc/self/fd")), int(fields["Threads"]), resident


def test_ten_thousand_groups_leave_nothing_behind() -> None:
    made_and_destroyed(500)
    before = footprint()
    made_and_destroyed(10_000)
    after = footprint()
    assert after[0] <= before[0], "descriptors"
    assert after[1] <= before[1], "threads"
    # A kilobyte for each would be 10 MB; PyTorch's store keeps the keys of all of them.
    assert after[2] - before[2] < 30_000, f"{after[2] - before[2]} KB for 10,000 groups"
