"""Whose DistributedDataParallel is tested: ours, or PyTorch's own, which shows whether the tests are right.

`pytest --ddp torch --backend gloo` tests PyTorch's on Gloo; the choice reaches ranks by the environment.
"""

import importlib
import os

from torch.nn.parallel import DistributedDataParallel

VARIABLE = "TENFOLD_TEST_DDP"
CHOICES = ["tenfold", "torch"]


def ddp_class(name: str) -> type[DistributedDataParallel]:
    if name == "torch":
        return DistributedDataParallel
    return importlib.import_module(f"{name}.torch").DistributedDataParallel


def under_test() -> type[DistributedDataParallel]:
    return ddp_class(os.environ.get(VARIABLE, CHOICES[0]))


def is_ours() -> bool:
    return under_test() is not DistributedDataParallel
