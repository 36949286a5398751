# pyright: basic
"""Lossless: conversion of values to byte planes and of planes to regions, and back (docs/spec/format.md, 3 to 7)."""

from typing import Any, NamedTuple

import numpy as np

from codec.engines.numba.checksum import PLANE, digest
from codec.engines.numba.floats import NOWHERE, STORE, put, to_floats
from codec.engines.numba.jit import enter_floats, jit, kernel, leave_floats
from codec.engines.numba.lanes import ROW
from codec.engines.numba.model import fill_offsets, fill_row_offsets
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
    compact,
    count_from,
    end_region,
    expand,
    get_coded,
    get_literals,
    is_constant,
    largest,
    load32,
    open_block,
    pass_literals,
    put_coded,
    store32,
)
from codec.engines.numba.words import F32, I64, U8, U16, U32, U64, copy, turn, unturn

PRUNED = 1 << 16  # flag in a region's head: +0 values are left out of other planes
SHIFT, SHIFT64 = 7, 4  # s of the format for float32, bfloat16 and float16; for float64
MANY = 64  # values are pruned if at least one in 64 is +0
PLANE_ROOM = BLOCK + ROW  # bytes of a plane's buffer


@jit
def _split2(x, offset, is_float, p0, p1):
    """Split values of 2 bytes into planes."""
    n = len(x)
    if is_float:
        for i in range(n):
            y = turn(x[i], offset[i], SHIFT)
            p0[i], p1[i] = U8(y >> U16(8)), U8(y)
    else:
        for i in range(n):
            p0[i], p1[i] = U8(x[i] >> U16(8)), U8(x[i])


@jit
def _split4(x, offset, is_float, upper, p0, p1, p2, p3):
    """Split values of 4 bytes into planes. ``upper`` is a buffer of 16 bits for each value."""
    n = len(x)
    if is_float:
        for i in range(n):  # a loop of its own: lanes of the next one have 16 bits, twice as many in a vector
            upper[i] = U16(x[i] >> U32(16))
        _split2(upper[:n], offset, is_float, p0, p1)
    else:
        for i in range(n):
            p0[i], p1[i] = U8(x[i] >> U32(24)), U8(x[i] >> U32(16))
    for i in range(n):  # a loop of its own: LLVM vectorizes only loops over few arrays, whose overlap it checks
        p2[i], p3[i] = U8(x[i] >> U32(8)), U8(x[i])


@jit
def _split8(x, offset, is_float, upper, half, planes):
    """Split values of 8 bytes into planes. ``half`` is a buffer of 32 bits for each value."""
    n = len(x)
    for i in range(n):
        half[i] = U32(x[i] >> U64(32))
    _split4(half, offset, False, upper, planes[0], planes[1], planes[2], planes[3])
    for i in range(n):
        half[i] = U32(x[i])
    _split4(half, offset, False, upper, planes[4], planes[5], planes[6], planes[7])
    p0, p1 = planes[0], planes[1]
    for i in range(n if is_float else 0):
        y = turn(U16(U16(U16(p0[i]) << U16(8)) | U16(p1[i])), offset[i], SHIFT64)
        p0[i], p1[i] = U8(y >> U16(8)), U8(y)


@jit
def _split(job, data, offset, upper, half, planes):
    """Split values (``data``: their bytes) into planes."""
    is_float = job.octave > 0
    if job.size == 1:
        copy(planes[0], data)
    elif job.size == 2:
        _split2(data.view(U16), offset, is_float, planes[0], planes[1])
    elif job.size == 4:
        _split4(data.view(U32), offset, is_float, upper, planes[0], planes[1], planes[2], planes[3])
    else:
        _split8(data.view(U64), offset, is_float, upper, half, planes)


@jit
def _merge2(p0, p1, offset, is_float, x):
    """Merge planes to values of 2 bytes."""
    n = len(x)
    if is_float:
        for i in range(n):
            x[i] = unturn(U16(U16(U16(p0[i]) << U16(8)) | U16(p1[i])), offset[i], SHIFT)
    else:
        for i in range(n):
            x[i] = U16(U16(U16(p0[i]) << U16(8)) | U16(p1[i]))


