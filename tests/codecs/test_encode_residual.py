"""encode(residual=, feedback=True) equals adding the residual, encoding, decoding and subtracting in separate steps."""

import numpy as np
import pytest
import torch

import codec
from support import flatcall
from support.specs import LOSSY, TOPKS, TRUNCATES

N = 120_003
SPECS = {**LOSSY, **TOPKS, **TRUNCATES}
SGD = codec.optimizers.SGD(1 / 10)


def values(seed, n=N):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(n) * np.exp(rng.standard_normal(n))).astype(np.float32) * np.float32(1e-3)


def how(spec, n=N):
    if isinstance(spec, codec.Truncate) and spec.fixed_level is None:
        return {"optimizer": SGD, "state": {"theta": values(1, n)}}
    return {}


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", SPECS)
def test_feedback_encodes_the_sum_and_updates_the_residual(name, threads):
    """The residual becomes the error of the frame of x + residual; x is unchanged."""
    spec = SPECS[name]
    for n in (700, N):
        x, e, keywords = values(2, n), values(3, n) * 10, how(spec, n)
        summed = x + e
        left = np.empty_like(x)
        expected = flatcall.encode(summed, spec, residual=left, **keywords)
        before, error = x.tobytes(), e.copy()
        assert flatcall.encode(x, spec, residual=error, feedback=True, threads=threads, **keywords) == expected
        assert error.tobytes() == left.tobytes()
        assert x.tobytes() == before
        error, out = torch.from_numpy(e.copy()), np.zeros(codec.bound(n, "f4", spec), np.uint8)
        assert flatcall.encode(x, spec, residual=error, feedback=True, threads=threads, out=out, **keywords) == expected
        assert error.numpy().tobytes() == left.tobytes()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", SPECS)
def test_errors_leave_the_residual_unchanged(name, threads):
    """The residual is unchanged if `out` is too small, or if the sum of tensor and residual cannot be encoded."""
    spec = SPECS[name]
    x, e, keywords = values(2), values(3), how(spec)
    before = e.tobytes()
    for capacity in (0, 50, 500):
        with pytest.raises(codec.ArgumentError, match="too few"):
            flatcall.encode(x, spec, residual=e, feedback=True, out=bytearray(capacity), threads=threads, **keywords)
        assert e.tobytes() == before
    if name in LOSSY | TOPKS and not (isinstance(spec, codec.Float8) and spec.nonfinite == "propagate"):
        e[-1] = np.inf
        before = e.tobytes()
        with pytest.raises(codec.ArgumentError, match="NaN or Inf"):
            flatcall.encode(x, spec, residual=e, feedback=True, threads=threads, **keywords)
        assert e.tobytes() == before


@pytest.mark.parametrize("engine", ["native", "numba"])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", SPECS)
def test_one_pass_gives_the_same_frames_residuals_and_errors(name, threads, engine):
    """verify_first=False changes no frame, residual or error; after an error the residual is undefined, x unchanged."""
    spec, once = SPECS[name], {"verify_first": False, "threads": threads, "engine": engine}
    for n in (700, N):
        x, keywords = values(2, n), how(spec, n)
        before = x.tobytes()
        for feedback in (True, False):
            e, error = values(3, n), values(3, n)
            expected = flatcall.encode(x, spec, residual=e, feedback=feedback, **keywords)
            assert flatcall.encode(x, spec, residual=error, feedback=feedback, **once, **keywords) == expected
            assert error.tobytes() == e.tobytes()
        if name in LOSSY | TOPKS and not (isinstance(spec, codec.Float8) and spec.nonfinite == "propagate"):
            error[-1] = np.inf
            with pytest.raises(codec.ArgumentError, match="NaN or Inf"):
                flatcall.encode(x, spec, residual=error, feedback=True, **once, **keywords)
        assert x.tobytes() == before


def test_wrong_uses_of_feedback_are_rejected():
    x = values(0)
    before = x.tobytes()
    for match, keywords in {
        "needs residual=": {"spec": codec.Sign()},
        "Lossless has no residual": {"residual": np.zeros_like(x)},
        "shares memory with x": {"spec": codec.Sign(), "residual": x},
        "as many values": {"spec": codec.Sign(), "residual": np.zeros(5, np.float32)},
    }.items():
        error = codec.SpecError if match.startswith("Lossless") else codec.ArgumentError
        with pytest.raises(error, match=match):
            flatcall.encode(x, feedback=True, **keywords)
    for bad in (1, None, "yes", np.True_):
        with pytest.raises(codec.ArgumentError, match="feedback must be"):
            codec.encode(x, codec.Sign(), residual=np.zeros_like(x), feedback=bad)
    assert x.tobytes() == before


def test_mean_of_decoded_frames_converges_to_the_tensor():
    """With feedback, the mean of decoded frames converges to the tensor, since each frame corrects earlier errors."""
    x, e = values(5, 5_000), np.zeros(5_000, np.float32)
    spec = codec.Sign(group_size=128)
    total = np.zeros(5_000, np.float32)
    for _ in range(200):
        codec.accumulate(codec.encode(x, spec, residual=e, feedback=True), total)
    once = np.abs(codec.decode(codec.encode(x, spec)) - x).mean()
    assert np.abs(total / 200 - x).mean() < once / 10
