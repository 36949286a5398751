"""A formula per optimizer for A, the term that a step adds to the gradient; docs/guides/optimizers.md lists them."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from codec.errors import ArgumentError
from codec.optimizers.base import Optimizer, Terms


@dataclass(frozen=True, slots=True)
class SGD(Optimizer):
    """SGD: theta - lr * (g + weight_decay * theta), with momentum if `momentum` is not 0.

    ``m`` is the momentum buffer. The first step sets m = g, without `dampening`, as in torch.

    Parameters
    ----------
    momentum, dampening : float
        As in torch.optim.SGD.
    nesterov : bool
        As in torch.optim.SGD. It needs `momentum` without `dampening`.
    """

    lr: float = 1e-3
    _: KW_ONLY
    momentum: float = 0
    dampening: float = 0
    nesterov: bool = False

    def __post_init__(self) -> None:
        Optimizer.__post_init__(self)
        if self.nesterov and (not self.momentum or self.dampening):
            raise ArgumentError("nesterov=True needs momentum above 0 and dampening=0, as in torch.optim.SGD")

    def terms(self, state: Mapping[str, Any]) -> Terms:
        """Return the coefficients of A.

        A = theta / lr - weight_decay * theta. With momentum, A = (theta - lr mu m) / (lr (1 - tau)) - weight_decay *
        theta. With Nesterov momentum, A = ((1 - lr lambda (1 + mu)) theta - lr mu^2 m) / (lr (1 + mu)).
        """
        mu = self.momentum
        if self.nesterov:
            own = np.float64(self.lr) * (1 + mu)
            return Terms((1 - own * self.weight_decay) / own, m=-mu * mu / (1 + mu))
        own = np.float64(1 - self.dampening if mu and "m" in state else 1)
        return Terms(1 / (self.lr * own) - self.weight_decay, m=-mu / own if mu else 0)


@dataclass(frozen=True, slots=True)
class Adagrad(Optimizer):
    """Adagrad. ``v`` is the sum of squares before the step, a lower bound of the sum that the step uses.

    Parameters
    ----------
    lr_decay, eps : float
        As in torch.optim.Adagrad.
    step : int
        Number of steps before this one, torch's ``state["step"]``; 0 for the first step.
    """

    lr: float = 1e-2
    _: KW_ONLY
    lr_decay: float = 0
    eps: float = 1e-10
    step: int = 0

    def terms(self, state: Mapping[str, Any]) -> Terms:
        """Return the coefficients of A = theta (sqrt(v) + eps) / decayed lr - weight_decay * theta."""
        lr = np.float64(self.lr) / (1 + self.step * self.lr_decay)
        return Terms(-self.weight_decay, 1 / lr, 1, self.eps)


@dataclass(frozen=True, slots=True)
class RMSprop(Optimizer):
    """RMSprop. ``v`` is the mean square before the step; alpha * v is a lower bound of the step's own mean square.

    Parameters
    ----------
    alpha, eps : float
        As in torch.optim.RMSprop.
    momentum : float
        As in torch.optim.RMSprop. If it is not 0, no bit is dropped.
    centered : bool
        As in torch.optim.RMSprop. If True, no bit is dropped.
    """

    lr: float = 1e-2
    _: KW_ONLY
    alpha: float = 0.99
    eps: float = 1e-8
    momentum: float = 0
    centered: bool = False

    def _known(self) -> bool:
        return not (self.maximize or self.centered or self.momentum)

    def terms(self, state: Mapping[str, Any]) -> Terms:
        """Return the coefficients of A = theta (sqrt(alpha v) + eps) / lr - weight_decay * theta."""
        return Terms(-self.weight_decay, np.float64(1) / self.lr, self.alpha, self.eps)


@dataclass(frozen=True, slots=True)
class Adam(Optimizer):
    """Adam. ``m`` and ``v`` are exp_avg and exp_avg_sq before the step.

    The step divides by the bias-corrected mean square, which is at least v^ = beta2 v / (1 - beta2^t), t = `step` + 1.

    Parameters
    ----------
    betas : (float, float)
        As in torch.optim.Adam; each is 0 or more and below 1.
    eps : float
        As in torch.optim.Adam.
    amsgrad : bool
        As in torch.optim.Adam. If True, no bit is dropped.
    step : int
        Number of steps before this one, torch's ``state["step"]``; 0 for the first step.
    """

    lr: float = 1e-3
    _: KW_ONLY
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    amsgrad: bool = False
    step: int = 0

    def _known(self) -> bool:
        return not (self.maximize or self.amsgrad)

    def terms(self, state: Mapping[str, Any]) -> Terms:
        """Return the coefficients of A.

        A = (theta (sqrt(v^) + eps) (1 - beta1^t) - lr beta1 m) / (lr (1 - beta1)) - weight_decay * theta.
        """
        (beta1, beta2), t = self.betas, self.step + 1
        theta_v = (1 - beta1**t) / (np.float64(self.lr) * (1 - beta1))
        return Terms(-self.weight_decay, theta_v, beta2 / (1 - beta2**t), self.eps, -beta1 / (1 - beta1))


@dataclass(frozen=True, slots=True)
class AdamW(Adam):
    """Adam with decoupled weight decay."""

    _: KW_ONLY
    weight_decay: float = 0.01

    def terms(self, state: Mapping[str, Any]) -> Terms:
        """Return the coefficients of A.

        A = (theta (sqrt(v^) + eps) (1 - beta1^t) (1 - lr lambda) - lr beta1 m) / (lr (1 - beta1)).
        """
        t = Adam.terms(self, state)
        return Terms(0, t.theta_v * (1 - self.lr * self.weight_decay), t.v, t.eps, t.m)


@lru_cache(maxsize=64)
def _mu_product(beta1: float, momentum_decay: float, steps: int) -> float:
    """Return the product of NAdam's momenta of the first `steps` steps, torch's ``state["mu_product"]``."""
    product = 1.0
    for t in range(1, steps + 1):
        product *= _mu(beta1, momentum_decay, t)
        if product < 1e-20:  # smaller products do not change 1 - product
            break
    return product


def _mu(beta1: float, momentum_decay: float, t: int) -> float:
    """Return NAdam's momentum of step `t`; the first step has t = 1."""
    return beta1 * (1 - 0.5 * 0.96 ** (t * momentum_decay))


