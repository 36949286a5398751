"""Measure the errors and costs of specs on samples of this rank's gradients, and report them as integers."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from math import prod
from typing import Any, cast

import numpy as np
import torch

from codec import CallOptions, CodecError
from codec.advisor.advise import measure
from codec.advisor.cost_model import Cost
from codec.advisor.sampling import Sample, samples, tensors_of
from codec.decoding import decode
from codec.encoding import encode
from codec.specs import Spec
from codec.tensors.floats import widen
from codec.tensors.wrapper import view

MILLION = 1_000_000
UNKNOWN = -1  # reported error of a tensor that was not measured, such as one whose sample is zero everywhere
_FIELDS = tuple(f.name for f in fields(Cost))
_BUDGET = 1 << 18  # maximum number of values sampled from all tensors together
_FEWEST = 512  # minimum number of values sampled from a tensor, unless there are too many tensors for the budget


@dataclass
class Samples:
    """Samples of the gradients of one step, by parameter name."""

    values: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    # Norm of the residual divided by the norm of the gradient.
    ratios: dict[str, float] = field(default_factory=dict[str, float])
    # True if gradients are on a GPU: times of encoding on the host then say nothing about the GPU.
    on_device: bool = False


def take(flat: torch.Tensor, shape: Sequence[int], values: int, tensors: int) -> torch.Tensor:
    """Copy a sample of a tensor to host memory: rows from its middle, or a part of one row if rows are too long.

    Parameters
    ----------
    flat : torch.Tensor
        All values of the tensor.
    shape : sequence of int
        Shape of the tensor.
    values, tensors : int
        Total number of values of all sampled tensors, and number of these tensors.
    """
    n = flat.numel()
    wanted = min(n, max(1, min(_FEWEST, _BUDGET // tensors), n * _BUDGET // max(1, values)))
    row = next((r for i in range(1, len(shape)) if 0 < (r := prod(shape[i:])) <= wanted), 0)
    if not row:
        begin = (n - wanted) // 2
        return flat[begin : begin + wanted].detach().cpu().clone()
    count = wanted // row
    begin = (n // row - count) // 2 * row
    return flat[begin : begin + count * row].detach().cpu().clone().view(count, row)


def numbers_of(
    taken: Samples, names: Sequence[str], values: int, specs: Sequence[Spec], world_size: int, options: CallOptions
) -> list[int]:
    """Return a rank's measurements of its samples, as integers that all ranks exchange.

    Parameters
    ----------
    taken : Samples
        Samples of some of the tensors.
    names : sequence of str
        Names of all tensors, in the order of the report.
    values : int
        Total number of values of all tensors.
    specs : sequence of Spec
        Specs to measure; the first one is lossless.
    world_size : int
        Number of ranks.
    options : CallOptions
        Engine and threads of the measurements.

    Returns
    -------
    list of int
        First, for each spec: the fields of its :class:`Cost`, scaled to all values, in bytes and nanoseconds. Then, for
        each tensor and each spec but the first: the relative error in millionths, or `UNKNOWN` if it was not measured.
    """
    keys = [name for name in names if name in taken.values]
    found = [0] * (len(_FIELDS) * len(specs))
    errors = {name: [UNKNOWN] * (len(specs) - 1) for name in names}
    if keys:
        tensors, _ = tensors_of([taken.values[key] for key in keys], None)
        by_dtype = samples(tensors, world_size, None)
        scale = values / sum(s.n for s in by_dtype)
        for i, spec in enumerate(specs):
            found[len(_FIELDS) * i : len(_FIELDS) * (i + 1)] = _cost(by_dtype, spec, scale, taken.on_device, options)
        kinds = dict.fromkeys(t.v.dtype for t in tensors)
        for s, dtype in zip(by_dtype, kinds, strict=True):
            mine = [key for t, key in zip(tensors, keys, strict=True) if t.v.dtype == dtype]
            for i, spec in enumerate(specs[1:]):
                for key, error in zip(mine, _errors(s, spec, options), strict=True):
                    errors[key][i] = error
    return found + [error for name in names for error in errors[name]]


def length(tensors: int, specs: int) -> int:
    """Return the number of integers that :func:`numbers_of` returns for a number of tensors and of specs."""
    return len(_FIELDS) * specs + tensors * (specs - 1)


def costs_of(numbers: Sequence[int], specs: int) -> list[Cost]:
    """Return the cost of each of `specs` specs, read from the report `numbers`."""
    costs: list[Cost] = []
    for i in range(specs):
        frame, total, *nanoseconds = numbers[len(_FIELDS) * i : len(_FIELDS) * (i + 1)]
        costs.append(Cost(float(frame), float(total), *(1e-9 * t for t in nanoseconds)))
    return costs


def errors_of(numbers: Sequence[int], names: Sequence[str], specs: int) -> dict[str, list[int]]:
    """Return, for each tensor, its errors with all specs but the first one, read from the report `numbers`."""
    errors = numbers[len(_FIELDS) * specs :]
    return {name: list(errors[i * (specs - 1) : (i + 1) * (specs - 1)]) for i, name in enumerate(names)}


def _cost(by_dtype: Sequence[Sample], spec: Spec, scale: float, on_device: bool, options: CallOptions) -> Iterator[int]:
    try:
        costs = [measure(s, spec, None, False, options) * scale for s in by_dtype]
    except CodecError:  # NaN or Inf: the step fails, or a GradScaler skips it
        costs = [Cost(0.0, 0.0)]
    total = sum(costs[1:], costs[0])
    for name in _FIELDS:
        value = getattr(total, name)
        is_size = name.endswith("nbytes")
        yield round(value) if is_size else 0 if on_device else round(1e9 * value)


def _errors(s: Sample, spec: Spec, options: CallOptions) -> list[int]:
    """Return the relative error, in millionths, of each segment of a sample."""
    try:
        frame = encode(view(s.x, s.dtype, s.segments), spec, options=options)
        back = decode(frame, out=np.empty_like(s.x), options=options)
    except CodecError:
        return [UNKNOWN] * len(s.segments)
    x, y = widen(s.x, s.dtype), widen(cast(Any, back), s.dtype)
    found: list[int] = []
    for start, shape in s.segments:
        here = slice(start, start + prod(shape))
        norm = float(np.linalg.norm(x[here].astype(np.float64)))
        lost = float(np.linalg.norm(x[here].astype(np.float64) - y[here]))
        found.append(UNKNOWN if norm == 0 else min(math.ceil(MILLION * lost / norm), 1 << 30))
    return found
