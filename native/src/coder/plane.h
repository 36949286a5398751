/* plane.h - a plane of bytes to its part of a region and back. docs/format.md, section 7. */
#ifndef CODEC_PLANE_H
#define CODEC_PLANE_H

#include "work.h"

static inline uint64_t escaped_bits(const uint32_t *escaped, uint64_t word, uint64_t m)
{
	uint64_t bits = escaped[2 * word] | (uint64_t)escaped[2 * word + 1] << 32;

	return 64 * word + 64 > m ? bits & ((1ull << m % 64) - 1) : bits;
}

/* Escaped positions below m, in order. */
#define FOR_ESCAPED(i, escaped, m)                                                                                     \
	for (uint64_t word_ = 0; word_ < ((m) + 63) / 64; word_++)                                                     \
		for (uint64_t bits_ = escaped_bits(escaped, word_, m), i;                                              \
		     bits_ && (i = 64 * word_ + (uint64_t)__builtin_ctzll(bits_), 1); bits_ &= bits_ - 1)

static inline int is_constant(const uint8_t *p, uint64_t n)
{
	return n < 2 || (p[0] == p[n - 1] && memcmp(p, p + 1, n - 1) == 0);
}

/* The place of the first of n bytes above `most`; the last one's if there is none, for a frame may change meanwhile. */
static inline uint64_t first_above(const uint8_t *p, uint64_t n, uint8_t most)
{
	uint64_t i = 0;

	while (i + 1 < n && p[i] <= most)
		i++;
	return i;
}

/* Where a region is read: what is left of it are the bytes frame[at, end). */
struct cursor {
	const uint8_t *frame;
	uint64_t at, end;
};

/* What is stored for values whose code is the escape's: their bytes or, if `wide` is given, two bytes each. */
struct literals {
	const uint8_t *byte;
	const uint16_t *wide;
};

/*
 * Code m symbols, whose memory goes on to padded(m) and is written there. Returns the bytes stored at dst; 0 if these
 * would be more than `most`: nothing is written behind dst + most. from.byte may be `symbol`. Uses w->words, w->top[0].
 */
uint64_t encode_plane(const book_codes *codes, const struct kernels *k, struct work *w, uint8_t *symbol, uint64_t m,
		      struct literals from, uint64_t most, uint8_t *dst);

/*
 * A coded plane in steps, for two planes may go through the coder's loop together. Read it up to its words' end: s,
 * which has its memory, gets the words and the lanes' first state. After its rows were decoded: nothing may be left
 * over, and the last row is filled up as it must be. Symbols of escapes are still to come then.
 */
codec_status open_plane(struct cursor *c, struct stream *s, codec_fault *f);
codec_status close_plane(const book_lookup *lookup, const struct cursor *c, const struct stream *s, uint64_t m,
			 codec_fault *f);
/* Those steps at once: m symbols to `symbol`, which has padded(m) bytes; w->top[0].escaped says which are escapes. */
codec_status decode_plane(const book_lookup *lookup, const struct kernels *k, struct work *w, struct cursor *c,
			  uint64_t m, uint8_t *symbol, codec_fault *f);
/* The literals behind the words, to their places. */
codec_status read_literals(const uint32_t *escaped, struct cursor *c, uint8_t *symbol, uint64_t m, codec_fault *f);
codec_status skip_literals(uint64_t n, struct cursor *c, codec_fault *f);
codec_status read_wide_literals(const uint32_t *escaped, struct cursor *c, uint16_t *literal, uint64_t m,
				codec_fault *f);
/* A region ends with fewer than 8 zero bytes. */
codec_status close_region(const struct cursor *c, codec_fault *f);

/*
 * Codecs of rows with an entropy stage: n code bytes in w->plane[0] to dst, at most 4 + n bytes; returns how many.
 * And back: *bytes is in the frame or in w->symbol.
 */
uint64_t encode_bytes(const struct job *j, const struct kernels *k, struct work *w, uint64_t n, uint8_t *dst);
codec_status decode_bytes(const struct job *j, const struct kernels *k, struct work *w, struct cursor *c, uint64_t n,
			  const uint8_t **bytes, codec_fault *f);

#endif
