"""The CUDA engine on the CPU gives the bytes, values and errors of the native engine.

Fixtures run tests on one, two or three kinds of device; ``make gpu-tests`` runs the file on a GPU.
"""

import hashlib
import itertools
import os
import weakref

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import codec
from codec import optimizers
from codec._c.library import ITEMSIZE
from codec.decoding import decode_request
from codec.encoding import encode_request
from codec.engines.cuda import DeferredCalls, Sum, encoding, plan, scratch, workspace
from codec.engines.cuda.kernels import FILE_OF
from codec.engines.cuda.plan import Plan
from codec.engines.cuda.workspace import Work
from codec.errors import Status
from codec.tensors.view import view
from reference import decoder as oracle
from support import cupy_on_cpu, engine_comparison, flatcall
from support.device import DeviceArray, Emulated, Real, build, use
from support.engine_comparison import (
    check_decode,
    check_encode,
    check_engines,
    level_arguments,
    misaligned,
    sample_bits,
    unify_nan,
)
from support.format_cases import HAND_MADE
from support.frame_builder import recompute_checksums
from support.golden_frames import GOLDEN, GOLDEN_FRAMES, golden_tensor
from support.sample_frames import FRAMES_TO_DAMAGE, damage
from support.specs import LOSSY, MORE, SPECS, TRUNCATES
from support.tensors import ADAMW, ALL_DTYPES, KINDS, NUMPY_DTYPES, gradient, optimizer_state, random_bits
from support.tiers import N_DAMAGED, nightly

F32 = np.float32
LOSSY_DTYPES = ("float32", "bfloat16", "float16")
ROWS = {name: spec for name, spec in (LOSSY | MORE).items() if not isinstance(spec, codec.Truncate)}


@pytest.fixture(scope="session")
def library():
    return build(options=os.environ.get("CUDA_ON_CPU_FLAGS", "").split())


def like(dtype):
    return np.empty(0, f"u{ITEMSIZE[dtype]}")


GPU = pytest.param("gpu", marks=pytest.mark.gpu)


@pytest.fixture(params=["cpu", GPU], autouse=True)
def device(request, monkeypatch):
    """The kernels compiled for the CPU, the same behind a CuPy that runs on the CPU, or with ``-m gpu`` a real GPU."""
    if request.param == "cpu":
        device = Emulated(request.getfixturevalue("library"))
        use(monkeypatch, device)
        return device
    if request.param == "cupy":
        cupy_on_cpu.install(monkeypatch, request.getfixturevalue("library"))
    return Real(monkeypatch)


on_cpu = pytest.mark.parametrize("device", ["cpu"], indirect=True)
by_cupy = pytest.mark.parametrize("device", ["cpu", "cupy", GPU], indirect=True)


def encode(x, spec, dtype, **how):
    return bytes(flatcall.encode(x, spec, dtype=dtype, engine="cuda", **how))


def decode(frame, **how):
    """Return the decoded values' bytes."""
    out = np.empty(codec.inspect(frame).shape, like(codec.inspect(frame).dtype).dtype)
    return flatcall.decode(frame, out=out, engine="cuda", **how).tobytes()


def bytes_of(x):
    """Return the bytes of a frame or a tensor on the host or the device."""
    x = x.get() if hasattr(x, "get") else x
    return x.tobytes() if isinstance(x, np.ndarray) else bytes(x)


def outcome(call, *args, **how):
    """Return the result's bytes, or the error's code."""
    try:
        return bytes_of(call(*args, **how))
    except codec.CodecError as e:
        return e.code


def both_outcomes(frame, dtype, **how):
    """Return the both_outcomes of decoding with the CUDA engine and with the native one."""
    return [outcome(flatcall.decode, frame, like=like(dtype), engine=name, **how) for name in ("cuda", "native")]


def planes_of_all_modes():
    """Yield float and integer tensors whose planes are sent in every mode of the format."""
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
    """The reference decoder confirms that every mode occurs."""
    seen, read = set(), oracle.decode_region

    def watched(frame, at, end, m, nplanes, shift, fixed, coded, halved, *rest):
        head = int.from_bytes(frame[at : at + 4], "little")
        for p in range(nplanes):
            way = "fixed" if fixed >> p & 1 else ("constant", "raw", "coded", "rows")[head >> 2 * p & 3]
            way = "halved" if way == "coded" and halved >> p & 1 else way
            seen.add((way, bool(p and head >> 16 & 1)))
        return read(frame, at, end, m, nplanes, shift, fixed, coded, halved, *rest)

    monkeypatch.setattr(oracle, "decode_region", watched)
    for x, dtype in planes_of_all_modes():
        frame = codec.encode(codec.view(x, dtype))
        assert oracle.decode(frame)[2] == x.tobytes()
        assert encode(x, codec.Lossless(), dtype) == frame
        assert decode(frame) == x.tobytes()
    assert seen >= {(way, False) for way in WAYS} | {(way, True) for way in PRUNED}


@pytest.mark.parametrize("last", [17, 63])
def test_pruned_planes_that_end_with_a_short_run_of_zeros(last):
    """The last run of 128 bytes of live values, which is shorter, may be the only one that is left out."""
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
    """Blocks of one value and of noise, where only the first plane lies in regions."""
    n, heads, read = 16_384, [], oracle.decode_region
    x = random_bits(dtype, 6 * n, "normal")
    x[n : 2 * n] = x[0]
    x[3 * n : 4 * n] = np.random.default_rng(5).integers(0, 256, (n, ITEMSIZE[dtype]), np.uint8).view(x.dtype).ravel()

    def watched(frame, at, *rest):
        heads.append((int.from_bytes(frame[at : at + 4], "little"), rest[4]))
        return read(frame, at, *rest)

    monkeypatch.setattr(oracle, "decode_region", watched)
    frame = codec.encode(codec.view(x, dtype), codec.Lossless(model="flat"))
    assert oracle.decode(frame)[2] == x.tobytes()
    assert heads == [(mode, (1 << ITEMSIZE[dtype]) - 2) for mode in (2, 0, 2, 1, 2, 2)]
    assert encode(x, codec.Lossless(model="flat"), dtype) == frame


@pytest.fixture
def compare_with_native(monkeypatch):
    """Make check_encode() and similar helpers compare the CUDA engine with the native one."""
    monkeypatch.setattr(engine_comparison, "ENGINES", ("native", "cuda"))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.data())
def test_random_calls_agree_with_native(compare_with_native, data):
    check_engines(data.draw)


