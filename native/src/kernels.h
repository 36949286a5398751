/* kernels.h - the table of loops that each instruction set fills in. */
#ifndef CODEC_KERNELS_H
#define CODEC_KERNELS_H

#include <stddef.h>
#include <string.h>

#include "bits.h"
#include "book.h"
#include "seal.h"
#include "wire.h"

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

/* How a value becomes bytes, most significant first. */
enum form {
	FORM_BYTES1,
	FORM_BYTES2,
	FORM_BYTES4,
	FORM_BYTES8,
	FORM_FLOAT2, /* turned: the exponent's byte first */
	FORM_FLOAT4,
	FORM_FLOAT8, /* plane 0 the exponent through a window, plane 1 sign and 4 bits of mantissa, then 6 bytes */
	FORM_COUNT
};

/*
 * A lane's bit sequence is `tail` bits longer than one word. While encoding, `word` is its end (what the decoder
 * takes next) and `part` its beginning, right-justified; while decoding, `word` is its beginning and `part` what
 * follows, left-justified.
 */
typedef struct lanes {
	uint32_t word[WIRE_LANES];
	uint32_t part[WIRE_LANES];
	uint32_t tail[WIRE_LANES];
} lanes;

/* Memory that comes next: `count` pieces of n bytes, `stride` apart. Kernels that compute bring it closer meanwhile. */
struct ahead {
	const void *at;
	size_t stride, n, count;
};

/* Words that a kernel may write below, or read above, what it was given. */
#define LANES_SLACK 48

/* A plane to be decoded: nwords words at any address, zeros follow the last one. */
struct stream {
	const uint8_t *words;
	size_t nwords;
	lanes *state;
	uint8_t *symbol;
	uint32_t *escaped; /* bit i: symbol i is the book's escape */
	int good;          /* every word was taken and every lane ended on 32 zero bits */
};

/* Sums over at most 128 rows, so that 16 bits are enough. */
#define COLUMNS 512
struct columns {
	int16_t total[COLUMNS];
	int16_t parts[COLUMNS];
	int16_t count[COLUMNS];
};

struct kernels {
	const char *name;

	/*
	 * Code `rows` quad rows of symbols, last row first, storing words downwards from `end`; LANES_SLACK words
	 * below the last one may be overwritten. Bit i of `escaped` is set where symbol i has no code. Returns the
	 * place of the first word.
	 */
	uint32_t *(*encode_lanes)(const book_codes *book, const uint8_t *symbol, size_t rows, uint32_t *end,
				  lanes *state, uint32_t *escaped, const struct ahead *ahead);
	/*
	 * Decode `rows` quad rows of a, and of b unless it is NULL: two are faster together where one leaves the CPU
	 * waiting for itself.
	 */
	void (*decode_lanes)(const book_lookup *book, struct stream *a, struct stream *b, size_t rows,
			     const struct ahead *ahead);

	/* Values to byte planes and back; by enum form. FLOAT8 leaves plane 0 alone. `stream`: past the caches. */
	void (*split[FORM_COUNT])(const void *src, size_t n, uint8_t *const *plane);
	void (*merge[FORM_COUNT])(const uint8_t *const *plane, size_t n, void *dst, int stream);
	void (*stream)(uint8_t *dst, const uint8_t *src, size_t n);

	/* Plane 0 alone; FLOAT8 through no window: use top_float8. */
	void (*top[FORM_COUNT])(const void *src, size_t n, uint8_t *e);
	/* The exponents of float64 as bytes, 0 outside of the window; how many are outside. */
	size_t (*top_float8)(const void *src, size_t n, uint32_t window, uint8_t *e);

	/* Sum of the bytes, and how many are not 0. */
	void (*sum)(const uint8_t *e, size_t n, uint32_t *total, uint32_t *count);
	/* Column by column, where e is not 0: total += e - whole, parts += part, count += 1. */
	void (*columns)(const uint8_t *e, uint8_t whole, uint8_t part, size_t n, struct columns *sums);

	/* Exponent bytes to symbols under an offset each, and back (in place if wanted). */
	void (*symbols)(const uint8_t *e, const uint8_t *offset, uint8_t escape, size_t n, uint8_t *symbol);
	void (*unsymbols)(const uint8_t *symbol, const uint8_t *offset, size_t n, uint8_t *e);
	/* offset = step * floor((quarters + cols) / 4); |cols| <= 64 */
	void (*offsets)(const int8_t *cols, int quarters, int step, size_t n, uint8_t *offset);

	/* Low nibbles as symbols, high ones two a byte (value i and value i + (n + 1) / 2); and back, in place. */
	void (*halve)(const uint8_t *p, size_t n, uint8_t *symbol, uint8_t *high);
	void (*unhalve)(uint8_t *symbol, const uint8_t *high, size_t n);

	/* Sum of seal_chunk over nbytes bytes, the last chunk padded with zeros. */
	uint64_t (*digest)(const uint8_t *src, size_t nbytes, uint32_t seed);

	/* How many e are 0; and the OR of p there. */
	size_t (*zeros)(const uint8_t *e, size_t n);
	uint8_t (*under_zeros)(const uint8_t *e, const uint8_t *p, size_t n);
	/* Keep p[i] where e[i] is not 0 (dst may be p); and the inverse, zeros elsewhere. */
	size_t (*prune)(const uint8_t *e, const uint8_t *p, size_t n, uint8_t *dst);
	void (*unprune)(const uint8_t *e, const uint8_t *p, size_t n, uint8_t *dst);
	/* Bit r: run r of 128 bytes is not all zero. Returns the number of bytes in such runs. */
	size_t (*rows)(const uint8_t *p, size_t n, uint8_t *bitmap);
};

extern const struct kernels kernels_scalar, kernels_avx2, kernels_avx512;

#endif
