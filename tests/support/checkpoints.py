"""State dicts of many kinds of tensors, and series of checkpoints that store changes."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

import codec.torch
from codec.checkpoints.chain import Checkpoint

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]


def state_of(step):
    """Return a state dict with tensors of many kinds, of which every step changes some values."""
    chance = torch.Generator().manual_seed(0)
    base = torch.randn(4000, generator=chance)
    moved = base * (1 + 1e-3 * step * (torch.arange(4000) % 7 == 0))
    big = torch.randn(1_100_000, generator=chance)  # more than one chunk of 4 MiB
    big[: 1000 * (step + 1)] += step
    tied = moved.clone()
    return {
        "floats": {str(dtype): moved.to(dtype) for dtype in FLOATS},
        "complex": torch.complex(moved, base),
        "bool": base > step / 10,
        "int8": torch.arange(3000).to(torch.int8) + step,
        "int64": torch.arange(3000) * (step + 1),
        "scalar": torch.tensor(step, dtype=torch.float32),
        "bfloat16 scalar": torch.tensor(step).bfloat16(),
        "empty": torch.empty(0, 3),
        "strided": moved.reshape(40, 100).t(),
        "constant": base,
        "tied": {"a": tied, "b": tied},
        "nan": torch.where(base > 1, torch.nan, moved),
        "big": big,
        "object": {"step": step, "text": "x" * 50 * step},
        "lr": [0.1 / (step + 1), None],
    }


def blank(x):
    """Return a state dict of the same structure, without the values."""
    if isinstance(x, torch.Tensor):
        return torch.full_like(x, 1) if x.numel() else torch.empty_like(x)
    if isinstance(x, dict):
        return {key: blank(value) for key, value in x.items()}
    return [blank(value) for value in x] if isinstance(x, list) else type(x)() if x is not None else None


def bits(x):
    """Return a state dict with the bytes of tensors, for comparisons to the bit."""
    if isinstance(x, torch.Tensor):
        return str(x.dtype), x.shape, x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(x, dict):
        return {key: bits(value) for key, value in x.items()}
    return [bits(value) for value in x] if isinstance(x, list) else x


def save(writer, folder, step, state=None):
    state = state_of(step) if state is None else state
    dcp.save(state, checkpoint_id=folder / str(step), storage_writer=writer, no_dist=True)


def loaded(folder, like):
    state = blank(like)
    dcp.load(state, storage_reader=codec.torch.checkpoint_reader(folder), no_dist=True)
    return state


def check(folder, step):
    expected = state_of(step)
    assert bits(loaded(folder / str(step), expected)) == bits(expected)


def depths(folder):
    return [Checkpoint(path).head.depth for path in sorted(folder.iterdir(), key=lambda path: int(path.name))]


def series(folder, steps, **how):
    writer = codec.torch.checkpoint_writer(folder, **({"full_every": 3} | how))
    for step in range(steps):
        save(writer, folder, step)
    return writer


def failure(folder, state=None):
    """Return the message of the error that loading a checkpoint raises."""
    with pytest.raises(CheckpointException) as caught:
        loaded(folder, state_of(0) if state is None else state)
    return str(caught.value)
