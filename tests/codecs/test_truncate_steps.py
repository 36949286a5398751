"""Truncate with an optimizer's metric: the effect on the optimizer's step, metrics of groups, custom metrics."""

import copy

import ml_dtypes
import numpy as np
import pytest
import torch

import codec
from codec import Truncate, optimizers
from support.specs import TRUNCATE_LEVELS
from support.tensors import gradient, optimizer_state
from support.truncation import DROPS, a_exponents, cut

F32 = np.float32


def torch_optimizers():
    """Yield optimizers of torch, each with its metric and the names of its buffers for m and v."""
    o, wd = torch.optim, 0.01
    return {
        "sgd": (lambda p: o.SGD(p, 0.05, weight_decay=wd), lambda t: optimizers.SGD(0.05, weight_decay=wd), {}),
        "momentum": (
            lambda p: o.SGD(p, 0.05, momentum=0.9, weight_decay=wd),
            lambda t: optimizers.SGD(0.05, weight_decay=wd, momentum=0.9),
            {"m": "momentum_buffer"},
        ),
        "dampening": (
            lambda p: o.SGD(p, 0.05, momentum=0.9, dampening=0.5),
            lambda t: optimizers.SGD(0.05, momentum=0.9, dampening=0.5),
            {"m": "momentum_buffer"},
        ),
        "nesterov": (
            lambda p: o.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=wd),
            lambda t: optimizers.SGD(0.05, weight_decay=wd, momentum=0.9, nesterov=True),
            {"m": "momentum_buffer"},
        ),
        "adagrad": (
            lambda p: o.Adagrad(p, 1e-4, lr_decay=0.01, weight_decay=wd),
            lambda t: optimizers.Adagrad(1e-4, weight_decay=wd, step=t - 1, lr_decay=0.01),
            {"v": "sum"},
        ),
        "rmsprop": (
            lambda p: o.RMSprop(p, 1e-5, alpha=0.98, weight_decay=wd),
            lambda t: optimizers.RMSprop(1e-5, weight_decay=wd, alpha=0.98),
            {"v": "square_avg"},
        ),
        "adam": (
            lambda p: o.Adam(p, 1e-4, weight_decay=wd),
            lambda t: optimizers.Adam(1e-4, weight_decay=wd, step=t - 1),
            {"m": "exp_avg", "v": "exp_avg_sq"},
        ),
        "adamw": (
            lambda p: o.AdamW(p, 1e-4, weight_decay=wd),
            lambda t: optimizers.AdamW(1e-4, weight_decay=wd, step=t - 1),
            {"m": "exp_avg", "v": "exp_avg_sq"},
        ),
    }


@pytest.mark.parametrize("name", torch_optimizers())
@pytest.mark.parametrize(("levels", "granularity"), [("coded", "six"), ("shared", "bit")])
def test_exact_preset_changes_few_parameters_of_a_step(name, levels, granularity):
    """After a step with `exact`, 99.3% of parameters are bit-identical, and none differs by more than one ulp."""
    make, metric_of, buffers = torch_optimizers()[name]
    n = 40_000
    theta = torch.nn.Parameter(torch.from_numpy(optimizer_state(n)["theta"]).clone())
    optimizer = make([theta])
    dropped = 0
    for step in range(1, 6):
        g = gradient(n, 10 + step)
        saved = optimizer.state[theta]
        arrays = {"theta": theta.detach().numpy().copy()}
        arrays |= {k: saved[b].numpy().copy() for k, b in buffers.items() if b in saved and saved[b] is not None}
        metric = metric_of(step)
        spec = Truncate(level_coding=levels, granularity=granularity, guard="exact")
        y = codec.decode(codec.encode(g, spec.bind(metric, **arrays)), codec.Truncate().bind(metric, **arrays))
        twin = torch.nn.Parameter(theta.detach().clone())
        other = make([twin])
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # copy, since load_state_dict shares buffers
        theta.grad, twin.grad = torch.from_numpy(g), torch.from_numpy(y)
        optimizer.step()
        other.step()
        a, b = theta.detach().numpy(), twin.detach().numpy()
        assert (a == b).mean() >= 0.993
        # a parameter that comes close to 0 has a smaller ulp than before the step
        unit = np.spacing(np.maximum(np.abs(arrays["theta"]), np.abs(a)))
        assert (np.abs(a - b) <= unit).all()
        dropped += (g != y).mean()
    assert dropped > 0.5  # most gradients lost bits


def test_first_step_without_buffers():
    """Before the first step, missing m and v count as zeros, and momentum starts with the whole gradient."""
    x, arrays = gradient(5000), optimizer_state(5000)
    zeros = {"theta": arrays["theta"], "m": np.zeros(5000, F32), "v": np.zeros(5000, F32)}
    for metric in (
        optimizers.AdamW(1e-3, weight_decay=0),
        optimizers.Adam(1e-3, weight_decay=0.1),
        optimizers.RMSprop(1e-3),
        optimizers.SGD(0.1),
    ):
        with_zeros = codec.encode(x, Truncate().bind(metric, **zeros))
        assert codec.encode(x, Truncate().bind(metric, theta=arrays["theta"])) == with_zeros
    late = optimizers.SGD(0.1, momentum=0.9, dampening=0.75)
    assert late.final({"theta": 0}).theta == optimizers.SGD(0.1).final({"theta": 0}).theta
    assert late.final({"theta": 0, "m": 0}).theta == pytest.approx(40)


