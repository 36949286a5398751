/*
 * round.h - functions of lossy codecs on single words: random bits, conversions and rounding. C, C++ and NVRTC.
 *
 * Arguments are finite unless the function's comment says otherwise.
 *
 * One file: all floating-point operations of the core are here.
 */
#ifndef CODEC_ROUND_H
#define CODEC_ROUND_H

#include "bits.h"

#if defined(__FAST_MATH__) || (defined(__i386__) && !defined(__SSE2_MATH__))
#error "numbers would depend on the build: without -ffast-math, on 32-bit x86 with -msse2 -mfpmath=sse"
#endif

/*
 * Floating-point operations. No other code in the headers of exact/ adds, multiplies, divides or converts floats. A
 * build that neither fuses operations nor flushes subnormals to zero gives bit-identical results everywhere.
 */
BITS_FN float round_add(float a, float b)
{
	return a + b;
}

BITS_FN float round_sub(float a, float b)
{
	return a - b;
}

BITS_FN float round_mul(float a, float b)
{
	return a * b;
}

BITS_FN float round_div(float a, float b)
{
	return a / b;
}

/* Round toward zero; x must fit an int. */
BITS_FN int round_to_int(float x)
{
	return (int)x;
}

BITS_FN double round_add64(double a, double b)
{
	return a + b;
}

BITS_FN double round_sub64(double a, double b)
{
	return a - b;
}

BITS_FN double round_mul64(double a, double b)
{
	return a * b;
}

BITS_FN double round_div64(double a, double b)
{
	return a / b;
}

BITS_FN float round_to_float(double x)
{
	return (float)x;
}

#ifdef __CUDACC__
BITS_FN float round_sqrt(float x)
{
	return __fsqrt_rn(x);
}

BITS_FN double round_sqrt64(double x)
{
	return __dsqrt_rn(x);
}
#else
BITS_FN float round_sqrt(float x)
{
	return __builtin_sqrtf(x);
}

BITS_FN double round_sqrt64(double x)
{
	return __builtin_sqrt(x);
}
#endif

#define ROUND_INF 0x7f800000u
#define ROUND_ABS 0x7fffffffu
#define ROUND_MAX 0x7f7fffffu /* largest finite float32 */

BITS_FN uint32_t round_bits(float x)
{
	union {
		float f;
		uint32_t u;
	} c = {x};

	return c.u;
}

BITS_FN float round_float(uint32_t u)
{
	union {
		uint32_t u;
		float f;
	} c = {u};

	return c.f;
}

/* Add residual e to x. If the sum is NaN, its bits are 0x7fc00000, whatever the operands are. */
BITS_FN float round_plus(float x, float e)
{
	float sum = round_add(x, e);

	return sum != sum ? round_float(0x7fc00000u) : sum;
}

/* Return the residual x - y; 0 if x is NaN or Inf, which error feedback must not accumulate. */
BITS_FN float round_minus(float x, float y)
{
	float lost = round_sub(x, y);

	return (round_bits(x) & ROUND_ABS) < ROUND_INF ? lost : 0.0f;
}

/* Accumulate a frame's value y: out + weight * y. round_larger: the larger of out and y, or NaN if either is NaN. */
BITS_FN float round_weighted(float out, float weight, float y)
{
	return round_add(out, round_mul(weight, y));
}

BITS_FN float round_larger(float out, float y)
{
	return out < y || y != y ? y : out;
}

/*
 * Philox4x32-10 (Salmon et al., SC 2011). Element i of a tensor uses the 16-bit number i % 8 of the Philox block with
 * counter (i / 8, word) and key (seed, stream). The counter's `word`, 0 or 1, selects one of two independent random
 * numbers per element.
 */
#define PHILOX_M0 0xd2511f53u
#define PHILOX_M1 0xcd9e8d57u
#define PHILOX_W0 0x9e3779b9u
#define PHILOX_W1 0xbb67ae85u
#define PHILOX_ROUNDS 10

struct philox {
	uint32_t seed, stream, stream_high;
};

BITS_FN void philox_block(struct philox key, uint64_t block, uint32_t word, uint32_t out[4])
{
	uint32_t c[4] = {(uint32_t)block, (uint32_t)(block >> 32), word, key.stream_high};
	uint32_t k0 = key.seed, k1 = key.stream;

	for (int r = 0; r < PHILOX_ROUNDS; r++) {
		uint64_t a = (uint64_t)PHILOX_M0 * c[0], b = (uint64_t)PHILOX_M1 * c[2];

		c[0] = (uint32_t)(b >> 32) ^ c[1] ^ k0;
		c[2] = (uint32_t)(a >> 32) ^ c[3] ^ k1;
		c[1] = (uint32_t)b;
		c[3] = (uint32_t)a;
		k0 += PHILOX_W0;
		k1 += PHILOX_W1;
	}
	for (int i = 0; i < 4; i++)
		out[i] = c[i];
}

