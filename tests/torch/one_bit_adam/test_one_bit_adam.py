"""OneBitAdam: values against references to the bit, on one rank and between ranks; refused steps; options of Adam."""

import copy
import math
import subprocess
import sys
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

import codec
import codec.torch
from codec.torch.one_bit_adam import phase
from support.ddp_training import ENCODE_ALL, data, net, parameter_bytes, wrapped
from support.ranks import run_ranks

OPTIONS = codec.options(algorithm="two_shot")
SIGN = codec.Sign(group_size=64)


def loss_of(model, rank, step):
    x, y = data(rank, step)
    return nn.functional.cross_entropy(model(x), y)


def take_step(model, optimizer, rank, step):
    optimizer.zero_grad()
    loss_of(model, rank, step).backward()
    optimizer.step()


def state_bytes(optimizer):
    """Return the moments and steps of an optimizer, and its phase and residuals on this rank."""
    states = [
        (k, bytes(x.detach().numpy())) for s in optimizer.state.values() for k, x in s.items() if torch.is_tensor(x)
    ]
    return states, optimizer.state_dict()["param_groups"][0]["one_bit"]


# One process: references to the bit


def reference(parameters, gradients, freeze, lr, betas, eps, decay, decoupled):
    """Take steps of Adam, and of 1-bit Adam without compression after step `freeze`, as its paper states them."""
    b1, b2 = betas
    for p, grads in zip(parameters, gradients, strict=True):
        m, v, denominator = torch.zeros_like(p), torch.zeros_like(p), None
        for t, g in enumerate(grads, 1):
            m = torch.lerp(m, g if decoupled else torch.add(g, p, alpha=decay), 1 - b1)
            if t <= freeze:
                g = g if decoupled else torch.add(g, p, alpha=decay)  # noqa: PLW2901
                v = (v * b2).addcmul_(g, g, value=1 - b2)
                denominator = v.sqrt() / math.sqrt(1 - b2**t) + eps
            if decoupled:
                p.mul_(1 - lr * decay)
            p.addcdiv_(m, denominator, value=-lr / (1 - b1**t))


@pytest.mark.parametrize("foreach", [None, True])
@pytest.mark.parametrize("decoupled", [True, False])
def test_steps_are_those_of_the_reference_to_the_bit(decoupled, foreach):
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(40, 30)), nn.Parameter(torch.randn(17))]
    theirs = [p.detach().clone() for p in ours]
    gradients = [[torch.randn_like(p) * 10 ** -(i % 3) for i in range(9)] for p in ours]
    how = (1e-2, (0.9, 0.99), 1e-8, 0.1)
    optimizer = codec.torch.OneBitAdam(ours, *how, freeze_step=4, decoupled_weight_decay=decoupled)
    optimizer.param_groups[0]["foreach"] = foreach
    for i in range(9):
        for p, grads in zip(ours, gradients, strict=True):
            p.grad = grads[i].clone()
        optimizer.step()
        assert optimizer.frozen == (i >= 3)
    reference(theirs, gradients, 4, *how, decoupled)
    for p, expected in zip(ours, theirs, strict=True):
        assert torch.equal(p, expected)


def test_warmup_takes_the_steps_of_adamw_to_the_bit():
    ours, theirs = net(), net()
    adam = torch.optim.AdamW(theirs.parameters(), 1e-3, weight_decay=0.1)
    optimizer = codec.torch.OneBitAdam(ours.parameters(), 1e-3, weight_decay=0.1, freeze_step=100)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 10) for o in (adam, optimizer)]
    for step in range(8):
        take_step(ours, optimizer, 0, step)
        take_step(theirs, adam, 0, step)
        for schedule in schedules:
            schedule.step()
    assert parameter_bytes(ours) == parameter_bytes(theirs)


def test_first_frozen_step_is_as_large_as_that_of_adam():
    torch.manual_seed(0)
    p = nn.Parameter(torch.zeros(10_000))
    optimizer = codec.torch.OneBitAdam([p], 1e-3, freeze_step=100)
    for _ in range(100):
        p.grad = torch.randn_like(p) + 0.5
        optimizer.step()
    q = nn.Parameter(p.detach().clone())
    adam = torch.optim.AdamW([q], 1e-3, weight_decay=0)
    adam.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    p.grad = torch.randn_like(p) + 0.5
    q.grad = p.grad.clone()
    before = p.detach().clone()
    optimizer.step()
    adam.step()
    assert ((p - before).norm() / (q - before).norm()).item() == pytest.approx(1, abs=0.01)


