/*
 * coder/sample.cuh - sample a tensor (planes, rows, columns) to choose the encoder's settings: docs/spec/encoder.md,
 * sections 4 and 5. coder/symbols.cuh counts the symbols.
 *
 * Each part of the scale model is fitted in three steps: row means and row offsets; column offsets; symbol counts,
 * which show if offsets save bits. Several CTAs share each step of a part, and the last CTA to finish completes the
 * step.
 */
#ifndef CODEC_CUDA_CODER_SAMPLE_CUH
#define CODEC_CUDA_CODER_SAMPLE_CUH

#include "coder/codebook.cuh"
#include "coder/fit.cuh"

#define PLANE_SHARES 8  /* number of tasks that sample planes */
#define PART_SHARES 128 /* maximum number of tasks for one step of a part */

/* Results of sampling one part of the scale model; 0 before the launch. */
struct codec_part_found {
	uint32_t rows, cols, counts; /* number of finished tasks of each step */
	/* flags: rows_ready is set once the row offsets are computed, cols_ready once the column offsets are */
	uint32_t rows_ready, cols_ready;
	uint32_t empty; /* number of values in empty quad rows, which the counts do not have */
	int16_t mean[CHOOSE_ROWS];
	uint64_t side_nibbles; /* size in bytes of the nibbles of all earlier parts in the side section */
	/* symbol counts: without offsets (raw), with offsets (lowered), with the base only (based; float64) */
	uint32_t raw[256], lowered[256], based[256];
};

/*
 * Results of sampling a tensor; 0 before the launch. Followed by a codec_part_found for each part. `counts`: final
 * symbol counts, equal to the result of codec_count; float8 with a scale model: [0] with the model, [1] without.
 */
struct codec_choice {
	uint32_t counts[WIRE_MAX_PLANES][256], all[256];
	uint32_t ticket; /* number of tasks that CTAs have claimed */
	/*
	 * done: number of finished tasks of each step (PLANES, PARTS, SYMBOLS); ready: flags, set once the result of
	 * PLANES or PARTS is available
	 */
	uint32_t done[3], ready[2];
	/*
	 * masks of planes: zero_runs: a sampled row of 128 bytes is all 0, but not all planes of the row are; varied:
	 * not all sampled bytes are equal
	 */
	uint32_t zero_runs, varied;
	uint32_t has_empty_row; /* not 0 if all bits of a sampled quad row are 0 */
	uint32_t under;         /* not 0 if another plane has a nonzero byte where plane 0 is 0 */
	int32_t finest;         /* finest shift of offsets */
	/* sample of planes without empty quad rows: number of 0 bytes, and of all bytes, of plane 0 */
	unsigned long long zeros, sampled;
	/* sample of symbols with empty quad rows: number of 0 symbols, and of all symbols */
	unsigned long long nzeros, nvalues;
	/* size in bytes of `lead`, the first bytes of the side section: codebooks and number of parts */
	uint32_t lead_nbytes;
	uint8_t lead[8 + WIRE_MAX_PLANES * BOOK_MAX_NBYTES + 4];
};

/* Sizes in bytes of the results for a tensor and for each part; the host reads this symbol. */
extern "C" __device__ const uint64_t choose_nbytes[] = {sizeof(codec_choice), sizeof(codec_part_found)};

/* Steps of all parts together: indices of codec_choice.done and ready. */
enum { PLANES, PARTS, SYMBOLS };

/* Constants of the job's dtype and codec for sampling. */
struct sample_kind {
	uint32_t size;
	/* octave: number of patterns in an octave; eighth: see grain_log2 */
	int octave, eighth;
	int shift;        /* index of the lowest bit of symbols in patterns */
	int most_shift;   /* largest shift of offsets */
	uint32_t zero;    /* smallest pattern to which offsets are applied */
	bool top;         /* see has_top */
	bool flat, based; /* flat: no offsets, one base for all values; based: a base is always needed (float64) */
};

