# pyright: basic
"""Sign, ternary, float8, float4, quantize: values share scales (docs/format.md, section 8; docs/encoder.md, 7).

A block is gone through a run of whole rows, or a piece of one, at a time: what a run becomes stays in the first-level
cache. Its values get their scale each, so that one long loop does rows of any length.
"""

from typing import Any, NamedTuple

import numpy as np

from codec.engines.numba.draws import ROUNDS, draw, draw_one, fill_keys
from codec.engines.numba.floats import (
    FLOAT32,
    NOWHERE,
    STORE,
    from_floats,
    load,
    put,
    to_floats,
)
from codec.engines.numba.jit import enter_floats, jit, kernel, leave_floats
from codec.engines.numba.packing import pack, pack_trits, unpack, unpack_trits
from codec.engines.numba.region import (
    BAD_REGION,
    CODED,
    CONSTANT,
    LIMIT,
    OK,
    RAW,
    SHORT_OUTPUT,
    bad,
    close_block,
    close_region,
    coder_room,
    end_region,
    get_coded,
    get_literals,
    is_constant,
    largest,
    load32,
    open_block,
    put_coded,
    store32,
)
from codec.engines.numba.words import (
    ABS,
    F32,
    I32,
    I64,
    INF,
    MAX,
    NAN,
    U8,
    U16,
    U32,
    U64,
    bits_of,
    copy,
    float_of,
    minus,
    over,
    over_of,
    place,
    small_nearest,
    small_stochastic,
    small_value,
)
from codec.errors import Status

NONFINITE, BAD_SCALE = int(Status.NONFINITE), int(Status.BAD_SCALE)
SIGN, TERNARY, FLOAT8, FLOAT4, QUANTIZE = 2, 3, 4, 5, 6
L1, L2, TWO_MEAN = 0, 1, 2  # sign's variants
E4M3FN, NVFP4 = 0, 0  # float8's, float4's
STOCHASTIC, PROPAGATE, ENTROPY = 1, 2, 4  # options
ROW_BLOCK, TRITS_BLOCK = 16384, 81920
RUN, TILE = 2560, 10240  # values: multiples of 40, so that codes of any width begin at a byte
TREE, LANES = 4096, 32  # of sums
TIE = 3  # ternary's code where the second draw decides
MIN_CODED = 512


class Work(NamedTuple):
    """Memory of one thread."""

    coder: Any
    codes: Any  # bytes, packed, on their way through the coder
    code: Any  # a byte each
    region: Any
    x: Any
    y: Any
    scale: Any  # of each value; and a second one
    other: Any
    row_scale: Any
    row_other: Any
    half: Any  # draws
    keys: Any
    sums: Any  # float32 lanes, float64 lanes
    sums64: Any
    levels: Any  # sums of 2^i pieces
    total: Any
    c: Any
    fault: Any
    floats: Any  # the thread's way with floats


def work_of(job):
    """Memory for a job's blocks."""
    most = 16 + 8 * ROW_BLOCK + ROW_BLOCK * 2
    work = Work(
        coder_room(job, ROW_BLOCK),
        np.empty(ROW_BLOCK + 128, U8),
        np.empty(ROW_BLOCK + 64, U8),
        np.empty(most, U8),
        np.empty(TREE, F32),
        np.empty(RUN, F32),
        np.empty(RUN, F32),
        np.empty(RUN, F32),
        np.empty(RUN, F32),
        np.empty(RUN, F32),
        np.empty(RUN + 16, U16),
        np.empty(2 * ROUNDS + 1, U32),
        np.empty((2, LANES), F32),
        np.empty((2, LANES), np.float64),
        np.empty((2, 64), np.float64),
        np.empty(4, np.float64),
        np.empty(2, I64),
        np.empty(3, U64),
        np.empty(64, U8),
    )
    fill_keys(job.seed, job.stream, work.keys)
    return work


