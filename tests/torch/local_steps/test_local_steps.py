"""LocalSteps on real ranks: means with error feedback, fragments sent in the background, statistics, finish()."""

import re

import numpy as np
import pytest
import torch
from torch import nn

import codec
import codec.torch
from support.ddp_training import change_error
from support.local_training import (
    EXACT,
    ROUNDED,
    Linear,
    adam,
    flat,
    moved,
    net,
    parameter_bytes,
    push,
    raised,
    started,
    started_linear,
    train,
)
from support.ranks import run_ranks

# Comparison with oracles in numpy


def _trained(rank, size, spec, every, steps):
    model, optimizer, local = started(every=every, spec=spec)
    train(model, optimizer, rank, range(steps), local.step)
    local.finish()
    return flat(model)


def oracle(size, spec, every, steps):
    """Return the parameters after local steps of `size` ranks, each of which sends its changes to all others."""
    models = [net() for _ in range(size)]
    optimizers = [adam(m) for m in models]
    shapes = {name: tuple(p.shape) for name, p in models[0].named_parameters()}
    anchor, residuals = flat(models[0]), [np.zeros(len(flat(models[0]))) for _ in range(size)]
    for begin in range(0, steps, every):
        sent = []
        for rank, (m, o) in enumerate(zip(models, optimizers, strict=True)):
            train(m, o, rank, range(begin, min(steps, begin + every)))
            values = (flat(m) - anchor + residuals[rank]).astype(np.float32)
            decoded = codec.decode(codec.encode(codec.view(values, segments=shapes), spec))
            residuals[rank] = values - decoded.astype(np.float64)
            sent.append(decoded.astype(np.float64))
        anchor = anchor + np.mean(sent, 0)
        for m in models:
            nn.utils.vector_to_parameters(torch.from_numpy(anchor).float(), m.parameters())
    return anchor


@pytest.mark.parametrize("spec", [ROUNDED, EXACT, codec.Sign()], ids=str)
def test_parameters_are_those_of_means_with_error_feedback(pool, spec):
    """Parameters equal the oracle's after 11 steps in rounds of 4, 4 and 3, the last one ended by finish()."""
    found = pool.run(_trained, spec, 4, 11)
    np.testing.assert_array_equal(*found)
    expected = oracle(2, spec, 4, 11)
    if spec == EXACT:
        assert change_error([found[0]], [expected], [flat(net())]) < 1e-3
    else:  # a few values near the boundary of two codes may round differently
        assert np.quantile(np.abs(found[0] - expected), 0.99) < 1e-5


@pytest.mark.nightly
def test_four_ranks_have_the_parameters_of_exact_means():
    found = run_ranks(4, _trained, EXACT, 4, 11)
    for each in found:
        np.testing.assert_array_equal(each, found[0])
    assert change_error([found[0]], [oracle(4, EXACT, 4, 11)], [flat(net())]) < 1e-3


def _pushed(rank, size, how, steps, exact=True):
    model, optimizer, local = started_linear(**how)
    push(model, optimizer, rank, range(steps), local.step)
    local.finish(exact=exact)
    return flat(model), local.stats()


CASES = [
    {"every": 4},
    {"every": 3, "spec": codec.Sign()},
    {"every": 6, "fragments": 3},
    {"every": 4, "delay": 4},
    {"every": 6, "fragments": 3, "delay": 2, "spec": "small"},
    {"every": 4, "warmup": 3},
    {"every": 4, "fragments": 2, "delay": 1, "warmup": 2, "spec": codec.Float8(group_size=32)},
]


@pytest.mark.parametrize("how", CASES, ids=str)
def test_no_change_is_lost_or_counted_twice(pool, how):
    """After an exact finish, parameters include the mean of all changes, whatever frames or fragments had lost."""
    found = pool.run(_pushed, how, 13)
    expected = flat(Linear()) + moved(range(2), range(13), 0.01)
    for parameters, stats in found:
        np.testing.assert_array_equal(parameters, found[0][0])
        np.testing.assert_allclose(parameters, expected, rtol=0, atol=2e-6)
        assert stats.steps == 13
        assert stats.residual_norm == 0
        assert stats.failed_synchronizations == 0


@pytest.mark.nightly
@pytest.mark.parametrize("how", CASES, ids=str)
def test_no_change_is_lost_or_counted_twice_by_four_ranks(how):
    """On four ranks, where sums are encoded, too, no change is lost when residuals move between ranks."""
    expected = flat(Linear()) + moved(range(4), range(13), 0.01)
    for parameters, _ in run_ranks(4, _pushed, how, 13):
        np.testing.assert_allclose(parameters, expected, rtol=0, atol=4e-6)


def test_three_ranks_keep_residuals_of_encoded_sums():
    expected = flat(Linear()) + moved(range(3), range(13), 0.01)
    found = run_ranks(3, _pushed, {"every": 6, "fragments": 3, "delay": 1}, 13)
    for parameters, _ in found:
        np.testing.assert_array_equal(parameters, found[0][0])
        np.testing.assert_allclose(parameters, expected, rtol=0, atol=4e-6)


def test_stats_count_bytes_and_synchronizations(pool):
    for _, stats in pool.run(_pushed, {"every": 4}, 12, False):
        assert (stats.synchronizations, stats.world_size, stats.values) == (3, 2, 1708)
        assert 0 < stats.residual_norm < 1
        assert 0.3 < stats.agreement < 1  # changes of two ranks with unrelated gradients: 0.71
        assert re.fullmatch(
            r"12 steps, 3 synchronizations: [0-9.]+ of 82 kB sent \([0-9.]+%\), .* a synchronization on the wire",
            str(stats),
        )
        # Bytes sent / float32 bytes of 3 synchronizations: 4 of 32 bits, and the scales of small tensors
        assert 3 * 0.06 < stats.ratio * 12 < 3 * 0.25


def _after_finish(rank, size):
    model, optimizer, local = started(warmup=2)
    train(model, optimizer, rank, range(3), local.step)
    local.finish()
    train(model, optimizer, rank, range(1))  # finish() removed the hook: gradients are not averaged
    return raised(local.step), "finished" in repr(local), parameter_bytes(model)


def test_finish_ends_local_steps(pool):
    a, b = pool.run(_after_finish)
    assert a[0][0] == "StateError"
    assert "finish() was called" in a[0][1]
    assert a[1]
    assert a[2] != b[2]
