"""Each bug that fuzz/planted.py plants changes code that still exists in native/src."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "fuzz"))
import planted  # noqa: E402

SOURCES = [path.read_text() for path in (ROOT / "native/src").rglob("*.[ch]")]


@pytest.mark.parametrize("bug", planted.PLANTS, ids=lambda bug: bug[1])
def test_each_planted_bug_changes_one_place(bug):
    """The code that a planted bug replaces occurs exactly once, as `make planted`, which rarely runs, requires."""
    for old, new in bug[2]:
        assert old != new
        assert sum(text.count(old) for text in SOURCES) == 1, old