/* Return the size of a value in bytes. */
DEVICE uint32_t size_of(uint32_t dtype)
{
	switch (dtype) {
	case CODEC_FLOAT32:
	case CODEC_INT32:
	case CODEC_UINT32: return 4;
	case CODEC_FLOAT64:
	case CODEC_INT64:
	case CODEC_UINT64: return 8;
	case CODEC_BFLOAT16:
	case CODEC_FLOAT16:
	case CODEC_INT16:
	case CODEC_UINT16: return 2;
	default: return 1;
	}
}

DEVICE sample_kind sample_kind_of(const codec_view *v)
{
	uint32_t size = size_of(v->dtype);
	int octave = octave_of(v->dtype);
	bool lossless = v->codec == CODEC_LOSSLESS;

	return {size,
		octave,
		octave ? grain_log2(octave, size) : 0,
		SHIFT_OF(size),
		is_float8(v->dtype) ? WIRE_MAX_SHIFT8 : WIRE_MAX_SHIFT,
		zero_of(v),
		has_top(v->dtype),
		(lossless && v->variant == CODEC_MODEL_FLAT) || v->n < CHOOSE_MODEL_MIN,
		v->dtype == CODEC_FLOAT64};
}

/* Convert an offset from eighths of an octave to patterns, modulo the number of patterns that the model changes. */
DEVICE uint16_t around(const sample_kind &q, int eighths)
{
	return on_circle(eighths, 1u << q.eighth, WIRE_CIRCLE(q.zero));
}

/* Return the offset, in patterns, of value i under the job's scale model. */
DEVICE uint16_t offset_of(const job *j, const sample_kind &q, uint64_t i)
{
	place o = place_at(j, i);

	return offset_at(&o, WIRE_CIRCLE(q.zero));
}

/* Return the bytes of value i as a little-endian word. values: aligned to `size` bytes. */
DEVICE uint64_t word_of(const uint8_t *values, uint32_t size, uint64_t i)
{
	switch (size) {
	case 1: return global(values)[i];
	case 2: return global((const uint16_t *)values)[i];
	case 4: return global((const uint32_t *)values)[i];
	default: return global((const uint64_t *)values)[i];
	}
}

/* Return the byte in plane p of the value whose bytes are `word`. offset: the value's offset, in patterns. */
DEVICE uint32_t plane_byte(const sample_kind &q, uint64_t word, uint32_t p, uint16_t offset)
{
	if (q.octave && q.size == 1)
		return lowered8((uint32_t)word, offset, q.zero);
	if (!q.octave || p > 1)
		return word >> 8 * (q.size - 1 - p) & 255;
	return bits_turn((uint16_t)(word >> 8 * (q.size - 2)), offset, q.shift) >> (8 - 8 * p) & 255;
}

/*
 * Count the bytes of planes from first_plane on, in share `share` of the sample of planes. j: job whose scale model is
 * applied to values (`shares` must be 1); NULL: no model. bins: shared memory, 256 counters per plane.
 */
