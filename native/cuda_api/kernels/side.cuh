/*
 * side.cuh - read the side section of a frame on the device, as native/src/job/side.c does: codebooks, then the scale
 * model or the parts of a row codec. docs/spec/format.md, sections 5 and 8.
 *
 * All arrays are written to the frame's part of the workspace, whose memory_nbytes() bytes suffice for the largest
 * arrays that the format allows. Thread 0 reads sequential data (codebooks, records); all threads read offsets.
 */
#ifndef CODEC_CUDA_KERNELS_SIDE_CUH
#define CODEC_CUDA_KERNELS_SIDE_CUH

#include "kernels/header.cuh"
#include "exact/book.h"

#define LEAD_NBYTES (8 + WIRE_MAX_PLANES * BOOK_MAX_NBYTES) /* maximum bytes of codebooks in a side section */

/* Cursor over the side section: bytes [at, end) of the frame are still to be read. */
struct side {
	const uint8_t *frame;
	uint64_t at, end;
};

/*
 * Read the codebooks. lead: the first min(LEAD_NBYTES, end - at) bytes of the section. Called by thread 0.
 */
static __device__ codec_status read_books(side *s, const uint8_t *lead, const codec_view *v, codebook *books)
{
	const uint64_t from = s->at;

	if (v->flags & WIRE_FLAG_PRIOR)
		return s->end - s->at < 8 || !load64(lead) ? CODEC_BAD_SIDE : CODEC_UNKNOWN_CODEBOOK;
	for (int p = 0; p < WIRE_MAX_PLANES; p++) {
		if (!(v->coded >> p & 1))
			continue;
		int n = book_unpack(books + p, lead + (s->at - from), s->end - s->at);

		if (!n)
			return CODEC_BAD_SIDE;
		for (int i = 256 >> raw_bits_of(v, (uint32_t)p); i < 256; i++)
			if (books[p].length[i])
				return CODEC_BAD_SIDE;
		s->at += (uint64_t)n;
	}
	return CODEC_OK;
}

/* Return true if the record of a part of the scale model is valid; the part begins at value part->start. */
DEVICE bool model_part_valid(const codec_view *v, const codec_model_part *part)
{
	const bool octaves = v->codec == CODEC_TRUNCATE, rows = part->kind != 0,
		   cols = part->kind == (WIRE_SEGMENT_ROWS | WIRE_SEGMENT_COLS);
	const uint32_t bases = circle_of(v) / grain_of(v), row = part->row, rows_shift = part->shifts & 15,
		       cols_shift = part->shifts >> 4, most = is_float8(v->dtype) ? WIRE_MAX_SHIFT8 : WIRE_MAX_SHIFT;

	if (!part->count || part->count > v->n - part->start || (part->kind > WIRE_SEGMENT_ROWS && !cols))
		return false;
	if (cols ? row < WIRE_MATRIX_MIN || part->count % row || part->count / row < WIRE_MATRIX_MIN
		 : row != (rows ? WIRE_FLAT_ROW : 0))
		return false;
	if (rows_shift > (rows ? most : 0) || cols_shift > (cols ? most : 0) || part->base >= bases)
		return false;
	return !octaves || !(part->base % 8 || rows_shift != (rows ? WIRE_MAX_SHIFT : 0) ||
			     cols_shift != (cols ? WIRE_MAX_SHIFT : 0));
}

DEVICE uint64_t nibbles_nbytes(const codec_model_part *part)
{
	return (part_rows(part) + 1) / 2 + (part_cols(part) + 1) / 2;
}

/* Read the records of the scale model's parts. Sets s->at to the beginning of the offsets. Called by thread 0. */
static __device__ codec_status read_model_parts(side *s, codec_view *v, codec_model_part *parts)
{
	uint64_t count, start = 0, nibbles = 0, left;

	if (!(v->flags & WIRE_FLAG_SEGMENTS))
		return CODEC_OK;
	if (s->end - s->at < 4)
		return CODEC_BAD_SIDE;
	count = load32(s->frame + s->at);
	s->at += 4;
	if (!count || count > WIRE_MAX_PARTS(v->n) || count > (s->end - s->at) / WIRE_SEGMENT_NBYTES)
		return CODEC_BAD_SIDE;
	left = s->end - s->at - WIRE_SEGMENT_NBYTES * count;
	for (uint64_t i = 0; i < count; i++, s->at += WIRE_SEGMENT_NBYTES) {
		const uint8_t *record = s->frame + s->at;
		codec_model_part part = {};

		part.start = start;
		part.count = load64(record);
		part.row = load32(record + 8);
		part.kind = record[12];
		part.shifts = record[13];
		part.base = (uint16_t)(record[14] | record[15] << 8);
		part.nibbles_at = (uint32_t)nibbles;
		if (!model_part_valid(v, &part) || nibbles_nbytes(&part) > left)
			return CODEC_BAD_SIDE;
		parts[i] = part;
		left -= nibbles_nbytes(&part);
		nibbles += nibbles_nbytes(&part);
		start += part.count;
	}
	v->model_parts = {0, count, sizeof(codec_model_part)};
	v->offsets = {0, 2 * nibbles, sizeof(uint16_t)};
	return start == v->n ? CODEC_OK : CODEC_BAD_SIDE;
}

