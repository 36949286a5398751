"""OneBitAdam between the replicas of an FSDP2 model (HSDP): equals unsharded training, failures, checkpoints."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import codec
import codec.torch
from support.ranks import run_ranks

FREEZE, STEPS = 3, 7
SIGN = codec.Sign(group_size=32)
# FSDP2 divides each in 2 shards
SHAPES = {"even": (32, 32), "vector": (128,), "frozen": (6, 6), "uneven": (5, 16), "one": (1, 8)}


class Planes(nn.Module):
    """Parameters whose gradients are the inputs: small integers, so that sums and means are exact in float32."""

    def __init__(self, names):
        super().__init__()
        torch.manual_seed(7)
        self.planes = nn.ParameterDict({name: nn.Parameter(torch.randn(SHAPES[name])) for name in names})
        if "frozen" in names:
            self.planes["frozen"].requires_grad_(False)

    def forward(self, gradients):
        return sum((self.planes[name] * g).sum() for name, g in gradients.items())


def gradients(names, replica, step):
    """Return the gradients of the two parts into which a replica's batch is divided."""
    g = torch.Generator().manual_seed(1000 * step + replica)
    return [{name: torch.randint(-8, 9, SHAPES[name], generator=g).float() for name in names} for _ in range(2)]


def take_steps(model, optimizer, place, steps, poison=None):
    """Take steps with the gradients of (replica, part); part None: with the mean of both parts' gradients."""
    replica, part = place
    for step in steps:
        names = list((model.module if part is None else model).planes)
        first, second = gradients(names, replica, step)
        given = {k: (first[k] + second[k]) / 2 for k in names} if part is None else (first, second)[part]
        if poison is not None:
            given[poison][0, 0] = torch.nan
        optimizer.zero_grad()
        model(given).backward()
        optimizer.step()


def optimizer_of(model, *, group=None, clip=None, **how):
    how = {"freeze_step": FREEZE, "spec": SIGN, "warmup": codec.Quantize(8, group_size=32, rounding="nearest")} | how
    policy = codec.torch.Policy(lossless_small=False, uneven=None)
    optimizer = codec.torch.OneBitAdam(model.parameters(), 1e-2, weight_decay=0.01, **how)
    options = codec.options(algorithm="two_shot")
    return optimizer.register(model, group=group, max_grad_norm=clip, policy=policy, options=options)


def hsdp(names, shape, rank, **how):
    """Return a sharded model, its optimizer, and the place of a rank for :func:`take_steps`."""
    model = Planes(names)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh["shard"])
    return model, optimizer_of(model, group=mesh.get_group("replicate"), **how), divmod(rank, shape[1])


def values(model):
    """Return all values of a model, gathered from its shards."""
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([p.detach().flatten() for p in whole])


EXACT = {
    "signs": {},
    "0/1 Adam": {"freeze_step": codec.torch.VarianceSchedule(FREEZE, refreshes=1, max_interval=2)},
}
ROUNDED = {
    "lossless": {
        "spec": codec.Lossless(),
        "warmup": codec.Lossless(),
        "betas": (0.9, 0.8),
        "freeze_step": "auto",
        "clip": 5.0,
    },
}


def _trained(rank, size, shape):
    """Return the values of a model after each kind of training; shape None: by DistributedDataParallel."""
    found = {}
    for kind, how in (EXACT | ROUNDED).items():
        names = ["even", "vector", "frozen"] if kind in EXACT else list(SHAPES)
        if shape is None:
            model = DistributedDataParallel(Planes(names))
            optimizer, place = optimizer_of(model, **how), (rank, None)
        else:
            model, optimizer, place = hsdp(names, shape, rank, **how)
        take_steps(model, optimizer, place, range(STEPS))
        optimizer.finish()
        found[kind] = values(model), optimizer.drift(), optimizer.stats().ratio
    return found


def test_steps_are_those_of_plain_training():
    """If no shard boundary divides a group, scales are equal to those of unsharded training, and so are all bits."""
    plain = run_ranks(2, _trained, None)[0]
    for found in run_ranks(4, _trained, (2, 2), fresh=True):
        for kind in EXACT | ROUNDED:
            assert found[kind][0] == pytest.approx(plain[kind][0], rel=0, abs=0 if kind in EXACT else 1e-6), kind
            assert found[kind][1] == pytest.approx(plain[kind][1], rel=1e-4)
        assert found["signs"][2] < found["lossless"][2] / 3


def state_of(model, optimizer):
    """Return the shards of this rank, its moments, phase and residuals, for comparison."""
    moments = [(k, x.to_local()) for s in optimizer.state.values() for k, x in s.items() if hasattr(x, "to_local")]
    tensors = [*(p.to_local() for p in model.parameters()), *(x for _, x in moments)]
    return [x.detach().clone() for x in tensors], optimizer.state_dict()["param_groups"][0]["one_bit"]


def assert_equal(a, b):
    assert all(torch.equal(x, y) for x, y in zip(a[0], b[0], strict=True))
    assert a[1] == b[1]


def _fails(rank, size):
    """Make steps fail: NaN in one shard, or a rank in another step than the other replicas. Return the errors."""
    errors = []
    undisturbed, optimizer, place = hsdp(list(SHAPES), (2, 2), rank)
    take_steps(undisturbed, optimizer, place, range(STEPS))
    for first, how in ((1, "NaN"), (FREEZE + 1, "NaN"), (FREEZE + 2, "step")):
        model, optimizer, place = hsdp(list(SHAPES), (2, 2), rank)
        take_steps(model, optimizer, place, range(first))
        before, steps = state_of(model, optimizer), optimizer._phase.steps
        optimizer._phase.steps += how == "step" and rank == 2
        with pytest.raises(codec.CodecError) as e:
            take_steps(model, optimizer, place, [first], "even" if how == "NaN" and rank == 2 else None)
        optimizer._phase.steps = steps
        assert_equal(state_of(model, optimizer), before)
        take_steps(model, optimizer, place, range(first, STEPS))
        assert torch.equal(values(model), values(undisturbed))
        errors.append((type(e.value).__name__, e.value.code, str(e.value)))
    return errors