BITS_FN uint16_t philox_half(struct philox key, uint64_t i, uint32_t word)
{
	uint32_t out[4];

	philox_block(key, i >> 3, word, out);
	return (uint16_t)(out[i >> 1 & 3] >> 16 * (i & 1));
}

/* Convert bfloat16 or float16 bits to float32 exactly. NaNs of float16 become quiet, as in CPUs' conversions. */
BITS_FN uint32_t round_from_bfloat16(uint16_t x)
{
	return (uint32_t)x << 16;
}

BITS_FN uint32_t round_from_float16(uint16_t x)
{
	uint32_t a = x & 0x7fffu, sign = (uint32_t)(x & 0x8000) << 16;
	uint32_t normal = (a << 13) + (112u << 23);
	/* float16 subnormal: 2^-14 plus its fraction, minus 2^-14 */
	uint32_t small = round_bits(round_sub(round_float((a << 13) + (113u << 23)), 0x1p-14f));
	uint32_t special = (a << 13) | ROUND_INF | (uint32_t)(a > 0x7c00) << 22;

	return sign | (a < 0x400 ? small : a < 0x7c00 ? normal : special);
}

/*
 * Convert float32 to bfloat16 or float16: to nearest even, clamped to the largest finite value. NaN becomes the quiet
 * NaN of its sign.
 */
BITS_FN uint16_t round_to_bfloat16(uint32_t x)
{
	uint32_t a = x & ROUND_ABS, up = (a + 0x7fff + (a >> 16 & 1)) >> 16;

	up = up > 0x7f7f ? 0x7f7f : up;
	return (uint16_t)((x >> 16 & 0x8000) | (a > ROUND_INF ? 0x7fc0 : up));
}

BITS_FN uint16_t round_to_float16(uint32_t x)
{
	uint32_t a = x & ROUND_ABS, sign = x >> 16 & 0x8000;
	uint32_t normal = ((a + 0xfff + (a >> 13 & 1)) >> 13) - (112u << 10);
	/* below 2^-14, float16's last bit is 2^-24, as is the last bit of 1/2 + x in float32 */
	uint32_t small = round_bits(round_add(round_float(a), 0.5f)) - round_bits(0.5f),
		 is_small = 0 - (a < 113u << 23);
	uint32_t finite =
		(small & is_small) | (normal & ~is_small); /* branch-free: a conditional would prevent vectorization */

	finite = finite > 0x7bff ? 0x7bff : finite;
	return (uint16_t)(sign | (a > ROUND_INF ? 0x7e00 : finite));
}

/*
 * Round to a small float with `mbits` mantissa bits and the given bias: e4m3fn 3 and 7, e5m2 2 and 15, e2m1 1 and 1. y
 * is at most the largest value of that type. Stochastic rounding: h has 16 random bits. The result is one of y's two
 * neighbours, and its expected value differs from y by at most 2^-17 of the distance between the neighbours.
 */
BITS_FN uint32_t round_small_nearest(uint32_t y, uint32_t mbits, uint32_t bias)
{
	uint32_t a = y & ROUND_ABS, shift = 23 - mbits;
	uint32_t normal = ((a + (1u << (shift - 1)) - 1 + (a >> shift & 1)) >> shift) - ((127 - bias) << mbits);
	/* below the normal range: adding a power of two whose last mantissa bit is one step rounds y to steps */
	uint32_t step = (127 + 23 + 1 - bias - mbits) << 23;
	uint32_t small = round_bits(round_add(round_float(a), round_float(step))) - step;

	return a < (128 - bias) << 23 ? small : normal;
}

BITS_FN uint32_t round_small_stochastic(uint32_t y, uint32_t mbits, uint32_t bias, uint32_t h)
{
	uint32_t a = y & ROUND_ABS, shift = 23 - mbits, lost = shift - 16;
	uint32_t normal = ((a + (h << lost) + (1u << lost >> 1)) >> shift) - ((127 - bias) << mbits);
	float steps = round_mul(round_float(a), round_float((127 + 17 + bias + mbits - 1) << 23));
	uint32_t is_small = a < (128 - bias) << 23;
	uint32_t small = ((uint32_t)round_to_int(is_small ? steps : 0.0f) + 2 * h + 1) >> 17;

	return is_small ? small : normal;
}

