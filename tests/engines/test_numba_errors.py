"""The Numba engine refuses wrong calls as the native engine does, and leaves residuals and outputs unchanged."""

import numpy as np
import pytest

import codec
from codec import optimizers
from support import flatcall
from support.engine_comparison import agreed, check_encode, level_arguments, outcome, sample_bits
from support.specs import FAMILIES, LOSSY, MORE, SPECS, TRUNCATES
from support.tensors import ADAMW, NUMPY_DTYPES, gradient, normal_values, optimizer_state

F32 = np.float32
LOSSY_DTYPES = ("float32", "bfloat16", "float16")


@pytest.mark.parametrize("name", [*LOSSY, *MORE])
def test_nonfinite_values(name):
    """For NaN and Inf, both engines return equal frames, or raise equal errors that leave the residual unchanged."""
    for dtype in LOSSY_DTYPES:
        for bad in (np.nan, np.inf, -np.inf):
            x = normal_values(30_000)
            x[29_000] = bad
            x = x.astype(NUMPY_DTYPES[dtype])
            for threads in (1, 4):
                how = level_arguments(SPECS[name], len(x))
                check_encode(x, SPECS[name], dtype, np.full(30_000, 7, F32), threads=threads, **how)
                check_encode(x, SPECS[name], dtype, np.full(30_000, 7, F32), feedback=True, threads=threads, **how)


ROWS_OF_ONE = [
    codec.Sign("two_mean", 1),
    codec.Float8(group_size=1),
    codec.Quantize(8, 1),
    codec.Quantize(3, 2, "odd"),
    codec.Quantize(1, 1, zero_point=True),
]


@pytest.mark.parametrize("spec", [*LOSSY.values(), *TRUNCATES.values(), *ROWS_OF_ONE], ids=repr)
def test_residual_in_place(spec):
    """The residual may be written in place of the tensor, even if the frame is larger than the tensor."""
    x = normal_values(100_003)
    how = level_arguments(spec, len(x))
    left, fed = np.full_like(x, 1e-3), np.full_like(x, 1e-3)
    frame = check_encode(x, spec, "float32", left, feedback=True, **how)
    for threads in (1, 3):
        given = {"threads": threads, "engine": "numba", **how}
        flatcall.encode(x, spec, residual=fed, feedback=True, **given)
        mine = x + F32(1e-3)
        assert flatcall.encode(mine, spec, residual=mine, **given) == frame
        assert (mine == fed).all()
        fed[:] = 1e-3


def test_value_above_the_given_scale_leaves_the_residual_unchanged():
    """A value above the given scale, in the last block, is an error that leaves the residual unchanged."""
    x = np.full(200_000, 0.25, F32)
    x[-1] = 0.75
    for packing in ("2bit", "base3", "entropy"):
        for threads in (1, 3):
            for feedback in (False, True):
                left = np.full_like(x, 0.125)
                how = {"threads": threads, "feedback": feedback}
                error = check_encode(x, codec.Ternary(packing, scale=0.5), "float32", left, **how)
                assert error[1] == codec.Status.BAD_SCALE


def test_nan_is_reported_before_a_scale_that_is_too_small():
    """NaN is reported before a scale that is too small, even if it is in a later chunk, block or segment."""
    for bad, large in ((90_000, 3), (3, 90_000), (3_000, 3), (199_999, 0), (20_000, 100)):
        x = np.full(200_000, 0.25, F32)
        x[large] = 0.75
        x[bad] = np.nan
        for packing in ("2bit", "base3", "entropy"):
            for segments in (None, [(0, (50_000,)), (50_000, (150_000,))]):
                for left in (None, np.zeros_like(x)):
                    spec = codec.Ternary(packing, scale=0.5)
                    error = check_encode(x, spec, "float32", left, threads=2, segments=segments)
                    assert error[1] == codec.Status.NONFINITE


