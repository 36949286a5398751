"""Schedules given by a function, delays, fragments of equal size, and parameters that are sent lossless."""

import time

import numpy as np
import pytest
import torch
from torch import nn

import codec
import codec.torch
from codec.torch.replicas.fragment import cut
from support.local_training import (
    EXACT,
    Linear,
    adam,
    flat,
    local_steps,
    log_records,
    moved,
    net,
    parameter_bytes,
    push,
    raised,
    started,
    started_linear,
    train,
)
from support.states import through_a_file

# every=


def growing(steps):
    return 2 if steps < 4 else 3


def _rounds(rank, size, how):
    """Return the numbers of the steps after which the number of synchronizations grew."""
    model, optimizer, local = started(**how)
    found, before = [], 0
    for step in range(12):
        train(model, optimizer, rank, [step], local.step)
        now = local.stats().synchronizations
        if now > before:
            found.append(step + 1)
        before = now
    local.synchronize()
    return found, parameter_bytes(model)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({"every": growing}, [2, 4, 7, 10]),
        ({"every": growing, "delay": 1}, [3, 5, 8, 11]),
        ({"every": lambda steps: 2 + 2 * (steps > 0), "fragments": 2}, [1, 2, 4, 6, 8, 10, 12]),
        ({"every": growing, "warmup": 3}, [5, 8, 11]),
    ],
    ids=lambda x: str(list(x)) if isinstance(x, dict) else "",
)
def test_function_sets_the_steps_until_the_next_synchronization(pool, how, expected):
    if "fragments" in how:
        how = how | {"every": doubled}
    (found, a), (_, b) = pool.run(_rounds, how)
    assert found == expected
    assert a == b


def doubled(steps):
    return 2 + 2 * (steps > 0)


def by_learning_rate(optimizer):
    return lambda steps: round(0.02 / optimizer.param_groups[0]["lr"])


def _resumed(rank, size, begin):
    model = net()
    optimizer = adam(model)
    local = local_steps(model, optimizer, every=by_learning_rate(optimizer))

    def run(model, optimizer, local, steps):
        for step in steps:
            optimizer.param_groups[0]["lr"] = 1e-2 if step < 3 else 5e-3
            train(model, optimizer, rank, [step], local.step)

    run(model, optimizer, local, range(begin))
    saved = through_a_file([x.state_dict() for x in (model, optimizer, local)])
    run(model, optimizer, local, range(begin, 10))
    again = net(seed=9)
    optimizer2 = adam(again)
    local2 = local_steps(again, optimizer2, every=by_learning_rate(optimizer2))
    for x, state in zip((again, optimizer2, local2), saved, strict=True):
        x.load_state_dict(state)
    run(again, optimizer2, local2, range(begin, 10))
    return parameter_bytes(model), parameter_bytes(again), local.stats().synchronizations


def test_round_of_a_function_continues_from_a_checkpoint(pool):
    for a, b, n in pool.run(_resumed, 5):
        assert a == b
        assert n == 3  # after the steps 2, 4 and 8


def _different(rank, size, kind):
    def every(steps):
        if kind == "raises" and rank and steps:
            raise ValueError("no schedule")
        if kind == "zero" and rank and steps:
            return 0
        return 2 + (rank and steps == 2)

    model, optimizer, local = started(every=every)
    train(model, optimizer, rank, range(1), local.step)
    train(model, optimizer, rank, range(1, 2))
    before = parameter_bytes(model)
    error = raised(local.step)
    assert parameter_bytes(model) == before
    local.synchronize()
    return error, parameter_bytes(model)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("differs", "then 3 steps"),
        ("raises", "every(2) raised ValueError"),
        ("zero", "every(2) must be an int from 1 to"),
    ],
)
def test_functions_that_fail_or_differ_on_one_rank_are_an_error_on_all(pool, kind, text):
    (first, a), (second, b) = pool.run(_different, kind)
    assert first[0] == "PeerError"
    assert second[0] == ("PeerError" if kind == "differs" else "ArgumentError")
    assert text in first[1]
    assert text in second[1]
    assert a == b


# delay=


