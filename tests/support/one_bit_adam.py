"""Small models, training steps and state comparisons for tests of OneBitAdam."""

import torch
from torch import nn

import codec
import codec.torch
from codec.torch.feedback.checkpoint import unpacked
from support.ddp_training import data

SIGN = codec.Sign(group_size=64)
OPTIONS = codec.options(algorithm="two_shot")
FREEZE, STEPS = 4, 9
LOSSLESS = {"spec": codec.Lossless()}


def batch(rank, step, n=32):
    return torch.randn(16, n, generator=torch.Generator().manual_seed(100 * step + rank))


def layers(n=3):
    """Return layers of 32 x 32 weights, the same on all ranks."""
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(32, 32) for _ in range(n))


class Chain(nn.Module):
    """Chain of layers; a forward pass uses only the layers with indices `used`, like experts."""

    def __init__(self, n=3):
        super().__init__()
        self.layers = layers(n)

    def forward(self, x, used=None):
        for i in range(len(self.layers)) if used is None else used:
            x = self.layers[i](x)
        return x.square().mean()


def registered(model, *, register=None, **how):
    how = {"freeze_step": 3, "spec": codec.Lossless(), "weight_decay": 0.1} | how
    optimizer = codec.torch.OneBitAdam(model.parameters(), 1e-2, **how)
    return optimizer.register(model, options=OPTIONS, **(register or {}))


def loss_of(model, rank, step):
    """Return the loss of a `ddp_training.net` model for the batch of `rank` in `step`."""
    x, y = data(rank, step)
    return nn.functional.cross_entropy(model(x), y)


def take_step(model, optimizer, rank, step):
    optimizer.zero_grad()
    loss_of(model, rank, step).backward()
    optimizer.step()


def residuals_of(state):
    """Return the states of the hooks in a state dict, by rank."""
    entry = state["param_groups"][0]["one_bit"]
    size = entry["ranks"]
    return {r: unpacked(entry[f"rank {r} of {size}"]) for r in range(size) if f"rank {r} of {size}" in entry}


def with_entry(state, **changes):
    """Return a copy of `state` with changed values in its entry ``one_bit``; a change to None removes the value."""
    first, *others = state["param_groups"]
    entry = {k: v for k, v in (first["one_bit"] | changes).items() if v is not None}
    return state | {"param_groups": [first | {"one_bit": entry}, *others]}


def plain(state):
    """Return a state with its tensors as bytes, so that states can be compared with ==."""
    if isinstance(state, dict):
        return {k: plain(v) for k, v in state.items()}
    if isinstance(state, list | tuple):
        return [plain(v) for v in state]
    return (str(state.dtype), tuple(state.shape), state.numpy().tobytes()) if torch.is_tensor(state) else state


def take_steps(model, optimizer, rank, first, last):
    for step in range(first, last):
        take_step(model, optimizer, rank, step)


def optimizer_of(model, **how):
    how = {"freeze_step": FREEZE, "spec": codec.Sign(group_size=64), "warmup": codec.Quantize(4)} | how
    return codec.torch.OneBitAdam(model.parameters(), 1e-3, weight_decay=0.01, **how)
