"""Check the arguments and the model of a hook, and warn of mistakes that would otherwise stay unnoticed."""

import atexit
import functools
import gc
import logging
import warnings
import weakref
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from codec import ArgumentError, SpecError
from codec.arguments import shown
from codec.specs import BoundSpec, Preset, Sign, Spec, Ternary, check_contraction, require_feedback
from codec.stateful import CodebookRefresher
from codec.torch._compat import comm_hooks, messages_of
from codec.torch.ddp.buckets import PYTHON_REDUCER, Optimizers, needs_optimizer
from codec.torch.ddp.policy import feeds_back
from codec.torch.ddp.reducer import Reducer
from codec.torch.group.levels import proposal
from codec.torch.reduction.arguments import plain_spec
from codec.torch.reduction.table import check_request

logger = logging.getLogger("codec.torch")


class Watched:
    """Hook for which a warning is logged at the end of the process if it was never called, and compressed nothing."""

    def __init__(self) -> None:
        self.called = False
        _hooks.add(self)


_hooks: "weakref.WeakSet[Watched]" = weakref.WeakSet()  # all hooks of this process
_unchecked: "weakref.WeakSet[Reducer]" = weakref.WeakSet()  # reducers of hooks whose optimizer is not known yet


@atexit.register
def _warn_of_unused() -> None:
    for hook in _hooks:
        if not hook.called:
            logger.warning(
                "%r was never called, so that no gradient was compressed: call hook.register(model) with the "
                "DistributedDataParallel. Frameworks may ignore hooks, see docs/guides/frameworks.md",
                hook,
            )


def register(model: DistributedDataParallel, hook: Any) -> None:
    """Register a communication hook to a model that has none.

    Raises
    ------
    ArgumentError
        The model already has a hook, which DistributedDataParallel cannot replace.
    """
    for former, state in comm_hooks(model):
        theirs = f"{state!r} of {former!r}" if isinstance(state, Watched) else repr(former)
        raise ArgumentError(
            f"the model has a communication hook already, {theirs}: to change the codec of that hook, call its "
            "set_spec(); to register another hook, wrap the module in a new DistributedDataParallel"
        )
    try:
        model.register_comm_hook(None, hook)  # pyright: ignore[reportUnknownMemberType]
    except RuntimeError as e:  # the model has one of torch's built-in C++ hooks, which comm_hooks() does not list
        comm_hooks(model).pop()
        raise ArgumentError(
            f"DistributedDataParallel refuses the hook ({str(e).strip()}): wrap the module in a new "
            "DistributedDataParallel"
        ) from e


def check_reducer(model: DistributedDataParallel) -> None:
    """Raise ArgumentError if a model's gradients are reduced by torch.compile's Python reducer."""
    if getattr(model, "_use_python_reducer", False):
        raise ArgumentError(PYTHON_REDUCER)


def check_silent(model: DistributedDataParallel) -> None:
    """Raise ArgumentError if a model sends messages over its own process group, which cannot be replaced."""
    if reason := messages_of(model):
        raise ArgumentError(
            f"the DistributedDataParallel itself uses its process group, since it {reason}: wrap the module in a new "
            "DistributedDataParallel over the new group, and call hook.register()"
        )


def models() -> list[DistributedDataParallel]:
    """Return all DistributedDataParallel objects of this process."""
    return [m for m in gc.get_objects() if issubclass(type(m), DistributedDataParallel)]


def model_of(hook: object, parameter: torch.Tensor) -> DistributedDataParallel:
    """Return the model to which torch's own register_comm_hook registered a hook, or a function that calls the hook.

    Parameters
    ----------
    hook : Hook
        The hook. If it is registered to no model, neither as hook nor as the state of one, `parameter` identifies the
        model.
    parameter : torch.Tensor
        Parameter of the model.

    Raises
    ------
    ArgumentError
        No model or several models match.
    """
    with_hooks = [m for m in models() if comm_hooks(m)]
    mine = [m for m in with_hooks if any(h is hook or s is hook for h, s in comm_hooks(m))]
    mine = mine or [m for m in with_hooks if any(p is parameter for p in m.parameters())]
    if len(mine) != 1:
        raise ArgumentError(
            f"the hook must be registered with one model, but is with {len(mine)}: create a hook for each model by "
            "ddp_hook(), or name the model by hook.serve(model)"
        )
    return mine[0]


