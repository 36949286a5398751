/*
 * bits.h - functions on single words: bit positions, mixing, rounded quotients. C, C++ and NVRTC.
 *
 * Every function maps words to words and accesses no memory. Each engine (C, CUDA, Numba) has its own loops over
 * tensors.
 */
#ifndef CODEC_BITS_H
#define CODEC_BITS_H

#ifdef __CUDACC_RTC__
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#else
#include <stdint.h>
#endif

/* BITS_LARGE_FN: functions too large to inline at every call. */
#if defined(BITS_FN) /* set by builds that export the functions */
#define BITS_LARGE_FN BITS_FN
#elif defined(__CUDACC__)
#define BITS_FN static __host__ __device__ __forceinline__
#define BITS_LARGE_FN static inline __host__ __device__
#else
#define BITS_FN static inline
#define BITS_LARGE_FN static inline
#endif

/*
 * Lower a float's pattern p (the 15 bits below its sign) by an offset < WIRE_CIRCLE(zero). Patterns of at least `zero`
 * wrap around, from `zero` to the largest pattern; smaller patterns are unchanged. bits_raise is the inverse. Offset 0
 * changes nothing.
 */
BITS_FN uint16_t bits_lower(uint16_t p, uint16_t offset, uint16_t zero)
{
	uint16_t d = (uint16_t)(p - zero - offset), moves = (uint16_t)-(p >= zero);
	uint16_t u = (uint16_t)((d & 0x7fff) + (zero & (uint16_t)((d >> 15) - 1)));

	return p ^ ((p ^ u) & moves); /* branch-free, so that compilers vectorize loops */
}

BITS_FN uint16_t bits_raise(uint16_t u, uint16_t offset, uint16_t zero)
{
	uint16_t s = (uint16_t)(u + offset), moves = (uint16_t)-(u >= zero);
	uint16_t p = (uint16_t)((s & 0x7fff) + (zero & (uint16_t)-(s >> 15)));

	return u ^ ((u ^ p) & moves);
}

/*
 * Rearrange x, the upper 16 bits of a float, into plane 0 (high byte) and plane 1 (low byte). Patterns (the 15 bits
 * below the sign) of at least 1 << s are lowered by `offset` first. The result has, from the top: bits s + 7 to s of
 * the pattern (plane 0), the bits above them, the sign, and the bits below them. bits_unturn is the inverse.
 */
BITS_FN uint16_t bits_turn(uint16_t x, uint16_t offset, int s)
{
	uint16_t u = bits_lower(x & 0x7fff, offset, (uint16_t)(1 << s));

	return (uint16_t)((u >> s & 0xff) << 8 | u >> (s + 8) << (s + 1) | x >> 15 << s | (u & ((1 << s) - 1)));
}

BITS_FN uint16_t bits_unturn(uint16_t y, uint16_t offset, int s)
{
	uint16_t u = (uint16_t)(y >> 8 << s | (y & 0xff) >> (s + 1) << (s + 8) | (y & ((1 << s) - 1)));

	return (uint16_t)((y >> s & 1) << 15 | bits_raise(u, offset, (uint16_t)(1 << s)));
}

/*
 * Return the symbol of a byte in a coded plane with `raw` bits per value outside of symbols (WIRE_RAW_BITS): the low
 * nibble (4); the byte without its highest bit (1), and without its lowest bit, too (2). bits_raw: return the other
 * bits of the byte. bits_with_raw: the inverse of both.
 */
BITS_FN uint8_t bits_symbol(uint8_t x, int raw)
{
	return (uint8_t)(x >> (raw == 2) & 255 >> raw);
}

BITS_FN uint8_t bits_raw(uint8_t x, int raw)
{
	return (uint8_t)(raw == 4 ? x >> 4 : (x >> 7 | x << 1) & ((1 << raw) - 1));
}

BITS_FN uint8_t bits_with_raw(uint8_t symbol, uint8_t bits, int raw)
{
	return (uint8_t)(raw == 4 ? symbol | bits << 4 : symbol << (raw == 2) | bits >> 1 | bits << 7);
}

/* Lower an exponent for TRUNCATE: rotate 1..last by `by` < last; 0 is unchanged. bits_raise_exponent is the inverse. */
BITS_FN uint8_t bits_lower_exponent(uint8_t e, uint8_t by, uint8_t last)
{
	uint8_t a = (uint8_t)(e - 1), d = (uint8_t)(a - by);

	d = (uint8_t)(d + (last & -(a < by)) + 1);
	return (uint8_t)(d & -(e != 0));
}

