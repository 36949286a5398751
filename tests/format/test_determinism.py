"""Frames are bit-identical for all instruction sets, thread counts and addresses, and decode by docs/spec/format.md."""

import os
import subprocess
import sys

import numpy as np
import pytest

import codec
from codec._c import pool
from codec._c.library import isas, use_isa
from codec.engines import blockwise
from codec.engines.native import encoding
from reference import decoder as oracle
from support import flatcall
from support.specs import LOSSY, TOPKS, TRUNCATES
from support.tensors import ALL_DTYPES, KINDS, random_bits

PYTHON = (sys.executable, "-P", "-W", "ignore", "-c")  # -P: ignore the working directory


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_reference_decoder_reads_every_frame(dtype):
    for kind in KINDS:
        for n in (0, 3, 600, 5000, 20000):
            x = random_bits(dtype, n, kind)
            name, shape, data = oracle.decode(bytes(codec.encode(codec.view(x, dtype))))
            assert (name, shape, data) == (dtype, (n,), x.tobytes())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_reference_decoder_reads_scale_models(dtype):
    x = random_bits(dtype, 24000, "mixed")
    for spec in (codec.Lossless(), codec.Lossless(model="separable"), codec.Lossless(max_code_length=4)):
        for segments in (None, [(100, (100, 90)), (9100, (130, 80)), (19500, (7,))]):
            frame = bytes(codec.encode(codec.view(x, dtype, segments=segments), spec))
            assert oracle.decode(frame)[2] == x.tobytes()
        square = x[:22500].reshape(150, 150)
        assert oracle.decode(bytes(codec.encode(codec.view(square, dtype), spec)))[2] == square.tobytes()


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_instruction_sets_decode_to_the_same_bytes(dtype):
    """All instruction sets decode to the same bytes; test_encoder_rules.py compares their frames."""
    for kind in KINDS:
        for n in (513, 5000, 40000):
            x = random_bits(dtype, n, kind)
            frame = codec.encode(codec.view(x, dtype))
            for isa in isas():
                with use_isa(isa):
                    assert codec.decode(frame, out=np.empty_like(x)).tobytes() == x.tobytes()


def test_every_length_and_offset_in_a_cache_line(isa):
    """Frames are identical for lengths up to 1,024 (up to 512 values are stored), at every offset in a cache line."""
    memory = random_bits("bfloat16", 2048, "normal")
    raw = np.empty(memory.nbytes + 64, np.uint8)
    for n in range(1025):
        shift = n % 64
        raw[shift : shift + 2 * n] = memory[:n].view(np.uint8)
        moved = raw[shift : shift + 2 * n].view(np.uint16)
        frame = codec.encode(codec.view(memory[:n], "bfloat16"))
        assert codec.encode(codec.view(moved, "bfloat16")) == frame
        unaligned = np.empty(len(frame) + 64, np.uint8)
        unaligned[shift : shift + len(frame)] = np.frombuffer(frame, np.uint8)
        out = raw[(shift + 1) % 64 :][: 2 * n].view(np.uint16)
        codec.decode(unaligned[shift : shift + len(frame)], out=out)
        assert (out == memory[:n]).all()


@pytest.mark.parametrize("shape", [(1100, 64), (1030, 6001), (3, 1500, 333), (600_000,)])
@pytest.mark.parametrize("codec_", ["lossless", "truncate"])
def test_threads_give_the_same_scale_models(shape, codec_):
    """Scale models do not depend on the thread count, also where threads compute the offsets of unsampled rows."""
    rng = np.random.default_rng(4)
    x = rng.standard_normal(shape, np.float32) * np.exp(3 * rng.standard_normal((*shape[:-1], 1), np.float32))
    spec = codec.Lossless(model="separable") if codec_ == "lossless" else codec.Truncate(level=1)
    frame = codec.encode(x, spec, options=codec.options(threads=1))
    assert codec.inspect(frame).nsegments == 1 or codec_ == "truncate"
    for threads in (2, 3, 5):
        assert codec.encode(x, spec, options=codec.options(threads=threads)) == frame
    y = codec.decode(frame)
    assert y.tobytes() == x.tobytes() or (codec_ == "truncate" and np.allclose(x, y, rtol=2.0**-15))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "uint8", "int32"])
def test_threads_give_the_same_bytes(dtype, isa):
    for kind in KINDS:
        x = random_bits(dtype, 300_000, kind)
        frame = codec.encode(codec.view(x, dtype), options=codec.options(threads=1))
        for threads in (2, 3, 16):
            assert codec.encode(codec.view(x, dtype), options=codec.options(threads=threads)) == frame
            assert (
                codec.decode(frame, out=np.empty_like(x), options=codec.options(threads=threads)).tobytes()
                == x.tobytes()
            )
        exact = np.empty(len(frame), np.uint8)
        assert codec.encode(codec.view(x, dtype), out=exact, options=codec.options(threads=4)) == frame


@pytest.mark.parametrize("spec", [codec.Lossless(), *LOSSY.values(), *TOPKS.values(), *TRUNCATES.values()], ids=repr)
def test_every_codec_uses_all_threads(spec, monkeypatch):
    """Every codec uses all threads, unless the frame would be larger than the tensor."""
    x = np.random.default_rng(0).standard_normal(300_001).astype(np.float32)
    how = {"optimizer": codec.optimizers.SGD(1e-6), "state": {"theta": x}} if isinstance(spec, codec.Truncate) else {}
    frame = flatcall.encode(x, spec, threads=1, **how)
    monkeypatch.delattr(encoding, "_encode_one")
    assert flatcall.encode(x, spec, threads=3, **how) == frame
    exact = np.empty(codec.bound(x.shape, "float32", spec), np.uint8)
    assert flatcall.encode(x, spec, out=exact, threads=3, **how) == frame


