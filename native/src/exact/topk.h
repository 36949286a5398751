/*
 * topk.h - TOPK: kept values of a chunk, their scales and levels. C, C++ and NVRTC.
 *
 * The tensor is cut into chunks of 2^chunk_log2 values. For the values of largest magnitude of each chunk, the frame
 * stores position, sign and a level of the magnitude; the rest decode to 0. docs/spec/format.md, section 11.
 */
#ifndef CODEC_TOPK_H
#define CODEC_TOPK_H

#include "delta.h"
#include "round.h"
#include "wire.h"

struct topk_kind {
	uint32_t chunk_log2, kept; /* log2 of the values per chunk; number of values kept of a whole chunk */
	uint32_t rice_k;           /* Rice parameter of the gaps between kept values */
	uint32_t bits;             /* bits per kept value: sign and level */
	uint32_t dtype;
};

/* Return the header's group_size field, which combines chunk_log2 and the number of values kept per chunk. */
BITS_FN uint32_t topk_group(uint32_t chunk_log2, uint32_t kept)
{
	return chunk_log2 << WIRE_TOPK_CHUNK_AT | kept;
}

/* Return 1 if chunk_log2 and the number of values kept, in a header's group_size field, are in range. */
BITS_FN int topk_is_group(uint32_t group)
{
	uint32_t log2 = group >> WIRE_TOPK_CHUNK_AT, kept = group & WIRE_TOPK_KEPT;

	return log2 >= WIRE_TOPK_MIN_CHUNK_LOG2 && log2 <= WIRE_TOPK_MAX_BLOCK_LOG2 && kept && kept <= 1u << (log2 - 1);
}

BITS_FN struct topk_kind topk_kind_of(uint32_t group, uint32_t bits, uint32_t dtype)
{
	struct topk_kind q = {0, 0, 0, 0, 0};

	q.chunk_log2 = group >> WIRE_TOPK_CHUNK_AT;
	q.kept = group & WIRE_TOPK_KEPT;
	q.bits = bits;
	q.dtype = dtype;
	q.rice_k = delta_gap_k(1ull << q.chunk_log2, q.kept ? q.kept : 1);
	return q;
}

/* Return the number of values kept of a chunk of n values. */
BITS_FN uint32_t topk_kept(const struct topk_kind *q, uint64_t n)
{
	return (uint32_t)((n * q->kept + (1ull << q->chunk_log2) - 1) >> q->chunk_log2);
}

/* Return the number of scales per chunk: 1, or 2 (magnitude of the lowest level, and of the highest). */
BITS_FN uint32_t topk_scales(uint32_t bits)
{
	return bits == 1 ? 1 : 2;
}

/* Return the size in bytes of the scales of the chunks of m values. */
BITS_FN uint64_t topk_scales_nbytes(const struct topk_kind *q, uint64_t m)
{
	return 2 * topk_scales(q->bits) * ((m + (1ull << q->chunk_log2) - 1) >> q->chunk_log2);
}

/* Return an upper bound of the size in bytes of a region of m values. */
BITS_FN uint64_t topk_region_nbytes(const struct topk_kind *q, uint64_t m)
{
	uint64_t chunk = 1ull << q->chunk_log2, rest = m % chunk, chunks = m / chunk;
	uint64_t kept = chunks * q->kept + (rest ? topk_kept(q, rest) : 0);
	/* the Rice code of a gap of q << k has 1 + k + q bits; an escape has at most twice as many */
	uint64_t nbits = kept * (1 + q->rice_k + q->bits) + (2 * m >> q->rice_k);

	return (topk_scales_nbytes(q, m) + (nbits + 7) / 8 + WIRE_ALIGN - 1) / WIRE_ALIGN * WIRE_ALIGN;
}

/* Return the number of steps between the lowest and the highest level. */
BITS_FN int topk_steps(uint32_t bits)
{
	return (1 << (bits - 1)) - 1;
}

/* Return the level, 0..steps, of a magnitude in low..high. h: 16 random bits, or 2^15 to round to nearest. */
BITS_FN uint32_t topk_level(float magnitude, float low, float high, int steps, uint32_t h)
{
	float range = round_sub(high, low), above = round_sub(magnitude, low);

	if (!(range > 0.0f) || !(above > 0.0f) || !steps)
		return 0;
	above = above < range ? above : range;
	return (uint32_t)round_place(round_mul(round_over_times(above, round_over(range, 1.0f)), (float)steps), h);
}

/*
 * Return the magnitude of a level 0..steps, where level 0 is `low` and `steps` is `high`, before it is rounded to the
 * dtype.
 */
BITS_FN float topk_magnitude(uint32_t level, float low, float high, int steps)
{
	if (!level)
		return low;
	return round_add(low, round_mul(round_sub(high, low), round_div((float)level, (float)steps)));
}

/* Return the dequantized value of a code: sign in bit 0, level above it. A value that rounds to 0 is +0. */
BITS_FN float topk_value(uint32_t code, float low, float high, int steps, uint32_t dtype)
{
	uint32_t x = round_bits(topk_magnitude(code >> 1, low, high, steps));

	if (dtype == CODEC_BFLOAT16)
		x = round_from_bfloat16(round_to_bfloat16(x));
	else if (dtype == CODEC_FLOAT16)
		x = round_from_float16(round_to_float16(x));
	return round_float(x ? x | code << 31 : 0);
}

#endif
