"""Truncate changes a step by no more than optimizers.md promises, measured with the optimizers in float64."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import codec
from codec import Truncate, optimizers

SHAPE = (32, 40)
GUARDS = st.sampled_from(["exact", "near", 0, -4, -14])
WAYS = st.sampled_from([("coded", "six"), ("shared", "bit")])
ROUNDINGS = st.sampled_from(["nearest", "truncate"])
FLOAT_ERROR = 1 + 1e-5  # relative tolerance, because A is computed in float32
NEWTON_SCHULZ = 3.4445, -4.7750, 2.0315
EPS1, EPS2 = 2.0**-23, 1e-3  # default eps of Adafactor


class Case:
    """Random history of an optimizer, the next gradient, and the gradient that Truncate encodes and decodes."""

    def __init__(self, draw):
        self.rng = np.random.default_rng(draw(st.integers(0, 2**32)))
        self.steps = draw(st.integers(1, 12))
        self.lr = 10.0 ** draw(st.integers(-4, -1))
        self.guard, way, rounding = draw(GUARDS), draw(WAYS), draw(ROUNDINGS)
        self.spec = Truncate("optimizer", rounding, *way, self.guard)
        bits = self.spec.guard_bits  # granularity "bit" keeps two more bits with the guard "exact"
        self.share = 2.0 ** (-bits - 1 - 23)  # largest error of the gradient g, divided by the metric A

    def gradient(self):
        """Return a gradient whose rows and columns have different magnitudes."""
        rows, columns = np.exp(self.rng.standard_normal((SHAPE[0], 1))), np.exp(self.rng.standard_normal(SHAPE[1]))
        return torch.from_numpy((self.rng.standard_normal(SHAPE) * 0.1 * rows * columns).astype(np.float32))

    def parameter(self):
        theta = self.rng.standard_normal(SHAPE) * 10.0 ** self.rng.integers(-3, 1, SHAPE)
        return torch.nn.Parameter(torch.from_numpy(theta.astype(np.float32)))

    def rounded(self, g, metric, state):
        """Return g after a round trip through a Truncate frame."""
        y = codec.decode(codec.encode(g, self.spec.bind(metric, **state)), self.spec.bind(metric, **state), like=g)
        assert torch.isfinite(y).all()
        return y


@st.composite
def cases(draw):
    return Case(draw)


def trained(case, make):
    """Return a float32 optimizer after some steps, its parameter, the next gradient, and its Truncate round trip."""
    theta = case.parameter()
    optimizer = make([theta], case.lr)
    for _ in range(case.steps):
        theta.grad = case.gradient()
        optimizer.step()
    g = case.gradient()
    y = case.rounded(g, optimizers.from_optimizer(optimizer), optimizers.state_of(optimizer, theta))
    return optimizer, theta, g, y


def stepped(optimizer, theta, g, make, lr):
    """Take the next step in float64, from the float32 state, and return the parameter."""
    wide = torch.nn.Parameter(theta.detach().double())
    other = make([wide], lr)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # casts the state to the parameter's dtype
    wide.grad = g.double()
    other.step()
    return wide.detach().numpy()


def float64(x):
    return x.detach().double().numpy()


PLAIN = {
    "sgd": lambda p, lr: torch.optim.SGD(p, lr, weight_decay=0.1),
    "momentum": lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9, dampening=0.3, weight_decay=0.1),
    "nesterov": lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adagrad": lambda p, lr: torch.optim.Adagrad(p, lr, lr_decay=0.1),
    "rmsprop": lambda p, lr: torch.optim.RMSprop(p, lr),
}


@given(case=cases(), name=st.sampled_from(sorted(PLAIN)))
def test_steps_of_other_optimizers_change_little(case, name):
    """A step changes by at most share * |theta'|, where theta' is the parameter after a step with g = 0."""
    optimizer, theta, g, y = trained(case, PLAIN[name])
    after, other, zero = (stepped(optimizer, theta, x, PLAIN[name], case.lr) for x in (g, y, torch.zeros_like(g)))
    assert (abs(after - other) <= FLOAT_ERROR * case.share * abs(zero) + 1e-14 * abs(float64(theta))).all()
    assert case.spec.guard_bits > 0 or (g != y).any()


ADAM_LIKE = {
    "adam": lambda p, lr: torch.optim.Adam(p, lr, weight_decay=0.01),
    "adamw": lambda p, lr: torch.optim.AdamW(p, lr, weight_decay=0.1),
    "adamw, other betas": lambda p, lr: torch.optim.AdamW(p, lr, betas=(0.5, 0.9)),
    "nadam": lambda p, lr: torch.optim.NAdam(p, lr, weight_decay=0.01),
    "nadam, decoupled": lambda p, lr: torch.optim.NAdam(
        p, lr, weight_decay=0.1, decoupled_weight_decay=True, momentum_decay=1.0
    ),
}


@pytest.mark.parametrize("name", ADAM_LIKE)
@given(case=cases())
def test_steps_of_adam_and_nadam_change_little(name, case):
    """A step changes by at most share * (1 + K) * |lr_own * A|; lr_own: factor of g in it; K: effect of g on v."""
    optimizer, theta, g, y = trained(case, ADAM_LIKE[name])
    metric, state = optimizers.from_optimizer(optimizer), optimizers.state_of(optimizer, theta)
    t = metric.terms(state)
    m, v, w = (float64(state[k]) for k in ("m", "v", "theta"))
    low = np.sqrt(t.v * v)
    a = w * ((low + t.eps) * t.theta_v + t.theta) + t.m * m
    kept = {"adamw": 1 - case.lr * 0.1, "adamw, other betas": 1 - case.lr * 0.01, "nadam, decoupled": 1 - case.lr * 0.1}
    # Factor of g in the step, since theta_v (low + eps) = kept / own
    own = kept.get(name, 1) / (t.theta_v * (low + t.eps))
    q = (1 - metric.betas[1]) / (1 - metric.betas[1] ** (metric.step + 1))
    k = np.sqrt(q) * abs(t.m * m) / (2 * low)
    changed = abs(
        stepped(optimizer, theta, g, ADAM_LIKE[name], case.lr) - stepped(optimizer, theta, y, ADAM_LIKE[name], case.lr)
    )
    rounding = 1e-14 * (abs(w) + case.lr)  # allowance for the rounding of float64
    assert (changed <= FLOAT_ERROR * case.share * (1 + k) * abs(own * a) + rounding).all()
    assert case.spec.guard_bits > 0 or (g != y).any()


def adafactor(p, lr):
    return torch.optim.Adafactor(p, lr, eps=(EPS1, EPS2), weight_decay=0.1)


def second_moment(optimizer, theta, g):
    """Return the scale of Adafactor's next step, and the second moment by which it divides g, before clipping."""
    state, g = optimizer.state[theta], g.double()
    t = float(state["step"]) + 1
    new = t**-0.8
    scale = max(EPS2, float(theta.detach().double().square().mean()) ** 0.5) * min(
        optimizer.param_groups[0]["lr"], t**-0.5
    )
    if "variance" in state:
        return scale, ((1 - new) * state["variance"].double() + new * g.square()).numpy()
    row, column = (
        (1 - new) * state[name].double() + new * g.square().mean(dim, keepdim=True)
        for name, dim in (("row_var", -1), ("col_var", -2))
    )
    return scale, (row * column / row.mean(-2, keepdim=True).clamp(min=EPS1)).numpy()