def test_values_without_second_moments_never_move():
    p = nn.Parameter(torch.ones(100))
    optimizer = codec.torch.OneBitAdam([p], 0.1, freeze_step=3)
    used = torch.arange(100) < 60
    for step in range(8):
        p.grad = torch.where(used, 1.0, 1.0 if step > 4 else 0.0)
        optimizer.step()
    assert torch.equal(p[~used], torch.ones(40))
    assert (p[used] != 1).all()
    assert not optimizer.state[p]["exp_avg"][~used].any()


def test_parameter_groups_have_their_own_numbers():
    torch.manual_seed(1)
    a, b = nn.Parameter(torch.randn(50)), nn.Parameter(torch.randn(60))
    gradients = [[torch.randn_like(p) for _ in range(5)] for p in (a, b)]
    theirs = [p.detach().clone() for p in (a, b)]
    groups = [{"params": [a], "lr": 1e-2}, {"params": [b], "betas": (0.8, 0.95), "weight_decay": 0.2}]
    optimizer = codec.torch.OneBitAdam(groups, 1e-3, freeze_step=2)
    for i in range(5):
        a.grad, b.grad = gradients[0][i].clone(), gradients[1][i].clone()
        optimizer.step()
    reference(theirs[:1], gradients[:1], 2, 1e-2, (0.9, 0.999), 1e-8, 0, True)
    reference(theirs[1:], gradients[1:], 2, 1e-3, (0.8, 0.95), 1e-8, 0.2, True)
    assert torch.equal(a, theirs[0])
    assert torch.equal(b, theirs[1])


# The freeze


def test_auto_freezes_when_second_moments_are_stable():
    torch.manual_seed(0)
    p = nn.Parameter(torch.zeros(1000))
    optimizer = codec.torch.OneBitAdam([p], 1e-3, (0.9, 0.95), freeze_step="auto")
    sizes = [10.0 if step < 30 else 1.0 for step in range(200)]  # the window is 20 steps
    frozen = []
    for size in sizes:
        p.grad = size * torch.randn_like(p)
        optimizer.step()
        frozen.append(optimizer.frozen)
        if optimizer.frozen:
            break
    assert not any(frozen[:90])  # v, which forgets by 0.95 a step, still falls
    assert optimizer.frozen
    assert optimizer.drift() <= 0.04


def test_freeze_of_moving_second_moments_warns_once():
    p = nn.Parameter(torch.zeros(1000))
    optimizer = codec.torch.OneBitAdam([p], 1e-3, freeze_step=20)
    assert math.isnan(optimizer.drift())
    for step in range(20):
        p.grad = torch.full_like(p, 0.7**step)
        if step < 19:
            optimizer.step()
    with pytest.warns(UserWarning, match=r"frozen after 20 steps, but still changed by \d\d%.*freeze later"):
        optimizer.step()
    assert optimizer.drift() > 0.45
    drift = optimizer.drift()
    optimizer.step()  # warnings are errors
    assert optimizer.drift() == drift


@pytest.mark.parametrize(("factor", "warns"), [(0.95, True), (0.98, False)])
def test_freeze_warns_from_a_drift_of_a_quarter_on(factor, warns):
    p = nn.Parameter(torch.zeros(1000))
    optimizer = codec.torch.OneBitAdam([p], 1e-3, freeze_step=20)
    for step in range(20):
        p.grad = torch.full_like(p, factor**step)
        with pytest.warns(UserWarning, match="40% of the steps") if warns and step == 19 else nullcontext():
            optimizer.step()
    assert (optimizer.drift() > 0.25) == warns


UNFROZEN = """
import torch, codec.torch
for freeze_step, steps in (("auto", 0), ("auto", 7), (9, 3)):
    p = torch.nn.Parameter(torch.ones(9))
    optimizer = codec.torch.OneBitAdam([p], freeze_step=freeze_step)
    for _ in range(steps):
        p.grad = torch.ones(9)
        optimizer.step()
    globals()[f"kept{freeze_step}{steps}"] = optimizer
"""


def test_auto_that_has_not_frozen_is_logged(caplog):
    kept = []
    for freeze_step, steps in (("auto", 0), ("auto", 7), (9, 3)):
        p = nn.Parameter(torch.ones(9))
        kept.append(codec.torch.OneBitAdam([p], freeze_step=freeze_step))
        for _ in range(steps):
            p.grad = torch.ones(9)
            kept[-1].step()
    phase._warn_of_unfrozen()
    (message,) = [record.getMessage() for record in caplog.records if "in 7 steps" in record.getMessage()]
    assert "1 / (1 - b2) = 1000 steps" in message
    assert "in 3 steps" not in caplog.text


