"""OneBitAdam's state dicts resume bit for bit, load on other numbers of ranks, and are exchanged with AdamW."""

import copy
import itertools
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import codec
import codec.torch
from support.ddp_training import net, parameter_bytes, wrapped
from support.one_bit_adam import FREEZE, STEPS, optimizer_of, plain, residuals_of, take_steps, with_entry
from support.ranks import run_ranks
from support.states import through_a_file
from support.tiers import every

OPTIONS = codec.options(algorithm="two_shot")


# Models, steps after which a state is saved, and ways to load the state: gathered, and before the model is registered
RESUMED = list(
    itertools.product(
        (wrapped, net), (2, FREEZE, FREEZE + 1, FREEZE + 3), ((False, False), (True, False), (True, True))
    )
)


def _resumed(rank, size, cases):
    """States saved in the warm-up, at the freeze or after it, by each rank or gathered, resume bit for bit."""
    for make, group in itertools.groupby(cases, lambda case: case[0]):
        steps = [(at, how) for _, at, how in group]
        model = make()
        optimizer = optimizer_of(model).register(model, options=OPTIONS)
        saved = {}
        for step in range(STEPS):
            take_steps(model, optimizer, rank, step, step + 1)
            if any(step + 1 == at for at, _ in steps):
                inner = getattr(model, "module", model)
                states = optimizer.state_dict(), optimizer.state_dict(gather=True)
                saved[step + 1] = through_a_file([copy.deepcopy(inner.state_dict()), *states])
        expected = parameter_bytes(model), plain(optimizer.state_dict())
        for at, (gathered, late) in steps:
            # A copy, because load_state_dict shares tensors with the state
            inner, state = net(), copy.deepcopy(saved[at][2 if gathered else 1])
            inner.load_state_dict(saved[at][0])
            model = make(inner) if make is wrapped else inner
            optimizer = optimizer_of(model)
            if late:
                optimizer.load_state_dict(state)
                optimizer.register(model, options=OPTIONS)
            else:
                optimizer.register(model, options=OPTIONS).load_state_dict(state)
            assert optimizer.frozen == (at >= FREEZE)
            take_steps(model, optimizer, rank, at, STEPS)
            assert parameter_bytes(model) == expected[0]
            assert plain(optimizer.state_dict()) == expected[1]


def test_resumed_training_is_the_uninterrupted_one_to_the_bit():
    run_ranks(2, _resumed, every(5, RESUMED))


def _saved(rank, size):
    model = wrapped()
    optimizer = optimizer_of(model).register(model, options=OPTIONS)
    take_steps(model, optimizer, rank, 0, 7)
    state = optimizer.state_dict(gather=True)
    return pickle.dumps((model.module.state_dict(), state, optimizer.state_dict()))


def _loaded(rank, size, saved):
    parameters, state, alone = pickle.loads(saved)
    model = wrapped()
    model.module.load_state_dict(parameters)
    optimizer = optimizer_of(model).register(model, options=OPTIONS)
    before = plain(optimizer.state_dict())
    with pytest.raises(codec.StateError, match=r"one of 4 ranks, but the group has 2.*gather=True"):
        optimizer.load_state_dict(alone)
    assert plain(optimizer.state_dict()) == before
    optimizer.load_state_dict(state)
    residuals = residuals_of(optimizer.state_dict())[rank]["momenta"]
    take_steps(model, optimizer, rank, 7, 9)
    return parameter_bytes(model), plain(residuals)


def test_two_ranks_go_on_from_four_with_the_same_total_residual():
    saved = run_ranks(4, _saved)
    first, *others = (plain(pickle.loads(s)[:2]) for s in saved)
    assert all(first == other for other in others)
    (first, *residuals), (second, *others) = run_ranks(2, _loaded, saved[0])
    assert first == second
    old = [plain(residuals_of(pickle.loads(saved[0])[1])[r]["momenta"]) for r in range(4)]
    new = residuals + others
    for role in ("worker", "server"):
        totals = []
        for ranks in (old, new):
            total = {}
            for key, x in ((k, x) for r in ranks for k, x in r[role].items() if "[" in k):
                name, _, bounds = key.partition("[")
                begin, end = map(int, bounds[:-1].split(":"))
                place = total.setdefault(name, np.zeros(64 * 64))
                place[begin:end] += np.frombuffer(x[2], np.float32) / (len(ranks) if role == "worker" else 1)
            totals.append(total)
        assert totals[0].keys() == totals[1].keys()
        assert any(x.any() for x in totals[0].values())
        for name, x in totals[0].items():
            assert np.allclose(x, totals[1][name], rtol=1e-5, atol=1e-9)


def trained(optimizer_class, steps, **how):
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(30, 20))
    optimizer = optimizer_class([p], 1e-2, weight_decay=0.1, **how)
    more_steps(p, optimizer, 0, steps)
    return p, optimizer


def more_steps(p, optimizer, first, last):
    for step in range(first, last):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
        optimizer.step()


def test_state_of_adamw_goes_on_in_the_warmup_or_is_frozen_at_once():
    p, adam = trained(torch.optim.AdamW, 6)
    expected, ours = trained(codec.torch.OneBitAdam, 6, freeze_step=6)
    assert torch.equal(p, expected)
    for freeze_step in (4, 6, 9):
        q = nn.Parameter(p.detach().clone())
        optimizer = codec.torch.OneBitAdam([q], freeze_step=freeze_step)
        optimizer.load_state_dict(copy.deepcopy(adam.state_dict()))
        assert optimizer.frozen == (freeze_step <= 6)
        assert optimizer.param_groups[0]["lr"] == 1e-2
        more_steps(q, optimizer, 6, 10)
        same, _ = trained(codec.torch.OneBitAdam, 10, freeze_step=max(6, freeze_step))
        assert torch.equal(q, same)
    theirs = torch.optim.AdamW([nn.Parameter(p.detach().clone())])
    theirs.load_state_dict(ours.state_dict())
    assert torch.equal(theirs.state_dict()["state"][0]["exp_avg_sq"], ours.state[expected]["exp_avg_sq"])


