"""ddp_hook("auto"): equal choices on all ranks, quality floors, checkpoints, failures, and results of training."""

import json

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import codec
import codec.torch
from codec.advisor.cost_model import LinkModel
from codec.stateful.schema import signed
from codec.torch.auto import costs
from support.ddp_training import (
    hook_state_bytes,
    net,
    parameter_bytes,
    small_forward,
    small_net,
    take_step,
    train,
)
from support.ranks import RankPool

Auto = codec.torch.Auto
SLOW = LinkModel(1e6, rtt=0.0)  # a link for which the smallest frames are predicted to be fastest


@pytest.fixture(scope="module")
def ranks():
    with RankPool(2) as ranks:
        ranks.new_group()
        yield ranks


def hooked(model=None, auto="auto", **how):
    model = DistributedDataParallel(model or net(), bucket_cap_mb=0.03)
    return model, codec.torch.ddp_hook(auto, **how).register(model)


def _trained(rank, size, steps, how):
    """Train; return the parameters, the loss, and the hook's statistics."""
    model = DistributedDataParallel(net(), bucket_cap_mb=0.03)
    hook = None if how is None else codec.torch.ddp_hook(**how).register(model)
    losses = train(model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), rank, steps)
    stats = None if hook is None else hook.stats(by_parameter=True)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return weights, losses[-1], stats


def test_a_training_ends_near_plain_ddp_and_is_exact_by_default(ranks):
    plain, loss, _ = ranks.run(_trained, 40, None)[0]
    exact, _, _ = ranks.run(_trained, 40, {"spec": "lossless"})[0]
    found = ranks.run(_trained, 40, {"spec": "auto"})
    for weights, _, stats in found:
        assert torch.equal(weights, exact), "the default loses nothing, whatever is chosen"
        assert set(stats.choices) <= {"raw", "Lossless()"}
        assert sum(stats.choices.values()) == 40
    found = ranks.run(_trained, 40, {"spec": Auto("small", SLOW)})
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][2].choices == found[1][2].choices == {"Lossless()": 1, "Quantize()": 39}
    assert found[0][2].link == SLOW
    start = torch.cat([p.detach().flatten() for p in net().parameters()])
    assert (found[0][0] - plain).norm() < 0.2 * (plain - start).norm()
    assert abs(found[0][1] - loss) < 0.1


def _limited(rank, size):
    """A tensor whose error in 4 bits exceeds the quality floor gets a less lossy spec."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(128, 128, bias=False), torch.nn.Linear(128, 128, bias=False))
    weight = 1e-3 * torch.ones(128, 128)
    weight[:, ::64] = 1.0  # one value in each group of 64 is 1,000 times the others
    model, hook = hooked(model, Auto(0.05, SLOW), policy=codec.torch.Policy(lossless_small=False))
    even = torch.randn(128, 128, generator=torch.Generator().manual_seed(rank))
    for _ in range(3):
        model.zero_grad()
        first, second = model.module[0].weight, model.module[1].weight
        out = model(torch.ones(1, 128))
        ((first * even).sum() + (second * weight).sum() + 0 * out.sum()).backward()
    parameters = hook.stats(by_parameter=True).parameters
    lossy = [codec.Quantize(b) for b in (8, 6, 5, 4, 3)]
    assert parameters["0.weight"].spec in lossy[:2]
    contents = hook.stats().contents
    assert parameters["0.weight"].spec.bits > 4
    return {name: p.spec for name, p in parameters.items()}, contents


def test_errors_of_tensors_limit_their_specs_equally_on_all_ranks(ranks):
    first, second = ranks.run(_limited)
    assert first == second


def _slowed(rank, size):
    """If ranks measure different times, their choices are still equal, and within the quality floor."""
    real = costs.numbers_of
    costs.numbers_of = lambda *a: [n * (3 + rank) // 3 for n in real(*a)]
    try:
        model, hook = hooked(auto=Auto("balanced"), feedback=True)
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        train(model, optimizer, rank, 30)
    finally:
        costs.numbers_of = real
    stats = hook.stats()
    assert set(stats.choices) <= {"raw", "Lossless()", "Float8(group_size=128)"}
    return stats.choices, parameter_bytes(model)


def test_ranks_that_measure_other_times_choose_alike(ranks):
    first, second = ranks.run(_slowed)
    assert first == second


def _resumed(rank, size):
    """A hook resumed from a checkpoint begins with the saved choice and residuals."""
    auto = Auto("smallest", SLOW)
    model, hook = hooked(small_net(), auto)
    for _ in range(5):
        take_step(model, rank, small_forward)
    assert isinstance(hook.spec, codec.Sign)
    state = hook.state_dict(gather=True)
    other, again = hooked(small_net(), auto)
    again.load_state_dict(state)
    assert again.spec == hook.spec
    late = codec.torch.ddp_hook(auto)
    late.load_state_dict(state["ranks"][rank])
    late.register(DistributedDataParallel(small_net()))
    assert late.spec == hook.spec
    assert hook_state_bytes(late) == hook_state_bytes(hook)
    expected = take_step(model, rank, small_forward)
    assert all(torch.equal(g, h) for g, h in zip(take_step(other, rank, small_forward), expected, strict=True))
    assert set(again.stats().choices) == {"Sign(group_size=1024)"}

    fresh, lossless = hooked(small_net())
    without = {k: v for k, v in state["ranks"][rank].items() if k not in ("worker", "server")}
    lossless.load_state_dict(signed(without))
    assert lossless.spec == codec.Lossless(), "a state of another quality does not lower the floor"
    take_step(fresh, rank, small_forward)
    before, good = hook_state_bytes(again), json.loads(state["ranks"][rank]["auto"])
    for wrong in (
        "[]",
        "{",
        json.dumps(good | {"level": 9}),
        json.dumps(good | {"level": True}),
        json.dumps(good | {"numbers": good["numbers"][1:]}),
        json.dumps(good | {"numbers": [-1, *good["numbers"][1:]]}),
        json.dumps(good | {"count": 1.5}),
        json.dumps(good | {"names": [1] * len(good["names"])}),
        7,
    ):
        with pytest.raises(codec.StateError):
            again.load_state_dict(signed({**state["ranks"][rank], "auto": wrong}))
        assert hook_state_bytes(again) == before


def test_checkpoints_hold_the_choice(ranks):
    ranks.run(_resumed)


def _replaced(rank, size):
    """If a rank's hook is new, all ranks measure again."""
    model, hook = hooked(small_net(), Auto("small", SLOW))
    for _ in range(3):
        take_step(model, rank, small_forward)
    model, again = hooked(small_net(), Auto("small", SLOW))
    if rank == 0:
        again.load_state_dict(hook.state_dict())
        assert again.spec == codec.Quantize(4)
    for _ in range(2):
        take_step(model, rank, small_forward)
    assert again.stats().choices == {"Lossless()": 1, "Quantize()": 1}


