"""A hook continues with the remaining ranks after a loss: replicas stay equal, and residuals keep their effect."""

import copy
import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import codec
import codec.torch
from codec.stateful.checkpoint import ROLES
from support.ddp_training import ENCODE_ALL, data, net, parameter_bytes, separate_buckets, wrapped
from support.ranks import KILLED, run_ranks

STEPS, LOST_AT, LOST = 40, 8, 3
FAULTS = ["before", "in a bucket", "after"]


def _group(store, name, ranks, rank):
    return codec.torch.ProcessGroup(dist.PrefixStore(name, store), ranks.index(rank), len(ranks), timedelta(seconds=10))


def _loss(model, rank, step):
    x, _ = data(rank, step)
    return (model(x) - x[:, :5]).square().mean()


def _model():
    torch.manual_seed(3)
    layers = torch.nn.Linear(20, 64), torch.nn.GELU(), torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 5)
    return torch.nn.Sequential(*layers)


def _evaluated(model):
    """Return the loss of a batch that no rank trains with."""
    with torch.no_grad():
        return sum(_loss(model, 99, step).item() for step in range(8)) / 8


def _residuals(hook):
    state = hook.state_dict()
    return {role: {k: x.clone() for k, x in state[role].items() if isinstance(x, torch.Tensor)} for role in ROLES}


def _trained(rank, size, path, fault, wrap):
    """Train; one of four ranks dies; return the last loss, the parameters of each step, and the hook's statistics."""
    store, ranks = dist.FileStore(path, -1), list(range(size))
    separate_buckets()
    group = _group(store, "first", ranks, rank)
    model = wrapped(_model())
    dist.destroy_process_group()  # its own group is never used again
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    dying = False

    def transform(buffer, gradients):
        if dying:
            os.kill(os.getpid(), signal.SIGKILL)

    spec, two_shot = codec.Quantize(4), codec.options(algorithm="two_shot")
    hook = codec.torch.ddp_hook(spec, feedback=True, policy=ENCODE_ALL, transform=transform, options=two_shot)
    hook.register(model, group=group)
    states, step = [], 0
    while step < STEPS:
        last = rank == LOST and step == LOST_AT and fault is not None
        if last and fault == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        dying = last and fault == "in a bucket"
        optimizer.zero_grad()
        loss = _loss(model, rank, step)
        try:
            loss.backward()
        except codec.PeerError:
            assert step in (LOST_AT, LOST_AT + 1)
            before = _residuals(hook)
            codec.torch.close_group(group)
            ranks = [r for r in ranks if r != LOST]
            group = _group(store, "second", ranks, rank)
            if wrap:
                dist.init_process_group("gloo", store=dist.PrefixStore("wrap", store), rank=rank, world_size=len(ranks))
                model = DistributedDataParallel(model.module, bucket_cap_mb=0.015)
                hook.register(model, group=group)
            else:
                hook.change_group(group)
            _check_residuals(before, _residuals(hook), len(ranks) / size)
            continue
        optimizer.step()
        states.append(parameter_bytes(model))
        step += 1
        if last:
            os.kill(os.getpid(), signal.SIGKILL)
    stats = hook.stats()
    return _evaluated(model.module), states, stats.steps, stats.world_size


def _check_residuals(before, after, factor):
    """Check that residuals of gradients were multiplied by `factor`, and those of sums are unchanged."""
    for role, expected in (("worker", factor), ("server", 1.0)):
        assert before[role].keys() == after[role].keys()
        assert any(x.any() for x in before[role].values())
        assert all(torch.equal(x * torch.tensor(expected), after[role][k]) for k, x in before[role].items())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return run_ranks(4, _trained, str(tmp_path_factory.mktemp("store") / "store"), None, False)


@pytest.mark.parametrize("fault", FAULTS)
def test_training_goes_on_with_the_remaining_ranks(tmp_path, undisturbed, fault):
    found = run_ranks(4, _trained, str(tmp_path / "store"), fault, False, killed=(LOST,))
    assert found.pop(LOST) == KILLED
    _check_training(found, undisturbed)


def test_training_goes_on_in_a_new_wrapper(tmp_path, undisturbed):
    found = run_ranks(4, _trained, str(tmp_path / "store"), "in a bucket", True, killed=(LOST,))
    _check_training(found[:LOST], undisturbed)


def _check_training(found, undisturbed):
    """Check that replicas are equal after each step, and that the last loss is close to the one of four ranks."""
    for _, states, steps, size in found:
        assert (len(states), steps, size) == (STEPS, STEPS, 3)
        assert states == found[0][1]
    assert found[0][1][:LOST_AT] == undisturbed[0][1][:LOST_AT]
    loss, expected, first = found[0][0], undisturbed[0][0], _evaluated(_model())
    assert expected < first / 2
    assert abs(loss - expected) < (first - expected) / 4


def _refused(rank, size):
    """change_group() refuses hooks without a model, and models that use their own group; nothing is changed."""
    hook = codec.torch.ddp_hook("small")
    with pytest.raises(codec.ArgumentError, match=r"not registered.*call register"):
        hook.change_group()
    new = dist.new_group()
    norm = torch.nn.Sequential(net(), torch.nn.BatchNorm1d(5))
    for model, how, why in (
        (norm, {}, "broadcasts its buffers"),
        (net(), {"find_unused_parameters": True}, "searches for unused parameters"),
        (net(), {}, "order of its buckets at the begin of its second step"),
    ):
        ddp = DistributedDataParallel(copy.deepcopy(model), **how)
        hook = codec.torch.ddp_hook("small").register(ddp)
        _loss(ddp, rank, 0).backward()
        if not how:
            continue
        _loss(ddp, rank, 0).backward()
        with pytest.raises(codec.ArgumentError, match=f"{why}.*new DistributedDataParallel"):
            hook.change_group(new)
        assert hook.reducer.group is dist.group.WORLD
    with pytest.raises(codec.ArgumentError, match="order of its buckets"):
        hook.change_group(new)
    _loss(ddp, rank, 1).backward()
    with pytest.raises(codec.ArgumentError, match="group must be"):
        hook.change_group(5)
    only = dist.new_group([0])
    if rank == 1:
        with pytest.raises(codec.ArgumentError, match="not in the group"):
            hook.change_group(only)
    hook.change_group(new)
    codec.torch.close_group()
    _loss(ddp, rank, 2).backward()
    assert hook.stats().steps == 3


def test_models_that_use_their_own_group_are_refused():
    run_ranks(2, _refused)
