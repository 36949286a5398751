"""Connection of an optimizer to the other ranks: two hooks, one for gradients and one for momenta."""

import functools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch

from codec import ArgumentError, CallOptions, PeerError, SpecError
from codec.arguments import shown
from codec.specs import Lossless, Spec
from codec.torch._compat import local
from codec.torch.collectives.calls import all_reduce
from codec.torch.ddp import lifetime
from codec.torch.ddp.buckets import Bucket, gradients_in, n_values, needs_optimizer
from codec.torch.ddp.hook import Hook
from codec.torch.ddp.make import ddp_hook
from codec.torch.ddp.policy import Policy
from codec.torch.ddp.reducer import Transform
from codec.torch.ddp.stats import Stats
from codec.torch.ddp.step import FAILED_ELSEWHERE
from codec.torch.group.work import Work
from codec.torch.one_bit_adam import arithmetic
from codec.torch.one_bit_adam.backward import Backward
from codec.torch.one_bit_adam.model import Model
from codec.torch.one_bit_adam.schedule import Kind, ZeroOneSchedule
from codec.torch.one_bit_adam.sharded import WHOLE, Shards
from codec.torch.transport.counters import Counters

# Embeddings and their heads are encoded, too: a momentum over sqrt(v) has even rows.
EVEN_POLICY = Policy(uneven=None)
SENT: tuple[Kind, ...] = ("gradients", "momenta")

_BUCKET = 25 << 20  # bytes of a bucket without DistributedDataParallel; that is its default, too


@dataclass
class Settings:
    """Arguments of ``register``, and the specs of an optimizer."""

    warmup: Spec
    spec: Spec
    transform: Transform
    optimizer: torch.optim.Optimizer  # Adam whose state Truncate reads, if the warm-up is Truncate
    policy: Policy = EVEN_POLICY
    grad_scaler: Any = None  # an enabled one
    max_grad_norm: float | None = None
    options: CallOptions | None = None

    @property
    def scale(self) -> float:
        """Factor of the GradScaler in gradients."""
        return 1.0 if self.grad_scaler is None else self.grad_scaler.get_scale()

    def clip_factor(self, gradients: Iterable[torch.Tensor], scale: float = 1.0, shards: Shards = WHOLE) -> float:
        """Return the factor by which this rank's gradients, which have the factor `scale`, are clipped."""
        if self.max_grad_norm is None:
            return 1.0
        return arithmetic.clip_factor(shards.norm(arithmetic.norm(gradients)), self.max_grad_norm, scale)

    def hook(self, kind: Kind) -> Hook:
        """Return a new hook for gradients or momenta."""
        spec = self.warmup if kind == "gradients" else self.spec
        return ddp_hook(
            spec,
            optimizer=self.optimizer if kind == "gradients" else None,
            feedback=None if kind == "gradients" else not isinstance(spec, Lossless),
            policy=self.policy,
            grad_scaler=self.grad_scaler,
            transform=self.transform,
            options=self.options,
        )


def check_spec(spec: Spec) -> None:
    """Raise SpecError if momenta cannot be sent with a spec."""
    if needs_optimizer(spec):
        raise SpecError(f"spec= is for momenta, but {spec} drops bits of gradients: use it as warmup=")
    if not isinstance(spec, Lossless) and not spec.contraction:
        raise SpecError(f"{spec} is no contraction, so that error feedback does not converge: use Sign")


def check_warmup(spec: Spec, group: Mapping[str, Any]) -> None:
    """Raise ArgumentError if the gradients of a parameter group cannot be sent with a spec in the warm-up."""
    if needs_optimizer(spec) and not arithmetic.corrects_bias(group):
        raise ArgumentError(
            f"warmup={spec} drops bits by the step of torch.optim.Adam, which is bias-corrected: use Lossless() or "
            "Quantize(4), or bias_correction=True"
        )


def check_clipping(max_grad_norm: Any) -> float | None:
    """Return an argument `max_grad_norm`; raise ArgumentError unless it is a positive number or None."""
    number = isinstance(max_grad_norm, int | float) and not isinstance(max_grad_norm, bool)
    if max_grad_norm is not None and not (number and isfinite(max_grad_norm) and max_grad_norm > 0):
        raise ArgumentError(f"max_grad_norm must be a finite number above 0, or None, got {shown(max_grad_norm)}")
    return max_grad_norm


def check_scaler(grad_scaler: Any, model: Model, schedule: ZeroOneSchedule | None) -> Any:
    """Return a GradScaler; None for one that is switched off, which scales nothing and skips no step.

    Raises
    ------
    ArgumentError
        It is no GradScaler, or ranks could skip different steps.
    """
    if grad_scaler is None:
        return None
    if not hasattr(grad_scaler, "is_enabled") or not hasattr(grad_scaler, "get_scale"):
        raise ArgumentError(f"grad_scaler must be a torch.amp.GradScaler or None, got {shown(grad_scaler)}")
    if not grad_scaler.is_enabled():
        return None
    if schedule is not None and schedule.max_interval > 1:
        raise ArgumentError(
            "grad_scaler= needs communication in every step, since ranks could skip different local steps: use "
            "ZeroOneSchedule(max_interval=1), or bfloat16 without a scaler"
        )
    if model.ddp is None:
        raise ArgumentError("grad_scaler= needs a DistributedDataParallel: scalers of ranks could skip other steps")
    return grad_scaler


