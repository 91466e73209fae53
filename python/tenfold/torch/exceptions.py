"""Error classes that derive from tenfold's and PyTorch's, so that `except
torch.distributed.DistBackendError` catches them.
"""

import torch.distributed as dist

from tenfold import exceptions as _plain


class DistBackendError(_plain.DistBackendError, dist.DistBackendError):
    pass


class DistNetworkError(_plain.DistNetworkError, dist.DistNetworkError):
    pass


class DistStoreError(_plain.DistStoreError, dist.DistStoreError):
    pass


class DistQueueEmptyError(_plain.DistQueueEmptyError, dist.QueueEmptyError):
    pass


class DistStoreArgumentError(_plain.DistStoreArgumentError, DistStoreError):
    pass


class DistArgumentError(_plain.DistArgumentError, DistBackendError):
    pass


class DistTimeoutError(_plain.DistTimeoutError, DistBackendError):
    pass


class DistStoreTimeoutError(_plain.DistStoreTimeoutError, DistStoreError):
    pass


_BOTH = {
    _plain.DistBackendError: DistBackendError,
    _plain.DistNetworkError: DistNetworkError,
    _plain.DistStoreError: DistStoreError,
    _plain.DistQueueEmptyError: DistQueueEmptyError,
    _plain.DistStoreArgumentError: DistStoreArgumentError,
    _plain.DistArgumentError: DistArgumentError,
    _plain.DistTimeoutError: DistTimeoutError,
    _plain.DistStoreTimeoutError: DistStoreTimeoutError,
}

_plain._adopt(_BOTH)
