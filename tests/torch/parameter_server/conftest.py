"""Fixture `pools`: pools of rank processes, shared by all tests of parameter servers."""

import pytest

from support.parameter_servers import SOON
from support.ranks import RankPool


@pytest.fixture(scope="package")
def pools():
    """Yield a function that returns the pool with a given number of ranks, whose group is initialized."""
    made = {}

    def pool(size):
        if size not in made:
            made[size] = RankPool(size, timeout=SOON).__enter__()
        made[size].new_group()
        return made[size]

    yield pool
    for each in made.values():
        each.__exit__()
