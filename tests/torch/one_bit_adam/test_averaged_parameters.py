"""Parameters of OneBitAdam that a step averages, steps by this rank's gradients, or refuses."""

import copy
import io
import logging
import math
import pickle
import time
import warnings
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import codec
import codec.torch
from codec.torch.group.work import Work
from support.ddp_training import net, parameter_bytes, wrapped
from support.ranks import run_ranks

OPTIONS = codec.options(algorithm="two_shot")
LOSSLESS = {"spec": codec.Lossless()}


def batch(rank, step, n=32):
    return torch.randn(16, n, generator=torch.Generator().manual_seed(100 * step + rank))


def layers(n=3):
    """Return layers of 32 x 32 weights, the same on all ranks."""
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(32, 32) for _ in range(n))


class Chain(nn.Module):
    """Layers of which a forward pass uses some."""

    def __init__(self, n=3):
        super().__init__()
        self.layers = layers(n)

    def forward(self, x, used=None):
        for i in range(len(self.layers)) if used is None else used:
            x = self.layers[i](x)
        return x.square().mean()


def registered(model, *, register=None, **how):
    how = {"freeze_step": 3, "spec": codec.Lossless(), "weight_decay": 0.1} | how
    optimizer = codec.torch.OneBitAdam(model.parameters(), 1e-2, **how)
    return optimizer.register(model, options=OPTIONS, **(register or {}))


# Parameters that the registered model does not average


def _others(rank, size):
    """Momenta of a second DDP, of a module beside it and of ignored parameters go on as those of Adam with frozen v."""
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
            schedule = codec.torch.ZeroOneSchedule(3, refreshes=9, max_interval=1) if zero_one else 3
            optimizer = codec.torch.OneBitAdam(model.parameters(), 1e-2, (0.9, 0.97), freeze_step=schedule, **LOSSLESS)
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
            with pytest.raises(codec.ArgumentError, match="rank has not moved"):
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
    """Layers frozen before or after register() stay; a layer that DDP did not know is refused by name."""
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


# Experts


def _experts(rank, size, set_to_none):
    """Parameters that no rank or one rank uses in a step move alike, with DDP and without."""
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
            if step == 6:  # a gradient of zeros, not a momentum of zeros
                assert torch.allclose(m, 0.9 * before, rtol=1e-5)
        found.append(parameter_bytes(model))
    assert found[0] == found[1]
    return found


@pytest.mark.parametrize("set_to_none", [True, False])
def test_experts_that_no_rank_uses_have_gradients_of_zeros_after_the_freeze(set_to_none):
    results = run_ranks(2, _experts, set_to_none)
    assert results[0] == results[1]


def _static(rank, size):
    """A static graph and views of buckets give the bits of plain DDP."""
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
    """A gradient of zeros on one rank and none on the other, before the first use and after it."""
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
    schedule = codec.torch.ZeroOneSchedule(freeze, refreshes=int(random.integers(1, 4)), max_interval=4)
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
            used = random.random((2, 5)) < 0.7  # of each rank
            used[:, 0] = True
            frozen = random.random(5) < 0.1
            frozen[0] = False
            for layer, stays in zip(model.layers, frozen, strict=True):
                layer.requires_grad_(not stays)
            poisoned = random.random() < 0.15
            before = parameter_bytes(model)
            optimizer.zero_grad(set_to_none=False)
            for p in model.parameters():
                if not optimizer.state.get(p):  # torch's Adam begins with a gradient of zeros
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
            for p, q in zip(ours, theirs, strict=True):
                assert torch.allclose(p, q, rtol=1e-3, atol=1e-5), (seed, step)
        assert first._phase.steps == second._phase.steps
        ends.append([p.tolist() for p in plain[-1] + wrapped[-1]])
    return ends


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 60), marks=pytest.mark.nightly)])
def test_random_trainings_agree_with_and_without_ddp(seeds):
    first, second = run_ranks(2, _random, seeds)
    assert first == second


