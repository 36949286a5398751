"""Rounds of codec.torch.Rounds: quorum, grace time, late changes, joins, lagging sites, and exact sums."""

import threading

import numpy as np
import pytest
import torch

import codec
import codec.torch
from codec.torch.rounds import follower
from codec.torch.rounds.arrivals import Arrivals
from codec.torch.rounds.names import ChangeName
from support.local_training import EXACT, ROUNDED, adam, log_records, nesterov, net, parameter_bytes, train
from support.ranks import run_ranks
from support.rounds import Around, MemoryStore, Pushing, merged_changes, together


def digests(*sites):
    return {(site.rounds.merged, site.member.site.anchors_digest()) for site in sites}


def close(found, expected):
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-3)


def exactly(found, expected):
    """Compare tensors of integers, which float32 sums may have moved slightly."""
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x.round(), y)


def test_one_site_trains_as_without_rounds():
    model, alone = net(), net()
    rounds = codec.torch.Rounds(model, adam(model), MemoryStore(), "a", every=3, spec=codec.Lossless(), quorum=1)
    train(model, _optimizer(rounds), 0, range(7), rounds.step)
    rounds.finish()
    train(alone, adam(alone), 0, range(7))
    for x, y in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
    assert rounds.merged == 3
    with pytest.raises(codec.StateError, match="finish"):
        rounds.step()


def _optimizer(rounds):
    return rounds._member.site.optimizers[0]


def test_round_merges_the_mean_weighted_by_steps():
    store = MemoryStore()
    a, b = Pushing(store, 0, quorum=2, early=False), Pushing(store, 1, quorum=2, every=6, early=False)
    together(lambda: a.steps(2), lambda: b.steps(6))
    assert len(digests(a, b)) == 1
    assert a.rounds.merged == 1
    mean = [(2 * x + 6 * y) / 8 for x, y in zip(a.total(), b.total(), strict=True)]
    close([p.detach() for p in a.model.parameters()], mean)


def test_round_merges_the_mean_weighted_by_tokens():
    store = MemoryStore()
    a, b = (Pushing(store, i, quorum=2, early=False) for i in range(2))
    together(lambda: a.steps(2, weight=100), lambda: b.steps(2, weight=300.0))
    mean = [(x + 3 * y) / 4 for x, y in zip(a.total(), b.total(), strict=True)]
    close([p.detach() for p in b.model.parameters()], mean)


def test_sparse_changes_are_divided_by_the_weight_of_their_senders():
    store = MemoryStore()
    sites = [Pushing(store, i, quorum=2, spec=codec.TopK(1 / 8), early=False) for i in range(2)]
    together(*(lambda site=site: site.steps(2) for site in sites))
    first, second = (merged_changes(store.objects, site, site.model) for site in sites)
    exact = {piece.name for piece in sites[0].member.site.fragments[0].pieces if piece.exact}
    for (name, p), x, y in zip(sites[0].model.named_parameters(), first, second, strict=True):
        count = 2 if name in exact else ((x != 0).int() + (y != 0).int()).clamp(min=1)
        torch.testing.assert_close(p.detach(), (x + y) / count)


def _local_steps(rank, size, outer):
    model = net()
    optimizer = adam(model)
    local = codec.torch.LocalSteps(model, optimizer, every=4, spec=codec.Lossless(), outer=outer)
    train(model, optimizer, rank, range(20), local.step)
    return [p.detach().numpy() for p in model.parameters()]


@pytest.mark.parametrize("outer", [None, nesterov])
def test_rounds_of_all_sites_agree_with_local_steps(outer):
    """Two sites, both in each round, with equal weights: only the rounding of sums differs."""
    expected = run_ranks(2, _local_steps, outer)[0]
    store, models = MemoryStore(), [net(), net()]

    def run(i):
        rounds = codec.torch.Rounds(models[i], optimizers[i], store, f"s{i}", every=4, spec=EXACT, outer=outer)
        ready.wait()
        rounds._next_look = float("inf")  # no early change
        train(models[i], optimizers[i], i, range(20), rounds.step)
        assert rounds.merged == 5

    optimizers, ready = [adam(model) for model in models], threading.Barrier(2)
    together(lambda: run(0), lambda: run(1))
    start = np.concatenate([p.detach().numpy().ravel() for p in net().parameters()])
    moved = np.concatenate([p.ravel() for p in expected]) - start
    found = np.concatenate([p.detach().numpy().ravel() for p in models[0].parameters()]) - start
    assert np.linalg.norm(found - moved) < 1e-3 * np.linalg.norm(moved)


