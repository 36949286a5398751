"""Convert entries of the store (stored m) to and from float32."""

from typing import Any, NamedTuple

import numpy as np

from codec.decoding import decode
from codec.encoding import bound, encode
from codec.errors import ArgumentError
from codec.inspection import inspect, verify
from codec.specs import Quantize
from codec.tensors.floats import Floats, narrow, widen

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

EIGHT_BIT = Quantize(8, rounding="nearest")  # codec for entries of dtype "8bit", and default for raw samples
BITS: dict[str, Any] = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.float16}


class SampleEntry(NamedTuple):
    """Metadata of a sample's stored m."""

    check: int  # hash that identifies m, never 0
    n: int  # number of values of m
    visits: int  # number of deltas since m was last sent raw


def largest_nbytes(dtype: str, n: int) -> int:
    """Return the maximum size of an entry of n values, in bytes."""
    return bound((n,), "float32", EIGHT_BIT, exact=True) if dtype == "8bit" else n * (4 if dtype == "float32" else 2)


def pack(row: Floats, dtype: str, out: Bytes) -> int:
    """Convert a row of float32 values to an entry in `out`, and return the entry's size in bytes.

    Raises
    ------
    ArgumentError
        The row contains NaN or Inf, and `dtype` is "8bit".
    """
    if dtype == "8bit":
        return len(encode(row, EIGHT_BIT, out=out))
    n = len(row) * (4 if dtype == "float32" else 2)
    narrow(row, dtype, out[:n].view(BITS[dtype]))
    return n


def unpack(entry: Bytes, dtype: str, out: Floats) -> None:
    """Convert an entry to float32 values, and write them to `out`.

    Raises
    ------
    FrameError, ArgumentError
        The bytes are not an entry of this dtype and number of values.
    """
    if dtype == "8bit":
        decode(entry, out=out)
    else:
        widen(entry.view(BITS[dtype]), dtype, out)


def check_entry(entry: Bytes, dtype: str, n: int) -> None:
    """Check that bytes are a valid entry of n values.

    Raises
    ------
    CodecError
        The bytes are not a valid entry of this dtype and number of values.
    """
    if dtype == "8bit":
        info = inspect(entry)
        if (info.spec, info.dtype, info.shape) != (EIGHT_BIT, "float32", (n,)):
            raise ArgumentError(
                f"its frame must have {n} float32 values in 8 bits, got {info.dtype} of shape {info.shape} by "
                f"{info.spec}"
            )
        verify(entry)
    largest = largest_nbytes(dtype, n)
    if len(entry) > largest or (dtype != "8bit" and len(entry) != largest):
        raise ArgumentError(f"its size must be {largest} bytes for {n} values, got {len(entry)}")