/*
 * Convert a code of at most 7 bits, without sign, to float32 bits. A subnormal code read as a normal number x is too
 * large; its true value is 2x - (smallest normal number). For a normal code, 2x - (smallest normal number) is at least
 * x, so the minimum of both is right for every code.
 */
BITS_FN uint32_t round_small_value(uint32_t code, uint32_t mbits, uint32_t bias)
{
	float normal = round_float((code << (23 - mbits)) + ((127 - bias) << 23));
	float small = round_sub(round_add(normal, normal), round_float((128 - bias) << 23));

	return round_bits(small < normal ? small : normal);
}

/* Round to nearest, or stochastically with 16 random bits. `random` is a compile-time constant in each caller. */
BITS_FN uint32_t round_small(uint32_t y, uint32_t mbits, uint32_t bias, int random, uint32_t h)
{
	return random ? round_small_stochastic(y, mbits, bias, h) : round_small_nearest(y, mbits, bias);
}

#define FLOAT8_NAN 0x7fu

/*
 * FLOAT8: return the code of x * scale. x may be NaN or Inf. `most`: bits of the largest finite value of the code's
 * format. round_float8_value decodes it.
 */
BITS_FN uint8_t round_float8_code(uint32_t x, float scale, float most, uint32_t mbits, uint32_t bias, int random,
				  uint32_t h)
{
	uint32_t a = x & ROUND_ABS, y = round_bits(round_mul(round_float(a), scale)), top = round_bits(most);
	uint32_t c = round_small(y < top ? y : top, mbits, bias, random, h);

	return (uint8_t)((a < ROUND_INF ? c : FLOAT8_NAN) | (x >> 24 & 0x80));
}

BITS_FN float round_float8_value(uint32_t code, float scale, uint32_t mbits, uint32_t bias, uint32_t last)
{
	uint32_t c = code & 0x7f, v = round_bits(round_div(round_float(round_small_value(c, mbits, bias)), scale));

	v = v < ROUND_MAX ? v : ROUND_MAX;
	v = c > last ? 0x7fc00000u : v;
	return round_float(v | (code & 0x80) << 24);
}

/* FLOAT4: return the code of x divided by a scale, with the sign at bit 3; the code of 0 if the scale is 0. */
BITS_FN uint8_t round_float4_code(uint32_t x, float scale, int random, uint32_t h)
{
	uint32_t y = round_bits(round_div(round_float(x & ROUND_ABS), scale > 0 ? scale : round_float(ROUND_INF)));

	y = y < 0x40c00000u ? y : 0x40c00000u; /* 6.0f, the largest magnitude */
	return (uint8_t)(round_small(y, 1, 1, random, h) | (x >> 28 & 8));
}

/* FLOAT4: return the dequantized value of a code before scaling. */
BITS_FN float round_float4_ratio(uint32_t code)
{
	return round_float(round_small_value(code & 7, 1, 1) | (code & 8) << 28);
}

/* Return ratio * scale, clamped to the largest finite value with the product's sign. */
BITS_FN float round_scaled(float ratio, float scale)
{
	uint32_t u = round_bits(round_mul(ratio, scale)), a = u & ROUND_ABS;

	return round_float((u & ~ROUND_ABS) | (a < ROUND_MAX ? a : ROUND_MAX));
}

/*
 * SIGN: return the dequantized value of a set sign bit: -scale; but 0 if the scale is 0, when all values were +0 or -0.
 */
BITS_FN float round_sign_below(float scale)
{
	return scale > 0 ? -scale : 0.0f;
}

/*
 * Factors to compute x / scale * n as (x * up) * by, because a division is many times slower. n is a power of two, so
 * that |x| <= scale gives at most n under any rounding. `up` keeps `by` finite.
 */
struct over {
	float up, by;
};

BITS_FN struct over round_over(float scale, float n)
{
	float up = scale < 0x1p-60f ? 0x1p64f : 1.0f;
	struct over o = {up, round_div(n, round_mul(scale, up))};

	return o;
}

BITS_FN float round_over_times(float x, struct over o)
{
	return round_mul(round_mul(x, o.up), o.by);
}

/*
 * QUANTIZE: return the position of x among the levels, before rounding. Even: position 0 is -amax, position n is amax.
 * Odd: the position of |x|; position 0 is 0, position n is amax.
 */
BITS_FN float round_even_place(float x, struct over amax, float n)
{
	return round_mul(round_add(round_over_times(x, amax), 1.0f), round_mul(n, 0.5f));
}

