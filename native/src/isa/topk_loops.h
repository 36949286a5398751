/*
 * topk_loops.h - loops that search for TOPK's largest values, compiled once per instruction set.
 *
 * Included by scalar.c, avx2.c and avx512.c, after the macros for vectors. A key is the pattern of a magnitude, which
 * orders magnitudes as integers.
 */
#include "bit_stream.h"

/* Return a mask of 64 values: bit i is set if the bit pattern of |x[i]| is at least `key`. */
ALWAYS uint64_t mask_above(const float_any *x, uint32_t key)
{
	uint64_t mask = 0;
#ifdef MASK_BITS
	const V most = SET1(0x7fffffff), below = SET1((int)key - 1);

	for (int i = 0; i < 64; i += LANES)
		mask |= (uint64_t)MASK_BITS(GT(AND(LOAD(x + i), most), below)) << i;
#else
	for (int i = 0; i < 64; i++)
		mask |= (uint64_t)((round_bits(x[i]) & ROUND_ABS) >= key) << i;
#endif
	return mask;
}

/* Return the mask of mask_above for n < 64 values. */
ALWAYS uint64_t mask_rest(const float_any *x, size_t n, uint32_t key)
{
	uint64_t mask = 0;

	for (size_t i = 0; i < n; i++)
		mask |= (uint64_t)((round_bits(x[i]) & ROUND_ABS) >= key) << i;
	return mask;
}

static size_t count_above(const float_any *x, size_t n, uint32_t key)
{
	size_t count = 0, i = 0;

	for (; i + 64 <= n; i += 64)
		count += (size_t)__builtin_popcountll(mask_above(x + i, key));
	return count + (size_t)__builtin_popcountll(mask_rest(x + i, n - i, key));
}

static size_t list_above(const float_any *x, size_t n, uint32_t key, size_t room, uint32_t *at)
{
	size_t count = 0;

	for (size_t i = 0; i < n; i += 64) {
		uint64_t mask = n - i < 64 ? mask_rest(x + i, n - i, key) : mask_above(x + i, key);

		if (!mask)
			continue;
		if (room - count < (size_t)__builtin_popcountll(mask))
			return room + 1;
		for (; mask; mask &= mask - 1)
			at[count++] = (uint32_t)i + (uint32_t)__builtin_ctzll(mask);
	}
	return count;
}

#define TOPK_LOOPS .count_above = count_above, .list_above = list_above
