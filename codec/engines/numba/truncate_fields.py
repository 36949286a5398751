# pyright: basic
"""Truncate: dropped bits, levels, fields of sign and mantissa, and their packing (docs/spec/format.md, section 9)."""

from typing import Any, NamedTuple

from codec._c.library import lib
from codec.engines.numba.jit import jit
from codec.engines.numba.region import OK
from codec.engines.numba.scans import largest
from codec.engines.numba.words import I16, U8, U16, U32, U64
from codec.errors import Status

BAD_ARGUMENT = int(Status.BAD_ARGUMENT)
FIXED, BITS = lib.CODEC_LEVEL_CODING_FIXED, lib.CODEC_OPTION_BITS
UNLIMITED = 1000  # as a number of bits: drop the whole mantissa; negated: drop no bit


class TruncateDtype(NamedTuple):
    """Constants of a dtype (format.md, section 9.1)."""

    mbits: int  # number of mantissa bits
    sign: int  # position of the sign bit
    bias: int  # exponent bias
    last: int  # exponent of Inf and NaN
    base: int  # exponents above this one have joint symbols of exponent and level
    drops: Any  # number of mantissa bits that each level drops
    pieces: Any  # number of bits of each piece of a field, from the top


@jit
def drop_bits(e, ea, kind, guard, by_bit, drop):
    """Compute the number of mantissa bits that each value may drop, from its exponent ``e`` and A's exponent ``ea``."""
    shift, last, mbits = I16(guard + 127 - kind.bias), U8(kind.last), I16(kind.mbits)
    k1, k2, k3 = I16(kind.drops[1]), I16(kind.drops[2]), I16(kind.drops[3])
    for i in range(len(e)):
        d = I16(I16(I16(ea[i]) - I16(e[i])) - shift)
        d = I16(UNLIMITED) if ea[i] == U8(255) else d
        d = I16(-UNLIMITED) if ea[i] == U8(0) or e[i] == last else d
        level = k3 if d >= k3 else k2 if d >= k2 else k1 if d >= k1 else I16(0)
        drop[i] = U8(min(max(d, I16(0)), mbits) if by_bit else level)


@jit
def drops(job, kind, e, ea, levels, drop):
    """Compute how many mantissa bits each value drops, from given ``levels``, a fixed level, or the exponents."""
    last, drops = U8(kind.last), kind.drops
    if job.variant == FIXED:
        k = U8(drops[job.bits])
        for i in range(len(e)):
            drop[i] = U8(0) if e[i] == last else k
    elif len(levels):
        if largest(levels) > 3:
            return BAD_ARGUMENT
        for i in range(len(e)):
            drop[i] = U8(0) if e[i] == last else U8(drops[levels[i]])
    else:
        drop_bits(e, ea, kind, job.guard, job.options & BITS != 0, drop)
    return OK


@jit
def cut_patterns(kind, nearest, drop, x, e):
    """Drop the last bits of patterns ``x``, rounded if ``nearest``, and compute the new exponents (encoder, 8.1)."""
    mbits, last = U32(kind.mbits), U32(kind.last)
    for i in range(len(x)):
        k, u = U32(drop[i]), x[i]
        mask = U32(U32(U32(1) << k) - U32(1))
        half = U32(U32(U32(U32(U32(1) << k) >> U32(1)) - U32(1)) + U32(U32(u >> k) & U32(1)))
        up = U32(U32(u + (half if nearest and k else U32(0))) & U32(~mask))
        up = U32(u & U32(~mask)) if U32(U32(up >> mbits) & last) == last else up
        x[i] = up if U32(U32(u >> mbits) & last) else U32(0)
    for i in range(len(x)):
        e[i] = U8(U32(x[i] >> mbits) & last)


@jit
def exponents_of(kind, x, e):
    """Extract the exponents ``e`` of bit patterns ``x``."""
    mbits, last = U32(kind.mbits), U32(kind.last)
    for i in range(len(x)):
        e[i] = U8(U32(x[i] >> mbits) & last)


@jit
def levels_of(kind, drop, level):
    """Convert the number of dropped bits of each value to its level."""
    k1, k2, k3 = U8(kind.drops[1]), U8(kind.drops[2]), U8(kind.drops[3])
    for i in range(len(drop)):
        level[i] = U8(U8(drop[i] >= k1) + U8(drop[i] >= k2) + U8(drop[i] >= k3))


