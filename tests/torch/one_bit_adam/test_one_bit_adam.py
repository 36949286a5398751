"""OneBitAdam in one process: bit-identical to references, freezes as specified, refuses wrong arguments."""

import copy
import math
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import codec
import codec.torch
from codec.torch.one_bit_adam import phase
from support.ddp_training import net, parameter_bytes
from support.one_bit_adam import take_step

# Tests in one process against bit-exact references


def reference(parameters, gradients, freeze, lr, betas, eps, decay, decoupled, ratio=None):
    """Take steps of Adam, and after step `freeze` those of 1-bit Adam without compression, by the paper's formulas.

    `ratio`: upper bound of |m| / sqrt(v) after the freeze.
    """
    b1, b2 = betas
    for p, grads in zip(parameters, gradients, strict=True):
        m, v, denominator = torch.zeros_like(p), torch.zeros_like(p), None
        for t, g in enumerate(grads, 1):
            m = torch.lerp(m, g if decoupled else torch.add(g, p, alpha=decay), 1 - b1)
            if t <= freeze:
                g = g if decoupled else torch.add(g, p, alpha=decay)  # noqa: PLW2901
                v = (v * b2).addcmul_(g, g, value=1 - b2)
                denominator = v.sqrt() / math.sqrt(1 - b2**t) + eps
            elif ratio is not None:
                m = torch.minimum(torch.maximum(m, -ratio * denominator), ratio * denominator)
            if decoupled:
                p.mul_(1 - lr * decay)
            p.addcdiv_(m, denominator, value=-lr / (1 - b1**t))


@pytest.mark.parametrize(("foreach", "ratio"), [(None, 1.0), (True, 0.5), (None, None), (True, None)])
@pytest.mark.parametrize("decoupled", [True, False])
def test_steps_are_those_of_the_reference_to_the_bit(decoupled, foreach, ratio):
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(40, 30)), nn.Parameter(torch.randn(17))]
    theirs = [p.detach().clone() for p in ours]
    gradients = [[torch.randn_like(p) * 10 ** -(i % 3) for i in range(9)] for p in ours]
    how = (1e-2, (0.9, 0.99), 1e-8, 0.1)
    optimizer = codec.torch.OneBitAdam(ours, *how, freeze_step=4, decoupled_weight_decay=decoupled, max_ratio=ratio)
    optimizer.param_groups[0]["foreach"] = foreach
    for i in range(9):
        for p, grads in zip(ours, gradients, strict=True):
            p.grad = grads[i].clone()
        optimizer.step()
        assert optimizer.frozen == (i >= 3)
    reference(theirs, gradients, 4, *how, decoupled, ratio)
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
    reference(theirs[:1], gradients[:1], 2, 1e-2, (0.9, 0.999), 1e-8, 0, True, 1.0)
    reference(theirs[1:], gradients[1:], 2, 1e-3, (0.8, 0.95), 1e-8, 0.2, True, 1.0)
    assert torch.equal(a, theirs[0])
    assert torch.equal(b, theirs[1])


def rare_row(max_ratio=1.0, steps=30, **group):
    """Train an embedding whose row 1 has tiny gradients until the freeze after step 10; return it and its optimizer."""
    p = nn.Parameter(torch.zeros(2, 50))
    optimizer = codec.torch.OneBitAdam([{"params": [p]} | group], 1e-3, freeze_step=10, max_ratio=max_ratio)
    for step in range(steps):
        p.grad = torch.ones(2, 50) if step >= 10 else torch.tensor([[1.0], [1e-5]]).expand(2, 50).clone()
        optimizer.step()
    return p.detach(), optimizer


@pytest.mark.parametrize("corrected", [True, False])
def test_values_with_tiny_second_moments_move_by_the_learning_rate_at_most(corrected):
    p, optimizer = rare_row(bias_correction=corrected)
    largest = 1 if corrected else 1 / math.sqrt(1 - 0.999**10)  # lr / sqrt(v) without the correction of v
    assert 15 * 1e-3 < -p[1].min() < 35 * 1e-3 * largest
    ratio = optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"][1].max() / 1e-5
    assert ratio == pytest.approx(1, abs=0.02)  # the stored momentum is limited, too


