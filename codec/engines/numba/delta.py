# pyright: basic
"""Delta: changes of a block against a base (docs/format.md, section 10; docs/encoder.md, section 10).

Kernels work on the bits of values as uint64. The rank of a value is its place among all patterns of its dtype, and a
step the difference of two ranks, modulo 2^w for values of w bits.
"""

from typing import Any, NamedTuple

import numpy as np

from codec._c.library import DTYPE_NAMES, MANTISSA_BITS
from codec.engines.numba.bitstream import (
    WORD,
    Bits,
    bit_length,
    ends,
    get_bits,
    get_gamma,
    get_rice,
    put_bits,
    put_gamma,
    put_rice,
    rice_nbits,
)
from codec.engines.numba.checksum import VALUES, digest_from
from codec.engines.numba.floats import NOWHERE
from codec.engines.numba.jit import jit, kernel
from codec.engines.numba.region import BAD_REGION, OK, bad, close_block, close_region, load32, open_block, store32
from codec.engines.numba.words import I64, U8, U16, U32, U64, copy

SAME, STEPS, RAW, PATCHES = 0, 1, 2, 3  # modes of a region
BIAS, CLASSES, MORE, GAP_BITS, MAX_GAP_K = 16, 8, 8, 20, 18  # as in format.md, section 10.3
SAMPLE, TOTAL = 31, U64(1 << 40)  # every 31st value is counted; larger steps count as 2^40
CHUNK = 1024  # bytes of a chunk of the digest
_MBITS = MANTISSA_BITS | {
    "float64": 52,
    "float8_e4m3fn": 3,
    "float8_e4m3fnuz": 3,
    "float8_e5m2": 2,
    "float8_e5m2fnuz": 2,
}


class Kind(NamedTuple):
    """Constants of the dtype (format, 10.2)."""

    w: int  # bits of a value
    mask: Any  # uint64 of w bits
    mbits: int
    last: int  # largest exponent field; 0: the dtype has no exponents


class Work(NamedTuple):
    """Buffers of one thread."""

    kind: Kind
    region: Any
    base: Any  # bits of the block's values: of the base,
    new: Any  # and of the tensor
    bytes: Any  # decoded values
    at: Any  # places of changes
    exponent: Any
    member: Any  # class of each value
    bins: Any  # by exponent: sampled values, codes, total of steps
    bits: Bits
    c: Any


def work_of(job):
    """Allocate the buffers for a job's blocks."""
    name, size, m = DTYPE_NAMES[job.dtype], job.size, min(job.block, job.n)
    mbits = _MBITS.get(name, 0)
    last = (1 << 8 * size - 1 - mbits) - 1 if mbits else 0
    return Work(
        Kind(8 * size, U64((1 << 8 * size) - 1), mbits, last),
        np.empty(m * size + 128, U8),  # the last code may exceed the largest region
        np.empty(m, U64),
        np.empty(m, U64),
        np.empty(m * size, U8),
        np.empty(m, I64),
        np.empty(m, np.int16),
        np.empty(m, U8),
        np.zeros((3, last + 1), U64),
        Bits(np.zeros(2, I64), np.zeros(1, U64)),
        np.empty(2, I64),
    )


@jit
def _load(size, data, x):
    """Load the bits of values (``data``: their bytes)."""
    if size == 1:
        copy(x, data)
    elif size == 2:
        copy(x, data.view(U16))
    elif size == 4:
        copy(x, data.view(U32))
    else:
        copy(x, data.view(U64))


@jit
def _store(size, x, data):
    """Store the bits of values as bytes."""
    for i in range(len(x)):
        for k in range(size):
            data[size * i + k] = U8(x[i] >> U64(8 * k))


@jit
def _rank(kind, x):
    """Return the rank of a float, or the float of a rank: the function is its own inverse."""
    return x ^ ((kind.mask >> U64(1)) & (U64(0) - (x >> U64(kind.w - 1) & U64(1))))


@jit
def _step(kind, x, y):
    """Return the step from one value to another."""
    if kind.last:
        return (_rank(kind, y) - _rank(kind, x)) & kind.mask
    return (y - x) & kind.mask


