/*
 * topk/select.cuh - find the values of largest magnitude in a chunk, with one CTA. docs/spec/encoder.md, section 11.
 *
 * A key is the bit pattern of a magnitude as float32, which orders magnitudes as integers. Candidates are the values
 * whose keys are at least a threshold, which is guessed from the least key that was kept in the previous chunk. If the
 * guess yields too few or too many candidates, or there is none, a histogram of the keys' first 11 bits gives the
 * threshold. The least key that is kept is then found among the candidates by radix select: digits of 11, 10 and 10
 * bits, with histograms in shared memory. A guess affects only the time, not the result.
 */
#ifndef CODEC_CUDA_TOPK_SELECT_CUH
#define CODEC_CUDA_TOPK_SELECT_CUH

#include "common/cta.cuh"
#include "common/values.cuh"
#include "topk/topk.cuh"

#define DIGITS 2048                   /* number of possible values of the first digit, which has 11 bits */
#define TILE_VALUES (4 * CTA_THREADS) /* values that a CTA reads in one step, four per thread */
#define MOST_FOUND 256                /* maximum number of candidates in a warp's part of a chunk */
/*
 * by how much the guessed threshold is below the least key kept before: an eighth of an octave, which gives about 1.5
 * times as many candidates as kept values
 */
#define GUESS_SLACK (1u << 20)

/* A chunk's values from which the largest are chosen: all values, or only candidates. */
struct topk_chunk {
	const codec_source *source;
	const uint16_t *at; /* positions of candidates in the chunk, ascending; NULL: all values */
	uint64_t first;     /* index of the chunk's first value */
	uint32_t n;         /* number of values, or of candidates */
	uint32_t kept, dtype;
	bool quads; /* true if four values can be read by one aligned load */
};

/* Positions of candidates, in the shared memory of a CTA. */
struct topk_candidates {
	uint16_t found[CTA_WARPS][MOST_FOUND], at[CTA_WARPS * MOST_FOUND];
	uint32_t count[CTA_WARPS];
};

/*
 * Least key (bit pattern of a magnitude) that is kept. Of the values with this key only the first `ties` are kept.
 * most: largest key of the chunk.
 */
struct topk_least {
	uint32_t key, ties, most;
};

/* Return the position in the chunk of value (or candidate) i. */
DEVICE uint32_t place_of(const topk_chunk &c, uint32_t i)
{
	return c.at ? c.at[i] : i;
}

/* Load values i to i + 3, as far as they exist (c.n values), as bits of float32. Return their number. */
DEVICE uint32_t load_four(const topk_chunk &c, uint32_t i, uint32_t x[4])
{
	const uint32_t there = i < c.n ? (c.n - i < 4 ? c.n - i : 4) : 0;

	if (there == 4 && c.quads && !c.at)
		values_at_quads<4>(c.dtype, c.source, c.first + i, x);
	else
		for (uint32_t k = 0; k < 4; k++)
			x[k] = k < there ? round_bits(value_at(c.dtype, c.source, c.first + place_of(c, i + k))) : 0;
	return there;
}

/*
 * List the positions of a chunk's values whose keys are at least `low`, in order. Each warp searches an eighth of the
 * chunk. Return the number of values listed; 0 if a warp finds too many. If there is a residual, copy all values of the
 * chunk to it.
 */
DEVICE uint32_t list_candidates(const topk_chunk &c, uint32_t low, topk_candidates *to)
{
	const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32,
		       each = (c.n + TILE_VALUES - 1) / TILE_VALUES * 128;
	const uint32_t end = (warp + 1) * each < c.n ? (warp + 1) * each : c.n;
	uint32_t count = 0, before = 0, all = 0, most = 0;

	for (uint32_t from = warp * each; from < end; from += 128) {
		const uint32_t i = from + 4 * lane;
		uint32_t x[4], mine = 0, slot = count, some = 0;
		const uint32_t there = load_four(c, i, x);

		for (uint32_t k = 0; k < there; k++) {
			mine |= (uint32_t)((x[k] & ROUND_ABS) >= low) << k;
			if (c.source->residual)
				c.source->residual[c.first + i + k] = round_float(x[k]);
		}
		if (!__any_sync(FULL, mine != 0))
			continue;
		for (uint32_t k = 0; k < 4; k++) {
			const uint32_t lanes = __ballot_sync(FULL, mine >> k & 1);

			slot += (uint32_t)__popc(lanes & ((1u << lane) - 1));
			some += (uint32_t)__popc(lanes);
		}
		for (uint32_t k = 0; k < 4; k++)
			if (mine >> k & 1 && slot < MOST_FOUND)
				to->found[warp][slot++] = (uint16_t)(i + k);
		count += some;
	}
	if (lane == 0)
		to->count[warp] = count;
	__syncthreads();
	for (uint32_t w = 0; w < CTA_WARPS; w++) {
		before += w < warp ? to->count[w] : 0;
		all += to->count[w];
		most = to->count[w] > most ? to->count[w] : most;
	}
	for (uint32_t i = lane; most <= MOST_FOUND && i < count; i += 32)
		to->at[before + i] = to->found[warp][i];
	__syncthreads();
	return most <= MOST_FOUND ? all : 0;
}

/*
 * Compute a histogram of one digit of the keys: the `bits` bits from bit `shift` on. Only keys whose bits above the
 * digit equal `high` are counted, and no keys of 0. Return the thread's largest key.
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

		load_four(c, from + 4 * threadIdx.x, x);
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
 * Return the digit of the *rank-th largest key, and set *rank to the key's rank among the keys with that digit. If
 * fewer than *rank keys were counted, return `digits`, and reduce *rank by the number of keys counted.
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
	__syncthreads(); /* all threads have read the result before the next digit is searched */
	return digit;
}

/* Find the least of the c.kept largest keys of a chunk. counts: shared memory for DIGITS counters. */
DEVICE topk_least find_least(const topk_chunk &c, uint32_t *counts)
{
	topk_least least = {0, c.kept, cta_max(count_digits(c, counts, 20, 11, 0))};
	const uint32_t digit = choose_digit(counts, DIGITS, &least.ties);

	if (digit == DIGITS) /* the chunk has fewer than c.kept non-zero values */
		return least;
	least.key = digit << 20;
	count_digits(c, counts, 10, 10, least.key);
	least.key |= choose_digit(counts, 1024, &least.ties) << 10;
	count_digits(c, counts, 0, 10, least.key);
	least.key |= choose_digit(counts, 1024, &least.ties);
	return least;
}

/*
 * Return the candidates of a chunk, which include all values to keep; or the chunk itself if it has too many
 * candidates. guess: key to try as the threshold; 0: no guess. room: memory for candidates; counts: memory for a
 * histogram, as in find_least.
 */
DEVICE topk_chunk narrow(const topk_chunk &c, uint32_t guess, topk_candidates *room, uint32_t *counts)
{
	topk_chunk few = c;
	uint32_t count = 0, rank = c.kept;

	if (c.kept > CTA_WARPS * MOST_FOUND)
		return c;
	if (guess)
		count = list_candidates(c, guess, room);
	if (count < c.kept) {
		count_digits(c, counts, 20, 11, 0);
		const uint32_t digit = choose_digit(counts, DIGITS, &rank);

		if (digit == DIGITS) /* the chunk has fewer than c.kept non-zero values */
			return c;
		count = list_candidates(c, digit ? digit << 20 : 1, room);
	}
	if (count < c.kept)
		return c;
	few.at = room->at;
	few.n = count;
	return few;
}

#endif
