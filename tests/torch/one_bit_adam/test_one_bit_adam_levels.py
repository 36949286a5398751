"""OneBitAdam over machines with several ranks: plain values within a machine, frames between machines."""

import copy
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import codec
import codec.torch
from support.ddp_training import change_error, net, parameter_bytes, wrapped
from support.one_bit_adam import FREEZE, OPTIONS, STEPS, loss_of, optimizer_of, plain, residuals_of, take_steps
from support.ranks import run_ranks

ZERO_ONE = {"freeze_step": codec.torch.VarianceSchedule(FREEZE, refreshes=1, max_interval=2)}
LOSSLESS = {"spec": codec.Lossless(), "warmup": codec.Lossless()}


def machines():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def registered(group, make=wrapped, **how):
    model = make()
    return model, optimizer_of(model, **how).register(model, group=group, options=OPTIONS)


def _trained(rank, size):
    """Return parameters and statistics of flat and two-level training, with a DistributedDataParallel and without."""
    found = {}
    for name, make, how in (("1-bit Adam", wrapped, LOSSLESS), ("0/1 Adam", net, LOSSLESS | ZERO_ONE)):
        for group in (None, machines()):
            model, optimizer = registered(group, make, **how)
            take_steps(model, optimizer, rank, 0, STEPS)
            optimizer.finish()
            parameters = [p.detach().clone() for p in model.parameters()]
            found[name, group is None] = parameters, parameter_bytes(model), optimizer.stats()
    return found


def test_training_in_two_levels_equals_flat_training():
    results = run_ranks(4, _trained)
    initial = list(net().parameters())
    for found in results:
        for (name, is_flat), (parameters, data, stats) in found.items():
            assert data == results[0][name, is_flat][1]  # replicas are equal
            flat, _, apart = found[name, True]
            assert change_error(_joined(parameters), _joined(flat), _joined(initial)) < 1e-3, name
            assert stats.steps == apart.steps
            assert stats.levels == ("4 ranks" if is_flat else "2 x 2 ranks")
            assert stats.cpu_s > 0 < stats.buffer_nbytes
            if not is_flat:
                assert stats.local_nbytes > 0
                assert stats.sent_nbytes < 0.5 * apart.sent_nbytes


def _joined(parameters):
    return [torch.cat([p.detach().flatten() for p in parameters])]


def _resumed(rank, size):
    """States saved in the warm-up and after the freeze, by each rank or gathered, resume bit for bit."""
    model, optimizer = registered(machines())
    saved = {}
    for step in range(STEPS):
        take_steps(model, optimizer, rank, step, step + 1)
        if step + 1 in (2, FREEZE + 2):
            states = optimizer.state_dict(), optimizer.state_dict(gather=True)
            saved[step + 1] = copy.deepcopy([model.module.state_dict(), *states])
    expected = parameter_bytes(model), plain(optimizer.state_dict())
    for at, (parameters, *states) in saved.items():
        for state in states:
            again, resumed = registered(machines())
            again.module.load_state_dict(parameters)
            resumed.load_state_dict(copy.deepcopy(state))  # which shares tensors with the state
            take_steps(again, resumed, rank, at, STEPS)
            assert parameter_bytes(again) == expected[0]
            assert plain(resumed.state_dict()) == expected[1]


def test_resumed_training_is_the_uninterrupted_one_to_the_bit():
    run_ranks(4, _resumed)


def effect(state):
    """Return the effect of the residuals of momenta of all ranks on the next mean, by parameter."""
    ranks, found = residuals_of(state), {}
    for hooks in ranks.values():
        momenta = hooks["momenta"]
        for role, factor in (("worker", momenta["within"] / len(ranks)), ("server", 1)):
            for key, values in momenta[role].items():
                name, _, where = key.rpartition("[")
                if where.endswith("]"):
                    begin, end = map(int, where[:-1].split(":"))
                    found.setdefault(name, torch.zeros(64 * 64))[begin:end] += factor * values
    return torch.cat([found[name] for name in sorted(found)])


def _moved(rank, size, live):
    """Train flat, then in two levels, then flat, from state to state, or by register(); and flat all the time."""
    ends, steps = [], ((0, FREEZE + 2), (FREEZE + 2, FREEZE + 4), (FREEZE + 4, STEPS))
    for groups in ((None, None, None), (None, machines(), dist.group.WORLD)):
        model, optimizer = registered(None, net)
        for (first, last), group in zip(steps, groups, strict=True):
            if group is not None:
                before = optimizer.state_dict(gather=True)
                if live:
                    optimizer.register(model, group=group, options=OPTIONS)
                else:
                    model, optimizer = registered(group, lambda model=model: model)
                    optimizer.load_state_dict(copy.deepcopy(before))
                torch.testing.assert_close(effect(optimizer.state_dict(gather=True)), effect(before))
            take_steps(model, optimizer, rank, first, last)
        ends.append((_joined(model.parameters()), parameter_bytes(model)))
    return ends


