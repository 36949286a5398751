"""Stages with forward="auto" and backward="auto": equal bit widths on all ranks, quality floors, checkpoints."""

import io

import pytest
import torch

import codec
import codec.torch
from codec.torch.auto import edges
from codec.torch.auto.edges import EdgeChoice, checked
from codec.torch.auto.quality import bits_of
from codec.torch.pipelining.settings import specs_of
from support.pipelines import Pipeline, altered_messages, check_equal_sides, damaged

Auto = codec.torch.Auto
FAST = Auto(link="1gbit")


def both(auto):
    return {"forward": auto, "backward": auto}


LEVELS = bits_of("smallest")


class Scripted:
    """Fake selector that cycles through the levels, one step each."""

    def __init__(self, level):
        self.level = level

    def observe(self, seconds, predicted):
        assert seconds > 0
        self.level = (self.level + 1) % len(predicted)


def _trained(rank, size, schedule, arguments):
    """Train with another level in each step, damage a message of one step, and continue from a checkpoint."""
    edges.Selector = Scripted
    p = Pipeline(schedule, rank, size, **arguments)
    count = 0

    def change(message):
        nonlocal count
        count += 1
        return damaged(message, 0.3) if rank == 0 and count == 11 else message

    with altered_messages(change):
        losses = p.train(6)
    file = io.BytesIO()
    torch.save([s.state_dict() for s in p.stages], file)
    file.seek(0)
    saved = torch.load(file)
    again = Pipeline(schedule, rank, size, **arguments)
    for stage, state in zip(again.stages, saved, strict=True):
        stage.load_state_dict(state)
    assert [s.state_dict()["auto"] for s in again.stages] == [state["auto"] for state in saved]
    again.train(1)
    specs = [(d.spec, d.backward) for each in (p, again) for e in each.ends() for d in e.deltas]
    return losses, p.checks(), [s.stats() for s in p.stages], specs


@pytest.mark.parametrize("schedule", ["1F1B", pytest.param("Interleaved1F1B", marks=pytest.mark.nightly)])
def test_stages_choose_equal_bits_on_all_ranks(ranks, schedule):
    found = ranks.run(_trained, schedule, both(Auto("smallest")))
    losses = next(r[0] for r in found if r[0])
    assert losses[-1] < losses[0]
    check_equal_sides([r[1] for r in found])
    choices = [s.choices for r in found for s in r[2]]
    assert all(c == choices[0] for c in choices)
    assert sum(choices[0].values()) == 18, "6 epochs of 3 steps; the disturbed one counts once"
    assert len(choices[0]) == len(LEVELS)
    assert all(s.refused_steps == 1 for r in found for s in r[2])


@pytest.mark.parametrize("arguments", [both(FAST) | {"activations": "direct"}, {"forward": FAST, "backward": "small"}])
def test_bits_stay_within_the_default_floor(ranks, arguments):
    for *_, specs in ranks.run(_trained, "1F1B", arguments):
        for forward, backward in specs:
            assert forward.bits >= 4
            assert backward == (codec.Quantize(4) if arguments["backward"] == "small" else codec.Quantize(8))


def steps(choice, count, rates, seconds, start=0):
    """Simulate steps whose edge e sends 1 MB (at 8 bits) per direction over a link of rates[e] bytes/s."""
    for _ in range(count):
        sent = []
        for edge, rate in enumerate(rates):
            for kind in (0, 1):
                nbytes = round(1e6 * (choice.spec(edge, kind).bits + 0.5) / 8.5)
                sent.append([edge, kind, round(1e12 / rate), 941_176, nbytes])
        wire = max(each[2] * each[4] for each in sent) / 1e12
        choice.learn([checked({"microseconds": round(1e6 * seconds(wire)), "sent": sent})], logs=False)


def test_fast_edges_keep_more_bits_than_slow_ones():
    choice = EdgeChoice(LEVELS, None)
    steps(choice, 30, [12.5e6, 1.25e9], lambda wire: 0.02 + wire)
    assert [choice.spec(0, kind).bits for kind in (0, 1)] == [2, 4]
    assert [choice.spec(1, kind).bits for kind in (0, 1)] == [8, 8]
    steps(choice, 15, [1.25e9, 1.25e9], lambda wire: 0.02 + wire)
    assert choice.spec(0, 1).bits == 8, "fewer bits would not make steps faster"
    steps(choice, 15, [12.5e6, 12.5e6], lambda wire: max(0.2, wire))
    assert choice.spec(0, 1).bits == 8, "messages travel while stages compute"


@pytest.mark.parametrize(
    "report",
    [
        None,
        {"microseconds": 1},
        {"microseconds": 1.5, "sent": []},
        {"microseconds": 1, "sent": [[0, 0, 1, 1]]},
        {"microseconds": 1, "sent": [[0, 2, 1, 1, 1]]},
        {"microseconds": 1, "sent": [[0, 0, 1, 1, 1 << 61]]},
        {"microseconds": 1, "sent": [[0, 0, True, 1, 1]]},
        {"microseconds": 1, "sent": [[0, 0, 1, -1, 1]]},
        {"microseconds": -1, "sent": []},
    ],
)
def test_reports_of_other_ranks_are_validated(report):
    with pytest.raises((ValueError, TypeError, KeyError)):
        checked(report)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"forward": Auto("small"), "backward": "auto"}, "must have the same Auto"),
        (both(Auto(0.1)), "quality of a pipeline"),
        (both(Auto(link="fast")), "link must be"),
    ],
)
def test_wrong_arguments_are_refused(arguments, match):
    with pytest.raises(codec.ArgumentError, match=match):
        specs_of(**arguments, deltas=None)
