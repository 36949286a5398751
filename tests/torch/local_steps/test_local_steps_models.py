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
    log_records,
    moved,
    nesterov,
    net,
    parameter_bytes,
    push,
    started,
    started_linear,
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
    model, optimizer, local = started(Mixed(), every=2)
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
    model, optimizer, local = started_linear(every=2, spec=EXACT, outer=outer)
    push(model, optimizer, rank, range(6), local.step)
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


# Frozen parameters and buffers


def _other_tensors(rank, size):
    """Trained parameters are equal at the start; everything else differs."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(4, 8).requires_grad_(False), nn.Linear(8, 2))
    nn.init.constant_(model[1].weight, 0.1)
    nn.init.zeros_(model[1].bias)
    model.register_buffer("order", torch.randperm(50))
    model.register_buffer("angles", torch.randn(3, dtype=torch.complex64))
    model.register_buffer("mask", torch.rand(7) < 0.5)
    model.register_buffer("cache", torch.randn(2), persistent=False)
    model.register_buffer("placeholder", torch.empty(3, device="meta"), persistent=False)
    model.register_buffer("spread", torch.zeros(1).expand(5), persistent=False)
    local_steps(model, torch.optim.SGD(model[1].parameters(), lr=0.1), every=2)
    return parameter_bytes(nn.ModuleList([model[0]])), model.order.tolist(), model.angles.tolist(), model.mask.tolist()


def test_frozen_parameters_and_all_buffers_are_those_of_rank_0(pool):
    a, b = pool.run(_other_tensors)
    assert a == b


# Copies of parameters in optimizers


class Masters(torch.optim.Optimizer):
    """SGD with momentum, of float32 copies of the parameters; the parameters are the rounded copies."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                master = state.setdefault("any_name", p.float().clone())
                momentum = state.setdefault("momentum", torch.zeros_like(master))
                if p.grad is not None:
                    momentum.mul_(0.5).add_(p.grad.float())
                    master -= group["lr"] * momentum
                    p.copy_(master)


def _masters(rank, size, how, lr):
    model = Linear(torch.bfloat16)
    with torch.no_grad():
        model.b.zero_()  # equal to its momentum at first
    optimizer = Masters(model.parameters(), lr)
    local = local_steps(model, optimizer, spec=EXACT, **how)
    start = flat(model)
    push(model, optimizer, rank, range(8), local.step)
    optimizer.param_groups[0]["lr"] *= 1e-3  # the last changes are those of the masters alone
    push(model, optimizer, rank, [0], local.step)
    local.finish()
    after = flat(model)
    optimizer.param_groups[0]["lr"] = 0.0
    push(model, optimizer, rank, [8])  # moves nothing, but copies the masters to the parameters
    np.testing.assert_array_equal(flat(model), after)
    momenta = [float(s["momentum"].abs().max()) for s in optimizer.state.values()]
    anchors = np.concatenate([x.numpy().reshape(-1) for x in local.state_dict()["anchors"].values()])
    return after, anchors - start, momenta


def test_synchronization_sets_float32_masters_and_includes_their_changes(pool):
    """Steps far below the resolution of bfloat16 add up in the masters, and in the mean of the ranks."""
    for how in ({"every": 4}, {"every": 4, "delay": 2}, {"every": 4, "fragments": 3}):
        for lr in (0.05, 1e-5):
            (a, change, _), (b, _, momenta) = pool.run(_masters, how, lr)
            np.testing.assert_array_equal(a, b)
            expected = _expected_change(lr)
            np.testing.assert_allclose(change, expected, rtol=0, atol=1e-2 * np.abs(expected).max())
            assert min(momenta) > 0.1


class Hidden(Masters):
    """Optimizer of the same kind, whose copies are not in its state."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr)
        self.copies = [p.detach().float().clone() for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        for p, master in zip(self.param_groups[0]["params"], self.copies, strict=True):
            master.sub_(self.param_groups[0]["lr"] * p.grad)
            p.copy_(master)


def _warnings_of(rank, size, kind, every):
    model = Linear(torch.bfloat16 if kind in (Masters, Hidden) else torch.float32)
    how = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind(model.parameters(), lr=0.05, **how)
    local = local_steps(model, optimizer, every=every)
    with log_records() as records:
        for step in range(2 * every + 1):
            optimizer.param_groups[0]["lr"] = 0.05 if step % every else 0.01
            push(model, optimizer, rank, [step], local.step)
    return [text for _, text in records]


def test_optimizer_that_undoes_synchronizations_is_warned_of_once(pool):
    for [text] in pool.run(_warnings_of, Hidden, 10):
        assert "the optimizer has overwritten parameters, such as 'a', with copies of its own" in text
    for kind, every in ((Masters, 10), (torch.optim.SGD, 1), (torch.optim.SGD, 4), (torch.optim.AdamW, 4)):
        assert pool.run(_warnings_of, kind, every) == [[], []]


def _expected_change(lr):
    """Return the mean over two ranks of the change of Masters' float32 copies after 8 steps."""
    total = 0.0
    for rank in range(2):
        model = Linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
        start = flat(model)
        push(model, optimizer, rank, range(8))
        total = total + (flat(model) - start) / 2
    return lr * total