def test_a_new_rank_makes_all_ranks_measure_again(ranks):
    ranks.run(_replaced)


def _disturbed(rank, size):
    """Failed steps change no choice, join() and a new spec work, and residuals are kept when specs change."""
    model, hook = hooked(small_net(), Auto("small", SLOW), feedback=True, policy=codec.torch.Policy(start_step=2))
    for _ in range(3):
        take_step(model, rank, small_forward)
    before = hook.stats(by_parameter=True).parameters["2.weight"]
    assert before.spec == codec.Quantize(4)
    assert before.residual_norm > 0
    state = hook_state_bytes(hook)
    with pytest.raises(codec.ArgumentError if rank else codec.PeerError):
        take_step(model, rank, lambda m, r: small_forward(m, r) * (torch.nan if r else 1.0))
    assert hook_state_bytes(hook) == state
    take_step(model, rank, small_forward)
    assert hook.stats().choices == {"Lossless()": 2, "Quantize()": 2}
    with model.join():
        for _ in range(1 + rank):
            take_step(model, rank, small_forward)
    assert hook.stats().choices == {"Lossless()": 2, "Quantize()": 4}

    residual_norm = sum(p.residual_norm for p in hook.stats(by_parameter=True).parameters.values())
    assert residual_norm > 0
    hook.set_spec(codec.Lossless())
    grads = take_step(model, rank, small_forward)
    plain = DistributedDataParallel(small_net())
    assert not all(torch.equal(g, h) for g, h in zip(grads, take_step(plain, rank, small_forward), strict=True))
    assert not any(p.residual_norm for p in hook.stats(by_parameter=True).parameters.values()), "added to the gradient"
    assert hook.stats().choices == {}


def test_failed_steps_join_and_set_spec(ranks):
    ranks.run(_disturbed)


def _different(rank, size):
    model = DistributedDataParallel(small_net())
    codec.torch.ddp_hook(Auto("small" if rank else "balanced")).register(model)
    with pytest.raises(codec.PeerError, match="quality"):
        take_step(model, rank, small_forward)


def test_other_floors_on_ranks_are_an_error(ranks):
    ranks.run(_different)


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ({"spec": Auto("near")}, "quality must be"),
        ({"spec": Auto(link="fast")}, "link must be"),
        ({"spec": "auto", "feedback": "yes"}, "feedback must be"),
        ({"spec": "auto", "refresher": codec.CodebookRefresher(codec.Lossless())}, "refresher="),
    ],
)
def test_wrong_arguments_are_refused(how, match):
    with pytest.raises(codec.ArgumentError, match=match):
        codec.torch.ddp_hook(**how)
