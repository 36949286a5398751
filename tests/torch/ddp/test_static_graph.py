"""Models with static_graph=True, whose first backward pass gives all buckets index 0."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import codec
import codec.torch
from support.ddp_training import ENCODE_ALL
from support.ranks import run_ranks


class Kinds(nn.Module):
    """Layers whose gradients are sparse, bfloat16, float64 and float32: a first backward pass of four buckets."""

    def __init__(self, sparse):
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(10, 8, sparse=sparse)
        kinds = (torch.bfloat16, torch.float64, torch.float32, torch.bfloat16)
        self.layers = nn.ModuleList(nn.Linear(8, 8, dtype=kind) for kind in kinds)
        self.spare = nn.Linear(8, 8)

    def forward(self, rank, step):
        x = self.embedding((torch.arange(4) + step + rank) % 10)
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x.float().square().sum()


def wrapped(sparse=True):
    return DistributedDataParallel(Kinds(sparse), static_graph=True, bucket_cap_mb=0.0003)


def _hooked(rank, size, how):
    """Train losslessly, without and with the hook, registered by codec or by torch."""
    found, fails = [], []

    def transform(buffer, gradients):
        if fails and rank and len(gradients) > 2:
            raise OSError("this rank fails")

    for hooked in (False, True):
        model = wrapped()
        if how == "frozen":
            model.module.layers[1].requires_grad_(False)
        hook = codec.torch.ddp_hook(codec.Lossless(), policy=ENCODE_ALL, transform=transform)
        if hooked and how == "torch":
            model.register_comm_hook(None, hook)
        elif hooked:
            hook.register(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(3):
            if hooked and how == "error" and step < 2:
                fails.append(step)
                with pytest.raises(OSError if rank else codec.PeerError, match="fail"):
                    model(rank, step).backward()
                fails.clear()
            optimizer.zero_grad()
            model(rank, step).backward()
            optimizer.step()
        found.append([p.float().tolist() for p in model.parameters()])
    assert hook.stats().steps == 3
    assert found[0] == found[1]


@pytest.mark.parametrize("how", ["codec", "torch", "frozen", "error"])
def test_first_backward_pass_may_have_several_buckets(how):
    run_ranks(2, _hooked, how)


def _one_bit_adam(rank, size, clips):
    found = []
    for static in (False, True):
        model = wrapped(sparse=False) if static else DistributedDataParallel(Kinds(False), find_unused_parameters=True)
        optimizer = codec.torch.OneBitAdam(model.parameters(), 0.01, freeze_step=3, spec=codec.Lossless())
        optimizer.register(model, max_grad_norm=0.1 if clips else None)
        for step in range(5):
            optimizer.zero_grad()
            model(rank, step).backward()
            optimizer.step()
        found.append([p.float() for p in model.parameters()])
    for a, b in zip(*found, strict=True):  # norms of other buckets are rounded otherwise
        torch.testing.assert_close(a, b, rtol=1e-4 if clips else 0, atol=1e-6 if clips else 0)


@pytest.mark.parametrize("clips", [False, True])
def test_one_bit_adam_trains_as_without_static_graph(clips):
    run_ranks(2, _one_bit_adam, clips)