@jit
def code_bits(job):
    """Of a code; 0: five a byte."""
    if job.codec == SIGN:
        return 1
    if job.codec == TERNARY:
        return 2 if job.variant == 0 else 0
    if job.codec == FLOAT8:
        return 8
    return 4 if job.codec == FLOAT4 else job.bits


@jit
def has_entropy(job):
    """Whether there is an entropy stage."""
    return (job.codec == TERNARY and job.variant == 2) or (job.codec == FLOAT8 and job.options & ENTROPY != 0)


@jit
def scale_nbytes(job):
    """Of a row."""
    if job.codec == FLOAT4:
        return 1
    return 8 if job.codec == SIGN and job.variant == TWO_MEAN else 4


@jit
def codes_nbytes(job, m):
    """Of m values."""
    bits = code_bits(job)
    return (m * bits + 7) // 8 if bits else (m + 4) // 5


@jit
def block_place(job, b):
    """Block b: the part it belongs to, its first value, how many it has."""
    low, high = 0, len(job.row_parts)
    while high - low > 1:
        middle = (low + high) // 2
        if I64(job.row_parts[middle].first_block) <= b:
            low = middle
        else:
            high = middle
    part = job.row_parts[low]
    row = I64(part.row)
    if row:
        block = ROW_BLOCK // row * row if row <= ROW_BLOCK else row
    else:
        block = ROW_BLOCK if code_bits(job) else TRITS_BLOCK
    before = (b - I64(part.first_block)) * block
    return low, I64(part.start) + before, min(block, I64(part.count) - before)


@jit
def run_length(row, i, m):
    """How far a run from value i of m goes."""
    n = RUN
    if row and row <= RUN:
        n = RUN // row * row
    elif row:
        n = min(n, row - i % row)
    return min(n, m - i)


# Scales.


@jit
def _magnitude(x, limit):
    """The largest |x|, its bits, those from `limit` on left out."""
    u, most = x.view(U32), U32(0)
    for i in range(len(u)):
        a = U32(u[i] & ABS)
        a = a if a < limit else U32(0)
        most = max(most, a)
    return most


@jit
def _add_magnitudes(x, by_sign, lanes):
    """|x| to lanes; or negative ones' to other lanes: how many these are."""
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
    """x^2 and x to lanes."""
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
    """Lanes by halves."""
    w = LANES // 2
    while w:
        for k in range(w):
            lanes[k] = lanes[k] + lanes[k + w]
        w //= 2
    return np.float64(lanes[0])


@jit
def _piece(job, work, data, error, first, n, total):
    """Sums of at most 4,096 values to total[0..1]; how many are negative, and the bits of the largest magnitude."""
    direct = job.dtype == FLOAT32 and not len(error)
    x = data[4 * first : 4 * (first + n)].view(F32) if direct else work.x[:n]
    if not direct:
        load(job.dtype, data, error, first, x)
    if (job.codec == SIGN and job.variant == L2) or job.clip > F32(0):
        work.sums64[:, :] = 0.0
        _add_squares(x, work.sums64)
        total[0], total[1] = _fold(work.sums64[0]), _fold(work.sums64[1])
        return 0, _magnitude(x, U32(ABS + U32(1)))
    work.sums[:, :] = F32(0)
    negative = _add_magnitudes(x, job.codec == SIGN and job.variant == TWO_MEAN, work.sums)
    total[0], total[1] = _fold(work.sums[0]), _fold(work.sums[1])
    return negative, _magnitude(x, U32(ABS + U32(1)))


@kernel
def scan(job, work, data, error, first, count):
    """Pieces of 4,096 values of parts: what the C library makes scales of."""
    enter_floats(work.floats)
    lost = error.view(F32)
    for i in range(first, first + count):
        p = len(job.row_parts) - 1
        while I64(job.row_parts[p].first_sum) > i:
            p -= 1
        part = job.row_parts[p]
        at = (i - I64(part.first_sum)) * TREE
        negative, most = _piece(
            job, work, data, lost, I64(part.start) + at, min(TREE, I64(part.count) - at), work.total
        )
        sums = job.row_sums[i]
        sums.sum0, sums.sum1 = work.total[0], work.total[1]
        sums.negative, sums.max = U32(negative), most
    leave_floats(work.floats)


