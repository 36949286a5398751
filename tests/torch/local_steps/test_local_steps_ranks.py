"""LocalSteps when ranks leave and join: remaining ranks keep their state, and new ranks receive the parameters."""

import os
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import codec.torch
from codec.torch.group.communicator import communicator_of
from support.faults import KILLED, at_fault_point, die
from support.local_training import (
    Linear,
    adam,
    flat,
    moved,
    nesterov,
    net,
    parameter_bytes,
    push,
    raised,
    started,
    started_linear,
    state_bytes,
    train,
)
from support.rank_loss import FAULTY, fault_points, run_with_fault
from support.ranks import RankPool, run_ranks

LR = 0.01
HOW = {"every": 3, "spec": codec.Sign(group_size=64)}


def share_of_residuals(local):
    """Return this rank's share of the mean of all residuals: worker residuals divided by N, plus residuals of sums."""
    state = local.state_dict()
    names = list(state["anchors"])
    total = {name: torch.zeros(x.numel(), dtype=torch.float64) for name, x in state["anchors"].items()}
    for role, weight in (("worker", 1 / state["world_size"]), ("server", 1)):
        for key, values in state["residuals"].get(role, {}).items():
            if isinstance(values, torch.Tensor):
                name, _, ends = key.rpartition("[")
                start, stop = map(int, ends[:-1].split(":"))
                total[name][start:stop] += weight * values.double()
    return torch.cat([total[name] for name in names]).numpy()


def _three_two_three(rank, size, how, steps):
    """Rank 2 leaves after some steps, and a new process replaces it later."""
    pair, again = dist.new_group([0, 1]), dist.new_group([0, 1, 2])
    model, optimizer, local = started_linear(**how)

    def run(first, last):
        push(model, optimizer, rank, range(first, last), local.step)

    run(0, steps)
    local.synchronize()
    lost = share_of_residuals(local)
    if rank < 2:
        before = share_of_residuals(local)
        local.change_group(pair)
        # The residuals' share of the mean is unchanged
        np.testing.assert_allclose(share_of_residuals(local), before, rtol=0, atol=1e-7)
        run(steps, 2 * steps)
        local.synchronize()
        local.change_group(again)
        assert local.stats().world_size == 3
    else:  # rank 2 is a new process now
        model = Linear()
        with torch.no_grad():
            model.a.zero_()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        local = codec.torch.LocalSteps(model, optimizer, group=again, **how)
        assert local.steps == 2 * steps
    start = flat(model)
    run(2 * steps, 3 * steps)
    local.finish(exact=True)
    return flat(model), lost, start, parameter_bytes(model)


def check_three_two_three(how, steps):
    found = run_ranks(3, _three_two_three, how, steps)
    phases = [(range(3), range(steps)), (range(2), range(steps, 2 * steps)), (range(3), range(2 * steps, 3 * steps))]
    expected = flat(Linear()) + sum(moved(ranks, some, LR) for ranks, some in phases) - found[2][1]
    for parameters, _, start, bits in found:
        np.testing.assert_allclose(parameters, expected, rtol=0, atol=5e-6)
        np.testing.assert_array_equal(start, found[0][2])
        assert bits == found[0][3]
    assert np.abs(found[2][1]).max() > 1e-4  # the lost rank's residuals are more than rounding


def test_ranks_that_leave_lose_their_residuals_alone():
    check_three_two_three(HOW, 6)


@pytest.mark.nightly
@pytest.mark.parametrize("how", [HOW | {"fragments": 3, "delay": 1}, HOW | {"warmup": 2}], ids=str)
def test_ranks_leave_and_come_between_fragments(how):
    check_three_two_three(how, 7)


_kept = []  # model, optimizer and LocalSteps of this process, kept when its group is replaced


def _begin(rank, size, how):
    model, optimizer, local = started(**how)
    train(model, optimizer, rank, range(6), local.step)
    _kept[:] = [model, optimizer, local]


def _lose(rank, size, how):
    """Kill rank 1 before a synchronization; return the other rank's errors, and whether its state is unchanged."""
    model, _optimizer, local = _kept
    if rank == 1:
        os._exit(1)
    if how.get("delay"):  # the mean in flight may have arrived before rank 1 died
        raised(local.synchronize)
    before, shared = parameter_bytes(model), state_bytes(local)
    error = raised(local.synchronize)
    again = raised(local.synchronize)
    return error, again, before == parameter_bytes(model), shared == state_bytes(local)


def _go_on(rank, size, how):
    if not _kept:  # this is a new process, which replaces the lost rank
        model = net(seed=8)
        optimizer = adam(model)
        _kept[:] = [model, optimizer, codec.torch.LocalSteps(model, optimizer, **how)]
    else:
        _kept[2].change_group()
    model, optimizer, local = _kept
    norm, steps = local.stats().residual_norm, local.steps
    train(model, optimizer, rank, range(6, 9), local.step)
    local.finish()
    return parameter_bytes(model), norm, steps


