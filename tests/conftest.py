"""Settings and fixtures of all tests."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import codec
from support.tiers import N_EXAMPLES

# Python processes that tests start import the package that the tests import, whether it is installed or not.
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


@pytest.fixture(params=codec.isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test under each instruction set of this machine in turn, and return its name."""
    with codec.use_isa(request.param):
        yield request.param