def test_every_length(compare_with_native):
    """Lengths 0 to 512, codecs in turn, at every offset in a cache line."""
    x = {dtype: sample_bits(dtype, 512, "zeros", odd=9) for dtype in LOSSY_DTYPES}
    specs = sorted(SPECS.items())
    for n in range(513):
        for i in range(2):
            _, spec = specs[(2 * n + i) % len(specs)]
            dtype, how = LOSSY_DTYPES[(n + i) % 3], level_arguments(spec, n)
            frame = check_encode(misaligned(x[dtype][:n], n % 13), spec, dtype, stream=n, **how)
            if isinstance(frame, bytes):
                check_decode(frame, dtype, n, **how)


def test_every_width(compare_with_native):
    """Rows of 64 to 1,000 values, in segments that begin anywhere."""
    for i, columns in enumerate(range(64, 1001, 39)):
        dtype, rows = ("float64", *LOSSY_DTYPES)[i % 4], 1 + 20_000 // columns
        x = random_bits(dtype, 3 + 2 * rows * columns, "normal")
        segments = [(3, (rows, columns)), (3 + rows * columns, (rows // 2, 2 * columns))]
        for spec in (codec.Lossless(), codec.Lossless(model="separable"), codec.Float8(group_size=columns)):
            if dtype != "float64" or isinstance(spec, codec.Lossless):
                frame = check_encode(x, spec, dtype, segments=segments)
                if isinstance(frame, bytes):
                    check_decode(frame, dtype, x.size)


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


# rows end inside a chunk, between chunks and inside a group of 4, with lengths that are multiples of 4 or not
WIDTHS = (64, 68, 100, 127, 130, 512, 1_000, 2_052)


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("dtype", LOSSY_DTYPES)
def test_whole_rows(dtype, columns):
    """A loop for eight rows of 128 values and the general loop alternate within a tensor."""
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


# rows of a few lanes, of one and several passes of a warp, without groups of 8; packed by 32, 16, 8 bits and fives
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
    """A loop for groups of 8 in one row and the general path alternate within a tensor."""
    spec, rng = EIGHTS[name], np.random.default_rng(len(name))
    x = rng.standard_normal(18_509, F32) * np.exp(rng.standard_normal(18_509, F32)) * (rng.random(18_509) > 0.02)
    x[600:1300] = 0
    x[3_000:4_500] *= 1e-25
    if name.startswith("mxfp8"):
        x[10_000] = 60_000  # rounded up, its row's largest code is more than float16 holds
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
    """NaN, Inf and values above a given scale, at any position."""
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


@pytest.mark.parametrize("zero", range(4))
def test_pieces_of_truncate_that_are_0_in_all_values(zero):
    """They are left out of regions; those behind them are read to the region's end."""
    x = np.random.default_rng(zero).integers(0x3F000000, 0x40000000, 33_000, np.uint32) & ~np.uint32(63 << 6 * zero)
    frame = flatcall.encode(x, codec.Truncate(0), dtype="float32")
    assert encode(x, codec.Truncate(0), "float32") == frame
    assert decode(frame) == x.tobytes()


@pytest.mark.parametrize("packing", ["2bit", "base3", "entropy"])
def test_scale_0_of_zeros(packing):
    """Frames equal those of the native engine; another value than 0 is the same error, and changes no residual."""
    spec, segments = codec.Ternary(packing, scale=0), [(0, (12_000,)), (12_000, (6_509,))]
    for dtype in LOSSY_DTYPES:
        for how in ({}, {"segments": segments}):
            x = np.zeros(18_509, {"float32": F32, "float16": np.float16, "bfloat16": np.uint16}[dtype])
            for bad in (None, 17_000):
                if bad:
                    x[bad] = 1
                native = outcome(flatcall.encode, x, spec, dtype=dtype, **how)
                assert outcome(flatcall.encode, x, spec, dtype=dtype, engine="cuda", **how) == native
                assert (native == Status.BAD_SCALE) is (bad is not None)
            left = np.full(x.size, 0.5, F32)
            assert outcome(flatcall.encode, x, spec, dtype=dtype, engine="cuda", residual=left, **how) == native
            assert (left == (0.5 if bad else 0)).all()


@pytest.mark.parametrize("name", ROWS)
def test_row_codecs_equal_the_native_engine(name):
    for dtype in LOSSY_DTYPES:
        for n in (1, 5, 63, 64, 100, 513, 17_001):
            x = sample_bits(dtype, n, "normal", odd=0 if "scale" in name else 3)
            frame = bytes(codec.encode(codec.view(x, dtype), ROWS[name]))
            assert encode(x, ROWS[name], dtype) == frame, (dtype, n)
            ours, native = both_outcomes(frame, dtype)
            assert ours == native, (dtype, n)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TRUNCATES)
def test_truncate_equals_the_native_engine(name, kind):
    for dtype in LOSSY_DTYPES:
        for n in (513, 20_001) if kind == "mixed" else (513,):
            x = random_bits(dtype, n, kind)
            how = level_arguments(TRUNCATES[name], n)
            frame = bytes(flatcall.encode(x, TRUNCATES[name], dtype=dtype, **how))
            assert encode(x, TRUNCATES[name], dtype, **how) == frame, (dtype, n)
            given = how if TRUNCATES[name].level_coding == "shared" else {}
            ours, native = both_outcomes(frame, dtype, **given)
            assert ours == native, (dtype, n)


BUCKET = [(0, (100, 90)), (9000, (130, 80)), (19_400, (7,)), (19_407, (5000,)), (25_000, (70, 1030))]


@pytest.mark.parametrize("name", ["lossless", *ROWS, *TRUNCATES])
def test_segments(name):
    """Parameters of a bucket have their own scale models, rows and scales."""
    spec = (SPECS | ROWS)[name]
    for dtype in LOSSY_DTYPES if name == "lossless" else [LOSSY_DTYPES[len(name) % 3]]:
        x = sample_bits(dtype, 100_000, "normal")
        how = level_arguments(spec, len(x))
        for segments in (BUCKET, BUCKET[1:]) if name == "lossless" else (BUCKET,):
            frame = bytes(flatcall.encode(x, spec, dtype=dtype, segments=segments, **how))
            ours = encode(x, spec, dtype, segments=segments, **how)
            assert ours == frame, dtype


@pytest.mark.parametrize("dtype", ["float64", *LOSSY_DTYPES])
def test_large_tensors(dtype):
    """One part, whose best eighth of an octave is searched, and many parts."""
    n = 540_001
    x = random_bits(dtype, n, "normal")
    y = np.where(np.arange(n) % 3 == 0, x.view(f"u{ITEMSIZE[dtype]}"), 0).astype(x.dtype)
    bucket = [(i * 9000 + i, (100, 90)) for i in range(50)]
    for values in (x, y):
        for model in ("auto", "flat"):
            for segments in (None, bucket) if model == "auto" else (None,):
                spec, how = codec.Lossless(model=model), {} if segments is None else {"segments": segments}
                frame = bytes(flatcall.encode(values, spec, dtype=dtype, **how))
                assert encode(values, spec, dtype, **how) == frame, (model, segments is None)


def test_shared_codebook():
    x, far = sample_bits("float32", 30_000, "normal"), sample_bits("float32", 30_000, "wide", 3)
    for spec in (codec.Lossless(), codec.Lossless(model="flat"), codec.Truncate(1), TRUNCATES["truncate_coded"]):
        how = level_arguments(spec, len(x))
        book = flatcall.codebook(x.view(F32), spec=spec, **how)
        for y in (x, far, x[:600]):
            how = level_arguments(spec, len(y))
            frame = bytes(flatcall.encode(y, spec, dtype="float32", codebook=book, **how))
            assert encode(y, spec, "float32", codebook=book, **how) == frame


@pytest.mark.parametrize("name", [*ROWS, *TRUNCATES])
def test_residuals(name, device):
    """With and without feedback, for stored tensors, and unchanged where encoding fails."""
    spec = (ROWS | TRUNCATES)[name]
    for dtype in LOSSY_DTYPES:
        for n in (300, 5001):
            x = sample_bits(dtype, n, "normal", odd=0 if "scale" in name else 3)
            levels = level_arguments(spec, n)
            left, ours, there = (np.full(n, 1e-3, F32) for _ in range(3))
            on_device = device.put(there)
            for feedback in (False, True):
                how = {"dtype": dtype, "feedback": feedback, **levels}
                native = outcome(flatcall.encode, x, spec, residual=left, **how)
                assert outcome(flatcall.encode, x, spec, engine="cuda", residual=ours, **how) == native
                assert outcome(flatcall.encode, device.put(x), spec, residual=on_device, **how) == native
                assert ours.tobytes() == bytes_of(on_device) == left.tobytes(), (dtype, n, feedback)


def test_one_pass_reads_rows_once(monkeypatch):
    """verify_first=False launches fewer kernels; errors are the same."""
    scanned, plan_of = [], encoding.plan_of
    monkeypatch.setattr(encoding, "plan_of", lambda r: scanned.append((plan := plan_of(r)).view.row_sums.count) or plan)
    x = np.random.default_rng(2).standard_normal(20_000, F32)
    for spec in (codec.Float8(), codec.Quantize(4), codec.Sign(group_size=1_024)):
        left = np.ones_like(x)
        frame = codec.encode(x, spec, residual=left, feedback=True)
        for verify_first in (True, False):
            how = {"residual": (ours := np.ones_like(x)), "feedback": True, "verify_first": verify_first}
            assert encode(x, spec, "float32", **how) == frame
            assert ours.tobytes() == left.tobytes()
        bad = np.where(np.arange(20_000) == 19_999, F32(np.nan), x)
        assert outcome(encode, bad, spec, "float32", residual=ours, verify_first=False) == Status.NONFINITE
    assert [count > 0 for count in scanned] == [True, False, False] * 3


def test_calls_share_plans(monkeypatch):
    """A call with the spec, dtype and shape of an earlier one makes no plan; its random bits and values are its own."""
    made = []
    monkeypatch.setattr(plan, "_plans", {})
    monkeypatch.setattr(plan, "Plan", lambda r: made.append(r) or Plan(r))
    rng = np.random.default_rng(11)
    xs = rng.standard_normal((3, 40, 500), F32)
    book = codec.Codebook.from_tensors(xs[0])
    quantize, lossless = codec.Quantize(4, rounding="stochastic"), codec.Lossless()
    cases = [(quantize, {"stream": s}) for s in (0, 1, 1 << 40)] + [(codec.Ternary(seed=s), {}) for s in (0, 1)]
    cases += [(lossless, {}), (lossless, {"codebook": book}), (lossless, {"segments": [(0, (40, 500))]})]
    for x in xs:
        for spec, how in cases:
            assert encode(x, spec, "float32", **how) == flatcall.encode(x, spec, **how), (spec, how)
    assert len(made) == 6
    for shape, dtype in (((500, 40), "float32"), ((40, 500), "uint32")):
        y = x.view(dtype).reshape(shape)
        assert encode(y, lossless, dtype) == codec.encode(y)
    assert len(made) == 8
    monkeypatch.setattr(plan, "_KEPT", 1)
    for spec in (quantize, lossless, quantize):
        assert encode(x[:20], spec, "float32") == codec.encode(x[:20], spec)
    assert len(made) == 11
    assert len(plan._plans) == 1


@by_cupy
def test_residual_in_place(device):
    """The residual is the tensor itself."""
    for spec in (codec.Float8(), codec.Sign(), codec.Truncate(1), codec.Truncate(3)):
        for x in (np.random.default_rng(1).standard_normal(70_000, F32), np.full(600, np.pi, F32)):
            left, there = x.copy(), device.put(x.copy())
            frame = codec.encode(left, spec, residual=left)
            assert bytes_of(codec.encode(there, spec, residual=there)) == frame
            assert bytes_of(there) == left.tobytes()


@pytest.mark.parametrize("dtype", LOSSY_DTYPES)
def test_metrics(dtype):
    """Parameter groups with their own metrics, state of every dtype, and given levels."""
    n, sgd, adamw = 30_000, optimizers.SGD(0.1), ADAMW
    x = gradient(n, dtype=dtype)
    arrays = optimizer_state(n)
    arrays["theta"][100:109] = 0, -0.0, np.inf, np.nan, 1e-40, 3e38, -3e38, 1e-45, -np.inf
    with np.errstate(over="ignore"):
        halves = {k: a.astype(np.float16) for k, a in arrays.items()}
    brains = {k: a.astype(NUMPY_DTYPES["bfloat16"]) for k, a in arrays.items()}
    groups = [(0, adamw), (1, sgd), (9_999, adamw), (29_999, sgd), (50_000, sgd)]
    for state in (arrays, halves, brains):
        for metric in (sgd, adamw, optimizers.Momentum(0.1, momentum=0.9), optimizers.SGD(0.1, maximize=True), groups):
            how = {"optimizer": metric, "state": state}
            frame = bytes(flatcall.encode(x, codec.Truncate(), **how))
            assert encode(x, codec.Truncate(), dtype, **how) == frame
    levels = np.random.default_rng(3).integers(0, 4, n, np.uint8)
    frame = bytes(codec.encode(x, TRUNCATES["truncate_plane"].bind(levels=levels)))
    assert encode(x, TRUNCATES["truncate_plane"], dtype, optimizer=levels) == frame
    levels[-1] = 4
    with pytest.raises(codec.ArgumentError) as error:
        encode(x, TRUNCATES["truncate_plane"], dtype, optimizer=levels)
    assert error.value.code == Status.BAD_ARGUMENT


@by_cupy
def test_few_values():
    for name, spec in (SPECS | ROWS).items():
        for n in (0, 1, 2, 7, 511):
            x = sample_bits("bfloat16", n, "normal")
            how = level_arguments(spec, n)
            frame = bytes(flatcall.encode(x, spec, dtype="bfloat16", **how))
            assert encode(x, spec, "bfloat16", **how) == frame, (name, n)


def test_rows_whose_scales_are_larger_than_their_codes():
    x = sample_bits("float32", 17_000, "normal").view(F32)
    for row in (1, 3, 100):
        for spec in (codec.Float8(group_size=row, entropy=True), codec.Float8(group_size=row), codec.Quantize(2, row)):
            frame = bytes(codec.encode(x, spec, stream=1 << 40))
            assert encode(x, spec, "float32", stream=1 << 40) == frame, (row, spec)


@by_cupy
def test_encode_errors_agree_with_native():
    """A tensor that needs more room than `out` has is stored if that fits."""
    x = sample_bits("float32", 100_000, "normal").view(F32)
    nan, inf = x.copy(), x.copy()
    nan[70_000], inf[99_999] = np.nan, np.inf

    for spec in ROWS.values():
        for bad in (nan, inf):
            assert outcome(encode, bad, spec, "float32") == outcome(codec.encode, bad, spec), spec
    for packing in ("2bit", "entropy"):
        spec = codec.Ternary(packing, scale=float(np.abs(x).max()) / 2)
        assert outcome(encode, x, spec, "float32") == Status.BAD_SCALE
        assert outcome(encode, nan, spec, "float32") == outcome(codec.encode, nan, spec) == Status.NONFINITE


@by_cupy
def test_encode_into_out(device):
    """On host and device, at any address, too small or just large enough."""
    x = sample_bits("float32", 30_000, "normal").view(F32)
    noise = np.random.default_rng(5).integers(0, 1 << 32, 30_000, np.uint32).view(F32)
    noise[:18_000] = x[:18_000]
    lossy = codec.Quantize(), codec.Float8(entropy=True), codec.Truncate(1)
    for values, specs in ((x, (codec.Lossless(), *lossy)), (noise, [codec.Lossless()])):
        for spec in specs:
            frame = codec.encode(values, spec)
            room = codec.bound(x.shape, "float32", spec)
            for nbytes in (4_000, len(frame) - 1, len(frame), room):
                for at in (0, 3, 8):
                    memory, host = np.zeros(at + nbytes, np.uint8), np.zeros(at + nbytes, np.uint8)
                    out = device.put(memory)[at:]
                    expected = Status.SHORT_OUTPUT if nbytes < len(frame) else frame
                    assert outcome(codec.encode, device.put(values), spec, out=out) == expected
                    assert outcome(flatcall.encode, values, spec, engine="cuda", out=host[at:]) == expected
                    if nbytes >= len(frame):
                        assert bytes_of(out)[: len(frame)] == host[at : at + len(frame)].tobytes() == frame
                    left = device.put(np.ones_like(x))
                    if not isinstance(spec, codec.Lossless):
                        assert outcome(codec.encode, device.put(values), spec, residual=left, out=out) == expected
                        assert (left.get() == 1).all() == (nbytes < len(frame))


@by_cupy
def test_decode_from_and_to_host_and_device(device):
    """At any address; damage leaves the destination unchanged."""
    for x in (np.random.default_rng(0).standard_normal(9000, F32), np.ones(100, F32)):
        frame = codec.encode(x)
        damaged = frame[:-20] + bytes([frame[-20] ^ 1]) + frame[-19:]
        for at in (0, 1, 4, 8):
            there, bad = (device.put(np.frombuffer(bytes(at) + f, np.uint8).copy())[at:] for f in (frame, damaged))
            assert bytes_of(codec.decode(there)) == x.tobytes()
            assert codec.decode(there, like=x).tobytes() == x.tobytes()
            out, far = np.zeros_like(x), device.put(np.zeros_like(x))
            for whole, broken in ((there, bad), (frame, damaged)):
                assert codec.decode(whole, out=far) is far
                assert bytes_of(far) == x.tobytes()
                assert codec.decode(whole, out=out, options=codec.options(engine="cuda")) is out
                assert out.tobytes() == x.tobytes()
                for kept in (far, out):
                    with pytest.raises(codec.ChecksumError):
                        codec.decode(broken, out=kept, options=codec.options(engine="cuda"))
                    assert bytes_of(kept) == x.tobytes()


@by_cupy
def test_arguments_on_another_device_are_rejected(device):
    x = device.put(np.random.default_rng(0).standard_normal(600, F32))
    with pytest.raises(codec.ArgumentError, match="shares memory"):
        codec.encode(x, out=x.view(np.uint8))
    memory = device.put(np.zeros(5000, np.uint8))
    frame = codec.encode(x, out=memory)
    with pytest.raises(codec.ArgumentError, match="shares memory"):
        codec.decode(frame, out=memory[:2400].view(F32))
    with pytest.raises(codec.EngineError, match="native"):
        codec.encode(x, options=codec.options(engine="native"))


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
    """At any position."""
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
    """With one scale and with several, for equal and different segments."""
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
    """Also of more frames than one launch takes."""
    segments = [(0, (40, 90)), (3600, (13, 80)), (4641, (7,))]
    coded = getattr(
        ROWS[name], "entropy", name == "ternary_entropy"
    )  # entropy-coded frames are added one after the other
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
    """Also of tensors with other specs; errors are those of each sum alone."""
    how = codec.options(engine="cuda")
    specs = [codec.Quantize(4), codec.Quantize(8, group_size=128), codec.Float8(), codec.Lossless(), codec.Ternary()]
    tensors = [(spec, n) for spec in specs for n in (600, 20_001)]
    frames = [[codec.encode(sample_bits("float32", n, seed=i).view(F32), s) for i in range(3)] for s, n in tensors]
    out = [device.put(np.zeros(n, F32)) for _, n in tensors]

    def sums(frames):
        asked = [
            [decode_request((view(f),), None, how, to) for f in some] for some, to in zip(frames, out, strict=True)
        ]
        return [Sum(some, "mean") for some in asked]

    calls = DeferredCalls()
    device.launched.clear()
    calls.reduce_many(sums(frames))
    launched = [kernel for kernel in device.launched if "lossless" not in kernel]
    assert sorted(launched) == ["reduce_rows<3>", "reduce_rows<4>", "reduce_rows<6>"]
    assert len(device.launched) == 3 + 3  # one for each rank
    calls.conclude()
    for to, some in zip(out, frames, strict=True):
        assert bytes_of(to) == codec.reduce(some, op="mean").tobytes()
    frames[3][1] = frames[3][1][:-20] + bytes([frames[3][1][-20] ^ 1]) + frames[3][1][-19:]
    calls.reduce_many(sums(frames))
    with pytest.raises(codec.FrameError):
        calls.conclude()


@pytest.mark.parametrize("fp8", ["e4m3fn", "e5m2"])
def test_reduce_of_quantized_rows(fp8):
    """Short rows use a table of quotients; odd scales and NaN do not."""
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


@by_cupy
@pytest.mark.parametrize("at_once", [2, 65_535])
def test_batches(device, monkeypatch, at_once):
    """Any sizes, on host and device; all or none; the first fault is reported, also over several launches."""
    monkeypatch.setattr(workspace, "MAX_GRID_Y", at_once)
    rng = np.random.default_rng(3)
    xs = {i: rng.standard_normal(n).astype(F32) for i, n in enumerate((0, 1, 600, 20_000, 512))}
    frames = codec.encode_many(xs)
    there = {i: device.put(x) for i, x in xs.items()}
    device.launched.clear()
    assert {i: bytes_of(f) for i, f in codec.encode_many(there).items()} == frames
    assert device.launched.count("close_frame") == -(-len(xs) // at_once)
    assert codec.encode_many(xs, options=codec.options(engine="cuda")) == frames
    device.launched.clear()
    decoded = codec.decode_many(frames, options=codec.options(engine="cuda"))
    assert device.launched.count("decode_lossless_fast<4>") == (
        1 if at_once > 2 else 2
    )  # small tensors are stored without blocks
    assert all((decoded[i] == x).all() for i, x in xs.items())
    codec.decode_many(frames, out={i: device.put(np.zeros_like(x)) for i, x in xs.items()})
    bad = frames | {3: frames[3][:-1] + b"\1"}
    out = {i: np.zeros_like(x) for i, x in xs.items()}
    with pytest.raises(codec.FrameError) as error:
        codec.decode_many(bad, out=out, options=codec.options(engine="cuda"))
    assert error.value.item == 3
    assert not any(x.any() for x in out.values())
    xs[2][5] = np.nan
    with pytest.raises(codec.ArgumentError) as error:
        codec.encode_many(xs, codec.Sign(), options=codec.options(engine="cuda"))
    assert error.value.item == 2
    assert (
        codec.encode_many([], options=codec.options(engine="cuda"))
        == codec.decode_many([], options=codec.options(engine="cuda"))
        == []
    )


@by_cupy
def test_cached_headers(device, monkeypatch):
    """decode() skips fetching a header that it knows, and detects that it belongs to another frame."""
    x = np.random.default_rng(4).standard_normal((300, 70), F32)
    for y, other in ((x, -x), (x[:3], -x[:3])):
        frame, another, short = codec.encode(y), codec.encode(other), codec.encode(y[:-1])
        there, out = device.put(np.frombuffer(frame, np.uint8)), device.put(np.zeros_like(y))
        for head in (frame[:4096], frame, frame[:120]):
            flatcall.decode(there, out=out, head=head)
            flatcall.accumulate(there, out, head=head)
            assert bytes_of(out) == (2 * y).tobytes()
        with pytest.raises(codec.LimitError):
            flatcall.decode(there, head=frame, max_nbytes=y.nbytes - 1)
        flatcall.decode(there, out=out, head=device.put(np.frombuffer(frame, np.uint8)))
        assert bytes_of(out) == y.tobytes()
        flatcall.accumulate(there, out, head=frame)
        for wrong in (another, short, frame[:20], b""):
            with pytest.raises(codec.FrameError):
                flatcall.decode(there, out=out, head=wrong)
        assert bytes_of(out) == (2 * y).tobytes()
    spec, state = TRUNCATES["truncate_shared"], {"theta": device.put(x)}
    how = {"optimizer": optimizers.SGD(0.1), "state": state}
    frame, another = (flatcall.encode(device.put(z), spec, **how) for z in (x, -x))
    damaged = bytearray(bytes_of(another)[:4096])
    damaged[-1] ^= 255
    for head in (bytes_of(another), bytes(damaged), bytes_of(another)[:48] + bytes(60)):
        with pytest.raises(codec.CodecError):
            flatcall.decode(frame, head=head, **how)


@by_cupy
def test_symbols_are_counted_on_the_device(device):
    """Codebooks use the sample that encoding takes; few values are counted on the host."""
    rng = np.random.default_rng(2)
    x = (rng.standard_normal((300, 128)) * np.exp(rng.standard_normal((300, 1)))).astype(F32)
    lossless = [codec.Lossless(), codec.Lossless(model="flat"), codec.Lossless(model="separable")]
    for dtype, specs in ((F32, [*lossless, codec.Truncate(1)]), (np.float64, lossless), (np.float16, lossless[:1])):
        y = x.astype(dtype)
        for spec in specs:
            for some in (y, y[:3]):
                book = codec.Codebook.from_tensors(device.put(some), spec=spec)
                assert book == codec.Codebook.from_tensors(some, spec=spec)
    spec, metric, state = codec.Truncate(), optimizers.SGD(0.1), {"theta": x[::-1] * F32(0.1)}
    there = {name: device.put(array) for name, array in state.items()}
    ours = codec.Codebook.from_tensors(device.put(x), spec=spec.bind(metric, **there))
    assert ours == codec.Codebook.from_tensors(x, spec=spec.bind(metric, **state))


@by_cupy
def test_calls_do_not_synchronize(device):
    """Size and status stay on the device, and nothing is copied to the host."""
    x = np.random.default_rng(8).standard_normal(20_000, F32)
    nan = x.copy()
    nan[100] = np.nan
    for spec in (codec.Lossless(), codec.Sign(), codec.Float8(entropy=True), codec.Truncate(1)):
        frame = codec.encode(x, spec)
        out = device.put(np.zeros(codec.bound(x.shape, "float32", spec), np.uint8))
        pending = codec.encode_async(device.put(x), spec, out=out)
        assert (pending.nbytes.get(), pending.status.get()) == (len(frame), 0)
        if isinstance(spec, codec.Lossless | codec.Truncate):
            book = codec.Codebook.from_counts(pending.counts.get(), spec)
            assert book == codec.Codebook.from_tensors(x, spec=spec)
        assert bytes_of(pending.wait()) == bytes_of(out)[: len(frame)] == frame
        assert codec.inspect(out[: len(frame)]) == codec.inspect(frame)
        codec.verify(out[: len(frame)])
        pending = codec.encode_async(device.put(x), spec, out=out[:100])
        assert (pending.nbytes.get(), pending.status.get()) == (0, Status.SHORT_OUTPUT)
        with pytest.raises(codec.ArgumentError, match="bound"):
            pending.wait()
    pending = codec.encode_async(device.put(nan), codec.Sign(), out=out)
    assert pending.status.get() == Status.NONFINITE
    for wrong in (out[1:], np.zeros(100_000, np.uint8)):
        with pytest.raises(codec.CodecError, match="encode_async"):
            codec.encode_async(device.put(x), out=wrong)
    with pytest.raises(codec.EngineError, match="on a GPU"):
        codec.encode_async(x, out=wrong)


@by_cupy
def test_warmup_compiles_kernels(device):
    codec.warmup([codec.Sign(), codec.Lossless()], "float32", progress=False, options=codec.options(engine="cuda"))
    assert {"encode_rows<2>", "decode_rows<2>", "encode_lossless_fast<4>", "decode_lossless<4>"} <= set(device.launched)


@by_cupy
def test_custom_metrics_run_on_the_host(device):
    """Wherever the state lies."""
    x = gradient(9000)
    state = optimizer_state(9000)
    metric = [(0, optimizers.Custom(lambda theta, v: theta / (v + 1e-8) ** 0.5)), (5000, optimizers.SGD(0.1))]
    frame = codec.encode(x, TRUNCATES["truncate_shared"].bind(metric, **state))
    there = {name: device.put(array) for name, array in state.items()}
    ours = codec.encode(device.put(x), TRUNCATES["truncate_shared"].bind(metric, **there))
    assert bytes_of(ours) == frame
    expected = codec.decode(frame, codec.Truncate().bind(metric, **state)).tobytes()
    assert bytes_of(codec.decode(ours, codec.Truncate().bind(metric, **there))) == expected


@on_cpu
def test_batches_of_different_sizes_in_any_block_order(device, monkeypatch):
    """Thread blocks beyond the end of a smaller tensor do nothing."""
    monkeypatch.setenv("CUDA_ON_CPU_ORDER", "down")
    rng = np.random.default_rng(6)
    xs = [rng.standard_normal(n, F32) for n in (600, 150_000, 5000, 1, 20_000)]
    for spec in (codec.Lossless(), codec.Sign(), codec.Float8(entropy=True), codec.Quantize(4), codec.Truncate(1)):
        frames = [codec.encode(x, spec, stream=i << 32) for i, x in enumerate(xs)]
        assert codec.encode_many(xs, spec, options=codec.options(engine="cuda")) == frames
        there = [device.put(np.frombuffer(frame, np.uint8)) for frame in frames]
        assert list(map(bytes_of, codec.decode_many(there))) == [codec.decode(frame).tobytes() for frame in frames]


@by_cupy
def test_number_of_launches(device):
    """At most four to encode, and three to decode into memory that errors must not change.

    Batches need no more, except for tensors that use other kernels.
    """
    xs = [device.put(np.random.default_rng(n).standard_normal(n, F32)) for n in (5, 600, 40_000, 513, 20_000)]
    codec.encode_many(xs)
    assert device.launched == ["choose_lossless", "encode_lossless_fast<4>", "close_frame"]
    device.launched.clear()
    frames = codec.encode_many([*xs[1:], *(device.put(np.ones(1000, np.int16)) for _ in range(3))])
    assert device.launched == ["choose_lossless", "encode_lossless<2>", "encode_lossless_fast<4>", "close_frame"]
    device.launched.clear()
    codec.decode_many(frames)
    assert device.launched == ["gather", "decode_lossless<2>", "decode_lossless_fast<4>"]
    x = device.put(np.random.default_rng(1).standard_normal(20_000, F32))
    groups = {"optimizer": [(0, optimizers.SGD(0.1)), (500, optimizers.SGD(0.2))], "state": {"theta": x}}
    with_feedback = {"residual": device.put(np.zeros(20_000, F32)), "feedback": True}
    shared = TRUNCATES["truncate_shared"]
    for spec, how, most in (
        (codec.Lossless(), {}, 3),
        (codec.Float8(), {}, 3),
        (codec.Sign(), {}, 4),
        (codec.Sign(), with_feedback, 4),
        (shared, groups | with_feedback, 4),
    ):
        device.launched.clear()
        frame = flatcall.encode(x, spec, **how)
        assert len(device.launched) == most
        device.launched.clear()
        flatcall.decode(frame, out=device.put(np.zeros(20_000, F32)), **groups if spec is shared else {})
        assert len(device.launched) == (3 if spec is shared else 2)


@on_cpu
def test_upload_is_limited_to_the_used_part_of_a_job(device):
    x = np.random.default_rng(7).standard_normal(20_000, F32)
    there = device.put(x)
    for spec in (codec.Lossless(), codec.Truncate(), *ROWS.values()):
        how = level_arguments(spec, len(x))
        how |= {"state": {key: device.put(v) for key, v in how["state"].items()}} if how else {}
        device.uploaded.clear()
        frame = flatcall.encode(there, spec, **how)
        assert 0 < sum(device.uploaded) < 800, spec
        device.uploaded.clear()
        codec.decode(frame)
        assert 0 < sum(device.uploaded) < 1100, spec


SCRATCHED = {  # codecs that need scratch memory
    "lossless": codec.Lossless(),
    "float8": codec.Float8(entropy=True),
    "trits": codec.Ternary("base3"),
    "ternary": codec.Ternary("entropy"),
    "truncate": codec.Truncate(1),
    "joint": codec.Truncate(level_coding="coded"),
    "topk": codec.TopK(1 / 4, chunk=64),
}


@on_cpu
@pytest.mark.parametrize("nbytes", [nightly(1), 400_000, nightly(1_500_000)])  # of units: for one warp, some and most
@pytest.mark.parametrize("workers", [1, nightly(4)])
def test_warps_wait_for_scratch_memory(nbytes, workers, monkeypatch):
    """Fewer units than warps need delay warps, but change nothing; all units are given back."""
    device = Emulated(build(options=[f"-DCUDA_ON_CPU_WORKERS={workers}"] if workers > 1 else []), 3)
    use(monkeypatch, device)
    monkeypatch.setattr(scratch, "MAX_SCRATCH", nbytes)
    rng = np.random.default_rng(nbytes)
    xs = [rng.standard_normal(n, F32) * (rng.random(n) > zeros) for n, zeros in ((90_000, 0.1), (600, 0), (70_000, 0))]
    for spec in SCRATCHED.values():
        how = [level_arguments(spec, len(x)) for x in xs]
        frames = [
            flatcall.encode(x, spec, stream=i << 32, **levels)
            for i, (x, levels) in enumerate(zip(xs, how, strict=True))
        ]
        there = [device.put(np.frombuffer(frame, np.uint8)) for frame in frames]
        assert list(map(bytes_of, codec.decode_many(there))) == [codec.decode(frame).tobytes() for frame in frames]
        if not any(how):
            assert codec.encode_many(xs, spec, options=codec.options(engine="cuda")) == frames
            continue
        for x, levels, frame in zip(xs, how, frames, strict=True):
            assert flatcall.encode(device.put(x), spec, **levels).get().tobytes() == frame


class Counted(Emulated):
    """Device that launches nothing, and counts the bytes that calls have allocated and not released."""

    live = peak = 0

    def allocate(self, nbytes, like):
        address, memory = _NOWHERE, type("Memory", (), {})()
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(memory, self.release, nbytes)
        return address, memory

    def release(self, nbytes):
        self.live -= nbytes

    def upload(self, to, data):
        return None

    def download(self, at, nbytes):
        return bytearray(nbytes)

    def clear(self, at, nbytes):
        pass

    def copy(self, to, at, nbytes):
        pass

    def launch(self, kernel, grid, *args):
        pass


_NOWHERE = 1 << 20  # address that nobody reads
PEAKS = {  # maximum MB of scratch memory on a GPU of 132 multiprocessors, for tensors that use all of them
    "lossless": (codec.Lossless(), 88),
    "bfloat16": (codec.Lossless(), 106),
    "truncate": (codec.Truncate(1), 140),
    "float8_entropy": (codec.Float8(entropy=True), 180),
    "trits": (codec.Ternary("base3"), 3),
    "float8": (codec.Float8(), 0),
    "quantize": (codec.Quantize(4), 0),
    "sign": (codec.Sign(), 0),
    "ternary": (codec.Ternary(), 0),
}


@on_cpu
@pytest.mark.parametrize("name", PEAKS)
def test_scratch_memory_does_not_grow_with_the_number_of_tensors(name, library, monkeypatch):
    """Pending frames keep none; a batch needs as much as one large tensor."""
    spec, most = PEAKS[name]
    device = Counted(library, 132)
    use(monkeypatch, device)
    dtype = "bfloat16" if name == "bfloat16" else "float32"
    x = codec.view(DeviceArray(np.empty((1 << 13, 1 << 13), like(dtype).dtype)), dtype)
    out = DeviceArray(np.empty(codec.bound((1 << 13, 1 << 13), dtype, spec), np.uint8))
    pending = codec.encode_async(x, spec, out=out)
    one, kept = device.peak, device.live
    assert one <= most * 1_000_000 + kept
    assert kept < 1 << 20  # arguments, decisions and results
    more = [codec.encode_async(x, spec, out=out) for _ in range(20)]
    assert device.peak <= one + 20 * kept
    del pending, more
    assert device.live == 0
    device.capturing = lambda: True
    pending = codec.encode_async(x, spec, out=out)  # memory of a graph is kept
    assert device.live == one
    del pending
    assert device.live == 0
    device.peak, device.capturing = 0, lambda: False
    codec.encode_many([x] * 50, spec)
    assert device.peak <= most * 1_000_000 + 50 * (1 << 20)


@on_cpu
def test_deferred_calls_keep_no_scratch_memory(library, monkeypatch):
    """Calls whose verdicts nobody has read keep arguments and results alone, and tell their memory."""
    spec, device, noted = codec.Truncate(1), Counted(library, 132), []
    use(monkeypatch, device)
    values = gradient((1 << 20,))
    frame = codec.encode(values, spec, options=codec.options(engine="native"))
    x, out, residual, there = (
        DeviceArray(a)
        for a in (values, np.empty(2 * values.nbytes, np.uint8), values.copy(), np.frombuffer(frame, np.uint8))
    )
    calls, how = DeferredCalls(lambda *nbytes: noted.append(nbytes)), codec.options(engine="cuda")
    for i in range(1, 21):
        calls.encode_many([encode_request(x, spec, how, out, residual, feedback=True)])
        assert noted[-1][1] > 11_000_000  # 3.2 MB for warps, and sums with residuals
        decode = decode_request((view(there),), None, how, x)._replace(head=view(np.frombuffer(frame, np.uint8)))
        calls.decode_many([decode])
        assert noted[-1][1] > 2_000_000
        assert sum(kept for kept, _ in noted) < i * (1 << 18)
        assert device.live < i * (1 << 18)
    del calls
    assert device.live == sum(kept for kept, _ in noted) == 0


@on_cpu
def test_batches_of_unlike_sizes_start_few_idle_thread_blocks(library, monkeypatch):
    device, launched = Counted(library, 132), []
    use(monkeypatch, device)
    monkeypatch.setattr(device, "launch", lambda kernel, grid, *_: launched.append((kernel, *grid)))
    large, small = (codec.view(DeviceArray(np.empty(n, np.uint32)), "float32") for n in (1 << 26, 600))
    codec.encode_many([small] * 100 + [large] + [small] * 99, codec.Float8())
    for kernel in {kernel for kernel, _, _ in launched}:
        own = [grid for name, *grid in launched if name == kernel]
        assert sum(count for _, count in own) == 200
        assert len(own) == 2
        assert sum(x * y for x, y in own) < 3 * 4096  # 105,600 by one launch


@on_cpu
def test_batches_of_several_launches(device, monkeypatch):
    """Structs of tensors whose grids differ are launched apart."""
    monkeypatch.setattr(workspace, "MAX_IDLE", 0)
    monkeypatch.setattr(device, "processors", 3)
    rng = np.random.default_rng(0)
    for spec in (codec.Lossless(), codec.Float8(), codec.Sign()):
        xs = [rng.standard_normal(n, F32) for n in (600, 150_000, 70_000, 20_000, 300_000, 600)]
        frames = codec.encode_many(xs, spec)
        device.launched.clear()
        there = codec.encode_many([device.put(x) for x in xs], spec)
        assert device.launched.count("close_frame") > 1
        assert list(map(bytes_of, there)) == frames
        assert list(map(bytes_of, codec.decode_many(there))) == [codec.decode(frame).tobytes() for frame in frames]


@on_cpu
@pytest.mark.parametrize("kernel", [name for name in FILE_OF if name.startswith(("encode_", "decode_"))])
def test_scratch_memory_of_a_call_is_limited(kernel, library):
    device = Counted(library, 132)
    most = [
        scratch.Scratch(Work(device, 0), [(kernel, 528, scratch.Need(nbytes, units))] * frames)
        for nbytes, units in ((33_152, 9), (82_560, 1), (66_176, 1))
        for frames in (1, 1000)
    ]
    assert all(4 * 528 * 33_152 <= s.nbytes <= 300_000_000 for s in most)


@on_cpu
@pytest.mark.nightly  # builds the kernels once more
def test_thread_blocks_in_parallel(monkeypatch):
    """Thread blocks wait for values of other blocks, which run in parallel or have not begun."""
    use(monkeypatch, Emulated(build(options=["-DCUDA_ON_CPU_WORKERS=4"]), 2))
    x = sample_bits("bfloat16", 200_000, "normal")
    y = random_bits("float64", 100_000, "normal")
    how = level_arguments(codec.Truncate(), len(x))
    cases = [(x, codec.Lossless(), "bfloat16", {}), (x, codec.Lossless(), "bfloat16", {"segments": BUCKET})]
    cases += [(y, codec.Lossless(), "float64", {}), (x, codec.Truncate(), "bfloat16", how)]
    cases += [(x, spec, "bfloat16", {}) for spec in (codec.Ternary("entropy"), codec.Sign(), codec.TopK())]
    for values, spec, dtype, how in cases:
        frame = bytes(flatcall.encode(values, spec, dtype=dtype, **how))
        for _ in range(20):
            assert encode(values, spec, dtype, **how) == frame, spec
            ours, native = both_outcomes(frame, dtype)
            assert ours == native, spec


@on_cpu
@pytest.mark.parametrize("order", ["down", "3", "17"])
def test_any_order_of_threads(order, monkeypatch):
    """Between collectives threads may run in any order."""
    monkeypatch.setenv("CUDA_ON_CPU_ORDER", order)
    for name, (frame, dtype, _, how) in FRAMES_TO_DAMAGE.items():
        ours, native = both_outcomes(frame, dtype, **how)
        assert ours == native, name


@on_cpu
@pytest.mark.parametrize("order", ["up", "down", "3", "17"])
def test_scale_models_in_any_order_of_threads(order, monkeypatch):
    """Blocks compute offsets of many rows; a sample compares all values with the first one."""
    monkeypatch.setenv("CUDA_ON_CPU_ORDER", order)
    powers = np.ldexp(1.0, np.random.default_rng(0).integers(-20, 20, (1040, 1))) * np.ones((1040, 160))
    for x, spec in (
        (np.ones((1040, 160)), codec.Lossless(model="separable")),
        (powers, codec.Lossless()),
        (powers.astype(F32), codec.Lossless(model="separable")),
        (powers.astype(F32), codec.Truncate(1)),
        *((powers.astype(F32), spec) for spec in (codec.Sign(), codec.Float8(group_size=64), codec.Ternary("base3"))),
    ):
        frame = codec.encode(x, spec)
        assert encode(x, spec, str(x.dtype)) == frame
        if not isinstance(spec, codec.Lossless):
            frames = [frame] * 3
            assert (
                codec.reduce(frames, options=codec.options(engine="cuda")).tobytes() == codec.reduce(frames).tobytes()
            )


@by_cupy
@pytest.mark.parametrize("name", GOLDEN)
def test_golden_frames(name):
    frame, about = GOLDEN_FRAMES[name], GOLDEN[name]
    x, dtype, how = golden_tensor(name)
    given = {k: v for k, v in how.items() if k in ("optimizer", "state", "base")}
    if "codebook" in how:
        given["codebooks"] = how["codebook"]
    assert hashlib.sha256(decode(frame, **given)).hexdigest() == about.get("values_sha256", about["tensor_sha256"])
    assert encode(x, how.pop("spec", codec.Lossless()), dtype, **how) == frame


@pytest.mark.parametrize("name", [*GOLDEN][::3])
def test_truncated_golden_frames(name):
    """At any byte, with and without a size field that agrees."""
    frame = GOLDEN_FRAMES[name]
    for n in {0, 1, 47, *np.random.default_rng(len(frame)).integers(0, len(frame), 9).tolist()}:
        for cut in (frame[:n], recompute_checksums(frame[:16] + n.to_bytes(8, "little") + frame[24:n])):
            if cut is not None:
                ours, native = both_outcomes(cut, codec.inspect(frame).dtype)
                assert ours == native


def reduce_bits(frames, engine):
    """Return the bits of a reduction with all NaNs unified: a GPU makes other NaNs than a CPU."""
    return unify_nan(np.frombuffer(bytes_of(codec.reduce(frames, options=codec.options(engine=engine))), np.float32))


@pytest.mark.parametrize("name", FRAMES_TO_DAMAGE)
def test_hostile_frames(name):
    """Damaged frames give the same tensor or the same error."""
    frame, dtype, _, how = FRAMES_TO_DAMAGE[name]
    rng = np.random.default_rng(sorted(FRAMES_TO_DAMAGE).index(name))
    refused = 0
    for _ in range(N_DAMAGED):
        mutant = damage(frame, rng)
        ours, native = both_outcomes(mutant, dtype, max_nbytes=1 << 22, **how)
        assert ours == native
        refused += isinstance(ours, int)
        if name in (*ROWS, "blocks_quantize_3_odd", "parts") and refused % 3 == 0:
            ours, native = (outcome(reduce_bits, [frame, mutant, frame], by) for by in ("cuda", "native"))
            assert ours == native
    assert refused


@pytest.mark.parametrize("case", HAND_MADE)
def test_frames_made_by_hand(case):
    """Hand-made frames decode to the same values or are rejected alike."""

    def compared(frame, **how):
        ours, native = both_outcomes(frame, codec._c.library.DTYPE_NAMES[frame[6]], **how)
        assert ours == native
        return dict.fromkeys((1, 4), ours if isinstance(ours, bytes) else None)

    check, *arguments = HAND_MADE[case]
    check(compared, *arguments)