@given(case=cases(), growth=st.floats(0.01, 2), vector=st.booleans())
def test_steps_of_adafactor_change_little(case, growth, vector):
    """A step changes by share * |theta| for a value's own error, and by 7 * eta of the step for others' errors."""
    theta = case.parameter()
    theta = torch.nn.Parameter(theta.detach().reshape(-1)) if vector else theta
    optimizer = adafactor([theta], case.lr)
    for _ in range(case.steps):
        theta.grad = case.gradient().reshape(theta.shape)
        optimizer.step()
    g = case.gradient().reshape(theta.shape)
    if not vector:  # scales the gradient's mean square to growth^2 times the running mean
        g *= growth * float(optimizer.state[theta]["row_var"].mean().clamp(min=EPS1) / g.square().mean()) ** 0.5
    metric, state = optimizers.from_optimizer(optimizer), optimizers.state_of(optimizer, theta)
    y = case.rounded(g, metric, state)
    after, other = (stepped(optimizer, theta, x, adafactor, case.lr) for x in (g, y))
    start = float64(theta) * (1 - case.lr * 0.1)
    eta = (abs(float64(g) - float64(y)) / abs(float64(g))).max()
    shared = (1 + eta) ** 3 / (1 - eta) ** 4 - 1
    assert eta > 2**-6 or shared <= 7.5 * eta + 1e-12
    scale, v = second_moment(optimizer, theta, g)
    t = metric.terms(state)
    a = start / (1 - case.lr * 0.1) * np.sqrt(t.v * float64(state["v"])) * t.theta_v
    assert (
        abs(a) <= FLOAT_ERROR * abs(start) * np.sqrt(v) / scale
    ).all()  # A is small enough that the error of g moves theta by at most share |start|
    bound = case.share * abs(start) + abs(after - start) * shared
    assert (abs(after - other) <= FLOAT_ERROR * bound + 1e-14 * abs(start)).all()
    assert (g != y).any() or case.spec.guard_bits > 0


