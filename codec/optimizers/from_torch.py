"""Conversion of torch optimizers, of other packages' Lion, and of a user's formula, to descriptions and state."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from codec.arguments import shown, whole
from codec.errors import ArgumentError
from codec.optimizers.base import Optimizer
from codec.optimizers.custom import Custom, Formula
from codec.optimizers.formulas import (
    SGD,
    Adafactor,
    Adagrad,
    Adam,
    AdamW,
    Lion,
    Muon,
    NAdam,
    RMSprop,
)
from codec.optimizers.wrappers import unwrapped

_BUFFERS = {"m": ("momentum_buffer", "exp_avg"), "v": ("exp_avg_sq", "square_avg", "sum")}
# Options of third-party Lions, each with the value for which the step is that of the Lion paper.
_LION_OPTIONS = {
    "caution": False,
    "cautious": False,
    "cautious_factor": 1,
    "adanorm": False,
    "use_gc": False,
    "weight_decouple": True,
}


def from_optimizer(optimizer: Any, group: int = 0, *, parameter: Any = None) -> Optimizer:
    """Describe the next step of a torch optimizer, as the object that :meth:`codec.Truncate.bind` takes.

    Options that select an implementation (``foreach``, ``fused``, ``capturable``, ``differentiable``) are ignored. With
    ``maximize``, ``amsgrad``, ``centered`` or RMSprop's ``momentum``, Truncate drops no bit.

    Parameters
    ----------
    optimizer : torch.optim.SGD, Adagrad, RMSprop, Adam, AdamW, NAdam, Adafactor or Muon, a Lion, or a Formula
        The torch optimizer, or a wrapper with the attribute ``optimizer``, such as those of Accelerate and Lightning. A
        Lion of any package is accepted, such as those of lion_pytorch and timm, if its class is named Lion, its weight
        decay is decoupled, and its only state array is ``exp_avg``.
    group : int
        Index into ``optimizer.param_groups``.
    parameter : torch.nn.Parameter, optional
        Parameter of the group whose number of steps becomes `step`. Pass it if layers of the group were unfrozen during
        training. Default: all parameters of the group must have taken the same number of steps.

    Returns
    -------
    Optimizer
        Optimizer of :mod:`codec.optimizers` with the group's options and number of steps. For a :class:`Formula`,
        ``SGD(lr=1)``, whose A is ``theta``, because :func:`state_of` returns A as ``theta``.

    Raises
    ------
    ArgumentError
        The optimizer's class is not supported, it has no such group, or its parameters have taken different numbers of
        steps.

    Examples
    --------
    >>> w = torch.nn.Parameter(torch.ones(1000))
    >>> optimizer = torch.optim.AdamW([w], lr=1e-4)
    >>> w.grad = torch.full_like(w, 1e-3)
    >>> step = codec.optimizers.from_optimizer(optimizer)
    >>> step.lr, step.betas, step.step
    (0.0001, (0.9, 0.999), 0)
    >>> spec = codec.Truncate().bind(step, **codec.optimizers.state_of(optimizer, w))
    >>> frame = codec.encode(w.grad, spec)
    """
    optimizer = unwrapped(optimizer)
    kind = check_known(optimizer)
    groups: list[dict[str, Any]] = optimizer.param_groups
    if not -len(groups) <= whole("group", group, -len(groups)) < len(groups):
        raise ArgumentError(f"group must be an index into the optimizer's {len(groups)} param_groups, got {group}")
    g: dict[str, Any] = groups[group]
    if isinstance(optimizer, Formula):
        return SGD(1.0)
    if parameter is not None and not optimizer.state.get(parameter):
        g = {**g, "dampening": 0.0}  # SGD ignores dampening in the first step of a parameter
    known = {name: float(g[name]) for name in ("lr", "weight_decay")} | {"maximize": bool(g.get("maximize"))}
    counted = g["params"] if parameter is None else [parameter]
    return _READERS[kind](g, known, lambda: _steps(optimizer, counted))


def check_known(optimizer: Any) -> str:
    """Return the name of the class of a torch optimizer, or "Formula".

    Raises
    ------
    ArgumentError
        No formula for the step of this class is known, or the object is not a torch optimizer.
    """
    optim: Any = getattr(sys.modules.get("torch"), "optim", None)
    kind = type(optimizer).__name__
    if isinstance(optimizer, Formula):
        return kind
    if not hasattr(optimizer, "param_groups"):
        own = isinstance(optimizer, Optimizer | Custom)
        describes = ", which describes a step for Truncate.bind(), but has no parameters and no state" if own else ""
        raise ArgumentError(
            f"optimizer must be a torch optimizer, got {shown(optimizer)}{describes}: pass the torch optimizer, or "
            "codec.optimizers.Formula(optimizer, function) if the formula for its step is yours"
        )
    if kind == "Lion" and _is_torch_optimizer(optimizer):
        _check_lion(optimizer)
    elif kind not in _READERS or type(optimizer) is not getattr(optim, kind, None):
        known = ", ".join(name for name in _READERS if name != "Lion")
        raise ArgumentError(
            f"the formula for the step of {kind} is not known: use {known} of torch.optim or a Lion, which may be "
            "wrapped, or pass codec.optimizers.Formula(optimizer, function), whose function computes A"
        )
    return kind


def _is_torch_optimizer(optimizer: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(optimizer, torch.optim.Optimizer)


def _check_lion(optimizer: Any) -> None:
    """Raise ArgumentError if a third-party Lion's options or state show that its step is not that of the paper."""
    for group in optimizer.param_groups:
        for name, plain in _LION_OPTIONS.items():
            value = group.get(name, getattr(optimizer, name, plain))
            if value != plain:
                raise ArgumentError(
                    f"the formula for the step of Lion with {name}={value!r} is not known: use {name}={plain!r}"
                )
        if lacking := {"lr", "betas", "weight_decay"} - group.keys():
            raise ArgumentError(
                "the formula for the step of this Lion is not known: its param_groups have no "
                f"{', '.join(sorted(lacking))}"
            )
    for state in optimizer.state.values():
        if state and "exp_avg" not in state:
            raise ArgumentError(
                f"the formula for the step of this Lion is not known: its state has no exp_avg, only {', '.join(state)}"
            )


