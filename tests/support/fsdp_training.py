"""A small model and its data for tests of FSDP2."""

import copy

import torch
from torch import nn


def small_model():
    """Return a model of three linear layers, the same on all ranks."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(60, 150), nn.ReLU(), nn.Linear(150, 90), nn.ReLU(), nn.Linear(90, 7))


def batch(rank):
    """Return the inputs of a rank."""
    return torch.randn(16, 60, generator=torch.Generator().manual_seed(50 + rank))


def gradients_of(net, size, dtype=torch.float32):
    """Return, for each parameter, the list of gradients that ranks compute, all computed in this process."""
    found = []
    for rank in range(size):
        here = copy.deepcopy(net).to(dtype)
        here(batch(rank).to(dtype)).square().mean().backward()
        found.append([p.grad for p in here.parameters()])
    return list(zip(*found, strict=True))


def mean(tensors):
    """Return the mean of tensors, added in float32 in the given order."""
    total = tensors[0].float()
    for t in tensors[1:]:
        total = total + t.float()
    return total / len(tensors)


def module_residuals(state, rank):
    """Return the worker residuals in the state of a collective, by module name."""
    worker = state[f"rank {rank}"][0]["residuals"].get("worker", {})
    return {name.rpartition("[")[0]: x for name, x in worker.items() if torch.is_tensor(x)}
