"""The CUDA engine on the CPU gives the bytes, values and errors of the native engine.

Fixtures run each test on one, two or three kinds of emulated device; ``make gpu-tests`` runs this file on a GPU.
"""

import itertools

import numpy as np
import pytest

import codec
from codec._c.library import ITEMSIZE
from codec.decoding import decode_request
from codec.engines.cuda import DeferredCalls, FrameSum
from codec.tensors.view import view
from reference import decoder as oracle
from support import flatcall
from support.cuda_calls import LOSSY_DTYPES, ROWS, both_outcomes, by_cupy, bytes_of, decode, encode, outcome
from support.engine_comparison import sample_bits
from support.tensors import ALL_DTYPES, KINDS, float8_tensors, gap_tensors, random_bits
from support.tiers import every

pytestmark = pytest.mark.usefixtures("device")

F32 = np.float32


def planes_of_all_modes():
    """Yield float and integer tensors whose planes the encoder stores in every mode of the format."""
    rng, n = np.random.default_rng(0), 66_000
    x, noise = rng.standard_normal(n, F32).view(np.uint32), rng.integers(0, 1 << 32, n, np.uint32)
    short, zero, rare, runs = x & 0xFFFF0000, rng.random(n) < 0.3, rng.random(n) < 0.05, np.arange(n) // 512 % 2 == 0
    some = (runs, noise, 0), (runs, 0, noise), (runs, noise, noise & 0xFFFF0000), (runs, x, short), (runs, 0, x)
    quiet = np.where(np.arange(n) % 20_000 < 300, x & 0xFFFFFF00, x)
    ones = np.where(np.arange(n) % 20_000 < 300, 0x3F800000, x)
    more = (rare, 0, x & 0xFFFFF000), (rare, 0, x), (rare, 0, quiet), (rare, 0, ones)
    for where, a, b in (*some, (zero, 0, np.where(runs, x, short)), *more):
        for dtype in ("float32", "uint32"):
            yield np.where(where, a, b).astype(np.uint32), dtype


WAYS = {"fixed", "constant", "raw", "coded", "halved", "rows"}
PRUNED = WAYS - {"fixed"}


def test_planes_of_every_mode(monkeypatch):
    """Frames with planes of every mode equal the native engine's; the reference decoder finds all modes in them."""
    seen, read = set(), oracle.decode_region

    def watched(frame, at, end, m, dtype, fixed, coded, halved, *rest):
        head = int.from_bytes(frame[at : at + 4], "little")
        for p in range(oracle.DTYPES[dtype][1]):
            way = "fixed" if fixed >> p & 1 else ("constant", "raw", "coded", "rows")[head >> 2 * p & 3]
            way = "halved" if way == "coded" and halved >> p & 1 else way
            seen.add((way, bool(p and head >> 16 & 1)))
        return read(frame, at, end, m, dtype, fixed, coded, halved, *rest)

    monkeypatch.setattr(oracle, "decode_region", watched)
    for x, dtype in planes_of_all_modes():
        frame = codec.encode(codec.view(x, dtype))
        assert oracle.decode(frame)[2] == x.tobytes()
        assert encode(x, codec.Lossless(), dtype) == frame
        assert decode(frame) == x.tobytes()
    assert seen >= {(way, False) for way in WAYS} | {(way, True) for way in PRUNED}


@pytest.mark.parametrize("dtype", every(3, ALL_DTYPES))
def test_gaps(dtype):
    """Frames of tensors with empty quad rows equal the native engine's."""
    for x in every(2, gap_tensors(dtype)):
        frame = codec.encode(codec.view(x, dtype))
        assert encode(x, codec.Lossless(), dtype) == frame
        assert decode(frame) == x.tobytes()


