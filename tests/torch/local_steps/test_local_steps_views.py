"""LocalSteps of modules whose tensors are not contiguous, or lazily conjugated or negated."""

import torch
from torch import nn

import codec.torch


class Views(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(30, 40).T)
        self.register_buffer("frequencies", torch.randn(3, dtype=torch.complex64).conj())
        self.register_buffer("shift", torch._neg_view(torch.randn(3)))


def _digests(rank, size):
    torch.manual_seed(rank)
    model = Views()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    local = codec.torch.LocalSteps(model, optimizer, every=1)
    model.weight.grad = torch.full_like(model.weight, rank)
    optimizer.step()
    local.step()
    return [x.resolve_conj().resolve_neg().contiguous().view(torch.uint8).tolist() for x in model.state_dict().values()]


def test_ranks_agree_on_lazy_views_and_strided_parameters(pool):
    a, b = pool.run(_digests)
    assert a == b
