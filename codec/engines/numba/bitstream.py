# pyright: basic
"""Bit streams of Delta and TopK (docs/spec/format.md, section 10.3): bit i is bit i mod 8 of byte floor(i / 8).

Beyond the end of a stream, readers return zeros. Callers compare the position with the end to detect this.
"""

from typing import Any, NamedTuple

from codec.engines.numba.jit import jit
from codec.engines.numba.words import I64, U8, U64

WORD = 64  # bits that a writer buffers before it stores them
LONGEST = 24  # number of leading zeros that mark an escape in a Rice code


class Bits(NamedTuple):
    """Position in a stream.

    Attributes
    ----------
    at : array of 2 int64
        Number of bits read or written, and a byte offset: the beginning of the stream (reader), or the position of the
        next word (writer).
    word : array of 1 uint64
        Writer: bits that are not yet stored in the array.
    """

    at: Any
    word: Any


@jit
def begin(bits, at):
    """Start reading or writing a stream at byte offset ``at``."""
    bits.at[0], bits.at[1] = 0, at
    bits.word[0] = U64(0)


@jit
def close_bits(bits, out):
    """Store the buffered bits of a stream, and return the stream's size in bytes."""
    rest = (bits.at[0] % WORD + 7) // 8
    for i in range(rest):
        out[bits.at[1] + i] = U8(bits.word[0] >> U64(8 * i))
    return (bits.at[0] + 7) // 8


@jit
def put_bits(bits, out, x, n):
    """Append the lower ``n`` <= 64 bits of ``x`` to the stream."""
    have = bits.at[0] % WORD
    bits.at[0] += n
    bits.word[0] |= x << U64(have)
    if have + n < WORD:
        return
    for i in range(8):
        out[bits.at[1] + i] = U8(bits.word[0] >> U64(8 * i))
    bits.at[1] += 8
    bits.word[0] = x >> U64(WORD - have) if have else U64(0)


@jit
def put_rice(bits, out, x, k, full):
    """Append the Rice code of ``x`` with parameter ``k``. An escaped ``x`` is stored in ``full`` bits."""
    q = x >> U64(k)
    if q >= U64(LONGEST):
        put_bits(bits, out, U64(0), LONGEST)
        put_bits(bits, out, x, full)
    else:
        put_bits(bits, out, U64(1) << q, I64(q) + 1)
        put_bits(bits, out, x & ((U64(1) << U64(k)) - U64(1)), k)


@jit
def put_gamma(bits, out, x):
    """Append the Elias gamma code of ``x`` >= 1 to the stream."""
    n = bit_length(x) - 1
    put_bits(bits, out, U64(0), n)
    put_bits(bits, out, U64(1), 1)
    put_bits(bits, out, x & ((U64(1) << U64(n)) - U64(1)), n)


@jit
def bit_length(x):
    """Return the number of bits of ``x``, 0 for 0."""
    n = 0
    while x:
        x >>= U64(1)
        n += 1
    return n


@jit
def rice_nbits(x, k, full):
    """Return the size in bits of the code that :func:`put_rice` writes."""
    q = x >> U64(k)
    return LONGEST + full if q >= U64(LONGEST) else I64(q) + 1 + k


@jit
def _zeros(bits, frame, end, most):
    """Skip zero bits of the stream, at most ``most``, and return their number."""
    n = 0
    while n < most:
        at = bits.at[0]
        if at < end and frame[bits.at[1] + at // 8] >> U8(at % 8) & U8(1):
            break
        bits.at[0] += 1
        n += 1
    return n


@jit
def get_bits(bits, frame, end, n):
    """Read ``n`` <= 64 bits of the stream, and return them as an integer."""
    x = U64(0)
    for i in range(n):
        at = bits.at[0] + i
        if at < end:
            x |= U64(frame[bits.at[1] + at // 8] >> U8(at % 8) & U8(1)) << U64(i)
    bits.at[0] += n
    return x


@jit
def get_rice(bits, frame, end, k, full):
    """Read a Rice code; return the number, and True if the number has at most ``full`` bits, as a valid one has."""
    q = _zeros(bits, frame, end, LONGEST)
    if q == LONGEST:
        return get_bits(bits, frame, end, full), True
    bits.at[0] += 1
    x = U64(q) << U64(k) | get_bits(bits, frame, end, k)
    return x, full - k > 5 or U64(q) >> U64(full - k) == 0


@jit
def get_gamma(bits, frame, end):
    """Read an Elias gamma code, and return the number; 0 if the number is 2^64 or more."""
    n = _zeros(bits, frame, end, 64)
    if n == 64:
        return U64(0)
    bits.at[0] += 1
    return U64(1) << U64(n) | get_bits(bits, frame, end, n)


@jit
def ends(bits, frame, end):
    """Return True if a stream has been read to its end: fewer than 64 bits are left, and all of these are 0."""
    left = end - bits.at[0]
    return 0 <= left < 64 and get_bits(bits, frame, end, left) == 0
