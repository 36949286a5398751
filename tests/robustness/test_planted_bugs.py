"""Planted bugs of fuzz/planted.py: the code that they change is in native/src."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "fuzz"))
import planted  # noqa: E402

SOURCES = [path.read_text() for path in (ROOT / "native/src").rglob("*.[ch]")]


@pytest.mark.parametrize("bug", planted.PLANTS, ids=lambda bug: bug[1])
def test_each_planted_bug_changes_one_place(bug):
    """A bug whose code is gone would end `make planted`, which runs seldom."""
    for old, new in bug[2]:
        assert old != new
        assert sum(text.count(old) for text in SOURCES) == 1, old
