"""Frames of row codecs, and of all lossy codecs with error feedback, equal the reference encoder's."""

import functools
import itertools
from math import prod
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import codec
from codec import optimizers, specs
from reference import encoder
from reference.encoder import Ask
from support import flatcall
from support.encoder_rules import FLOATS, NUMBER, bits_of, same, tame
from support.specs import LOSSY, TOPKS, TRUNCATES
from support.tensors import KINDS, optimizer_state, random_bits
from support.tiers import every

F32 = np.float32
ROWS = (LOSSY | TOPKS) | {
    "topk_default": codec.TopK(),
    "topk_3": codec.TopK(1 / 2, 3, 1024, "stochastic"),
    "topk_sparse": codec.TopK(1 / 5000, 4, 1 << 16),
    "sign_block": codec.Sign("l1", 700),
    "ternary_entropy_clip": codec.Ternary("entropy", clip=0.7, seed=9),
    "ternary_given": codec.Ternary("base3", scale=1e4),
    "float8_given": codec.Float8("e5m2", scale=3.25, rounding="stochastic"),
    "float8_entropy_long": codec.Float8(group_size=20_000, entropy=True),
    "float4_nvfp4_stochastic": codec.Float4(rounding="stochastic", seed=2),
    "float4_mxfp4_nearest": codec.Float4("mxfp4"),
    "quantize_5": codec.Quantize(5, 128, "even", "nearest"),
    "quantize_2_zero": codec.Quantize(2, 40, "even", "nearest", zero_point=True),
}
ADAMW = optimizers.AdamW(1e-3, step=99)
EACH = pytest.mark.parametrize("spec", ROWS.values(), ids=list(ROWS))


@EACH
@pytest.mark.parametrize("dtype", FLOATS)
def test_frames_of_row_codecs(spec, dtype):
    stream = 5 << 32 | 3
    for kind, n in (("normal", 1), ("normal", 511), ("zeros", 2500), ("constant", 2500), ("sparse", 2500)):
        same(tame(dtype, n, kind), spec, dtype=dtype, stream=stream)
    same(tame(dtype, 0, "normal"), spec, dtype=dtype, shape=(3, 0))
    x = tame(dtype, 18_000, "wide")
    same(x, spec, dtype=dtype, shape=(60, 100, 3), stream=stream)
    same(x, spec, dtype=dtype, segments=[(5, (7,)), (100, (200, 3, 9)), (12_000, (4096,))], stream=1)


@pytest.mark.parametrize("packing", ["base3", "entropy"])
def test_ternary_frames_of_several_blocks(packing):
    """Ternary frames of several blocks equal the reference encoder's, for every packing and for unsampled blocks."""
    same(tame("bfloat16", 170_000, "normal"), codec.Ternary(packing), dtype="bfloat16")
    same(tame("float32", 17_000, "normal"), codec.Float8(group_size=512, entropy=True), dtype="float32")
    for n, row in itertools.product((511, 512), (100, 20_000)):
        same(
            tame("float32", n, "constant") ^ (np.arange(n, dtype=np.uint32) & 1) << 31,
            codec.Float8(group_size=row, entropy=True),
            dtype="float32",
        )
    for row in (16_383, 16_384, 16_385):
        same(tame("float32", 40_000, "normal"), codec.Float8(group_size=row, entropy=True), dtype="float32")
    for shape in ((9, 7, 9), (9, 8, 8), (9, 2, 32), (100, 63), (100, 64), (5, 70_000)):
        same(tame("bfloat16", prod(shape), "normal"), codec.Sign("l1", "row"), dtype="bfloat16", shape=shape)
    same(tame("float32", 290_000, "zeros"), codec.Float8(group_size=14_000, entropy=True), dtype="float32")


@given(st.sampled_from(sorted(ROWS)), st.integers(0, 6000), st.integers(0, 2**32), st.data())
def test_random_frames_of_row_codecs(name, n, seed, data):
    dtype, kind = data.draw(st.sampled_from(FLOATS)), data.draw(st.sampled_from(KINDS))
    stream = data.draw(st.integers(0, 2**64 - 1))
    same(tame(dtype, n, kind, seed), ROWS[name], dtype=dtype, stream=stream)


N = 1 << 14


@functools.cache
def halves_of(rounding):
    """Return the random words of seed 3 and stream 5, or the constant word of rounding to nearest."""
    if rounding == "nearest":
        return np.full(N, 1 << 15)
    return encoder.draws(Ask(6, seed=3, stream=5), N, 0)


