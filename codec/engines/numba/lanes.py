# pyright: basic
"""Loops of the entropy coder over 32 interleaved lanes (format.md, section 7), and its tables of symbol pairs."""

import numpy as np

from codec.engines.numba.jit import jit, kernel

U8, U16, U32, U64 = np.uint8, np.uint16, np.uint32, np.uint64

LANES, ROW = 32, 128  # number of lanes; number of symbols in a quad row, which has four per lane
PAIR_BITS = 12  # index bits of the decoding table: nearly all pairs of codes fit, and the table fits the L1 cache
UNPAIRED = U32(63)  # bit count of a table entry whose pair is longer than PAIR_BITS or contains an escape
BITS, ESCAPED = U64(63), U32(64)  # masks in encoding entries: length of both codes in bits; flag for an escape


@kernel
def fill_encode_pairs(code, length, pair):
    """Fill the encoding table: entry ``b * 256 + a`` is for symbol a followed by symbol b.

    An entry has the length of both codes in bits (mask BITS), a flag for escapes (ESCAPED), and both codes from bit 16
    on.
    """
    for b in range(256):
        second = U32(length[b]) & U32(15)
        low = U32(U32(code[b]) << U32(16)) | second | (ESCAPED if length[b] >= 128 else U32(0))
        entries = pair[256 * b : 256 * b + 256]
        for a in range(256):
            high = U32(U32(code[a]) << U32(second + U32(16))) | (ESCAPED if length[a] >= 128 else U32(0))
            entries[a] = U32((low | high) + U32(length[a] & U8(15)))


@jit
def encode_lanes(pair, symbol, rows, words, bits, have, escaped):
    """Encode quad rows from the last to the first, and return the index of the first word written.

    Words are written downwards from the end of ``words``. ``bits`` and ``have`` are set to each lane's bit
    reservoir and the reservoir's length in bits. ``escaped[r]`` is set to 1 if row ``r`` has escapes, otherwise to
    0.
    """
    end = U64(len(words))
    for lane in range(LANES):
        bits[lane] = U64(0)
        have[lane] = U64(32)
    for r in range(rows - 1, -1, -1):
        halves = symbol[ROW * r : ROW * r + ROW].view(U16)
        some = U32(0)
        for lane in range(LANES - 1, -1, -1):
            a, b = pair[halves[2 * lane]], pair[halves[2 * lane + 1]]
            some |= a | b
            quad = U64(a >> U32(16)) << (U64(b) & BITS) | U64(b >> U32(16))
            x, k = bits[lane], have[lane]
            n = k + (U64(a) & BITS) + (U64(b) & BITS)
            # avoid a branch, which would be mispredicted: always store the word, and move `end` only if the word is
            # full
            due = n >> U64(6)
            words[end - U64(1)] = U32(x)
            end -= due
            due <<= U64(5)
            bits[lane] = quad << (k - due) | x >> due
            have[lane] = n - due
        escaped[r] = U8((some & ESCAPED) != 0)
    return np.int64(end)


@kernel
def pairs_of(value, length, escape, pair):
    """Fill the decoding table, indexed by the next 12 bits of a lane.

    An entry has the first symbol << 16, the second symbol << 24, and the length of both codes in bits, or UNPAIRED.
    """
    for i in range(len(pair)):
        top = i >> (PAIR_BITS - 8)
        first = U32(length[top])
        rest = U32(U32(i) << first) & U32((1 << PAIR_BITS) - 1)
        second = rest >> U32(PAIR_BITS - 8)
        n = first + U32(length[second])
        unpaired = n > PAIR_BITS or value[top] == escape or value[second] == escape
        pair[i] = U32(value[top]) << U32(16) | U32(value[second]) << U32(24) | (UNPAIRED if unpaired else n)


@jit
def decode_lanes(pair, value, length, escape, words, rows, bits, quad, escaped):
    """Decode quad rows to ``quad``, four symbols per uint32, unless it is None; return the number of words consumed.

    ``bits`` has a reservoir of 64 bits for each lane: from the top, 32 to 63 bits of the stream, then a marker bit 1,
    then zeros. ``words`` must have as many words as all lanes could consume. ``escaped[r]`` is set to the number of
    escapes in row ``r``.
    """
    at = U64(0)
    for r in range(rows):
        some = U8(0)
        for lane in range(LANES):
            x = bits[lane]
            a = pair[x >> U64(64 - PAIR_BITS)]
            y = x << (U64(a) & U64(63))
            b = pair[y >> U64(64 - PAIR_BITS)]
            y <<= U64(b) & U64(63)
            if quad is not None:
                quad[LANES * r + lane] = U32(a >> U32(16)) | U32(b & U32(0xFFFF0000))
            if not y:  # an UNPAIRED entry has shifted out even the marker: decode the four symbols one by one
                y, four = x, U32(0)
                for i in range(4):
                    k = y >> U64(56)
                    four = U32(four | U32(U32(value[k]) << U32(8 * i)))
                    some += U8(value[k] == escape)
                    y <<= U64(length[k])
                if quad is not None:
                    quad[LANES * r + lane] = four
            # If fewer than 32 bits are left, the marker is bit 32 + d, d >= 0. Then insert a word there and move the
            # marker to bit d, by adding 2^d * (2 * word + 1 - 2^32); otherwise add 0. A branch would be mispredicted.
            due = (y & (U64(0) - y)) >> U64(32)
            bits[lane] = y + due * (U64(words[at]) * U64(2) - U64(0xFFFFFFFF))
            at += U64(due != 0)
        escaped[r] = some
    return np.int64(at)