# Parameters that are added


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
        with pytest.raises(codec.StateError, match="second moments are frozen"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        assert len(optimizer.param_groups) == 2
        assert float(optimizer.state[third]["step"]) == 4
    return parameter_bytes(module)


@pytest.mark.filterwarnings("ignore:second moments were frozen")
def test_added_and_unfrozen_parameters_are_averaged():
    results = run_ranks(2, _added)
    assert results[0] == results[1]


# Ranks that differ


def _differ(rank, size):
    """Gradients of one rank are never averaged with momenta of another, nor with those of another step."""
    for how in ({"freeze_step": 2 + 2 * rank}, {"freeze_step": codec.torch.ZeroOneSchedule(9, refreshes=1 + rank)}):
        p = nn.Parameter(batch(0, 0, 100))
        optimizer = codec.torch.OneBitAdam([p], 0.1, **how, **LOSSLESS)
        refused = 0
        for step in range(5):
            p.grad = batch(rank, step, 100)
            before = p.detach().clone()
            try:
                optimizer.step()
            except codec.PeerError:
                refused += 1
                assert torch.equal(p, before)
        assert refused == (3 if isinstance(how["freeze_step"], int) else 4)
    state = copy.deepcopy(optimizer.state_dict())
    if rank == 0:
        optimizer._phase.steps += 1
    with pytest.raises(codec.PeerError):
        optimizer.step()
    optimizer.load_state_dict(state)
    return [bytes(p.detach().numpy()), optimizer._phase.steps]


def test_ranks_that_are_in_different_steps_are_refused():
    first, second = run_ranks(2, _differ)
    assert first == second


def _delayed(rank, size):
    """Steps succeed if the thread of collectives pauses before callbacks, as on a busy machine."""
    take_callbacks = Work.take_callbacks

    def later(self):
        time.sleep(0.02)
        return take_callbacks(self)

    Work.take_callbacks = later if rank == 0 else take_callbacks
    try:
        for model in (net(), wrapped()):
            optimizer = registered(model, freeze_step=2, register={"max_grad_norm": 1.0})
            for step in range(3):
                optimizer.zero_grad()
                model(batch(rank, step, 20)).square().mean().backward()
                optimizer.step()
        return parameter_bytes(model)
    finally:
        Work.take_callbacks = take_callbacks


@pytest.mark.filterwarnings("ignore:second moments were frozen")
def test_steps_do_not_read_futures_before_their_callbacks():
    first, second = run_ranks(2, _delayed)
    assert first == second


# join()


def _train(model, optimizer, rank, steps, joining):
    with joining:
        for step in range(steps):
            optimizer.zero_grad()
            model(batch(rank, step, 20)).square().mean().backward()
            optimizer.step()


def _joined(rank, size, batches):
    """join() is refused on all ranks, however many batches they have; join(throw_on_early_termination=True) is not."""
    for divides in (True, False):
        model = wrapped(process_group=dist.new_group(timeout=timedelta(seconds=20)))
        optimizer = registered(model)
        before = parameter_bytes(model)
        joining = model.join(divide_by_initial_world_size=divides)
        with pytest.raises(codec.ArgumentError, match=r"does not support model\.join"):
            _train(model, optimizer, rank, batches[rank], joining)
        assert parameter_bytes(model) == before
    model = wrapped(process_group=dist.new_group())
    optimizer = registered(model)
    with pytest.raises(RuntimeError, match="exhausted"):
        _train(model, optimizer, rank, 2 + rank, model.join(throw_on_early_termination=True))
    return optimizer._phase.steps, parameter_bytes(model)


@pytest.mark.parametrize("batches", [(2, 2), (0, 2)])
def test_join_is_refused_on_all_ranks(batches):
    first, second = run_ranks(2, _joined, batches)
    assert first == second
    assert first[0] == 2


# Copies of the model


def _saved(rank, size):
    """A registered model can be saved and copied; a copy trains when it is registered."""
    model = wrapped()
    optimizer = registered(model)
    model(batch(rank, 0, 20)).square().mean().backward()
    optimizer.step()
    copied = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    assert len(pickle.dumps(model)) < 2 * len(pickle.dumps(model.module)) + 10_000
    file.seek(0)
    for again in (copied, torch.load(file, weights_only=False)):
        hook, _ = again._comm_hooks[0]
        with pytest.raises(codec.ArgumentError, match="is a copy"):
            hook(None, None)
        fresh = DistributedDataParallel(again.module)
        optimizer = registered(fresh)
        fresh(batch(rank, 1, 20)).square().mean().backward()
        optimizer.step()
        assert parameter_bytes(fresh) != parameter_bytes(model)


def test_registered_models_can_be_saved_and_copied():
    run_ranks(2, _saved)


# Scalers and clipping


def _disabled(rank, size):
    """A scaler that is switched off is no scaler: NaN is refused on all ranks, and local steps are allowed."""
    schedule = codec.torch.ZeroOneSchedule(2, max_interval=4)
    for freeze_step in (2, schedule):
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        model = wrapped()
        optimizer = registered(model, freeze_step=freeze_step, register={"grad_scaler": scaler})
        refused = 0
        for step in range(6):
            optimizer.zero_grad()
            x = batch(rank, step, 20)
            if step in (1, 3) and rank == 0:
                x[0, 0] = math.nan
            try:
                scaler.scale(model(x).square().mean()).backward()
            except codec.CodecError:
                refused += 1
                continue
            scaler.step(optimizer)
            scaler.update()
        assert refused == 2
        assert all(p.isfinite().all() for p in model.parameters())
    for wrong in (5, "x"):
        with pytest.raises(codec.ArgumentError, match="GradScaler or None"):
            registered(wrapped(), register={"grad_scaler": wrong})


@pytest.mark.filterwarnings("ignore:second moments were frozen")
def test_scaler_that_is_switched_off_refuses_nan_on_all_ranks():
    run_ranks(2, _disabled)


def _clipped(rank, size):
    """max_grad_norm clips each rank's gradient as clip_grad_norm_ does, with DDP, without, scaled, in local steps."""
    schedule = codec.torch.ZeroOneSchedule(3, max_interval=2)
    for freeze_step in (3, schedule):
        found = []
        for kind in ("by hand", "module", "ddp", "scaled"):
            if kind == "scaled" and freeze_step is schedule:
                continue
            ddp = kind in ("ddp", "scaled")
            model = wrapped() if ddp else net()
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=kind == "scaled")
            how = {} if kind == "by hand" else {"max_grad_norm": 0.25, "grad_scaler": scaler}
            optimizer = registered(model, freeze_step=freeze_step, register=how)
            for step in range(7):
                optimizer.zero_grad()
                loss = model(batch(rank, step, 20)).square().mean()
                scaler.scale(loss * (100 if step % 2 else 1)).backward()
                if kind == "by hand":
                    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.25)
                    assert not step % 2 or norm > 0.25
                scaler.step(optimizer)
                scaler.update()
            optimizer.finish()
            found.append([p.detach().clone() for p in model.parameters()])
        for other in found[1:]:
            for p, q in zip(found[0], other, strict=True):
                assert torch.allclose(p, q, rtol=1e-3, atol=1e-5)
    for wrong in (0, -1.0, math.inf, math.nan, "1", True):
        with pytest.raises(codec.ArgumentError, match="max_grad_norm must be"):
            registered(net(), register={"max_grad_norm": wrong})
    return [p.tolist() for p in found[-1]]


