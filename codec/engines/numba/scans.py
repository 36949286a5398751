# pyright: basic
"""Scans of byte planes: tests and counts of bytes, and selection of bytes by the values of another plane."""

from codec.engines.numba.jit import jit
from codec.engines.numba.words import U8, U64

ONES = U64(0x0101010101010101)  # a word with 1 in each byte


@jit
def is_constant(plane):
    """Return True if all bytes of a plane are equal."""
    n = len(plane)
    if not n:
        return True
    words, all_equal = plane[: n // 8 * 8].view(U64), U64(plane[0]) * ONES
    for at in range(0, len(words), 32):  # most planes are not constant in the first words, so stop early
        some = U64(0)
        for word in words[at : at + 32]:
            some |= word ^ all_equal
        if some:
            return False
    some = U8(0)
    for x in plane[n // 8 * 8 :]:
        some |= x ^ plane[0]
    return some == 0


@jit
def largest(p):
    """Return the largest byte of an array; 0 if it is empty."""
    most = U8(0)
    for i in range(len(p)):
        most = max(most, p[i])
    return most


@jit
def first_above(p, most):
    """Return the index of the first byte above ``most``; the last index if there is none.

    Callers have found such a byte before, but a frame's memory may change while it is read.
    """
    i = 0
    while i + 1 < len(p) and p[i] <= most:
        i += 1
    return i


@jit
def count_from(p, least):
    """Return the number of bytes in ``p`` that are at least ``least``."""
    n = 0
    for at in range(0, len(p), 128):  # in pieces of 128 bytes, so that a uint8 can count
        some = U8(0)
        for x in p[at : at + 128]:
            some += U8(x >= least)
        n += some
    return n


@jit
def compact(e, least, p, kept):
    """Copy the bytes p[i] with e[i] >= ``least`` to ``kept``, and return their number."""
    n = 0
    for i in range(len(p)):
        kept[n] = p[i]
        n += e[i] >= least
    return n


@jit
def expand(e, least, kept, p):
    """Copy the bytes of ``kept``, in order, to the bytes p[i] with e[i] >= ``least``; set other bytes of ``p`` to 0.

    Return the number of bytes copied. ``kept`` must have one byte more, which is read.
    """
    n = 0
    for i in range(len(p)):
        keeps = e[i] >= least
        x = kept[n]  # read unconditionally: a branch would be mispredicted
        p[i] = x if keeps else U8(0)
        n += keeps
    return n
