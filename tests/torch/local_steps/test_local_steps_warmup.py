"""Warm-up of LocalSteps: gradients are averaged as by DistributedDataParallel; all ranks skip a skipped step."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from support.local_training import adam, batch, local_steps, net, parameter_bytes, train


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
    """Rank 1's gradients overflow in step 1, during the warm-up; rank 0's in step 4, a local step."""
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
    assert a[3] == a[4]  # rank 0 skipped the local step 4


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
