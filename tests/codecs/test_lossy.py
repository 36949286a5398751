"""Lossy codecs: each codec's definition in numpy, rounding, unbiasedness, residuals, special values and sums."""

import functools
import itertools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import codec
from codec import Status
from reference import decoder as oracle
from support import flatcall
from support.philox import philox, random_words
from support.specs import LOSSY, TOPKS
from support.tensors import NUMPY_DTYPES, normal_values, random_bits

F32 = np.float32
SPECS = pytest.mark.parametrize("spec", (LOSSY | TOPKS).values(), ids=LOSSY | TOPKS)


def test_philox_known_answers():
    """The second implementation gives the published test vectors of the generator."""
    assert philox((0, 0), (0, 0, 0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 0xFFFFFFFF
    assert philox((ones, ones), (ones,) * 4) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert philox((0xA4093822, 0x299F31D0), pi) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def over(x, scale, n=1):
    """Return x / scale * n by two multiplications; the first one keeps the second factor finite."""
    up = np.where(scale < 2**-60, F32(2**64), F32(1))
    return x * up * (n / (scale * up))


@pytest.mark.parametrize("scale", [0.01, 1e37, 1e-41, 1e-44])
@pytest.mark.parametrize(("seed", "stream"), [(0, 0), (5, 3), (0xFFFFFFFF, (7 << 32) + 9)])
def test_ternary_follows_its_definition(seed, stream, scale, isa):
    x = normal_values(5000, scale=scale)
    x[7] = 0
    s = np.abs(x).max()
    q = over(np.abs(x), s, F32(65536)).astype(np.float64) * 65536
    u = random_words(5000, seed, stream) << 16 | random_words(5000, seed, stream, 1)
    expected = np.where((u < np.floor(q)) | (np.abs(x) == s), np.sign(x) * s, 0).astype(F32)
    y = codec.decode(codec.encode(x, codec.Ternary(seed=seed), stream=stream))
    assert (y == expected).all()
    assert np.abs(y).max() == s


def test_ternary_breaks_ties_by_the_second_random_word(isa):
    """The second word decides where the first one equals the upper 16 bits of the ratio."""
    n = 1 << 16
    h, low = random_words(n, 0, 0), random_words(n, 0, 0, 1)
    x = ((h + 0.5) / 65536).astype(F32)
    x[0] = 1.0
    y = codec.decode(codec.encode(x, codec.Ternary(scale=1.0)))
    assert (y[1:] == (low[1:] < 32768)).all()


def test_sign_follows_its_definition(isa):
    x = normal_values((64, 1000))
    x[3] = 0
    x[5, 2] = -0.0
    for variant in ("l1", "l2", "two_mean"):
        y = codec.decode(codec.encode(x, codec.Sign(variant, "row")))
        d = x.astype(np.float64)
        negative = np.signbit(x)
        if variant == "two_mean":
            up = np.where(negative, 0, d).sum(1) / np.maximum((~negative).sum(1), 1)
            down = np.where(negative, d, 0).sum(1) / np.maximum(negative.sum(1), 1)
        else:
            up = np.abs(d).mean(1) if variant == "l1" else np.sqrt((d * d).mean(1))
            down = -up
        expected = np.where(negative, down[:, None], up[:, None])
        np.testing.assert_allclose(y, expected, rtol=1e-6, atol=0)
        assert not np.signbit(y[3]).any()
        assert len(np.unique(y[7])) == 2


@pytest.mark.parametrize("n", [1, 31, 32, 4095, 4096, 4097, 3 * 4096, 5 * 4096 + 1, 100_000])
def test_scales_are_summed_in_one_order(n, isa):
    """32 float32 lanes over 4,096 values are folded by halves; partial sums are added pairwise in float64."""
    x = np.abs(normal_values(n))
    level = []
    for i in range(0, n, 4096):
        piece = np.zeros(-(-min(4096, n - i) // 32) * 32, F32)
        piece[: min(4096, n - i)] = x[i : i + 4096]
        lanes = np.zeros(32, F32)
        for row in piece.reshape(-1, 32):
            lanes += row
        while len(lanes) > 1:
            lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
        level.append(float(lanes[0]))
    while len(level) > 1:
        level = [sum(level[i : i + 2]) for i in range(0, len(level), 2)]
    expected = F32(level[0] / n)
    for spec in (codec.Sign(), codec.Sign(group_size=n)):
        for threads in (1, 3):
            assert (codec.decode(codec.encode(x, spec, options=codec.options(threads=threads))) == expected).all()


def float8_scaled(x, most, row):
    """Return x divided by the scale of its row, as Float8 stores it."""
    rows = x.reshape(-1, row)
    amax = np.abs(rows).max(1)
    with np.errstate(all="ignore"):
        scale = F32(most) / amax
    scale = np.where(np.isfinite(scale), scale, F32(1)).astype(F32)
    return np.clip(rows * scale[:, None], -most, most), scale[:, None]


@pytest.mark.parametrize("format", ["e4m3fn", "e5m2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_float8_rounds_as_ml_dtypes_does(format, dtype, isa):
    """All finite patterns of the half-precision dtypes, and many of float32."""
    kind = np.dtype(getattr(ml_dtypes, f"float8_{format}"))
    most = float(ml_dtypes.finfo(kind).max)
    if dtype == "float32":
        bits = np.random.default_rng(1).integers(0, 1 << 32, 1 << 18, dtype=np.uint32)
        # exponents near the format's range: few rows become all zeros
        x = (bits & np.uint32(0x807FFFFF) | ((bits >> 23) % 40 + 100 << 23).astype(np.uint32)).view(F32)
    else:
        x = np.arange(1 << 16, dtype=np.uint16).view(NUMPY_DTYPES[dtype])
    x = x[np.isfinite(x.astype(F32))]
    x = x[: len(x) // 64 * 64]
    for fixed in (None, 1.0):
        frame = codec.encode(x, codec.Float8(format, 64, scale=fixed))
        wide = x.astype(F32)
        y, scale = float8_scaled(wide, most, 64)
        if fixed:
            y, scale = np.clip(wide, -most, most).reshape(-1, 64), np.ones((1, 1), F32)
        with np.errstate(over="ignore"):
            expected = (y.astype(kind).astype(F32) / scale).ravel().astype(x.dtype)
        assert codec.decode(frame).tobytes() == expected.tobytes()


def test_float4_follows_its_definition(isa):
    x = normal_values((64, 96))
    x[2] = 0
    x[3] *= 1e-6
    e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], F32)

    def nearest(v):
        return np.copysign(v.astype(ml_dtypes.float4_e2m1fn).astype(F32), v)

    y = codec.decode(codec.encode(x, codec.Float4("mxfp4")))
    blocks = x.reshape(-1, 32)
    amax = np.abs(blocks).max(1, keepdims=True)
    with np.errstate(divide="ignore"):
        d = np.where(amax > 0, 2.0 ** (np.floor(np.log2(amax)) - 2), 1).astype(F32)
    assert (y.reshape(-1, 32) == nearest(np.clip(blocks / d, -6, 6)) * d).all()

    y = codec.decode(codec.encode(x, codec.Float4("nvfp4")))
    blocks = x.reshape(-1, 16)
    t = np.abs(x).max() / F32(6 * 448)
    s = (np.abs(blocks).max(1, keepdims=True) / F32(6) / t).astype(ml_dtypes.float8_e4m3fn).astype(F32)
    d = np.where(s > 0, s * t, F32(1))
    assert (y.reshape(-1, 16) == nearest(np.clip(blocks / d, -6, 6)) * (s * t)).all()
    assert set(np.abs(codec.decode(codec.encode(np.repeat(e2m1, 4), codec.Float4("mxfp4"))))) <= set(e2m1)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("levels", ["even", "odd"])
def test_quantize_follows_its_definition(bits, levels, isa):
    if levels == "odd" and bits == 1:
        with pytest.raises(codec.SpecError):
            codec.Quantize(1, levels="odd")
        return
    x = normal_values(4100)
    x[64:128] = 0
    n = F32(2**bits - 1 if levels == "even" else 2 ** (bits - 1) - 1)
    padded = np.zeros(65 * 64, F32)
    padded[:4100] = x
    groups = padded.reshape(-1, 64)
    amax = np.abs(groups).max(1, keepdims=True)
    safe = np.where(amax > 0, amax, F32(1))
    h = np.zeros(65 * 64, np.int64)
    for rounding in ("stochastic", "nearest"):
        h[:4100] = random_words(4100, 9, 4) if rounding == "stochastic" else 0x8000
        q = over(groups if levels == "even" else np.abs(groups), safe)
        place = (q + F32(1)) * (n * F32(0.5)) if levels == "even" else q * n
        c = (np.floor(place * F32(65536) + F32(0.5)).astype(np.int64) + h.reshape(-1, 64)) >> 16
        level = (2 * c - int(n)) if levels == "even" else np.where(np.signbit(groups), -c, c)
        expected = np.where(amax > 0, amax * (level.astype(F32) / n), F32(0)).ravel()[:4100]
        y = codec.decode(codec.encode(x, codec.Quantize(bits, 64, levels, rounding, seed=9), stream=4))
        assert (y == expected).all()
        assert np.abs(y - x).max() <= 1.01 * amax.max() / n * (2 if levels == "even" else 1)
        assert not y[64:128].any()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("bits", [1, 4, 5, 8])
def test_quantize_with_a_zero_point_follows_its_definition(bits, dtype, isa):
    """Values are between the smallest and the largest of their group, which are exact; so are equal values."""
    most = np.finfo(dtype).max
    x = (normal_values(4100) + F32(7)).astype(dtype)
    x[64:128], x[128:192], x[192] = F32(-0.1), np.linspace(-1, 1, 64) * most, -0.0
    groups = np.append(x, np.full(60, x[-1])).astype(F32).reshape(-1, 64)
    low, high = groups.min(1, keepdims=True), groups.max(1, keepdims=True)
    half = high * F32(0.5) - low * F32(0.5)
    middle = low + half
    n = F32(2**bits - 1)
    h = np.zeros(65 * 64, np.int64)
    for rounding in ("stochastic", "nearest"):
        h[:4100] = random_words(4100, 9, 4) if rounding == "stochastic" else 0x8000
        place = (over(groups - middle, np.where(half > 0, half, F32(1))) + F32(1)) * (n * F32(0.5))
        c = (np.floor(np.clip(place, 0, n).astype(float) * 65536 + 0.5).astype(np.int64) + h.reshape(-1, 64)) >> 16
        c = np.where(half > 0, c, 0)
        y = middle + half * ((2 * c - int(n)).astype(F32) / n)
        y = np.clip(y, -most, most).astype(dtype).ravel()[:4100]
        spec = codec.Quantize(bits, 64, rounding=rounding, seed=9, zero_point=True)
        decoded = codec.decode(codec.encode(x, spec, stream=4))
        assert decoded.tobytes() == y.tobytes()
        assert (decoded[64:128] == x[64:128]).all()
        assert {-most, most} <= set(decoded[128:192])


@pytest.mark.parametrize(
    "spec",
    [
        codec.Ternary(),
        codec.Float8(rounding="stochastic"),
        codec.Float8("e5m2", rounding="stochastic"),
        codec.Float4(rounding="stochastic"),
        codec.Quantize(2),
        codec.Quantize(3, levels="odd"),
    ],
)
def test_stochastic_rounding_is_unbiased_and_streams_are_independent(spec):
    """The mean over streams is the tensor; the variance of a mean of 8 streams is an eighth."""
    x = normal_values(20_000, 2)
    x[:64] = x[0]  # exactly representable values would hide errors
    errors = np.array([codec.decode(codec.encode(x, spec, stream=i)).astype(np.float64) - x for i in range(64)])
    sigma = errors.std(0)
    some = sigma > 0.3 * sigma.max()  # rare events give no good estimate of the variance
    z = errors.mean(0)[some] / (sigma[some] / 8)
    assert abs(z.mean()) < 5 / np.sqrt(z.size)
    assert np.abs(z).max() < 8
    total = errors.sum(1) / np.sqrt((errors**2).sum(1))
    assert np.abs(total).max() < 5
    one, eight = (errors**2).mean(), (errors.reshape(8, 8, -1).mean(1) ** 2).mean()
    assert abs(8 * eight / one - 1) < 0.03


@SPECS
def test_residual_is_the_tensor_minus_the_decoded_frame(spec, isa):
    for shape in ((300,), (40, 130), (70_000,)):
        x = normal_values(shape)
        x.ravel()[5:200] = 0
        before, r = x.copy(), np.full(shape, np.nan, F32)
        frame = codec.encode(x, spec, residual=r)
        assert codec.encode(x, spec) == frame
        assert (x == before).all()
        assert (r == x - codec.decode(frame)).all()
        for threads in (1, 4):
            c = x.copy()
            assert codec.encode(c, spec, residual=c, options=codec.options(threads=threads)) == frame
            assert (c == r).all()


def test_error_feedback_telescopes():
    """The sum of decoded frames equals the sum of inputs minus the last residual."""
    for spec in (codec.Sign(), codec.Ternary(clip=2.5), codec.Quantize(2)):
        e = np.zeros(5000, F32)
        sent, came = np.zeros(5000), np.zeros(5000)
        for step in range(20):
            g = normal_values(5000, step)
            c = g + e
            came += g
            sent += codec.decode(codec.encode(c, spec, residual=e, stream=step))
        np.testing.assert_allclose(sent, came - e, atol=1e-6)


@SPECS
def test_nonfinite_values_are_rejected_without_side_effects(spec, isa):
    for dtype in ("float32", "bfloat16", "float16"):
        for bad in (np.nan, np.inf, -np.inf):
            x = normal_values(30_000)
            x[29_000] = bad
            x = x.astype(NUMPY_DTYPES[dtype])
            r = np.full(30_000, 7, F32)
            out = np.empty(codec.bound(30_000, dtype, spec), np.uint8)
            for threads in (1, 4):
                if isinstance(spec, codec.Float8) and spec.nonfinite == "propagate":
                    y = codec.decode(codec.encode(x, spec, options=codec.options(threads=threads))).astype(F32)
                    assert np.isnan(y[29_000])
                    assert np.isfinite(np.delete(y, 29_000)).all()
                    continue
                with pytest.raises(codec.ArgumentError, match="NaN or Inf"):
                    codec.encode(x, spec, out=out, residual=r, options=codec.options(threads=threads))
                assert (r == 7).all()


@SPECS
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_half_precision_pattern_is_encoded_identically(spec, dtype):
    """All instruction sets give the same bytes, and the reference decoder the same values."""
    x = np.arange(1 << 16, dtype=np.uint16).view(NUMPY_DTYPES[dtype])
    x = x[np.isfinite(x.astype(F32))]
    frames = set()
    for isa in codec.isas():
        with codec.use_isa(isa):
            frames.add(bytes(codec.encode(x, spec)))
            y = codec.decode(codec.encode(x, spec))
    assert len(frames) == 1
    assert oracle.decode(frames.pop())[2] == y.tobytes()
    assert np.isfinite(y.astype(F32)).all()


@SPECS
@given(st.integers(0, 40_000), st.integers(0, 2**32), st.sampled_from(["normal", "zeros", "sparse", "constant"]))
def test_reference_decoder_gives_the_same_values(spec, n, seed, kind):
    x = random_bits("float32", n, kind, seed).view(F32)
    frame = bytes(codec.encode(x, spec, stream=seed))
    assert len(frame) <= codec.bound(n, "float32", spec)
    assert oracle.decode(frame)[2] == codec.decode(frame).tobytes()


@SPECS
def test_residual_in_place_with_several_threads(spec):
    """The tensor itself is the residual."""
    x = normal_values(200_003)
    segments = [(0, (40_000,)), (40_000, (3,)), (40_003, (100_000,)), (140_003, (60_000,))]
    expected = np.empty_like(x)
    frame = codec.encode(codec.view(x, segments=segments), spec, residual=expected, options=codec.options(threads=1))
    assert (
        codec.encode(
            codec.view(x, segments=segments),
            spec,
            residual=x,
            out=np.empty(len(frame), np.uint8),
            options=codec.options(threads=4),
        )
        == frame
    )
    assert x.tobytes() == expected.tobytes()


@pytest.mark.parametrize("scale", [0.01, 1e35, 1e-41])
@SPECS
def test_frames_are_identical_for_all_instruction_sets_threads_and_addresses(spec, scale):
    x = normal_values(300_001, scale=scale)
    frame = codec.encode(x, spec)
    y = codec.decode(frame)
    raw = np.empty(x.nbytes + 8, np.uint8)
    raw[3 : 3 + x.nbytes] = x.view(np.uint8)
    moved = np.ndarray(x.shape, F32, raw[3:])
    for isa in codec.isas():
        with codec.use_isa(isa):
            for threads in (1, 2, 7):
                assert codec.encode(x, spec, options=codec.options(threads=threads)) == frame
                assert codec.encode(moved, spec, options=codec.options(threads=threads)) == frame
                assert codec.decode(frame, options=codec.options(threads=threads)).tobytes() == y.tobytes()
                assert (
                    codec.decode(
                        frame, out=np.ndarray(x.shape, F32, raw[1:]), options=codec.options(threads=threads)
                    ).tobytes()
                    == y.tobytes()
                )
                raw[3 : 3 + x.nbytes] = x.view(np.uint8)


@pytest.mark.parametrize("spec", LOSSY.values(), ids=LOSSY)  # TopK takes no segments into account
def test_segments_are_encoded_as_if_alone(spec, isa):
    """Each parameter of a bucket has its own scales."""
    shapes = [(0, (100, 90)), (9000, (130, 80)), (19_400, (7,)), (19_407, (5000,))]
    x = normal_values(24_407)
    for i, (offset, shape) in enumerate(shapes):
        x[offset : offset + int(np.prod(shape))] *= 10.0**i
    frame = codec.encode(codec.view(x, segments=shapes), spec)
    assert codec.encode(codec.view(x, segments=shapes), spec, options=codec.options(threads=3)) == frame
    assert codec.inspect(frame).nsegments == 4
    y = codec.decode(frame)
    assert oracle.decode(bytes(frame))[2] == y.tobytes()
    random = isinstance(spec, codec.Ternary) or getattr(spec, "rounding", "") == "stochastic"
    for offset, shape in shapes:
        n = int(np.prod(shape))
        if not random and n > 4096:
            alone = codec.decode(codec.encode(x[offset : offset + n].reshape(shape), spec))
            assert (y[offset : offset + n] == alone.ravel()).all()


def test_ternary_with_a_given_scale():
    x = normal_values(3000)
    s = float(np.abs(x).max())
    assert codec.decode(codec.encode(x, codec.Ternary(scale=2 * s))).max() == F32(2 * s)
    with pytest.raises(codec.SpecError, match="smaller than the largest"):
        codec.encode(x, codec.Ternary(scale=s / 2))
    r = np.full(3000, 7, F32)
    with pytest.raises(codec.SpecError, match="smaller than the largest"):
        codec.encode(x, codec.Ternary(scale=s / 2), residual=r)
    assert (r == 7).all()
    assert np.abs(codec.decode(codec.encode(x, codec.Ternary(clip=2.0)))).max() == pytest.approx(2 * x.std(), rel=1e-5)
    y = codec.decode(codec.encode(x, codec.Float8(scale=448 / s * 4)))
    assert np.abs(y).max() == pytest.approx(s / 4, rel=1e-6)  # saturated


@SPECS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_accumulate_and_reduce_equal_sums_of_decoded_frames(spec, dtype, isa):
    frames = [codec.encode(normal_values((60, 500), i).astype(NUMPY_DTYPES[dtype]), spec, stream=i) for i in range(5)]
    values = [codec.decode(f).astype(F32) for f in frames]
    for threads in (1, 3):
        out = normal_values((60, 500), 9)
        expected = out + F32(0.3) * values[0]
        assert codec.accumulate(frames[0], out, weight=0.3, options=codec.options(threads=threads)) is out
        assert (out == expected).all()
        total = ((((values[0] + values[1]) + values[2]) + values[3]) + values[4]).astype(F32)
        assert (codec.reduce(frames, op="sum", options=codec.options(threads=threads)) == total).all()
        assert (codec.reduce(frames, options=codec.options(threads=threads)) == total / F32(5)).all()
        assert (
            codec.reduce(frames, op="max", options=codec.options(threads=threads)) == np.maximum.reduce(values)
        ).all()
        assert (codec.reduce(frames[:1], options=codec.options(threads=threads)) == values[0]).all()


@pytest.mark.parametrize("variant", ["l1", "two_mean"])
def test_sums_of_sign_frames_are_sequential_float32_sums(variant, isa):
    """For any number of frames and any group sizes."""
    for n, block in itertools.product((7, 1_000, 40_003), (None, 8, 12, 40, 72, 1_000, 1_024, 4_096)):
        xs = [normal_values(n, i) * F32(i + 1) for i in range(19)]
        segments = [(0, (n // 3,)), (n // 3, (n - n // 3,))] if n > 20_000 else None
        frames = [codec.encode(codec.view(x, segments=segments), codec.Sign(variant, group_size=block)) for x in xs]
        values = [codec.decode(frame) for frame in frames]
        out = np.empty(4 * n + 4, np.uint8)[1 : 4 * n + 1].view(F32)
        for count in (2, 3, 8, 9, 19):
            total = functools.reduce(np.add, values[:count])
            codec.reduce(frames[:count], out=out, op="sum", options=codec.options(threads=1 + count % 2))
            assert out.tobytes() == total.tobytes(), (n, block, count)
            assert codec.reduce(frames[:count], op="mean").tobytes() == (total / F32(count)).tobytes(), (
                n,
                block,
                count,
            )


@SPECS
def test_sums_of_several_dtypes_add_decoded_values(spec, isa):
    """Values of a narrower frame are rounded to its dtype before they are added."""
    xs = [
        normal_values(9_000, i).astype(NUMPY_DTYPES[dtype])
        for i, dtype in enumerate(["float32", "float16", "bfloat16"])
    ]
    for frames in itertools.permutations(codec.encode(x, spec, stream=i) for i, x in enumerate(xs)):
        a, b, c = (codec.decode(frame).astype(F32) for frame in frames)
        assert codec.reduce(frames, op="sum").tobytes() == ((a + b) + c).tobytes()


@SPECS
def test_reduce_with_nontemporal_stores(spec, isa):
    """Sums are stored at any address without touching bytes around them."""
    for n, offsets in ((1, (0, 4)), (100, (0, 4, 60, 1, 18)), (40_000, (8, 18)), (200_001, (4,))):
        frames = [codec.encode(normal_values(n, i), spec, stream=i) for i in range(3)]
        room = np.empty(4 * n + 128, np.uint8)
        for count, op, offset in itertools.product((1, 2, 3), ("sum", "mean", "max"), offsets):
            out = room[offset : offset + 4 * n].view(F32)
            room[:] = 0xA5
            codec.reduce(frames[:count], out=out, op=op, options=codec.options(threads=1, nontemporal=True))
            assert out.tobytes() == codec.reduce(frames[:count], op=op).tobytes()
            assert (room[:offset] == 0xA5).all()
            assert (room[offset + 4 * n :] == 0xA5).all()


def test_large_sums_use_nontemporal_stores():
    """The result is the same as for the parts."""
    xs = [np.resize(normal_values(100_000, i), 2_100_000) for i in range(3)]
    for spec in (codec.Sign(group_size=1024), codec.Lossless(), codec.Ternary("base3")):
        frames = [codec.encode(x, spec) for x in xs]
        a, b, c = (codec.decode(frame) for frame in frames)
        for threads in (1, 2):
            assert (codec.reduce(frames, options=codec.options(threads=threads)) == (a + b + c) / F32(3)).all()


@pytest.mark.parametrize("engine", ["native", "numba"])
def test_check_finite_rejects_nonfinite_results(engine):
    """Errors of a frame are raised before errors of the result."""
    large, some = np.full(300_000, 1e38, F32), normal_values(300_000)
    large[:204_800] = 1  # whole rows
    wrong = np.where(np.arange(300_000) == 250_000, np.nan, some)
    for spec in (
        codec.Float8(),
        codec.Sign("l2", group_size=1024),
        codec.Lossless(),
        codec.Float8("e5m2", entropy=True),
    ):
        frames = [codec.encode(x, spec) for x in (large, some, large, large, large)]
        for threads, past in itertools.product((1, 3), (False, True)):
            how = {"threads": threads, "engine": engine, "nontemporal": past, "check_finite": True}
            with pytest.raises(codec.ArgumentError, match="the result holds NaN or Inf") as caught:
                flatcall.reduce(frames, "sum", **how)
            assert caught.value.code == Status.NONFINITE
            with pytest.raises(codec.ArgumentError, match="the result holds"):
                flatcall.reduce(frames, "mean", **how)
            assert (
                np.isinf(codec.reduce(frames, op="sum", options=codec.options(threads=threads, engine=engine))).sum()
                == 95_200
            )
            for few, op in ((frames[:3], "sum"), (frames, "max"), (frames[:1], "sum")):
                assert (flatcall.reduce(few, op, **how) == codec.reduce(few, op=op)).all()
            with pytest.raises(codec.ChecksumError):
                flatcall.reduce([*frames, frames[0][:-9] + bytes([frames[0][-9] ^ 1]) + frames[0][-8:]], "sum", **how)
    for few in (
        [codec.encode(wrong)],
        [codec.encode(wrong), codec.encode(some, codec.Sign())],
    ):  # frames of different codecs
        with pytest.raises(codec.ArgumentError, match="the result holds"):
            codec.reduce(few, check_finite=True, op="sum", options=codec.options(engine=engine))
    assert (
        codec.reduce([codec.encode(np.empty(0, F32))], check_finite=True, options=codec.options(engine=engine)).size
        == 0
    )


def test_reduce_of_different_codecs():
    """Lossless and stored frames may be among them."""
    xs = [normal_values((60, 500), i) for i in range(3)]
    noise = np.random.default_rng(3).integers(0, 0x7F000000, 30_000, dtype=np.uint32).view(F32).reshape(60, 500)
    frames = [codec.encode(xs[0]), codec.encode(xs[1], codec.Sign()), codec.encode(xs[2], codec.Float8())]
    values = [codec.decode(f) for f in frames]
    assert (codec.reduce(frames, op="sum") == (values[0] + values[1]) + values[2]).all()
    for lossless in ([xs[0], xs[1]], [xs[0], noise], [xs[0][:2, :50], xs[1][:2, :50]]):
        frames = [codec.encode(x) for x in lossless]
        for threads in (1, 4):
            assert (
                codec.reduce(frames, op="sum", options=codec.options(threads=threads)) == lossless[0] + lossless[1]
            ).all()


def test_shared_scales_add_as_integers():
    xs = [normal_values(200_000, i) for i in range(6)]
    s = float(max(np.abs(x).max() for x in xs))
    for packing in ("2bit", "base3", "entropy"):
        frames = [codec.encode(x, codec.Ternary(packing, s), stream=i) for i, x in enumerate(xs)]
        codes = sum(np.sign(codec.decode(f)).astype(int) for f in frames)
        for threads in (1, 4):
            assert (
                codec.reduce(frames, op="sum", options=codec.options(threads=threads)) == codes.astype(F32) * F32(s)
            ).all()
            assert (
                codec.reduce(frames, op="mean", options=codec.options(threads=threads))
                == codes.astype(F32) * F32(s) / F32(6)
            ).all()
            assert (
                codec.reduce(frames[::-1], op="sum", options=codec.options(threads=threads))
                == codes.astype(F32) * F32(s)
            ).all()


def test_reduce_rejects_wrong_arguments():
    a, b = codec.encode(normal_values((60, 500)), codec.Sign()), codec.encode(normal_values((500, 60)), codec.Sign())
    damaged = bytearray(a)
    damaged[-9] ^= 1
    out = np.full((60, 500), 7, F32)
    for bad, error in (
        (lambda: codec.reduce([]), codec.ArgumentError),
        (lambda: codec.reduce([a, b]), codec.ArgumentError),
        (lambda: codec.reduce([a], op="median"), codec.ArgumentError),
        (lambda: codec.reduce([a, bytes(damaged)]), codec.ChecksumError),
        (lambda: codec.reduce([a, a[:-8]]), codec.FrameError),
        (lambda: codec.reduce([a], max_nbytes=1000), codec.LimitError),
        (lambda: codec.reduce([codec.encode(np.arange(1000))]), codec.ArgumentError),
        (lambda: codec.accumulate(bytes(damaged), out), codec.ChecksumError),
        (lambda: codec.accumulate(a, np.zeros((500, 60), F32)), codec.ArgumentError),
        (lambda: codec.accumulate(a, np.zeros((60, 500))), codec.ArgumentError),
        (lambda: codec.accumulate(codec.encode(np.arange(1000)), np.zeros(1000, F32)), codec.ArgumentError),
    ):
        with pytest.raises(error):
            bad()
    assert (out == 7).all()


def test_frame_sizes_follow_from_the_definitions():
    """Within 1% at a million values, headers included."""
    x = normal_values((1024, 1024))
    for spec, bits in (
        (codec.Sign(), 1),
        (codec.Sign(group_size=1024), 1 + 32 / 1024),
        (codec.Ternary(), 2),
        (codec.Ternary("base3"), 1.6),
        (codec.Float8(), 8 + 32 / 1024),
        (codec.Float8("mxfp8_e4m3"), 8.25),
        (codec.Float4(), 4.5),
        (codec.Float4("mxfp4"), 4.25),
        (codec.Quantize(), 4.5),
        (codec.Quantize(2, 128), 2.25),
        (codec.Quantize(4, zero_point=True), 5),
    ):
        assert 8 * len(codec.encode(x, spec)) / x.size <= 1.01 * bits


@SPECS
def test_decode_writes_no_byte_around_the_destination(spec):
    """At any address; loops store whole vectors."""
    for isa in codec.isas():
        for n, at in ((1, 64), (63, 65), (1000, 68), (5001, 127)):
            frame = codec.encode(normal_values(n), spec)
            room = np.full(256 + 4 * n, 0xA5, np.uint8)
            inside = slice(at, at + 4 * n)
            with codec.use_isa(isa):
                codec.decode(frame, out=room[inside].view(F32))
                assert room[inside].tobytes() == codec.decode(frame).tobytes()
                codec.reduce([frame, frame], out=room[inside].view(F32), op="mean")
            assert (np.delete(room, inside) == 0xA5).all()


@pytest.mark.parametrize("isa", codec.isas())
def test_mean_is_the_correctly_rounded_quotient(isa):
    """Bit-identical for normal and subnormal values, whether the engine divides or multiplies."""
    odd = np.array([0x3, 0x5, 0x7FFFFF, 0x800001, 0x7F7FFFFF, 0x80000003, 0x3F800001, 0, 0x80000000], np.uint32)
    x = np.concatenate([odd.view(F32), normal_values(3000, scale=1e-38), normal_values(3000)])
    zeros = codec.encode(np.zeros_like(x))
    with codec.use_isa(isa):
        for count in (1, 2, 3, 4, 6, 8, 16):
            mean = codec.reduce([codec.encode(x)] + [zeros] * (count - 1), op="mean")
            total = x + F32(0) if count > 1 else x  # -0 + 0 = 0
            assert mean.tobytes() == (total / F32(count)).tobytes()


@pytest.mark.torch
@SPECS
def test_flush_denormal_does_not_change_results(spec):
    import torch

    x = normal_values(5000, scale=1e-38)
    x[:100] = np.arange(100, dtype=np.uint32).view(F32)
    frame = codec.encode(x, spec)
    y = codec.decode(frame)
    mean = codec.reduce([frame, frame])
    torch.set_flush_denormal(True)
    try:
        assert codec.encode(x, spec) == frame
        assert codec.decode(frame).tobytes() == y.tobytes()
        assert codec.reduce([frame, frame]).tobytes() == mean.tobytes()
        assert torch.set_flush_denormal(True)  # restore the default
        tiny = torch.tensor([1e-39]) * 1
        assert tiny.item() == 0
    finally:
        torch.set_flush_denormal(False)


def test_specs_reject_wrong_parameters():
    x = normal_values(100)
    for bad in (
        lambda: codec.Sign("l3"),
        lambda: codec.Sign(group_size=0),
        lambda: codec.Sign(group_size="column"),
        lambda: codec.Ternary("4bit"),
        lambda: codec.Ternary(scale=-1.0),
        lambda: codec.Ternary(scale=float("nan")),
        lambda: codec.Ternary(clip=-1.0),
        lambda: codec.Ternary(seed=1 << 32),
        lambda: codec.Float8("e3m4"),
        lambda: codec.Float8(group_size=0),
        lambda: codec.Float8("mxfp8_e4m3", 64),
        lambda: codec.Float8("mxfp8_e5m2", scale=1.0),
        lambda: codec.Float8(rounding="up"),
        lambda: codec.Float8(nonfinite="ignore"),
        lambda: codec.Float8(entropy=1),
        lambda: codec.Float4("fp4"),
        lambda: codec.Quantize(0),
        lambda: codec.Quantize(9),
        lambda: codec.Quantize(group_size=0),
        lambda: codec.Quantize(levels="many"),
        lambda: codec.Quantize(levels="odd", zero_point=True),
        lambda: codec.Quantize(zero_point=1),
    ):
        with pytest.raises(codec.SpecError):
            bad()
    for bad in (
        lambda: codec.encode(x.astype(np.float64), codec.Sign()),
        lambda: codec.encode(np.arange(10), codec.Ternary()),
        lambda: codec.encode(x, codec.Sign(), residual=np.zeros(99, F32)),
        lambda: codec.encode(x, codec.Sign(), residual=np.zeros(100)),
        lambda: codec.encode(x, codec.Sign(), stream=-1),
        lambda: codec.encode(x, codec.Sign(), stream=1 << 64),
    ):
        with pytest.raises(codec.ArgumentError):
            bad()


@SPECS
def test_inspect_returns_the_spec(spec):
    """Parameters that frames do not store are defaults; block="row" becomes the size in use."""
    said = codec.inspect(codec.encode(normal_values((20, 70)), spec)).spec
    lost = {"seed": 0, "scale": None, "clip": None} if not isinstance(spec, codec.Sign) else {}
    for name in spec.__slots__:
        asked = getattr(spec, name)
        chosen = asked == "row" or (type(spec) is codec.Float8 and name == "group_size" and asked is None)
        assert getattr(said, name) == (70 if chosen else lost.get(name, asked))


def test_inspect_returns_the_group_size_of_segments():
    """One size if all segments share it; otherwise "row"; None if the side section is missing."""
    x, alike, apart = normal_values(10_000), [(0, (50, 100)), (5000, (50, 100))], [(0, (50, 100)), (5000, (25, 200))]
    for segments, row in ((alike, 100), (apart, None)):
        assert codec.inspect(codec.encode(codec.view(x, segments=segments), codec.Float8())).spec == codec.Float8(
            group_size=row
        )
        frame = codec.encode(codec.view(x, segments=segments), codec.Sign(group_size="row"))
        assert codec.inspect(frame).spec == codec.Sign(group_size=row or "row")
        assert codec.inspect(frame[:56]).spec == codec.Sign()
    for spec in (codec.Quantize(3, 50), codec.Sign(), codec.Float4("mxfp4"), codec.Ternary("entropy")):
        frame = codec.encode(codec.view(x, segments=apart), spec)
        assert codec.inspect(frame).spec == spec
        codec.inspect(frame[:56])
