"""Average the gradients and momenta of OneBitAdam over ranks; with one rank, return this rank's own."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist

from codec import ArgumentError, PeerError, StateError, Status
from codec.specs import Spec
from codec.torch.ddp.hook import Hook
from codec.torch.ddp.stats import HookStats
from codec.torch.one_bit_adam import arithmetic, checkpoint, parameters
from codec.torch.one_bit_adam.backward import Backward
from codec.torch.one_bit_adam.checkpoint import HookStates
from codec.torch.one_bit_adam.link import AdamLink, AdamSettings
from codec.torch.one_bit_adam.model import Model, model_of
from codec.torch.one_bit_adam.phase import AdamPhase, Unfit, total
from codec.torch.one_bit_adam.schedule import Kind
from codec.torch.one_bit_adam.sharded import WHOLE, Shards
from codec.torch.one_bit_adam.steps import AdamSteps, Tensors


class Averager:
    """Averages the gradients and momenta of an optimizer over ranks.

    Parameters
    ----------
    optimizer : torch.optim.Adam
        The optimizer.
    phase : AdamPhase
        Phase of the run, which determines the kind of tensors that the next step sends.
    steps : AdamSteps
        Arithmetic that computes the momenta to send.
    warmup, spec : Spec
        Codecs of gradients and of momenta.
    """

    def __init__(
        self, optimizer: torch.optim.Adam, phase: AdamPhase, steps: AdamSteps, warmup: Spec, spec: Spec
    ) -> None:
        self.link: AdamLink | None = None
        self.waiting = HookStates()  # loaded states of hooks, stored until a link is created
        self.settings = AdamSettings(
            warmup, spec, self._transform, parameters.as_adam(optimizer)
        )  # defaults of `register`
        self._optimizer, self._phase, self._steps = optimizer, phase, steps
        self._nonfinite = False  # True if a gradient in any shard of this replica holds NaN or Inf
        self._interrupted = False  # True if an error has interrupted a rank with a shard of this replica
        self._reported = False  # True if the other ranks have received the error that interrupted this rank
        self._finishing = False  # True while finish() sends the momenta of local steps

    # Connection

    def connect(self, model: Model, group: Any, settings: AdamSettings) -> None:
        """Create the link to the other ranks, and move the residuals of an earlier link to the new one."""
        group = model.group(group)
        link = AdamLink(settings, model, group, lambda: self._phase.kind, self._steps.moves)
        waiting = self.waiting
        if self.link is not None:
            waiting = checkpoint.moved(self.link, group)
        link.hooks = checkpoint.new_hooks(link, waiting)
        link.attach()
        link.hooks["gradients"].called |= self._phase.frozen
        self.link, self.waiting = link, HookStates()

    def _connected(self) -> AdamLink | None:
        """Return the link to the other ranks. Create it if no model was registered; extend it to new parameters."""
        named = parameters.named(self._optimizer)
        if self.link is None and dist.is_available() and dist.is_initialized():
            self.connect(model_of(named), None, self.settings)
        elif self.link is not None and any(self.link.model.lacks(p) for _, p in named):
            self.connect(self.link.model.extended(named), self.link.group, self.link.settings)
        return self.link

    def check_new(self) -> None:
        """Check the parameters that were added to the optimizer.

        Raises
        ------
        ArgumentError
            The registered module does not have one of these parameters.
        StateError
            Second moments are frozen.
        """
        if self._phase.frozen:
            raise StateError(
                "parameters cannot be added after the freeze of second moments, since those of new parameters are 0 "
                "and they would not move: add parameters before the freeze, or create another optimizer for them"
            )
        if self.link is not None:
            self.link.model.extended(parameters.named(self._optimizer))

    # Messages

    def _transform(self, buffer: torch.Tensor, gradients: list[tuple[torch.nn.Parameter, torch.Tensor]]) -> str:
        """Check the gradients of a bucket, and in steps that send momenta, replace them by momenta.

        The hooks call this as their ``transform=``, before they encode the bucket.

        Returns
        -------
        str
            Kind of the tensors in the bucket, number of the step, and number of local steps since the last
            synchronization. All of them must be the same on all ranks.
        """
        self._phase.check_complete()
        if self._interrupted:
            raise PeerError("an error has interrupted a step on a rank that holds other shards of the model")
        apart = f", {self._steps.n_local} local" if self._steps.n_local else ""
        step = f"step {self._phase.steps + 1}{apart}"
        if self._finishing:
            for p, gradient in gradients:
                self._steps.unsent(p, gradient)
            return f"finish, {step}"
        if buffer.is_sparse:
            raise ArgumentError(
                "OneBitAdam does not support sparse gradients: use dense ones, such as torch.nn.Embedding(sparse=False)"
            )
        if self._nonfinite or not arithmetic.is_finite(buffer):
            raise ArgumentError("a gradient holds NaN or Inf: the step is refused on all ranks", Status.NONFINITE)
        if self._phase.kind == "gradients":
            return f"gradients, {step}"
        self._replace(gradients, 1.0 if self.link is None else self.link.settings.scale)
        return f"momenta, {step}"

    def _check_complete(self, link: AdamLink | None, kind: Kind) -> None:
        """Raise StateError if an error has interrupted this rank.

        Before a local step, report the error once, in the collective by which the other ranks synchronize next. So they
        do not wait for this rank, whose steps all remain local.
        """
        if self._phase.updating and not self._reported and link is not None and kind == "local":
            self._reported = True
            if link.model.shards is not None:
                self.shards.cancel()
            else:
                link.reduce("momenta", {})  # _transform() raises the error
        self._phase.check_complete()

    def _replace(self, gradients: list[tuple[torch.nn.Parameter, torch.Tensor]], scale: float) -> None:
        """Replace gradients, which a GradScaler has scaled by `scale`, by the momenta that this rank sends."""
        groups = parameters.groups(self._optimizer)
        for p, gradient in gradients:
            if p in groups:  # skip parameters that the optimizer lacks: they required no gradient at registration
                self._steps.message(p, gradient, groups[p], scale)

    def _local(self, kind: Kind, gradients: Tensors) -> Tensors:
        """Return the gradients, or the momenta computed from them, of parameters that ranks do not average.

        Raises
        ------
        ArgumentError
            A gradient holds NaN or Inf.
        """
        if kind == "local":
            return gradients
        if not all(map(arithmetic.is_finite, gradients.values())):
            raise ArgumentError(
                "a gradient holds NaN or Inf: the parameters of this rank are unchanged", Status.NONFINITE
            )
        if kind == "gradients":
            return gradients
        found = {p: g.clone() for p, g in gradients.items()}
        self._replace([(cast(torch.nn.Parameter, p), g) for p, g in found.items()], 1.0)
        return found

    # Means

    def received(self, kind: Kind) -> Tensors:
        """Return the mean gradient or momentum of each parameter that a step updates.

        Which parameters are updated depends on the means that were received, never on this rank's own gradients, so
        that all ranks update the same parameters. In local steps, return the gradients of this rank.
        """
        link = self._connected()
        if link is None or link.backward is not None or kind == "local":
            self._check_complete(link, kind)  # otherwise _transform() raises the error, so that all ranks receive it
        gradients = {p: g for p, g in parameters.gradients(self._optimizer).items() if self._steps.moves(p)}
        if link is None:
            found = self._local(kind, gradients)
        elif link.backward is not None:
            found = self._after_backward(link, link.backward, kind, gradients)
        elif kind == "local":
            factor = link.settings.clip_factor(gradients.values(), shards=link.shards)
            found = {p: g * factor for p, g in gradients.items()} if factor < 1 else gradients
        else:
            with link.before_buckets(kind):
                if link.model.shards is not None:
                    nonfinite = not all(map(arithmetic.is_finite, gradients.values()))
                    self._nonfinite, self._interrupted = link.shards.any([nonfinite, self._phase.updating])
            found = link.reduce(kind, gradients)
            if kind == "gradients":  # skip parameters that no rank has ever used, as torch.optim.Adam does
                new = [p for p in link.model.names if p in found and not self._optimizer.state.get(p)]
                used = link.shards.any([bool(found[p].any()) for p in new])
                for p in (p for p, is_used in zip(new, used, strict=True) if not is_used):
                    del found[p]
        if kind == "momenta":  # skip parameters without second moments
            found = {p: x for p, x in found.items() if self._optimizer.state.get(p)}
        return {p: x for p, x in found.items() if self._steps.moves(p)}

    def _after_backward(self, link: AdamLink, backward: Backward, kind: Kind, gradients: Tensors) -> Tensors:
        """Return the means that a backward pass has computed, and the tensors of parameters outside of the model.

        Raises
        ------
        StateError
            The gradients of the model were not averaged, or were changed after the backward pass.
        """
        mine = {p: g for p, g in gradients.items() if p in link.model.names}
        if (mine or kind != "gradients") and not self._is_blank(gradients):
            backward.guard.check_unchanged(link.settings.grad_scaler is not None)
        left = [] if self._is_blank(gradients) else [p for p in mine if p not in backward.reduced]
        if left:
            names = ", ".join(link.model.names[cast(torch.nn.Parameter, p)] for p in left[:5])
            raise StateError(
                f"the DistributedDataParallel does not average {names}, which required no gradient when the model was "
                "wrapped: create a new DistributedDataParallel after requires_grad_(True)"
            )
        others = {p: g for p, g in gradients.items() if p not in link.model.names}
        return mine | self._local(kind, others)

    def _is_blank(self, gradients: Tensors) -> bool:
        """Return True if all gradients and learning rates are 0 before the first step.

        torch.distributed.checkpoint takes such a step to make an optimizer allocate its state.
        """
        optimizer = self._optimizer
        unused = not optimizer.state and all(not group["lr"] for group in optimizer.param_groups)
        return unused and not self.shards.any([any(bool(g.any()) for g in gradients.values())])[0]

    def starts(self, received: Tensors) -> bool:
        """Return True if a step only allocates the state: it is the first one, with learning rates and means of 0."""
        return not self._phase.steps and self._is_blank(received)

    @contextmanager
    def updating(self) -> Generator[None]:
        """Return a context manager for the update of parameters and state after the ranks have agreed on a step.

        If its body raises, this rank can take no further steps until it loads a state, and ranks with other shards of
        the model do not wait for it.
        """
        self._phase.updating = True
        try:
            yield
        except BaseException:
            self.shards.cancel()
            raise
        self._phase.updating = False

    def finish(self) -> Tensors:
        """Return the means over ranks of the momenta of local steps since the last synchronization."""
        found: Tensors = {}
        if (link := self._connected()) is None:
            self._phase.check_complete()
        else:
            self._finishing = True
            try:
                found = link.reduce("momenta", {})
            finally:
                self._finishing = False
        for p in self._steps.apart - found.keys():
            self._steps.unsent(p, found.setdefault(p, torch.empty_like(p)))
        return found

    @property
    def shards(self) -> Shards:
        """Ranks that hold the shards of this replica; this rank alone if parameters are not sharded."""
        return WHOLE if self.link is None else self.link.shards

    def second_moments(self) -> float:
        """Return the sum of the bias-corrected second moments of all parameters."""
        return self.shards.total(total(parameters.second_moments(self._optimizer)))

    def freeze(self) -> Unfit:
        """Freeze the second moments; return the parameters that they do not suit."""
        self._steps.freeze()
        self._phase.frozen = True
        moved = self.shards.any(parameters.have_moments(self._optimizer))
        tiny = [] if self._steps.bounded else self.shards.any(parameters.have_tiny_moments(self._optimizer))
        return Unfit([i for i, is_moved in enumerate(moved) if not is_moved], [i for i, x in enumerate(tiny) if x])

    def is_finite(self, gradients: Tensors) -> bool:
        """Return True if no gradient of this replica holds NaN or Inf."""
        return not self.shards.any([not all(map(arithmetic.is_finite, gradients.values()))])[0]

    def agree(self, decision: bool) -> bool:
        """Return True on all ranks if `decision` is True on any rank.

        Ranks agree on decisions that are computed from sums, because the rounding of sums can differ between machines.
        """
        return decision if self.link is None else self.link.agree(decision)

    def share_buckets(self, kind: Kind) -> None:
        """Store the buckets of the last step, of kind `kind`, in the states of both hooks, for checkpoints."""
        if self.link is not None:
            self.link.share_buckets(kind)

    def forget_gradients(self) -> None:
        """Drop the record of the last backward pass, after a step or after gradients were reset."""
        if self.link is not None and self.link.backward is not None:
            self.link.backward.guard.clear()

    def stats(self) -> HookStats:
        """Return the statistics of both hooks; empty ones if there is no link."""
        return HookStats() if self.link is None else self.link.stats()

    # State

    def hook_states(self, gather: bool) -> HookStates:
        """Return the states of the hooks of this rank, or of all ranks if `gather` is True."""
        return checkpoint.hook_states(self.link, gather, self.waiting)

    def new_hooks(self, saved: HookStates) -> dict[Kind, Hook] | None:
        """Create hooks with saved states, for :meth:`load`; return None if there is no link."""
        return None if self.link is None else checkpoint.new_hooks(self.link, saved)

    def load(self, saved: HookStates, hooks: dict[Kind, Hook] | None) -> None:
        """Replace the hooks by those that :meth:`new_hooks` created from `saved`; without a link, store `saved`."""
        self._interrupted = self._reported = False
        if self.link is None or hooks is None:
            self.waiting = saved
            return
        self.link.hooks = hooks
        hooks["gradients"].called |= self._phase.frozen
        self.forget_gradients()
