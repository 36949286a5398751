# pyright: basic
"""TopK: the values of largest magnitude of each chunk (format.md, section 11; encoder.md, section 11).

A key is the bit pattern of a magnitude as float32. Keys, compared as integers, sort like the magnitudes.
"""

from typing import Any, NamedTuple

import numpy as np

from codec._c.library import lib
from codec.engines.numba.bitstream import Bits, begin, close_bits, ends, get_bits, get_rice, put_bits, put_rice
from codec.engines.numba.floats import ADD, BFLOAT16, FLOAT16, NOWHERE, STORE, from_floats, load, put
from codec.engines.numba.jit import enter_floats, jit, kernel, leave_floats
from codec.engines.numba.philox import fill_keys, random_word
from codec.engines.numba.region import BAD_REGION, OK, bad, close_block, close_region, open_block
from codec.engines.numba.words import (
    ABS,
    F32,
    I64,
    INF,
    U8,
    U16,
    U32,
    U64,
    bits_of,
    copy,
    float_of,
    from_bfloat16,
    from_float16,
    minus,
    over,
    over_of,
    place,
    to_bfloat16,
    to_float16,
)
from codec.errors import Status

NONFINITE = int(Status.NONFINITE)
STOCHASTIC = lib.CODEC_OPTION_STOCHASTIC
GAP_BITS = 20
DIGIT_BITS = 11  # number of bits of a key that one histogram covers
HALF = U16(0x8000)  # replaces the random bits for rounding to nearest


class TopKFrame(NamedTuple):
    """Parameters of a frame (format.md, section 11)."""

    chunk: int  # number of values in a chunk
    kept: int  # number of values kept in a chunk of full size
    rice_k: int  # Rice parameter for gaps
    bits: int  # bits of a kept value: sign and level
    scales: int  # number of scales per chunk
    steps: int  # number of steps between the lowest and the highest level


class TopKWork(NamedTuple):
    """Buffers of one thread that encodes or decodes blocks of TopK."""

    kind: TopKFrame
    region: Any
    x: Any  # values of a chunk
    at: Any  # positions of kept values
    code: Any
    count: Any  # histogram of one digit (DIGIT_BITS bits) of the keys
    range: Any  # magnitudes of the lowest and the highest level of a chunk
    keys: Any  # Philox keys of the random bits
    bits: Bits
    c: Any
    floats: Any  # saved floating-point environment of the thread


