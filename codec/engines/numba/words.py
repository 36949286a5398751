# pyright: basic
"""Bit manipulation and rounding of single words, as in `native/src/exact/bits.h` and `round.h`.

Arguments are unsigned words of a fixed width. Numba widens sums to 64 bits, so each step is converted back, which also
lets LLVM vectorize loops with narrow lanes. Float operations are float32, and each is rounded once.
"""

import numpy as np

from codec.engines.numba.jit import jit

I16, I32, I64 = np.int16, np.int32, np.int64
U8, U16, U32, U64, F32 = np.uint8, np.uint16, np.uint32, np.uint64, np.float32

ABS, INF, MAX, NAN = U32(0x7FFFFFFF), U32(0x7F800000), U32(0x7F7FFFFF), U32(0x7FC00000)


@jit
def bits_of(x):
    """Return the bits of a float32."""
    return F32(x).view(U32)


@jit
def float_of(u):
    """Return the float32 that has bits ``u``."""
    return U32(u).view(F32)


@jit
def lower(p, offset, zero):
    """Subtract an offset from a bit pattern, cyclically (format.md, section 5.2); patterns below ``zero`` stay."""
    d = U16(p - zero - offset)
    u = U16((d & U16(0x7FFF)) + (zero if d < U16(0x8000) else U16(0)))
    return u if p >= zero else p


@jit
def raise_(u, offset, zero):
    """Return the bit pattern that :func:`lower` maps to ``u``: the inverse function."""
    s = U16(u + offset)
    p = U16((s & U16(0x7FFF)) + (zero if s >= U16(0x8000) else U16(0)))
    return p if u >= zero else u


@jit
def turn(x, offset, s):
    """Lower the upper 16 bits of a float, and return its bytes in planes 0 and 1 (format.md, section 3)."""
    u = lower(U16(x & U16(0x7FFF)), offset, U16(1 << s))
    top = U16(U16(U16(u >> U16(s)) & U16(0xFF)) << U16(8))
    above = U16(U16(u >> U16(s + 8)) << U16(s + 1))
    sign = U16(U16(x >> U16(15)) << U16(s))
    return U16(top | above | sign | U16(u & U16((1 << s) - 1)))


@jit
def unturn(y, offset, s):
    """Convert a float's bytes in planes 0 and 1 to its upper 16 bits: the inverse of :func:`turn`."""
    above = U16(U16(U16(y & U16(0xFF)) >> U16(s + 1)) << U16(s + 8))
    u = U16(U16(U16(y >> U16(8)) << U16(s)) | above | U16(y & U16((1 << s) - 1)))
    sign = U16(U16(U16(y >> U16(s)) & U16(1)) << U16(15))
    return U16(sign | raise_(u, offset, U16(1 << s)))


@jit
def from_bfloat16(h):
    """Convert the bits of a bfloat16 to those of a float32."""
    return U32(U32(h) << U32(16))


@jit
def from_float16(h):
    """Convert the bits of a float16 to those of a float32; NaN becomes quiet."""
    a, sign = U32(h) & U32(0x7FFF), U32(U32(U32(h) & U32(0x8000)) << U32(16))
    wide = U32(U32(a) << U32(13))
    normal = U32(wide + U32(112 << 23))
    # subnormal: put its bits into the mantissa of 2^-14, and subtract 2^-14
    small = bits_of(F32(float_of(U32(wide + U32(113 << 23))) - F32(2.0**-14)))
    special = U32(wide | INF) | (U32(1 << 22) if a > U32(0x7C00) else U32(0))
    u = small if a < U32(0x400) else normal if a < U32(0x7C00) else special
    return U32(sign | u)


@jit
def to_bfloat16(u):
    """Round float32 bits to the nearest bfloat16, ties to even, clipped to the largest number; NaN becomes quiet."""
    a = U32(u & ABS)
    up = U32(U32(a + U32(0x7FFF) + (U32(a >> U32(16)) & U32(1))) >> U32(16))
    up = min(up, U32(0x7F7F))
    return U16(U16(U32(u >> U32(16)) & U32(0x8000)) | U16(U32(0x7FC0) if a > INF else up))


