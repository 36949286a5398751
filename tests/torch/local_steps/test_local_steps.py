"""Local steps between real ranks: means with error feedback, warm-up, fragments, and all kinds of models."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import codec
import codec.torch
from support.local_training import (
    EXACT,
    ROUNDED,
    Linear,
    adam,
    batch,
    flat,
    moved,
    net,
    parameter_bytes,
    push,
    raised,
    train,
)
from support.ranks import RankPool, run_ranks


@pytest.fixture(scope="module")
def pool():
    with RankPool(2) as ranks:
        ranks.new_group()
        yield ranks


def local_steps(model, optimizer=None, **how):
    return codec.torch.LocalSteps(model, optimizer or adam(model), **how)


# Oracles


def _trained(rank, size, spec, every, steps):
    model = net()
    optimizer = adam(model)
    local = local_steps(model, optimizer, every=every, spec=spec)
    train(model, optimizer, rank, range(steps), local.step)
    local.finish()
    return flat(model)


def oracle(size, spec, every, steps):
    """Return the parameters after local steps of `size` ranks, each of which sends its changes to all others."""
    models = [net() for _ in range(size)]
    optimizers = [adam(m) for m in models]
    shapes = {name: tuple(p.shape) for name, p in models[0].named_parameters()}
    anchor, residuals = flat(models[0]), [np.zeros(len(flat(models[0]))) for _ in range(size)]
    for begin in range(0, steps, every):
        sent = []
        for rank, (m, o) in enumerate(zip(models, optimizers, strict=True)):
            train(m, o, rank, range(begin, min(steps, begin + every)))
            values = (flat(m) - anchor + residuals[rank]).astype(np.float32)
            decoded = codec.decode(codec.encode(codec.view(values, segments=shapes), spec))
            residuals[rank] = values - decoded.astype(np.float64)
            sent.append(decoded.astype(np.float64))
        anchor = anchor + np.mean(sent, 0)
        for m in models:
            nn.utils.vector_to_parameters(torch.from_numpy(anchor).float(), m.parameters())
    return anchor


@pytest.mark.parametrize("spec", [ROUNDED, EXACT, codec.Sign()], ids=str)
def test_parameters_are_those_of_means_with_error_feedback(pool, spec):
    """11 steps in rounds of 4, 4 and 3, the last by finish()."""
    found = pool.run(_trained, spec, 4, 11)
    np.testing.assert_array_equal(*found)
    expected = oracle(2, spec, 4, 11)
    if spec == EXACT:
        np.testing.assert_allclose(found[0], expected, rtol=0, atol=1e-5)
    else:  # a value near the boundary of two codes may be rounded to the other one
        assert np.quantile(np.abs(found[0] - expected), 0.99) < 1e-5


@pytest.mark.nightly
def test_four_ranks_have_the_parameters_of_exact_means():
    found = run_ranks(4, _trained, EXACT, 4, 11)
    for each in found:
        np.testing.assert_array_equal(each, found[0])
    np.testing.assert_allclose(found[0], oracle(4, EXACT, 4, 11), rtol=0, atol=1e-5)


def _pushed(rank, size, how, steps, exact=True):
    model = Linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    local = local_steps(model, optimizer, **how)
    for step in range(steps):
        push(model, optimizer, rank, step)
        local.step()
    local.finish(exact=exact)
    return flat(model), local.stats()


CASES = [
    {"every": 4},
    {"every": 3, "spec": codec.Sign()},
    {"every": 6, "fragments": 3},
    {"every": 4, "delay": 4},
    {"every": 6, "fragments": 3, "delay": 2, "spec": "small"},
    {"every": 4, "warmup": 3},
    {"every": 4, "fragments": 2, "delay": 1, "warmup": 2, "spec": codec.Float8(group_size=32)},
]


@pytest.mark.parametrize("how", CASES, ids=str)
def test_no_change_is_lost_or_counted_twice(pool, how):
    """An exact finish leaves the mean of all changes, whatever was lost in frames, in flight or in a fragment."""
    found = pool.run(_pushed, how, 13)
    expected = flat(Linear()) + moved(range(2), range(13), 0.01)
    for parameters, stats in found:
        np.testing.assert_array_equal(parameters, found[0][0])
        np.testing.assert_allclose(parameters, expected, rtol=0, atol=2e-6)
        assert stats.steps == 13
        assert stats.residual_norm == 0
        assert stats.failed_synchronizations == 0


@pytest.mark.nightly
@pytest.mark.parametrize("how", CASES, ids=str)
def test_no_change_is_lost_or_counted_twice_by_four_ranks(how):
    """Sums are encoded, too, whose residuals move between ranks with the fragments."""
    expected = flat(Linear()) + moved(range(4), range(13), 0.01)
    for parameters, _ in run_ranks(4, _pushed, how, 13):
        np.testing.assert_allclose(parameters, expected, rtol=0, atol=4e-6)


def test_three_ranks_keep_residuals_of_encoded_sums():
    expected = flat(Linear()) + moved(range(3), range(13), 0.01)
    found = run_ranks(3, _pushed, {"every": 6, "fragments": 3, "delay": 1}, 13)
    for parameters, _ in found:
        np.testing.assert_array_equal(parameters, found[0][0])
        np.testing.assert_allclose(parameters, expected, rtol=0, atol=4e-6)


def test_stats_count_bytes_and_synchronizations(pool):
    for _, stats in pool.run(_pushed, {"every": 4}, 12, False):
        assert (stats.synchronizations, stats.world_size, stats.values) == (4, 2, 1708)
        assert 0 < stats.residual_norm < 1
        assert 4 * 0.06 < stats.ratio * 12 < 4 * 0.25  # at least 4 of 32 bits; scales of small tensors are more


# Warm-up


def _warmed_up(rank, size, steps, ddp):
    model = net()
    optimizer = adam(model)
    if ddp:
        train(DistributedDataParallel(model), optimizer, rank, range(steps))
    else:
        local = local_steps(model, optimizer, warmup=steps)
        train(model, optimizer, rank, range(steps), local.step)
        assert local.synchronized
        assert local.stats().synchronizations == 0
    return parameter_bytes(model)


def test_warmup_has_the_bits_of_distributed_data_parallel(pool):
    found = {bits for ddp in (False, True) for bits in pool.run(_warmed_up, 5, ddp)}
    assert len(found) == 1


def _lossy_warmup(rank, size):
    model = net()
    optimizer = adam(model)
    local = local_steps(model, optimizer, every=4, warmup=(6, "small"))
    train(model, optimizer, rank, range(6), local.step)
    early, sent = parameter_bytes(model), local.stats().ratio
    train(model, optimizer, rank, range(6, 9), local.step)
    apart = parameter_bytes(model), local.synchronized
    train(model, optimizer, rank, range(9, 10), local.step)
    return early, sent, apart, parameter_bytes(model), local.synchronized


def test_warmup_sends_lossy_gradients_and_then_steps_are_local(pool):
    (early, sent, apart, late, same), other = pool.run(_lossy_warmup)
    assert early == other[0]
    assert 0.1 < sent < 0.25
    assert apart[0] != other[2][0]
    assert not apart[1]
    assert late == other[3]
    assert same


def _overflowing(rank, size, how):
    """Rank 1 overflows in step 1 of the warm-up, rank 0 in step 4, which is local."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **how)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    local = local_steps(model, optimizer, warmup=3, every=3)
    digests = []
    for step in range(6):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        if (rank, step) in ((1, 1), (0, 4)):
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        if how:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        local.step()
        digests.append(parameter_bytes(model))
    return digests, local.stats().steps