def test_auto_freezes_in_the_same_step_after_a_checkpoint():
    how = {"freeze_step": "auto", "betas": (0.9, 0.8)}
    p, whole = trained(codec.torch.OneBitAdam, 40, **how)
    q, part = trained(codec.torch.OneBitAdam, 5, **how)
    state = through_a_file(part.state_dict())
    part = codec.torch.OneBitAdam([q], **how)
    part.load_state_dict(state)
    more_steps(q, part, 5, 40)
    assert whole.frozen
    assert torch.equal(p, q)
    assert part.drift() == whole.drift()


def test_copies_and_pickles_go_on():
    p, optimizer = trained(codec.torch.OneBitAdam, 5, freeze_step=3)
    again = pickle.loads(pickle.dumps(optimizer))
    q = again.param_groups[0]["params"][0]
    for parameter, each in ((p, optimizer), (q, again)):
        more_steps(parameter, each, 5, 8)
    assert torch.equal(p, q)


def changed(state, *path_and_value):
    """Return a copy of a state whose entry at a path has another value."""
    *path, last, value = path_and_value
    state = copy.deepcopy(state)
    place = state
    for each in path:
        place = place[each]
    place[last] = value
    return state


def test_wrong_states_are_refused_and_change_nothing():
    _, optimizer = trained(codec.torch.OneBitAdam, 5, freeze_step=3)
    good = optimizer.state_dict()
    amsgrad = copy.deepcopy(good)
    amsgrad["param_groups"][0]["amsgrad"] = True
    groups = copy.deepcopy(good)
    groups["param_groups"] *= 2
    without_entry = copy.deepcopy(good)
    del without_entry["param_groups"][0]["one_bit"]
    before = plain(good)
    for wrong, match in [
        (changed(good, "state", 0, "exp_avg", torch.ones(3)), r"'exp_avg' of .* must be a tensor of shape \(30, 20\)"),
        (changed(good, "state", 0, "variance_step", 9), "'variance_step' of .* must be at most 'step', got 9"),
        (amsgrad, "amsgrad"),
        (groups, "does not fit"),
        (without_entry, "lacks the entry 'one_bit'"),
    ]:
        with pytest.raises(codec.StateError, match=match):
            optimizer.load_state_dict(wrong)
        assert plain(optimizer.state_dict()) == before
    with pytest.raises(codec.StateError, match="no model is registered"):
        optimizer.state_dict(gather=True)


def _parts_missing(rank, size):
    """An incomplete state is refused, and changes nothing."""
    model = wrapped()
    optimizer = optimizer_of(model).register(model, options=OPTIONS)
    take_steps(model, optimizer, rank, 0, 6)
    own, good = optimizer.state_dict(), optimizer.state_dict(gather=True)
    mine, other = f"rank {rank} of 2", f"rank {1 - rank} of 2"
    data = good["param_groups"][0]["one_bit"][mine]
    assert own["param_groups"][0]["one_bit"][mine] == data
    part = copy.deepcopy(good)
    for state in part["state"].values():
        del state["variance_step"]
    lost = copy.deepcopy(good)
    del lost["param_groups"][0]["one_bit"]
    before = plain(optimizer.state_dict())
    for wrong, match in [
        (part, "variance_step of parameter"),
        (lost, "has the phase and the residuals"),
        (with_entry(own, **{mine: None}), f"none of rank {rank}: load"),
        (with_entry(own, **{mine: None, other: data}), f"none of rank {rank}: load"),
        (with_entry(own, **{mine: good["param_groups"][0]["one_bit"][other]}), f"belong to rank {1 - rank}"),
        (with_entry(own, ranks=3), "that of one of 3 ranks"),
        *((with_entry(own, **{mine: data[:n]}), "must be a serialized state") for n in (0, 7, 8, 100, len(data) - 1)),
        (with_entry(own, **{mine: b"\x02" + bytes(7) + b"{}"}), r"damaged|must have the states .*, got \[\]"),
        (with_entry(own, **{mine: (10**5).to_bytes(8, "little") + b"[" * 10**5}), "must be a serialized state"),
    ]:
        with pytest.raises(codec.StateError, match=match):
            optimizer.load_state_dict(wrong)
        assert plain(optimizer.state_dict()) == before
    optimizer.load_state_dict(good)
    assert plain(optimizer.state_dict()) == before


def test_parts_of_states_are_refused():
    run_ranks(2, _parts_missing)


def test_torch_adamw_goes_on_from_a_state_and_back():
    p, ours = trained(codec.torch.OneBitAdam, 6, freeze_step=4)
    q = nn.Parameter(p.detach().clone())
    theirs = torch.optim.AdamW([q], 1e-2, weight_decay=0.1)
    theirs.load_state_dict(through_a_file(ours.state_dict()))
    back = codec.torch.OneBitAdam([q], freeze_step=4)
    back.load_state_dict(through_a_file(theirs.state_dict()))  # AdamW took no step: v is still frozen since step 4
    assert back.frozen
    assert back.state[q]["variance_step"] == 4
    more_steps(q, theirs, 6, 9)
    back = codec.torch.OneBitAdam([q], freeze_step=20)
    back.load_state_dict(through_a_file(theirs.state_dict()))  # AdamW has updated v, so it is not frozen
    assert not back.frozen
    assert back.state[q]["variance_step"] == back._phase.steps == 9
