"""Truncate: rounding of mantissas, and agreement of encoder and decoder on shared levels."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import codec
from codec import Truncate, optimizers
from codec._c.library import use_isa
from reference import decoder as oracle
from support import flatcall
from support.specs import TRUNCATE_LEVELS
from support.tensors import ADAMW, NUMPY_DTYPES, gradient, optimizer_state
from support.truncation import DROPS, a_exponents, cut

F32 = np.float32


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
@pytest.mark.parametrize("level", range(4))
@pytest.mark.parametrize("rounding", ["nearest", "truncate"])
def test_fixed_level_rounds_the_given_bits(dtype, level, rounding, isa):
    x = gradient(30_000, dtype=dtype)
    spec = Truncate(level, rounding)
    frame = bytes(codec.encode(x, spec))
    expected = cut(x, DROPS[dtype][level], rounding == "nearest")
    assert codec.decode(frame).tobytes() == expected.tobytes()
    assert oracle.decode(frame)[2] == expected.tobytes()
    assert len(frame) < x.nbytes * (1 - DROPS[dtype][level] / (8 * x.itemsize))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("level", range(4))
def test_every_half_precision_pattern(dtype, level, isa):
    """NaN and Inf keep every bit, zeros and subnormals become +0, and no finite value becomes Inf."""
    x = np.arange(1 << 16, dtype=np.uint16).view(NUMPY_DTYPES[dtype])
    frame = bytes(codec.encode(x, Truncate(level)))
    y = codec.decode(frame)
    if codec.inspect(frame).stored:  # all exponents occur equally often, so nothing can be compressed
        assert level == 0
        assert y.tobytes() == x.tobytes()
        return
    wide = x.astype(F32)
    odd = ~np.isfinite(wide)
    assert y.view(np.uint16)[odd].tolist() == x.view(np.uint16)[odd].tolist()
    small = np.abs(wide) < float(ml_dtypes.finfo(x.dtype).smallest_normal)
    assert not y.view(np.uint16)[small].any()
    drop = np.where(odd, 0, DROPS[dtype][level])
    assert y.tobytes() == cut(x, drop).tobytes()
    assert oracle.decode(frame)[2] == y.tobytes()


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
@pytest.mark.parametrize(("levels", "granularity"), TRUNCATE_LEVELS)
@pytest.mark.parametrize("guard", [-8, "exact", -20])
@pytest.mark.parametrize("rounding", ["nearest", "truncate"])
def test_all_levels_and_granularities_round_alike(dtype, levels, granularity, guard, rounding, isa):
    x, arrays = gradient(17_000, dtype=dtype), optimizer_state(17_000)
    x[7:9] = np.nan, np.inf
    spec = Truncate("optimizer", rounding, levels, granularity, guard)
    r = np.empty(x.shape, F32)
    frame = bytes(codec.encode(x, spec.bind(ADAMW, **arrays), residual=r))
    how = {"optimizer": ADAMW, "state": arrays} if levels == "shared" else {}
    y = flatcall.decode(frame, **how)
    with np.errstate(invalid="ignore"):
        lost = x.astype(F32) - y.astype(F32)
    np.testing.assert_array_equal(r, np.where(np.isfinite(x.astype(F32)), lost, 0))  # NaN and Inf have residual 0
    assert oracle.decode(frame, a_exponents=a_exponents(ADAMW, arrays))[2] == y.tobytes()
    if granularity == "six":
        g = spec.guard_bits + (rounding == "truncate")
        level = ADAMW.levels(x, arrays["theta"], m=arrays["m"], v=arrays["v"], guard=g)
        assert set(np.unique(level)) >= {0} if guard == "exact" else len(set(np.unique(level))) > 2
        k = np.array(DROPS[dtype])[level]
        assert y.tobytes() == cut(x, k, rounding == "nearest").tobytes()
    for threads in (2, 5):
        assert codec.encode(x, spec.bind(ADAMW, **arrays), options=codec.options(threads=threads)) == frame
        assert flatcall.decode(frame, threads=threads, **how).tobytes() == y.tobytes()
    out = np.ones(x.shape, F32)
    flatcall.accumulate(frame, out, 2.0, **how)
    np.testing.assert_array_equal(out, F32(1) + F32(2) * y.astype(F32))
    np.testing.assert_array_equal(flatcall.reduce([frame, frame], "sum", **how), y.astype(F32) + y.astype(F32))
    c = x.astype(F32)
    if dtype == "float32":
        codec.encode(c, spec.bind(ADAMW, **arrays), residual=c)
        np.testing.assert_array_equal(c, r)


@given(
    st.integers(0, 40_000), st.integers(0, 2**32), st.sampled_from(TRUNCATE_LEVELS), st.integers(-30, 10), st.booleans()
)
def test_reference_decoder_gives_the_same_values(n, seed, way, guard, matrix):
    x, arrays = gradient(n, seed), optimizer_state(n, seed)
    spec = Truncate("optimizer", "nearest", *way, guard)
    shape = (n // 100, 100) if matrix and n % 100 == 0 and n else (n,)
    frame = bytes(codec.encode(x.reshape(shape), spec.bind(ADAMW, **arrays)))
    assert len(frame) <= codec.bound(shape, "float32", spec)
    y = codec.decode(frame, codec.Truncate().bind(ADAMW, **arrays))
    assert oracle.decode(frame, a_exponents=a_exponents(ADAMW, arrays))[2] == y.tobytes()


def test_values_that_sampling_misses_are_escaped(isa):
    """Values that the sample misses, such as rare zeros and exponents, have no code and are escaped."""
    x, arrays = gradient(200_000), optimizer_state(200_000)
    x[x == 0] = 1e-3
    for at, value in ((77_777, 0.0), (123_456, 1e-30), (99_999, 1e30), (150_001, np.inf)):
        x[at] = value
    for way in TRUNCATE_LEVELS:
        spec = Truncate("optimizer", "nearest", *way)
        frame = bytes(codec.encode(x, spec.bind(ADAMW, **arrays)))
        y = codec.decode(frame, codec.Truncate().bind(ADAMW, **arrays))
        assert (y[77_777], y[150_001]) == (0, np.inf)
        assert oracle.decode(frame, a_exponents=a_exponents(ADAMW, arrays))[2] == y.tobytes()


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_runs_of_fields_of_every_width(dtype, isa):
    """All instruction sets pack runs of equally long fields, whose bits together may exceed a word."""
    magnitude = np.repeat(np.exp2(np.arange(-13, 14)), 389)
    x = np.random.default_rng(0).uniform(-1, 1, magnitude.size)
    x = (magnitude * (x + np.sign(x))).astype(F32).astype(NUMPY_DTYPES[dtype])
    metric, arrays = optimizers.SGD(1.0), {"theta": np.full(x.size, 2.0**11, F32)}
    spec = Truncate(level_coding="shared", granularity="bit", guard=0).bind(metric, **arrays)
    frame = bytes(codec.encode(x, spec))
    y = codec.decode(frame, spec)
    assert oracle.decode(frame, a_exponents=a_exponents(metric, arrays))[2] == y.tobytes()
    kept = np.bitwise_or.reduce(y.view(f"u{y.itemsize}").reshape(-1, 389), 1)
    assert len({int(bits) & -int(bits) for bits in kept}) == {"float32": 24, "bfloat16": 8, "float16": 11}[dtype]
    with use_isa("scalar"):
        assert bytes(codec.encode(x, spec)) == frame


def test_segments_and_codebook(isa):
    x, arrays = gradient(30_000), optimizer_state(30_000)
    x[:9000] *= 1e-3
    segments = [(0, (90, 100)), (9000, (700,)), (10_000, (150, 130))]
    lossless = codec.Codebook.from_tensors(x)
    for way in TRUNCATE_LEVELS:
        spec = Truncate("optimizer", "nearest", *way)
        book = codec.Codebook.from_tensors(x, spec=spec.bind(ADAMW, **arrays))
        with pytest.raises(codec.ArgumentError, match="symbols"):
            codec.encode(x, spec.bind(ADAMW, **arrays), codebook=lossless)
        own = len(codec.encode(x, spec.bind(ADAMW, **arrays)))
        assert len(codec.encode(x, spec.bind(ADAMW, **arrays), codebook=book)) <= own
        for how in ({"segments": segments}, {"codebook": book}):
            frame = bytes(flatcall.encode(x, spec, optimizer=ADAMW, state=arrays, **how))
            y = codec.decode(frame, codec.Truncate().bind(ADAMW, **arrays), codebooks=book)
            plain = codec.decode(codec.encode(x, spec.bind(ADAMW, **arrays)), codec.Truncate().bind(ADAMW, **arrays))
            assert (y == plain).all()
    joint = codec.Codebook.from_tensors(x.astype(np.float16), spec=Truncate().bind(ADAMW, **arrays))
    with pytest.raises(codec.ArgumentError, match="symbols"):
        codec.encode(x, Truncate().bind(ADAMW, **arrays), codebook=joint)
    with pytest.raises(codec.StateError, match="optimizer"):
        codec.Codebook.from_tensors(x, spec=Truncate())
    whole = len(codec.encode(x, Truncate(2)))
    assert len(codec.encode(codec.view(x, segments=segments), Truncate(2))) < whole


@pytest.mark.parametrize("n", [600, 616, 700, 20_000])
@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_frames_that_would_grow_are_stored(n, dtype, isa):
    """A tensor whose frame would grow is stored; its residual is correct even after blocks had been encoded."""
    x = (
        np.random.default_rng(n)
        .integers(0, 1 << 16, n * NUMPY_DTYPES[dtype].itemsize // 2, np.uint16)
        .view(NUMPY_DTYPES[dtype])
    )
    spec, how = Truncate(guard=126), {"optimizer": optimizers.SGD(1.0), "state": {"theta": np.full(n, 1e-30, F32)}}
    finite = np.isfinite(x.astype(F32))
    for threads in (1, 2):
        for room in (0, 8):
            left = np.full(n, 7, F32)
            out = np.empty(codec.bound(x.shape, dtype, spec) - room, np.uint8)
            try:
                frame = flatcall.encode(x, spec, residual=left, out=out, threads=threads, **how)
            except codec.ArgumentError:  # `out` is too small
                assert room
                assert (left == 7).all()
                continue
            y = codec.decode(frame)
            assert (left[finite] == x[finite].astype(F32) - y[finite].astype(F32)).all()


def test_levels_given_as_an_array():
    x = gradient(20_000)
    level = np.random.default_rng(0).integers(0, 4, 20_000).astype(np.uint8)
    for levels in ("plane", "coded"):
        frame = bytes(codec.encode(x, Truncate(level_coding=levels).bind(levels=level)))
        expected = cut(x, np.array(DROPS["float32"])[level])
        assert codec.decode(frame).tobytes() == expected.tobytes()
        assert oracle.decode(frame)[2] == expected.tobytes()
    x, level, residual = gradient(100_000), np.full(100_000, 3, np.uint8), np.full(100_000, 7, F32)
    level[-1] = 4
    with pytest.raises(codec.ArgumentError):
        codec.encode(x, Truncate().bind(levels=level), residual=residual)
    assert (residual == 7).all()


@pytest.mark.parametrize(("levels", "granularity"), TRUNCATE_LEVELS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_residual_is_written_by_blocks_as_after_all_of_them(levels, granularity, dtype, isa):
    """Blocks that write the residual, over the tensor too, give the frame and residual of two threads, which do not."""
    n = 96 * 1500  # rows cross the ends of blocks
    scale = np.exp2(np.random.default_rng(2).integers(-6, 6, (1500, 1))).astype(F32)
    x = (gradient(n).reshape(1500, 96) * scale).astype(dtype)
    spec = Truncate("optimizer", "nearest", levels, granularity, "feedback").bind(
        optimizers.SGD(0.05), theta=optimizer_state(n)["theta"]
    )
    error = gradient(n, 3, scale=1e-4).reshape(x.shape)
    results = []
    for threads in (1, 2):
        how = {"options": codec.options(threads=threads), "out": np.empty(codec.bound(x.shape, dtype, spec), np.uint8)}
        left, fed, in_place = np.empty_like(error), error.copy(), x.copy()
        frames = [bytes(codec.encode(x, spec, residual=left, **how))]
        if dtype == "float32":
            assert bytes(codec.encode(in_place, spec, residual=in_place, **how)) == frames[0]
            assert in_place.tobytes() == left.tobytes()
        frames += [bytes(codec.encode(x, spec, residual=fed, feedback=True, **how))]
        results.append((frames, left.tobytes(), fed.tobytes()))
    assert results[0] == results[1]
    assert (left == x.astype(F32) - codec.decode(frames[0], spec).astype(F32)).all()


def test_feedback_of_a_stored_frame_adds_the_residual_once():
    """Blocks do not write the residual while the frame may still be stored raw, however large `out` is."""
    x = np.random.default_rng(0).integers(1 << 23, 255 << 23, 40_000, np.uint32).view(F32)
    residual, sums = np.full_like(x, 2e-38), x + F32(2e-38)
    frame = codec.encode(x, Truncate(0), residual=residual, feedback=True, out=np.empty(2 * x.nbytes, np.uint8))
    assert codec.inspect(bytes(frame)).stored
    assert not residual.any()
    assert codec.decode(frame).tobytes() == sums.tobytes() != x.tobytes()


def test_decoding_with_another_state_is_a_state_error():
    x, arrays = gradient(20_000), optimizer_state(20_000)
    frame = codec.encode(x, Truncate(level_coding="shared").bind(ADAMW, **arrays))
    other = {**arrays, "theta": arrays["theta"].copy()}
    other["theta"][19_999] *= 2
    for bad in (
        {},
        {"optimizer": ADAMW, "state": other},
        {"optimizer": ADAMW, "state": {"m": arrays["m"], "v": arrays["v"]}},
        {"optimizer": optimizers.AdamW(2e-3, step=99), "state": arrays},
        {"optimizer": optimizers.AdamW(1e-3, step=100, betas=(0.5, 0.999)), "state": arrays},
    ):
        with pytest.raises(codec.StateError):
            flatcall.decode(frame, **bad)
        with pytest.raises(codec.StateError):
            flatcall.reduce([frame, frame], **bad)
    out = np.full(20_000, 7, F32)
    with pytest.raises(codec.ArgumentError):
        codec.decode(frame, codec.Truncate().bind(ADAMW, **{**arrays, "m": arrays["m"][:100]}), out=out)
    assert (out == 7).all()


@pytest.mark.parametrize("rounding", ["nearest", "truncate"])
def test_inspect_returns_a_valid_spec_for_every_guard(rounding):
    """inspect() returns a valid spec for every guard; a frame stores the guard with the bits that dtypes add."""
    x, half = gradient(600), gradient(600).astype(NUMPY_DTYPES["bfloat16"])
    theta = np.full(600, 1e-30, F32)
    for guard in range(-128, 127):
        spec = Truncate("optimizer", rounding, "shared", guard=guard)
        for values, of, more in ((x, theta, 0), (half, theta, 16), (x, theta.astype(NUMPY_DTYPES["bfloat16"]), -16)):
            how = {"optimizer": optimizers.SGD(1.0), "state": {"theta": of}}
            frame = flatcall.encode(values, spec, **how)
            found = codec.inspect(frame).spec
            assert found == Truncate("optimizer", rounding, "shared", guard=min(max(guard + more, -128), 126))
            assert flatcall.decode(frame, like=values, **how).shape == (600,)


def test_wrong_arguments_are_rejected():
    x, arrays = gradient(5000), optimizer_state(5000)
    for bad in (
        lambda: Truncate(4),
        lambda: Truncate("levels"),
        lambda: Truncate(rounding="up"),
        lambda: Truncate(level_coding="none"),
        lambda: Truncate(granularity="bit"),
        lambda: Truncate(2, level_coding="shared", granularity="bit"),
        lambda: Truncate(guard=127),
        lambda: Truncate(guard=-129),
        lambda: Truncate(guard="far"),
        lambda: Truncate(max_code_length=9),
        lambda: codec.encode(x, Truncate()),
    ):
        with pytest.raises(codec.SpecError):
            bad()
    for bad in (
        lambda: Truncate().bind(None, **arrays),
        lambda: Truncate().bind(ADAMW, levels=np.zeros(5000, np.uint8)),
        lambda: codec.encode(x, Truncate().bind("AdamW", **arrays)),
        lambda: codec.encode(x, Truncate().bind(ADAMW, **{**arrays, "v": x[:10]})),
        lambda: codec.encode(x, Truncate().bind(ADAMW, **{**arrays, "v": x.astype(np.float64)})),
        lambda: codec.encode(x, Truncate().bind(levels=np.zeros(10, np.uint8))),
        lambda: codec.encode(x, Truncate(level_coding="shared").bind(levels=np.zeros(5000, np.uint8))),
        lambda: codec.encode(np.arange(5000), Truncate(1)),
        lambda: optimizers.SGD(-1.0),
        lambda: optimizers.Adam(float("nan")),
    ):
        with pytest.raises(codec.ArgumentError):
            bad()


@pytest.mark.parametrize(("levels", "granularity"), TRUNCATE_LEVELS)
def test_frame_size_follows_from_entropies(levels, granularity):
    """A frame's size is that of the kept bits plus the entropies of exponents and levels, to 2%."""
    x, arrays = gradient(1 << 18), optimizer_state(1 << 18)
    spec = Truncate(level_coding=levels, granularity=granularity)
    frame = codec.encode(x, spec.bind(ADAMW, **arrays))
    assert codec.inspect(frame).spec == spec
    y = codec.decode(frame, codec.Truncate().bind(ADAMW, **arrays))
    level = ADAMW.levels(x, arrays["theta"], m=arrays["m"], v=arrays["v"])
    e = y.view(np.uint32) >> 23 & 255

    def entropy(symbols):
        counts = np.unique(symbols, return_counts=True)[1]
        return float((counts * np.log2(counts.sum() / counts)).sum())

    if granularity == "bit":
        a = a_exponents(ADAMW, arrays).astype(int)
        k = np.where(a > 0, np.clip(a - e + 8, 0, 23), 0)
    else:
        k = np.array(DROPS["float32"])[level]
    bits = (24 - k)[e > 0].sum() + entropy(e)
    bits += {"plane": 2 * int((e > 0).sum()), "coded": entropy(level[e > 0]), "shared": 0}[levels]
    assert 8 * len(frame) <= 1.02 * bits


