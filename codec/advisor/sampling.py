"""A few MiB of many tensors, as a flat bucket that compresses as all of them do."""

import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, cast

import numpy as np

from codec import optimizers
from codec._c.library import ITEMSIZE, MANTISSA_BITS, ffi
from codec.errors import ArgumentError, CodecError
from codec.tensors.segments import Segments
from codec.tensors.view import Array, TensorView, on_host, view

NBYTES = 4 << 20  # of a sample
WINDOWS = 8  # parts of the bucket, far from each other, that a sample is made of
MOST_RANKS = 8  # whose mean is made: more make no difference to its size


class Tensor(NamedTuple):
    """One of the user's tensors, and the parameter whose gradient it is, if an optimizer is to be asked."""

    v: TensorView
    parameter: Any = None


Cut = tuple[Tensor, int, tuple[int, ...]]  # the offset inside of a tensor where a part begins, and the part's shape


class Sample(NamedTuple):
    """Rows of tensors of one dtype, in their order."""

    dtype: str
    x: Array  # bits
    mean: Array  # bits of what the mean over ranks would be like
    segments: Segments
    n: int  # values of all tensors, of which these are some
    metric: Any = None  # of each group of parameters, with the offsets where they begin
    state: dict[str, Array] | None = None


def tensors_of(given: Any, dtype: Any, optimizer: Any) -> tuple[list[Tensor], bool]:
    """Look through what the user gave; True beside it if these are weights, which have no gradients yet.

    Raises
    ------
    ArgumentError, EngineError
        There are no values, or some that cannot be reduced or read; the key of that tensor is in the message.
    """
    items, weights = _items(given)
    owners: dict[int, Any] = {}
    if optimizer is not None:
        if not hasattr(optimizer, "param_groups"):
            raise ArgumentError(f"optimizer must be one of torch.optim's, not {type(optimizer).__name__}")
        owners = {id(p.grad): p for g in optimizer.param_groups for p in g["params"]}
    found: list[Tensor] = []
    for key, x, parameter in items:
        try:
            v = on_host("it", view(x, dtype))
            if v.dtype not in MANTISSA_BITS:
                raise ArgumentError(
                    f"{v.dtype} cannot be reduced from frames, only {', '.join(MANTISSA_BITS)}: leave it to an "
                    "all-reduce of its own"
                )
            owner = parameter if parameter is not None else owners.get(id(x))
            if optimizer is not None and owner is None:
                raise ArgumentError(
                    "optimizer= has no parameter whose gradient this is: give a model, or gradients of its"
                )
            if v.nbytes:
                found.append(Tensor(v, owner))
        except CodecError as e:
            if key is not None:
                e.of(key)
            raise
    if not found:
        raise ArgumentError("there are no values to measure")
    return found, weights


def _items(given: Any) -> tuple[Iterable[tuple[Any, Any, Any]], bool]:
    """Keys, tensors and, of a model, their parameters; True beside it if the tensors are the parameters."""
    module: Any = getattr(getattr(sys.modules.get("torch"), "nn", None), "Module", ())
    if isinstance(given, module):
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