DEVICE_CALL void sample_planes(const codec_view *v, const job *j, uint8_t *memory, const uint8_t *values,
			       uint32_t first_plane, uint32_t share, uint32_t shares, codec_choice *c, uint32_t *bins)
{
	const sample_kind q = sample_kind_of(v);
	uint64_t nrows = (v->n + WIRE_ROW - 1) / WIRE_ROW, take = choose_plane_rows(nrows, is_float8(v->dtype));
	uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;

	for (uint32_t i = threadIdx.x; i < 256 * q.size; i += CTA_THREADS)
		bins[i] = 0;
	if (j && warp == 0) /* offset of the first value, since all values are compared with the first one */
		fit_rows(j, memory, values, q.size, q.octave, q.zero, 0, 1, lane);
	__syncthreads();
	const uint64_t head = word_of(values, q.size, 0);
	const uint16_t head_offset = j ? offset_of(j, q, 0) : 0;

	for (uint64_t i = share * CTA_WARPS + warp; i < take; i += shares * CTA_WARPS) {
		uint64_t first = WIRE_ROW * choose_even(i, take, nrows), word[4];
		uint16_t offset[4] = {0};
		uint32_t n = v->n - first < WIRE_ROW ? (uint32_t)(v->n - first) : WIRE_ROW, zeros = 0, under = 0;

		if (j)
			fit_rows(j, memory, values, q.size, q.octave, q.zero, first, n, lane);
#pragma unroll
		for (uint32_t k = 0; k < 4; k++) /* issue all loads before their results are used */
			word[k] = lane + 32 * k < n ? word_of(values, q.size, first + lane + 32 * k) : 0;
#pragma unroll
		for (uint32_t k = 0; k < 4; k++)
			offset[k] = j && lane + 32 * k < n ? offset_of(j, q, first + lane + 32 * k) : 0;
		const bool empty = !__any_sync(FULL, (word[0] | word[1] | word[2] | word[3]) != 0);

		for (uint32_t p = first_plane; p < q.size; p++) {
			uint32_t value = plane_byte(q, head, p, head_offset), any = 0, differ = 0;

#pragma unroll
			for (uint32_t k = 0; k < 4; k++) {
				if (lane + 32 * k >= n)
					continue;
				uint32_t byte = plane_byte(q, word[k], p, offset[k]);
				bool zero = q.octave && !plane_byte(q, word[k], 0, offset[k]);

				differ |= byte ^ value;
				if (empty)
					continue;
				atomicAdd(bins + 256 * p + byte, 1u);
				any |= byte;
				zeros += zero && p == first_plane;
				under |= zero && byte;
			}
			bool run = !__any_sync(FULL, any != 0), varies = __any_sync(FULL, differ != 0);

			if (lane == 0 && run && !empty)
				atomicOr(&c->zero_runs, 1u << p);
			if (lane == 0 && varies)
				atomicOr(&c->varied, 1u << p);
		}
		zeros = (uint32_t)warp_sum(zeros);
		under = __any_sync(FULL, under != 0);
		if (lane == 0 && empty)
			atomicOr(&c->has_empty_row, 1u);
		if (lane == 0 && !empty) {
			atomicAdd(&c->zeros, (unsigned long long)zeros);
			atomicAdd(&c->sampled, (unsigned long long)n);
			if (under)
				atomicOr(&c->under, 1u);
		}
	}
	__syncthreads();
	for (uint32_t i = 256 * first_plane + threadIdx.x; i < 256 * q.size; i += CTA_THREADS)
		if (bins[i])
			atomicAdd((uint32_t *)c->counts + i, bins[i]);
}

/*
 * Choose the finest shift of offsets, after all shares of the sample of planes are done. bins: shared memory, 256
 * counters.
 */
DEVICE_CALL void conclude_planes(const codec_view *v, codec_choice *c, uint32_t *bins)
{
	const sample_kind q = sample_kind_of(v);
	const volatile codec_choice *seen = c;
	uint32_t i = threadIdx.x, values = 2 * (uint32_t)q.octave, n = q.top ? seen->counts[1][i] : 0;
	int finest = 0;

	if (q.based && i == 0 && choose_prunes(seen->zeros, seen->sampled) && !seen->under)
		/*
		 * blocks omit values whose byte in plane 0 is 0; other values of float64 do not have this byte in plane
		 * 1
		 */
		c->counts[1][0] = n = 0;
	bins[i] = 0;
	uint64_t total = cta_sum(n);

	if (q.octave && q.octave <= 128) { /* see choose_finest */
		atomicAdd(bins + i % values, n);
		__syncthreads();
		uint64_t squares = cta_sum(bins[i] * bins[i]);

		finest = choose_finest_of((~seen->varied | seen->zero_runs) >> 1 & 1,
					  choose_excess_of((uint32_t)squares, values, total), total);
	}
	if (i == 0)
		c->finest = finest;
}

