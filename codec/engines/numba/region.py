# pyright: basic
"""Regions of blocks: byte planes encoded into regions and decoded from them (docs/spec/format.md, sections 6 and 7).

Functions that read a frame return a status. On failure, they store the byte offset, the value found, and the value or
bound expected in ``fault``. ``c`` is the read position: c[0] is the offset of the next byte, c[1] the end of the
region.
"""

from typing import Any, NamedTuple

import numpy as np

from codec.engines.numba.checksum import PLANE, REGION, block_checksum, digest
from codec.engines.numba.jit import jit
from codec.engines.numba.lanes import LANES, PAIR_BITS, ROW, decode_lanes, encode_lanes, fill_encode_pairs, pairs_of
from codec.engines.numba.scans import ONES
from codec.engines.numba.words import U8, U16, U32, U64, copy
from codec.errors import Status

OK, SHORT_OUTPUT, LIMIT = 0, int(Status.SHORT_OUTPUT), int(Status.LIMIT)
BAD_DIRECTORY, BAD_REGION, CHECKSUM = int(Status.BAD_DIRECTORY), int(Status.BAD_REGION), int(Status.CHECKSUM)
CONSTANT, RAW, CODED, ROWS = 0, 1, 2, 3  # modes in which a byte plane is stored in a region
BLOCK = 16384  # maximum number of values per block, for codecs without rows
STATE = 22  # byte offset in a coded plane of the tails: the bits of each lane that do not fill a word


class Room(NamedTuple):
    """Buffers for one plane in the entropy coder."""

    words: Any
    bits: Any  # bit reservoir of each lane
    have: Any  # number of bits in each reservoir
    escaped: Any  # for each quad row: number of escapes, or a flag when encoding
    literals: Any
    pairs: Any  # by plane: table of symbol pairs, for planes that have a codebook
    none: Any  # empty uint16 array: no literals of two bytes


def coder_room(job, n):
    """Allocate buffers for planes of ``n`` bytes, and fill tables of symbol pairs for the job's codebooks."""
    rows = (n + ROW - 1) // ROW
    planes = job.coded.bit_length()
    pairs = np.empty((planes, 1 << 16 if job.encoding else 1 << PAIR_BITS), U32)
    for p in range(planes):
        if job.coded >> p & 1:
            table = job.tables[p]
            if job.encoding:
                fill_encode_pairs(table[:256], table[256:512], pairs[p])
            else:
                pairs_of(table[:256], table[256:512], table[512], pairs[p])
    words = np.empty(LANES * rows + 3 * LANES, U32)
    bits, have = np.empty(LANES, U64), np.empty(LANES, U64)
    return Room(words, bits, have, np.empty(rows, U8), np.empty(2 * n, U8), pairs, np.empty(0, U16))


@jit
def bad(fault, status, where, found, expected):
    """Store the details of an error in ``fault``, and return ``status``."""
    fault[0], fault[1], fault[2] = U64(where), U64(found), U64(expected)
    return status


@jit
def load32(data, at):
    """Return the little-endian 32-bit word at ``data[at]``."""
    return U32(data[at]) | U32(data[at + 1]) << U32(8) | U32(data[at + 2]) << U32(16) | U32(data[at + 3]) << U32(24)


@jit
def store32(data, at, x):
    """Store a little-endian 32-bit word at ``data[at]``."""
    for i in range(4):
        data[at + i] = U8(U32(x) >> U32(8 * i))


@jit
def close_region(region, size):
    """Pad a region with zeros to a multiple of 8 bytes, and return its size."""
    while size % 8:
        region[size] = U8(0)
        size += 1
    return size


