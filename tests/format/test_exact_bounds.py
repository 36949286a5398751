"""codec.bound with exact=True returns the exact size of the frame that encode() returns."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import codec
from codec._c.traits import has_fixed_rate
from support.specs import SPECS

FIXED = {name: spec for name, spec in SPECS.items() if has_fixed_rate(spec)}
SHAPES = [(), (0,), (1,), (5,), (3, 7), (16_384,), (16_385,), (100, 1000), (81_921,), (3, 70_000)]
SEGMENTS = [
    [(0, (64, 100)), (6400, (64,)), (7000, (50, 3000))],
    [(10, (9000,)), (9010, (3, 20_000)), (69_010, (2, 2, 1500))],
    [(0, (200_000,))],
    [],
]


def values(shape):
    return np.random.default_rng(0).uniform(-0.4, 0.4, shape).astype(np.float32)  # below the given scales of all SPECS


def viewed(x, dtype, segments=None):
    """Return a view of float32 values in another dtype."""
    if dtype == "bfloat16":
        x = (x.view(np.uint32) >> 16).astype(np.uint16)
    return codec.view(x.astype(np.float16) if dtype == "float16" else x, dtype, segments)


@pytest.mark.parametrize("spec", FIXED.values(), ids=FIXED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_exact_bound_is_the_size_for_every_fixed_rate_spec(spec, dtype):
    for shape in SHAPES:
        assert codec.bound(shape, dtype, spec, exact=True) == len(codec.encode(viewed(values(shape), dtype), spec)), (
            shape
        )


@pytest.mark.parametrize("spec", FIXED.values(), ids=FIXED)
def test_exact_bound_is_the_size_for_buckets_of_parameters(spec):
    x = values(200_000)
    for segments in SEGMENTS:
        frame = codec.encode(codec.view(x, segments=segments), spec)
        assert codec.bound(x.shape, "float32", spec, segments=segments, exact=True) == len(frame), segments


# Group sizes below and above 16,384, the number of values of a block with smaller groups
GROUPS = st.integers(1, 40_000)


@st.composite
def fixed_specs(draw):
    """Draw a spec of fixed rate, with any group size that its codec accepts."""
    spec = draw(st.sampled_from(list(FIXED.values())))
    try:
        return dataclasses.replace(spec, group_size=draw(GROUPS)) if draw(st.booleans()) else spec
    except (TypeError, codec.SpecError):  # the codec has no groups, or only groups of one size
        return spec


ANY_FIXED = fixed_specs()
DTYPE = st.sampled_from(["float32", "bfloat16", "float16"])


@given(ANY_FIXED, DTYPE, st.lists(st.integers(0, 40), max_size=3) | st.lists(st.integers(0, 90_000), max_size=1))
def test_exact_bound_is_the_size_for_any_shape(spec, dtype, shape):
    assert codec.bound(shape, dtype, spec, exact=True) == len(codec.encode(viewed(values(shape), dtype), spec))


@given(
    ANY_FIXED,
    DTYPE,
    st.lists(st.tuples(st.integers(0, 300), st.lists(st.integers(1, 200), max_size=2)), max_size=4),
    st.integers(0, 300),
)
def test_exact_bound_is_the_size_for_any_segments(spec, dtype, gaps_and_shapes, rest):
    segments, n = [], 0
    for gap, shape in gaps_and_shapes:
        segments.append((n + gap, tuple(shape)))
        n += gap + math.prod(shape)
    n += rest
    frame = codec.encode(viewed(values(n), dtype, segments), spec)
    assert codec.bound(n, dtype, spec, segments=segments, exact=True) == len(frame)


def test_exact_bound_takes_mappings_and_presets():
    parameters = {"weight": (64, 100), "bias": (64,)}
    x = values(6464)
    frame = codec.encode(codec.view(x, segments=parameters), codec.preset("smallest"))
    assert codec.bound(6464, "f4", "smallest", segments=parameters, exact=True) == len(frame)


@pytest.mark.parametrize("spec", [spec for spec in SPECS.values() if not has_fixed_rate(spec)])
def test_exact_bound_rejects_specs_of_variable_rate(spec):
    with pytest.raises(codec.SpecError, match="depends on the values"):
        codec.bound(1000, "float32", spec, exact=True)


def test_exact_bound_rejects_impossible_tensors():
    with pytest.raises(codec.ArgumentError):
        codec.bound(1000, "int32", codec.Quantize(4), exact=True)
    with pytest.raises(codec.ArgumentError):
        codec.bound(1000, "float32", codec.Quantize(4), segments=[(0, (1001,))], exact=True)
    with pytest.raises(codec.LimitError):
        codec.bound(1 << 50, "float32", codec.Quantize(4), exact=True)