def _steps(optimizer: Any, params: Sequence[Any]) -> int:
    """Return the number of steps that all of `params` have taken; parameters that never had a gradient are ignored."""
    steps = {int(s["step"]) for p in params if "step" in (s := optimizer.state.get(p, {}))}
    if len(steps) > 1:
        raise ArgumentError(
            f"the parameters of this group have taken different numbers of steps, {min(steps)} to {max(steps)}: make "
            "an optimizer for each parameter by from_optimizer(optimizer, group, parameter=...)"
        )
    return steps.pop() if steps else 0


def _read_sgd(g: Mapping[str, Any], known: dict[str, Any], steps: Callable[[], int]) -> Optimizer:
    options: dict[str, Any] = {name: float(g[name]) for name in ("momentum", "dampening")}
    return SGD(**known, **options, nesterov=bool(g["nesterov"]))


def _read_adagrad(g: Mapping[str, Any], known: dict[str, Any], steps: Callable[[], int]) -> Optimizer:
    return Adagrad(**known, lr_decay=float(g["lr_decay"]), eps=float(g["eps"]), step=steps())


def _read_rmsprop(g: Mapping[str, Any], known: dict[str, Any], steps: Callable[[], int]) -> Optimizer:
    known |= {name: float(g[name]) for name in ("alpha", "eps", "momentum")}
    return RMSprop(**known, centered=bool(g["centered"]))


def _read_adam(g: Mapping[str, Any], known: dict[str, Any], steps: Callable[[], int]) -> Optimizer:
    beta1, beta2 = g["betas"]
    kind = AdamW if g["decoupled_weight_decay"] else Adam
    betas = (float(beta1), float(beta2))
    return kind(**known, betas=betas, eps=float(g["eps"]), amsgrad=bool(g["amsgrad"]), step=steps())


def _read_nadam(g: Mapping[str, Any], known: dict[str, Any], steps: Callable[[], int]) -> Optimizer:
    beta1, beta2 = g["betas"]
    known |= {name: float(g[name]) for name in ("eps", "momentum_decay")}
    decoupled = bool(g["decoupled_weight_decay"])
    return NAdam(**known, betas=(float(beta1), float(beta2)), decoupled_weight_decay=decoupled, step=steps())


def _read_adafactor(g: Mapping[str, Any], known: dict[str, Any], steps: Callable[[], int]) -> Optimizer:
    return Adafactor(**known, beta2_decay=float(g["beta2_decay"]), step=steps())


def _read_lion(g: Mapping[str, Any], known: dict[str, Any], steps: Callable[[], int]) -> Optimizer:
    beta1, beta2 = g["betas"]
    return Lion(**known, betas=(float(beta1), float(beta2)))


def _read_muon(g: Mapping[str, Any], known: dict[str, Any], steps: Callable[[], int]) -> Optimizer:
    return Muon(**known, momentum=float(g["momentum"]), nesterov=bool(g["nesterov"]))


_READERS = {
    "SGD": _read_sgd,
    "Adagrad": _read_adagrad,
    "RMSprop": _read_rmsprop,
    "Adam": _read_adam,
    "AdamW": _read_adam,
    "NAdam": _read_nadam,
    "Adafactor": _read_adafactor,
    "Muon": _read_muon,
    "Lion": _read_lion,
}


