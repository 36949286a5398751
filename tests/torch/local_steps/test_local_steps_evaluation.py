"""Evaluations of the mean of all ranks do not change the training."""

import numpy as np
import pytest
import torch
from torch import nn

import codec
import codec.torch
from support.local_training import (
    EXACT,
    Linear,
    flat,
    local_steps,
    moved,
    nesterov,
    net,
    parameter_bytes,
    push,
    raised,
    started,
    started_linear,
    state_bytes,
    train,
)

LR = 0.01


def _evaluated(rank, size, how, evaluate):
    """Train, and evaluate after each third step; return parameters and the state at the end."""
    model, optimizer, local = started(nn.Sequential(net(), nn.BatchNorm1d(3)), **how)
    for step in range(9):
        train(model, optimizer, rank, [step], local.step)
        if evaluate and step % 3 == 2:
            before = parameter_bytes(model), state_bytes(local)
            with local.averaged():
                shown = parameter_bytes(model)
            assert (parameter_bytes(model), state_bytes(local)) == before
            with local.averaged(exact=True):
                pass
    bits = parameter_bytes(model), state_bytes(local)
    return bits, shown if evaluate else None


CASES = [
    {"every": 5, "outer": nesterov},
    {"every": 5, "spec": codec.torch.Feedback(codec.TopK(1 / 8), decay=0.9)},
    {"every": 4, "fragments": 2, "delay": 2, "outer": nesterov},
    {"every": 4, "warmup": 4},
]


@pytest.mark.parametrize("how", CASES, ids=lambda how: str(list(how)))
def test_averaged_shows_equal_models_and_changes_nothing(pool, how):
    plain = pool.run(_evaluated, how, False)
    found = pool.run(_evaluated, how, True)
    assert [bits for bits, _ in found] == [bits for bits, _ in plain]
    assert found[0][1] == found[1][1]
    assert "warmup" in how or found[0][1] != found[0][0][0]


def _mean(rank, size):
    model, optimizer, local = started_linear(every=9)
    push(model, optimizer, rank, range(4), local.step)
    with local.averaged(exact=True):
        inside = flat(model)
        refused = [raised(call) for call in (local.step, local.finish, local.state_dict, local.synchronize)]
        again = raised(lambda: local.averaged().__enter__())

    def fail():
        with local.averaged():
            raise ValueError("in the block")

    own = flat(model)
    assert raised(fail) == ("ValueError", "in the block")
    np.testing.assert_array_equal(flat(model), own)
    local.finish()
    return inside, [*refused, again]


def test_averaged_shows_the_mean_and_refuses_other_calls(pool):
    expected = flat(Linear()) + moved(range(2), range(4), LR)
    for inside, refused in pool.run(_mean):
        np.testing.assert_allclose(inside, expected, rtol=0, atol=1e-6)
        assert {kind for kind, _ in refused} == {"StateError"}
        assert all("end the block of averaged()" in text for _, text in refused)


def _synchronized(rank, size, times):
    model, optimizer, local = started(every=3, outer=nesterov)
    for step in range(6):
        train(model, optimizer, rank, [step], local.step)
        if step % 3 == 2:
            before = parameter_bytes(model)
            for _ in range(times):
                local.synchronize()
            assert parameter_bytes(model) == before
    before = parameter_bytes(model)
    local.finish()
    assert parameter_bytes(model) == before
    return before


def test_synchronize_and_finish_after_a_scheduled_synchronization_change_nothing(pool):
    assert len({*pool.run(_synchronized, 0), *pool.run(_synchronized, 2)}) == 1


def _in_between(rank, size, steps, save):
    """The outer optimizer takes one step for all changes since its last one, whatever was averaged in between."""
    model = Linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    how = {"every": 4, "spec": EXACT, "outer": nesterov}
    local = local_steps(model, optimizer, **how)
    for step in range(8):
        push(model, optimizer, rank, [step], local.step)
        if step in steps:
            local.synchronize()
            if save:
                state, again = local.state_dict(), Linear()
                again.load_state_dict(model.state_dict())
                model, optimizer = again, torch.optim.SGD(again.parameters(), lr=LR)
                local = local_steps(model, optimizer, **how)
                local.load_state_dict(state)
        elif step == 5:
            assert not local.synchronized
    return flat(model)


@pytest.mark.parametrize("save", [False, True])
def test_outer_optimizer_includes_changes_that_synchronize_has_averaged(pool, save):
    expected, momentum = flat(Linear()), 0.0
    for round in range(2):
        g = -moved(range(2), range(4 * round, 4 * round + 4), LR)
        momentum = g if round == 0 else 0.9 * momentum + g
        expected = expected - 0.7 * (g + 0.9 * momentum)
    for steps in ([], [1, 2, 6]):
        found = pool.run(_in_between, steps, save)
        np.testing.assert_array_equal(*found)
        np.testing.assert_allclose(found[0], expected, rtol=0, atol=1e-5)


def _uneven(rank, size):
    """Rank 0 ends after a synchronization, rank 1 three steps later."""
    model, optimizer, local = started(every=5, outer=nesterov)
    train(model, optimizer, rank, range(5 + 3 * rank), local.step)
    local.finish()
    return parameter_bytes(model)


def test_finish_includes_the_steps_of_a_rank_that_has_taken_more(pool):
    assert len(set(pool.run(_uneven))) == 1


def _unequal_calls(rank, size):
    model, optimizer, local = started(every=5)
    train(model, optimizer, rank, range(4), local.step)
    train(model, optimizer, rank, range(4, 5))
    error = raised(local.finish if rank == 0 else local.step)
    local.synchronize()  # both ranks can go on
    return error, parameter_bytes(model)


def test_rank_that_finishes_early_is_named_by_the_error_of_the_other(pool):
    (first, a), (second, b) = pool.run(_unequal_calls)
    assert first[0] == second[0] == "PeerError"
    step = "all_gather, requested as all_gather (step() after step 5, synchronization 0, then 5 steps)"
    assert f"rank 1 has begun {step}, and this rank finish() of LocalSteps" in first[1]
    assert f"rank 0 has begun finish() of LocalSteps, and this rank {step}" in second[1]
    assert a == b
