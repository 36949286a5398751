# pyright: basic
"""Quantization and dequantization of the row codecs (docs/spec/encoder.md, 7.4; docs/spec/format.md, 8.5).

Arguments are arrays with an item for each value: ``half`` has 16 random bits, ``code`` a code in a byte, ``scale`` the
scale of the value's row.
"""

from codec.engines.numba.jit import jit
from codec.engines.numba.parts import FLOAT4, FLOAT8, ODD, QUANTIZE, SIGN, TERNARY, TIE, TWO_MEAN, is_affine, is_e5m2
from codec.engines.numba.philox import random_word
from codec.engines.numba.scales import spread
from codec.engines.numba.scans import largest
from codec.engines.numba.words import (
    ABS,
    F32,
    I32,
    I64,
    INF,
    MAX,
    NAN,
    U8,
    U32,
    bits_of,
    float_of,
    over,
    over_of,
    place,
    small_nearest,
    small_stochastic,
    small_value,
)


@jit
def float8_codes(variant, x, scale, random, half, code):
    """Multiply values by ``scale``, and round them to codes of float8."""
    mbits, bias = (2, 15) if is_e5m2(variant) else (3, 7)
    top = bits_of(F32(57344) if is_e5m2(variant) else F32(448))
    u = x.view(U32)
    for i in range(len(u)):
        a = U32(u[i] & ABS)
        y = min(bits_of(F32(float_of(a) * scale[i])), top)
        c = small_stochastic(y, mbits, bias, half[i]) if random else small_nearest(y, mbits, bias)
        code[i] = U8(U32(c if a < INF else U32(0x7F)) | U32(U32(u[i] >> U32(24)) & U32(0x80)))


@jit
def float4_codes(x, scale, random, half, code):
    """Divide values by ``scale``, and round them to codes of e2m1, which have a sign and three bits."""
    u = x.view(U32)
    for i in range(len(u)):
        d = scale[i] if scale[i] > F32(0) else float_of(INF)
        y = min(bits_of(F32(float_of(U32(u[i] & ABS)) / d)), U32(0x40C00000))
        c = small_stochastic(y, 1, 1, half[i]) if random else small_nearest(y, 1, 1)
        code[i] = U8(c | U32(U32(u[i] >> U32(28)) & U32(8)))


@jit
def level_codes(odd, levels, x, up, by, half, code):
    """Round values to level indices of Quantize with random bits. The factor ``by`` is 0 in rows of zeros."""
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
def affine_codes(bits, x, up, by, middle, half, code):
    """Round values to indices of levels around ``middle``. The factor ``by`` is 0 in rows of equal values."""
    n = F32((1 << bits) - 1)
    half_n = F32(n * F32(0.5))
    for i in range(len(x)):
        p = F32(F32(over(F32(x[i] - middle[i]), up[i], by[i]) + F32(1)) * half_n)
        c = U8(place(p if p < n else n, half[i]))
        code[i] = c if by[i] > F32(0) else U8(0)


@jit
def _ternary_part(a, up, by):
    """Return 2^32 |x| / scale in two halves: the upper 16 bits as an integer, and the rest as float32."""
    q = over(float_of(a), up, by)
    q = q if q < F32(65536) else F32(65536)
    high = min(I32(q), I32(65535))
    return high, F32(F32(q - F32(high)) * F32(65536))


@jit
def ternary_codes(x, scale, half, code):
    """Convert values to codes: 0 for zero, 1 for scale, 2 for -scale, and TIE where 16 random bits do not decide."""
    up, by = over_of(scale, F32(65536))
    u, top = x.view(U32), bits_of(scale)
    for i in range(len(u)):
        a = min(U32(u[i] & ABS), top)
        high, _ = _ternary_part(a, up, by)
        h = I32(half[i])
        kept = U8(U32(U32(1) + U32(u[i] >> U32(31))))
        code[i] = kept if h < high or a == top else U8(TIE) if h == high else U8(0)


