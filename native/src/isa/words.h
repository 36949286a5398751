/*
 * words.h - load and store words at any address: little-endian words of frames, words of tensors in native byte order.
 */
#ifndef CODEC_WORDS_H
#define CODEC_WORDS_H

#include <stdint.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
#define CODEC_BIG_ENDIAN 1
#else
#define CODEC_BIG_ENDIAN 0
#endif

static inline uint16_t load16(const void *p)
{
	const uint8_t *b = p;

	return (uint16_t)(b[0] | b[1] << 8);
}

static inline uint32_t load32(const void *p)
{
	uint32_t x;

	memcpy(&x, p, 4);
#if CODEC_BIG_ENDIAN
	x = __builtin_bswap32(x);
#endif
	return x;
}

static inline uint64_t load64(const void *p)
{
	uint64_t x;

	memcpy(&x, p, 8);
#if CODEC_BIG_ENDIAN
	x = __builtin_bswap64(x);
#endif
	return x;
}

static inline void store16(void *p, uint32_t x)
{
	uint8_t *b = p;

	b[0] = (uint8_t)x;
	b[1] = (uint8_t)(x >> 8);
}

static inline void store32(void *p, uint32_t x)
{
#if CODEC_BIG_ENDIAN
	x = __builtin_bswap32(x);
#endif
	memcpy(p, &x, 4);
}

static inline void store64(void *p, uint64_t x)
{
#if CODEC_BIG_ENDIAN
	x = __builtin_bswap64(x);
#endif
	memcpy(p, &x, 8);
}

/* Return word i of an array in this machine's byte order. */
static inline uint16_t native16(const void *p, size_t i)
{
	uint16_t x;

	memcpy(&x, (const char *)p + 2 * i, 2);
	return x;
}

static inline uint32_t native32(const void *p, size_t i)
{
	uint32_t x;

	memcpy(&x, (const char *)p + 4 * i, 4);
	return x;
}

static inline uint64_t native64(const void *p, size_t i)
{
	uint64_t x;

	memcpy(&x, (const char *)p + 8 * i, 8);
	return x;
}

#endif
