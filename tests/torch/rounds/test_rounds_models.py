"""Arguments and models of codec.torch.Rounds: buffers, frozen parameters, bfloat16."""

import pytest
import torch

import codec
import codec.torch
from codec.torch.rounds import follower
from support.local_training import adam, nesterov, net, parameter_bytes
from support.rounds import MemoryStore, Pushing, together


def _optimizer(rounds):
    return rounds._member.site.optimizers[0]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"spec": codec.Quantize(8)}, "spec"),
        ({"outer": nesterov}, "outer"),
    ],
)
def test_site_with_other_arguments_is_refused(how, message):
    store = MemoryStore()
    Pushing(store, 0)
    with pytest.raises(codec.ArgumentError, match=f"the run in the store has {message}"):
        Pushing(store, 1, **how)


def test_site_with_another_model_is_refused():
    store = MemoryStore()
    Pushing(store, 0)
    model = net()
    with pytest.raises(codec.ArgumentError, match=r"parameters"):
        codec.torch.Rounds(model, adam(model), store, "b", spec=codec.Lossless())


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"site": "a/b"}, "site must be a name"),
        ({"site": ""}, "site must be a name"),
        ({"every": 0}, "every must be"),
        ({"quorum": 0}, "quorum must be"),
        ({"quorum": (1, -1.0)}, "seconds of quorum must be a finite number of at least 0"),
        ({"quorum": (1, float("nan"))}, "seconds of quorum must be"),
        ({"quorum": (1, 2, 3)}, "quorum must be a number of sites, or a pair"),
        ({"every": 4, "delay": 5}, "delay must be"),
        ({"spec": codec.Truncate()}, "needs the state of an optimizer"),
    ],
)
def test_wrong_arguments_are_refused(how, message):
    model, store = net(), MemoryStore()
    with pytest.raises((codec.ArgumentError, codec.SpecError), match=message):
        codec.torch.Rounds(model, adam(model), store, **({"site": "a"} | how))
    assert not store.objects


def test_nan_is_refused_and_nothing_is_sent():
    store = MemoryStore()
    a = Pushing(store, 0)
    a.steps(1)
    with torch.no_grad():
        a.model.c[3, 3] = float("nan")
    with pytest.raises(codec.ArgumentError, match="parameter 'c' holds NaN"):
        a.steps(1)
    assert not store.contents.changes


def test_buffers_are_those_of_the_run_and_frozen_parameters_must_be():
    def model(seed=0):
        torch.manual_seed(seed)
        found = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
        found[0].requires_grad_(False)
        return found

    def site(store, name):
        m = model()
        return m, codec.torch.Rounds(m, torch.optim.SGD(m.parameters(), lr=0.1), store, name, every=1, quorum=2)

    store = MemoryStore()
    sites = [site(store, name) for name in ("a", "b")]

    def step(m, rounds, shift):
        torch.manual_seed(shift)
        m(torch.randn(16, 8) + shift).sum().backward()
        _optimizer(rounds).step()
        rounds.step()

    together(*(lambda i=i: step(*sites[i], i) for i in range(2)))
    assert parameter_bytes(sites[0][0]) == parameter_bytes(sites[1][0])
    sites[0][1]._member._written = 0
    follower._SNAPSHOT_ROUNDS, kept = 1, follower._SNAPSHOT_ROUNDS
    sites[0][1]._member._keep_snapshot(0)
    follower._SNAPSHOT_ROUNDS = kept
    assert parameter_bytes(site(store, "c")[0]) == parameter_bytes(sites[0][0])
    other = model(seed=1)
    with pytest.raises(codec.ArgumentError, match="frozen parameters"):
        codec.torch.Rounds(other, torch.optim.SGD(other.parameters(), lr=0.1), store, "d", quorum=2)


def test_bfloat16_parameters_and_their_masters_agree():
    store = MemoryStore()
    models = [net(i).bfloat16() for i in range(2)]
    rounds = [
        codec.torch.Rounds(m, torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), store, f"s{i}", every=2)
        for i, m in enumerate(models)
    ]

    def run(i):
        rounds[i]._next_look = float("inf")  # no early change
        for step in range(4):
            x = torch.randn(16, 12, generator=torch.Generator().manual_seed(10 * step + i)).bfloat16()
            models[i].zero_grad()
            models[i](x).square().mean().backward()
            _optimizer(rounds[i]).step()
            rounds[i].step()

    together(*(lambda i=i: run(i) for i in range(2)))
    assert parameter_bytes(models[0]) == parameter_bytes(models[1])
