/*
 * coder/fit.cuh - compute row offsets of the scale model, one row per warp. docs/spec/encoder.md, section 4.2.
 *
 * The row offsets of a part are computed before the first block if the sample contains all rows (is_fitted). Otherwise
 * each block computes the offsets of the rows that it contains.
 */
#ifndef CODEC_CUDA_CODER_FIT_CUH
#define CODEC_CUDA_CODER_FIT_CUH

#include "exact/choose.h"
#include "coder/model.cuh"

/* Return the pattern of the value with bits `word`, of `size` bytes; see pattern_at. */
DEVICE uint32_t pattern_of(uint64_t word, uint32_t size)
{
	return (uint32_t)(size == 1 ? word << 8 : word >> (8 * size - 16)) & 0x7fff;
}

/*
 * Return the pattern of value i: exponent and upper mantissa bits, the 15 bits below the sign (float8: 7 bits, followed
 * by zeros). values: aligned to `size`, the bytes per value.
 */
DEVICE uint32_t pattern_at(const uint8_t *values, uint32_t size, uint64_t i)
{
	if (size == 1)
		return (global(values)[i] & 127u) << 8;
	return *global((const uint16_t *)(values + (i + 1) * size - 2)) & 0x7fff;
}

/* Return the mean pattern of a sample of row r; CHOOSE_NONE if no pattern in the sample is at least `zero`. */
DEVICE_CALL int row_mean(const codec_model_part *part, const uint8_t *values, uint32_t size, uint32_t zero, uint64_t r,
			 uint32_t lane)
{
	uint64_t first = part->start + r * part->row, n = part->start + part->count - first;
	uint32_t sum = 0, count = 0, runs = (uint32_t)choose_runs(size == 1);

	static_assert(CHOOSE_RUN == 32, "a lane takes a value of each run");
	n = n < part->row ? n : part->row;
	bool all = n <= runs * CHOOSE_RUN;

	uint32_t pattern[CHOOSE_RUNS8];

	for (uint32_t i = 0; i < CHOOSE_RUNS8; i++) {
		uint64_t at = (all ? CHOOSE_RUN * i : choose_run(i, runs, n)) + lane;

		pattern[i] = i < runs && at < n ? pattern_at(values, size, first + at) : 0;
	}
	for (uint32_t i = 0; i < CHOOSE_RUNS8; i++) {
		sum += pattern[i] >= zero ? pattern[i] : 0;
		count += pattern[i] >= zero;
	}
	return choose_mean(warp_sum(sum), warp_sum(count));
}

/* Return the offset of row r of a part, in eighths of an octave. */
DEVICE_CALL int fit_row(const codec_model_part *part, const uint8_t *values, uint32_t size, int octave, uint32_t zero,
			uint64_t r, uint32_t lane)
{
	int mean = row_mean(part, values, size, zero, r, lane);

	return choose_offset(choose_eighths(mean, part->mean, grain_log2(octave, size)), part->shifts & 15);
}

/* Return the number of row offsets of a part; 0 if its rows have no offsets. */
DEVICE uint64_t part_rows(const codec_model_part *part)
{
	return part->kind & WIRE_SEGMENT_ROWS ? (part->count + part->row - 1) / part->row : 0;
}

/* Return the number of column offsets of a part; 0 if its columns have no offsets. */
DEVICE uint64_t part_cols(const codec_model_part *part)
{
	return part->kind & WIRE_SEGMENT_COLS ? part->row : 0;
}

/* Return true if all row offsets of a part are computed before the first block is encoded. */
DEVICE bool is_fitted(const codec_model_part *part)
{
	return part_rows(part) <= CHOOSE_ROWS;
}

/* Return the address of a part's row offsets, in patterns; column offsets follow at an even index. */
DEVICE uint16_t *row_offsets(const codec_view *v, uint8_t *memory, const codec_model_part *part)
{
	return (uint16_t *)(memory + v->offsets.at) + 2ull * part->nibbles_at;
}

DEVICE uint16_t *col_offsets(const codec_view *v, uint8_t *memory, const codec_model_part *part)
{
	return row_offsets(v, memory, part) + (part_rows(part) + 1) / 2 * 2;
}

/*
 * Compute the offsets of the rows that contain values first to first + m - 1, unless they were computed before. If
 * several warps compute a row's offset, they write the same number.
 */
DEVICE_CALL void fit_rows(const job *j, uint8_t *memory, const uint8_t *values, uint32_t size, int octave,
			  uint32_t zero, uint64_t first, uint32_t m, uint32_t lane)
{
	place o = place_at(j, first);

	for (uint32_t todo = m; todo;) {
		uint64_t step = o.left;

		if (o.length) {
			if (!is_fitted(o.part)) {
				int offset = fit_row(o.part, values, size, octave, zero, o.row, lane);

				if (lane == 0)
					row_offsets(&j->v, memory, o.part)[o.row] =
						on_circle(offset, grain_of(&j->v), circle_of(&j->v));
			}
			step = step < o.length - o.column ? step : o.length - o.column;
		}
		if (step >= todo)
			break;
		todo -= (uint32_t)step;
		o.left -= step;
		o.row++, o.column = 0;
		if (!o.left)
			o = place_at(j, first + m - todo);
	}
	__syncwarp();
}

#endif
