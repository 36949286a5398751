"""Samples of the user's tensors: a few MiB, as a flat bucket that compresses as well as all tensors."""

import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, cast

import numpy as np

from codec import optimizers
from codec._c.library import ITEMSIZE, MANTISSA_BITS, UNSIGNED
from codec.errors import ArgumentError, CodecError
from codec.specs import BoundSpec, Truncate
from codec.tensors.floats import narrow, widen
from codec.tensors.segments import Records, Segments, unpack
from codec.tensors.view import Array, TensorView, on_host, view
from codec.tensors.wrapper import View

NBYTES = 4 << 20  # bytes of a sample
WINDOWS = 8  # number of positions in the bucket from which a sample takes values
MOST_RANKS = 8  # maximum number of ranks in the simulated mean; more ranks would not change the size of its frame


class GivenTensor(NamedTuple):
    """Tensor given by the user, with its parameter and its position among all tensors."""

    v: TensorView
    parameter: Any = None  # parameter of which the tensor is the gradient; None without an optimizer
    offset: int = 0  # index of the tensor's first value among the values of all tensors


Cut = tuple[GivenTensor, int, tuple[int, ...]]  # part of a tensor: the tensor, offset and shape of the part


class Sample(NamedTuple):
    """Sample of the tensors of one dtype: whole rows, in the order of the tensors."""

    dtype: str
    x: Array  # bits of the sampled values
    mean: Array  # bits of values that compress like a mean over ranks
    segments: Segments
    n: int  # number of values of all tensors of this dtype
    offsets: list[int]  # index of each segment's first value among the values of all tensors
    groups: list[tuple[int, optimizers.Optimizer]] | None = None  # (offset in x, optimizer) of each parameter group
    state: dict[str, Array] | None = None  # state of the optimizer for the values of x, as float32


def tensors_of(given: Any, optimizer: Any) -> tuple[list[GivenTensor], bool]:
    """Check and return the user's tensors, and True if they are weights because there are no gradients yet.

    Raises
    ------
    ArgumentError, EngineError
        There are no values, or a tensor cannot be reduced or read; the message names the key of that tensor.
    """
    items, weights = _items(given)
    owners: dict[int, Any] = {}
    if optimizer is not None:
        if not hasattr(optimizer, "param_groups"):
            raise ArgumentError(f"optimizer must be an optimizer of torch.optim, not {type(optimizer).__name__}")
        owners = {id(p.grad): p for g in optimizer.param_groups for p in g["params"]}
    found: list[GivenTensor] = []
    end = 0
    for key, x, parameter in items:
        try:
            tensor, dtype, segments = (x.tensor, x.dtype, x.segments) if type(x) is View else (x, None, None)
            v = on_host("the tensor", view(tensor, dtype))
            if v.dtype not in MANTISSA_BITS:
                raise ArgumentError(
                    f"frames of {v.dtype} cannot be reduced, only those of {', '.join(MANTISSA_BITS)}: leave the "
                    "tensor out, and reduce it uncompressed"
                )
            owner = parameter if parameter is not None else owners.get(id(tensor))
            if optimizer is not None and owner is None:
                raise ArgumentError(
                    "the tensor is not the gradient of a parameter of optimizer=: pass a model, or gradients of the "
                    "optimizer's parameters"
                )
            for part in _segments_of(v, segments):
                if part.nbytes:
                    found.append(GivenTensor(part, owner, end))
                    end += part.nbytes // ITEMSIZE[part.dtype]
        except CodecError as e:
            if key is not None:
                e.of(key)
            raise
    if not found:
        raise ArgumentError("tensor_or_model has no values to measure: pass at least one tensor that is not empty")
    return found, weights


def _segments_of(v: TensorView, segments: Records | None) -> list[TensorView]:
    """Split a bucket at its segments; return the segments, and the values between them, as separate tensors."""
    if segments is None:
        return [v]
    found: list[TensorView] = []
    size, end, n = ITEMSIZE[v.dtype], 0, v.nbytes // ITEMSIZE[v.dtype]
    for offset, shape in [*unpack(segments), (n, (0,))]:
        if offset < end or offset + prod(shape) > n:
            raise ArgumentError(f"segment {shape} at {offset} overlaps with the one before it or ends after value {n}")
        for begin, part in ((end, (offset - end,)), (offset, shape)):
            found.append(v._replace(shape=part, data=v.data + size * begin, nbytes=size * prod(part)))
        end = offset + prod(shape)
    return found


