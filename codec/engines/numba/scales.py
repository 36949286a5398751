# pyright: basic
"""Scales of rows and parts (docs/spec/encoder.md, section 7.2)."""

import numpy as np

from codec.engines.numba.floats import FLOAT32, from_floats, load, to_floats
from codec.engines.numba.jit import jit
from codec.engines.numba.parts import (
    FLOAT4,
    FLOAT8,
    L1,
    L2,
    LANES,
    LEAF,
    NONFINITE,
    NVFP4,
    PROPAGATE,
    RCEIL,
    RUN,
    SIGN,
    STOCHASTIC,
    TWO_MEAN,
    is_affine,
    is_e5m2,
    scale_most,
    scale_nbytes,
)
from codec.engines.numba.region import BAD_REGION, OK, bad, load32, store32
from codec.engines.numba.words import (
    ABS,
    F32,
    I32,
    I64,
    INF,
    MAX,
    U8,
    U32,
    U64,
    bits_of,
    float_of,
    small_nearest,
    small_value,
)


@jit
def magnitude(x, limit):
    """Return the bits of the largest |x|; magnitudes whose bits are ``limit`` or more are ignored."""
    u, most = x.view(U32), U32(0)
    for i in range(len(u)):
        a = U32(u[i] & ABS)
        a = a if a < limit else U32(0)
        most = max(most, a)
    return most


@jit
def _add_magnitudes(x, by_sign, lanes):
    """Add |x| to the partial sums in ``lanes[0]``; with ``by_sign``, add negative values to ``lanes[1]`` instead.

    Return the number of negative values; 0 without ``by_sign``.
    """
    a, b, negative = lanes[0], lanes[1], 0
    n = len(x)
    for at in range(0, n, LANES):
        some = x[at : at + LANES].view(U32)
        for k in range(len(some)):
            u = some[k]
            v = float_of(U32(u & ABS))
            below = by_sign and u > ABS
            a[k] = F32(a[k] + (F32(0) if below else v))
            b[k] = F32(b[k] + (v if below else F32(0)))
            negative += below
    return negative


@jit
def _add_squares(x, lanes):
    """Add x^2 to the partial sums in ``lanes[0]``, and x to those in ``lanes[1]``."""
    s, t = lanes[0], lanes[1]
    n = len(x)
    for at in range(0, n, LANES):
        some = x[at : at + LANES]
        for k in range(len(some)):
            v = np.float64(some[k])
            s[k] = s[k] + v * v
            t[k] = t[k] + v


@jit
def _fold(lanes):
    """Return the sum of the partial sums: add the upper half to the lower half until one sum is left."""
    w = LANES // 2
    while w:
        for k in range(w):
            lanes[k] = lanes[k] + lanes[k + w]
        w //= 2
    return np.float64(lanes[0])


@jit
def sum_leaf(job, work, data, feedback, first, n, total):
    """Compute the two sums that the codec needs over at most 4,096 values, into ``total[0]`` and ``total[1]``.

    Return the number of negative values (only for Sign's two-mean variant, otherwise 0), and the bits of the largest
    magnitude.
    """
    direct = job.dtype == FLOAT32 and not len(feedback)
    x = data[4 * first : 4 * (first + n)].view(F32) if direct else work.x[:n]
    if not direct:
        load(job.dtype, data, feedback, first, x)
    if (job.codec == SIGN and job.variant == L2) or job.clip > F32(0):
        work.sums64[:, :] = 0.0
        _add_squares(x, work.sums64)
        total[0], total[1] = _fold(work.sums64[0]), _fold(work.sums64[1])
        return 0, magnitude(x, U32(ABS + U32(1)))
    work.sums[:, :] = F32(0)
    negative = _add_magnitudes(x, job.codec == SIGN and job.variant == TWO_MEAN, work.sums)
    total[0], total[1] = _fold(work.sums[0]), _fold(work.sums[1])
    return negative, magnitude(x, U32(ABS + U32(1)))


@jit
def _push(levels, count, total):
    """Add leaf number ``count`` to the pairwise summation tree; ``levels[k, i]`` is a sum of 2^i leaves."""
    for k in range(2):
        i, s = 0, total[k]
        while count >> i & 1:
            s = levels[k, i] + s
            i += 1
        levels[k, i] = s


@jit
def _sum_of(levels, count):
    """Return the sum of all ``count`` leaves in the pairwise summation tree ``levels``."""
    total, some = 0.0, False
    for i in range(64):
        if count >> i & 1:
            total = levels[i] + total if some else levels[i]
            some = True
    return total


@jit
def _of_sum(dtype, x):
    """Round a mean or root to float32 in one rounding, clipped to the largest number of the tensor's dtype."""
    most = 65504.0 if dtype == 4 else 3.3895313892515355e38 if dtype == 3 else 3.4028234663852886e38
    return F32(x if x < most else most)


