# pyright: basic
"""Truncate: exponents are entropy-coded, mantissas are cut to levels (format.md, section 9; encoder.md, 8).

One file: decoding of a region reverses the steps of encoding.
"""

from typing import Any, NamedTuple

import numpy as np

from codec._c.library import DTYPE_NAMES, DTYPES, LEVEL_BITS, MANTISSA_BITS, lib
from codec.engines.numba.checksum import STATE, digest
from codec.engines.numba.floats import NOWHERE, STORE, load_native, put, to_floats
from codec.engines.numba.gaps import GAPS, MOST_ROWS, expand_rows, find_gaps, get_bitmap, pack_rows, put_bitmap
from codec.engines.numba.jit import enter_floats, jit, kernel, leave_floats
from codec.engines.numba.model import fill_offsets, fill_row_offsets
from codec.engines.numba.packing import pack, unpack
from codec.engines.numba.region import (
    BAD_REGION,
    BLOCK,
    CODED,
    CONSTANT,
    OK,
    RAW,
    ROWS,
    bad,
    close_block,
    close_region,
    coder_room,
    end_region,
    get_coded,
    get_literals,
    load32,
    open_block,
    put_coded,
    store32,
)
from codec.engines.numba.scans import compact, count_from, expand, first_above, is_constant, largest
from codec.engines.numba.truncate_fields import (
    BITS,
    FIXED,
    TruncateDtype,
    cut_patterns,
    drops,
    drops_at,
    exponents_of,
    fields_of,
    join,
    levels_of,
    move_exponents,
    pack_widths,
    patterns_of,
    piece_of,
    unpack_widths,
    widths_of,
)
from codec.engines.numba.words import F32, I64, U8, U16, U32, U64, copy
from codec.errors import Status

OTHER_STATE = int(Status.OTHER_STATE)
PLANE, CODED_LEVELS = lib.CODEC_LEVEL_CODING_PLANE, lib.CODEC_LEVEL_CODING_CODED
SHARED, CUT = lib.CODEC_LEVEL_CODING_SHARED, lib.CODEC_OPTION_CUT
FLOAT16 = DTYPES["float16"]
BASE = 96  # exponents 97 to 159 (float16: 1 to 31, base 0) have joint symbols of exponent and level
PIECES = 4  # number of pieces into which a field of sign and mantissa is divided
_PIECES = {"float32": (6, 6, 6, 6), "bfloat16": (2, 2, 2, 2), "float16": (3, 3, 2, 3)}
TILE = 1024  # number of values to which residuals are added per step


class TruncateWork(NamedTuple):
    """Buffers of one thread that encodes or decodes blocks of Truncate."""

    coder: Any
    kind: TruncateDtype
    region: Any
    rows: Any  # by quad row: 1 if the region has its symbols
    native: Any
    x: Any
    offset: Any
    pattern: Any
    pair: Any
    symbol: Any
    e: Any
    drop: Any
    width: Any
    level: Any
    piece: Any
    kept: Any
    c: Any
    floats: Any  # saved floating-point environment of the thread


