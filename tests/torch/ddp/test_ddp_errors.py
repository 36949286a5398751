"""Steps of DDP hooks that fail raise on all ranks and change nothing; wrong arguments are rejected."""

import pickle
import time

import pytest
import torch
import torch.distributed as dist

import codec
import codec.torch
from codec.torch.ddp import residuals as hook_residuals
from support.ddp_training import (
    ENCODE_ALL,
    EqualLayers,
    check_failed_step,
    data,
    hook_state_bytes,
    parameter_bytes,
    train,
    wrapped,
)
from support.faults import at_fault_point, die
from support.ranks import run_ranks


def _refused(rank, size):
    model = wrapped()
    hook = codec.torch.ddp_hook(codec.Quantize(4), feedback=True, options=codec.options(algorithm="two_shot")).register(
        model
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    train(model, optimizer, rank, 3)
    check_failed_step(model, hook, optimizer, rank, 3)
    train(model, optimizer, rank, 3, 4)  # training continues as if the failed step had not happened
    return hook.stats().failed_steps, parameter_bytes(model)


def test_nan_on_one_rank_raises_on_all_and_changes_nothing():
    results = run_ranks(3, _refused)
    assert all(refused == 1 for refused, _ in results)
    assert len({b for _, b in results}) == 1


def _nested(rank, size):
    model, other = wrapped(EqualLayers(nested=True)), wrapped(EqualLayers(nested=True))
    hook = codec.torch.ddp_hook(codec.Float8(), policy=ENCODE_ALL).register(model)

    def step():
        model.zero_grad()
        model(torch.randn(16, 64, requires_grad=True)).square().mean().backward()
        return [p.grad.clone() for p in model.parameters()]

    found = [step()]
    for i, layer in enumerate(model.module.layers):
        poison = layer.weight.register_hook(lambda g: g * (torch.nan if rank else 1))
        with pytest.raises(codec.ArgumentError if rank else codec.PeerError, match=r"NaN|nothing was changed"):
            step()
        poison.remove()
        assert hook.stats().failed_steps == i + 1
        found.append(step())

    def broken(*_):  # raises between two inner passes, when no bucket is in flight
        assert not torch.is_grad_enabled()

    if rank:
        model.module.layers[1].register_forward_pre_hook(broken)
    with pytest.raises(AssertionError if rank else codec.PeerError):
        step()
    if rank:
        hook.register(other)  # ends the unfinished step, so that rank 0 stops waiting and raises
    with pytest.raises(codec.PeerError, match="new group"):
        codec.torch.all_reduce(torch.ones(3))
    return [g.tolist() for grads in found for g in grads]


def test_errors_in_reentrant_backward_passes_are_raised():
    """An error in a reentrant backward pass raises, for any bucket, also after the passes of earlier buckets ended."""
    results = run_ranks(2, _nested)
    assert results[0] == results[1]


def _alone(rank, size):
    """Fail on rank 1, before its first message or after all ranks have agreed; return the steps' outcomes."""
    found = []
    for where, name in ((hook_residuals.HookResiduals, "begin_step"), (codec.torch.ddp.reducer, "scatter")):
        model = wrapped(EqualLayers(), process_group=dist.new_group())
        codec.torch.ddp_hook(codec.Quantize(4), feedback=True).register(model)
        call = getattr(where, name)

        def fails(*args, where=where, name=name, call=call):
            setattr(where, name, call)
            raise MemoryError

        def step(i, model=model):
            model.zero_grad()
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(size * i + rank))
            model(x).square().sum().backward()
            return [p.grad.tolist() for p in model.parameters()]

        found.append(step(0))
        if rank:
            setattr(where, name, fails)
        if name == "scatter" and rank == 0:  # rank 0 has already succeeded when rank 1 fails to store its results
            step(1)
        else:
            with pytest.raises(MemoryError if rank else codec.PeerError):
                step(1)
        if name == "begin_step":  # nothing was sent, so all ranks can continue
            found.append(step(2))
        else:
            with pytest.raises(codec.PeerError, match="new group"):
                step(2)
    return found


def test_failure_on_one_rank_raises_on_all():
    """A failure on one rank raises on all ranks, and buckets of equal size are not confused."""
    results = run_ranks(2, _alone)
    assert results[0] == results[1]


def _lacking(rank, size):
    model = wrapped(EqualLayers())
    optimizer = torch.optim.SGD(model.module.layers[:3].parameters(), 0.1)
    codec.torch.ddp_hook(codec.Truncate(), optimizer=optimizer).register(model)
    with pytest.raises(codec.ArgumentError, match=r"lacks the parameters layers\.3\.weight"):
        model(torch.ones(4, 64)).sum().backward()


def test_parameters_of_another_optimizer():
    run_ranks(1, _lacking)


def _lost(rank, size):
    model = wrapped()
    hook = codec.torch.ddp_hook(codec.Quantize(4), feedback=True).register(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    train(model, optimizer, rank, 2)
    before, state = parameter_bytes(model), hook_state_bytes(hook)
    x, y = data(rank, 2)
    channel = codec.torch.group.communicator.communicator_of(model.process_group).channel
    begin = time.monotonic()
    with (
        at_fault_point(channel, 15 if rank == 1 else -1, die),
        pytest.raises(codec.PeerError, match=r"gone|new group"),
    ):
        torch.nn.functional.cross_entropy(model(x), y).backward()
    assert parameter_bytes(model) == before
    assert hook_state_bytes(hook) == state
    return time.monotonic() - begin


def test_lost_rank_raises_in_backward_on_all_others():
    took = run_ranks(3, _lost, timeout=3, killed=(1,))
    assert max(took[0], took[2]) < 6


def test_wrong_arguments_are_rejected():
    with pytest.raises(codec.SpecError, match="optimizer="):
        codec.torch.ddp_hook(codec.Truncate())
    with pytest.raises(codec.SpecError, match="has no residual"):
        codec.torch.ddp_hook(codec.Lossless(), feedback=True)
    with pytest.raises(codec.ArgumentError, match="ring"):
        codec.torch.ddp_hook(codec.Sign(), options=codec.options(algorithm="ring"))
    for spec in (codec.Ternary(clip=2.5), codec.Sign("l2"), codec.Quantize(2)):
        with pytest.raises(codec.SpecError, match="not a contraction"):
            codec.torch.ddp_hook(spec, feedback=True)
    again = pickle.loads(pickle.dumps(codec.torch.ddp_hook(codec.Float8())))
    assert again.spec == codec.Float8()
    for bad in ("x", codec.Sign, None):
        with pytest.raises(codec.SpecError, match="not a spec"):
            codec.torch.ddp_hook(bad)
    for bad in ("foo", 5, []):
        with pytest.raises(codec.ArgumentError, match="algorithm must be"):
            codec.torch.ddp_hook(options=codec.options(algorithm=bad))
    with pytest.raises(codec.ArgumentError, match="a DistributedDataParallel, got Sequential"):
        again.register(torch.nn.Sequential())
    for bad in (None, [1], {"worker": 1}):
        with pytest.raises(codec.StateError, match=r"the Hook state (must be a dict|lacks)"):
            again.load_state_dict(bad)
