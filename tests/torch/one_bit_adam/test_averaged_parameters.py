"""OneBitAdam averages parameters of the registered model, updates others locally, and refuses unknown ones."""

import logging
import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import codec
import codec.torch
from support.ddp_training import change_error, parameter_bytes
from support.one_bit_adam import LOSSLESS, OPTIONS, Chain, batch, layers, registered
from support.ranks import run_ranks

# Tests of parameters that are not averaged


def _others(rank, size):
    """Momenta of a second DDP model, of other modules and of ignored parameters follow Adam with frozen v."""
    for kind in ("second", "beside", "ignored"):
        for zero_one in (False, True)[: 1 + (kind == "second")]:
            model = Chain(4)
            mine, other = model.layers[:2], model.layers[2:]
            if kind == "ignored":
                names = [name for name, _ in model.named_parameters() if name[7] in "23"]
                DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
                ddp = second = DistributedDataParallel(model)
            else:
                ddp = DistributedDataParallel(nn.Sequential(*mine))
                second = DistributedDataParallel(nn.Sequential(*other)) if kind == "second" else nn.Sequential(*other)
            schedule = codec.torch.VarianceSchedule(3, refreshes=9, max_interval=1) if zero_one else 3
            how = LOSSLESS | {"freeze_step": schedule, "max_ratio": None}
            optimizer = codec.torch.OneBitAdam(model.parameters(), 1e-2, (0.9, 0.97), **how)
            optimizer.register(ddp, options=OPTIONS)
            p = other[0].weight
            m, v, expected = torch.zeros_like(p), torch.zeros_like(p), p.detach().clone()
            for t in range(1, 8):
                optimizer.zero_grad()
                x = batch(rank if kind == "second" else 0, t)
                (ddp(x) if kind == "ignored" else second(ddp(x)).square().mean()).backward()
                g = p.grad.clone()
                optimizer.step()
                m = torch.lerp(m, g, 0.1)
                if t <= 3:
                    v = 0.97 * v + 0.03 * g * g
                    root = (v / (1 - 0.97**t)).sqrt() + 1e-8
                expected -= 1e-2 / (1 - 0.9**t) * m / root
                assert torch.allclose(optimizer.state[p]["exp_avg"], m, rtol=1e-4, atol=1e-8), (kind, t)
                assert torch.allclose(p, expected, rtol=1e-4, atol=1e-6), (kind, t)
            optimizer.zero_grad()
            (ddp(x) if kind == "ignored" else second(ddp(x)).square().mean()).backward()
            p.grad.fill_(math.nan)
            before = parameter_bytes(model)
            with pytest.raises(codec.ArgumentError, match="parameters of this rank are unchanged"):
                optimizer.step()
            assert parameter_bytes(model) == before
    return parameter_bytes(model)


def test_other_parameters_are_stepped_by_their_own_momenta():
    run_ranks(2, _others)


def _logged(rank, size):
    net, other, second = layers()
    ddp, elsewhere = DistributedDataParallel(net), DistributedDataParallel(second)
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("codec.torch").addHandler(handler)
    named = nn.ModuleDict({"net": net, "other": other, "second": second}).named_parameters()
    codec.torch.OneBitAdam(named, freeze_step=3).register(ddp)
    assert len(records) == 1
    assert "2 parameters that no DistributedDataParallel averages, such as other.weight, other.bias" in records[0]
    assert elsewhere is not None


def test_parameters_that_no_model_averages_are_logged_by_name():
    run_ranks(1, _logged)


def _frozen(rank, size):
    """Layers frozen before or after register() stay unchanged; a layer unknown to DDP raises an error with its name."""
    for when in ("before", "after", "late"):
        model = DistributedDataParallel(Chain(), find_unused_parameters=True)
        first = model.module.layers[0]
        if when == "before":
            first.requires_grad_(False)
        optimizer = registered(model)
        for step in range(6):
            if step == {"after": 0, "late": 5}.get(when):
                first.requires_grad_(False)
                before = parameter_bytes(first)
            optimizer.zero_grad()
            model(batch(rank, step)).backward()
            optimizer.step()
        if when != "before":
            assert parameter_bytes(first) == before
    model = Chain()
    model.layers[0].requires_grad_(False)
    ddp = DistributedDataParallel(model)
    optimizer = registered(ddp)
    model.layers[0].requires_grad_(True)
    ddp(batch(rank, 0)).backward()
    with pytest.raises(codec.StateError, match=r"does not average layers\.0\.weight, layers\.0\.bias"):
        optimizer.step()


