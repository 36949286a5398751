# pyright: basic
"""Regions of blocks: byte planes into them and out of them (docs/format.md, sections 6 and 7).

What reads a frame returns a status and, if that is not OK, has left in `fault` where, what was found and what would
have been right. `c` is where the reading is: c[0] the next byte, c[1] the region's end.
"""

from typing import Any, NamedTuple

import numpy as np

from codec.engines.numba.jit import jit
from codec.engines.numba.lanes import LANES, PAIR_BITS, ROW, codes_of_pairs, decode_lanes, encode_lanes, pairs_of
from codec.engines.numba.seal import PLANE, REGION, digest, seal_block
from codec.engines.numba.words import U8, U16, U32, U64, copy
from codec.errors import Status

OK, SHORT_OUTPUT, LIMIT = 0, int(Status.SHORT_OUTPUT), int(Status.LIMIT)
BAD_DIRECTORY, BAD_REGION, CHECKSUM = int(Status.BAD_DIRECTORY), int(Status.BAD_REGION), int(Status.CHECKSUM)
CONSTANT, RAW, CODED, ROWS = 0, 1, 2, 3  # modes
BLOCK = 16384  # values of the largest block but those of rows
STATE = 22  # bytes of a coded plane before its tails
ONES = U64(0x0101010101010101)


class Room(NamedTuple):
    """Memory for one plane on its way through the coder."""

    words: Any
    bits: Any  # the lanes' reservoirs, and how many bits of each
    have: Any
    escaped: Any  # a byte a quad row
    literals: Any
    pairs: Any  # a table for each plane that has a codebook
    none: Any  # literals of two bytes where there are none


def coder_room(job, n):
    """For planes of n bytes; with tables of the job's codebooks."""
    rows = (n + ROW - 1) // ROW
    planes = job.coded.bit_length()
    pairs = np.empty((planes, 1 << 16 if job.encoding else 1 << PAIR_BITS), U32)
    for p in range(planes):
        if job.coded >> p & 1:
            table = job.tables[p]
            if job.encoding:
                codes_of_pairs(table[:256], table[256:512], pairs[p])
            else:
                pairs_of(table[:256], table[256:512], table[512], pairs[p])
    words = np.empty(LANES * rows + 3 * LANES, U32)
    bits, have = np.empty(LANES, U64), np.empty(LANES, U64)
    return Room(words, bits, have, np.empty(rows, U8), np.empty(2 * n, U8), pairs, np.empty(0, U16))


@jit
def bad(fault, status, where, found, expected):
    """What is wrong."""
    fault[0], fault[1], fault[2] = U64(where), U64(found), U64(expected)
    return status


@jit
def load32(data, at):
    """A little-endian word."""
    return U32(data[at]) | U32(data[at + 1]) << U32(8) | U32(data[at + 2]) << U32(16) | U32(data[at + 3]) << U32(24)


@jit
def store32(data, at, x):
    """The inverse."""
    for i in range(4):
        data[at + i] = U8(U32(x) >> U32(8 * i))