@pytest.mark.parametrize("how", [{}, {"fused": True}], ids=str)
def test_all_ranks_skip_a_step_that_a_grad_scaler_skips(pool, how):
    (a, steps), (b, _) = pool.run(_overflowing, how)
    assert [x == y for x, y in zip(a, b, strict=True)] == [True, True, True, False, False, True]
    assert a[0] == a[1]
    assert steps == 6
    assert a[3] == a[4]  # rank 0 alone has not moved in step 4


def _without_optimizer_step(rank, size):
    model = net()
    optimizer = adam(model)
    local = local_steps(model, optimizer, warmup=2)
    model(torch.ones(1, 12)).sum().backward()
    before = [p.grad.clone() for p in model.parameters()]
    local.step()
    return all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))


def test_gradients_stay_if_no_rank_steps_in_the_warmup(pool):
    assert pool.run(_without_optimizer_step) == [True, True]


# Models


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
    """Values of 1 have steps of 2^-7 in bfloat16: rank 0 takes one, and the mean is half of it."""
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
        self.a, self.b = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.zeros(8, 2))  # LoRA
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
    with torch.no_grad():
        model.cache.fill_(rank)
    optimizer = adam(model)
    local = local_steps(model, optimizer, every=2)
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
    torch.testing.assert_close(model.unused, unused, rtol=0, atol=0.01)  # it shares scales with its neighbours
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
    assert (a[3], b[3]) == ([0, 0], [1, 1])  # no part of the state dict, so no state of training


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


def nesterov(parameters):
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


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
    local = local_steps(torch.compile(model), adam(model))
    return sorted(local.state_dict()["anchors"]) == sorted(n for n, _ in model.named_parameters())


def test_names_do_not_depend_on_wrappers(pool):
    assert all(pool.run(_compiled))


def _after_finish(rank, size):
    model = net()
    optimizer = adam(model)
    local = local_steps(model, optimizer, warmup=2)
    train(model, optimizer, rank, range(3), local.step)
    local.finish()
    train(model, optimizer, rank, range(1))  # without a mean of gradients: the hook is gone
    return raised(local.step), "finished" in repr(local), parameter_bytes(model)


def test_finish_ends_local_steps(pool):
    a, b = pool.run(_after_finish)
    assert a[0][0] == "StateError"
    assert "finish() was called" in a[0][1]
    assert a[1]
    assert a[2] != b[2]
