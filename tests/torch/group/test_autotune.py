"""Choice between frames and raw values by measured times, equal on all ranks."""

import logging
from types import SimpleNamespace

import pytest
import torch

import codec
import codec.torch
from codec.torch.group import communicator
from codec.torch.group.autotune import TRIALS, RawFallback, Timing, Tuner
from codec.torch.reduction import execution
from codec.torch.transport.counters import Counters
from codec.torch.transport.levels import Levels
from support.collective_values import rank_values, sum_in_order
from support.ranks import run_ranks


class IdleChannel:
    """Channel in host memory, by default of two ranks, which sends nothing. Only other machines have a round trip."""

    def __init__(self, rtt=0.0, levels=None):
        self.levels, self.counters = levels or Levels(2, 0), Counters()
        between = self.levels.between
        self.peers = tuple(between.ranks[o] for o in between.others)
        self.mesh = SimpleNamespace(rtt=lambda ranks: rtt * bool(set(ranks) & set(self.peers)))


def choices_of(frames, values, load, n, smaller=1):
    """Simulate n collectives, which take `frames` or `values` seconds each; return the choices of two ranks."""
    tuners = [RawFallback() for _ in range(2)]
    ways = []
    for i in range(n):
        timings = [tuner.begin(IdleChannel()) for tuner in tuners]
        way, other = (way_of(timing) for timing in timings)
        assert way == other  # ranks choose alike although their measured times differ
        ways.append(way)
        reports = []
        for rank in range(2):
            wall = {"frames": frames, "values": values}[way] * (5 if i % 200 == 0 else 1 + rank / 10)
            larger = smaller if way == "frames" else 1
            reports.append([round(wall * 1e6), round(load * 1e3), round((1 - load) * wall * larger * 1e6)])
        for timing in timings:
            timing.learn(list(map(max, zip(*reports, strict=True))))
            timing.end()
    return ways


def way_of(timing):
    """Return the choice of a collective, and check that it need not wait for earlier ones."""
    with pytest.raises(StopIteration) as end:
        timing.wait().send(None)
    return end.value.value


def test_autotune_sends_what_is_faster():
    """Frames are tried first. Raw values are chosen if ranks are busy and values were faster, never on a slow link."""
    assert set(choices_of(1.0, 25.0, 0.05, 500)) == {"frames"}
    fast = choices_of(1.0, 0.5, 0.8, 450)
    assert fast[:3] == ["frames"] * 3
    assert set(fast[3:200]) == {"values"}  # the choice is made within 5 collectives
    assert fast[200:203] == ["frames"] * 3  # frames are tried again after 200 collectives
    assert set(fast[203:400]) == {"values"}
    near = choices_of(1.0, 1.5, 0.8, 100)
    assert near[3:5] == ["values"] * 2
    assert set(near[5:]) == {"frames"}
    # frames keep the processor busy, but sending raw values would take longer still
    assert set(choices_of(1.0, 25.0, 0.5, 500, 50)) == {"frames"}
    assert set(choices_of(1.0, 0.9, 0.5, 100, 3)[3:]) == {"values"}


def test_collectives_wait_for_those_before_them_while_ways_are_tried():
    """During trials a collective waits for earlier ones, so that ranks choose only once they have all measurements."""
    tuner = RawFallback()
    first, second = tuner.begin(IdleChannel()), tuner.begin(IdleChannel())
    assert way_of(first) == "frames"
    waiting = second.wait()
    wait = waiting.send(None)
    assert not wait.done
    first.learn([1, 1, 1])
    first.end()
    assert wait.done
    with pytest.raises(StopIteration):
        waiting.send(None)


def test_switch_between_frames_and_raw_is_logged_once(caplog):
    caplog.set_level(logging.INFO, logger="codec.torch")
    tuner, ways = RawFallback("400000 bytes (float32 by Lossless())"), []
    for i in range(450):
        frames = 1000 if i < 200 else 300  # microseconds of a frame collective: faster than raw from number 200 on
        timing = tuner.begin(IdleChannel())
        ways.append(way_of(timing))
        timing.learn([frames if ways[-1] == "frames" else 500, 800, 0])
        timing.end()
    assert set(ways[5:200]) == {"values"}
    assert set(ways[205:400]) == {"frames"}
    to_raw, to_frames = [record.getMessage() for record in caplog.records]
    assert "400000 bytes (float32 by Lossless()) are sent uncompressed from now on" in to_raw
    assert "frames 1.00 ms, uncompressed 0.50 ms" in to_raw
    assert "sent as frames from now on" in to_frames


def test_waiting_for_other_ranks_by_latency_does_not_grow_with_the_bytes(monkeypatch):
    """Waiting time due to latency is not extrapolated with the bytes, neither for raw values nor for frames."""
    for rtt, most in ((0.0, 10.0), (0.1, 1.5)):
        timing = Timing(Tuner(), IdleChannel(rtt))
        assert way_of(timing) == "frames"
        timing._started = timing._started[0] - 0.1, timing._started[1]  # as if 0.1 s had passed without computing
        wall, load, waited = timing.report(1000, 10_000, 1, on_device=False)
        assert 90_000 < wall < 200_000
        assert load < 500
        assert waited < most * wall


def test_uncompressed_values_are_predicted_by_what_leaves_a_machine():
    """On 3 machines of 8 ranks, a rank sends its window uncompressed to two others, and waits for their round trip."""
    levels = Levels(24, 0, between=range(0, 24, 8), within=range(8))
    for channel in (IdleChannel(0.0, levels), IdleChannel(0.0, Levels(3, 0))):
        timing = Timing(Tuner(), channel)
        assert way_of(timing) == "frames"
        timing._started = timing._started[0] - 1.0, timing._started[1]  # as if 1 s had passed without computing
        wall, _, waited = timing.report(1000, 9000, 1, on_device=False)
        assert waited == pytest.approx(12 * wall, rel=0.01)  # 2 * 9,000 * 2 / 3 bytes instead of 1,000
    timing = Timing(Tuner(), IdleChannel(0.5, levels))
    assert way_of(timing) == "frames"
    timing._started = timing._started[0] - 1.0, timing._started[1]
    wall, _, waited = timing.report(1000, 9000, 1, on_device=False)
    assert waited == pytest.approx(0.5e6 + 12 * (wall - 0.5e6), rel=0.01)


def _chosen(rank, size):
    every = [rank_values(r, (500, 1000)) for r in range(size)]
    want = sum_in_order(every, "mean")
    for _ in range(15):
        t = every[rank].clone()
        codec.torch.all_reduce(t, op="mean")
        assert torch.equal(t, want)
    ways = [c.way(TRIALS) for c in communicator.communicator_of(None).tuners.values()]
    execution._CHOICES = 3
    with pytest.raises(codec.PeerError):
        # sizes differ by rank
        codec.torch.all_reduce(torch.ones(5 + rank))
    for n in (1, 2, 3, 1, 4):
        codec.torch.all_reduce(torch.ones(n))
    choices = communicator.communicator_of(None).tuners
    assert [c._count for c in choices.values()] == [1, 2, 1]
    return [*ways, *choices]


def test_all_ranks_choose_frames_or_raw_alike():
    """All ranks choose frames or raw alike, with bit-identical results."""
    results = run_ranks(3, _chosen)
    assert len(results[0]) == 1 + 3
    assert all(r == results[0] for r in results)