@jit
def _mean(dtype, total, n):
    """Return total / n as a scale; 0 if n is 0."""
    return _of_sum(dtype, total / np.float64(n)) if n else F32(0)


@jit
def store_sign_scales(job, work, data, feedback, first, m, row, region):
    """Compute Sign's scales of the rows of a block, and write them to its region."""
    at = 0
    for i in range(0, m, row):
        n, negative, pieces = min(row, m - i), 0, 0
        for k in range(0, n, LEAF):
            some, most = sum_leaf(job, work, data, feedback, first + i + k, min(LEAF, n - k), work.total)
            if most >= INF:
                return NONFINITE
            _push(work.levels, pieces, work.total)
            pieces += 1
            negative += some
        one, two = _sum_of(work.levels[0], pieces), _sum_of(work.levels[1], pieces)
        if job.variant == L1:
            above, below = _mean(job.dtype, one, n), F32(0)
        elif job.variant == L2:
            above, below = _of_sum(job.dtype, np.sqrt(one / np.float64(n))), F32(0)
        else:
            above, below = _mean(job.dtype, one, n - negative), _mean(job.dtype, two, negative)
        store32(region, at, bits_of(above))
        at += 4
        if job.variant == TWO_MEAN:
            store32(region, at, bits_of(below))
            at += 4
    return OK


@jit
def _scale_of_byte(job, stored, part):
    """Return the divisor (Float4) or factor (Float8) of a row's values, given the row's stored scale byte."""
    if job.codec == FLOAT8:
        return float_of(U32(U32(254 - I64(stored)) << U32(23)))
    if job.variant == NVFP4:
        return F32(small_value(U32(stored), 3, 7) * part)
    return float_of(U32(U32(stored) << U32(23)) if stored else U32(1 << 22))


@jit
def _mx_stored(job, up, most):
    """Return the scale byte (an e8m0 exponent) of a row of MXFP4 or MXFP8; ``most``: bits of its largest magnitude."""
    if job.codec == FLOAT4:
        last, top = 2, U32(0x400000)
    else:
        last, top = 15 if is_e5m2(job.variant) else 8, U32(0x600000)
    e = I64(most >> U32(23)) + (1 if up and U32(most & U32(0x7FFFFF)) > top else 0)
    return U8(min(max(e - last, 0), scale_most(job)))


@jit
def _stored(job, most, part):
    """Return a row's scale byte. With stochastic rounding or "rceil", it is rounded up, so that no value is clipped."""
    up = job.options & (STOCHASTIC | RCEIL) != 0
    if job.codec == FLOAT8 or job.variant != NVFP4:
        return _mx_stored(job, up, most)
    a = F32(F32(float_of(most) / F32(6)) / part) if part > F32(0) else F32(0)
    stored = small_nearest(bits_of(a if a < F32(448) else F32(448)), 3, 7)
    if up and stored < U32(126) and small_value(stored, 3, 7) < a:
        stored = U32(stored + U32(1))
    return U8(stored)


@jit
def _row_scale(job, part_scale, most, region, at):
    """Compute a row's scale from ``most``, the bits of its largest magnitude, and write it to ``region[at]``.

    Return the factor by which the row's values are multiplied (Float8), or the divisor (other codecs).
    """
    scale = float_of(most)
    if scale_most(job):
        region[at] = _stored(job, most, part_scale)
        return _scale_of_byte(job, region[at], part_scale)
    if job.codec == FLOAT8:
        top = F32(57344) if is_e5m2(job.variant) else F32(448)
        scale = job.scale if job.scale > F32(0) else F32(top / scale)
        scale = scale if bits_of(scale) < INF else F32(1)
    store32(region, at, bits_of(scale))
    return scale


@jit
def _ordered(u):
    """Convert the bits of a float to an int32 that sorts as the float does, or back; -0 precedes +0."""
    return I32(u) ^ I32(U32(I32(u) >> I32(31)) >> U32(1))


@jit
def _extremes(x, least, most):
    """Return the smallest and the largest of ``least``, ``most`` and values ``x``, as integers of :func:`_ordered`."""
    u = x.view(U32)
    for i in range(len(u)):
        a = _ordered(u[i])
        least, most = min(least, a), max(most, a)
    return least, most


@jit
def _store_ends(job, work, r, least, most, region, at):
    """Write a row's smallest and largest value to ``region[at]``; store its half range and middle in ``work``."""
    ends, size = work.ends, scale_nbytes(job) // 2
    for k in range(2):
        ends[k] = float_of(U32(_ordered(U32(least if k == 0 else most))))
    from_floats(job.dtype, ends, region[at : at + 2 * size], 0)
    to_floats(job.dtype, region[at : at + 2 * size], 0, ends)
    for k in range(2):
        if ends[k] == F32(0):
            ends[k] = F32(0)
            region[at + k * size : at + (k + 1) * size] = U8(0)
    _use_ends(work, r)


