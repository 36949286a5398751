/*
 * bit_stream.h - read and write bit streams (bit i is bit i mod 8 of byte i / 8) and their Rice codes.
 *
 * The Rice code of a number x with parameter k is x >> k zeros, a one, and the lower k bits of x. If x >> k is
 * WIRE_RICE_LONGEST or more, the code is an escape: WIRE_RICE_LONGEST zeros, then all bits of x.
 */
#ifndef CODEC_BIT_STREAM_H
#define CODEC_BIT_STREAM_H

#include "kernels.h"

#define ALWAYS static inline __attribute__((always_inline))

/*
 * Cursor over a bit stream. Bits past the end read as 0, so a loop need not check for the end at every read; it
 * compares `at` with 8 * nbytes from time to time.
 */
struct bit_reader {
	const uint8_t *p;
	uint64_t nbytes, at;
};

/* Return the next bits of the stream without consuming them. At least the lower 57 bits of the result are valid. */
ALWAYS uint64_t peek_bits(const struct bit_reader *r)
{
	uint64_t byte = r->at >> 3;

	if (__builtin_expect(byte + 8 <= r->nbytes, 1))
		return load64(r->p + byte) >> (r->at & 7);
	if (byte >= r->nbytes)
		return 0;
	{
		uint8_t last[8] = {0};

		memcpy(last, r->p + byte, r->nbytes - byte);
		return load64(last) >> (r->at & 7);
	}
}

/* Read n <= 64 bits. */
ALWAYS uint64_t read_bits(struct bit_reader *r, uint32_t n)
{
	uint64_t x = 0;

	if (n > 32) {
		x = peek_bits(r) & 0xffffffffu;
		r->at += 32;
		n -= 32;
		x |= (peek_bits(r) & ((1ull << n) - 1)) << 32;
	} else {
		x = peek_bits(r) & ((1ull << n) - 1);
	}
	r->at += n;
	return x;
}

/*
 * Read the Rice code, with parameter k < full, of a number that must be below 2^full. An escape has the number in
 * `full` bits. Set *bad if the number is too large.
 */
ALWAYS uint64_t read_rice(struct bit_reader *r, uint32_t k, uint32_t full, uint32_t *bad)
{
	uint64_t v = peek_bits(r);
	uint32_t q = (uint32_t)__builtin_ctzll(v | 1ull << WIRE_RICE_LONGEST);

	if (__builtin_expect(q == WIRE_RICE_LONGEST, 0)) {
		r->at += WIRE_RICE_LONGEST;
		return read_bits(r, full);
	}
	*bad |= (uint32_t)((uint64_t)q >> 1 >> (full - 1 - k));
	r->at += q + 1;
	if (full > 32) /* an escape is too long for one call of peek_bits */
		return (uint64_t)q << k | read_bits(r, k);
	r->at += k;
	return (uint64_t)q << k | (v >> (q + 1) & ((1ull << k) - 1));
}

/* Return 1 if a stream has been read to its end: fewer than 64 bits remain, and all of them are 0. */
ALWAYS int stream_ends(const struct bit_reader *r)
{
	struct bit_reader rest = *r;
	uint64_t left = 8 * r->nbytes - r->at;

	return r->at <= 8 * r->nbytes && left < 64 && !read_bits(&rest, (uint32_t)left);
}

/* State of writing a bit stream. When it reaches `end`, `full` is set and further bits are dropped. */
struct bit_writer {
	uint64_t word;
	uint32_t count;
	int full;
	uint8_t *p, *end;
};

/* Append n <= 64 bits. */
ALWAYS void put_bits(struct bit_writer *w, uint64_t x, uint32_t n)
{
	w->word |= x << w->count;
	if (w->count + n < 64) {
		w->count += n;
		return;
	}
	if (w->end - w->p < 8) {
		w->full = 1;
		w->p = w->end;
	} else {
		store64(w->p, w->word);
		w->p += 8;
	}
	w->word = w->count ? x >> (64 - w->count) : 0;
	w->count += n - 64;
}

ALWAYS void put_rice(struct bit_writer *w, uint64_t x, uint32_t k, uint32_t full)
{
	uint64_t q = x >> k;

	if (q >= WIRE_RICE_LONGEST) {
		put_bits(w, 0, WIRE_RICE_LONGEST);
		put_bits(w, x, full);
		return;
	}
	put_bits(w, 1ull << q, (uint32_t)q + 1);
	put_bits(w, x & ((1ull << k) - 1), k);
}

/* Write the bits that are still in w->word. Return the size of the stream in bytes, or 0 if it was full. */
ALWAYS size_t close_bits(struct bit_writer *w, const uint8_t *start)
{
	size_t rest = (w->count + 7) / 8;

	if (w->full || (size_t)(w->end - w->p) < rest)
		return 0;
	for (size_t i = 0; i < rest; i++)
		w->p[i] = (uint8_t)(w->word >> 8 * i);
	return (size_t)(w->p - start) + rest;
}

#endif
