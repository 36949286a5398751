"""OneBitAdam on several ranks equals DeepSpeed's algorithm, keeps replicas equal, and refuses invalid steps."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import codec
import codec.torch
from support.ddp_training import ENCODE_ALL, change_error, net, parameter_bytes, wrapped
from support.one_bit_adam import OPTIONS, SIGN, loss_of, take_step
from support.ranks import run_ranks


def state_bytes(optimizer):
    """Return this rank's moments, steps, phase and residuals of an optimizer, as bytes."""
    states = [
        (k, bytes(x.detach().numpy())) for s in optimizer.state.values() for k, x in s.items() if torch.is_tensor(x)
    ]
    return states, optimizer.state_dict()["param_groups"][0]["one_bit"]


def deepspeed(rank_gradients, freeze, lr, betas, eps, group):
    """Compute DeepSpeed's 1-bit Adam, in which both phases send signs; return a parameter's values and all momenta.

    Each worker adds its error to its momentum, and sends signs and the mean magnitude of each group. The owner of a
    chunk averages, adds its own error, and sends signs and mean magnitudes of the average.
    """
    size, (b1, b2) = len(rank_gradients), betas
    n = rank_gradients[0][0].size
    theta, m, v = np.zeros(n), np.zeros(n), np.zeros(n)
    worker, server, vhat = np.zeros((size, n)), np.zeros(n), None

    def compressed(x):
        rows = x.reshape(-1, group)
        return (np.where(np.signbit(rows), -1, 1) * np.abs(rows).mean(1, keepdims=True)).reshape(x.shape)

    for t, grads in enumerate(zip(*rank_gradients, strict=True), 1):
        if t <= freeze:
            g = np.mean(grads, 0)
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
            vhat = v / (1 - b2**t)
        else:
            corrected = np.array([b1 * m + (1 - b1) * g for g in grads]) + worker
            sent = np.array([compressed(c) for c in corrected])
            worker = corrected - sent
            corrected = sent.mean(0) + server
            m = compressed(corrected)
            server = corrected - m
        theta = theta - lr * m / (1 - b1**t) / (np.sqrt(vhat) + eps)
    return theta


def gradients_of(rank, steps, n):
    generator = np.random.default_rng(rank)
    return [(generator.normal(size=n) + 0.2).astype(np.float32) for _ in range(steps)]


def _deepspeed(rank, size):
    found = []
    for spec_size, n in ((64, 64 * 6 * 4), (256, 256 * 6 * 2)):
        module = nn.Module()
        module.weight = nn.Parameter(torch.zeros(n))
        how = {"freeze_step": 5, "spec": codec.Sign(group_size=spec_size), "max_ratio": None}
        optimizer = codec.torch.OneBitAdam(module.parameters(), 1e-2, (0.9, 0.99), **how)
        optimizer.register(module, policy=ENCODE_ALL, options=OPTIONS)
        for gradient in gradients_of(rank, 25, n):
            module.weight.grad = torch.from_numpy(gradient.copy())
            optimizer.step()
            assert np.array_equal(module.weight.grad.numpy(), gradient)  # step() leaves p.grad unchanged
        found.append((n, spec_size, module.weight.detach().numpy().copy()))
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_frozen_steps_agree_with_the_algorithm_of_deepspeed(size):
    results = run_ranks(size, _deepspeed)
    for of_size in zip(*results, strict=True):
        n, group, theta = of_size[0]
        assert all(np.array_equal(theta, other) for _, _, other in of_size)
        gradients = [gradients_of(rank, 25, n) for rank in range(size)]
        expected = deepspeed(gradients, 5, 1e-2, (0.9, 0.99), 1e-8, group)
        lossless = np.abs(deepspeed(gradients, 25, 1e-2, (0.9, 0.99), 1e-8, group) - expected)
        assert np.abs(theta - expected).max() < 1e-3 * lossless.max()


def optimizer_of(model, **how):
    how = {"freeze_step": 3, "spec": SIGN} | how
    registering = {name: how.pop(name) for name in ("policy", "grad_scaler") if name in how}
    return codec.torch.OneBitAdam(model.parameters(), 1e-3, weight_decay=0.01, **how).register(
        model, options=OPTIONS, **registering
    )