def is_model(given: Any) -> bool:
    """Return True if an argument is a torch.nn.Module, without importing torch."""
    module: Any = getattr(getattr(sys.modules.get("torch"), "nn", None), "Module", ())
    return isinstance(given, module)


def _items(given: Any) -> tuple[Iterable[tuple[Any, Any, Any]], bool]:
    """Return (key, tensor, parameter or None) for each tensor, and True if the tensors are parameters."""
    if is_model(given):
        named = [(name, p) for name, p in given.named_parameters() if p.requires_grad]
        if grads := [(name, p.grad, p) for name, p in named if p.grad is not None]:
            return grads, False
        return [(name, p, p) for name, p in named], True
    items: list[tuple[Any, Any, Any]] = [(None, given, None)]
    if isinstance(given, Mapping):
        items = [(key, x, None) for key, x in cast(Mapping[Any, Any], given).items()]
    elif isinstance(given, list | tuple) or hasattr(given, "__next__"):
        items = [(i, x, None) for i, x in enumerate(cast(Iterable[Any], given))]
    parameter: Any = getattr(getattr(sys.modules.get("torch"), "nn", None), "Parameter", ())
    return items, any(isinstance(x, parameter) for _, x, _ in items)


def samples(tensors: Sequence[GivenTensor], world_size: int, optimizer: Any) -> list[Sample]:
    """Return a sample for each dtype. Together, the samples have `NBYTES` bytes, or all values if these are fewer.

    Samples consist of whole rows, because the scale model of lossless frames has offsets by row and column. The rows
    come from several positions in the bucket, because layers differ.
    """
    total = sum(t.v.nbytes for t in tensors)
    by_dtype: dict[str, list[GivenTensor]] = {}
    for t in tensors:
        by_dtype.setdefault(t.v.dtype, []).append(t)
    found: list[Sample] = []
    for dtype, group in by_dtype.items():
        n = sum(t.v.nbytes for t in group) // ITEMSIZE[dtype]
        wanted = n if total <= NBYTES else max(1, n * NBYTES // total)
        found.append(_sample(dtype, group, list(_cuts(group, n, wanted)), world_size, optimizer))
    return found


def _cuts(group: Sequence[GivenTensor], n: int, wanted: int) -> Iterator[Cut]:
    """Yield parts of the tensors of a group, which has `n` values; the parts have `wanted` values or a few more."""
    windows = 1 if wanted == n else WINDOWS
    width = -(-wanted // windows)
    at = [(i * n + n // 2) // windows - width // 2 if windows > 1 else 0 for i in range(windows)]
    ends = list(itertools.accumulate(t.v.nbytes // ITEMSIZE[t.v.dtype] for t in group))
    for first in at:
        for t, end in zip(group, ends, strict=True):
            size = t.v.nbytes // ITEMSIZE[t.v.dtype]
            low, high = max(0, first - end + size), min(size, first + width - end + size)
            if low >= high:
                continue
            if high - low == size:
                yield t, 0, t.v.shape
                continue
            # a row spans as many of the last dimensions as fit into `width` values
            inner = next(s for k in range(1, len(t.v.shape) + 1) if prod(s := t.v.shape[k:]) <= width)
            row = prod(inner)
            yield t, low // row * row, (-(-high // row) - low // row, *inner)


def _sample(
    dtype: str,
    group: Sequence[GivenTensor],
    cuts: list[Cut],
    world_size: int,
    optimizer: Any,
) -> Sample:
    """Concatenate parts of tensors of one dtype to a sample."""
    x = np.concatenate([_part(t.v, offset, shape) for t, offset, shape in cuts])
    starts = list(itertools.accumulate((prod(shape) for _, _, shape in cuts), initial=0))
    segments = [(start, shape) for start, (_, _, shape) in zip(starts, cuts, strict=False)]
    n = sum(t.v.nbytes for t in group) // ITEMSIZE[dtype]
    groups, state = None, None
    if optimizer is not None:
        groups = _groups(optimizer, [t for t, _, _ in cuts], starts)
        state = _state(optimizer, cuts)
    offsets = [t.offset + offset for t, offset, _ in cuts]
    return Sample(dtype, x, _mean(x, dtype, world_size), segments, n, offsets, groups, state)


def bound_for(spec: Truncate, bound: BoundSpec | None, s: Sample) -> BoundSpec:
    """Bind a spec to the optimizer, and to the state of the values in a sample.

    Parameters
    ----------
    spec : Truncate
        Spec to bind.
    bound : BoundSpec or None
        The user's spec, bound to the concatenated state of all tensors. None: use the groups and state of the sample.
    s : Sample
        Sample of the tensors.
    """
    if bound is None:
        return spec.bind(s.groups, **(s.state or {}))
    starts = [(start, offset, prod(shape)) for (start, shape), offset in zip(s.segments, s.offsets, strict=True)]
    if bound.levels is not None:
        return spec.bind(levels=_parts_of("levels=", bound.levels, starts, floats=False))
    state = {name: _parts_of(name, x, starts) for name, x in bound.state.items()}
    optimizer: Any = bound.optimizer
    if not isinstance(optimizer, list | tuple):
        return spec.bind(optimizer, **state)
    groups: list[tuple[int, Any]] = []
    given = cast(Sequence[tuple[int, Any]], optimizer)
    for start, offset, n in starts:
        inside = [(at, o) for at, o in given if at < offset + n]
        first = max((i for i, (at, _) in enumerate(inside) if at <= offset), default=0)
        groups += [(start + max(0, at - offset), o) for at, o in inside[first:]]
    return spec.bind(groups, **state)


def _parts_of(name: str, x: Any, starts: Sequence[tuple[int, int, int]], *, floats: bool = True) -> Array:
    """Return the parts of a state array that belong to the sample, as float32 if `floats`, otherwise as bits."""
    v = on_host(name, view(x))
    if v.nbytes < ITEMSIZE[v.dtype] * max(offset + n for _, offset, n in starts):
        raise ArgumentError(
            f"{name} has {v.nbytes // ITEMSIZE[v.dtype]} values, fewer than all tensors together: bind the state of "
            "all tensors"
        )
    parts = [_part(v, offset, (n,)) for _, offset, n in starts]
    return np.concatenate([widen(part, v.dtype) for part in parts] if floats else parts)


def _part(v: TensorView, offset: int, shape: tuple[int, ...]) -> Array:
    """Return the bits of a tensor's values from index `offset` on as a flat array, with as many values as `shape`."""
    return v.array(UNSIGNED[v.dtype])[offset : offset + prod(shape)]


def _mean(x: Array, dtype: str, world_size: int) -> Array:
    """Return the bits of a tensor that compresses like a mean over ranks: the mean of x and of shifted copies of x.

    The shifted copies stand for other ranks: like the same value on two ranks, neighbouring values have similar
    exponents and different mantissas.
    """
    with np.errstate(all="ignore"):
        values = widen(x, dtype)
        total = values.copy()
        for k in range(1, min(world_size, MOST_RANKS)):
            total += np.roll(values, k)
        total /= np.float32(world_size)
    mean = np.empty_like(x)
    narrow(total, dtype, mean)
    return mean


def _groups(
    optimizer: Any, tensors: Sequence[GivenTensor], starts: Sequence[int]
) -> list[tuple[int, optimizers.Optimizer]]:
    """Return (offset, optimizer) for each run of tensors in one parameter group; `starts`: offset of each tensor."""
    group_of = {id(p): i for i, g in enumerate(optimizer.param_groups) for p in g["params"]}
    known: dict[int, optimizers.Optimizer] = {}
    found: list[tuple[int, optimizers.Optimizer]] = []
    for t, start in zip(tensors, starts, strict=False):
        group = group_of.get(id(t.parameter))
        if group is None:
            raise ArgumentError(
                f"a parameter of shape {tuple(t.parameter.shape)} is in none of the optimizer's param_groups: pass the "
                "optimizer of all parameters of the model"
            )
        if group not in known:
            known[group] = optimizers.from_optimizer(optimizer, group)
        if not found or found[-1][1] != known[group]:
            found.append((start, known[group]))
    return found


def _state(optimizer: Any, cuts: Sequence[Cut]) -> dict[str, Array]:
    """Return the sampled values of the parameters, and of the state arrays that all parameters have, as float32."""
    states = [optimizers.state_of(optimizer, t.parameter) for t, _, _ in cuts]
    common = [name for name in states[0] if all(name in s for s in states)]
    found: dict[str, Array] = {}
    for name in common:
        parts: list[Array] = []
        for s, (_, offset, shape) in zip(states, cuts, strict=True):
            v = on_host(f"state's {name}", view(s[name]))
            parts.append(widen(_part(v, offset, shape), v.dtype))
        found[name] = np.concatenate(parts)
    return found
