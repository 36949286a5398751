# pyright: basic
"""Digests of bytes and checksums of blocks (docs/spec/format.md, section 13)."""

import numpy as np

from codec.engines.numba.jit import jit

U32, U64 = np.uint32, np.uint64
GOLDEN = U64(0x9E3779B97F4A7C15)
REGION, PLANE, STATE, VALUES = 0x300, 0x400, 0x500, 0x600  # by kind of data: seed of its digests
PAIRS = 128  # pairs of 32-bit words in a chunk
LOWER = U64(0xFFFFFFFF)


def _keys() -> np.ndarray:
    """Return the key h(i + 1) | 1 for each 32-bit word i of a chunk."""
    with np.errstate(over="ignore"):
        x = np.arange(1, 2 * PAIRS + 1, dtype=U32)
        x = (x ^ x >> U32(16)) * U32(0x85EBCA6B)
        x = (x ^ x >> U32(13)) * U32(0xC2B2AE35)
        return x ^ x >> U32(16) | U32(1)


EVEN, ODD = _keys()[::2].astype(U64), _keys()[1::2].astype(U64)


@jit
def mix(x):
    """Return the 64-bit word ``x`` after the mixing function of format.md, section 13, a bijection."""
    x ^= x >> U64(30)
    x *= U64(0xBF58476D1CE4E5B9)
    x ^= x >> U64(27)
    x *= U64(0x94D049BB133111EB)
    return x ^ x >> U64(31)


@jit
def _product(x, i):
    """Return the sum of words 2 i and 2 i + 1 of a chunk, each multiplied by its key; ``x`` contains both words."""
    return (x & LOWER) * EVEN[i] + (x >> U64(32)) * ODD[i]


@jit
def digest(data, seed):
    """Return the 64-bit digest of bytes."""
    return digest_from(data, seed, 0)


@jit
def digest_from(data, seed, first):
    """Return the part of a sequence's 64-bit digest that comes from ``data``, the chunks from number ``first`` on."""
    total = U64(0)
    whole = len(data) // 8
    pairs = data[: 8 * whole].view(U64)
    nchunks = (len(data) + 8 * PAIRS - 1) // (8 * PAIRS)
    for c in range(nchunks):
        chunk = pairs[PAIRS * c : PAIRS * c + PAIRS]
        s = U64(0)
        for i in range(len(chunk)):
            s += _product(chunk[i], i)
        if c == nchunks - 1:
            last = U64(0)
            for i in range(8 * whole, len(data)):
                last |= U64(data[i]) << U64(8 * (i % 8))
            s += _product(last, whole % PAIRS)
        total += mix(s + ((U64(seed) << U64(40)) + U64(first + c)) * GOLDEN)
    return total


@jit
def block_checksum(data, b):
    """Return the checksum of block ``b``, whose bytes have the digest ``data``.

    The checksum of a frame is the sum of its blocks' checksums. The upper half of a block's checksum is stored in its
    directory entry.
    """
    return mix(data ^ U64(b + 1) * GOLDEN)