def propose_levels(group: Any) -> None:
    """Log once, on rank 0, how to reduce within machines first if torchrun has started several ranks on each."""
    if group.rank() == 0 and (advice := proposal(group)):
        _log_once(advice)


@functools.cache
def _log_once(text: str) -> None:
    logger.info("%s", text)


def warn_of_adam(reducer: Reducer) -> None:
    """Warn if the optimizer of a hook's parameters is a variant of Adam and the codec distorts its second moments.

    If the hook has no ``optimizer=``, the first optimizer that steps one of its parameters is checked. Hooks with a
    transform are not checked, because they may send other tensors than gradients, as OneBitAdam sends momenta.
    """
    if not _distorts(reducer):
        return
    if reducer.optimizers.all:
        for optimizer in reducer.optimizers.all:
            _warn_if_adam(reducer.plan.lossiest, optimizer)
        return
    if not _unchecked:
        _listen()
    _unchecked.add(reducer)


@functools.cache
def _listen() -> None:
    """Register, once, a callback that checks the unchecked hooks before each step of any optimizer.

    The callback stays registered, because it cannot remove itself during an optimizer's step.
    """

    def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for reducer in list(_unchecked):
            if any(p in reducer.plan.names for g in optimizer.param_groups for p in g["params"]):
                _unchecked.discard(reducer)
                if _distorts(reducer):
                    _warn_if_adam(reducer.plan.lossiest, optimizer)

    register_optimizer_step_pre_hook(check)


def _distorts(reducer: Reducer) -> bool:
    """Return True if a hook's codec distorts the squares of gradients, and so the optimizer's second moments."""
    return reducer.transform is None and isinstance(reducer.plan.lossiest, Sign | Ternary)


def _warn_if_adam(spec: Spec, optimizer: torch.optim.Optimizer) -> None:
    if "Adam" in type(optimizer).__name__:
        warnings.warn(
            f"{spec} distorts the second moments that {type(optimizer).__name__} divides by, and more so with error "
            "feedback: use Quantize(4) with Adam, or codec.torch.OneBitAdam (1-bit Adam); this codec suits SGD",
            stacklevel=4,
        )


def check_feedback(feedback: Any) -> None:
    """Raise ArgumentError unless ``feedback=`` of a hook is True, False, None or a decay."""
    if not isinstance(feedback, bool | None) and (type(feedback) not in (int, float) or not 0 < feedback <= 1):
        raise ArgumentError(
            f"feedback must be True, False, None or a decay above 0 and at most 1, got {shown(feedback)}"
        )


def check(
    spec: Spec | Preset,
    optimizers: Optimizers,
    feedback: bool | float | None,
    algorithm: str,
    refresher: CodebookRefresher | None,
) -> Spec:
    """Check that these arguments of :func:`ddp_hook` do not contradict each other; return the spec."""
    if isinstance(spec, BoundSpec):
        raise ArgumentError(
            f"spec must not be bound, since the optimizer's state changes in each step, got {spec!r}: pass "
            f"{spec.spec!r} and optimizer=, a torch optimizer or codec.optimizers.Formula(optimizer, function), with "
            "which the hook binds the spec in each step"
        )
    spec = plain_spec(spec)
    if needs_optimizer(spec):
        if not optimizers.all:
            raise SpecError(f"{spec} needs the state of the optimizer: pass optimizer=")
        optimizers.check_known()
    check_feedback(feedback)
    if feedback:
        check_contraction(spec)
    has_feedback = feeds_back(spec) if feedback is None else bool(feedback)
    if feedback is None and not has_feedback:
        require_feedback(spec, 'use rounding="nearest", or feedback=False to send without error feedback')
    check_request(algorithm, spec, "mean", feedback=has_feedback)
    if refresher is not None and refresher.spec != spec:
        raise ArgumentError(
            f"refresher= has the spec {refresher.spec}, but the hook {spec}: create a CodebookRefresher with the spec "
            "of the hook"
        )
    return spec
