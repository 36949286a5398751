"""Arithmetic of 1-bit Adam and 0/1 Adam on one rank: momenta to send, and updates of parameters and state."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.adam import adam

from codec.torch._compat import local

_torch: Any = torch  # torch's type stubs lack the _foreach functions
Group = Mapping[str, Any]  # parameter group
State = dict[str, Any]  # optimizer state of a parameter


def start(p: torch.Tensor, state: State) -> None:
    """Initialize the state of a parameter with the entries of torch.optim.Adam, if it has none."""
    if "exp_avg" not in state:
        state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
        state["variance_step"] = 0  # number of updates of exp_avg_sq
        state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)


def adam_step(
    group: Group,
    parameters: Sequence[torch.Tensor],
    states: Sequence[State],
    gradients: Sequence[torch.Tensor],
) -> None:
    """Update some parameters of a group as a step of torch.optim.Adam does, and count the update of second moments."""
    adam(
        [local(p) for p in parameters],
        list(gradients),
        moments(states, "exp_avg"),
        moments(states, "exp_avg_sq"),
        [],
        [s["step"] for s in states],
        foreach=group["foreach"],
        decoupled_weight_decay=group["decoupled_weight_decay"],
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
    for s in states:
        s["variance_step"] += 1


def moments(states: Sequence[State], name: str) -> list[torch.Tensor]:
    """Return the moment `name` of each parameter, or of its shard."""
    return [local(s[name]) for s in states]


def corrects_bias(group: Group) -> bool:
    """Return True if the moments of a group are bias-corrected, as in Adam."""
    return group.get("bias_correction", True)


class Denominators:
    """Cache of the denominators sqrt(v) + eps, where v are bias-corrected second moments that do not change.

    A denominator is computed once, and takes 4 bytes per float32 value of the parameter.

    Parameters
    ----------
    max_ratio : float or None
        Upper bound of the magnitude of a momentum divided by its denominator; None: no bound.
    """

    def __init__(self, max_ratio: float | None) -> None:
        self._max_ratio = max_ratio
        self._known: dict[torch.Tensor, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def clear(self) -> None:
        """Drop all denominators, after second moments have changed."""
        self._known.clear()

    def forget(self, parameters: Sequence[torch.Tensor]) -> None:
        """Drop the denominators of parameters whose second moments have changed."""
        for p in parameters:
            self._known.pop(p, None)

    def of(self, p: torch.Tensor, state: State, group: Group) -> torch.Tensor:
        """Return the denominator of a parameter; Inf where v is 0, so that these values never change."""
        return self._of(p, state, group)[0]

    def dead(self, p: torch.Tensor, state: State, group: Group) -> torch.Tensor | None:
        """Return a mask of the values of a parameter whose second moment is 0; None if no second moment is 0."""
        return self._of(p, state, group)[1]

    def limit(self, p: torch.Tensor, state: State, group: Group, m: torch.Tensor, out: torch.Tensor) -> None:
        """Store a momentum `m` of a parameter in `out`, limited to `max_ratio` times sqrt(v) in magnitude.

        A second moment that is too small for later gradients, such as that of a row that was rarely used, would
        otherwise make steps of any size. Momenta are compared with bias-corrected v also if the group's options exclude
        the correction from steps.
        """
        if self._max_ratio is None:
            out.copy_(m)
            return
        correction = 1.0 if corrects_bias(group) else _correction(state, group)
        ratio, bound = self._max_ratio / math.sqrt(correction or 1), self.of(p, state, group)
        bound = bound if ratio == 1 else bound * ratio
        torch.clamp(m, -bound, bound, out=out)

    def _of(self, p: torch.Tensor, state: State, group: Group) -> tuple[torch.Tensor, torch.Tensor | None]:
        if p not in self._known:
            v = local(state["exp_avg_sq"])
            correction = _correction(state, group) if corrects_bias(group) else 1
            dead = v == 0
            denominator = (v.sqrt() / math.sqrt(correction or 1)).add_(group["eps"]).masked_fill_(dead, math.inf)
            self._known[p] = denominator, dead if bool(dead.any()) else None
        return self._known[p]


def _correction(state: State, group: Group) -> float:
    """Return the factor by which the second moments of a parameter are too small, since they began at 0."""
    return 1 - group["betas"][1] ** state["variance_step"]


def local_momentum(
    p: torch.Tensor, gradient: torch.Tensor, state: State, group: Group, dead: torch.Tensor | None, scale: float = 1.0
) -> None:
    """Replace a gradient by this rank's momentum, b1 m + (1 - b1) g, in place.

    Parameters
    ----------
    p : torch.Tensor
        The parameter, for weight decay that is added to the gradient.
    gradient : torch.Tensor
        Gradient of this rank, which becomes its momentum.
    state, group : dict
        Optimizer state and group of the parameter.
    dead : torch.Tensor or None
        Mask of values that never change, whose momentum is set to 0.
    scale : float
        Factor by which a GradScaler has multiplied the gradient. The momentum is multiplied by the same factor.
    """
    m = local(state["exp_avg"]) if scale == 1 else local(state["exp_avg"]) * scale
    if group["weight_decay"] and not group["decoupled_weight_decay"]:
        gradient.add_(local(p), alpha=scale * group["weight_decay"])
    torch.lerp(m, gradient, 1 - group["betas"][0], out=gradient)
    if dead is not None:
        gradient.masked_fill_(dead, 0)


def count(states: Sequence[State]) -> None:
    """Increment the step count in each state."""
    _torch._foreach_add_([s["step"] for s in states], 1)


def refresh(
    group: Group, states: Sequence[State], gradients: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]
) -> None:
    """Count a step, and update both moments of parameters of a group from their mean gradients, as Adam does."""
    given = list(gradients)
    if group["weight_decay"] and not group["decoupled_weight_decay"]:
        given = _torch._foreach_add(given, [local(p) for p in parameters], alpha=group["weight_decay"])
    beta1, beta2 = group["betas"]
    squares = moments(states, "exp_avg_sq")
    _torch._foreach_lerp_(moments(states, "exp_avg"), given, 1 - beta1)
    _torch._foreach_mul_(squares, beta2)
    _torch._foreach_addcmul_(squares, given, given, 1 - beta2)
    count(states)
    for s in states:
        s["variance_step"] += 1


def step_size(group: Group, step: float) -> float:
    """Return the factor of m / (sqrt(v^) + eps) in a step: the learning rate divided by the bias correction of m."""
    return float(group["lr"]) / (1 - group["betas"][0] ** step if corrects_bias(group) else 1)


def decay(group: Group, tensors: Sequence[torch.Tensor]) -> None:
    """Multiply `tensors` by 1 - lr * weight_decay if weight decay is decoupled, as in AdamW."""
    if group["weight_decay"] and group["decoupled_weight_decay"]:
        _torch._foreach_mul_([local(x) for x in tensors], 1 - float(group["lr"]) * group["weight_decay"])


def update(
    parameters: Sequence[torch.Tensor],
    momenta: Sequence[torch.Tensor],
    denominators: Sequence[torch.Tensor],
    factors: Sequence[float],
) -> None:
    """Add factor * momentum / denominator to each parameter."""
    _torch._foreach_addcdiv_([local(p) for p in parameters], list(momenta), list(denominators), list(factors))


def norm(gradients: Iterable[torch.Tensor]) -> float:
    """Return the Euclidean norm over all gradients; 0 if there are none."""
    return math.hypot(*(_norm(g) for g in gradients))


def _norm(x: torch.Tensor) -> float:
    """Return the Euclidean norm of a tensor; its squares are added in float32, or float64 for float64."""
    return float(_torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32)))


def clip_factor(norm: float, max_norm: float, scale: float = 1.0) -> float:
    """Return the factor by which ``torch.nn.utils.clip_grad_norm_`` multiplies gradients.

    Parameters
    ----------
    norm : float
        Norm over all gradients, which a GradScaler may have scaled.
    max_norm : float
        Largest allowed norm of the unscaled gradients.
    scale : float
        Factor by which a GradScaler has multiplied the gradients.
    """
    return min(1.0, max_norm / (norm / scale + 1e-6))


def is_finite(x: torch.Tensor) -> bool:
    """Return True if a tensor holds neither NaN nor Inf. If its sum is finite, the tensor is read only once."""
    return bool(x.sum().isfinite()) or bool(x.isfinite().all())
