"""A backend that sends nothing, for programs that run as one rank of many without the other ranks.

Outputs are filled from this rank's data. By default only their shapes are right. With
`simulate_uniform_ranks` they hold the result for equal data on all ranks, so that sums are right, too.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from tenfold.arrays import copy_into, parts
from tenfold.c10d.backend import Backend
from tenfold.c10d.collectives import COLLECTIVES
from tenfold.c10d.options import Fields
from tenfold.c10d.work import FakeWork
from tenfold.reduce_op import ReduceOp

__all__ = ["FakeProcessGroup"]


class FakeProcessGroup(Backend):
    """A group whose other ranks do not exist.

    >>> group = FakeProcessGroup._create_internal(rank=0, world_size=2)
    >>> gathered = [bytearray(2), bytearray(2)]
    >>> group.allgather([gathered], [bytearray(b"hi")]).wait()
    True
    >>> gathered
    [bytearray(b'hi'), bytearray(b'hi')]
    """

    class Options(Backend.Options):
        """The settings of a fake group."""

        fake_option: int = 0
        error_on_collective: bool = False
        simulate_uniform_ranks: bool = False

        def __init__(self) -> None:
            super().__init__("fake")

    @staticmethod
    def _create_internal(
        rank: int, world_size: int, options: "FakeProcessGroup.Options | None" = None
    ) -> "FakeProcessGroup":
        group = FakeProcessGroup(rank, world_size)
        group._options = options or FakeProcessGroup.Options()
        return group

    _options: Options

    @property
    def options(self) -> Options:
        return self._options

    def _get_backend_name(self) -> str:
        return "fake"

    @property
    def supports_splitting(self) -> bool:
        return True

    def split(self, store: Any, ranks: Sequence[int], opts: Any) -> "FakeProcessGroup | None":
        if self._rank not in ranks:
            return None
        return FakeProcessGroup._create_internal(list(ranks).index(self._rank), len(ranks), self._options)

    def set_timeout(self, timeout: timedelta) -> None:
        self._options._timeout = timeout

    def abort(self) -> None: ...

    def shutdown(self) -> None: ...

    def _perform(self, name: str, arguments: list[Any], options: Fields | None) -> FakeWork:
        if self._options.error_on_collective:
            raise RuntimeError("FakeProcessGroup collective operation error (error_on_collective=true)")
        collective = COLLECTIVES.get(name)
        if collective is None or collective.fill is None:
            raise self._unsupported(name)
        getattr(self, f"_fill_{collective.fill}")(arguments, options)
        return FakeWork()

    # How outputs are filled, by `Collective.fill`. An operation on several pairs fills each of them.

    def _fill_nothing(self, arguments: list[Any], options: Any) -> None: ...

    def _fill_reduce(self, arguments: list[Any], options: Any) -> None:
        if getattr(options, "rootRank", self._rank) == self._rank:
            for tensor in arguments[0]:
                self._as_if_reduced(tensor, options.reduceOp)

    def _as_if_reduced(self, tensor: Any, op: ReduceOp) -> None:
        """Replaces elements by the reduction of the same elements on all ranks."""
        if not self._options.simulate_uniform_ranks:
            return
        if op.op is ReduceOp.SUM:
            tensor *= self._size
        elif op.op is ReduceOp.PREMUL_SUM:
            tensor *= op.factor * self._size
        elif op.op is ReduceOp.PRODUCT:
            tensor **= self._size
        elif op.op is ReduceOp.BXOR and self._size % 2 == 0:
            tensor ^= tensor

    def _fill_gather(self, arguments: list[Any], options: Any) -> None:
        for outputs, tensor in zip(*arguments, strict=True):
            for output in outputs:
                copy_into(output, tensor)

    def _fill_gather_lists(self, arguments: list[Any], options: Any) -> None:
        for outputs in arguments[0]:
            for output, tensor in zip(outputs, arguments[1], strict=True):
                copy_into(output, tensor)

    def _fill_gather_parts(self, arguments: list[Any], options: Any) -> None:
        for output, tensor in _pairs(arguments):
            for part in parts(output, self._size):
                copy_into(part, tensor)

    def _fill_gather_at_root(self, arguments: list[Any], options: Any) -> None:
        if self._rank == options.rootRank:
            self._fill_gather(arguments, options)
        elif any(map(len, arguments[0])):
            raise ValueError("FakeProcessGroup::gather: requires empty output on non-root")

    def _fill_scatter(self, arguments: list[Any], options: Any) -> None:
        outputs, inputs = arguments
        if self._rank == options.rootRank:
            if len(inputs) != 1 or len(inputs[0]) != self._size:
                raise ValueError(f"FakeProcessGroup::scatter: the root must give {self._size} inputs")
            copy_into(outputs[0], inputs[0][self._rank])
        elif any(map(len, inputs)):
            raise ValueError("FakeProcessGroup::scatter: requires empty input on non-root")

    def _fill_reduce_scatter(self, arguments: list[Any], options: Any) -> None:
        for output, tensors in zip(*arguments, strict=True):
            copy_into(output, tensors[self._rank])
            self._as_if_reduced(output, options.reduceOp)

    def _fill_reduce_scatter_parts(self, arguments: list[Any], options: Any) -> None:
        for output, tensor in _pairs(arguments):
            self._fill_reduce_scatter([[output], [parts(tensor, self._size)]], options)

    def _fill_exchange(self, arguments: list[Any], options: Any) -> None:
        for place, output in enumerate(arguments[0]):
            source = self._rank if self._options.simulate_uniform_ranks else place
            copy_into(output, arguments[1][source])

    def _fill_exchange_parts(self, arguments: list[Any], options: Any) -> None:
        output, tensor, output_splits, input_splits = arguments
        if not self._options.simulate_uniform_ranks:
            copy_into(output, tensor)
            return
        sent = _cut(tensor, input_splits, self._size)[self._rank]
        for part in _cut(output, output_splits, self._size):
            copy_into(part, sent)


def _pairs(arguments: list[Any]) -> list[tuple[Any, Any]]:
    """Returns an output and an input, or several of them."""
    if isinstance(arguments[0], list | tuple):
        return list(zip(*arguments, strict=True))
    return [(arguments[0], arguments[1])]


def _cut(tensor: Any, splits: Sequence[int], count: int) -> list[Any]:
    if not splits:
        return parts(tensor, count)
    ends = [sum(splits[: place + 1]) for place in range(len(splits))]
    return [tensor[end - rows : end] for end, rows in zip(ends, splits, strict=True)]
