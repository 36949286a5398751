/* coder/codebook.cuh - codebooks and costs as in exact/book.h and choose_cost, computed by a CTA or a warp.
 *
 * Package-merge merges two sorted lists, leaves and packages. All entries are placed at once by rank: a leaf's place is
 * its index plus the number of lighter packages; a package's place is its index plus the number of leaves that are not
 * heavier. Ties are broken as in book.h, and results do not depend on the order of threads.
 */
#ifndef CODEC_CUDA_CODER_CODEBOOK_CUH
#define CODEC_CUDA_CODER_CODEBOOK_CUH

#include "exact/choose.h"
#include "common/job.cuh"
#include "common/cta.cuh"

#define LEAVES 257u

/* Shared memory for one codebook. */
struct book_room {
	uint32_t weight[LEAVES], list[2][2 * LEAVES], live, leaves, count[WIRE_MAX_CODE_LENGTH + 2];
	uint16_t symbol[LEAVES], place[WIRE_MAX_CODE_LENGTH][LEAVES];
	uint32_t escape, pad;
};

/* Return how many of n packages weigh less than x. Package i is pair[2 * i] + pair[2 * i + 1]; packages ascend. */
DEVICE uint32_t packages_below(const uint32_t *pair, uint32_t n, uint32_t x)
{
	uint32_t low = 0;

	for (uint32_t step = 512; step; step /= 2)
		if (low + step <= n && pair[2 * (low + step) - 2] + pair[2 * (low + step) - 1] < x)
			low += step;
	return low;
}

/* Return how many of n ascending weights are at most x. */
DEVICE uint32_t leaves_up_to(const uint32_t *weight, uint32_t n, uint32_t x)
{
	uint32_t low = 0;

	for (uint32_t step = 512; step; step /= 2)
		if (low + step <= n && weight[low + step - 1] <= x)
			low += step;
	return low;
}

/*
 * Make leaves for 256 counts, in order of (weight, symbol), the escape last among equals. At most 2^max_code_length - 1
 * symbols are kept. Writes r->weight, r->symbol and r->live, the number of leaves.
 */
DEVICE_CALL void find_leaves(const uint32_t *counts, uint32_t max_code_length, book_room *r)
{
	uint32_t i = threadIdx.x, shift = 0, rank = 0, lighter = 0, room = (1u << max_code_length) - 1;
	uint64_t total = cta_sum(counts[i]);

	while (total >> shift >= 1u << 24)
		shift++;
	uint32_t w = counts[i] >> shift ? counts[i] >> shift : 1;
	bool keeps = book_keeps(counts[i], total);
	uint32_t n = (uint32_t)cta_sum(keeps), drop = n > room ? n - room : 0;

	for (uint32_t j = 0; keeps && j < 256; j++) {
		uint32_t v = counts[j] >> shift ? counts[j] >> shift : 1;
		bool other = book_keeps(counts[j], total);

		rank += other && (v < w || (v == w && j < i));
		lighter += other &&
			   (v < w || (v == w && j > i)); /* of equal weights the largest symbol is dropped first */
	}
	keeps = keeps && lighter >= drop;
	uint64_t kept = cta_sum(keeps ? counts[i] : 0);
	uint32_t escape = (uint32_t)((total - kept) >> shift);

	escape = escape ? escape : 1;
	for (uint32_t k = i; k < LEAVES; k += CTA_THREADS)
		r->weight[k] = 0;
	__syncthreads();
	if (keeps) { /* places of dropped symbols stay 0 */
		r->weight[rank] = w;
		r->symbol[rank] = (uint16_t)i;
	}
	__syncthreads();
	if (i)
		return;
	uint32_t m = 0, at;

	if (!n) { /* no counts: keep symbol 0 */
		r->weight[0] = 1;
		r->symbol[0] = 0;
		n = 1;
	}
	for (uint32_t j = 0; j < n; j++)
		if (r->weight[j]) {
			r->weight[m] = r->weight[j];
			r->symbol[m++] = r->symbol[j];
		}
	for (at = m; at && r->weight[at - 1] > escape; at--) {
		r->weight[at] = r->weight[at - 1];
		r->symbol[at] = r->symbol[at - 1];
	}
	r->weight[at] = escape;
	r->symbol[at] = WIRE_ESCAPE;
	r->live = m + 1;
}