def places(h, most):
    """Return numbers below `most` just below their rounding point, which an addition in float32 would round up."""
    rng = np.random.default_rng(most)
    x = rng.integers(0, most, N) + (65535 - h + rng.choice([0, 0, 0.25, 1], N)) / 65536
    return np.where(h == 65535, np.nextafter(F32(0.5), F32(0)) / F32(65536), x.astype(F32))


def argument(function, guess, target):
    """Return the float32 x near `guess` for which function(x) is closest to `target`."""
    near = [guess]
    for end in (F32(-2), F32(2)):
        x = guess
        for _ in range(4):
            near.append(x := np.nextafter(x, end))
    near = np.clip(near, -1, 1)
    with np.errstate(invalid="ignore"):
        return near[np.abs(function(near).astype(np.float64) - target).argmin(0), np.arange(N)]


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("levels", ["even", "odd"])
@pytest.mark.parametrize("bits", [2, 5, 8])
def test_quantize_rounds_without_double_rounding(bits, levels, rounding):
    """Quantize does not round the sum 2^16 x + 1/2 before rounding to a level, which matters from 128 levels on."""
    n = 2**bits - 1 if levels == "even" else 2 ** (bits - 1) - 1
    place = (lambda x: (x + F32(1)) * F32(n / 2)) if levels == "even" else (lambda x: np.abs(x) * F32(n))
    target = np.minimum(places(halves_of(rounding), n), n)
    x = argument(place, (target / n * 2 - 1 if levels == "even" else target / n).astype(F32), target)
    x[0] = 1
    if levels == "odd":
        x[1::2] *= -1
    same(x, codec.Quantize(bits, N, levels, rounding, seed=3), stream=5)


def test_quantize_to_nearest_rounds_without_double_rounding():
    """A position of 154.49999 is rounded to 154; adding 1/2 in float32 would give 155."""
    x = np.zeros(4096, F32)
    x[:2] = 1, 0.21176453
    assert same(x, codec.Quantize(8, 4096, "even", "nearest"))[69] == 154


SMALL = {"e4m3fn": (3, 7, 448), "e5m2": (2, 15, 57344), "e2m1": (1, 1, 6)}


def magnitudes(kind, h):
    """Return values with all exponents; those below the normal range lie just below a rounding point."""
    m, bias, most = SMALL[kind]
    rng = np.random.default_rng(bias)
    x = np.exp2(rng.uniform(-bias - m - 3, np.log2(most) + 0.3, N)).astype(F32)
    x = np.where((h < 65535) & (rng.random(N) < 0.3), x, np.ldexp(places(h, 1 << m), 1 - bias - m)).astype(F32)
    x[1::2] *= -1
    return x


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("kind", SMALL)
def test_small_floats_round_without_double_rounding(kind, rounding):
    """Small floats are rounded once, also below the normal range."""
    x = magnitudes(kind, halves_of(rounding))
    if kind == "e2m1":
        x = np.clip(x, -6, 6)
        x[::32] = 6  # the largest value of each group is 6, so that all scales are 1
        same(x, codec.Float4("mxfp4", rounding, seed=3), stream=5)
    else:
        same(x, codec.Float8(kind, N, rounding, scale=1.0, seed=3), stream=5)


