"""The library's frames are bit-identical to those of the encoder that was written from docs/spec/encoder.md."""

import functools
import itertools
import struct
from dataclasses import replace
from math import prod
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import codec
from codec import optimizers, specs
from reference import encoder
from reference.decoder import DTYPES as NUMBERED
from reference.encoder import Ask
from support import flatcall
from support.specs import LOSSY, TOPKS, TRUNCATES
from support.tensors import ALL_DTYPES, KINDS, random_bits
from support.tiers import every

F32 = np.float32
NUMBER = {name: number for number, (name, *_) in NUMBERED.items()}
FLOATS = ("float32", "bfloat16", "float16")
LOSSLESS = codec.Lossless()
PATTERNS = (*FLOATS, "float64")


def ask_of(spec):
    """Return a spec as the reference encoder takes it: in the numbers of the format's parameters."""
    index = lambda choices, value: get_args(choices).index(value)
    stochastic = getattr(spec, "rounding", None) == "stochastic"
    match spec:
        case codec.Delta():
            return Ask(8, block_log2=(spec.block_size or 1 << 16).bit_length() - 1)
        case codec.TopK():
            log2 = spec.chunk.bit_length() - 1
            return Ask(9, 0, int(stochastic), spec.bits, seed=spec.seed, chunk_log2=log2, kept=spec.kept)
        case codec.Lossless():
            return Ask(1, index(specs.Model, spec.model), max_code_length=spec.max_code_length)
        case codec.Sign():
            row = encoder.BY_SHAPE if spec.group_size == "row" else spec.group_size or 0
            return Ask(2, index(specs.SignScale, spec.scale), row=row)
        case codec.Ternary():
            packing = index(specs.Packing, spec.packing)
            return Ask(3, packing, scale=spec.scale, clip=spec.clip, seed=spec.seed)
        case codec.Float8():
            options = stochastic | 2 * (spec.nonfinite == "propagate") | 4 * spec.entropy
            variant = index(specs.Format8, spec.format)
            scale = None if spec.scale == "rceil" else spec.scale
            options |= 128 * (spec.scale == "rceil")
            return Ask(4, variant, options, row=spec.group_size, scale=scale, seed=spec.seed)
        case codec.Float4():
            return Ask(5, index(specs.Format4, spec.format), int(stochastic), seed=spec.seed)
        case codec.Quantize():
            levels = 2 if spec.zero_point else index(specs.Levels, spec.levels)
            return Ask(6, levels, int(stochastic), spec.bits, spec.group_size, seed=spec.seed)
    cut = 16 * (spec.rounding == "truncate")
    if spec.fixed_level is not None:
        return Ask(7, 3, cut, spec.fixed_level, max_code_length=spec.max_code_length)
    options = cut | 8 * (spec.granularity == "bit")
    return Ask(
        7,
        index(specs.LevelCoding, spec.level_coding),
        options,
        max_code_length=spec.max_code_length,
        guard=spec.guard_bits,
    )


def asked_metric(ask, metric, state):
    """Return `ask` with a metric, groups of metrics or given levels, and the state."""
    if isinstance(metric, np.ndarray):
        return replace(ask, levels=metric)
    if metric is None:
        return ask
    groups = metric if isinstance(metric, list) else [(0, metric)]
    terms = [(start, m.final(state)) for start, m in groups]
    names = {"theta"} | {"v" for _, t in terms if t.theta_v} | {"m" for _, t in terms if t.m}
    floats = {name: np.asarray(x).astype(F32) for name, x in state.items() if name in names}
    p = {"float32": 23, "bfloat16": 7, "float16": 10}[state["theta"].dtype.name]
    numbers = [(start, (t.theta, t.theta_v, t.v, t.eps, t.m)) for start, t in terms]
    return replace(ask, groups=numbers, state=floats, p=p)


