"""Frames of lossy codecs: residuals, special values, sizes and specs, on all instruction sets and thread counts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import codec
from codec._c.library import isas, use_isa
from reference import decoder as oracle
from support.specs import LOSSY, TOPKS
from support.tensors import NUMPY_DTYPES, normal_values, random_bits

F32 = np.float32
SPECS = pytest.mark.parametrize("spec", (LOSSY | TOPKS).values(), ids=LOSSY | TOPKS)


@SPECS
def test_residual_is_the_tensor_minus_the_decoded_frame(spec, isa):
    for shape in ((300,), (40, 130), (70_000,)):
        x = normal_values(shape)
        x.ravel()[5:200] = 0
        before, r = x.copy(), np.full(shape, np.nan, F32)
        frame = codec.encode(x, spec, residual=r)
        assert codec.encode(x, spec) == frame
        assert (x == before).all()
        assert (r == x - codec.decode(frame)).all()
        for threads in (1, 4):
            c = x.copy()
            assert codec.encode(c, spec, residual=c, options=codec.options(threads=threads)) == frame
            assert (c == r).all()


def test_error_feedback_telescopes():
    """The sum of decoded frames equals the sum of inputs minus the last residual."""
    for spec in (codec.Sign(), codec.Ternary(clip=2.5), codec.Quantize(2)):
        e = np.zeros(5000, F32)
        sent, came = np.zeros(5000), np.zeros(5000)
        for step in range(20):
            g = normal_values(5000, step)
            c = g + e
            came += g
            sent += codec.decode(codec.encode(c, spec, residual=e, stream=step))
        np.testing.assert_allclose(sent, came - e, atol=1e-6)


@SPECS
def test_nonfinite_values_are_rejected_without_side_effects(spec, isa):
    for dtype in ("float32", "bfloat16", "float16"):
        for bad in (np.nan, np.inf, -np.inf):
            x = normal_values(30_000)
            x[29_000] = bad
            x = x.astype(NUMPY_DTYPES[dtype])
            r = np.full(30_000, 7, F32)
            out = np.empty(codec.bound(30_000, dtype, spec), np.uint8)
            for threads in (1, 4):
                if isinstance(spec, codec.Float8) and spec.nonfinite == "propagate":
                    y = codec.decode(codec.encode(x, spec, options=codec.options(threads=threads))).astype(F32)
                    assert np.isnan(y[29_000])
                    assert np.isfinite(np.delete(y, 29_000)).all()
                    continue
                with pytest.raises(codec.ArgumentError, match="NaN or Inf"):
                    codec.encode(x, spec, out=out, residual=r, options=codec.options(threads=threads))
                assert (r == 7).all()


@SPECS
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_half_precision_pattern_is_encoded_identically(spec, dtype):
    """All instruction sets encode every half-precision pattern to the same bytes, and the reference decoder agrees."""
    x = np.arange(1 << 16, dtype=np.uint16).view(NUMPY_DTYPES[dtype])
    x = x[np.isfinite(x.astype(F32))]
    frames = set()
    for isa in isas():
        with use_isa(isa):
            frames.add(bytes(codec.encode(x, spec)))
            y = codec.decode(codec.encode(x, spec))
    assert len(frames) == 1
    assert oracle.decode(frames.pop())[2] == y.tobytes()
    assert np.isfinite(y.astype(F32)).all()


@SPECS
@given(st.integers(0, 40_000), st.integers(0, 2**32), st.sampled_from(["normal", "zeros", "sparse", "constant"]))
def test_reference_decoder_gives_the_same_values(spec, n, seed, kind):
    x = random_bits("float32", n, kind, seed).view(F32)
    frame = bytes(codec.encode(x, spec, stream=seed))
    assert len(frame) <= codec.bound(n, "float32", spec)
    assert oracle.decode(frame)[2] == codec.decode(frame).tobytes()


@SPECS
def test_residual_in_place_with_several_threads(spec):
    """The residual may be written in place of the tensor, with several threads."""
    x = normal_values(200_003)
    segments = [(0, (40_000,)), (40_000, (3,)), (40_003, (100_000,)), (140_003, (60_000,))]
    expected = np.empty_like(x)
    frame = codec.encode(codec.view(x, segments=segments), spec, residual=expected, options=codec.options(threads=1))
    assert (
        codec.encode(
            codec.view(x, segments=segments),
            spec,
            residual=x,
            out=np.empty(len(frame), np.uint8),
            options=codec.options(threads=4),
        )
        == frame
    )
    assert x.tobytes() == expected.tobytes()


@pytest.mark.parametrize("scale", [0.01, 1e35, 1e-41])
@SPECS
def test_frames_are_identical_for_all_instruction_sets_threads_and_addresses(spec, scale):
    x = normal_values(300_001, scale=scale)
    frame = codec.encode(x, spec)
    y = codec.decode(frame)
    raw = np.empty(x.nbytes + 8, np.uint8)
    raw[3 : 3 + x.nbytes] = x.view(np.uint8)
    moved = np.ndarray(x.shape, F32, raw[3:])
    for isa in isas():
        with use_isa(isa):
            for threads in (1, 2, 7):
                assert codec.encode(x, spec, options=codec.options(threads=threads)) == frame
                assert codec.encode(moved, spec, options=codec.options(threads=threads)) == frame
                assert codec.decode(frame, options=codec.options(threads=threads)).tobytes() == y.tobytes()
                assert (
                    codec.decode(
                        frame, out=np.ndarray(x.shape, F32, raw[1:]), options=codec.options(threads=threads)
                    ).tobytes()
                    == y.tobytes()
                )
                raw[3 : 3 + x.nbytes] = x.view(np.uint8)


@pytest.mark.parametrize("spec", LOSSY.values(), ids=LOSSY)  # without TopK, which ignores segments
def test_segments_are_encoded_as_if_alone(spec, isa):
    """Values of a segment are the same as if its parameter were encoded alone."""
    shapes = [(0, (100, 90)), (9000, (130, 80)), (19_400, (7,)), (19_407, (5000,))]
    x = normal_values(24_407)
    for i, (offset, shape) in enumerate(shapes):
        x[offset : offset + int(np.prod(shape))] *= 10.0**i
    frame = codec.encode(codec.view(x, segments=shapes), spec)
    assert codec.encode(codec.view(x, segments=shapes), spec, options=codec.options(threads=3)) == frame
    assert codec.inspect(frame).nsegments == 4
    y = codec.decode(frame)
    assert oracle.decode(bytes(frame))[2] == y.tobytes()
    random = isinstance(spec, codec.Ternary) or getattr(spec, "rounding", "") == "stochastic"
    for offset, shape in shapes:
        n = int(np.prod(shape))
        if not random and n > 4096:
            alone = codec.decode(codec.encode(x[offset : offset + n].reshape(shape), spec))
            assert (y[offset : offset + n] == alone.ravel()).all()


def test_ternary_with_a_given_scale():
    x = normal_values(3000)
    s = float(np.abs(x).max())
    assert codec.decode(codec.encode(x, codec.Ternary(scale=2 * s))).max() == F32(2 * s)
    with pytest.raises(codec.SpecError, match="smaller than the largest"):
        codec.encode(x, codec.Ternary(scale=s / 2))
    r = np.full(3000, 7, F32)
    with pytest.raises(codec.SpecError, match="smaller than the largest"):
        codec.encode(x, codec.Ternary(scale=s / 2), residual=r)
    assert (r == 7).all()
    assert np.abs(codec.decode(codec.encode(x, codec.Ternary(clip=2.0)))).max() == pytest.approx(2 * x.std(), rel=1e-5)
    y = codec.decode(codec.encode(x, codec.Float8(scale=448 / s * 4)))
    # The given scale is 4 times too large, so that values above s / 4 saturate.
    assert np.abs(y).max() == pytest.approx(s / 4, rel=1e-6)


def test_frame_sizes_follow_from_the_definitions():
    """Frame sizes at a million values, headers included, are within 1% of the codecs' definitions."""
    x = normal_values((1024, 1024))
    for spec, bits in (
        (codec.Sign(), 1),
        (codec.Sign(group_size=1024), 1 + 32 / 1024),
        (codec.Ternary(), 2),
        (codec.Ternary("base3"), 1.6),
        (codec.Float8(), 8 + 32 / 1024),
        (codec.Float8("mxfp8_e4m3"), 8.25),
        (codec.Float4(), 4.5),
        (codec.Float4("mxfp4"), 4.25),
        (codec.Quantize(), 4.5),
        (codec.Quantize(2, 128), 2.25),
        (codec.Quantize(4, zero_point=True), 5),
    ):
        assert 8 * len(codec.encode(x, spec)) / x.size <= 1.01 * bits