@jit
def _merge4(p0, p1, p2, p3, offset, is_float, upper, x):
    """Merge planes to values of 4 bytes."""
    n = len(x)
    _merge2(p0, p1, offset, is_float, upper[:n])  # a loop of its own: 16-bit lanes, twice as many in a vector
    for i in range(n):
        x[i] = U32(U32(U32(upper[i]) << U32(16)) | U32(U32(p2[i]) << U32(8)) | U32(p3[i]))


@jit
def _merge8(p0, p1, p2, p3, p4, p5, p6, p7, offset, is_float, upper, half, x):
    """Merge planes to values of 8 bytes."""
    n = len(x)
    for i in range(n):
        y = U16(U16(U16(p0[i]) << U16(8)) | U16(p1[i]))
        y = unturn(y, offset[i], SHIFT64) if is_float else y
        half[i] = U32(U32(U32(y) << U32(16)) | U32(U32(p2[i]) << U32(8)) | U32(p3[i]))
    for i in range(n):
        x[i] = U64(half[i]) << U64(32)
    _merge4(p4, p5, p6, p7, offset, False, upper, half[:n])
    for i in range(n):
        x[i] |= U64(half[i])


@jit
def _section(job, p, first):
    """Return the offset in the frame of the values from ``first`` on in fixed plane ``p``."""
    at = job.planes + first
    for q in range(p):
        at += job.plane_stride * (job.fixed >> q & 1)
    return at


@jit
def _plane_array(frame, job, flat, p):
    """Return the array that holds plane ``p``: the frame if the plane is fixed, else the thread's planes."""
    if job.fixed >> p & 1:
        return frame
    return flat


@jit
def _plane_offset(job, p, first):
    """Return the offset of plane ``p`` of a block in the array that :func:`_plane_array` returns."""
    return _section(job, p, first) if job.fixed >> p & 1 else PLANE_ROOM * p


@jit
def _merge(frame, job, work, first, data):
    """Merge the planes of a block to values (``data``: their bytes)."""
    is_float, flat = job.octave > 0, work.flat
    p0 = _plane_array(frame, job, flat, 0)[_plane_offset(job, 0, first) :]
    if job.size == 1:
        copy(data, p0[: len(data)])
        return
    p1 = _plane_array(frame, job, flat, 1)[_plane_offset(job, 1, first) :]
    if job.size == 2:
        _merge2(p0, p1, work.offset, is_float, data.view(U16))
        return
    p2 = _plane_array(frame, job, flat, 2)[_plane_offset(job, 2, first) :]
    p3 = _plane_array(frame, job, flat, 3)[_plane_offset(job, 3, first) :]
    if job.size == 4:
        _merge4(p0, p1, p2, p3, work.offset, is_float, work.upper, data.view(U32))
        return
    p4 = _plane_array(frame, job, flat, 4)[_plane_offset(job, 4, first) :]
    p5 = _plane_array(frame, job, flat, 5)[_plane_offset(job, 5, first) :]
    p6 = _plane_array(frame, job, flat, 6)[_plane_offset(job, 6, first) :]
    p7 = _plane_array(frame, job, flat, 7)[_plane_offset(job, 7, first) :]
    _merge8(p0, p1, p2, p3, p4, p5, p6, p7, work.offset, is_float, work.upper, work.half, data.view(U64))


@jit
def _pays(halved, lengths, plane):
    """Estimate from some quad rows whether encoding a plane saves at least 2%."""
    n, raw = len(plane), 4 if halved else 8
    cost, count = 0, 0
    for r in range(0, n, 8 * ROW):
        for i in range(r, min(n, r + ROW)):
            length = lengths[plane[i] & U8(15) if halved else plane[i]]
            cost += np.int64(length & U8(15)) + np.int64(length >> U8(7)) * 8
            count += 1
    return 100 * cost < 98 * raw * count


