/*
 * coder/codebook.cuh - compute codebooks and costs by a CTA or a warp. Results equal those of exact/book.h and
 * choose_cost.
 *
 * Package-merge merges two sorted lists, leaves and packages. All entries are merged in parallel by rank: a leaf's
 * position in the merged list is its index plus the number of lighter packages; a package's position is its index plus
 * the number of leaves that are not heavier. Ties are broken as in book.h, and results do not depend on the order of
 * threads.
 */
#ifndef CODEC_CUDA_CODER_CODEBOOK_CUH
#define CODEC_CUDA_CODER_CODEBOOK_CUH

#include "exact/choose.h"
#include "common/job.cuh"
#include "common/cta.cuh"

#define LEAVES 257u

/* Shared memory of a CTA that computes one codebook. */
struct book_room {
	uint32_t weight[LEAVES], list[2][2 * LEAVES], live, count[CTA_WARPS][WIRE_MAX_CODE_LENGTH + 2];
	uint16_t symbol[LEAVES], place[WIRE_MAX_CODE_LENGTH][LEAVES];
	uint8_t length[LEAVES];
	uint32_t pad;
};

/*
 * Return the first step of a binary search among n elements: the largest power of two that is at most n, or 0 if n is
 * 0.
 */
DEVICE uint32_t first_step(uint32_t n)
{
	return n ? 0x80000000u >> __clz((int)n) : 0;
}

/* Return how many of n packages weigh less than x. Package i weighs pair[2 * i] + pair[2 * i + 1]; weights ascend. */
DEVICE uint32_t packages_below(const uint32_t *pair, uint32_t n, uint32_t x)
{
	uint32_t low = 0;

	for (uint32_t step = first_step(n); step; step /= 2)
		if (low + step <= n && pair[2 * (low + step) - 2] + pair[2 * (low + step) - 1] < x)
			low += step;
	return low;
}

/* Return how many of n leaves, sorted by ascending weight, weigh at most x. */
DEVICE uint32_t leaves_up_to(const uint32_t *weight, uint32_t n, uint32_t x)
{
	uint32_t low = 0;

	for (uint32_t step = first_step(n); step; step /= 2)
		if (low + step <= n && weight[low + step - 1] <= x)
			low += step;
	return low;
}

/*
 * Compute the leaves of the Huffman tree for 256 symbol counts, sorted by (weight, symbol); of equal weights, the
 * escape is the last. At most 2^max_code_length - 1 symbols get a code. Writes r->weight, r->symbol and r->live, the
 * number of leaves.
 */
DEVICE_CALL void find_leaves(const uint32_t *counts, uint32_t max_code_length, book_room *r)
{
	uint32_t i = threadIdx.x, shift = 0, rank = 0, room = (1u << max_code_length) - 1, *weight = r->list[0];
	uint64_t total = cta_sum(counts[i]), n;

	while (total >> shift >= 1u << 24)
		shift++;
	bool keeps = book_keeps(counts[i], total);
	uint32_t at = (uint32_t)cta_scan(keeps, &n), w = counts[i] >> shift ? counts[i] >> shift : 1;

	/* list the symbols that get a code (keeps), in order of symbols; most symbols are rare, so the list is short */
	if (keeps)
		weight[at] = w;
	__syncthreads();
	if (n > room) {
		uint32_t lighter = 0;

		for (uint32_t j = 0; keeps && j < n; j++) /* among equal weights, drop the largest symbol first */
			lighter += weight[j] < w || (weight[j] == w && j > at);
		__syncthreads();
		if (keeps && lighter < n - room) {
			weight[at] = 0xffffffffu; /* heavier than all leaves, so that it sorts after them */
			keeps = false;
		}
		__syncthreads();
	}
	uint64_t kept = cta_sum(keeps ? counts[i] : 0);
	uint32_t escape = (uint32_t)((total - kept) >> shift);

	escape = escape ? escape : 1;
	uint32_t before = (uint32_t)cta_sum(keeps && w <= escape), live = n < room ? (uint32_t)n : room;

	for (uint32_t j = 0; keeps && j < n; j++)
		rank += weight[j] < w || (weight[j] == w && j < at);
	if (keeps) {
		r->weight[rank + (w > escape)] = w;
		r->symbol[rank + (w > escape)] = (uint16_t)i;
	}
	if (i)
		return;
	if (!n) { /* all counts are 0: give a code to symbol 0 */
		r->weight[0] = 1;
		r->symbol[0] = 0;
		before = live = 1;
	}
	r->weight[before] = escape;
	r->symbol[before] = WIRE_ESCAPE;
	r->live = live + 1;
}