@pytest.mark.parametrize("live", [False, True])
def test_residuals_move_between_flat_groups_and_two_levels(live):
    results = run_ranks(4, _moved, live)
    for (flat, _), (moved, data) in results:
        assert data == results[0][1][1]
        assert change_error(moved, flat, _joined(net().parameters())) < 0.5


def _fails(rank, size):
    """A NaN on one rank, and a step that is another one at one place of all machines, fail and change nothing."""
    errors = []
    for failure in ("NaN", "step"):
        model, optimizer = registered(machines(), net)
        take_steps(model, optimizer, rank, 0, FREEZE + 1)
        before = parameter_bytes(model), plain(optimizer.state_dict())
        optimizer.zero_grad()
        loss_of(model, rank, FREEZE + 1).backward()
        if failure == "NaN" and rank == 1:
            next(model.parameters()).grad.view(-1)[0] = torch.nan
        optimizer._phase.steps += failure == "step" and rank in (1, 3)
        with pytest.raises(codec.CodecError) as e:
            optimizer.step()
        optimizer._phase.steps -= failure == "step" and rank in (1, 3)
        assert (parameter_bytes(model), plain(optimizer.state_dict())) == before
        take_steps(model, optimizer, rank, FREEZE + 1, STEPS)
        errors.append((type(e.value).__name__, parameter_bytes(model)))
    return errors


def test_error_on_some_ranks_is_an_error_on_all_and_changes_nothing():
    results = run_ranks(4, _fails)
    assert [errors[0][0] for errors in results] == ["PeerError", "ArgumentError", "PeerError", "PeerError"]
    assert {errors[1][0] for errors in results} == {"PeerError"}
    assert len({data for errors in results for _, data in errors}) == 1


def _lost(rank, size):
    model, optimizer = registered(machines(), net)
    take_steps(model, optimizer, rank, 0, FREEZE + 1)
    before = parameter_bytes(model), plain(optimizer.state_dict())
    optimizer.zero_grad()
    loss_of(model, rank, FREEZE + 1).backward()
    dist.barrier()
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(codec.PeerError):
        optimizer.step()
    assert (parameter_bytes(model), plain(optimizer.state_dict())) == before
    return time.monotonic() - begin


def test_lost_rank_is_an_error_on_all_ranks_of_all_machines():
    assert max(run_ranks(4, _lost, killed=(3,), limit=60)[:3]) < 15


def _sharded(rank, size):
    """Train with shards within machines and replicas between them, given by the whole mesh, a pair or one group."""
    mesh, found = machines(), []
    pair = mesh.get_group("replicate"), mesh.get_group("shard")
    for group, sharded in ((mesh, mesh["shard"]), (pair, mesh["shard"]), (pair[0], mesh["shard"]), (mesh, mesh)):
        model = fully_shard(net(), mesh=sharded)
        optimizer = optimizer_of(model).register(model, group=group, options=OPTIONS)
        take_steps(model, optimizer, rank, 0, STEPS)
        found.append(torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()]))
    assert all(torch.equal(each, found[0]) for each in found)
    deep = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("machine", "rank", "shard"))
    model = fully_shard(net(), mesh=deep["shard"])
    optimizer = optimizer_of(model, **LOSSLESS).register(model, group=deep["machine", "rank"], options=OPTIONS)
    take_steps(model, optimizer, rank, 0, STEPS)
    plain_model, flat = registered(None, net, **LOSSLESS)
    take_steps(plain_model, flat, rank, 0, STEPS)
    shards = _joined(p.full_tensor() for p in model.parameters())
    assert change_error(shards, _joined(plain_model.parameters()), _joined(net().parameters())) < 1e-3
    assert optimizer.stats().local_nbytes > 0


def test_shards_within_machines_and_replicas_between_them():
    run_ranks(4, _sharded)


def _refused(rank, size):
    model = fully_shard(nn.Linear(8, 8))
    optimizer = codec.torch.OneBitAdam(model.parameters(), freeze_step=1)
    for group in (None, machines()):
        with pytest.raises(codec.ArgumentError, match=r'over all 4 ranks.*fully_shard\(model, mesh=mesh\["shard"'):
            optimizer.register(model, group=group)


def test_shards_over_all_ranks_are_refused():
    run_ranks(4, _refused)
