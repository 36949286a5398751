"""Versions of other packages are written in tests/constraints*.txt and pyproject.toml; one page shows them."""

import re

import pytest

from support.tested_releases import END, PACKAGES, PAGE, ROOT, bounds, page, pins, table


def test_page_shows_the_versions_of_the_constraints():
    """To update the page: PYTHONPATH=tests python -m support.tested_releases --write."""
    assert PAGE.read_text() == page()
    assert END in page().partition(table())[2]


@pytest.mark.parametrize("name", PACKAGES)
def test_exact_versions_are_written_once(name):
    """Neither the Makefile nor other pages name the exact version of a package."""
    versions = {v for v in (pins("").get(name), pins("-newest").get(name)) if v}
    texts = [ROOT / "Makefile", ROOT / "README.md", *(ROOT / "codec").rglob("*.py")]
    texts += [path for path in (ROOT / "docs").rglob("*.md") if path != PAGE and "benchmarks" not in path.parts]
    for version in versions:
        spelling = re.compile(
            rf"\b{re.escape(name.removesuffix('-cpu'))}(==|[ (]+){re.escape(version)}\b", re.IGNORECASE
        )
        assert [path for path in texts if spelling.search(path.read_text())] == []


def test_each_package_has_a_version():
    known = bounds() | pins("") | pins("-newest")
    assert [name for name in PACKAGES if name not in known] == []
    assert set(pins("-newest")) <= set(PACKAGES)