/* Return how many of n <= LEAVES ascending numbers in `place` are below x. Called by all lanes of a warp. */
DEVICE uint32_t places_below(const uint16_t *place, uint32_t n, uint32_t x, uint32_t lane)
{
	uint32_t last = 8 * lane + 7;
	uint32_t low = 8 * __popc(__ballot_sync(FULL, last < n && place[last] < x)), i = low + lane;

	return low + __popc(__ballot_sync(FULL, lane < 8 && i < n && place[i] < x));
}

/*
 * Compute code lengths from 256 symbol counts, as book_from_counts does. `length`: output in shared memory, 257 bytes,
 * of which the last is for the escape; lengths are at most max_code_length.
 */
DEVICE_CALL void cta_book(const uint32_t *counts, uint32_t max_code_length, uint8_t *length, book_room *r)
{
	uint32_t n = 0, take, leaves[WIRE_MAX_CODE_LENGTH];

	find_leaves(counts, max_code_length, r);
	for (uint32_t i = threadIdx.x; i < LEAVES; i += CTA_THREADS)
		length[i] = 0;
	__syncthreads();
	const uint32_t live = r->live;

	for (uint32_t l = 0; l < max_code_length; l++) {
		uint32_t packs = n / 2, *before = r->list[l & 1], *next = r->list[~l & 1];

		for (uint32_t i = threadIdx.x; i < live + packs; i += CTA_THREADS) {
			if (i < live) {
				uint32_t place = i + packages_below(before, packs, r->weight[i]);

				r->place[l][i] = (uint16_t)place;
				next[place] = r->weight[i];
				continue;
			}
			uint32_t p = i - live, sum = before[2 * p] + before[2 * p + 1];

			next[p + leaves_up_to(r->weight, live, sum)] = sum;
		}
		n = live + packs;
		__syncthreads();
	}
	take = 2 * live - 2;
#pragma unroll
	for (uint32_t l = WIRE_MAX_CODE_LENGTH; l-- > 0;) { /* each warp counts all leaves of level l */
		leaves[l] = l < max_code_length ? places_below(r->place[l], live, take, threadIdx.x % 32) : 0;
		take = l < max_code_length ? 2 * (take - leaves[l]) : take;
	}
	for (uint32_t i = threadIdx.x; i < live; i += CTA_THREADS) {
		uint32_t sum = 0;

#pragma unroll
		for (uint32_t l = 0; l < WIRE_MAX_CODE_LENGTH; l++)
			sum += i < leaves[l];
		length[r->symbol[i]] = (uint8_t)sum;
	}
	__syncthreads();
}

/*
 * Compute codes and decoding tables (layout: common/job.cuh) from code lengths, as book_to_codes does. `length`: code
 * lengths, in shared memory.
 */
DEVICE_CALL void cta_codes(const uint8_t *length, uint8_t *table, book_room *r)
{
	uint32_t i = threadIdx.x, warp = i / 32, l = length[i], e = length[WIRE_ESCAPE], first = 0, rank = 0, total = 0;
	uint32_t escape = cta_max(l ? 0 : i);

	for (uint32_t k = 1; k <= WIRE_MAX_CODE_LENGTH; k++) {
		uint32_t same = __ballot_sync(FULL, l == k);

		rank = l == k ? __popc(same & ((1u << i % 32) - 1)) : rank;
		if (i % 32 == 0)
			r->count[warp][k] = __popc(same);
	}
	if (i == 0)
		r->pad = escape;
	__syncthreads();
	for (uint32_t k = 1; k <= WIRE_MAX_CODE_LENGTH; k++) {
		total = k == e;
		for (uint32_t w = 0; w < CTA_WARPS; w++) {
			rank += k == l && w < warp ? r->count[w][k] : 0;
			total += r->count[w][k];
		}
		if (k >= (l ? l : e))
			break;
		first = (first + total) << 1;
	}
	uint32_t code = l ? first + rank : first + total - 1; /* symbols without a code get the escape's code */

	table[i] = (uint8_t)code;
	table[TABLE_LENGTHS + i] = (uint8_t)(l ? l : 0x80 | e);
	if (l && code == 0)
		r->pad = i;
	__syncthreads();
	if (i)
		return;
	table[TABLE_ESCAPE] = (uint8_t)escape;
	table[TABLE_PAD] = (uint8_t)r->pad;
}

/* First and last non-zero symbol with a code, between which a packed codebook stores code lengths. */
struct book_ends {
	uint32_t first, last;
};