BITS_FN uint8_t bits_raise_exponent(uint8_t u, uint8_t by, uint8_t last)
{
	return bits_lower_exponent(u, (uint8_t)(last - by), last);
}

/*
 * Extract the field of a pattern: sign and mantissa, right-justified, mbits + 1 bits. bits_pattern is the inverse; it
 * returns +0 if e is 0.
 */
BITS_FN uint32_t bits_field(uint32_t x, int mbits, int sign)
{
	return (x & ((1u << mbits) - 1)) | x >> sign << mbits;
}

BITS_FN uint32_t bits_pattern(uint32_t f, uint8_t e, int mbits, int sign)
{
	uint32_t y = (f & ((1u << mbits) - 1)) | (uint32_t)e << mbits | f >> mbits << sign;

	return y & -(uint32_t)(e != 0);
}

/*
 * TRUNCATE: combine a lowered exponent and its level (0..3) into one number; 0 if the exponent is 0. bits_pair_symbol
 * returns the number's symbol, or 0 if the exponent is 0 or too far from `base`. In the latter case the number must be
 * escaped.
 */
BITS_FN uint16_t bits_pair(uint8_t e, uint8_t level)
{
	return (uint16_t)((e << 2 | level) & -(e != 0));
}

BITS_FN uint16_t bits_pair_symbol(uint16_t pair, int base)
{
	uint16_t t = (uint16_t)(pair - 4 * base);

	return (uint16_t)(t & -(t >= 4 && t < 256 && pair != 0));
}

BITS_FN uint16_t bits_symbol_pair(uint8_t symbol, int base)
{
	return (uint16_t)(symbol ? symbol + 4 * base : 0);
}

/* Pack eight codes of `bits` bits, one per byte of x, contiguously into the low bits. bits_spread is the inverse. */
BITS_FN uint64_t bits_squeeze(uint64_t x, int bits)
{
	int gap = 8 - bits;

	x = (x & 0x00ff00ff00ff00ffull) | (x & 0xff00ff00ff00ff00ull) >> gap;
	x = (x & 0x0000ffff0000ffffull) | (x & 0xffff0000ffff0000ull) >> 2 * gap;
	return (x & 0x00000000ffffffffull) | (x & 0xffffffff00000000ull) >> 4 * gap;
}

BITS_FN uint64_t bits_spread(uint64_t x, int bits)
{
	uint64_t b1 = (1ull << bits) - 1, b2 = (1ull << 2 * bits) - 1, b4 = (1ull << 4 * bits) - 1;

	x = (x & b4) | (x >> 4 * bits & b4) << 32;
	x = (x & (b2 | b2 << 32)) | (x >> 2 * bits & (b2 | b2 << 32)) << 16;
	b1 |= b1 << 32;
	b1 |= b1 << 16;
	return (x & b1) | (x >> bits & b1) << 8;
}

/*
 * Pack five codes 0..2 into a byte, the first most significant. bits_third returns b / 3 for b < 512, to unpack them.
 */
BITS_FN uint8_t bits_trits(uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t e)
{
	return (uint8_t)(81 * a + 27 * b + 9 * c + 3 * d + e);
}

BITS_FN uint32_t bits_third(uint32_t b)
{
	return b * 171 >> 9;
}

/* splitmix64's finalizer: a bijection of 64-bit words. */
BITS_FN uint64_t bits_mix64(uint64_t x)
{
	x ^= x >> 30;
	x *= 0xbf58476d1ce4e5b9ull;
	x ^= x >> 27;
	x *= 0x94d049bb133111ebull;
	return x ^ x >> 31;
}

/* MurmurHash3's 32-bit finalizer. */
BITS_FN uint32_t bits_mix32(uint32_t x)
{
	x ^= x >> 16;
	x *= 0x85ebca6bu;
	x ^= x >> 13;
	x *= 0xc2b2ae35u;
	return x ^ x >> 16;
}

/* Return sum / n, rounded to nearest, halves up. n > 0; sum may be negative. */
BITS_FN int bits_mean(long long sum, long long n)
{
	long long t = 2 * sum + n, d = 2 * n, q = t / d;

	return (int)(q - (t % d < 0));
}

#endif
