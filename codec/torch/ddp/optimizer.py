"""Hyperparameters and state of the optimizer for a part of a bucket, from which Truncate computes levels."""

from dataclasses import replace
from typing import Any

from codec import ArgumentError, SpecError, optimizers
from codec.specs import Spec, SpecLike, Truncate
from codec.torch.ddp.buckets import Buffers, Part, flat, n_values, needs_optimizer


def check_has(optimizer: Any, spec: Spec, name: str) -> None:
    """Raise ArgumentError if the spec of a parameter needs an optimizer, and there is none."""
    if needs_optimizer(spec) and optimizer is None:
        raise SpecError(f"{spec} for {name} drops bits by the optimizer's step: pass ddp_hook(optimizer=)")


def bind_to_part(optimizer: Any, part: Part, scale: float, buffers: Buffers, number: int) -> SpecLike:
    """Return the spec of a part, bound to the optimizer's parameter groups and state if it needs them.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer or None
        Optimizer of the model.
    part : Part
        Parameters of a bucket.
    scale : float
        Factor of the GradScaler in all gradients.
    buffers : Buffers
        Memory for the state.
    number : int
        Number of the part in its bucket.

    Raises
    ------
    ArgumentError
        There is no optimizer, or it does not have a parameter of the part.
    """
    if not needs_optimizer(part.spec):
        return part.spec
    check_has(optimizer, part.spec, part.names[0])
    group_of = {p: i for i, g in enumerate(optimizer.param_groups) for p in g["params"]}
    if lacking := [name for name, p in zip(part.names, part.parameters, strict=True) if p not in group_of]:
        raise ArgumentError(f"optimizer= does not have {', '.join(lacking)}: give another spec for it by policy=")
    of_group = {
        i: replace(optimizers.from_optimizer(optimizer, i), grad_scale=scale)
        for i in {group_of[p] for p in part.parameters}
    }
    groups: list[tuple[int, Any]] = []
    offset = 0
    for p in part.parameters:
        group = of_group[group_of[p]]
        if not groups or groups[-1][1] != group:
            groups.append((offset, group))
        offset += n_values(p)
    states = [(p, optimizers.state_of(optimizer, p)) for p in part.parameters]
    common = [name for name in ("theta", "m", "v") if all(name in s for _, s in states)]
    state = {name: buffers.joined((number, name), [flat(s[name], p) for p, s in states]) for name in common}
    assert isinstance(part.spec, Truncate)
    return part.spec.bind(groups, **state)