def _waits(rank, size, pauses):
    """Train with steps that take `pauses[rank]` seconds; return the seconds of waiting, and the warnings."""
    model, optimizer, local = started(every=1, delay=1)
    with log_records() as records:
        for step in range(6):
            time.sleep(pauses[rank])
            train(model, optimizer, rank, [step], local.step)
        local.finish()
    return local.stats().blocked_s, [text for level, text in records if level == "WARNING"]


def test_rank_warns_once_that_synchronizations_do_not_fit_into_the_delay(pool):
    (blocked, warnings), (others, _) = pool.run(_waits, (0.0, 0.2))
    assert blocked > 0.6
    assert others < blocked
    assert len(warnings) == 1
    assert "do not fit into delay=1 steps" in warnings[0]


def test_synchronizations_that_fit_into_the_delay_do_not_warn(pool):
    assert [warnings for _, warnings in pool.run(_waits, (0.3, 0.3))] == [[], []]


# Fragments


def _names(shapes, count, exact=()):
    parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    return [[piece.name for piece in f.pieces] for f in cut(parameters, [parameters[n] for n in exact], count)]


@pytest.mark.parametrize(
    ("shapes", "count", "expected"),
    [
        ({"a": (10, 2), "b": (20,)}, 2, [["a"], ["b"]]),
        (
            {"token": (90, 2), "b": (20,)},
            4,
            [["token[0:25]"], ["token[25:50]"], ["token[50:75]"], ["token[75:90]", "b"]],
        ),
        ({"a": (7,), "b": (2, 10), "c": (7,)}, 2, [["a", "b[0:1]"], ["b[1:2]", "c"]]),
        ({"a": (), "b": (1,), "c": (100,)}, 3, [["a"], ["b"], ["c"]]),
        ({"a": (100,), "b": (), "c": (1,)}, 3, [["a"], ["b"], ["c"]]),
        ({"a": (3, 1000), "b": (3,)}, 4, [["a[0:1]"], ["a[1:2]"], ["a[2:3]"], ["b"]]),
    ],
    ids=str,
)
def test_fragments_have_the_nearest_rows_to_equal_sizes(shapes, count, expected):
    assert _names(shapes, count) == expected


def test_fragments_differ_by_at_most_a_row():
    parameters = {"token": nn.Parameter(torch.zeros(32_000, 8)), "head": nn.Parameter(torch.zeros(64, 8))}
    sizes = [f.n for f in cut(parameters, [], 8)]
    assert sum(sizes) == 32_064 * 8
    assert max(sizes) - min(sizes) <= 8


def _divided(rank, size):
    """A permuted parameter is divided between fragments, whose synchronizations together are a whole one."""
    model = nn.Conv2d(2, 40, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    local = local_steps(model, optimizer, every=6, fragments=3, spec=EXACT)
    start = flat(model)
    for _ in range(6):
        push(model, optimizer, rank, [0], local.step)
    local.finish()
    assert len(local.state_dict()["anchors"]) == 4
    assert model.weight.is_contiguous(memory_format=torch.channels_last)
    return flat(model), start


def test_rows_of_a_divided_parameter_are_all_synchronized(pool):
    (a, start), (b, _) = pool.run(_divided)
    np.testing.assert_array_equal(a, b)
    assert (a != start).all()


# Lossless parameters


def _biases(rank, size):
    model, optimizer, local = started_linear(every=2, spec=codec.Sign())
    push(model, optimizer, rank, range(2), local.step)
    names = {key.rpartition("[")[0] for key in local.state_dict()["residuals"]["worker"] if "[" in key}
    return flat(model), names


def test_norms_and_biases_are_sent_lossless(pool):
    (a, names), (b, _) = pool.run(_biases)
    np.testing.assert_array_equal(a, b)
    assert names == {"a", "c"}
    expected = flat(Linear()) + moved(range(2), range(2), 0.01)
    small = np.r_[600:607, 1707]  # the values of b and d
    np.testing.assert_allclose(a[small], expected[small], rtol=0, atol=1e-6)
    assert np.abs(a - expected).max() > 1e-3
