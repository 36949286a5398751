"""Buckets of gradients and their contents: parameters, their offsets and order in memory, and the optimizer's state."""

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, cast

import torch
import torch.distributed as dist

from codec import ArgumentError, SpecError, optimizers
from codec._c.library import lib
from codec.explain import CARRIES_NONFINITE, bits_of, count_nonfinite
from codec.specs import Spec, SpecLike, Truncate
from codec.stateful.ranges import NOBODY, Layout, numel
from codec.tensors.segments import Records, pack, segments
from codec.tensors.view import view
from codec.torch._compat import divides_by_ranks_with_inputs, local
from codec.torch.reduction import arguments
from codec.torch.reduction.host import Reduction, Values

_MAX_OTHERS = 1 / 32  # encode a whole bucket, not a copy of the part, if other values are at most this share


def n_values(parameter: torch.Tensor) -> int:
    """Return how many values a parameter, or its shard, has in a bucket: two real ones for each complex one."""
    return local(parameter).numel() * (2 if parameter.is_complex() else 1)


def sizes_of(names: Mapping[torch.nn.Parameter, str]) -> dict[str, int]:
    """Return the number of values of each parameter, by name."""
    return {name: n_values(p) for p, name in names.items()}


@dataclass(frozen=True)
class Bucket:
    """Gradients of some parameters, which are reduced together."""

    buffer: torch.Tensor  # flat, or sparse
    parameters: Sequence[torch.nn.Parameter]
    number: int  # index of the bucket in the step
    last: bool  # the last one of the step

    @classmethod
    def of(cls, bucket: dist.GradBucket) -> "Bucket":  # pyright: ignore[reportPrivateImportUsage]
        """Return the contents of a bucket of DistributedDataParallel."""
        parameters = cast(list[torch.nn.Parameter], bucket.parameters())
        return cls(bucket.buffer(), parameters, bucket.index(), bucket.is_last())

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradient of each parameter, as views of the buffer."""
        return gradients_in(self.buffer, self.parameters)

    def explain_nonfinite(self, error: BaseException, names: Mapping[torch.nn.Parameter, str]) -> None:
        """Name the parameter, and the place in it, in the message of an error about NaN or Inf in this bucket."""
        for p, gradient in zip(self.parameters, self.gradients(), strict=True):
            values = view(torch.view_as_real(gradient) if gradient.is_complex() else gradient)
            if found := count_nonfinite(bits_of(values), values.dtype, values.shape):
                error.args = (
                    f"the gradient of {names[p]!r} holds {found}. The step is refused on all ranks: skip the batch, "
                    "pass grad_scaler= to ddp_hook if a GradScaler scales the loss, or use the spec "
                    f"{CARRIES_NONFINITE}",
                )
                return


@dataclass
class Part:
    """Parameters of a bucket that have the same spec and the same error feedback.

    If they are nearly the whole bucket, the whole bucket is encoded (`whole`), without a copy. Its frames then hold
    the parameters of other parts, too, under the name NOBODY: these have no residual there, and get their values from
    their own part.
    """

    spec: Spec
    feedback: bool  # error feedback is applied
    names: list[str]
    parameters: list[torch.nn.Parameter]
    offsets: list[int]  # offset of each parameter in the bucket, in values
    whole: bool  # frames hold the whole bucket
    number: int = 0  # number of the bucket in its step, times 256, plus number of the part in the bucket
    new: bool = True  # no step with this part has succeeded yet
    out: torch.Tensor | None = None  # result of a whole bucket, which the model reads

    @functools.cached_property
    def layout(self) -> Layout:
        """Ranges of parameters, (name, 0, number of values), in the order of the part."""
        return tuple((name, 0, n_values(p)) for name, p in zip(self.names, self.parameters, strict=True))

    @functools.cached_property
    def segments(self) -> Records:
        """Shapes of the parameters, whose rows get scales of their own."""
        return pack(segments([shape_of(p) for p in self.parameters]))

    @functools.cached_property
    def n(self) -> int:
        """Number of values."""
        return numel(self.layout)


def cut(
    names: Sequence[str],
    parameters: Sequence[torch.nn.Parameter],
    specs: Sequence[tuple[Spec, bool]],
    number: int = 0,
) -> list[Part]:
    """Group the parameters of a bucket by spec and feedback; the part that is encoded as a whole comes first."""
    sizes = [n_values(p) for p in parameters]
    offsets = [0, *itertools.accumulate(sizes)]
    parts: list[Part] = []
    for key in dict.fromkeys(specs):
        mine = [i for i, its in enumerate(specs) if its == key]
        parts.append(
            Part(*key, [names[i] for i in mine], [parameters[i] for i in mine], [offsets[i] for i in mine], False)
        )
    largest = max(parts, key=lambda part: part.n)
    others = offsets[-1] - largest.n
    if not others:
        largest.whole = True
    elif others <= offsets[-1] * _MAX_OTHERS and not needs_optimizer(largest.spec):
        mine = set(largest.names)
        inside = [name if name in mine else NOBODY for name in names]
        whole = Part(largest.spec, largest.feedback, inside, [*parameters], offsets[:-1], whole=True)
        parts = [whole, *(part for part in parts if part is not largest)]
    for i, part in enumerate(parts):
        part.number = (number << 8) + i
    return parts


def cut_as(
    buckets: Sequence[Sequence[str]],
    names: Sequence[str],
    parameters: Sequence[torch.nn.Parameter],
    specs: Sequence[tuple[Spec, bool]],
) -> list[Part]:
    """Group the parameters of a bucket as if they had come in several buckets.

    DistributedDataParallel has one bucket in its first step, in another order. If that bucket is reduced in the buckets
    from before a checkpoint, a resumed run is bit-identical to the uninterrupted one.

    Parameters
    ----------
    buckets : sequence of sequences of str
        Names of the same parameters, in the order of each bucket.
    names, parameters, specs
        As for :func:`cut`, of the one bucket.
    """
    offsets = itertools.accumulate((n_values(p) for p in parameters), initial=0)
    offset_of = dict(zip(parameters, offsets, strict=False))
    where = {name: i for i, name in enumerate(names)}
    found: list[Part] = []
    for number, bucket in enumerate(buckets):
        mine = [where[name] for name in bucket]
        parts = cut(bucket, [parameters[i] for i in mine], [specs[i] for i in mine], number)
        for part in parts:
            part.offsets, part.whole = [offset_of[p] for p in part.parameters], False
        found += parts
    return found


def needs_optimizer(spec: Spec) -> bool:
    """Return True if a spec computes the level of each value from the optimizer's state."""
    return isinstance(spec, Truncate) and spec.fixed_level is None


