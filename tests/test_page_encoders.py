"""What docs/format.md says of encoders, in numpy: roundings, draws and scales of the codecs of rows, to the bit."""

import functools

import numpy as np
import oracle
import pytest
from test_lossy import draws

import codec

F32 = np.float32


def f32(*x):
    return np.array(x, "<f4").tobytes()


N = 1 << 16


@functools.cache
def halves_of(rounding):
    """What the encoders below draw: seed 3, stream 5."""
    return draws(N, 3, 5) if rounding == "stochastic" else np.full(N, 1 << 15)


def steps(x, h):
    """Section 8.6 of float32 x: 2^16 x + 1/2 is exact in float64, unless it is far below 1."""
    return (np.floor(x.astype(np.float64) * 65536 + 0.5).astype(np.int64) + h) >> 16


def places(h, most):
    """Numbers below `most` just under where they would be rounded up, as a sum with 1/2 that is rounded would be."""
    rng = np.random.default_rng(most)
    x = rng.integers(0, most, N) + (65535 - h + rng.choice([0, 0, 0.25, 1], N)) / 65536
    return np.where(h == 65535, np.nextafter(F32(0.5), F32(0)) / F32(65536), x.astype(F32))


def argument(function, guess, target):
    """Of a few float32 around a guess that whose value is closest to the target."""
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
def test_quantize_rounds_exactly(bits, levels, rounding, isa):
    """Section 8.6: 2^16 x + 1/2 is not rounded, which matters most from 128 levels on."""
    n = 2**bits - 1 if levels == "even" else 2 ** (bits - 1) - 1
    place = (lambda x: (x + F32(1)) * F32(n / 2)) if levels == "even" else (lambda x: np.abs(x) * F32(n))
    h = halves_of(rounding)
    target = np.minimum(places(h, n), n)
    x = argument(place, (target / n * 2 - 1 if levels == "even" else target / n).astype(F32), target)
    x[0] = 1
    if levels == "odd":
        x[1::2] *= -1
    c = steps(place(x), h)
    if levels == "odd":
        c = np.where(np.signbit(x), n - c, n + c)
    frame = bytes(codec.encode(x, codec.Quantize(bits, N, levels, rounding, seed=3), stream=5))
    flat = np.unpackbits(np.frombuffer(frame[68:], np.uint8), bitorder="little")[: N * bits]
    assert ((flat.reshape(-1, bits) << np.arange(bits)).sum(1) == c).all()


def test_quantize_to_the_nearest(isa):
    """A place of 154.49999 is rounded down: a sum with 1/2 in float32 would make it 155."""
    x = np.zeros(4096, F32)
    x[:2] = 1, 0.21176453
    frame = codec.encode(x, codec.Quantize(8, 4096, "even", "nearest"))
    assert bytes(frame)[69] == 154


SMALL = {"e4m3fn": (3, 7, 448), "e5m2": (2, 15, 57344), "e2m1": (1, 1, 6)}


def small_codes(y, kind, h=None):
    """Section 8.6 of magnitudes y; h: draws, or to nearest even."""
    m, bias, most = SMALL[kind]
    y = np.minimum(y, F32(most))
    e = np.where(y > 0, np.maximum(np.frexp(y)[1] - 1, 1 - bias), 1 - bias)
    x = np.ldexp(y, m - e)
    c = np.rint(x).astype(np.int64) if h is None else steps(x, h)
    return (c + (e - 1 + bias << m)).astype(np.uint8)  # a carry goes on into the exponent


def magnitudes(kind, h):
    """Of all exponents; and below the normal range, just under where they would be rounded up."""
    m, bias, most = SMALL[kind]
    rng = np.random.default_rng(bias)
    x = np.exp2(rng.uniform(-bias - m - 3, np.log2(most) + 0.3, N)).astype(F32)
    return np.where((h < 65535) & (rng.random(N) < 0.3), x, np.ldexp(places(h, 1 << m), 1 - bias - m)).astype(F32)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("format", ["e4m3fn", "e5m2"])
