"""Lossless round trips restore every bit, for every dtype, shape and distribution of values."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import codec
from codec._c.library import ITEMSIZE
from support import flatcall
from support.tensors import ALL_DTYPES, KINDS, random_bits


def same(x, dtype=None, **kw):
    """Check that decoding returns every bit of x, and return the frame."""
    frame = flatcall.encode(x, dtype=dtype, **kw)
    assert len(frame) <= codec.bound(x.shape, dtype or x.dtype)
    y = codec.decode(frame, out=np.empty_like(x, order="C"))
    assert y.tobytes() == x.tobytes()
    codec.verify(frame)
    return frame


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_every_dtype_and_distribution(dtype, kind, isa):
    for n in (0, 1, 512, 1000, 4096, 16384, 16385, 70000):
        same(random_bits(dtype, n, kind), dtype)


@pytest.mark.parametrize(
    "spec", [codec.Lossless(), codec.Sign(), codec.Float8(), codec.Quantize(4), codec.Truncate(level=1)]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_decode_with_nontemporal_stores(spec, dtype, isa):
    """Non-temporal stores decode the same values and change no byte around the destination, at any address."""
    n = 40_000
    x = random_bits(dtype, n, "normal")
    frame = codec.encode(codec.view(x, dtype), spec)
    expected = codec.decode(frame, out=np.empty_like(x))
    for offset in (0, 1, 7, 31):
        room = np.full(n + 64, 7, x.dtype)
        codec.decode(frame, out=room[offset : offset + n], options=codec.CallOptions(nontemporal=True))
        assert room[offset : offset + n].tobytes() == expected.tobytes()
        assert (np.delete(room, slice(offset, offset + n)) == 7).all()


@given(
    hnp.arrays(
        st.sampled_from([np.float32, np.float64, np.float16, np.int8, np.int16, np.int64, np.uint32, np.bool_]),
        hnp.array_shapes(min_dims=0, max_dims=8, min_side=0, max_side=12),
    )
)
def test_every_shape(x):
    y = codec.decode(codec.encode(x))
    assert y.shape == x.shape
    assert y.dtype == x.dtype
    assert y.tobytes() == x.tobytes()


@given(st.integers(0, 3000), st.sampled_from(ALL_DTYPES), st.integers(1, 50), st.integers(0, 2**32), st.data())
def test_few_distinct_bit_patterns(n, dtype, distinct, seed, data):
    """Tensors of few distinct bit patterns, whose symbol counts differ from those of gradients, are restored."""
    u = np.dtype(f"u{ITEMSIZE[dtype]}")
    values = data.draw(st.lists(st.integers(0, 2 ** (8 * u.itemsize) - 1), min_size=1, max_size=distinct))
    rng = np.random.default_rng(seed)
    weights = rng.dirichlet(np.full(len(values), 0.3))
    same(np.array(values, u)[rng.choice(len(values), n, p=weights)], dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("repeat", [1, 3])
def test_every_half_precision_pattern(dtype, repeat, isa):
    x = np.repeat(np.arange(1 << 16, dtype=np.uint16), repeat)
    same(x, dtype)
    np.random.default_rng(0).shuffle(x)
    same(x, dtype)


def test_special_values(isa):
    special = np.array(
        [0x7FC00001, 0xFFC12345, 0x7F800001, 0x80000000, 1, 0x807FFFFF, 0x7F800000, 0xFF800000], np.uint32
    )
    x = random_bits("float32", 20000, "normal")
    x[np.random.default_rng(1).choice(x.size, 3000, replace=False)] = np.resize(special, 3000)
    y = codec.decode(codec.encode(codec.view(x, "float32")))
    assert y.dtype == np.float32
    assert (y.view(np.uint32) == x).all()


@pytest.mark.parametrize("shape", [(300, 400), (64, 3, 7, 7), (128, 128), (1, 100_000), (100_000, 1), (20, 30, 50, 4)])
@pytest.mark.parametrize("model", ["auto", "flat", "separable"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_every_scale_model(shape, model, dtype, isa):
    n = int(np.prod(shape))
    same(random_bits(dtype, n, "mixed").reshape(shape), dtype, spec=codec.Lossless(model=model))


@pytest.mark.parametrize("cap", range(2, 9))
def test_every_code_length_limit(cap, isa):
    for kind in KINDS:
        same(random_bits("bfloat16", 20000, kind), "bfloat16", spec=codec.Lossless(max_code_length=cap))


@given(st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 200), st.integers(1, 200)), max_size=6))
def test_buckets_with_segments(parts):
    segments, end = [], 0
    for gap, rows, cols in parts:
        segments.append((end + gap, (rows, cols)))
        end += gap + rows * cols
    x = random_bits("float32", end + 777, "normal")
    for offset, shape in segments:
        x[offset : offset + shape[0] * shape[1]] += np.uint32(offset % 16 << 23)
    same(x, "float32", segments=segments, spec=codec.Lossless(model="separable"))
    same(x, "float32", segments=segments)


def test_scale_model_removes_scales_of_rows_and_columns():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((512, 768)) * np.exp(2 * rng.standard_normal((512, 1))) * np.exp(rng.standard_normal(768))
    x = x.astype(np.float32)
    flat = len(codec.encode(x, codec.Lossless(model="flat")))
    auto = len(codec.encode(x))
    plain = len(codec.encode(rng.standard_normal(x.shape).astype(np.float32)))
    assert auto < flat - x.size // 16  # the scale model saves at least half a bit per value
    assert auto < plain * 1.01  # at most 1% larger than a tensor whose rows and columns have equal scales


def test_planes_of_few_values_are_not_coded():
    """A plane is not coded if the codebook (128 bytes) would cost more than coding saves."""
    for seed in range(40):
        x = np.random.default_rng(seed).standard_normal(1024).astype(np.float32)
        assert codec.inspect(codec.encode(x)).sections["side"][1] < 64
    x = np.random.default_rng(0).standard_normal(1024).astype(np.float32)
    few = (x.view(np.uint32) & 0xFFF0FFFF).view(np.float32)  # the third byte has 16 distinct values
    assert len(codec.encode(few)) < len(codec.encode(x)) - 350


def test_zero_half_of_the_mantissa_costs_nothing():
    x = random_bits("float32", 1 << 17, "normal") & 0xFFFF0000
    assert len(codec.encode(codec.view(x, "float32"))) < 0.345 * x.nbytes


@pytest.mark.parametrize("model", ["auto", "flat"])
@pytest.mark.parametrize("n", [600, 5000, 70000])
def test_zeros_of_float64_cost_little(n, model):
    """Zeros have a symbol of their own for any mean exponent, and thus cost few bits."""
    x = np.random.default_rng(1).standard_normal(n)
    for scale in (1e-100, 1, 5, 1e80):
        frame = same(np.maximum(scale * x, 0), spec=codec.Lossless(model=model))
        assert len(frame) < 0.75 * len(codec.encode(x, codec.Lossless(model=model)))


def test_arrays_of_ml_dtypes():
    x = random_bits("bfloat16", 5000, "normal").view(ml_dtypes.bfloat16).reshape(50, 100)
    y = codec.decode(codec.encode(x))
    assert y.dtype == ml_dtypes.bfloat16
    assert y.tobytes() == x.tobytes()
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"):
        z = random_bits(name, 5000, "normal").view(getattr(ml_dtypes, name))
        assert codec.decode(codec.encode(z)).dtype == z.dtype
