"""Fixture `ranks`: two processes in a group, shared by the tests of a module."""

import pytest

from support.ranks import RankPool
from support.tiers import HANG_SECONDS


@pytest.fixture(scope="module")
def ranks():
    with RankPool(2, timeout=HANG_SECONDS) as ranks:
        ranks.new_group()
        yield ranks
