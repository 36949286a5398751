"""The recipes of CONTRIBUTING.md for formulas and integrations name all files that such a change needs."""

import re
from pathlib import Path

import pytest

import codec.optimizers

ROOT = Path(__file__).parents[2]
RECIPES = dict(re.findall(r"^### (.+)\n([^#]+)", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE))
FORMULAS = sorted(
    name
    for name in codec.optimizers.__all__
    if isinstance(kind := getattr(codec.optimizers, name), type) and kind.__module__ == "codec.optimizers.formulas"
)
# Modules that hosts share
OWN = {"adapter_folders", "adapters", "attach", "chunks", "federated", "flower_records", "kv", "slime_version"}
OWN |= {"torchft_work", "weights"}
HOSTS = sorted(p.stem for p in (ROOT / "codec/integrations").glob("*.py") if p.stem not in OWN | {"__init__"})


def _files_of(recipe: str, folder: str) -> list[str]:
    return [p for p in re.findall(r"[`(]([\w/.]+\.(?:py|md))[`)]", RECIPES[recipe]) if p.startswith(folder)]


def _word(name: str, path: str) -> bool:
    return re.search(rf"\b{name}\b", (ROOT / path).read_text()) is not None


@pytest.mark.parametrize("name", FORMULAS)
def test_formula_is_in_every_file_of_its_recipe(name):
    files = _files_of("An optimizer formula", "")
    assert len(files) >= 6
    tests = [p for p in files if p.startswith("tests/")]
    assert [p for p in files if p not in tests and not _word(name, p)] == []
    assert any(_word(name, p) for p in tests)


@pytest.mark.parametrize("name", HOSTS)
def test_host_is_in_the_reference_and_has_a_test(name):
    assert _word(f"codec.integrations.{name}", "docs/reference/python.md")
    folders = ("tests/frameworks", "tests/rollouts", "tests/integrations", "tests/files", "tests/weight_sync")
    assert any(_word(name, str(p.relative_to(ROOT))) for folder in folders for p in (ROOT / folder).glob("test_*.py"))
