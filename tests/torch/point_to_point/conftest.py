"""Fixture `ranks`: two processes in a group, shared by the tests of a module."""

import pytest

from support.point_to_point import SOON
from support.ranks import RankPool


@pytest.fixture(scope="module")
def ranks():
    with RankPool(2, timeout=SOON) as ranks:
        ranks.new_group()
        yield ranks