@pytest.mark.parametrize("outer", [None, nesterov])
def test_sites_have_equal_anchors_after_each_round(outer):
    store, found = MemoryStore(), {}
    sites = [Pushing(store, i, spec=ROUNDED, quorum=2, grace=None, outer=outer) for i in range(3)]

    def run(site):
        while site.rounds.merged < 5:
            site.steps(1)
            found.setdefault(site.rounds.merged, set()).add(site.member.site.anchors_digest())

    together(*(lambda site=site: run(site) for site in sites))
    assert {number: len(some) for number, some in found.items() if number} == dict.fromkeys(range(1, 6), 1)


def test_site_that_joins_adopts_the_parameters_of_the_run():
    store = MemoryStore()
    a = Pushing(store, 0, outer=nesterov)
    a.steps(6)
    with log_records() as records:
        b = Pushing(store, 1, outer=nesterov)
    assert digests(a, b) == {(3, a.member.site.anchors_digest())}
    assert parameter_bytes(a.model) == parameter_bytes(b.model)
    assert not records
    together(lambda: a.steps(2), lambda: b.steps(2))
    assert len(digests(a, b)) == 1


def test_site_that_joins_replays_rounds_after_a_snapshot(monkeypatch):
    monkeypatch.setattr(follower, "_SNAPSHOT_ROUNDS", 3)
    store = MemoryStore()
    a = Pushing(store, 0, spec=ROUNDED, outer=nesterov)
    a.steps(16)
    assert store.contents.snapshots == {3, 6}
    assert min(store.contents.manifests) <= 3 < max(store.contents.manifests) == 7
    assert digests(a, Pushing(store, 1, spec=ROUNDED, outer=nesterov)) == digests(a)


def test_old_objects_are_deleted(monkeypatch):
    monkeypatch.setattr(follower, "_SNAPSHOT_ROUNDS", 3)
    store = MemoryStore()
    Pushing(store, 0).steps(60)
    assert store.contents.snapshots == {27, 30}
    assert len(store.objects) < 20


def test_lagging_site_keeps_its_changes_beyond_the_snapshots(monkeypatch):
    monkeypatch.setattr(follower, "_SNAPSHOT_ROUNDS", 2)
    store = MemoryStore()
    a, b = Pushing(store, 0), Pushing(store, 1, every=100)
    b.rounds._next_look = float("inf")
    b.steps(3)
    a.steps(20)
    assert min(store.contents.snapshots) > 1
    b.rounds._next_look = 0.0
    with log_records() as records:
        b.steps(1)
    assert any("was away" in text for _, text in records)
    assert len(digests(a, b)) == 1
    exactly(b.unmerged(), b.total())


def test_change_that_misses_its_round_is_merged_by_a_later_one():
    """Its sender goes on from the merged parameters and its own change, which is merged once, with its weight."""
    store = MemoryStore()
    a, b = Pushing(store, 0), Pushing(store, 1, every=10, quorum=2)
    a.steps(2)
    b.rounds._next_look = float("inf")
    b.steps(1)
    b.member.send()  # for round 0, which is closed
    b.rounds._patience = 10
    assert [c.round for c in store.contents.changes if c.site == "site1"] == [0]
    b.rounds._next_look = 0.0
    b.steps(1)
    assert b.rounds.merged == 1
    assert b.member.sent is not None
    exactly(b.unmerged(), b.total())
    a.steps(2)
    assert a.rounds.stats().sites == 2
    b.rounds._next_look = 0.0
    b.steps(1)
    assert b.rounds.stats().late_changes == 1
    exactly(b.unmerged(), b.total(begin=1))
    exactly(merged_changes(store.objects, b, b.model), [x - y for x, y in zip(b.total(), b.total(1), strict=True)])


def test_change_that_is_too_late_stays_in_the_parameters():
    store, held = MemoryStore(), []

    def before(kind, name=""):
        if kind == "put" and held:
            raise OSError("not now")

    a, b = Pushing(store, 0), Pushing(Around(store, before), 1, every=3)
    held.append(True)
    b.steps(2)
    with pytest.raises(codec.PeerError, match="not now"):
        b.steps(1)
    a.steps(2 * (follower.LATE + 2))
    held.clear()
    with log_records() as records:
        b.steps(1)
    assert any("no round has merged" in text for _, text in records), records
    assert b.rounds.stats().dropped_changes == 1
    exactly(b.unmerged(), b.total())
    assert (b.member.sent.since, b.member.sent.weight) == (4, 4.0)
    b.rounds.finish()
    exactly(merged_changes(store.objects, b, b.model), b.total())