def same(x, spec=LOSSLESS, *, dtype=None, shape=None, **how):
    """Check that the library's frame equals the reference encoder's for every instruction set; return it."""
    dtype = dtype or x.dtype.name
    shape = shape or x.shape
    bits = x.reshape(-1).view(f"u{x.itemsize}")
    ask = asked_metric(ask_of(spec), how.get("optimizer"), how.get("state"))
    ask = replace(ask, segments=how.get("segments"), stream=how.get("stream", 0))
    if book := how.get("codebook"):
        ask = replace(ask, book=[*book.lengths, book.escape_length])
    if (error := how.get("residual")) is not None:
        ask = replace(ask, error=error.copy())
    if (base := how.get("base")) is not None:
        ask = replace(ask, base=base)
        how["base"] = codec.view(base.reshape(shape), dtype)
    expected = encoder.encode(bits, NUMBER[dtype], shape, ask)
    for isa in codec.isas():
        with codec.use_isa(isa):
            if error is not None:
                how["residual"] = error.copy()
            for threads in (1, 3) if x.nbytes > 400_000 and error is None else (1,):
                assert bytes(flatcall.encode(x.reshape(shape), spec, dtype=dtype, threads=threads, **how)) == expected
    return expected


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
        found |= {"pruned" * (head >> 16)}
        at = 8 * int.from_bytes(frame[directory + 8 * b : directory + 8 * b + 4], "little")
    return found - {""}


