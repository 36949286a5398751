"""Frames of all codecs that the CUDA engine writes on the CPU equal the native engine's, for all arguments."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import codec
from codec import optimizers
from codec._c.library import ITEMSIZE
from codec.engines.cuda import encoding, plan
from codec.engines.cuda.plan import FramePlan
from codec.errors import Status
from support import engine_comparison, flatcall
from support.cuda_calls import BUCKET, LOSSY_DTYPES, ROWS, both_outcomes, by_cupy, bytes_of, decode, encode, outcome
from support.engine_comparison import (
    check_decode,
    check_encode,
    check_engines,
    level_arguments,
    misaligned,
    sample_bits,
)
from support.specs import SPECS, TRUNCATES
from support.tensors import ADAMW, KINDS, NUMPY_DTYPES, gap_tensors, gradient, optimizer_state, random_bits
from support.tiers import every

pytestmark = pytest.mark.usefixtures("device")

F32 = np.float32


@pytest.fixture
def compare_with_native(monkeypatch):
    """Make check_encode() and the other helpers compare the CUDA engine with the native one."""
    monkeypatch.setattr(engine_comparison, "ENGINES", ("native", "cuda"))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.data())
def test_random_calls_agree_with_native(compare_with_native, data):
    check_engines(data.draw)


def test_every_length(compare_with_native):
    """Frames equal the native engine's for lengths 0 to 512, at every offset in a cache line."""
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
    """Frames equal the native engine's for rows of 64 to 1,000 values, in segments at any offset."""
    for i, columns in enumerate(range(64, 1001, 39)):
        dtype, rows = ("float64", *LOSSY_DTYPES)[i % 4], 1 + 20_000 // columns
        x = random_bits(dtype, 3 + 2 * rows * columns, "normal")
        segments = [(3, (rows, columns)), (3 + rows * columns, (rows // 2, 2 * columns))]
        for spec in (codec.Lossless(), codec.Lossless(model="separable"), codec.Float8(group_size=columns)):
            if dtype != "float64" or isinstance(spec, codec.Lossless):
                frame = check_encode(x, spec, dtype, segments=segments)
                if isinstance(frame, bytes):
                    check_decode(frame, dtype, x.size)


@pytest.mark.parametrize("zero", range(4))
def test_pieces_of_truncate_that_are_0_in_all_values(zero):
    """Pieces that are 0 in all values are omitted from regions, and the pieces after them are decoded correctly."""
    x = np.random.default_rng(zero).integers(0x3F000000, 0x40000000, 33_000, np.uint32) & ~np.uint32(63 << 6 * zero)
    frame = flatcall.encode(x, codec.Truncate(0), dtype="float32")
    assert encode(x, codec.Truncate(0), "float32") == frame
    assert decode(frame) == x.tobytes()


@pytest.mark.parametrize("packing", ["2bit", "base3", "entropy"])
def test_scale_0_of_zeros(packing):
    """Scale 0 gives native frames for zeros, and for other values the native error, which changes no residual."""
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


@pytest.mark.parametrize("name", TRUNCATES)
def test_gaps_of_truncate(name):
    """Frames of tensors with empty quad rows equal the native engine's."""
    for dtype in LOSSY_DTYPES:
        for x in every(3, gap_tensors(dtype)):
            how = level_arguments(TRUNCATES[name], x.size)
            frame = bytes(flatcall.encode(x, TRUNCATES[name], dtype=dtype, **how))
            assert encode(x, TRUNCATES[name], dtype, **how) == frame
            given = how if TRUNCATES[name].level_coding == "shared" else {}
            ours, native = both_outcomes(frame, dtype, **given)
            assert ours == native


@pytest.mark.parametrize("name", ["lossless", *ROWS, *TRUNCATES])
def test_segments(name):
    """Segments have their own scale models, rows and scales, as with the native engine."""
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
    """Frames of large tensors, of one part with the finest offsets and of many parts, equal the native engine's."""
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
    """Residuals equal the native engine's, with and without feedback, also of raw frames; errors change nothing."""
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
    """verify_first=False launches fewer kernels, since rows are read once; errors are the same."""
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
    """Calls with equal spec, dtype and shape share one plan, but not random bits or values."""
    made = []
    monkeypatch.setattr(plan, "_plans", {})
    monkeypatch.setattr(plan, "FramePlan", lambda r: made.append(r) or FramePlan(r))
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
    """The residual may be written in place of the tensor."""
    for spec in (codec.Float8(), codec.Sign(), codec.Truncate(1), codec.Truncate(3)):
        for x in (np.random.default_rng(1).standard_normal(70_000, F32), np.full(600, np.pi, F32)):
            left, there = x.copy(), device.put(x.copy())
            frame = codec.encode(left, spec, residual=left)
            assert bytes_of(codec.encode(there, spec, residual=there)) == frame
            assert bytes_of(there) == left.tobytes()


@pytest.mark.parametrize("dtype", LOSSY_DTYPES)
def test_metrics(dtype):
    """Frames equal the native engine's for groups with their own metrics, state of every dtype, and given levels."""
    n, sgd, adamw = 30_000, optimizers.SGD(0.1), ADAMW
    x = gradient(n, dtype=dtype)
    arrays = optimizer_state(n)
    arrays["theta"][100:109] = 0, -0.0, np.inf, np.nan, 1e-40, 3e38, -3e38, 1e-45, -np.inf
    with np.errstate(over="ignore"):
        halves = {k: a.astype(np.float16) for k, a in arrays.items()}
    brains = {k: a.astype(NUMPY_DTYPES["bfloat16"]) for k, a in arrays.items()}
    groups = [(0, adamw), (1, sgd), (9_999, adamw), (29_999, sgd), (50_000, sgd)]
    for state in (arrays, halves, brains):
        for metric in (sgd, adamw, optimizers.SGD(0.1, momentum=0.9), optimizers.SGD(0.1, maximize=True), groups):
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
