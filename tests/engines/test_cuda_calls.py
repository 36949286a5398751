"""Calls of the CUDA engine: errors, destinations, batches, cached headers, and the number of launches."""

import numpy as np
import pytest

import codec
from codec import optimizers
from codec.engines.cuda import workspace
from codec.errors import Status
from support import flatcall
from support.cuda_calls import ROWS, by_cupy, bytes_of, encode, on_cpu, outcome
from support.engine_comparison import level_arguments, sample_bits
from support.specs import TRUNCATES
from support.tensors import gradient, optimizer_state

pytestmark = pytest.mark.usefixtures("device")

F32 = np.float32


@by_cupy
def test_encode_errors_agree_with_native():
    """encode() raises the native engine's errors. A tensor whose frame exceeds `out` is stored raw if that fits."""
    x = sample_bits("float32", 100_000, "normal").view(F32)
    nan, inf = x.copy(), x.copy()
    nan[70_000], inf[99_999] = np.nan, np.inf

    for spec in ROWS.values():
        for bad in (nan, inf):
            assert outcome(encode, bad, spec, "float32") == outcome(codec.encode, bad, spec), spec
    for packing in ("2bit", "entropy"):
        spec = codec.Ternary(packing, scale=float(np.abs(x).max()) / 2)
        assert outcome(encode, x, spec, "float32") == Status.BAD_SCALE
        assert outcome(encode, nan, spec, "float32") == outcome(codec.encode, nan, spec) == Status.NONFINITE


@by_cupy
def test_encode_into_out(device):
    """encode() accepts any `out` on host or device, at any address, that is large enough; others are an error."""
    x = sample_bits("float32", 30_000, "normal").view(F32)
    noise = np.random.default_rng(5).integers(0, 1 << 32, 30_000, np.uint32).view(F32)
    noise[:18_000] = x[:18_000]
    lossy = codec.Quantize(), codec.Float8(entropy=True), codec.Truncate(1)
    for values, specs in ((x, (codec.Lossless(), *lossy)), (noise, [codec.Lossless()])):
        for spec in specs:
            frame = codec.encode(values, spec)
            room = codec.bound(x.shape, "float32", spec)
            for nbytes in (4_000, len(frame) - 1, len(frame), room):
                for at in (0, 3, 8):
                    memory, host = np.zeros(at + nbytes, np.uint8), np.zeros(at + nbytes, np.uint8)
                    out = device.put(memory)[at:]
                    expected = Status.SHORT_OUTPUT if nbytes < len(frame) else frame
                    assert outcome(codec.encode, device.put(values), spec, out=out) == expected
                    assert outcome(flatcall.encode, values, spec, engine="cuda", out=host[at:]) == expected
                    if nbytes >= len(frame):
                        assert bytes_of(out)[: len(frame)] == host[at : at + len(frame)].tobytes() == frame
                    left = device.put(np.ones_like(x))
                    if not isinstance(spec, codec.Lossless):
                        assert outcome(codec.encode, device.put(values), spec, residual=left, out=out) == expected
                        assert (left.get() == 1).all() == (nbytes < len(frame))


@by_cupy
def test_decode_from_and_to_host_and_device(device):
    """Frames and destinations may be on host or device, at any address; an error leaves the destination unchanged."""
    for x in (np.random.default_rng(0).standard_normal(9000, F32), np.ones(100, F32)):
        frame = codec.encode(x)
        damaged = frame[:-20] + bytes([frame[-20] ^ 1]) + frame[-19:]
        for at in (0, 1, 4, 8):
            there, bad = (device.put(np.frombuffer(bytes(at) + f, np.uint8).copy())[at:] for f in (frame, damaged))
            assert bytes_of(codec.decode(there)) == x.tobytes()
            assert codec.decode(there, like=x).tobytes() == x.tobytes()
            out, far = np.zeros_like(x), device.put(np.zeros_like(x))
            for whole, broken in ((there, bad), (frame, damaged)):
                assert codec.decode(whole, out=far) is far
                assert bytes_of(far) == x.tobytes()
                assert codec.decode(whole, out=out, options=codec.options(engine="cuda")) is out
                assert out.tobytes() == x.tobytes()
                for kept in (far, out):
                    with pytest.raises(codec.ChecksumError):
                        codec.decode(broken, out=kept, options=codec.options(engine="cuda"))
                    assert bytes_of(kept) == x.tobytes()