@SPECS
def test_decode_writes_no_byte_around_the_destination(spec):
    """Decoding writes no byte around the destination, at any address, although loops store whole vectors."""
    for isa in isas():
        for n, at in ((1, 64), (63, 65), (1000, 68), (5001, 127)):
            frame = codec.encode(normal_values(n), spec)
            room = np.full(256 + 4 * n, 0xA5, np.uint8)
            inside = slice(at, at + 4 * n)
            with use_isa(isa):
                codec.decode(frame, out=room[inside].view(F32))
                assert room[inside].tobytes() == codec.decode(frame).tobytes()
                codec.reduce([frame, frame], out=room[inside].view(F32), op="mean")
            assert (np.delete(room, inside) == 0xA5).all()


@pytest.mark.torch
@SPECS
def test_flush_denormal_does_not_change_results(spec):
    import torch

    x = normal_values(5000, scale=1e-38)
    x[:100] = np.arange(100, dtype=np.uint32).view(F32)
    frame = codec.encode(x, spec)
    y = codec.decode(frame)
    mean = codec.reduce([frame, frame])
    torch.set_flush_denormal(True)
    try:
        assert codec.encode(x, spec) == frame
        assert codec.decode(frame).tobytes() == y.tobytes()
        assert codec.reduce([frame, frame]).tobytes() == mean.tobytes()
        assert torch.set_flush_denormal(True)  # restores torch's default
        tiny = torch.tensor([1e-39]) * 1
        assert tiny.item() == 0
    finally:
        torch.set_flush_denormal(False)


