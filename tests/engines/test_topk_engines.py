"""TopK on the Numba and CUDA engines gives the frames, values, residuals and errors of the native engine."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import codec
from support import engine_comparison, flatcall
from support.device import Emulated, build, use
from support.engine_comparison import check_decode, check_encode, check_sums, misaligned, sample_bits
from support.tensors import KINDS, LOSSY_DTYPES

F32 = np.float32
SPECS = st.builds(
    codec.TopK,
    st.sampled_from([1e-9, 1 / 64, 0.1, 1 / 3, 1 / 2]),
    st.integers(1, 8),
    st.sampled_from([64, 128, 256, 1024, 4096, 1 << 16]),
    st.sampled_from(["nearest", "stochastic"]),
    st.integers(0, 3),
)


@pytest.fixture(params=["numba", "cuda"])
def engine(request, monkeypatch):
    """Return the name of the engine under test: once "numba", once "cuda" with kernels on the CPU."""
    if request.param == "cuda":
        use(monkeypatch, Emulated(build()))
    monkeypatch.setattr(engine_comparison, "ENGINES", ("native", request.param))
    return request.param


def check(x, spec, dtype, **how):
    """Check that frame, values and sums equal the native engine's, and return the frame."""
    frame = check_encode(misaligned(x), spec, dtype, **how)
    if isinstance(frame, bytes):
        check_decode(frame, dtype, x.shape)
        for op in ("sum", "mean", "max"):
            check_sums([frame, frame], dtype, x.size, op)
    return frame


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.sampled_from(LOSSY_DTYPES), st.integers(0, 9000), st.sampled_from(KINDS), SPECS, st.data())
def test_any_tensor(engine, dtype, n, kind, spec, data):
    """Results equal the native engine's for short last chunks, ties, zeros, NaN, Inf, residuals and random streams."""
    seed = data.draw(st.integers(0, 99))
    x = sample_bits(dtype, n, kind, seed, data.draw(st.integers(0, 5)), finite=data.draw(st.integers(0, 4)) > 0)
    left = None
    if data.draw(st.booleans()):
        left = (np.random.default_rng(seed).standard_normal(n) * 1e-2).astype(F32)
    check(x, spec, dtype, left=left, feedback=left is not None and seed % 2 == 0, stream=seed << 30)


@pytest.mark.parametrize(
    "spec", [codec.TopK(1 / 2, 3, 1 << 16), codec.TopK(1 / 2, 3, 128), codec.TopK(1e-9, 2, 1 << 16)]
)
def test_large_tensors(engine, spec):
    """Results equal the native engine's for several blocks, kept values beyond shared memory, and escaped gaps."""
    x = np.random.default_rng(0).standard_normal(150_000).astype(F32)
    x[70_000:140_000] = np.round(x[70_000:140_000])
    x[1000:60_000] *= F32(1e-9)
    check(x, spec, "float32", left=np.zeros_like(x), threads=3)


def test_chunks_of_few_magnitudes(engine):
    """If magnitudes are equal, or fewer are nonzero than are kept, the first values of the chunk are kept."""
    x = np.zeros(6 * 4096, F32)
    x[:4096] = -3
    x[8192 + 4000 : 8192 + 4010] = 1e-40
    x[3 * 4096 :: 5] = 7
    x[3 * 4096 + 1 :: 7] = -0.0
    for spec in (codec.TopK(bits=1), codec.TopK(), codec.TopK(1 / 64, 2, 64), codec.TopK(1 / 8, 1, 256)):
        for dtype in ("float32", "bfloat16"):
            bits_of = x.view(np.uint32) if dtype == "float32" else (x.view(np.uint32) >> 16).astype(np.uint16)
            check(bits_of, spec, dtype, left=np.full(x.size, 0.5, F32))


def test_accumulate_leaves_other_values_as_they_are(engine):
    x = np.random.default_rng(1).standard_normal(5000).astype(F32)
    frame = codec.encode(x, codec.TopK())
    for before in (-0.0, np.inf):
        outs = [np.full(5000, before, F32) for _ in range(2)]
        for by, out in zip(("native", engine), outs, strict=True):
            flatcall.accumulate(frame, out, 0.5, engine=by)
        assert outs[0].tobytes() == outs[1].tobytes()


def test_residuals_survive_tensors_that_are_refused(engine):
    """A tensor with NaN is refused before residuals are written, unless ``verify_first=False``."""
    x = np.random.default_rng(1).standard_normal(200_000).astype(F32)
    x[-1] = np.nan
    left = np.full_like(x, 0.25)
    with pytest.raises(codec.ArgumentError) as error:
        flatcall.encode(x, codec.TopK(), residual=left, feedback=True, engine=engine)
    assert error.value.code == codec.Status.NONFINITE
    assert (left == F32(0.25)).all()
    x[-1] = 0
    how = {"residual": left, "feedback": True, "verify_first": False}
    frame = bytes(flatcall.encode(x, codec.TopK(), engine=engine, **how))
    assert frame == codec.encode(x + F32(0.25), codec.TopK())


def test_kernels_are_compiled_by_warmup(engine):
    codec.warmup(codec.TopK(), ["bfloat16"], options=codec.options(engine=engine))


def test_encode_async(monkeypatch):
    device = Emulated(build())
    use(monkeypatch, device)
    x = np.linspace(-1, 1, 70_000, dtype=F32)
    out = device.put(np.empty(codec.bound(x.shape, x.dtype, codec.TopK()), np.uint8))
    left = device.put(np.zeros_like(x))
    pending = codec.encode_async(device.put(x), codec.TopK(), out=out, residual=left, feedback=True)
    assert bytes(pending.wait().get()) == bytes(codec.encode(x, codec.TopK()))
    assert (left.array == x - codec.decode(codec.encode(x, codec.TopK()))).all()
