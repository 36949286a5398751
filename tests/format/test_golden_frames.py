"""Golden frames decode to their tensors, and the current encoder writes the same bytes (support/golden_frames.py)."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

import codec
from reference import decoder as oracle
from support import flatcall
from support.golden_frames import FOLDER, GOLDEN, NAMES, OLDER_FRAMES, decoded, golden_tensor


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_frame(name, isa):
    about = GOLDEN[name]
    frame = (FOLDER / f"{name}.codec").read_bytes()
    x, dtype, how = golden_tensor(name)
    assert hashlib.sha256(x.tobytes()).hexdigest() == about["tensor_sha256"]
    book = how.get("codebook")
    shared = {k: v for k, v in how.items() if k in ("optimizer", "state", "base")}
    y = flatcall.decode(frame, out=np.empty_like(x), codebooks=book, **shared)
    assert hashlib.sha256(y.tobytes()).hexdigest() == about.get("values_sha256", about["tensor_sha256"])
    assert flatcall.encode(x, dtype=dtype, **how) == frame
    lengths = {book.id: [*book.lengths, book.escape_length]} if book else None
    assert decoded(frame, lengths, how) == (dtype, x.shape, y.tobytes())


@pytest.mark.parametrize("path", OLDER_FRAMES, ids=[path.stem for path in OLDER_FRAMES])
def test_frame_of_a_former_encoder(path, isa):
    """Frames of former encoders, which made other choices, still decode to the same values."""
    frame, about = path.read_bytes(), GOLDEN[path.stem]
    x, dtype, how = golden_tensor(path.stem)
    assert flatcall.encode(x, dtype=dtype, **how) != frame
    values = codec.decode(frame, out=np.empty_like(x)).tobytes()
    assert hashlib.sha256(values).hexdigest() == about.get("older_values_sha256", about["tensor_sha256"])
    assert oracle.decode(frame) == (dtype, x.shape, values)


def test_every_golden_frame_exists():
    assert set(GOLDEN) == set(NAMES)
    assert OLDER_FRAMES


def test_example_of_the_specification():
    document = (Path(__file__).parents[2] / "docs/spec/format.md").read_text()
    assert oracle.dump(oracle.example()) in document
