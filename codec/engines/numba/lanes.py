# pyright: basic
"""The coder's loops over 32 lanes (docs/format.md, section 7), and its tables of pairs."""

import numpy as np

from codec.engines.numba.jit import jit, kernel

U8, U16, U32, U64 = np.uint8, np.uint16, np.uint32, np.uint64

LANES, ROW = 32, 128  # symbols of a quad row
PAIR_BITS = 12  # looked up at once: nearly all pairs of codes, and a table that leaves room in the cache
APART = U32(63)  # for the bits of a pair that has more, or an escape
BITS, ESCAPED = U64(63), U32(64)  # of codes of pairs: how many, and whether a symbol is an escape; codes above 16


@kernel
def codes_of_pairs(code, length, pair):
    """Of symbols a and b at b * 256 + a, which are two bytes one after the other: their bits | both codes << 16."""
    for b in range(256):
        second = U32(length[b]) & U32(15)
        low = U32(U32(code[b]) << U32(16)) | second | (ESCAPED if length[b] >= 128 else U32(0))
        ahead = pair[256 * b : 256 * b + 256]
        for a in range(256):
            high = U32(U32(code[a]) << U32(second + U32(16))) | (ESCAPED if length[a] >= 128 else U32(0))
            ahead[a] = U32((low | high) + U32(length[a] & U8(15)))


@jit
def encode_lanes(pair, symbol, rows, words, bits, have, escaped):
    """Code quad rows, the last one first, words downwards from the end of `words`: where the first one is.

    `bits` and `have` become the lanes' reservoirs; escaped[r] says whether row r has escapes.
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
            # whether a word is due cannot be predicted: it is stored in any case, and stays if it is
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
    """By the next 12 bits: first symbol << 16 | second << 24 | bits of both, or APART."""
    for i in range(len(pair)):
        top = i >> (PAIR_BITS - 8)
        first = U32(length[top])
        rest = U32(U32(i) << first) & U32((1 << PAIR_BITS) - 1)
        second = rest >> U32(PAIR_BITS - 8)
        n = first + U32(length[second])
        apart = n > PAIR_BITS or value[top] == escape or value[second] == escape
        pair[i] = U32(value[top]) << U32(16) | U32(value[second]) << U32(24) | (APART if apart else n)


@jit
def decode_lanes(pair, value, length, escape, words, rows, bits, quad, escaped):
    """Decode quad rows to `quad`, four symbols an item, or nowhere if that is None: how many words were taken.

    A lane is 64 bits: its next ones on top, 32 to 63 of them, a 1 that marks their end, and zeros. `words` goes on for
    as many as there may be. escaped[r] says how many escapes row r has.
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
            if not y:  # not even the mark is left: a pair is read symbol by symbol, or both
                y, four = x, U32(0)
                for i in range(4):
                    k = y >> U64(56)
                    four = U32(four | U32(U32(value[k]) << U32(8 * i)))
                    some += U8(value[k] == escape)
                    y <<= U64(length[k])
                if quad is not None:
                    quad[LANES * r + lane] = four
            # If fewer than 32 are left, the mark is bit 32 + d: a word goes where it is, and the mark to d. Without
            # a branch, which could not be predicted: 2^d, or 0, times what a word and a mark in its place add up to.
            due = (y & (U64(0) - y)) >> U64(32)
            bits[lane] = y + due * (U64(words[at]) * U64(2) - U64(0xFFFFFFFF))
            at += U64(due != 0)
        escaped[r] = some
    return np.int64(at)