BITS_FN float round_odd_place(float ax, struct over amax, float n)
{
	return round_mul(round_over_times(ax, amax), n);
}

/*
 * Round a position in 0..255, stochastically, to one of its neighbours: floor((floor(2^16 place + 1/2) + h) / 2^16),
 * computed exactly; adding 1/2 in floating point would round. Positions outside 0..255, and NaN, occur only if another
 * thread changes the tensor; the result is then any number from 0 to 256.
 */
BITS_FN int round_place(float place, uint32_t h)
{
	place = place > 0.0f ? place : 0.0f;
	place = place < 255.0f ? place : 255.0f;
	return (round_to_int(round_mul(place, 131072.0f)) + 2 * (int)h + 1) >> 17;
}

BITS_FN float round_level(int c, float n, float amax)
{
	return amax > 0 ? round_mul(amax, round_div((float)c, n)) : 0.0f;
}

/*
 * QUANTIZE: return the code of x; with an odd number of levels, codes have the sign bit above the magnitude. amax > 0;
 * in rows of zeros all codes are round_level_zero.
 */
BITS_FN uint8_t round_level_code(uint32_t x, int odd, int levels, struct over amax, uint32_t h)
{
	int c;

	if (!odd)
		return (uint8_t)round_place(round_even_place(round_float(x), amax, (float)levels), h);
	c = round_place(round_odd_place(round_float(x & ROUND_ABS), amax, (float)levels), h);
	return (uint8_t)(levels + (x >> 31 ? -c : c));
}

/*
 * QUANTIZE with zero points: half the distance between a row's smallest and largest value (half_range), and their
 * midpoint (middle). Neither overflows.
 */
BITS_FN float round_half_range(float low, float high)
{
	return round_sub(round_mul(high, 0.5f), round_mul(low, 0.5f));
}

BITS_FN float round_middle(float low, float half)
{
	return round_add(low, half);
}

/* Map the bits of a float to an integer that sorts like the float, -0 before +0, and back. */
BITS_FN int32_t round_ordered(uint32_t bits)
{
	return (int32_t)(bits ^ (uint32_t)((int32_t)bits >> 31) >> 1);
}

/*
 * QUANTIZE with zero points: return the code of x; half the row's range is > 0. Values outside the range get the code
 * of its nearer end.
 */
BITS_FN uint8_t round_affine_code(float x, int levels, float middle, struct over half, uint32_t h)
{
	float place = round_even_place(round_sub(x, middle), half, (float)levels);

	return (uint8_t)round_place(place < (float)levels ? place : (float)levels, h);
}

/*
 * QUANTIZE with zero points: return middle + ratio * half, clamped to the largest finite value. ratio: level in -1..1.
 */
BITS_FN float round_affine(float ratio, float half, float middle)
{
	float y = round_add(middle, round_mul(half, ratio)), most = round_float(ROUND_MAX);

	y = y < most ? y : most;
	return y > -most ? y : -most;
}

BITS_FN uint8_t round_level_zero(int odd, int levels)
{
	return (uint8_t)(odd ? levels : 0);
}

/* QUANTIZE: return the level of a code as an integer. The code's dequantized value is level * amax / levels. */
BITS_FN int round_level_of(uint32_t code, int odd, int levels)
{
	return odd ? (int)code - levels : 2 * (int)code - levels;
}

/*
 * GComp. Dropping k bits of a gradient value is harmless if the exponent of A exceeds the value's exponent by at least
 * k plus a guard. A is the part of the optimizer's step that does not depend on the gradient, divided by the gradient's
 * factor. Exponents are biased exponent fields; ea has float32's bias.
 */
BITS_FN uint8_t round_exponent(float a)
{
	uint32_t u = round_bits(a) & ROUND_ABS;

	return (uint8_t)(u > ROUND_INF ? 0 : u >> 23);
}

BITS_FN uint8_t round_minus8(uint8_t a, uint8_t b)
{
	uint8_t larger = a > b ? a : b;

	return (uint8_t)(larger - b);
}

BITS_FN uint8_t round_plus8(uint8_t a, uint8_t b)
{
	uint8_t most = (uint8_t)(255 - b), less = a < most ? a : most;

	return (uint8_t)(less + b);
}

/*
 * Return ea - e - guard, clamped to 0..255. `guard` is the header's guard + 127 - the dtype's bias. The function works
 * on bytes, of which a vector holds more: it computes ea - e and e - ea saturated at 0, so that one of the two is 0.
 */
