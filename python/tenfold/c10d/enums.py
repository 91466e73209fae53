"""c10d's enumerations, with c10d's numbers."""

from tenfold.numbered import Numbered

__all__ = ["BackendType", "DebugLevel", "ErrorType", "HookOpName", "OpType", "WorkResult"]


class OpType(Numbered):
    """The operation of a `Work`."""

    BROADCAST = 0
    ALLREDUCE = 1
    ALLREDUCE_COALESCED = 2
    REDUCE = 3
    ALLGATHER = 4
    _ALLGATHER_BASE = 5
    ALLGATHER_COALESCED = 6
    GATHER = 7
    SCATTER = 8
    REDUCE_SCATTER = 9
    ALLTOALL_BASE = 10
    ALLTOALL = 11
    SEND = 12
    RECV = 13
    RECVANYSOURCE = 14
    BARRIER = 15
    _REDUCE_SCATTER_BASE = 16
    COALESCED = 17
    _ALLREDUCE_SPARSE = 18
    REDUCE_SCATTER_TENSOR_COALESCED = 19
    ALLGATHER_INTO_TENSOR_COALESCED = 20
    UNKNOWN = 100


class WorkResult(Numbered):
    """The result of a `Work`, as in `Work.get_future_result`."""

    SUCCESS = 0
    TIMEOUT = 1
    COMM_ERROR = 2
    UNKNOWN = 100


class ErrorType(Numbered):
    """Why a group can no longer be used; see `Backend.get_error`."""

    SUCCESS = 0
    TIMEOUT = 1
    COMM_ERROR = 2
    REMOTE_ERROR = 3


class DebugLevel(Numbered):
    """How much is checked; see `get_debug_level`."""

    OFF = 0
    INFO = 1
    DETAIL = 2


class BackendType(Numbered):
    """The kind of a `Backend`. tenfold's is `CUSTOM`."""

    UNDEFINED = 0
    GLOO = 1
    NCCL = 2
    UCC = 3
    MPI = 4
    XCCL = 5
    CUSTOM = 6


class HookOpName(Numbered):
    """The operations for which the hooks of a `ProcessGroup` are called."""

    SEND = 0
    RECV = 1
    BROADCAST = 2
    ALLREDUCE = 3
    REDUCE = 4
    ALLGATHER = 5
    REDUCE_SCATTER = 6
    ALLTOALL = 7
    BARRIER = 8
    SCATTER = 9
    GATHER = 10
    SPLIT = 11
    NEW_WINDOW = 12
    ALLREDUCE_COALESCED = 13
    ALLGATHER_BASE = 14
    ALLGATHER_COALESCED = 15
    ALLGATHER_INTO_TENSOR_COALESCED = 16
    REDUCE_SCATTER_BASE = 17
    REDUCE_SCATTER_TENSOR_COALESCED = 18
    ALLTOALL_BASE = 19
    UNKNOWN = 20
