"""State dicts of codec.torch.Feedback resume bit for bit, load on other numbers of ranks, and are validated."""

import copy
import os

import numpy as np
import pytest
import torch

import codec
import codec.torch
from codec.stateful.schema import signed
from support.collective_values import tensor_bytes
from support.feedback import BUCKETS, N, corrections, gathered, gradient, reduce, state_bytes
from support.ranks import run_ranks


def _continued(rank, size):
    def steps(feedback, numbers):
        for step in numbers:
            shapes = BUCKETS[step % 3]
            x = gradient(rank, step, sum(int(np.prod(s)) for s in shapes.values()))
            reduce(codec.view(x, segments=shapes), feedback)
            yield tensor_bytes(x)

    spec = codec.Sign(group_size=128)
    whole, first, again = (codec.torch.Feedback(spec) for _ in range(3))
    expected = list(steps(whole, range(8)))
    found = list(steps(first, range(4)))
    path = f"/tmp/feedback-{os.getpid()}.pt"
    torch.save(first.state_dict(), path)
    again.load_state_dict(torch.load(path, weights_only=True))
    os.unlink(path)
    copied = copy.deepcopy(first)
    assert state_bytes(again) == state_bytes(first) == state_bytes(copied)
    assert found + list(steps(again, range(4, 8))) == expected
    assert state_bytes(again) == state_bytes(whole)
    assert list(steps(copied, range(4, 8))) == expected[4:]


def test_resumed_steps_are_bit_identical():
    run_ranks(3, _continued)


def _saved(rank, size, op):
    feedback = codec.torch.Feedback(codec.Sign(group_size=128))
    for step in range(4):
        shapes = BUCKETS[step % 3]
        x = gradient(rank, step, sum(int(np.prod(s)) for s in shapes.values()))
        reduce(codec.view(x, segments=shapes), feedback, op=op)
    return feedback.state_dict()


def _resharded(rank, size, states, op):
    """Reshard residuals that four ranks saved, continue, and check that later results contain all of them."""
    feedback = codec.torch.Feedback(codec.Sign(group_size=128))
    feedback.load_state_dict(states[0])  # saved by rank 0 of 4
    x = torch.zeros(4000)
    with pytest.raises(codec.StateError, match=r"rank 0 of 4, but this is rank"):
        reduce(codec.view(x, segments={"a": (40, 100)}), feedback, op=op)
    feedback.load_state_dict(codec.torch.Feedback.reshard(states, size)[rank])
    held = corrections(states, op)
    total = {}
    for step in range(3):
        shapes = BUCKETS[(step + 1) % 3]
        # Zero gradients: results consist of residuals only
        x = torch.zeros(sum(int(np.prod(s)) for s in shapes.values()))
        reduce(codec.view(x, segments=shapes), feedback, op=op)
        at = 0
        for name, shape in shapes.items():
            k = int(np.prod(shape))
            total[name] = total.get(name, 0) + x[at : at + k].double().numpy()
            at += k
    left = corrections(gathered(feedback), op)
    for name, got in total.items():
        want = held[name][: got.size]
        if name != "b":  # parameter b has a single value, which sign and scale reproduce exactly
            assert np.abs(want).max() > 0.1
            assert np.abs(got).max() > 0.01
        assert np.abs(want - got - left[name][: got.size]).max() < 1e-4, name


@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("size", [1, 2])
def test_residuals_continue_on_fewer_ranks(size, op):
    states = run_ranks(4, _saved, op)
    for new in (codec.torch.Feedback.reshard(states, size), codec.torch.Feedback.reshard(states, 7)):
        for name, want in corrections(states, op).items():
            assert np.abs(corrections(new, op)[name] - want).max() < 1e-5
    run_ranks(size, _resharded, states, op)


def _in_group_of_one(rank, size):
    """Check that invalid states are rejected and leave the residuals unchanged."""
    feedback = codec.torch.Feedback(codec.Sign(group_size=128))
    reduce(gradient(0, 0, 300), feedback)
    good, before = feedback.state_dict(), state_bytes(feedback)
    for wrong in (
        good | {"rank": 1},
        good | {"rank": -1},
        good | {"worker": good["server"]},
        good | {"worker": good["worker"] | {"[5:7]": torch.zeros(2)}},
    ):
        for given in (wrong, signed(wrong) if isinstance(wrong, dict) else wrong):
            with pytest.raises(codec.StateError):
                feedback.load_state_dict(given)
        assert state_bytes(feedback) == before
    for wrong in (
        None,
        [],
        good,
        [good, good],
        [signed(good | {"world_size": 2}), signed(good | {"op": "sum"})],
        [{}],
        "ab",
    ):
        with pytest.raises(codec.StateError):
            codec.torch.Feedback.reshard(wrong, 2)
    with pytest.raises(codec.ArgumentError, match="world_size"):
        codec.torch.Feedback.reshard([good], 0)
    fresh = codec.torch.Feedback("smallest")
    fresh.load_state_dict(codec.torch.Feedback("smallest").state_dict())
    reduce(gradient(0, 0), fresh)
    assert "1 parameter" in repr(fresh)


def test_wrong_states_are_rejected():
    run_ranks(1, _in_group_of_one)


def _stats(rank, size):
    before = codec.torch.group_stats()
    codec.torch.all_reduce(gradient(rank, 0), codec.Quantize(4), op="mean", options=codec.options(algorithm="two_shot"))
    delta = codec.torch.group_stats() - before
    assert delta.frame_collectives == 1
    return delta.sent_nbytes, delta.received_nbytes


def test_stats_of_a_group_count_bytes():
    (sent, received), other = run_ranks(2, _stats)
    assert N / 2 < sent < N  # 4.5 bits per value
    assert other == (received, sent)