@jit
def resolve_ties(keys, first, x, scale, code):
    """Replace TIE codes: 16 more random bits decide between zero and the scale."""
    if largest(code) < TIE:
        return
    up, by = over_of(scale, F32(65536))
    u = x.view(U32)
    for i in range(len(code)):
        if code[i] == TIE:
            _, low = _ternary_part(U32(u[i] & ABS), up, by)
            kept = I32(random_word(keys, first + i, 1)) < I32(low)
            code[i] = U8(1 + I64(u[i] >> U32(31))) if kept else U8(0)


@jit
def largest_code(job):
    """Return the largest code that the codec of a job writes."""
    if job.codec == TERNARY:
        return 2
    if job.codec == QUANTIZE:
        return 2 * ((1 << (job.bits - 1)) - 1) if job.variant == ODD else (1 << job.bits) - 1
    return 255


@jit
def _sign_values(code, above, below, y):
    """Dequantize codes of Sign: 1 gives ``above``, 0 gives ``below``."""
    for i in range(len(y)):
        y[i] = above[i] if code[i] else below[i]


@jit
def _float8_values(variant, code, scale, y):
    """Dequantize codes of Float8 into ``y``."""
    mbits, bias, last = (2, 15, 0x7B) if is_e5m2(variant) else (3, 7, 0x7E)
    u = y.view(U32)
    for i in range(len(u)):
        c = U32(code[i] & U8(0x7F))
        v = min(bits_of(F32(small_value(c, mbits, bias) / scale[i])), MAX)
        u[i] = U32((NAN if c > last else v) | U32(U32(code[i] & U8(0x80)) << U32(24)))


@jit
def _scaled(ratio, scale):
    """Return the bits of ``ratio * scale``, clipped to the largest finite number."""
    u = bits_of(F32(ratio * scale))
    return U32(U32(u & ~ABS) | min(U32(u & ABS), MAX))


@jit
def _other_values(job, code, scale, y):
    """Dequantize codes of Ternary, Float4 and Quantize (without zero points) into ``y``."""
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
        odd = job.variant == ODD
        levels = (1 << (job.bits - 1)) - 1 if odd else (1 << job.bits) - 1
        n, each = F32(levels), I32(1 if odd else 2)
        for i in range(len(u)):
            level = I32(I32(I32(code[i]) * each) - I32(levels))
            u[i] = _scaled(F32(F32(level) / n), scale[i]) if scale[i] > F32(0) else U32(0)


@jit
def _affine_values(bits, code, half, middle, y):
    """Dequantize codes of Quantize with zero points into ``y``."""
    u, levels = y.view(U32), I32((1 << bits) - 1)
    for i in range(len(u)):
        ratio = F32(F32(I32(I32(I32(code[i]) * I32(2)) - levels)) / F32(levels))
        v = bits_of(F32(middle[i] + F32(half[i] * ratio)))
        u[i] = U32(U32(v & ~ABS) | min(U32(v & ABS), MAX))


@jit
def values(job, work, part, unscaled, code, y):
    """Dequantize the codes of a run into ``y`` with the row scales in ``work``, or with scale 1 if ``unscaled``."""
    row, n = I64(part.group_size), len(y)
    scale, other = work.scale[:n], work.other[:n]
    if row == 0:
        work.row_scale[0] = F32(1) if unscaled else part.scale
        work.row_other[0] = part.scale_below if job.variant == TWO_MEAN else part.scale
    spread(work.row_scale, row, scale)
    if job.codec == SIGN:
        spread(work.row_other, row, other)
        for k in range(n):
            other[k] = F32(-other[k]) if other[k] > F32(0) else F32(0)
        _sign_values(code, scale, other, y)
    elif job.codec == FLOAT8:
        _float8_values(job.variant, code, scale, y)
    elif is_affine(job):
        spread(work.row_middle, row, other)
        _affine_values(job.bits, code, scale, other, y)
    else:
        _other_values(job, code, scale, y)