@jit
def _halve(plane, low, high):
    """Split a plane into low nibbles, a byte each, and high nibbles, two in a byte: of values i and i + (n + 1) / 2."""
    n, half = len(plane), len(high)
    for i in range(n):
        low[i] = plane[i] & U8(15)
    for i in range(half):
        high[i] = plane[i] >> U8(4)
    for i in range(n - half):
        high[i] |= plane[half + i] & U8(0xF0)


@jit
def _unhalve(low, high):
    """Add the high nibbles to the low ones: the inverse of :func:`_halve`."""
    n, half = len(low), len(high)
    for i in range(half):
        low[i] |= U8(high[i] << U8(4))
    for i in range(half, n):
        low[i] |= high[i - half] & U8(0xF0)


@jit
def _put_rows(plane, out, at):
    """Encode a plane as a bitmap of runs of 128 bytes and the runs that are not all zero; return the end.

    Return 0 if this saves nothing.
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
    """Encode plane ``i``, the first ``k`` bytes of ``memory``, in the smallest mode; return the mode and the end."""
    plane, end = memory[:k], 0
    if is_constant(plane):
        out[at] = plane[0]
        return CONSTANT, at + 1
    halved = job.halved >> i & 1
    lengths = job.tables[i, 256:512]
    if job.coded >> i & 1 and ((i == 0 and job.octave) or _pays(halved, lengths, plane)):
        if halved:
            half = (k + 1) // 2
            high = low[BLOCK:][:half]
            _halve(plane, low, high)
            end = put_coded(job, i, low, k, room.none, k // 2 - 1, room, out, at)
            if end:
                copy(out[end:], high)
                end += half
        else:
            end = put_coded(job, i, memory, k, room.none, k - 1, room, out, at)
    if end:
        return CODED, end
    end = _put_rows(plane, out, at)
    if end:
        return ROWS, end
    copy(out[at:], plane)
    return RAW, at + k


@jit
def _put_fixed(job, frame, planes, first, m):
    """Copy a block's fixed planes to their sections, and return their digest.

    The rest of a section is filled with zeros after the last block.
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
    """Return the bitwise OR of the bytes of ``plane`` where plane 0 is 0."""
    some = U8(0)
    for i in range(len(top)):
        some |= plane[i] if top[i] == 0 else U8(0)
    return some


