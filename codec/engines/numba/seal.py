# pyright: basic
"""Digests of bytes (docs/format.md, section 11)."""

import numpy as np

from codec.engines.numba.jit import jit

U32, U64 = np.uint32, np.uint64
GOLDEN = U64(0x9E3779B97F4A7C15)
REGION, PLANE, STATE = 0x300, 0x400, 0x500  # seeds
WORDS = 256  # of a chunk


def _keys() -> np.ndarray:
    """h(i + 1) | 1."""
    with np.errstate(over="ignore"):
        x = np.arange(1, WORDS + 1, dtype=U32)
        x = (x ^ x >> U32(16)) * U32(0x85EBCA6B)
        x = (x ^ x >> U32(13)) * U32(0xC2B2AE35)
        return x ^ x >> U32(16) | U32(1)


KEYS = _keys()


@jit
def mix(x):
    """A bijection of 64-bit words."""
    x ^= x >> U64(30)
    x *= U64(0xBF58476D1CE4E5B9)
    x ^= x >> U64(27)
    x *= U64(0x94D049BB133111EB)
    return x ^ x >> U64(31)


@jit
def digest(data, seed):
    """Of bytes."""
    total = U64(0)
    whole = len(data) // 4
    words = data[: 4 * whole].view(U32)
    nchunks = (len(data) + 4 * WORDS - 1) // (4 * WORDS)
    for c in range(nchunks):
        chunk = words[WORDS * c : WORDS * c + WORDS]
        s = U64(0)
        for i in range(len(chunk)):
            s += U64(chunk[i]) * U64(KEYS[i])
        if c == nchunks - 1:
            last = U64(0)
            for i in range(4 * whole, len(data)):
                last |= U64(data[i]) << U64(8 * (i % 4))
            if last:
                s += last * U64(KEYS[whole % WORDS])
        total += mix(s + ((U64(seed) << U64(40)) + U64(c)) * GOLDEN)
    return total


@jit
def seal_block(data, b):
    """What a block whose bytes have this digest adds to the checksum; its upper half stands in the directory."""
    return mix(data ^ U64(b + 1) * GOLDEN)