@jit
def is_constant(plane):
    """Whether all bytes are equal."""
    n = len(plane)
    if not n:
        return True
    words, all_equal = plane[: n // 8 * 8].view(U64), U64(plane[0]) * ONES
    for at in range(0, len(words), 32):  # a few at a time: of most planes the first ones tell
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
    """The largest byte, 0 if there is none."""
    most = U8(0)
    for i in range(len(p)):
        most = max(most, p[i])
    return most


@jit
def first_above(p, most):
    """The place of the first byte above `most`; the last one's if there is none, for a frame may change meanwhile."""
    i = 0
    while i + 1 < len(p) and p[i] <= most:
        i += 1
    return i


@jit
def count_from(p, least):
    """How many bytes are at least so large."""
    n = 0
    for at in range(0, len(p), 128):  # so few that a byte can count them
        some = U8(0)
        for x in p[at : at + 128]:
            some += U8(x >= least)
        n += some
    return n


@jit
def keep_from(e, least, p, kept):
    """Those of p where e is at least so large: how many."""
    n = 0
    for i in range(len(p)):
        kept[n] = p[i]
        n += e[i] >= least
    return n


@jit
def spread_from(e, least, kept, p):
    """The inverse, 0 elsewhere: how many."""
    n = 0
    for i in range(len(p)):
        keeps = e[i] >= least
        x = kept[n]  # in any case, for nothing can be predicted here: it has one more
        p[i] = x if keeps else U8(0)
        n += keeps
    return n


@jit
def close_region(region, size):
    """Fill up to a multiple of 8: its size."""
    while size % 8:
        region[size] = U8(0)
        size += 1
    return size


@jit
def close_block(frame, job, b, region, size, in_place, limit, planes, result):
    """Block b's region to frame[result[0]], unless it was made there, and its entry; `planes`: digest of fixed ones.

    result becomes where the region ends and, added to it, the block's seal.
    """
    at = np.int64(result[0])
    end = at + size
    if end > limit:
        return SHORT_OUTPUT
    if end // 8 > 0xFFFFFFFF:
        return LIMIT
    if not in_place:
        copy(frame[at:], region[:size])
    sealed = seal_block(digest(region[:size], REGION) + planes, b)
    entry = job.directory + 8 * b
    store32(frame, entry, end // 8)
    store32(frame, entry + 4, sealed >> U64(32))
    result[0] = U64(end)
    result[1] += sealed
    return OK


@jit
def open_block(frame, job, b, checks, c, seal, fault):
    """Where block b's region is, to c; its digest is checked if wanted, and added to the seal."""
    entry = job.directory + 8 * b
    c[0] = 8 * np.int64(load32(frame, entry - 8)) if b else job.regions
    c[1] = 8 * np.int64(load32(frame, entry))
    if c[0] < job.regions or c[1] <= c[0] or c[1] > job.frame_nbytes:
        return bad(fault, BAD_DIRECTORY, entry, c[1], c[0])
    if not checks:
        return OK
    total, section = digest(frame[c[0] : c[1]], REGION), job.planes
    for p in range(8):
        if job.fixed >> p & 1:
            first = section + b * job.block
            total += digest(frame[first : first + min(job.block, job.n - b * job.block)], PLANE + p)
            section += job.plane_stride
    sealed = seal_block(total, b)
    found = load32(frame, entry + 4)
    if U64(found) != sealed >> U64(32):
        return bad(fault, CHECKSUM, entry + 4, found, sealed >> U64(32))
    seal[0] += sealed
    return OK


@jit
def end_region(frame, c, fault):
    """A region ends with fewer than 8 zero bytes."""
    if c[1] - c[0] >= 8:
        return bad(fault, BAD_REGION, c[0], c[1] - c[0], 7)
    for i in range(c[0], c[1]):
        if frame[i]:
            return bad(fault, BAD_REGION, i, frame[i], 0)
    return OK


@jit
def _take_literals(lengths, symbol, k, wide, escaped, literals):
    """Literals of k symbols: how many bytes."""
    n = 0
    for r in range(len(escaped)):
        if escaped[r]:
            for i in range(ROW * r, min(k, ROW * r + ROW)):
                if lengths[symbol[i]] >= 128:
                    if len(wide):
                        literals[n], literals[n + 1] = U8(wide[i]), U8(wide[i] >> U16(8))
                        n += 2
                    else:
                        literals[n] = symbol[i]
                        n += 1
    return n


@jit
def _pack(out, at, fields, widths):
    """Fields of so many bits each, the first one on top, to out[at...]: its end, at a byte."""
    word, have = U64(0), 0
    for lane in range(LANES):
        word = word << U64(widths[lane]) | U64(fields[lane])
        have += np.int64(widths[lane])
        while have >= 8:
            have -= 8
            out[at] = U8(word >> U64(have))
            at += 1
    if have:
        out[at] = U8(word << U64(8 - have))
        at += 1
    return at


@jit
def _unpack(data, at, fields, widths):
    """The inverse: the bits that were taken."""
    word, have = U64(0), 0
    for lane in range(LANES):
        width = np.int64(widths[lane])
        while have < width:
            word = word << U64(8) | U64(data[at])
            at += 1
            have += 8
        have -= width
        fields[lane] = word >> U64(have) & ((U64(1) << U64(width)) - U64(1))


FIVE = np.full(LANES, 5, U64)


@jit
def put_coded(job, p, symbol, k, wide, most, room, out, at):
    """Code k symbols, whose memory goes on to whole quad rows, to out[at...]: the end, or 0 if it takes over `most`.

    With the codebook of plane p. `wide` has literals of two bytes, or is empty.
    """
    words, bits, have = room.words, room.bits, room.have
    table, rows = job.tables[p], (k + ROW - 1) // ROW
    escaped = room.escaped[:rows]
    symbol[k : ROW * rows] = table[513]
    first = encode_lanes(room.pairs[p], symbol, rows, words, bits, have, escaped) - LANES
    tails = U64(0)
    for lane in range(LANES):
        have[lane] -= U64(32)
        tails += have[lane]
        words[first + lane] = U32(bits[lane] >> have[lane])
        bits[lane] &= (U64(1) << have[lane]) - U64(1)
    end = len(words)
    while end > first and words[end - 1] == 0:
        end -= 1
    head = (STATE + (np.int64(tails) + 7) // 8 + 3) // 4 * 4
    nliterals = _take_literals(table[256:512], symbol, k, wide, escaped, room.literals)
    size = head + 4 * (end - first) + nliterals
    if size > most:
        return 0
    out[at], out[at + 1] = U8(end - first), U8((end - first) >> 8)
    after = _pack(out, _pack(out, at + 2, have, FIVE), bits, have)
    out[after : at + head] = U8(0)
    copy(out[at + head :], words[first:end].view(U8))
    copy(out[at + size - nliterals :], room.literals[:nliterals])
    return at + size


@jit
def get_coded(frame, job, p, k, room, wanted, symbol, c, fault):
    """Decode k symbols of plane p, escapes among them as such, to `symbol`, which goes on to whole quad rows.

    room.escaped[r] says how many escapes row r has. Where symbols are not wanted, only that, and the checks.
    """
    words, bits, have, escaped, table = room.words, room.bits, room.have, room.escaped, job.tables[p]
    start = c[0]
    if c[1] - start < STATE:
        return bad(fault, BAD_REGION, start, c[1] - start, STATE)
    nwords = np.int64(frame[start]) | np.int64(frame[start + 1]) << 8
    _unpack(frame, start + 2, have, FIVE)
    tails = 0
    for lane in range(LANES):
        tails += np.int64(have[lane])
    c[0] = start + STATE + (tails + 7) // 8
    if c[0] > c[1]:
        return bad(fault, BAD_REGION, start, c[0], c[1])
    _unpack(frame, start + STATE, bits, have)
    if tails % 8 and U8(frame[c[0] - 1] << U8(tails % 8)):
        return bad(fault, BAD_REGION, c[0] - 1, frame[c[0] - 1], 0)
    while (c[0] - start) % 4:
        if c[0] >= c[1] or frame[c[0]]:
            return bad(fault, BAD_REGION, c[0], 1, 0)
        c[0] += 1
    left = (c[1] - c[0]) // 4
    if nwords > left:
        return bad(fault, BAD_REGION, start, nwords, left)
    if nwords and load32(frame, c[0] + 4 * (nwords - 1)) == 0:
        return bad(fault, BAD_REGION, c[0] + 4 * (nwords - 1), 0, 1)
    rows = (k + ROW - 1) // ROW
    most = min(nwords, LANES * rows + LANES)
    copy(words.view(U8), frame[c[0] : c[0] + 4 * most])
    words[most : LANES * rows + LANES + 1] = U32(0)
    for lane in range(LANES):
        tail = U64(2) * bits[lane] + U64(1)  # and the mark
        bits[lane] = U64(words[lane]) << U64(32) | tail << (U64(31) - have[lane])
    c[0] += 4 * nwords
    padding, escape = ROW * rows - k, table[512]
    how = room.pairs[p], table[:256], table[256:512], escape, words[LANES:], rows, bits
    if wanted or padding:  # that is checked
        taken = decode_lanes(*how, symbol[: ROW * rows].view(U32), escaped)
    else:
        taken = decode_lanes(*how, None, escaped)
    some = U64(0)
    for lane in range(LANES):
        some |= bits[lane] ^ U64(1 << 31)
    after = max(nwords - LANES, 0)
    if some or taken < after:
        return bad(fault, BAD_REGION, c[0], after, k)
    for i in range(k, ROW * rows):
        if symbol[i] != table[513]:
            return bad(fault, BAD_REGION, c[0], symbol[i], table[513])
    if padding and table[513] == escape:
        escaped[rows - 1] -= U8(padding)
    return OK


@jit
def pass_literals(escaped, k, c, fault):
    """Past literals of a byte each, which nobody wants."""
    total = 0
    for n in escaped[: (k + ROW - 1) // ROW]:
        total += np.int64(n)
    if c[1] - c[0] < total:
        return bad(fault, BAD_REGION, c[1], 0, 1)
    c[0] += total
    return OK


@jit
def get_literals(frame, escape, escaped, k, symbol, wide, c, fault):
    """Literals to the places of escapes: to `symbol`, or two bytes each to `wide`, if that is not empty."""
    eights = symbol[: (k + ROW - 1) // ROW * ROW].view(U64)
    all_of_them = U64(escape) * ONES
    for r in range((k + ROW - 1) // ROW):
        after = np.int64(escaped[r])  # so many are still to come in this row
        for e in range(ROW // 8 * r, ROW // 8 * (r + 1)):
            if not after:
                break
            other = eights[e] ^ all_of_them
            if not (other - ONES) & ~other & (ONES << U64(7)):  # no byte of it is 0
                continue
            for i in range(8 * e, min(k, 8 * e + 8)):
                if symbol[i] != escape:
                    continue
                after -= 1
                if len(wide):
                    if c[1] - c[0] < 2:
                        return bad(fault, BAD_REGION, c[0], c[1] - c[0], 2)
                    wide[i] = U16(frame[c[0]]) | U16(frame[c[0] + 1]) << U16(8)
                    c[0] += 2
                else:
                    if c[0] >= c[1]:
                        return bad(fault, BAD_REGION, c[1], 0, 1)
                    symbol[i] = frame[c[0]]
                    c[0] += 1
    return OK