@jit
def _moved(kind, x, step):
    """Return the value that a step leads to."""
    if kind.last:
        return _rank(kind, (_rank(kind, x) + step) & kind.mask)
    return (x + step) & kind.mask


@jit
def _is_negative(kind, step):
    return step >> U64(kind.w - 1) & U64(1)


@jit
def _size(kind, step):
    """Return the size of a step, at most 2^(w - 1)."""
    return (U64(0) - step) & kind.mask if _is_negative(kind, step) else step


@jit
def _fill_exponents(kind, x, e):
    """Compute the exponents of values: their fields, but 1 for 0."""
    for i in range(len(x)):
        e[i] = max(I64(x[i] >> U64(kind.mbits)) & kind.last, 1)


@jit
def _class_of(exponent, scale):
    """Return the class of a value under scale S: 0 small, 1 to 8 pairs of exponents above S."""
    return min(max((I64(exponent) - scale + 1) >> 1, 0), CLASSES)


@jit
def _small_k(kind, exponent, scale):
    """Return the Rice parameter of a small value."""
    return min(scale - I64(exponent), kind.w - 2)


@jit
def _codes_of(size):
    """Return the number of codes of a change in a class."""
    return min(I64(min(size, U64(MORE + 1))), MORE + 1)


@jit
def _cost(kind, bins, low, high, scale):
    """Estimate a block's bits under a scale. ``low`` and ``high``: the exponents with values or changes."""
    cost, e = U64(0), low
    while e <= high and e <= scale:
        k = U64(_small_k(kind, e, scale))
        cost += U64(SAMPLE) * bins[0, e] * (k + U64(1)) + ((U64(2) * bins[2, e]) >> k)
        e += 1
    while e <= high:
        r = _class_of(e, scale)
        values, codes = U64(0), U64(0)
        while e <= high and _class_of(e, scale) == r:
            values += bins[0, e]
            codes += bins[1, e]
            e += 1
        cost += codes * U64(2 * r + 2) + ((U64(SAMPLE) * values) >> U64(2 * r))
    return cost


@jit
def _best_scale(kind, bins, low, high, first, last, step):
    """Return the scale of least cost among ``first``, ``first + step``, ... up to ``last``; the smallest of several."""
    best, least = first, ~U64(0)
    for scale in range(first, last + 1, step):
        cost = _cost(kind, bins, low, high, scale)
        if cost < least:
            best, least = scale, cost
    return best


@jit
def _choose_scale(kind, work, m, count):
    """Return the scale of a block from samples of its base and from its changes."""
    bins = work.bins
    bins[:] = U64(0)
    for i in range(0, m, SAMPLE):
        bins[0, work.exponent[i]] += U64(1)
    for c in range(count):
        i = work.at[c]
        size, e = _size(kind, _step(kind, work.base[i], work.new[i])), work.exponent[i]
        bins[1, e] += U64(_codes_of(size))
        bins[2, e] += min(size, TOTAL)
    low, high = kind.last, 0
    for e in range(1, kind.last + 1):
        if bins[0, e] or bins[1, e]:
            low, high = min(low, e), e
    first, last = max(low - BIAS, -BIAS), high + kind.w - 2
    middle = _best_scale(kind, bins, low, high, first, last, 8)
    return _best_scale(kind, bins, low, high, max(middle - 7, first), min(middle + 7, last), 1)


@jit
def _gap_k(m, count):
    """Return the Rice parameter of gaps between ``count`` changes of ``m`` values."""
    k = 0
    while k < MAX_GAP_K and (3 * count << (k + 1)) <= 2 * m:
        k += 1
    return k


@jit
def _patch_nbits(kind, work, count, k, steps):
    """Return the size in bits of patches, or of steps of dtypes without exponents."""
    total, after = 0, 0
    for c in range(count):
        i = work.at[c]
        total += rice_nbits(U64(i - after), k, GAP_BITS)
        after = i + 1
        if steps:
            total += 2 * bit_length(_size(kind, _step(kind, work.base[i], work.new[i])))
        else:
            total += kind.w
    return total


