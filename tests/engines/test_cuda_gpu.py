"""Tests that need a real GPU: thousands of thread blocks at once, concurrent streams, CUDA graphs, torch tensors.

``make gpu-tests`` runs this file.
"""

import threading

import numpy as np
import pytest

import codec
from support.specs import LOSSY, MORE
from support.tensors import random_bits

pytestmark = pytest.mark.gpu

F32 = np.float32
SPECS = {
    "lossless": codec.Lossless(),
    "flat": codec.Lossless(model="flat"),
    "sign": codec.Sign(),
    "ternary": codec.Ternary("base3"),
    "ternary_entropy": codec.Ternary("entropy"),
    "quantize": codec.Quantize(4, 64),
    "float8": codec.Float8(),
    "float8_entropy": codec.Float8(entropy=True),
    "nvfp4": codec.Float4("nvfp4"),
    "truncate": codec.Truncate(1),
}


def values(shape, dtype):
    """Return values on the host whose rows have different scales, as in a gradient."""
    rng = np.random.default_rng(len(shape))
    x = rng.standard_normal(shape, F32) * np.exp(rng.standard_normal((shape[0], *[1] * (len(shape) - 1)), F32))
    return x if dtype == "float32" else (x.view(np.uint32) >> 16).astype(np.uint16)


def as_torch(x, dtype):
    """Return a torch tensor on the GPU with these bits."""
    import torch

    return torch.from_numpy(x.view(f"i{x.itemsize}")).cuda().view(getattr(torch, dtype)).reshape(x.shape)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SPECS)
def test_many_blocks_at_once(name, dtype):
    """With all multiprocessors on one tensor, ten runs give the native engine's frame and values."""
    import cupy

    spec = SPECS[name]
    for shape in ((16_384, 4_096), (40_000_003,)):
        x = values(shape, dtype)
        frame = np.frombuffer(codec.encode(codec.view(x, dtype), spec), np.uint8)
        there, right = cupy.array(x), cupy.array(frame)
        decoded = cupy.array(codec.decode(frame, like=x)) if name in ("lossless", "flat") else None
        for _ in range(10):
            ours = codec.encode(codec.view(there, dtype), spec)
            assert ours.nbytes == right.nbytes
            assert bool((ours == right).all())
            back = codec.decode(right, like=there if dtype == "float32" else cupy.empty(0, cupy.uint16))
            decoded = back if decoded is None else decoded
            assert bool((back.view(cupy.uint8) == decoded.view(cupy.uint8)).all())
        if name not in ("lossless", "flat"):
            assert decoded.get().tobytes() == codec.decode(frame, like=np.empty(0, x.dtype)).tobytes()


@pytest.mark.parametrize("name", ["lossless", "truncate", "float8_entropy"])
def test_frames_share_scratch_memory(name):
    """If warps of many frames must wait for scratch memory, frames and values still equal the native engine's."""
    import cupy

    spec, xs = SPECS[name], [values((1_024, 4_096 + 128 * i), "float32") for i in range(24)]
    for i, x in enumerate(xs):
        x[np.random.default_rng(i).random(x.shape) < 0.02 * i] = 0  # zeros, so that regions contain several planes
    frames = codec.encode_many(xs, spec)
    tensors = [codec.decode(frame, like=xs[0]) for frame in frames]
    there, ours = [cupy.array(x) for x in xs], [cupy.array(np.frombuffer(frame, np.uint8)) for frame in frames]
    for _ in range(10):
        assert [frame.get().tobytes() for frame in codec.encode_many(there, spec)] == frames
        for back, x in zip(codec.decode_many(ours), tensors, strict=True):
            assert back.get().tobytes() == x.tobytes()


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16"])
def test_more_than_2_31_values(dtype):
    """Tensors of more than 2^31 values are restored, which needs 64-bit offsets."""
    import cupy

    n = (1 << 31) + 5
    x = cupy.zeros(n, cupy.uint8 if dtype == "uint8" else cupy.uint16)
    x[-(1 << 20) :] = cupy.arange(1 << 20) % 251
    x[: 1 << 20] = cupy.arange(1 << 20) % 241
    frame = codec.encode(codec.view(x, dtype))
    assert frame.nbytes < n
    back = codec.decode(frame, like=x, max_nbytes=x.nbytes)
    assert bool((back == x).all())
    if dtype == "bfloat16":
        back.fill(1)
        codec.decode(codec.encode(codec.view(x, dtype), codec.Float8()), out=back, max_nbytes=x.nbytes)
        assert back.size == n
        assert not bool(back[1 << 21 : 1 << 22].any())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("spec", [codec.Lossless(), codec.Float8(), codec.Sign(), codec.Truncate(1)], ids=repr)
