"""The examples in docstrings do what they say."""

import doctest
import importlib
import pkgutil

import numpy as np
import pytest
import torch

import codec

MODULES = ["codec", *(m.name for m in pkgutil.walk_packages(codec.__path__, "codec.") if not m.name.endswith("_cffi"))]
# what users call: each with an example that is run
SHOWN = [
    "encode",
    "decode",
    "accumulate",
    "reduce",
    "bound",
    "inspect",
    "encode_many",
    "segments",
    "advise",
    "engines",
    "use_isa",
    "warmup",
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    globs = {"codec": codec, "np": np, "torch": torch, "metrics": codec.metrics}
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    module = importlib.import_module(name)
    assert doctest.testmod(module, extraglobs=globs, optionflags=flags).failed == 0


def test_what_has_examples():
    finder = doctest.DocTestFinder(recurse=False)
    for name in SHOWN:
        (found,) = finder.find(getattr(codec, name), name)
        assert found.examples, name
    for member in (codec.Codebook, codec.ErrorFeedback, codec.CodebookRefresher, codec.metrics.from_optimizer):
        assert any(t.examples for t in finder.find(member, "it"))
