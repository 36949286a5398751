"""The library's frames are bit-identical to those of the reference encoder, written from docs/spec/encoder.md."""

import itertools
import struct
from math import prod
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import codec
from codec import specs
from reference import encoder
from reference.decoder import DTYPES as NUMBERED
from support.encoder_rules import NUMBER, PATTERNS, ask_of, bits_of, matrix, same
from support.tensors import (
    ALL_DTYPES,
    FLOAT8_DTYPES,
    KINDS,
    float8_tensors,
    gap_tensors,
    random_bits,
    with_empty_rows,
)
from support.tiers import every

F32 = np.float32


def seen(frame):
    """Return the features of the format that a lossless frame uses."""
    fixed, flags, halved, nblocks = frame[10], frame[40], frame[41], frame[44]
    if not frame[8]:
        return {"stored"}
    found = {"fixed" * (fixed > 0), "halved" * (halved > 0), "prior" * (flags & 1), "model" * (flags >> 1)}
    directory = 48 + 8 * frame[7] + int.from_bytes(frame[12:16], "little")
    n = prod(int.from_bytes(frame[i : i + 8], "little") for i in range(48, 48 + 8 * frame[7], 8))
    at = directory + 8 * nblocks + fixed.bit_count() * (n + 7 & -8)
    for b in range(nblocks):
        head = int.from_bytes(frame[at : at + 4], "little")
        found |= {f"mode {head >> 2 * p & 3}" for p in range(NUMBERED[frame[6]][1]) if not fixed >> p & 1}
        found |= {"pruned" * (head >> 16 & 1), "gaps" * (head >> 17)}
        at = 8 * int.from_bytes(frame[directory + 8 * b : directory + 8 * b + 4], "little")
    return found - {""}


# -- Lossless frames equal the reference encoder's


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_lossless_frames(dtype):
    for kind, n in itertools.product(KINDS, (0, 1, 511, 512, 4095, 4096, 20_000)):
        same(random_bits(dtype, n, kind), dtype=dtype)
    same(random_bits(dtype, 5000, "normal"), codec.Lossless(max_code_length=2), dtype=dtype)
    same(random_bits(dtype, 5000, "mixed"), codec.Lossless(max_code_length=5), dtype=dtype, shape=(50, 1, 100))
    same(random_bits(dtype, 1, "normal"), dtype=dtype, shape=())


