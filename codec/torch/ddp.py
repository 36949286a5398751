"""Hooks for DistributedDataParallel: how they are made, and how torch calls them."""

# no `from __future__ import annotations`: torch looks at the hook's annotations

from typing import Any

import torch
import torch.distributed as dist

from codec import ArgumentError
from codec.arguments import whole
from codec.optimizers.from_torch import check_known, unwrapped
from codec.specs import Lossless, Spec
from codec.stateful import CodebookRefresher
from codec.torch.buckets import by_state
from codec.torch.channel import Timeout
from codec.torch.collectives import Algorithm
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
    if by_state(spec):
        check_known(optimizer)
    start_step = whole("start_step", start_step, 0, 1 << 40)
    return Hook(spec, optimizer, feedback, policy, algorithm, refresher, grad_scaler, group, timeout, start_step)


def comm_hook(state: Hook, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # pyright: ignore[reportPrivateImportUsage]
    """Reduce a bucket by a :class:`Hook`, for programs that register hooks as torch does.

    Parameters
    ----------
    state : Hook
        What :func:`ddp_hook` returned.
    bucket : torch.distributed.GradBucket
        From DistributedDataParallel.

    Returns
    -------
    torch.futures.Future
        The reduced bucket.

    Raises
    ------
    ArgumentError
        `state` is not a Hook.

    Examples
    --------
    >>> hook = codec.torch.ddp_hook(codec.Float8())  # doctest: +SKIP
    >>> model.register_comm_hook(state=hook, hook=codec.torch.comm_hook)  # doctest: +SKIP
    """
    if not isinstance(state, Hook):
        raise ArgumentError(
            f"the state of codec.torch.comm_hook is what ddp_hook() returned, not {type(state).__name__}"
        )
    return state(None, bucket)
