"""codec.advise predicts times from formulas and chooses the fastest codec, on a fake clock."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import codec
from codec.advisor import levels
from codec.advisor.cost_model import Cost, LinkModel, compute_seconds, link_of, predict_seconds, wire_nbytes
from support.captured import gradients

NEVER = LinkModel(math.inf)


# Tests of predicted times


def test_predictions_follow_the_documented_formulas():
    """Predicted times equal the formulas of advise's docstring, computed by hand for 4 ranks and 8 bit/s."""
    cost = Cost(120, 160, encode=1, encode_sum=2, reduce=3, decode=4)
    expected = {
        "two_shot": (210, 1 + 3 + 0.5 + 4, 2),
        "ring": (230, 0.25 * (1 + 15) + 4, 4),
        "all_gather": (360, 13, 2),
    }
    for algorithm, (nbytes, compute, round_trips) in expected.items():
        assert wire_nbytes(cost, 4, algorithm) == nbytes
        assert compute_seconds(cost, 4, algorithm) == compute
        how = {"algorithm": algorithm}
        assert predict_seconds(cost, LinkModel(8, 0), 4, **how) == nbytes + compute
        assert predict_seconds(cost, LinkModel(8, 0), 4, chunks=5, **how) == nbytes + compute / 5
        assert predict_seconds(cost, LinkModel(80, 0), 4, chunks=10**9, **how) == pytest.approx(
            max(nbytes / 10, compute)
        )
        assert predict_seconds(cost, LinkModel(8, 10), 4, **how) == nbytes + compute + 10 * round_trips


def test_predictions_of_uncompressed_all_reduces():
    """Every algorithm sends 2 (N - 1)/N of the tensor; one rank sends nothing."""
    for n in range(1, 9):
        for algorithm in ("two_shot", "ring"):
            assert wire_nbytes(Cost(840, 840), n, algorithm) == pytest.approx(2 * (n - 1) / n * 840)
    for algorithm in ("two_shot", "ring", "all_gather"):
        assert predict_seconds(Cost(840, 840), LinkModel(1, 5), 1, algorithm=algorithm) == 0


some = st.floats(0, 1e9)


@given(st.tuples(*[some] * 6), st.floats(1, 1e15), st.floats(1, 1e6), st.integers(1, 64), st.integers(1, 64))
def test_predictions_are_monotone(cost, rate, times, n, chunks):
    """A faster link or more overlap never increases a predicted time, nor is it below the wire or the compute time."""
    cost = Cost(*cost)
    for algorithm in ("two_shot", "ring", "all_gather"):

        def seconds(rate, chunks, algorithm=algorithm):
            return predict_seconds(cost, LinkModel(rate), n, algorithm=algorithm, chunks=chunks)

        here = seconds(rate, chunks)
        assert seconds(rate * times, chunks) <= here
        assert seconds(rate, chunks + 1) <= here
        assert here >= max(8 * wire_nbytes(cost, n, algorithm) / rate, compute_seconds(cost, n, algorithm))


def test_predictions_reject_wrong_arguments():
    cost, link = Cost(1, 1), LinkModel(1)
    for n, how in ((0, {}), (2.0, {}), (4, {"chunks": 0}), (4, {"algorithm": "tree"}), (4, {"algorithm": None})):
        with pytest.raises(codec.ArgumentError, match=r"world_size|chunks|algorithm"):
            predict_seconds(cost, link, n, **how)


def test_links_take_names_numbers_and_latencies():
    """Link names are units of `tc`; a Link prints its name."""
    for text, rate in {"100mbit": 1e8, "1gbit": 1e9, "2.5 Gbit/s": 2.5e9, " .5tbit": 5e11, "64KBIT": 64e3}.items():
        assert link_of(text) == LinkModel(rate)
    for number in (1e8, 10**8, np.int64(10**8), np.float32(1e8)):
        assert link_of(number) == LinkModel(1e8)
    assert link_of(own := LinkModel(5, rtt=1)) is own
    assert [str(LinkModel(rate)) for rate in (5, 64e3, 1e8, 2.5e9, 4e12, math.inf)] == [
        f"{rate}bit/s, round trip 0.2 ms" for rate in ("5 ", "64 k", "100 M", "2.5 G", "4 T", "inf T")
    ]
    for bad in ("fast", "", "100mb", "100mbps", "-1gbit", "\u0661gbit", None, True, [1], 1j):
        with pytest.raises(codec.ArgumentError, match='link must be text such as "100mbit"'):
            link_of(bad)
    for bad in (0, -1, math.nan, "0gbit", np.arange(2), 10**5000):
        with pytest.raises(codec.ArgumentError, match="bits_per_second must be a number above 0"):
            link_of(bad)
    for bad in (-1, math.inf, math.nan, "0", None, True):
        with pytest.raises(codec.ArgumentError, match="rtt must be seconds, 0 or more"):
            LinkModel(1, bad)