def test_lossless_samples_use_every_feature():
    """The tensors of these tests use every plane mode, halved planes, gaps, pruning and scale models."""
    found = set()
    rng = np.random.default_rng(0)
    products = (rng.integers(0, 16, 20_000) * rng.integers(0, 16, 20_000)).astype(np.uint8)
    found |= seen(same(products))
    found |= seen(same(products.astype(np.uint32) << 8 | rng.integers(0, 2, 20_000, np.uint32) * 3, dtype="float32"))
    gradient = rng.standard_normal(40_000).astype(F32)
    for cut in range(8, 24, 2):
        found |= seen(same(gradient.view(np.uint32) >> cut << cut, dtype="float32"))
    for step in (3, 70, 500):
        x = gradient.copy()
        x[::step] = 0
        found |= seen(same(x)) | seen(same(x.astype(np.float64))) | seen(same(x.astype(np.float16)))
        x[::step] = -0.0
        found |= seen(same(x)) | seen(same(x.astype(np.float64)))
    x = np.where(np.arange(40_000) % 4096 < 1500, 0, gradient)
    found |= seen(same(x)) | seen(same(x.astype(np.float64))) | seen(same((1000 * x).astype(np.int32)))
    found |= seen(same(gradient[:400])) | seen(same(gradient, codebook=codec.Codebook.from_tensors(gradient)))
    x = rng.integers(0, 1 << 32, 40_000, np.uint32)
    x[np.arange(40_000) // 128 % 30 == 3] = 0
    found |= seen(same(x)) | seen(same(x & np.uint32(0xFFFFFF00) | np.uint32(1)))
    found |= seen(same(matrix("float32", 100, 90), dtype="float32", shape=(100, 90)))
    modes = {f"mode {mode}" for mode in range(4)}
    assert found == {"stored", "fixed", "halved", "prior", "model", "gaps", "pruned"} | modes


@pytest.mark.parametrize("dtype", every(3, ALL_DTYPES))
def test_gaps(dtype):
    """Frames equal the reference encoder's if quad rows are empty, at all limits of the rule."""
    for x in every(2, gap_tensors(dtype)):
        same(x, dtype=dtype)
    # Fixed planes: the sample of planes has no empty row. Rows of -0 are not empty.
    wide = random_bits(dtype, 128 * 2000, "normal")
    same(with_empty_rows(wide, range(1, 2000, 40)), dtype=dtype)
    if dtype in PATTERNS:
        x, rows = wide[:20_000], np.arange(157)
        minus = bits_of(np.array([-0.0]), dtype)[0]
        same(np.where(np.arange(x.size) // 128 % 2, x, minus), dtype=dtype)
        same(np.where(np.arange(x.size) // 128 % 3 == 1, x, with_empty_rows(0 * x + minus, rows[::3])), dtype=dtype)
        for spec in (codec.Lossless(model="flat"), codec.Lossless(model="separable")):
            same(with_empty_rows(x, rows[rows % 25 > 0]), spec, dtype=dtype, shape=(200, 100))
            segments = [(70, (120, 90)), (19_000, (900,))]
            same(with_empty_rows(x, rows[rows % 5 > 0]), spec, dtype=dtype, segments=segments)


@pytest.mark.parametrize("dtype", FLOAT8_DTYPES)
def test_float8_frames(dtype):
    """Frames equal the reference encoder's with all numbers of raw bits, with and without a scale model."""
    found = set()
    for x in float8_tensors(dtype):
        for model in get_args(specs.Model):
            frame = same(x.ravel(), codec.Lossless(model=model), dtype=dtype, shape=x.shape)
            found.add((frame[40], frame[41]))
    assert {flags for flags, _ in found} == {0, 2}
    assert {halved for _, halved in found} == {0, 2, 4}
    x = np.concatenate([x.ravel() for x in float8_tensors(dtype)])[:90_000]
    segments = [(5, (70, 300)), (21_100, (700, 70)), (80_000, (9000,))]
    same(x, codec.Lossless(max_code_length=5), dtype=dtype, segments=segments)


@pytest.mark.parametrize("model", get_args(specs.Model))
@pytest.mark.parametrize("dtype", PATTERNS)
def test_scale_models(dtype, model):
    spec = codec.Lossless(model=model)
    for n in (4097, 8191, 8192, 16_383, 16_384, 16_385):
        same(random_bits(dtype, n, "mixed"), spec, dtype=dtype)
    for kind in KINDS:
        x = random_bits(dtype, 24_000, kind)
        same(x, spec, dtype=dtype, segments=[(100, (100, 90)), (9100, (130, 80)), (19_500, (7,)), (19_600, ())])
        same(x, spec, dtype=dtype, shape=(15, 10, 160))
    for rows, cols in ((64, 64), (63, 200), (100, 128), (300, 70), (20, 1000)):
        same(matrix(dtype, rows, cols), spec, dtype=dtype, shape=(rows, cols))
    x = np.concatenate([matrix(dtype, 100, 90), random_bits(dtype, 9000, "normal"), matrix(dtype, 90, 100)])
    same(x, spec, dtype=dtype, segments=[(0, (100, 90)), (9000, (9000,)), (18_000, (90, 100))])
    same(x, spec, dtype=dtype, segments=[(1, (2, 2)), (5000, (1000, 0)), (9000, (9, 10, 100))])


@pytest.mark.parametrize("dtype", every(2, PATTERNS))
def test_scale_model_of_large_tensors(dtype):
    """Frames equal the reference encoder's for scale models of more than 1,024 rows, with offsets of 1/8 octave."""
    rng = np.random.default_rng(1)
    same(matrix(dtype, 1100, 250), dtype=dtype, shape=(1100, 250))
    n = 524_288 if dtype in ("float32", "bfloat16") else 100_000
    x = bits_of(1.3 * rng.standard_normal(n + 5000), dtype)
    same(x, dtype=dtype, segments=[(1000, (1050, 64)), (80_000, (n - 100_000,)), (n - 10_000, (100, 90))])
    for scale in (0.7, 1.4) if n > 100_000 else ():
        for m in (n - 1, n):
            same(bits_of(scale * rng.standard_normal(m), dtype), dtype=dtype)


@pytest.mark.parametrize("spec", [codec.Lossless(), codec.Lossless(max_code_length=6, model="flat")], ids=repr)
def test_frames_with_a_shared_codebook(spec):
    for dtype, n in itertools.product(PATTERNS, (600, 30_000)):
        sample, x = random_bits(dtype, n, "normal"), random_bits(dtype, n, "normal", 1)
        counts = encoder.count_symbols(sample, NUMBER[dtype], sample.shape, ask_of(spec))
        book = codec.Codebook.from_counts(counts, spec, dtype)
        if dtype not in ("bfloat16",):
            assert book == codec.Codebook.from_tensors(sample.view(dtype), spec=spec)
        assert [*book.lengths, book.escape_length] == encoder.codebook(counts, spec.max_code_length)
        for kind in ("normal", "noise", "zeros"):
            same(random_bits(dtype, n, kind, 2), spec, dtype=dtype, codebook=book)
        same(x, spec, dtype=dtype, codebook=book)


@given(st.data())
def test_codebooks_from_counts(data):
    """Codebooks equal the reference encoder's for any counts, such as ties, many symbols and sums above 2^24."""
    most = data.draw(st.sampled_from([1, 2, 30, 1 << 14, 1 << 31]))
    # Counts that are almost equal and add up to more than 2^24
    close = st.lists(st.integers(83_000, 83_003), min_size=256, max_size=256)
    few = st.lists(st.integers(0, most), min_size=256, max_size=256)
    steep = st.builds(lambda r, k: [int(1 + k * r**i) for i in range(256)], st.floats(0.5, 1), st.integers(1, most))
    counts, cap = data.draw(few | steep | close), data.draw(st.integers(2, 8))
    book = codec.Codebook.from_counts(counts, codec.Lossless(max_code_length=cap))
    assert [*book.lengths, book.escape_length] == encoder.codebook(np.array(counts), cap)


@given(st.sampled_from(ALL_DTYPES), st.integers(0, 20_000), st.sampled_from(KINDS), st.integers(0, 2**32), st.data())
def test_random_lossless_frames(dtype, n, kind, seed, data):
    spec = codec.Lossless(data.draw(st.integers(2, 8)), data.draw(st.sampled_from(get_args(specs.Model))))
    cols = data.draw(st.integers(1, 300))
    shape = (n // cols, cols) if data.draw(st.booleans()) else (n // cols * cols,)
    cuts = sorted(data.draw(st.lists(st.integers(0, prod(shape)), max_size=4)))
    segments = [(a, (b - a,)) for a, b in itertools.pairwise(cuts)]
    same(random_bits(dtype, n, kind, seed)[: prod(shape)], spec, dtype=dtype, shape=shape, segments=segments or None)


def skewed(n, skew, seed=0):
    """Return random bytes whose frequencies differ by `skew`."""
    rng = np.random.default_rng(seed)
    return np.minimum(rng.integers(0, 256, n), rng.integers(0, 256 + skew, n)).astype(np.uint8)


def around_zero(n, deviation):
    """Return bytes normally distributed around 0, modulo 256."""
    return (np.random.default_rng(1).standard_normal(n) * deviation).astype(np.int64).astype(np.uint8)


def test_thresholds_of_plane_modes():
    """Frames equal the reference encoder's where coding a plane, block or nibble just pays, or 1 in 64 values is 0."""
    for skew in range(0, 240, 8):
        for n in (1100, 3333):
            x = skewed(n, skew)
            same(np.where(x > 200 - skew // 4, x & 0xF0, x).astype(np.uint8))
            same(255 - x)
            same(x.astype(np.uint32) << 8 | skewed(n, 240 - skew, 1), dtype="float32")
            same(skewed(n, 0, 2) & 0xF0 | x >> 4)
    # Each deviation fills one block
    same(np.concatenate([around_zero(16_384, deviation) for deviation in np.linspace(10, 60, 40)]))
    gradient = np.random.default_rng(4).standard_normal(4096).astype(F32)
    gradient[::64] = 0
    for dtype, zero in itertools.product(PATTERNS, (0, 1.0)):
        x = bits_of(gradient, dtype)
        same(x, dtype=dtype)
        x[64 * 9] = bits_of(np.array([zero or 0.5]), dtype)[0]
        same(x, dtype=dtype)
        same(x, codec.Lossless(model="separable"), dtype=dtype)


def test_thresholds_of_shapes():
    """Frames equal the reference encoder's at size limits of scale models: sides of 64 or 63, 8,192 or 8,191 values."""
    for dtype, rows, cols in itertools.product(("float32", "float64"), (63, 64, 128), (127, 128, 129)):
        x = matrix(dtype, rows, cols)
        same(x, codec.Lossless(model="separable"), dtype=dtype, shape=(rows, cols))
        for shape in ((rows, cols), (rows * cols,)):
            same(np.concatenate([x, x]), codec.Lossless(model="separable"), dtype=dtype, segments=[(100, shape)])
    x = random_bits("float32", 12_000, "normal")
    for count in (4095, 4096):
        same(x, codec.Sign(), dtype="float32", segments=[(3, (count,))])


@pytest.mark.parametrize("dtype", PATTERNS)
def test_thresholds_of_scale_models(dtype):
    """Frames equal the reference encoder's for offsets that just pay or just do not, and for clamped offsets."""
    rng = np.random.default_rng(6)
    for spread in np.linspace(0, 0.5, 25):
        scales = np.exp(spread * (rng.standard_normal((70, 1)) + rng.standard_normal((1, 120))))
        x = rng.standard_normal((70, 120)) * scales
        same(bits_of(x.ravel(), dtype), dtype=dtype, shape=x.shape)
        rows = np.exp(spread * rng.standard_normal((24, 1)))
        x = rng.standard_normal((24, 512)) * rows
        same(bits_of(x.ravel(), dtype), dtype=dtype, segments=[(0, (9000,))])
        x = rng.standard_normal((200, 64))
        x[rng.permutation(200)[: int(40 * spread)]] *= 40.0
        same(bits_of(x.ravel(), dtype), dtype=dtype, shape=x.shape)
    for n in (95, 96):
        x = rng.standard_normal((n, 90))
        x[5:8] *= 20.0
        same(bits_of(x.ravel(), dtype), codec.Lossless(model="separable"), dtype=dtype, shape=x.shape)


@pytest.mark.nightly
def test_sampling_of_large_tensors():
    """Frames equal the reference encoder's above 4,000,000 values, where fewer than 1 in 16 quad rows are sampled."""
    rng = np.random.default_rng(8)
    x = (rng.standard_normal(36_863 * 128) * np.exp(4 * rng.standard_normal(36_863 * 128))).astype(F32)
    same((x.view(np.uint32) >> 16).astype(np.uint16), dtype="bfloat16")


# -- Delta frames equal the reference encoder's


def delta_modes(frame):
    """Return the modes of a frame's regions."""
    (nblocks,) = struct.unpack_from("<I", frame, 44)
    directory = 48 + 8 * frame[7] + 16
    ends = [8 * struct.unpack_from("<I", frame, directory + 8 * b)[0] for b in range(nblocks)]
    return {frame[at] & 3 for at in [directory + 8 * nblocks, *ends][:nblocks]}


def moved(base, dtype, density, largest, seed):
    """Return `base` with a fraction `density` of values changed, most by up to `largest` patterns, some arbitrarily."""
    rng = np.random.default_rng([seed, len(base)])
    steps = rng.integers(1, largest + 1, len(base), dtype=np.uint64).astype(base.dtype)
    steps = np.where(rng.random(len(base)) < 0.5, steps, (0 - steps.astype(np.int64)).astype(base.dtype))
    steps = np.where(rng.random(len(base)) < 0.01, random_bits(dtype, len(base), "noise"), steps)
    return np.where(rng.random(len(base)) < density, base + steps, base).astype(base.dtype)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_delta_frames(dtype):
    found = set()
    for kind, n in every(3, itertools.product(KINDS, (0, 1, 1024, 1025, 6000))):
        base = random_bits(dtype, n, kind)
        for density, largest in ((0, 1), (0.002, 1), (0.05, 3), (0.7, 100)):
            new = moved(base, dtype, density, min(largest, 1 << 8 * base.itemsize - 2), seed=n)
            found |= delta_modes(same(new, codec.Delta(1024), dtype=dtype, base=base))
    base = random_bits(dtype, 20_000, "normal")
    for density, largest in ((0.001, 1), (1, 60)):
        new = moved(base, dtype, density, largest, seed=7)
        found |= delta_modes(same(new, codec.Delta(), dtype=dtype, shape=(100, 200), base=base))
    noise = random_bits(dtype, 20_000, "noise")
    for new in (noise, np.where(noise % 20 == 0, noise * base.dtype.type(77), base)):
        found |= delta_modes(same(new, codec.Delta(), dtype=dtype, base=base))
    assert found == {0, 1, 2, 3}


def test_delta_of_masters():
    """Delta frames of master weights, whose values all move by thousands of patterns, equal the reference encoder's."""
    for dtype, largest in (("float32", 5000), ("float64", 1 << 40)):
        base = random_bits(dtype, 3000, "normal")
        assert delta_modes(same(moved(base, dtype, 1, largest, seed=3), codec.Delta(), dtype=dtype, base=base)) == {1}
