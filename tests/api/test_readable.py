"""Statistics print as one readable line, and their repr rounds floats."""

import pickle
from dataclasses import replace

import pytest

import codec
import codec.torch
from codec import readable
from codec.stateful.activation.change import ActivationStats
from codec.torch.ddp.stats import HookStats, ParameterStats
from codec.torch.fsdp.stats import FsdpStats
from codec.torch.parameter_server.links import ClientStats
from codec.torch.parameter_server.server import ServerStats
from codec.torch.pipelining.stats import PipelineStats
from codec.torch.transport.counters import Counters

ACTIVATIONS = ActivationStats(6, 4096, 8, 40, 48, 98_304, 2, 0, (0.43210987, 0.28123456))
STATS = HookStats(
    18,
    2,
    1_500_000,
    340_000,
    340_000,
    0,
    0.4910187149985177,
    0.5,
    0.25,
    0.3,
    20.0,
    {1: 0.5},
    20,
    1,
    20,
    0.12345678,
    0,
    {},
    world_size=2,
)


@pytest.mark.parametrize(
    ("stats", "line"),
    [
        (
            STATS,
            "20 steps: 0.34 of 1.5 MB sent (23%), 25 ms a step on the wire, "
            "residual 0.123 times the gradient, 1 failed",
        ),
        (HookStats(), "0 steps: 0 bytes sent"),
        (
            ParameterStats(codec.Sign(), 1, 2.0, 0.0),
            "1 value by Sign(scale='l1', group_size=None)",
        ),
        (
            Counters(**{f: getattr(STATS, f) for f in Counters.__dataclass_fields__}),
            "20 collectives (2 uncompressed) of 1.5 MB: 340 kB sent, 340 kB received; encoding 491 ms, wire 500 ms, "
            "decoding 250 ms",
        ),
        (
            FsdpStats(4, 0, 4_000_000, 300_000, 0, 0, 0, 0.1, 0, 0.0, 4.0, {}, 2_000_000, 0.0),
            "4 collectives: 0.3 of 2 MB sent (15%), 25 ms each on the wire",
        ),
        (
            PipelineStats(300, 50, 1000, 1, (ACTIVATIONS,), ()),
            "0.35 of 1 kB sent (35%), activations change by 28% between visits, 1 step refused",
        ),
        (
            ACTIVATIONS,
            "6 messages of 4.1 kB: 40 deltas, 8 raw, change 0.281; 48 samples stored in 98.3 kB, 2 evicted, 0 damaged",
        ),
        (ClientStats(1, 12, 3_400_000_000), "1 request: 12 bytes sent, 3.4 GB received"),
        (
            ServerStats(3, 10, 1, 5000, 60, 2, 1 << 20, 1 << 21, {3: "it has closed the connection"}),
            "10 steps, 1 in flight (5 kB), of 3 keys: 60 requests, 2 refused, 1.05 MB received, 2.1 MB sent, "
            "lost workers 3",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_statistics_print_as_one_line(stats, line):
    assert str(stats) == line
    assert str(pickle.loads(pickle.dumps(stats))) == line


def test_repr_has_all_fields_with_rounded_floats():
    text = repr(STATS)
    assert text.startswith("HookStats(frame_collectives=18, raw_collectives=2, raw_nbytes=1500000, sent_nbytes=340000,")
    assert "encode_s=0.491, wire_s=0.5, decode_s=0.25" in text
    assert repr(ACTIVATIONS).endswith("damaged=0, change=(0.4321, 0.2812))")
    one = ParameterStats(codec.Sign(), 5, 1 / 3, 2 / 3)
    spec = "ParameterStats(spec=Sign(scale='l1', group_size=None), n=5, residual_norm=0.3333, residual_ratio=0.6667)"
    assert repr(one) == spec
    assert f"parameters={{'a': {spec}}}, choices" in repr(replace(STATS, parameters={"a": one}))
    assert repr(replace(ACTIVATIONS, change=(1 / 3,))).endswith("change=(0.3333,))")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1 kB"), (1234, "1.23 kB"), (999_600, "1 MB"), (123_456_789, "123 MB")],
)
def test_sizes_have_three_digits(nbytes, text):
    assert readable.size(nbytes) == text


def test_small_shares_have_a_unit_of_their_own():
    assert readable.share(1200, 3_000_000) == "1.2 kB of 3 MB sent (0.04%)"
    assert readable.share(3e6, 3e6) == "3 of 3 MB sent (100%)"
    assert readable.duration(3.1e-7) == "0.31 us"