@jit
def to_float16(u):
    """Round float32 bits to the nearest float16, ties to even, clipped to the largest number; NaN becomes quiet."""
    a = U32(u & ABS)
    normal = U32(U32(U32(a + U32(0xFFF) + (U32(a >> U32(13)) & U32(1))) >> U32(13)) - U32(112 << 10))
    # float16 values below 2^-14 are multiples of 2^-24. Adding 1/2 in float32 rounds to such a multiple.
    small = U32(bits_of(F32(float_of(a) + F32(0.5))) - U32(0x3F000000))
    finite = min(small if a < U32(113 << 23) else normal, U32(0x7BFF))
    return U16(U16(U32(u >> U32(16)) & U32(0x8000)) | U16(U32(0x7E00) if a > INF else finite))


@jit
def plus(x, e):
    """Return the sum of a value and its residual; NaN becomes the canonical quiet NaN."""
    total = F32(x + e)
    return float_of(NAN) if np.isnan(total) else total


@jit
def minus(x, y):
    """Return the residual x - y; 0 if x is NaN or Inf, which error feedback must not carry on."""
    residual = F32(x - y)
    return residual if U32(bits_of(x) & ABS) < INF else F32(0)


@jit
def copy(to, values):
    """Copy all of ``values`` to the beginning of ``to``."""
    for i in range(len(values)):
        to[i] = values[i]


@jit
def small_nearest(y, mbits, bias):
    """Round ``y`` to the nearest small float of ``mbits`` mantissa bits, ties to even (encoder, 7.4).

    ``y`` holds the bits of a positive float32 that is at most the largest small float.
    """
    shift = U32(23 - mbits)
    normal = U32(y + U32((1 << (22 - mbits)) - 1) + (U32(y >> shift) & U32(1)))
    normal = U32(U32(normal >> shift) - U32((127 - bias) << mbits))
    # Subnormal results: add a power of two whose last mantissa bit equals one step, so that the sum is rounded to a
    # multiple of the step.
    step = U32((127 + 23 + 1 - bias - mbits) << 23)
    small = U32(bits_of(F32(float_of(y) + float_of(step))) - step)
    return small if y < U32((128 - bias) << 23) else normal


@jit
def small_stochastic(y, mbits, bias, h):
    """Round ``y`` stochastically to one of the two neighbouring small floats, with 16 random bits ``h``."""
    shift, align = U32(23 - mbits), U32(7 - mbits)
    normal = U32(U32(y + U32(U32(h) << align) + U32((1 << (7 - mbits)) >> 1)) >> shift)
    normal = U32(normal - U32((127 - bias) << mbits))
    is_small = y < U32((128 - bias) << 23)
    steps = F32(float_of(y) * float_of(U32((127 + 17 + bias + mbits - 1) << 23)))
    small = U32(U32(U32(I32(steps if is_small else F32(0))) + U32(U32(h) << U32(1)) + U32(1)) >> U32(17))
    return small if is_small else normal


@jit
def small_value(code, mbits, bias):
    """Return the value of a small float's code without sign, as float32."""
    # if a subnormal code is decoded as a normal one, the result x is too large: the value is 2 x - (smallest normal)
    normal = float_of(U32(U32(U32(code) << U32(23 - mbits)) + U32((127 - bias) << 23)))
    small = F32(F32(normal + normal) - float_of(U32((128 - bias) << 23)))
    return small if small < normal else normal


@jit
def place(x, h):
    """Clip ``x`` to 0..255, and round it stochastically to a neighbouring integer, with 16 random bits ``h``."""
    x = x if x > F32(0) else F32(0)
    x = x if x < F32(255) else F32(255)
    return I32(I32(I32(F32(x * F32(131072))) + I32(I32(h) * I32(2)) + I32(1)) >> I32(17))


@jit
def over_of(scale, n):
    """Return two factors whose product is n / scale. If the scale is tiny, a first factor of 2^64 avoids overflow."""
    up = F32(2.0**64) if scale < F32(2.0**-60) else F32(1)
    return up, F32(F32(n) / F32(scale * up))


@jit
def over(x, up, by):
    """Return ``x`` times the factors ``up`` and ``by`` of :func:`over_of`, that is, n x / scale."""
    return F32(F32(x * up) * by)
