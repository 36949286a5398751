"""Stream extension of torch.distributed.checkpoint: compressed streams, and FSDP2 checkpoints on other rank counts."""

import io
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import codec
import codec.torch
from codec.checkpoints import streams
from codec.torch.saving import stream
from support.fsdp_training import batch, small_model
from support.ranks import run_ranks
from support.tiers import nightly

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
CHUNK = streams.CHUNK


def written(data, sizes=(CHUNK,)):
    """Write `data` to a FrameStream in pieces of random `sizes`, and return the compressed bytes."""
    output, chance = io.BytesIO(), random.Random(0)
    with stream.FrameStream().transform_to(output) as writer:
        rest = memoryview(data)
        while rest:
            rest = rest[writer.write(rest[: chance.choice(sizes)]) :]
    return output.getvalue()


def read(frames):
    return stream.FrameStream().transform_from(io.BytesIO(frames)).read(-1)


@pytest.mark.parametrize("n", [0, 1, 1001, CHUNK - 1, CHUNK, 2 * CHUNK + 3])
def test_streams_restore_bytes_written_in_any_pieces(n):
    data = np.random.default_rng(0).integers(0, 200, n, np.uint8).tobytes()
    frames = written(data, (1, 999, 100_000, 3 << 20))
    assert read(frames) == data
    reader, found = stream.FrameStream().transform_from(io.BytesIO(frames)), b""
    while more := reader.read(77_777):
        found += more
    assert found == data
    for cut in {0, 30, 56, len(frames) - 56, len(frames) - 1} - {len(frames)}:
        with pytest.raises(codec.FrameError):
            read(frames[:cut])


@pytest.mark.parametrize(("dtype", "ratio"), [("float32", 0.85), ("bfloat16", 0.68), ("int64", 0.3), ("float64", 0.95)])
def test_dtype_of_a_tensor_is_guessed(dtype, ratio):
    values = torch.arange(200_000) if dtype == "int64" else torch.randn(200_000).to(getattr(torch, dtype))
    file = io.BytesIO()
    torch.save(values, file)
    assert len(written(file.getvalue())) < ratio * values.nbytes


def test_frames_of_other_kinds_are_refused():
    x = np.zeros(4000, np.uint8)
    delta = codec.encode(x, codec.Delta(), base=x + 1)
    for frame in (b"", b"abc" * 100, codec.encode(np.zeros((3, 3))), codec.encode(np.zeros(2 << 20)), delta):
        with pytest.raises(codec.FrameError):
            read(frame)
    with pytest.raises(codec.ArgumentError, match="streams of version '3', but this library reads version '1'"):
        stream.FrameStream.from_descriptor("3")


def test_checkpoint_is_smaller_and_damage_is_an_error(tmp_path):
    torch.manual_seed(0)
    state = {"w": torch.randn(300, 300).bfloat16(), "lr": 0.1, "step": torch.tensor(3), "none": torch.empty(0)}
    dcp.save(state, storage_writer=codec.torch.checkpoint_writer(tmp_path / "a"), no_dist=True)
    dcp.save(state, checkpoint_id=tmp_path / "b", no_dist=True)
    for folder in ("a", "b"):
        loaded = {k: torch.zeros_like(v) if isinstance(v, torch.Tensor) else 0 for k, v in state.items()}
        dcp.load(loaded, storage_reader=codec.torch.checkpoint_reader(tmp_path / folder), no_dist=True)
        assert all(loaded[k] == v if k == "lr" else torch.equal(loaded[k], v) for k, v in state.items())
    a, b = (next(Path(tmp_path / folder).glob("*.distcp")) for folder in ("a", "b"))
    assert a.stat().st_size < 0.7 * b.stat().st_size
    damaged = bytearray(a.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    a.write_bytes(damaged)
    with pytest.raises(dcp.CheckpointException, match="ChecksumError"):
        dcp.load(loaded, storage_reader=codec.torch.checkpoint_reader(tmp_path / "a"), no_dist=True)


def _sharded(rank, steps=1):
    net = small_model()
    fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for _ in range(steps):  # the first step creates the optimizer's state
        net(batch(rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


def _full(net, optimizer):
    """Return all parameters and optimizer moments as unsharded tensors."""
    tensors = [p.full_tensor() for p in net.parameters()]
    return tensors + [optimizer.state[p]["exp_avg_sq"].full_tensor() for p in net.parameters()]


def _save(rank, size, folder):
    net, optimizer = _sharded(rank, 3)
    model, state = get_state_dict(net, optimizer)
    dcp.save({"model": model, "optimizer": state}, storage_writer=codec.torch.checkpoint_writer(folder))
    return [t.detach() for t in _full(net, optimizer)]


def _load(rank, size, folder):
    net, optimizer = _sharded(rank)
    model, state = get_state_dict(net, optimizer)
    dcp.load({"model": model, "optimizer": state}, storage_reader=codec.torch.checkpoint_reader(folder))
    set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=state)
    assert dist.get_world_size() == size
    return [t.detach() for t in _full(net, optimizer)]


@pytest.mark.parametrize("sizes", [(1, 2), nightly((2, 3)), nightly((2, 4)), nightly((4, 2))])
def test_state_of_fsdp2_is_loaded_by_another_number_of_ranks(sizes, tmp_path):
    before, after = sizes
    saved = run_ranks(before, _save, str(tmp_path))
    loaded = run_ranks(after, _load, str(tmp_path))
    for tensors in loaded:
        assert all(torch.equal(a, b) for a, b in zip(tensors, saved[0], strict=True))