def test_specs_reject_wrong_parameters():
    x = normal_values(100)
    for bad in (
        lambda: codec.Sign("l3"),
        lambda: codec.Sign(group_size=0),
        lambda: codec.Sign(group_size="column"),
        lambda: codec.Ternary("4bit"),
        lambda: codec.Ternary(scale=-1.0),
        lambda: codec.Ternary(scale=float("nan")),
        lambda: codec.Ternary(clip=-1.0),
        lambda: codec.Ternary(seed=1 << 32),
        lambda: codec.Float8("e3m4"),
        lambda: codec.Float8(group_size=0),
        lambda: codec.Float8("mxfp8_e4m3", 64),
        lambda: codec.Float8("mxfp8_e5m2", scale=1.0),
        lambda: codec.Float8(rounding="up"),
        lambda: codec.Float8(nonfinite="ignore"),
        lambda: codec.Float8(entropy=1),
        lambda: codec.Float4("fp4"),
        lambda: codec.Quantize(0),
        lambda: codec.Quantize(9),
        lambda: codec.Quantize(group_size=0),
        lambda: codec.Quantize(levels="many"),
        lambda: codec.Quantize(levels="odd", zero_point=True),
        lambda: codec.Quantize(zero_point=1),
    ):
        with pytest.raises(codec.SpecError):
            bad()
    for bad in (
        lambda: codec.encode(x.astype(np.float64), codec.Sign()),
        lambda: codec.encode(np.arange(10), codec.Ternary()),
        lambda: codec.encode(x, codec.Sign(), residual=np.zeros(99, F32)),
        lambda: codec.encode(x, codec.Sign(), residual=np.zeros(100)),
        lambda: codec.encode(x, codec.Sign(), stream=-1),
        lambda: codec.encode(x, codec.Sign(), stream=1 << 64),
    ):
        with pytest.raises(codec.ArgumentError):
            bad()


@SPECS
def test_inspect_returns_the_spec(spec):
    """inspect() returns the spec, with defaults for parameters that frames do not store, and block="row" resolved."""
    said = codec.inspect(codec.encode(normal_values((20, 70)), spec)).spec
    lost = {"seed": 0, "scale": None, "clip": None} if not isinstance(spec, codec.Sign) else {}
    for name in spec.__slots__:
        asked = getattr(spec, name)
        chosen = asked == "row" or (type(spec) is codec.Float8 and name == "group_size" and asked is None)
        assert getattr(said, name) == (70 if chosen else lost.get(name, asked))


def test_inspect_returns_the_group_size_of_segments():
    """inspect() returns one group size if it is equal in all segments, otherwise "row"; None without a side section."""
    x, alike, apart = normal_values(10_000), [(0, (50, 100)), (5000, (50, 100))], [(0, (50, 100)), (5000, (25, 200))]
    for segments, row in ((alike, 100), (apart, None)):
        assert codec.inspect(codec.encode(codec.view(x, segments=segments), codec.Float8())).spec == codec.Float8(
            group_size=row
        )
        frame = codec.encode(codec.view(x, segments=segments), codec.Sign(group_size="row"))
        assert codec.inspect(frame).spec == codec.Sign(group_size=row or "row")
        assert codec.inspect(frame[:56]).spec == codec.Sign()
    for spec in (codec.Quantize(3, 50), codec.Sign(), codec.Float4("mxfp4"), codec.Ternary("entropy")):
        frame = codec.encode(codec.view(x, segments=apart), spec)
        assert codec.inspect(frame).spec == spec
        codec.inspect(frame[:56])