/*
 * Compute code lengths (257 bytes, the escape's last) from 256 counts, as book_from_counts does. Lengths are at most
 * max_code_length.
 */
DEVICE_CALL void cta_book(const uint32_t *counts, uint32_t max_code_length, uint8_t *length, book_room *r)
{
	uint32_t n = 0, take;

	find_leaves(counts, max_code_length, r);
	__syncthreads();
	for (uint32_t l = 0; l < max_code_length; l++) {
		uint32_t packs = n / 2, *before = r->list[l & 1], *next = r->list[~l & 1];

		for (uint32_t i = threadIdx.x; i < r->live; i += CTA_THREADS) {
			uint32_t place = i + packages_below(before, packs, r->weight[i]);

			r->place[l][i] = (uint16_t)place;
			next[place] = r->weight[i];
		}
		for (uint32_t p = threadIdx.x; p < packs; p += CTA_THREADS) {
			uint32_t sum = before[2 * p] + before[2 * p + 1];

			next[p + leaves_up_to(r->weight, r->live, sum)] = sum;
		}
		n = r->live + packs;
		__syncthreads();
	}
	take = 2 * r->live - 2;
	for (uint32_t i = threadIdx.x; i < LEAVES; i += CTA_THREADS)
		length[i] = 0;
	for (uint32_t l = max_code_length; l-- > 0;) {
		__syncthreads();
		if (threadIdx.x == 0)
			r->leaves = 0;
		__syncthreads();
		for (uint32_t i = threadIdx.x; i < r->live; i += CTA_THREADS)
			if (r->place[l][i] < take) {
				atomicAdd(&r->leaves, 1u);
				length[r->symbol[i]]++;
			}
		__syncthreads();
		take = 2 * (take - r->leaves);
	}
	__syncthreads();
}

/* Compute codes and decoding tables (layout: common/job.cuh) from code lengths, as book_to_codes does. */
DEVICE_CALL void cta_codes(const uint8_t *length, uint8_t *table, book_room *r)
{
	uint32_t i = threadIdx.x, l = length[i], e = length[WIRE_ESCAPE], first = 0, rank = 0, below = 0;

	if (i < WIRE_MAX_CODE_LENGTH + 2)
		r->count[i] = 0;
	if (i == 0)
		r->escape = 0;
	__syncthreads();
	if (l)
		atomicAdd(&r->count[l], 1u);
	else
		atomicMax(&r->escape, i);
	if (i == 0)
		atomicAdd(&r->count[e], 1u);
	__syncthreads();
	for (uint32_t k = 1; k < (l ? l : e); k++)
		first = (first + r->count[k]) << 1;
	below = first + r->count[e] - 1; /* a symbol without a code has the escape's */
	for (uint32_t j = 0; j < i; j++)
		rank += length[j] == l;
	table[i] = (uint8_t)(l ? first + rank : below);
	table[TABLE_LENGTHS + i] = (uint8_t)(l ? l : 0x80 | e);
	if (i == 0) {
		table[TABLE_ESCAPE] = (uint8_t)r->escape;
		r->pad = r->escape;
	}
	__syncthreads();
	if (l && first + rank == 0)
		r->pad = i;
	__syncthreads();
	if (i == 0)
		table[TABLE_PAD] = (uint8_t)r->pad;
}

/* Return what counts cost in bits, as book_cost does. `literal`: bits of a literal. */
DEVICE_CALL uint64_t cta_cost(const uint8_t *length, const uint32_t *counts, uint32_t literal)
{
	uint32_t l = length[threadIdx.x];

	return cta_sum((uint64_t)counts[threadIdx.x] * (l ? l : length[WIRE_ESCAPE] + literal));
}

/* Shared memory of a warp that computes a cost. */
struct cost_room {
	uint32_t live[LEAVES], leaf[LEAVES], node[LEAVES];
};

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
	for (uint32_t left = n, i = 0, from = 0, to = 0; lane == 0 && left > 1; left--) {
		uint32_t pair = 0;

		for (int k = 0; k < 2; k++)
			pair += from == to || (i < n && room->leaf[i] <= room->node[from]) ? room->leaf[i++]
											   : room->node[from++];
		room->node[to++] = pair;
		cost += pair;
	}
	__syncwarp();
	return __shfl_sync(FULL, cost, 0) + 8ull * rest;
}

#endif
