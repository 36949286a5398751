# pyright: basic
"""Scale model: compute the offset of each value (format.md, 5.2), and choose the offsets of rows (encoder.md, 4.2)."""

import numpy as np

from codec._c.library import lib
from codec.engines.numba.floats import load_native
from codec.engines.numba.jit import jit
from codec.engines.numba.words import I64, U8, U16

ROWS, COLUMNS = 1, 2  # bits of a part's kind: its rows have offsets; its columns have offsets
EAGER_ROWS = 1024  # the C library chooses the offsets of parts with at most this many rows when the job is opened
FLOAT64_ZERO, ZERO = 16, 128  # lowest bit pattern from which offsets are subtracted, for float64 and for wider planes
GRAIN8 = 256  # float8: unit of offsets, a number of the type; other dtypes: an eighth of an octave
TRUNCATE = lib.CODEC_TRUNCATE


@jit
def zero_of(job):
    """Return the lowest bit pattern from which offsets are subtracted; patterns below it, such as 0, stay unchanged."""
    if job.codec == TRUNCATE or job.size == 1:
        return job.octave
    return FLOAT64_ZERO if job.octave == FLOAT64_ZERO else ZERO


@jit
def grain_of(job):
    """Return the unit of offsets, in bit patterns."""
    return GRAIN8 if job.size == 1 else job.octave // 8


@jit
def row_count(part):
    """Return the number of rows of a part; 0 if its rows have no offsets."""
    if part.kind & ROWS == 0:
        return 0
    return (np.int64(part.count) + np.int64(part.row) - 1) // np.int64(part.row)


@jit
def part_at(parts, first):
    """Return the index of the part that contains value ``first``."""
    low, high = 0, len(parts)
    while high - low > 1:
        middle = (low + high) // 2
        if np.int64(parts[middle].start) <= first:
            low = middle
        else:
            high = middle
    return low


@jit
def fill_offsets(job, first, offset):
    """Fill ``offset`` with the offsets of values from ``first`` on, in bit patterns: t of format.md, section 5.2."""
    zero = zero_of(job)
    circle, grain = 32768 - zero, grain_of(job)
    n, at = len(offset), 0
    p = part_at(job.parts, first) if len(job.parts) else 0
    if not len(job.parts):
        offset[:] = U16(0)
        return
    while at < n:
        part = job.parts[p]
        i = first + at - np.int64(part.start)
        end = min(n, at + np.int64(part.count) - i)
        rows = 2 * np.int64(part.nibbles_at)
        columns = rows + (row_count(part) + 1) // 2 * 2
        length = np.int64(part.row) if part.kind else end - at
        while at < end:
            row, column = (i // length, i % length) if part.kind else (0, 0)
            m = min(end - at, length - column)
            here = offset[at : at + m]
            base = np.int64(part.base)
            if part.kind:
                base += job.offsets[rows + row]
            start = base * grain % circle
            if part.kind & COLUMNS:
                some = job.offsets[columns + column : columns + column + m]
                begin, modulus = U16(start - circle if start > circle // 2 else start), U16(circle)
                shift = U16(8 if grain == GRAIN8 else 7 if grain == 128 else 4 if grain == 16 else 1)
                for k in range(m):
                    t = U16(begin + U16(U16(some[k]) << shift))
                    here[k] = U16(t + (modulus & U16(-I64(t >> U16(15)))))  # with an `if`, LLVM would use wider lanes
            else:
                here[:] = U16(start)
            at += m
            i += m
        p += 1


@jit
def _add_patterns(data, size, first, n, zero):
    """Return the sum and the number of those bit patterns of ``n`` values that are at least ``zero``."""
    total, some = 0, 0
    for i in range((first + 1) * size - 1, (first + n) * size, size):
        pattern = np.int64(data[i] & U8(127)) << 8
        if size > 1:
            pattern |= np.int64(data[i - 1])
        if pattern >= zero:
            total += pattern
            some += 1
    return total, some


@jit
def fill_row_offsets(job, data, feedback, first, end, x, native):
    """Choose the offsets of rows that overlap values [first, end), in parts of more than EAGER_ROWS rows.

    If several threads choose the offset of the same row, they write the same number. ``x`` and ``native`` are buffers
    of 128 values.
    """
    zero, grain = zero_of(job), grain_of(job)
    runs = 8 if job.size == 1 else 4
    for p in range(len(job.parts)):
        part = job.parts[p]
        start, count, length = np.int64(part.start), np.int64(part.count), np.int64(part.row)
        if row_count(part) <= EAGER_ROWS or start >= end or start + count <= first:
            continue
        shift = np.int64(part.shifts & 15)
        for row in range(max(first - start, 0) // length, (min(end, start + count) - start - 1) // length + 1):
            at = start + row * length
            m = min(length, start + count - at)
            total, some = 0, 0
            for run in range(runs if m > 32 * runs else 1):
                begin = at + run * (m - 32) // (runs - 1) if m > 32 * runs else at
                k = 32 if m > 32 * runs else m
                if len(feedback):
                    load_native(job.dtype, data, feedback, begin, x[:k], native)
                    more, live = _add_patterns(native, job.size, 0, k, zero)
                else:
                    more, live = _add_patterns(data, job.size, begin, k, zero)
                total += more
                some += live
            q = 0
            if some:
                mean = (2 * total + some) // (2 * some)
                q = min(max((mean - np.int64(part.mean) + grain // 2) // grain, -127), 127)
            nibble = (q + (1 << shift) // 2) >> shift
            job.offsets[2 * np.int64(part.nibbles_at) + row] = min(max(nibble, -8), 7) << shift
