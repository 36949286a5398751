"""Connection of an optimizer to the other ranks: two hooks, one for gradients and one for momenta."""

# no `from __future__ import annotations`: torch checks the annotations of a hook

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from codec import ArgumentError, CallOptions, StateError
from codec.specs import Lossless, Spec
from codec.torch.ddp import reducer
from codec.torch.ddp.buckets import n_values, order
from codec.torch.ddp.hook import Hook
from codec.torch.ddp.make import ddp_hook
from codec.torch.ddp.policy import Policy
from codec.torch.ddp.stats import Stats
from codec.torch.one_bit_adam.guard import Guard
from codec.torch.one_bit_adam.schedule import Kind

# Embeddings and their heads are encoded, too: a momentum over sqrt(v) has even rows.
EVEN_POLICY = Policy(lossless_uneven=False)
SENT: tuple[Kind, ...] = ("gradients", "momenta")

_BUCKET = 25 << 20  # bytes of a bucket without DistributedDataParallel; that is its default, too


@dataclass
class Settings:
    """Arguments of ``register``, and the specs of an optimizer."""

    warmup: Spec
    spec: Spec
    transform: reducer.Transform
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


class PlainModel:
    """Parameters without a DistributedDataParallel, in the form that a hook serves."""

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._named = named
        self.module = self
        self.process_group = dist.group.WORLD

    def named_parameters(self) -> Sequence[tuple[str, torch.Tensor]]:
        """Return names and parameters."""
        return self._named

    def modules(self) -> tuple[()]:
        """Return no modules: their kinds are unknown."""
        return ()


class FlatBucket:
    """Bucket of gradients in one tensor, with the methods of ``torch.distributed.GradBucket``."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        p = parameters[0]
        self._parameters = list(parameters)
        self._offsets = [0, *itertools.accumulate(n_values(p) for p in parameters)]
        self._buffer = torch.empty(self._offsets[-1], dtype=p.dtype, device=p.device)
        self._index, self._last = 0, False

    def place(self, index: int, last: bool) -> None:
        """Set the place of the bucket in its step."""
        self._index, self._last = index, last

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Return the gradients in a buffer, in the shapes of the parameters and the order of their memory."""
        found: list[torch.Tensor] = []
        for p, begin, end in zip(self._parameters, self._offsets, self._offsets[1:], strict=False):
            dims = order(p)
            back = sorted(range(p.dim()), key=dims.__getitem__)
            found.append(buffer[begin:end].view([p.shape[d] for d in dims]).permute(back))
        return found

    def index(self) -> int:
        """Return the number of the bucket."""
        return self._index

    def is_last(self) -> bool:
        """Return True for the last bucket of a step."""
        return self._last

    def buffer(self) -> torch.Tensor:
        """Return all gradients."""
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients of the parameters, which are views of the buffer."""
        return self.views(self._buffer)

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters."""
        return self._parameters


