"""codec.optimizers follow torch.optim: names, defaults, and the state that is read from an optimizer."""

import dataclasses
import inspect

import numpy as np
import pytest
import torch

import codec
from codec import optimizers
from support.lion import Lion

TORCH = {
    "SGD": torch.optim.SGD,
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": torch.optim.RMSprop,
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "NAdam": torch.optim.NAdam,
    "Adafactor": torch.optim.Adafactor,
    "Lion": Lion,
}
if hasattr(torch.optim, "Muon"):  # torch 2.9 and later
    TORCH["Muon"] = torch.optim.Muon


@pytest.mark.parametrize("name", TORCH)
def test_parameters_have_torchs_names_and_defaults(name):
    """Parameters have the names and defaults of torch.optim; all but lr are keyword-only."""
    theirs = inspect.signature(TORCH[name]).parameters
    ours = inspect.signature(getattr(optimizers, name)).parameters
    assert set(ours) - set(theirs) <= {"grad_scale", "step"} | ({"maximize"} if name in ("Lion", "Muon") else set())
    assert ours["lr"].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    for parameter in ours.values():
        if parameter.name == "lr":
            assert parameter.default == theirs["lr"].default
            continue
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
        if parameter.name in theirs:
            assert parameter.default == theirs[parameter.name].default, parameter.name


