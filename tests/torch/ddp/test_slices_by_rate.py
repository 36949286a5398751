"""Slices of the ranks in DDP steps follow the rates of their links."""

import torch

import codec
import codec.torch
from codec.torch.group import autotune, shares
from support.ddp_training import ENCODE_ALL, parameter_bytes, train, wrapped
from support.ranks import run_ranks

RATES = [20, 20, 20, 5]


def _trained(spec, feedback, rank, algorithm):
    """Train two periods; return the parameters, the weights, and the bytes that this rank has sent in each period."""
    model, sent = wrapped(joins=True), []  # buckets that are not joined are too small for slices
    options = codec.options(algorithm=algorithm)
    hook = codec.torch.ddp_hook(spec, feedback=feedback, policy=ENCODE_ALL, options=options).register(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for period in range(2):
        before = hook.stats().sent_nbytes
        train(model, optimizer, rank, shares.PERIOD, period * shares.PERIOD)
        sent.append(hook.stats().sent_nbytes - before)
    return parameter_bytes(model), hook.reducer.state.shares.weights, sent


def _with_a_slow_link(rank, size):
    shares.rate_of = lambda *_: RATES[rank]
    autotune.RawFallback.way = lambda self, index: "frames"
    lossless = [_trained(codec.Lossless(), None, rank, algorithm) for algorithm in ("auto", "two_shot")]
    return *lossless, _trained(codec.Quantize(4), True, rank, "auto")


def test_slow_rank_owns_no_slice_and_sums_are_unchanged():
    found = run_ranks(4, _with_a_slow_link)
    for auto, equal, quantized in found:
        assert auto[:2] == (equal[0], (22, 21, 21, 0))
        assert quantized[:2] == found[0][2][:2]
        assert equal[1] is None
    (before, after), (equal_before, equal_after) = found[3][0][2], found[3][1][2]
    assert after < 0.8 * before  # S in place of 1.5 S
    assert equal_after > 0.9 * equal_before
