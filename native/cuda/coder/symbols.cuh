/* coder/symbols.cuh - count the symbols of a sample, to decide which offsets of the scale model save bits. */
#ifndef CODEC_CUDA_CODER_SYMBOLS_CUH
#define CODEC_CUDA_CODER_SYMBOLS_CUH

#include "coder/sample.cuh"

/* Shared memory of a CTA that counts symbols. */
struct count_room {
	uint32_t raw[256], lowered[256], based[256];
	codec_model_part part;
};

/* Share `share` of `shares` of a part's sample of symbols. model: false if no part has offsets. */
struct symbol_share {
	const codec_model_part *part;
	const uint8_t *values;
	bool model;
	uint32_t share, shares;
};

/*
 * Patterns of a row of 128 values, four of each lane, and the offsets to lower them by. empty: true if all bits of the
 * row's values are 0.
 */
struct sampled_row {
	uint32_t pattern[4], by[4];
	bool empty;
};
#define NO_PATTERN ~0u /* behind the part's last value; patterns have at most 16 bits */

/* Load the row at value `at` of a part. */
DEVICE sampled_row load_row(const codec_view *v, uint8_t *memory, const sample_kind &q, const codec_model_part *part,
			    const uint8_t *values, bool fitted, uint64_t at)
{
	const uint16_t *row_offset = row_offsets(v, memory, part), *col_offset = col_offsets(v, memory, part);
	const uint32_t circle = WIRE_CIRCLE(q.zero), lane = threadIdx.x % 32;
	const uint64_t row = part->row,
		       r = !row       ? 0
			   : at >> 32 ? at / row
				      : (uint32_t)at / (uint32_t)row,
		       first = at - r * row;
	/* offsets of the up to three rows in which a run of 128 values lies, since rows have at least 64 values */
	uint32_t offset[3] = {0}, in_row[4];
	uint64_t some = 0;
	sampled_row x;

#pragma unroll
	for (uint32_t k = 0; k < 4; k++) { /* issue all loads before their results are used */
		uint64_t e = lane + 32 * k, col = first + e;
		const bool exists = at + e < part->count;
		const uint64_t word = exists ? word_of(values, q.size, part->start + at + e) : 0;

		some |= word;
		x.pattern[k] = exists ? pattern_of(word, q.size) : NO_PATTERN;
		in_row[k] = 0;
		for (uint32_t next = 0; next < 2; next++)
			if (row && col >= row) {
				col -= row;
				in_row[k]++;
			}
		x.by[k] = around(q, part->base);
		if (part->kind & WIRE_SEGMENT_COLS)
			x.by[k] = once_round(x.by[k] + col_offset[col], circle);
	}
	for (uint32_t k = 0; part->kind && k < 3 && (r + k) * row < at + WIRE_ROW && (r + k) * row < part->count; k++)
		offset[k] = fitted ? row_offset[r + k]
				   : around(q, fit_row(part, values, q.size, q.octave, q.zero, r + k, lane));
#pragma unroll
	for (uint32_t k = 0; k < 4; k++) {
		x.by[k] += in_row[k] == 0 ? offset[0] : in_row[k] == 1 ? offset[1] : offset[2];
		x.by[k] = once_round(x.by[k], circle);
	}
	x.empty = !__any_sync(FULL, some != 0);
	return x;
}

/*
 * Count the symbols of plane 0 in a share of a part's sample: without offsets and, if `model`, also with offsets.
 */
