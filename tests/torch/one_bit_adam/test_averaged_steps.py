"""Steps of OneBitAdam with ranks that are out of step, join(), copied models, GradScaler and gradient clipping."""

import copy
import io
import math
import pickle
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import codec
import codec.torch
from codec.torch.group.work import Work
from support.ddp_training import change_error, net, parameter_bytes, wrapped
from support.one_bit_adam import LOSSLESS, batch, registered
from support.ranks import run_ranks

# Tests of ranks in different phases or steps


def _differ(rank, size):
    """Ranks in different phases or steps raise, instead of averaging gradients with momenta or with other steps."""
    for how in ({"freeze_step": 2 + 2 * rank}, {"freeze_step": codec.torch.VarianceSchedule(9, refreshes=1 + rank)}):
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


# Tests of DistributedDataParallel.join()


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


# Tests of saved and copied models


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


# Tests of GradScaler and gradient clipping


def _disabled(rank, size):
    """With a disabled scaler, NaN is refused on all ranks, and local steps are allowed, as without a scaler."""
    schedule = codec.torch.VarianceSchedule(2, max_interval=4)
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


def _train_clipped(rank, kind, freeze_step, max_grad_norm):
    """Train with gradients clipped by torch or by OneBitAdam; return the first and the last loss, and parameters."""
    ddp = kind in ("ddp", "scaled")
    model = wrapped() if ddp else net()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=kind == "scaled")
    how = {} if kind == "by hand" else {"max_grad_norm": max_grad_norm, "grad_scaler": scaler}
    # This eps bounds steps by gradients: values whose frozen second moments are near 0 would diverge.
    optimizer = registered(model, freeze_step=freeze_step, eps=0.1, register=how)
    losses = []
    for step in range(7):
        optimizer.zero_grad()
        loss = (model(batch(rank, step, 20)) - 1).square().mean()
        losses.append(loss.item())
        scaler.scale(loss * (100 if step % 2 else 1)).backward()
        if kind == "by hand":
            norm = nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
            assert not step % 2 or norm > max_grad_norm
        scaler.step(optimizer)
        scaler.update()
    optimizer.finish()
    return losses[0], losses[-1], [p.detach().clone() for p in model.parameters()]


def _clipped(rank, size):
    """max_grad_norm clips each rank's gradient as clip_grad_norm_ does: with DDP, without, scaled, in local steps."""
    schedule = codec.torch.VarianceSchedule(3, max_interval=2)
    for freeze_step, kinds in ((3, ("module", "ddp", "scaled")), (schedule, ("module", "ddp"))):
        first, last, expected = _train_clipped(rank, "by hand", freeze_step, 0.25)
        assert last < first
        for kind in kinds:
            *_, found = _train_clipped(rank, kind, freeze_step, 0.25)
            assert change_error(found, expected, net().parameters()) < 1e-4
        *_, other = _train_clipped(rank, "by hand", freeze_step, 0.26)
        assert change_error(other, expected, net().parameters()) > 5e-3
    for wrong in (0, -1.0, math.inf, math.nan, "1", True):
        with pytest.raises(codec.ArgumentError, match="max_grad_norm must be"):
            registered(net(), register={"max_grad_norm": wrong})
    return [p.tolist() for p in found]


def _refused_while_clipping(rank, size):
    """With clipping, NaN in one bucket is refused on all ranks, although buckets wait for the norm."""
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
    """Identity function whose backward raises."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ZeroDivisionError("no gradient today")


def _interrupted(rank, size, max_grad_norm):
    """A backward pass that raises on one rank after some buckets also raises at once on the other rank."""
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