@jit
def _push(levels, count, total):
    """`count` sums went before: neighbours are added first, then neighbouring pairs, and so on."""
    for k in range(2):
        i, s = 0, total[k]
        while count >> i & 1:
            s = levels[k, i] + s
            i += 1
        levels[k, i] = s


@jit
def _sum_of(levels, count):
    """Of all; the last one may be without a neighbour."""
    total, some = 0.0, False
    for i in range(64):
        if count >> i & 1:
            total = levels[i] + total if some else levels[i]
            some = True
    return total


@jit
def _of_sum(dtype, x):
    """A mean or root as a scale: rounded once, at most the dtype's largest number."""
    most = 65504.0 if dtype == 4 else 3.3895313892515355e38 if dtype == 3 else 3.4028234663852886e38
    return F32(x if x < most else most)


@jit
def _mean(dtype, total, n):
    return _of_sum(dtype, total / np.float64(n)) if n else F32(0)


@jit
def _sign_scales(job, work, data, error, first, m, row, region):
    """Of the rows of a block, to its region."""
    at = 0
    for i in range(0, m, row):
        n, negative, pieces = min(row, m - i), 0, 0
        for k in range(0, n, TREE):
            some, most = _piece(job, work, data, error, first + i + k, min(TREE, n - k), work.total)
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
def _float4_scale(variant, stored, part):
    """What a row's values are divided by."""
    if variant == NVFP4:
        return F32(small_value(U32(stored), 3, 7) * part)
    return float_of(U32(U32(stored) << U32(23)) if stored else U32(1 << 22))


@jit
def _float4_stored(variant, up, most, part):
    """The byte that a row's scale is stored as; `up`: never below."""
    if variant != NVFP4:
        e = I64(most >> U32(23)) + (1 if up and U32(most & U32(0x7FFFFF)) > U32(0x400000) else 0)
        return U8(min(max(e - 2, 0), 252))
    a = F32(F32(float_of(most) / F32(6)) / part) if part > F32(0) else F32(0)
    stored = small_nearest(bits_of(a if a < F32(448) else F32(448)), 3, 7)
    if up and stored < U32(126) and small_value(stored, 3, 7) < a:
        stored = U32(stored + U32(1))
    return U8(stored)


@jit
def _row_scale(job, part_scale, most, region, at):
    """From a row's largest magnitude: what its values are multiplied or divided by; and what says so, to region[at]."""
    scale = float_of(most)
    if job.codec == FLOAT4:
        region[at] = _float4_stored(job.variant, job.options & STOCHASTIC != 0, most, part_scale)
        return _float4_scale(job.variant, region[at], part_scale)
    if job.codec == FLOAT8:
        top = F32(448) if job.variant == E4M3FN else F32(57344)
        scale = job.scale if job.scale > F32(0) else F32(top / scale)
        scale = scale if bits_of(scale) < INF else F32(1)
    store32(region, at, bits_of(scale))
    return scale