def test_unlimited_steps_with_tiny_second_moments_warn_and_are_large():
    with pytest.warns(UserWarning, match=r"1 parameters have second moments below 1/10,000.*max_ratio=1.*\[0\]"):
        p, _ = rare_row(max_ratio=None)
    assert p[1].abs().min() > 100


def test_few_ordinary_values_are_limited():
    torch.manual_seed(0)
    found = []
    for max_ratio in (1.0, None):
        p = nn.Parameter(torch.zeros(1000))
        optimizer = codec.torch.OneBitAdam([p], 1e-3, freeze_step=100, max_ratio=max_ratio)
        g = torch.Generator().manual_seed(0)
        for _ in range(200):
            p.grad = torch.randn(1000, generator=g) + 0.1
            optimizer.step()
        found.append(p.detach())
    assert (found[0] != found[1]).float().mean() < 0.02


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, "1", True])
def test_max_ratio_must_be_positive(value):
    with pytest.raises(codec.ArgumentError, match="max_ratio must be a finite number above 0, or None"):
        codec.torch.OneBitAdam([nn.Parameter(torch.zeros(3))], freeze_step=1, max_ratio=value)


# Tests of the step at which second moments freeze


def test_auto_freezes_when_second_moments_are_stable():
    torch.manual_seed(0)
    p = nn.Parameter(torch.zeros(1000))
    optimizer = codec.torch.OneBitAdam([p], 1e-3, (0.9, 0.95), freeze_step="auto")
    # Scale of the gradients by step; stability is judged over 20 steps
    sizes = [10.0 if step < 30 else 1.0 for step in range(200)]
    frozen = []
    for size in sizes:
        p.grad = size * torch.randn_like(p)
        optimizer.step()
        frozen.append(optimizer.frozen)
        if optimizer.frozen:
            break
    assert not any(frozen[:90])  # v decays by 0.95 per step, and is still falling
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
    optimizer.step()  # must not warn: pytest turns warnings into errors
    assert optimizer.drift() == drift


@pytest.mark.parametrize(("factor", "warns"), [(0.95, True), (0.98, False)])
def test_freeze_warns_from_a_drift_of_a_quarter_on(factor, warns):
    p = nn.Parameter(torch.zeros(1000))
    optimizer = codec.torch.OneBitAdam([p], 1e-3, freeze_step=20)
    for step in range(20):
        p.grad = torch.full_like(p, factor**step)
        with pytest.warns(UserWarning, match="freeze later") if warns and step == 19 else nullcontext():
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
    command = [sys.executable, "-P", "-c", UNFROZEN]  # -P: import the installed package, not the working directory
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
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


# Tests of invalid arguments


def test_wrong_arguments_are_refused():
    p = nn.Parameter(torch.ones(5))
    for how, error, match in [
        ({"freeze_step": 0}, codec.ArgumentError, "at least 1, got 0"),
        ({"freeze_step": "soon"}, codec.ArgumentError, "'soon'"),
        ({"freeze_step": 1, "lr": -1.0}, codec.ArgumentError, "learning rate"),
        ({"freeze_step": 1, "spec": codec.Ternary()}, codec.SpecError, "is not a contraction"),
        ({"freeze_step": 1, "spec": codec.Truncate()}, codec.SpecError, "encodes momenta"),
        ({"freeze_step": 1, "spec": "tiny"}, codec.SpecError, "preset"),
    ]:
        with pytest.raises(error, match=match):
            codec.torch.OneBitAdam([p], **how)
    for option in ("amsgrad", "maximize", "fused"):
        with pytest.raises(codec.ArgumentError, match=f"{option}=True"):
            codec.torch.OneBitAdam([{"params": [p], option: True}], freeze_step=1)
    with pytest.raises(codec.ArgumentError, match="must be real floats"):
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
