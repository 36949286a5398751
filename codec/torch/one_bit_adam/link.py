"""Connection of an optimizer to other ranks: a communication hook for gradients, and one for momenta."""

import functools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import torch

from codec import ArgumentError, CallOptions, PeerError, SpecError
from codec._c.traits import is_lossless
from codec.arguments import shown
from codec.specs import Spec
from codec.torch._compat import local
from codec.torch.collectives.calls import all_reduce
from codec.torch.ddp import lifetime
from codec.torch.ddp.buckets import Bucket, gradients_in, n_values, needs_optimizer
from codec.torch.ddp.hook import Hook
from codec.torch.ddp.make import ddp_hook
from codec.torch.ddp.policy import Policy
from codec.torch.ddp.reducer import Transform
from codec.torch.ddp.stats import HookStats
from codec.torch.ddp.step import FAILED_ELSEWHERE, OtherGroups
from codec.torch.group.work import Work
from codec.torch.one_bit_adam import arithmetic
from codec.torch.one_bit_adam.backward import Backward
from codec.torch.one_bit_adam.model import Model
from codec.torch.one_bit_adam.schedule import Kind, VarianceSchedule
from codec.torch.one_bit_adam.sharded import WHOLE, Shards
from codec.torch.transport.counters import Counters

# Embeddings and output heads are encoded, too, because all rows of momentum / sqrt(v) have similar magnitudes.
EVEN_POLICY = Policy(uneven=None)
SENT: tuple[Kind, ...] = ("gradients", "momenta")

_BUCKET = 25 << 20  # maximum bytes of a bucket of reduce(); DistributedDataParallel has the same default


@dataclass
class AdamSettings:
    """Arguments of ``OneBitAdam.register``, and the optimizer's specs."""

    warmup: Spec  # codec of gradients
    spec: Spec  # codec of momenta
    transform: Transform  # replaces gradients by momenta before they are sent
    optimizer: torch.optim.Optimizer  # Adam whose state Truncate reads, if `warmup` is Truncate
    policy: Policy = EVEN_POLICY
    grad_scaler: Any = None  # enabled GradScaler; None: gradients are not scaled
    max_grad_norm: float | None = None
    options: CallOptions | None = None

    @property
    def scale(self) -> float:
        """Factor by which the GradScaler has multiplied gradients."""
        return 1.0 if self.grad_scaler is None else self.grad_scaler.get_scale()

    def clip_factor(self, gradients: Iterable[torch.Tensor], scale: float = 1.0, shards: Shards = WHOLE) -> float:
        """Return the factor, at most 1, that clips this rank's gradients, which a GradScaler has scaled by `scale`."""
        if self.max_grad_norm is None:
            return 1.0
        return arithmetic.clip_factor(shards.norm(arithmetic.norm(gradients)), self.max_grad_norm, scale)

    def hook(self, kind: Kind) -> Hook:
        """Create the hook that sends gradients, or the one that sends momenta."""
        spec = self.warmup if kind == "gradients" else self.spec
        return ddp_hook(
            spec,
            optimizer=self.optimizer if kind == "gradients" else None,
            feedback=None if kind == "gradients" else not is_lossless(spec),
            policy=self.policy,
            grad_scaler=self.grad_scaler,
            transform=self.transform,
            options=self.options,
        )


def check_spec(spec: Spec) -> None:
    """Raise SpecError unless a spec is supported for momenta."""
    if needs_optimizer(spec):
        raise SpecError(
            f"spec={spec} needs the state of an optimizer, but spec= encodes momenta: use "
            f"spec=Sign(group_size=1024) and warmup={spec}"
        )
    if not is_lossless(spec) and not spec.contraction:
        raise SpecError(f"{spec} is not a contraction, so that error feedback may diverge: use Sign")


def check_warmup(spec: Spec, group: Mapping[str, Any]) -> None:
    """Raise ArgumentError unless a spec is supported for the gradients of a parameter group in the warm-up."""
    if needs_optimizer(spec) and not arithmetic.corrects_bias(group):
        raise ArgumentError(
            f"warmup={spec} needs bias_correction=True, since it drops bits by the step of torch.optim.Adam: set it, "
            "or use Lossless() or Quantize(4) as warmup="
        )


