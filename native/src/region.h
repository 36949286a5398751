/* region.h - what encoding and decoding a block's region share. docs/format.md, sections 6 and 7. */
#ifndef CODEC_REGION_H
#define CODEC_REGION_H

#include "core.h"

/* Results this large go past the caches: they would only sweep them out, and be read before they are overwritten. */
#define STREAM_NBYTES (8u << 20)

#define STATE_NBYTES 22 /* u16 and 32 x 5 bits */

static inline uint64_t padded(uint64_t n)
{
	return (n + WIRE_ROW - 1) / WIRE_ROW * WIRE_ROW;
}

static inline int literal_nbytes(const struct dtype *d, int plane)
{
	return d->form == FORM_FLOAT8 && plane == 0 ? 2 : 1;
}

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

#endif
