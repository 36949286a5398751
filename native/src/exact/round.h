/* round.h - one-word functions of the lossy codecs: random words, conversions and their roundings. C, C++ and NVRTC.
 *
 * Arguments are finite unless it says otherwise. Each float operation rounds once, to nearest even: compile without
 * contraction, and run without flushing subnormals to zero.
 */
#ifndef CODEC_ROUND_H
#define CODEC_ROUND_H

#include "bits.h"

#define ROUND_INF 0x7f800000u
#define ROUND_ABS 0x7fffffffu
#define ROUND_MAX 0x7f7fffffu /* the largest number */

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

/* A value and what was lost of earlier ones. NaN is one, whichever of the two it comes from. */
BITS_FN float round_plus(float x, float e)
{
	float sum = x + e;

	return sum != sum ? round_float(0x7fc00000u) : sum;
}

/* What is lost of x where y is seen: nothing of NaN and Inf, or it would never be made up for. */
BITS_FN float round_minus(float x, float y)
{
	float lost = x - y;

	return (round_bits(x) & ROUND_ABS) < ROUND_INF ? lost : 0.0f;
}

/*
 * Philox4x32-10 (Salmon et al., SC 2011). Element i of a tensor uses half-word i % 8 of the block with counter
 * (i / 8, word), key (seed, stream): two draws (word 0 and 1) of 16 bits an element.
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

/* bfloat16 and float16 bits to float32, exactly (NaNs of float16 become quiet, as CPUs make them). */
BITS_FN uint32_t round_from_bfloat16(uint16_t x)
{
	return (uint32_t)x << 16;
}

BITS_FN uint32_t round_from_float16(uint16_t x)
{
	uint32_t a = x & 0x7fffu, sign = (uint32_t)(x & 0x8000) << 16;
	uint32_t normal = (a << 13) + (112u << 23);
	/* subnormal: as a fraction above 2^-14, which is then taken away */
	uint32_t small = round_bits(round_float((a << 13) + (113u << 23)) - 0x1p-14f);
	uint32_t special = (a << 13) | ROUND_INF | (uint32_t)(a > 0x7c00) << 22;

	return sign | (a < 0x400 ? small : a < 0x7c00 ? normal : special);
}

/* float32 to bfloat16 and float16, to nearest even, at most the largest number; NaN gives the quiet NaN of its sign. */
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
	/* below 2^-14 a number has as many bits as are left of 2^-24: those of a sum with 1/2 */
	uint32_t small = round_bits(round_float(a) + 0.5f) - round_bits(0.5f), is_small = 0 - (a < 113u << 23);
	uint32_t finite = (small & is_small) | (normal & ~is_small); /* a choice would keep loops from being vectors */

	finite = finite > 0x7bff ? 0x7bff : finite;
	return (uint16_t)(sign | (a > ROUND_INF ? 0x7e00 : finite));
}

/*
 * Small floats of `mbits` bits of mantissa and a bias: e4m3fn 3 and 7, e5m2 2 and 15, e2m1 1 and 1. y is at most
 * their largest value. h: 16 random bits; the result is then one of the neighbours, and on average y to 2^-17 of
 * their distance.
 */
BITS_FN uint32_t round_small_nearest(uint32_t y, uint32_t mbits, uint32_t bias)
{
	uint32_t a = y & ROUND_ABS, shift = 23 - mbits;
	uint32_t normal = ((a + (1u << (shift - 1)) - 1 + (a >> shift & 1)) >> shift) - ((127 - bias) << mbits);
	/* below the normal range: a sum with a power of two whose last bit is worth a step */
	uint32_t step = (127 + 23 + 1 - bias - mbits) << 23;
	uint32_t small = round_bits(round_float(a) + round_float(step)) - step;

	return a < (128 - bias) << 23 ? small : normal;
}

BITS_FN uint32_t round_small_stochastic(uint32_t y, uint32_t mbits, uint32_t bias, uint32_t h)
{
	uint32_t a = y & ROUND_ABS, shift = 23 - mbits, lost = shift - 16;
	uint32_t normal = ((a + (h << lost) + (1u << lost >> 1)) >> shift) - ((127 - bias) << mbits);
	float steps = round_float(a) * round_float((127 + 17 + bias + mbits - 1) << 23);
	uint32_t is_small = a < (128 - bias) << 23;
	uint32_t small = ((uint32_t)(int)(is_small ? steps : 0.0f) + 2 * h + 1) >> 17;

	return is_small ? small : normal;
}

/*
 * The inverse, without sign: code below 2^(7 or fewer) to float32 bits. Read as if all were normal, a subnormal number
 * is too large, and twice that less the smallest normal number is what it is; of normal ones that is more.
 */
