"""Warm-up of LocalSteps: ranks average their gradients before each step of the optimizer."""

import weakref
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from codec import Status, view
from codec.specs import Spec
from codec.torch.replicas.fragment import split
from codec.torch.replicas.mean import Problem, Term
from codec.torch.replicas.model import Parameters, parameters_of
from codec.torch.replicas.ranks import Ranks, SkippedStep

BeforeStep = Callable[[torch.optim.Optimizer, tuple[Any, ...]], None]


def listen_before(optimizers: Sequence[torch.optim.Optimizer], call: BeforeStep) -> list[Any]:
    """Call a bound method before each step of an optimizer; return the handles of the hooks.

    The hooks hold a weak reference to the method, so that its object can be freed; the hooks then do nothing.
    """
    method = weakref.WeakMethod(call)

    def before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (alive := method()) is not None:
            alive(optimizer, (*args, *kwargs.values()))

    return [each.register_step_pre_hook(before) for each in optimizers]


def listen_after(optimizers: Sequence[torch.optim.Optimizer], call: Callable[[], None]) -> list[Any]:
    """Call a bound method after each step of an optimizer, as :func:`listen_before` does before it."""
    method = weakref.WeakMethod(call)

    def after(*_: Any) -> None:
        if (alive := method()) is not None:
            alive()

    return [each.register_step_post_hook(after) for each in optimizers]


class Warmup:
    """Averages the gradients of each optimizer before its step.

    All ranks average the gradients of the same optimizer at the same time. A rank whose GradScaler has skipped the step
    of an optimizer is then already at the next one, or at the end of the step. All ranks then skip the step of the
    optimizer with the lowest number at which a rank is.

    Parameters
    ----------
    parameters : dict of str to Parameter
        Synchronized parameters by name.
    optimizers : sequence of Optimizer
        Their optimizers.
    spec : Spec
        Codec of the gradients.
    """

    def __init__(self, parameters: Parameters, optimizers: Sequence[torch.optim.Optimizer], spec: Spec) -> None:
        self._parameters, self._optimizers, self._spec = parameters, optimizers, spec
        self._averaged, self._skipped = set[int](), set[int]()  # numbers of optimizers in the current step

    def before_step(self, ranks: Ranks, step: int, optimizer: torch.optim.Optimizer, arguments: Sequence[Any]) -> None:
        """Average the gradients of an optimizer, or set them to None if a rank has skipped its step.

        Parameters
        ----------
        ranks : Ranks
            The ranks.
        step : int
            Number of steps so far.
        optimizer : Optimizer
            One of the optimizers.
        arguments : sequence
            Arguments of its method `step`.

        Raises
        ------
        ArgumentError
            The gradients cannot be averaged: see :func:`average_gradients`.
        PeerError
            Another rank has raised one of these errors, or is lost. Gradients are unchanged.
        """
        turn = next(i for i, each in enumerate(self._optimizers) if each is optimizer)
        mine = set(parameters_of(optimizer))
        some = {name: p for name, p in self._parameters.items() if p in mine}
        problem = problem_of(optimizer, arguments)
        while turn not in self._skipped:
            try:
                average_gradients(some, ranks, self._spec, problem, step, turn)
            except SkippedStep as e:
                self._skipped.add(e.turn)
            else:
                self._averaged.add(turn)
                return
        if problem is None:  # otherwise this rank's optimizer skips the step itself, and the gradients stay
            for p in some.values():
                p.grad = None

    def end_step(self, ranks: Ranks, step: int) -> None:
        """Wait for the ranks that average gradients of an optimizer whose step this rank has skipped."""
        end = len(self._optimizers)
        absent = Problem("the optimizer has taken no step", skipped=True)
        while len(self._averaged | self._skipped) < end and end not in self._skipped:
            try:
                average_gradients({}, ranks, self._spec, absent, step, end)
            except SkippedStep as e:
                self._skipped.add(e.turn)
        self._averaged.clear()
        self._skipped.clear()


def problem_of(optimizer: torch.optim.Optimizer, arguments: Sequence[Any]) -> Problem | None:
    """Return the reason why gradients cannot be averaged before a step of an optimizer; None if they can be averaged.

    A GradScaler calls the step of a fused optimizer even if gradients overflowed. The gradients are then still scaled,
    unless the program called ``unscale_``.
    """
    if any(callable(x) for x in arguments):
        return Problem(
            "optimizer.step(closure) cannot be used with warmup=, which averages gradients before step(): pass warmup=0"
        )
    overflow = getattr(optimizer, "found_inf", None)
    if overflow is not None and bool(overflow):
        return Problem("gradients overflowed", skipped=True)
    if getattr(optimizer, "grad_scale", None) is not None:
        return Problem("the gradients are scaled by a GradScaler: call scaler.unscale_(optimizer) before scaler.step()")
    return None


@torch.no_grad()
def average_gradients(
    parameters: Parameters, ranks: Ranks, spec: Spec, problem: Problem | None, step: int = 0, turn: int = 0
) -> None:
    """Replace the gradients by their means over all ranks.

    A gradient that is None counts as zeros. It stays None if the mean is zero everywhere.

    Parameters
    ----------
    parameters : dict of str to Parameter
        Parameters by name.
    ranks : Ranks
        The ranks.
    spec : Spec
        Codec of the gradients.
    problem : Problem or None
        Reason why this rank cannot take part.
    step : int
        Number of steps so far, which is the number of the random stream that the codec rounds with.
    turn : int
        Number of the optimizer.

    Raises
    ------
    ArgumentError
        `problem` is not None; or a gradient is sparse, or holds NaN or Inf.
    PeerError
        Another rank has raised one of these errors, or is lost. Gradients are unchanged.
    SkippedStep
        A rank has skipped the step. Gradients are unchanged.
    """
    shapes = {name: tuple(p.shape) for name, p in parameters.items()}
    device = next(iter(parameters.values())).device if parameters else None
    flat = torch.zeros(sum(map(prod, shapes.values())), dtype=torch.float32, device=device)
    parts = split(flat, shapes.values())
    if problem is None:
        problem = _gather(parameters, parts)
    terms = [] if problem else [Term(view(flat, segments=shapes), spec, stream=step)]
    ranks.mean(terms, problem, f"gradients of optimizer {turn} in step {step}", turn)
    for p, part in zip(parameters.values(), parts, strict=True):
        if p.grad is not None:
            p.grad.copy_(part)
        elif bool(part.any()):
            p.grad = part.to(p.dtype, copy=True)


def _gather(parameters: Parameters, parts: Sequence[torch.Tensor]) -> Problem | None:
    """Copy gradients to the parts of a flat tensor; return the first problem with a gradient, or None."""
    for (name, p), part in zip(parameters.items(), parts, strict=True):
        if p.grad is None:
            continue
        if p.grad.layout != torch.strided:
            return Problem(f"the gradient of {name!r} is sparse: warmup= needs dense gradients")
        part.copy_(p.grad)
        if not (bool(part.sum().isfinite()) or bool(part.isfinite().all())):
            return Problem(f"the gradient of {name!r} holds NaN or Inf: no gradient was changed", Status.NONFINITE)
    return None
