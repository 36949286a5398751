"""Sums of lossy frames: accumulation and reduction equal sums of decoded frames."""

import functools
import itertools

import numpy as np
import pytest

import codec
from codec import Status
from codec._c.library import isas, use_isa
from support import flatcall
from support.specs import LOSSY, TOPKS
from support.tensors import NUMPY_DTYPES, normal_values

F32 = np.float32
SPECS = pytest.mark.parametrize("spec", (LOSSY | TOPKS).values(), ids=LOSSY | TOPKS)


@SPECS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_accumulate_and_reduce_equal_sums_of_decoded_frames(spec, dtype, isa):
    frames = [codec.encode(normal_values((60, 500), i).astype(NUMPY_DTYPES[dtype]), spec, stream=i) for i in range(5)]
    values = [codec.decode(f).astype(F32) for f in frames]
    for threads in (1, 3):
        out = normal_values((60, 500), 9)
        expected = out + F32(0.3) * values[0]
        assert codec.accumulate(frames[0], out, weight=0.3, options=codec.options(threads=threads)) is out
        assert (out == expected).all()
        total = ((((values[0] + values[1]) + values[2]) + values[3]) + values[4]).astype(F32)
        assert (codec.reduce(frames, op="sum", options=codec.options(threads=threads)) == total).all()
        assert (codec.reduce(frames, options=codec.options(threads=threads)) == total / F32(5)).all()
        assert (
            codec.reduce(frames, op="max", options=codec.options(threads=threads)) == np.maximum.reduce(values)
        ).all()
        assert (codec.reduce(frames[:1], options=codec.options(threads=threads)) == values[0]).all()