@pytest.mark.filterwarnings("ignore:2 parameters had no gradient")
def test_frozen_layers_stay_and_layers_unknown_to_ddp_are_refused():
    run_ranks(2, _frozen)


# Tests of experts: layers that only some ranks use in a step


def _experts(rank, size, set_to_none):
    """Parameters used by one rank or no rank in a step are updated equally on all ranks, with and without DDP."""
    found = []
    for make in (lambda m: m, lambda m: DistributedDataParallel(m, find_unused_parameters=True)):
        model = make(Chain(4))
        optimizer = registered(model, freeze_step=4)
        for step in range(9):
            used = [0, 1, 2, 3] if step < 4 else [0, 1 + rank] if step % 2 else [0, 1]
            optimizer.zero_grad(set_to_none)
            model(batch(rank, step), used).backward()
            if step == 6:
                m = optimizer.state[getattr(model, "module", model).layers[3].weight]["exp_avg"]
                before = m.clone()
            optimizer.step()
            if step == 6:  # a rank without a gradient counts as gradient 0: the momentum decays
                assert torch.allclose(m, 0.9 * before, rtol=1e-5)
        found.append(parameter_bytes(model))
    assert found[0] == found[1]
    return found


@pytest.mark.parametrize("set_to_none", [True, False])
def test_experts_that_no_rank_uses_have_gradients_of_zeros_after_the_freeze(set_to_none):
    results = run_ranks(2, _experts, set_to_none)
    assert results[0] == results[1]


def _static(rank, size):
    """DDP with static_graph and gradient_as_bucket_view gives the same bits as plain DDP."""
    found = []
    for how in ({}, {"static_graph": True}, {"gradient_as_bucket_view": True, "find_unused_parameters": True}):
        model = DistributedDataParallel(Chain(), **how)
        optimizer = registered(model)
        for step in range(6):
            optimizer.zero_grad()
            model(batch(rank, step)).backward()
            optimizer.step()
        found.append(parameter_bytes(model))
    assert found[0] == found[1] == found[2]


def test_kinds_of_ddp_give_the_same_bits():
    run_ranks(2, _static)


def _zeros_or_none(rank, size):
    """A gradient of zeros on one rank and no gradient on the other are equivalent, before and after the first use."""
    used, other = (nn.Parameter(torch.full((100, 100), 0.5)) for _ in range(2))
    optimizer = codec.torch.OneBitAdam([used, other], 0.1, weight_decay=0.1, freeze_step=5, **LOSSLESS)
    for step in range(8):
        used.grad = batch(rank, step, 100)[0].expand(100, 100).clone()
        other.grad = torch.zeros(100, 100) if rank == step % 2 else None
        if step == 2 and rank == 0:
            other.grad = torch.ones(100, 100)
        optimizer.step()
        if step < 2:
            assert other not in optimizer.state or not optimizer.state[other]
    return parameter_bytes(nn.ParameterList([used, other])), float(optimizer.state[other]["step"])


def test_zeros_on_one_rank_and_no_gradient_on_another_count_alike():
    first, second = run_ranks(2, _zeros_or_none)
    assert first == second
    assert first[1] == 6