@jit
def _put_patches(kind, work, count, k, steps, out):
    """Write patches, or steps of dtypes without exponents."""
    after = 0
    for c in range(count):
        i = work.at[c]
        x, y = work.base[i], work.new[i]
        put_rice(work.bits, out, U64(i - after), k, GAP_BITS)
        after = i + 1
        if steps:
            step = _step(kind, x, y)
            put_bits(work.bits, out, _is_negative(kind, step), 1)
            put_gamma(work.bits, out, _size(kind, step))
        else:
            put_bits(work.bits, out, x ^ y, kind.w)


@jit
def _put_class(kind, work, m, count, r, out, limit):
    """Write the codes of class ``r``; return False if the stream exceeds ``limit`` bits."""
    codes = 0
    for c in range(count):
        i = work.at[c]
        if work.member[i] == r:
            codes += _codes_of(_size(kind, _step(kind, work.base[i], work.new[i])))
    put_gamma(work.bits, out, U64(codes + 1))
    c, gap = 0, 0
    for i in range(m if codes else 0):
        if work.member[i] == r:
            gap += 1
        if c == count or work.at[c] != i:
            continue
        c += 1
        if work.member[i] != r:
            continue
        if work.bits.at[0] > limit:
            return False
        step = _step(kind, work.base[i], work.new[i])
        size = _size(kind, step)
        put_rice(work.bits, out, U64(gap), 2 * r, GAP_BITS)
        put_bits(work.bits, out, _is_negative(kind, step), 1)
        for _ in range(_codes_of(size) - 1):
            put_bits(work.bits, out, U64(1), 2 * r + 1)
        if size > U64(MORE):
            put_gamma(work.bits, out, size - U64(MORE))
        gap = 0
    return work.bits.at[0] <= limit


@jit
def _put_steps(kind, work, m, count, scale, out, limit):
    """Write steps of a dtype with exponents; return False if the stream exceeds ``limit`` bits."""
    top = 0
    for i in range(m):
        work.member[i] = U8(_class_of(work.exponent[i], scale))
        top = max(top, I64(work.member[i]))
    for i in range(m):
        if work.member[i]:
            continue
        step = _step(kind, work.base[i], work.new[i])
        z = ((step << U64(1)) ^ (U64(0) - _is_negative(kind, step))) & kind.mask
        put_rice(work.bits, out, z, _small_k(kind, work.exponent[i], scale), kind.w)
        if work.bits.at[0] > limit:
            return False
    r, fits = 1, True
    while fits and r <= top:
        fits = _put_class(kind, work, m, count, r, out, limit)
        r += 1
    return fits


@jit
def _begin(bits, region):
    """Begin a stream behind the head of a region."""
    bits.at[0], bits.at[1] = 0, 4
    bits.word[0] = U64(0)


