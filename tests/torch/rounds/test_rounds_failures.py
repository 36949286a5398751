"""Rounds of codec.torch.Rounds when stores fail, calls are interrupted, and objects are lost or not valid."""

import random

import pytest
import torch

import codec
import codec.torch
from codec.torch.replicas.landing import Landing
from codec.torch.rounds.names import manifest_name
from codec.torch.rounds.objects import ManifestHead, sealed, unsealed
from support.local_training import ROUNDED, log_records, nesterov, parameter_bytes
from support.rounds import Around, MemoryStore, Pushing


def state(site):
    """Return the bytes of all that a round may change on a site, and the number of rounds."""
    inner = site.member.site
    residual = b"" if inner.residual is None else inner.residual.tobytes()
    return parameter_bytes(site.model), inner.anchors_digest(), residual, site.rounds.merged


def undisturbed(rounds, **how):
    """Return the states of a site after each of its rounds, without faults."""
    site, found = Pushing(MemoryStore(), 0, spec=ROUNDED, outer=nesterov, every=1, **how), []
    found.append(state(site))
    for _ in range(rounds):
        site.steps(1)
        found.append(state(site))
    return found


def retried(site):
    """Take a step, and repeat what failed by looking again, until it succeeds; return the number of failures."""
    failures = 0
    try:
        site.steps(1)
    except (codec.CodecError, KeyboardInterrupt):
        failures = 1
        while True:
            try:
                site.rounds._wait(1) if site.member.sent is not None else site.member.look()
                break
            except (codec.CodecError, KeyboardInterrupt):
                failures += 1
    if site.rounds.merged < site.pushed:  # the change was not sent yet
        failures += _send_again(site)
    return failures


def _send_again(site):
    failures = 0
    while site.member.unmerged:
        try:
            if site.member.sent is None:
                site.member.send()
            site.rounds._wait(1)
        except (codec.CodecError, KeyboardInterrupt):
            failures += 1
    return failures


@pytest.mark.parametrize("seed", range(4))
def test_calls_of_the_store_that_fail_change_no_bit(seed, monkeypatch):
    monkeypatch.setattr("codec.stores.calls._PAUSE", 0.0)
    rng, armed = random.Random(seed), []

    def before(kind, name=""):
        if armed and rng.random() < 0.75:
            raise rng.choice([OSError("reset"), RuntimeError("500"), TimeoutError("slow")])

    site = Pushing(Around(MemoryStore(), before), 0, spec=ROUNDED, outer=nesterov, every=1)
    expected, failures = undisturbed(6), 0
    armed.append(True)
    for number in range(6):
        failures += retried(site)
        assert state(site)[1:] == expected[number + 1][1:]
    assert failures > 0
    assert state(site) == expected[-1]


@pytest.mark.parametrize("where", ["store", "move", "write", "write again"])
def test_interrupted_rounds_are_completed_by_the_next_call(where, monkeypatch):
    """At each moment the parameters are those before or after a round, up to a copy that the next call repeats."""
    expected = undisturbed(4)
    points, armed = [0], [-1]

    def tick(*_):
        points[0] += 1
        if points[0] == armed[0]:
            raise KeyboardInterrupt

    def around(cls, name):
        inner = getattr(cls, name)

        def call(*args):
            tick()
            found = inner(*args)
            tick()
            return found

        monkeypatch.setattr(cls, name, call)

    store = MemoryStore()
    if where == "store":
        store = Around(store, tick)
    elif where == "move":
        around(Landing, "_move")
    elif where == "write":
        around(Landing, "write")
    else:
        around(Landing, "_store")
    hit = 0
    for point in range(1, 40):
        points[0], armed[0] = 0, -1
        store.objects.clear()
        site = Pushing(store, 0, spec=ROUNDED, outer=nesterov, every=1)
        points[0], armed[0] = 0, point
        failures = 0
        for number in range(4):
            failures += retried(site)
            assert state(site)[1:] == expected[number + 1][1:], (point, number)
        assert state(site) == expected[-1]
        hit += failures
        if not failures:
            break
    assert hit > 3
    assert not failures, "more points than were tried"


def test_change_that_is_damaged_is_not_merged():
    store = MemoryStore()
    a, b = Pushing(store, 0), Pushing(store, 1)
    b.steps(1)
    b.member.send()
    name = next(name for name in store.objects if name.startswith("change"))
    store.objects[name] = store.objects[name][:-5] + b"\x00\x01\x02\x03\x04"
    with log_records() as records:
        a.steps(2)
    assert a.rounds.stats().sites == 1
    assert any("does not merge the change of site 'site1'" in text for _, text in records)


