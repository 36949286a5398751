"""README.md, CONTRIBUTING.md and docs/ refer only to files and sections that exist, and document all errors."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import codec
from codec._c import library

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
ERRORS = ROOT / "docs/reference/errors.md"
FOLDERS = "bench|bindings|docs|examples|fuzz|native|tests"
SOURCES = (".c", ".cc", ".cu", ".cuh", ".h", ".md", ".py")
PLACEHOLDERS = ("*", "NAME")
SECTIONS = {
    page.name: re.findall(r"^##+ ([\d.]*\d)", page.read_text(), re.M) for page in (ROOT / "docs/spec").rglob("*.md")
}
# Matches page and numbers of references like "format.md, sections 5.2 and 7", also across lines of a comment
SECTION = re.compile(
    r"(?:/|\b)([\w-]+\.md)[)`]*(?:\(\S+\))?,?\s+(?:[/*#]+\s+)*sections?\s+((?:[\d.]*\d)(?:(?:,| and| to)\s+[\d.]*\d)*)"
)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_paths_in_a_page_exist(page):
    text = page.read_text()
    code = re.findall(rf"[`\s]((?:{FOLDERS})/[\w./*-]*[\w*/]|codec/[\w/]*(?:\.py|/)(?=`))", text)
    links = re.findall(r"\]\((?!https?://|mailto:|#)([^)#\s]+)", text)
    missing = [p for p in code if not any(x in p for x in PLACEHOLDERS) and not (ROOT / p).exists()]
    missing += [p for p in links if not (page.parent / p).exists()]
    assert not missing


def test_sections_of_specifications_that_files_name_exist():
    files = [p for folder in ("codec", *FOLDERS.split("|")) for p in (ROOT / folder).rglob("*") if p.suffix in SOURCES]
    named = [(path, page, numbers) for path in files for page, numbers in SECTION.findall(path.read_text())]
    assert len(named) > 100
    missing = [
        f"{path.relative_to(ROOT)}: {page}, section {number}"
        for path, page, numbers in named
        for number in re.findall(r"[\d.]*\d", numbers)
        if page in SECTIONS and number not in SECTIONS[page]
    ]
    assert not missing


def test_pages_that_files_name_exist():
    """Tests that run nightly read pages, too: a page that is moved must fail here first."""
    files = [p for folder in ("codec", *FOLDERS.split("|")) for p in (ROOT / folder).rglob("*") if p.suffix in SOURCES]
    named = [(path, page) for path in files for page in re.findall(r"\bdocs/[\w/-]+\.md\b", path.read_text())]
    assert len(named) > 100
    assert not {f"{path.relative_to(ROOT)}: {page}" for path, page in named if not (ROOT / page).exists()}


def test_files_that_the_architecture_names_exist():
    named = re.findall(r"`(?:[\w/]+/)?(\w+\.(?:py|c|h|cc|cu))`", (ROOT / "docs/internals/architecture.md").read_text())
    exist = {p.name for folder in ("codec", *FOLDERS.split("|")) for p in (ROOT / folder).rglob("*.*")}
    assert not {name for name in named if name not in exist and "NAME" not in name}


def test_rows_of_the_threat_model_name_code_and_tests_that_exist():
    lines = (ROOT / "docs/internals/threat-model.md").read_text().splitlines()
    rows = [re.split(r"\s+\|\s+", line.strip("| ")) for line in lines if line.startswith("| ")]
    rows = {row[0]: row[2:] for row in rows if len(row) == 4 and row[0] != "event"}
    files = [path for folder in ("codec", *FOLDERS.split("|")) for path in (ROOT / folder).rglob("*.*")]
    names = [f"/{path.relative_to(ROOT)}" for path in files]
    code = "".join(p.read_text() for p in files if p.suffix in SOURCES and {"codec", "native"} & {*p.parts})
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)

    def exists(name):
        if name.endswith(SOURCES):
            return any(path.endswith(f"/{name}") for path in names)
        return name in targets or re.search(rf"\b{name.split('.')[-1]}\b", code)

    missing = []
    for event, (kept, tested) in rows.items():
        tests = re.findall(r"`(?:make )?((?:[\w/]*(?:test|fuzz)_\w+\.\w+|[\w-]+))`", tested)
        missing += [] if tests else [(event, "no test")]
        missing += [(event, name) for name in [*tests, *re.findall(r"`([\w./]+)`", kept)] if not exists(name)]
    assert len(rows) > 40
    assert not missing


def raised_for(status):
    """Return the name of the exception that Python raises for a status of the C library; "" for success."""
    try:
        library.check(status, SimpleNamespace(offset=0, found=0, expected=0))
    except codec.CodecError as e:
        return type(e).__name__
    return ""


def test_table_of_errors_has_every_status_and_its_exception():
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|.*\| `?(\w*)`? ?\|$", ERRORS.read_text(), re.MULTILINE)
    assert rows == [(str(int(s)), s.name, raised_for(s)) for s in codec.Status]


def test_table_of_errors_has_every_exception():
    names = set(re.findall(r"^\| `(\w+)` \| `\w+` \|", ERRORS.read_text(), re.MULTILINE))
    assert names == {e for e in codec.__all__ if e.endswith("Error")} - {"CodecError"}
