/* topk/select.cuh - find the values of largest magnitude of a chunk, by a CTA. docs/encoder.md, section 11.
 *
 * A key is the bit pattern of a magnitude as float32, which orders magnitudes as integers. The least key that is kept
 * is found digit by digit: values are counted by their first 11 bits, then those of the chosen digit by the next 10
 * bits, then by the last 10. Counters are in shared memory. Values are read again for each digit, from a cache.
 */
#ifndef CODEC_CUDA_TOPK_SELECT_CUH
#define CODEC_CUDA_TOPK_SELECT_CUH

#include "common/cta.cuh"
#include "common/values.cuh"
#include "topk/topk.cuh"

#define DIGITS 2048                   /* values of the first digit */
#define TILE_VALUES (4 * CTA_THREADS) /* values that a CTA reads at once, four a thread */

/* Chunk of a tensor. */
struct topk_chunk {
	const codec_source *source;
	uint64_t first; /* index of the first value */
	uint32_t n, kept, dtype;
	bool quads; /* four values are aligned for one load */
};

/* Least key that is kept: `ties` values with this key are kept, the first ones. most: largest key. */
struct topk_least {
	uint32_t key, ties, most;
};

/* Load the thread's values of the tile at value `from` of a chunk, as bits of float32. Returns how many there are. */
DEVICE uint32_t load_tile(const topk_chunk &c, uint32_t from, uint32_t x[4])
{
	const uint32_t i = from + 4 * threadIdx.x, there = i < c.n ? (c.n - i < 4 ? c.n - i : 4) : 0;

	if (there == 4 && c.quads)
		values_at_quads<4>(c.dtype, c.source, c.first + i, x);
	else
		for (uint32_t k = 0; k < 4; k++)
			x[k] = k < there ? round_bits(value_at(c.dtype, c.source, c.first + i + k)) : 0;
	return there;
}

/*
 * Count the keys of a chunk by the digit from bit `shift` on, if the bits above the digit are those of `high`. Keys of
 * 0 are not counted. Returns the thread's largest key.
 */
DEVICE uint32_t count_digits(const topk_chunk &c, uint32_t *counts, uint32_t shift, uint32_t bits, uint32_t high)
{
	const uint32_t digits = 1u << bits, above = shift + bits;
	uint32_t most = 0;

	for (uint32_t i = threadIdx.x; i < digits; i += CTA_THREADS)
		counts[i] = 0;
	__syncthreads();
	for (uint32_t from = 0; from < c.n; from += TILE_VALUES) {
		uint32_t x[4];

		load_tile(c, from, x);
		for (uint32_t k = 0; k < 4; k++) {
			const uint32_t key = x[k] & ROUND_ABS;

			most = key > most ? key : most;
			if (key && key >> above == high >> above)
				atomicAdd(counts + (key >> shift & (digits - 1)), 1u);
		}
	}
	__syncthreads();
	return most;
}

/*
 * Return the digit of the key with rank *rank from the top, and make *rank its rank among keys with that digit. Returns
 * `digits` if fewer keys were counted; *rank is then reduced by their number.
 */
DEVICE uint32_t choose_digit(const uint32_t *counts, uint32_t digits, uint32_t *rank)
{
	__shared__ uint32_t found[2];
	const uint32_t each = digits / CTA_THREADS, top = digits - 1 - each * threadIdx.x;
	uint32_t own = 0;
	uint64_t all;

	for (uint32_t i = 0; i < each; i++)
		own += counts[top - i];
	uint32_t before = (uint32_t)cta_scan(own, &all);

	if (all < *rank) {
		*rank -= (uint32_t)all;
		return digits;
	}
	if (before < *rank && *rank <= before + own) {
		uint32_t digit = top;

		for (; before + counts[digit] < *rank; digit--)
			before += counts[digit];
		found[0] = digit;
		found[1] = *rank - before;
	}
	__syncthreads();
	const uint32_t digit = found[0];

	*rank = found[1];
	__syncthreads(); /* all threads have read before the next digit is found */
	return digit;
}

/* Find the least key of the c.kept largest. counts: shared memory for DIGITS counters. */
DEVICE topk_least find_least(const topk_chunk &c, uint32_t *counts)
{
	topk_least least = {0, c.kept, cta_max(count_digits(c, counts, 20, 11, 0))};
	const uint32_t digit = choose_digit(counts, DIGITS, &least.ties);

	if (digit == DIGITS) /* fewer values than are kept are not 0 */
		return least;
	least.key = digit << 20;
	count_digits(c, counts, 10, 10, least.key);
	least.key |= choose_digit(counts, 1024, &least.ties) << 10;
	count_digits(c, counts, 0, 10, least.key);
	least.key |= choose_digit(counts, 1024, &least.ties);
	return least;
}

#endif
