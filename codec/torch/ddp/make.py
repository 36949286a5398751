"""Create hooks for DistributedDataParallel."""

from dataclasses import replace
from typing import Any, Literal, cast

from codec import ArgumentError, CallOptions
from codec._options import settings_of
from codec.advisor.cost_model import link_of
from codec.arguments import shown
from codec.specs import Lossless, Preset, Spec
from codec.stateful import CodebookRefresher
from codec.torch.auto.gradients import GradientChoice
from codec.torch.auto.quality import Auto, auto_of, quality_of
from codec.torch.ddp.buckets import Optimizers
from codec.torch.ddp.hook import Hook
from codec.torch.ddp.lifetime import check, check_feedback
from codec.torch.ddp.policy import Chooser, ParameterPlan, Policy, default_policy, policy_of
from codec.torch.ddp.reducer import Reducer, Transform
from codec.torch.reduction.execution import algorithm_of


def ddp_hook(
    spec: Spec | Preset | Literal["auto"] | Auto = Lossless(),  # noqa: B008 - immutable
    *,
    optimizer: Any = None,
    feedback: bool | float | None = None,
    policy: Policy | Chooser = default_policy,
    refresher: CodebookRefresher | None = None,
    grad_scaler: Any = None,
    group: Any = None,
    transform: Transform | None = None,
    options: CallOptions | None = None,
) -> Hook:
    """Create a communication hook that sends DistributedDataParallel's gradients as frames, and averages them.

    Buckets are reduced in the background during the backward pass, all of them in flight together, over connections
    that the library opens. A step waits for one round trip if there are two ranks, and for two round trips if there are
    more. The averages are bit-identical on all ranks. After an error on any rank, all ranks raise an error, and
    gradients and the residuals of error feedback are as before the step. Gradients of float64 and sparse gradients are
    sent uncompressed.

    Parameters
    ----------
    spec : Spec, str or Auto
        Codec of the gradients, or the name of a preset. Default: lossless. "auto" or :class:`Auto`: the hook measures
        the link. Of the specs that :class:`Auto`'s quality allows, it finds the fastest one, and uses the least lossy
        one that is about as fast. It changes its choice when the link changes, at the same step on all ranks. "auto"
        alone is lossless; on slow links, ``Auto("small")`` is more than twice as fast.
    optimizer : torch.optim.Optimizer, codec.optimizers.Formula, or list of them, optional
        Optimizer of the model; a list if the model has several, such as Muon and AdamW. :class:`codec.Truncate`
        computes from the next step how many bits of each gradient matter (:func:`codec.optimizers.from_optimizer`).
        Each parameter that Truncate encodes must be in exactly one of them. For an optimizer that is not built in, pass
        a :class:`codec.optimizers.Formula`. Wrappers of Accelerate and Lightning are removed.
    feedback : bool or float, optional
        Error feedback: each rank adds the encoding errors of its frames, the residuals, to its gradients of the next
        step. A rank that encodes sums does the same with them. Residuals take 8 bytes per value on each rank; in two
        levels, 8 bytes divided by the number of ranks of a machine. Training converges if the codec is a contraction
        (:attr:`codec.Spec.contraction`). A number below 1, such as 0.95, is the decay of the residuals, by which they
        are multiplied before they are added. Default: True for :class:`codec.Sign` and :class:`codec.TopK`, which
        converge badly without error feedback, and for :class:`codec.Truncate` with ``guard="feedback"``; else False.
    policy : Policy or callable
        Specs of parameters. policy(name, parameter) returns a spec, the name of a preset, or None to let the rules of
        :class:`Policy` decide. The rules return `spec`, except for small and uneven parameters. Default: the rules
        decide for all parameters.
    refresher : CodebookRefresher, optional
        Refresher of codebooks for the same spec, which must be :class:`codec.Lossless` or :class:`codec.Truncate`.
        Frames then refer to a codebook that all ranks have agreed on, instead of each containing its own codebook. In a
        step in which a refresh is due, each rank counts its symbols, and the counts are summed after the last bucket.
        If a rank joins, all ranks drop their codebooks. Default: None, because frames are smaller if the gradients of
        each layer have their own codebook.
    grad_scaler : torch.amp.GradScaler, optional
        GradScaler of the loss, if the training has one. NaN and Inf then raise no error: all ranks receive NaN, all
        scalers skip the step, and residuals stay unchanged. Truncate reads the scale of the gradients from it.
    group : ProcessGroup, DeviceMesh or pair of ProcessGroup, optional
        Ranks over which gradients are averaged, as for :func:`all_reduce`. Default: the group of the model. With
        several ranks a machine, pass a DeviceMesh of two dimensions, between machines and within them.
    transform : callable, optional
        transform(buffer, gradients) changes a bucket of this rank's gradients in place, before residuals are added and
        the bucket is encoded. `buffer` is the bucket as a flat tensor; `gradients` is a list of pairs (parameter,
        gradient), whose gradients are views of `buffer` in the shapes of the parameters. The library calls it without
        autograd, in the thread of the group's collectives, for every bucket of every step. Parameters may be in other
        buckets in the next step. It must change nothing but the buffer, because the step may fail later. If it raises,
        all ranks raise an error. It returns None, or an int or str that must be the same on all ranks, such as the
        number of the step: if ranks return different items, all raise an error before any gradient is sent.
    options : CallOptions, optional
        ``codec.options(algorithm=, timeout=, engine=, threads=)``, as for :func:`all_reduce`. Options of the ``with``
        blocks around the call of ddp_hook apply, too.

    Returns
    -------
    Hook
        Hook; call its ``register(model)``, or pass it to ``model.register_comm_hook(None, hook)``.

    Raises
    ------
    ArgumentError, SpecError
        An argument has a wrong type or value, or arguments contradict each other.

    Examples
    --------
    >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 100))
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> hook = codec.torch.ddp_hook("near", optimizer=optimizer).register(model)
    >>> model(torch.ones(8, 100)).sum().backward()
    >>> hook.stats().steps
    1

    Send this rank's momenta instead of its gradients, as optimizers that compress momenta do.

    >>> momenta = {p: torch.zeros_like(p) for p in model.parameters()}
    >>> def momentum(buffer, gradients):
    ...     for p, gradient in gradients:
    ...         gradient.mul_(0.1).add_(momenta[p], alpha=0.9)
    >>> model = torch.nn.parallel.DistributedDataParallel(model.module)
    >>> hook = codec.torch.ddp_hook(codec.Sign(), transform=momentum).register(model)
    >>> model(torch.ones(8, 100)).sum().backward()  # gradients are now the mean momenta
    """
    optimizers = Optimizers(optimizer)
    settings = settings_of(options)
    if (auto := auto_of(spec)) is None:
        choice, spec = None, check(cast(Spec | Preset, spec), optimizers, feedback, algorithm_of(settings), refresher)
    else:
        choice, spec = _choice(auto, feedback, refresher, settings), Lossless()
    if transform is not None and not callable(transform):  # pyright: ignore[reportUnnecessaryComparison]
        raise ArgumentError(f"transform must be a function of a buffer and a list of gradients, got {shown(transform)}")
    reducer = Reducer(
        ParameterPlan(spec, feedback, policy_of(policy), choice),
        optimizers=optimizers,
        refresher=refresher,
        grad_scaler=grad_scaler,
        transform=transform,
        settings=settings,
    )
    return Hook(reducer, group)


def _choice(
    auto: Auto, feedback: bool | float | None, refresher: CodebookRefresher | None, settings: CallOptions
) -> GradientChoice:
    """Return the GradientChoice of ``ddp_hook("auto")``, among the specs that the other arguments allow."""
    if refresher is not None:
        raise ArgumentError('refresher= has one spec, but "auto" chooses specs: leave one of them out')
    algorithm, floor = algorithm_of(settings), quality_of(auto.quality)
    lossless, *lossy = floor.specs
    specs = lossless, *(s for s in lossy if not feedback or s.contraction)  # residuals of non-contractions diverge
    for each in specs:
        check(each, Optimizers(None), None if each == lossless else feedback, algorithm, None)
    check_feedback(feedback)
    stated = None if auto.link is None else link_of(auto.link)
    options = CallOptions(threads=settings.threads)  # other options do not apply: samples are encoded in host memory
    return GradientChoice(replace(floor, specs=specs), stated, raw=algorithm == "auto", options=options)
