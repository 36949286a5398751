"""Every public name is reachable from docs/reference/python.md."""

import inspect
import re
from pathlib import Path

import pytest

import codec.kv
import codec.optimizers
import codec.torch
import codec.torch.pipelining
import codec.weight_sync

PAGE = (Path(__file__).parents[2] / "docs/reference/python.md").read_text()
MODULES = (codec, codec.kv, codec.optimizers, codec.torch, codec.torch.pipelining, codec.weight_sync)


def test_reference_lists_the_public_modules():
    listed = re.search(r"autosummary::(.*?)```", PAGE, re.DOTALL).group(1)
    assert re.findall(r"^   (codec[\w.]*)$", listed, re.MULTILINE) == [m.__name__ for m in MODULES]


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__)
def test_reference_lists_public_names_that_autosummary_leaves_out(module):
    """The template of a module's page lists functions, classes and exceptions; other names are on python.md itself."""
    others = [n for n in module.__all__ if not (inspect.isclass(v := getattr(module, n)) or inspect.isroutine(v))]
    others = [n for n in others if not inspect.ismodule(getattr(module, n))]
    assert [n for n in others if f".. py:data:: {module.__name__}.{n}\n" not in PAGE] == []


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__)
def test_public_names_have_a_docstring(module):
    objects = {n: v for n in module.__all__ if inspect.isclass(v := getattr(module, n)) or inspect.isroutine(v)}
    assert [n for n, v in objects.items() if not v.__doc__] == []