def check_positive(name: str, value: Any) -> float | None:
    """Return the argument `name`; raise ArgumentError unless it is a positive finite number or None."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (number and isfinite(value) and value > 0):
        raise ArgumentError(f"{name} must be a finite number above 0, or None, got {shown(value)}")
    return value


def check_scaler(grad_scaler: Any, model: Model, schedule: VarianceSchedule | None) -> Any:
    """Return `grad_scaler`, or None if it is disabled and so never scales or skips a step.

    Raises
    ------
    ArgumentError
        `grad_scaler` is no GradScaler, or ranks could skip different steps with it.
    """
    if grad_scaler is None:
        return None
    if not hasattr(grad_scaler, "is_enabled") or not hasattr(grad_scaler, "get_scale"):
        raise ArgumentError(f"grad_scaler must be a torch.amp.GradScaler or None, got {shown(grad_scaler)}")
    if not grad_scaler.is_enabled():
        return None
    if schedule is not None and schedule.max_interval > 1:
        raise ArgumentError(
            "grad_scaler= cannot be used with local steps, since ranks could skip different ones: use "
            "VarianceSchedule(max_interval=1), or bfloat16 without a GradScaler"
        )
    if model.ddp is None:
        raise ArgumentError(
            "grad_scaler= needs a DistributedDataParallel, since otherwise GradScalers of ranks could skip different "
            "steps"
        )
    return grad_scaler


class AdamLink:
    """Sends an optimizer's gradients and momenta over a process group, through one hook for each kind.

    Parameters
    ----------
    settings : AdamSettings
        Codecs and options of the hooks.
    model : Model
        Parameters whose gradients are averaged.
    group : ProcessGroup
        Ranks to average over.
    kind_of_step : callable
        Returns the kind of tensors that the next step sends.
    moves : callable
        Returns True if steps update a given parameter.

    Raises
    ------
    ArgumentError, SpecError
        The settings contradict each other, or do not fit the model.
    """

    def __init__(
        self,
        settings: AdamSettings,
        model: Model,
        group: Any,
        kind_of_step: Callable[[], Kind],
        moves: Callable[[torch.Tensor], bool],
    ) -> None:
        self.settings, self.model, self.group = settings, model, group
        self.backward: Backward | None = None  # hook of the DistributedDataParallel; None: step() averages
        self._kind_of_step, self._moves = kind_of_step, moves
        self.shards = Shards(model.shards, settings.options)
        self._buckets: list[Bucket] = []  # buckets of reduce(), created by its first call
        self.hooks = self.new_hooks()

    def new_hooks(self) -> dict[Kind, Hook]:
        """Create a hook of each kind that serves the model."""
        hooks: dict[Kind, Hook] = {kind: self.settings.hook(kind) for kind in SENT}
        model = self.model
        for hook in hooks.values():
            if model.ddp is not None:
                hook.serve(model.ddp, group=self.group)
            else:
                hook.reducer.check(model.names, self.group)
                hook.reducer.serve(model.names, self.group, model.module)
            if model.shards is not None:
                hook.reducer.state.other_groups = OtherGroups(self.shards.confirm, self.shards.cancel)
        hooks["momenta"].called = True  # no warning if a run ends before the freeze, and never sends momenta
        return hooks

    def attach(self) -> None:
        """Register the communication hook of the DistributedDataParallel, or take over the replicas of HSDP."""
        if self.model.ddp is None:
            self.model.take_replicas()
            return
        settings = self.settings
        clips = settings.max_grad_norm is not None
        self.backward = Backward(
            self.model.ddp,
            lambda kind: self.hooks.get(kind),
            self._kind_of_step,
            self._moves,
            (lambda buffers: settings.clip_factor(buffers, settings.scale)) if clips else None,
        )
        lifetime.register(self.model.ddp, self.backward)

    @contextmanager
    def before_buckets(self, kind: Kind) -> Generator[None]:
        """Return a context manager that cancels the step on all ranks if its body raises.

        Use it around agreements among the shards of this replica before a step, so that other replicas do not wait if
        an agreement fails.
        """
        try:
            yield
        except BaseException:
            self.hooks[kind].reducer.cancel()
            raise

    def reduce(
        self, kind: Kind, tensors: Mapping[torch.Tensor, torch.Tensor | None]
    ) -> dict[torch.Tensor, torch.Tensor]:
        """Average tensors over all ranks, outside of a backward pass; all ranks must call this.

        Parameters
        ----------
        kind : str
            Kind of the hook that sends the tensors. Its transform is applied first.
        tensors : mapping
            Gradients by parameter. A missing entry, or None, counts as zeros.

        Returns
        -------
        dict
            Mean of each parameter of the model.
        """
        hook = self.hooks[kind]
        hook.called = True
        self._buckets = self._buckets or self._make_buckets(hook)
        with self.before_buckets(kind):
            factor = self.settings.clip_factor((g for g in tensors.values() if g is not None), shards=self.shards)
        works: list[Work] = []
        for bucket in self._buckets:
            for p, place in zip(bucket.parameters, bucket.gradients(), strict=True):
                given = tensors.get(p)
                if given is None:
                    place.zero_()
                else:
                    place.copy_(given)
            if factor < 1:
                bucket.buffer.mul_(factor)
            works.append(hook.reducer.reduce(bucket))
        if not works and not self.shards.confirm(True):
            raise PeerError(FAILED_ELSEWHERE)
        empty = [p for p in self.model.names if not n_values(p)]  # parameters whose shard on this rank is empty
        found: dict[torch.Tensor, torch.Tensor] = {p: torch.zeros_like(local(p)) for p in empty}
        for bucket, work in zip(self._buckets, works, strict=True):
            found |= zip(bucket.parameters, gradients_in(work.result(), bucket.parameters), strict=True)
        return found

    def _make_buckets(self, hook: Hook) -> list[Bucket]:
        """Create buckets for :meth:`reduce`: with DDP, those of the last backward pass, so that residuals fit."""
        known = hook.reducer.state.buckets
        if self.model.ddp is None or not known:
            return _buckets_of(list(_cut(self.model.names)))
        named = {name: p for p, name in self.model.names.items()}
        return _buckets_of([[named[name] for name in bucket] for bucket in known])

    def agree(self, decision: bool) -> bool:
        """Return True on all ranks if `decision` is True on any of them; all ranks must call this."""
        vote = torch.tensor([float(decision)], dtype=torch.float32, device="cpu")
        all_reduce(vote, op="max", group=self.group, options=self.settings.options)
        return bool(vote.item())

    def share_buckets(self, kind: Kind) -> None:
        """Store the buckets of the last step, of kind `kind`, in the states of both hooks, for checkpoints."""
        if kind != "local":
            for hook in self.hooks.values():
                hook.reducer.state.buckets = self.hooks[kind].reducer.state.buckets

    def stats(self) -> HookStats:
        """Return the sums of the statistics of both hooks."""
        all_stats = [hook.stats() for hook in self.hooks.values()]
        totals: dict[str, Any] = vars(functools.reduce(Counters.__add__, all_stats, Counters()))
        for name in ("steps", "failed_steps", "buckets", "uncompressed_nbytes"):
            totals[name] = sum(getattr(s, name) for s in all_stats)
        used = [s for s in all_stats if s.steps] or all_stats  # gradients, then momenta if any were sent
        ratio = max(s.residual_ratio for s in all_stats)
        return replace(used[-1], **totals, residual_ratio=ratio)  # both hooks share the group's memory and levels


def _buckets_of(groups: list[list[torch.nn.Parameter]]) -> list[Bucket]:
    """Create a bucket for each group of parameters."""
    buckets: list[Bucket] = []
    for i, some in enumerate(groups):
        buffer = torch.empty(sum(map(n_values, some)), dtype=some[0].dtype, device=some[0].device)
        buckets.append(Bucket(buffer, some, i, last=i == len(groups) - 1))
    return buckets


def _cut(parameters: Iterable[torch.nn.Parameter]) -> Iterator[list[torch.nn.Parameter]]:
    """Group parameters into buckets of one dtype and device; skip parameters without values on this rank."""
    kinds: dict[Any, list[torch.nn.Parameter]] = {}
    for p in parameters:
        if n_values(p):
            kinds.setdefault((p.dtype, p.device), []).append(p)
    for (dtype, _), some in kinds.items():
        bucket: list[torch.nn.Parameter] = []
        nbytes = 0
        for p in some:
            if bucket and nbytes + n_values(p) * dtype.itemsize > _BUCKET:
                yield bucket
                bucket, nbytes = [], 0
            bucket.append(p)
            nbytes += n_values(p) * dtype.itemsize
        yield bucket
