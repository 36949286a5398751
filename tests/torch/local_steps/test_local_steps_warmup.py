"""Warm-up of LocalSteps: gradients are averaged as by DistributedDataParallel; all ranks skip a skipped step."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import codec.torch
from support.local_training import adam, batch, local_steps, net, parameter_bytes, raised, started, train


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
    model, optimizer, local = started(every=4, warmup=(6, "small"))
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
    model, _, local = started(warmup=2)
    model(torch.ones(1, 12)).sum().backward()
    before = [p.grad.clone() for p in model.parameters()]
    local.step()
    return all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))


def test_gradients_stay_if_no_rank_steps_in_the_warmup(pool):
    assert pool.run(_without_optimizer_step) == [True, True]


# Several optimizers


def two(model):
    """Return an optimizer of the matrices, and one of the other parameters."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() < 2]
    return torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(rest, lr=0.02)


def _two(rank, size, order, ddp):
    model = net()
    optimizers = two(model)
    if ddp:
        local, trained = None, DistributedDataParallel(model)
    else:
        local, trained = local_steps(model, list(optimizers), warmup=5, every=3), model
    for step in range(5):
        x, y = batch(rank, step)
        for each in optimizers:
            each.zero_grad()
        nn.functional.cross_entropy(trained(x), y).backward()
        for i in order:
            optimizers[i].step()
        if local is not None:
            local.step()
    assert local is None or local.synchronized
    return parameter_bytes(model)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_warmup_averages_the_gradients_of_all_optimizers(pool, order):
    assert len({bits for ddp in (False, True) for bits in pool.run(_two, order, ddp)}) == 1


def _two_with_overflow(rank, size, order):
    """In step 1, gradients of rank 1 overflow for one optimizer; in step 2, those of rank 0 for the other one."""
    model = net()
    optimizers = two(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    local = local_steps(model, list(optimizers), warmup=5)
    digests = []
    for step in range(5):
        x, y = batch(rank, step)
        for each in optimizers:
            each.zero_grad()
        scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
        if (rank, step) == (1, 1):
            model[0].weight.grad[0, 0] = torch.inf
        if (rank, step) == (0, 2):
            model[0].bias.grad[0] = torch.inf
        for i in order:
            scaler.step(optimizers[i])
        scaler.update()
        local.step()
        digests.append(parameter_bytes(model))
    return digests


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_all_ranks_skip_the_step_of_an_optimizer_that_one_skips(pool, order):
    a, b = pool.run(_two_with_overflow, order)
    assert a == b
    assert len(set(a)) == 5 or order == (1, 0)  # only in the given order is it known which optimizer was skipped


def _alternating(rank, size):
    """The second optimizer steps in every second step, with gradients from after the first one's step."""
    model = net()
    first, second = two(model)
    local = local_steps(model, [first, second], warmup=4)
    for step in range(4):
        for each in (first, second) if step % 2 else (first,):
            x, y = batch(rank, step)
            each.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            each.step()
        local.step()
    return parameter_bytes(model)


def test_warmup_averages_gradients_of_a_second_backward_pass(pool):
    assert len(set(pool.run(_alternating))) == 1


def _left_out(rank, size):
    model = net()
    first, second = two(model)
    errors = [
        raised(lambda given=given: codec.torch.LocalSteps(model, given, warmup=2)) for given in (first, [second], [])
    ]
    errors.append(raised(lambda: local_steps(model, [first, first])))
    assert local_steps(model, first).steps == 0  # without a warm-up, LocalSteps does not depend on the optimizers
    return errors


def test_parameters_without_an_optimizer_are_refused_in_the_warmup(pool):
    for errors in pool.run(_left_out):
        assert {kind for kind, _ in errors} == {"ArgumentError"}
        assert "lacks 5 parameters of the model that require gradients, such as '0.bias'" in errors[0][1]
        assert "lacks 3 parameters of the model that require gradients, such as '0.weight'" in errors[1][1]
        assert "at least one optimizer" in errors[2][1]
        assert "each only once" in errors[3][1]
