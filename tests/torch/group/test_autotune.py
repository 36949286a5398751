"""The choice between frames and raw values, which all ranks make alike."""

import pytest
import torch

import codec
import codec.torch
from codec.torch.group import communicator
from codec.torch.reduction import execution
from support.collective_values import rank_values, sum_in_order
from support.ranks import run_ranks


def choices_of(frames, values, load, n, smaller=1):
    """Return the choices of two ranks for n collectives, of which frames and values take the given seconds."""
    choices = [codec.torch.group.autotune.Choice() for _ in range(2)]
    kinds = []
    for i in range(n):
        kind, other = (c.kind for c in choices)
        assert kind == other  # ranks agree although their clocks differ
        kinds.append(kind)
        reports = []
        for rank in range(2):
            wall = {"frames": frames, "values": values}[kind] * (5 if i % 200 == 0 else 1 + rank / 10)
            larger = smaller if kind == "frames" else 1
            reports.append([round(wall * 1e6), round(load * 1e3), round((1 - load) * wall * larger * 1e6)])
        for c in choices:
            c.learn(list(map(max, zip(*reports, strict=True))))
    return kinds


def test_autotune_sends_what_is_faster():
    """Frames first; values where ranks are busy and values were faster; values are never tried on a slow link."""
    assert set(choices_of(1.0, 25.0, 0.05, 500)) == {"frames"}
    fast = choices_of(1.0, 0.5, 0.8, 450)
    assert fast[:5] == ["frames"] * 5
    assert set(fast[10:200]) == {"values"}
    assert fast[200] == "frames"  # measured again
    assert set(fast[210:400]) == {"values"}
    near = choices_of(1.0, 1.5, 0.8, 100)
    assert near[5:10] == ["values"] * 5
    assert set(near[10:]) == {"frames"}
    # a trial stops when values take twice as long as frames
    far = choices_of(1.0, 3.0, 0.5, 300, 4)
    assert [i for i, kind in enumerate(far) if kind == "values"] == [5, 6, 205, 206]
    # frames keep the processor busy, but sending raw values would take longer still
    assert set(choices_of(1.0, 25.0, 0.5, 500, 50)) == {"frames"}
    assert set(choices_of(1.0, 0.9, 0.5, 100, 3)[5:]) == {"values"}


def test_autotune_uses_the_median_of_recent_times():
    """The fastest time may be luck; a way that becomes slower is left."""

    def sent(frames, values, n=200):
        choice, kinds = codec.torch.group.autotune.Choice(), []
        for i in range(n):
            kinds.append(choice.kind)
            choice.learn([frames(i) if kinds[-1] == "frames" else values(i), 800, 0])
        return kinds

    def scattered(i):
        return 1100 if i % 4 else 500

    assert "values" not in sent(lambda i: 1000, scattered)[10:]
    assert "frames" not in sent(scattered, lambda i: 1000)[10:]
    # a single slow collective, still faster than frames, does not end the trial
    assert "frames" not in sent(lambda i: 3000, lambda i: 2900 if i % 3 else 1000)[10:]
    assert "frames" not in sent(lambda i: 3000, lambda i: 1000 if i % 3 else 2900)[10:]
    slower = sent(lambda i: 1000, lambda i: 500 if i < 50 else 2000)
    assert "frames" not in slower[10:50]
    assert "values" not in slower[60:]


def _chosen(rank, size):
    every = [rank_values(r, (500, 1000)) for r in range(size)]
    want = sum_in_order(every, "mean")
    for _ in range(15):
        t = every[rank].clone()
        codec.torch.all_reduce(t, op="mean")
        assert torch.equal(t, want)
    kinds = [c.kind for c in communicator.communicator_of(None).choices.values()]
    execution._CHOICES = 3
    with pytest.raises(codec.PeerError):
        codec.torch.all_reduce(torch.ones(5 + rank))  # small tensors leave no entry
    for n in (1, 2, 3, 1, 4):
        codec.torch.all_reduce(torch.ones(n))
    choices = communicator.communicator_of(None).choices
    assert [c._count for c in choices.values()] == [1, 2, 1]
    return [*kinds, *choices]


def test_all_ranks_choose_frames_or_raw_alike():
    """Results are bit-identical in both ways."""
    results = run_ranks(3, _chosen)
    assert len(results[0]) == 1 + 3
    assert all(r == results[0] for r in results)