@jit
def _prune(job, planes, m):
    """Remove +0 values from all planes but plane 0, and return the number of values left.

    All values are kept if fewer than one in 64 is +0, or if plane 0 is 0 for a value other than +0.
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
def _put_block(job, planes, m, room, low, region):
    """Write the planes of a block to its region, and return the size."""
    head, at, k = 0, 4, m
    for p in range(job.size):
        if job.fixed >> p & 1:
            continue
        mode, at = _put_plane(job, p, planes[p], m if p == 0 else k, room, low, region, at)
        head |= mode << 2 * p
        if p == 0 and mode == CODED and job.octave and (job.fixed | 1) != (1 << job.size) - 1:
            k = _prune(job, planes, m)
    store32(region, 0, head | (PRUNED if k < m else 0))
    return close_region(region, at)


class Work(NamedTuple):
    """Buffers of one thread."""

    coder: Any
    planes: Any
    flat: Any  # `planes` as one dimension
    low: Any  # low nibbles, followed by high nibbles
    region: Any
    offset: Any
    upper: Any  # upper 16 bits of values; half: 32 bits of values
    half: Any
    x: Any
    native: Any
    mode: Any
    c: Any
    floats: Any  # saved floating-point environment of the thread


def work_of(job):
    """Allocate the buffers for a job's blocks."""
    planes = np.empty((8, PLANE_ROOM), U8)
    return Work(
        coder_room(job, BLOCK),
        planes,
        planes.reshape(-1),
        np.empty(2 * BLOCK + ROW, U8),
        np.empty(8 * BLOCK + 64, U8),
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

    result[0] becomes the end, and checksums of blocks are added to result[1].
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
        _split(job, values, work.offset, work.upper, work.half, work.planes)
        fixed = _put_fixed(job, frame, work.planes, start, m)
        fits = limit - at >= m * job.size + 8
        region = frame[at:limit] if fits else work.region
        size = _put_block(job, work.planes, m, work.coder, work.low, region)
        status = close_block(frame, job, b, region, size, fits, limit, fixed, result)
        if status:
            return status
    return OK


@jit
def _read_head(job, head, at, mode, fault):
    """Read the modes of a region's planes, and check that they are valid."""
    known = PRUNED | ((1 << 2 * job.size) - 1)
    if head & ~known:
        return bad(fault, BAD_REGION, at, head, known)
    for p in range(job.size):
        mode[p] = head >> 2 * p & 3
        fixed, coded = job.fixed >> p & 1, job.coded >> p & 1
        if (mode[p] != 0) if fixed else (mode[p] == CODED and not coded):
            return bad(fault, BAD_REGION, at, head, job.coded)
    if head & PRUNED and (not job.octave or mode[0] != CODED):
        return bad(fault, BAD_REGION, at, head, CODED)
    return OK


@jit
def _get_high(frame, low, c, fault):
    """Read the high nibbles of a halved plane, and add them to the low ones."""
    n = len(low)
    half = (n + 1) // 2
    if c[1] - c[0] < half:
        return bad(fault, BAD_REGION, c[0], c[1] - c[0], half)
    some = U8(0)
    for i in range(n):
        some |= low[i]
    if some > 15:
        return bad(fault, BAD_REGION, c[0], some, 15)
    high = frame[c[0] : c[0] + half]
    if n % 2 and high[half - 1] > 15:
        return bad(fault, BAD_REGION, c[0] + half - 1, high[half - 1], 15)
    _unhalve(low, high)
    c[0] += half
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
def _get_plane(frame, job, p, mode, k, room, memory, wanted, c, fault):
    """Decode plane ``p``, of ``k`` values, to ``memory``; if it is not ``wanted``, only validate it."""
    if mode == CODED:
        halved = job.halved >> p & 1
        symbols = wanted or halved > 0
        status = get_coded(frame, job, p, k, room, symbols, memory, c, fault)
        if not status and symbols:
            status = get_literals(frame, job.tables[p, 512], room.escaped, k, memory, room.none, c, fault)
        elif not status:
            status = pass_literals(room.escaped, k, c, fault)
        if not status and halved:
            status = _get_high(frame, memory[:k], c, fault)
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
    """Check that pruned values are +0 also in the fixed planes, which hold a byte for each value."""
    for p in range(1, job.size):
        if job.fixed >> p & 1:
            at = _section(job, p, first)
            some = _under_zeros(planes[0][:m], frame[at : at + m])
            if some:
                return bad(fault, BAD_REGION, at, some, 0)
    return OK


@jit
def _get_block(frame, job, work, first, m, merges, fault):
    """Decode a region to planes; unless ``merges``, decode only what must be validated."""
    c, planes, mode = work.c, work.planes, work.mode
    head = np.int64(load32(frame, c[0]))
    status = _read_head(job, head, c[0], mode, fault)
    c[0] += 4
    wanted = merges or head & PRUNED != 0
    k = m
    for p in range(job.size):
        if status or job.fixed >> p & 1:
            continue
        if p == 0 or not head & PRUNED:
            status = _get_plane(frame, job, p, mode[p], m, work.coder, planes[p], wanted, c, fault)
        else:
            status = _get_plane(frame, job, p, mode[p], k, work.coder, work.low, merges, c, fault)
            if not status and merges:
                expand(planes[0][:m], 1, work.low, planes[p][:m])
        if not status and p == 0 and head & PRUNED:
            k = count_from(planes[0][:m], 1)
            status = _check_pruned(frame, job, first, m, planes, fault) if k else bad(fault, BAD_REGION, c[0], 0, 1)
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
        _merge(frame, job, work, start, data)
        if not stores:
            for i in range(0, m, len(work.x)):
                x = work.x[: min(len(work.x), m - i)]
                to_floats(job.dtype, data, i, x)
                put(sink, F32(0), x, start + i)
    leave_floats(work.floats)
    return status
