# pyright: basic
"""Conversion of tensors of any float dtype to float32, and of decoded values to their destination."""

from typing import Any, NamedTuple

import numpy as np

from codec._c.library import DTYPES, lib
from codec.engines.numba.jit import jit
from codec.engines.numba.words import (
    ABS,
    F32,
    INF,
    U16,
    U32,
    copy,
    from_bfloat16,
    from_float16,
    plus,
    to_bfloat16,
    to_float16,
)

FLOAT32, BFLOAT16, FLOAT16 = DTYPES["float32"], DTYPES["bfloat16"], DTYPES["float16"]
STORE, ADD, MAXIMUM = lib.CODEC_INTO_STORE, lib.CODEC_INTO_ADD, lib.CODEC_INTO_MAX
NOWHERE = 101  # value of Sink.into: validate the frame without decoding values


@jit
def to_floats(dtype, data, first, x):
    """Fill ``x`` with a tensor's values from index ``first`` on, as float32; ``data``: bytes of the tensor."""
    n = len(x)
    if dtype == FLOAT32:
        copy(x, data[4 * first : 4 * (first + n)].view(F32))
        return
    h = data[2 * first : 2 * (first + n)].view(U16)
    u = x.view(U32)
    if dtype == BFLOAT16:
        for i in range(n):
            u[i] = from_bfloat16(h[i])
    else:
        for i in range(n):
            u[i] = from_float16(h[i])


@jit
def from_floats(dtype, x, data, first):
    """Round float32 values ``x`` to a dtype, and store them from index ``first`` on; ``data``: bytes of the tensor."""
    n = len(x)
    if dtype == FLOAT32:
        copy(data[4 * first : 4 * (first + n)].view(F32), x)
        return
    h = data[2 * first : 2 * (first + n)].view(U16)
    u = x.view(U32)
    if dtype == BFLOAT16:
        for i in range(n):
            h[i] = to_bfloat16(u[i])
    else:
        for i in range(n):
            h[i] = to_float16(u[i])


@jit
def load(dtype, data, feedback, first, x):
    """Fill ``x`` with the values to encode: the tensor's values, plus residuals unless ``feedback`` is empty."""
    to_floats(dtype, data, first, x)
    if len(feedback):
        e = feedback[first : first + len(x)]
        for i in range(len(x)):
            x[i] = plus(x[i], e[i])


@jit
def load_native(dtype, data, feedback, first, x, native):
    """Store the values to encode in ``native``, as bytes, rounded to the tensor's dtype; Inf stays Inf.

    ``x`` is a buffer of float32; its length is the number of values.
    """
    load(dtype, data, feedback, first, x)
    from_floats(dtype, x, native, 0)
    if dtype == FLOAT32:
        return
    h, u = native[: 2 * len(x)].view(U16), x.view(U32)
    inf = U16(0x7C00 if dtype == FLOAT16 else 0x7F80)
    for i in range(len(x)):
        if U32(u[i] & ABS) == INF:
            h[i] = U16(U32(u[i] >> U32(16)) & U32(0x8000)) | inf


@jit
def larger(a, y):
    """Return the maximum of two values; NaN if either is NaN."""
    return y if a < y or np.isnan(y) else a


class Sink(NamedTuple):
    """Destination of decoded values, and the operation that combines them with the destination's contents."""

    into: int  # STORE, ADD, MAXIMUM or NOWHERE; any other value: store float32 even if the frame has another dtype
    weight: Any  # float32 factor of added values
    divide: Any  # float32 divisor of the result; 0: none
    unscaled: bool  # True: ternary values are 0, 1 and -1, without their scale
    rescale: bool  # True: multiply the result by the part's scale
    data: Any  # memory of the destination, as bytes


@jit
def put(sink, scale, y, first):
    """Combine float32 values ``y`` with the float32 destination, from index ``first`` on."""
    n, weight, divide = len(y), sink.weight, sink.divide
    out = sink.data[4 * first : 4 * (first + n)].view(F32)
    if sink.into == ADD:
        for i in range(n):
            out[i] = F32(out[i] + F32(weight * y[i]))
    elif sink.into == MAXIMUM:
        for i in range(n):
            out[i] = larger(out[i], y[i])
    else:
        copy(out, y)
    if sink.rescale:
        for i in range(n):
            out[i] = F32(out[i] * scale)
    if divide > F32(0):
        for i in range(n):
            out[i] = F32(out[i] / divide)