def test_step_that_fails_for_some_shards_changes_nothing_on_any_rank():
    found = run_ranks(4, _fails, fresh=True)
    for n in (0, 1):
        assert [errors[n][0] for errors in found] == ["PeerError", "PeerError", "ArgumentError", "ArgumentError"]
        assert {errors[n][1] for errors in found} == {codec.Status.NONFINITE}
    assert {errors[2][0] for errors in found} == {"PeerError"}
    for rank in (1, 3):  # ranks 1 and 3 hold the other shards, whose replicas are in the same step
        assert "other shards" in found[rank][2][2]


def _lost(rank, size, pauses):
    model, optimizer, place = hsdp(list(SHAPES), (2, 2), rank)
    take_steps(model, optimizer, place, range(FREEZE + 1))
    before = state_of(model, optimizer)
    optimizer.zero_grad()
    model(gradients(list(SHAPES), place[0], FREEZE + 1)[place[1]]).backward()
    dist.barrier()
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(pauses[rank])
    begin = time.monotonic()
    with pytest.raises(codec.PeerError):
        optimizer.step()
    assert_equal(state_of(model, optimizer), before)
    return time.monotonic() - begin


@pytest.mark.parametrize("pauses", [(0, 0, 0), (0.3, 0.3, 0.6)])  # second case: rank 1 detects the loss before its step
def test_lost_rank_fails_on_all_ranks_of_all_replicas_at_once(pauses):
    """A rank that cannot begin the step must not leave the other ranks of its replica waiting."""
    # Seconds; the group's timeout is 30 minutes
    assert max(run_ranks(4, _lost, pauses, killed=(3,), limit=60)[:3]) < 15


def _saved(model, optimizer):
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def _resumed(rank, size, folder):
    for first in (1, FREEZE + 1):
        model, optimizer, place = hsdp(list(SHAPES), (2, 2), rank)
        take_steps(model, optimizer, place, range(first))
        optimizer.zero_grad()
        dcp.save(_saved(model, optimizer), checkpoint_id=f"{folder}/{first}")
        again, resumed, _ = hsdp(list(SHAPES), (2, 2), rank)
        with torch.no_grad():
            for p in again.parameters():
                p.zero_()
        template = _saved(again, resumed)
        dcp.load(template, checkpoint_id=f"{folder}/{first}")
        set_model_state_dict(again, template["model"])
        set_optimizer_state_dict(again, resumed, template["optimizer"])
        assert_equal(state_of(again, resumed), state_of(model, optimizer))
        for net, each in ((model, optimizer), (again, resumed)):
            take_steps(net, each, place, range(first, STEPS))
        assert torch.equal(values(model), values(again))
        own = optimizer.state_dict()
        for n, (name, words) in enumerate([("rank 0 of 2, shard 5 of 6", "shard"), ("exp_avg", "sharded")]):
            damaged = optimizer.state_dict()
            if n == 0:
                entry = damaged["param_groups"][0]["one_bit"]
                damaged["param_groups"][0]["one_bit"] = {
                    (name if str(k).startswith("rank ") else k): v for k, v in entry.items()
                }
            else:
                damaged["state"][0] = damaged["state"][0] | {name: damaged["state"][0][name].full_tensor()}
            with pytest.raises(codec.StateError, match=words):
                optimizer.load_state_dict(damaged)
        optimizer.load_state_dict(own)
        with pytest.raises(codec.StateError, match=r"torch\.distributed\.checkpoint"):
            optimizer.state_dict(gather=True)


def test_training_goes_on_from_a_checkpoint(tmp_path):
    run_ranks(4, _resumed, str(tmp_path), fresh=True)


def _refused(rank, size):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = Planes(["even", "vector"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = codec.torch.OneBitAdam(model.parameters(), freeze_step=1)
    with pytest.raises(codec.ArgumentError, match=r'group=mesh.get_group\("replicate"\)'):
        optimizer.register(model)
    with pytest.raises(codec.StateError, match="before the first step"):
        optimizer.step()
    tensors = init_device_mesh("cpu", (2, 1), mesh_dim_names=("shard", "tensor"))
    column = nn.Sequential(nn.Linear(8, 8))
    parallelize_module(column, tensors["tensor"], {"0": ColwiseParallel()})
    fully_shard(column, mesh=tensors["shard"])
    of_both = codec.torch.OneBitAdam(column.parameters(), freeze_step=1)
    with pytest.raises(codec.ArgumentError, match='mesh=mesh\\["shard"\\]'):
        of_both.register(column, group=tensors)
    ranks = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    partly = Planes(["even", "vector"])
    fully_shard(partly, mesh=ranks["shard"], ignored_params={partly.planes["vector"]})
    of_part = codec.torch.OneBitAdam(partly.parameters(), freeze_step=1)
    with pytest.raises(codec.ArgumentError, match=r"FSDP2 does not shard planes\.vector"):
        of_part.register(partly, group=ranks.get_group("replicate"))
    partly.planes["vector"].requires_grad_(False)
    with pytest.raises(codec.ArgumentError, match="between its replicas"):
        # All ranks, between which this model is sharded, are no replicas
        of_part.register(partly, group=dist.group.WORLD)
    of_part.register(partly, group=ranks.get_group("replicate"))


def test_unsupported_sharding_is_refused():
    run_ranks(2, _refused, fresh=True)
