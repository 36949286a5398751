"""The CUDA engine limits scratch memory, needs few launches, and does not depend on the order of blocks or threads."""

import weakref

import numpy as np
import pytest

import codec
from codec.decoding import decode_request
from codec.encoding import encode_request
from codec.engines.cuda import DeferredCalls, scratch, workspace
from codec.engines.cuda.kernels import KERNELS
from codec.engines.cuda.workspace import CallMemory
from codec.tensors.view import view
from support import flatcall
from support.cuda_calls import BUCKET, both_outcomes, bytes_of, encode, like, on_cpu
from support.device import DeviceArray, Emulated, Unlaunched, build, use
from support.engine_comparison import level_arguments, sample_bits
from support.sample_frames import FRAMES_TO_DAMAGE
from support.tensors import gradient, random_bits
from support.tiers import nightly

pytestmark = pytest.mark.usefixtures("device")

F32 = np.float32


@on_cpu
def test_batches_of_different_sizes_in_any_block_order(device, monkeypatch):
    """Batches of different sizes give the same frames in any block order: blocks beyond a tensor's end do nothing."""
    monkeypatch.setenv("CUDA_ON_CPU_ORDER", "down")
    rng = np.random.default_rng(6)
    xs = [rng.standard_normal(n, F32) for n in (600, 150_000, 5000, 1, 20_000)]
    for spec in (codec.Lossless(), codec.Sign(), codec.Float8(entropy=True), codec.Quantize(4), codec.Truncate(1)):
        frames = [codec.encode(x, spec, stream=i << 32) for i, x in enumerate(xs)]
        assert codec.encode_many(xs, spec, options=codec.options(engine="cuda")) == frames
        there = [device.put(np.frombuffer(frame, np.uint8)) for frame in frames]
        assert list(map(bytes_of, codec.decode_many(there))) == [codec.decode(frame).tobytes() for frame in frames]


SCRATCHED = {  # codecs that need scratch memory
    "lossless": codec.Lossless(),
    "float8": codec.Float8(entropy=True),
    "trits": codec.Ternary("base3"),
    "ternary": codec.Ternary("entropy"),
    "truncate": codec.Truncate(1),
    "joint": codec.Truncate(level_coding="coded"),
    "topk": codec.TopK(1 / 4, chunk=64),
}


@on_cpu
# Limits of scratch memory, in bytes, with which one warp (the minimum), some warps, or most warps run at once
@pytest.mark.parametrize("nbytes", [nightly(1), 400_000, nightly(1_500_000)])
@pytest.mark.parametrize("workers", [1, nightly(4)])
def test_warps_wait_for_scratch_memory(nbytes, workers, monkeypatch):
    """With fewer scratch units than warps, warps wait, results are unchanged, and all units are returned."""
    device = Emulated(build(options=[f"-DCUDA_ON_CPU_WORKERS={workers}"] if workers > 1 else []), 3)
    use(monkeypatch, device)
    monkeypatch.setattr(scratch, "MAX_SCRATCH", nbytes)
    rng = np.random.default_rng(nbytes)
    xs = [rng.standard_normal(n, F32) * (rng.random(n) > zeros) for n, zeros in ((90_000, 0.1), (600, 0), (70_000, 0))]
    for spec in SCRATCHED.values():
        how = [level_arguments(spec, len(x)) for x in xs]
        frames = [
            flatcall.encode(x, spec, stream=i << 32, **levels)
            for i, (x, levels) in enumerate(zip(xs, how, strict=True))
        ]
        there = [device.put(np.frombuffer(frame, np.uint8)) for frame in frames]
        assert list(map(bytes_of, codec.decode_many(there))) == [codec.decode(frame).tobytes() for frame in frames]
        if not any(how):
            assert codec.encode_many(xs, spec, options=codec.options(engine="cuda")) == frames
            continue
        for x, levels, frame in zip(xs, how, frames, strict=True):
            assert flatcall.encode(device.put(x), spec, **levels).get().tobytes() == frame


class Counted(Unlaunched):
    """Device that launches nothing, and counts allocated bytes that have not been released."""

    live = peak = 0

    def allocate(self, nbytes, like):
        address, memory = _NOWHERE, type("Memory", (), {})()
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(memory, self.release, nbytes)
        return address, memory

    def release(self, nbytes):
        self.live -= nbytes


