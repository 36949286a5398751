"""The Numba engine gives the bytes, values and errors of the native engine for all arguments."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import codec
from codec import optimizers
from codec.engines import blockwise
from codec.engines.native import decoding, encoding, reducing
from codec.engines.numba import calls, loops, view
from support import engine_comparison, flatcall
from support.device import Emulated, build, use
from support.engine_comparison import (
    agreed,
    check_decode,
    check_encode,
    check_engines,
    check_sums,
    level_arguments,
    misaligned,
    sample_bits,
)
from support.philox import random_words
from support.specs import FAMILIES, LOSSY, MORE, SPECS, TRUNCATE_LEVELS, TRUNCATES
from support.tensors import (
    ADAMW,
    ALL_DTYPES,
    KINDS,
    NUMPY_DTYPES,
    gap_tensors,
    gradient,
    normal_values,
    optimizer_state,
)
from support.tiers import every

F32 = np.float32
LOSSY_DTYPES = ("float32", "bfloat16", "float16")


@given(st.data())
def test_random_calls_agree_with_native(data):
    check_engines(data.draw)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.data())
def test_random_calls_agree_between_all_engines(monkeypatch, data):
    """For random calls, the native engine, the Numba engine and the CUDA engine on the CPU give the same outcome."""
    use(monkeypatch, Emulated(build()))
    monkeypatch.setattr(engine_comparison, "ENGINES", ("native", "numba", "cuda"))
    check_engines(data.draw)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_length(name):
    """Engines agree for lengths 0 to 1,024, at every offset in a cache line."""
    spec = SPECS[name]
    dtype = "bfloat16" if name == "lossless" else "float32"
    x = sample_bits(dtype, 1024, "zeros")
    for n in range(1025):
        how = level_arguments(spec, n)
        part = misaligned(x[:n], n % 64 % 13)
        frame = check_encode(part, spec, dtype, stream=n, threads=1 + n % 2, **how)
        check_decode(frame, dtype, n, **how)


@pytest.mark.parametrize("name", SPECS)
def test_large_tensors(name):
    """Engines agree for tensors of many blocks, with several thread counts."""
    spec = SPECS[name]
    x = sample_bits("float32", 300_001, "normal").view(F32)
    x[17:40_000] = 0
    x /= np.abs(x).max() / 4  # magnitudes below the given scale of some Ternary specs
    how = level_arguments(spec, len(x), how="groups")
    frame = bytes(flatcall.encode(x, spec, threads=1, **how))
    y = flatcall.decode(frame, **how)
    left = np.empty_like(x)
    for threads in (1, 2, 5):
        given = {"engine": "numba", "threads": threads, **how}
        assert flatcall.encode(x, spec, residual=left, **given) == frame
        assert (left == x - y).all()
        assert flatcall.decode(frame, **given).tobytes() == y.tobytes()
    other = bytes(flatcall.encode(x[::-1].copy(), spec, stream=9, **how))
    for op in ("sum", "mean", "max"):
        check_sums([frame, other, frame], "float32", len(x), op, threads=1 + len(op) % 3, **how)


@pytest.mark.parametrize("scale", [1e35, 1e-36, 1e-41])
@pytest.mark.parametrize("name", SPECS)
def test_extreme_scales(name, scale):
    """Engines agree for scales near float32's limits, where quotients and products overflow or become subnormal."""
    spec = SPECS[name]
    x = (normal_values(20_001) * F32(scale * 30)).reshape(3, -1)
    x[1] *= F32(1e-3)
    how = level_arguments(spec, x.size)
    left = np.zeros_like(x)
    frame = check_encode(x, spec, "float32", left, feedback=not isinstance(spec, codec.Lossless), **how)
    if isinstance(frame, bytes):
        check_decode(frame, "float32", x.shape, **how)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", SPECS)
def test_every_half_precision_pattern(name, dtype):
    """Engines agree for all 65,536 patterns, or for lossy row codecs all finite ones."""
    spec = SPECS[name]
    x = np.arange(1 << 16, dtype=np.uint16)
    if name in LOSSY | MORE and not isinstance(spec, codec.Truncate):
        x = x[x & 0x7FFF < (0x7F80 if dtype == "bfloat16" else 0x7C00)]
    how = level_arguments(spec, len(x), how="adamw")
    frame = check_encode(x, spec, dtype, np.zeros(len(x), F32), **how)
    if isinstance(frame, bytes):
        check_decode(frame, dtype, len(x), **how)
        check_sums([frame, frame], dtype, len(x), "max", **how)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_lossless_of_every_dtype(dtype):
    """Engines agree for Lossless on every dtype and distribution of values, in one and in several blocks."""
    for kind in KINDS:
        for n in (513, 20_000):
            x = sample_bits(dtype, n, kind, odd=9, finite=False)
            frame = check_encode(x, codec.Lossless(), dtype, threads=n % 3 + 1)
            assert check_decode(frame, dtype, n) == x.tobytes()
            check_sums([frame], dtype, n)


