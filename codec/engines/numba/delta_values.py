# pyright: basic
"""Ranks, steps, exponents and classes of Delta's values (format.md, section 10.2), and a thread's buffers for them.

A value is represented by its bits as uint64. The rank of a value is its position in the order of all bit patterns of
its dtype. A step is the difference of two ranks, modulo 2^w for values of w bits.
"""

from typing import Any, NamedTuple

import numpy as np

from codec._c.library import DTYPE_NAMES, MANTISSA_BITS
from codec.engines.numba.bitstream import Bits
from codec.engines.numba.jit import jit
from codec.engines.numba.words import I64, U8, U16, U32, U64, copy

SAME, STEPS, RAW, PATCHES = 0, 1, 2, 3  # modes in which a region codes the changes of a block
BIAS, CLASSES, MORE, GAP_BITS, MAX_GAP_K = 16, 8, 8, 20, 18  # constants of format.md, section 10.3
_MBITS = MANTISSA_BITS | {
    "float64": 52,
    "float8_e4m3fn": 3,
    "float8_e4m3fnuz": 3,
    "float8_e5m2": 2,
    "float8_e5m2fnuz": 2,
}


class DeltaDtype(NamedTuple):
    """Constants of a dtype (format.md, section 10.2)."""

    w: int  # number of bits of a value
    mask: Any  # uint64 with the lower w bits set
    mbits: int  # number of mantissa bits; 0: the dtype has no exponents
    last: int  # largest exponent field; 0: the dtype has no exponents


class DeltaWork(NamedTuple):
    """Buffers of one thread that encodes or decodes blocks of Delta."""

    kind: DeltaDtype
    region: Any
    base: Any  # bits of the base's values in the block
    new: Any  # bits of the tensor's values in the block
    bytes: Any  # bytes of decoded values
    at: Any  # indices of the changed values of the block
    exponent: Any
    member: Any  # class of each value
    bins: Any  # by exponent: numbers of sampled values and of codes, and sum of steps
    bits: Bits
    c: Any


def work_of(job):
    """Allocate one thread's buffers for the blocks of a Delta job."""
    name, size, m = DTYPE_NAMES[job.dtype], job.size, min(job.block, job.n)
    mbits = _MBITS.get(name, 0)
    last = (1 << 8 * size - 1 - mbits) - 1 if mbits else 0
    return DeltaWork(
        DeltaDtype(8 * size, U64((1 << 8 * size) - 1), mbits, last),
        np.empty(m * size + 128, U8),  # 128 bytes more than the largest region, because the last code may exceed it
        np.empty(m, U64),
        np.empty(m, U64),
        np.empty(m * size, U8),
        np.empty(m, I64),
        np.empty(m, np.int16),
        np.empty(m, U8),
        np.zeros((3, last + 1), U64),
        Bits(np.zeros(2, I64), np.zeros(1, U64)),
        np.empty(2, I64),
    )


@jit
def load_bits(size, data, x):
    """Load the bits of values into ``x``; ``data``: bytes of the values."""
    if size == 1:
        copy(x, data)
    elif size == 2:
        copy(x, data.view(U16))
    elif size == 4:
        copy(x, data.view(U32))
    else:
        copy(x, data.view(U64))


@jit
def store_bits(size, x, data):
    """Store the bits of values, little-endian, in ``data``; ``size``: bytes per value."""
    for i in range(len(x)):
        for k in range(size):
            data[size * i + k] = U8(x[i] >> U64(8 * k))


@jit
def rank_of(kind, x):
    """Convert the bits of a float to its rank, or a rank to the bits. The function is its own inverse."""
    return x ^ ((kind.mask >> U64(1)) & (U64(0) - (x >> U64(kind.w - 1) & U64(1))))


@jit
def step_of(kind, x, y):
    """Return the step from value ``x`` to value ``y``."""
    if kind.last:
        return (rank_of(kind, y) - rank_of(kind, x)) & kind.mask
    return (y - x) & kind.mask


@jit
def moved(kind, x, step):
    """Return the value that is ``step`` away from value ``x``."""
    if kind.last:
        return rank_of(kind, (rank_of(kind, x) + step) & kind.mask)
    return (x + step) & kind.mask


@jit
def is_negative(kind, step):
    """Return 1 if a step is negative."""
    return step >> U64(kind.w - 1) & U64(1)


@jit
def size_of(kind, step):
    """Return the absolute value of a step, at most 2^(w - 1)."""
    return (U64(0) - step) & kind.mask if is_negative(kind, step) else step


@jit
def fill_exponents(kind, x, e):
    """Extract the exponent fields of values; 0 is replaced by 1, the exponent of subnormals."""
    for i in range(len(x)):
        e[i] = max(I64(x[i] >> U64(kind.mbits)) & kind.last, 1)


@jit
def class_of(exponent, scale):
    """Return the class of a value: 0 for exponents up to ``scale``, 1 to 8 for pairs of exponents above it."""
    return min(max((I64(exponent) - scale + 1) >> 1, 0), CLASSES)


@jit
def small_k(kind, exponent, scale):
    """Return the Rice parameter with which the step of a value of class 0 is coded."""
    return min(scale - I64(exponent), kind.w - 2)
