# pyright: basic
"""Decoding of a Delta region (docs/spec/format.md, section 10.3). Invalid bytes give an error or arbitrary values."""

from codec.engines.numba.bitstream import begin, ends, get_bits, get_gamma, get_rice
from codec.engines.numba.delta_values import (
    BIAS,
    GAP_BITS,
    MAX_GAP_K,
    MORE,
    RAW,
    SAME,
    STEPS,
    class_of,
    fill_exponents,
    moved,
    small_k,
)
from codec.engines.numba.jit import jit
from codec.engines.numba.region import BAD_REGION, bad, load32
from codec.engines.numba.words import I64, U8, U64


@jit
def _get_small(kind, work, m, scale, room, frame, end):
    """Read the steps of values of class 0; return the number of changes, or -1 if the stream is invalid."""
    count = 0
    for i in range(m):
        if work.member[i]:
            continue
        z, valid = get_rice(work.bits, frame, end, small_k(kind, work.exponent[i], scale), kind.w)
        if not valid:
            return -1
        if z:
            count += 1
            step = ((z >> U64(1)) ^ (U64(0) - (z & U64(1)))) & kind.mask
            work.new[i] = moved(kind, work.base[i], step)
    return count if count <= room and work.bits.at[0] <= end else -1


@jit
def _get_class(kind, work, m, r, room, frame, end):
    """Read the codes for values of class ``r``; return the number of changes, or -1 if the stream is invalid."""
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
        else:  # gap 0: increase the step of the last change by 1
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
        work.new[i] = moved(kind, work.base[i], step & kind.mask)
    return count if bits.at[0] <= end else -1


@jit
def _get_steps(kind, work, m, scale, room, frame, end):
    """Read the steps of a dtype with exponents; return the number of changes, or -1 if the stream is invalid."""
    top = 0
    fill_exponents(kind, work.base[:m], work.exponent)
    for i in range(m):
        work.member[i] = U8(class_of(work.exponent[i], scale))
        top = max(top, I64(work.member[i]))
    count = _get_small(kind, work, m, scale, room, frame, end)
    for r in range(1, top + 1):
        some = _get_class(kind, work, m, r, room - count, frame, end) if count >= 0 else -1
        count = count + some if some >= 0 else -1
    return count


@jit
def _get_patches(kind, work, m, k, steps, changes, frame, end):
    """Read patches (if ``steps``: steps of a dtype without exponents). Return the number of changes; -1 if invalid."""
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
            work.new[i] = moved(kind, x, (U64(0) - step if negative else step) & kind.mask)
        else:
            work.new[i] = x ^ get_bits(work.bits, frame, end, kind.w)
        if work.new[i] == x or work.bits.at[0] > end:
            return -1
        i += 1
    return changes


@jit
def _get_raw(size, work, m, frame, at):
    """Read uncompressed values; return the number of values that differ from the base."""
    count = 0
    for i in range(m):
        x = U64(0)
        for k in range(size):
            x |= U64(frame[at + size * i + k]) << U64(8 * k)
        work.new[i] = x
        count += x != work.base[i]
    return count


@jit
def get_changes(kind, work, m, frame, c, fault):
    """Decode a region into ``work.new``, which initially holds the base; return the number of changes, or -1."""
    at, head = c[0], I64(load32(frame, c[0]))
    mode, field, changes = head & 3, head >> 2 & 4095, (head >> 14) + 1
    raw = (4 + m * kind.w // 8 + 7) // 8 * 8
    end, found = 8 * (c[1] - at - 4), -1
    begin(work.bits, at + 4)
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
