"""Pages of README.md, CONTRIBUTING.md and docs/ name files that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = "bench|bindings|docs|examples|fuzz|native|tests"
PLACEHOLDERS = ("*", "NAME")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_paths_in_a_page_exist(page):
    text = page.read_text()
    code = re.findall(rf"[`\s]((?:{FOLDERS})/[\w./*-]*[\w*/])", text)
    links = re.findall(r"\]\((?!https?://|mailto:|#)([^)#\s]+)", text)
    missing = [p for p in code if not any(x in p for x in PLACEHOLDERS) and not (ROOT / p).exists()]
    missing += [p for p in links if not (page.parent / p).exists()]
    assert not missing