/*
 * Read n offsets from nibbles at src, each shifted left by `shift`, and convert them to patterns. Return true if the
 * padding of the last byte is invalid (not 0). Called by all threads.
 */
DEVICE bool read_nibbles(const codec_view *v, const uint8_t *src, uint64_t n, int shift, uint16_t *offsets)
{
	const uint32_t grain = grain_of(v) << shift, circle = circle_of(v);

	for (uint64_t i = threadIdx.x; i < n; i += blockDim.x)
		offsets[i] = on_circle((int)((src[i / 2] >> 4 * (i % 2) & 15u) ^ 8u) - 8, grain, circle);
	return n % 2 && src[n / 2] >> 4;
}

/*
 * Read the offsets of all parts, and set s->at to their end. Returns true if padding is invalid (not 0). Called by all
 * threads.
 */
static __device__ bool read_offsets(side *s, const codec_view *v, const codec_model_part *parts, uint16_t *offsets)
{
	const uint8_t *src = s->frame + s->at;
	bool bad = false;

	for (uint64_t i = 0; i < v->model_parts.count; i++) {
		const codec_model_part *part = parts + i;
		const uint64_t rows = part_rows(part), cols = part_cols(part);
		uint16_t *to = offsets + 2ull * part->nibbles_at;

		bad |= read_nibbles(v, src + part->nibbles_at, rows, part->shifts & 15, to);
		bad |= read_nibbles(v, src + part->nibbles_at + (rows + 1) / 2, cols, part->shifts >> 4,
				    to + (rows + 1) / 2 * 2);
	}
	__syncthreads();
	if (threadIdx.x == 0)
		s->at += v->offsets.count / 2;
	return bad;
}

/* Read the scales of a part of a row codec. Returns false if a scale is invalid. */
DEVICE bool read_part_scales(const uint8_t *p, const codec_view *v, codec_row_part *part)
{
	const int used = v->codec == CODEC_SIGN && v->variant == CODEC_SIGN_TWO_MEAN ? 2 : 1;

	for (int i = 0; i < 2; i++) {
		uint32_t u = load32(p + 4 * i);

		if (u >= (i < used ? ROUND_INF : 1))
			return false;
		part->scale[i] = round_float(u);
		if (v->codec == CODEC_TERNARY && round_bits(scale_in_dtype(part->scale[i], v->dtype)) != u)
			return false;
	}
	return true;
}

/* Read the parts of a row codec, and their scales. Called by thread 0. */
static __device__ codec_status read_row_parts(side *s, codec_view *v, codec_row_part *parts)
{
	const row_kind q = kind_of(v);
	uint64_t count = 1, start = 0, nblocks = 0;

	if (v->flags & WIRE_FLAG_SEGMENTS) {
		count = s->end - s->at < 4 ? 0 : load32(s->frame + s->at);
		if (!count || count > WIRE_MAX_ROW_PARTS(v->n) || count > (s->end - s->at - 4) / WIRE_SEGMENT_NBYTES)
			return CODEC_BAD_SIDE;
		s->at += 4;
	}
	for (uint64_t i = 0; i < count; i++) {
		codec_row_part part = {start, v->n, nblocks, 0, v->group_size, {0, 0}};

		if (v->flags & WIRE_FLAG_SEGMENTS) {
			const uint8_t *record = s->frame + s->at;

			part.count = load64(record);
			part.group_size = load32(record + 8);
			if (!part.count || part.count > v->n - start || !row_allowed(q, part.group_size) ||
			    load32(record + 12))
				return CODEC_BAD_SIDE;
			s->at += WIRE_SEGMENT_NBYTES;
		}
		parts[i] = part;
		start += part.count;
		nblocks += row_nblocks(q, part.group_size, part.count);
	}
	if (start != v->n)
		return CODEC_BAD_SIDE;
	for (uint64_t i = 0; i < count; i++) {
		if (!row_part_scaled(q, parts[i].group_size))
			continue;
		if (s->end - s->at < 8 || !read_part_scales(s->frame + s->at, v, parts + i))
			return CODEC_BAD_SIDE;
		s->at += 8;
	}
	v->row_parts = {0, count, sizeof(codec_row_part)};
	return nblocks == v->nblocks ? CODEC_OK : CODEC_BAD_SIDE;
}

/* Check that fewer than WIRE_ALIGN bytes of the side section are left, all of them 0. */
DEVICE codec_status close_side(const side *s)
{
	bool bad = s->end - s->at >= WIRE_ALIGN;

	for (uint64_t i = s->at; !bad && i < s->end; i++)
		bad = s->frame[i] != 0;
	return bad ? CODEC_BAD_SIDE : CODEC_OK;
}

#endif