BITS_FN uint32_t round_small_value(uint32_t code, uint32_t mbits, uint32_t bias)
{
	float normal = round_float((code << (23 - mbits)) + ((127 - bias) << 23));
	float small = normal + normal - round_float((128 - bias) << 23);

	return round_bits(small < normal ? small : normal);
}

#define FLOAT8_NAN 0x7fu

/*
 * x / scale * n by two products, since a division takes many times longer: (x * up) * by. n is a power of two, so that
 * |x| <= scale gives at most n, whatever the roundings; `up` keeps `by` finite.
 */
struct round_over {
	float up, by;
};

BITS_FN struct round_over round_over(float scale, float n)
{
	float up = scale < 0x1p-60f ? 0x1p64f : 1.0f;
	struct round_over o = {up, n / (scale * up)};

	return o;
}

/* x over a scale, as an index into levels 0..n from -amax to amax (even) or 0..n from 0 to amax (odd, of |x|). */
BITS_FN float round_even_place(float x, struct round_over amax, float n)
{
	return (x * amax.up * amax.by + 1.0f) * (n * 0.5f);
}

BITS_FN float round_odd_place(float ax, struct round_over amax, float n)
{
	return ax * amax.up * amax.by * n;
}

/*
 * A place in 0..255 to one of its neighbours: floor((floor(2^16 place + 1/2) + h) / 2^16), exactly; a sum with 1/2
 * would round. Others, NaN too, come from tensors that change while they are read, and give some number from 0 to 256.
 */
BITS_FN int round_place(float place, uint32_t h)
{
	place = place > 0.0f ? place : 0.0f;
	place = place < 255.0f ? place : 255.0f;
	return ((int)(place * 131072.0f) + 2 * (int)h + 1) >> 17;
}

BITS_FN float round_level(int c, float n, float amax)
{
	return amax * ((float)c / n);
}

/*
 * GComp. Dropping k bits of a gradient is harmless where the exponent of A, all that does not depend on the gradient in
 * (rest of the step) / (its part of the step), exceeds its own by k and a guard. Exponents are the patterns' fields; ea
 * is float32's.
 */
BITS_FN uint8_t round_exponent(float a)
{
	uint32_t u = round_bits(a) & ROUND_ABS;

	return (uint8_t)(u > ROUND_INF ? 0 : u >> 23);
}

#define ROUND_SLACK 1000

/* guard here is that of the spec + 127 - the dtype's bias. All fits 16 bits, so that loops become narrow vectors. */
BITS_FN short round_slack(uint8_t e, uint8_t ea, uint8_t last, short guard)
{
	short d = (short)(ea - e - guard);

	d = ea == 255 ? ROUND_SLACK : d;
	d = ea == 0 ? -ROUND_SLACK : d;
	return e == last ? -ROUND_SLACK : d;
}

BITS_FN uint8_t round_drop_bits(uint8_t e, uint8_t ea, uint8_t last, short guard, short mbits)
{
	short d = round_slack(e, ea, last, guard);

	d = d < 0 ? 0 : d;
	return (uint8_t)(d > mbits ? mbits : d);
}

BITS_FN uint8_t round_drop_level(uint8_t e, uint8_t ea, uint8_t last, short guard, short k1, short k2, short k3)
{
	short d = round_slack(e, ea, last, guard), k;

	k = d >= k1 ? k1 : 0;
	k = d >= k2 ? k2 : k;
	return (uint8_t)(d >= k3 ? k3 : k);
}

/* Pattern x without its last k bits; without a sign and mantissa where the exponent is 0. */
BITS_FN uint32_t round_truncate(uint32_t x, uint32_t k, uint32_t nearest, uint32_t mbits, uint32_t last)
{
	uint32_t mask = (1u << k) - 1, half = (1u << k >> 1) - 1 + (x >> k & 1);
	uint32_t up = (x + (nearest && k ? half : 0)) & ~mask, e = x >> mbits & last;

	up = (up >> mbits & last) == last ? x & ~mask : up; /* no finite value becomes Inf */
	return e ? up : 0;
}

/*
 * TernGrad: |x| / s as a fraction of 2^32, cut in two; `over` is round_over(s, 65536). A value is kept if the first
 * draw is below `high`, or equal to it and the second below `low`, and always if |x| = s.
 */
BITS_FN uint32_t round_ternary(float ax, struct round_over over, uint32_t *low)
{
	float q = ax * over.up * over.by, most = 65536.0f;
	int high;

	q = q < most ? q : most; /* of a tensor that changes while it is read, anything */
	high = (int)q < 65535 ? (int)q : 65535;

	*low = (uint32_t)(int)((q - (float)high) * 65536.0f);
	return (uint32_t)high;
}

#endif
