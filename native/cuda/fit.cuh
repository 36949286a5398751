/* fit.cuh - offsets of rows that are found in the blocks. docs/encoder.md, section 4.2. */
#ifndef CODEC_FIT_CUH
#define CODEC_FIT_CUH

#include "exact/choose.h"
#include "model.cuh"

/* A value's pattern, of its bytes. */
DEVICE uint32_t pattern_at(const uint8_t *values, uint32_t size, uint64_t i)
{
	return (values[(i + 1) * size - 2] | (uint32_t)values[(i + 1) * size - 1] << 8) & 0x7fff;
}

/* The offset of row r of a part, which docs/encoder.md, section 4.2 has. */
static __device__ int fit_row(const codec_model_part *part, const uint8_t *values, uint32_t size, int octave,
			      uint32_t zero, uint64_t r, uint32_t lane)
{
	uint64_t first = part->start + r * part->row, n = part->start + part->count - first;
	uint32_t eighth = (uint32_t)__ffs(octave) - 4, sum = 0, count = 0;

	n = n < part->row ? n : part->row;
	for (uint64_t i = lane; i < (n > CHOOSE_RUNS * CHOOSE_RUN ? CHOOSE_RUNS * CHOOSE_RUN : n); i += 32) {
		uint64_t at = n > CHOOSE_RUNS * CHOOSE_RUN ? choose_run(i / CHOOSE_RUN, n) + i % CHOOSE_RUN : i;
		uint32_t pattern = pattern_at(values, size, first + at);

		sum += pattern >= zero ? pattern : 0;
		count += pattern >= zero;
	}
	sum = (uint32_t)warp_sum(sum);
	count = (uint32_t)warp_sum(count);
	return choose_offset(choose_eighths(choose_mean(sum, count), part->mean, (int)eighth), part->shifts & 15);
}

/*
 * Offsets of rows that values [first, first + m) lie in, where that was left for the blocks, to the job's memory. Warps
 * that share a row find the same.
 */
static __device__ void fit_rows(const job *j, uint8_t *memory, const uint8_t *values, uint32_t size, int octave,
				uint32_t zero, uint64_t first, uint32_t m, uint32_t lane)
{
	place o = place_at(j, first);

	for (uint64_t i = first; i < first + m;) {
		uint64_t nrows = o.part->row ? (o.part->count + o.part->row - 1) / o.part->row : 0;
		uint64_t after = o.part->start + o.part->count, step = after - i;

		if (o.part->kind & WIRE_SEGMENT_ROWS) {
			uint64_t row = (i - o.part->start) / o.part->row, end = o.part->start + (row + 1) * o.part->row;

			if (nrows > CHOOSE_ROWS) {
				int offset = fit_row(o.part, values, size, octave, zero, row, lane);

				if (lane == 0)
					((int8_t *)memory)[j->v.offsets.at + 2ull * o.part->nibbles_at + row] =
						(int8_t)offset;
			}
			step = (end < after ? end : after) - i;
		}
		i += step;
		if (i >= after && i < first + m)
			o = place_at(j, i);
	}
	__syncwarp();
}

#endif
