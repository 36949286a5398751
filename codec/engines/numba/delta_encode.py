# pyright: basic
"""Encoding of a block's changes to a Delta region (docs/spec/encoder.md, section 10)."""

from codec.engines.numba.bitstream import (
    begin,
    bit_length,
    close_bits,
    put_bits,
    put_gamma,
    put_rice,
    rice_nbits,
)
from codec.engines.numba.delta_values import (
    BIAS,
    GAP_BITS,
    MAX_GAP_K,
    MORE,
    PATCHES,
    RAW,
    STEPS,
    class_of,
    fill_exponents,
    is_negative,
    size_of,
    small_k,
    step_of,
    store_bits,
)
from codec.engines.numba.jit import jit
from codec.engines.numba.region import store32
from codec.engines.numba.words import I64, U8, U64

SAMPLE, TOTAL = 31, U64(1 << 40)  # every 31st value is sampled; a step above 2^40 counts as 2^40


@jit
def _codes_of(size):
    """Return the number of codes that a change of ``size`` steps takes, for a value of a class above 0."""
    return min(I64(min(size, U64(MORE + 1))), MORE + 1)


@jit
def _cost(kind, bins, low, high, scale):
    """Estimate a block's size in bits under a scale. ``low``, ``high``: range of exponents of values and changes."""
    cost, e = U64(0), low
    while e <= high and e <= scale:
        k = U64(small_k(kind, e, scale))
        cost += U64(SAMPLE) * bins[0, e] * (k + U64(1)) + ((U64(2) * bins[2, e]) >> k)
        e += 1
    while e <= high:
        r = class_of(e, scale)
        values, codes = U64(0), U64(0)
        while e <= high and class_of(e, scale) == r:
            values += bins[0, e]
            codes += bins[1, e]
            e += 1
        cost += codes * U64(2 * r + 2) + ((U64(SAMPLE) * values) >> U64(2 * r))
    return cost


@jit
def _best_scale(kind, bins, low, high, first, last, step):
    """Return the smallest of the scales ``first``, ``first + step``, ... ``last`` that have the least cost."""
    best, least = first, ~U64(0)
    for scale in range(first, last + 1, step):
        cost = _cost(kind, bins, low, high, scale)
        if cost < least:
            best, least = scale, cost
    return best


@jit
def _choose_scale(kind, work, m, count):
    """Choose the scale of a block from a sample of its base and from its changes."""
    bins = work.bins
    bins[:] = U64(0)
    for i in range(0, m, SAMPLE):
        bins[0, work.exponent[i]] += U64(1)
    for c in range(count):
        i = work.at[c]
        size, e = size_of(kind, step_of(kind, work.base[i], work.new[i])), work.exponent[i]
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
    """Return the Rice parameter for gaps between ``count`` changes in ``m`` values."""
    k = 0
    while k < MAX_GAP_K and (3 * count << (k + 1)) <= 2 * m:
        k += 1
    return k


@jit
def _patch_nbits(kind, work, count, k, steps):
    """Return the size in bits of patches, or, if ``steps`` is set, of the steps of a dtype without exponents."""
    total, after = 0, 0
    for c in range(count):
        i = work.at[c]
        total += rice_nbits(U64(i - after), k, GAP_BITS)
        after = i + 1
        if steps:
            total += 2 * bit_length(size_of(kind, step_of(kind, work.base[i], work.new[i])))
        else:
            total += kind.w
    return total


@jit
def _put_patches(kind, work, count, k, steps, out):
    """Write patches, or, if ``steps`` is set, the steps of a dtype without exponents."""
    after = 0
    for c in range(count):
        i = work.at[c]
        x, y = work.base[i], work.new[i]
        put_rice(work.bits, out, U64(i - after), k, GAP_BITS)
        after = i + 1
        if steps:
            step = step_of(kind, x, y)
            put_bits(work.bits, out, is_negative(kind, step), 1)
            put_gamma(work.bits, out, size_of(kind, step))
        else:
            put_bits(work.bits, out, x ^ y, kind.w)


@jit
def _put_class(kind, work, m, count, r, out, limit):
    """Write the codes for values of class ``r``; return False if the stream exceeds ``limit`` bits."""
    codes = 0
    for c in range(count):
        i = work.at[c]
        if work.member[i] == r:
            codes += _codes_of(size_of(kind, step_of(kind, work.base[i], work.new[i])))
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
        step = step_of(kind, work.base[i], work.new[i])
        size = size_of(kind, step)
        put_rice(work.bits, out, U64(gap), 2 * r, GAP_BITS)
        put_bits(work.bits, out, is_negative(kind, step), 1)
        for _ in range(_codes_of(size) - 1):
            put_bits(work.bits, out, U64(1), 2 * r + 1)
        if size > U64(MORE):
            put_gamma(work.bits, out, size - U64(MORE))
        gap = 0
    return work.bits.at[0] <= limit


@jit
def _put_steps(kind, work, m, count, scale, out, limit):
    """Write the steps of a dtype with exponents; return False if the stream exceeds ``limit`` bits."""
    top = 0
    for i in range(m):
        work.member[i] = U8(class_of(work.exponent[i], scale))
        top = max(top, I64(work.member[i]))
    for i in range(m):
        if work.member[i]:
            continue
        step = step_of(kind, work.base[i], work.new[i])
        z = ((step << U64(1)) ^ (U64(0) - is_negative(kind, step))) & kind.mask
        put_rice(work.bits, out, z, small_k(kind, work.exponent[i], scale), kind.w)
        if work.bits.at[0] > limit:
            return False
    r, fits = 1, True
    while fits and r <= top:
        fits = _put_class(kind, work, m, count, r, out, limit)
        r += 1
    return fits


@jit
def put_changes(kind, work, m, count, region):
    """Write the changes of a block to a region, in the mode that takes the fewest bytes; return the size in bytes."""
    room, k = m * kind.w // 8, _gap_k(m, count)
    patches = (_patch_nbits(kind, work, count, k, False) + 7) // 8
    mode, field, size = STEPS, k, 0
    begin(work.bits, 4)
    if kind.last:
        fill_exponents(kind, work.base[:m], work.exponent)
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
        begin(work.bits, 4)
        if size < room:
            _put_patches(kind, work, count, k, False, region)
    if (4 + size + 7) // 8 >= (4 + room + 7) // 8:
        mode, field, size = RAW, 0, room
        store_bits(kind.w // 8, work.new[:m], region[4:])
    else:
        close_bits(work.bits, region)
    store32(region, 0, mode | field << 2 | (count - 1) << 14)
    return 4 + size
