# pyright: basic
"""Splitting of values into byte planes, and merging of planes to values (docs/spec/format.md, section 3)."""

from codec.engines.numba.jit import jit
from codec.engines.numba.lanes import ROW
from codec.engines.numba.region import BLOCK
from codec.engines.numba.words import U8, U16, U32, U64, copy, lower, raise_, turn, unturn

SHIFT, SHIFT64 = 7, 4  # s of format.md, section 3, for 2- and 4-byte floats and for float64
PLANE_ROOM = BLOCK + ROW  # size of a plane's buffer in bytes


@jit
def _split2(x, offset, is_float, p0, p1):
    """Split 2-byte values ``x`` into the byte planes ``p0`` and ``p1``."""
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
    """Split 4-byte values ``x`` into byte planes ``p0`` to ``p3``. ``upper`` is a buffer of 16 bits for each value."""
    n = len(x)
    if is_float:
        for i in range(n):  # a separate loop: vectors of the next loop then have twice as many lanes, of 16 bits
            upper[i] = U16(x[i] >> U32(16))
        _split2(upper[:n], offset, is_float, p0, p1)
    else:
        for i in range(n):
            p0[i], p1[i] = U8(x[i] >> U32(24)), U8(x[i] >> U32(16))
    for i in range(n):  # a separate loop: LLVM vectorizes a loop only if it can check few arrays for overlap
        p2[i], p3[i] = U8(x[i] >> U32(8)), U8(x[i])


@jit
def _split8(x, offset, is_float, upper, half, planes):
    """Split 8-byte values ``x`` into byte planes. ``half`` is a buffer of 32 bits for each value."""
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
def _split1(x, offset, zero, y):
    """Lower the patterns of float8 values ``x``."""
    for i in range(len(x)):
        u = lower(U16(U16(x[i] & U8(127)) << U16(8)), offset[i], U16(zero))
        y[i] = x[i] & U8(128) | U8(u >> U16(8))


@jit
def _merge1(y, offset, zero, x):
    """Restore the patterns of float8 values: the inverse of :func:`_split1`."""
    for i in range(len(x)):
        p = raise_(U16(U16(y[i] & U8(127)) << U16(8)), offset[i], U16(zero))
        x[i] = y[i] & U8(128) | U8(p >> U16(8))


@jit
def split_values(job, data, offset, upper, half, planes):
    """Split values into byte planes. ``data``: bytes of the values."""
    is_float = job.octave > 0
    if job.size == 1 and len(job.parts):
        _split1(data, offset, job.octave, planes[0])
    elif job.size == 1:
        copy(planes[0], data)
    elif job.size == 2:
        _split2(data.view(U16), offset, is_float, planes[0], planes[1])
    elif job.size == 4:
        _split4(data.view(U32), offset, is_float, upper, planes[0], planes[1], planes[2], planes[3])
    else:
        _split8(data.view(U64), offset, is_float, upper, half, planes)


@jit
def _merge2(p0, p1, offset, is_float, x):
    """Merge the byte planes ``p0`` and ``p1`` to 2-byte values ``x``."""
    n = len(x)
    if is_float:
        for i in range(n):
            x[i] = unturn(U16(U16(U16(p0[i]) << U16(8)) | U16(p1[i])), offset[i], SHIFT)
    else:
        for i in range(n):
            x[i] = U16(U16(U16(p0[i]) << U16(8)) | U16(p1[i]))


@jit
def _merge4(p0, p1, p2, p3, offset, is_float, upper, x):
    """Merge the byte planes ``p0`` to ``p3`` to 4-byte values ``x``."""
    n = len(x)
    _merge2(p0, p1, offset, is_float, upper[:n])  # a separate loop: its vectors have twice as many lanes, of 16 bits
    for i in range(n):
        x[i] = U32(U32(U32(upper[i]) << U32(16)) | U32(U32(p2[i]) << U32(8)) | U32(p3[i]))


@jit
def _merge8(p0, p1, p2, p3, p4, p5, p6, p7, offset, is_float, upper, half, x):
    """Merge the byte planes ``p0`` to ``p7`` to 8-byte values ``x``."""
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
def section(job, p, first):
    """Return the offset in the frame of value ``first``'s byte in fixed plane ``p``."""
    at = job.planes + first
    for q in range(p):
        at += job.plane_stride * (job.fixed >> q & 1)
    return at