# Tests of the choice between codecs


@pytest.mark.parametrize("name", ["cnn_float32", "transformer_autocast", "transformer_bfloat16"])
def test_slow_link_gets_the_smallest_frames(clock, name):
    """A slow link gets the smallest frames, lossless ones unless loss is allowed; an infinitely fast link gets raw."""
    grads = gradients(name)
    first = codec.advise(grads, "100mbit")
    assert (first.spec, first.table[0].spec) == (codec.Lossless(), None)
    assert first.seconds < first.raw_seconds
    assert first.nbytes < first.table[0].nbytes
    lossy = codec.advise(grads, "100mbit", lossy=True)
    assert lossy.spec == codec.Quantize(4)
    assert lossy.nbytes < first.nbytes / 2
    assert "Quantize() sends" in lossy.why
    signs = codec.advise(grads, "100mbit", lossy=True, feedback=True)
    assert signs.spec == codec.Sign(group_size=1024)
    assert signs.nbytes < lossy.nbytes / 3
    for advice in (codec.advise(grads, NEVER), codec.advise(grads, NEVER, lossy=True, feedback=True)):
        assert advice.spec is None
        assert advice.seconds == advice.raw_seconds < min(row.seconds for row in advice.table[1:])
        assert advice.why.startswith("Raw: ")


def test_raw_if_encoding_takes_longer_than_the_wire(clock):
    """advise chooses raw if encoding takes longer than sending raw bytes, and `why` gives this reason."""
    grads = gradients("transformer_autocast")
    assert codec.advise(grads, "1gbit").spec == codec.Lossless()
    clock.step = 0.125
    advice = codec.advise(grads, "1gbit")
    assert advice.spec is None
    assert "but encoding, adding and decoding take" in advice.why


def test_raw_if_frames_are_not_smaller(clock):
    noise = np.random.default_rng(0).integers(0, 1 << 32, 10_000, np.uint32).view(np.float32)
    advice = codec.advise(noise, "1kbit", world_size=2)
    assert advice.spec is None
    assert "no frame is smaller" in advice.why


def test_single_rank_needs_no_codec(clock):
    advice = codec.advise(gradients("cnn_float32"), "1kbit", world_size=1)
    assert (advice.spec, advice.seconds, advice.nbytes) == (None, 0, 0)
    assert "sends nothing" in advice.why


def test_best_time_falls_with_the_links_speed(clock):
    """The faster the link, the shorter the best time; the chosen codec changes from small frames to raw."""
    grads = gradients("cnn_float32")
    found = [codec.advise(grads, 10.0**k, lossy=True) for k in range(6, 14)]
    seconds = [a.seconds for a in found]
    assert seconds == sorted(seconds, reverse=True)
    nbytes = [a.nbytes for a in found]
    assert nbytes == sorted(nbytes)
    assert (found[0].spec, found[-1].spec) == (codec.Quantize(4), None)


def test_given_candidates_and_raw_are_compared(clock):
    """Given candidates and raw are compared in the given order, for any value of `lossy`."""
    x = gradients("cnn_float32")
    specs = [codec.Sign(), codec.Float4(), codec.Lossless(max_code_length=4)]
    advice = codec.advise(x, "1mbit", candidates=iter(specs))
    assert [row.spec for row in advice.table] == [None, *specs]
    assert advice.spec == codec.Sign()
    assert [row.spec for row in codec.advise(x, "1mbit", candidates=()).table] == [None]
    for lossy, feedback, n in (
        (False, False, 1),
        (False, True, 1),
        ("near", False, 1),
        (True, False, 4),
        (True, True, 6),
    ):
        assert len(codec.advise(x, "1mbit", lossy=lossy, feedback=feedback).table) == 1 + n


def test_one_level_sends_frames_of_each_rank_out_of_a_machine_two_levels_once(clock, monkeypatch):
    """With P ranks a machine, P S (M - 1)/M leave a machine in each phase of one level, S (M - 1)/M in two levels."""
    monkeypatch.setattr(levels, "_measured", lambda: (2e-9, 1e-9))
    x = np.random.default_rng(0).standard_normal((400, 1000)).astype(np.float32)
    size = 4 * 400_000
    for machines in (2, 3):
        how = {"candidates": [codec.Quantize(4)], "world_size": (machines, 8)}
        advice = codec.advise(x, ("100mbit", "20ms"), options=codec.options(algorithm="two_shot"), **how)
        raw, row = advice.table
        n, frames = 8 * machines, row.cost.frame_nbytes + row.cost.sum_nbytes
        assert raw.nbytes == round(2 * (n - 1) / n * size), "a ring crosses each link once"
        assert row.nbytes_by_levels == pytest.approx([f * (machines - 1) / machines * frames for f in (8, 1)], abs=1)
        within = 7 / 8 * size * (2 * 2e-9 + 1e-9)
        assert row.compute_seconds == pytest.approx(within + compute_seconds(row.cost, machines) / 8)
        assert (row.levels, row.seconds) == (2, row.seconds_by_levels[1])
        assert row.latency_seconds == pytest.approx(0.02 * min(2, machines - 1))
        assert advice.mesh == f'mesh = torch.distributed.init_device_mesh("cpu", ({machines}, 8))'
        assert advice.hook.endswith(".register(model, group=mesh)")
        assert (advice.world_size, advice.ranks_per_machine) == (n, 8)
        ring = codec.advise(x, "100mbit", options=codec.options(algorithm="ring"), **how).table[1]
        assert ring.nbytes_by_levels[0] == round(wire_nbytes(ring.cost, n, "ring"))