def work_of(job):
    """Allocate one thread's buffers for the blocks of a Truncate job."""
    name = DTYPE_NAMES[job.dtype]
    mbits, bits = MANTISSA_BITS[name], 8 * job.size
    last = (1 << bits - 1 - mbits) - 1
    pieces = np.array(_PIECES[name], I64)
    base = 0 if job.dtype == FLOAT16 else BASE
    room = BLOCK + 128
    return TruncateWork(
        coder_room(job, BLOCK),
        TruncateDtype(mbits, bits - 1, last // 2, last, base, np.array(LEVEL_BITS[name], I64), pieces),
        np.empty((job.size + 3) * BLOCK + 1024, U8),
        np.empty(MOST_ROWS, U8),
        np.empty(4 * BLOCK, U8),
        np.empty(BLOCK, F32),
        np.empty(BLOCK, U16),
        np.empty(BLOCK, U32),
        np.empty(BLOCK, U16),
        np.empty(room, U8),
        np.empty(room, U8),
        np.empty(room, U8),
        np.empty(room, U8),
        np.empty(room, U8),
        np.empty(room, U8),
        np.empty(room, U8),
        np.empty(2, I64),
        np.empty(64, U8),
    )


@jit
def _load_patterns(job, work, data, feedback, first, x):
    """Load the bit patterns of values as uint32; residuals are added first unless ``feedback`` is empty."""
    m = len(x)
    if len(feedback):
        for i in range(0, m, TILE):
            n = min(TILE, m - i)
            load_native(job.dtype, data, feedback, first + i, work.x[:n], work.native[job.size * i :])
    else:
        copy(work.native, data[job.size * first : job.size * (first + m)])
    if job.size == 4:
        copy(x, work.native[: 4 * m].view(U32))
    else:
        h = work.native[: 2 * m].view(U16)
        for i in range(m):
            x[i] = U32(h[i])


@jit
def _put_symbols(job, work, m, out, at):
    """Encode the symbols of a block in the mode that takes the fewest bytes.

    Return mode and gaps as bits of the region's head, and the end in ``out``.
    """
    kind, joint = work.kind, job.variant == CODED_LEVELS
    symbol, e, flag = work.symbol[:m], work.e[:m], 0
    lowered, outside = work.kept[:m] if joint else symbol, 0
    if len(job.parts):
        move_exponents(e, work.offset[:m], 10 if job.dtype == FLOAT16 else 7, kind.last, False, lowered)
    else:
        copy(lowered, e)
    if joint:
        levels_of(kind, work.drop[:m], work.level[:m])
        outside = join(lowered, work.level[:m], kind.base, work.pair[:m], symbol)
    kept = find_gaps(e, m, 1, work.rows)
    if kept < m:
        flag, at = GAPS, put_bitmap(work.rows, m, out, at)
        pack_rows(work.rows, m, symbol)
        if joint:
            pack_rows(work.rows, m, work.pair)
        m, symbol = kept, symbol[:kept]
    if not outside and is_constant(symbol):
        out[at] = symbol[0]
        return flag | CONSTANT, at + 1
    if outside:
        for i in range(m):
            if work.pair[i] and symbol[i] == 0:
                symbol[i] = job.tables[0, 512]
    wide = work.pair if joint else work.coder.none
    end = put_coded(job, 0, work.symbol, m, wide, 1 << 40 if joint else m - 1, work.coder, out, at)
    if end:
        return flag | CODED, end
    copy(out[at:], symbol)
    return flag | RAW, at + m


@jit
def _put_pieces(job, work, m, out, at):
    """Write the kept bits of each value's field; return bits to set in the region's head, and the end in ``out``."""
    kind, head = work.kind, 0
    total, f, width = kind.mbits + 1, work.pattern[:m], work.width[:m]
    fields_of(kind, f, f)
    if job.options & BITS:
        some, tail = U32(0), 0
        for i in range(m):
            some |= f[i]
        while tail < total and not some >> U32(tail) & U32(1):
            tail += 1
        widths_of(work.e[:m], work.drop[:m], total, total - tail, width)
        return tail << 8, pack_widths(f, width, total, out, at)
    widths_of(work.e[:m], work.drop[:m], total, total, width)
    least = 0
    for p in range(PIECES):
        bits = kind.pieces[p]
        least += bits
        piece_of(f, total - least, bits, work.piece[:m])
        n = compact(width, least, work.piece[:m], work.kept)
        if n and largest(work.kept[:n]) == 0:
            head |= 1 << 8 + p
            continue
        pack(work.kept, n, bits, out[at:])
        at += (n * bits + 7) // 8
    return head, at


@jit
def _put_block(job, work, m, digest_of_state, region):
    """Write a truncated block to its region, and return the region's size in bytes."""
    at = 4
    if job.variant == SHARED:
        store32(region, at, digest_of_state)
        at += 4
    mode, at = _put_symbols(job, work, m, region, at)
    if job.variant == PLANE:
        levels_of(work.kind, work.drop[:m], work.level[:m])
        n = compact(work.e[:m], 1, work.level[:m], work.kept)
        pack(work.kept, n, 2, region[at:])
        at += (n + 3) // 4
    head, at = _put_pieces(job, work, m, region, at)
    store32(region, 0, head | mode)
    return close_region(region, at)


@kernel
def encode_blocks(job, work, data, feedback, levels, exponents, from_, frame, limit, first, count, result):
    """Encode blocks [first, first + count) to regions from frame[result[0]] on.

    result[0] is set to the end of the regions, and the blocks' checksums are added to result[1]. ``levels`` has the
    user's level of each value of the tensor, or is empty. ``exponents`` has the exponents of A for values from
    ``from_`` on.
    """
    enter_floats(work.floats)
    status, feedback_values, kind = OK, feedback.view(F32), work.kind
    fill_row_offsets(
        job, data, feedback_values, first * job.block, min((first + count) * job.block, job.n), work.x, work.native
    )
    for b in range(first, first + count):
        start, at = b * job.block, I64(result[0])
        m = min(job.block, job.n - start)
        x, e, drop = work.pattern[:m], work.e[:m], work.drop[:m]
        ea, given = exponents[start - from_ :][:m], levels[start:][:m]
        _load_patterns(job, work, data, feedback_values, start, x)
        exponents_of(kind, x, e)
        status = drops(job, kind, e, ea, given, drop)
        if status:
            break
        cut_patterns(kind, job.options & CUT == 0, drop, x, e)
        if job.variant == SHARED:  # the receiver knows only the exponents after rounding, and computes levels from them
            drops(job, kind, e, ea, given, drop)
        if len(job.parts):
            fill_offsets(job, start, work.offset[:m])
        state = digest(ea, STATE) if job.variant == SHARED else U64(0)
        fits = limit - at >= len(work.region)
        region = frame[at:limit] if fits else work.region
        size = _put_block(job, work, m, U32(state), region)
        status = close_block(frame, job, b, region, size, fits, limit, U64(0), result)
        if status:
            break
    leave_floats(work.floats)
    return status


@jit
def _get_symbols(frame, job, work, mode, m, c, fault):
    """Decode exponents, lowered by offsets, to ``work.e``, and coded levels to ``work.level``."""
    kind, joint, symbol = work.kind, job.variant == CODED_LEVELS, work.symbol
    escaped, escape = work.coder.escaped, job.tables[0, 512]
    at = c[0]
    if mode == CODED:
        status = get_coded(frame, job, 0, m, work.coder, True, symbol, c, fault)
        at = c[0]  # end of the words of the entropy coder
        if not status and not joint:
            status = get_literals(frame, escape, escaped, m, symbol, work.coder.none, c, fault)
        if status:
            return status
    elif mode == RAW:
        if joint or c[1] - c[0] < m:
            return bad(fault, BAD_REGION, c[0], c[1] - c[0], m)
        copy(symbol, frame[c[0] : c[0] + m])
        c[0] += m
    else:
        if c[1] == c[0]:
            return bad(fault, BAD_REGION, c[0], 0, 1)
        symbol[:m] = frame[c[0]]
        c[0] += 1
    e, level, pair = work.e[:m], work.level[:m], work.pair[:m]
    if not joint:
        if largest(symbol[:m]) > kind.last:
            i = first_above(symbol[:m], kind.last)
            return bad(fault, BAD_REGION, at + (i if mode == RAW else 0), symbol[i], kind.last)
        copy(e, symbol[:m])
        return OK
    for i in range(m):
        pair[i] = U16(symbol[i] + 4 * kind.base) if symbol[i] else U16(0)
    if mode == CODED:
        status = get_literals(frame, escape, escaped, m, symbol, pair, c, fault)
        if status:
            return status
        literal = at
        for r in range((m + 127) // 128):
            for i in range(128 * r, min(m, 128 * r + 128) if escaped[r] else 0):
                if symbol[i] == escape:
                    if (pair[i] and pair[i] < 4) or pair[i] >> U16(2) > kind.last:
                        return bad(fault, BAD_REGION, literal, pair[i], 4 if pair[i] < 4 else 4 * kind.last + 3)
                    symbol[i] = U8(0)
                    literal += 2
    few, most = U8(0), 4 * (kind.last - kind.base) + 3
    for i in range(m):
        few |= symbol[i] if symbol[i] < 4 else U8(0)
    if few or largest(symbol[:m]) > most:
        for i in range(m):
            if (symbol[i] and symbol[i] < 4) or symbol[i] > most:
                return bad(fault, BAD_REGION, at, symbol[i], 4 if symbol[i] < 4 else most)
    for i in range(m):
        e[i] = U8(pair[i] >> U16(2))
        level[i] = U8(pair[i] & U16(3))
    return OK


@jit
def _get_codes(frame, n, bits, checking, code, c, fault):
    """Read ``n`` packed codes, and check that padding bits are 0; with ``checking``, do not unpack the codes."""
    nbytes = (n * bits + 7) // 8
    if c[1] - c[0] < nbytes:
        return bad(fault, BAD_REGION, c[0], c[1] - c[0], nbytes)
    at = c[0] + nbytes - 1
    if n * bits % 8 and frame[at] >> U8(n * bits % 8):
        return bad(fault, BAD_REGION, at, frame[at], 0)
    if not checking:
        unpack(frame[c[0] : c[0] + nbytes], n, bits, code)
    c[0] += nbytes
    return OK


@jit
def _get_levels(frame, job, work, found, ea, none, m, c, fault):
    """Compute the number of bits that each value has dropped, into ``work.drop``."""
    kind, e, drop, at = work.kind, work.e[:m], work.drop[:m], c[0]
    if job.variant == SHARED:
        state = U32(digest(ea, STATE))
        if found != state:
            return bad(fault, OTHER_STATE, at, found, state)
        return drops(job, kind, e, ea, none, drop)
    if job.variant == FIXED:
        return drops(job, kind, e, ea, none, drop)
    if job.variant == PLANE:
        status = _get_codes(frame, count_from(e, 1), 2, False, work.kept, c, fault)
        if status:
            return status
        expand(e, 1, work.kept, work.level[:m])
    drops_at(kind, work.level[:m], drop)
    some, last = U8(0), U8(kind.last)
    for i in range(m):
        some |= drop[i] if e[i] == last else U8(0)
    return bad(fault, BAD_REGION, at, 1, 0) if some else OK


@jit
def _get_pieces(frame, job, work, head, m, checking, c, fault):
    """Decode fields to ``work.pattern``; with ``checking``, only validate them."""
    kind, f, width = work.kind, work.pattern[:m], work.width[:m]
    total = kind.mbits + 1
    tail = head >> 8 & 31 if job.options & BITS else 0
    widths_of(work.e[:m], work.drop[:m], total, total - tail, width)
    if job.options & BITS:
        nbits = 0
        for i in range(m):
            nbits += I64(width[i])
        nbytes = (nbits + 7) // 8
        if c[1] - c[0] < nbytes:
            return bad(fault, BAD_REGION, c[0], c[1] - c[0], nbytes)
        c[0] += nbytes
        if nbits % 8 and frame[c[0] - 1] >> U8(nbits % 8):
            return bad(fault, BAD_REGION, c[0] - 1, frame[c[0] - 1], 0)
        if not checking:
            unpack_widths(frame[c[0] - nbytes : c[0]], width, total, f)
        return OK
    f[:] = U32(0)
    least = 0
    for p in range(PIECES):
        bits = kind.pieces[p]
        least += bits
        if head >> 8 + p & 1:
            continue
        status = _get_codes(frame, count_from(width, least), bits, checking, work.kept, c, fault)
        if status:
            return status
        if checking:
            continue
        piece, below = work.piece[:m], U32(total - least)
        expand(width, least, work.kept, piece)
        for i in range(m):
            f[i] |= U32(U32(piece[i]) << below)
    return OK


@jit
def _get_block(frame, job, work, ea, none, first, m, checking, fault):
    """Decode a region to fields in ``work.pattern`` and exponents in ``work.e``."""
    c, kind = work.c, work.kind
    at = c[0]
    head = I64(load32(frame, at))
    by_bit = job.options & BITS != 0
    known = GAPS | 3 | (31 << 8 if by_bit else 15 << 8)
    if head & ~known or head & 3 == ROWS or (by_bit and head >> 8 & 31 > kind.mbits + 1):
        return bad(fault, BAD_REGION, at, head, known)
    c[0] += 4
    found = U32(0)
    if job.variant == SHARED:
        found = load32(frame, c[0])
        c[0] += 4
    status, kept = OK, m
    if head & GAPS:
        status, kept = get_bitmap(frame, m, work.rows, c, fault)
    if not status:
        status = _get_symbols(frame, job, work, head & 3, kept, c, fault)
    if status:
        return status
    if head & GAPS:
        expand_rows(work.rows, m, kept, work.e)
        if job.variant == CODED_LEVELS:
            expand_rows(work.rows, m, kept, work.level)
    if len(job.parts):
        fill_offsets(job, first, work.offset[:m])
        e = work.e[:m]
        move_exponents(e, work.offset[:m], 10 if job.dtype == FLOAT16 else 7, kind.last, True, e)
    status = _get_levels(frame, job, work, found, ea, none, m, c, fault)
    if not status:
        status = _get_pieces(frame, job, work, head, m, checking, c, fault)
    return status if status else end_region(frame, c, fault)


@kernel
def decode_blocks(job, work, frame, checks, exponents, from_, first, count, sink, checksum, fault):
    """Decode blocks [first, first + count) to ``sink``; if ``sink.into`` is NOWHERE, only validate them."""
    enter_floats(work.floats)
    status = OK
    for b in range(first, first + count):
        start = b * job.block
        m = min(job.block, job.n - start)
        status = open_block(frame, job, b, checks, work.c, checksum, fault)
        if not status:
            ea = exponents[start - from_ :][:m]
            status = _get_block(frame, job, work, ea, work.kept[:0], start, m, sink.into == NOWHERE, fault)
        if status:
            break
        if sink.into == NOWHERE:
            continue
        patterns_of(work.kind, work.pattern[:m], work.e[:m])
        stores = sink.into == STORE
        data = sink.data[job.size * start : job.size * (start + m)] if stores else work.native[: job.size * m]
        if job.size == 4:
            copy(data.view(U32), work.pattern[:m])
        else:
            h = data.view(U16)
            for i in range(m):
                h[i] = U16(work.pattern[i])
        if not stores:
            to_floats(job.dtype, data, 0, work.x[:m])
            put(sink, F32(0), work.x[:m], start)
    leave_floats(work.floats)
    return status