_NOWHERE = 1 << 20  # fake address, which is never accessed
PEAKS = {  # by spec: maximum MB of scratch memory on a GPU with 132 multiprocessors, all of them in use
    "lossless": (codec.Lossless(), 88),
    "bfloat16": (codec.Lossless(), 106),
    "truncate": (codec.Truncate(1), 140),
    "float8_entropy": (codec.Float8(entropy=True), 180),
    "trits": (codec.Ternary("base3"), 3),
    "float8": (codec.Float8(), 0),
    "quantize": (codec.Quantize(4), 0),
    "sign": (codec.Sign(), 0),
    "ternary": (codec.Ternary(), 0),
}


@on_cpu
@pytest.mark.parametrize("name", PEAKS)
def test_scratch_memory_does_not_grow_with_the_number_of_tensors(name, library, monkeypatch):
    """A batch needs as much scratch memory as one large tensor, and pending frames keep none."""
    spec, most = PEAKS[name]
    device = Counted(library, 132)
    use(monkeypatch, device)
    dtype = "bfloat16" if name == "bfloat16" else "float32"
    x = codec.view(DeviceArray(np.empty((1 << 13, 1 << 13), like(dtype).dtype)), dtype)
    out = DeviceArray(np.empty(codec.bound((1 << 13, 1 << 13), dtype, spec), np.uint8))
    pending = codec.encode_async(x, spec, out=out)
    one, kept = device.peak, device.live
    assert one <= most * 1_000_000 + kept
    assert kept < 1 << 20  # bytes kept: arguments, decisions and results
    more = [codec.encode_async(x, spec, out=out) for _ in range(20)]
    assert device.peak <= one + 20 * kept
    del pending, more
    assert device.live == 0
    device.capturing = lambda: True
    pending = codec.encode_async(x, spec, out=out)  # a captured graph keeps its scratch memory
    assert device.live == one
    del pending
    assert device.live == 0
    device.peak, device.capturing = 0, lambda: False
    codec.encode_many([x] * 50, spec)
    assert device.peak <= most * 1_000_000 + 50 * (1 << 20)


@on_cpu
def test_deferred_calls_keep_no_scratch_memory(library, monkeypatch):
    """Deferred calls keep only arguments and results, no scratch memory, until their verdicts are read."""
    spec, device, noted = codec.Truncate(1), Counted(library, 132), []
    use(monkeypatch, device)
    values = gradient((1 << 20,))
    frame = codec.encode(values, spec, options=codec.options(engine="native"))
    x, out, residual, there = (
        DeviceArray(a)
        for a in (values, np.empty(2 * values.nbytes, np.uint8), values.copy(), np.frombuffer(frame, np.uint8))
    )
    calls, how = DeferredCalls(lambda *nbytes: noted.append(nbytes)), codec.options(engine="cuda")
    for i in range(1, 21):
        calls.encode_many([encode_request(x, spec, how, out, residual, feedback=True)])
        # This call's scratch memory in bytes: 3.2 MB for warps, the rest for the sum tensor + residual
        assert noted[-1][1] > 11_000_000
        decode = decode_request((view(there),), None, how, x)._replace(head=view(np.frombuffer(frame, np.uint8)))
        calls.decode_many([decode])
        assert noted[-1][1] > 2_000_000
        assert sum(kept for kept, _ in noted) < i * (1 << 18)
        assert device.live < i * (1 << 18)
    del calls
    assert device.live == sum(kept for kept, _ in noted) == 0


@on_cpu
def test_batches_of_unlike_sizes_start_few_idle_thread_blocks(library, monkeypatch):
    device, launched = Counted(library, 132), []
    use(monkeypatch, device)
    monkeypatch.setattr(device, "launch", lambda kernel, grid, *_: launched.append((kernel, *grid)))
    large, small = (codec.view(DeviceArray(np.empty(n, np.uint32)), "float32") for n in (1 << 26, 600))
    codec.encode_many([small] * 100 + [large] + [small] * 99, codec.Float8())
    for kernel in {kernel for kernel, _, _ in launched}:
        own = [grid for name, *grid in launched if name == kernel]
        assert sum(count for _, count in own) == 200
        assert len(own) == 2
        assert sum(x * y for x, y in own) < 3 * 4096  # thread blocks; a single launch would need 105,600