DEVICE_CALL void sample_symbols(const codec_view *v, uint8_t *memory, const sample_kind &q, const symbol_share &s,
				codec_part_found *f, count_room *room)
{
	const bool model = s.model;
	const uint16_t based_only = model ? around(q, base_without_offsets(q, s.part)) : 0;
	const auto lowered = [&](uint32_t pattern, uint32_t by) {
		return bits_lower((uint16_t)pattern, (uint16_t)by, (uint16_t)q.zero) >> q.shift & 255;
	};

	room->raw[threadIdx.x] = room->lowered[threadIdx.x] = room->based[threadIdx.x] = 0;
	if (threadIdx.x == 0)
		room->part = *s.part;
	__syncthreads();
	const codec_model_part *part = &room->part;
	const uint64_t nrows = (part->count + WIRE_ROW - 1) / WIRE_ROW, n = (v->n + WIRE_ROW - 1) / WIRE_ROW;
	const uint64_t stride = choose_stride(n), take = (nrows + stride - 1) / stride;
	const bool fitted = is_fitted(part);

	for (uint64_t i = s.share * CTA_WARPS + threadIdx.x / 32; i < take; i += s.shares * CTA_WARPS) {
		const sampled_row x =
			load_row(v, memory, q, part, s.values, fitted, WIRE_ROW * choose_spread(i, take, nrows));

#pragma unroll
		for (uint32_t k = 0; k < 4; k++) {
			if (x.pattern[k] == NO_PATTERN)
				continue;
			if (x.empty) {
				atomicAdd(&f->empty, 1u);
				continue;
			}
			atomicAdd(room->raw + (x.pattern[k] >> q.shift & 255), 1u);
			if (!model)
				continue;
			atomicAdd(room->lowered + lowered(x.pattern[k], x.by[k]), 1u);
			if (q.based)
				atomicAdd(room->based + lowered(x.pattern[k], based_only), 1u);
		}
	}
	__syncthreads();
	const uint32_t i = threadIdx.x;

	if (room->raw[i])
		atomicAdd(f->raw + i, room->raw[i]);
	if (room->lowered[i])
		atomicAdd(f->lowered + i, room->lowered[i]);
	if (room->based[i])
		atomicAdd(f->based + i, room->based[i]);
}

/* Add to `sum` the counts shifted down by a base of `by` symbols, as choose_add_lowered does. */
DEVICE void add_lowered(const volatile uint32_t *counts, uint32_t by, uint32_t *sum)
{
	const uint32_t i = threadIdx.x, n = counts[i];

	if (n)
		atomicAdd(sum + (i ? 1 + (i - 1 + 255 - by % 255) % 255 : 0), n);
}

/* Shared memory of a CTA that runs decide_part. */
struct decide_room {
	uint32_t raw[256], lowered[256];
	cost_room cost[2];
	uint64_t bits[2];
};

/*
 * Drop a part's offsets unless they save bits. Add the part's symbol counts to the counts of all parts, which are not
 * used for float8.
 */
DEVICE_CALL void decide_part(const codec_view *v, const sample_kind &q, codec_model_part *part, codec_choice *c,
			     codec_part_found *f, decide_room *room)
{
	uint32_t warp = threadIdx.x / 32;
	bool pays = q.flat || (v->codec == CODEC_LOSSLESS && v->variant == CODEC_MODEL_SEPARABLE);
	uint16_t base = base_without_offsets(q, part);

	room->raw[threadIdx.x] = ((const volatile uint32_t *)f->raw)[threadIdx.x];
	room->lowered[threadIdx.x] = ((const volatile uint32_t *)f->lowered)[threadIdx.x];
	__syncthreads();
	if (warp < 2) {
		uint64_t bits = warp_cost(warp ? room->lowered : room->raw, room->cost + warp, threadIdx.x % 32);

		if (threadIdx.x % 32 == 0)
			room->bits[warp] = bits;
	}
	/* the barriers in cta_sum also order accesses to room->bits */
	const uint32_t empty = *(const volatile uint32_t *)&f->empty;
	uint64_t samples = cta_sum(room->raw[threadIdx.x]) + empty;

	pays |= choose_offsets_pay(room->bits[0], room->bits[1], samples, part->count,
				   part_rows(part) + part_cols(part));
	if (threadIdx.x == 0) {
		atomicAdd(&c->nzeros, (unsigned long long)room->lowered[0] + empty);
		atomicAdd(&c->nvalues, (unsigned long long)samples);
	}
	if (pays)
		return add_lowered(f->lowered, 0, c->all);
	__syncthreads();
	if (threadIdx.x == 0)
		set_base_only(part, base);
	if (q.based) /* float64: symbols wrap around after 256, patterns only after 2047 symbols */
		return add_lowered(f->based, 0, c->all);
	add_lowered(f->raw, q.octave > 128 ? base : base / 8u, c->all);
}

#endif
