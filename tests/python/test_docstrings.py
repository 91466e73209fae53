"""The examples in the package's docstrings do what they say."""

import doctest
import importlib
import pkgutil
import subprocess
import sys

import pytest
import tenfold

MODULES = {
    "tenfold",
    *(f"tenfold.{module.name}" for module in pkgutil.iter_modules(tenfold.__path__)),
    *(f"tenfold.c10d.{module.name}" for module in pkgutil.iter_modules(tenfold.c10d.__path__)),
}

# The command would run; PyTorch's parts and the benchmark have tests of their own.
WITHOUT_EXAMPLES = {"tenfold.__main__", "tenfold.bench", "tenfold.torch"}

RUN = """
import doctest, importlib, sys
failed, _ = doctest.testmod(importlib.import_module(sys.argv[1]), optionflags=doctest.ELLIPSIS)
assert "torch" not in sys.modules
sys.exit(failed > 0)
"""


@pytest.mark.parametrize("name", sorted(MODULES - WITHOUT_EXAMPLES))
def test_the_examples_run(name):
    # In a process without PyTorch, whose presence makes other classes of the exceptions.
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", RUN, name]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stdout + ran.stderr


def test_there_are_examples_where_users_look():
    finder = doctest.DocTestFinder(exclude_empty=True)
    for name in ["tenfold.api", "tenfold.c10d.process_group", "tenfold.reduce_op", "tenfold.work"]:
        examples = [found for found in finder.find(importlib.import_module(name)) if found.examples]
        assert examples, f"{name} has no example"
