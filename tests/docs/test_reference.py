"""Every public name is reachable from docs/reference/python.md, has a docstring, and says if it is provisional."""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

import codec.kv
import codec.optimizers
import codec.torch
import codec.torch.ops
import codec.torch.pipelining
import codec.weight_sync
from support import provisional

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reference/python.md").read_text()
MODULES = (
    *(codec, codec.kv, codec.optimizers, codec.torch, codec.torch.ops, codec.torch.pipelining, codec.weight_sync),
)
MOST_NAMES = 112
# Modules that several integrations share
SHARED = {"__init__", "adapter_folders", "adapters", "attach", "chunks", "federated", "flower_records", "kv"} | {
    "slime_version",
    "torchft_work",
    "weights",
}
INTEGRATIONS = {
    f"codec.integrations.{p.stem}": ast.parse(p.read_text())
    for p in sorted((ROOT / "codec/integrations").glob("*.py"))
    if p.stem not in SHARED
}


def listed(heading):
    """Return the names that autosummary lists in a section of the page."""
    section = re.search(rf"^#+ {heading}$(.*?)(?=^#|\Z)", PAGE, re.DOTALL | re.MULTILINE).group(1)
    return re.findall(r"^   (codec[\w.]*)$", re.search(r"autosummary::(.*?)```", section, re.DOTALL).group(1), re.M)


def documented(module):
    """Return the public functions and classes of a module by name."""
    return {n: v for n in module.__all__ if inspect.isclass(v := getattr(module, n)) or inspect.isroutine(v)}


def test_reference_lists_the_public_modules():
    assert listed("Python") == [m.__name__ for m in MODULES]
    assert listed("Integrations") == list(INTEGRATIONS)


def test_reference_lists_classes_of_results_once():
    names = listed("Results")
    assert len(names) == len(set(names))
    for name in names:
        module, _, attribute = name.rpartition(".")
        kind = getattr(importlib.import_module(module), attribute)
        assert kind.__doc__, name
        assert not any(kind in documented(m).values() for m in MODULES), name


def test_public_names_are_few_and_have_docstrings():
    assert sum(len(m.__all__) for m in MODULES) <= MOST_NAMES
    for module in MODULES:
        objects = documented(module)
        assert sorted(objects) == sorted(module.__all__)
        assert [n for n, v in objects.items() if not v.__doc__] == []


@pytest.mark.parametrize("name", INTEGRATIONS)
def test_integrations_export_names_with_docstrings(name):
    tree = INTEGRATIONS[name]
    (names,) = (
        ast.literal_eval(n.value) for n in tree.body if isinstance(n, ast.Assign) and n.targets[0].id == "__all__"
    )
    defined = {n.name: ast.get_docstring(n) for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef)}
    imported = {a.asname or a.name for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert [n for n in names if not defined.get(n) and n not in imported] == []
    assert provisional.NOTE in ast.get_docstring(tree)


def test_docstrings_say_what_is_provisional():
    objects = {"codec.integrations": importlib.import_module("codec.integrations")}
    for module in MODULES:
        objects[module.__name__] = module
        objects |= {f"{module.__name__}.{n}": v for n, v in documented(module).items()}
    marked = {name for name, v in objects.items() if provisional.NOTE in (v.__doc__ or "")}
    assert marked == {n for n in objects if n in provisional.NAMES or n.startswith("codec.torch.pipelining.")}


@pytest.mark.parametrize("page", sorted(provisional.DOCUMENTS))
def test_documents_say_what_is_provisional(page):
    heading = provisional.DOCUMENTS[page]
    assert f"{heading}\n\n*{provisional.NOTE}*\n" in (ROOT / "docs" / page).read_text()


def test_no_other_document_is_marked_as_provisional():
    docs = ROOT / "docs"
    marked = {str(p.relative_to(docs)) for p in docs.rglob("*.md") if f"*{provisional.NOTE}*" in p.read_text()}
    assert marked == {*provisional.DOCUMENTS}
