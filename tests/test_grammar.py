"""Frames from the grammar, most of which no encoder writes: library and oracle take or refuse them alike."""

import sys
from pathlib import Path

import pytest

from codec._c import library

sys.path.insert(0, str(Path(__file__).parents[1] / "fuzz"))
import compare

FRAMES, PIECE, MOST = 1200, 100, 6000


@pytest.fixture(scope="module")
def grammar(tmp_path_factory):
    return compare.build(tmp_path_factory.mktemp("grammar"), Path(library._path).resolve())


@pytest.mark.parametrize("first", range(0, FRAMES, PIECE))
def test_library_and_oracle_agree(grammar, first):
    """What the format allows is decoded to the oracle's values, what it forbids is refused, on all kinds of frames."""
    for seed in range(first, first + PIECE):
        one, why = compare.compare(grammar, seed, MOST)
        assert not why, f"frame {seed}: {why}; {bytes(one.frame[: one.nbytes]).hex()}"


def test_frames_are_of_all_kinds(grammar):
    """The sample has frames of each codec that are taken, and as many that are refused: else the above says little."""
    taken, refused = set(), set()
    for seed in range(FRAMES):
        one = compare.One()
        grammar.frames_make(seed, MOST, one)
        (refused if one.status else taken).add(one.frame[5] if one.nbytes > 5 else 0)
    assert taken == set(range(1, 8))
    assert refused >= taken
