"""Everything that PyTorch's c10d has, compared with tenfold's by introspection: names, parameters, defaults.

Run with `-s` to see the table. What is missing or different on purpose is listed here with its reason, and a
reason without a gap is a failure, too.
"""

import ast
import enum
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import tenfold
import tenfold.torch
import torch.distributed as dist
from c10d_signatures import accepts, of_c10d, of_tenfold, shown
from tenfold.c10d import functional
from tenfold.c10d.collectives import COLLECTIVES
from torch._C import _distributed_c10d as c10d
from torch.distributed import _functional_collectives

NVIDIA = "for NVIDIA's GPUs only; tenfold works on the CPU"
GPU_MEMORY = "memory that GPUs share; tenfold's shared memory is `Group.shared_memory`"
OTHER_BACKEND = "another backend; tenfold's own is `ProcessGroupTenfold`"
PROFILER = "a title in PyTorch's profiler, which knows only operations of PyTorch's groups"
INTERNAL = "a switch or test of PyTorch's C++ runtime"

ABSENT = {
    "NCCLXStub": NVIDIA,
    "ProcessGroupNCCL": NVIDIA,
    "ProcessGroupNCCL2": NVIDIA,
    "ProcessGroupNCCLLazy": NVIDIA,
    "_is_nvshmem_available": NVIDIA,
    "_nvshmemx_cumodule_init": NVIDIA,
    "_register_external_nccl_comm": NVIDIA,
    "_unregister_external_nccl_comm": NVIDIA,
    "_DMAConnectivity": GPU_MEMORY,
    "_SymmetricMemory": GPU_MEMORY,
    "_detect_dma_connectivity": GPU_MEMORY,
    "_get_intra_node_comm_usage_counter": GPU_MEMORY,
    "Window": "one-sided access, which no backend on the CPU has; `supports_window` is False",
    "ProcessGroupGloo": OTHER_BACKEND,
    "_get_comm_profiling_name": PROFILER,
    "_set_comm_profiling_name": PROFILER,
    "_hash_tensors": INTERNAL,
    "_set_global_rank": INTERNAL,
}

DIFFERENT = {
    "TCPStore.__init__": "an extension cannot show a timedelta as a default; a test below shows it is c10d's"
}

NO_CPU_BACKEND = "no CPU backend of c10d has it either, so nothing can be compared with"
MEMORY = "memory that peers read is made by `Group.shared_memory`, or by `tenfold.torch.empty`"

# Methods that are here, with c10d's parameters, and only refuse; on tenfold's own backend.
REFUSED = {
    "_end_time_estimate": NO_CPU_BACKEND,
    "_start_time_estimate": NO_CPU_BACKEND,
    "allocate_tensor": MEMORY,
    "mem_allocator": MEMORY,
    "memory_stats": "a CPU's memory is not the backend's to count",
    "new_window": NO_CPU_BACKEND,
    "resume": "only memory of a GPU is given back and taken again",
    "suspend": "only memory of a GPU is given back and taken again",
}

# What pybind11 gives every class and enumeration.
OF_PYBIND11 = {"_pybind11_conduit_v1_", "__entries", "name", "value"}


@dataclass(frozen=True)
class Row:
    """One thing of c10d's and what became of it; `gap` is what is wrong with tenfold's, if anything is."""

    name: str
    theirs: str
    gap: str | None = None


def rows() -> Iterator[Row]:
    for name in sorted(name for name in dir(c10d) if not name.startswith("__")):
        theirs = getattr(c10d, name)
        if not hasattr(tenfold.c10d, name):
            yield Row(name, kind_of(theirs), "missing")
        elif inspect.isclass(theirs):
            yield from rows_of_class(name, theirs, getattr(tenfold.c10d, name))
        elif callable(theirs):
            yield row_of_callable(name, theirs, getattr(tenfold.c10d, name))
        else:
            ours = getattr(tenfold.c10d, name)
            yield Row(name, repr(theirs), None if ours == theirs else f"is {ours!r}")


def rows_of_class(name: str, theirs: type, ours: type) -> Iterator[Row]:
    yield Row(name, "class", None if inspect.isclass(ours) else "is not a class")
    if "__members__" in vars(theirs):
        yield from rows_of_enumeration(name, theirs, ours)
        return
    members = {key: member for key, member in vars(theirs).items() if is_public(key)}
    if not is_made_by_pybind11_only(theirs):
        members["__init__"] = theirs.__init__
    for key, member in sorted(members.items()):
        yield from rows_of_member(f"{name}.{key}", key, member, theirs, ours)


def rows_of_member(label: str, key: str, member: Any, theirs: type, ours: type) -> Iterator[Row]:
    if not hasattr(ours, key):
        yield Row(label, kind_of(member), "missing")
    elif inspect.isclass(member):
        yield from rows_of_class(label, member, getattr(ours, key))
    elif isinstance(member, property):
        static = inspect.getattr_static(ours, key)
        is_settable = not isinstance(static, property) or static.fset is not None
        gap = "cannot be set" if member.fset is not None and not is_settable else None
        yield Row(label, "property", gap)
    elif callable(getattr(theirs, key)) and not is_enum_member(getattr(theirs, key)):
        # The constructors of the extension's classes are known to the classes only.
        is_of_extension = key == "__init__" and not inspect.isfunction(ours.__init__)
        yield row_of_callable(label, getattr(theirs, key), ours if is_of_extension else getattr(ours, key))
    else:
        value = getattr(ours, key)
        yield Row(label, repr(member), None if repr(value) == repr(member) else f"is {value!r}")