def trained(kind, steps=3, **how):
    """Return an optimizer of two parameters after some steps."""
    generator = torch.Generator().manual_seed(0)
    shape = (25, 40) if kind.__name__ in ("Muon", "Adafactor") else (1000,)
    w = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for _ in range(2)]
    optimizer = kind(w, **how)
    for _ in range(steps):
        for p in w:
            p.grad = torch.randn(shape, generator=generator)
        optimizer.step()
    return optimizer, w


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}, optimizers.SGD(0.1, weight_decay=0.1), {}),
    "sgd that maximizes": (torch.optim.SGD, {"maximize": True}, optimizers.SGD(maximize=True), {}),
    "momentum": (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "foreach": True},
        optimizers.SGD(0.1, momentum=0.9, dampening=0.5),
        {"m": "momentum_buffer"},
    ),
    "nesterov": (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True},
        optimizers.SGD(0.1, momentum=0.9, nesterov=True),
        {"m": "momentum_buffer"},
    ),
    "adagrad": (
        torch.optim.Adagrad,
        {"lr_decay": 0.1, "initial_accumulator_value": 0.1},
        optimizers.Adagrad(lr_decay=0.1, step=3),
        {"v": "sum"},
    ),
    "rmsprop": (
        torch.optim.RMSprop,
        {"alpha": 0.9, "eps": 1e-6},
        optimizers.RMSprop(alpha=0.9, eps=1e-6),
        {"v": "square_avg"},
    ),
    "rmsprop with all": (
        torch.optim.RMSprop,
        {"momentum": 0.5, "centered": True},
        optimizers.RMSprop(momentum=0.5, centered=True),
        {"m": "momentum_buffer", "v": "square_avg"},
    ),
    "adam": (
        torch.optim.Adam,
        {"betas": (0.8, 0.9), "weight_decay": 0.1, "fused": True},
        optimizers.Adam(betas=(0.8, 0.9), weight_decay=0.1, step=3),
        {"m": "exp_avg", "v": "exp_avg_sq"},
    ),
    "adam, decoupled": (
        torch.optim.Adam,
        {"decoupled_weight_decay": True},
        optimizers.AdamW(weight_decay=0, step=3),
        {"m": "exp_avg", "v": "exp_avg_sq"},
    ),
    "adamw": (
        torch.optim.AdamW,
        {"lr": torch.tensor(0.25), "amsgrad": True, "capturable": False},
        optimizers.AdamW(0.25, amsgrad=True, step=3),
        {"m": "exp_avg", "v": "exp_avg_sq"},
    ),
    "nadam": (
        torch.optim.NAdam,
        {"betas": (0.8, 0.9), "weight_decay": 0.1, "momentum_decay": 0.5, "decoupled_weight_decay": True},
        optimizers.NAdam(betas=(0.8, 0.9), weight_decay=0.1, momentum_decay=0.5, decoupled_weight_decay=True, step=3),
        {"m": "exp_avg", "v": "exp_avg_sq"},
    ),
    "lion": (
        Lion,
        {"betas": (0.8, 0.9), "weight_decay": 0.1, "caution": False, "foreach": True},
        optimizers.Lion(betas=(0.8, 0.9), weight_decay=0.1),
        {"m": "exp_avg"},
    ),
    "lion that maximizes": (Lion, {"maximize": True}, optimizers.Lion(maximize=True), {"m": "exp_avg"}),
}
if hasattr(torch.optim, "Muon"):
    OPTIMIZERS["muon"] = (
        torch.optim.Muon,
        {"momentum": 0.5, "nesterov": False},
        optimizers.Muon(momentum=0.5, nesterov=False),
        {"m": "momentum_buffer"},
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_from_optimizer_describes_the_next_step(name):
    """from_optimizer() describes the next step, and state_of() returns the optimizer's state without a copy."""
    kind, how, expected, buffers = OPTIMIZERS[name]
    optimizer, (w, _) = trained(kind, **how)
    metric, state = optimizers.from_optimizer(optimizer), optimizers.state_of(optimizer, w)
    assert metric == expected
    assert set(state) == {"theta", *buffers}
    assert state["theta"] is w
    for ours, theirs in buffers.items():
        assert state[ours].data_ptr() == optimizer.state[w][theirs].data_ptr()
    g = torch.randn(w.shape)
    for levels in ("coded", "shared"):
        frame = codec.encode(g, codec.Truncate(level_coding=levels).bind(metric, **state))
        y = codec.decode(frame, codec.Truncate().bind(metric, **state), like=g)
        assert torch.equal(y, g) == (not metric._known())
    fresh, (w, _) = trained(kind, steps=0, **how)
    first = optimizers.from_optimizer(fresh)
    assert first == (dataclasses.replace(expected, step=0) if hasattr(expected, "step") else expected)
    y = codec.decode(codec.encode(g, codec.Truncate().bind(first, **optimizers.state_of(fresh, w))))
    assert y.shape == g.shape
    assert not any("step" in s and float(s["step"]) for s in fresh.state.values())  # the optimizer's state is unchanged


def test_parameter_groups_have_their_own_settings():
    """Each parameter group has its own settings, and its offset in the bucket."""
    torch.manual_seed(0)
    w = [torch.nn.Parameter(torch.randn(2000)) for _ in range(2)]
    optimizer = torch.optim.AdamW([{"params": [w[0]], "lr": 0.1}, {"params": [w[1]], "weight_decay": 0.5}])
    first, second = (optimizers.from_optimizer(optimizer, i) for i in (0, 1))
    assert (first, second) == (optimizers.AdamW(0.1), optimizers.AdamW(weight_decay=0.5))
    assert optimizers.from_optimizer(optimizer, -1) == second
    bucket, g = torch.cat([p.detach() for p in w]), 1e-3 * torch.randn(4000)
    frame = codec.encode(g, codec.Truncate().bind([(0, first), (2000, second)], theta=bucket))
    parts = [
        codec.encode(g[i * 2000 :][:2000], codec.Truncate().bind(m, theta=w[i])) for i, m in enumerate((first, second))
    ]
    assert not any(codec.inspect(p).stored for p in parts)  # stored values keep all bits
    decoded = codec.decode(frame, like=g)
    assert not torch.equal(decoded, g)
    assert torch.equal(decoded, torch.cat([codec.decode(p, like=g) for p in parts]))


def test_unknown_optimizers_groups_and_parameters_are_rejected():
    optimizer, (w, other) = trained(torch.optim.Adam)

    class Mine(torch.optim.AdamW):
        pass

    class LikeLion:
        param_groups = ()

    like = type("Lion", (LikeLion,), {})()
    for bad in (torch.optim.LBFGS([w]), torch.optim.RAdam([w]), Mine([w]), None, w, "Adam", like):
        with pytest.raises(codec.ArgumentError, match=r"is not known: use|must be a torch optimizer, got"):
            optimizers.from_optimizer(bad)
    for group in (1, -2, "0", None, 0.0):
        with pytest.raises(codec.ArgumentError, match="group"):
            optimizers.from_optimizer(optimizer, group)
    with pytest.raises(codec.ArgumentError, match="must be a torch optimizer, got None"):
        optimizers.state_of(None, w)
    with pytest.raises(codec.ArgumentError, match="none of the optimizer's param_groups"):
        optimizers.state_of(optimizer, torch.nn.Parameter(torch.ones(3)))
    other.grad = None
    optimizer.step()
    with pytest.raises(codec.ArgumentError, match=r"different numbers of steps, 3 to 4: .*parameter="):
        optimizers.from_optimizer(optimizer)
    assert [optimizers.from_optimizer(optimizer, parameter=p).step for p in (w, other)] == [4, 3]


def test_first_step_of_a_parameter_has_no_dampening():
    """In a parameter's first step, also that of a layer unfrozen late, momentum is the gradient without dampening."""
    w, late = (torch.nn.Parameter(torch.ones(100)) for _ in range(2))
    optimizer = torch.optim.SGD([w, late], 0.1, momentum=0.9, dampening=0.5)
    w.grad = torch.ones(100)
    optimizer.step()
    found = [optimizers.from_optimizer(optimizer, parameter=p) for p in (w, late)]
    assert [step.dampening for step in found] == [0.5, 0]


@pytest.mark.parametrize(
    "more", [{"caution": True}, {"cautious_factor": 0.5}, {"weight_decouple": False}, {"adanorm": True}]
)
def test_variants_of_lion_are_rejected(more):
    """A Lion variant with options that change the step is rejected; the error names the option."""
    (name,) = more
    optimizer, _ = trained(Lion, **more)
    with pytest.raises(codec.ArgumentError, match=rf"Lion with {name}=.* is not known: use {name}="):
        optimizers.from_optimizer(optimizer)
    optimizer, _ = trained(Lion)
    setattr(optimizer, name, more[name])
    with pytest.raises(codec.ArgumentError, match=rf"Lion with {name}="):
        optimizers.from_optimizer(optimizer)


def test_lion_with_another_state_is_rejected():
    optimizer, (w, _) = trained(Lion)
    optimizer.state[w] = {"state1": torch.zeros(1000, dtype=torch.uint8)}
    with pytest.raises(codec.ArgumentError, match="its state has no exp_avg, only state1"):
        optimizers.from_optimizer(optimizer)
    optimizer.param_groups[0].pop("betas")
    with pytest.raises(codec.ArgumentError, match="its param_groups have no betas"):
        optimizers.from_optimizer(optimizer)


@pytest.mark.parametrize("shape", [(1000,), (25, 40), (5, 4, 5, 10)])
def test_adafactor_state_is_a_lower_bound_of_its_second_moment(shape):
    """Adafactor's v is the second moment over the squared scale, rounded down by at most 1/3, on any thread count."""
    w = torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    optimizer = torch.optim.Adafactor([w], lr=0.1)
    assert set(optimizers.state_of(optimizer, w)) == {"theta"}
    for _ in range(3):
        w.grad = torch.randn(shape) * torch.rand(shape[-1])
        optimizer.step()
    assert optimizers.from_optimizer(optimizer) == optimizers.Adafactor(0.1, step=3)
    v, state = optimizers.state_of(optimizer, w)["v"], optimizer.state[w]
    assert (v.dtype, v.shape, v.stride()) == (torch.float32, w.shape, w.stride())
    if len(shape) == 1:
        exact = state["variance"]
    else:
        exact = state["row_var"] * state["col_var"] / state["row_var"].mean(dim=-2, keepdim=True)
    exact = exact / w.detach().square().mean()
    assert (v <= exact * (1 + 1e-5)).all()
    assert (v >= exact / 1.5).all()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert torch.equal(optimizers.state_of(optimizer, w)["v"], v)
    finally:
        torch.set_num_threads(before)


def test_step_counts_steps_taken_before():
    """`step` counts the steps taken before, and encoding leaves the optimizer's step unchanged."""
    g = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    theta = {"theta": np.ones(1000, np.float32)}
    for kind in (optimizers.Adagrad, optimizers.Adam, optimizers.AdamW):
        how = {"lr_decay": 0.5} if kind is optimizers.Adagrad else {}
        terms = [kind(step=step, **how).final({**theta, "v": 0}) for step in (0, 1, 2)]
        assert terms[0] == kind(**how).final({**theta, "v": 0})
        assert len(set(terms)) == 3
        assert codec.encode(g, codec.Truncate().bind(kind(step=0), **theta))
    t = optimizers.Adam(0.5, step=1).final({"v": 0})
    assert t.theta_v == pytest.approx((1 - 0.9**2) / (0.5 * 0.1))
    assert t.v == pytest.approx(0.999 / (1 - 0.999**2))


def test_levels_takes_named_guards():
    """levels() accepts guards by name, returns an array of g's shape, and rejects invalid arguments."""
    x = np.random.default_rng(0).standard_normal((30, 40)).astype(np.float32)
    theta, metric = np.ones(1200, np.float32), optimizers.SGD(0.1)
    for guard, bits in (("exact", 4), ("near", -8), ("feedback", -11)):
        levels = metric.levels(x, theta, guard=guard)
        assert levels.shape == x.shape
        assert (levels == metric.levels(x, theta, guard=bits)).all()
        frame = codec.encode(x, codec.Truncate(guard=guard).bind(metric, theta=theta))
        assert frame == codec.encode(x, codec.Truncate(guard=guard).bind(levels=levels))
    assert (metric.levels(x, theta, guard="max") == 3).all()
    for guard in ("exac", 1.5):
        with pytest.raises(codec.SpecError, match="guard must be"):
            metric.levels(x, theta, guard=guard)
    with pytest.raises(codec.ArgumentError, match="m must have as many values as g, 1200, got 1199"):
        metric.levels(x, theta, m=theta[1:])
    with pytest.raises(codec.ArgumentError, match="theta must have as many values as g, 1200, got 3"):
        metric.levels(x, np.ones(3, np.float32))


def test_missing_step_with_a_nonzero_state_is_rejected():
    """A state with nonzero moments but no step is rejected; zero moments, as torch creates them, are accepted."""
    x = np.ones(1000, np.float32)
    for kind in (optimizers.Adam, optimizers.AdamW):
        with pytest.warns(UserWarning, match="step=0"):
            codec.encode(x, codec.Truncate().bind(kind(), theta=x, v=x))
        codec.encode(x, codec.Truncate().bind(kind(), theta=x, v=0 * x))
        codec.encode(x, codec.Truncate().bind(kind(step=1), theta=x, v=x))
    codec.encode(x, codec.Truncate().bind(optimizers.Adagrad(), theta=x, v=x))


@pytest.mark.parametrize("begin", [0, 400, 900])
def test_only_the_values_of_parameters_without_a_step_must_be_zero(begin):
    """A parameter without steps, such as an expert that got no token, may lie among others in a bucket."""
    x = np.ones(1000, np.float32)
    v = x.astype(np.float16)
    v[begin : begin + 100] = 0
    new, old = optimizers.Adam(), optimizers.Adam(step=3)
    groups = [(0, old)] * (begin > 0) + [(begin, new)] + [(begin + 100, old)] * (begin < 900)
    codec.encode(x, codec.Truncate().bind(groups, theta=x, v=v))
    v[begin] = 1
    with pytest.warns(UserWarning, match="step=0"):
        codec.encode(x, codec.Truncate().bind(groups, theta=x, v=v))
