"""Warm-up of LocalSteps: ranks average their gradients before each step of the optimizer."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from codec import ArgumentError, CodecError, PeerError, Status, view
from codec.specs import Spec
from codec.torch._compat import local
from codec.torch.local_steps.replica import Replica
from codec.torch.replicas.changes import with_checksum
from codec.torch.replicas.fragment import split
from codec.torch.replicas.holders import Holders, like
from codec.torch.replicas.model import Parameters, parameters_of
from codec.torch.replicas.ranks import MeanTerm, Ranks
from codec.torch.replicas.windows import Region

_Register = Callable[[Callable[..., None]], Any]


class SkippedStep(Exception):
    """Reason why a rank does not take part in a mean of gradients: it has skipped the step of the optimizer."""


def listen(register: _Register, call: Callable[[torch.optim.Optimizer, tuple[Any, ...]], None]) -> Any:
    """Register a bound method as a hook of an optimizer's steps, and return the handle of the hook.

    `register` is a method of the optimizer. The hook holds a weak reference to the method, so that its object can be
    freed; the hook then does nothing.
    """
    method = weakref.WeakMethod(call)

    def hook(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (alive := method()) is not None:
            alive(optimizer, (*args, *kwargs.values()))

    return register(hook)


class Turn(NamedTuple):
    """Place of a mean of gradients in the warm-up."""

    step: int  # number of steps so far, which is the number of the random stream that the codec rounds with
    optimizer: int


class Warmup:
    """Averages the gradients of each optimizer before its step.

    All ranks average the gradients of the same optimizer at the same time. A rank whose GradScaler has skipped the step
    of an optimizer is then already at the next one, or at the end of the step. All ranks then skip the step of the
    optimizer with the lowest number at which a rank is.

    Parameters
    ----------
    state : Replica
        Synchronized parameters, their optimizers, and ranks of this site that have the same gradients.
    spec : Spec
        Codec of the gradients.
    """

    def __init__(self, state: Replica, spec: Spec) -> None:
        self._state, self._spec = state, spec
        self._averaged, self._skipped = set[int](), set[int]()  # numbers of optimizers in the current step

    def before_step(self, ranks: Ranks, step: int, optimizer: torch.optim.Optimizer, arguments: Sequence[Any]) -> None:
        """Average the gradients of an optimizer, or set them to None if a rank has skipped its step.

        `arguments` are those of the optimizer's method `step`.

        Raises
        ------
        ArgumentError
            The gradients cannot be averaged: see :func:`error_of` and :func:`_gather`.
        PeerError
            Another rank has raised one of these errors, or is lost. Gradients are unchanged.
        """
        turn = next(i for i, each in enumerate(self._state.optimizers) if each is optimizer)
        mine = set(parameters_of(optimizer))
        some = {name: p for name, p in self._state.parameters.items() if p in mine}
        error = error_of(optimizer, arguments)
        while turn not in self._skipped:
            if self._average(ranks, some, step, turn, error):
                self._averaged.add(turn)
                return
        if error is None:  # otherwise this rank's optimizer skips the step itself, and the gradients stay
            for p in some.values():
                p.grad = None

    def end_step(self, ranks: Ranks, step: int) -> None:
        """Wait for the ranks that average gradients of an optimizer whose step this rank has skipped."""
        end = len(self._state.optimizers)
        while len(self._averaged | self._skipped) < end and end not in self._skipped:
            self._average(ranks, {}, step, end, SkippedStep("the optimizer has taken no step"))
        self._averaged.clear()
        self._skipped.clear()

    def _average(
        self, ranks: Ranks, parameters: Parameters, step: int, turn: int, error: ArgumentError | SkippedStep | None
    ) -> bool:
        """Average gradients; if a rank has skipped the step, and no rank has an error, return False on all ranks.

        The cause of a failed collective may be a skipped step, although another rank has an error. So the ranks meet
        again, and those that have an error report it.
        """
        try:
            average_gradients(parameters, self._state.holders, ranks, self._spec, error, Turn(step, turn))
        except (CodecError, SkippedStep) as e:
            if isinstance(e, PeerError) and not ranks.connected:
                raise
            own = None if isinstance(e, PeerError | SkippedStep) else e
            skips = int(isinstance(e, SkippedStep))
            reports = ranks.agreed(ranks.call, {}, [turn, skips], error=own)
            turns = [theirs for theirs, _ in reports]
            if len(set(turns)) == 1 and not any(skipped for _, skipped in reports):
                raise
            self._skipped.add(min(turns))
            return False
        return True


def error_of(optimizer: torch.optim.Optimizer, arguments: Sequence[Any]) -> ArgumentError | SkippedStep | None:
    """Return the reason why gradients cannot be averaged before a step of an optimizer; None if they can be averaged.

    A GradScaler calls the step of a fused optimizer even if gradients overflowed. The gradients are then still scaled,
    unless the program called ``unscale_``.
    """
    if any(callable(x) for x in arguments):
        return ArgumentError(
            "optimizer.step(closure) cannot be used with warmup=, which averages gradients before step(): pass warmup=0"
        )
    overflow = getattr(optimizer, "found_inf", None)
    if overflow is not None and bool(overflow):
        return SkippedStep("gradients overflowed")
    if getattr(optimizer, "grad_scale", None) is not None:
        return ArgumentError(
            "the gradients are scaled by a GradScaler: call scaler.unscale_(optimizer) before scaler.step()"
        )
    return None


@torch.no_grad()
def average_gradients(
    parameters: Parameters, holders: Holders, ranks: Ranks, spec: Spec, error: Exception | None, item: Turn
) -> None:
    """Replace the gradients of an optimizer by their means over all sites, unless this rank has an `error`.

    A gradient that is None counts as zeros. It stays None if the mean is zero everywhere. After an error gradients are
    unchanged.
    """
    ordered = [(held, [name for name in parameters if name in held.names]) for held in holders.groups]
    shapes = {name: tuple(local(parameters[name]).shape) for _, names in ordered for name in names}
    device = next(iter(parameters.values())).device if parameters else None
    flat = torch.zeros(sum(map(prod, shapes.values())), dtype=torch.float32, device=device)
    parts = dict(zip(shapes, split(flat, shapes.values()), strict=True))
    error = error or _gather(parameters, parts)
    regions: list[Region] = []
    end = 0
    for held, names in ordered:
        begin, end = end, end + sum(parts[name].numel() for name in names)
        region = Region(begin, end, held.holders)
        regions.append(region if holders.flat else with_checksum(flat, region))
    terms = [] if error else [MeanTerm(view(flat, segments=shapes), spec, stream=item.step, regions=regions)]
    ranks.wait(ranks.begin(terms, error, f"gradients of optimizer {item.optimizer} in step {item.step}"))
    for name, part in parts.items():
        p = parameters[name]
        if p.grad is not None:
            local(p.grad).copy_(part)
        elif bool(part.any()):
            p.grad = like(part.to(p.dtype, copy=True), p)


def _gather(parameters: Parameters, parts: Mapping[str, torch.Tensor]) -> ArgumentError | None:
    """Copy gradients to the parts of a flat tensor; return the error of a gradient that cannot be sent, or None."""
    for name, part in parts.items():
        if (grad := parameters[name].grad) is None:
            continue
        if local(grad).layout != torch.strided:
            return ArgumentError(f"the gradient of {name!r} is sparse: warmup= needs dense gradients")
        part.copy_(local(grad))
        if not (bool(part.sum().isfinite()) or bool(part.isfinite().all())):
            return ArgumentError(
                f"the gradient of {name!r} holds NaN or Inf: no gradient was changed", Status.NONFINITE
            )
    return None
