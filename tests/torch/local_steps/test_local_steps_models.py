"""LocalSteps accepts models of all dtypes, buffers and kinds of parameters, and outer optimizers."""

from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from support.local_training import (
    EXACT,
    Linear,
    adam,
    flat,
    local_steps,
    moved,
    nesterov,
    net,
    parameter_bytes,
    push,
    train,
)


def _of_dtype(rank, size, dtype):
    model = Linear(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    local = local_steps(model, optimizer, every=1, spec=EXACT)
    for _ in range(9):
        for p in model.parameters():
            p.grad = torch.full_like(p, 0 if rank else -(2.0**-7))
        optimizer.step()
        local.step()
    return flat(model), {str(x.dtype) for x in local.state_dict()["anchors"].values()}


def test_means_below_the_resolution_of_bfloat16_add_up(pool):
    """Rank 0 moves bfloat16 values of 1 by their resolution, 2^-7; means of half of it must add up over rounds."""
    for dtype, anchors in ((torch.bfloat16, "torch.float32"), (torch.float64, "torch.float64")):
        for end, dtypes in pool.run(_of_dtype, dtype):
            expected = torch.tensor(1 + 9 * 2.0**-8, dtype=torch.float64).to(dtype).item()
            np.testing.assert_array_equal(end, expected)
            assert dtypes == {anchors}


class Mixed(nn.Module):
    """Tied, frozen, unused, scalar, empty and permuted parameters, and buffers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.token, self.head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
        self.head.weight = self.token.weight
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.zeros(8, 2))  # a low-rank adapter (LoRA)
        self.unused, self.empty = nn.Parameter(torch.randn(5)), nn.Parameter(torch.empty(0, 3))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.conv = nn.Conv2d(2, 4, 2).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("mask", torch.full((3,), -torch.inf))
        self.register_buffer("nothing", torch.empty(0))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x):
        h = self.token(x).mean(1)
        h = self.norm(h + self.base(h) + h @ self.a.T @ self.b.T) * self.scale
        return self.head(h) + self.conv(h.view(-1, 2, 2, 2)).sum()


def _mixed(rank, size):
    model = Mixed()
    optimizer = adam(model)
    local = local_steps(model, optimizer, every=2)
    with torch.no_grad():
        model.cache.fill_(rank)
    base, unused = parameter_bytes(model.base), model.unused.detach().clone()
    statistics = []
    for step in range(4):
        x = torch.randint(20, (6, 5), generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), x[:, 0]).backward()
        if step == 3:
            statistics.append(model.norm.running_mean.double().numpy().copy())
        optimizer.step()
        local.step()
    assert parameter_bytes(model.base) == base
    # Changes a little: quantization groups include neighbouring parameters
    torch.testing.assert_close(model.unused, unused, rtol=0, atol=0.01)
    assert model.head.weight is model.token.weight
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    names = set(local.state_dict()["anchors"])
    assert names == {
        "token.weight",
        "a",
        "b",
        "unused",
        "scale",
        "conv.weight",
        "conv.bias",
        "norm.weight",
        "norm.bias",
    }
    return parameter_bytes(model), statistics[0], model.norm.running_mean.double().numpy(), model.cache.tolist()


def test_any_parameters_and_buffers_are_synchronized(pool):
    a, b = pool.run(_mixed)
    assert a[0] == b[0]
    np.testing.assert_allclose(a[2], (a[1] + b[1]) / 2, rtol=1e-6)
    assert (a[3], b[3]) == ([0, 0], [1, 1])  # non-persistent buffers are not synchronized


def _without_movement(rank, size):
    model = net()
    optimizer = adam(model, lr=0.0)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    before = parameter_bytes(model)
    local = local_steps(model, optimizer, every=2)
    train(model, optimizer, rank, range(4), local.step)
    return before == parameter_bytes(model)


def test_learning_rate_zero_changes_nothing(pool):
    assert pool.run(_without_movement) == [True, True]


def _of_rank_0(rank, size):
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(9, 30), nn.BatchNorm1d(30))
    with torch.no_grad():
        model[1].running_var.fill_(rank + 1)
    expected = parameter_bytes(model)
    local_steps(model)
    return expected, parameter_bytes(model)


def test_all_ranks_begin_with_the_model_of_rank_0(pool):
    (first, a), (_, b) = pool.run(_of_rank_0)
    assert a == b == first


def _outer(rank, size, outer):
    model = Linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    local = local_steps(model, optimizer, every=2, spec=EXACT, outer=outer)
    for step in range(6):
        push(model, optimizer, rank, step)
        local.step()
    return flat(model)


def test_outer_optimizer_takes_the_mean_change_as_its_gradient(pool):
    found = pool.run(_outer, nesterov)
    np.testing.assert_array_equal(*found)
    x, momentum = flat(Linear()), 0.0
    for round in range(3):
        g = -moved(range(2), range(2 * round, 2 * round + 2), 0.01)
        momentum = g if round == 0 else 0.9 * momentum + g
        x = x - 0.7 * (g + 0.9 * momentum)
    np.testing.assert_allclose(found[0], x, rtol=0, atol=1e-5)


def _compiled(rank, size):
    model = net()
    local = local_steps(SimpleNamespace(_orig_mod=model), adam(model))  # stands for a module wrapped by torch.compile
    return sorted(local.state_dict()["anchors"]) == sorted(n for n, _ in model.named_parameters())


def test_names_do_not_depend_on_wrappers(pool):
    assert all(pool.run(_compiled))
