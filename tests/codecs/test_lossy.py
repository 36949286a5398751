"""Lossy codecs: each codec's definition in numpy, rounding and unbiasedness."""

import ml_dtypes
import numpy as np
import pytest

import codec
from support.philox import philox, random_words
from support.tensors import NUMPY_DTYPES, normal_values

F32 = np.float32


def test_philox_known_answers():
    """The tests' implementation of Philox returns the published test vectors."""
    assert philox((0, 0), (0, 0, 0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 0xFFFFFFFF
    assert philox((ones, ones), (ones,) * 4) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert philox((0xA4093822, 0x299F31D0), pi) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def over(x, scale, n=1):
    """Compute x / scale * n by two multiplications, so that no intermediate factor overflows."""
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
    """Where the first random word equals the upper 16 bits of the ratio, the second word decides the rounding."""
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
    """Scales are summed in the specified order: 32 float32 lanes per 4,096 values, folded by halves, whose partial sums
    are added pairwise in float64.
    """
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
    """Return x multiplied by the float32 factor that Float8 stores for its row."""
    rows = x.reshape(-1, row)
    amax = np.abs(rows).max(1)
    with np.errstate(all="ignore"):
        scale = F32(most) / amax
    scale = np.where(np.isfinite(scale), scale, F32(1)).astype(F32)
    return np.clip(rows * scale[:, None], -most, most), scale[:, None]


@pytest.mark.parametrize("format", ["e4m3fn", "e5m2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_float8_rounds_as_ml_dtypes_does(format, dtype, isa):
    """Float8 rounds like ml_dtypes, for all finite patterns of bfloat16 and float16, and many of float32."""
    kind = np.dtype(getattr(ml_dtypes, f"float8_{format}"))
    most = float(ml_dtypes.finfo(kind).max)
    if dtype == "float32":
        bits = np.random.default_rng(1).integers(0, 1 << 32, 1 << 18, dtype=np.uint32)
        # random exponents in the format's range, so that few rows round to zeros only
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
    """Decoded values follow the definition, and lie in the range of the dtype."""
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


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_ends_of_a_group_with_a_zero_point_decode_up_to_rounding(dtype, isa):
    """In float32, both are at most one ulp of the group's largest magnitude off; in 16 bits, they are exact."""
    rng = np.random.default_rng(0)
    spread, offset = 10 ** rng.uniform(-3, 3, (2, 300, 1))
    x = (spread * rng.standard_normal((300, 64)) + offset * rng.standard_normal((300, 1))).astype(dtype)
    rows, ulp = np.arange(300), np.spacing(np.abs(x).max(1).astype(F32)) * (dtype is np.float32)
    for bits in range(1, 9):
        y = codec.decode(codec.encode(x, codec.Quantize(bits, rounding="nearest", zero_point=True))).astype(float)
        for end in (x.argmin(1), x.argmax(1)):
            assert (np.abs(y[rows, end] - x[rows, end].astype(float)) <= ulp).all()


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
    """The mean over random streams is the tensor, and averaging 8 streams divides the variance by 8."""
    x = normal_values(20_000, 2)
    x[:64] = x[0]  # a value that its group's scale represents exactly has no error
    errors = np.array([codec.decode(codec.encode(x, spec, stream=i)).astype(np.float64) - x for i in range(64)])
    sigma = errors.std(0)
    some = sigma > 0.3 * sigma.max()  # values whose variance 64 streams estimate well
    z = errors.mean(0)[some] / (sigma[some] / 8)
    assert abs(z.mean()) < 5 / np.sqrt(z.size)
    assert np.abs(z).max() < 8
    total = errors.sum(1) / np.sqrt((errors**2).sum(1))
    assert np.abs(total).max() < 5
    one, eight = (errors**2).mean(), (errors.reshape(8, 8, -1).mean(1) ** 2).mean()
    assert abs(8 * eight / one - 1) < 0.03
