# pyright: basic
"""Lossless: conversion between values, byte planes and regions (docs/spec/format.md, sections 3 to 7).

One file: decoding of a region reverses the steps of encoding.
"""

from typing import Any, NamedTuple

import numpy as np

from codec.engines.numba.checksum import PLANE, digest
from codec.engines.numba.floats import NOWHERE, STORE, put, to_floats
from codec.engines.numba.gaps import GAPS, MOST_ROWS, expand_rows, find_gaps, get_bitmap, pack_rows, put_bitmap
from codec.engines.numba.jit import enter_floats, jit, kernel, leave_floats
from codec.engines.numba.lanes import ROW
from codec.engines.numba.model import fill_offsets, fill_row_offsets
from codec.engines.numba.packing import pack, unpack
from codec.engines.numba.planes import (
    PLANE_ROOM,
    halve,
    join_bits,
    merge_planes,
    raw_bits,
    section,
    split_values,
    symbol_of,
    take_bits,
    unhalve,
)
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
    pass_literals,
    put_coded,
    store32,
)
from codec.engines.numba.scans import compact, count_from, expand, is_constant, largest
from codec.engines.numba.words import F32, I64, U8, U16, U32, U64, copy

PRUNED = 1 << 16  # flag in a region's head: planes other than plane 0 do not contain the bytes of +0 values
MANY = 64  # +0 values of a block are pruned if at least one value in 64 is +0


@jit
def has_top(job):
    """Return True if plane 0 is a part of the pattern, without the sign: for floats, except float8."""
    return job.octave > 0 and job.size > 1


@jit
def _pays(raw, lengths, plane):
    """Return True if entropy-coding a plane saves at least 2%, as estimated from every 8th quad row."""
    n, cost, count = len(plane), 0, 0
    for r in range(0, n, 8 * ROW):
        for i in range(r, min(n, r + ROW)):
            length = lengths[symbol_of(plane[i], raw)]
            cost += np.int64(length & U8(15)) + np.int64(length >> U8(7)) * 8
            count += 1
    return 100 * cost < 98 * (8 - raw) * count