def test_round_without_a_quorum_waits_and_the_next_call_continues():
    store = MemoryStore()
    a = Pushing(store, 0, quorum=2, timeout=0.3)
    a.steps(1)
    with pytest.raises(codec.PeerError, match=r"changes of 1 site \(site0\).*quorum is 2"):
        a.steps(1)
    assert a.rounds.steps == 2
    b = Pushing(store, 1, quorum=2, early=False)
    b.steps(2)
    a.steps(1)
    assert len(digests(a, b)) == 1
    exactly(a.unmerged(), a.total(begin=2))


def test_lost_site_delays_one_round():
    store = MemoryStore()
    sites = [Pushing(store, i, quorum=3, grace=0.5, early=False) for i in range(3)]
    together(*(lambda site=site: site.steps(2) for site in sites))
    waits = []
    for site in sites[:2]:
        site.member.quorum = 2
    for _ in range(3):
        before = sites[0].rounds.stats().wait_s + sites[1].rounds.stats().wait_s
        together(*(lambda site=site: site.steps(2) for site in sites[:2]))
        waits.append(sites[0].rounds.stats().wait_s + sites[1].rounds.stats().wait_s - before)
    assert waits[0] >= 0.5
    assert max(waits[1:]) < 0.5
    joined = Pushing(store, 2, quorum=3, grace=0.5, early=False)
    together(*(lambda site=site: site.steps(2) for site in (*sites[:2], joined)))
    assert digests(*sites[:2]) == digests(joined)


def test_slow_site_sends_the_steps_that_it_has_when_others_have_a_quorum():
    store, done = MemoryStore(), threading.Event()
    fast = [Pushing(store, i, quorum=2, grace=30.0) for i in range(2)]
    slow = Pushing(store, 2, quorum=2, every=1000)
    sites = []

    def lag():
        while not done.wait(0.02):
            slow.steps(1)

    def run(site):
        while site.rounds.merged < 12:
            site.steps(1)
            sites.append(site.rounds.stats().sites)

    def both():
        together(*(lambda site=site: run(site) for site in fast))
        done.set()

    together(lag, both)
    assert sites[-1] == 3
    assert slow.pushed < 1000
    assert slow.rounds.stats().merged_steps > 0


def test_site_that_leaves_is_not_awaited():
    store = MemoryStore()
    a, b = (Pushing(store, i, quorum=2, grace=30.0, early=False) for i in range(2))
    together(lambda: a.steps(2), lambda: b.steps(2))

    def leave():
        b.steps(1)
        b.rounds.finish()

    together(lambda: a.steps(2), leave)
    assert (a.rounds.merged, b.rounds.merged) == (2, 2)
    assert all(not x.any() for x in b.unmerged())
    a.member.quorum = 1
    a.steps(4)
    assert a.rounds.merged == 4


def test_averaged_parameters_are_those_of_the_last_round():
    store = MemoryStore()
    a, b = Pushing(store, 0), Pushing(store, 1, every=100)
    a.steps(2)
    b.steps(1)
    a.steps(1)
    own = parameter_bytes(a.model)
    with a.rounds.averaged(), b.rounds.averaged():
        assert parameter_bytes(a.model) == parameter_bytes(b.model) != own
        with pytest.raises(codec.StateError, match="averaged"):
            a.rounds.step()
    assert parameter_bytes(a.model) == own


def test_grace_time_follows_the_delays_of_changes():
    arrivals = Arrivals(None)
    arrivals.pace = 100.0
    assert arrivals.grace == 25.0
    for number in range(20):
        assert arrivals.waits(number, 1000.0 * number)
        arrivals.see([ChangeName(number, "0" * 16, "b")], 1000.0 * number + 2 + 0.1 * (number % 3))
    assert arrivals.grace == pytest.approx(2.1 + 5 * 0.1)
    arrivals.pace = 4.0
    assert arrivals.grace == 1.0
    assert Arrivals(7.0).grace == 7.0
