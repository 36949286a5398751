"""Means of an optimizer's gradients and momenta over ranks, with or without a link to other ranks."""

from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist

from codec import ArgumentError, Status
from codec.specs import Spec
from codec.torch.ddp.hook import Hook
from codec.torch.ddp.stats import Stats
from codec.torch.one_bit_adam import arithmetic, checkpoint, parameters
from codec.torch.one_bit_adam.link import Link, Settings
from codec.torch.one_bit_adam.model import Model, model_of
from codec.torch.one_bit_adam.phase import Phase
from codec.torch.one_bit_adam.schedule import Kind
from codec.torch.one_bit_adam.steps import Steps, Tensors


class Averager:
    """Averages the gradients and momenta of an optimizer.

    Parameters
    ----------
    optimizer : torch.optim.Adam
        The optimizer.
    phase : Phase
        Kind of tensors that the next step sends.
    steps : Steps
        Computes the momenta that are sent.
    warmup, spec : Spec
        Codecs of gradients and of momenta.
    """

    def __init__(self, optimizer: torch.optim.Adam, phase: Phase, steps: Steps, warmup: Spec, spec: Spec) -> None:
        self.link: Link | None = None
        self.waiting: dict[Kind, Any] = {}  # states of hooks that were loaded before there is a link
        self.settings = Settings(warmup, spec, self._transform, parameters.as_adam(optimizer))  # defaults of `register`
        self._optimizer, self._phase, self._steps = optimizer, phase, steps

    def connect(self, model: Model, group: Any, settings: Settings) -> None:
        """Make the link to the other ranks; residuals of an earlier link are kept."""
        group = group or model.group
        link = Link(settings, model, group, lambda: self._phase.kind)
        waiting: dict[Kind, Any] = self.waiting
        if self.link is not None:
            here = {"rank": group.rank(), "world_size": group.size()}
            waiting = {kind: state | here for kind, state in checkpoint.hook_states(self.link, False, {}).items()}
        link.hooks = checkpoint.new_hooks(link, waiting)
        link.attach()
        link.hooks["gradients"].called |= self._phase.frozen
        self.link, self.waiting = link, {}

    def _connected(self) -> Link | None:
        """Return the link; made now for the default group if there is one."""
        if self.link is None and dist.is_available() and dist.is_initialized():
            self.connect(model_of(parameters.named(self._optimizer)), None, self.settings)
        return self.link

    def _transform(self, buffer: torch.Tensor, gradients: list[tuple[torch.nn.Parameter, torch.Tensor]]) -> None:
        """Check the gradients of a bucket, and replace them by momenta after the freeze; runs before the all-reduce."""
        if buffer.is_sparse:
            raise ArgumentError("OneBitAdam does not support sparse gradients")
        if not arithmetic.is_finite(buffer):
            raise ArgumentError("a gradient holds NaN or Inf: the step is refused on all ranks", Status.NONFINITE)
        if self._phase.kind == "gradients":
            return
        scaler = None if self.link is None else self.link.settings.grad_scaler
        scale = 1.0 if scaler is None else scaler.get_scale()
        groups = parameters.groups(self._optimizer)
        for p, gradient in gradients:
            self._steps.message(p, gradient, groups[p], scale)

    def received(self, kind: Kind) -> Tensors:
        """Return the mean gradient or momentum of each parameter, without those that have none."""
        link = self._connected()
        if link is not None and link.is_ddp and kind != "gradients":
            scaler = link.settings.grad_scaler
            link.guard.check_unchanged(scaler is not None and scaler.is_enabled())
        if kind == "local" or (link is not None and link.is_ddp):
            return parameters.gradients(self._optimizer)
        if link is None:
            return self._alone(kind)
        means = link.reduce(kind, {p: p.grad for p in link.model.names})
        # a parameter that no rank has ever used stays as it is, as in torch.optim.Adam
        states = self._optimizer.state
        return {p: x for p, x in means.items() if p.grad is not None or states.get(p) or bool(x.any())}

    def _alone(self, kind: Kind) -> Tensors:
        """Return what :meth:`received` does, without a process group."""
        gradients = parameters.gradients(self._optimizer)
        if kind != "gradients":
            gradients = {p: g.clone() for p, g in gradients.items()}
        for p, gradient in gradients.items():
            self._transform(gradient, [(cast(torch.nn.Parameter, p), gradient)])
        return gradients

    def agree(self, decision: bool) -> bool:
        """Return True on all ranks if any of them decides so: sums may differ in the last bit between machines."""
        return decision if self.link is None else self.link.agree(decision)

    def share_buckets(self) -> None:
        """Let momenta travel in the buckets of gradients after a checkpoint."""
        if self.link is not None:
            self.link.share_buckets()

    def forget_gradients(self) -> None:
        """Forget the gradients of the last backward pass, after a step or after they were set to zero."""
        if self.link is not None:
            self.link.guard.clear()

    def stats(self) -> Stats:
        """Return the statistics of the link."""
        return Stats() if self.link is None else self.link.stats()

    # State

    def hook_states(self, gather: bool) -> dict[Kind, Any]:
        """Return the states of the hooks of this rank or of all ranks."""
        return checkpoint.hook_states(self.link, gather, self.waiting)

    def new_hooks(self, saved: Mapping[Kind, Any]) -> dict[Kind, Hook] | None:
        """Return hooks with saved states for :meth:`load`; None if there is no link."""
        return None if self.link is None else checkpoint.new_hooks(self.link, saved)

    def load(self, saved: dict[Kind, Any], hooks: dict[Kind, Hook] | None) -> None:
        """Go on from saved states, with the hooks that :meth:`new_hooks` made of them."""
        if self.link is None or hooks is None:
            self.waiting = saved
            return
        self.link.hooks = hooks
        hooks["gradients"].called |= self._phase.frozen
        self.link.guard.clear()
