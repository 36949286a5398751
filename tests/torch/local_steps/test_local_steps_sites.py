"""LocalSteps between sites of several ranks, which average gradients in each step by DistributedDataParallel."""

import os

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import codec
import codec.torch
from support.local_sites import SITES, Tied, parallel, sites, train, train_with_pause
from support.local_training import ROUNDED, adam, flat, nesterov, parameter_bytes, raised, state_bytes
from support.ranks import RankPool

SPARSE = codec.torch.Feedback(codec.TopK(1 / 4), decay=0.95)


@pytest.fixture(scope="module")
def four():
    """Return four ranks in two sites."""
    with RankPool(4) as ranks:
        ranks.new_group()
        yield ranks


def _trained(rank, size, group, how, steps):
    ddp, optimizer, local = parallel(group, **how)
    train(ddp, optimizer, range(steps), local.step)
    with local.averaged():
        mean = flat(ddp.module)
    local.finish()
    return flat(ddp.module), parameter_bytes(ddp.module), local.stats(), mean


OUTER = {"outer": nesterov, "spec": ROUNDED}
HOWS = {
    "now": {"spec": ROUNDED},
    "stochastic": {},
    "fragments": {"spec": ROUNDED, "fragments": 3, "delay": 1},
    "outer": OUTER | {"fragments": 2},
    "warmup": {"spec": ROUNDED, "warmup": 3},
    "sparse": {"spec": SPARSE},
    "two_shot": {"spec": ROUNDED},
}


@pytest.mark.parametrize("name", HOWS)
def test_sites_send_one_copy_and_get_the_means_of_one_rank_a_site(four, name):
    how = HOWS[name] | {"every": 4}
    found = four.run(_trained, None, how, 9)
    flats = four.run(_trained, "between", how, 9)
    assert len({bits for _, bits, *_ in found}) == 1
    one_copy = sum(stats.sent_nbytes for *_, stats, _ in found) / SITES
    copies = sum(stats.sent_nbytes for *_, stats, _ in flats) / SITES
    assert one_copy < 0.62 * copies  # of two copies
    assert sum(stats.values for *_, stats, _ in found[:2]) == flats[0][2].values
    for (ours, _, _, mean), (theirs, _, _, their_mean) in zip(found, flats, strict=True):
        if name == "stochastic":
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=0.02)
            continue
        np.testing.assert_array_equal(mean, found[0][3])
        if name == "sparse":
            continue
        np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_array_equal(mean, their_mean)


def _resumed(rank, size, how):
    """Train with and without a pause; return both models and states."""
    both = [train_with_pause(parallel, pause, **how) for pause in (None, 5)]
    return [(parameter_bytes(model), state_bytes(local)) for model, local in both]


@pytest.mark.parametrize("how", [{"every": 3}, {"every": 4, "fragments": 2, "delay": 2, "outer": nesterov}], ids=str)
def test_training_resumes_to_the_bit(four, how):
    for whole, resumed in four.run(_resumed, how):
        assert whole == resumed


def _accident(rank, size):
    """Change a parameter on rank 3 alone; return the errors and whether they changed nothing."""
    ddp, optimizer, local = parallel(every=100, spec=ROUNDED)
    train(ddp, optimizer, range(3), local.step)
    if rank == 3:
        with torch.no_grad():
            ddp.module.back.weight[0, 0] += 1e-3
    before = parameter_bytes(ddp.module), state_bytes(local)
    error = raised(local.synchronize)
    return error, before == (parameter_bytes(ddp.module), state_bytes(local))


def test_ranks_of_a_site_that_differ_are_an_error_that_changes_nothing(four):
    found = four.run(_accident)
    assert all(kind == "PeerError" and "other arguments" in text and same for (kind, text), same in found)
    assert any("checksum of values that must be equal on all ranks of a site" in text for (_, text), _ in found)