@dataclass(frozen=True, slots=True)
class NAdam(Optimizer):
    """NAdam, Adam with Nesterov momentum (Dozat 2016). ``m`` and ``v`` are exp_avg and exp_avg_sq before the step.

    Parameters
    ----------
    betas : (float, float)
        As in torch.optim.NAdam; each is 0 or more and below 1. NAdam's product of momenta is computed as if `betas` and
        `momentum_decay` had been the same in all earlier steps.
    eps, momentum_decay : float
        As in torch.optim.NAdam.
    decoupled_weight_decay : bool
        As in torch.optim.NAdam.
    step : int
        Number of steps before this one, torch's ``state["step"]``; 0 for the first step.

    References
    ----------
    .. [1] T. Dozat, "Incorporating Nesterov Momentum into Adam", ICLR workshop 2016.
    """

    lr: float = 2e-3
    _: KW_ONLY
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum_decay: float = 4e-3
    decoupled_weight_decay: bool = False
    step: int = 0

    def terms(self, state: Mapping[str, Any]) -> Terms:
        """Return the coefficients of A.

        A = (theta (sqrt(v^) + eps) (1 - lr lambda) - lr b m) / (lr a) with decoupled weight decay.

        Without decoupled weight decay, lambda is 0 in this formula, and weight_decay * theta is subtracted from A as in
        Adam.

        The step is ``lr (a g + b m) / (sqrt(v^) + eps)``, where mu are the momenta of this step and the next one:
        a = (1 - mu_t) / (1 - mu_1...mu_t) + (1 - beta1) c, b = beta1 c, and c = mu_t+1 / (1 - mu_1...mu_t+1).
        """
        (beta1, beta2), t = self.betas, self.step + 1
        mu, mu_next = (_mu(beta1, self.momentum_decay, i) for i in (t, t + 1))
        product = _mu_product(beta1, self.momentum_decay, t)
        c = mu_next / (1 - product * mu_next)
        own = (1 - mu) / (1 - product) + (1 - beta1) * c
        kept = 1 - self.lr * self.weight_decay if self.decoupled_weight_decay else 1.0
        theta = 0.0 if self.decoupled_weight_decay else -self.weight_decay
        return Terms(theta, kept / (np.float64(self.lr) * own), beta2 / (1 - beta2**t), self.eps, -beta1 * c / own)


