"""The examples in the package's docstrings do what they say."""

import doctest
import importlib
import pkgutil

import pytest
import tenfold

MODULES = ["tenfold", *(f"tenfold.{module.name}" for module in pkgutil.iter_modules(tenfold.__path__))]

# The command would run; PyTorch's parts and the benchmark have tests of their own.
WITHOUT_EXAMPLES_OF_THEIR_OWN = {"tenfold.__main__", "tenfold.bench", "tenfold.torch"}


@pytest.mark.parametrize("name", sorted(set(MODULES) - WITHOUT_EXAMPLES_OF_THEIR_OWN))
def test_the_examples_run(name):
    failed, _ = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert failed == 0, f"{failed} examples of {name} failed; see above"


def test_there_are_examples_where_users_look():
    finder = doctest.DocTestFinder(exclude_empty=True)
    for name in ["tenfold.api", "tenfold.process_group", "tenfold.reduce_op", "tenfold.work"]:
        examples = [found for found in finder.find(importlib.import_module(name)) if found.examples]
        assert examples, f"{name} has no example"