def _adapted(rank, size):
    """Train adapters of frozen layers alone."""
    mesh = sites()
    torch.manual_seed(1)
    base = nn.Linear(64, 64).requires_grad_(False)
    model = nn.Sequential(base, nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    ddp = DistributedDataParallel(model, process_group=mesh.get_group("within"))
    optimizer = adam(model)
    local = codec.torch.LocalSteps(model, optimizer, every=2, spec=ROUNDED, group=mesh)
    for step in range(4):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        optimizer.step()
        local.step()
    return parameter_bytes(model), local.stats()


def test_only_adapters_leave_a_site(four):
    found = four.run(_adapted)
    assert len({bits for bits, _ in found}) == 1
    assert [stats.values for _, stats in found] == [64 * 64] * 4
    for _, stats in found:  # half of the adapters in 4 bits with scales, and small messages
        assert 2 * 64 * 64 * 0.5 < stats.sent_nbytes < 2 * 64 * 64 * 0.75


def _two_schedules(rank, size):
    """Each rank is a replica: sites average changes every 2 steps, and each other every 6 steps."""
    mesh = sites()
    model = Tied()
    optimizer = adam(model)
    site = codec.torch.LocalSteps(model, optimizer, every=2, spec=codec.Lossless(), group=mesh.get_group("within"))
    local = codec.torch.LocalSteps(model, optimizer, every=6, group=mesh)
    after = []
    train(model, optimizer, range(13), site.step, local.step, lambda: after.append(parameter_bytes(model)))
    with site.averaged(), local.averaged():
        mean = parameter_bytes(model)
    site.finish()
    local.finish()
    return after, mean, parameter_bytes(model), local.stats().synchronizations


def test_sites_average_often_and_each_other_rarely(four):
    found = four.run(_two_schedules)
    for step in range(13):
        bits = [after[step] for after, *_ in found]
        site = step % 2 == 1
        assert (bits[0] == bits[1]) is (bits[2] == bits[3]) is site
        assert (bits[0] == bits[2]) is (step in (5, 11))
    assert len({mean for _, mean, *_ in found}) == len({end for *_, end, _ in found}) == 1
    assert found[0][3] == 3


_kept = []  # model, optimizer and LocalSteps of this process, kept when its group is replaced


def _begin(rank, size):
    _kept[:] = parallel(every=4, spec=codec.Sign())
    train(*_kept[:2], range(6), _kept[2].step)


def _lose(rank, size):
    if rank == 3:
        os._exit(1)
    ddp, _, local = _kept
    before = parameter_bytes(ddp.module), state_bytes(local)
    error = raised(local.synchronize)
    return error[0], before == (parameter_bytes(ddp.module), state_bytes(local))


def _go_on(rank, size):
    mesh = sites()
    if _kept:
        model = _kept[0].module
        optimizer, local = _kept[1:]
        local.change_group(mesh)
    else:  # this is a new process, which replaces the lost rank
        model = Tied()
        optimizer = adam(model)
        local = codec.torch.LocalSteps(model, optimizer, every=4, spec=codec.Sign(), group=mesh)
    norm = local.stats().residual_norm
    ddp = DistributedDataParallel(model, process_group=mesh.get_group("within"))  # gives rank 2's changes to rank 3
    if rank >= 2:  # so that both ranks of the site have equal states
        optimizer.state.clear()
    train(ddp, optimizer, range(6, 12), local.step)
    local.finish()
    return parameter_bytes(model), norm, local.steps


def test_lost_rank_is_an_error_on_all_ranks_that_changes_nothing():
    with RankPool(4, timeout=10) as pool:
        pool.new_group()
        pool.run(_begin)
        pool.start(_lose)
        for error, same in pool.results([0, 1, 2]):
            assert error == "PeerError"
            assert same
        pool.replace(3)
        pool.new_group()
        found = pool.run(_go_on)
    assert len({bits for bits, *_ in found}) == 1
    assert [norm > 0 for _, norm, _ in found] == [True, True, True, False]
    assert {steps for *_, steps in found} == {12}


def residual_sum(local):
    """Return the sum of this rank's residuals of each value of its own changes, divided by the number of sites."""
    state = local.state_dict()
    total = {name: torch.zeros(x.numel(), dtype=torch.float64) for name, x in state["anchors"].items()}
    for key, values in state["residuals"].get("worker", {}).items():
        if isinstance(values, torch.Tensor):
            name, _, ends = key.rpartition("[")
            start, stop = map(int, ends[:-1].split(":"))
            total[name][start:stop] += values.double() / local.stats().world_size
    return torch.cat([*total.values()]).numpy()


def _grown(rank, size):
    """Sites of one rank become sites of two ranks, which divide the residuals."""
    pair = dist.new_group([0, 2])
    mesh = sites()
    model = Tied()
    optimizer = adam(model)
    local, before = None, None
    if rank in (0, 2):
        local = codec.torch.LocalSteps(model, optimizer, every=100, spec=codec.Sign(), group=pair)
        train(model, optimizer, range(3), local.step)
        local.synchronize()
        before = residual_sum(local)
        local.change_group(mesh)
    else:
        local = codec.torch.LocalSteps(model, optimizer, every=100, spec=codec.Sign(), group=mesh)
    after, parameters = residual_sum(local), parameter_bytes(model)
    local.synchronize()
    local.finish(exact=True)
    return before, after, parameters, parameter_bytes(model), local.stats().residual_norm


def test_residuals_move_to_the_ranks_that_encode_their_values(four):
    found = four.run(_grown)
    for first in (0, 2):
        before = found[first][0]
        assert np.abs(before).max() > 0
        np.testing.assert_allclose(found[first][1] + found[first + 1][1], before, rtol=0, atol=1e-7)
        assert (found[first][1] != 0).any()
        assert (found[first + 1][1] != 0).any()
    assert len({parameters for _, _, parameters, *_ in found}) == 1
    assert len({end for *_, end, _ in found}) == 1
    assert {norm for *_, norm in found} == {0}