def test_torch_tensors(spec, dtype):
    """Frames and values of torch tensors equal the native engine's; results are torch tensors on the GPU."""
    import torch

    x = random_bits(dtype, 300_000, "normal").reshape(300, 1_000)
    frame = codec.encode(codec.view(x, dtype), spec)
    there = as_torch(x, dtype)
    ours = codec.encode(there, spec)
    assert isinstance(ours, torch.Tensor)
    assert ours.is_cuda
    assert ours.cpu().numpy().tobytes() == frame
    back = codec.decode(ours, like=there)
    assert (back.dtype, back.shape, back.device) == (there.dtype, there.shape, there.device)
    expected = codec.decode(frame, like=np.empty(0, x.dtype))
    assert back.view(torch.uint8).cpu().numpy().tobytes() == expected.tobytes()
    out = torch.zeros_like(there)
    assert codec.decode(ours, out=out) is out
    assert torch.equal(out, back)
    total = torch.ones(x.shape, device="cuda")
    codec.accumulate(ours, total, weight=0.5)
    host = np.ones(x.shape, F32)
    codec.accumulate(frame, host, weight=0.5)
    assert total.cpu().numpy().tobytes() == host.tobytes()
    assert codec.reduce([ours, ours]).cpu().numpy().tobytes() == codec.reduce([frame, frame]).tobytes()


def test_memory_beside_torch_tensors_comes_from_torch():
    """Memory comes from torch's allocator: a frame keeps only its own size, and torch can reuse scratch memory."""
    import cupy
    import torch

    x = torch.randn(1 << 24, device="cuda")
    codec.encode(x, codec.Sign())
    torch.cuda.synchronize()
    before, others = torch.cuda.memory_allocated(), cupy.get_default_memory_pool().used_bytes()
    frame = codec.encode(x, codec.Sign())
    assert torch.cuda.memory_allocated() - before < frame.numel() + 4096
    assert cupy.get_default_memory_pool().used_bytes() == others


def test_torch_streams():
    """A call waits for the work of torch's current stream, and later work of the stream waits for the call."""
    import torch

    x = torch.from_numpy(values((4_096, 4_096), "float32")).cuda()
    frame = codec.encode((2 * x).cpu().numpy(), codec.Float8())
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(20):
            y = x.clone()
            torch.cuda._sleep(1_000_000)
            y.mul_(2)
            ours = codec.encode(y, codec.Float8())
            y.zero_()
            assert ours.cpu().numpy().tobytes() == frame


@pytest.mark.parametrize("spec", [codec.Lossless(), codec.Float8(), codec.Sign()], ids=repr)
def test_graphs_of_torch(spec):
    """A captured encode encodes new values at replay, even if the engine's first use is in the capture."""
    import torch

    x = torch.zeros(512, 2_048, device="cuda")
    out = torch.zeros(codec.bound(x.shape, "float32", spec), dtype=torch.uint8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pending = codec.encode_async(x, spec, out=out)
    for seed in range(5):
        host = np.random.default_rng(seed).standard_normal(x.shape, F32)
        x.copy_(torch.from_numpy(host))
        graph.replay()
        torch.cuda.synchronize()
        frame = codec.encode(host, spec)
        assert int(pending.status.item()) == 0
        assert int(pending.nbytes.item()) == len(frame)
        assert out[: len(frame)].cpu().numpy().tobytes() == frame


def test_two_threads_with_a_stream_each():
    import cupy

    xs = [values((3_000, 1_024 + 512 * i), "float32") for i in range(2)]
    specs = [codec.Lossless(), codec.Float8(entropy=True)]
    frames = [codec.encode(x, spec) for x, spec in zip(xs, specs, strict=True)]
    wrong = []

    def work(i):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            there = cupy.array(xs[i])
            stream.synchronize()
            for _ in range(50):
                ours = codec.encode(there, specs[i])
                if ours.get().tobytes() != frames[i]:
                    wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_batches_of_many_tensors():
    """A batch of 200 tensors, one with 2^25 values, gives the native engine's frames and values."""
    import cupy

    rng = np.random.default_rng(0)
    xs = [rng.standard_normal(n, F32) for n in (*rng.integers(0, 60_000, 199), 1 << 25)]
    there = [cupy.array(x) for x in xs]
    for spec in (codec.Lossless(), *LOSSY.values(), *MORE.values()):
        if isinstance(spec, codec.Truncate) or getattr(spec, "scale", 0) not in (0, None, "l1", "l2", "two_mean"):
            continue
        frames = codec.encode_many(xs, spec)
        ours = codec.encode_many(there, spec)
        assert [a.get().tobytes() for a in ours] == frames, spec
        back = codec.decode_many(ours)
        assert all(a.get().tobytes() == b.tobytes() for a, b in zip(back, codec.decode_many(frames), strict=True)), spec
