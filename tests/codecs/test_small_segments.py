"""Rows keep their scales in small segments, and in pieces of segments that the partition among ranks cuts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import codec
from codec.tensors.segments import pack, unpack
from codec.torch.reduction import partition
from support.tiers import NIGHTLY

SHAPES = st.lists(
    st.one_of(
        st.tuples(st.integers(1, 40), st.integers(1, 150)),
        st.tuples(st.integers(1, 6), st.integers(1, 9), st.integers(1, 4)),
        st.tuples(st.integers(1, 300)),
        st.just(()),
    ),
    min_size=1,
    max_size=12,
)
SPECS = [
    codec.Float8(),
    codec.Float8(group_size=32),
    codec.Sign(),
    codec.Sign("l2"),
    codec.Sign("two_mean", group_size="row"),
    codec.Sign(group_size=1024),
    codec.Quantize(4, rounding="nearest"),
    codec.Quantize(2, group_size=100, levels="odd", rounding="nearest"),
    codec.Float4("nvfp4", rounding="nearest"),
    codec.Float4("mxfp4", rounding="nearest"),
]


def uneven(shapes, seed=0):
    """Return a flat bucket and its segments, in which each row has another magnitude."""
    g = np.random.default_rng(seed)
    parts = []
    for shape in shapes:
        rows = (*shape[:1], *(1 for _ in shape[1:])) if len(shape) > 1 else ()
        parts.append((g.standard_normal(shape) * 10.0 ** g.uniform(-4, 4, rows)).astype(np.float32).ravel())
    return np.concatenate(parts), codec.segments(shapes)


@pytest.mark.parametrize("spec", SPECS, ids=repr)
@given(SHAPES, st.integers(0, 1000))
def test_small_segments_are_encoded_as_if_alone(spec, shapes, seed):
    # An additional segment, so that the limit on parts allows one for each segment
    x, segments = uneven([*shapes, (64, 60)], seed)
    values = codec.decode(codec.encode(codec.view(x, segments=segments), spec))
    for offset, shape in segments:
        mine = x[offset : offset + int(np.prod(shape))]
        alone = codec.decode(codec.encode(mine.reshape(shape), spec)).ravel()
        assert values[offset : offset + mine.size].tobytes() == alone.tobytes(), (offset, shape)


def row_error(x, y, segments):
    """Return the largest error of any row of a bucket, relative to the row's norm."""
    worst = 0.0
    for offset, shape in segments:
        n, row = int(np.prod(shape)), shape[-1] if len(shape) > 1 else int(np.prod(shape))
        a, b = (v[offset : offset + n].reshape(-1, row).astype(float) for v in (x, y))
        worst = max(worst, float((np.linalg.norm(a - b, axis=1) / np.linalg.norm(a, axis=1)).max()))
    return worst


MODELS = {
    "a matrix": [(64, 128)],
    "odd rows": [(37, 101), (13,), (29, 77), (5, 250), (300,), (64, 64)],
    "a large model": [(256, 300), (300,), (513, 100), (100,), (90, 65), (70, 129)],
    "adapters": [shape for _ in range(24) for shape in ((8, 256), (256, 8))],
}


def through_ranks(x, segments, size, spec):
    """Split a bucket as an all-reduce of `size` ranks does; return the values decoded from the frames of its pieces."""
    slices = partition.cut(x.size, size, 4, pack(segments))
    pieces = [piece for pieces in slices for piece in pieces if piece.n]
    frames = [codec.encode(codec.view(x[p.begin : p.end], segments=unpack(p.segments)), spec) for p in pieces]
    return np.concatenate([codec.decode(frame) for frame in frames])


@pytest.mark.parametrize("size", range(1, 65) if NIGHTLY else (1, 2, 3, 4, 7, 16, 64))
@pytest.mark.parametrize("model", MODELS)
def test_rows_keep_their_scales_on_any_number_of_ranks(model, size):
    """Rows of 64 values or more decode to the same values on any number of ranks; no row's error exceeds 4%."""
    x, segments = uneven(MODELS[model])
    if model == "adapters":  # short rows share scales, so all rows of an adapter are given the same magnitude
        segments = [(o, (s[0], s[1]) if s[1] > 64 else (s[0] * s[1],)) for o, s in segments]
        x = x / np.repeat([np.abs(x[o : o + 2048]).max() for o, _ in segments], 2048).astype(np.float32)
    y = through_ranks(x, segments, size, codec.Float8())
    assert row_error(x, y, segments) < 0.04


@pytest.mark.parametrize("size", range(1, 65) if NIGHTLY else (2, 4, 64))
@pytest.mark.parametrize("spec", [codec.Float8(), codec.Sign("two_mean", group_size="row")], ids=repr)
def test_results_do_not_depend_on_the_number_of_ranks(spec, size):
    x, segments = uneven([(64, 128), (50, 100), (33, 65)])
    one = codec.decode(codec.encode(codec.view(x, segments=segments), spec))
    assert through_ranks(x, segments, size, spec).tobytes() == one.tobytes()


def test_segments_beyond_the_limit_of_parts_share_scales():
    """A frame of 160 values has at most 11 parts; all further segments belong to the last part."""
    x, segments = uneven([(1, 8), (8,)] * 10)
    frame = codec.encode(codec.view(x, segments=segments), codec.Sign())
    assert codec.inspect(frame).nsegments == 11
    assert codec.decode(frame).shape == (160,)
    assert len(frame) <= codec.bound(160, "float32", codec.Sign())