@pytest.mark.parametrize("last", [17, 63])
def test_pruned_planes_that_end_with_a_short_run_of_zeros(last):
    """In a pruned plane, the last run of live values, shorter than 128 bytes, can be the only run omitted as zeros."""
    rng, n = np.random.default_rng(last), 16_384
    x = np.where(rng.random(n) < 0.05, 0, rng.standard_normal(n, F32))
    live = np.flatnonzero(x)
    x[live[: (len(live) - last) % 128]] = 0
    x[live[-last:]] = 1
    frame = codec.encode(x)
    assert encode(x, codec.Lossless(), "float32") == frame
    assert decode(frame) == x.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_whose_first_plane_is_not_coded(dtype, monkeypatch):
    """Constant and noise blocks, whose regions hold only an uncoded first plane, equal the native engine's."""
    n, heads, read = 16_384, [], oracle.decode_region
    x = random_bits(dtype, 6 * n, "normal")
    x[n : 2 * n] = x[0]
    x[3 * n : 4 * n] = np.random.default_rng(5).integers(0, 256, (n, ITEMSIZE[dtype]), np.uint8).view(x.dtype).ravel()

    def watched(frame, at, *rest):
        heads.append((int.from_bytes(frame[at : at + 4], "little"), rest[3]))
        return read(frame, at, *rest)

    monkeypatch.setattr(oracle, "decode_region", watched)
    frame = codec.encode(codec.view(x, dtype), codec.Lossless(model="flat"))
    assert oracle.decode(frame)[2] == x.tobytes()
    assert heads == [(mode, (1 << ITEMSIZE[dtype]) - 2) for mode in (2, 0, 2, 1, 2, 2)]
    assert encode(x, codec.Lossless(model="flat"), dtype) == frame


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_lossless(dtype, kind):
    for n in (512, 513, 9001):
        x = random_bits(dtype, n, kind)
        frame = bytes(codec.encode(codec.view(x, dtype)))
        assert encode(x, codec.Lossless(), dtype) == frame
        assert decode(frame) == x.tobytes()


@pytest.mark.parametrize("shape", [(1100, 64), (1030, 601), (3, 150, 133), (300_000,)])
@pytest.mark.parametrize("dtype", ["float64", *LOSSY_DTYPES])
def test_scale_models(dtype, shape):
    x = random_bits(dtype, int(np.prod(shape)), "normal").reshape(shape)
    for model in ("separable", "flat"):
        frame = bytes(codec.encode(codec.view(x, dtype), codec.Lossless(model=model)))
        assert encode(x, codec.Lossless(model=model), dtype) == frame
        assert decode(frame) == x.tobytes()


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float8_e5m2fnuz"])
def test_float8(dtype):
    """Frames equal the native engine's with and without raw bits and scale models, also of more than 1,024 rows."""
    features = set()
    for x in float8_tensors(dtype):
        for model in ("auto", "separable"):
            frame = bytes(codec.encode(codec.view(x, dtype), codec.Lossless(model=model)))
            assert encode(x, codec.Lossless(model=model), dtype) == frame
            assert decode(frame) == x.tobytes()
            features.add((frame[40], frame[41]))
    assert {flags for flags, _ in features} == {0, 2}
    assert {0, 4} <= {halved for _, halved in features}