@jit
def _end(bits, region):
    """Write the last bits of a stream."""
    for i in range((bits.at[0] % WORD + 7) // 8):
        region[bits.at[1] + i] = U8(bits.word[0] >> U64(8 * i))


@jit
def _put_changes(kind, work, m, count, region):
    """Write the changes of a block to a region in the smallest mode, and return the size in bytes."""
    room, k = m * kind.w // 8, _gap_k(m, count)
    patches = (_patch_nbits(kind, work, count, k, False) + 7) // 8
    mode, field, size = STEPS, k, 0
    _begin(work.bits, region)
    if kind.last:
        _fill_exponents(kind, work.base[:m], work.exponent)
        scale = _choose_scale(kind, work, m, count)
        field = scale + BIAS
        fits = _put_steps(kind, work, m, count, scale, region, 8 * min(room, patches))
        size = (work.bits.at[0] + 7) // 8 if fits else patches + 1
    else:
        size = (_patch_nbits(kind, work, count, k, True) + 7) // 8
        if size <= patches and size < room:
            _put_patches(kind, work, count, k, True, region)
    if patches < size:
        mode, field, size = PATCHES, k, patches
        _begin(work.bits, region)
        if size < room:
            _put_patches(kind, work, count, k, False, region)
    if (4 + size + 7) // 8 >= (4 + room + 7) // 8:
        mode, field, size = RAW, 0, room
        _store(kind.w // 8, work.new[:m], region[4:])
    else:
        _end(work.bits, region)
    store32(region, 0, mode | field << 2 | (count - 1) << 14)
    return 4 + size


@kernel
def encode_blocks(job, work, base, data, frame, limit, first, count, result):
    """Encode blocks [first, first + count) to regions from frame[result[0]] on.

    result[0] becomes the end, and checksums of blocks are added to result[1]. ``base``, ``data``: bytes of the tensors.
    """
    kind = work.kind
    for b in range(first, first + count):
        start = b * job.block
        m = min(job.block, job.n - start)
        old = base[job.size * start : job.size * (start + m)]
        new = data[job.size * start : job.size * (start + m)]
        _load(job.size, old, work.base)
        _load(job.size, new, work.new)
        changes = 0
        for i in range(m):
            if work.base[i] != work.new[i]:
                work.at[changes] = i
                changes += 1
        block, chunk = job.row_sums[b], job.size * start // CHUNK
        block.base, block.result = digest_from(old, VALUES, chunk), digest_from(new, VALUES, chunk)
        block.changes = changes
        size = 8
        if changes:
            size = close_region(work.region, _put_changes(kind, work, m, changes, work.region))
        else:
            work.region[:8] = U8(0)
        status = close_block(frame, job, b, work.region, size, False, limit, U64(0), result)
        if status:
            return status
    return OK


@jit
def _get_small(kind, work, m, scale, room, frame, end):
    """Read the steps of small values; return the number of changes, or -1 if the stream is invalid."""
    count = 0
    for i in range(m):
        if work.member[i]:
            continue
        z, valid = get_rice(work.bits, frame, end, _small_k(kind, work.exponent[i], scale), kind.w)
        if not valid:
            return -1
        if z:
            count += 1
            step = ((z >> U64(1)) ^ (U64(0) - (z & U64(1)))) & kind.mask
            work.new[i] = _moved(kind, work.base[i], step)
    return count if count <= room and work.bits.at[0] <= end else -1


@jit
def _get_class(kind, work, m, r, room, frame, end):
    """Read the codes of class ``r``; return the number of changes, or -1 if the stream is invalid."""
    bits, i, count, zeros, negative = work.bits, -1, 0, MORE, U64(0)
    codes = get_gamma(bits, frame, end)
    if not codes or bits.at[0] > end or codes - U64(1) > U64(end - bits.at[0]):
        return -1
    for _ in range(I64(codes - U64(1))):
        gap, valid = get_rice(bits, frame, end, 2 * r, GAP_BITS)
        if not valid:
            return -1
        if gap:
            negative = get_bits(bits, frame, end, 1)
            while gap and i + 1 < m:
                i += 1
                gap -= U64(work.member[i] == r)
            if gap or count == room:
                return -1
            count += 1
            zeros = 0
            step = U64(1)
        else:  # the last change is a step larger
            if zeros == MORE:
                return -1
            zeros += 1
            step = U64(zeros + 1)
            if zeros == MORE:
                more = get_gamma(bits, frame, end)
                step = U64(MORE) + more
                if not more or step < more or step > U64(1) << U64(kind.w - 1):
                    return -1
        step = U64(0) - step if negative else step
        work.new[i] = _moved(kind, work.base[i], step & kind.mask)
    return count if bits.at[0] <= end else -1


@jit
def _get_steps(kind, work, m, scale, room, frame, end):
    """Read steps of a dtype with exponents; return the number of changes, or -1 if the stream is invalid."""
    top = 0
    _fill_exponents(kind, work.base[:m], work.exponent)
    for i in range(m):
        work.member[i] = U8(_class_of(work.exponent[i], scale))
        top = max(top, I64(work.member[i]))
    count = _get_small(kind, work, m, scale, room, frame, end)
    for r in range(1, top + 1):
        some = _get_class(kind, work, m, r, room - count, frame, end) if count >= 0 else -1
        count = count + some if some >= 0 else -1
    return count


@jit
def _get_patches(kind, work, m, k, steps, changes, frame, end):
    """Read patches, or steps of dtypes without exponents; return the number of changes, or -1."""
    i = 0
    for _ in range(changes):
        gap, valid = get_rice(work.bits, frame, end, k, GAP_BITS)
        if not valid or gap >= U64(m - i):
            return -1
        i += I64(gap)
        x = work.base[i]
        if steps:
            negative = get_bits(work.bits, frame, end, 1)
            step = get_gamma(work.bits, frame, end)
            if not step or step > U64(1) << U64(kind.w - 1):
                return -1
            work.new[i] = _moved(kind, x, (U64(0) - step if negative else step) & kind.mask)
        else:
            work.new[i] = x ^ get_bits(work.bits, frame, end, kind.w)
        if work.new[i] == x or work.bits.at[0] > end:
            return -1
        i += 1
    return changes


@jit
def _get_raw(size, work, m, frame, at):
    """Read raw values, and return the number that differ from the base's."""
    count = 0
    for i in range(m):
        x = U64(0)
        for k in range(size):
            x |= U64(frame[at + size * i + k]) << U64(8 * k)
        work.new[i] = x
        count += x != work.base[i]
    return count


@jit
def _get_changes(kind, work, m, frame, c, fault):
    """Decode a region to ``work.new``, which holds the base's values; return the number of changes, or -1."""
    at, head = c[0], I64(load32(frame, c[0]))
    mode, field, changes = head & 3, head >> 2 & 4095, (head >> 14) + 1
    raw = (4 + m * kind.w // 8 + 7) // 8 * 8
    end, found = 8 * (c[1] - at - 4), -1
    work.bits.at[0], work.bits.at[1] = 0, at + 4
    if mode == SAME:
        valid = head == 0 and c[1] - at == 8 and load32(frame, at + 4) == 0
        return 0 if valid else -bad(fault, BAD_REGION, at, head, 0)
    if changes > m:
        return -bad(fault, BAD_REGION, at, changes, m)
    if mode == RAW:
        if field:
            return -bad(fault, BAD_REGION, at, field, 0)
        if c[1] - at != raw:
            return -bad(fault, BAD_REGION, at, c[1] - at, raw)
        for i in range(at + 4 + m * kind.w // 8, c[1]):
            if frame[i]:
                return -bad(fault, BAD_REGION, i, frame[i], 0)
        found = _get_raw(kind.w // 8, work, m, frame, at + 4)
        return changes if found == changes else -bad(fault, BAD_REGION, at, changes, 0)
    if mode == STEPS and kind.last:
        most = kind.last + kind.w - 2 + BIAS
        if field > most:
            return -bad(fault, BAD_REGION, at, field, most)
        found = _get_steps(kind, work, m, field - BIAS, changes, frame, end)
    else:
        if field > MAX_GAP_K:
            return -bad(fault, BAD_REGION, at, field, MAX_GAP_K)
        found = _get_patches(kind, work, m, field, mode == STEPS, changes, frame, end)
    if found != changes or not ends(work.bits, frame, end):
        return -bad(fault, BAD_REGION, at + 4, max(found, 0), changes)
    return changes


@kernel
def decode_blocks(job, work, frame, checks, base, first, count, sink, checksum, fault):
    """Decode blocks [first, first + count) to the sink, which may be the base, or only check them.

    With ``checks``, checksums of blocks are compared and added to ``checksum[0]``, and digests of values stored in the
    job. Nothing of a block is written before all of it has been read. ``fault[3]`` becomes the block whose changes are
    invalid.
    """
    kind, c = work.kind, work.c
    for b in range(first, first + count):
        status = open_block(frame, job, b, checks, c, checksum, fault)
        if status:
            return status
        start = b * job.block
        m = min(job.block, job.n - start)
        old = base[job.size * start : job.size * (start + m)]
        _load(job.size, old, work.base)
        copy(work.new, work.base[:m])
        changes = _get_changes(kind, work, m, frame, c, fault)
        if changes < 0:
            fault[3] = U64(b)
            return BAD_REGION
        new = work.bytes[: job.size * m]
        _store(job.size, work.new[:m], new)
        if checks:
            block, chunk = job.row_sums[b], job.size * start // CHUNK
            block.base, block.result = digest_from(old, VALUES, chunk), digest_from(new, VALUES, chunk)
            block.state = 1
        if sink.into != NOWHERE:
            copy(sink.data[job.size * start :], new)
    return OK
