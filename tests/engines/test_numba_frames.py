"""The Numba engine decodes and reduces golden, former, damaged and hand-made frames as the native engine does."""

import hashlib

import numpy as np
import pytest
import torch

import codec
from reference import decoder as oracle
from support import flatcall
from support.engine_comparison import (
    ENGINES,
    agreed,
    check_sums,
    level_arguments,
    like,
    outcome,
    sample_bits,
    unify_nan,
)
from support.format_cases import FLOAT16, HAND_MADE, JOINT, SEVEN, cut, u32
from support.frame_builder import coded
from support.golden_frames import GOLDEN, GOLDEN_FRAMES, OLDER_FRAMES, golden_tensor
from support.sample_frames import FRAMES_TO_DAMAGE, damage
from support.specs import SPECS
from support.tiers import N_DAMAGED

F32 = np.float32
LOSSY_DTYPES = ("float32", "bfloat16", "float16")


def test_reduce_of_different_codecs():
    """Engines agree on sums of frames with different codecs or blocks, of raw frames, and of Ternary frames."""
    x = sample_bits("float32", 30_000, "normal").view(F32)
    x *= F32(1 / np.abs(x).max())
    frames = [
        bytes(codec.encode(x, spec)) for spec in (codec.Sign(), codec.Lossless(), codec.Quantize(group_size=20_000))
    ]
    ternary = [bytes(codec.encode(x, codec.Ternary(scale=1.5), stream=i)) for i in range(3)]
    noise = np.random.default_rng(0).integers(0x3F000000, 0x3F800000, 30_000, dtype=np.uint32)
    halves = bytes(codec.encode(codec.view((x.view(np.uint32) >> 16).astype(np.uint16), "bfloat16"), codec.Sign()))
    stored = bytes(codec.encode(noise[:400].view(F32)))
    assert codec.inspect(stored).stored
    for some in (
        frames,
        ternary,
        [*ternary, bytes(codec.encode(x, codec.Ternary()))],
        [halves, frames[1]],
        [frames[1]] * 3,
    ):
        for threads in (1, 2):
            for op in ("sum", "mean", "max"):
                check_sums(some, "float32", len(x), op, threads=threads)
    check_sums([stored, bytes(codec.encode(x[:400], codec.Sign()))], "float32", 400)
    damaged = frames[2][:-9] + b"\x99" + frames[2][-8:]
    for some in ([frames[0], damaged], [damaged, frames[0]], [damaged, damaged], [damaged], [ternary[0], damaged]):
        for threads in (1, 2):
            out = np.full(len(x), 7, F32)
            given = {"out": out, "threads": threads}
            error = agreed(lambda engine: flatcall.reduce(some, engine=engine, **given))  # noqa: B023
            assert error[0] is codec.ChecksumError
            assert (out == 7).all()


def all_results(engine, x, spec, **how):
    """Return the frame, residual, decoded values and sums that an engine computes from a tensor."""
    left = np.zeros_like(x)
    feedback = not isinstance(spec, codec.Lossless)
    frame = flatcall.encode(x, spec, residual=left, feedback=feedback, engine=engine, **how)
    how["engine"] = engine
    sums = [flatcall.reduce([frame] * 3, op, **how) for op in ("sum", "mean", "max")]
    sums.append(flatcall.accumulate(frame, x.copy(), 0.5, **how))
    return [bytes(frame), left.tobytes(), flatcall.decode(frame, **how).tobytes(), *map(unify_nan, sums)]


@pytest.mark.parametrize("name", SPECS)
def test_flush_denormal_does_not_change_results(name):
    """Results are unchanged if the calling thread flushes subnormals."""
    small = np.arange(5000, dtype=np.uint32) * 1657
    x = np.concatenate([sample_bits("float32", 5000, "normal"), small, small | np.uint32(1 << 31)]).view(F32)
    for y in (x, x[5000:]):
        how = level_arguments(SPECS[name], len(y))
        if how:
            how["state"] = {name: v * F32(1e-38) for name, v in how["state"].items()}
        expected = all_results("native", y, SPECS[name], **how)
        assert all_results("numba", y, SPECS[name], **how) == expected
        torch.set_flush_denormal(True)
        try:
            flushed = [all_results(engine, y, SPECS[name], **how) for engine in ENGINES]
        finally:
            torch.set_flush_denormal(False)
        assert flushed[0] == expected
        assert flushed[1] == expected


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_frames(name):
    """The Numba engine encodes and decodes golden frames as the native engine does."""
    about, frame = GOLDEN[name], GOLDEN_FRAMES[name]
    x, dtype, how = golden_tensor(name)
    shared = {k: v for k, v in how.items() if k in ("optimizer", "state", "base")}
    y = flatcall.decode(frame, out=np.empty_like(x), codebooks=how.get("codebook"), engine="numba", **shared)
    assert hashlib.sha256(y.tobytes()).hexdigest() == about.get("values_sha256", about["tensor_sha256"])
    assert flatcall.encode(x, dtype=dtype, engine="numba", **how) == frame


