"""State dicts of LocalSteps resume training bit for bit, and are refused if they do not match the model."""

import copy

import pytest
import torch

import codec
import codec.torch
from codec.stateful.schema import signed
from support.local_training import (
    EXACT,
    adam,
    log_records,
    nesterov,
    net,
    parameter_bytes,
    raised,
    started,
    state_bytes,
    train,
)
from support.states import through_a_file

CASES = [
    ({"every": 4}, 6),
    # The checkpoint is taken while a synchronization is in flight
    ({"every": 4, "fragments": 2, "delay": 1, "outer": nesterov}, 8),
    ({"every": 4, "warmup": 5, "spec": codec.Sign()}, 3),
    ({"every": 3, "spec": EXACT, "delay": 3}, 10),
]


@pytest.mark.parametrize(("how", "begin"), CASES, ids=lambda x: str(x) if isinstance(x, int) else str(list(x)))
def test_training_goes_on_from_a_checkpoint_with_the_same_bits(pool, how, begin):
    found = pool.run(_in_order, how, begin, "cmol")
    assert {bits for a, b, _ in found for bits in (a, b)} == {found[0][0]}
    assert all(same for _, _, same in found)


def _refusals(rank, size):
    model, optimizer, local = started(every=4, fragments=2, delay=1, outer=nesterov)
    train(model, optimizer, rank, range(8), local.step)
    state = local.state_dict()
    assert state["pending"]
    before = parameter_bytes(model), state_bytes(local)

    def changed(*path, to=None, drop=False):
        new = copy.deepcopy(state)
        place = new
        for key in path[:-1]:
            place = place[key]
        if drop:
            del place[path[-1]]
        else:
            place[path[-1]] = to
        return new

    weight = state["anchors"]["0.weight"]
    worker = state["residuals"]["worker"]
    key = next(k for k in worker if k.startswith("0.weight"))
    longer = {"0.weight[0:9999]" if k == key else k: torch.zeros(9999) if k == key else x for k, x in worker.items()}
    wrong = [
        (changed("rank", to=1 - rank), f"rank {1 - rank} of 2, but this is rank {rank} of 2"),
        (changed("world_size", to=3), "synchronize(exact=True)"),
        (changed("parameters", to="0" * 32), "does not have the parameters with which this state was saved"),
        (changed("bases", "9.weight", to=weight), "only one of both has '9.weight'"),
        (changed("anchors", "0.weight", drop=True), "only one of both has '0.weight'"),
        (changed("anchors", "9.weight", to=weight), "only one of both has '9.weight'"),
        (changed("residuals", "worker", to=longer), "incomplete or damaged"),
        (changed("residuals", to=signed(state["residuals"] | {"worker": longer})), "residual of 9999 values of '0.w"),
        (changed("residuals", to=signed(state["residuals"] | {"rank": 1 - rank})), "belong to another rank"),
        (changed("outer", to={}), "the state of the outer optimizer"),
        (changed("outer", "state", 0, "momentum_buffer", to=torch.ones(2, 2)), "the state of the outer optimizer"),
        (changed("outer", "state", 99, to={}), "the state of the outer optimizer"),
        (changed("pending", "mine", "9.weight", to=weight), "only one of both has '9.weight'"),
    ]
    found = []
    for other, text in wrong:
        error = raised(lambda other=other: local.load_state_dict(other))
        found.append((error is not None and error[0] == "StateError" and text in error[1]) or (text, error))
        assert (parameter_bytes(model), state_bytes(local)) == before
    return found


def test_states_that_do_not_fit_are_refused(pool):
    for found in pool.run(_refusals):
        assert [x for x in found if x is not True] == []


def _without_feedback(rank, size):
    lossy, exact, outer = (
        codec.torch.LocalSteps(m := net(), adam(m), **how) for how in ({}, {"spec": EXACT}, {"outer": nesterov})
    )
    return (
        raised(lambda: exact.load_state_dict(lossy.state_dict())),
        raised(lambda: lossy.load_state_dict(exact.state_dict())),
        raised(lambda: lossy.load_state_dict(outer.state_dict())),
    )


def test_states_of_other_arguments_are_refused(pool):
    for found in pool.run(_without_feedback):
        assert [kind for kind, _ in found] == ["StateError"] * 3
        assert "no error feedback" in found[0][1]
        assert "pass outer=" in found[2][1]