@jit
def _find_scales(job, work, data, error, part, first, i, n, m, x, region):
    """Of the rows that begin in a run, to the region and to work.row_scale."""
    row, nbytes = I64(part.row), scale_nbytes(job)
    limit = INF if job.options & PROPAGATE else U32(ABS + U32(1))
    if row > RUN:
        if i % row:
            return OK
        most = U32(0)
        for at in range(first + i, first + min(i + row, m), RUN):
            some = work.y[: min(RUN, first + min(i + row, m) - at)]
            load(job.dtype, data, error, at, some)
            most = max(most, _magnitude(some, limit))
        if most >= INF:
            return NONFINITE
        work.row_scale[0] = _row_scale(job, part.scale, most, region, i // row * nbytes)
        return OK
    for r in range((n + row - 1) // row):
        most = _magnitude(x[r * row : (r + 1) * row], limit)
        if most >= INF:
            return NONFINITE
        work.row_scale[r] = _row_scale(job, part.scale, most, region, (i // row + r) * nbytes)
    return OK


@jit
def _spread(row_scale, row, scale):
    """A scale for each value."""
    if row == 0 or row > RUN:
        scale[:] = row_scale[0]
        return
    n = len(scale)
    for r in range((n + row - 1) // row):
        here = scale[r * row : (r + 1) * row]
        here[:] = row_scale[r]


# Values to codes.


@jit
def _float8_codes(variant, x, scale, random, half, code):
    mbits, bias = (3, 7) if variant == E4M3FN else (2, 15)
    top = bits_of(F32(448) if variant == E4M3FN else F32(57344))
    u = x.view(U32)
    for i in range(len(u)):
        a = U32(u[i] & ABS)
        y = min(bits_of(F32(float_of(a) * scale[i])), top)
        c = small_stochastic(y, mbits, bias, half[i]) if random else small_nearest(y, mbits, bias)
        code[i] = U8(U32(c if a < INF else U32(0x7F)) | U32(U32(u[i] >> U32(24)) & U32(0x80)))


@jit
def _float4_codes(x, scale, random, half, code):
    u = x.view(U32)
    for i in range(len(u)):
        d = scale[i] if scale[i] > F32(0) else float_of(INF)
        y = min(bits_of(F32(float_of(U32(u[i] & ABS)) / d)), U32(0x40C00000))
        c = small_stochastic(y, 1, 1, half[i]) if random else small_nearest(y, 1, 1)
        code[i] = U8(c | U32(U32(u[i] >> U32(28)) & U32(8)))


@jit
def _level_codes(odd, levels, x, up, by, half, code):
    """`by` is 0 where all values of a row are."""
    n, top = F32(levels), U8(levels)
    u = x.view(U32)
    if odd:
        for i in range(len(u)):
            c = place(F32(over(float_of(U32(u[i] & ABS)), up[i], by[i]) * n), half[i])
            c = U8(levels + (-c if u[i] > ABS else c))
            code[i] = c if by[i] > F32(0) else top
    else:
        half_n = F32(n * F32(0.5))
        for i in range(len(u)):
            c = U8(place(F32(F32(over(x[i], up[i], by[i]) + F32(1)) * half_n), half[i]))
            code[i] = c if by[i] > F32(0) else U8(0)


@jit
def _ternary_part(a, up, by):
    """|x| / s as a fraction of 2^32, cut in two."""
    q = over(float_of(a), up, by)
    q = q if q < F32(65536) else F32(65536)
    high = min(I32(q), I32(65535))
    return high, F32(F32(q - F32(high)) * F32(65536))


@jit
def _ternary_codes(x, scale, half, code):
    up, by = over_of(scale, F32(65536))
    u, top = x.view(U32), bits_of(scale)
    for i in range(len(u)):
        a = min(U32(u[i] & ABS), top)
        high, _ = _ternary_part(a, up, by)
        h = I32(half[i])
        kept = U8(U32(U32(1) + U32(u[i] >> U32(31))))
        code[i] = kept if h < high or a == top else U8(TIE) if h == high else U8(0)


@jit
def _settle_ties(keys, first, x, scale, code):
    """Where the first draw decides nothing, the second does."""
    if largest(code) < TIE:
        return
    up, by = over_of(scale, F32(65536))
    u = x.view(U32)
    for i in range(len(code)):
        if code[i] == TIE:
            _, low = _ternary_part(U32(u[i] & ABS), up, by)
            kept = I32(draw_one(keys, first + i, 1)) < I32(low)
            code[i] = U8(1 + I64(u[i] >> U32(31))) if kept else U8(0)


@jit
def _encode_run(job, work, data, error, part, first, i, n, m, region, code):
    """Codes of values [i, i + n) of a block, a byte each; scales of rows that begin there."""
    half, row, direct = work.half, I64(part.row), job.dtype == FLOAT32 and not len(error)
    x = data[4 * (first + i) : 4 * (first + i + n)].view(F32) if direct else work.x[:n]
    random = job.codec == TERNARY or job.options & STOCHASTIC != 0
    if random:
        half = half[draw(work.keys, first + i, n, half) :]
    else:
        half[:n] = U16(0x8000)
    if not direct:
        load(job.dtype, data, error, first + i, x)
    if row:
        status = _find_scales(job, work, data, error, part, first, i, n, m, x, region)
        if status:
            return status
    if job.codec == TERNARY:
        if not part.scale > F32(0):
            code[:] = U8(0)
            return OK
        _ternary_codes(x, part.scale, half, code)
        if job.scale > F32(0) and not job.clip > F32(0):
            most = _magnitude(x, U32(ABS + U32(1)))
            if most > bits_of(part.scale):
                return NONFINITE if most >= INF else BAD_SCALE
        _settle_ties(work.keys, first + i, x, part.scale, code)
        return OK
    scale, other = work.scale[:n], work.other[:n]
    if job.codec == QUANTIZE:
        for r in range(1 if row > RUN else (n + row - 1) // row):
            amax = work.row_scale[r]
            if amax > F32(0):
                work.row_other[r], work.y[r] = over_of(amax, F32(1))
            else:
                work.row_other[r], work.y[r] = F32(1), F32(0)
        _spread(work.row_other, row, other)
        _spread(work.y, row, scale)
        odd = job.variant == 1
        levels = (1 << (job.bits - 1)) - 1 if odd else (1 << job.bits) - 1
        _level_codes(odd, levels, x, other, scale, half, code)
        return OK
    _spread(work.row_scale, row, scale)
    if job.codec == FLOAT8:
        _float8_codes(job.variant, x, scale, random, half, code)
    else:
        _float4_codes(x, scale, random, half, code)
    return OK


@jit
def _encode_codes(job, work, data, error, part, first, m, region, codes):
    """Codes of a whole block, packed, to `codes`; its rows' scales to the region."""
    row, bits = I64(part.row), code_bits(job)
    if job.codec == SIGN:
        if row:
            status = _sign_scales(job, work, data, error, first, m, row, region)
            if status:
                return status
        for i in range(0, m, RUN):
            n = min(RUN, m - i)
            direct = job.dtype == FLOAT32 and not len(error)
            x = data[4 * (first + i) : 4 * (first + i + n)].view(F32) if direct else work.x[:n]
            if not direct:
                load(job.dtype, data, error, first + i, x)
            u = x.view(U32)
            for k in range(n):
                work.code[k] = U8(u[k] <= ABS)
            pack(work.code, n, 1, codes[i // 8 :])
        return OK
    tile = m if row and row <= ROW_BLOCK else TILE
    for t in range(0, m, tile):
        end = min(t + tile, m)
        i = t
        while i < end:
            n = run_length(row, i, end)
            status = _encode_run(job, work, data, error, part, first, i, n, m, region, work.code[i - t : i - t + n])
            if status:
                return status
            i += n
        if bits:
            pack(work.code, end - t, bits, codes[t * bits // 8 :])
        else:
            pack_trits(work.code, end - t, codes[t // 5 :])
    return OK


@jit
def _put_bytes(job, work, n, out, at):
    """Code bytes through the entropy stage: where they end."""
    codes = work.codes
    if is_constant(codes[:n]):
        store32(out, at, CONSTANT)
        out[at + 4] = codes[0]
        return at + 5
    end = put_coded(job, 0, codes, n, work.coder.none, n - 1, work.coder, out, at + 4) if n >= MIN_CODED else 0
    store32(out, at, CODED if end else RAW)
    if end:
        return end
    copy(out[at + 4 :], codes[:n])
    return at + 4 + n


@kernel
def encode_blocks(job, work, data, error, residual, frame, limit, first, count, result):
    """Blocks [first, first + count) to regions from frame[result[0]] on; result becomes their end and seal.

    `residual` gets what a decoder will miss, unless it is empty.
    """
    enter_floats(work.floats)
    status, lost, entropy = OK, error.view(F32), has_entropy(job)
    for b in range(first, first + count):
        p, start, m = block_place(job, b)
        part, at = job.row_parts[p], I64(result[0])
        nscales = (m + I64(part.row) - 1) // I64(part.row) * scale_nbytes(job) if part.row else 0
        ncodes = codes_nbytes(job, m)
        most = (nscales + ncodes + (4 if entropy else 0) + 7) // 8 * 8
        fits = limit - at >= most
        if not fits and not entropy:
            status = SHORT_OUTPUT
            break
        region = frame[at:limit] if fits else work.region
        codes = work.codes if entropy else region[nscales : nscales + ncodes]
        status = _encode_codes(job, work, data, lost, part, start, m, region, codes)
        if status:
            break
        size = close_region(region, _put_bytes(job, work, ncodes, region, nscales) if entropy else nscales + ncodes)
        if size > limit - at:
            status = SHORT_OUTPUT
            break
        if not fits:
            copy(frame[at:], region[:size])
        if (at + size) // 8 > 0xFFFFFFFF:
            status = LIMIT
            break
        if len(residual):
            _leave(job, work, data, lost, residual, part, start, m, frame[at : at + size], codes)
        result[0] += U64(size)
        result[1] += close_block(frame, job, b, frame[at : at + size], U64(0), at + size)
    leave_floats(work.floats)
    return status


# Back to values.


@jit
def _read_scales(job, frame, at, part, n, work, fault):
    """Scales of n values of whole rows."""
    row, nbytes = I64(part.row), scale_nbytes(job)
    for r in range((n + row - 1) // row):
        if job.codec == FLOAT4:
            last = 126 if job.variant == NVFP4 else 252
            if frame[at] > last:
                return bad(fault, BAD_REGION, at, frame[at], last)
            work.row_scale[r] = _float4_scale(job.variant, frame[at], part.scale)
            u = bits_of(work.row_scale[r])
            if u >= INF:
                return bad(fault, BAD_REGION, at, u, MAX)
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
def _largest_code(job):
    """That this codec writes."""
    if job.codec == TERNARY:
        return 2
    if job.codec == QUANTIZE:
        return 2 * ((1 << (job.bits - 1)) - 1) if job.variant == 1 else (1 << job.bits) - 1
    return 255


@jit
def _open_codes(job, work, codes, codes_at, t, end, checking, fault):
    """Codes [t, end) of a block, a byte each, to work.code: none is larger than there are, what is left over is 0.

    `checking`: those of which no more is to be known may be left out.
    """
    bits, n = code_bits(job), end - t
    if bits == 0:
        nbytes = (n + 4) // 5
        some = codes[t // 5 : t // 5 + nbytes]
        if largest(some) > 242:
            return bad(fault, BAD_REGION, codes_at + t // 5, 243, 242)
        from_ = nbytes - 1 if checking else 0
        unpack_trits(some[from_:], n - 5 * from_, work.code[5 * from_ :])
        for i in range(n, 5 * nbytes):
            if work.code[i]:
                return bad(fault, BAD_REGION, codes_at + t // 5 + nbytes - 1, work.code[i], 0)
        return OK
    nbits = n * bits
    at = (t * bits + nbits) // 8
    if nbits % 8 and codes[at] >> U8(nbits % 8):
        return bad(fault, BAD_REGION, codes_at + at, codes[at] >> U8(nbits % 8), 0)
    most = _largest_code(job)
    all_are = job.codec == SIGN or most >= (1 << bits) - 1
    if not (checking and all_are):
        unpack(codes[t * bits // 8 :], n, bits, work.code)
    if not all_are:
        found = largest(work.code[:n])
        if found > most:
            return bad(fault, BAD_REGION, codes_at, found, most)
    return OK


@jit
def _sign_values(code, above, below, y):
    for i in range(len(y)):
        y[i] = above[i] if code[i] else below[i]


@jit
def _float8_values(variant, code, scale, y):
    mbits, bias, last = (3, 7, 0x7E) if variant == E4M3FN else (2, 15, 0x7B)
    u = y.view(U32)
    for i in range(len(u)):
        c = U32(code[i] & U8(0x7F))
        v = min(bits_of(F32(small_value(c, mbits, bias) / scale[i])), MAX)
        u[i] = U32((NAN if c > last else v) | U32(U32(code[i] & U8(0x80)) << U32(24)))


@jit
def _scaled(ratio, scale):
    """The product's bits, at most the largest number."""
    u = bits_of(F32(ratio * scale))
    return U32(U32(u & ~ABS) | min(U32(u & ABS), MAX))


@jit
def _other_values(job, code, scale, y):
    u = y.view(U32)
    if job.codec == TERNARY:
        for i in range(len(u)):
            ratio = F32(1) if code[i] == 1 else F32(-1) if code[i] == 2 else F32(0)
            u[i] = _scaled(ratio, scale[i])
    elif job.codec == FLOAT4:
        for i in range(len(u)):
            v = bits_of(small_value(U32(code[i] & U8(7)), 1, 1))
            u[i] = _scaled(float_of(U32(v | U32(U32(code[i] & U8(8)) << U32(28)))), scale[i])
    else:
        odd = job.variant == 1
        levels = (1 << (job.bits - 1)) - 1 if odd else (1 << job.bits) - 1
        n, each = F32(levels), I32(1 if odd else 2)
        for i in range(len(u)):
            level = I32(I32(I32(code[i]) * each) - I32(levels))
            u[i] = _scaled(F32(F32(level) / n), scale[i]) if scale[i] > F32(0) else U32(0)


@jit
def _values(job, work, part, unscaled, code, y):
    """Values of a run."""
    row, n = I64(part.row), len(y)
    scale, other = work.scale[:n], work.other[:n]
    if row == 0:
        work.row_scale[0] = F32(1) if unscaled else part.scale
        work.row_other[0] = part.scale_below if job.variant == TWO_MEAN else part.scale
    _spread(work.row_scale, row, scale)
    if job.codec == SIGN:
        _spread(work.row_other, row, other)
        for k in range(n):
            other[k] = F32(-other[k]) if other[k] > F32(0) else F32(0)
        _sign_values(code, scale, other, y)
    elif job.codec == FLOAT8:
        _float8_values(job.variant, code, scale, y)
    else:
        _other_values(job, code, scale, y)


@jit
def _round_to(job, y, native):
    """Float32 values as decoding to the dtype gives them."""
    from_floats(job.dtype, y, native, 0)
    to_floats(job.dtype, native, 0, y)


@jit
def _leave(job, work, data, error, residual, part, first, m, region, codes):
    """What a block, just encoded, leaves of its values."""
    row = I64(part.row)
    tile, nbytes = (m if row and row <= ROW_BLOCK else TILE), scale_nbytes(job)
    for t in range(0, m, tile):
        end = min(t + tile, m)
        _open_codes(job, work, codes, 0, t, end, False, work.fault)
        i = t
        while i < end:
            n = run_length(row, i, end)
            if row and (row <= RUN or i % row == 0):
                _read_scales(job, region, i // row * nbytes, part, n if row <= RUN else 1, work, work.fault)
            y, x = work.y[:n], work.x[:n]
            _values(job, work, part, False, work.code[i - t : i - t + n], y)
            if job.dtype != FLOAT32:
                _round_to(job, y, work.region)
            load(job.dtype, data, error, first + i, x)
            left = residual[4 * (first + i) : 4 * (first + i + n)].view(F32)
            for k in range(n):
                left[k] = minus(x[k], y[k])
            i += n


@jit
def _get_bytes(job, work, frame, n, c, fault):
    """Code bytes from behind the entropy stage, to work.codes."""
    mode = load32(frame, c[0])
    c[0] += 4
    codes = work.codes
    if mode == CODED:
        status = get_coded(frame, job, 0, n, work.coder, codes, c, fault)
        return (
            status
            if status
            else get_literals(frame, job.tables[0, 512], work.coder.escaped, n, codes, work.coder.none, c, fault)
        )
    if mode > CODED:
        return bad(fault, BAD_REGION, c[0] - 4, mode, CODED)
    nbytes = n if mode == RAW else 1
    if c[1] - c[0] < nbytes:
        return bad(fault, BAD_REGION, c[0], c[1] - c[0], nbytes)
    if mode == RAW:
        copy(codes, frame[c[0] : c[0] + n])
    else:
        codes[:n] = frame[c[0]]
    c[0] += nbytes
    return OK


@jit
def _decode_block(job, work, frame, part, first, m, sink, fault):
    c, row, nbytes = work.c, I64(part.row), scale_nbytes(job)
    at, end_at = c[0], c[1]
    nscales = (m + row - 1) // row * nbytes if row else 0
    ncodes, codes_at = codes_nbytes(job, m), at + nscales
    entropy = has_entropy(job)
    if entropy:
        if end_at - at < nscales + 4:
            return bad(fault, BAD_REGION, at, end_at - at, nscales + 4)
        c[0] = codes_at
        status = _get_bytes(job, work, frame, ncodes, c, fault)
        if not status:
            status = end_region(frame, c, fault)
        if status:
            return status
    else:
        size = (nscales + ncodes + 7) // 8 * 8
        if end_at - at != size:
            return bad(fault, BAD_REGION, at, end_at - at, size)
        for i in range(codes_at + ncodes, end_at):
            if frame[i]:
                return bad(fault, BAD_REGION, i, frame[i], 0)
    codes = work.codes[:ncodes] if entropy else frame[codes_at : codes_at + ncodes]
    tile = m if row and row <= ROW_BLOCK else TILE
    rounds = job.dtype != FLOAT32 and sink.into != STORE and not sink.unscaled
    for t in range(0, m, tile):
        end = min(t + tile, m)
        status = _open_codes(job, work, codes, codes_at, t, end, sink.into == NOWHERE, fault)
        i = t
        while i < end and not status:
            n = run_length(row, i, end)
            if row and (row <= RUN or i % row == 0):
                status = _read_scales(job, frame, at + i // row * nbytes, part, n if row <= RUN else 1, work, fault)
            if not status and sink.into != NOWHERE:
                at_once = sink.into == STORE and job.dtype == FLOAT32
                y = sink.data[4 * (first + i) : 4 * (first + i + n)].view(F32) if at_once else work.y[:n]
                _values(job, work, part, sink.unscaled, work.code[i - t : i - t + n], y)
                if rounds:
                    _round_to(job, y, work.region)
                if at_once:
                    pass
                elif sink.into == STORE:
                    from_floats(job.dtype, y, sink.data, first + i)
                else:
                    put(sink, part.scale, y, first + i)
            i += n
        if status:
            return status
    return OK


@kernel
def decode_blocks(job, work, frame, checks, first, count, sink, seal, fault):
    """Blocks [first, first + count) to their values; or, if there is no sink, only their checks."""
    enter_floats(work.floats)
    status = OK
    for b in range(first, first + count):
        status = open_block(frame, job, b, checks, work.c, seal, fault)
        if not status:
            p, start, m = block_place(job, b)
            status = _decode_block(job, work, frame, job.row_parts[p], start, m, sink, fault)
        if status:
            break
    leave_floats(work.floats)
    return status