@pytest.mark.parametrize("path", OLDER_FRAMES, ids=[path.stem for path in OLDER_FRAMES])
def test_golden_frames_of_former_encoders(path):
    x, about = golden_tensor(path.stem)[0], GOLDEN[path.stem]
    values = codec.decode(path.read_bytes(), out=np.empty_like(x), options=codec.options(engine="numba")).tobytes()
    assert hashlib.sha256(values).hexdigest() == about.get("older_values_sha256", about["tensor_sha256"])


@pytest.mark.parametrize("name", FRAMES_TO_DAMAGE)
def test_hostile_frames(name):
    """Damaged frames give the native tensor or error, on any thread count, and an error leaves `out` unchanged."""
    frame, dtype, n, how = FRAMES_TO_DAMAGE[name]
    rng = np.random.default_rng(sorted(FRAMES_TO_DAMAGE).index(name))
    out, seen = np.zeros(codec.inspect(frame).shape, like(dtype).dtype), []
    for i in range(N_DAMAGED if n < 20_000 else N_DAMAGED // 2):
        mutant = damage(frame, rng)
        given = {"like": like(dtype), "max_nbytes": 1 << 24, "threads": 1 + i % 3, **how}

        def decode(engine, mutant=mutant, given=given):
            y = flatcall.decode(mutant, engine=engine, **given)
            return y.shape, y.dtype, y.tobytes()

        result = agreed(decode)
        seen.append(type(result[0]) is type)
        out[:] = 7
        into = outcome(lambda: flatcall.decode(mutant, out=out, engine="numba", **how).tobytes())  # noqa: B023
        assert (out == 7).all() if isinstance(into, tuple) else into == result[2]
        if dtype in LOSSY_DTYPES and i % 4 == 0:
            total = np.full(codec.inspect(frame).shape, 7, F32)

            def add(engine, mutant=mutant, total=total):
                return flatcall.accumulate(mutant, total.copy(), engine=engine, **how).tobytes()

            def join(engine, mutant=mutant, total=total):
                # type and code only: the message does not always name the offset
                return outcome(lambda: flatcall.reduce([frame, mutant], out=total, engine=engine, **how).tobytes())[:2]

            agreed(add)
            if isinstance(into, tuple):
                agreed(join)
                assert (total == 7).all()
                with pytest.raises(codec.CodecError):
                    flatcall.accumulate(mutant, total, engine="numba", **how)
                assert (total == 7).all()
    assert any(seen)


def decode_by_all_engines(frame, **how):
    """Check that engines agree on a frame; return the decoded bytes by thread count, None if it is rejected."""
    kind = like(codec._c.library.DTYPE_NAMES[frame[6]])
    results = {}
    for threads in (1, 4):
        given = {"threads": threads, **how}
        result = agreed(lambda engine: flatcall.decode(frame, like=kind, engine=engine, **given).tobytes())  # noqa: B023
        assert isinstance(result, bytes) or issubclass(result[0], codec.FrameError)
        results[threads] = result if isinstance(result, bytes) else None
    return results


@pytest.mark.parametrize("case", HAND_MADE)
def test_frames_made_by_hand(case):
    """Hand-made frames decode to the same values with all engines, or all engines reject them."""
    check, *arguments = HAND_MADE[case]
    check(decode_by_all_engines, *arguments)


def test_truncated_two_byte_literals():
    """Two-byte literals are not read beyond the end of the region."""
    accepted = []
    for size in range(19):
        plane = coded([oracle.ESCAPE] * 9, SEVEN, (b"\x7c\0" * 9)[:size])
        frame = cut(FLOAT16, 9, u32(0xF02) + plane, JOINT).frame()
        accepted.append(decode_by_all_engines(frame)[1] is not None)
    assert not accepted[0]
    assert accepted[18]