/* Shared memory of a CTA that computes row and column offsets. */
struct fit_room {
	int8_t eighths[CHOOSE_ROWS];
	/* index of the first value of each row in the sample for columns */
	uint64_t at[CHOOSE_COL_ROWS8];
	int mean[CHOOSE_COL_ROWS8];                 /* mean pattern of the row under its rounded offset */
	int total[CTA_THREADS], count[CTA_THREADS]; /* per thread: sum of mean patterns, and number of rows */
};

#define SHIFT_AT_ONCE 16 /* number of offsets that a thread loads at once */

/* Return the shift, from `shift` to `most`, with which to store n offsets, as choose_shift does. */
template <class T> DEVICE_CALL int cta_shift(const T *eighths, uint64_t n, int shift, int most)
{
	uint64_t outside[WIRE_MAX_SHIFT] = {0};

	if (shift >= most)
		return shift;
	for (uint64_t i = threadIdx.x; i < n; i += SHIFT_AT_ONCE * CTA_THREADS) {
		T x[SHIFT_AT_ONCE];

#pragma unroll
		for (uint32_t k = 0; k < SHIFT_AT_ONCE; k++)
			x[k] = i + k * CTA_THREADS < n ? eighths[i + k * CTA_THREADS] : 0;
#pragma unroll
		for (uint32_t k = 0; k < SHIFT_AT_ONCE; k++)
			for (int by = 0; by < WIRE_MAX_SHIFT; by++) {
				int nibble = choose_nibble(x[k], by);

				outside[by] += choose_clamped(nibble) != nibble;
			}
	}
	static_assert(WIRE_MAX_SHIFT == 3, "three counts are packed");
	if (n < 1u << 21) { /* three counts of 21 bits each fit one 64-bit sum */
		uint64_t all = cta_sum(outside[0] | outside[1] << 21 | outside[2] << 42), mask = (1u << 21) - 1;

		for (int by = 0; by < WIRE_MAX_SHIFT; by++)
			outside[by] = all >> 21 * by & mask;
	} else {
		for (int by = 0; by < WIRE_MAX_SHIFT; by++)
			outside[by] = cta_sum(outside[by]);
	}
#pragma unroll
	for (int by = 0; by < WIRE_MAX_SHIFT; by++)
		if (by >= shift && by < most && 32 * outside[by] <= n)
			return by;
	return most;
}

/* Return the base of a part that has no offsets. */
DEVICE uint16_t base_without_offsets(const sample_kind &q, const codec_model_part *part)
{
	return choose_base(part->mean, q.eighth, (int)q.zero, q.top ? WIRE_MAX_SHIFT : 0, 0);
}

/* Remove the row and column offsets of a part, and set its base. */
DEVICE void set_base_only(codec_model_part *part, uint16_t base)
{
	part->kind = part->shifts = 0;
	part->row = 0;
	part->base = base;
}

/* Compute the mean pattern of each row in share `share` of a part's sample. */
DEVICE_CALL void sample_rows(const sample_kind &q, const codec_model_part *part, const uint8_t *values, uint32_t share,
			     uint32_t shares, codec_part_found *f)
{
	uint64_t nrows = part_rows(part), take = nrows < CHOOSE_ROWS ? nrows : CHOOSE_ROWS;
	uint32_t lane = threadIdx.x % 32;

	for (uint64_t i = share * CTA_WARPS + threadIdx.x / 32; i < take; i += shares * CTA_WARPS) {
		int mean = row_mean(part, values, q.size, q.zero, choose_spread(i, take, nrows), lane);

		if (lane == 0)
			f->mean[i] = (int16_t)mean;
	}
}