def _refused_while_clipping(rank, size):
    """NaN in one bucket is refused on all ranks, though buckets wait for the norm."""
    model = wrapped()
    optimizer = registered(model, freeze_step=2, spec=codec.Sign(group_size=64), register={"max_grad_norm": 0.1})
    scale = nn.Parameter(torch.tensor(1.0))
    for step in range(4):
        before = parameter_bytes(model), optimizer.state_dict()["param_groups"]
        for factor in (math.nan, math.inf):
            optimizer.zero_grad()
            loss = model(batch(rank, step, 20)).square().mean() * (scale * (factor if rank == step % 2 else 1))
            with pytest.raises(codec.CodecError) as raised:
                loss.backward()
            assert raised.value.code == codec.Status.NONFINITE
            assert (parameter_bytes(model), optimizer.state_dict()["param_groups"]) == before
        optimizer.zero_grad()
        model(batch(rank, step, 20)).square().mean().backward()
        optimizer.step()
    assert optimizer.stats().failed_steps == 8
    return parameter_bytes(model)


@pytest.mark.filterwarnings("ignore:second moments were frozen")
def test_nan_is_refused_on_all_ranks_while_buckets_wait_for_the_norm():
    first, second = run_ranks(2, _refused_while_clipping)
    assert first == second


class _Raise(torch.autograd.Function):
    """The identity, whose gradient is an error."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ZeroDivisionError("no gradient today")


def _interrupted(rank, size, max_grad_norm):
    """A backward pass that fails on one rank after some buckets fails on the other at once."""
    model = wrapped(process_group=dist.new_group(timeout=timedelta(seconds=60)))
    optimizer = registered(model, register={"max_grad_norm": max_grad_norm})
    model(batch(rank, 0, 20)).square().mean().backward()
    optimizer.step()
    before = parameter_bytes(model)
    if rank == 1:
        model.module[8].register_forward_hook(lambda module, inputs, output: _Raise.apply(output))
    begun = time.monotonic()
    with pytest.raises(ZeroDivisionError if rank == 1 else codec.PeerError):
        model(batch(rank, 1, 20)).square().mean().backward()
    assert time.monotonic() - begun < 20
    assert parameter_bytes(model) == before


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_a_backward_pass_that_fails_on_one_rank_fails_on_all_at_once(max_grad_norm):
    run_ranks(2, _interrupted, max_grad_norm)


def _twice(rank, size):
    """Two backward passes before a step of the warm-up add their mean gradients, as with plain DDP."""
    ours, theirs = wrapped(), wrapped()
    optimizer = registered(ours, freeze_step=9, weight_decay=0.01)
    adam = torch.optim.AdamW(theirs.parameters(), 1e-2, weight_decay=0.01)
    for step in range(3):
        for model, each in ((ours, optimizer), (theirs, adam)):
            each.zero_grad()
            for half in range(2):
                model(batch(rank, 2 * step + half, 20)).square().mean().backward()
            each.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-4, atol=1e-6)


def test_backward_passes_of_the_warmup_add_up():
    run_ranks(2, _twice)


@pytest.mark.filterwarnings("ignore:second moments were frozen")
def test_max_grad_norm_clips_the_gradients_of_each_rank():
    first, second = run_ranks(2, _clipped)
    assert first == second