def test_one_level_is_advised_if_plain_sums_cost_more_than_bytes(clock, monkeypatch):
    monkeypatch.setattr(levels, "_measured", lambda: (1e-6, 1e-6))
    x = np.random.default_rng(0).standard_normal((400, 1000)).astype(np.float32)
    advice = codec.advise(x, "100mbit", candidates=[codec.Quantize(4)], world_size=(2, 4))
    assert advice.table[1].levels == 1
    assert advice.mesh is None
    assert "group=mesh" not in advice.hook
    assert "In two levels: " in str(advice)
    alone = codec.advise(x, "100mbit", candidates=[codec.Quantize(4)], world_size=(2, 1))
    assert alone.table == codec.advise(x, "100mbit", candidates=[codec.Quantize(4)], world_size=2).table
    assert "In two levels" not in str(alone)


def test_costs_of_plain_values_are_measured():
    assert 0 < levels.plain_seconds(1e6, levels.MachineRanks(2, 8)) < 1
    assert levels.plain_seconds(1e6, levels.MachineRanks(8)) == 0


def test_algorithms_use_their_own_formulas(clock):
    """Raw is predicted as two_shot with one round trip; the number of chunks is computed from the size."""
    x = gradients("cnn_float32")
    for algorithm in ("two_shot", "ring", "all_gather"):
        advice = codec.advise(x, "1gbit", options=codec.options(algorithm=algorithm), world_size=5)
        raw, row = advice.table
        link = LinkModel(1e9)
        assert row.seconds == predict_seconds(row.cost, link, 5, algorithm=algorithm)
        assert row.nbytes == round(wire_nbytes(row.cost, 5, algorithm))
        assert raw.seconds == predict_seconds(Cost(4 * 145_994, 4 * 145_994), LinkModel(1e9, 0), 5) + link.rtt
    raw, row = codec.advise(np.ones(5 << 20, np.float32), "1gbit").table
    assert row.seconds == predict_seconds(row.cost, LinkModel(1e9), 4, chunks=5)


def test_round_trips_are_added_to_the_predictions(clock):
    """A step of the hook waits for 2 round trips (1 with 2 ranks), and for 1 per uncompressed bucket of a model."""
    x = gradients("cnn_float32")
    for rtt, seconds in (("40ms", 0.04), (0.04, 0.04), ("0.04", 0.04), (" 40000 us", 0.04), ("2s", 2.0)):
        advice = codec.advise(x, "1gbit", rtt=rtt)
        assert advice.link.rtt == pytest.approx(seconds)
        raw, row = advice.table
        assert (raw.latency_seconds, row.latency_seconds) == pytest.approx((seconds, 2 * seconds))
        assert row.seconds == pytest.approx(predict_seconds(row.cost, advice.link, 4))
        assert "round trips" in str(advice)
        assert json.loads(advice.to_json())["table"][1]["latency_seconds"] == pytest.approx(2 * seconds)
    assert codec.advise(x, LinkModel(1e9, rtt=1), rtt="1ms").link.rtt == 1e-3
    two = codec.advise(x, "1gbit", rtt=1, world_size=2)
    assert two.algorithm == "all_gather"
    assert [row.latency_seconds for row in two.table] == [1, 1]
    assert codec.advise(x, "1gbit", rtt=1, world_size=1).table[1].latency_seconds == 0
    model = torch.nn.Linear(4096, 2000, bias=False)  # 32.8 MB of float32 gradients: DDP buckets of 1, 25 and 5.3 MiB
    assert codec.advise(model, "1gbit", rtt=1).table[0].latency_seconds == 3
    assert "its round trips 1 s more" in codec.advise(x, "1tbit", rtt=1).why
    for bad in ("fast", "-1ms", "40m", "", -1, math.nan, math.inf, True, [1], np.ones(3)):
        with pytest.raises(codec.ArgumentError, match=r"rtt must be seconds, 0 or more"):
            codec.advise(x, "1gbit", rtt=bad)
