"""TopK keeps the values of largest magnitude in each chunk."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import codec
from codec._c.library import isas, use_isa
from support.specs import TOPKS
from support.tensors import NUMPY_DTYPES

F32 = np.float32
SPECS = (codec.TopK(), codec.TopK(1 / 500, 1, 1 << 16), codec.TopK(1 / 2, 8, 64), codec.TopK(0.1, 3, 1024))


def kept(x, spec):
    """Return x with only the values of largest magnitude in each chunk, the first ones among equals; others are 0."""
    out = np.zeros_like(x)
    for first in range(0, len(x), spec.chunk):
        v = x[first : first + spec.chunk]
        k = -(-len(v) * spec.kept // spec.chunk)
        at = np.argsort(-np.abs(v.astype(F32)), kind="stable")[:k]
        out[first + at] = v[at]
    return out


def least(x, spec):
    """Return, for each value, the least magnitude that TopK keeps in the value's chunk."""
    out = np.zeros_like(x)
    for first in range(0, len(x), spec.chunk):
        v = np.sort(np.abs(x[first : first + spec.chunk]))[::-1]
        out[first : first + spec.chunk] = v[-(-len(v) * spec.kept // spec.chunk) - 1]
    return out


def values(n, seed, digits):
    """Return normally distributed values, rounded so that many magnitudes are equal and some are 0."""
    rng = np.random.default_rng([seed, n])
    x = np.round(rng.standard_normal(n) * np.exp2(rng.integers(-3, 3, n)), digits)
    x[n // 3 : n // 2] *= rng.random() < 0.5
    return x.astype(F32)


@given(st.integers(0, 70_000), st.integers(0, 9), st.integers(0, 4), st.sampled_from(SPECS))
def test_the_largest_values_are_kept(n, seed, digits, spec):
    x = values(n, seed, digits)
    expected = kept(x, spec)
    for isa in isas():
        with use_isa(isa):
            y = codec.decode(codec.encode(x, spec))
            assert ((np.sign(y) == np.sign(expected)) | ((y == 0) & (least(x, spec) == 0))).all()
            if spec.bits > 1:
                assert (np.abs(y - expected) <= np.abs(x).max(initial=0) / 2 ** (spec.bits - 1) + 0.01).all()


def test_scales_are_the_mean_or_the_least_and_the_largest_magnitude():
    x = np.zeros(640, F32)
    x[:10] = [3, -5, 4, 8, -7, 1, 2, 2.5, 1.5, 0.5]
    x[64:68] = 1, -3, 2, -2
    two = codec.decode(codec.encode(x, codec.TopK(5 / 64, 2, 64)))
    np.testing.assert_array_equal(two[:10], [3, -3, 3, 8, -8, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(two[64:68], [0, -3, 3, -3])  # the fifth kept value is 0: the smaller level is 0
    one = codec.decode(codec.encode(x, codec.TopK(4 / 64, 1, 64)))
    np.testing.assert_array_equal(one[:10], [0, -6, 6, 6, -6, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(one[64:68], [2, -2, 2, -2])
    assert not one[68:].any()


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_extreme_values(dtype):
    """No extreme value is decoded as Inf or -0, since scales have 8 exponent bits for every dtype."""
    kind = NUMPY_DTYPES[dtype]
    limits = ml_dtypes.finfo(kind)
    x = np.zeros(1000, F32)
    x[:4] = [float(v) for v in (limits.max, limits.min, limits.tiny, -limits.smallest_subnormal)]
    x = x.astype(kind)
    y = codec.decode(codec.encode(x, codec.TopK(1 / 16, 8, 64))).astype(F32)
    assert np.isfinite(y).all()
    np.testing.assert_allclose(y[:2], x[:2].astype(F32), rtol=2**-8)
    assert not np.signbit(y[y == 0]).any()


def test_zero_chunks_take_their_scales_alone():
    x = np.zeros(1 << 20, F32)
    assert len(codec.encode(x, codec.TopK())) == 48 + 8 + 16 * (8 + 64)
    assert not codec.decode(codec.encode(x, codec.TopK())).any()


@pytest.mark.parametrize("bits", [1, 2])
def test_size_of_normal_values(bits):
    """Frames have the expected size with SparseLoCo's settings, 1 value in 64 and chunks of 4,096 values."""
    x = np.random.default_rng(1).standard_normal(1 << 20).astype(F32)
    assert 8 * len(codec.encode(x, codec.TopK(bits=bits))) / x.size < {1: 0.14, 2: 0.16}[bits]


def test_accumulate_leaves_other_values_as_they_are():
    x = values(5000, 1, 3)
    frame = codec.encode(x, codec.TopK())
    y = codec.decode(frame)
    for out in (np.full(5000, -0.0, F32), np.full(5000, np.inf, F32)):
        expected = np.where(y == 0, out, out + F32(0.5) * y)
        codec.accumulate(frame, out, weight=0.5)
        assert out.tobytes() == expected.tobytes()


def test_reduce_adds_frames_of_different_positions():
    frames = [codec.encode(values(200_000, seed, 4), codec.TopK(bits=4)) for seed in range(3)]
    dense = [codec.decode(f) for f in frames]
    total = dense[0] + dense[1] + dense[2]
    for threads in (1, 3):
        options = codec.options(threads=threads)
        assert codec.reduce(frames, op="sum", options=options).tobytes() == total.tobytes()
        np.testing.assert_array_equal(codec.reduce(frames, op="mean", options=options), total / F32(3))
        np.testing.assert_array_equal(codec.reduce(frames, op="max", options=options), np.max(dense, axis=0))


@pytest.mark.parametrize("name", TOPKS)
def test_inspect_returns_the_spec(name):
    spec = TOPKS[name]
    found = codec.inspect(codec.encode(values(1000, 0, 3), spec)).spec
    assert (found.kept, found.bits, found.chunk, found.rounding) == (spec.kept, spec.bits, spec.chunk, spec.rounding)
    assert codec.inspect(codec.encode(np.zeros(0, F32), spec)).spec == codec.TopK(
        bits=spec.bits, rounding=spec.rounding
    )


def test_wrong_fields_are_rejected():
    for wrong in (
        *({"density": d} for d in (0, 0.6, -1, 1, float("nan"), "1", True, None)),
        *({"bits": b} for b in (0, 9, 1.0, None)),
        *({"chunk": c} for c in (0, 32, 100, 1 << 17, 64.0)),
        {"rounding": "up"},
        {"seed": -1},
    ):
        with pytest.raises(codec.SpecError, match=next(iter(wrong))):
            codec.TopK(**wrong)
    assert codec.TopK(1e-9).kept == 1


def test_deltas_of_activations_refuse_it():
    with pytest.raises(codec.SpecError, match="sends all values"):
        codec.ActivationDelta(codec.TopK())
