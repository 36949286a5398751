"""Checkpoints of codec.torch.Rounds, and sites that come back without one."""

import io

import pytest
import torch

import codec
import codec.torch
from support.local_training import EXACT, ROUNDED, adam, log_records, nesterov, net, parameter_bytes, train
from support.rounds import MemoryStore, Pushing, merged_changes


def site(store, **how):
    model = net()
    optimizer = adam(model)
    how = {"every": 3, "quorum": (1, 0.0), "spec": ROUNDED, "outer": nesterov} | how
    return model, optimizer, lambda: codec.torch.Rounds(model, optimizer, store, "a", **how)


def saved(*items):
    file = io.BytesIO()
    torch.save([x.state_dict() for x in items], file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


@pytest.mark.parametrize("loads_first", [True, False])
def test_resumed_run_is_bit_identical(loads_first):
    store = MemoryStore()
    model, optimizer, make = site(store)
    rounds = make()
    train(model, optimizer, 0, range(7), rounds.step)
    kept, state = dict(store.objects), saved(model, optimizer, rounds)
    train(model, optimizer, 0, range(7, 14), rounds.step)
    store.objects.clear()
    store.objects.update(kept)
    again, other, make = site(store)
    if loads_first:
        again.load_state_dict(state[0])
        rounds2 = make()
    else:
        rounds2 = make()
        again.load_state_dict(state[0])
    other.load_state_dict(state[1])
    rounds2.load_state_dict(state[2])
    assert (rounds2.steps, rounds2.merged) == (7, 2)
    train(again, other, 0, range(7, 14), rounds2.step)
    assert parameter_bytes(again) == parameter_bytes(model)
    assert rounds2._member.site.anchors_digest() == rounds._member.site.anchors_digest()


def test_resumed_site_keeps_its_changes_and_merges_the_rounds_that_it_has_missed():
    store = MemoryStore()
    a, b = Pushing(store, 0), Pushing(store, 1, every=100)
    b.steps(3)
    state = saved(b.model, b.rounds)
    a.steps(6)
    again = Pushing(store, 1, every=100)
    again.model.load_state_dict(state[0])
    again.rounds.load_state_dict(state[1])
    again.pushed = 3
    assert again.rounds.merged == 3
    for x, y in zip(again.unmerged(), again.total(), strict=True):
        assert torch.equal(x.round(), y)
    again.rounds.finish()
    for x, y in zip(merged_changes(store.objects, again, again.model), again.total(), strict=True):
        assert torch.equal(x.round(), y)


@pytest.mark.parametrize("merged", [True, False])
def test_changes_that_were_sent_after_the_state_was_saved_count_once(merged):
    store = MemoryStore()
    b = Pushing(store, 1, every=100)
    b.steps(3)
    state = saved(b.model, b.rounds)
    b.steps(1)
    b.member.send()
    if merged:
        b.rounds._wait(1)
    again = Pushing(store, 1, every=100)
    again.model.load_state_dict(state[0])
    with log_records() as records:
        again.rounds.load_state_dict(state[1])
    assert any("after this state was saved" in text for _, text in records)
    assert again.rounds.steps == 3
    assert again.member.since == 0
    assert not any(x.any() for x in again.unmerged())
    Pushing(store, 0).steps(2)
    for x, y in zip(merged_changes(store.objects, b, b.model), b.total(), strict=True):
        assert torch.equal(x.round(), y)


def test_change_that_was_sent_before_the_state_was_saved_counts_once():
    store = MemoryStore()
    b = Pushing(store, 1, every=100, quorum=2)
    b.steps(2)
    b.member.send()
    b.rounds._patience = 100
    b.steps(1)
    state = saved(b.model, b.rounds)
    Pushing(store, 0).steps(2)
    again = Pushing(store, 1, every=100)
    again.model.load_state_dict(state[0])
    again.rounds.load_state_dict(state[1])
    again.pushed = 3
    assert again.rounds.merged == 1
    assert (again.member.sent, again.member.since) == (None, 1)
    for x, y in zip(again.unmerged(), again.total(begin=2), strict=True):
        assert torch.equal(x.round(), y)


def test_change_of_a_former_process_is_merged_once():
    """A site that was killed after it has sent its change, and comes back without a checkpoint, does not lose it."""
    store = MemoryStore()
    b = Pushing(store, 1, every=100)
    b.steps(3)
    b.member.send()
    again = Pushing(store, 1)
    again.pushed = 3
    again.steps(2)
    again.rounds.finish()
    for x, y in zip(merged_changes(store.objects, again, again.model), again.total(), strict=True):
        assert torch.equal(x.round(), y)


def test_wrong_states_change_nothing():
    store = MemoryStore()
    model, optimizer, make = site(store)
    rounds = make()
    train(model, optimizer, 0, range(4), rounds.step)
    state = rounds.state_dict()
    before = parameter_bytes(model), rounds._member.site.anchors_digest(), rounds.merged, rounds.steps
    other = MemoryStore()
    _, _, make = site(other)
    foreign = make().state_dict()
    wrong = [
        (foreign, "another run"),
        ({**state, "parameters": "0" * 32}, "does not have the parameters"),
        ({**state, "anchors": {}}, "another model"),
        ({**state, "residual": torch.zeros(3)}, "residuals of another model"),
        ({**state, "place": "{}"}, "damaged"),
        ({**state, "steps": -1}, "steps"),
        ({**state, "format": "LocalSteps"}, "format"),
        ({**state, "outer": {}}, "outer"),
        ({k: x for k, x in state.items() if k != "life"}, "life"),
    ]
    for given, message in wrong:
        with pytest.raises(codec.StateError, match=message):
            rounds.load_state_dict(given)
        assert (parameter_bytes(model), rounds._member.site.anchors_digest(), rounds.merged, rounds.steps) == before
    rounds.load_state_dict(state)


def test_state_of_a_lossless_site_has_no_residual():
    store = MemoryStore()
    _, _, make = site(store, spec=EXACT, outer=None)
    rounds = make()
    assert rounds.state_dict()["residual"].numel() == 0
    rounds.load_state_dict(rounds.state_dict())