/* Compute a part's mean pattern, shift, row offsets and base, from mean patterns of its rows. */
DEVICE_CALL void fit_part(const codec_view *v, uint8_t *memory, const sample_kind &q, codec_model_part *part,
			  const codec_choice *c, const codec_part_found *f, fit_room *room)
{
	uint64_t nrows = part_rows(part), take = nrows < CHOOSE_ROWS ? nrows : CHOOSE_ROWS, count = 0;
	const volatile int16_t *from = f->mean;
	uint64_t sum = 0;
	int centre, shift, mean[CHOOSE_ROWS / CTA_THREADS];

#pragma unroll
	for (uint32_t k = 0; k < CHOOSE_ROWS / CTA_THREADS; k++) {
		uint32_t i = threadIdx.x + k * CTA_THREADS;

		mean[k] = i < take ? from[i] : CHOOSE_NONE;
	}
#pragma unroll
	for (uint32_t k = 0; k < CHOOSE_ROWS / CTA_THREADS; k++)
		if (mean[k] != CHOOSE_NONE) { /* means are below 2^15: one 64-bit sum has their sum and number */
			sum += (uint64_t)mean[k];
			count += 1ull << 32;
		}
	sum = cta_sum(sum + count);
	count = sum >> 32;
	centre = count ? bits_mean((int64_t)(sum & 0xffffffffu), (int64_t)count) : choose_centre(q.octave);
#pragma unroll
	for (uint32_t k = 0; k < CHOOSE_ROWS / CTA_THREADS; k++) {
		uint32_t i = threadIdx.x + k * CTA_THREADS;

		if (i < take)
			room->eighths[i] = (int8_t)choose_eighths(mean[k], (uint16_t)centre, q.eighth);
	}
	__syncthreads();
	shift = cta_shift(room->eighths, take, c->finest, q.most_shift);
	for (uint64_t i = threadIdx.x; i < take && is_fitted(part); i += CTA_THREADS)
		row_offsets(v, memory, part)[i] = around(q, choose_offset(room->eighths[i], shift));
	__syncthreads();
	if (threadIdx.x)
		return;
	part->mean = (uint16_t)centre;
	part->shifts = (uint8_t)shift;
	if (q.flat)
		set_base_only(part, base_without_offsets(q, part));
	else
		part->base = choose_base(part->mean, q.eighth, (int)q.zero, c->finest, part->kind);
}

#define COL_AT_ONCE 16 /* number of a column's values that a thread loads at once */

/*
 * Compute unrounded column offsets, in eighths of an octave (int16_t), for share `share` of a part's columns: the mean
 * over sampled rows of (pattern - row offset). The sample is the first of the rows that sample_rows chose, whose means
 * are in f->mean, or all rows. Several threads share the rows of a column.
 */
DEVICE_CALL void sample_cols(const codec_view *v, uint8_t *memory, const sample_kind &q, const codec_model_part *part,
			     const uint8_t *values, uint32_t share, uint32_t shares, const codec_part_found *f,
			     fit_room *room)
{
	const uint64_t nrows = part_rows(part), row = part->row, each = (row + shares - 1) / shares;
	const uint32_t take = (uint32_t)choose_col_rows(nrows, !q.top);
	uint32_t width = 32;

	for (uint32_t t = threadIdx.x; t < take; t += CTA_THREADS) {
		uint64_t r = choose_spread(t, take, nrows);
		uint64_t i = nrows > CHOOSE_ROWS ? t : r; /* index of the row in the sample of sample_rows */
		int eighths = choose_eighths(f->mean[i], part->mean, q.eighth);

		room->at[t] = part->start + r * row;
		room->mean[t] = part->mean + choose_offset(eighths, part->shifts & 15) * (1 << q.eighth);
	}
	while (width < CTA_THREADS && width < each)
		width *= 2;
	const uint32_t group = threadIdx.x / width, groups = CTA_THREADS / width;

	for (uint64_t first = (uint64_t)share * width; first < row; first += (uint64_t)shares * width) {
		uint64_t col = first + threadIdx.x % width;
		int total = 0, count = 0;

		__syncthreads();
		for (uint32_t i = COL_AT_ONCE * group; i < take; i += COL_AT_ONCE * groups) {
			uint32_t pattern[COL_AT_ONCE];

#pragma unroll
			for (uint32_t k = 0; k < COL_AT_ONCE; k++)
				pattern[k] = i + k < take && col < row
						     ? pattern_at(values, q.size, room->at[i + k] + col)
						     : 0;
#pragma unroll
			for (uint32_t k = 0; k < COL_AT_ONCE; k++)
				if (pattern[k] >= q.zero) { /* zero is at least 1 */
					total += (int)pattern[k] - room->mean[i + k];
					count++;
				}
		}
		room->total[threadIdx.x] = total;
		room->count[threadIdx.x] = count;
		__syncthreads();
		if (group || col >= row)
			continue;
		for (uint32_t g = 1; g < groups; g++) {
			total += room->total[threadIdx.x + g * width];
			count += room->count[threadIdx.x + g * width];
		}
		col_offsets(v, memory, part)[col] = (uint16_t)choose_mean_eighths(total, count, q.eighth);
	}
}