@on_cpu
def test_batches_of_several_launches(device, monkeypatch):
    """Tensors with different grids get separate launches."""
    monkeypatch.setattr(workspace, "MAX_IDLE", 0)
    monkeypatch.setattr(device, "processors", 3)
    rng = np.random.default_rng(0)
    for spec in (codec.Lossless(), codec.Float8(), codec.Sign()):
        xs = [rng.standard_normal(n, F32) for n in (600, 150_000, 70_000, 20_000, 300_000, 600)]
        frames = codec.encode_many(xs, spec)
        device.launched.clear()
        there = codec.encode_many([device.put(x) for x in xs], spec)
        assert device.launched.count("close_frame") > 1
        assert list(map(bytes_of, there)) == frames
        assert list(map(bytes_of, codec.decode_many(there))) == [codec.decode(frame).tobytes() for frame in frames]


@on_cpu
@pytest.mark.parametrize("kernel", [name for name in KERNELS if name.startswith(("encode_", "decode_"))])
def test_scratch_memory_of_a_call_is_limited(kernel, library):
    device = Counted(library, 132)
    most = [
        scratch.WarpScratch(CallMemory(device, 0), [(KERNELS[kernel], 528, scratch.Need(nbytes, units))] * frames)
        for nbytes, units in ((33_152, 9), (82_560, 1), (66_176, 1))
        for frames in (1, 1000)
    ]
    assert all(4 * 528 * 33_152 <= s.nbytes <= 300_000_000 for s in most)


@on_cpu
@pytest.mark.nightly  # nightly: compiles the kernels once more
def test_thread_blocks_in_parallel(monkeypatch):
    """Results are correct if thread blocks wait for values of blocks that run in parallel or have not begun."""
    use(monkeypatch, Emulated(build(options=["-DCUDA_ON_CPU_WORKERS=4"]), 2))
    x = sample_bits("bfloat16", 200_000, "normal")
    y = random_bits("float64", 100_000, "normal")
    how = level_arguments(codec.Truncate(), len(x))
    cases = [(x, codec.Lossless(), "bfloat16", {}), (x, codec.Lossless(), "bfloat16", {"segments": BUCKET})]
    cases += [(y, codec.Lossless(), "float64", {}), (x, codec.Truncate(), "bfloat16", how)]
    cases += [(x, spec, "bfloat16", {}) for spec in (codec.Ternary("entropy"), codec.Sign(), codec.TopK())]
    for values, spec, dtype, how in cases:
        frame = bytes(flatcall.encode(values, spec, dtype=dtype, **how))
        for _ in range(20):
            assert encode(values, spec, dtype, **how) == frame, spec
            ours, native = both_outcomes(frame, dtype)
            assert ours == native, spec


@on_cpu
@pytest.mark.parametrize("order", ["down", "3", "17"])
def test_any_order_of_threads(order, monkeypatch):
    """Results do not depend on the order in which threads run between collective operations."""
    monkeypatch.setenv("CUDA_ON_CPU_ORDER", order)
    for name, (frame, dtype, _, how) in FRAMES_TO_DAMAGE.items():
        ours, native = both_outcomes(frame, dtype, **how)
        assert ours == native, name


@on_cpu
@pytest.mark.parametrize("order", ["up", "down", "3", "17"])
def test_scale_models_in_any_order_of_threads(order, monkeypatch):
    """Scale models do not depend on the order of threads, neither for offsets of many rows nor in the sample."""
    monkeypatch.setenv("CUDA_ON_CPU_ORDER", order)
    powers = np.ldexp(1.0, np.random.default_rng(0).integers(-20, 20, (1040, 1))) * np.ones((1040, 160))
    for x, spec in (
        (np.ones((1040, 160)), codec.Lossless(model="separable")),
        (powers, codec.Lossless()),
        (powers.astype(F32), codec.Lossless(model="separable")),
        (powers.astype(F32), codec.Truncate(1)),
        *((powers.astype(F32), spec) for spec in (codec.Sign(), codec.Float8(group_size=64), codec.Ternary("base3"))),
    ):
        frame = codec.encode(x, spec)
        assert encode(x, spec, str(x.dtype)) == frame
        if not isinstance(spec, codec.Lossless):
            frames = [frame] * 3
            assert (
                codec.reduce(frames, options=codec.options(engine="cuda")).tobytes() == codec.reduce(frames).tobytes()
            )
