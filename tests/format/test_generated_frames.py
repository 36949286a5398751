"""Library and reference decoder agree on frames generated from the grammar in fuzz/grammar.h."""

import sys
from pathlib import Path

import pytest

from codec._c import library

sys.path.insert(0, str(Path(__file__).parents[2] / "fuzz"))
import compare

FRAMES, PIECE, MOST = 1200, 100, 6000


@pytest.fixture(scope="module")
def grammar(tmp_path_factory):
    """Compile the generator fuzz/frames.c with the library under test."""
    return compare.build(tmp_path_factory.mktemp("grammar"), Path(library._path).resolve())


@pytest.mark.parametrize("first", range(0, FRAMES, PIECE))
def test_library_and_reference_decoder_agree(grammar, first):
    """Valid frames decode to the same values, and invalid ones are rejected by both."""
    for seed in range(first, first + PIECE):
        one, why = compare.compare(grammar, seed, MOST)
        assert not why, f"frame {seed}: {why}; {bytes(one.frame[: one.nbytes]).hex()}"


def test_generated_frames_cover_every_codec(grammar):
    """Valid and invalid frames of each codec occur in the sample."""
    taken, refused = set(), set()
    for seed in range(FRAMES):
        one = compare.One()
        grammar.frames_make(seed, MOST, one)
        (refused if one.status else taken).add(one.frame[5] if one.nbytes > 5 else 0)
    assert taken == {*range(1, 8), 9}  # fuzz_frames has no grammar of Delta, which needs a base
    assert refused >= taken