@pytest.mark.parametrize("format", ["e4m3fn", "e5m2"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_float8_ignores_nan_and_inf_for_scales(dtype, format):
    x = random_bits(dtype, 9000, "noise")
    top = {"float32": 0x7F800000, "bfloat16": 0x7F80, "float16": 0x7C00}[dtype]
    x[::50] |= top
    x[100:400] |= top
    same(x, codec.Float8(format, 100, nonfinite="propagate"), dtype=dtype)
    same(x, codec.Float8(format, 3000, "stochastic", "propagate", entropy=True), dtype=dtype)
    same(x, codec.Float8(f"mxfp8_{format[:4]}", nonfinite="propagate", entropy=True), dtype=dtype)


def test_float8_frames_hold_no_infinity():
    """Float8 frames hold no infinity, which section 8 of the format forbids."""
    for x, expected in (([3.4e38], 3.4028235e38), ([-3.4e38, 1], -3.4028235e38)):
        y = codec.decode(same(np.array(x, F32), codec.Float8(scale=1e-36)))
        assert y[0] == F32(expected)


@pytest.mark.parametrize("scale", [0.01, 1e37, 1e-41, 1e-44])
def test_ternary_ties_and_scales_without_a_reciprocal(scale):
    """Ternary frames equal the reference encoder's for ties, decided by a second random word, and for tiny scales."""
    rng = np.random.default_rng(3)
    x = (rng.standard_normal(N) * scale).astype(F32)
    same(x, codec.Ternary(seed=3), stream=5)
    ties = ((halves_of("stochastic") + 0.5) / 65536).astype(F32)
    ties[0] = 1
    same(ties, codec.Ternary("base3", seed=3, scale=1.0), stream=5)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("clip", [None, 0.5, 2.5, 1e5])
@pytest.mark.parametrize("scale", [None, 4.4321])
def test_ternary_scales(clip, scale, dtype):
    x = np.random.default_rng(3).standard_normal(9000) * 0.7 + 0.1
    same(bits_of(x, dtype), codec.Ternary(scale=scale, clip=clip), dtype=dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_ternary_scale_of_zeros(dtype):
    for clip in (None, 2.5):
        same(bits_of(np.zeros(9000), dtype), codec.Ternary("entropy", scale=0.0, clip=clip), dtype=dtype)


@pytest.mark.parametrize("variant", get_args(specs.SignScale))
@pytest.mark.parametrize("n", [1, 31, 33, 4095, 4097, 3 * 4096, 7 * 4096 + 1, 50_000])
def test_sums_of_sign_scales(variant, n):
    """Sign's scales equal the reference encoder's for a part, one long row, many rows, and sums that overflow."""
    x = np.random.default_rng(n).standard_normal(n).astype(F32)
    x[::5] = -0.0
    for y in (x, np.clip(x, -3, 3) * F32(1e38), -np.abs(x)):
        same(y, codec.Sign(variant))
        same(y, codec.Sign(variant, n))
    same(x, codec.Sign(variant, 700))
    same(np.full(n, 65504, np.float16), codec.Sign(variant))


AMAX = np.exp2(np.linspace(-149, 127, 300)) * np.linspace(1, 1.99, 300)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_row_scales_from_the_smallest_to_the_largest(rounding):
    for row in (16, 32):
        x = np.zeros((301, row), F32)
        x[:300, 5] = -AMAX
        for spec in (codec.Float8("e4m3fn", row, rounding), codec.Float8("e5m2", row, rounding)):
            same(x, spec)
        same(x, codec.Quantize(4, row, "even", rounding))
        same(x, codec.Quantize(4, row, "even", rounding, zero_point=True))
        same(x, codec.Float4("mxfp4", rounding))
        same(x, codec.Float8("mxfp8_e4m3", rounding=rounding))
        same(x, codec.Float8("mxfp8_e5m2", rounding=rounding))
        same(x, codec.Float8("mxfp8_e5m2", scale="rceil"))
        for top in (1e-44, 1e-30, 1.0, 3e38):
            same((x / AMAX[-1] * top).astype(F32), codec.Float4("nvfp4", rounding))


# -- Frames with error feedback


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("spec", every(2, [*LOSSY.values(), *TOPKS.values(), *TRUNCATES.values()]), ids=repr)
def test_frames_with_error_feedback(spec, dtype):
    """Frames with feedback equal the reference encoder's, also if tensor + residual exceeds the dtype's range."""
    n = 3000
    error = np.random.default_rng(2).standard_normal(n).astype(F32)
    error[11:14] = 70_000, -70_000, 3.4e38
    x = tame(dtype, n, "normal")
    x[9:14] = bits_of(np.array([3, 4, 65504, -65504, 3]), dtype)
    how = (
        {"optimizer": ADAMW, "state": optimizer_state(n)}
        if isinstance(spec, codec.Truncate) and spec.level == "optimizer"
        else {}
    )
    same(x, spec, dtype=dtype, residual=error, feedback=True, **how)
    if isinstance(spec, codec.Truncate) or getattr(spec, "nonfinite", None) == "propagate":
        error[20:23] = np.nan, np.inf, -np.inf
        error[:600] = 0
        x[100] = bits_of(np.array([np.inf]), dtype)[0]
        error[100] = -np.inf
        same(x, spec, dtype=dtype, residual=error, feedback=True, **how)
        same(
            x[:300],
            spec,
            dtype=dtype,
            residual=error[:300],
            feedback=True,
            **({"optimizer": ADAMW, "state": optimizer_state(300)} if how else {}),
        )
    left = error.copy()
    frame = flatcall.encode(x, spec, dtype=dtype, residual=left, feedback=True, **how)
    shared = how if getattr(spec, "level_coding", None) == "shared" else {}
    with np.errstate(all="ignore"):
        sums = encoder.floats(x, NUMBER[dtype]) + error
        lost = sums - flatcall.reduce([frame], "sum", **shared)
    np.testing.assert_array_equal(left, np.where(np.isfinite(sums), lost, 0))
