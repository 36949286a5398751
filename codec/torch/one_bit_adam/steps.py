"""Steps of an optimizer by what was received: momenta to send, updates, and steps without communication."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from codec.torch.one_bit_adam import arithmetic, parameters
from codec.torch.one_bit_adam.arithmetic import Denominators
from codec.torch.one_bit_adam.schedule import Kind

Tensors = dict[torch.Tensor, torch.Tensor]  # gradients or momenta by parameter
Group = dict[str, Any]  # parameter group
State = dict[str, Any]  # state of a parameter


@dataclass
class Local:
    """Steps of a parameter since the ranks were synchronized."""

    anchor: torch.Tensor  # values that the parameter would have without these steps; the same on all ranks
    sum: torch.Tensor  # of this rank's momenta times step sizes
    total: float  # sum of the step sizes; the same on all ranks


class Steps:
    """Arithmetic of an optimizer's steps.

    Parameters
    ----------
    optimizer : torch.optim.Adam
        The optimizer, whose parameters and state the steps change.
    refresh : bool
        True: second moments are refreshed in some steps only (0/1 Adam). False: in all steps until the freeze.
    """

    def __init__(self, optimizer: torch.optim.Adam, refresh: bool) -> None:
        self._optimizer, self._refresh = optimizer, refresh
        self._denominators = Denominators()
        self._local: dict[torch.Tensor, Local] = {}

    @property
    def synchronized(self) -> bool:
        """True if the parameters are the same on all ranks."""
        return not self._local

    def restart(self) -> None:
        """Go on from parameters and state that were replaced."""
        self._denominators.clear()
        self._local.clear()
        if self._refresh:  # a state of torch.optim.AdamW has refreshed v in every step
            for state in self._optimizer.state.values():
                state.setdefault("variance_step", int(state["step"]))

    def freeze(self) -> None:
        """Record how often second moments were updated; they are constant from now on."""
        for p in parameters.of(self._optimizer):
            if state := self._optimizer.state.get(p):
                state.setdefault("variance_step", int(state["step"].item()))
        self._denominators.clear()

    def message(self, p: torch.Tensor, gradient: torch.Tensor, group: Group, scale: float) -> None:
        """Replace the gradient of a parameter by the momentum that this rank sends.

        After local steps that is the mean of their momenta and of this step's, weighted by step sizes.
        """
        state = cast(State, self._optimizer.state.get(p, {}))
        if not state:
            gradient.zero_()  # it had no gradient before
            return
        dead = self._denominators.dead(p, state, group)
        arithmetic.local_momentum(p, gradient, state, group, dead, scale)
        if local := self._local.get(p):
            size = arithmetic.step_size(group, float(state["step"]) + 1)
            gradient.mul_(size).add_(local.sum, alpha=scale).div_(local.total + size)

    def take(self, kind: Kind, received: Tensors) -> None:
        """Update parameters and state by the mean gradients or momenta that were received."""
        for group in self._optimizer.param_groups:
            some = [p for p in group["params"] if p in received]
            if not some:
                continue
            states: list[State] = [self._optimizer.state[p] for p in some]
            for p, state in zip(some, states, strict=True):
                arithmetic.start(p, state)
            tensors = [received[p] for p in some]
            if kind == "momenta":
                self._adopt(group, some, states, tensors)
            elif self._refresh:
                arithmetic.refresh(group, states, tensors, some)
                self._denominators.forget(some)
                self._move(group, some, states)
            else:
                arithmetic.adam_step(group, some, states, tensors)

    def _adopt(self, group: Group, some: list[torch.Tensor], states: list[State], momenta: list[torch.Tensor]) -> None:
        """Adopt averaged momenta, and step by them from where the ranks were synchronized last."""
        arithmetic.adopt(states, momenta, [self._denominators.dead(*x, group) for x in zip(some, states, strict=True)])
        earlier: list[float] = []
        for p in some:
            local = self._local.pop(p, None)
            if local is not None:
                p.copy_(local.anchor)
            earlier.append(local.total if local is not None else 0.0)
        self._move(group, some, states, earlier)

    def _move(
        self, group: Group, some: list[torch.Tensor], states: list[State], earlier: Sequence[float] | None = None
    ) -> None:
        """Step by the momenta in the state, with step sizes to which `earlier` ones are added."""
        sizes = [arithmetic.step_size(group, float(s["step"])) for s in states]
        if earlier is not None:
            sizes = [a + b for a, b in zip(sizes, earlier, strict=True)]
        arithmetic.update(
            group,
            some,
            [s["exp_avg"] for s in states],
            [self._denominators.of(*x, group) for x in zip(some, states, strict=True)],
            [-size for size in sizes],
        )

    def take_alone(self, gradients: Tensors | None) -> None:
        """Take a local step: parameters move by this rank's momenta.

        Parameters
        ----------
        gradients : dict or None
            Gradients of this rank; a parameter that has none has a gradient of zeros. None: this rank does not move,
            and counts the step only.
        """
        for group in self._optimizer.param_groups:
            some = [p for p in group["params"] if self._optimizer.state.get(p)]
            if not some:
                continue
            states: list[State] = [self._optimizer.state[p] for p in some]
            for s in states:
                s["step"] += 1
            locals_ = [self._since(p) for p in some]
            if gradients is not None:
                for p, s in zip(some, states, strict=True):
                    g = gradients.get(p)
                    g = torch.zeros_like(p) if g is None else g.clone()
                    arithmetic.local_momentum(p, g, s, group, self._denominators.dead(p, s, group))
                    s["exp_avg"].copy_(g)
                self._move(group, some, states)
            for local, s in zip(locals_, states, strict=True):
                size = arithmetic.step_size(group, float(s["step"]))
                local.total += size
                if gradients is not None:
                    local.sum.add_(s["exp_avg"], alpha=size)
            arithmetic.decay(group, [local.anchor for local in locals_])

    def _since(self, p: torch.Tensor) -> Local:
        """Return the steps of a parameter since the ranks were synchronized."""
        if p not in self._local:
            self._local[p] = Local(p.detach().clone(), torch.zeros_like(p, memory_format=torch.preserve_format), 0.0)
        return self._local[p]