@given(case=cases(), betas=st.sampled_from([(0.9, 0.99), (0.95, 0.98), (0.5, 0.4)]))
def test_lion_keeps_its_momentum_and_signs(case, betas):
    """The momentum changes by share |beta2 m|; a sign only where its argument is within (1 - beta1) of the error."""
    b1, b2 = betas
    m = np.zeros(SHAPE)
    for _ in range(case.steps):
        m = b2 * m + (1 - b2) * case.gradient().double().numpy()
    m = m.astype(np.float32)
    g = case.gradient().numpy()
    state = {"theta": case.parameter().detach().numpy(), "m": m}
    y = case.rounded(torch.from_numpy(g), optimizers.Lion(case.lr, betas=betas), state).numpy()
    m, g, y = (x.astype(np.float64) for x in (m, g, y))
    change = abs((b2 * m + (1 - b2) * g) - (b2 * m + (1 - b2) * y))
    assert (change <= FLOAT_ERROR * case.share * abs(b2 * m) + 1e-15 * abs(g)).all()
    c, d = b1 * m + (1 - b1) * g, b1 * m + (1 - b1) * y
    flipped = np.sign(c) != np.sign(d)
    reach = (1 - b1) / (1 - b2) * case.share * abs(b2 * m)
    assert (abs(c)[flipped] <= FLOAT_ERROR * reach[flipped]).all()
    assert case.spec.guard_bits > 0 or (g != y).any()


def orthogonalized(u):
    """Orthogonalize u in float64, by the Newton-Schulz iteration of torch.optim.Muon."""
    x = u / np.linalg.norm(u)
    for _ in range(5):
        gram = x @ x.T
        x = NEWTON_SCHULZ[0] * x + (NEWTON_SCHULZ[1] * gram + NEWTON_SCHULZ[2] * gram @ gram) @ x
    return x


@given(case=cases(), momentum=st.sampled_from([0.95, 0.5]), nesterov=st.booleans())
def test_muon_keeps_its_momentum_and_its_matrix(case, momentum, nesterov):
    """U changes by share |mu m| by value; its orthogonalization by a_1^5 times that, relative to norms."""
    m = np.zeros(SHAPE)
    for _ in range(case.steps):
        m = momentum * m + (1 - momentum) * case.gradient().double().numpy()
    m = m.astype(np.float32)
    g = case.gradient().numpy()
    state = {"theta": case.parameter().detach().numpy(), "m": m}
    y = case.rounded(torch.from_numpy(g), optimizers.Muon(case.lr, momentum=momentum, nesterov=nesterov), state).numpy()
    m, g, y = (x.astype(np.float64) for x in (m, g, y))
    mu = momentum**2 if nesterov else momentum
    u, w = mu * m + (1 - mu) * g, mu * m + (1 - mu) * y
    assert (abs(u - w) <= FLOAT_ERROR * case.share * abs(mu * m) + 1e-15 * abs(g)).all()
    buffers = [momentum * m + (1 - momentum) * x for x in (g, y)]
    assert (abs(buffers[0] - buffers[1]) <= FLOAT_ERROR * case.share * abs(momentum * m) + 1e-15 * abs(g)).all()
    norm = np.linalg.norm
    bound = NEWTON_SCHULZ[0] ** 5 * case.share * norm(mu * m) * 2 / (norm(u) + norm(w))
    assert norm(orthogonalized(u) - orthogonalized(w)) <= FLOAT_ERROR * bound + 1e-9
    assert case.spec.guard_bits > 0 or (g != y).any()


def test_newton_schulz_is_nowhere_steeper_than_at_zero():
    """The slope of each Newton-Schulz polynomial is largest at 0, so that the product of the first coefficients is a
    Lipschitz constant on matrices of norm <= 1.
    """
    a, b, c = NEWTON_SCHULZ
    x = np.linspace(0, 1, 100_001)
    slope = np.ones_like(x)
    for _ in range(5):
        slope *= a + 3 * b * x**2 + 5 * c * x**4
        x = a * x + b * x**3 + c * x**5
    assert abs(slope).max() == slope[0] == pytest.approx(a**5)