def samples(tensors: Sequence[Tensor], world_size: int, optimizer: Any) -> list[Sample]:
    """One for each dtype, of `NBYTES` together, or of all values if they are fewer.

    Parts are cut where rows begin: scales of lossless frames are by row and column. They lie far from each other, for
    layers differ.
    """
    total = sum(t.v.nbytes for t in tensors)
    by_dtype: dict[str, list[Tensor]] = {}
    for t in tensors:
        by_dtype.setdefault(t.v.dtype, []).append(t)
    found: list[Sample] = []
    for dtype, group in by_dtype.items():
        n = sum(t.v.nbytes for t in group) // ITEMSIZE[dtype]
        wanted = n if total <= NBYTES else max(1, n * NBYTES // total)
        found.append(_sample(dtype, group, list(_cuts(group, n, wanted)), world_size, optimizer))
    return found


def _cuts(group: Sequence[Tensor], n: int, wanted: int) -> Iterator[Cut]:
    """Parts of tensors, `wanted` of their `n` values or a little more."""
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
            # the largest rows of which one fits
            inner = next(s for k in range(1, len(t.v.shape) + 1) if prod(s := t.v.shape[k:]) <= width)
            row = prod(inner)
            yield t, low // row * row, (-(-high // row) - low // row, *inner)


def _sample(
    dtype: str,
    group: Sequence[Tensor],
    cuts: list[Cut],
    world_size: int,
    optimizer: Any,
) -> Sample:
    x = np.concatenate([_part(t.v, offset, shape) for t, offset, shape in cuts])
    starts = list(itertools.accumulate((prod(shape) for _, _, shape in cuts), initial=0))
    segments = [(start, shape) for start, (_, _, shape) in zip(starts, cuts, strict=False)]
    n = sum(t.v.nbytes for t in group) // ITEMSIZE[dtype]
    metric, state = None, None
    if optimizer is not None:
        metric = _metrics(optimizer, [t for t, _, _ in cuts], starts)
        state = _state(optimizer, cuts)
    return Sample(dtype, x, _mean(x, dtype, world_size), segments, n, metric, state)


def _part(v: TensorView, offset: int, shape: tuple[int, ...]) -> Array:
    """Values from an offset on, as bits."""
    size = ITEMSIZE[v.dtype]
    return np.frombuffer(ffi.buffer(v.data, v.nbytes), f"u{size}", prod(shape), offset * size)


def _floats(x: Array, dtype: str) -> Array:
    """Bits as float32."""
    return (x.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else x.view(dtype).astype(np.float32)


def _mean(x: Array, dtype: str, world_size: int) -> Array:
    """What the mean of all ranks' tensors is like, as bits.

    Other ranks' values are like the neighbours of a value: of its size, but with bits of their own. So this is the mean
    of x and of x moved on by one, two, ... values.
    """
    with np.errstate(all="ignore"):
        values = _floats(x, dtype)
        total = values.copy()
        for k in range(1, min(world_size, MOST_RANKS)):
            total += np.roll(values, k)
        total /= np.float32(world_size)
        if dtype == "bfloat16":
            bits = total.view(np.uint32)
            return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)  # to nearest even
        return total.astype(dtype).view(x.dtype)


def _metrics(optimizer: Any, tensors: Sequence[Tensor], starts: Sequence[int]) -> list[tuple[int, optimizers.Metric]]:
    """Of the step to come: for each group of parameters, from its offset on."""
    group_of = {id(p): i for i, g in enumerate(optimizer.param_groups) for p in g["params"]}
    known: dict[int, optimizers.Metric] = {}
    found: list[tuple[int, optimizers.Metric]] = []
    for t, start in zip(tensors, starts, strict=False):
        group = group_of.get(id(t.parameter))
        if group is None:
            raise ArgumentError("a parameter is not among the optimizer's")
        if group not in known:
            known[group] = optimizers.from_optimizer(optimizer, group)
        if not found or found[-1][1] != known[group]:
            found.append((start, known[group]))
    return found


def _state(optimizer: Any, cuts: Sequence[Cut]) -> dict[str, Array]:
    """The same parts of parameters and of the optimizer's arrays, those that all parameters have, in float32."""
    states = [optimizers.state_of(optimizer, t.parameter) for t, _, _ in cuts]
    common = [name for name in states[0] if all(name in s for s in states)]
    found: dict[str, Array] = {}
    for name in common:
        parts: list[Array] = []
        for s, (_, offset, shape) in zip(states, cuts, strict=True):
            v = on_host(f"state's {name}", view(s[name]))
            parts.append(_floats(_part(v, offset, shape), v.dtype))
        found[name] = np.concatenate(parts)
    return found
