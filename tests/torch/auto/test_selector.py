"""Selector and Meter choose levels by predicted and measured times, here of simulated networks."""

import random

import pytest

from codec.torch.auto.meter import Meter
from codec.torch.auto.selector import Selector
from codec.torch.network.sockets import ConnectionInfo

# Bytes per step and coding seconds per step of four levels: raw, lossless frames, 8 bits, 4 bits.
NBYTES, COMPUTE = (3.3e6, 2.7e6, 0.85e6, 0.46e6), (0.0, 0.030, 0.010, 0.015)
LINKS = {"100mbit": 12.5e6, "1gbit": 125e6, "fast": 5e9}


def predicted(rate, rtt=0.0):
    return [max(n / rate, c) + rtt for n, c in zip(NBYTES, COMPUTE, strict=True)]


def run(selector, steps, truth, shown, noise=None, rest=0.02):
    """Simulate steps; return the mean seconds per step, and the number of switches between levels."""
    total = switches = 0
    for _ in range(steps):
        seconds = (rest + truth[selector.level]) * (1 if noise is None else noise())
        total += seconds
        switches += selector.observe(seconds, shown) is not None
    return total / steps, switches


@pytest.mark.parametrize("rtt", [0.0, 0.1])
def test_levels_are_about_as_fast_as_the_best_one_on_each_of_several_links(rtt):
    selector = Selector(1)
    assert selector.begin(predicted(LINKS["100mbit"])).level == 3
    fixed = [0.0] * 4
    whole = 0.0
    for link in ("100mbit", "1gbit", "fast", "100mbit", "fast", "1gbit"):
        times = predicted(LINKS[link], rtt)
        mean, _ = run(selector, 60, times, times)
        fixed = [f + 0.02 + t for f, t in zip(fixed, times, strict=True)]
        assert mean <= 1.15 * (0.02 + min(times)), "two steps at the level of the link before are among 60"
        steady, switches = run(selector, 60, times, times)
        assert steady <= 1.06 * (0.02 + min(times)), link
        assert switches <= 4, link
        whole += (mean + steady) / 2
    if not rtt:
        assert whole < min(fixed), "no fixed level is best on all of these links"


def test_a_link_that_changes_is_noticed_within_ten_steps():
    selector, slow, fast = Selector(3), predicted(LINKS["100mbit"]), predicted(LINKS["fast"])
    run(selector, 30, slow, slow)
    assert selector.level == 3
    run(selector, 10, fast, fast)
    assert selector.level == 0
    run(selector, 10, slow, slow)
    assert selector.level == 3


def test_a_level_that_is_slower_than_predicted_is_left_and_not_tried_for_long():
    selector, shown = Selector(1), [1.0, 1.0, 0.5]
    truth = [1.0, 1.0, 1.4]
    mean, switches = run(selector, 180, truth, shown, rest=0.0)
    assert selector.level == 0
    assert switches <= 4
    assert mean < 1.04


def test_noise_causes_few_switches():
    rng = random.Random(1)
    selector, times = Selector(1), [0.100, 0.102, 0.104, 0.107]
    _, switches = run(selector, 300, times, times, noise=lambda: 1 + 0.3 * rng.random() + 2 * (rng.random() < 0.05))
    assert switches <= 10


def test_equal_times_choose_the_least_lossy_level():
    selector = Selector(3)
    run(selector, 30, [0.0] * 4, [0.01] * 4)
    assert selector.level == 0


def measure(meter, steps, rate, nbytes, rtt, pause=0.05, start=(0, 0.0)):
    """Simulate messages of `nbytes` bytes over a link; return the connection's acknowledged bytes and busy seconds."""
    acked, busy = start
    for _ in range(steps):
        meter.begin([ConnectionInfo(rtt, acked, busy)])
        busy += nbytes / rate + rtt / 2
        meter.end([ConnectionInfo(rtt, acked + nbytes // 2, busy)])
        # The last acknowledgement (ACK) is delayed by up to 40 ms
        acked, busy = acked + nbytes, busy + min(pause, rtt / 2 + 0.04)
    return acked, busy


@pytest.mark.parametrize("rtt", [0.0002, 0.1])
@pytest.mark.parametrize("rate", [12.5e6, 125e6])
def test_meter_finds_the_rate_of_a_link(rate, rtt):
    meter = Meter()
    assert meter.estimate() is None
    start = measure(meter, 10, 3 * rate, 2_000_000, rtt)
    measure(meter, 12, rate, 2_000_000, rtt, start=start)
    found = meter.estimate()
    assert found.rtt == rtt
    assert rate / (2 if rtt < 0.01 else 4) < 1 / found.seconds_per_byte < 2 * rate


def test_meter_without_counters_of_the_kernel_reports_a_fast_link():
    meter = Meter()
    for _ in range(3):
        meter.begin([ConnectionInfo()])
        meter.end([ConnectionInfo()])
    assert meter.estimate() == (0.0, 0.0)
