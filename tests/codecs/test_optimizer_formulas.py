"""codec.optimizers.Formula: a torch optimizer that is not built in, with a function that computes A."""

import numpy as np
import pytest
import torch

import codec
from codec import optimizers


class Momentum(torch.optim.Optimizer):
    """An optimizer that is not built in, whose state has names of its own."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "mu": 0.5})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                velocity = self.state[p].setdefault("velocity", torch.zeros_like(p))
                velocity.mul_(group["mu"]).add_(p.grad)
                p.sub_(velocity, alpha=group["lr"])


def term(theta, state, group):
    """Return A of :class:`Momentum`."""
    velocity = state.get("velocity")
    return theta / group["lr"] - (0 if velocity is None else group["mu"] * velocity)


def stepped(dtype=torch.float32):
    """Return a Momentum after a step, and its parameter."""
    w = torch.nn.Parameter(torch.randn(4096, generator=torch.Generator().manual_seed(0)).to(dtype))
    optimizer = Momentum([w])
    w.grad = torch.full_like(w, 1e-3)
    optimizer.step()
    return optimizer, w


def test_formula_gives_the_levels_of_the_same_optimizer():
    optimizer, w = stepped()
    formula = optimizers.Formula(optimizer, term)
    g = torch.randn(4096, generator=torch.Generator().manual_seed(1))
    built_in = optimizers.SGD(0.1, momentum=0.5).levels(g, w.detach(), m=optimizer.state[w]["velocity"])
    state = optimizers.state_of(formula, w)
    found = optimizers.from_optimizer(formula, parameter=w).levels(g, state["theta"])
    assert (found == built_in).mean() > 0.999  # A may differ in its last bit
    assert len(np.unique(found)) > 1
    optimizer.param_groups[0]["lr"] = 1e-4  # as a scheduler does
    later = optimizers.from_optimizer(formula).levels(g, **optimizers.state_of(formula, w))
    assert (later >= found).all()
    assert (later > found).mean() > 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_term_of_a_formula_has_the_parameters_dtype_and_never_a_larger_exponent(dtype):
    optimizer, w = stepped(dtype)
    exact = []

    def kept(theta, state, group):
        exact.append(term(theta, state, group) * 3e5)
        exact[-1][0] = torch.nan
        return exact[-1]

    a = optimizers.state_of(optimizers.Formula(optimizer, kept), w)["theta"]
    assert (a.dtype, exact[0].dtype) == (dtype, torch.float32)
    assert a[0].isnan()
    assert torch.isfinite(a[1:]).all()
    found, most = torch.frexp(a[1:].float()).exponent, torch.frexp(exact[0][1:]).exponent
    assert (found <= most).all()
    inside = exact[0][1:].abs() < torch.finfo(dtype).max
    assert (found == most)[inside].float().mean() > 0.95


def test_formula_without_a_term_drops_no_bit():
    optimizer, w = stepped()
    formula = optimizers.Formula(optimizer, lambda theta, state, group: None)
    g = torch.randn(4096)
    assert not optimizers.from_optimizer(formula).levels(g, **optimizers.state_of(formula, w)).any()


@pytest.mark.parametrize("wrong", [0.5, torch.ones(3), torch.ones(4096, dtype=torch.int32), np.ones(4096)])
def test_formula_that_returns_no_tensor_of_the_parameters_shape_is_refused(wrong):
    optimizer, w = stepped()
    with pytest.raises(codec.ArgumentError, match=r"Formula\(Momentum, .*must return A, .*\(4096,\), or None"):
        optimizers.state_of(optimizers.Formula(optimizer, lambda *_: wrong), w)


def test_formula_takes_an_optimizer_and_a_function():
    optimizer, _ = stepped()
    for given in (None, optimizers.AdamW(), optimizers.Formula(optimizer, term)):
        with pytest.raises(codec.ArgumentError, match="takes a torch optimizer and a function"):
            optimizers.Formula(given, term)
    with pytest.raises(codec.ArgumentError, match="must be callable, got 3"):
        optimizers.Formula(optimizer, 3)


def test_state_of_an_optimizer_that_is_not_built_in_needs_the_names_of_its_tensors():
    """A tensor of an unknown name is never left out silently."""
    optimizer, w = stepped()
    velocity = optimizer.state[w]["velocity"]
    with pytest.raises(codec.ArgumentError, match=r"a tensor 'velocity'.*v='velocity'"):
        optimizers.state_of(optimizer, w)
    assert optimizers.state_of(optimizer, w, m="velocity") == {"theta": w, "m": velocity}
    with pytest.raises(codec.ArgumentError, match="no 'speed', only 'velocity'"):
        optimizers.state_of(optimizer, w, m="speed")
    new = Momentum([w])
    assert optimizers.state_of(new, w, m="velocity") == {"theta": w}  # before the first step