class Link:
    """Model, ranks and hooks of an optimizer.

    Parameters
    ----------
    settings : Settings
        How gradients and momenta are sent.
    model : DistributedDataParallel or PlainModel
        The model.
    group : ProcessGroup
        Ranks.
    kind_of_step : callable
        Returns what the next step sends.

    Raises
    ------
    ArgumentError, SpecError
        The settings do not go with each other or with the model.
    """

    def __init__(self, settings: Settings, model: Any, group: Any, kind_of_step: Callable[[], Kind]) -> None:
        self.settings, self.model, self.group, self._kind_of_step = settings, model, group, kind_of_step
        self.guard = Guard()
        self._before = 0  # steps of the hook before this backward pass
        self._buckets: list[FlatBucket] | None = None
        self.hooks = self.new_hooks()

    @property
    def is_ddp(self) -> bool:
        """True if a DistributedDataParallel calls the hooks in backward()."""
        return isinstance(self.model, DistributedDataParallel)

    @property
    def names(self) -> Mapping[torch.nn.Parameter, str]:
        """Names of the model's parameters."""
        return self.hooks["gradients"].plan.names

    def new_hooks(self) -> dict[Kind, Hook]:
        """Return new hooks that serve the model."""
        hooks: dict[Kind, Hook] = {kind: self.settings.hook(kind) for kind in SENT}
        for hook in hooks.values():
            hook.serve(self.model, group=self.group)
        hooks["momenta"].called = True  # a run may end before the freeze
        return hooks

    def attach(self) -> None:
        """Have the DistributedDataParallel send its buckets through the hooks."""

        def one_bit_adam(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # pyright: ignore[reportPrivateImportUsage]
            return self._reduce_bucket(bucket)

        self.model.register_comm_hook(None, one_bit_adam)

    def _reduce_bucket(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Reduce a bucket of a backward pass, or leave it as it is in a local step."""
        kind = self._kind_of_step()
        hook = self.hooks["gradients" if kind == "gradients" else "momenta"]
        if bucket.index() == 0:
            if kind != "gradients":
                self.guard.check_first()
            self._before = hook._steps
        if kind == "local":
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
        else:
            future = hook.reduce(bucket)
        if bucket.is_last() and reducer.in_backward():
            reducer._call_after_backward(lambda: self._end_backward(hook, kind))
        return future

    def _end_backward(self, hook: Hook, kind: Kind) -> None:
        """Record the gradients that a backward pass has left, unless its step has failed."""
        self.guard.clear()
        if kind == "local" or (kind == "momenta" and hook._steps > self._before):
            self.guard.record(self.names)

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
        if self._buckets is None:
            self._buckets = [FlatBucket(parameters) for parameters in _cut(self.names)]
        futures: list[torch.futures.Future[torch.Tensor]] = []
        for i, bucket in enumerate(self._buckets):
            bucket.place(i, i == len(self._buckets) - 1)
            for p, place in zip(bucket.parameters(), bucket.gradients(), strict=True):
                given = tensors[p]
                if given is None:
                    place.zero_()
                else:
                    place.copy_(given)
            futures.append(self.hooks[kind].reduce(bucket))  # pyright: ignore[reportArgumentType]
        found: dict[torch.Tensor, torch.Tensor] = {}
        for bucket, future in zip(self._buckets, futures, strict=True):
            found |= zip(bucket.parameters(), bucket.views(future.value()), strict=True)
        return found

    def stats(self) -> Stats:
        """Return the statistics of both hooks together."""
        all_stats = [hook.stats() for hook in self.hooks.values()]
        kept = ("residual_ratio", "world_size", "parameters")
        total: dict[str, Any] = {
            f.name: sum(getattr(s, f.name) for s in all_stats) for f in fields(Stats) if f.name not in kept
        }
        return Stats(
            **total, residual_ratio=max(s.residual_ratio for s in all_stats), world_size=all_stats[0].world_size
        )


def _cut(parameters: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Group parameters of equal dtype and device into buckets."""
    kinds: dict[Any, list[torch.Tensor]] = {}
    for p in parameters:
        kinds.setdefault((p.dtype, p.device), []).append(p)
    for some in kinds.values():
        bucket: list[torch.Tensor] = []
        nbytes = 0
        for p in some:
            if bucket and nbytes + p.nbytes > _BUCKET:
                yield bucket
                bucket, nbytes = [], 0
            bucket.append(p)
            nbytes += p.nbytes
        yield bucket


def check_model(model: Any, mine: Mapping[torch.Tensor, int]) -> Any:
    """Check the argument of ``register``; return a model that hooks can serve.

    Parameters
    ----------
    model : DistributedDataParallel or torch.nn.Module
        The argument, maybe inside of what torch.compile returned.
    mine : mapping
        Parameters of the optimizer.

    Raises
    ------
    ArgumentError
        It is no model, is sharded by FSDP, or has parameters that the optimizer lacks.
    """
    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(f"register needs a DistributedDataParallel or a module, got {type(model).__name__}")
    module = model.module if isinstance(model, DistributedDataParallel) else model
    named = {p: name for name, p in module.named_parameters() if p.requires_grad}
    if lacking := [name for p, name in named.items() if p not in mine]:
        raise ArgumentError(f"the optimizer lacks parameters of the model: {', '.join(lacking[:5])}")
    if not any(p in mine for p in named):
        raise ArgumentError("the model has none of the optimizer's parameters")
    if isinstance(model, DistributedDataParallel):
        return model
    others = [p for p in mine if p not in named and p.requires_grad]
    if others:
        raise ArgumentError(
            f"the optimizer has {len(others)} parameters that are not the model's: register a module that has them all"
        )
    return PlainModel([(name, p) for p, name in named.items()])


def check_not_wrapped(parameter: torch.Tensor) -> None:
    """Raise StateError if a parameter belongs to a DistributedDataParallel that was not registered."""
    from codec.torch.ddp import lifetime

    if any(p is parameter for model in lifetime._models() for p in model.parameters()):
        raise StateError(
            "the parameters belong to a DistributedDataParallel, which averages gradients itself: call "
            "optimizer.register(model) with it before the first step"
        )
