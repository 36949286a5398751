# pyright: basic
"""Tensors of any float dtype as float32, and decoded values to where they go."""

from typing import Any, NamedTuple

import numpy as np

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

FLOAT32, BFLOAT16, FLOAT16 = 1, 3, 4
STORE, ADD, MAXIMUM = 0, 1, 2  # codec_context.into; 3 is STORE as float32
NOWHERE = 101


@jit
def to_floats(dtype, data, first, x):
    """Values of a tensor (its bytes) from `first` on."""
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
    """Float32 values, rounded, to a tensor from value `first` on."""
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
def load(dtype, data, error, first, x):
    """What is encoded: values of a tensor, plus what was lost of earlier ones unless `error` is empty."""
    to_floats(dtype, data, first, x)
    if len(error):
        e = error[first : first + len(x)]
        for i in range(len(x)):
            x[i] = plus(x[i], e[i])


@jit
def load_native(dtype, data, error, first, x, native):
    """The same rounded to the dtype (Inf stays), as bytes; `x` is room for as many float32."""
    load(dtype, data, error, first, x)
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
    """The larger one, NaN if either is."""
    return y if a < y or np.isnan(y) else a


class Sink(NamedTuple):
    """Where decoded values go."""

    into: int
    weight: Any  # float32
    divide: Any  # the result, if it is not 0
    unscaled: bool  # ternary: values are 0, 1 and -1
    rescale: bool  # the result by the part's scale
    data: Any  # the destination's bytes


@jit
def put(sink, scale, y, first):
    """Float32 values to a float32 destination from value `first` on."""
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
