"""Hooks for DistributedDataParallel: how they are made, and how torch calls them."""

# no `from __future__ import annotations`: torch looks at the hook's annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from codec import ArgumentError, SpecError
from codec.arguments import shown, whole
from codec.optimizers.from_torch import check_known, unwrapped
from codec.specs import Lossless, Spec
from codec.stateful import CodebookRefresher
from codec.torch import lifetime
from codec.torch.buckets import needs_optimizer
from codec.torch.connection import Timeout
from codec.torch.execution import Algorithm
from codec.torch.hook import Hook, check
from codec.torch.policy import Policy, default_policy


def ddp_hook(
    spec: Spec = Lossless(),  # noqa: B008 - it cannot change
    *,
    optimizer: Any = None,
    feedback: bool | None = None,
    policy: Policy = default_policy,
    algorithm: Algorithm = "auto",
    refresher: CodebookRefresher | None = None,
    grad_scaler: Any = None,
    group: Any = None,
    timeout: Timeout | None = None,
    start_step: int = 0,
) -> Hook:
    """Make a communication hook that sends DistributedDataParallel's gradients as frames.

    Buckets are reduced one after the other by a thread of their own, over connections of their own, while backward goes
    on. All ranks get the same bits. After an error on any rank all of them raise, and the residuals of error feedback
    are as before the step. Gradients that frames cannot carry, float64 and sparse ones, are sent uncompressed.

    Parameters
    ----------
    spec : Spec
        How gradients are encoded; lossless if left out.
    optimizer : torch.optim.Optimizer, optional
        The optimizer that :class:`codec.Truncate` drops bits by: its step tells how many bits of a gradient matter
        (:func:`codec.optimizers.from_optimizer`). Optimizers that Accelerate or Lightning have wrapped are unwrapped.
    feedback : bool, optional
        Error feedback: what frames lose is added to the next step's gradients, on each rank and once more where sums
        are encoded. Left out: for :class:`codec.Sign`, which does not converge well without, and
        :class:`codec.Truncate` with the guard that is meant for it. It converges for codecs that are contractions
        (:attr:`codec.Spec.contraction`).
    policy : callable
        policy(name, parameter) returns the spec of a parameter, or None for `spec`. It is asked in every step, on all
        ranks, which must answer alike. Names are without what wrappers such as torch.compile add. Left out:
        :func:`default_policy`.
    algorithm : str
        As for :func:`all_reduce`.
    refresher : CodebookRefresher, optional
        For :class:`codec.Lossless` and :class:`codec.Truncate`, of the same spec: frames name codebooks that all ranks
        make of what all of them send, instead of bringing their own along. Counts are summed behind the buckets of a
        step in which it is due; it is part of the state. Ranks that know other codebooks, since one has joined, begin
        anew together. Left out: gradients of different layers are smaller with codebooks of their own, and a refresher
        then only finds that none pays.
    grad_scaler : torch.amp.GradScaler, optional
        If gradients are scaled. NaN and Inf are no error then: all ranks get NaN, all scalers skip the step, and
        residuals stay as before. Truncate takes the scale from it.
    group : ProcessGroup, optional
        Whose ranks; left out: the model's.
    timeout : float or timedelta, optional
        Seconds that a rank may keep others waiting; left out: the group's.
    start_step : int
        Send all gradients lossless in so many steps first, as a warm-up.

    Returns
    -------
    Hook
        With ``register(model)``, ``set_spec()``, ``state_dict()``, ``load_state_dict()``, ``reshard()`` and
        ``stats()``.

    Raises
    ------
    ArgumentError, SpecError
        The arguments do not go together.

    Examples
    --------
    >>> model = DistributedDataParallel(net)  # doctest: +SKIP
    >>> hook = codec.torch.ddp_hook(codec.Truncate(), optimizer=optimizer).register(model)  # doctest: +SKIP
    """
    optimizer = unwrapped(optimizer)
    check(spec, optimizer, feedback, algorithm, refresher)
    if needs_optimizer(spec):
        check_known(optimizer)
    start_step = whole("start_step", start_step, 0, 1 << 40)
    return Hook(spec, optimizer, feedback, policy, algorithm, refresher, grad_scaler, group, timeout, start_step)


# Hooks that comm_hook has made, by the model whose gradients they send.
_hooks: "weakref.WeakKeyDictionary[DistributedDataParallel, Hook]" = weakref.WeakKeyDictionary()


def comm_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # pyright: ignore[reportPrivateImportUsage]
    """Reduce a bucket, in the form ``hook(state, bucket)`` of torch's own communication hooks.

    Parameters
    ----------
    state : Hook, Spec or None
        Hook that :func:`ddp_hook` returned; or a spec for ``ddp_hook(spec)``; or None for ``ddp_hook()``, which is
        lossless. Pass a hook if it needs other arguments, such as ``optimizer=`` for :class:`codec.Truncate`, or if its
        statistics or its state for checkpoints are wanted.
    bucket : torch.distributed.GradBucket
        Bucket of DistributedDataParallel.

    Returns
    -------
    torch.futures.Future
        Tensor of the reduced bucket: the mean over all ranks.

    Raises
    ------
    ArgumentError
        `state` is something else, or a spec that needs other arguments of :func:`ddp_hook`.

    Examples
    --------
    >>> model.register_comm_hook(codec.Float8(), codec.torch.comm_hook)  # doctest: +SKIP
    >>> hook = codec.torch.ddp_hook(codec.Truncate(), optimizer=optimizer)  # doctest: +SKIP
    >>> model.register_comm_hook(hook, codec.torch.comm_hook)  # doctest: +SKIP
    """
    hook = state if isinstance(state, Hook) else _hook_of(state, bucket)
    return hook(None, bucket)


def _hook_of(state: Any, bucket: Any) -> Hook:
    """Return the hook of the model that a bucket belongs to; the first bucket of a model makes it."""
    lifetime.check_bucket(bucket)
    parameter = bucket.parameters()[0]
    for hook in _hooks.values():
        if parameter in hook.plan.names:
            return hook
    try:
        hook = ddp_hook() if state is None else ddp_hook(state)
    except (ArgumentError, SpecError) as e:
        raise ArgumentError(
            f"the state of codec.torch.comm_hook must be a hook that ddp_hook() returned, a Spec or None, got "
            f"{shown(state)}: {e}"
        ) from e
    model = lifetime.model_with(parameter, comm_hook)
    hook.serve(model)
    _hooks[model] = hook
    return hook
