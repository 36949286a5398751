/*
 * common/bit_stream.cuh - bit streams of Delta and TopK. When reading, all lanes of a warp read the same bits; when
 * writing, each lane or thread writes bits at a position that it has computed before. docs/spec/format.md, section
 * 10.3.
 */
#ifndef CODEC_CUDA_COMMON_BIT_STREAM_CUH
#define CODEC_CUDA_COMMON_BIT_STREAM_CUH

#include "common/warp.cuh"

/*
 * Cursor over a bit stream whose address is a multiple of 4 bytes. Bits past the end read as 0. All lanes of a warp
 * hold the same cursor.
 */
struct bit_reader {
	const uint32_t *words;
	uint32_t nwords;
	uint64_t at;
};

DEVICE uint32_t word_at(const bit_reader &r, uint64_t i)
{
	return i < r.nwords ? global(r.words)[i] : 0;
}

/* Return the next 32 bits of the stream without moving the cursor. */
DEVICE uint32_t peek_bits(const bit_reader &r)
{
	return __funnelshift_r(word_at(r, r.at / 32), word_at(r, r.at / 32 + 1), (uint32_t)(r.at % 32));
}

/* Read n <= 64 bits. */
DEVICE uint64_t read_bits(bit_reader *r, uint32_t n)
{
	uint64_t x = 0;

	if (n > 32) {
		x = peek_bits(*r);
		r->at += 32;
		n -= 32;
		x |= (peek_bits(*r) & ((1ull << n) - 1)) << 32;
	} else {
		x = peek_bits(*r) & ((1ull << n) - 1);
	}
	r->at += n;
	return x;
}

/*
 * Read the Rice code of a number, with parameter k < full. An escape is followed by the number itself in `full` bits.
 * Set *bad if the number is not below 2^full.
 */
DEVICE uint64_t read_rice(bit_reader *r, uint32_t k, uint32_t full, bool *bad)
{
	const uint32_t q = (uint32_t)__ffs((int)(peek_bits(*r) | 1u << WIRE_RICE_LONGEST)) - 1;

	if (q == WIRE_RICE_LONGEST) {
		r->at += WIRE_RICE_LONGEST;
		return read_bits(r, full);
	}
	*bad |= (uint64_t)q >> 1 >> (full - 1 - k) != 0;
	r->at += q + 1;
	return (uint64_t)q << k | read_bits(r, k);
}

/*
 * Read the Rice code of a gap, with parameter k, and, unless the gap is 0, the sign after it. Most gaps are decoded
 * from one load of 32 bits.
 */
DEVICE uint32_t read_gap(bit_reader *r, uint32_t k, bool *negative, bool *bad)
{
	const uint32_t bits = peek_bits(*r), q = (uint32_t)__ffs((int)(bits | 1u << WIRE_RICE_LONGEST)) - 1;

	if (q + k + 2 <= 32 && q < WIRE_RICE_LONGEST) {
		const uint32_t gap = q << k | (bits >> (q + 1) & ((1u << k) - 1));

		*negative = gap ? bits >> (q + 1 + k) & 1 : *negative;
		r->at += q + k + 1 + (gap != 0);
		return gap;
	}
	const uint32_t gap = (uint32_t)read_rice(r, k, WIRE_RICE_GAP_BITS, bad);

	if (gap)
		*negative = read_bits(r, 1) != 0;
	return gap;
}

/* Read an Elias gamma code of a number that is at least 1. Returns 0 if the number is 2^64 or more. */
DEVICE uint64_t read_gamma(bit_reader *r)
{
	uint32_t n = 0, zeros;

	do {
		const uint32_t bits = peek_bits(*r);

		zeros = bits ? (uint32_t)__ffs((int)bits) - 1 : 32;
		r->at += zeros;
		n += zeros;
	} while (zeros == 32 && n < 64);
	if (n >= 64)
		return 0;
	r->at++;
	return 1ull << n | read_bits(r, n);
}

/* Return true if a stream has been read to its end: fewer than 64 bits are left, and all of them are 0. */
DEVICE bool stream_ends(bit_reader r)
{
	const uint64_t nbits = 32ull * r.nwords;

	return r.at <= nbits && nbits - r.at < 64 && !read_bits(&r, (uint32_t)(nbits - r.at));
}

/* Return the size in bits of the Rice code of x with parameter k; an escape has x in `full` bits. */
DEVICE uint32_t rice_nbits(uint64_t x, uint32_t k, uint32_t full)
{
	return x >> k < WIRE_RICE_LONGEST ? (uint32_t)(x >> k) + 1 + k : WIRE_RICE_LONGEST + full;
}

/* OR x, of up to 64 bits, into a stream from bit index `bit` on. The stream's address is a multiple of 4 bytes. */
DEVICE void or_stream(uint8_t *stream, uint32_t bit, uint64_t x)
{
	or_bits(stream, bit, (uint32_t)x);
	if (x >> 32)
		or_bits(stream, bit + 32, (uint32_t)(x >> 32));
}

/* Write the Rice code of x to a zeroed stream, from bit `bit` on. Return the bit position after the code. */
DEVICE uint32_t put_rice(uint8_t *stream, uint32_t bit, uint64_t x, uint32_t k, uint32_t full)
{
	const uint64_t q = x >> k;

	if (q >= WIRE_RICE_LONGEST) {
		or_stream(stream, bit + WIRE_RICE_LONGEST, x);
		return bit + WIRE_RICE_LONGEST + full;
	}
	or_bits(stream, bit + (uint32_t)q, 1);
	or_stream(stream, bit + (uint32_t)q + 1, x & ((1ull << k) - 1));
	return bit + (uint32_t)q + 1 + k;
}

#endif