# row lengths for which rows end inside a chunk, at a chunk's end, or inside a group of 4 values
WIDTHS = (64, 68, 100, 127, 130, 512, 1_000, 2_052)


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("dtype", LOSSY_DTYPES)
def test_whole_rows(dtype, columns):
    """Frames equal the native engine's if the loop over 8 whole rows of 128 values alternates with the general loop."""
    rng = np.random.default_rng(columns)
    shape = (40_000 // columns, columns)
    x = rng.standard_normal(shape, F32) * np.exp(2 * rng.standard_normal((shape[0], 1), F32))
    x *= np.exp(rng.standard_normal(columns, F32)) * (rng.random(shape) > 0.02) * 0.01
    x[rng.integers(0, shape[0], 20), rng.integers(0, columns, 20)] = (0, 1e-30, 60_000.0, -1e-7) * 5
    flat = np.concatenate([x.ravel(), x.ravel()[:77]])
    for values, how in ((x, {}), (flat, {"segments": [(0, shape), (x.size, (77,))]})):
        bits = values.astype(np.float16 if dtype == "float16" else F32)
        if dtype == "bfloat16":
            bits = (bits.view(np.uint32) >> 16).astype(np.uint16)
        for model in ("auto", "flat", "separable"):
            frame = flatcall.encode(bits, codec.Lossless(model=model), dtype=dtype, **how)
            assert encode(bits, codec.Lossless(model=model), dtype, **how) == frame
            assert decode(frame) == bits.tobytes()


# Rows that occupy a few lanes, one pass or several passes of a warp, and rows without groups of 8 values; codes packed
# into 32, 16 and 8 bits, and five to a byte.
EIGHTS = {
    **{f"float8_{row}": codec.Float8(group_size=row) for row in (8, 64, 128, 256, 512, 40, 576, 1_152, 4_096, 100)},
    "float8_random": codec.Float8("e5m2", 1_000, "stochastic"),
    "float8_propagate": codec.Float8(group_size=128, nonfinite="propagate"),
    "float8_e5m2_64": codec.Float8("e5m2", 64),
    "mxfp8_floor": codec.Float8("mxfp8_e4m3"),
    "mxfp8_rceil": codec.Float8("mxfp8_e5m2", scale="rceil"),
    "mxfp8_nan": codec.Float8("mxfp8_e4m3", nonfinite="propagate", scale="rceil"),
    "float4_nearest": codec.Float4("mxfp4"),
    "float4_random": codec.Float4("nvfp4", "stochastic"),
    **{f"quantize_{b}_{row}": codec.Quantize(b, row, "odd") for b, row in ((2, 16), (3, 128), (4, 600), (8, 512))},
    **{f"quantize_{b}_{row}": codec.Quantize(b, row) for b, row in ((4, 64), (8, 128), (2, 768), (8, 1_024))},
    "quantize_nearest": codec.Quantize(4, 256, "even", "nearest"),
    "quantize_zero_64": codec.Quantize(4, zero_point=True),
    "quantize_zero_600": codec.Quantize(5, 600, rounding="nearest", zero_point=True),
    **{f"ternary_{packing}": codec.Ternary(packing, seed=3) for packing in ("2bit", "base3", "entropy")},
    "ternary_scale": codec.Ternary(scale=4_096.0),
    **{f"sign_{scale}": codec.Sign(scale) for scale in ("l1", "l2", "two_mean")},
    **{f"sign_{row}": codec.Sign("two_mean", row) for row in (32, 1_056, 5_000, 6_016)},
}


@pytest.mark.parametrize("name", EIGHTS)
def test_groups_of_8(name):
    """Frames equal the native engine's if the loop over groups of 8 values alternates with the general loop."""
    spec, rng = EIGHTS[name], np.random.default_rng(len(name))
    x = rng.standard_normal(18_509, F32) * np.exp(rng.standard_normal(18_509, F32)) * (rng.random(18_509) > 0.02)
    x[600:1300] = 0
    x[3_000:4_500] *= 1e-25
    if name.startswith("mxfp8"):
        x[10_000] = 60_000  # float16 overflows if the largest value of this row is rounded up
        x[2_000] = np.nan if name == "mxfp8_nan" else 1
    cut = [(3, (7, 640)), (4_488, (2, 4_096)), (12_680, (829,))]
    for dtype in LOSSY_DTYPES:
        values = x.astype(np.float16 if dtype == "float16" else F32)
        if dtype == "bfloat16":
            values = (values.view(np.uint32) >> 16).astype(np.uint16)
        for bits, how in ((values, {}), (values[:-1], {"segments": cut}), (values[1:], {})):
            frame = flatcall.encode(bits, spec, dtype=dtype, **how)
            assert encode(bits, spec, dtype, **how) == frame
            ours, native = both_outcomes(frame, dtype)
            assert ours == native
            left, other = np.full(bits.size, 1e-2, F32), np.full(bits.size, 1e-2, F32)
            how |= {"dtype": dtype, "feedback": bits is values}
            frame = flatcall.encode(bits, spec, residual=left, **how)
            assert flatcall.encode(bits, spec, engine="cuda", residual=other, **how) == frame
            assert left.tobytes() == other.tobytes()


@pytest.mark.parametrize("bad", [np.nan, -np.inf, 5_000.0])
def test_values_that_the_loop_for_groups_of_8_rejects(bad):
    """The loop over groups of 8 detects NaN, Inf and values above the given scale at any position."""
    names = "float8_64", "float8_1152", "quantize_4_600", "quantize_zero_64", "ternary_2bit", "ternary_scale"
    for name in (*names, "mxfp8_floor", "quantize_4_64", "quantize_8_1024", "sign_l1", "sign_1056"):
        for at in (5, 17_000, 18_508):
            x, left = np.ones(18_509, F32), np.full(18_509, 0.5, F32)
            x[at] = bad
            for how in ({}, {"residual": left}):
                native = outcome(flatcall.encode, x, EIGHTS[name], **how)
                assert outcome(flatcall.encode, x, EIGHTS[name], engine="cuda", **how) == native
                if isinstance(native, int):
                    assert (left == 0.5).all()
                left[:] = 0.5


@by_cupy
@pytest.mark.parametrize("dtype", LOSSY_DTYPES)
@pytest.mark.parametrize("spec", [codec.Lossless(), codec.Float8(), codec.Quantize(3), codec.Truncate(1)], ids=repr)
def test_accumulate_and_reduce_agree_with_native(spec, dtype, device):
    n = 20_001
    frames = [codec.encode(codec.view(sample_bits(dtype, n, seed=i), dtype), spec) for i in range(3)]
    total = np.linspace(-1, 1, n, dtype=F32)
    ours, there = total.copy(), device.put(total.copy())
    codec.accumulate(frames[0], total, weight=0.3)
    codec.accumulate(frames[0], ours, weight=0.3, options=codec.options(engine="cuda"))
    codec.accumulate(frames[0], there, weight=0.3)
    assert ours.tobytes() == bytes_of(there) == total.tobytes()
    for op in ("sum", "mean", "max"):
        for some in (frames, frames[:1]):
            expected = codec.reduce(some, op=op).tobytes()
            assert codec.reduce(some, op=op, options=codec.options(engine="cuda")).tobytes() == expected
            assert codec.reduce(some, out=there, op=op) is there
            assert bytes_of(there) == expected
    damaged = bytearray(frames[1])
    damaged[-20] ^= 1
    with pytest.raises(codec.FrameError):
        codec.reduce([frames[0], bytes(damaged), frames[2][:-1]], out=there)
    assert bytes_of(there) == expected


@by_cupy
def test_check_finite_rejects_nonfinite_results(device):
    """check_finite detects a NaN or Inf of the result at any position."""
    for n in (1, 31, 33, 5000):
        x = np.linspace(-1, 1, n, dtype=F32)
        frames = [codec.encode(x), codec.encode(x, codec.Float8())]
        assert (
            codec.reduce(frames, check_finite=True, options=codec.options(engine="cuda")).tobytes()
            == codec.reduce(frames).tobytes()
        )
        for at, odd in itertools.product({0, n // 2, n - 1}, (np.nan, -np.inf)):
            wrong = x.copy()
            wrong[at] = odd
            some = [*frames, codec.encode(wrong)]
            for how in ({"engine": "cuda"}, {"out": device.put(x.copy())}):
                with pytest.raises(codec.ArgumentError, match="the result holds NaN or Inf") as caught:
                    flatcall.reduce(some, check_finite=True, **how)
                assert caught.value.code == codec.Status.NONFINITE
                flatcall.reduce(some, **how)
    assert (
        codec.reduce([codec.encode(np.empty(0, F32))], check_finite=True, options=codec.options(engine="cuda")).size
        == 0
    )


@by_cupy
def test_reduce_of_ternary_frames():
    """reduce() accepts Ternary frames with one or several scales, and with equal or different segments."""
    rng = np.random.default_rng(2)
    x = rng.standard_normal((3, 30_000), F32)
    same, clipped = codec.Ternary(scale=6.0), codec.Ternary("base3", clip=2.0)
    parts = [(0, (100, 90)), (9000, (130, 80))]
    for specs, segments in (
        ([same] * 3, [None] * 3),
        ([same, clipped, same], [None] * 3),
        ([same] * 3, [parts, parts, None]),
    ):
        asked = enumerate(zip(x, specs, segments, strict=True))
        frames = [codec.encode(codec.view(a, segments=p), s, stream=i) for i, (a, s, p) in asked]
        for op in ("sum", "mean", "max"):
            assert (
                codec.reduce(frames, op=op, options=codec.options(engine="cuda")).tobytes()
                == codec.reduce(frames, op=op).tobytes()
            )


@by_cupy
@pytest.mark.parametrize("name", [name for name in ROWS if "scale" not in name])
def test_reduce_of_many_frames_with_equal_blocks(name, device):
    """reduce() adds frames with equal blocks, also if there are more than one launch can process."""
    segments = [(0, (40, 90)), (3600, (13, 80)), (4641, (7,))]
    coded = getattr(
        ROWS[name], "entropy", name == "ternary_entropy"
    )  # frames with an entropy stage are added one by one
    for n, count, how in ((20_001, 3, {}), (600, 70, {}), (5000, 3, {"segments": segments}), (9, 2, {})):
        dtype = LOSSY_DTYPES[(n + count) % 3]
        xs = [sample_bits(dtype, n, seed=i, odd=3) for i in range(count)]
        frames = [flatcall.encode(x, ROWS[name], dtype=dtype, stream=i, **how) for i, x in enumerate(xs)]
        for op in ("sum", "mean", "max"):
            device.launched.clear()
            assert (
                codec.reduce(frames, op=op, options=codec.options(engine="cuda")).tobytes()
                == codec.reduce(frames, op=op).tobytes()
            ), (n, op)
            assert n == 9 or len(device.launched) == (count if coded else -(-count // 32))


@by_cupy
def test_sums_of_several_tensors_share_launches(device):
    """Sums of several tensors share launches, whatever their specs, and raise the errors that single sums raise."""
    how = codec.options(engine="cuda")
    specs = [codec.Quantize(4), codec.Quantize(8, group_size=128), codec.Float8(), codec.Lossless(), codec.Ternary()]
    tensors = [(spec, n) for spec in specs for n in (600, 20_001)]
    frames = [[codec.encode(sample_bits("float32", n, seed=i).view(F32), s) for i in range(3)] for s, n in tensors]
    out = [device.put(np.zeros(n, F32)) for _, n in tensors]

    def sums(frames):
        asked = [
            [decode_request((view(f),), None, how, to) for f in some] for some, to in zip(frames, out, strict=True)
        ]
        return [FrameSum(some, "mean") for some in asked]

    calls = DeferredCalls()
    device.launched.clear()
    calls.reduce_many(sums(frames))
    launched = [kernel for kernel in device.launched if "lossless" not in kernel]
    assert sorted(launched) == ["reduce_rows<3>", "reduce_rows<4>", "reduce_rows<6>"]
    assert len(device.launched) == 3 + 3  # 3 launches of reduce_rows, and one for each of the 3 Lossless frames
    calls.conclude()
    for to, some in zip(out, frames, strict=True):
        assert bytes_of(to) == codec.reduce(some, op="mean").tobytes()
    frames[3][1] = frames[3][1][:-20] + bytes([frames[3][1][-20] ^ 1]) + frames[3][1][-19:]
    calls.reduce_many(sums(frames))
    with pytest.raises(codec.FrameError):
        calls.conclude()


@pytest.mark.parametrize("fp8", ["e4m3fn", "e5m2"])
def test_reduce_of_quantized_rows(fp8):
    """Sums equal the native engine's for short rows, which use a table of quotients, and for odd scales and NaN,
    which do not.
    """
    rng = np.random.default_rng(4)
    every = np.concatenate([np.ldexp(1.0, np.arange(-17, 10)) * (1 + m / 8) for m in range(8)]).astype(F32)
    for row, count in ((1_024, 8), (1_024, 9), (4_096, 3), (64, 2), (130, 2)):
        x = rng.standard_normal((count, 40_000), F32) * np.exp(3 * rng.standard_normal((count, 1), F32))
        x[:, : every.size] = every * rng.choice([-1, 1], every.size)
        for scale in (1.0, 1e-33, 1e33):
            x[1] *= F32(scale)
            frames = [codec.encode(a, codec.Float8(fp8, row, nonfinite="propagate")) for a in x]
            for op in ("sum", "mean", "max"):
                assert (
                    codec.reduce(frames, op=op, options=codec.options(engine="cuda")).tobytes()
                    == codec.reduce(frames, op=op).tobytes()
                )
            x[1] /= F32(scale)
    x[1, [0, 777, -1]] = np.nan
    frames = [codec.encode(a, codec.Float8(fp8, 1_024, nonfinite="propagate")) for a in x]
    expected = codec.reduce(frames)
    assert np.isnan(expected).sum() == 3
    assert np.array_equal(codec.reduce(frames, options=codec.options(engine="cuda")), expected, equal_nan=True)
