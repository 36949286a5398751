"""pytest settings and fixtures that apply to all tests."""

import gc
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import codec
from codec._c.library import isas, use_isa
from support.cpu_time import CpuTime
from support.tiers import CHECK, N_EXAMPLES

# Child processes import the same package as the tests, whether it is installed or not.
_PACKAGES = str(Path(codec.__file__).parents[1])
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_PACKAGES, os.environ.get("PYTHONPATH")]))

settings.register_profile(
    "codec",
    max_examples=N_EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("codec")


def pytest_configure(config: pytest.Config) -> None:
    """Measure and limit the CPU time of each test."""
    config.pluginmanager.register(CpuTime())


def pytest_collection_finish() -> None:
    """Exempt imported modules from garbage collections, which would take 0.1 s each, and tests start many."""
    gc.collect()
    gc.freeze()


def _imports_torch(source: str) -> bool:
    return re.search(r"^(import|from) (codec\.)?torch\b", source, re.MULTILINE) is not None


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Skip modules that import torch in `make check`, whose environment lacks torch."""
    is_module = collection_path.suffix == ".py" and collection_path.name != "conftest.py"
    return True if CHECK and is_module and _imports_torch(collection_path.read_text()) else None


@pytest.fixture(params=isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test once under each instruction set of this machine, and return the set's name."""
    with use_isa(request.param):
        yield request.param


@pytest.fixture(scope="module", autouse=True)
def ranks_of_module() -> Iterator[None]:
    """Kill the idle rank processes after the tests of a module."""
    yield
    if ranks := sys.modules.get("support.ranks"):
        ranks.close_idle_ranks()
