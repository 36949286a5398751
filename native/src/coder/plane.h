/* plane.h - encode a plane of bytes into a region, and decode it. docs/spec/format.md, section 7. */
#ifndef CODEC_PLANE_H
#define CODEC_PLANE_H

#include "work.h"

static inline uint64_t escaped_bits(const uint32_t *escaped, uint64_t word, uint64_t m)
{
	uint64_t bits = escaped[2 * word] | (uint64_t)escaped[2 * word + 1] << 32;

	return 64 * word + 64 > m ? bits & ((1ull << m % 64) - 1) : bits;
}

/* Loop over the positions i < m whose bit in `escaped` is set, in ascending order. */
#define FOR_ESCAPED(i, escaped, m)                                                                                     \
	for (uint64_t word_ = 0; word_ < ((m) + 63) / 64; word_++)                                                     \
		for (uint64_t bits_ = escaped_bits(escaped, word_, m), i;                                              \
		     bits_ && (i = 64 * word_ + (uint64_t)__builtin_ctzll(bits_), 1); bits_ &= bits_ - 1)

static inline int is_constant(const uint8_t *p, uint64_t n)
{
	return n < 2 || (p[0] == p[n - 1] && memcmp(p, p + 1, n - 1) == 0);
}

/*
 * Return the index of the first of n bytes that exceeds `most`. Callers have seen such a byte, but another thread may
 * have changed the frame since: return n - 1 if there is none.
 */
static inline uint64_t first_above(const uint8_t *p, uint64_t n, uint8_t most)
{
	uint64_t i = 0;

	while (i + 1 < n && p[i] <= most)
		i++;
	return i;
}

/* Reading position in a region: frame[at, end) remains to be read. */
struct cursor {
	const uint8_t *frame;
	uint64_t at, end;
};

/* Literals to store for escaped values: one byte per value, or two bytes per value if `wide` is given. */
struct literals {
	const uint8_t *byte;
	const uint16_t *wide;
};

/*
 * Encode m symbols into a coded plane. The buffer `symbol` has padded(m) bytes; encode_plane fills in the padding.
 * Return the size in bytes of the coded plane at dst, or 0 if it would exceed `most`. Nothing is written past dst +
 * most. from.byte may be `symbol`. The buffers w->words and w->top[0] are used.
 */
uint64_t encode_plane(const book_codes *codes, const struct kernels *k, struct work *w, uint8_t *symbol, uint64_t m,
		      struct literals from, uint64_t most, uint8_t *dst);

/*
 * Decode a coded plane in steps, so that two planes can be decoded together. open_plane reads the plane up to the end
 * of its words, and stores the words' address and the lanes' initial state in *s, whose buffers the caller has set.
 * After the symbols are decoded, close_plane checks that no bits are left and that the padding of the last 128 symbols
 * is correct. read_literals then reads the escaped values.
 */
codec_status open_plane(struct cursor *c, struct stream *s, codec_fault *f);
codec_status close_plane(const book_lookup *lookup, const struct cursor *c, const struct stream *s, uint64_t m,
			 codec_fault *f);
/*
 * Decode a plane of m symbols to `symbol`, which has padded(m) bytes, in one call. Bits of w->top[0].escaped mark
 * escapes.
 */
codec_status decode_plane(const book_lookup *lookup, const struct kernels *k, struct work *w, struct cursor *c,
			  uint64_t m, uint8_t *symbol, codec_fault *f);
/*
 * Read the literals of escaped symbols into the positions in `symbol` whose bit in `escaped` is set. The literals
 * follow the entropy-coded words.
 */
codec_status read_literals(const uint32_t *escaped, struct cursor *c, uint8_t *symbol, uint64_t m, codec_fault *f);
codec_status read_wide_literals(const uint32_t *escaped, struct cursor *c, uint16_t *literal, uint64_t m,
				codec_fault *f);
/* Check that a region ends with fewer than 8 padding bytes, all 0. */
codec_status close_region(const struct cursor *c, codec_fault *f);

/*
 * Encode the n bytes of codes in w->plane[0], for row codecs with an entropy stage. Return the size in bytes stored at
 * dst, at most 4 + n. decode_bytes is the inverse; it sets *bytes to an address in the frame or to w->symbol.
 */
uint64_t encode_bytes(const struct job *j, const struct kernels *k, struct work *w, uint64_t n, uint8_t *dst);
codec_status decode_bytes(const struct job *j, const struct kernels *k, struct work *w, struct cursor *c, uint64_t n,
			  const uint8_t **bytes, codec_fault *f);

#endif
