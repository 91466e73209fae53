"""A Python process with this folder in `PYTHONPATH` uses tenfold in Gloo's place once it imports torchft.

torchft's tests start processes of their own, so it is not enough to do it in the first one.
"""

import importlib.abc
import sys
from typing import Any


class _BeforeTorchft(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name == "torchft":
            sys.meta_path.remove(self)
            import gloo_stand_in

            gloo_stand_in.install()


sys.meta_path.insert(0, _BeforeTorchft())
