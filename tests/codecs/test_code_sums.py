"""codec.sum_codes: integer sums of Ternary frames with one scale, and scales of 0."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import codec
from codec import Status
from codec.engines import cuda
from reference import decoder as oracle
from support.frame_builder import recompute_checksums
from support.tensors import LOSSY_DTYPES, NUMPY_DTYPES, normal_values

F32 = np.float32
PACKINGS = ("2bit", "base3", "entropy")
ENGINES = ("native", "numba")
X = normal_values((3, 70_000), scale=1.0)
SCALE = float(np.abs(X).max())
SHARED = [codec.encode(x, codec.Ternary(scale=SCALE), stream=i) for i, x in enumerate(X)]


def codes_of(frame):
    """Return the codes of a frame as integers, from the reference decoder."""
    dtype, shape, values = oracle.decode(frame)
    return np.sign(np.frombuffer(values, NUMPY_DTYPES[dtype]).astype(F32)).astype(int).reshape(shape)


@given(st.data())
def test_sums_equal_those_of_the_reference_decoder(data):
    """Sums equal those of the reference decoder, for frames of different packings, on all engines and thread counts."""
    dtype = data.draw(st.sampled_from(LOSSY_DTYPES))
    shape = data.draw(st.lists(st.sampled_from((0, 1, 2, 7, 40)), max_size=3))
    packings = data.draw(st.lists(st.sampled_from(PACKINGS), min_size=1, max_size=4))
    seed = data.draw(st.integers(0, 1 << 16))
    scale = data.draw(st.sampled_from((0.5, 3.0, 8192.0)))  # scales that every dtype represents exactly
    tensors = (np.random.default_rng(seed).uniform(-0.5, 0.5, (len(packings), *shape))).astype(NUMPY_DTYPES[dtype])
    pairs = enumerate(zip(packings, tensors, strict=True))
    frames = [codec.encode(x, codec.Ternary(p, scale), stream=i) for i, (p, x) in pairs]
    settings = codec.options(engine=data.draw(st.sampled_from(ENGINES)), threads=data.draw(st.sampled_from((1, 3))))
    integers, found = codec.sum_codes(frames, options=settings)
    assert integers.dtype == np.int8
    assert integers.shape == tuple(shape)
    assert (integers == sum(codes_of(frame) for frame in frames)).all()
    assert found == (scale if integers.size else 0.0)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("packings", [*itertools.product(PACKINGS, PACKINGS)], ids="-".join)
def test_sums_of_many_blocks_equal_sums_of_decoded_frames(packings, threads, isa):
    x = normal_values((2, 300_001), scale=1.0)
    pairs = enumerate(zip(packings, x, strict=True))
    frames = [codec.encode(v, codec.Ternary(p, scale=6.0), stream=i) for i, (p, v) in pairs]
    integers, scale = codec.sum_codes(frames, options=codec.options(threads=threads))
    assert (integers == sum(np.sign(codec.decode(frame)) for frame in frames)).all()
    assert (integers * F32(scale) == codec.reduce(frames, op="sum")).all()


def test_integers_are_as_wide_as_the_number_of_frames_requires():
    """The result has the narrowest integer dtype that holds extreme sums: int8 for 127 frames, int16 for 32,767."""
    one, minus = (codec.encode(np.full(3, v, F32), codec.Ternary(scale=2.0)) for v in (2.0, -2.0))
    both = (one, 1), (minus, -1)
    for count, dtype, terms in (
        (1, "int8", both),
        (127, "int8", both),
        (128, "int16", both),
        (32_767, "int16", both[1:]),
        (32_768, "int32", both[:1]),
    ):
        for frame, sign in terms:
            integers, _ = codec.sum_codes([frame] * count)
            assert integers.dtype == dtype
            assert integers.tolist() == [sign * count] * 3


def test_frames_of_segments_need_one_scale():
    bucket = np.concatenate([np.ones(5000, F32), np.full(6000, 0.25, F32)])
    segments = codec.segments([(5000,), (6000,)])
    view = codec.view(bucket, segments=segments)
    frames = [codec.encode(view, codec.Ternary("base3", scale=1.0), stream=i) for i in range(2)]
    integers, scale = codec.sum_codes(frames)
    assert scale == codec.inspect(frames[0]).scale == 1.0
    assert (integers == codes_of(frames[0]) + codes_of(frames[1])).all()
    own = codec.encode(view, codec.Ternary("base3"))
    assert codec.inspect(own).scale is None
    with pytest.raises(codec.ArgumentError, match=r"^1: the segments of the frame have different scales") as e:
        codec.sum_codes([frames[0], own])
    assert e.value.item == 1


def test_cuda_engine_refuses_to_add_codes():
    with pytest.raises(codec.EngineError, match="the cuda engine"):
        codec.sum_codes(SHARED, options=codec.options(engine="cuda"))
    with pytest.raises(codec.EngineError, match="copy the frames to host memory"):
        cuda.sum_codes(None)  # the CUDA engine raises even on a machine with a GPU


@pytest.mark.parametrize("engine", ENGINES)
def test_frames_that_do_not_add_up_are_named(engine):
    x = X[0]
    for other, match in (
        (codec.encode(x / 2, codec.Ternary()), "the scale of the frame is .* but the first frame has .*scale=..."),
        (codec.encode(x[1:], codec.Ternary(scale=SCALE)), r"the shape of the frame is \(69999,\), .* \(70000,\)"),
        (codec.encode(x.astype(np.float16), codec.Ternary(scale=SCALE)), "the dtype of the frame is float16"),
        (codec.encode(x, codec.Sign()), r"a frame of Sign\(.* has no codes"),
        (codec.encode(x), r"a frame of Lossless\(.* has no codes"),
    ):
        with pytest.raises(codec.ArgumentError, match=f"^2: {match}") as e:
            codec.sum_codes([*SHARED[:2], other], options=codec.options(engine=engine))
        assert e.value.item == 2
    with pytest.raises(codec.ArgumentError, match=r"^0: a frame of Sign"):
        codec.sum_codes([codec.encode(x, codec.Sign())])
    with pytest.raises(codec.ArgumentError, match="frames is empty"):
        codec.sum_codes([])
    with pytest.raises(codec.ArgumentError, match="must be a sequence of frames"):
        codec.sum_codes(SHARED[0])  # pyright: ignore[reportArgumentType]


def with_code_3(frame):
    """Return a 2-bit frame with valid checksums whose last byte of codes holds the code 3, which the format forbids."""
    out = bytearray(frame)
    out[-1] |= 0xC0
    bad = recompute_checksums(bytes(out))
    assert bad is not None
    return bad


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("engine", ENGINES)
def test_damaged_frames_are_named(engine, threads):
    """The error names the first damaged frame, even if an earlier frame does not match the others."""
    settings = codec.options(engine=engine, threads=threads)
    changed = SHARED[1][:-9] + bytes([SHARED[1][-9] ^ 1]) + SHARED[1][-8:]
    for bad, error in (
        (SHARED[1][:-1], codec.FrameError),
        (SHARED[1] + b"\0", codec.FrameError),
        (changed, codec.ChecksumError),
        (with_code_3(SHARED[1]), codec.FrameError),
    ):
        for frames in ([SHARED[0], bad], [SHARED[0], bad, changed], [SHARED[0], bad, codec.encode(X[0], codec.Sign())]):
            with pytest.raises(error, match=r"^1: ") as e:
                codec.sum_codes(frames, options=settings)
            assert e.value.item == 1


def test_hostile_frames_give_an_error_or_integers_of_their_shape():
    """A frame with a changed byte, even with checksums recomputed, is an error or has only codes -1, 0 and 1."""
    frames = [codec.encode(X[0, :900], codec.Ternary(p, scale=SCALE)) for p in PACKINGS]
    rng = np.random.default_rng(0)
    errors: list[codec.CodecError] = []
    accepted = 0
    for frame in frames:
        for _ in range(150):
            out = bytearray(frame)
            out[rng.integers(len(out))] ^= int(rng.integers(1, 256))
            for bad in (bytes(out), recompute_checksums(bytes(out)) or b""):
                try:
                    integers, scale = codec.sum_codes([frame, bad], max_nbytes=1 << 20)
                except (codec.FrameError, codec.ArgumentError) as e:
                    errors.append(e)
                else:
                    accepted += 1
                    assert (integers == codes_of(frame) + codes_of(bad)).all()
                    assert scale == F32(SCALE)
    assert accepted
    assert {e.item for e in errors} == {1}


def test_results_are_limited_and_of_the_kind_of_like():
    with pytest.raises(codec.LimitError, match="70000 bytes"):
        codec.sum_codes(SHARED, max_nbytes=69_999)
    integers, _ = codec.sum_codes(SHARED, max_nbytes=70_000)
    tensor, _ = codec.sum_codes(SHARED, like=torch.empty(0))
    assert tensor.dtype == torch.int8
    assert (tensor.numpy() == integers).all()


@pytest.mark.parametrize("dtype", LOSSY_DTYPES)
@pytest.mark.parametrize("packing", PACKINGS)
def test_inspect_tells_the_scale(packing, dtype):
    """inspect() returns the scale of a frame; encoding with this scale, seed and stream gives the same frame."""
    x = X[0, :9000].astype(NUMPY_DTYPES[dtype])
    for spec in (codec.Ternary(packing), codec.Ternary(packing, scale=8.0)):
        frame = codec.encode(x, spec)
        info = codec.inspect(frame)
        assert info.spec.scale is None
        assert info.scale == (spec.scale or float(np.abs(x).max()))
        assert codec.encode(x, dataclasses.replace(info.spec, scale=info.scale)) == frame
        assert codec.inspect(frame[: info.sections["side"][0]]).scale is None
    assert codec.inspect(codec.encode(x[:0], codec.Ternary())).scale is None
    assert codec.inspect(codec.encode(x, codec.Sign())).scale is None


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", LOSSY_DTYPES)
@pytest.mark.parametrize("packing", PACKINGS)
def test_scale_0_is_for_zeros_alone(packing, dtype, engine):
    """Scale 0 encodes a tensor of zeros as without a given scale; other tensors are errors that change no residual."""
    settings = codec.options(engine=engine)
    spec = codec.Ternary(packing, scale=0.0)
    x = np.zeros(20_000, NUMPY_DTYPES[dtype])
    x[::2] = -0.0
    frame = codec.encode(x, spec, options=settings)
    assert frame == codec.encode(x, codec.Ternary(packing))
    assert codec.inspect(frame).scale == 0.0
    integers, scale = codec.sum_codes([frame, frame], options=settings)
    assert scale == 0.0
    assert not integers.any()
    residual = np.full(x.size, 7, F32)
    for bad in (1.0, 1e-7):
        x[-1] = bad
        for wrong in (spec, dataclasses.replace(spec, clip=2.5)):
            with pytest.raises(codec.SpecError) as e:
                codec.encode(x, wrong, residual=residual, options=settings)
            assert e.value.code == Status.BAD_SCALE
    x[-1] = np.inf
    with pytest.raises(codec.ArgumentError) as e:
        codec.encode(x, spec, residual=residual, options=settings)
    assert e.value.code == Status.NONFINITE
    assert (residual == 7).all()


def test_scale_0_counts_the_residual():
    """With feedback the sum of tensor and residual must be zero."""
    x, residual = np.full(600, 3, F32), np.full(600, -3, F32)
    spec = codec.Ternary(scale=0)
    assert codec.inspect(codec.encode(x, spec, residual=residual, feedback=True)).scale == 0.0
    assert not residual.any()
    with pytest.raises(codec.SpecError):
        codec.encode(np.zeros(600, F32), spec, residual=x, feedback=True)
    assert (x == 3).all()