def state_of(optimizer: Any, parameter: Any, *, m: str | None = None, v: str | None = None) -> dict[str, Any]:
    """Return the state of one parameter before the step, as keyword arguments of :meth:`codec.Truncate.bind`.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer or Formula
        The torch optimizer, or a wrapper, as for :func:`from_optimizer`.
    parameter : torch.nn.Parameter
        One of the optimizer's parameters.
    m, v : str, optional
        Names of these tensors in the optimizer's state. Default: torch's names, ``momentum_buffer`` or ``exp_avg`` for
        `m`, ``exp_avg_sq``, ``square_avg`` or ``sum`` for `v`.

    Returns
    -------
    dict of str to torch.Tensor
        ``theta``, and ``m`` and ``v`` if the optimizer has them; before its first step it has none. The tensors are not
        copied. Adafactor's ``v`` is a new tensor, computed from its row and column statistics. For a
        :class:`Formula`, ``theta`` is a new tensor, A.

    Raises
    ------
    ArgumentError
        `optimizer` is not a torch optimizer, or the parameter is not one of its parameters. The state has no tensor of
        the given name; or the optimizer is not built in, and its state has a tensor of the parameter's size whose name
        is not known.

    Examples
    --------
    >>> w = torch.nn.Parameter(torch.ones(1000))
    >>> sorted(codec.optimizers.state_of(torch.optim.SGD([w], lr=0.1), w))
    ['theta']
    """
    optimizer = unwrapped(optimizer)
    if not hasattr(optimizer, "param_groups"):
        check_known(optimizer)
    group = next((g for g in optimizer.param_groups if any(parameter is p for p in g["params"])), None)
    if group is None:
        raise ArgumentError(f"a parameter of shape {tuple(parameter.shape)} is in none of the optimizer's param_groups")
    if isinstance(optimizer, Formula):
        return {"theta": optimizer.term(parameter, group)}
    have: Mapping[str, Any] = optimizer.state.get(parameter, {})
    given = {name: its for name, its in (("m", m), ("v", v)) if its is not None}
    if have and (lacking := [its for its in given.values() if have.get(its) is None]):
        raise ArgumentError(f"the state of this parameter has no {lacking[0]!r}, only {', '.join(map(repr, have))}")
    names = _BUFFERS | {ours: (its,) for ours, its in given.items()}
    found = {ours: have[name] for ours, each in names.items() for name in each if have.get(name) is not None}
    _check_complete(optimizer, parameter, have, names)
    if "beta2_decay" in group and have:
        found["v"] = _adafactor_v(parameter, have, *group["eps"])
    return {"theta": parameter, **found}


def _check_complete(
    optimizer: Any, parameter: Any, have: Mapping[str, Any], names: Mapping[str, tuple[str, ...]]
) -> None:
    """Raise ArgumentError if the state of an optimizer that is not built in has a tensor of an unknown name.

    Without this check, a formula of the user's would be computed without this tensor.
    """
    if type(optimizer) is getattr(sys.modules["torch"].optim, type(optimizer).__name__, None):
        return
    known = {name for each in names.values() for name in each}
    size = tuple(parameter.shape)
    for name, x in have.items():
        if name not in known and size and tuple(getattr(x, "shape", ())) == size:
            raise ArgumentError(
                f"the state of {type(optimizer).__name__} has a tensor {name!r}, and it is not known whether this is m "
                f"or v: pass its name, state_of(optimizer, parameter, v={name!r}), or pass all tensors to bind() "
                "yourself"
            )


def _adafactor_v(parameter: Any, have: Mapping[str, Any], eps1: float | None, eps2: float) -> Any:
    """Return Adafactor's second moment divided by the square of the step's scale, in the shape of the parameter.

    Means over a tensor are computed in float64 and rounded up to 4 bits, so that they are equal on all ranks: torch
    adds values in an order that depends on the number of threads.
    """
    import torch

    with torch.no_grad():
        eps1 = float(torch.finfo(parameter.dtype).eps) if eps1 is None else eps1
        wide = parameter.detach().double()
        scale = _rounded_up((wide.norm() / wide.numel() ** 0.5).clamp(min=eps2))
        v = torch.empty_like(parameter, dtype=torch.float64)
        if "variance" in have:
            return v.copy_(have["variance"]).div_(scale.square()).float()
        mean = _rounded_up(have["row_var"].double().mean(dim=-2, keepdim=True).clamp(min=eps1))
        torch.mul(have["row_var"].double() / mean, have["col_var"].double(), out=v)
        return v.div_(scale.square()).float()


def _rounded_up(x: Any) -> Any:
    """Return positive numbers rounded up to 4 significant bits."""
    import torch

    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(mantissa.mul(16).ceil().div(16), exponent)