@jit
def close_block(frame, job, b, region, size, in_place, limit, planes, result):
    """Finish block ``b``: copy its region to frame[result[0]] unless ``in_place``, and write its directory entry.

    ``planes`` is the digest of the block's fixed planes. result[0] is set to the end of the region, and the block's
    checksum is added to result[1].
    """
    at = np.int64(result[0])
    end = at + size
    if end > limit:
        return SHORT_OUTPUT
    if end // 8 > 0xFFFFFFFF:
        return LIMIT
    if not in_place:
        copy(frame[at:], region[:size])
    checksum = block_checksum(digest(region[:size], REGION) + planes, b)
    entry = job.directory + 8 * b
    store32(frame, entry, end // 8)
    store32(frame, entry + 4, checksum >> U64(32))
    result[0] = U64(end)
    result[1] += checksum
    return OK


@jit
def open_block(frame, job, b, checks, c, checksum, fault):
    """Set ``c`` to the beginning and end of block ``b``'s region.

    If ``checks`` is set, compare the block's checksum with its directory entry, and add it to ``checksum[0]``.
    """
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
    own = block_checksum(total, b)
    found = load32(frame, entry + 4)
    if U64(found) != own >> U64(32):
        return bad(fault, CHECKSUM, entry + 4, found, own >> U64(32))
    checksum[0] += own
    return OK


@jit
def end_region(frame, c, fault):
    """Check that the rest of a region is padding: fewer than 8 bytes, all zero."""
    if c[1] - c[0] >= 8:
        return bad(fault, BAD_REGION, c[0], c[1] - c[0], 7)
    for i in range(c[0], c[1]):
        if frame[i]:
            return bad(fault, BAD_REGION, i, frame[i], 0)
    return OK


@jit
def _take_literals(lengths, symbol, k, wide, escaped, literals):
    """Copy the literals of escaped symbols to ``literals``, and return their size in bytes."""
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
    """Pack fields of ``widths`` bits to ``out[at]``, the first one in the top bits; return the offset of the end."""
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
    """Unpack fields of ``widths`` bits from ``data[at]``: the inverse of :func:`_pack`."""
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
    """Encode ``k`` symbols with the codebook of plane ``p`` to ``out[at]``, and return the offset of the end.

    Return 0 if more than ``most`` bytes are needed. ``symbol`` must have space for whole quad rows. ``wide`` contains
    two-byte literals, or is empty if literals have one byte.
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
    """Decode ``k`` symbols of plane ``p`` to ``symbol``, which must have space for whole quad rows.

    Escapes are not yet replaced by literals; ``room.escaped[r]`` is set to the number of escapes in row ``r``. If
    ``wanted`` is False, symbols are only validated, and escapes counted.
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
        tail = U64(2) * bits[lane] + U64(1)  # append the marker bit 1 to the lane's tail
        bits[lane] = U64(words[lane]) << U64(32) | tail << (U64(31) - have[lane])
    c[0] += 4 * nwords
    padding, escape = ROW * rows - k, table[512]
    args = room.pairs[p], table[:256], table[256:512], escape, words[LANES:], rows, bits
    if wanted or padding:  # padding symbols are checked below, so they must be decoded
        taken = decode_lanes(*args, symbol[: ROW * rows].view(U32), escaped)
    else:
        taken = decode_lanes(*args, None, escaped)
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
    """Skip the literals of escaped symbols, which have one byte each."""
    total = 0
    for n in escaped[: (k + ROW - 1) // ROW]:
        total += np.int64(n)
    if c[1] - c[0] < total:
        return bad(fault, BAD_REGION, c[1], 0, 1)
    c[0] += total
    return OK


@jit
def get_literals(frame, escape, escaped, k, symbol, wide, c, fault):
    """Replace escapes by literals, in ``wide`` (two bytes each) or, if ``wide`` is empty, in ``symbol`` (one byte)."""
    groups = symbol[: (k + ROW - 1) // ROW * ROW].view(U64)
    all_escapes = U64(escape) * ONES
    for r in range((k + ROW - 1) // ROW):
        remaining = np.int64(escaped[r])  # escapes left in this row
        for e in range(ROW // 8 * r, ROW // 8 * (r + 1)):
            if not remaining:
                break
            other = groups[e] ^ all_escapes
            if not (other - ONES) & ~other & (ONES << U64(7)):  # no byte is 0, so none of these 8 symbols is an escape
                continue
            for i in range(8 * e, min(k, 8 * e + 8)):
                if symbol[i] != escape:
                    continue
                remaining -= 1
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
