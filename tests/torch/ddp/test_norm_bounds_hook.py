"""A rank with broken gradients in training with ``codec.options(max_norm=)``: the step fails on all ranks."""

import math

import pytest
import torch

import codec
import codec.torch
from support import ddp_training, fsdp_training, local_training, one_bit_adam
from support.ddp_training import ENCODE_ALL, hook_state_bytes, parameter_bytes
from support.ranks import RankPool

MOST = 1000.0


@pytest.fixture(scope="module")
def pair():
    with RankPool(2) as ranks:
        yield ranks


def broken(model, rank, by):
    """Multiply a gradient of rank 1 by a factor, or set one value of it to NaN, before the hook gets it."""

    def change(gradient):
        if rank != 1:
            return gradient
        changed = gradient.clone()
        changed.view(-1)[3 if math.isnan(by) else slice(None)] *= by
        return changed

    return next(model.parameters()).register_hook(change)


def failure(call):
    with pytest.raises((codec.CodecError, RuntimeError)) as caught:
        call()
    text = str(caught.value)
    assert "rank 1 has sent values whose L2 norm in one frame is" in text, text
    assert "max_norm=1000" in text
    return text


def _hook(rank, size, spec, algorithm, by):
    torch.manual_seed(0)
    model = ddp_training.wrapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    how = codec.options(algorithm=algorithm, max_norm=MOST)
    feedback = spec is not None and spec.contraction
    hook = codec.torch.ddp_hook(spec or codec.Lossless(), feedback=feedback, policy=ENCODE_ALL, options=how)
    hook.register(model)
    ddp_training.train(model, optimizer, rank, 2)
    before = parameter_bytes(model), hook_state_bytes(hook)
    handle = broken(model.module, rank, by)
    for _ in range(2):  # a failed step can be repeated
        optimizer.zero_grad()
        failure(lambda: one_bit_adam.loss_of(model, rank, 2).backward())
        assert before == (parameter_bytes(model), hook_state_bytes(hook))
    handle.remove()
    ddp_training.train(model, optimizer, rank, 2, first=2)
    return parameter_bytes(model)


@pytest.mark.parametrize(
    ("spec", "algorithm", "by"),
    [
        (codec.Quantize(4), "two_shot", 1e9),
        (codec.Quantize(4), "all_gather", 1e9),
        (codec.Quantize(4), "raw", 1e9),
        (codec.Sign(), "two_shot", 1e9),
        (None, "auto", math.nan),
        (None, "two_shot", math.nan),
        (None, "raw", math.nan),
        (None, "ring", math.nan),
        (codec.Ternary(), "shared_scale", 1e9),
    ],
)
def test_broken_gradients_of_a_rank_change_nothing_and_training_goes_on(pair, spec, algorithm, by):
    pair.new_group()
    zero, one = pair.run(_hook, spec, algorithm, by)
    assert zero == one


def _fsdp(rank, size):
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(fsdp_training.small_model())
    comm = codec.torch.FsdpReduceScatter(codec.Quantize(4), feedback=True, options=codec.options(max_norm=MOST))
    comm.register(model)

    def backward(factor=1.0):
        (model(fsdp_training.batch(rank)).square().mean() * (factor if rank else 1.0)).backward()

    backward()

    def residuals():
        return {name: x.clone() for name, x in fsdp_training.module_residuals(comm.state_dict(), rank).items()}

    state, before = residuals(), [p.to_local().clone() for p in model.parameters()]
    failure(lambda: backward(1e9))
    assert state
    assert all(torch.equal(x, state[name]) for name, x in residuals().items())
    assert all(torch.equal(p.to_local(), was) for p, was in zip(model.parameters(), before, strict=True))
    model.zero_grad()
    backward()
    assert all(p.grad.to_local().abs().max() < 1 for p in model.parameters())


def test_fsdp_checks_norms(pair):
    pair.new_group()
    pair.run(_fsdp)


def _one_bit_adam(rank, size):
    model = ddp_training.wrapped()
    how = {"freeze_step": 3, "spec": codec.Sign(group_size=64)}
    optimizer = codec.torch.OneBitAdam(model.parameters(), 1e-2, **how)
    optimizer.register(model, options=codec.options(algorithm="two_shot", max_norm=MOST))
    for step in range(6):
        one_bit_adam.take_step(model, optimizer, rank, step)
        if step in (1, 4):  # in the warm-up, and with momenta
            before = parameter_bytes(model), repr(one_bit_adam.plain(optimizer.state_dict()))
            handle = broken(model.module, rank, 1e9)
            optimizer.zero_grad()
            failure(lambda step=step: (one_bit_adam.loss_of(model, rank, step + 1).backward(), optimizer.step()))
            handle.remove()
            assert before == (parameter_bytes(model), repr(one_bit_adam.plain(optimizer.state_dict())))
    return parameter_bytes(model)


def test_one_bit_adam_checks_norms(pair):
    pair.new_group()
    zero, one = pair.run(_one_bit_adam)
    assert zero == one


def _local_steps(rank, size):
    with codec.options(max_norm=MOST):
        model, optimizer, local = local_training.started(every=100)
    local_training.train(model, optimizer, rank, range(3))
    good = [p.detach().clone() for p in model.parameters()]
    if rank:
        with torch.no_grad():
            next(model.parameters()).mul_(1e6)
    mine = local_training.parameter_bytes(model)
    failure(local.synchronize)
    assert local_training.parameter_bytes(model) == mine
    with torch.no_grad():
        for p, value in zip(model.parameters(), good, strict=True):
            p.copy_(value)
    local.synchronize()
    return local_training.parameter_bytes(model)


def test_local_steps_check_norms(pair):
    pair.new_group()
    zero, one = pair.run(_local_steps)
    assert zero == one
