"""Warm-up of LocalSteps: ranks average their gradients before each step of the optimizer."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from codec import Status, view
from codec.specs import Spec
from codec.torch.local_steps.model import Parameters, parts_of
from codec.torch.local_steps.ranks import Problem, Ranks, SkippedStep

BeforeStep = Callable[[torch.optim.Optimizer, tuple[Any, ...]], None]


def listen(optimizer: torch.optim.Optimizer, call: BeforeStep) -> Any:
    """Call a bound method before each step of an optimizer; return the hook's handle.

    The hook holds a weak reference to the method, so that its object can be freed; the hook then does nothing.
    """
    method = weakref.WeakMethod(call)

    def before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (alive := method()) is not None:
            alive(optimizer, (*args, *kwargs.values()))

    return optimizer.register_step_pre_hook(before)


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
    parameters: Parameters, ranks: Ranks, spec: Spec, problem: Problem | None, stream: int = 0
) -> None:
    """Replace the gradients by their means over all ranks. If another rank skips this step, set them to None.

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
    stream : int
        Number of the random stream that the codec rounds with.

    Raises
    ------
    ArgumentError
        `problem` is not None; or a gradient is sparse, or holds NaN or Inf.
    PeerError
        Another rank has raised one of these errors, or is lost. Gradients are unchanged.
    """
    sizes = [p.numel() for p in parameters.values()]
    flat = torch.zeros(sum(sizes), dtype=torch.float32, device=next(iter(parameters.values())).device)
    shapes = {name: tuple(p.shape) for name, p in parameters.items()}
    parts = [part.view(p.shape) for part, p in zip(parts_of(flat, sizes), parameters.values(), strict=True)]
    if problem is None:
        problem = _gather(parameters, parts)
    try:
        ranks.mean(view(flat, segments=shapes), spec, problem, stream=stream)
    except SkippedStep:
        if problem is None:  # otherwise this rank's optimizer skips the step itself, and the gradients stay
            for p in parameters.values():
                p.grad = None
        return
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
