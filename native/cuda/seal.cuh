/* seal.cuh - digests by a warp: a word a lane, 128 bytes at a time. docs/format.md, section 11. */
#ifndef CODEC_SEAL_CUH
#define CODEC_SEAL_CUH

#include "warp.cuh"

#define CHUNK_ROWS (WIRE_CHUNK_WORDS / 32)

static __device__ const uint32_t SEAL_KEY[WIRE_CHUNK_WORDS] = {SEAL_KEYS};

/* Of bytes that pass by: the chunk's sum over this lane's words; chunks before it. */
struct digest {
	uint64_t sum, total;
};

/* Row `row` of them; `ends`: there is none behind it. */
DEVICE void digest_row(digest *d, uint32_t word, uint32_t row, bool ends, uint32_t seed, uint32_t lane)
{
	d->sum += (uint64_t)word * SEAL_KEY[row % CHUNK_ROWS * 32 + lane];
	if (ends || row % CHUNK_ROWS == CHUNK_ROWS - 1) {
		d->total += seal_chunk(warp_sum(d->sum), seed, row / CHUNK_ROWS);
		d->sum = 0;
	}
}

/* The same of rows that come the last one first. */
DEVICE void digest_row_back(digest *d, uint32_t word, uint32_t row, uint32_t seed, uint32_t lane)
{
	d->sum += (uint64_t)word * SEAL_KEY[row % CHUNK_ROWS * 32 + lane];
	if (row % CHUNK_ROWS == 0) {
		d->total += seal_chunk(warp_sum(d->sum), seed, row / CHUNK_ROWS);
		d->sum = 0;
	}
}

/* Of bytes in memory. */
static __device__ uint64_t digest_bytes(const uint8_t *p, uint64_t nbytes, uint32_t seed, uint32_t lane)
{
	uint32_t nrows = (uint32_t)((nbytes + 127) / 128);
	digest d = {0, 0};

	for (uint32_t r = 0; r < nrows; r++) {
		uint64_t at = 128ull * r + 4 * lane, left = at < nbytes ? nbytes - at : 0;

		digest_row(&d, load_bytes(p + at, left < 4 ? (uint32_t)left : 4), r, r + 1 == nrows, seed, lane);
	}
	return d.total;
}

/* Of the i-th chunk of bytes in memory. */
static __device__ uint64_t digest_chunk(const uint8_t *p, uint64_t nbytes, uint32_t seed, uint64_t i, uint32_t lane)
{
	uint64_t from = 4 * WIRE_CHUNK_WORDS * i, sum = 0;

	for (uint32_t k = lane; k < WIRE_CHUNK_WORDS && from + 4 * k < nbytes; k += 32) {
		uint64_t left = nbytes - from - 4 * k;

		sum += (uint64_t)load_bytes(p + from + 4 * k, left < 4 ? (uint32_t)left : 4) * SEAL_KEY[k];
	}
	return seal_chunk(warp_sum(sum), seed, i);
}

#endif