def work_of(job):
    """Allocate one thread's buffers for the blocks of a TopK job."""
    chunk, kept, bits = 1 << (job.group_size >> 16), job.group_size & 0xFFFF, job.bits
    rice_k = max((2 * chunk // (3 * kept)).bit_length() - 1, 0)
    kind = TopKFrame(chunk, kept, rice_k, bits, 1 if bits == 1 else 2, (1 << bits - 1) - 1)
    n, blocks = min(chunk, job.n), min(job.block, job.n)
    most = -(-blocks * kept // chunk) + blocks // chunk + 1
    keys = np.empty(21, U32)
    fill_keys(job.seed, job.stream, keys)
    return TopKWork(
        kind,
        np.empty(4 * (blocks // chunk + 1) + 8 * most + 16, U8),  # a code has at most 52 bits
        np.empty(n, F32),
        np.empty(n, I64),
        np.empty(n, U32),
        np.empty(1 << DIGIT_BITS, I64),
        np.empty(2, F32),
        keys,
        Bits(np.zeros(2, I64), np.zeros(1, U64)),
        np.empty(2, I64),
        np.empty(64, U8),
    )


@jit
def _kept_of(kind, n):
    """Return the number of values kept in a chunk of ``n`` values."""
    return (n * kind.kept + kind.chunk - 1) // kind.chunk


@jit
def _threshold(x, kept, count):
    """Return the key of the ``kept``-th largest magnitude, and the number of kept values that have exactly this key."""
    u, high, shift, rank = x.view(U32), U32(0), 31, kept
    while shift:
        bits = min(shift, DIGIT_BITS)
        before, shift = shift, shift - bits
        mask = U32((1 << bits) - 1)
        count[:] = 0
        for i in range(len(u)):
            key = U32(u[i] & ABS)
            if U32(U64(key) >> U64(before)) == U32(U64(high) >> U64(before)):
                count[U32(key >> U32(shift)) & mask] += 1
        digit = I64(mask)
        while count[digit] < rank:
            rank -= count[digit]
            digit -= 1
        high |= U32(digit) << U32(shift)
    return high, rank


@jit
def _select(x, kept, count, at):
    """Store the positions of the ``kept`` largest magnitudes in ``at``, ascending. Of equal ones, the first are kept.

    Return the smallest and the largest key of the kept magnitudes.
    """
    u, most, n = x.view(U32), U32(0), 0
    least, ties = _threshold(x, kept, count)
    for i in range(len(u)):
        key = U32(u[i] & ABS)
        most = max(most, key)
        if key < least or (key == least and ties == 0):
            continue
        ties -= key == least
        at[n] = i
        n += 1
    return least, most


@jit
def _store16(data, at, x):
    data[at], data[at + 1] = U8(x), U8(U16(x) >> U16(8))


@jit
def _load16(data, at):
    return U16(U16(data[at]) | U16(U16(data[at + 1]) << U16(8)))


@jit
def _put_scales(kind, x, at, kept, least, most, region, to):
    """Write scales of a chunk to ``region[to]``: the mean kept magnitude for 1 bit, otherwise smallest and largest."""
    if kind.bits > 1:
        _store16(region, to, to_bfloat16(least))
        _store16(region, to + 2, to_bfloat16(most))
        return
    total = 0.0
    for i in range(kept):
        total += np.float64(float_of(U32(bits_of(x[at[i]]) & ABS)))
    _store16(region, to, to_bfloat16(bits_of(F32(total / np.float64(kept)))))


@jit
def _get_range(kind, data, scales, chunk, levels):
    """Read the scales of a chunk into ``levels``; if the highest level is 0, the chunk has no codes."""
    at = scales + 2 * kind.scales * chunk
    levels[0] = float_of(from_bfloat16(_load16(data, at)))
    levels[1] = float_of(from_bfloat16(_load16(data, at + 2 * (kind.scales - 1))))


@jit
def _level_of(magnitude, low, high, steps, h):
    """Return the level index of a magnitude; ``h``: 16 random bits."""
    size, above = F32(high - low), F32(magnitude - low)
    if not size > F32(0) or not above > F32(0) or not steps:
        return U32(0)
    up, by = over_of(size, F32(1))
    return U32(place(F32(over(min(above, size), up, by) * F32(steps)), h))


@jit
def _value_of(dtype, code, low, high, steps):
    """Return the value of a code, rounded to the dtype; zero is always +0."""
    level = U32(code >> U32(1))
    magnitude = low
    if level:
        magnitude = F32(low + F32(F32(high - low) * F32(F32(level) / F32(steps))))
    u = U32(bits_of(magnitude))
    if dtype == BFLOAT16:
        u = from_bfloat16(to_bfloat16(u))
    elif dtype == FLOAT16:
        u = from_float16(to_float16(u))
    return float_of(U32(u | U32(U32(code) << U32(31)))) if u else F32(0)


@jit
def _put_codes(job, work, first, kept):
    """Append the codes of a chunk that begins at value ``first`` to the stream, and store them in ``work.code``."""
    kind, low, high, after = work.kind, work.range[0], work.range[1], 0
    for i in range(kept):
        at, h = work.at[i], HALF
        u = U32(bits_of(work.x[at]))
        if job.options & STOCHASTIC:
            h = random_word(work.keys, first + at, 0)
        level = _level_of(float_of(U32(u & ABS)), low, high, kind.steps, h)
        work.code[i] = U32(U32(u >> U32(31)) | U32(level << U32(1)))
        put_rice(work.bits, work.region, U64(at - after), kind.rice_k, GAP_BITS)
        put_bits(work.bits, work.region, U64(work.code[i]), kind.bits)
        after = at + 1


@jit
def _put_residual(job, work, kept, residual):
    """Write the residual of a chunk, whose first ``kept`` positions in ``work.at`` have codes in ``work.code``."""
    kind = work.kind
    copy(residual, work.x[: len(residual)])
    for i in range(kept):
        at = work.at[i]
        residual[at] = minus(work.x[at], _value_of(job.dtype, work.code[i], work.range[0], work.range[1], kind.steps))


@kernel
def scan(job, work, data, feedback, first, count):
    """Store the largest magnitude of each block in [first, first + count) in the job."""
    feedback_values = feedback.view(F32)
    enter_floats(work.floats)
    for b in range(first, first + count):
        most = U32(0)
        for i in range(b * job.block, min((b + 1) * job.block, job.n), len(work.x)):
            x = work.x[: min(len(work.x), job.n - i)]
            load(job.dtype, data, feedback_values, i, x)
            u = x.view(U32)
            for k in range(len(u)):
                most = max(most, U32(u[k] & ABS))
        job.row_sums[b] = most
    leave_floats(work.floats)


@jit
def _put_block(job, work, data, feedback, residual, start, m):
    """Write the region of a block of ``m`` values; return a status and the region's size in bytes."""
    kind = work.kind
    chunks = (m + kind.chunk - 1) // kind.chunk
    scales = 2 * kind.scales * chunks
    begin(work.bits, scales)
    for c in range(chunks):
        first = start + c * kind.chunk
        n = min(kind.chunk, start + m - first)
        x, kept = work.x[:n], _kept_of(kind, n)
        load(job.dtype, data, feedback, first, x)
        least, most = _select(x, kept, work.count, work.at)
        if most >= INF:
            return NONFINITE, 0
        _put_scales(kind, x, work.at, kept, least, most, work.region, 2 * kind.scales * c)
        _get_range(kind, work.region, 0, c, work.range)
        if work.range[1] > F32(0):
            _put_codes(job, work, first, kept)
        else:
            kept = 0
        if len(residual):
            _put_residual(job, work, kept, residual[first : first + n])
    return OK, scales + close_bits(work.bits, work.region)


@kernel
def encode_blocks(job, work, data, feedback, residual, frame, limit, first, count, result):
    """Encode blocks [first, first + count) to regions from frame[result[0]] on.

    result[0] is set to the end of the regions, and the blocks' checksums are added to result[1]. ``feedback`` and
    ``residual`` are the bytes of float32 arrays, or empty.
    """
    status, feedback_values, residual_values = OK, feedback.view(F32), residual.view(F32)
    enter_floats(work.floats)
    for b in range(first, first + count):
        start = b * job.block
        m = min(job.block, job.n - start)
        status, size = _put_block(job, work, data, feedback_values, residual_values, start, m)
        if status:
            break
        size = close_region(work.region, size)
        status = close_block(frame, job, b, work.region, size, False, limit, U64(0), result)
        if status:
            break
    leave_floats(work.floats)
    return status


@jit
def _check_scales(kind, frame, at, nbytes, fault):
    """Check that scales are finite and not negative, and that each chunk's lowest level is not above its highest."""
    for i in range(at, at + nbytes, 2):
        scale, least = I64(_load16(frame, i)), 0
        if scale >= I64(INF) >> 16:
            return bad(fault, BAD_REGION, i, scale, (I64(INF) >> 16) - 1)
        if kind.scales == 2 and (i - at) % 4:
            least = I64(_load16(frame, i - 2))
        if scale < least:
            return bad(fault, BAD_REGION, i, scale, least)
    return OK


@jit
def _get_codes(kind, work, n, kept, frame, end):
    """Read the positions and codes of a chunk of ``n`` values; return False if they are invalid."""
    after = 0
    for i in range(kept):
        gap, valid = get_rice(work.bits, frame, end, kind.rice_k, GAP_BITS)
        if not valid or gap >= U64(n - after):
            return False
        work.at[i] = after + I64(gap)
        after = work.at[i] + 1
        work.code[i] = U32(get_bits(work.bits, frame, end, kind.bits))
    return work.bits.at[0] <= end


@jit
def _put_values(job, work, kept, sink, first, n):
    """Store a chunk's values, or combine them with the destination. Adding without dividing skips dropped values."""
    adds = sink.into == ADD and not sink.divide > F32(0)
    x, out = work.x[:n], sink.data[:0].view(F32)
    if adds:
        out = sink.data[4 * first : 4 * (first + n)].view(F32)
    else:
        x[:] = F32(0)
    for i in range(kept):
        at, y = work.at[i], _value_of(job.dtype, work.code[i], work.range[0], work.range[1], work.kind.steps)
        if adds:
            out[at] = F32(out[at] + F32(sink.weight * y))
        else:
            x[at] = y
    if sink.into == STORE:
        from_floats(job.dtype, x, sink.data, first)
    elif not adds:
        put(sink, F32(1), x, first)


@jit
def _get_block(job, work, start, m, frame, sink, c, fault):
    """Decode a block of ``m`` values to ``sink``, or only validate it if ``sink.into`` is NOWHERE."""
    kind, at = work.kind, c[0]
    chunks = (m + kind.chunk - 1) // kind.chunk
    scales = 2 * kind.scales * chunks
    if c[1] - at < scales:
        return bad(fault, BAD_REGION, at, c[1] - at, (scales + 7) // 8 * 8)
    status = _check_scales(kind, frame, at, scales, fault)
    if status:
        return status
    end = 8 * (c[1] - at - scales)
    begin(work.bits, at + scales)
    for k in range(chunks):
        n = min(kind.chunk, m - k * kind.chunk)
        _get_range(kind, frame, at, k, work.range)
        kept = _kept_of(kind, n) if work.range[1] > F32(0) else 0
        if kept and not _get_codes(kind, work, n, kept, frame, end):
            return bad(fault, BAD_REGION, at + scales, k * kind.chunk, n)
        if sink.into != NOWHERE:
            _put_values(job, work, kept, sink, start + k * kind.chunk, n)
    used = work.bits.at[0]
    if not ends(work.bits, frame, end):
        return bad(fault, BAD_REGION, c[1] - 8, used, end)
    return OK


@kernel
def decode_blocks(job, work, frame, checks, first, count, sink, checksum, fault):
    """Decode blocks [first, first + count) to ``sink``; if ``sink.into`` is NOWHERE, only validate them."""
    status = OK
    enter_floats(work.floats)
    for b in range(first, first + count):
        status = open_block(frame, job, b, checks, work.c, checksum, fault)
        if status:
            break
        start = b * job.block
        status = _get_block(job, work, start, min(job.block, job.n - start), frame, sink, work.c, fault)
        if status:
            break
    leave_floats(work.floats)
    return status