def test_float8_rounds_exactly(format, rounding, isa):
    """Section 8.6, also below the normal range."""
    h = halves_of(rounding)
    x = magnitudes(format, h)
    x[1::2] *= -1
    spec = codec.Float8(format, row=N, rounding=rounding, scale=1.0, seed=3)
    got = np.frombuffer(bytes(codec.encode(x, spec, stream=5))[68 : 68 + N], np.uint8)
    c = small_codes(np.abs(x), format, h if rounding == "stochastic" else None)
    assert (got == c | np.signbit(x) << 7).all()


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_float4_rounds_exactly(rounding, isa):
    """Section 8.6, of mxfp4, whose divisors are powers of two."""
    h = halves_of(rounding)
    x = np.minimum(magnitudes("e2m1", h), 6)
    x[::32] = 6
    x[1::2] *= -1
    frame = bytes(codec.encode(x, codec.Float4("mxfp4", rounding, seed=3), stream=5))
    regions = np.frombuffer(frame[56 + 8 * N // 16384 :], np.uint8).reshape(-1, 512 + 8192)
    assert (regions[:, :512] == 127).all()
    c = small_codes(np.abs(x), "e2m1", h if rounding == "stochastic" else None)
    c = (c | np.signbit(x) << 3).astype(np.uint8)
    assert (regions[:, 512:].ravel() == (c[::2] | c[1::2] << 4)).all()


def test_float8_never_gives_inf(isa):
    """The encoder's own frames, too: section 8."""
    for x, expected in (([3.4e38], 3.4028235e38), ([-3.4e38, 1], -3.4028235e38)):
        y = codec.decode(codec.encode(np.array(x, F32), codec.Float8(scale=1e-36)))
        assert y[0] == F32(expected)


def run_sums(x, dtype):
    """Sums of runs of 4,096 values in 32 lanes, then of neighbours."""
    sums = []
    for i in range(0, max(len(x), 1), 4096):
        run = x[i : i + 4096]
        run = np.concatenate([run, np.zeros(-len(run) % 32, dtype)]).reshape(-1, 32)
        lanes = np.zeros(32, dtype)
        for row in run:
            lanes = lanes + row
        while len(lanes) > 1:
            lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
        sums.append(float(lanes[0]))
    while len(sums) > 1:
        sums = [sum(sums[i : i + 2]) for i in range(0, len(sums), 2)]
    return sums[0]


def sign_scales(x, variant, most):
    with np.errstate(over="ignore"):
        if variant == "l2":
            means = [np.sqrt(run_sums(x.astype(np.float64) ** 2, np.float64) / x.size)]
        elif variant == "l1":
            means = [run_sums(np.abs(x), F32) / x.size]
        else:
            sides = (~np.signbit(x), np.signbit(x))
            means = [run_sums(np.where(s, np.abs(x), F32(0)), F32) / s.sum() if s.any() else 0.0 for s in sides]
    return [F32(min(mean, most)) for mean in means]


@pytest.mark.parametrize("variant", ["l1", "l2", "two_mean"])
@pytest.mark.parametrize("n", [1, 31, 33, 4095, 4097, 3 * 4096, 7 * 4096 + 1, 100_000])
def test_sums_are_the_page_s(variant, n, isa):
    """Section 8.7: scales of sign, of a part, of one long row and of rows, and where a sum overflows."""
    x = np.random.default_rng(n).standard_normal(n).astype(F32)
    x[::5] = -0.0
    most = float(np.finfo(F32).max)
    for y in (x, np.clip(x, -3, 3) * F32(1e38), -np.abs(x)):
        scales = f32(*sign_scales(y, variant, most))
        frame = bytes(codec.encode(y, codec.Sign(variant)))
        assert frame[56 : 56 + len(scales)] == scales
        frame = bytes(codec.encode(y, codec.Sign(variant, n)))
        assert frame[64 : 64 + len(scales)] == scales
    frame = bytes(codec.encode(x, codec.Sign(variant, 700)))
    rows = [f32(*sign_scales(x[i : i + 700], variant, most)) for i in range(0, min(n, 16100), 700)]
    at = 56 + 8 * -(-n // 16100)
    assert frame[at : at + len(b"".join(rows))] == b"".join(rows)
    half = np.full(n, 65504, np.float16)
    assert oracle.decode(bytes(codec.encode(half, codec.Sign(variant))))[2] == half.tobytes()


AMAX = np.exp2(np.linspace(-149, 127, 300)) * np.linspace(1, 1.99, 300)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_scales_of_rows(rounding, isa):
    """Section 8.7: from the smallest amax to the largest, in rows of 32."""
    x = np.zeros((301, 32), F32)
    x[:300, 5] = -AMAX
    amax = np.abs(x).max(1)
    for name, most in (("e4m3fn", 448), ("e5m2", 57344)):
        with np.errstate(divide="ignore", over="ignore"):
            scale = F32(most) / amax
        frame = bytes(codec.encode(x, codec.Float8(name, 32, rounding)))
        assert frame[64 + 8 :][: 4 * 301] == np.where(np.isfinite(scale), scale, F32(1)).tobytes()
    frame = bytes(codec.encode(x, codec.Quantize(4, 32, "even", rounding)))
    assert frame[64 + 8 :][: 4 * 301] == amax.tobytes()

    e = (amax.view(np.uint32) >> 23).astype(int)
    with np.errstate(over="ignore"):
        e += (rounding == "stochastic") & (amax > 1.5 * np.exp2(e - 127.0))
    frame = bytes(codec.encode(x, codec.Float4("mxfp4", rounding)))
    assert list(frame[64 + 8 :][:301]) == np.clip(e - 2, 0, 252).tolist()


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("top", [1e-44, 1e-30, 1.0, 3e38])
def test_scales_of_nvfp4(rounding, top, isa):
    """Section 8.7: the part's, and the rows', which are rounded themselves."""
    x = np.zeros((301, 16), F32)
    x[:300, 5] = AMAX / AMAX[-1] * top
    amax = np.abs(x).max(1)
    t = amax.max() / F32(2688)
    a = np.minimum(amax / F32(6) / t if t else amax * 0, F32(448))
    e = small_codes(a, "e4m3fn")
    if rounding == "stochastic":
        e += oracle.E4M3[e] < a
    frame = bytes(codec.encode(x, codec.Float4("nvfp4", rounding)))
    assert frame[64:72] == f32(t, 0)
    assert list(frame[72 + 8 :][:301]) == e.tolist()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("clip", [None, 0.5, 2.5, 1e5])
@pytest.mark.parametrize("scale", [None, 4.4321])
def test_scales_of_ternary(clip, scale, dtype, isa):
    """Section 8.7: amax or what is given; clipped by a deviation whose sums have the order of means."""
    x = (np.random.default_rng(3).standard_normal(20_000) * 0.7 + 0.1).astype(dtype)
    s = np.dtype(dtype).type(F32(scale) if scale else np.abs(x).max())
    if clip:
        v = x.astype(np.float64)
        mean, square = run_sums(v, np.float64) / v.size, run_sums(v * v, np.float64) / v.size
        s = min(s, np.dtype(dtype).type(F32(min(np.float64(F32(clip)) * np.sqrt(square - mean * mean), 65504))))
    frame = bytes(codec.encode(x, codec.Ternary(scale=scale, clip=clip)))
    assert frame[56:64] == f32(s, 0)