def test_overlapping_arguments():
    """Both engines reject overlapping arguments, but a decoded tensor may overwrite the state of its shared levels."""
    memory = np.random.default_rng(0).standard_normal(60_000).astype(F32)
    x, raw, before = memory[:20_000], memory.view(np.uint8), memory.tobytes()
    frame = bytes(codec.encode(x))
    raw[100_000 : 100_000 + len(frame)] = np.frombuffer(frame, np.uint8)
    mine, before = raw[100_000 : 100_000 + len(frame)], memory.tobytes()
    for call in (
        lambda engine: codec.encode(x, codec.Sign(), out=raw[40_000:], options=codec.options(engine=engine)),
        lambda engine: codec.encode(x, codec.Sign(), residual=memory[5:20_005], options=codec.options(engine=engine)),
        lambda engine: codec.encode(
            x, codec.Sign(), residual=x, out=raw[:50_000], options=codec.options(engine=engine)
        ),
        lambda engine: codec.decode(mine, out=memory[20_000:40_000], options=codec.options(engine=engine)),
        lambda engine: codec.accumulate(mine, memory[20_000:40_000], options=codec.options(engine=engine)),
        lambda engine: codec.reduce([frame, mine], out=memory[20_000:40_000], options=codec.options(engine=engine)),
    ):
        assert agreed(call)[0] is codec.ArgumentError
        assert memory.tobytes() == before
    theta = optimizer_state(300_000)["theta"]
    how = {"optimizer": optimizers.SGD(0.1), "state": {"theta": theta}}
    frame = flatcall.encode(gradient(300_000), TRUNCATES["truncate_shared"], **how)
    expected = flatcall.decode(frame, **how).tobytes()
    for threads in (1, 3):
        out = theta.copy()
        how["state"] = {"theta": out}
        assert flatcall.decode(frame, out=out, threads=threads, engine="numba", **how).tobytes() == expected


@pytest.mark.parametrize("name", FAMILIES)
def test_out_of_every_size(name):
    """If `out` is large enough, only the frame's bytes are written; otherwise the engines raise the same error and
    write no residual.
    """
    spec, x = SPECS[name], sample_bits("float32", 40_000, "zeros")
    how = level_arguments(spec, len(x))
    left = None if name == "lossless" else np.full(len(x), 7, F32)
    frame, most = check_encode(x, spec, "float32", left, **how), codec.bound(len(x), "float32", spec)
    for room in (0, 47, 56, len(frame) - 8, len(frame) - 1, len(frame), len(frame) + 1, most - 1, most, most + 99):
        for threads in (1, 4):
            memory = np.full(room + 64, 0xA5, np.uint8)

            def call(engine, memory=memory, room=room, threads=threads):
                residual = None if left is None else left.copy()
                given = {"out": memory[3 : 3 + room], "residual": residual, "threads": threads, "engine": engine}
                made = outcome(lambda: bytes(flatcall.encode(x, spec, **given, dtype="float32", **how)))
                assert made == frame if room >= len(frame) else made[0] is codec.ArgumentError
                assert (memory[:3] == 0xA5).all()
                assert (memory[3 + room :] == 0xA5).all()
                if room < len(frame) and residual is not None:
                    assert (residual == 7).all()
                return made

            agreed(call)


def test_wrong_state():
    """Shared levels with a wrong state raise the same StateError in both engines, also for damaged frames."""
    n = 40_000
    x, arrays, adamw = gradient(n), optimizer_state(n), ADAMW
    frame = bytes(codec.encode(x, TRUNCATES["truncate_shared"].bind(adamw, **arrays)))
    changed = {**arrays, "theta": arrays["theta"].copy()}
    changed["theta"][n - 1] *= 2
    for damaged in (frame, frame[:-9] + b"\x55" + frame[-8:], frame[:1000] + b"\x55" + frame[1001:]):
        for how in (
            {},
            {"optimizer": adamw, "state": changed},
            {"optimizer": adamw, "state": {"theta": arrays["theta"], "v": arrays["v"]}},
            {"optimizer": optimizers.SGD(0.1), "state": arrays},
            {"optimizer": adamw, "state": {"theta": x[:9]}},
        ):
            for threads in (1, 3):
                out = np.full(n, 7, F32)
                given = {"threads": threads, **how}
                error = agreed(lambda engine: flatcall.decode(damaged, out=out, engine=engine, **given))  # noqa: B023
                assert issubclass(error[0], codec.CodecError)
                assert (out == 7).all()
                agreed(lambda engine: flatcall.reduce([frame, damaged], out=out, engine=engine, **given))  # noqa: B023
                assert (out == 7).all()