def rows_of_enumeration(name: str, theirs: type, ours: type) -> Iterator[Row]:
    assert issubclass(ours, enum.Enum)
    for key, member in theirs.__members__.items():
        value = ours.__members__.get(key)
        gap = "missing" if value is None else None if int(value) == int(member) else f"is {int(value)}"
        yield Row(f"{name}.{key}", str(int(member)), gap)


def row_of_callable(label: str, theirs: Any, ours: Any) -> Row:
    wanted, offered = of_c10d(theirs), of_tenfold(ours)
    if not wanted:
        return Row(label, "callable", None if callable(ours) else "cannot be called")
    refused = [form for form in wanted if not any(accepts(offer, form) for offer in offered)]
    gap = f"{shown(refused)} is not among {shown(offered)}" if refused else None
    return Row(label, shown(wanted), gap)


def is_public(key: str) -> bool:
    return not key.startswith("__") and key not in OF_PYBIND11


def is_enum_member(value: Any) -> bool:
    return hasattr(type(value), "__members__")


def is_made_by_pybind11_only(theirs: type) -> bool:
    """Has the class no constructor of its own?"""
    return not of_c10d(theirs.__init__)


def kind_of(value: Any) -> str:
    return "class" if inspect.isclass(value) else "function" if callable(value) else "value"


def test_everything_of_c10d_is_here_or_there_is_a_reason():
    table = list(rows())
    width = max(len(row.name) for row in table)
    unexplained = []
    for row in table:
        reason = ABSENT.get(row.name) if row.gap == "missing" else DIFFERENT.get(row.name)
        verdict = "same" if row.gap is None else f"{row.gap}: {reason or 'NO REASON'}"
        print(f"{row.name:{width}}  {row.theirs}  {verdict}")
        if row.gap is not None and reason is None:
            unexplained.append(f"{row.name}: {row.gap}")
    gaps = {row.name for row in table if row.gap is not None}
    stale = sorted((set(ABSENT) | set(DIFFERENT)) - gaps)
    same = sum(row.gap is None for row in table)
    print(f"{same} of {len(table)} are the same, {len(table) - same} are not for a reason")
    assert not unexplained, "\n".join(unexplained)
    assert not stale, f"there is a reason but no gap: {stale}"


@pytest.mark.parametrize("name", COLLECTIVES)
def test_an_operation_of_the_table_is_one_of_every_class(name):
    for kind in [tenfold.c10d.ProcessGroup, tenfold.c10d.Backend, tenfold.torch.Backend]:
        assert inspect.isfunction(getattr(kind, name)), kind


def refuses(member: Any) -> bool:
    """Has it nothing but a refusal in it?"""
    code = member.fget if isinstance(member, property) else member
    if not inspect.isfunction(code):
        return False
    body = ast.parse(textwrap.dedent(inspect.getsource(code))).body[0].body
    return len(body) == 1 and isinstance(body[0], ast.Raise)


def test_what_only_refuses_is_listed_with_its_reason():
    classes = [
        tenfold.c10d.ProcessGroupTenfold,
        tenfold.c10d.ProcessGroup,
        tenfold.c10d.Reducer,
        tenfold.c10d.Logger,
    ]
    found = {
        name
        for kind in classes
        for name, _ in inspect.getmembers(kind)
        if not name.startswith("__") and refuses(inspect.getattr_static(kind, name))
    }
    assert found == set(REFUSED)


ARGUMENTS: dict[str, tuple] = {"allocate_tensor": (4,)}


@pytest.mark.parametrize("name", REFUSED)
def test_what_only_refuses_says_so(name):
    backend = tenfold.c10d.ProcessGroupTenfold(tenfold.HashStore(), 0, 1)
    named = {"dtype": None, "device": None} if name == "allocate_tensor" else {}
    with pytest.raises(RuntimeError, match="Backend tenfold does not support"):
        getattr(backend, name)(*ARGUMENTS.get(name, ()), **named)


def test_a_tcp_store_waits_as_long_as_c10ds_by_default():
    store = tenfold.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert store.timeout == dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).timeout


@pytest.mark.parametrize("name", sorted(functional.__all__))
def test_functional_collectives_take_pytorchs_arguments_in_pytorchs_order(name):
    theirs = list(inspect.signature(getattr(_functional_collectives, name)).parameters)
    ours = inspect.signature(getattr(functional, name)).parameters.values()
    positional = [parameter.name for parameter in ours if parameter.kind is not parameter.KEYWORD_ONLY]
    assert len(positional) == len([parameter for parameter in theirs if parameter != "tag"])


def test_the_exceptions_have_the_hierarchy_of_pytorchs():
    names = ["DistError", "DistBackendError", "DistNetworkError", "DistStoreError"]
    pairs = [(getattr(dist, name), getattr(tenfold.c10d, name)) for name in names]
    pairs.append((dist.QueueEmptyError, tenfold.DistQueueEmptyError))
    for their_child, our_child in pairs:
        assert issubclass(our_child, RuntimeError)
        for their_parent, our_parent in pairs:
            assert issubclass(our_child, our_parent) == issubclass(their_child, their_parent)