class Link:
    """Model, ranks and hooks of an optimizer.

    Parameters
    ----------
    settings : Settings
        How gradients and momenta are sent.
    model : Model
        Parameters whose gradients are averaged.
    group : ProcessGroup
        Ranks.
    kind_of_step : callable
        Returns what the next step sends.
    moves : callable
        Returns True if a parameter takes part in steps.

    Raises
    ------
    ArgumentError, SpecError
        The settings do not go with each other or with the model.
    """

    def __init__(
        self,
        settings: Settings,
        model: Model,
        group: Any,
        kind_of_step: Callable[[], Kind],
        moves: Callable[[torch.Tensor], bool],
    ) -> None:
        self.settings, self.model, self.group = settings, model, group
        self.backward: Backward | None = None  # buckets of a DistributedDataParallel; None: step() averages
        self._kind_of_step, self._moves = kind_of_step, moves
        self.shards = Shards(model.shards, settings.options)
        self._buckets: list[Bucket] = []  # memory of :meth:`reduce`
        self.hooks = self.new_hooks()

    def new_hooks(self) -> dict[Kind, Hook]:
        """Return new hooks that serve the model."""
        hooks: dict[Kind, Hook] = {kind: self.settings.hook(kind) for kind in SENT}
        model = self.model
        for hook in hooks.values():
            if model.ddp is not None:
                hook.serve(model.ddp, group=self.group)
            else:
                hook.reducer.check(model.names, self.group)
                hook.reducer.serve(model.names, self.group, model.module)
            if model.shards is not None:
                hook.reducer.state.other_groups = self.shards
        hooks["momenta"].called = True  # a run may end before the freeze
        return hooks

    def attach(self) -> None:
        """Have the DistributedDataParallel, if there is one, send its buckets through the hooks."""
        if self.model.ddp is None:
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
        """Return a context manager for agreements of a replica before a step: an error fails on other replicas, too."""
        try:
            yield
        except BaseException:
            self.hooks[kind].reducer.cancel()
            raise

    def reduce(
        self, kind: Kind, tensors: Mapping[torch.Tensor, torch.Tensor | None]
    ) -> dict[torch.Tensor, torch.Tensor]:
        """Return the means of tensors over all ranks, outside of a backward pass; all ranks must call this.

        Parameters
        ----------
        kind : str
            The hook that sends them, whose transform is applied.
        tensors : mapping
            Gradient of each parameter; None, or none at all, counts as zeros.
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
        empty = [p for p in self.model.names if not n_values(p)]  # shards without values
        found: dict[torch.Tensor, torch.Tensor] = {p: torch.zeros_like(local(p)) for p in empty}
        for bucket, work in zip(self._buckets, works, strict=True):
            found |= zip(bucket.parameters, gradients_in(work.result(), bucket.parameters), strict=True)
        return found

    def _make_buckets(self, hook: Hook) -> list[Bucket]:
        """Return buckets for the model's gradients: those of the last backward pass, to which residuals belong."""
        known = hook.reducer.state.buckets
        if self.model.ddp is None or not known:
            return _buckets_of(list(_cut(self.model.names)))
        named = {name: p for p, name in self.model.names.items()}
        return _buckets_of([[named[name] for name in bucket] for bucket in known])

    def agree(self, decision: bool) -> bool:
        """Return True on all ranks if any of them decides so; all ranks must call this."""
        vote = torch.tensor([float(decision)], dtype=torch.float32, device="cpu")
        all_reduce(vote, op="max", group=self.group, options=self.settings.options)
        return bool(vote.item())

    def share_buckets(self, kind: Kind) -> None:
        """Let gradients and momenta travel in the buckets of the last step, of a kind, after a checkpoint."""
        if kind != "local":
            for hook in self.hooks.values():
                hook.reducer.state.buckets = self.hooks[kind].reducer.state.buckets

    def stats(self) -> Stats:
        """Return the statistics of both hooks together."""
        all_stats = [hook.stats() for hook in self.hooks.values()]
        totals: dict[str, Any] = vars(functools.reduce(Counters.__add__, all_stats, Counters()))
        for name in ("steps", "failed_steps", "buckets", "uncompressed_nbytes"):
            totals[name] = sum(getattr(s, name) for s in all_stats)
        contents = [s.contents for s in all_stats if s.contents]  # the last entry describes momenta, once they are sent
        return Stats(
            **totals,
            residual_ratio=max(s.residual_ratio for s in all_stats),
            world_size=all_stats[0].world_size,
            contents=contents[-1] if contents else {},
        )


def _buckets_of(groups: list[list[torch.nn.Parameter]]) -> list[Bucket]:
    """Return buckets for the gradients of groups of parameters."""
    buckets: list[Bucket] = []
    for i, some in enumerate(groups):
        buffer = torch.empty(sum(map(n_values, some)), dtype=some[0].dtype, device=some[0].device)
        buckets.append(Bucket(buffer, some, i, last=i == len(groups) - 1))
    return buckets


def _cut(parameters: Iterable[torch.nn.Parameter]) -> Iterator[list[torch.nn.Parameter]]:
    """Group parameters of equal dtype and device that have values on this rank into buckets."""
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
