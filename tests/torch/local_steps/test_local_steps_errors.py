"""Errors of local steps raise on all ranks, name the cause, and change nothing."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import codec
import codec.torch
from support.local_training import (
    EXACT,
    adam,
    log_records,
    net,
    parameter_bytes,
    raised,
    started,
    state_bytes,
    train,
)


def without_steps(state):
    """Return the entries of a state that an error leaves unchanged: all but steps, round and digest of parameters."""
    return [entry for entry in state if entry[0] not in (".steps", ".start", ".parameters")]


def _poisoned(rank, size, how, in_buffer):
    """NaN on rank 1 raises on both ranks and changes nothing; ranks can repeat the synchronization."""
    model, optimizer, local = started(nn.Sequential(net(), nn.BatchNorm1d(3)), every=4, **how)
    train(model, optimizer, rank, range(7), local.step)
    poisoned = model[1].running_mean if in_buffer else model[0][3].weight
    kept = poisoned.detach().clone()
    if rank == 1:
        with torch.no_grad():
            poisoned.view(-1)[1] = torch.nan
    before, shared = parameter_bytes(model), without_steps(state_bytes(local))
    error = raised(local.step)
    assert raised(lambda: local.synchronize(exact=True)) == error
    assert parameter_bytes(model) == before
    assert without_steps(state_bytes(local)) == shared
    with torch.no_grad():
        poisoned.copy_(kept)
    local.synchronize()
    return error, parameter_bytes(model), local.stats().failed_synchronizations


@pytest.mark.parametrize("in_buffer", [False, True], ids=["parameter", "buffer"])
@pytest.mark.parametrize("how", [{}, {"spec": EXACT}], ids=str)
def test_nan_on_one_rank_is_an_error_on_all_that_names_the_tensor(pool, how, in_buffer):
    (first, a, failed), (second, b, _) = pool.run(_poisoned, how, in_buffer)
    name = "buffer '1.running_mean' holds NaN" if in_buffer else "parameter '0.3.weight' holds NaN or Inf after step 8"
    assert first[0] == "PeerError"
    assert second[0] == "ArgumentError"
    assert first[1].startswith("rank 1 has NaN or Inf")
    assert name in first[1]
    assert second[1].startswith(name)
    assert a == b
    assert failed == 2


def _poisoned_in_flight(rank, size, repeat):
    model, optimizer, local = started(every=4, delay=2)
    train(model, optimizer, rank, range(4), local.step)  # the last step begins a synchronization
    train(model, optimizer, rank, range(4, 7), local.step)  # the synchronization ends
    kept = model[3].weight.detach().clone()
    if rank == 1:
        with torch.no_grad():
            model[3].weight[1, 1] = torch.inf
    shared = without_steps(state_bytes(local))
    local.step()
    local.step()
    refused = raised(local.state_dict)
    before = parameter_bytes(model)
    error = raised(local.synchronize if repeat else local.step)
    assert parameter_bytes(model) == before
    assert without_steps(state_bytes(local)) == shared
    with torch.no_grad():
        model[3].weight.copy_(kept)
    local.synchronize()
    return refused, error, parameter_bytes(model)


@pytest.mark.parametrize("repeat", [False, True], ids=["due", "repeated"])
def test_error_in_flight_is_raised_where_the_mean_is_due_or_repeated(pool, repeat):
    (refused, first, a), (_, second, b) = pool.run(_poisoned_in_flight, repeat)
    assert refused[0] == "StateError"
    assert "has failed" in refused[1]
    assert first[0] == "PeerError"
    assert second[0] == "ArgumentError"
    assert f"'3.weight' holds NaN or Inf after step {9 if repeat else 8}" in first[1]
    assert a == b


def _poisoned_gradient(rank, size, sparse):
    model = nn.Sequential(nn.Embedding(10, 4, sparse=sparse), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = codec.torch.LocalSteps(model, optimizer, warmup=4)
    model(torch.tensor([rank, 2])).sum().backward()
    if not sparse and rank == 0:
        model[1].bias.grad[0] = torch.nan
    before = parameter_bytes(model), [p.grad.to_dense().tolist() for p in model.parameters()]
    error = raised(optimizer.step)
    after = parameter_bytes(model), [p.grad.to_dense().tolist() for p in model.parameters()]
    assert repr(before) == repr(after)
    return error, local.steps


def test_wrong_gradient_in_the_warmup_is_an_error_on_all_ranks(pool):
    (first, steps), (second, _) = pool.run(_poisoned_gradient, False)
    assert first == ("ArgumentError", "the gradient of '1.bias' holds NaN or Inf: no gradient was changed")
    assert second[0] == "PeerError"
    assert second[1].startswith("rank 0 has NaN or Inf")
    assert first[1] in second[1]
    assert steps == 0
    for error, _ in pool.run(_poisoned_gradient, True):
        assert error == ("ArgumentError", "the gradient of '0.weight' is sparse: warmup= needs dense gradients")


def _other_arguments(rank, size, how):
    model = how.pop("model", net)(rank) if rank else net()
    optimizer = adam(model)
    before = parameter_bytes(model)
    error = raised(lambda: codec.torch.LocalSteps(model, optimizer, **(how if rank else {})))
    assert parameter_bytes(model) == before
    codec.torch.LocalSteps(model := net(), adam(model))  # the group can still be used
    return error


def narrow(rank):
    return nn.Sequential(nn.Linear(12, 40), nn.LayerNorm(40), nn.GELU(), nn.Linear(40, 39), nn.GELU(), nn.Linear(39, 3))


def frozen(rank):
    model = net()
    model[5].bias.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"every": 20}, "every is 20 there and 10 here"),
        ({"spec": codec.Sign()}, "spec is Sign("),
        ({"warmup": 5}, "warmup is 5, Lossless("),
        ({"fragments": 2}, "fragments is 2 there and 1 here"),
        ({"delay": 2}, "delay is 2 there and 0 here"),
        ({"outer": lambda p: torch.optim.SGD(p, lr=0.7)}, "outer is SGD ( Parameter Group 0"),
        ({"model": narrow}, "rank 1 has another tensor in place of '3.weight' of shape (40, 40) and torch.float32"),
        ({"model": frozen}, "number of parameters is 7 there and 8 here"),
    ],
    ids=lambda x: str(list(x)) if isinstance(x, dict) else "",
)
def test_other_arguments_of_one_rank_are_an_error_on_all(pool, how, text):
    if "outer" in how:
        how = {"outer": sgd}
    found = pool.run(_other_arguments, how)
    assert [kind for kind, _ in found] == ["PeerError"] * 2
    assert found[0][1].startswith("rank 1 has ")
    assert text in found[0][1]
    assert found[1][1].startswith("rank 0 has ")


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.7)


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ({"every": 0}, "ArgumentError: every must be an int from 1 to 1099511627776, got 0"),
        ({"fragments": 20}, "ArgumentError: fragments must be an int from 1 to 10, got 20"),
        ({"every": 500, "fragments": 200}, "ArgumentError: fragments=200 cannot be made of 88 rows of parameters"),
        ({"fragments": 5, "delay": 3}, "ArgumentError: delay must be an int from 0 to 2, got 3"),
        ({"spec": codec.Truncate()}, "SpecError: spec=Truncate"),
        ({"spec": "none"}, "SpecError"),
        ({"warmup": -1}, "ArgumentError: warmup must be an int"),
        ({"warmup": (1, 2, 3)}, "ArgumentError: warmup must be a number of steps, or a pair (steps, spec)"),
        ({"outer": 5}, "ArgumentError: outer must be a function"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_wrong_argument_of_one_rank_is_an_error_on_all(pool, how, error):
    first, second = pool.run(_other_arguments, how)
    assert f"{second[0]}: {second[1]}".startswith(error)
    assert first[0] == "PeerError"
    assert first[1].startswith("rank 1 could not do its part")
    assert error in first[1]


def _models(rank, size):
    """Unsupported models and optimizers, equal on all ranks, are errors."""
    model, extra = net(), nn.Parameter(torch.ones(3))
    frozen = net().requires_grad_(False)
    meta = nn.Linear(3, 3, device="meta")
    complex_ = nn.Linear(3, 3, dtype=torch.complex64)
    cases = [
        (
            DistributedDataParallel(net()),
            adam(model),
            "DistributedDataParallel, which averages gradients in every step",
        ),
        ([model], adam(model), "model must be a torch.nn.Module"),
        (model, "adam", "optimizer must be a torch.optim.Optimizer"),
        (
            model,
            torch.optim.SGD([*model.parameters(), extra]),
            "the optimizer has 1 parameters that the model lacks",
        ),
        (model, adam(net()), "parameters that the model lacks"),
        (frozen, adam(frozen), "no parameter that requires a gradient"),
        (meta, adam(meta), "parameter 'weight' must be dense and real, and not on meta"),
        (complex_, adam(complex_), "not on meta, got torch.complex64"),
    ]
    found = []
    for module, optimizer, text in cases:
        error = raised(lambda module=module, optimizer=optimizer: codec.torch.LocalSteps(module, optimizer))
        found.append((error[0] == "ArgumentError" and text in error[1]) or error)
    found.append(raised(lambda: codec.torch.LocalSteps(model, adam(model), group="world"))[1])
    return found


def test_wrong_models_and_groups_are_refused(pool):
    for found in pool.run(_models):
        assert found[:-1] == [True] * 8
        assert found[-1].startswith("group must be a ProcessGroup, a DeviceMesh")
        assert found[-1].endswith("got 'world'")


def test_torch_distributed_must_be_initialized():
    model = net()
    with pytest.raises(codec.ArgumentError, match="call init_process_group first"):
        codec.torch.LocalSteps(model, adam(model))


def _changed_model(rank, size, change):
    model = net()
    optimizer = adam(model)
    model[0].bias.requires_grad_(change != "unfrozen")
    local = codec.torch.LocalSteps(model, optimizer, every=1)
    if rank == 1 and change == "unfrozen":
        model[0].bias.requires_grad_(True)
    elif rank == 1:
        model[0].bias = nn.Parameter(torch.ones(40))
    return raised(local.step)


@pytest.mark.parametrize(
    ("change", "text"),
    [("unfrozen", "'0.bias' requires a gradient now"), ("replaced", "'0.bias' was replaced or removed")],
)
def test_other_parameters_than_before_are_an_error_on_all_ranks(pool, change, text):
    first, second = pool.run(_changed_model, change)
    assert (first[0], second[0]) == ("PeerError", "ArgumentError")
    assert text in first[1]
    assert text in second[1]


def _closure(rank, size):
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters())
    local = codec.torch.LocalSteps(model, optimizer, warmup=1)
    assert local.steps == 0
    return raised(lambda: optimizer.step(lambda: model(torch.ones(1, 12)).sum()))


def _scaled(rank, size):
    """A GradScaler with a fused optimizer is refused, because gradients would stay scaled, by factors that differ by
    rank.
    """
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    local = codec.torch.LocalSteps(model, optimizer, warmup=1)
    assert local.steps == 0
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 12)).sum()).backward()
    return raised(lambda: scaler.step(optimizer))


def test_gradients_that_cannot_be_averaged_are_refused(pool):
    for kind, text in pool.run(_closure):
        assert (kind, "closure" in text) == ("ArgumentError", True)
    for kind, text in pool.run(_scaled):
        assert (kind, "unscale_" in text) == ("ArgumentError", True)


def _unsynchronized(rank, size):
    from codec.torch.local_steps import local_steps

    with log_records() as records:
        model, optimizer, local = started(every=2)
        train(model, optimizer, rank, range(3), local.step)
        local_steps._warn_of_unsynchronized()
        local.finish()
        before = len(records)  # one record for each unfinished LocalSteps, also of earlier tests
        local_steps._warn_of_unsynchronized()
    return "\n".join(text for _, text in records[:before]), len(records) == 2 * before - 1


def test_process_that_ends_unsynchronized_logs_a_warning(pool):
    for text, silent in pool.run(_unsynchronized):
        assert "was not synchronized after its last step" in text
        assert silent
