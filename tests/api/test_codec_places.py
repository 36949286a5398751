"""Check that every codec of codec.specs.CODECS has its entry in each file that the table does not generate.

CONTRIBUTING.md lists these files in the order of work, in its recipe "A codec".
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

import codec
from codec import Delta, Lossless, TopK, Truncate, specs
from codec._c.library import lib
from codec.specs import CODECS

ROOT = Path(__file__).parents[2]
SOURCES = {".py", ".c", ".cc", ".h", ".cu", ".cuh"}  # suffixes of files that are searched in a folder


class Place(NamedTuple):
    """A file or folder in which every codec must have an entry."""

    path: str
    pattern: str  # regular expression of the entry; {Name}, {NAME}, {name}, {number} are replaced
    without: tuple[type[codec.Spec], ...] = ()  # codecs that need no entry

    def missing(self, kinds):
        """Return the names of the codecs that have no entry here."""
        path = ROOT / self.path
        files = sorted(p for p in path.rglob("*") if p.suffix in SOURCES) if path.is_dir() else [path]
        text = "\n".join(p.read_text() for p in files)
        return [
            kind.__name__
            for kind in kinds
            if kind not in self.without and not re.search(self._pattern_of(kind), text, re.MULTILINE)
        ]

    def _pattern_of(self, kind):
        name = kind.__name__
        number = getattr(lib, f"CODEC_{name.upper()}", 99)
        return self.pattern.format(Name=name, NAME=name.upper(), name=name.lower(), number=number)


PLACES = [
    # the specification, and its reference implementations for tests
    Place("docs/spec/format.md", r"\| codec \|.*\b{number} {name}\b"),
    Place("docs/spec/format.md", r"^\| offset \| type \| field\b.*\| {name} \|"),
    Place("docs/spec/encoder.md", r"\b(?i:{name})\b"),
    Place("tests/reference/decoder.py", r"\bcodec [!=]= {number}\b"),
    Place("tests/reference/encoder.py", r"\bask\.codec == {number}\b"),
    # Cases for tests/format/test_*_rules.py
    Place("tests/support/format_cases.py", r"^ .*\b{NAME}\b", (Lossless, Delta, TopK)),
    Place("tests/support/encoder_rules.py", r"\bcase codec\.{Name}\("),
    # C library
    Place("native/include/codec/codec.h", r"^#define CODEC_{NAME} {number}\b"),
    Place("native/src/exact/wire.h", r"^\tX\({NAME}, "),
    Place("native/tests/examples.h", r"^\tX\([\d.]+, {NAME}, "),  # all tests in C and C++
    # Python
    Place("codec/__init__.py", r'^    "{Name}",$'),
    Place("codec/_c/spec_structs.py", r"^    {Name}: \(_from_{name}, _to_{name}\),$"),
    # engines other than the native one
    Place("codec/engines/numba/", r"\blib\.CODEC_{NAME}\b", (Delta, TopK)),
    Place("native/cuda/", r"\b(CODEC_{NAME}|encode_{name})\b"),
    Place("native/src/job/launch.h", r'"encode_(rows<{number}>|{name}["<])'),
    # tests
    Place("tests/support/specs.py", r": codec\.{Name}\(", (Delta,)),  # lists specs that need no base
    Place("tests/codecs/test_lossy.py", r"^def test_{name}_", (Lossless, Truncate, Delta, TopK)),
    Place("tests/vectors/index.json", r'"\w+-{name}', (Lossless,)),
    # benchmarks and pages
    Place("bench/training/convergence.py", r"\b{Name}\(", (Delta, TopK)),
    Place("docs/codecs/index.md", r"^\| \[`{Name}\("),
    Place("docs/benchmarks/index.md", r"^\|[ |]*{Name}\b"),
    Place("docs/benchmarks/convergence.md", r"^\| `{Name}\(", (Delta, TopK)),
    Place("docs/spec/protocol.md", r"\('spec', \"{Name}\(", (Delta,)),
    Place("docs/internals/lossy.md", r"\b{Name}\b", (Lossless, Delta)),
]
EACH = pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place.path}: {place.pattern}")


@dataclass(frozen=True, slots=True)
class Imaginary(codec.Spec):
    """Codec that no file has an entry for."""


@EACH
def test_place_has_every_codec(place):
    missing = place.missing(CODECS)
    assert not missing, f'add {", ".join(missing)} to {place.path}; see "A codec" in CONTRIBUTING.md'


@EACH
def test_place_reports_a_codec_that_was_forgotten(place):
    assert place.missing([*CODECS, Imaginary]) == ["Imaginary"]


def test_table_has_every_spec_class():
    kinds = {kind for kind in vars(specs).values() if isinstance(kind, type) and issubclass(kind, codec.Spec)}
    assert kinds - {codec.Spec} == set(CODECS)


def test_recipe_names_every_place():
    pages = (ROOT / "CONTRIBUTING.md").read_text()
    recipe = pages.partition("### A codec\n")[2].partition("\n### ")[0]
    assert not {place.path for place in PLACES if f"`{place.path}`" not in recipe}