BITS_FN uint8_t round_slack(uint8_t e, uint8_t ea, uint8_t last, short guard)
{
	uint8_t up = (uint8_t)(guard < 0 ? -guard : 0), down = (uint8_t)(guard > 0 ? guard : 0);
	uint8_t d = round_plus8(round_minus8(ea, e), up);

	d = round_minus8(round_minus8(d, round_minus8(e, ea)), down);
	d = ea == 255 ? 255 : d;
	d = ea == 0 ? 0 : d;
	return e == last ? 0 : d;
}

BITS_FN uint8_t round_drop_bits(uint8_t e, uint8_t ea, uint8_t last, short guard, uint8_t mbits)
{
	uint8_t d = round_slack(e, ea, last, guard);

	return d > mbits ? mbits : d;
}

BITS_FN uint8_t round_drop_level(uint8_t e, uint8_t ea, uint8_t last, short guard, uint8_t k1, uint8_t k2, uint8_t k3)
{
	uint8_t d = round_slack(e, ea, last, guard), k = d >= k1 ? k1 : 0;

	k = d >= k2 ? k2 : k;
	return d >= k3 ? k3 : k;
}

/*
 * Return the level, 0..3, that drops `drop` bits; k1 to k3 are the bits that levels 1 to 3 drop. round_drop_of_level is
 * the inverse.
 */
BITS_FN uint8_t round_level_of_drop(uint8_t drop, uint8_t k1, uint8_t k2, uint8_t k3)
{
	return (uint8_t)((drop >= k1) + (drop >= k2) + (drop >= k3));
}

BITS_FN uint8_t round_drop_of_level(uint8_t level, uint8_t k1, uint8_t k2, uint8_t k3)
{
	uint8_t k = level >= 1 ? k1 : 0;

	k = level >= 2 ? k2 : k;
	return level >= 3 ? k3 : k;
}

/* Clear the last k bits of pattern x, truncating or rounding to nearest; 0 if the exponent is 0. */
BITS_FN uint32_t round_truncate(uint32_t x, uint32_t k, uint32_t nearest, uint32_t mbits, uint32_t last)
{
	uint32_t mask = (1u << k) - 1, half = (1u << k >> 1) - 1 + (x >> k & 1);
	uint32_t up = (x + (nearest && k ? half : 0)) & ~mask, e = x >> mbits & last;

	up = (up >> mbits & last) == last ? x & ~mask : up; /* no finite value becomes Inf */
	return e ? up : 0;
}

/*
 * TernGrad: return |x| / s as a 32-bit fraction: the upper 16 bits as the result, the lower ones in *low. `over` is
 * round_over(s, 65536). x becomes s or -s if a first 16-bit random number is below the upper half, or equal to it and a
 * second number is below *low; else 0. If |x| = s, it never becomes 0.
 */
BITS_FN uint32_t round_ternary(float ax, struct over over, uint32_t *low)
{
	float q = round_over_times(ax, over), most = 65536.0f;
	int high;

	q = q < most ? q : most; /* has an effect only if another thread changes the tensor */
	high = round_to_int(q) < 65535 ? round_to_int(q) : 65535;

	*low = (uint32_t)round_to_int(round_mul(round_sub(q, (float)high), 65536.0f));
	return (uint32_t)high;
}

/* code of a value for which the first random number is a tie, so that the second one decides */
#define TERNARY_TIE 3

/*
 * TERNARY: return the code of x by the first random number h: 0 for 0, 1 for s, 2 for -s, or TERNARY_TIE. `top`: bits
 * of the scale s > 0; |x| may exceed s.
 */
BITS_FN uint8_t round_ternary_code(uint32_t x, uint32_t top, struct over over, uint32_t h)
{
	uint32_t a = x & ROUND_ABS, low, high;

	a = a < top ? a : top;
	high = round_ternary(round_float(a), over, &low);
	return (uint8_t)(h < high || a == top ? 1 + (x >> 31) : h == high ? TERNARY_TIE : 0);
}

/* Return the code of x for which round_ternary_code returned TERNARY_TIE, by the second random number h. */
BITS_FN uint8_t round_ternary_settled(uint32_t x, struct over over, uint32_t h)
{
	uint32_t low;

	round_ternary(round_float(x & ROUND_ABS), over, &low);
	return (uint8_t)(h < low ? 1 + (x >> 31) : 0);
}

/* TERNARY: return the dequantized value of a code before scaling: 0, 1 or -1. */
BITS_FN float round_ternary_ratio(uint32_t code)
{
	return code == 1 ? 1.0f : code == 2 ? -1.0f : 0.0f;
}

#endif