@jit
def _put_rows(plane, out, at):
    """Encode a plane in mode ROWS (a bit for each run of 128 bytes, then the nonzero runs); return the end in ``out``.

    Return 0 if this does not make the plane smaller.
    """
    n = len(plane)
    rows = (n + ROW - 1) // ROW
    bitmap, kept = (rows + 7) // 8, 0
    out[at : at + bitmap] = U8(0)
    for r in range(rows):
        if largest(plane[ROW * r : ROW * r + ROW]):
            out[at + r // 8] |= U8(1 << r % 8)
            kept += min(ROW, n - ROW * r)
    if bitmap + kept >= n:
        return 0
    p = at + bitmap
    for r in range(rows):
        run = plane[ROW * r : ROW * r + ROW]
        if out[at + r // 8] >> U8(r % 8) & U8(1):
            copy(out[p:], run)
            p += len(run)
    return p


@jit
def _put_plane(job, i, memory, k, room, low, out, at):
    """Encode plane ``i``, the first ``k`` bytes of ``memory``, in the best mode; return mode, and end in ``out``."""
    plane, end = memory[:k], 0
    if is_constant(plane):
        out[at] = plane[0]
        return CONSTANT, at + 1
    raw = raw_bits(job, i)
    lengths = job.tables[i, 256:512]
    if job.coded >> i & 1 and ((i == 0 and has_top(job)) or _pays(raw, lengths, plane)):
        nbytes = (k * raw + 7) // 8
        bits = low[PLANE_ROOM:]
        if raw == 4:
            halve(plane, low, bits[:nbytes])
        elif raw:
            take_bits(plane, raw, low, bits)
        end = put_coded(job, i, low if raw else memory, k, room.none, k - nbytes - 1, room, out, at)
        if end and raw == 4:
            copy(out[end:], bits[:nbytes])
        elif end and raw:
            pack(bits, k, raw, out[end:])
        end += nbytes if end else 0
    if end:
        return CODED, end
    end = _put_rows(plane, out, at)
    if end:
        return ROWS, end
    copy(out[at:], plane)
    return RAW, at + k


@jit
def _put_fixed(job, frame, planes, first, m):
    """Copy a block's fixed planes (those stored uncompressed) to the planes' sections, and return the planes' digest.

    After the last block, the rest of each section is filled with zeros.
    """
    total, section = U64(0), job.planes + first
    for p in range(job.size):
        if job.fixed >> p & 1:
            total += digest(planes[p][:m], PLANE + p)
            copy(frame[section:], planes[p][:m])
            if first + m == job.n:
                frame[section + m : section + m + job.plane_stride - job.n] = U8(0)
            section += job.plane_stride
    return total


@jit
def _under_zeros(top, plane):
    """Return the bitwise OR of those bytes of ``plane`` whose byte in plane 0 (``top``) is 0."""
    some = U8(0)
    for i in range(len(top)):
        some |= plane[i] if top[i] == 0 else U8(0)
    return some


@jit
def _prune(job, planes, m):
    """Remove the bytes of +0 values from all planes but plane 0, and return the number of values left.

    Nothing is removed if fewer than one value in 64 is +0, or if plane 0 is 0 for a value other than +0.
    """
    top = planes[0][:m]
    left = count_from(top, 1)
    if MANY * (m - left) < m:
        return m
    for p in range(1, job.size):
        if _under_zeros(top, planes[p][:m]):
            return m
    for p in range(1, job.size):
        if not job.fixed >> p & 1:
            compact(top, 1, planes[p][:m], planes[p])
    return left


@jit
def _put_block(job, values, planes, rows, m, room, low, region):
    """Write the planes of a block to its region, and return the region's size in bytes."""
    kept = m if job.fixed else find_gaps(values, m, job.size, rows)
    head, at = 0, 4
    if kept < m:
        head, at = GAPS, put_bitmap(rows, m, region, at)
        for p in range(job.size):
            pack_rows(rows, m, planes[p])
    m = k = kept
    for p in range(job.size):
        if job.fixed >> p & 1:
            continue
        mode, at = _put_plane(job, p, planes[p], m if p == 0 else k, room, low, region, at)
        head |= mode << 2 * p
        if p == 0 and mode == CODED and has_top(job) and (job.fixed | 1) != (1 << job.size) - 1:
            k = _prune(job, planes, m)
    store32(region, 0, head | (PRUNED if k < m else 0))
    return close_region(region, at)


class LosslessWork(NamedTuple):
    """Buffers of one thread that encodes or decodes blocks of Lossless."""

    coder: Any
    planes: Any
    flat: Any  # `planes` as one dimension
    low: Any  # symbols of a plane, followed by raw bits
    region: Any
    rows: Any  # by quad row: 1 if the region has its values
    offset: Any
    upper: Any  # upper 16 bits of each value; `half` has 32 bits of each 8-byte value
    half: Any
    x: Any
    native: Any
    mode: Any
    c: Any
    floats: Any  # saved floating-point environment of the thread


def work_of(job):
    """Allocate one thread's buffers for the blocks of a Lossless job."""
    planes = np.empty((8, PLANE_ROOM), U8)
    return LosslessWork(
        coder_room(job, BLOCK),
        planes,
        planes.reshape(-1),
        np.empty(2 * PLANE_ROOM, U8),
        np.empty(8 * BLOCK + 64, U8),
        np.empty(MOST_ROWS, U8),
        np.empty(BLOCK, U16),
        np.empty(BLOCK, U16),
        np.empty(BLOCK, U32),
        np.empty(ROW, F32),
        np.empty(8 * ROW, U8),
        np.empty(8, I64),
        np.empty(2, I64),
        np.empty(64, U8),
    )


@kernel
def encode_blocks(job, work, data, frame, limit, first, count, result):
    """Encode blocks [first, first + count) to regions from frame[result[0]] on.

    result[0] is set to the end of the regions, and the blocks' checksums are added to result[1].
    """
    if job.octave:
        end = min((first + count) * job.block, job.n)
        fill_row_offsets(job, data, work.x[:0], first * job.block, end, work.x, work.native)
    for b in range(first, first + count):
        start = b * job.block
        m, at = min(job.block, job.n - start), np.int64(result[0])
        if job.octave:
            fill_offsets(job, start, work.offset[:m])
        values = data[job.size * start : job.size * (start + m)]
        split_values(job, values, work.offset, work.upper, work.half, work.planes)
        fixed = _put_fixed(job, frame, work.planes, start, m)
        fits = limit - at >= m * job.size + 8 + MOST_ROWS // 8
        region = frame[at:limit] if fits else work.region
        size = _put_block(job, values, work.planes, work.rows, m, work.coder, work.low, region)
        status = close_block(frame, job, b, region, size, fits, limit, fixed, result)
        if status:
            return status
    return OK


@jit
def _read_head(job, head, at, mode, fault):
    """Read the modes of a region's planes, and check that they are valid."""
    known = PRUNED | (0 if job.fixed else GAPS) | ((1 << 2 * job.size) - 1)
    if head & ~known:
        return bad(fault, BAD_REGION, at, head, known)
    for p in range(job.size):
        mode[p] = head >> 2 * p & 3
        fixed, coded = job.fixed >> p & 1, job.coded >> p & 1
        if (mode[p] != 0) if fixed else (mode[p] == CODED and not coded):
            return bad(fault, BAD_REGION, at, head, job.coded)
    if head & PRUNED and (not has_top(job) or mode[0] != CODED):
        return bad(fault, BAD_REGION, at, head, CODED)
    return OK


@jit
def _get_raw_bits(frame, symbol, raw, room, c, fault):
    """Read the raw bits of a plane, and combine them with the symbols in ``symbol``. ``room``: a buffer."""
    n = len(symbol)
    nbytes, used = (n * raw + 7) // 8, n * raw % 8
    if c[1] - c[0] < nbytes:
        return bad(fault, BAD_REGION, c[0], c[1] - c[0], nbytes)
    some = U8(0)
    for i in range(n):
        some |= symbol[i]
    if some > 255 >> raw:
        return bad(fault, BAD_REGION, c[0], some, 255 >> raw)
    bits = frame[c[0] : c[0] + nbytes]
    if used and bits[nbytes - 1] >> U8(used):
        return bad(fault, BAD_REGION, c[0] + nbytes - 1, bits[nbytes - 1], (1 << used) - 1)
    if raw == 4:
        unhalve(symbol, bits)
    else:
        unpack(bits, n, raw, room)
        join_bits(symbol, raw, room)
    c[0] += nbytes
    return OK


@jit
def _get_rows(frame, plane, c, fault):
    """Decode a plane that :func:`_put_rows` encoded."""
    n = len(plane)
    rows = (n + ROW - 1) // ROW
    nbytes = (rows + 7) // 8
    if c[1] - c[0] < nbytes:
        return bad(fault, BAD_REGION, c[0], c[1] - c[0], nbytes)
    bitmap = frame[c[0] : c[0] + nbytes]
    if rows % 8 and bitmap[nbytes - 1] >> U8(rows % 8):
        return bad(fault, BAD_REGION, c[0] + nbytes - 1, bitmap[nbytes - 1], 0)
    c[0] += nbytes
    for r in range(rows):
        run = plane[ROW * r : ROW * r + ROW]
        if not bitmap[r // 8] >> U8(r % 8) & U8(1):
            run[:] = U8(0)
            continue
        if c[1] - c[0] < len(run):
            return bad(fault, BAD_REGION, c[0], c[1] - c[0], len(run))
        copy(run, frame[c[0] : c[0] + len(run)])
        c[0] += len(run)
    return OK


@jit
def _get_plane(frame, job, p, mode, k, room, memory, bits, wanted, c, fault):
    """Decode plane ``p``, of ``k`` values, to ``memory``; if not ``wanted``, only validate the plane."""
    if mode == CODED:
        raw = raw_bits(job, p)
        symbols = wanted or raw > 0
        status = get_coded(frame, job, p, k, room, symbols, memory, c, fault)
        if not status and symbols:
            status = get_literals(frame, job.tables[p, 512], room.escaped, k, memory, room.none, c, fault)
        elif not status:
            status = pass_literals(room.escaped, k, c, fault)
        if not status and raw:
            status = _get_raw_bits(frame, memory[:k], raw, bits, c, fault)
        return status
    if mode == ROWS:
        return _get_rows(frame, memory[:k], c, fault)
    nbytes = k if mode == RAW else 1
    if c[1] - c[0] < nbytes:
        return bad(fault, BAD_REGION, c[0], c[1] - c[0], nbytes)
    if wanted and mode == RAW:
        copy(memory, frame[c[0] : c[0] + k])
    elif wanted:
        memory[:k] = frame[c[0]]
    c[0] += nbytes
    return OK


@jit
def _check_pruned(frame, job, first, m, planes, fault):
    """Check that pruned values are 0 in the fixed planes, too, which have a byte for every value."""
    for p in range(1, job.size):
        if job.fixed >> p & 1:
            at = section(job, p, first)
            some = _under_zeros(planes[0][:m], frame[at : at + m])
            if some:
                return bad(fault, BAD_REGION, at, some, 0)
    return OK


@jit
def _get_block(frame, job, work, first, m, merges, fault):
    """Decode a region to planes; if ``merges`` is False, decode only as much as validation needs."""
    c, planes, mode, bits = work.c, work.planes, work.mode, work.low[PLANE_ROOM:]
    head = np.int64(load32(frame, c[0]))
    status = _read_head(job, head, c[0], mode, fault)
    c[0] += 4
    wanted = merges or head & PRUNED != 0
    whole = m
    if not status and head & GAPS:
        status, m = get_bitmap(frame, m, work.rows, c, fault)
    k = m
    for p in range(job.size):
        if status or job.fixed >> p & 1:
            continue
        if p == 0 or not head & PRUNED:
            status = _get_plane(frame, job, p, mode[p], m, work.coder, planes[p], bits, wanted, c, fault)
        else:
            status = _get_plane(frame, job, p, mode[p], k, work.coder, work.low, bits, merges, c, fault)
            if not status and merges:
                expand(planes[0][:m], 1, work.low, planes[p][:m])
        if not status and p == 0 and head & PRUNED:
            k = count_from(planes[0][:m], 1)
            status = _check_pruned(frame, job, first, m, planes, fault) if k else bad(fault, BAD_REGION, c[0], 0, 1)
    if not status and merges and head & GAPS:
        for p in range(job.size):
            expand_rows(work.rows, whole, m, planes[p])
    return status if status else end_region(frame, c, fault)


@kernel
def decode_blocks(job, work, frame, checks, first, count, sink, checksum, fault):
    """Decode blocks [first, first + count) to ``sink``; if ``sink.into`` is NOWHERE, only validate them."""
    enter_floats(work.floats)
    status = OK
    for b in range(first, first + count):
        start = b * job.block
        m = min(job.block, job.n - start)
        status = open_block(frame, job, b, checks, work.c, checksum, fault)
        if not status:
            status = _get_block(frame, job, work, start, m, sink.into != NOWHERE, fault)
        if status:
            break
        if sink.into == NOWHERE:
            continue
        if job.octave:
            fill_offsets(job, start, work.offset[:m])
        stores = sink.into == STORE
        data = sink.data[job.size * start : job.size * (start + m)] if stores else work.region[: job.size * m]
        merge_planes(frame, job, work, start, data)
        if not stores:
            for i in range(0, m, len(work.x)):
                x = work.x[: min(len(work.x), m - i)]
                to_floats(job.dtype, data, i, x)
                put(sink, F32(0), x, start + i)
    leave_floats(work.floats)
    return status
