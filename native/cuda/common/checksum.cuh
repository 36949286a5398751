/* common/checksum.cuh - digests by a warp: a word a lane, 128 bytes at a time. docs/format.md, section 11. */
#ifndef CODEC_CUDA_COMMON_CHECKSUM_CUH
#define CODEC_CUDA_COMMON_CHECKSUM_CUH

#include "common/warp.cuh"

#define CHUNK_ROWS (WIRE_CHUNK_WORDS / 32)

static __device__ const uint32_t SEAL_KEY[WIRE_CHUNK_WORDS] = {SEAL_KEYS};

/*
 * Of bytes that pass by in rows: the chunk's sum over this lane's words; of the chunk, of the last 32, that is this
 * lane's, all of it. Sums are mixed by all lanes at once.
 */
struct digest {
	uint64_t sum, mine;
};

/* A word of row `row`, whose chunk's rows come one after the other. */
DEVICE void digest_word(digest *d, uint32_t word, uint32_t row, uint32_t lane)
{
	d->sum += (uint64_t)word * SEAL_KEY[row % CHUNK_ROWS * 32 + lane];
}

/* That was all of a chunk. */
DEVICE void digest_end_chunk(digest *d, uint32_t chunk, uint32_t lane)
{
	uint64_t all = warp_sum(d->sum);

	d->mine = chunk % 32 == lane ? all : d->mine;
	d->sum = 0;
}

/* What chunks `first` to `first` + count - 1, at most 32, add to the seal. */
DEVICE uint64_t digest_sum(const digest *d, uint64_t first, uint32_t count, uint32_t seed, uint32_t lane)
{
	return warp_sum(lane < count ? seal_chunk(d->mine, seed, first + lane) : (uint64_t)0);
}

/* Of the i-th chunk of bytes in memory: over this lane's words. */
static __device__ uint64_t lane_sum(const uint8_t *p, uint64_t nbytes, uint64_t i, uint32_t lane)
{
	uint64_t from = 4 * WIRE_CHUNK_WORDS * i, sum = 0;

	if ((uint64_t)p % 4 == 0 && nbytes - from >= 4 * WIRE_CHUNK_WORDS) {
		const uint32_t *word = global((const uint32_t *)(p + from)) + lane;

#pragma unroll
		for (uint32_t k = 0; k < WIRE_CHUNK_WORDS; k += 32)
			sum += (uint64_t)word[k] * SEAL_KEY[k + lane];
		return sum;
	}
	for (uint32_t k = lane; k < WIRE_CHUNK_WORDS && from + 4 * k < nbytes; k += 32) {
		uint64_t left = nbytes - from - 4 * k;

		sum += (uint64_t)load_bytes(p + from + 4 * k, left < 4 ? (uint32_t)left : 4) * SEAL_KEY[k];
	}
	return sum;
}

/* Of the i-th chunk of bytes in memory. */
static __device__ uint64_t digest_chunk(const uint8_t *p, uint64_t nbytes, uint32_t seed, uint64_t i, uint32_t lane)
{
	return seal_chunk(warp_sum(lane_sum(p, nbytes, i, lane)), seed, i);
}

/* Of bytes in memory. */
static __device__ uint64_t digest_bytes(const uint8_t *p, uint64_t nbytes, uint32_t seed, uint32_t lane)
{
	uint32_t nchunks = (uint32_t)((nbytes + 4 * WIRE_CHUNK_WORDS - 1) / (4 * WIRE_CHUNK_WORDS));
	uint64_t total = 0;
	digest d = {0, 0};

	for (uint32_t i = 0; i < nchunks; i++) {
		d.sum = lane_sum(p, nbytes, i, lane);
		digest_end_chunk(&d, i, lane);
		if (i % 32 == 31 || i + 1 == nchunks)
			total += digest_sum(&d, i / 32 * 32, i % 32 + 1, seed, lane);
	}
	return total;
}

#endif
