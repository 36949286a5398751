"""Steps of an optimizer: momenta to send, updates from received means, and steps without communication."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from codec.torch._compat import local
from codec.torch.one_bit_adam import arithmetic, parameters
from codec.torch.one_bit_adam.arithmetic import Denominators
from codec.torch.one_bit_adam.schedule import Kind

Tensors = dict[torch.Tensor, torch.Tensor]  # gradients or momenta by parameter
Group = dict[str, Any]  # parameter group
State = dict[str, Any]  # state of a parameter


@dataclass
class Local:
    """Steps of a parameter since the ranks were synchronized; `total` is 0 if all of its learning rates were 0."""

    anchor: torch.Tensor  # values that the parameter would have without these steps; the same on all ranks
    sum: torch.Tensor  # sum of this rank's momenta times step sizes
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

    @property
    def apart(self) -> set[torch.Tensor]:
        """Parameters that have taken local steps since the ranks were synchronized."""
        return set(self._local)

    def moves(self, p: torch.Tensor) -> bool:
        """Return True if a parameter takes part in steps: it requires a gradient, or has taken local steps."""
        return p.requires_grad or p in self._local

    def start(self) -> None:
        """Start the state of all parameters, before the first step."""
        for p in parameters.of(self._optimizer):
            if p.requires_grad:
                arithmetic.start(p, self._optimizer.state[p])

    def restart(self) -> None:
        """Go on from parameters and state that were replaced."""
        self._denominators.clear()
        self._local.clear()

    def freeze(self) -> None:
        """Keep second moments as they are from now on."""
        self._denominators.clear()

    def message(self, p: torch.Tensor, gradient: torch.Tensor, group: Group, scale: float) -> None:
        """Replace the gradient of a parameter by the momentum that this rank sends.

        After local steps that is the mean of their momenta and of this step's, weighted by step sizes; this step's
        momentum if all step sizes are 0.
        """
        state = cast(State, self._optimizer.state.get(p, {}))
        if not state or not self.moves(p):
            gradient.zero_()  # the parameter had no gradient before, or is not trained
            return
        dead = self._denominators.dead(p, state, group)
        arithmetic.local_momentum(p, gradient, state, group, dead, scale)
        if since := self._local.get(p):
            size = arithmetic.step_size(group, float(state["step"]) + 1)
            if since.total + size > 0:
                gradient.mul_(size).add_(since.sum, alpha=scale).div_(since.total + size)

    def unsent(self, p: torch.Tensor, gradient: torch.Tensor) -> None:
        """Replace the gradient of a parameter by the mean momentum of the local steps that it has taken, or by 0."""
        since = self._local.get(p)
        if since is None:
            gradient.zero_()
        elif since.total > 0:
            torch.div(since.sum, since.total, out=gradient)
        else:
            gradient.copy_(local(self._optimizer.state[p]["exp_avg"]))

    def synchronize(self, received: Tensors) -> None:
        """Move parameters from where the ranks were synchronized last, by the averages of what :meth:`unsent` sent."""
        for group in self._optimizer.param_groups:
            some = [p for p in group["params"] if p in self._local]
            states: list[State] = [self._optimizer.state[p] for p in some]
            if some:
                sizes = self._adopt(group, some, states, [received[p] for p in some])
                self._move(group, some, states, sizes)

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
                earlier = self._adopt(group, some, states, tensors)
                arithmetic.count(states)
                self._step(group, some, states, earlier)
            elif arithmetic.corrects_bias(group) and not self._refresh:
                arithmetic.adam_step(group, some, states, tensors)
            else:
                arithmetic.refresh(group, states, tensors, some)
                self._denominators.forget(some)
                self._step(group, some, states)

    def _adopt(
        self, group: Group, some: list[torch.Tensor], states: list[State], momenta: list[torch.Tensor]
    ) -> list[float]:
        """Set momenta to their means, and parameters to the last synchronization; return the step sizes since then."""
        arithmetic.adopt(states, momenta, [self._denominators.dead(*x, group) for x in zip(some, states, strict=True)])
        earlier: list[float] = []
        for p in some:
            since = self._local.pop(p, None)
            if since is not None:
                local(p).copy_(since.anchor)
            earlier.append(since.total if since is not None else 0.0)
        return earlier

    def _step(
        self, group: Group, some: list[torch.Tensor], states: list[State], earlier: Sequence[float] | None = None
    ) -> None:
        """Decay, and step by the momenta in the state, with step sizes to which `earlier` ones are added."""
        sizes = [arithmetic.step_size(group, float(s["step"])) for s in states]
        if earlier is not None:
            sizes = [a + b for a, b in zip(sizes, earlier, strict=True)]
        arithmetic.decay(group, some)
        self._move(group, some, states, sizes)

    def _move(self, group: Group, some: list[torch.Tensor], states: list[State], sizes: Sequence[float]) -> None:
        """Step by the momenta in the state."""
        arithmetic.update(
            some,
            arithmetic.moments(states, "exp_avg"),
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
            some = [p for p in group["params"] if self._optimizer.state.get(p) and self.moves(p)]
            if not some:
                continue
            states: list[State] = [self._optimizer.state[p] for p in some]
            arithmetic.count(states)
            locals_ = [self._since(p) for p in some]
            if gradients is not None:
                for p, s in zip(some, states, strict=True):
                    g = gradients.get(p)
                    g = torch.zeros_like(local(p)) if g is None else g.clone()
                    arithmetic.local_momentum(p, g, s, group, self._denominators.dead(p, s, group))
                    local(s["exp_avg"]).copy_(g)
                self._step(group, some, states)
            for since, s in zip(locals_, states, strict=True):
                size = arithmetic.step_size(group, float(s["step"]))
                since.total += size
                if gradients is not None:
                    since.sum.add_(local(s["exp_avg"]), alpha=size)
            arithmetic.decay(group, [since.anchor for since in locals_])

    def _since(self, p: torch.Tensor) -> Local:
        """Return the steps of a parameter since the ranks were synchronized."""
        if p not in self._local:
            x = local(p).detach()
            self._local[p] = Local(x.clone(), torch.zeros_like(x, memory_format=torch.preserve_format), 0.0)
        return self._local[p]