def order(p: torch.Tensor) -> list[int]:
    """Return a parameter's dimensions in the order of its values in a bucket: the order in memory, if without gaps."""
    p, dims = local(p), list(range(p.dim()))
    in_memory = sorted(dims, key=p.stride, reverse=True)
    return in_memory if not p.is_contiguous() and p.permute(in_memory).is_contiguous() else dims


def shape_of(p: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a parameter's values in a bucket, its first dimensions merged to fit the format's rank."""
    shape = tuple(local(p).permute(order(p)).shape) + ((2,) if p.is_complex() else ())
    extra = len(shape) - lib.CODEC_MAX_RANK
    return shape if extra <= 0 else (prod(shape[: extra + 1]), *shape[extra + 1 :])


def flat(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a parameter's shape as flat values in the order of the parameter in a bucket."""
    x = local(x).detach().permute(order(p))
    return (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).reshape(-1)


def _flat_or_zeros(x: torch.Tensor | None, p: torch.Tensor) -> torch.Tensor:
    """Return a moment of a parameter as flat values; zeros before its first step."""
    return flat(torch.zeros_like(local(p)) if x is None else x, p)


def gradients_in(buffer: torch.Tensor, parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Return the gradient of each parameter in a bucket, as views in the parameters' shapes, complex ones as complex.

    ``GradBucket.gradients()`` ignores the order in memory, and gives half of a complex gradient and no sparse one.
    """
    if buffer.is_sparse:
        return [buffer]  # a sparse gradient has a bucket of its own
    found: list[torch.Tensor] = []
    begin = 0
    for p in parameters:
        values = buffer[begin : begin + n_values(p)]
        begin += n_values(p)
        values = torch.view_as_complex(values.view(-1, 2)) if p.is_complex() else values
        dims = order(p)
        shape = local(p).shape
        found.append(values.view([shape[d] for d in dims]).permute([dims.index(d) for d in range(p.dim())]))
    return found


def scatter(result: Values, r: Reduction, part: Part, buffer: torch.Tensor) -> None:
    """Store the result of a part into the bucket."""
    if part.whole:
        arguments.publish(result, r, buffer)
        return
    begin = 0
    for offset, (_, _, n) in zip(part.offsets, part.layout, strict=True):
        arguments.publish(result[begin : begin + n], r, buffer[offset : offset + n])
        begin += n


class Buffers:
    """Memory for tensors that are concatenated in every step: to allocate it anew would take longer than the copy."""

    def __init__(self) -> None:
        self._buffers: dict[Any, torch.Tensor] = {}

    def joined(self, which: tuple[int, str], tensors: list[torch.Tensor]) -> torch.Tensor:
        """Concatenate tensors; this overwrites the result of the last call with the same `which`, a part and a name."""
        n, device = sum(t.numel() for t in tensors), tensors[0].device
        dtype = functools.reduce(torch.promote_types, (t.dtype for t in tensors))
        buffer = self._buffers.get(key := (*which, dtype, device))
        if buffer is None or buffer.numel() < n:
            buffer = self._buffers[key] = torch.empty(n, dtype=dtype, device=device)
        return torch.cat(tensors, out=buffer[:n])


def check_has(optimizer: Any, spec: Spec, name: str) -> None:
    """Raise SpecError if the spec of a parameter needs an optimizer, and there is none."""
    if needs_optimizer(spec) and optimizer is None:
        raise SpecError(f"{spec} for {name} drops bits by the optimizer's step: pass ddp_hook(optimizer=)")


def bind_to_part(optimizer: Any, part: Part, scale: float, buffers: Buffers, number: int) -> SpecLike:
    """Return the spec of a part, bound to the optimizer's parameter groups and state if it needs them.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer or None
        Optimizer of the model.
    part : Part
        Parameters of a bucket.
    scale : float
        Factor of the GradScaler in all gradients.
    buffers : Buffers
        Memory for the state.
    number : int
        Number of the part in its bucket.

    Raises
    ------
    ArgumentError
        The optimizer does not have a parameter of the part.
    SpecError
        There is no optimizer.
    """
    if not needs_optimizer(part.spec):
        return part.spec
    check_has(optimizer, part.spec, part.names[0])
    group_of = {p: i for i, g in enumerate(optimizer.param_groups) for p in g["params"]}
    if lacking := [name for name, p in zip(part.names, part.parameters, strict=True) if p not in group_of]:
        raise ArgumentError(f"optimizer= does not have {', '.join(lacking)}: give another spec for it by policy=")
    groups: list[tuple[int, Any]] = []
    offset = 0
    for p in part.parameters:
        group = replace(optimizers.from_optimizer(optimizer, group_of[p], parameter=p), grad_scale=scale)
        if not groups or groups[-1][1] != group:
            groups.append((offset, group))
        offset += n_values(p)
    states = [(p, optimizers.state_of(optimizer, p)) for p in part.parameters]
    known = [name for name in ("theta", "m", "v") if any(name in s for _, s in states)]
    state = {
        name: buffers.joined((number, name), [_flat_or_zeros(s.get(name), p) for p, s in states]) for name in known
    }
    assert isinstance(part.spec, Truncate)
    return part.spec.bind(groups, **state)


def check_join(module: torch.nn.Module | None) -> None:
    """Raise ArgumentError if a model divides gradients by another number than that of the group's ranks."""
    if module is not None and divides_by_ranks_with_inputs(module):
        raise ArgumentError(
            "join(divide_by_initial_world_size=False) divides gradients by the number of ranks that have inputs left, "
            "but the hook divides by the number of all ranks: call join() without this argument"
        )
