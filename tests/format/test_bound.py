"""codec.bound is an upper bound of the frame size for every input, and with segments a tight one."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import codec
from codec._c.traits import has_fixed_rate
from support.specs import FAMILIES, LOSSLESS, LOSSY, SPECS, TOPKS

DTYPE = st.sampled_from(["float32", "bfloat16", "float16"])
GROUPS = st.integers(1, 20_000)
ROWS = st.none() | st.just("row") | GROUPS
ANY_ROWS = st.one_of(
    st.builds(codec.Sign, st.sampled_from(["l1", "l2", "two_mean"]), ROWS),
    st.builds(codec.Ternary, st.sampled_from(["2bit", "base3", "entropy"])),
    st.builds(codec.Float8, st.sampled_from(["e4m3fn", "e5m2"]), st.none() | GROUPS, entropy=st.booleans()),
    st.builds(codec.Float8, st.sampled_from(["mxfp8_e4m3", "mxfp8_e5m2"]), entropy=st.booleans()),
    st.builds(codec.Float4, st.sampled_from(["nvfp4", "mxfp4"])),
    st.builds(codec.Quantize, st.integers(1, 8), GROUPS),
    st.builds(codec.Quantize, st.integers(2, 8), GROUPS, st.just("odd")),
)
# Shapes of segments: tiny ones, which have the most parts per value; rows of 64 values or more; large ones.
SHAPE = st.one_of(
    st.lists(st.integers(0, 9), max_size=3),
    st.tuples(st.integers(1, 20), st.integers(30, 300)),
    st.tuples(st.integers(4096, 20_000)),
    st.tuples(st.integers(20, 90), st.integers(200, 300)),
)
LAYOUT = st.tuples(
    st.lists(st.tuples(st.integers(0, 3) | st.integers(0, 300), SHAPE), max_size=12), st.integers(0, 300)
)


def laid_out(layout):
    """Return segments at offsets with gaps between them, and the total number of values, trailing ones included."""
    segments, n = [], 0
    for gap, shape in layout[0]:
        segments.append((n + gap, tuple(shape)))
        n += gap + math.prod(shape)
    return segments, n + layout[1]


def uniform(n, dtype, seed, digits):
    """Return uniform values of `digits` decimal digits. With few digits, an entropy stage reduces the frame."""
    x = np.round(np.random.default_rng(seed).uniform(-0.4, 0.4, n), digits).astype(np.float32)
    if dtype == "bfloat16":
        return (x.view(np.uint32) >> 16).astype(np.uint16)
    return x.astype(dtype)


def encoded(x, dtype, segments, spec, nbytes, *, engine: Any = "native", residual=None):
    """Return a frame, encoded into memory of `nbytes` bytes. Encoding raises an error if it needs more."""
    view, out = codec.view(x, dtype, segments), np.empty(nbytes, np.uint8)
    options = codec.options(engine=engine, threads=2)
    feedback = residual is not None
    return codec.encode(view, spec, out=out, residual=residual, feedback=feedback, options=options)


@given(ANY_ROWS, DTYPE, LAYOUT, st.integers(0, 9), st.integers(0, 6))
def test_bounds_hold_for_any_segments(spec, dtype, layout, seed, digits):
    segments, n = laid_out(layout)
    x = uniform(n, dtype, seed, digits)
    for given_segments in (segments, []):
        most = codec.bound(n, dtype, spec, segments=given_segments)
        frame = encoded(x, dtype, given_segments, spec, most)
        again = encoded(x, dtype, given_segments, spec, most, residual=np.zeros(n, np.float32))
        assert len(frame) == len(again) == most if has_fixed_rate(spec) else len(frame) <= most
        assert most <= codec.bound(n, dtype, spec)


@given(st.integers(0, 2000), st.integers(1, 70), DTYPE, st.sampled_from(list(LOSSY | TOPKS)), st.data())
def test_bound_without_segments_holds_for_as_many_parts_as_a_frame_may_have(n, cuts, dtype, name, data):
    at = sorted(data.draw(st.lists(st.integers(0, n), min_size=cuts, max_size=cuts)))
    segments = [(a, (b - a,)) if i % 2 else (a, (1, b - a)) for i, (a, b) in enumerate(pairwise(at))]
    x, spec = uniform(n, dtype, 1, 6), (LOSSY | TOPKS)[name]
    most = codec.bound(n, dtype, spec)
    frame = encoded(x, dtype, segments, spec, most)
    assert len(frame) <= codec.bound(n, dtype, spec, segments=segments) <= most


@pytest.mark.parametrize("engine", ["native", "numba"])
@pytest.mark.parametrize("name", [*FAMILIES, "ternary_entropy"])
def test_all_engines_encode_into_memory_of_the_bound(name, engine):
    spec, segments = SPECS[name], [(0, (64, 100)), (6400, (7,)), (6407, (3, 33)), (7000, (50, 300))]
    x = uniform(25_000, "float32", 2, 6)
    levels = np.zeros(x.size, np.uint8)
    bound_spec = spec.bind(levels=levels) if isinstance(spec, codec.Truncate) and spec.level == "optimizer" else spec
    for given_segments in (segments, []):
        most = codec.bound(x.size, "float32", spec, segments=given_segments)
        frame = encoded(x, None, given_segments, bound_spec, most, engine=engine)
        assert frame == codec.encode(codec.view(x, segments=given_segments), bound_spec)


@given(st.booleans(), DTYPE, LAYOUT)
def test_bound_of_an_entropy_stage_is_close_to_the_size_without_one(ternary, dtype, layout):
    """An entropy stage raises the bound by at most a codebook of 131 bytes, and a head of 4 bytes and padding to 8 per
    block.
    """
    coded = codec.Ternary("entropy") if ternary else codec.Float8(entropy=True)
    plain = codec.Ternary("base3") if ternary else codec.Float8()
    segments, n = laid_out(layout)
    segments = [s for s in segments if math.prod(s[1][-1:]) <= 16_384]  # an entropy stage splits longer rows
    frame = codec.bound(n, dtype, plain, segments=segments, exact=True)
    most, nblocks = codec.bound(n, dtype, coded, segments=segments), -(-n // 8192) + 2 * len(segments) + 1
    assert frame <= most <= frame + 136 + 8 * nblocks


def test_bounds_of_small_frames():
    """Bounds for 1,024 values without segments, with one segment and with unknown segments have the expected sizes."""
    for spec, sizes in (
        (codec.Float8(), (1096, 1176, 4864)),
        (codec.Sign(), (200, 224, 3320)),
        (codec.Quantize(4), (640, 664, 4352)),
    ):
        rows = [(0, (16, 64))]
        assert codec.bound(1024, "float32", spec, segments=()) == sizes[0]
        assert codec.bound(1024, "float32", spec, segments=rows) == sizes[1]
        assert codec.bound(1024, "float32", spec) == sizes[2]


@pytest.mark.parametrize("name", LOSSLESS)
def test_segments_do_not_change_bounds_of_stored_tensors(name):
    x = np.frombuffer(np.random.default_rng(3).bytes(40_000), np.uint32).view(np.float32)
    segments = [(0, (50, 100)), (5000, (40, 100))]
    most = codec.bound(x.size, "float32", LOSSLESS[name], segments=segments)
    assert most == codec.bound(x.size, "float32", LOSSLESS[name]) == x.nbytes + 56
    assert len(encoded(x, None, segments, LOSSLESS[name], most)) == most


def test_bound_takes_what_views_take():
    parameters = {"weight": (64, 100), "bias": (64,)}
    pairs = codec.segments(parameters)
    assert codec.bound(6464, "f4", "small", segments=parameters) == codec.bound(6464, "f4", "small", segments=pairs)
    with pytest.raises(codec.ArgumentError, match="segments"):
        codec.bound(6463, "f4", "small", segments=parameters)
    with pytest.raises(codec.ArgumentError, match="pairs"):
        codec.bound(6464, "f4", "small", segments=7)
