"""Zero points of quantized pages: the midpoint of each group, which is subtracted before values are quantized."""

from typing import Any

import numpy as np

from codec.tensors.view import Array

Bits = Array  # unsigned integers: the bits of values
Floats = np.ndarray[Any, np.dtype[np.float32]]


def split(bits: Bits, dtype: str, group: int) -> tuple[Bits, Floats]:
    """Return the midpoints of groups, as bits of bfloat16, and the distances of all values to them.

    Parameters
    ----------
    bits : numpy.ndarray of unsigned integers, shape (..., columns)
        Values, contiguous.
    dtype : {"bfloat16", "float16", "float32"}
        Dtype of the values.
    group : int
        Number of neighbouring columns that share a midpoint, a divisor of the number of columns.

    Returns
    -------
    midpoints, distances : numpy.ndarray, shapes (..., columns / group) and (..., columns)
    """
    values: Floats = widen(bits, dtype).reshape(*bits.shape[:-1], -1, group)
    with np.errstate(all="ignore"):  # a group with NaN or Inf gives NaN, which Quantize refuses
        midpoints = narrow(values.max(-1) * np.float32(0.5) + values.min(-1) * np.float32(0.5), "bfloat16")
        values -= widen(midpoints, "bfloat16")[..., None]
    return midpoints, values.reshape(bits.shape)


def join(midpoints: Bits, distances: Floats, dtype: str) -> Bits:
    """Return the bits of values: distances plus midpoints, rounded to the nearest number of `dtype`."""
    groups = distances.reshape(*midpoints.shape, -1)
    with np.errstate(all="ignore"):
        groups += widen(midpoints, "bfloat16")[..., None]
        return narrow(distances, dtype)


def widen(bits: Bits, dtype: str) -> Floats:
    """Return values as float32, which holds all numbers of `dtype`."""
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return bits.view(dtype).astype(np.float32)


def narrow(values: Floats, dtype: str) -> Bits:
    """Return the bits of the nearest numbers of `dtype`, ties to even. NaN may become Inf."""
    if dtype == "float32":
        return values.view(np.uint32)
    if dtype == "float16":
        return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    bits = bits + (((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))
    return (bits >> np.uint32(16)).astype(np.uint16)
