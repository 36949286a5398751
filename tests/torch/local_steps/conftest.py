"""Fixture `pool`: two ranks in a group, shared by all tests of LocalSteps."""

import pytest

from support.ranks import RankPool


@pytest.fixture(scope="package")
def pool():
    """Return two ranks with a group. Tests share the ranks, and must leave the group working."""
    with RankPool(2) as ranks:
        ranks.new_group()
        yield ranks