@jit
def _use_ends(work, r):
    """Compute row r's half range and middle from its smallest and largest value in ``work.ends``."""
    low, high = work.ends[0], work.ends[1]
    half = F32(F32(high * F32(0.5)) - F32(low * F32(0.5)))
    work.row_scale[r], work.row_middle[r] = half, F32(low + half)


@jit
def _store_affine_scales(job, work, data, feedback, part, first, i, n, m, x, region):
    """Implement :func:`store_scales` for Quantize with zero points; also store middles in ``work.row_middle``."""
    row, nbytes = I64(part.group_size), scale_nbytes(job)
    least, most, inf = I32(0x7FFFFFFF), I32(-0x80000000), I32(INF)
    if row > RUN:
        if i % row:
            return OK
        for at in range(first + i, first + min(i + row, m), RUN):
            some = work.y[: min(RUN, first + min(i + row, m) - at)]
            load(job.dtype, data, feedback, at, some)
            least, most = _extremes(some, least, most)
        if most >= inf or least <= ~inf:
            return NONFINITE
        _store_ends(job, work, 0, least, most, region, i // row * nbytes)
        return OK
    for r in range((n + row - 1) // row):
        low, high = _extremes(x[r * row : (r + 1) * row], least, most)
        if high >= inf or low <= ~inf:
            return NONFINITE
        _store_ends(job, work, r, low, high, region, (i // row + r) * nbytes)
    return OK


@jit
def store_scales(job, work, data, feedback, part, first, i, n, m, x, region):
    """Compute the scales of rows that begin in a run, and store them in the region and in ``work.row_scale``."""
    if is_affine(job):
        return _store_affine_scales(job, work, data, feedback, part, first, i, n, m, x, region)
    row, nbytes = I64(part.group_size), scale_nbytes(job)
    limit = INF if job.options & PROPAGATE else U32(ABS + U32(1))
    if row > RUN:
        if i % row:
            return OK
        most = U32(0)
        for at in range(first + i, first + min(i + row, m), RUN):
            some = work.y[: min(RUN, first + min(i + row, m) - at)]
            load(job.dtype, data, feedback, at, some)
            most = max(most, magnitude(some, limit))
        if most >= INF:
            return NONFINITE
        work.row_scale[0] = _row_scale(job, part.scale, most, region, i // row * nbytes)
        return OK
    for r in range((n + row - 1) // row):
        most = magnitude(x[r * row : (r + 1) * row], limit)
        if most >= INF:
            return NONFINITE
        work.row_scale[r] = _row_scale(job, part.scale, most, region, (i // row + r) * nbytes)
    return OK


@jit
def _read_ends(job, frame, at, r, work, fault):
    """Read the smallest and largest value of row r, for Quantize with zero points."""
    size = scale_nbytes(job) // 2
    to_floats(job.dtype, frame[at : at + 2 * size], 0, work.ends)
    u = work.ends.view(U32)
    finite = U32(u[0] & ABS) < INF and U32(u[1] & ABS) < INF
    if not finite or u[0] == ~ABS or u[1] == ~ABS or work.ends[0] > work.ends[1]:
        found = U64(load32(frame, at))
        found |= U64(load32(frame, at + 4)) << U64(32) if size == 4 else U64(0)
        return bad(fault, BAD_REGION, at, found, 0)
    _use_ends(work, r)
    return OK


@jit
def read_scales(job, frame, at, part, n, work, fault):
    """Read the scales of ``n`` values of whole rows into ``work``: ``row_scale``, ``row_other``, ``row_middle``."""
    row, nbytes = I64(part.group_size), scale_nbytes(job)
    for r in range((n + row - 1) // row):
        last = scale_most(job)
        if last:
            if frame[at] > last:
                return bad(fault, BAD_REGION, at, frame[at], last)
            work.row_scale[r] = _scale_of_byte(job, frame[at], part.scale)
            u = bits_of(work.row_scale[r])
            if u >= INF:
                return bad(fault, BAD_REGION, at, u, MAX)
        elif is_affine(job):
            status = _read_ends(job, frame, at, r, work, fault)
            if status:
                return status
        else:
            u = load32(frame, at)
            if u >= INF or (job.codec == FLOAT8 and u == 0):
                return bad(fault, BAD_REGION, at, u, INF)
            work.row_scale[r] = work.row_other[r] = float_of(u)
            if nbytes == 8:
                u = load32(frame, at + 4)
                if u >= INF:
                    return bad(fault, BAD_REGION, at + 4, u, INF)
                work.row_other[r] = float_of(u)
        at += nbytes
    return OK


@jit
def spread(row_scale, row, scale):
    """Fill ``scale`` with a copy of the row's scale for each value; ``row``: values per row."""
    if row == 0 or row > RUN:
        scale[:] = row_scale[0]
        return
    n = len(scale)
    for r in range((n + row - 1) // row):
        here = scale[r * row : (r + 1) * row]
        here[:] = row_scale[r]
