"""Metrics and state of torch's optimizers."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from codec.arguments import whole
from codec.errors import ArgumentError
from codec.optimizers.formulas import SGD, Adagrad, Adam, AdamW, Metric, Momentum, Nesterov, RMSprop

_BUFFERS = {"m": ("momentum_buffer", "exp_avg"), "v": ("exp_avg_sq", "square_avg", "sum")}


def from_optimizer(optimizer: Any, group: int = 0) -> Metric:
    """The metric of the step that a torch optimizer will take next.

    How a step is computed (``foreach``, ``fused``, ``capturable``, ``differentiable``) makes no difference. With
    ``maximize``, ``amsgrad``, ``centered`` and RMSprop's ``momentum`` no bit is dropped.

    Parameters
    ----------
    optimizer : torch.optim.SGD, Adagrad, RMSprop, Adam or AdamW
    group : int
        Index into ``optimizer.param_groups``.

    Raises
    ------
    ArgumentError
        Another optimizer, no such group, or a group whose parameters have taken different numbers of steps.

    Examples
    --------
    >>> w = torch.nn.Parameter(torch.ones(1000))
    >>> optimizer = torch.optim.AdamW([w], lr=1e-4)
    >>> w.grad = torch.full_like(w, 1e-3)
    >>> metric, state = metrics.from_optimizer(optimizer), metrics.state_of(optimizer, w)
    >>> metric.lr, metric.betas, metric.step
    (0.0001, (0.9, 0.999), 0)
    >>> frame = codec.encode(w.grad, codec.Truncate(), metric=metric, state=state)
    """
    optimizer = unwrapped(optimizer)
    kind = check_known(optimizer)
    groups: list[dict[str, Any]] = optimizer.param_groups
    if not -len(groups) <= whole("group", group, -len(groups)) < len(groups):
        raise ArgumentError(f"group {group} of an optimizer that has {len(groups)}")
    g = groups[group]
    known = {name: float(g[name]) for name in ("lr", "weight_decay")} | {"maximize": bool(g["maximize"])}
    return _READERS[kind](g, known, lambda: _steps(optimizer, g["params"]))


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer of torch's inside of one that a framework has wrapped, as Accelerate and Lightning do."""
    for _ in range(8):
        inside = getattr(optimizer, "optimizer", None)
        if not hasattr(inside, "param_groups"):
            break
        optimizer = inside
    return optimizer


def check_known(optimizer: Any) -> str:
    """Return the name of an optimizer's class, if it is one of torch's that has a metric.

    Raises
    ------
    ArgumentError
        It is another one.
    """
    optim: Any = getattr(sys.modules.get("torch"), "optim", None)
    kind = type(optimizer).__name__
    if kind not in _READERS or type(optimizer) is not getattr(optim, kind, None):
        known = ", ".join(_READERS)
        raise ArgumentError(
            f"no metric is known for {kind}: only for torch.optim's {known}, also as .optimizer of a wrapper, or by "
            "metrics.Custom"
        )
    return kind


def _steps(optimizer: Any, params: Sequence[Any]) -> int:
    """Taken so far by all parameters of a group."""
    steps = {int(s["step"]) for p in params if "step" in (s := optimizer.state.get(p, {}))}
    if len(steps) > 1:
        raise ArgumentError(
            f"parameters of this group have taken {min(steps)} to {max(steps)} steps: "
            "make their metrics one by one, by dataclasses.replace(metric, step=...)"
        )
    return steps.pop() if steps else 0


def _read_sgd(g: Mapping[str, Any], known: dict[str, Any], steps: Callable[[], int]) -> Metric:
    if not g["momentum"]:
        return SGD(**known)
    if g["nesterov"]:
        return Nesterov(**known, momentum=float(g["momentum"]))
    return Momentum(**known, momentum=float(g["momentum"]), dampening=float(g["dampening"]))


def _read_adagrad(g: Mapping[str, Any], known: dict[str, Any], steps: Callable[[], int]) -> Metric:
    return Adagrad(**known, lr_decay=float(g["lr_decay"]), eps=float(g["eps"]), step=steps())


def _read_rmsprop(g: Mapping[str, Any], known: dict[str, Any], steps: Callable[[], int]) -> Metric:
    known |= {name: float(g[name]) for name in ("alpha", "eps", "momentum")}
    return RMSprop(**known, centered=bool(g["centered"]))


def _read_adam(g: Mapping[str, Any], known: dict[str, Any], steps: Callable[[], int]) -> Metric:
    beta1, beta2 = g["betas"]
    kind = AdamW if g["decoupled_weight_decay"] else Adam
    betas = (float(beta1), float(beta2))
    return kind(**known, betas=betas, eps=float(g["eps"]), amsgrad=bool(g["amsgrad"]), step=steps())


_READERS = {
    "SGD": _read_sgd,
    "Adagrad": _read_adagrad,
    "RMSprop": _read_rmsprop,
    "Adam": _read_adam,
    "AdamW": _read_adam,
}


def state_of(optimizer: Any, parameter: Any) -> dict[str, Any]:
    """What ``state=`` wants beside :func:`from_optimizer`'s metric: the arrays of one parameter before the step.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
    parameter : torch.nn.Parameter
        One of the optimizer's.

    Returns
    -------
    dict of str to torch.Tensor
        ``theta``, and ``m`` and ``v`` if there are any yet: the optimizer's own memory, no copies.

    Raises
    ------
    ArgumentError
        It is no optimizer, or the parameter is not the optimizer's.
    """
    optimizer = unwrapped(optimizer)
    if not hasattr(optimizer, "param_groups"):
        raise ArgumentError(f"optimizer must be one of torch.optim's, not {type(optimizer).__name__}")
    if not any(parameter is p for g in optimizer.param_groups for p in g["params"]):
        raise ArgumentError("the parameter is not among the optimizer's")
    have: Mapping[str, Any] = optimizer.state.get(parameter, {})
    found = {ours: have[name] for ours, names in _BUFFERS.items() for name in names if have.get(name) is not None}
    return {"theta": parameter, **found}