def test_trailing_zero_bits_cost_nothing():
    """Mantissa bits that are 0 in all values, as in bfloat16 gradients stored as float32, take no space."""
    x, arrays = gradient(1 << 16), optimizer_state(1 << 16)
    x = (x.view(np.uint32) & 0xFFFF0000).view(F32)
    spec = Truncate(level_coding="shared", granularity="bit", guard="exact")
    frame = bytes(codec.encode(x, spec.bind(ADAMW, **arrays)))
    y = codec.decode(frame, codec.Truncate().bind(ADAMW, **arrays))
    assert oracle.decode(frame, a_exponents=a_exponents(ADAMW, arrays))[2] == y.tobytes()
    assert 8 * len(frame) / x.size < 8 + 3.5  # bits per value: 8 for sign and mantissa, 3.5 for the exponent
    assert (y == x).mean() > 0.99
    zeros = bytes(codec.encode(np.zeros_like(x), spec.bind(ADAMW, **arrays)))
    assert len(zeros) < 300
    assert not codec.decode(zeros, codec.Truncate().bind(ADAMW, **arrays)).any()


def test_flush_denormal_does_not_change_results():
    x, arrays = gradient(5000, scale=1e-38), optimizer_state(5000)
    arrays["v"] *= F32(1e-36)
    for way in TRUNCATE_LEVELS:
        spec = Truncate("optimizer", "nearest", *way)
        frame = codec.encode(x, spec.bind(ADAMW, **arrays))
        y = codec.decode(frame, codec.Truncate().bind(ADAMW, **arrays))
        torch.set_flush_denormal(True)
        try:
            assert codec.encode(x, spec.bind(ADAMW, **arrays)) == frame
            assert codec.decode(frame, codec.Truncate().bind(ADAMW, **arrays)).tobytes() == y.tobytes()
        finally:
            torch.set_flush_denormal(False)