@jit
def plane_array(frame, job, flat, p):
    """Return the array that contains plane ``p``: the frame if the plane is fixed, otherwise ``flat``."""
    if job.fixed >> p & 1:
        return frame
    return flat


@jit
def plane_offset(job, p, first):
    """Return the offset of plane ``p`` of a block in the array that :func:`plane_array` returns."""
    return section(job, p, first) if job.fixed >> p & 1 else PLANE_ROOM * p


@jit
def merge_planes(frame, job, work, first, data):
    """Merge the planes of a block to values, and store their bytes in ``data``."""
    is_float, flat = job.octave > 0, work.flat
    p0 = plane_array(frame, job, flat, 0)[plane_offset(job, 0, first) :]
    if job.size == 1:
        if len(job.parts):
            _merge1(p0, work.offset, job.octave, data)
        else:
            copy(data, p0[: len(data)])
        return
    p1 = plane_array(frame, job, flat, 1)[plane_offset(job, 1, first) :]
    if job.size == 2:
        _merge2(p0, p1, work.offset, is_float, data.view(U16))
        return
    p2 = plane_array(frame, job, flat, 2)[plane_offset(job, 2, first) :]
    p3 = plane_array(frame, job, flat, 3)[plane_offset(job, 3, first) :]
    if job.size == 4:
        _merge4(p0, p1, p2, p3, work.offset, is_float, work.upper, data.view(U32))
        return
    p4 = plane_array(frame, job, flat, 4)[plane_offset(job, 4, first) :]
    p5 = plane_array(frame, job, flat, 5)[plane_offset(job, 5, first) :]
    p6 = plane_array(frame, job, flat, 6)[plane_offset(job, 6, first) :]
    p7 = plane_array(frame, job, flat, 7)[plane_offset(job, 7, first) :]
    _merge8(p0, p1, p2, p3, p4, p5, p6, p7, work.offset, is_float, work.upper, work.half, data.view(U64))


@jit
def halve(plane, low, high):
    """Split a plane of n bytes into low nibbles, one per byte, and high nibbles, two per byte.

    A byte of ``high`` has the high nibbles of values i and i + (n + 1) / 2.
    """
    n, half = len(plane), len(high)
    for i in range(n):
        low[i] = plane[i] & U8(15)
    for i in range(half):
        high[i] = plane[i] >> U8(4)
    for i in range(n - half):
        high[i] |= plane[half + i] & U8(0xF0)


@jit
def unhalve(low, high):
    """Combine high nibbles with the low nibbles in ``low``: the inverse of :func:`halve`."""
    n, half = len(low), len(high)
    for i in range(half):
        low[i] |= U8(high[i] << U8(4))
    for i in range(half, n):
        low[i] |= high[i - half] & U8(0xF0)


@jit
def raw_bits(job, p):
    """Return how many bits of each value follow the symbols of coded plane ``p`` raw (format.md, section 7)."""
    if job.halved >> p & 1:
        return 4
    return job.halved >> 1 if job.size == 1 else 0


@jit
def symbol_of(x, raw):
    """Return the symbol of byte ``x`` of a plane with ``raw`` raw bits for each value."""
    return U8(x >> U8(raw == 2)) & U8(255 >> raw)


@jit
def take_bits(plane, raw, symbol, bits):
    """Split bytes of float8 into symbols, and ``raw`` raw bits each, one value per byte."""
    for i in range(len(plane)):
        symbol[i] = symbol_of(plane[i], raw)
        bits[i] = (plane[i] >> U8(7) | U8(plane[i] << U8(1))) & U8((1 << raw) - 1)


@jit
def join_bits(symbol, raw, bits):
    """Combine raw bits with the symbols in ``symbol``: the inverse of :func:`take_bits`."""
    for i in range(len(symbol)):
        symbol[i] = U8(symbol[i] << U8(raw == 2)) | bits[i] >> U8(1) | U8(bits[i] << U8(7))
