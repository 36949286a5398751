"""Arithmetic of uncompressed values: sums in rank order, and norms, which ``codec.options(max_norm=)`` bounds."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from codec import FrameError
from codec.torch._compat import from_numpy
from codec.torch.transport.messages import Array

_TILE = 1 << 16  # number of values that are processed at a time, so that they stay in the cache
_EXACT = 1e-30  # square of a norm below which float32 squares may have underflowed


def largest_of(a: Array, b: Array, out: Array) -> None:
    """Store the elementwise maximum of `a` and `b` in `out`; NaN if either value is NaN."""
    torch.maximum(from_numpy(a), from_numpy(b), out=from_numpy(out))


def reduce_values(parts: Sequence[Array], op: str, out: Array, widened: Callable[[Array], Array]) -> None:
    """Store the sum, mean or maximum of the values of all ranks in `out`, in rank order.

    Parameters
    ----------
    parts : sequence of ndarray
        Values of each rank; two or more.
    op : {"sum", "mean", "max"}
    out : ndarray
        Memory for the result.
    widened : callable
        Returns values of a rank in the dtype of `out`.
    """
    add = largest_of if op == "max" else np.add
    with np.errstate(over="ignore", invalid="ignore"):  # the result is checked for Inf and NaN later
        for begin in range(0, out.size, _TILE):
            place = out[begin : begin + _TILE]
            first, second, *more = (widened(part[begin : begin + _TILE]) for part in parts)
            add(first, second, out=place)
            for each in more:
                add(place, each, out=place)
            if op == "mean":
                place /= out.dtype.type(len(parts))


def square(x: Any) -> float:
    """Return the squared norm of float32 values."""
    return float(torch.dot(x, x)) if isinstance(x, torch.Tensor) else float(np.dot(x, x))


def norm_of(x: Array) -> float:
    """Return the L2 norm of flat float32 or float64 values; NaN or Inf if a value is NaN or Inf."""
    total = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for begin in range(0, x.size, _TILE):
            part = x[begin : begin + _TILE]
            squared = float(np.dot(part, part))
            if not _EXACT < squared < math.inf:  # float32 cannot hold all squares
                wide = part.astype(np.float64)
                squared = float(np.dot(wide, wide))
            total += squared
    return math.sqrt(total)


def check_norm(norm: float, most: float, rank: int, count: int = 1) -> None:
    """Raise FrameError if the norm of values is above a bound, or not a number.

    Parameters
    ----------
    norm : float
        Norm of the values in one frame, or in one message of uncompressed values.
    most : float
        Value of ``codec.options(max_norm=)``.
    rank : int
        Rank that has sent the values.
    count : int
        Number of ranks whose values are added up in a value.
    """
    if norm <= most * count:
        return
    of = f" for a sum over {count} ranks, {most * count:g}" if count > 1 else ""
    raise FrameError(
        f"rank {rank} has sent values whose L2 norm in one frame is {norm:.4g}, above max_norm={most:g}{of}: nothing "
        "was changed"
    )
