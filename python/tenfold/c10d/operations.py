# ruff: noqa: N803  c10d's parameters are named in its own way
# `operation` provides the bodies.
# mypy: disable-error-code="empty-body"
"""Every operation of c10d, in every form in which it can be called there.

`Backend` and `ProcessGroup` share them; only `_perform` differs. Where c10d's two classes have different
names for a parameter, both accept both names. A timeout of None or -1 ms means the group's.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, overload

from tenfold.arrays import Tensor, TensorLists, Tensors
from tenfold.c10d.options import (
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
from tenfold.c10d.overloads import operation, renamed
from tenfold.reduce_op import ReduceOp, Reduction
from tenfold.work import Work

__all__ = ["Operations"]


class Operations:
    """The operations. All except `monitored_barrier` return immediately, with a `Work` to wait for."""

    def _perform(self, name: str, arguments: list[Any], options: Fields | None) -> Any:
        """Runs an operation, given the arguments of its first form."""
        raise NotImplementedError

    @overload
    def broadcast(self, tensors: Tensors, opts: BroadcastOptions = ...) -> Work: ...

    @overload
    def broadcast(self, tensor: Tensor, root: int, timeout: timedelta | None = None) -> Work: ...

    @operation
    def broadcast(self, *args: Any, **kwargs: Any) -> Work:
        """Copies the root's tensor to all ranks."""

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
        """Reduces the tensors of all ranks, in place on all ranks."""

    @operation
    def allreduce_coalesced(self, tensors: Tensors, opts: AllreduceCoalescedOptions = ...) -> Work:
        """Does `allreduce` on several tensors in one operation."""

    @operation
    def allreduce_sparse(self, tensors: Tensors, opts: AllreduceOptions = ...) -> Work:
        """Does `allreduce` on sparse tensors, if the backend supports them."""

    @overload
    def reduce(self, tensors: Tensors, opts: ReduceOptions = ...) -> Work: ...

    @overload
    def reduce(
        self, tensor: Tensor, root: int, op: Reduction = ReduceOp.SUM, timeout: timedelta | None = None
    ) -> Work: ...

    @operation
    def reduce(self, *args: Any, **kwargs: Any) -> Work:
        """Reduces the tensors of all ranks into the root's. Other ranks' tensors are then undefined."""

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
        """Collects the tensors of all ranks on all ranks, in a list by rank."""

    @operation
    def all_gather_single(self, output: Tensor, input: Tensor, opts: AllgatherOptions = ...) -> Work:
        """Concatenates the tensors of all ranks on all ranks."""

    _allgather_base = renamed(all_gather_single, "_allgather_base")

    @operation
    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: AllgatherOptions = ...
    ) -> Work:
        """Does `all_gather_single` on several tensors in one operation."""

    allgather_into_tensor_coalesced = renamed(all_gather_single_coalesced, "allgather_into_tensor_coalesced")

    @operation
    def allgather_coalesced(
        self, output_lists: TensorLists, input_list: Tensors, opts: AllgatherOptions = ...
    ) -> Work:
        """Does `allgather` on several tensors in one operation: a list of tensors for every rank."""

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
        """Collects the tensors of all ranks on the root, in a list by rank. Other ranks pass no outputs."""

    @operation
    def gather_single(self, output: Tensor, input: Tensor, opts: GatherOptions = ...) -> Work:
        """Concatenates the tensors of all ranks on the root."""

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
        """Distributes the root's tensors, one to each rank. Other ranks pass no inputs."""

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
        """Reduces lists of tensors over all ranks. Each rank gets the result at its own index."""

    @operation
    def reduce_scatter_single(
        self, outputTensor: Tensor, inputTensor: Tensor, opts: ReduceScatterOptions = ...
    ) -> Work:
        """Reduces the tensors of all ranks. Each rank gets an equal part of the result."""

    _reduce_scatter_base = renamed(reduce_scatter_single, "_reduce_scatter_base")

    @operation
    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: ReduceScatterOptions = ...
    ) -> Work:
        """Does `reduce_scatter_single` on several tensors in one operation."""

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
        """Sends a part of a tensor to each rank. Parts are given in rows; by default they are equal."""

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
        """Sends one tensor to each rank, and receives one from each."""

    @operation
    def send(self, tensors: Tensors, dstRank: int, tag: int) -> Work:
        """Sends one tensor to another rank."""

    @operation
    def recv(self, tensors: Tensors, srcRank: int, tag: int) -> Work:
        """Receives one tensor from another rank."""

    @operation
    def recv_anysource(self, tensors: Tensors, tag: int, /) -> Work:
        """Receives one tensor from any rank. `Work.source_rank` returns the sender."""

    @overload
    def barrier(self, opts: BarrierOptions = ...) -> Work: ...

    @overload
    def barrier(self, timeout: timedelta | None = None) -> Work: ...

    @operation
    def barrier(self, *args: Any, **kwargs: Any) -> Work:
        """Completes when all ranks have called it."""

    @operation
    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Waits for all ranks. If it times out, rank 0 names the missing ranks."""
