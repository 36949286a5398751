"""Connection of an optimizer to the other ranks: two hooks, one for gradients and one for momenta."""

# no `from __future__ import annotations`: torch checks the annotations of a hook

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist

from codec import CallOptions, SpecError
from codec.specs import Lossless, Spec
from codec.torch._compat import backward_pass, call_after_backward
from codec.torch.collectives.calls import all_reduce
from codec.torch.ddp import lifetime
from codec.torch.ddp.buckets import Bucket, gradients_in, n_values, needs_optimizer
from codec.torch.ddp.hook import Hook
from codec.torch.ddp.make import ddp_hook
from codec.torch.ddp.policy import Policy
from codec.torch.ddp.reducer import Transform
from codec.torch.ddp.stats import Stats
from codec.torch.group.work import Work
from codec.torch.one_bit_adam.guard import Guard
from codec.torch.one_bit_adam.model import Model
from codec.torch.one_bit_adam.schedule import Kind

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
    grad_scaler: Any = None
    options: CallOptions | None = None

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

    Raises
    ------
    ArgumentError, SpecError
        The settings do not go with each other or with the model.
    """

    def __init__(self, settings: Settings, model: Model, group: Any, kind_of_step: Callable[[], Kind]) -> None:
        self.settings, self.model, self.group, self._kind_of_step = settings, model, group, kind_of_step
        self.guard = Guard()
        self._before = 0  # steps of the hook before this backward pass
        self._buckets: list[Bucket] = []  # memory of :meth:`reduce`
        self.hooks = self.new_hooks()

    @property
    def is_ddp(self) -> bool:
        """True if a DistributedDataParallel calls the hooks in backward()."""
        return self.model.ddp is not None

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
        hooks["momenta"].called = True  # a run may end before the freeze
        return hooks

    def attach(self) -> None:
        """Have the DistributedDataParallel, if there is one, send its buckets through the hooks."""
        if self.model.ddp is None:
            return

        def one_bit_adam(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # pyright: ignore[reportPrivateImportUsage]
            return self._reduce_bucket(bucket)

        lifetime.register(self.model.ddp, one_bit_adam)

    def _reduce_bucket(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # pyright: ignore[reportPrivateImportUsage]
        """Reduce a bucket of a backward pass; in a local step, return it unchanged."""
        kind = self._kind_of_step()
        hook = self.hooks["gradients" if kind == "gradients" else "momenta"]
        if bucket.index() == 0:
            if kind != "gradients":
                self.guard.check_first()
            self._before = hook.reducer.state.count
        if kind == "local":
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
        else:
            future = hook.reduce(bucket)
        if bucket.is_last() and backward_pass() is not None:
            call_after_backward(lambda: self._end_backward(hook, kind))
        return future

    def _end_backward(self, hook: Hook, kind: Kind) -> None:
        """Record the gradients that a backward pass has left, unless its step has failed."""
        self.guard.clear()
        if kind == "local" or (kind == "momenta" and hook.reducer.state.count > self._before):
            self.guard.record(self.model.names)

    def reduce(
        self, kind: Kind, tensors: Mapping[torch.Tensor, torch.Tensor | None]
    ) -> dict[torch.Tensor, torch.Tensor]:
        """Return the means of tensors over all ranks, without DistributedDataParallel; all ranks must call this.

        Parameters
        ----------
        kind : str
            The hook that sends them, whose transform is applied.
        tensors : mapping
            Gradient of each parameter of the model; None counts as zeros.
        """
        hook = self.hooks[kind]
        hook.called = True
        self._buckets = self._buckets or _buckets_of(self.model.names)
        works: list[Work] = []
        for bucket in self._buckets:
            for p, place in zip(bucket.parameters, bucket.gradients(), strict=True):
                given = tensors[p]
                if given is None:
                    place.zero_()
                else:
                    place.copy_(given)
            works.append(hook.reducer.reduce(bucket))
        found: dict[torch.Tensor, torch.Tensor] = {}
        for bucket, work in zip(self._buckets, works, strict=True):
            found |= zip(bucket.parameters, gradients_in(work.result(), bucket.parameters), strict=True)
        return found

    def agree(self, decision: bool) -> bool:
        """Return True on all ranks if any of them decides so; all ranks must call this."""
        vote = torch.tensor([float(decision)], dtype=torch.float32, device="cpu")
        all_reduce(vote, op="max", group=self.group, options=self.settings.options)
        return bool(vote.item())

    def share_buckets(self) -> None:
        """Let momenta travel in the buckets of gradients after a checkpoint."""
        self.hooks["momenta"].reducer.state.buckets = self.hooks["gradients"].reducer.state.buckets

    def stats(self) -> Stats:
        """Return the statistics of both hooks together."""
        all_stats = [hook.stats() for hook in self.hooks.values()]
        kept = ("residual_ratio", "world_size", "parameters", "contents")
        total: dict[str, Any] = {
            f.name: sum(getattr(s, f.name) for s in all_stats) for f in fields(Stats) if f.name not in kept
        }
        return Stats(
            **total,
            residual_ratio=max(s.residual_ratio for s in all_stats),
            world_size=all_stats[0].world_size,
            contents=next(
                (s.contents for s in all_stats[::-1] if s.contents), dict[str, int]()
            ),  # momenta, once they are sent
        )


def _buckets_of(parameters: Iterable[torch.nn.Parameter]) -> list[Bucket]:
    """Return buckets for the gradients of parameters."""
    buckets: list[Bucket] = []
    groups = list(_cut(parameters))
    for i, some in enumerate(groups):
        buffer = torch.empty(sum(map(n_values, some)), dtype=some[0].dtype, device=some[0].device)
        buckets.append(Bucket(buffer, some, i, last=i == len(groups) - 1))
    return buckets


def _cut(parameters: Iterable[torch.nn.Parameter]) -> Iterator[list[torch.nn.Parameter]]:
    """Group parameters of equal dtype and device into buckets."""
    kinds: dict[Any, list[torch.nn.Parameter]] = {}
    for p in parameters:
        kinds.setdefault((p.dtype, p.device), []).append(p)
    for some in kinds.values():
        bucket: list[torch.nn.Parameter] = []
        nbytes = 0
        for p in some:
            if bucket and nbytes + p.nbytes > _BUCKET:
                yield bucket
                bucket, nbytes = [], 0
            bucket.append(p)
            nbytes += p.nbytes
        yield bucket
