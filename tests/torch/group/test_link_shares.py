"""Slices by the rates of links: weights, and when they change."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from codec.torch.ddp.step import StepState
from codec.torch.group.shares import PERIOD, UNITS, LinkShares, rate_of, weights_for
from codec.torch.network.sockets import ConnectionInfo
from codec.torch.reduction.partition import cut
from codec.torch.transport.levels import Levels

MBIT = 125_000


def seconds(weights, rates):
    """Return the longest time in which a rank sends (1 + w (N - 2)) bytes."""
    shares = np.array(weights) / sum(weights)
    return max((1 + shares * (len(rates) - 2)) / np.array(rates))


def test_slow_rank_among_four_owns_nothing():
    rates = [20 * MBIT, 20 * MBIT, 20 * MBIT, 5 * MBIT]
    weights = weights_for(rates)
    assert weights[3] == 0
    assert sorted(weights[:3]) == [21, 21, 22]
    assert seconds(weights, rates) == pytest.approx(1 / rates[3])
    assert seconds([1] * 4, rates) == pytest.approx(1.5 / rates[3])


@given(st.lists(st.integers(1, 10**10), min_size=3, max_size=64))
def test_weights_are_near_the_optimum(rates):
    weights = weights_for(rates)
    assert sum(weights) == UNITS
    assert min(weights) >= 0
    # lower bounds of the optimum: each rank sends at least one byte, and all of them 2 (N - 1)
    best = max(1 / min(rates), 2 * (len(rates) - 1) / sum(rates))
    rounding = (len(rates) - 2) / UNITS / min(r for r, w in zip(rates, weights, strict=True) if w or r == min(rates))
    assert seconds(weights, rates) <= best + rounding * 1.001


def changes(shares, rates, pace=0):
    """Return True if the weights or the limit have changed after the steps of a period."""
    for _ in range(PERIOD):
        shares.learn([*rates, pace] if shares.is_due else [])
    return shares.moved()


def test_weights_follow_the_link_with_hysteresis():
    shares, equal = LinkShares(), [20 * MBIT] * 4
    assert not changes(shares, equal)
    assert shares.weights is None
    uneven = [20 * MBIT] * 3 + [5 * MBIT]
    assert changes(shares, uneven)
    assert shares.weights[3] == 0
    assert not changes(shares, [19 * MBIT, 20 * MBIT, 21 * MBIT, 5 * MBIT])  # saves too little
    assert not changes(shares, [0, *uneven[1:]])  # a rank has measured nothing
    assert changes(shares, equal)
    assert shares.weights is None


def test_limit_of_joined_buckets_follows_the_link_with_hysteresis():
    shares = LinkShares()
    assert not changes(shares, [])
    assert changes(shares, [], 85_000)  # 20 Mbit/s, 4-bit frames: 13 kB take 1.1 ms
    limit = shares.limit
    assert 10_000 < limit < 100_000
    assert not changes(shares, [], 70_000)
    assert not changes(shares, [], 110_000)
    assert changes(shares, [], 8500)
    assert shares.limit == pytest.approx(10 * limit, rel=1e-3)
    assert changes(shares, [], 1)
    assert shares.limit is None
    assert not changes(shares, [], 0)
    assert changes(shares, [], 85_000)
    shares.reset()
    assert shares.limit is None
    assert shares.moved()


def test_rate_is_the_sum_of_concurrent_connections():
    before = [ConnectionInfo(0.01, 0, 0.0), ConnectionInfo(0.01, 1000, 1.0)]
    now = [ConnectionInfo(0.01, 500_000, 0.6), ConnectionInfo(0.01, 1_001_000, 2.1)]
    assert rate_of(before, now, 10) == round(500_000 / 0.5 + 1_000_000 / 1.0)


def test_rank_without_a_slice_is_measured_beside_another_one():
    """Two such ranks send each other no frames, only what belongs to agreements."""
    before = [ConnectionInfo(1e-4, 0, 0.0)] * 3
    busy = [ConnectionInfo(1e-4, 500_000, 0.5)] * 2
    rate = rate_of(before, [*busy, ConnectionInfo(1e-4, 400, 0.001)], 11)
    assert rate == rate_of(before[:2], busy, 11) > 1_900_000
    assert rate_of(before, [*busy, ConnectionInfo(1e-4, 100_000, 0.001)], 11) == 0
    assert rate_of(before, [ConnectionInfo(1e-4, 0, 0.0)] * 3, 11) == 0
    local = ConnectionInfo(1e-4, 900_000, 0.9, local=True)
    assert rate_of(before, [*busy, local], 11) == rate
    assert rate_of(before[:1], [local], 11) == 0


def channel_of(size, within=1, *, on_gpus=False):
    """Return a channel of rank 0 whose connections have sent 1 MB/s each."""
    count = iter(range(2))

    def connections(peers):
        at = next(count)
        return [ConnectionInfo(0.001, at * 1_000_000, at * 1.0) for _ in peers]

    levels = Levels(size, 0, range(0, size, within), range(within))
    mesh = SimpleNamespace(connections=connections)
    peers = tuple(levels.between.ranks[o] for o in levels.between.others)
    device = SimpleNamespace(connected=on_gpus)
    return SimpleNamespace(size=size, levels=levels, mesh=mesh, peers=peers, device=device)


@pytest.mark.parametrize(
    ("size", "within", "n"), [(1, 1, 0), (2, 1, 0), (3, 1, 3), (64, 1, 64), (65, 1, 0), (130, 2, 0), (4, 2, 0)]
)
def test_ranks_report_rates_of_3_to_64_links_and_the_time_of_a_byte(size, within, n):
    shares, channel = LinkShares(), channel_of(size, within)
    for _ in range(PERIOD - 1):
        shares.begin(channel)
        assert shares.report(channel, 5000) == []
        shares.learn([])
    shares.begin(channel)
    *rates, pace = shares.report(channel, 5000)
    assert len(rates) == n
    assert pace == pytest.approx(1e12 * (1 if channel.peers else 0) / 11 / 5000, rel=0.02)
    assert rates[1:] == [0] * (n - 1)
    assert n == 0 or rates[0] == pytest.approx((n - 1) * 1e6, rel=0.02)


def test_slices_are_equal_again_when_ranks_compare_their_states():
    shares, uneven = LinkShares(), [20 * MBIT] * 3 + [5 * MBIT]
    assert changes(shares, uneven)
    shares.learn([])
    shares.reset()
    assert shares.weights is None
    assert shares.moved()
    shares.reset()
    assert not shares.moved(), "the second comparison changes nothing"
    assert changes(shares, uneven), "a period after the comparison, ranks report again"


@pytest.mark.parametrize(("algorithm", "on_gpus"), [("auto", False), ("auto", True), ("two_shot", False)])
def test_slices_stay_equal_between_gpus_and_with_a_named_algorithm(algorithm, on_gpus):
    state = StepState(SimpleNamespace(auto=None, feedback=False), None)
    timing = state.begin_timing(algorithm, channel_of(4, on_gpus=on_gpus))
    assert (timing.shares is state.shares) == (algorithm == "auto" and not on_gpus)


@given(st.integers(0, 10**6), st.lists(st.integers(0, 64), min_size=1, max_size=9).filter(any))
def test_weighted_slices_cover_the_tensor(n, weights):
    slices = cut(n, len(weights), 4, None, 1 << 16, tuple(weights))
    pieces = [piece for each in slices for piece in each]
    assert [p.begin for p in pieces] == [0, *(p.end for p in pieces[:-1])]
    assert pieces[-1].end == n
    for weight, each in zip(weights, slices, strict=True):
        assert abs(each[-1].end - each[0].begin - n * weight / sum(weights)) <= 1024 * 2


def test_equal_weights_are_the_default():
    assert cut(100_000, 3, 4, None, 1 << 14, (5, 5, 5)) == cut(100_000, 3, 4, None, 1 << 14)