/* Return the smallest and the largest non-zero symbol with a code, as book_span does. */
DEVICE_CALL book_ends cta_span(const uint8_t *length)
{
	bool has = threadIdx.x && length[threadIdx.x];
	uint32_t last = cta_max(has ? threadIdx.x : 0), below = cta_max(has ? 256 - threadIdx.x : 0);

	return {below ? 256 - below : 1, last};
}

/* Return the size in bytes of a packed codebook. */
DEVICE uint32_t ends_nbytes(book_ends s)
{
	return 3 + (s.last + 2 - s.first) / 2;
}

/* Pack a codebook as book_pack does. Returns its size in bytes. */
DEVICE_CALL uint32_t cta_pack(const uint8_t *length, uint8_t *to)
{
	const book_ends s = cta_span(length);
	uint32_t n = ends_nbytes(s), k = threadIdx.x;

	if (k == 0) {
		to[0] = (uint8_t)(length[WIRE_ESCAPE] | length[0] << 4);
		to[1] = (uint8_t)s.first;
		to[2] = (uint8_t)s.last;
	}
	if (k + 3 < n) {
		uint32_t i = s.first + 2 * k;

		to[3 + k] = (uint8_t)(length[i] | (i < s.last ? length[i + 1] << 4 : 0));
	}
	return n;
}

/* Return the coded size in bits of symbols with these counts, as book_cost does. `literal`: bits of a literal. */
DEVICE_CALL uint64_t cta_cost(const uint8_t *length, const uint32_t *counts, uint32_t literal)
{
	uint32_t l = length[threadIdx.x];

	return cta_sum((uint64_t)counts[threadIdx.x] * (l ? l : length[WIRE_ESCAPE] + literal));
}

/* Shared memory of a warp that runs warp_cost. */
struct cost_room {
	uint32_t live[LEAVES], leaf[LEAVES], node[LEAVES];
};

/*
 * Return the sum of the weights of all inner nodes of a Huffman tree with n sorted leaves. Called by one lane. The
 * order of equal weights does not matter, because all optimal trees cost the same.
 */
DEVICE uint64_t merge_cost(cost_room *room, uint32_t n)
{
	const uint32_t none = 0x7fffffff; /* larger than all weights; twice this fits into 32 bits */
	uint64_t cost = 0;

	for (uint32_t left = n, i = 0, from = 0, to = 0; left > 1; left--) {
		uint32_t a = i < n ? room->leaf[i] : none, b = i + 1 < n ? room->leaf[i + 1] : none;
		uint32_t c = from < to ? room->node[from] : none, d = from + 1 < to ? room->node[from + 1] : none;
		uint32_t leaves = a + b, mixed = a + c, nodes = c + d;
		uint32_t pair = leaves < mixed ? leaves : mixed;

		pair = nodes < pair ? nodes : pair; /* sum of the two lightest entries of both sorted lists */
		i += pair == leaves ? 2 : pair == mixed ? 1 : 0;
		from += pair == leaves ? 0 : pair == mixed ? 1 : 2;
		room->node[to++] = pair;
		cost += pair;
	}
	return cost;
}

/* Return the cost of 256 symbol counts in bits, as choose_cost does. */
DEVICE_CALL uint64_t warp_cost(const uint32_t *counts, cost_room *room, uint32_t lane)
{
	uint32_t total = 0, rest = 0, n = 0;
	uint64_t cost = 0;

	for (uint32_t e = lane; e < 256; e += 32)
		total += counts[e];
	total = (uint32_t)warp_sum(total);
	for (uint32_t e = lane; e < 256; e += 32) {
		bool keeps = counts[e] > total / 1280;
		uint32_t some = __ballot_sync(FULL, keeps);

		rest += keeps ? 0 : counts[e];
		if (keeps)
			room->live[n + __popc(some & ((1u << lane) - 1))] = counts[e];
		n += __popc(some);
	}
	rest = (uint32_t)warp_sum(rest);
	if (lane == 0)
		room->live[n] = rest + !rest;
	n++;
	__syncwarp();
	for (uint32_t i = lane; i < n; i += 32) {
		uint32_t rank = 0;

		for (uint32_t j = 0; j < n; j++)
			rank += room->live[j] < room->live[i] || (room->live[j] == room->live[i] && j < i);
		room->leaf[rank] = room->live[i];
	}
	__syncwarp();
	if (lane == 0)
		cost = merge_cost(room, n);
	__syncwarp();
	return __shfl_sync(FULL, cost, 0) + 8ull * rest;
}

#endif