def matrix(dtype, rows, cols, seed=0):
    """Return bits of values whose rows and columns have scales of their own; some values are zero."""
    rng = np.random.default_rng([seed, rows, cols])
    scales = np.exp(1.5 * rng.standard_normal((rows, 1)) + 1.5 * rng.standard_normal((1, cols)) - 7)
    x = rng.standard_normal((rows, cols)) * scales
    x[: rows // 20], x[rows // 2, :], x[:, 5] = 0, 0, 0
    return bits_of(x.ravel(), dtype)


def bits_of(x, dtype):
    if dtype == "bfloat16":
        return (x.astype(F32).view(np.uint32) >> 16).astype(np.uint16)
    x = x.astype(dtype)
    return x.view(f"u{x.itemsize}")


# -- Lossless


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_lossless_frames(dtype):
    for kind, n in itertools.product(KINDS, (0, 1, 511, 512, 4095, 4096, 20_000)):
        same(random_bits(dtype, n, kind), dtype=dtype)
    same(random_bits(dtype, 5000, "normal"), codec.Lossless(max_code_length=2), dtype=dtype)
    same(random_bits(dtype, 5000, "mixed"), codec.Lossless(max_code_length=5), dtype=dtype, shape=(50, 1, 100))
    same(random_bits(dtype, 1, "normal"), dtype=dtype, shape=())


def test_lossless_samples_use_every_feature():
    """Every plane mode, halved planes, pruning and scale models occur in the tensors of these tests."""
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
    found |= seen(same(x)) | seen(same(matrix("float32", 100, 90), dtype="float32", shape=(100, 90)))
    modes = {f"mode {mode}" for mode in range(4)}
    assert found == {"stored", "fixed", "halved", "prior", "model", "pruned"} | modes


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
    """More than 1,024 rows, sampled quad rows, and offsets in eighths of an octave."""
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
    """Any counts: ties, many symbols, sums above 2^24."""
    most = data.draw(st.sampled_from([1, 2, 30, 1 << 14, 1 << 31]))
    close = st.lists(st.integers(83_000, 83_003), min_size=256, max_size=256)  # their sum is above 2^24
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
    """Return bytes some of which are more frequent than others."""
    rng = np.random.default_rng(seed)
    return np.minimum(rng.integers(0, 256, n), rng.integers(0, 256 + skew, n)).astype(np.uint8)


def around_zero(n, deviation):
    """Return bytes around 0 with a standard deviation."""
    return (np.random.default_rng(1).standard_normal(n) * deviation).astype(np.int64).astype(np.uint8)


def test_thresholds_of_plane_modes():
    """Counts at which coding a plane, a block or a nibble just pays, and at which 1 in 64 values is 0."""
    for skew in range(0, 240, 8):
        for n in (1100, 3333):
            x = skewed(n, skew)
            same(np.where(x > 200 - skew // 4, x & 0xF0, x).astype(np.uint8))
            same(255 - x)
            same(x.astype(np.uint32) << 8 | skewed(n, 240 - skew, 1), dtype="float32")
            same(skewed(n, 0, 2) & 0xF0 | x >> 4)
    same(np.concatenate([around_zero(16_384, deviation) for deviation in np.linspace(10, 60, 40)]))  # one block each
    gradient = np.random.default_rng(4).standard_normal(4096).astype(F32)
    gradient[::64] = 0
    for dtype, zero in itertools.product(PATTERNS, (0, 1.0)):
        x = bits_of(gradient, dtype)
        same(x, dtype=dtype)
        x[64 * 9] = bits_of(np.array([zero or 0.5]), dtype)[0]
        same(x, dtype=dtype)
        same(x, codec.Lossless(model="separable"), dtype=dtype)


def test_thresholds_of_shapes():
    """Sides of 64, segments and tensors of 8,192 values, and one less."""
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
    """Offsets that just pay, that just do not, and that are clamped."""
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
    """More than 4,000,000 values, of which fewer than 1 in 16 quad rows are sampled."""
    rng = np.random.default_rng(8)
    x = (rng.standard_normal(36_863 * 128) * np.exp(4 * rng.standard_normal(36_863 * 128))).astype(F32)
    same((x.view(np.uint32) >> 16).astype(np.uint16), dtype="bfloat16")


# -- row codecs


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
EACH = pytest.mark.parametrize("spec", ROWS.values(), ids=list(ROWS))


def tame(dtype, n, kind, seed=0):
    """Return finite values below 1e4."""
    x = random_bits(dtype, n, kind, seed)
    with np.errstate(invalid="ignore"):
        return np.where(np.abs(encoder.floats(x, NUMBER[dtype])) < 1e4, x, 0).astype(x.dtype)


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
    """Blocks of base 3 are longer; with more than 16 blocks some are not sampled."""
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
    """Return the random words of seed 3 and stream 5; constant ones for rounding to nearest."""
    if rounding == "nearest":
        return np.full(N, 1 << 15)
    return encoder.draws(Ask(6, seed=3, stream=5), N, 0)


def places(h, most):
    """Return numbers below `most`, just under the point where a sum rounded to float32 would be rounded up."""
    rng = np.random.default_rng(most)
    x = rng.integers(0, most, N) + (65535 - h + rng.choice([0, 0, 0.25, 1], N)) / 65536
    return np.where(h == 65535, np.nextafter(F32(0.5), F32(0)) / F32(65536), x.astype(F32))


def argument(function, guess, target):
    """Return the float32 near a guess whose value of `function` is closest to the target."""
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
    """The sum 2^16 x + 1/2 is not rounded, which matters most from 128 levels on."""
    n = 2**bits - 1 if levels == "even" else 2 ** (bits - 1) - 1
    place = (lambda x: (x + F32(1)) * F32(n / 2)) if levels == "even" else (lambda x: np.abs(x) * F32(n))
    target = np.minimum(places(halves_of(rounding), n), n)
    x = argument(place, (target / n * 2 - 1 if levels == "even" else target / n).astype(F32), target)
    x[0] = 1
    if levels == "odd":
        x[1::2] *= -1
    same(x, codec.Quantize(bits, N, levels, rounding, seed=3), stream=5)


def test_quantize_to_nearest_rounds_without_double_rounding():
    """A position of 154.49999 is rounded down; a sum with 1/2 in float32 would make it 155."""
    x = np.zeros(4096, F32)
    x[:2] = 1, 0.21176453
    assert same(x, codec.Quantize(8, 4096, "even", "nearest"))[69] == 154


SMALL = {"e4m3fn": (3, 7, 448), "e5m2": (2, 15, 57344), "e2m1": (1, 1, 6)}


def magnitudes(kind, h):
    """Return values of all exponents; below the normal range, just under the point of rounding up."""
    m, bias, most = SMALL[kind]
    rng = np.random.default_rng(bias)
    x = np.exp2(rng.uniform(-bias - m - 3, np.log2(most) + 0.3, N)).astype(F32)
    x = np.where((h < 65535) & (rng.random(N) < 0.3), x, np.ldexp(places(h, 1 << m), 1 - bias - m)).astype(F32)
    x[1::2] *= -1
    return x


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("kind", SMALL)
def test_small_floats_round_without_double_rounding(kind, rounding):
    """Also below the normal range."""
    x = magnitudes(kind, halves_of(rounding))
    if kind == "e2m1":
        x = np.clip(x, -6, 6)
        x[::32] = 6  # makes all scales powers of two
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
    """Section 8 of the format forbids it."""
    for x, expected in (([3.4e38], 3.4028235e38), ([-3.4e38, 1], -3.4028235e38)):
        y = codec.decode(same(np.array(x, F32), codec.Float8(scale=1e-36)))
        assert y[0] == F32(expected)


@pytest.mark.parametrize("scale", [0.01, 1e37, 1e-41, 1e-44])
def test_ternary_ties_and_scales_without_a_reciprocal(scale):
    """The second random word decides ties; reciprocals of tiny scales overflow."""
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
    """Sums of a part, of one long row and of many rows, and sums that overflow."""
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


# -- Truncate


def gradient(n, dtype="float32", scale=1e-3, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(n) * scale * np.exp(rng.standard_normal(n))
    x[rng.random(n) < 0.05] = 0
    x[7:9] = np.nan, np.inf
    return bits_of(x, dtype)


def state_of(n, seed=1):
    rng = np.random.default_rng(seed)
    m, v = rng.standard_normal(n) * 1e-3, rng.standard_normal(n) ** 2 * 1e-6
    return {"theta": (rng.standard_normal(n) * 0.02).astype(F32), "m": m.astype(F32), "v": v.astype(F32)}


ADAMW = optimizers.AdamW(1e-3, step=99)
METRICS = {
    "sgd": optimizers.SGD(1e-3),
    "momentum": optimizers.Momentum(1e-3, momentum=0.9),
    "nesterov": optimizers.Nesterov(1e-3, momentum=0.9, weight_decay=0.1),
    "adagrad": optimizers.Adagrad(1e-2),
    "rmsprop": optimizers.RMSprop(1e-3),
    "adam": optimizers.Adam(1e-3, weight_decay=0.1, step=1),
    "adamw": ADAMW,
    "unknown": optimizers.AdamW(1e-3, maximize=True, step=1),
    "still": optimizers.SGD(0),
    "groups": [
        (0, ADAMW),
        (700, optimizers.SGD(1e-4)),
        (701, optimizers.Adam(1e-2, step=1)),
        (6000, optimizers.SGD(1e-9)),
    ],
}
WAYS = [("plane", "six"), ("coded", "six"), ("shared", "six"), ("shared", "bit")]


@pytest.mark.parametrize(("levels", "granularity"), WAYS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_truncate_frames(dtype, levels, granularity):
    rare = 1e-20 if dtype != "float16" else 300
    for n, rounding, guard in itertools.product((600, 9000), get_args(specs.Cut), (-8, "exact", -20)):
        spec = codec.Truncate("optimizer", rounding, levels, granularity, guard)
        for scale in (1e-3, rare):
            same(gradient(n, dtype, scale), spec, dtype=dtype, optimizer=ADAMW, state=state_of(n))
    spec = codec.Truncate("optimizer", "nearest", levels, granularity, -8, 5)
    for n in (0, 511, 512):
        same(random_bits(dtype, n, "normal"), spec, dtype=dtype, optimizer=ADAMW, state=state_of(n))
    for metric in METRICS.values():
        same(gradient(8000, dtype), spec, dtype=dtype, optimizer=metric, state=state_of(8000))
    for kind in KINDS:
        same(random_bits(dtype, 5000, kind), spec, dtype=dtype, optimizer=ADAMW, state=state_of(5000))
    x = random_bits(dtype, 20_000, "mixed")
    state = state_of(20_000)
    same(x, spec, dtype=dtype, optimizer=ADAMW, state=state, segments=[(100, (90, 100)), (9500, (9000,))])
    same(matrix(dtype, 130, 70), spec, dtype=dtype, shape=(130, 70), optimizer=ADAMW, state=state_of(9100))
    halves = {name: y.astype(np.float16) for name, y in state.items()}
    same(x, spec, dtype=dtype, optimizer=optimizers.SGD(1e-3), state=halves)


@pytest.mark.parametrize("dtype", FLOATS)
def test_truncate_frames_with_given_levels(dtype):
    rng = np.random.default_rng(0)
    for n, rounding in itertools.product((511, 600, 17_000), get_args(specs.Cut)):
        for level in range(4):
            same(gradient(n, dtype), codec.Truncate(level, rounding), dtype=dtype)
        levels = rng.integers(0, 4, n).astype(np.uint8)
        for sent in ("plane", "coded"):
            spec = codec.Truncate("optimizer", rounding, sent, max_code_length=7, guard=3)
            same(gradient(n, dtype), spec, dtype=dtype, optimizer=levels)
    if dtype != "float32":
        for level in range(4):
            same(np.arange(1 << 16, dtype=np.uint16), codec.Truncate(level), dtype=dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", every(2, TRUNCATES))
def test_truncate_frames_with_a_shared_codebook(name, dtype):
    spec, n = TRUNCATES[name], 6000
    how = {"optimizer": ADAMW, "state": state_of(n)} if spec.fixed_level is None else {}
    ask = asked_metric(ask_of(spec), how.get("optimizer"), how.get("state"))
    counts = encoder.count_symbols(gradient(n, dtype), NUMBER[dtype], (n,), ask)
    book = codec.Codebook.from_counts(counts, spec, dtype)
    if dtype != "bfloat16":
        assert book == flatcall.codebook(gradient(n, dtype).view(dtype), spec=spec, **how)
    for scale in (1e-3, 1e-5):
        same(gradient(n, dtype, scale, 2), spec, dtype=dtype, codebook=book, **how)


@given(st.integers(0, 9000), st.integers(0, 2**32), st.sampled_from(WAYS), st.integers(-30, 10), st.data())
def test_random_truncate_frames(n, seed, way, guard, data):
    dtype, kind = data.draw(st.sampled_from(FLOATS)), data.draw(st.sampled_from(KINDS))
    metric = METRICS[data.draw(st.sampled_from(sorted(METRICS)))]
    rounding = data.draw(st.sampled_from(get_args(specs.Cut)))
    spec = codec.Truncate("optimizer", rounding, *way, guard, data.draw(st.integers(2, 8)))
    same(random_bits(dtype, n, kind, seed), spec, dtype=dtype, optimizer=metric, state=state_of(n, seed))


# -- error feedback


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("spec", every(2, [*LOSSY.values(), *TOPKS.values(), *TRUNCATES.values()]), ids=repr)
def test_frames_with_error_feedback(spec, dtype):
    """Some sums lie between the dtype's numbers or beyond its range."""
    n = 3000
    error = np.random.default_rng(2).standard_normal(n).astype(F32)
    error[11:14] = 70_000, -70_000, 3.4e38
    x = tame(dtype, n, "normal")
    x[9:14] = bits_of(np.array([3, 4, 65504, -65504, 3]), dtype)
    how = (
        {"optimizer": ADAMW, "state": state_of(n)}
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
            **({"optimizer": ADAMW, "state": state_of(300)} if how else {}),
        )
    left = error.copy()
    frame = flatcall.encode(x, spec, dtype=dtype, residual=left, feedback=True, **how)
    shared = how if getattr(spec, "level_coding", None) == "shared" else {}
    with np.errstate(all="ignore"):
        sums = encoder.floats(x, NUMBER[dtype]) + error
        lost = sums - flatcall.reduce([frame], "sum", **shared)
    np.testing.assert_array_equal(left, np.where(np.isfinite(sums), lost, 0))


# -- Delta


def delta_modes(frame):
    """Return the modes of a frame's regions."""
    (nblocks,) = struct.unpack_from("<I", frame, 44)
    directory = 48 + 8 * frame[7] + 16
    ends = [8 * struct.unpack_from("<I", frame, directory + 8 * b)[0] for b in range(nblocks)]
    return {frame[at] & 3 for at in [directory + 8 * nblocks, *ends][:nblocks]}


def moved(base, dtype, density, largest, seed):
    """Return values of which a share has moved by up to `largest` patterns, some by any number."""
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
    """All values of float32 and float64 move by thousands of patterns: S is above all exponents."""
    for dtype, largest in (("float32", 5000), ("float64", 1 << 40)):
        base = random_bits(dtype, 3000, "normal")
        assert delta_modes(same(moved(base, dtype, 1, largest, seed=3), codec.Delta(), dtype=dtype, base=base)) == {1}