def _random_training(rank, seed, wraps):
    """Train with random experts, frozen layers and learning rates of 0; return the parameters of each step."""
    random = np.random.default_rng(seed)
    model = Chain(5)
    ddp = DistributedDataParallel(model, find_unused_parameters=True) if wraps else model
    freeze = int(random.integers(2, 5))
    schedule = codec.torch.VarianceSchedule(freeze, refreshes=int(random.integers(1, 4)), max_interval=4)
    groups = [{"params": model.layers[:3].parameters(), "lr": float(random.choice([0, 1e-4]))}]
    groups += [{"params": model.layers[3:].parameters()}]
    how = {"freeze_step": [freeze, schedule][seed % 2], "decoupled_weight_decay": bool(random.integers(2)), **LOSSLESS}
    optimizer = codec.torch.OneBitAdam(groups, 1e-4, weight_decay=0.1, **how)
    optimizer.register(ddp, options=OPTIONS, max_grad_norm=random.choice([None, 0.01]))
    found = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "second moments were frozen")
        warnings.filterwarnings("ignore", ".* parameters had no gradient")
        for step in range(12):
            used = random.random((2, 5)) < 0.7  # used[rank, layer]
            used[:, 0] = True
            frozen = random.random(5) < 0.1
            frozen[0] = False
            for layer, stays in zip(model.layers, frozen, strict=True):
                layer.requires_grad_(not stays)
            poisoned = random.random() < 0.15
            before = parameter_bytes(model)
            optimizer.zero_grad(set_to_none=False)
            for p in model.parameters():
                if not optimizer.state.get(p):  # a zero gradient would create Adam's state; None does not
                    p.grad = None
            try:
                loss = ddp(batch(rank, step), np.flatnonzero(used[rank]))
                (loss * (math.nan if poisoned and rank == step % 2 else 1)).backward()
                optimizer.step()
            except codec.CodecError as e:
                if not poisoned or e.code != codec.Status.NONFINITE or parameter_bytes(model) != before:
                    raise
            found.append([p.detach().clone() for p in model.parameters()])
    optimizer.finish()
    return [*found, [p.detach().clone() for p in model.parameters()]], optimizer


def _random(rank, size, seeds):
    ends = []
    for seed in seeds:
        (plain, first), (wrapped, second) = (_random_training(rank, seed, wraps) for wraps in (False, True))
        for step, (ours, theirs) in enumerate(zip(plain, wrapped, strict=True)):
            assert change_error(ours, theirs, layers(5).parameters()) < 1e-3, (seed, step)
        assert first._phase.steps == second._phase.steps
        ends.append([p.tolist() for p in plain[-1] + wrapped[-1]])
    return ends


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 60), marks=pytest.mark.nightly)])
def test_random_trainings_agree_with_and_without_ddp(seeds):
    first, second = run_ranks(2, _random, seeds)
    assert first == second


# Tests of parameters that are added during training


def _added(rank, size):
    """Added parameters are averaged before the freeze, and refused after it; unfrozen ones are averaged."""
    for registers in (False, True):
        module = layers()
        first, second, third = (m.weight for m in module)
        third.requires_grad_(False)
        optimizer = codec.torch.OneBitAdam([first], 0.1, freeze_step=4, spec=codec.Sign(group_size=32))
        if registers:
            with pytest.raises(codec.ArgumentError, match="optimizer lacks parameters of the model"):
                optimizer.register(module)
            for p in module.parameters():
                p.requires_grad_(p is first)
            optimizer.register(module, policy=codec.torch.Policy(lossless_small=False), options=OPTIONS)
            with pytest.raises(codec.ArgumentError, match="registered module lacks parameters of the optimizer"):
                optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        twin = torch.optim.AdamW([second.detach().clone()], 0.1, weight_decay=0.0)
        (copied,) = twin.param_groups[0]["params"]
        second.requires_grad_(True)
        for step in range(6):
            gradients = [batch(r, step)[0].expand(32, 32) for r in range(size)]
            if step == 1:
                optimizer.add_param_group({"params": [second, third]})
            first.grad = gradients[rank].clone()
            if step >= 1:
                second.grad = gradients[rank].clone()
                copied.grad = torch.stack(gradients).mean(0)
            if step == 2:
                third.requires_grad_(True)
            if step >= 2:
                third.grad = second.grad.clone()
            optimizer.step()
            if 1 <= step < 4:
                twin.step()
                assert torch.allclose(second, copied, atol=1e-5)
        assert len(optimizer.param_groups) == 2
        with pytest.raises(codec.StateError, match="after the freeze of second moments"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        assert len(optimizer.param_groups) == 2
        assert float(optimizer.state[third]["step"]) == 4
    return parameter_bytes(module)


@pytest.mark.filterwarnings("ignore:second moments were frozen")
def test_added_and_unfrozen_parameters_are_averaged():
    results = run_ranks(2, _added)
    assert results[0] == results[1]