@jit
def drops_at(kind, level, drop):
    """Convert the level of each value to its number of dropped bits."""
    k1, k2, k3 = U8(kind.drops[1]), U8(kind.drops[2]), U8(kind.drops[3])
    for i in range(len(level)):
        k = U8(level[i])
        drop[i] = k3 if k >= 3 else k2 if k >= 2 else k1 if k >= 1 else U8(0)


@jit
def widths_of(e, drop, total, most, width):
    """Compute how many bits of its field each value keeps: at most ``most``, and none for exponent 0."""
    for i in range(len(e)):
        keeps = min(U8(U8(total) - drop[i]), U8(most))
        width[i] = keeps if e[i] else U8(0)


@jit
def fields_of(kind, x, f):
    """Extract the fields (sign and mantissa) ``f`` of bit patterns ``x``. ``f`` may be ``x``."""
    mask, mbits, sign = U32((1 << kind.mbits) - 1), U32(kind.mbits), U32(kind.sign)
    for i in range(len(x)):
        f[i] = U32(U32(x[i] & mask) | U32(U32(x[i] >> sign) << mbits))


@jit
def patterns_of(kind, f, e):
    """Combine fields ``f`` and exponents to bit patterns, stored in ``f``; exponent 0 gives +0."""
    mask, mbits, sign = U32((1 << kind.mbits) - 1), U32(kind.mbits), U32(kind.sign)
    for i in range(len(f)):
        x = U32(U32(f[i] & mask) | U32(U32(e[i]) << mbits) | U32(U32(f[i] >> mbits) << sign))
        f[i] = x if e[i] else U32(0)


@jit
def pack_widths(f, width, total, out, at):
    """Pack the upper ``width[i]`` bits of each field to ``out[at]``, and return the offset of the end."""
    word, have = U64(0), U64(0)
    for i in range(len(f)):
        n = U64(width[i])
        word |= U64(f[i] >> U32(U64(total) - n)) << have
        have += n
        while have >= U64(8):
            out[at] = U8(word)
            word >>= U64(8)
            have -= U64(8)
            at += 1
    if have:
        out[at] = U8(word)
        at += 1
    return at


@jit
def unpack_widths(data, width, total, f):
    """Unpack the upper ``width[i]`` bits of each field: the inverse of :func:`pack_widths`."""
    word, have, at = U64(0), U64(0), 0
    for i in range(len(f)):
        n = U64(width[i])
        while have < n:
            word |= U64(data[at]) << have
            have += U64(8)
            at += 1
        f[i] = U32(U32(word & ((U64(1) << n) - U64(1))) << U32(U64(total) - n))
        word >>= n
        have -= n


@jit
def piece_of(f, below, bits, piece):
    """Extract ``bits`` bits of each field, from bit ``below`` on."""
    mask = U32((1 << bits) - 1)
    for i in range(len(f)):
        piece[i] = U8(U32(f[i] >> U32(below)) & mask)


@jit
def move_exponents(e, offset, shift, last, back, moved):
    """Subtract offsets from exponents, or add them if ``back``, cyclically in 1 to ``last``; 0 stays 0.

    ``moved`` may be ``e``.
    """
    circle = U8(last)
    for i in range(len(e)):
        by = U8(offset[i] >> U16(shift))
        by = U8(circle - by) if back else by
        a = U8(e[i] - U8(1))
        d = U8(U8(a - by) + U8((circle if a < by else U8(0)) + U8(1)))
        moved[i] = d if e[i] else U8(0)


@jit
def join(lowered, level, base, pair, symbol):
    """Combine exponents and levels to pairs, and pairs to joint symbols; return the number without a symbol."""
    outside = 0
    for i in range(len(pair)):
        both = U16(U16(U16(lowered[i]) << U16(2)) | U16(level[i])) if lowered[i] else U16(0)
        t = U16(both - U16(4 * base))
        one = U8(t) if t >= U16(4) and t < U16(256) and both else U8(0)
        pair[i], symbol[i] = both, one
        outside += U8(one == 0 and both != 0)
    return outside