def _different_steps(rank, size):
    """Ranks with states of different steps raise at the next call, before any change."""
    model, optimizer, local = started(every=4)
    states = []
    for step in range(5):
        train(model, optimizer, rank, [step], local.step)
        states.append((copy.deepcopy(model.state_dict()), local.state_dict()))

    def load(saved):
        model.load_state_dict(saved[0])
        local.load_state_dict(saved[1])

    load(states[2 + rank])
    before = parameter_bytes(model), state_bytes(local)
    errors = raised(local.step), raised(local.synchronize)
    assert (parameter_bytes(model), state_bytes(local)) == before
    load(states[3])
    local.synchronize()
    return errors, parameter_bytes(model)


def test_ranks_that_load_states_of_different_steps_raise(pool):
    (errors, a), (_, b) = pool.run(_different_steps)
    for kind, text in errors:
        assert kind == "PeerError"
        assert "rank 1 is at step 4, synchronization 1, and rank 0 at step 3, synchronization 0" in text
    assert a == b


def _in_order(rank, size, how, begin, order):
    """Resume in a given order of creating LocalSteps (c), and loading model (m), optimizer (o) and LocalSteps (l)."""

    def new(seed):
        model = torch.nn.Sequential(net(seed), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3).requires_grad_(False))
        model.register_buffer("order", torch.randperm(5))
        return model, adam(model)

    model, optimizer = new(seed=3)
    local = codec.torch.LocalSteps(model, optimizer, **how)
    train(model, optimizer, rank, range(begin), local.step)
    saved, saved_bytes = through_a_file([x.state_dict() for x in (model, optimizer, local)]), state_bytes(local)
    train(model, optimizer, rank, range(begin, 12), local.step)
    local.finish()

    again, optimizer2 = new(seed=9 + rank)
    made = []
    calls = {
        "c": lambda: made.append(codec.torch.LocalSteps(again, optimizer2, **how)),
        "m": lambda: again.load_state_dict(saved[0]),
        "o": lambda: optimizer2.load_state_dict(saved[1]),
        "l": lambda: made[0].load_state_dict(saved[2]),
    }
    for each in order:
        calls[each]()
    assert made[0].steps == begin
    assert state_bytes(made[0]) == saved_bytes
    train(again, optimizer2, rank, range(begin, 12), made[0].step)
    made[0].finish()
    return parameter_bytes(model), parameter_bytes(again), state_bytes(local) == state_bytes(made[0])


@pytest.mark.parametrize("order", ["cmol", "mcol", "mocl", "omcl", "cmlo"])
def test_training_goes_on_whenever_the_model_was_loaded(pool, order):
    for how, begin in (CASES[0], CASES[1], CASES[3]):
        found = pool.run(_in_order, how, begin, order)
        assert {bits for a, b, _ in found for bits in (a, b)} == {found[0][0]}
        assert all(same for _, _, same in found)


def _wrong_model(rank, size, which):
    model, optimizer, local = started(every=4)
    train(model, optimizer, rank, range(6), local.step)
    state = local.state_dict()
    again = net(seed=9)
    local2 = codec.torch.LocalSteps(again, adam(again), every=4)
    if which == "steps":
        train(model, optimizer, rank, range(6, 7))
    if which != "none":
        again.load_state_dict(model.state_dict())
    before = parameter_bytes(again), state_bytes(local2)
    error = raised(lambda: local2.load_state_dict(state))
    assert (parameter_bytes(again), state_bytes(local2)) == before
    return error


@pytest.mark.parametrize("which", ["none", "steps"])
def test_state_for_other_parameters_is_refused(pool, which):
    """The model was not loaded, or was saved one step later."""
    for kind, text in pool.run(_wrong_model, which):
        assert kind == "StateError"
        assert "call model.load_state_dict() with the model that this rank saved together with the state" in text


def _replaced(rank, size):
    model = net()
    if rank:
        with torch.no_grad():
            model[3].bias.add_(1)
    with log_records() as records:
        started(model)
    return records


def test_replaced_parameters_are_named_by_a_warning(pool):
    first, second = pool.run(_replaced)
    assert first == []
    [(level, text)] = second
    assert level == "WARNING"
    assert text.startswith("rank 1 of 2 had other values than rank 0 in '3.bias', and has taken those of rank 0")