def _wrapping(rank, size):
    """With lossless momenta, DDP, DDP with no_sync() and an unwrapped module give the same bits."""
    models = [net(), wrapped(), wrapped(), wrapped(gradient_as_bucket_view=True)]
    optimizers = [optimizer_of(model, spec=codec.Lossless()) for model in models]
    for step in range(7):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            if model is models[2]:
                with model.no_sync():
                    loss_of(model, rank, 2 * step).backward()
                second = loss_of(model, rank, 2 * step + 1)
            else:
                second = loss_of(model, rank, 2 * step + 1)
                if model is models[0]:
                    loss_of(model, rank, 2 * step).backward()
                else:
                    second = loss_of(model, rank, 2 * step) + second
            second.backward()
            optimizer.step()
    found = [parameter_bytes(model) for model in models]
    assert found[0] == found[2]
    assert found[1] == found[3]
    assert change_error(models[0].parameters(), models[1].parameters(), net().parameters()) < 1e-3
    return found


def test_ddp_accumulation_and_plain_modules_agree():
    results = run_ranks(2, _wrapping)
    assert results[0] == results[1]


def _identical(rank, size):
    """Replicas stay identical with every spec; one-bit momenta take about one bit per value."""
    sent = []
    for how in ({}, {"spec": codec.Quantize(4)}, {"warmup": codec.Quantize(4)}, {"warmup": "near"}):
        model = wrapped()
        optimizer = optimizer_of(model, policy=ENCODE_ALL, **how)
        for step in range(8):
            if step == 3:
                before = optimizer.stats().sent_nbytes
            take_step(model, optimizer, rank, step)
        sent.append((parameter_bytes(model), before, optimizer.stats().sent_nbytes - before))
        assert optimizer.stats().steps == 8
    return sent


def test_replicas_stay_identical_for_every_spec():
    results = run_ranks(3, _identical)
    for first, *others in zip(*results, strict=True):
        assert all(first[0] == other[0] for other in others)
    lossless, quantized = results[0][0], results[0][2]
    # lossless[1]: bytes of 3 lossless steps; lossless[2]: bytes of 5 frozen steps. A frozen step must send less than
    # a fifth of the bytes of a lossless step.
    assert lossless[2] / 5 < lossless[1] / 3 / 5
    assert quantized[1] < lossless[1] / 4


def _refused(rank, size):
    """NaN on one rank refuses the step on all ranks, in both phases, and changes nothing."""
    for make in (net, wrapped):
        model = make()
        optimizer = optimizer_of(model)
        poisoned = nn.Parameter(torch.tensor(math.nan))
        for step in range(6):
            before = parameter_bytes(model), state_bytes(optimizer)
            optimizer.zero_grad()
            loss = loss_of(model, rank, step)
            if rank == 1:
                loss = loss * poisoned
            with pytest.raises(codec.CodecError) as caught:
                loss.backward() if make is wrapped else (loss.backward(), optimizer.step())
            assert isinstance(caught.value, codec.ArgumentError if rank == 1 else codec.PeerError)
            assert caught.value.code == codec.Status.NONFINITE
            assert (parameter_bytes(model), state_bytes(optimizer)) == before
            take_step(model, optimizer, rank, step)
        assert optimizer.frozen
        assert optimizer.stats().failed_steps == 6


def test_nan_on_one_rank_is_refused_on_all():
    run_ranks(2, _refused)


def _misused(rank, size):
    """Calls that would alter momenta instead of gradients after the freeze are refused from the first step on."""
    model = wrapped()
    optimizer = optimizer_of(model, freeze_step=2)
    for step in range(4):
        before = parameter_bytes(model), state_bytes(optimizer)
        optimizer.zero_grad()
        with model.no_sync():
            loss_of(model, rank, 3).backward()
        with pytest.raises(codec.StateError, match="needs a backward pass"):
            optimizer.step()
        optimizer.zero_grad()
        loss_of(model, rank, 3).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e6)
        with pytest.raises(codec.StateError, match=r"Remove clip_grad_norm_.*max_grad_norm="):
            optimizer.step()
        assert parameter_bytes(model) == before[0]
        assert state_bytes(optimizer)[0] == before[1][0]
        take_step(model, optimizer, rank, step)
        with pytest.raises(codec.StateError, match="needs a backward pass"):
            optimizer.step()
    optimizer.zero_grad()
    loss_of(model, rank, 3).backward()
    with pytest.raises(codec.StateError, match="second backward pass before step"):
        loss_of(model, rank, 4).backward()


def test_clipping_and_repeated_backward_passes_are_refused_in_all_steps():
    run_ranks(1, _misused)