def test_zero_learning_rate_unknown_steps_and_scaled_gradients():
    """With lr = 0 all bits may be dropped. Levels are computed from the gradient divided by a GradScaler's scale."""
    x, arrays = gradient(5000), optimizer_state(5000)
    arrays["theta"][arrays["theta"] == 0] = 1
    top = codec.decode(codec.encode(x, Truncate(3)))
    assert (codec.decode(codec.encode(x, Truncate().bind(optimizers.SGD(0.0), **arrays))) == top).all()
    for metric in (
        optimizers.SGD(0.1, maximize=True),
        optimizers.Adam(1e-3, amsgrad=True, step=1),
        optimizers.AdamW(1e-3, amsgrad=True, step=1),
        optimizers.RMSprop(1e-3, centered=True),
        optimizers.RMSprop(1e-3, momentum=0.9),
    ):
        y = codec.decode(codec.encode(x, Truncate(guard=-99).bind(metric, **arrays)))
        assert (y == x).all()
    scaled = codec.decode(
        codec.encode(x * F32(1024), Truncate().bind(optimizers.Adam(1e-3, grad_scale=1024.0, step=1), **arrays))
    )
    assert (
        scaled / 1024 == codec.decode(codec.encode(x, Truncate().bind(optimizers.Adam(1e-3, step=1), **arrays)))
    ).all()


def test_guard_depends_on_the_dtypes_of_gradient_and_parameter():
    """For a bfloat16 parameter, more bits are dropped than for a float32 one."""
    x = gradient(5000, dtype="bfloat16")
    arrays = optimizer_state(5000)
    half = {k: v.astype(ml_dtypes.bfloat16) for k, v in arrays.items()}
    wide = {k: v.astype(F32) for k, v in half.items()}
    metric = optimizers.SGD(0.1)
    for theta, extra in ((wide, 16), (half, 0)):
        level = metric.levels(x, theta["theta"], guard=-2)
        a = a_exponents(metric, {"theta": wide["theta"]}).astype(int)
        e = x.view(np.uint16) >> 7 & 255
        slack = a - e.astype(int) + 2 - extra
        assert (level == sum((slack >= k) & (a > 0) for k in (2, 4, 6))).all()
        y = codec.decode(codec.encode(x, Truncate(guard=-2).bind(metric, **theta)))
        assert y.tobytes() == cut(x, np.array(DROPS["bfloat16"])[level]).tobytes()


@pytest.mark.parametrize(("levels", "granularity"), TRUNCATE_LEVELS)
def test_parameter_groups_use_their_own_metrics(levels, granularity, isa):
    """Each parameter group uses its own metric, for any boundary between groups in a bucket."""
    x, arrays = gradient(40_000), optimizer_state(40_000)
    first, second, third = (
        optimizers.AdamW(1e-3, weight_decay=0.1, step=8),
        optimizers.SGD(0.5),
        optimizers.SGD(1e-5, momentum=0.9),
    )
    groups = [(0, first), (17_003, second), (33_000, third)]
    spec = Truncate(level_coding=levels, granularity=granularity)
    frame = codec.encode(x, spec.bind(groups, **arrays))
    assert codec.encode(x, spec.bind(groups, **arrays), options=codec.options(threads=3)) == frame
    y = codec.decode(frame, codec.Truncate().bind(groups, **arrays))
    for (begin, metric), end in zip(groups, (17_003, 33_000, 40_000), strict=True):
        alone = {k: v[begin:end] for k, v in arrays.items()}
        z = codec.decode(codec.encode(x[begin:end], spec.bind(metric, **alone)), codec.Truncate().bind(metric, **alone))
        assert (y[begin:end] == z).all()
    for bad in ([], [(1, first)], [(0, first), (0, second)], [(0, first), (9, second), (5, third)]):
        with pytest.raises(codec.ArgumentError):
            codec.encode(x, spec.bind(bad, **arrays))
    if levels == "shared":
        with pytest.raises(codec.StateError):
            codec.decode(frame, codec.Truncate().bind([(0, first), (17_000, second), (33_000, third)], **arrays))


def test_custom_metric_equals_the_built_in_one(isa):
    """A custom metric compiled by Numba computes the same float32 values as the built-in metric."""
    x, arrays = gradient(20_000), optimizer_state(20_000)
    built_in = optimizers.SGD(0.1, momentum=0.9)
    t = built_in.final(arrays)
    p, q = F32(t.theta), F32(t.m)
    custom = optimizers.Custom(lambda theta, m: theta * p + q * m)
    for way in TRUNCATE_LEVELS:
        spec = Truncate("optimizer", "nearest", *way)
        frame = codec.encode(x, spec.bind(custom, **arrays), options=codec.options(threads=1))
        assert frame == codec.encode(x, spec.bind(built_in, **arrays))
        assert codec.encode(x, spec.bind(custom, **arrays), options=codec.options(threads=4)) == frame
        y = codec.decode(frame, codec.Truncate().bind(custom, **arrays))
        assert (y == codec.decode(frame, codec.Truncate().bind(built_in, **arrays))).all()
    with pytest.raises(codec.StateError):
        codec.encode(x, Truncate().bind(custom, theta=arrays["theta"]))
    with pytest.raises(codec.ArgumentError):
        optimizers.Custom(lambda theta, beta: theta)


def test_named_guards_equal_their_numbers():
    x, state = np.linspace(-1, 1, 5000, dtype=F32), {"theta": np.full(5000, 3, F32)}
    for name, granularity, guard in (
        ("exact", "six", 4),
        ("exact", "bit", 6),
        ("near", "bit", -8),
        ("feedback", "bit", -11),
    ):
        frames = {
            codec.encode(
                x, Truncate(level_coding="shared", granularity=granularity, guard=g).bind(optimizers.SGD(0.1), **state)
            )
            for g in (name, guard)
        }
        assert len(frames) == 1