@pytest.mark.parametrize("variant", ["l1", "two_mean"])
def test_sums_of_sign_frames_are_sequential_float32_sums(variant, isa):
    """Sums of Sign frames equal float32 sums in order, for any number of frames and any group sizes."""
    for n, block in itertools.product((7, 1_000, 40_003), (None, 8, 12, 40, 72, 1_000, 1_024, 4_096)):
        xs = [normal_values(n, i) * F32(i + 1) for i in range(19)]
        segments = [(0, (n // 3,)), (n // 3, (n - n // 3,))] if n > 20_000 else None
        frames = [codec.encode(codec.view(x, segments=segments), codec.Sign(variant, group_size=block)) for x in xs]
        values = [codec.decode(frame) for frame in frames]
        out = np.empty(4 * n + 4, np.uint8)[1 : 4 * n + 1].view(F32)
        for count in (2, 3, 8, 9, 19):
            total = functools.reduce(np.add, values[:count])
            codec.reduce(frames[:count], out=out, op="sum", options=codec.options(threads=1 + count % 2))
            assert out.tobytes() == total.tobytes(), (n, block, count)
            assert codec.reduce(frames[:count], op="mean").tobytes() == (total / F32(count)).tobytes(), (
                n,
                block,
                count,
            )


@SPECS
def test_sums_of_several_dtypes_add_decoded_values(spec, isa):
    """Sums of frames of several dtypes add decoded values, each rounded to the dtype of its frame."""
    xs = [
        normal_values(9_000, i).astype(NUMPY_DTYPES[dtype])
        for i, dtype in enumerate(["float32", "float16", "bfloat16"])
    ]
    for frames in itertools.permutations(codec.encode(x, spec, stream=i) for i, x in enumerate(xs)):
        a, b, c = (codec.decode(frame).astype(F32) for frame in frames)
        assert codec.reduce(frames, op="sum").tobytes() == ((a + b) + c).tobytes()


@SPECS
def test_reduce_with_nontemporal_stores(spec, isa):
    """Non-temporal stores of sums write no byte around the destination, at any address."""
    for n, offsets in ((1, (0, 4)), (100, (0, 4, 60, 1, 18)), (40_000, (8, 18)), (200_001, (4,))):
        frames = [codec.encode(normal_values(n, i), spec, stream=i) for i in range(3)]
        room = np.empty(4 * n + 128, np.uint8)
        for count, op, offset in itertools.product((1, 2, 3), ("sum", "mean", "max"), offsets):
            out = room[offset : offset + 4 * n].view(F32)
            room[:] = 0xA5
            codec.reduce(frames[:count], out=out, op=op, options=codec.CallOptions(threads=1, nontemporal=True))
            assert out.tobytes() == codec.reduce(frames[:count], op=op).tobytes()
            assert (room[:offset] == 0xA5).all()
            assert (room[offset + 4 * n :] == 0xA5).all()


def test_large_sums_use_nontemporal_stores():
    """A sum large enough for non-temporal stores equals the sums of its parts."""
    xs = [np.resize(normal_values(100_000, i), 2_100_000) for i in range(3)]
    for spec in (codec.Sign(group_size=1024), codec.Lossless(), codec.Ternary("base3")):
        frames = [codec.encode(x, spec) for x in xs]
        a, b, c = (codec.decode(frame) for frame in frames)
        for threads in (1, 2):
            assert (codec.reduce(frames, options=codec.options(threads=threads)) == (a + b + c) / F32(3)).all()


@pytest.mark.parametrize("engine", ["native", "numba"])
def test_check_finite_rejects_nonfinite_results(engine):
    """check_finite rejects results with NaN or Inf; an error of a frame has priority."""
    large, some = np.full(300_000, 1e38, F32), normal_values(300_000)
    large[:204_800] = 1  # sums overflow only after these whole rows
    wrong = np.where(np.arange(300_000) == 250_000, np.nan, some)
    for spec in (
        codec.Float8(),
        codec.Sign("l2", group_size=1024),
        codec.Lossless(),
        codec.Float8("e5m2", entropy=True),
    ):
        frames = [codec.encode(x, spec) for x in (large, some, large, large, large)]
        for threads, past in itertools.product((1, 3), (False, True)):
            how = {"threads": threads, "engine": engine, "nontemporal": past, "check_finite": True}
            with pytest.raises(codec.ArgumentError, match="the result holds NaN or Inf") as caught:
                flatcall.reduce(frames, "sum", **how)
            assert caught.value.code == Status.NONFINITE
            with pytest.raises(codec.ArgumentError, match="the result holds"):
                flatcall.reduce(frames, "mean", **how)
            assert (
                np.isinf(codec.reduce(frames, op="sum", options=codec.options(threads=threads, engine=engine))).sum()
                == 95_200
            )
            for few, op in ((frames[:3], "sum"), (frames, "max"), (frames[:1], "sum")):
                assert (flatcall.reduce(few, op, **how) == codec.reduce(few, op=op)).all()
            with pytest.raises(codec.ChecksumError):
                flatcall.reduce([*frames, frames[0][:-9] + bytes([frames[0][-9] ^ 1]) + frames[0][-8:]], "sum", **how)
    for few in (
        [codec.encode(wrong)],
        [codec.encode(wrong), codec.encode(some, codec.Sign())],
    ):  # frames of different codecs are refused
        with pytest.raises(codec.ArgumentError, match="the result holds"):
            codec.reduce(few, check_finite=True, op="sum", options=codec.options(engine=engine))
    assert (
        codec.reduce([codec.encode(np.empty(0, F32))], check_finite=True, options=codec.options(engine=engine)).size
        == 0
    )


def test_reduce_of_different_codecs():
    """reduce() accepts frames of different codecs, Lossless and stored frames included."""
    xs = [normal_values((60, 500), i) for i in range(3)]
    noise = np.random.default_rng(3).integers(0, 0x7F000000, 30_000, dtype=np.uint32).view(F32).reshape(60, 500)
    frames = [codec.encode(xs[0]), codec.encode(xs[1], codec.Sign()), codec.encode(xs[2], codec.Float8())]
    values = [codec.decode(f) for f in frames]
    assert (codec.reduce(frames, op="sum") == (values[0] + values[1]) + values[2]).all()
    for lossless in ([xs[0], xs[1]], [xs[0], noise], [xs[0][:2, :50], xs[1][:2, :50]]):
        frames = [codec.encode(x) for x in lossless]
        for threads in (1, 4):
            assert (
                codec.reduce(frames, op="sum", options=codec.options(threads=threads)) == lossless[0] + lossless[1]
            ).all()


def test_shared_scales_add_as_integers():
    xs = [normal_values(200_000, i) for i in range(6)]
    s = float(max(np.abs(x).max() for x in xs))
    for packing in ("2bit", "base3", "entropy"):
        frames = [codec.encode(x, codec.Ternary(packing, s), stream=i) for i, x in enumerate(xs)]
        codes = sum(np.sign(codec.decode(f)).astype(int) for f in frames)
        for threads in (1, 4):
            assert (
                codec.reduce(frames, op="sum", options=codec.options(threads=threads)) == codes.astype(F32) * F32(s)
            ).all()
            assert (
                codec.reduce(frames, op="mean", options=codec.options(threads=threads))
                == codes.astype(F32) * F32(s) / F32(6)
            ).all()
            assert (
                codec.reduce(frames[::-1], op="sum", options=codec.options(threads=threads))
                == codes.astype(F32) * F32(s)
            ).all()


def test_reduce_rejects_wrong_arguments():
    a, b = codec.encode(normal_values((60, 500)), codec.Sign()), codec.encode(normal_values((500, 60)), codec.Sign())
    damaged = bytearray(a)
    damaged[-9] ^= 1
    out = np.full((60, 500), 7, F32)
    for bad, error in (
        (lambda: codec.reduce([]), codec.ArgumentError),
        (lambda: codec.reduce([a, b]), codec.ArgumentError),
        (lambda: codec.reduce([a], op="median"), codec.ArgumentError),
        (lambda: codec.reduce([a, bytes(damaged)]), codec.ChecksumError),
        (lambda: codec.reduce([a, a[:-8]]), codec.FrameError),
        (lambda: codec.reduce([a], max_nbytes=1000), codec.LimitError),
        (lambda: codec.reduce([codec.encode(np.arange(1000))]), codec.ArgumentError),
        (lambda: codec.accumulate(bytes(damaged), out), codec.ChecksumError),
        (lambda: codec.accumulate(a, np.zeros((500, 60), F32)), codec.ArgumentError),
        (lambda: codec.accumulate(a, np.zeros((60, 500))), codec.ArgumentError),
        (lambda: codec.accumulate(codec.encode(np.arange(1000)), np.zeros(1000, F32)), codec.ArgumentError),
    ):
        with pytest.raises(error):
            bad()
    assert (out == 7).all()


@pytest.mark.parametrize("isa", isas())
def test_mean_is_the_correctly_rounded_quotient(isa):
    """The mean is the correctly rounded quotient of the sum, for normal and subnormal values."""
    odd = np.array([0x3, 0x5, 0x7FFFFF, 0x800001, 0x7F7FFFFF, 0x80000003, 0x3F800001, 0, 0x80000000], np.uint32)
    x = np.concatenate([odd.view(F32), normal_values(3000, scale=1e-38), normal_values(3000)])
    zeros = codec.encode(np.zeros_like(x))
    with use_isa(isa):
        for count in (1, 2, 3, 4, 6, 8, 16):
            mean = codec.reduce([codec.encode(x)] + [zeros] * (count - 1), op="mean")
            total = x + F32(0) if count > 1 else x  # a sum of several frames turns -0 into 0
            assert mean.tobytes() == (total / F32(count)).tobytes()
