"""Steps of OneBitAdam: momenta to send, updates from received means, and steps without communication."""

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
State = dict[str, Any]  # optimizer state of a parameter


@dataclass
class Local:
    """Local steps of a parameter since the last synchronization of the ranks."""

    # Parameter before these steps, times the weight decay factors of these steps; equal on all ranks
    anchor: torch.Tensor
    sum: torch.Tensor  # sum over these steps of this rank's momentum times the step size
    total: float  # sum of the step sizes, equal on all ranks; 0 if all learning rates were 0


class AdamSteps:
    """Arithmetic of an optimizer's steps.

    Parameters
    ----------
    optimizer : torch.optim.Adam
        The optimizer, whose parameters and state the steps change.
    refresh : bool
        True: only some steps update second moments (0/1 Adam). False: all steps until the freeze update them.
    max_ratio : float or None
        Upper bound of |m| / sqrt(v) in steps that do not update second moments; None: no bound.
    """

    def __init__(self, optimizer: torch.optim.Adam, refresh: bool, max_ratio: float | None) -> None:
        self._optimizer, self._refresh = optimizer, refresh
        self._denominators = Denominators(max_ratio)
        self.bounded = max_ratio is not None
        self._local: dict[torch.Tensor, Local] = {}
        self.n_local = 0  # number of local steps since the last synchronization, equal on all ranks

    @property
    def synchronized(self) -> bool:
        """True if the parameters are equal on all ranks, because no local step followed the last synchronization."""
        return not self._local

    @property
    def apart(self) -> set[torch.Tensor]:
        """Parameters that have taken local steps since the last synchronization."""
        return set(self._local)

    def moves(self, p: torch.Tensor) -> bool:
        """Return True if steps update a parameter: it requires a gradient, or has taken local steps."""
        return p.requires_grad or p in self._local

    def start(self) -> None:
        """Initialize the state of all parameters that require gradients, before the first step."""
        for p in parameters.of(self._optimizer):
            if p.requires_grad:
                arithmetic.start(p, self._optimizer.state[p])

    def restart(self) -> None:
        """Drop cached denominators and local steps, after parameters and state were replaced."""
        self._denominators.clear()
        self._local.clear()
        self.n_local = 0

    def freeze(self) -> None:
        """Drop cached denominators at the freeze; the next ones are computed from the final second moments."""
        self._denominators.clear()

    def message(self, p: torch.Tensor, gradient: torch.Tensor, group: Group, scale: float) -> None:
        """Replace the gradient of a parameter by the momentum that this rank sends.

        After local steps, this is the mean of the momenta of these steps and of the current step, weighted by step
        sizes. If all step sizes are 0, it is the current step's momentum.
        """
        state = cast(State, self._optimizer.state.get(p, {}))
        if not state or not self.moves(p):
            gradient.zero_()  # the parameter has no second moments, or is not trained
            return
        dead = self._denominators.dead(p, state, group)
        arithmetic.local_momentum(p, gradient, state, group, dead, scale)
        if since := self._local.get(p):
            size = arithmetic.step_size(group, float(state["step"]) + 1)
            if since.total + size > 0:
                gradient.mul_(size).add_(since.sum, alpha=scale).div_(since.total + size)

    def unsent(self, p: torch.Tensor, gradient: torch.Tensor) -> None:
        """Replace the gradient of a parameter by the mean momentum of its local steps, or by 0 if it has taken none."""
        since = self._local.get(p)
        if since is None:
            gradient.zero_()
        elif since.total > 0:
            torch.div(since.sum, since.total, out=gradient)
        else:
            gradient.copy_(local(self._optimizer.state[p]["exp_avg"]))

    def synchronize(self, received: Tensors) -> None:
        """Replace local steps by their mean over ranks; `received` has the means of the results of :meth:`unsent`."""
        for group in self._optimizer.param_groups:
            some = [p for p in group["params"] if p in self._local]
            states: list[State] = [self._optimizer.state[p] for p in some]
            if some:
                sizes = self._adopt(group, some, states, [received[p] for p in some])
                self._move(group, some, states, sizes)
        self.n_local = 0

    def take(self, kind: Kind, received: Tensors) -> None:
        """Update parameters and state from the mean gradients or momenta that were received."""
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
        self.n_local = 0

    def _adopt(
        self, group: Group, some: list[torch.Tensor], states: list[State], momenta: list[torch.Tensor]
    ) -> list[float]:
        """Set momenta to their means, limited, and parameters to their anchors; return sums of local step sizes."""
        for p, state, m in zip(some, states, momenta, strict=True):
            own = local(state["exp_avg"])
            self._denominators.limit(p, state, group, m, own)
            if (dead := self._denominators.dead(p, state, group)) is not None:
                own.masked_fill_(dead, 0)
        earlier: list[float] = []
        for p in some:
            since = self._local.pop(p, None)
            if since is not None:
                local(p).copy_(since.anchor)
            earlier.append(since.total if since is not None else 0.0)
        return earlier

    def _step(
        self,
        group: Group,
        some: list[torch.Tensor],
        states: list[State],
        earlier: Sequence[float] | None = None,
        momenta: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Apply weight decay, and update parameters by `momenta`, by default those in the state.

        `earlier`: sums of local step sizes, which are added to the step sizes.
        """
        sizes = [arithmetic.step_size(group, float(s["step"])) for s in states]
        if earlier is not None:
            sizes = [a + b for a, b in zip(sizes, earlier, strict=True)]
        arithmetic.decay(group, some)
        self._move(group, some, states, sizes, momenta)

    def _move(
        self,
        group: Group,
        some: list[torch.Tensor],
        states: list[State],
        sizes: Sequence[float],
        momenta: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Update parameters by `momenta`, by default those in the state, times `sizes`."""
        arithmetic.update(
            some,
            arithmetic.moments(states, "exp_avg") if momenta is None else momenta,
            [self._denominators.of(*x, group) for x in zip(some, states, strict=True)],
            [-size for size in sizes],
        )

    def take_alone(self, gradients: Tensors | None) -> None:
        """Take a local step: update parameters by this rank's momenta.

        Parameters
        ----------
        gradients : dict or None
            Gradients of this rank; a missing gradient counts as zeros. None: only count the step, without an update.
        """
        self.n_local += 1
        for group in self._optimizer.param_groups:
            some = [p for p in group["params"] if self._optimizer.state.get(p) and self.moves(p)]
            if not some:
                continue
            states: list[State] = [self._optimizer.state[p] for p in some]
            arithmetic.count(states)
            locals_ = [self._since(p) for p in some]
            if gradients is not None:
                limited: list[torch.Tensor] = []  # not stored: a momentum of one rank varies more than their mean
                for p, s in zip(some, states, strict=True):
                    g = gradients.get(p)
                    g = torch.zeros_like(local(p)) if g is None else g.clone()
                    arithmetic.local_momentum(p, g, s, group, self._denominators.dead(p, s, group))
                    local(s["exp_avg"]).copy_(g)
                    self._denominators.limit(p, s, group, g, g)
                    limited.append(g)
                self._step(group, some, states, momenta=limited)
            for since, s in zip(locals_, states, strict=True):
                size = arithmetic.step_size(group, float(s["step"]))
                since.total += size
                if gradients is not None:
                    since.sum.add_(local(s["exp_avg"]), alpha=size)
            arithmetic.decay(group, [since.anchor for since in locals_])

    def _since(self, p: torch.Tensor) -> Local:
        """Return the local steps of a parameter since the last synchronization; create the record if there is none."""
        if p not in self._local:
            x = local(p).detach()
            self._local[p] = Local(x.clone(), torch.zeros_like(x, memory_format=torch.preserve_format), 0.0)
        return self._local[p]
