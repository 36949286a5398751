"""Conversion of values to float32 and back; NumPy has no bfloat16."""

from typing import Any

import numpy as np

Bits = np.ndarray[Any, Any]
Floats = np.ndarray[Any, np.dtype[np.float32]]


def widen(bits: Bits, dtype: str, out: Floats | None = None) -> Floats:
    """Convert values to float32, which is exact. float32 values are not copied unless `out` is given.

    Parameters
    ----------
    bits : numpy.ndarray
        Values, or unsigned integers with the bits of the values, as those of bfloat16 always are.
    dtype : {"float32", "bfloat16", "float16"}
        Dtype of the values.
    out : numpy.ndarray of float32, optional
        Array of the same shape for the result.
    """
    if dtype == "float32" and out is None:
        return bits.view(np.float32)
    if out is None:
        out = np.empty(bits.shape, np.float32)
    if dtype == "bfloat16":
        words = out.view(np.uint32)
        np.copyto(words, bits)
        np.left_shift(words, 16, out=words)
    else:
        np.copyto(out, bits.view(dtype))
    return out


def narrow(x: Floats, dtype: str, out: Bits) -> None:
    """Convert float32 values to `dtype`, rounded to nearest even, and write them to `out`. NaN remains NaN."""
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):
            np.copyto(out.view(dtype), x, casting="same_kind")
        return
    words = x.view(np.uint32)
    rounded = words >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += words  # may overflow for NaN, which is handled below
    rounded >>= 16
    np.copyto(out, rounded, casting="unsafe")
    nan = np.isnan(x)
    if nan.any():
        out[nan] = (words[nan] >> 16).astype(np.uint16) | 0x40