@dataclass(frozen=True, slots=True)
class Adafactor(Optimizer):
    """Adafactor of torch.optim (Shazeer and Stern 2018).

    ``v`` is the second moment before the step, divided by the square of the step's scale: V / max(eps2, rms(theta))^2,
    as :func:`state_of` computes it. V is ``variance``, or ``row_var * col_var / max(eps1, mean(row_var))``.

    The error of a gradient value changes its parameter value by a bounded amount, as for the other optimizers, if the
    mean square of the gradient is at most 4 times its running mean. Errors of other gradient values also change the
    step of this value, through V and the clipping of the step: by a factor of at most (1 + eta)^3 / (1 - eta)^4, about
    1 + 7 eta, where eta is the largest relative error of a gradient value (2^-6 for level 3 of float32).

    Parameters
    ----------
    beta2_decay : float
        As in torch.optim.Adafactor, 0 or less.
    step : int
        Number of steps before this one, torch's ``state["step"]``; 0 for the first step, in which no bit is dropped.

    References
    ----------
    .. [1] N. Shazeer and M. Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", ICML 2018.
    """

    lr: float = 1e-2
    _: KW_ONLY
    beta2_decay: float = -0.8
    step: int = 0

    def terms(self, state: Mapping[str, Any]) -> Terms:
        """Return the coefficients of A.

        A = theta (1 - lr lambda) sqrt(beta^2 v / (beta + 4 (1 - beta))) / min(lr, t^-0.5); beta = 1 - t^beta2_decay.

        Dividing beta^2 v by beta + 4 (1 - beta) keeps A a lower bound even if the mean of row_var grows in this step.
        """
        t = self.step + 1
        new = t**self.beta2_decay
        rate = np.float64(min(self.lr, t**-0.5))
        return Terms(0, (1 - self.lr * self.weight_decay) / rate, (1 - new) ** 2 / (1 - new + _GROWTH * new))


_GROWTH = 4  # maximum ratio of a gradient's mean square to its running mean for which Adafactor's bound holds


@dataclass(frozen=True, slots=True)
class Lion(Optimizer):
    """Lion, whose step is lr sign(beta1 m + (1 - beta1) g) (Chen et al. 2023). ``m`` is exp_avg.

    The parameter's step depends on g only through its sign, but the momentum depends on all bits of g. Therefore
    :class:`codec.Truncate` bounds the error of the new momentum beta2 m + (1 - beta2) g: A is beta2 m / (1 - beta2),
    and `guard` counts bits of the momentum instead of the parameter. The sign can change only for values where
    ``|beta1 m + (1 - beta1) g|`` is at most (1 - beta1) times the error of g. In the first step, without ``m``, no bit
    is dropped.

    Parameters
    ----------
    betas : (float, float)
        As in Lion; each is 0 or more and below 1.

    References
    ----------
    .. [1] X. Chen et al., "Symbolic Discovery of Optimization Algorithms", NeurIPS 2023.
    """

    lr: float = 1e-4
    _: KW_ONLY
    betas: tuple[float, float] = (0.9, 0.99)

    def terms(self, state: Mapping[str, Any]) -> Terms:
        """Return the coefficients of A = beta2 m / (1 - beta2)."""
        return Terms(0, m=self.betas[1] / (1 - self.betas[1]))


@dataclass(frozen=True, slots=True)
class Muon(Optimizer):
    """Muon (Jordan et al. 2024), whose step is an orthogonalized matrix. ``m`` is the momentum buffer.

    Each value of the step depends on all values of the matrix, so there is no bound for each value. Instead,
    :class:`codec.Truncate` bounds the error of the momentum and of U, the matrix that is orthogonalized: in the sum
    that gives U, A is the term with m that is added to g, and `guard` counts bits of A instead of the parameter. For
    float32, U changes by at most ``2^(-guard - 24) |mu^2 m| / |U|``, relative to its Frobenius norm; optimizers.md
    bounds the relative change of the step. In the first step, without ``m``, no bit is dropped.

    Parameters
    ----------
    momentum : float
        As in torch.optim.Muon. At 1 or more no bit is dropped.
    nesterov : bool
        As in torch.optim.Muon.

    References
    ----------
    .. [1] K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024,
       https://kellerjordan.github.io/posts/muon/
    """

    lr: float = 1e-3
    _: KW_ONLY
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True

    def _known(self) -> bool:
        return self.momentum < 1 and not self.maximize

    def terms(self, state: Mapping[str, Any]) -> Terms:
        """Return the coefficients of A = mu^2 m / (1 - mu^2) with Nesterov momentum, or mu m / (1 - mu) without."""
        mu = np.float64(self.momentum**2 if self.nesterov else self.momentum)
        return Terms(0, m=mu / (1 - mu))
