"""Parameters of an optimizer: their groups, names and gradients, and checks that they are supported."""

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch

from codec import ArgumentError
from codec.arguments import shown
from codec.torch._compat import local

UNSUPPORTED = ("amsgrad", "maximize", "fused", "capturable", "differentiable")


def of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield all parameters of an optimizer, in the order of its groups."""
    for group in optimizer.param_groups:
        yield from group["params"]


def groups(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, dict[str, Any]]:
    """Return the parameter group of each parameter."""
    return {p: group for group in optimizer.param_groups for p in group["params"]}


def gradients(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, torch.Tensor]:
    """Return the gradients of all parameters that have one. For a parameter that FSDP2 shards, return its shard.

    Raises
    ------
    ArgumentError
        A gradient is sparse.
    """
    found = {p: local(p.grad) for p in of(optimizer) if p.grad is not None}
    if any(g.is_sparse for g in found.values()):
        raise ArgumentError(
            "OneBitAdam does not support sparse gradients: use dense ones, such as torch.nn.Embedding(sparse=False)"
        )
    return found


def named(optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    """Return all parameters with names: the optimizer's ``param_names`` if these are unique, else "group.index"."""
    groups = optimizer.param_groups
    given = [name for group in groups for name in group.get("param_names", ())]
    places = [f"{i}.{j}" for i, group in enumerate(groups) for j in range(len(group["params"]))]
    return list(zip(given if len(set(given)) == len(places) else places, of(optimizer), strict=True))


def second_moments(optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], float]]:
    """Yield, for each parameter that has moments, its state and the b2 of its group."""
    for p, group in groups(optimizer).items():
        if state := cast(dict[str, Any], optimizer.state.get(p)):
            yield state, group["betas"][1]


def have_moments(optimizer: torch.optim.Optimizer) -> list[bool]:
    """Return, for each parameter, True if any of its second moments on this rank is not 0."""
    states = [optimizer.state.get(p) for p in of(optimizer)]
    return [bool(state) and bool(local(state["exp_avg_sq"]).any()) for state in states]


def have_tiny_moments(optimizer: torch.optim.Optimizer) -> list[bool]:
    """Return, for each parameter, True if more than 1% of its second moments are below 1/10,000 of their mean.

    Second moments of 0 do not count, because their values never change.
    """
    found: list[bool] = []
    for p in of(optimizer):
        state = cast(dict[str, Any], optimizer.state.get(p))
        if not state:
            found.append(False)
            continue
        v = local(state["exp_avg_sq"])
        n = max(1, int(v.count_nonzero()))
        tiny = (v > 0) & (v < v.sum(dtype=torch.float64).item() / n * 1e-4)
        found.append(int(tiny.count_nonzero()) > n / 100)
    return found


def as_adam(optimizer: torch.optim.Adam) -> torch.optim.Adam:
    """Return a torch.optim.Adam that shares groups and state with `optimizer`; codec.optimizers supports its step."""
    adam = torch.optim.Adam.__new__(torch.optim.Adam)
    adam.__dict__ = optimizer.__dict__  # share the dict itself, because load_state_dict replaces groups and state
    return adam


def window(group: Mapping[str, Any]) -> int:
    """Return the time constant of a group's second moments in steps, 1 / (1 - b2), at least 2."""
    return max(2, round(1 / (1 - group["betas"][1])))


def check_group(group: Mapping[str, Any]) -> None:
    """Raise ArgumentError if a parameter or an option of a parameter group is not supported."""
    for p in cast(list[torch.Tensor], group["params"]):
        if not p.is_floating_point():
            raise ArgumentError(f"parameters of OneBitAdam must be real floats, got {p.dtype}")
    if (corrects := group.get("bias_correction", True)) not in (True, False):
        raise ArgumentError(f"bias_correction of a parameter group must be True or False, got {shown(corrects)}")
    if on := [name for name in UNSUPPORTED if group.get(name)]:
        raise ArgumentError(f"OneBitAdam does not support {', '.join(f'{name}=True' for name in on)}")
    if isinstance(group["lr"], torch.Tensor) or isinstance(group["betas"][0], torch.Tensor):
        raise ArgumentError("lr and betas of OneBitAdam must be numbers, got a tensor: pass float(lr)")