@pytest.mark.parametrize("name", ["lossless", *TRUNCATES])
def test_gaps(name):
    """Engines agree for tensors with empty quad rows."""
    for dtype in every(2, ("float64", *LOSSY_DTYPES, "uint8") if name == "lossless" else LOSSY_DTYPES):
        for x in every(2, gap_tensors(dtype)):
            how = level_arguments(SPECS[name], x.size)
            check_decode(check_encode(x, SPECS[name], dtype, **how), dtype, x.size, **how)


@pytest.mark.parametrize("shape", [(1100, 64), (1030, 601), (3, 1500, 133), (300_000,)])
@pytest.mark.parametrize("name", ["lossless_separable", "truncate_coded"])
def test_scale_models(shape, name):
    """Engines agree for rows and columns of different scales, also of rows that are not in the sample."""
    spec, rng = SPECS[name], np.random.default_rng(4)
    size = np.exp2(np.arange(np.prod(shape)) // (shape[-1] if len(shape) > 1 else 512) * 37 % 6).reshape(shape)
    size = size * np.exp2(np.arange(shape[-1]) % 5 if len(shape) > 1 else 0) * 1e-2
    values = rng.standard_normal(shape) * size
    dtypes = {**NUMPY_DTYPES, "float64": np.dtype("f8")} if name != "truncate_coded" else NUMPY_DTYPES
    for dtype, kind in dtypes.items():
        x = values.astype(kind)
        how = level_arguments(spec, x.size)
        for threads in (1, 3):
            frame = check_encode(x, spec, dtype, threads=threads, **how)
            if name == "truncate_coded":
                left = np.full(shape, 1e-3, F32)
                check_encode(x, spec, dtype, left, feedback=True, threads=threads, **how)
        assert codec.inspect(frame).nsegments == 1
        check_decode(frame, dtype, shape, **how)


def test_segments():
    """Engines agree for segments, which have their own rows, scales and offsets."""
    shapes = [(0, (100, 90)), (9000, (130, 80)), (19_400, (7,)), (19_407, (5000,)), (25_000, (70, 1030))]
    for spec in SPECS.values():
        for dtype in LOSSY_DTYPES:
            x = sample_bits(dtype, 100_000, "normal")
            how = level_arguments(spec, len(x))
            frame = check_encode(x, spec, dtype, segments=shapes, threads=2, **how)
            check_decode(frame, dtype, len(x), threads=3, **how)


def test_every_seed_and_stream():
    x = normal_values(3000)
    for seed, stream in ((0, 0), (5, 3), (0xFFFFFFFF, (1 << 64) - 7), (1 << 31, 1 << 63), (9, (7 << 32) + 9)):
        for spec in (
            codec.Ternary(seed=seed),
            codec.Quantize(seed=seed),
            codec.Float8(rounding="stochastic", seed=seed),
        ):
            assert isinstance(check_encode(x, spec, "float32", stream=stream), bytes)


def test_ternary_ties_and_given_scales():
    """Engines agree for Ternary's ties, which a second random word decides, and for given scales that are too small."""
    h, low = random_words(1 << 16, 0, 0), random_words(1 << 16, 0, 0, 1)
    x = ((h + 0.5) / 65536).astype(F32)
    x[0] = 1.0
    y = codec.decode(
        codec.encode(x, codec.Ternary(scale=1.0), options=codec.options(engine="numba")),
        options=codec.options(engine="numba"),
    )
    assert (y[1:] == (low[1:] < 32768)).all()
    for packing in ("2bit", "base3", "entropy"):
        check_encode(x, codec.Ternary(packing), "float32")
        for scale in (0.5, 1e-30, 1e30, np.float32(0.9999)):
            check_encode(x, codec.Ternary(packing, scale=float(scale)), "float32", np.zeros_like(x))
            check_encode(x.astype(np.float16), codec.Ternary(packing, scale=float(scale)), "float16", np.zeros_like(x))


@pytest.mark.parametrize("dtype", every(2, LOSSY_DTYPES))
def test_metrics(dtype):
    """Engines agree for all metrics: with and without m and v, groups, state of every float dtype, given levels and
    custom functions.
    """
    n, ways = 20_000, TRUNCATE_LEVELS
    x = gradient(n, dtype=dtype)
    x[7:9] = np.nan, np.inf
    arrays = optimizer_state(n)
    arrays["theta"][100:109] = 0, -0.0, np.inf, np.nan, 1e-40, 3e38, -3e38, 1e-45, -np.inf
    with np.errstate(over="ignore"):
        half = arrays["theta"].astype(np.float16)
    halves = {
        "theta": half,
        "m": arrays["m"].astype(NUMPY_DTYPES["bfloat16"]),
        "v": misaligned(arrays["v"]),
    }
    sgd, adamw = optimizers.SGD(0.1), ADAMW
    of_three = optimizers.Custom(lambda theta, m, v: theta * F32(8) + m - v)
    cases = [
        (sgd, {"theta": arrays["theta"]}),
        (adamw, {"theta": arrays["theta"], "v": arrays["v"]}),
        (adamw, halves),
        (optimizers.SGD(0.1, momentum=0.9), arrays),
        (optimizers.SGD(0.1, maximize=True), arrays),
        ([(0, adamw), (1, sgd), (9_999, adamw), (19_999, sgd), (50_000, sgd)], arrays),
        ([(0, sgd), (5_000, optimizers.Custom(lambda theta: theta * F32(3))), (9_000, of_three)], arrays),
        (of_three, arrays),
        (optimizers.Custom(lambda m, theta: theta * F32(3) + m), {"theta": arrays["theta"], "m": arrays["m"]}),
        (optimizers.Custom(lambda theta: theta), halves),
        (sgd, {}),
    ]
    for levels, granularity in ways:
        for guard, rounding in ((-8, "nearest"), ("exact", "truncate"), (3, "nearest")):
            spec = codec.Truncate("optimizer", rounding, levels, granularity, guard)
            for metric, state in cases if guard == -8 else cases[2:3]:
                how = {"optimizer": metric, "state": state}
                frame = check_encode(x, spec, dtype, np.zeros(n, F32), threads=1 + n % 2, **how)
                if isinstance(frame, bytes):
                    check_decode(frame, dtype, n, threads=2, **(how if levels == "shared" else {}))
    given = np.random.default_rng(5).integers(0, 4, n, dtype=np.uint8)
    for levels in ("plane", "coded"):
        frame = check_encode(x, codec.Truncate(level_coding=levels), dtype, optimizer=given)
        check_decode(frame, dtype, n)
    given[n - 3] = 4
    error = check_encode(x, codec.Truncate(), dtype, np.full(n, 7, F32), optimizer=given)
    assert error[0] is codec.ArgumentError


def test_shared_codebooks():
    """Engines agree for shared codebooks, also if they lack codes for some symbols."""
    x = sample_bits("float32", 30_000, "normal")
    far = sample_bits("float32", 30_000, "wide", 3)
    for spec in (codec.Lossless(), codec.Truncate(1), TRUNCATES["truncate_coded"], TRUNCATES["truncate_shared"]):
        how = level_arguments(spec, len(x))
        book = flatcall.codebook(x.view(F32), spec=spec, **how)
        for y in (x, far, x[:600]):
            own = level_arguments(spec, len(y))
            frame = check_encode(y, spec, "float32", codebook=book, **own)
            check_decode(frame, "float32", len(y), codebooks=book, **own)
            agreed(lambda engine: flatcall.decode(frame, engine=engine, **own).tobytes())  # noqa: B023
    counts = np.zeros(256, int)
    for few in (counts, np.eye(256, dtype=int)[127]):
        book = codec.Codebook.from_counts(few)
        check_decode(check_encode(x, codec.Lossless(), "float32", codebook=book), "float32", len(x), codebooks=book)
    halves = sample_bits("float16", 5000, "mixed")
    how = level_arguments(codec.Truncate(), 5000)
    book = flatcall.codebook(halves.view(np.float16), spec=codec.Truncate(), **how)
    check_decode(
        check_encode(halves, codec.Truncate(), "float16", codebook=book, **how), "float16", 5000, codebooks=book
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_batches(name):
    """Engines agree for batches, including the first error that is reported."""
    spec = SPECS[name]
    xs = [sample_bits("float32", n, "mixed", n).view(F32) for n in (70_000, 0, 5, 600, 20_000, 300_000)]
    states = [level_arguments(spec, len(x), 3).get("state") for x in xs]
    how = {"optimizer": optimizers.SGD(1e-2), "state": states} if states[0] else {}
    for threads in (1, 3):
        given = {"threads": threads}
        frames = agreed(lambda engine: flatcall.encode_many(xs, spec, stream=7, engine=engine, **given, **how))  # noqa: B023
        assert isinstance(frames, list)
        agreed(lambda engine: [y.tobytes() for y in flatcall.decode_many(frames, engine=engine, **given)])  # noqa: B023
        outs = [np.full_like(x, 7) for x in xs]
        bad = [*frames[:4], bytes(frames[4][:-1]) + bytes([frames[4][-1] ^ 1]), frames[5]]
        error = agreed(lambda engine: flatcall.decode_many(bad, out=outs, engine=engine, **given))  # noqa: B023
        assert error[0] is codec.ChecksumError
        assert all((out == 7).all() for out in outs)
        xs[3][5] = np.nan
        agreed(lambda engine: flatcall.encode_many(xs, spec, engine=engine, **given, **how))  # noqa: B023
        xs[3][5] = 1


class WithoutLoops:
    """The C library, without its functions that process values."""

    def __init__(self, lib, *names):
        self._lib, self._names = lib, names

    def __getattr__(self, name):
        if name.startswith("codec_") and name not in self._names:
            raise AssertionError(f"{name} was called")
        return getattr(self._lib, name)

    def codec_reduce_blocks(self, *args):
        assert args[3].count == 0  # with count 0, the function only checks that blocks match
        return self._lib.codec_reduce_blocks(*args)


@pytest.mark.parametrize("name", FAMILIES)
def test_all_blocks_run_in_numba_loops(name, monkeypatch):
    """Numba loops process all blocks, and the C library none."""
    spec = SPECS[name]
    x = sample_bits("float32", 70_000, "normal").view(F32)
    how = level_arguments(spec, len(x))
    frame = bytes(flatcall.encode(x, spec, **how))
    y, nblocks = (
        flatcall.decode(frame, **how).tobytes(),
        codec.inspection.read_header(codec.tensors.view.view_bytes(frame)).nblocks,
    )
    mean = flatcall.reduce([frame, frame], **how).tobytes()
    done = {}

    def count(name, at):
        function = getattr(loops, name)

        def counted(*args):
            done[name] = done.get(name, 0) + args[at].count
            return function(*args)

        monkeypatch.setattr(loops, name, counted)

    def never(*_, **__):
        raise AssertionError("the native engine was called")

    count("codec_encode_blocks", 5)
    count("codec_decode_check", 4)
    count("codec_decode_blocks", 5)
    count("codec_reduce_blocks", 3)
    around = (
        "codec_traits", "codec_job_nbytes", "codec_encode_open", "codec_encode_start", "codec_encode_move",
        "codec_encode_close", "codec_decode_open", "codec_decode_close",
    )  # fmt: skip
    monkeypatch.setattr(blockwise, "lib", WithoutLoops(blockwise.lib, *around))
    monkeypatch.setattr(calls, "lib", WithoutLoops(calls.lib, "codec_bound_segments", "codec_encode_room"))
    monkeypatch.setattr(loops, "lib", WithoutLoops(loops.lib, "codec_strerror"))
    monkeypatch.setattr(view, "lib", WithoutLoops(view.lib, "codec_job_view"))
    monkeypatch.setattr(encoding, "lib", WithoutLoops(encoding.lib))
    monkeypatch.setattr(encoding, "encode_filled", never)
    monkeypatch.setattr(decoding, "lib", WithoutLoops(decoding.lib, "codec_inspect"))
    monkeypatch.setattr(decoding, "decode_prepared", never)
    monkeypatch.setattr(reducing, "reduce_into", never)
    for threads in (1, 3):
        how["threads"], how["engine"] = threads, "numba"
        done.clear()
        assert flatcall.encode(x, spec, **how) == frame
        assert flatcall.encode(x, spec, out=np.empty(len(frame), np.uint8), **how) == frame
        assert flatcall.decode(frame, out=np.empty_like(x), **how).tobytes() == y
        assert flatcall.reduce([frame, frame], **how).tobytes() == mean
        once = {"codec_encode_blocks": 2, "codec_decode_check": 1, "codec_decode_blocks": 1, "codec_reduce_blocks": 1}
        assert done == {name: times * nblocks for name, times in once.items()}


def test_calls_from_several_threads_are_independent():
    xs = [sample_bits("float32", n, "normal", n).view(F32) for n in (600, 20_000, 40_000)]
    asked = [(x, spec, level_arguments(spec, len(x))) for x in xs for spec in SPECS.values()]
    expected = [bytes(flatcall.encode(x, spec, **how)) for x, spec, how in asked]
    values = [flatcall.decode(frame, **how).tobytes() for frame, (_, _, how) in zip(expected, asked, strict=True)]

    def caller(k):
        for i in np.random.default_rng(k).permutation(len(asked)):
            x, spec, how = asked[i]
            given = {"engine": "numba", "threads": 1 + k % 2, **how}
            frame = flatcall.encode(x, spec, **given)
            assert frame == expected[i]
            assert flatcall.decode(frame, **given).tobytes() == values[i]
        return True

    with ThreadPoolExecutor(5) as pool:
        assert all(pool.map(caller, range(5)))
