"""Optimizers of a hook's model, from whose next steps Truncate computes how many bits of each gradient matter."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from codec import ArgumentError, SpecError, optimizers
from codec.optimizers.from_torch import check_known
from codec.optimizers.wrappers import unwrapped
from codec.specs import Spec, SpecLike, Truncate
from codec.torch._compat import local
from codec.torch.ddp.buckets import Buffers, Part, flat, n_values, needs_optimizer


class Optimizers:
    """The argument ``optimizer=`` of a hook.

    Parameters
    ----------
    given : torch.optim.Optimizer, Formula, a list of them, or None
        Argument of the user. Wrappers of Accelerate and Lightning are removed.

    Raises
    ------
    ArgumentError
        The list is empty.
    """

    def __init__(self, given: Any) -> None:
        one = () if given is None else (given,)
        several = cast(Sequence[Any], given) if isinstance(given, list | tuple) else one
        if given is not None and not several:
            raise ArgumentError("optimizer= is an empty list: pass the optimizers of the model")
        self.all: tuple[Any, ...] = tuple(map(unwrapped, several))

    def check_known(self) -> None:
        """Raise ArgumentError unless the formulas for the steps of all optimizers are known."""
        for each in self.all:
            check_known(each)

    def check_has(self, spec: Spec, name: str) -> None:
        """Raise SpecError if the spec of a parameter needs an optimizer, and there is none."""
        if needs_optimizer(spec) and not self.all:
            raise SpecError(f"{spec}, the spec of {name}, needs the state of the optimizer: pass ddp_hook(optimizer=)")

    def check_each_once(self, names: Mapping[torch.nn.Parameter, str]) -> None:
        """Raise ArgumentError unless each of some parameters is in exactly one optimizer."""
        found: dict[torch.nn.Parameter, int] = {}
        for optimizer in self.all:
            for p in {p for group in optimizer.param_groups for p in group["params"]}:
                found[p] = found.get(p, 0) + 1
        lacking = [name for p, name in names.items() if p not in found]
        twice = [name for p, name in names.items() if found.get(p, 0) > 1]
        if lacking:
            raise ArgumentError(
                f"optimizer= lacks the parameters {_some(lacking)}: pass a list of all optimizers of the model, or "
                "choose another spec for these parameters by policy="
            )
        if twice:
            raise ArgumentError(
                f"several optimizers of optimizer= have the parameters {_some(twice)}, so that the step is not known: "
                "pass the optimizer that changes them, or choose another spec for them by policy="
            )

    def bind(self, part: Part, scale: float, buffers: Buffers, number: int) -> SpecLike:
        """Return the spec of a part, bound to the parameter groups and the state if the spec needs them.

        Parameters
        ----------
        part : Part
            Parameters of a bucket.
        scale : float
            Factor by which a GradScaler has multiplied all gradients; 1 without one.
        buffers : Buffers
            Cached memory for the concatenated state.
        number : int
            Key of the part in `buffers`.

        Raises
        ------
        ArgumentError
            A parameter of the part is not in exactly one optimizer.
        SpecError
            There is no optimizer.
        """
        if not needs_optimizer(part.spec):
            return part.spec
        self.check_has(part.spec, part.names[0])
        self.check_each_once(dict(zip(part.parameters, part.names, strict=True)))
        place_of = {p: (o, i) for o in self.all for i, g in enumerate(o.param_groups) for p in g["params"]}
        groups: list[tuple[int, Any]] = []
        states: list[tuple[torch.nn.Parameter, dict[str, Any]]] = []
        offset = 0
        for p in part.parameters:
            optimizer, index = place_of[p]
            group = replace(optimizers.from_optimizer(optimizer, index, parameter=p), grad_scale=scale)
            if not groups or groups[-1][1] != group:
                groups.append((offset, group))
            states.append((p, optimizers.state_of(optimizer, p)))
            offset += n_values(p)
        known = [name for name in ("theta", "m", "v") if any(name in s for _, s in states)]
        state = {
            name: buffers.joined((number, name), [_flat_or_zeros(s.get(name), p) for p, s in states]) for name in known
        }
        assert isinstance(part.spec, Truncate)
        return part.spec.bind(groups, **state)


def _flat_or_zeros(x: torch.Tensor | None, p: torch.Tensor) -> torch.Tensor:
    """Flatten the state tensor `x` of a parameter; return zeros for None, before the optimizer's first step."""
    return flat(torch.zeros_like(local(p)) if x is None else x, p)


def _some(names: Sequence[str]) -> str:
    """Return the first names of a list, and the number of the others."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} others" if len(names) > 5 else "")