def _unregistered(rank, size):
    model = wrapped()
    optimizer = codec.torch.OneBitAdam(model.parameters(), freeze_step=2)
    loss_of(model, rank, 0).backward()
    with pytest.raises(codec.StateError, match=r"call optimizer\.register"):
        optimizer.step()
    module = net()
    optimizer = codec.torch.OneBitAdam(module.named_parameters(), freeze_step=2, spec=SIGN)
    for step in range(4):
        take_step(module, optimizer, rank, step)
    assert "0.weight" in optimizer._averager.link.model.names.values()
    return parameter_bytes(module)


def test_step_averages_by_itself_without_ddp():
    assert len(set(run_ranks(2, _unregistered))) == 1


def _embedding(rank, size):
    module = nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 100))
    for uneven in (codec.Lossless(), codec.Quantize(4), None):
        policy = codec.torch.Policy(uneven=uneven)
        optimizer = codec.torch.OneBitAdam(module.parameters(), freeze_step=1, spec=SIGN).register(
            module, policy=policy
        )
        for _ in range(3):
            module(torch.arange(100)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        momenta = optimizer._averager.link.hooks["momenta"].stats(by_parameter=True).parameters
        for name in ("0.weight", "1.weight"):
            assert momenta[name].spec == (uneven or SIGN)


def test_policy_protects_embeddings_of_a_module_without_ddp():
    run_ranks(1, _embedding)


def _unused(rank, size):
    """Parameters that some or no ranks use are updated equally, without DistributedDataParallel."""
    module = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("all", "some", "none")})
    with torch.no_grad():
        for p in module.parameters():
            p.fill_(0.5)
    optimizer = codec.torch.OneBitAdam(module.parameters(), freeze_step=2, weight_decay=0.1).register(module)
    x = torch.ones(4, 8)
    for step in range(4):
        optimizer.zero_grad()
        out = module["all"](x) + (module["some"](x) if rank == 0 else 0)
        out.square().sum().backward()
        if step == 1:
            with pytest.warns(UserWarning, match="2 parameters had no gradient"):
                optimizer.step()
        else:
            optimizer.step()
    assert (module["none"].weight == 0.5).all()
    assert (module["some"].weight != 0.5).all()
    return parameter_bytes(module)


def test_unused_parameters_stay_and_replicas_agree():
    assert len(set(run_ranks(2, _unused))) == 1


def _scaled(rank, size):
    """Training with a GradScaler is bit-identical to training without one; all ranks skip a step with Inf."""
    found = []
    for scaled in (False, True):
        model = wrapped()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3, enabled=scaled)
        optimizer = optimizer_of(model, grad_scaler=scaler)
        for step in range(9):
            if scaled and step in (1, 5):  # an extra step, whose gradients overflow on one rank
                before = parameter_bytes(model), state_bytes(optimizer)
                optimizer.zero_grad()
                loss = loss_of(model, rank, 100)
                scaler.scale(loss * (math.inf if rank == 1 else 1)).backward()
                scaler.step(optimizer)
                scaler.update()
                assert parameter_bytes(model) == before[0]
                assert state_bytes(optimizer)[0] == before[1][0]
            optimizer.zero_grad()
            scaler.scale(loss_of(model, rank, step)).backward()
            scaler.step(optimizer)
            scaler.update()
        found.append(parameter_bytes(model))
    assert found[0] == found[1]
    unaware = optimizer_of(model := wrapped(), freeze_step=1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, rank, 0)).backward()
    with pytest.raises(codec.StateError, match=r"register\(grad_scaler="):
        scaler.step(unaware)
    with pytest.raises(codec.ArgumentError, match="needs a DistributedDataParallel"):
        optimizer_of(net(), grad_scaler=scaler)


def test_grad_scaler_changes_no_bit_and_skips_on_all_ranks():
    run_ranks(2, _scaled)


def _auto(rank, size):
    """With freeze_step="auto", all ranks freeze at the same step, without warnings."""
    model = wrapped()
    optimizer = codec.torch.OneBitAdam(model.parameters(), 1e-4, (0.5, 0.75), freeze_step="auto", spec=SIGN)
    optimizer.register(model, options=OPTIONS)
    steps = 0
    while not optimizer.frozen and steps < 60:
        take_step(model, optimizer, rank, steps)
        steps += 1
    for step in range(2):
        take_step(model, optimizer, rank, step)
    return steps, parameter_bytes(model)


def test_ranks_agree_on_the_step_of_the_freeze():
    results = run_ranks(2, _auto)
    assert results[0] == results[1]
    assert results[0][0] < 60