@pytest.mark.parametrize("how", [{"every": 4}, {"every": 4, "delay": 3, "outer": nesterov}], ids=["now", "in flight"])
def test_lost_rank_is_an_error_that_changes_nothing_and_a_new_one_takes_its_place(how):
    with RankPool(2, timeout=10) as pool:
        pool.new_group()
        pool.run(_begin, how)
        pool.start(_lose, how)
        (error, again, same, kept), killed = pool.results([0])[0], pool.results([1])[0]
        assert killed is KILLED
        assert error[0] == again[0] == "PeerError"
        assert same
        assert kept
        pool.replace(1)
        pool.new_group()
        (a, norm, steps), (b, new_norm, new_steps) = pool.run(_go_on, how)
    assert a == b
    assert norm > 0 or "delay" in how
    assert new_norm == 0
    assert steps == new_steps == 6


def _refused_change(rank, size):
    """change_group() to an unusable group raises and changes nothing."""
    alone = dist.new_group([0])
    model, optimizer, local = started(every=4)
    train(model, optimizer, rank, range(6), local.step)
    before = parameter_bytes(model), state_bytes(local)
    errors = [raised(lambda: local.change_group(5))]
    if rank == 1:
        errors.append(raised(lambda: local.change_group(alone)))
    assert (parameter_bytes(model), state_bytes(local)) == before
    local.synchronize()
    return errors, parameter_bytes(model)


def test_wrong_groups_are_refused():
    (first, a), (second, b) = run_ranks(2, _refused_change)
    assert [kind for kind, _ in first + second] == ["ArgumentError"] * 3
    assert "this rank is not in group=" in second[1][1]
    assert a == b


def _sites(rank, size):
    """Ranks (0, 1) and (2, 3) average gradients in every step; (0, 2) and (1, 3) synchronize by local steps."""
    within, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    across, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    model = net()
    optimizer = adam(model)
    ddp = DistributedDataParallel(model, process_group=within)
    local = codec.torch.LocalSteps(ddp.module, optimizer, every=4, warmup=2, group=across)
    train(ddp, optimizer, rank, range(9), local.step)
    apart = parameter_bytes(model)
    local.finish()
    return apart, parameter_bytes(model)


@pytest.mark.nightly
def test_sites_take_local_steps_of_distributed_data_parallel():
    found = run_ranks(4, _sites)
    apart = [a for a, _ in found]
    assert apart[0] == apart[1] != apart[2] == apart[3]
    assert len({end for _, end in found}) == 1


def _prepare(rank, size):
    """Train up to the next synchronization, with a new LocalSteps or with the one kept from the former group."""
    if _kept:
        _kept[2].change_group()
    else:
        model = nn.Sequential(net(), nn.BatchNorm1d(3))
        optimizer = adam(model)
        with codec.options(timeout=5):
            _kept[:] = [model, optimizer, codec.torch.LocalSteps(model, optimizer, every=100, spec=HOW["spec"])]
    model, optimizer, local = _kept
    train(model, optimizer, rank, range(local.steps, local.steps + 3), local.step)


def _count(rank, size):
    """Run a synchronization; return its number of communication events, and the event number of the last message."""
    with at_fault_point(communicator_of(None).channel, -1, None) as events:
        _kept[2].synchronize()
    return events.count, events.last_send, parameter_bytes(_kept[0])


def _disturbed(rank, size, point, fault):
    model, _, local = _kept
    before, begin = (parameter_bytes(model), state_bytes(local)), time.monotonic()
    with at_fault_point(communicator_of(None).channel, point if rank == FAULTY else -1, fault):
        error = raised(local.synchronize)
    if error is not None:
        assert (parameter_bytes(model), state_bytes(local)) == before
    return error and error[0], time.monotonic() - begin


@pytest.mark.parametrize("count", [3, pytest.param(12, marks=pytest.mark.nightly)])
def test_rank_that_dies_in_a_synchronization_changes_nothing_on_the_others(count):
    """A rank dies at any event of a synchronization; the other ranks are unchanged, and continue with a new rank."""
    with RankPool(3) as pool:
        pool.new_group()
        pool.run(_prepare)
        events, last_send, _ = pool.run(_count)[FAULTY]
        pool.run(_prepare)
        for point in fault_points(events, count):
            run_with_fault(pool, die, _disturbed, point, voted=point > last_send)
            pool.new_group()
            pool.run(_prepare)
        assert len({bits for *_, bits in pool.run(_count)}) == 1