/* Choose the shift of column offsets, round the offsets from sample_cols to it, and convert them to patterns. */
DEVICE_CALL void fit_cols(const codec_view *v, uint8_t *memory, const sample_kind &q, codec_model_part *part,
			  const codec_choice *c)
{
	uint16_t *cols = col_offsets(v, memory, part);
	const int16_t *eighths = (const int16_t *)cols;
	const uint64_t n = part->row;
	int shift = cta_shift(eighths, n, c->finest, q.most_shift);

	for (uint64_t i = threadIdx.x; i < n; i += SHIFT_AT_ONCE * CTA_THREADS) {
		int16_t x[SHIFT_AT_ONCE];

#pragma unroll
		for (uint32_t k = 0; k < SHIFT_AT_ONCE; k++)
			x[k] = i + k * CTA_THREADS < n ? eighths[i + k * CTA_THREADS] : 0;
#pragma unroll
		for (uint32_t k = 0; k < SHIFT_AT_ONCE; k++)
			if (i + k * CTA_THREADS < n)
				cols[i + k * CTA_THREADS] = around(q, choose_offset(x[k], shift));
	}
	__syncthreads();
	if (threadIdx.x == 0)
		part->shifts |= (uint8_t)(shift << 4);
}

/*
 * Write the first bytes of the side section to c->lead: id of an agreed codebook, codebooks, number of segment records.
 * coded: mask of planes with a codebook. name: id of the agreed codebook; 0: there is none.
 */
DEVICE_CALL void write_lead(const codec_view *v, const uint8_t *memory, uint32_t coded, uint64_t name,
			    uint64_t nrecords, codec_choice *c)
{
	uint32_t at = name ? 8 : 0, i = threadIdx.x;

	__syncthreads(); /* all threads have written their code lengths to memory */
	for (uint32_t p = 0; p < WIRE_MAX_PLANES; p++)
		if (coded >> p & 1 && !(p == 0 && name))
			at += cta_pack(memory + v->lengths.at + LEAVES * p, c->lead + at);
	if (name && i < 8)
		c->lead[i] = (uint8_t)(name >> 8 * i);
	if (nrecords && i < 4)
		c->lead[at + i] = (uint8_t)(nrecords >> 8 * i);
	at += nrecords ? 4 : 0;
	if (i == 0)
		c->lead_nbytes = at;
	__syncthreads();
}

/* Set the offsets of sections in the frame, given the size of the side section. */
DEVICE void place_sections(codec_view *v, uint64_t side_nbytes)
{
	v->side_nbytes = (side_nbytes + WIRE_ALIGN - 1) / WIRE_ALIGN * WIRE_ALIGN;
	v->directory_offset = v->side_offset + v->side_nbytes;
	v->planes_offset = v->directory_offset + WIRE_DIRECTORY_ENTRY * v->nblocks;
	v->regions_offset = v->planes_offset + v->plane_stride * __popc(v->fixed);
}

#endif
