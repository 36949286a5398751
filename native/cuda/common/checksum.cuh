/*
 * common/checksum.cuh - checksums of bytes, computed by a warp in steps of 32 words (128 bytes), one word per lane.
 * Definition: docs/spec/format.md, section 13.
 *
 * For each chunk of WIRE_CHUNK_WORDS words, words are multiplied by keys and summed up, and the sum is mixed with the
 * chunk's index. The checksum is the sum over all chunks. Both sums are of integers, so that the order of execution
 * does not matter.
 */
#ifndef CODEC_CUDA_COMMON_CHECKSUM_CUH
#define CODEC_CUDA_COMMON_CHECKSUM_CUH

#include "common/warp.cuh"

#define CHUNK_ROWS (WIRE_CHUNK_WORDS / 32)

static __device__ const uint32_t CHECKSUM_KEY[WIRE_CHUNK_WORDS] = {CHECKSUM_KEYS};

/*
 * A lane's state of the checksum of one stream of bytes. `sum`: sum over this lane's words of the current chunk.
 * `mine`: sum over all words of the latest chunk whose index modulo 32 equals this lane's number. So the lanes together
 * store the sums of 32 chunks, which digest_sum mixes at once.
 */
struct digest {
	uint64_t sum, mine;
};

/*
 * Add this lane's `word` of row `row` of the stream; a row is 32 words, one per lane. Rows of a chunk may be added in
 * any order.
 */
DEVICE void digest_word(digest *d, uint32_t word, uint32_t row, uint32_t lane)
{
	d->sum += (uint64_t)word * CHECKSUM_KEY[row % CHUNK_ROWS * 32 + lane];
}

/* End the current chunk, whose index is `chunk`: add up the sums of all lanes, and start the next chunk at 0. */
DEVICE void digest_end_chunk(digest *d, uint32_t chunk, uint32_t lane)
{
	uint64_t all = warp_sum(d->sum);

	d->mine = chunk % 32 == lane ? all : d->mine;
	d->sum = 0;
}

/*
 * Return the checksum of chunks `first` to `first` + count - 1. `count` is at most 32, since only the sums of the
 * latest 32 chunks are stored.
 */
DEVICE uint64_t digest_sum(const digest *d, uint64_t first, uint32_t count, uint32_t seed, uint32_t lane)
{
	return warp_sum(lane < count ? checksum_of_chunk(d->mine, seed, first + lane) : (uint64_t)0);
}

/* Load this lane's words of a whole chunk at address `from`, a multiple of 4 bytes. */
DEVICE void load_chunk(const uint8_t *from, uint32_t word[CHUNK_ROWS], uint32_t lane)
{
	for (uint32_t k = 0; k < CHUNK_ROWS; k++)
		word[k] = global((const uint32_t *)from)[32 * k + lane];
}

DEVICE uint64_t sum_chunk(const uint32_t word[CHUNK_ROWS], uint32_t lane)
{
	uint64_t sum = 0;

	for (uint32_t k = 0; k < CHUNK_ROWS; k++)
		sum += (uint64_t)word[k] * CHECKSUM_KEY[32 * k + lane];
	return sum;
}

/* Return the sum over this lane's words of chunk i of nbytes bytes at p, which may lie at any address. */
static __device__ uint64_t lane_sum(const uint8_t *p, uint64_t nbytes, uint64_t i, uint32_t lane)
{
	uint64_t from = 4 * WIRE_CHUNK_WORDS * i, sum = 0;

	if ((uint64_t)p % 4 == 0 && nbytes - from >= 4 * WIRE_CHUNK_WORDS) {
		uint32_t word[CHUNK_ROWS];

		load_chunk(p + from, word, lane);
		return sum_chunk(word, lane);
	}
	for (uint32_t k = lane; k < WIRE_CHUNK_WORDS && from + 4 * k < nbytes; k += 32) {
		uint64_t left = nbytes - from - 4 * k;

		sum += (uint64_t)load_bytes(p + from + 4 * k, left < 4 ? (uint32_t)left : 4) * CHECKSUM_KEY[k];
	}
	return sum;
}

/* Return the checksum of chunk i of nbytes bytes at p. */
static __device__ uint64_t digest_chunk(const uint8_t *p, uint64_t nbytes, uint32_t seed, uint64_t i, uint32_t lane)
{
	return checksum_of_chunk(warp_sum(lane_sum(p, nbytes, i, lane)), seed, i);
}

/* Return the checksum of nbytes bytes at p. */
DEVICE_CALL uint64_t digest_bytes(const uint8_t *p, uint64_t nbytes, uint32_t seed, uint32_t lane)
{
	uint32_t nchunks = (uint32_t)((nbytes + 4 * WIRE_CHUNK_WORDS - 1) / (4 * WIRE_CHUNK_WORDS));
	const uint32_t whole = (uint64_t)p % 4 ? 0 : (uint32_t)(nbytes / (4 * WIRE_CHUNK_WORDS));
	const uint32_t AT_ONCE = 2; /* number of chunks whose loads are in flight together */
	uint64_t total = 0;
	digest d = {0, 0};

	for (uint32_t i = 0; i < nchunks;) {
		if (i % AT_ONCE == 0 && i + AT_ONCE <= whole) {
			uint32_t word[AT_ONCE][CHUNK_ROWS];

			for (uint32_t k = 0; k < AT_ONCE; k++)
				load_chunk(p + 4 * WIRE_CHUNK_WORDS * (i + (uint64_t)k), word[k], lane);
			for (uint32_t k = 0; k < AT_ONCE; k++) {
				d.sum = sum_chunk(word[k], lane);
				digest_end_chunk(&d, i++, lane);
			}
		} else {
			d.sum = lane_sum(p, nbytes, i, lane);
			digest_end_chunk(&d, i++, lane);
		}
		if (i % 32 == 0 || i == nchunks)
			total += digest_sum(&d, (i - 1) / 32 * 32, (i - 1) % 32 + 1, seed, lane);
	}
	return total;
}

#endif
