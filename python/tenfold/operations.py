# ruff: noqa: N803  c10d's parameters are named in its own way
# The bodies are put there by `operation`.
# mypy: disable-error-code="empty-body"
"""Every operation of c10d, in every form in which it can be called there.

`Backend` and `ProcessGroup` share them: what differs is only what `_perform` does. Where c10d's two classes
call a parameter differently both names are taken by both, and a timeout of None or -1 ms means the group's.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, overload

from tenfold.options import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    Fields,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)
from tenfold.overloads import Reduction, Tensor, TensorLists, Tensors, operation, renamed
from tenfold.reduce_op import ReduceOp
from tenfold.work import Work

__all__ = ["Operations"]


class Operations:
    """The operations. All but `monitored_barrier` return a `Work` at once, which is to be waited for."""

    def _perform(self, name: str, arguments: list[Any], options: Fields | None) -> Any:
        """What an operation does, given the arguments of its first form."""
        raise NotImplementedError

    @overload
    def broadcast(self, tensors: Tensors, opts: BroadcastOptions = ...) -> Work: ...

    @overload
    def broadcast(self, tensor: Tensor, root: int, timeout: timedelta | None = None) -> Work: ...

    @operation
    def broadcast(self, *args: Any, **kwargs: Any) -> Work:
        """The root's elements for everybody."""

    @overload
    def allreduce(self, tensors: Tensors, opts: AllreduceOptions = ...) -> Work: ...

    @overload
    def allreduce(
        self, tensors: Tensors, op: Reduction = ReduceOp.SUM, timeout: timedelta | None = None
    ) -> Work: ...

    @overload
    def allreduce(
        self, tensor: Tensor, op: Reduction = ReduceOp.SUM, timeout: timedelta | None = None
    ) -> Work: ...

    @operation
    def allreduce(self, *args: Any, **kwargs: Any) -> Work:
        """Everybody's elements reduced, for everybody, in place."""

    @operation
    def allreduce_coalesced(self, tensors: Tensors, opts: AllreduceCoalescedOptions = ...) -> Work:
        """`allreduce` of several tensors at once."""

    @operation
    def allreduce_sparse(self, tensors: Tensors, opts: AllreduceOptions = ...) -> Work:
        """`allreduce` of sparse tensors, for backends that know them."""

    @overload
    def reduce(self, tensors: Tensors, opts: ReduceOptions = ...) -> Work: ...

    @overload
    def reduce(
        self, tensor: Tensor, root: int, op: Reduction = ReduceOp.SUM, timeout: timedelta | None = None
    ) -> Work: ...

    @operation
    def reduce(self, *args: Any, **kwargs: Any) -> Work:
        """Everybody's elements reduced, for the root; what the others' tensors hold then is undefined."""

    @overload
    def allgather(
        self, output_tensors: TensorLists, input_tensors: Tensors, opts: AllgatherOptions = ...
    ) -> Work: ...

    @overload
    def allgather(
        self, output_tensors: Tensors, input_tensor: Tensor, timeout: timedelta | None = None
    ) -> Work: ...

    @operation
    def allgather(self, *args: Any, **kwargs: Any) -> Work:
        """Everybody's tensor for everybody, in a list by rank."""

    @operation
    def all_gather_single(self, output: Tensor, input: Tensor, opts: AllgatherOptions = ...) -> Work:
        """Everybody's tensor for everybody, in one tensor one after the other."""

    _allgather_base = renamed(all_gather_single, "_allgather_base")

    @operation
    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: AllgatherOptions = ...
    ) -> Work:
        """`all_gather_single` of several tensors at once."""

    allgather_into_tensor_coalesced = renamed(all_gather_single_coalesced, "allgather_into_tensor_coalesced")

    @operation
    def allgather_coalesced(
        self, output_lists: TensorLists, input_list: Tensors, opts: AllgatherOptions = ...
    ) -> Work:
        """`allgather` of several tensors at once: for every rank a list of its tensors."""

    @overload
    def gather(
        self, output_tensors: TensorLists, input_tensors: Tensors, opts: GatherOptions = ...
    ) -> Work: ...

    @overload
    def gather(
        self, output_tensors: Tensors, input_tensor: Tensor, root: int, timeout: timedelta | None = None
    ) -> Work: ...

    @operation
    def gather(self, *args: Any, **kwargs: Any) -> Work:
        """Everybody's tensor for the root, in a list by rank; the others give no outputs."""

    @operation
    def gather_single(self, output: Tensor, input: Tensor, opts: GatherOptions = ...) -> Work:
        """Everybody's tensor for the root, in one tensor one after the other."""

    gather_into_tensor = renamed(gather_single, "gather_into_tensor")

    @overload
    def scatter(
        self, output_tensors: Tensors, input_tensors: TensorLists, opts: ScatterOptions = ...
    ) -> Work: ...

    @overload
    def scatter(
        self, output_tensor: Tensor, input_tensors: Tensors, root: int, timeout: timedelta | None = None
    ) -> Work: ...

    @operation
    def scatter(self, *args: Any, **kwargs: Any) -> Work:
        """One of the root's tensors for each rank; the others give no inputs."""

    @overload
    def reduce_scatter(
        self, output_tensors: Tensors, input_tensors: TensorLists, opts: ReduceScatterOptions = ...
    ) -> Work: ...

    @overload
    def reduce_scatter(
        self, output: Tensor, input: Tensors, op: Reduction = ReduceOp.SUM, timeout: timedelta | None = None
    ) -> Work: ...

    @overload
    def reduce_scatter(
        self,
        output_tensors: Tensor,
        input_tensor: Tensors,
        op: Reduction = ReduceOp.SUM,
        timeout: timedelta | None = None,
    ) -> Work: ...

    @operation
    def reduce_scatter(self, *args: Any, **kwargs: Any) -> Work:
        """Everybody's tensors reduced, one for each rank."""

    @operation
    def reduce_scatter_single(
        self, outputTensor: Tensor, inputTensor: Tensor, opts: ReduceScatterOptions = ...
    ) -> Work:
        """Everybody's tensor reduced, an equal part for each rank."""

    _reduce_scatter_base = renamed(reduce_scatter_single, "_reduce_scatter_base")

    @operation
    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: ReduceScatterOptions = ...
    ) -> Work:
        """`reduce_scatter_single` of several tensors at once."""

    reduce_scatter_tensor_coalesced = renamed(
        reduce_scatter_single_coalesced, "reduce_scatter_tensor_coalesced"
    )

    @overload
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: AllToAllOptions = ...,
    ) -> Work: ...

    @overload
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        timeout: timedelta | None = None,
    ) -> Work: ...

    @overload
    def all_to_all_single(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: AllToAllOptions = ...,
    ) -> Work: ...

    @operation
    def all_to_all_single(self, *args: Any, **kwargs: Any) -> Work:
        """A part of everybody's tensor for each rank; the parts are counted in rows, or equal without."""

    alltoall_base = renamed(all_to_all_single, "alltoall_base")

    @overload
    def alltoall(
        self, output_tensors: Tensors, input_tensors: Tensors, opts: AllToAllOptions = ...
    ) -> Work: ...

    @overload
    def alltoall(
        self, output_tensor: Tensors, input_tensor: Tensors, opts: AllToAllOptions = ...
    ) -> Work: ...

    @operation
    def alltoall(self, *args: Any, **kwargs: Any) -> Work:
        """One of everybody's tensors for each rank."""

    @operation
    def send(self, tensors: Tensors, dstRank: int, tag: int) -> Work:
        """One tensor to another rank."""

    @operation
    def recv(self, tensors: Tensors, srcRank: int, tag: int) -> Work:
        """One tensor from another rank."""

    @operation
    def recv_anysource(self, tensors: Tensors, tag: int, /) -> Work:
        """One tensor from whoever sends first; `Work.source_rank` tells who it was."""

    @overload
    def barrier(self, opts: BarrierOptions = ...) -> Work: ...

    @overload
    def barrier(self, timeout: timedelta | None = None) -> Work: ...

    @operation
    def barrier(self, *args: Any, **kwargs: Any) -> Work:
        """Over when all ranks have called it."""

    @operation
    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that blocks, and in which rank 0 finds out who is missing."""