@by_cupy
def test_arguments_on_another_device_are_rejected(device):
    x = device.put(np.random.default_rng(0).standard_normal(600, F32))
    with pytest.raises(codec.ArgumentError, match="shares memory"):
        codec.encode(x, out=x.view(np.uint8))
    memory = device.put(np.zeros(5000, np.uint8))
    frame = codec.encode(x, out=memory)
    with pytest.raises(codec.ArgumentError, match="shares memory"):
        codec.decode(frame, out=memory[:2400].view(F32))
    with pytest.raises(codec.EngineError, match="native"):
        codec.encode(x, options=codec.options(engine="native"))


@by_cupy
@pytest.mark.parametrize("at_once", [2, 65_535])
def test_batches(device, monkeypatch, at_once):
    """Batches of any sizes, on host and device, are processed as a whole or not at all; the first fault is reported."""
    monkeypatch.setattr(workspace, "MAX_GRID_Y", at_once)
    rng = np.random.default_rng(3)
    xs = {i: rng.standard_normal(n).astype(F32) for i, n in enumerate((0, 1, 600, 20_000, 512))}
    frames = codec.encode_many(xs)
    there = {i: device.put(x) for i, x in xs.items()}
    device.launched.clear()
    assert {i: bytes_of(f) for i, f in codec.encode_many(there).items()} == frames
    assert device.launched.count("close_frame") == -(-len(xs) // at_once)
    assert codec.encode_many(xs, options=codec.options(engine="cuda")) == frames
    device.launched.clear()
    decoded = codec.decode_many(frames, options=codec.options(engine="cuda"))
    assert device.launched.count("decode_lossless_fast<4>") == (
        1 if at_once > 2 else 2
    )  # only large tensors count: small ones are stored, without blocks
    assert all((decoded[i] == x).all() for i, x in xs.items())
    codec.decode_many(frames, out={i: device.put(np.zeros_like(x)) for i, x in xs.items()})
    bad = frames | {3: frames[3][:-1] + b"\1"}
    out = {i: np.zeros_like(x) for i, x in xs.items()}
    with pytest.raises(codec.FrameError) as error:
        codec.decode_many(bad, out=out, options=codec.options(engine="cuda"))
    assert error.value.item == 3
    assert not any(x.any() for x in out.values())
    xs[2][5] = np.nan
    with pytest.raises(codec.ArgumentError) as error:
        codec.encode_many(xs, codec.Sign(), options=codec.options(engine="cuda"))
    assert error.value.item == 2
    assert (
        codec.encode_many([], options=codec.options(engine="cuda"))
        == codec.decode_many([], options=codec.options(engine="cuda"))
        == []
    )


@by_cupy
def test_cached_headers(device, monkeypatch):
    """decode() does not copy a cached header again, and detects a cached header that belongs to another frame."""
    x = np.random.default_rng(4).standard_normal((300, 70), F32)
    for y, other in ((x, -x), (x[:3], -x[:3])):
        frame, another, short = codec.encode(y), codec.encode(other), codec.encode(y[:-1])
        there, out = device.put(np.frombuffer(frame, np.uint8)), device.put(np.zeros_like(y))
        for head in (frame[:4096], frame, frame[:120]):
            flatcall.decode(there, out=out, head=head)
            flatcall.accumulate(there, out, head=head)
            assert bytes_of(out) == (2 * y).tobytes()
        with pytest.raises(codec.LimitError):
            flatcall.decode(there, head=frame, max_nbytes=y.nbytes - 1)
        flatcall.decode(there, out=out, head=device.put(np.frombuffer(frame, np.uint8)))
        assert bytes_of(out) == y.tobytes()
        flatcall.accumulate(there, out, head=frame)
        for wrong in (another, short, frame[:20], b""):
            with pytest.raises(codec.FrameError):
                flatcall.decode(there, out=out, head=wrong)
        assert bytes_of(out) == (2 * y).tobytes()
    spec, state = TRUNCATES["truncate_shared"], {"theta": device.put(x)}
    how = {"optimizer": optimizers.SGD(0.1), "state": state}
    frame, another = (flatcall.encode(device.put(z), spec, **how) for z in (x, -x))
    damaged = bytearray(bytes_of(another)[:4096])
    damaged[-1] ^= 255
    for head in (bytes_of(another), bytes(damaged), bytes_of(another)[:48] + bytes(60)):
        with pytest.raises(codec.CodecError):
            flatcall.decode(frame, head=head, **how)


@by_cupy
def test_symbols_are_counted_on_the_device(device):
    """Symbols for codebooks are counted on the device, in encode's sample; those of small tensors on the host."""
    rng = np.random.default_rng(2)
    x = (rng.standard_normal((300, 128)) * np.exp(rng.standard_normal((300, 1)))).astype(F32)
    lossless = [codec.Lossless(), codec.Lossless(model="flat"), codec.Lossless(model="separable")]
    for dtype, specs in ((F32, [*lossless, codec.Truncate(1)]), (np.float64, lossless), (np.float16, lossless[:1])):
        y = x.astype(dtype)
        for spec in specs:
            for some in (y, y[:3]):
                book = codec.Codebook.from_tensors(device.put(some), spec=spec)
                assert book == codec.Codebook.from_tensors(some, spec=spec)
    spec, metric, state = codec.Truncate(), optimizers.SGD(0.1), {"theta": x[::-1] * F32(0.1)}
    there = {name: device.put(array) for name, array in state.items()}
    ours = codec.Codebook.from_tensors(device.put(x), spec=spec.bind(metric, **there))
    assert ours == codec.Codebook.from_tensors(x, spec=spec.bind(metric, **state))


@by_cupy
def test_calls_do_not_synchronize(device):
    """Asynchronous calls do not synchronize: size and status stay on the device, and nothing is copied to the host."""
    x = np.random.default_rng(8).standard_normal(20_000, F32)
    nan = x.copy()
    nan[100] = np.nan
    for spec in (codec.Lossless(), codec.Sign(), codec.Float8(entropy=True), codec.Truncate(1)):
        frame = codec.encode(x, spec)
        out = device.put(np.zeros(codec.bound(x.shape, "float32", spec), np.uint8))
        pending = codec.encode_async(device.put(x), spec, out=out)
        assert (pending.nbytes.get(), pending.status.get()) == (len(frame), 0)
        if isinstance(spec, codec.Lossless | codec.Truncate):
            book = codec.Codebook.from_counts(pending.counts.get(), spec)
            assert book == codec.Codebook.from_tensors(x, spec=spec)
        assert bytes_of(pending.wait()) == bytes_of(out)[: len(frame)] == frame
        assert codec.inspect(out[: len(frame)]) == codec.inspect(frame)
        codec.verify(out[: len(frame)])
        pending = codec.encode_async(device.put(x), spec, out=out[:100])
        assert (pending.nbytes.get(), pending.status.get()) == (0, Status.SHORT_OUTPUT)
        with pytest.raises(codec.ArgumentError, match="bound"):
            pending.wait()
    pending = codec.encode_async(device.put(nan), codec.Sign(), out=out)
    assert pending.status.get() == Status.NONFINITE
    for wrong in (out[1:], np.zeros(100_000, np.uint8)):
        with pytest.raises(codec.CodecError, match="encode_async"):
            codec.encode_async(device.put(x), out=wrong)
    with pytest.raises(codec.EngineError, match="on a GPU"):
        codec.encode_async(x, out=wrong)


@by_cupy
def test_warmup_compiles_kernels(device):
    codec.warmup([codec.Sign(), codec.Lossless()], "float32", progress=False, options=codec.options(engine="cuda"))
    assert {"encode_rows<2>", "decode_rows<2>", "encode_lossless_fast<4>", "decode_lossless<4>"} <= set(device.launched)


@by_cupy
def test_custom_metrics_run_on_the_host(device):
    """Custom metrics run on the host, whether the optimizer state is on host or device."""
    x = gradient(9000)
    state = optimizer_state(9000)
    metric = [(0, optimizers.Custom(lambda theta, v: theta / (v + 1e-8) ** 0.5)), (5000, optimizers.SGD(0.1))]
    frame = codec.encode(x, TRUNCATES["truncate_shared"].bind(metric, **state))
    there = {name: device.put(array) for name, array in state.items()}
    ours = codec.encode(device.put(x), TRUNCATES["truncate_shared"].bind(metric, **there))
    assert bytes_of(ours) == frame
    expected = codec.decode(frame, codec.Truncate().bind(metric, **state)).tobytes()
    assert bytes_of(codec.decode(ours, codec.Truncate().bind(metric, **there))) == expected


@by_cupy
def test_number_of_launches(device):
    """Encoding needs at most 4 launches, and decoding 3 if errors must not change the destination.

    A batch needs as many, plus those of tensors that use other kernels.
    """
    xs = [device.put(np.random.default_rng(n).standard_normal(n, F32)) for n in (5, 600, 40_000, 513, 20_000)]
    codec.encode_many(xs)
    assert device.launched == ["choose_lossless", "encode_lossless_fast<4>", "close_frame"]
    device.launched.clear()
    frames = codec.encode_many([*xs[1:], *(device.put(np.ones(1000, np.int16)) for _ in range(3))])
    assert device.launched == ["choose_lossless", "encode_lossless<2>", "encode_lossless_fast<4>", "close_frame"]
    device.launched.clear()
    codec.decode_many(frames)
    assert device.launched == ["gather", "decode_lossless<2>", "decode_lossless_fast<4>"]
    x = device.put(np.random.default_rng(1).standard_normal(20_000, F32))
    groups = {"optimizer": [(0, optimizers.SGD(0.1)), (500, optimizers.SGD(0.2))], "state": {"theta": x}}
    with_feedback = {"residual": device.put(np.zeros(20_000, F32)), "feedback": True}
    shared = TRUNCATES["truncate_shared"]
    for spec, how, most in (
        (codec.Lossless(), {}, 3),
        (codec.Float8(), {}, 3),
        (codec.Sign(), {}, 4),
        (codec.Sign(), with_feedback, 4),
        (shared, groups | with_feedback, 4),
    ):
        device.launched.clear()
        frame = flatcall.encode(x, spec, **how)
        assert len(device.launched) == most
        device.launched.clear()
        flatcall.decode(frame, out=device.put(np.zeros(20_000, F32)), **groups if spec is shared else {})
        assert len(device.launched) == (3 if spec is shared else 2)


@on_cpu
def test_upload_is_limited_to_the_used_part_of_a_job(device):
    x = np.random.default_rng(7).standard_normal(20_000, F32)
    there = device.put(x)
    for spec in (codec.Lossless(), codec.Truncate(), *ROWS.values()):
        how = level_arguments(spec, len(x))
        how |= {"state": {key: device.put(v) for key, v in how["state"].items()}} if how else {}
        device.uploaded.clear()
        frame = flatcall.encode(there, spec, **how)
        assert 0 < sum(device.uploaded) < 800, spec
        device.uploaded.clear()
        codec.decode(frame)
        assert 0 < sum(device.uploaded) < 1100, spec
