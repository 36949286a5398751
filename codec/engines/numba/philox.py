# pyright: basic
"""Random bits of values, from the generator Philox4x32-10 (docs/spec/encoder.md, section 7.3)."""

from codec.engines.numba.jit import jit, kernel
from codec.engines.numba.words import U16, U32, U64

ROUNDS = 10


@kernel
def fill_keys(seed, stream, keys):
    """Fill ``keys`` (21 uint32) with two key words for each round, and the upper word of all counters."""
    for r in range(ROUNDS):
        keys[2 * r] = U32(U32(seed) + U32(U32(r) * U32(0x9E3779B9)))
        keys[2 * r + 1] = U32(U32(stream) + U32(U32(r) * U32(0xBB67AE85)))
    keys[2 * ROUNDS] = U32(stream >> U64(32))


@jit
def _round(c0, c1, c2, c3, k0, k1):
    """Return the four words of a counter after one Philox round."""
    a, b = U64(U32(c0)) * U64(0xD2511F53), U64(U32(c2)) * U64(0xCD9E8D57)
    return U32(U32(b >> U64(32)) ^ c1 ^ k0), U32(b), U32(U32(a >> U64(32)) ^ c3 ^ k1), U32(a)


@jit
def fill_random(keys, first, n, half):
    """Fill ``half`` with 16 random bits (word 0) for each of ``n`` values, from value ``first`` on.

    Each counter yields bits for an aligned group of 8 values. Return the index in ``half`` of value ``first``'s bits.
    """
    words = half.view(U32)
    # LLVM vectorizes only loops without an inner loop, so keys are local variables, and rounds are unrolled
    k0, k1, k2, k3, k4, k5, k6, k7, k8, k9 = (
        keys[0], keys[1], keys[2], keys[3], keys[4], keys[5], keys[6], keys[7], keys[8], keys[9],
    )  # fmt: skip
    m0, m1, m2, m3, m4, m5, m6, m7, m8, m9 = (
        keys[10], keys[11], keys[12], keys[13], keys[14], keys[15], keys[16], keys[17], keys[18], keys[19],
    )  # fmt: skip
    last = keys[2 * ROUNDS]
    for b in range((first + n + 7) // 8 - first // 8):
        at = U64(first // 8) + U64(b)
        c0, c1, c2, c3 = U32(at), U32(at >> U64(32)), U32(0), last
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, k0, k1)
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, k2, k3)
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, k4, k5)
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, k6, k7)
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, k8, k9)
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, m0, m1)
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, m2, m3)
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, m4, m5)
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, m6, m7)
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, m8, m9)
        words[4 * b], words[4 * b + 1], words[4 * b + 2], words[4 * b + 3] = c0, c1, c2, c3
    return first % 8


@jit
def random_word(keys, i, word):
    """Return 16 random bits of value ``i``; ``word`` selects one of the value's words of random bits."""
    c0, c1, c2, c3 = U32(U64(i // 8)), U32(U64(i // 8) >> U64(32)), U32(word), keys[2 * ROUNDS]
    for r in range(ROUNDS):
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, keys[2 * r], keys[2 * r + 1])
    k = i // 2 % 4
    c = c0 if k == 0 else c1 if k == 1 else c2 if k == 2 else c3
    return U16(c >> U32(16 * (i % 2)))