def test_all_threads_encode_to_out_of_the_size_that_bound_returns(monkeypatch):
    """Side section and directory leave less than the maximum size of a region to each block of a large tensor."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((1 << 15, 64)) * np.exp(rng.standard_normal((1 << 15, 1)))).astype(np.float16)
    frame, counts, run = codec.encode(x), [], pool.run
    monkeypatch.setattr(pool, "run", lambda task, count, threads: counts.append(count) or run(task, count, threads))
    out = np.empty(codec.bound(x.shape, x.dtype), np.uint8)
    assert codec.encode(x, out=out, options=codec.options(threads=2)) == frame
    assert counts == [8, 8]  # pieces of the sample, and ranges of blocks


@pytest.mark.parametrize("spec", [codec.Lossless(), codec.Delta(), LOSSY["float8_entropy"], TOPKS["topk_2"]], ids=repr)
def test_ranges_of_blocks_may_be_encoded_in_any_order(spec, monkeypatch):
    """Frame and residual are equal if regions are written to buffers, to slots of the frame, or to their places."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal(1 << 19).astype(np.float32)
    ways = set()

    def encode(threads, capacity=None):
        how = {"base": np.where(x < 2, x, 0)} if isinstance(spec, codec.Delta) else {}
        if not isinstance(spec, (codec.Lossless, codec.Delta)):
            how["residual"] = np.zeros_like(x)
        out = None if capacity is None else np.empty(capacity, np.uint8)
        frame = flatcall.encode(x, spec, threads=threads, out=out, **how)
        return bytes(frame), how.get("residual", x).tobytes()

    def in_order(order):
        def run(task, count, _):
            results = [None] * count
            for i in order(count):
                results[i] = task(i, 0)
            return results

        return run

    class Watched(blockwise._Regions):
        def begin(self, i):
            slot = self.ranges[i].at
            super().begin(i)
            ways.add("buffer" if self.ranges[i].buffer else "slot" if self.ranges[i].at == slot else "place")

    monkeypatch.setattr(blockwise, "_Regions", Watched)
    expected = encode(1)
    for capacity in (None, codec.bound(x.shape, "float32", spec)):
        ways.clear()
        for order in (lambda n: range(n)[::-1], lambda n: [*range(1, n, 2), *range(0, n, 2)], rng.permutation):
            monkeypatch.setattr(pool, "run", in_order(order))
            assert encode(2, capacity) == expected
        assert ways == {"buffer", "slot", "place"}


def test_codec_isa_chooses_the_instruction_set():
    code = "import codec, numpy as np; print(codec.encode(np.arange(9999, dtype=np.float32)).hex())"
    frames = set()
    for isa in isas():
        env = {**os.environ, "CODEC_ISA": isa}
        frames.add(subprocess.run([*PYTHON, code], env=env, capture_output=True, check=True).stdout)
    assert len(frames) == 1
    bad = subprocess.run([*PYTHON, code], env={**os.environ, "CODEC_ISA": "mmx"}, capture_output=True, check=False)
    assert b"EngineError: CODEC_ISA: instruction set 'mmx'" in bad.stderr
    for chosen in ("None", "'scalar'"):
        script = f"import codec; from codec._c.library import use_isa; use_isa({chosen}); {code}"
        env = {**os.environ, "CODEC_ISA": "mmx"}
        frames.add(subprocess.run([*PYTHON, script], env=env, capture_output=True, check=True).stdout)
    assert len(frames) == 1
    # importing with an unknown instruction set succeeds; the first use fails
    subprocess.run([*PYTHON, "import codec"], env={**os.environ, "CODEC_ISA": "mmx"}, check=True)


@pytest.mark.torch
def test_flush_denormal_does_not_change_results():
    import torch

    x = np.concatenate([random_bits("float32", 5000, "normal"), np.arange(5000, dtype=np.uint32)])
    frame = codec.encode(codec.view(x, "float32"))
    torch.set_flush_denormal(True)
    try:
        assert codec.encode(codec.view(x, "float32")) == frame
        assert codec.decode(frame).tobytes() == x.tobytes()
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("spec", [codec.Lossless(), codec.Truncate(0)], ids=repr)
def test_every_half_precision_pattern_converts_to_the_same_float32(dtype, spec):
    """All 65,536 half-precision patterns, signaling NaNs included, convert alike on every instruction set."""
    x = np.arange(1 << 16, dtype=np.uint16)
    frame = codec.encode(codec.view(x, dtype), spec)
    results = []
    for isa in isas():
        with use_isa(isa):
            results += [codec.reduce([frame], op="sum").tobytes(), codec.reduce([frame, frame], op="max").tobytes()]
    assert len(set(results)) == 1
    y = np.frombuffer(results[0], np.float32)
    stored = codec.decode(frame, like=x)
    exact = (
        stored.view(np.float16).astype(np.float32)
        if dtype == "float16"
        else (stored.astype(np.uint32) << 16).view(np.float32)
    )
    assert (np.isnan(y) == np.isnan(exact)).all()
    assert (y[~np.isnan(y)] == exact[~np.isnan(y)]).all()