@pytest.mark.nightly
def test_end_of_a_process_logs_that_auto_has_not_frozen():
    done = subprocess.run([sys.executable, "-c", UNFROZEN], capture_output=True, text=True, check=True)
    assert done.stderr.count("has not frozen second moments") == 1
    assert "in 7 steps" in done.stderr
    assert "1 / (1 - b2) = 1000 steps" in done.stderr


def test_parameter_without_gradients_before_the_freeze_is_reported():
    a, b = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))
    optimizer = codec.torch.OneBitAdam([a, b], freeze_step=1)
    a.grad = torch.ones(5)
    with pytest.warns(UserWarning, match=r"1 parameters had no gradient before the freeze.*\[1\]"):
        optimizer.step()
    b.grad = torch.ones(5)
    optimizer.step()
    assert torch.equal(b, torch.ones(5))


# Arguments


def test_wrong_arguments_are_refused():
    p = nn.Parameter(torch.ones(5))
    for how, error, match in [
        ({"freeze_step": 0}, codec.ArgumentError, "at least 1, got 0"),
        ({"freeze_step": "soon"}, codec.ArgumentError, "'soon'"),
        ({"freeze_step": 1, "lr": -1.0}, codec.ArgumentError, "learning rate"),
        ({"freeze_step": 1, "spec": codec.Ternary()}, codec.SpecError, "no contraction"),
        ({"freeze_step": 1, "spec": codec.Truncate()}, codec.SpecError, "is for momenta"),
        ({"freeze_step": 1, "spec": "tiny"}, codec.SpecError, "preset"),
    ]:
        with pytest.raises(error, match=match):
            codec.torch.OneBitAdam([p], **how)
    for option in ("amsgrad", "maximize", "fused"):
        with pytest.raises(codec.ArgumentError, match=f"{option}=True"):
            codec.torch.OneBitAdam([{"params": [p], option: True}], freeze_step=1)
    with pytest.raises(codec.ArgumentError, match="real parameters"):
        codec.torch.OneBitAdam([nn.Parameter(torch.ones(5, dtype=torch.complex64))], freeze_step=1)
    optimizer = codec.torch.OneBitAdam([p], freeze_step=1)
    for model, match in [(5, "got int"), (nn.Linear(2, 2), "lacks parameters"), (nn.Sequential(), "none of the")]:
        with pytest.raises(codec.ArgumentError, match=match):
            optimizer.register(model)


def test_nonfinite_gradients_are_refused_without_ranks():
    p = nn.Parameter(torch.ones(5))
    optimizer = codec.torch.OneBitAdam([p], freeze_step=2)
    unchanged = p.detach().clone()
    for step in range(4):
        p.grad = torch.full((5,), math.inf if step == 1 else math.nan)
        before = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(codec.ArgumentError, match="NaN or Inf"):
            optimizer.step()
        assert torch.equal(p, unchanged)
        assert str(optimizer.state_dict()) == str(before)
        p.grad = torch.ones(5)
        optimizer.step()
        unchanged = p.detach().clone()


# Ranks


def deepspeed(rank_gradients, freeze, lr, betas, eps, group):
    """Return a parameter's values after 1-bit Adam as DeepSpeed does it, and all momenta: two phases of signs.

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
        optimizer = codec.torch.OneBitAdam(
            module.parameters(), 1e-2, (0.9, 0.99), freeze_step=5, spec=codec.Sign(group_size=spec_size)
        ).register(module, policy=ENCODE_ALL, options=OPTIONS)
        for gradient in gradients_of(rank, 25, n):
            module.weight.grad = torch.from_numpy(gradient.copy())
            optimizer.step()
            assert np.array_equal(module.weight.grad.numpy(), gradient)  # left to the caller
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
    """With lossless momenta, DistributedDataParallel, no_sync() and a plain module give the same bits."""
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
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-3, atol=1e-5)
    return found


def test_ddp_accumulation_and_plain_modules_agree():
    results = run_ranks(2, _wrapping)
    assert results[0] == results[1]


def _identical(rank, size):
    """Replicas stay identical with every spec; one-bit momenta take about one bit a value."""
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
    assert lossless[2] / 5 < lossless[1] / 3 / 5  # bytes of a frozen step, and a fifth of those of a lossless one
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
    """Whatever would change momenta instead of gradients after the freeze is refused from the first step on."""
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
    """Parameters that only some ranks use, or that none uses, without DistributedDataParallel."""
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
    """A GradScaler changes no bit; all ranks skip a step with Inf."""
    found = []
    for scaled in (False, True):
        model = wrapped()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3, enabled=scaled)
        optimizer = optimizer_of(model, grad_scaler=scaler)
        for step in range(9):
            if scaled and step in (1, 5):  # one more step, which overflows on one rank
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
    """Ranks freeze in the same step, and warn of nothing."""
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