def test_listed_change_that_is_lost_or_changed_is_an_error_and_a_snapshot_heals_it(monkeypatch):
    monkeypatch.setattr("codec.stores.calls._PAUSE", 0.0)
    monkeypatch.setattr("codec.torch.rounds.follower._SNAPSHOT_ROUNDS", 2)
    for damage in (lambda data: data[:-1] + bytes([data[-1] ^ 1]), lambda data: None, lambda data: data + bytes(99)):
        store = MemoryStore()
        a, b = Pushing(store, 0), Pushing(store, 1, every=100)
        b.rounds._next_look = float("inf")
        a.steps(2)
        name = next(name for name in store.objects if name.startswith("change"))
        damaged = damage(store.objects[name])
        if damaged is None:
            del store.objects[name]
        else:
            store.objects[name] = damaged
        b.steps(1)
        before = state(b)
        b.rounds._next_look = 0.0
        with pytest.raises(codec.FrameError, match=name):
            b.member.look()
        assert state(b) == before
        a.steps(4)
        b.member.look()
        assert b.rounds.merged == a.rounds.merged
        assert b.member.site.anchors_digest() == a.member.site.anchors_digest()


def test_site_with_other_anchors_is_an_error_until_the_next_snapshot(monkeypatch):
    monkeypatch.setattr("codec.torch.rounds.follower._SNAPSHOT_ROUNDS", 2)
    store = MemoryStore()
    a, b = Pushing(store, 0), Pushing(store, 1, every=100)
    with torch.no_grad():
        next(iter(b.member.site.anchors.values())).add_(1e-3)
    b.member._digests.clear()
    a.steps(2)
    before = state(b)
    for _ in range(2):
        with pytest.raises(codec.StateError, match="before round 0, the anchors of site 'site1'"):
            b.member.look()
        assert state(b) == before
    a.steps(4)
    b.member.look()
    assert b.member.site.anchors_digest() == a.member.site.anchors_digest()


def test_change_relative_to_other_anchors_is_not_merged():
    store = MemoryStore()
    a, b = Pushing(store, 0), Pushing(store, 1)
    with torch.no_grad():
        next(iter(b.member.site.anchors.values())).add_(1e-3)
    b.member._digests.clear()
    b.steps(1)
    b.member.send()
    with log_records() as records:
        a.steps(2)
    assert any("has other anchors" in text for _, text in records)
    assert a.rounds.stats().sites == 1


def test_change_above_the_bound_of_norms_is_not_merged():
    store = MemoryStore()
    with codec.options(max_norm=1000.0):
        a = Pushing(store, 0)
    b = Pushing(store, 1)
    with torch.no_grad():
        b.model.a.add_(1e6)
    b.steps(1)
    b.member.send()
    with log_records() as records:
        a.steps(2)
    assert any("max_norm is 1e+03" in text for _, text in records)
    assert a.rounds.stats().sites == 1


def test_manifest_that_lists_a_change_twice_is_refused():
    store = MemoryStore()
    a, b = Pushing(store, 0), Pushing(store, 1, every=100)
    a.steps(2)
    name = manifest_name(0)
    manifest = ManifestHead.read(name, unsealed(name, store.objects[name], None)[0])
    store.objects[name] = sealed(name, manifest.entries() | {"changes": manifest.changes * 2}, [], None)
    before = state(b)
    with pytest.raises(codec.FrameError, match="merged already"):
        b.member.look()
    assert state(b) == before


def test_round_is_merged_although_the_list_of_objects_lacks_its_manifest():
    """A shared file system may list a new file late."""

    class Stale(MemoryStore):
        def names(self):
            return [name for name in super().names() if not name.startswith("manifest")]

    site = Pushing(Stale(), 0, timeout=5)
    site.steps(6)
    assert site.rounds.merged == 3


def test_full_disk_is_an_error_and_the_next_call_continues(tmp_path, monkeypatch):
    import os

    monkeypatch.setattr("codec.stores.calls._PAUSE", 0.0)
    site, full = Pushing(tmp_path, 0), []
    fsync = os.fsync

    def fails(fd):
        if full:
            raise OSError(28, "No space left on device")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", fails)
    full.append(True)
    site.steps(1)
    with pytest.raises(codec.PeerError, match="No space left"):
        site.steps(1)
    full.clear()
    site.steps(1)
    assert site.rounds.merged >= 1


def test_store_that_does_not_answer_is_an_error_within_the_timeout():
    import threading
    import time

    release, armed = threading.Event(), []

    def before(kind, name=""):
        if armed:
            release.wait(20)

    site = Pushing(Around(MemoryStore(), before), 0, timeout=0.5)
    armed.append(True)
    begin = time.monotonic()
    with pytest.raises(codec.PeerError, match=r"the store does not answer within 0\.5 s"):
        site.steps(2)
    assert time.monotonic() - begin < 5
    armed.clear()
    release.set()
    site.steps(2)
    assert site.rounds.merged >= 1
