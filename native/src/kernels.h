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
	FORM_FLOAT2, /* the pattern lowered: its upper 8 bits, then sign and its lower 7 bits; then the other bytes */
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

#define COLUMNS 512
struct columns {
	int32_t total[COLUMNS];
	int32_t count[COLUMNS];
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

	/*
	 * Values to byte planes and back, by enum form. Floats have an offset each (others none). FLOAT8 leaves plane 0
	 * and the 4 bits of mantissa in plane 1 alone: its patterns are done apart. `past`: past the caches.
	 */
	void (*split[FORM_COUNT])(const void *src, size_t n, const uint16_t *offset, uint8_t *const *plane);
	void (*merge[FORM_COUNT])(const uint8_t *const *plane, size_t n, const uint16_t *offset, void *dst, int past);
	void (*stream)(uint8_t *dst, const uint8_t *src, size_t n);

	/* The patterns of floats; lowered and raised under an offset each (in place if wanted). */
	void (*patterns[FORM_COUNT])(const void *src, size_t n, uint16_t *p);
	void (*lower)(const uint16_t *p, const uint16_t *offset, uint16_t zero, size_t n, uint16_t *u);
	void (*raise)(const uint16_t *u, const uint16_t *offset, uint16_t zero, size_t n, uint16_t *p);
	/* offset = start + grain * cols on the circle; |start| <= circle / 2, |cols| <= 64, grain <= 128 */
	void (*offsets)(const int8_t *cols, int start, int grain, uint16_t zero, size_t n, uint16_t *offset);

	/* Sum of the patterns from `zero` on, and how many they are. */
	void (*sum)(const uint16_t *p, size_t n, uint16_t zero, uint32_t *total, uint32_t *count);
	/* Column by column, where p is from `zero` on: total += p - row, count += 1. */
	void (*columns)(const uint16_t *p, int row, uint16_t zero, size_t n, struct columns *sums);

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
