"""Pools of ranks shared by all tests of parameter servers."""

import pytest

from support.parameter_servers import SOON
from support.ranks import RankPool


@pytest.fixture(scope="package")
def pools():
    """Return pools of ranks by size, each with a group."""
    made = {}

    def pool(size):
        if size not in made:
            made[size] = RankPool(size, timeout=SOON).__enter__()
        made[size].new_group()
        return made[size]

    yield pool
    for each in made.values():
        each.__exit__()
