/*
 * decode.c - decode a region to a block of values, and store or accumulate the values. Safe for any bytes: they give
 * values or an error.
 */
#include "rows.h"

#define BAD(where, found, expected) return fault(f, CODEC_BAD_REGION, where, found, expected)

static inline codec_status read_scale(const uint8_t *frame, uint64_t at, float *scale, codec_fault *f)
{
	uint32_t u = load32(frame + at);

	if (u >= ROUND_INF)
		BAD(at, u, ROUND_INF);
	*scale = round_float(u);
	return CODEC_OK;
}

/*
 * QUANTIZE with zero points: read a row's smallest and largest value. Set *scale to half their distance and *middle to
 * their midpoint.
 */
static inline codec_status read_ends(const uint8_t *frame, uint64_t at, uint32_t dtype, float *scale, float *middle,
				     codec_fault *f)
{
	uint64_t stored = dtype == CODEC_FLOAT32 ? load64(frame + at) : load32(frame + at);
	struct row_ends ends;

	if (!scale_open_ends(stored, dtype, &ends))
		BAD(at, stored, 0);
	*scale = ends.half;
	*middle = ends.middle;
	return CODEC_OK;
}

/* MXFP8: read the scales of nrows rows at frame[at]. */
static codec_status read_mx_scales(const uint8_t *frame, uint64_t at, const struct row_kind q, uint64_t nrows,
				   float *scale, codec_fault *f)
{
	const uint8_t *stored = frame + at;
	uint8_t most = 0;

	for (uint64_t r = 0; r < nrows; r++) {
		most = MAX(most, stored[r]);
		scale[r] = scale_byte_value(q, stored[r], 0);
	}
	if (most > q.scale_most) {
		at += first_above(stored, nrows, q.scale_most);
		BAD(at, frame[at], q.scale_most);
	}
	return CODEC_OK;
}

/*
 * Read the scales of n values in whole rows from frame[at] to w->scale. If rows have two numbers, w->scale_below
 * receives the second: SIGN's scale of negative values, or the midpoint of a QUANTIZE row with a zero point.
 */
static codec_status read_scales(const uint8_t *frame, uint64_t at, const struct row_kind *q, uint64_t nbytes,
				const struct part *p, uint64_t n, struct work *w, codec_fault *f)
{
	uint64_t nrows = row_count(p->group_size, n);

	if (q->codec == CODEC_FLOAT8 && row_is_mx(*q))
		return read_mx_scales(frame, at, *q, nrows, w->scale, f);
	for (uint64_t r = 0; r < nrows; r++, at += nbytes) {
		if (q->scale_most) {
			if (frame[at] > q->scale_most)
				BAD(at, frame[at], q->scale_most);
			w->scale[r] = scale_byte_value(*q, frame[at], p->scale[0]);
			if (round_bits(w->scale[r]) >= ROUND_INF) /* the product with the part's scale overflowed */
				BAD(at, round_bits(w->scale[r]), ROUND_MAX);
			continue;
		}
		if (q->affine) {
			TRY(read_ends(frame, at, q->dtype, w->scale + r, w->scale_below + r, f));
			continue;
		}
		TRY(read_scale(frame, at, w->scale + r, f));
		if (q->codec == CODEC_FLOAT8 && !(w->scale[r] > 0))
			BAD(at, round_bits(w->scale[r]), ROUND_INF);
		if (nbytes == 8) { /* two float32 per row; n is at most ROW_CHUNK values */
			TRY(read_scale(frame, at + 4, w->scale_below + r, f));
		} else if (q->codec == CODEC_SIGN) {
			w->scale_below[r] = w->scale[r];
		}
	}
	return CODEC_OK;
}

static void sign_run(const struct kernels *k, const uint8_t *bits, uint64_t from, uint64_t n, uint64_t row,
		     const struct work *w, int how, float_any *y)
{
	for (uint64_t i = 0; i < n; i += row) {
		float above = w->scale[i / row], below = w->scale_below[i / row];

		k->sign_values(bits, from + i, MIN(row, n - i), round_sign_below(below), above, how, y + i);
	}
}

/* A block's scales and codes, and their offsets in the frame, which codec_fault reports. */
struct coded {
	const struct part *part;
	const uint8_t *frame, *codes;
	uint64_t scales_at, codes_at;
	uint64_t first, m;
};

/*
 * Return the offset in the frame of a byte of codes, for codec_fault. If codes are entropy-coded, return the offset at
 * which the coded bytes begin.
 */
static uint64_t code_at(const struct coded *c, const uint8_t *code)
{
	return c->codes == c->frame + c->codes_at ? c->codes_at + (uint64_t)(code - c->codes) : c->codes_at;
}

/* Return the largest valid code of this codec. */
static uint8_t largest_code(const struct row_kind *q)
{
	if (q->codec == CODEC_TERNARY)
		return 2;
	return (uint8_t)(q->codec == CODEC_QUANTIZE ? q->odd ? 2 * q->levels : q->levels : 255);
}

/*
 * TERNARY: unpack codes [t, end) of a block, five per byte, to w->code. `last`: only unpack the codes of the last byte,
 * to check its padding.
 */
static codec_status open_trits(const struct kernels *k, const struct coded *c, uint64_t t, uint64_t end, int last,
			       struct work *w, codec_fault *f)
{
	uint64_t nbytes = (end - t + 4) / 5, from = last ? nbytes - 1 : 0;
	const uint8_t *src = c->codes + t / 5;

	if (k->max_byte(src, nbytes) > 242) {
		src += first_above(src, nbytes, 242);
		BAD(code_at(c, src), *src, 242);
	}
	k->unpack_trits(src + from, 5 * (nbytes - from), w->code + 5 * from);
	for (uint64_t i = end - t; i < 5 * nbytes; i++)
		if (w->code[i])
			BAD(code_at(c, src + nbytes - 1), w->code[i], 0);
	return CODEC_OK;
}

/*
 * Unpack codes [t, end) of a block to one byte each, and set *code to them; SIGN's codes remain packed bits. Check that
 * no code is too large and that the padding of the last byte is 0. If the block is only checked, codes may remain
 * packed.
 */
static codec_status open_codes(const struct kernels *k, const struct row_kind *q, const struct coded *c, uint64_t t,
			       uint64_t end, int checking, struct work *w, const uint8_t **code, codec_fault *f)
{
	uint64_t nbits = (end - t) * q->bits, at = (t * q->bits + nbits) / 8;
	uint8_t most = largest_code(q), rest = nbits % 8 ? c->codes[at] >> nbits % 8 : 0;
	int all = q->codec == CODEC_SIGN || !q->bits ||
		  most >= (1 << q->bits) - 1; /* if equal or larger, every bit pattern is a valid code */

	*code = q->bits == 8 ? c->codes + t : q->codec == CODEC_SIGN ? c->codes : w->code;
	if (!q->bits)
		return open_trits(k, c, t, end, checking, w, f);
	if (rest)
		BAD(c->codes_at + at, rest, 0);
	if (*code == w->code && !(checking && all))
		k->unpack_codes(c->codes + t * q->bits / 8, end - t, q->bits, w->code);
	if (!all && k->max_byte(*code, end - t) > most) {
		uint64_t i = first_above(*code, end - t, most);

		BAD(c->codes_at + (t + i) * q->bits / 8, (*code)[i], most);
	}
	return CODEC_OK;
}

/* Decode values [t, end) of a block to the sink, rows_run values at a time. */
static codec_status decode_tile(const struct job *j, const struct kernels *k, const struct row_kind *q,
				const struct coded *c, uint64_t t, uint64_t end, const uint8_t *code,
				const struct sink *sink, struct work *w, codec_fault *f)
{
	uint64_t row = c->part->group_size <= ROW_CHUNK ? c->part->group_size : 0, nbytes = row_scale_nbytes(*q), n;
	int half = j->h.dtype == CODEC_FLOAT16;
	int signs = q->codec == CODEC_SIGN, how = sink->into == CODEC_INTO_ADD ? SIGNS_ADD
						  : sink->nontemporal          ? SIGNS_NONTEMPORAL
									       : SIGNS_STORE;
	/* 1: round values to the frame's dtype before they are accumulated, as decoding to that dtype does */
	int rounds = j->h.dtype != CODEC_FLOAT32 && sink->into != CODEC_INTO_STORE && !sink->unscaled;

	for (uint64_t i = t; i < end; i += n) {
		float_any *there, *y;

		n = rows_run(c->part->group_size, i, end);
		if (row || (c->part->group_size && i % c->part->group_size == 0))
			TRY(read_scales(c->frame, c->scales_at + i / c->part->group_size * nbytes, q, nbytes, c->part,
					row ? n : 1, w, f));
		if (sink->into == SINK_NONE)
			continue;
		if (sink_takes_codes(sink)) {
			sink_put_codes(k, sink, c->first + i, n, code + i - t);
			continue;
		}
		there = rounds ? NULL : sink_room(sink, c->first + i, signs, signs && row % 8 == 0);
		y = there ? there : w->y;
		if (signs)
			sign_run(k, code, i, n, row ? row : n, w, there ? how : SIGNS_STORE, y);
		else
			k->decode_rows(q, code + i - t, n, row ? row : n, w->scale, w->scale_below, y);
		if (rounds) {
			k->from_float[half](w->y, n, w->half);
			k->to_float[half](w->half, n, w->y);
		}
		sink_put(k, sink, c->first + i, n, there ? NULL : w->y);
	}
	return CODEC_OK;
}

static codec_status decode_codes(const struct job *j, const struct kernels *k, const struct coded *c,
				 const struct sink *sink, struct work *w, codec_fault *f)
{
	uint64_t tile = c->part->group_size && c->part->group_size <= WIRE_ROW_BLOCK ? c->m : ROW_TILE;
	const struct row_kind q = header_kind(&j->h);
	const uint8_t *code;

	w->scale[0] = sink->unscaled ? 1 : c->part->scale[0];
	w->scale_below[0] = c->part->scale[q.variant == CODEC_SIGN_TWO_MEAN];
	for (uint64_t t = 0; t < c->m; t += tile) {
		uint64_t end = MIN(t + tile, c->m);

		TRY(open_codes(k, &q, c, t, end, sink->into == SINK_NONE, w, &code, f));
		TRY(decode_tile(j, k, &q, c, t, end, code, sink, w, f));
	}
	return CODEC_OK;
}

/* Find the scales and codes of block b in its region, frame[at, end). */
static codec_status open_block(const struct job *j, const struct kernels *k, const uint8_t *frame, uint64_t b,
			       uint64_t at, uint64_t end, struct work *w, struct coded *block, codec_fault *f)
{
	const struct row_kind q = header_kind(&j->h);
	struct place p = rows_place(j, b);
	uint64_t ncodes = row_codes_nbytes(q, p.n), codes_at = at + p.nscales;

	*block = (struct coded){p.part, frame, frame + codes_at, at, codes_at, p.first, p.n};
	if (q.entropy) {
		struct cursor c = {frame, codes_at, end};

		if (end - at < p.nscales + 4)
			BAD(at, end - at, p.nscales + 4);
		TRY(decode_bytes(j, k, w, &c, ncodes, &block->codes, f));
		TRY(close_region(&c, f));
	} else {
		if (end - at != ALIGN8(p.nscales + ncodes))
			BAD(at, end - at, ALIGN8(p.nscales + ncodes));
		for (uint64_t i = codes_at + ncodes; i < end; i++)
			if (frame[i])
				BAD(i, frame[i], 0);
	}
	return CODEC_OK;
}

codec_status rows_decode_block(const struct job *j, const struct kernels *k, const uint8_t *frame, uint64_t b,
			       uint64_t at, uint64_t end, const struct sink *sink, struct work *w, codec_fault *f)
{
	struct sink last = *sink;
	struct coded block;

	TRY(open_block(j, k, frame, b, at, end, w, &block, f));
	last.scale = block.part->scale[0];
	return decode_codes(j, k, &block, &last, w, f);
}

/* Write the residual of block b, which was just encoded to `region`: values of src minus the block's decoded values. */
codec_status rows_residual(const struct job *j, const struct kernels *k, const struct source *src,
			   const uint8_t *region, uint64_t b, float *residual, struct work *w)
{
	const codec_tensor dst = {.dtype = CODEC_FLOAT32, .data = residual, .nbytes = 4 * j->h.n};
	const struct sink sink = {
		.into = src->minus ? CODEC_INTO_ADD : SINK_RESIDUAL, .weight = 1, .dst = &dst, .src = src};
	struct place p = rows_place(j, b);
	const uint8_t *codes = header_kind(&j->h).entropy ? w->plane[0] : region + p.nscales;
	const struct coded block = {p.part, region, codes, 0, p.nscales, p.first, p.n};

	return decode_codes(j, k, &block, &sink, w, NULL);
}

codec_status rows_decode_blocks(const uint8_t *frame, const codec_tensor *dst, const codec_context *with,
				const struct job *j, codec_range *range, struct work *w)
{
	const int codes = dst && with->into >= CODEC_INTO_CODES; /* check_destination allows it for TERNARY only */
	const struct sink sink = {.into = dst ? sink_into(with->into, dst->dtype) : SINK_NONE,
				  .weight = codes ? 1 : with->weight,
				  .rescale = with->into == CODEC_INTO_SCALE_CODES,
				  .divide = with->divide,
				  .unscaled = codes,
				  .nontemporal = dst && is_nontemporal(with, dst),
				  .dst = dst};

	for (uint64_t b = range->first; b < range->first + range->count; b++) {
		uint64_t at, end;

		TRY(job_block(j, frame, with, b, &at, &end, &range->checksum));
		TRY(rows_decode_block(j, kernels_for(with), frame, b, at, end, &sink, w, with->fault));
	}
	return CODEC_OK;
}

/*
 * Return 1 if rows_sum_signs can decode this frame: SIGN's codes of each row fill whole bytes, and the dtype is
 * float32, because values of narrower dtypes must be rounded before they are added.
 */
int rows_sums_signs(const struct job *j)
{
	if (j->h.codec != CODEC_SIGN || j->h.dtype != CODEC_FLOAT32)
		return 0;
	for (const struct part *p = job_parts(j); p < job_parts(j) + j->nparts; p++)
		if (p->group_size % 8)
			return 0;
	return 1;
}

#define AT_ONCE 8 /* maximum number of frames per kernel call */

/*
 * SIGN: store in y the sum over `count` frames of values [i, i + n) of a block, which lie in one row. `more`: add to
 * the sum of earlier frames, which y contains. `by`: divisor of the sum; 0: none.
 */
static codec_status sum_row(const struct kernels *k, const struct row_kind *q, const struct coded *block, size_t count,
			    uint64_t i, uint64_t n, int more, float by, float_any *y, codec_fault *f)
{
	uint64_t nbytes = row_scale_nbytes(*q);
	struct signs signs[AT_ONCE];

	for (size_t s = 0; s < count; s++) {
		const struct coded *b = block + s;
		float above = b->part->scale[0], below = b->part->scale[q->variant == CODEC_SIGN_TWO_MEAN];

		if (b->part->group_size) {
			uint64_t at = b->scales_at + i / b->part->group_size * nbytes;

			TRY(read_scale(b->frame, at, &above, f));
			TRY(read_scale(b->frame, at + nbytes - 4, &below, f));
		}
		signs[s] = (struct signs){b->codes + i / 8, round_sign_below(below), above};
	}
	k->sign_sums(signs, count, n, more, by, y);
	return CODEC_OK;
}

/*
 * SIGN: add up block b of `count` frames into y, and divide the sums by `divide` unless it is 0. The frames have equal
 * parts, and rows_sums_signs accepts each. Add the checksum of block b of frame i to checksums[i].
 */
codec_status rows_sum_signs(const void *const *frames, const void *const *jobs, size_t count, const codec_context *with,
			    uint64_t b, float divide, float_any *y, uint64_t *checksums, struct work *w)
{
	const struct kernels *k = kernels_for(with);
	const struct job *j = job_place((void *)jobs[0]);
	const struct row_kind q = header_kind(&j->h);

	for (size_t first = 0, m; first < count; first += m) {
		struct coded block[AT_ONCE];
		uint64_t row, n;

		m = MIN(AT_ONCE, count - first);
		for (size_t i = 0; i < m; i++) {
			const uint8_t *frame = frames[first + i], *code;
			uint64_t at, end;

			j = job_place((void *)jobs[first + i]);
			TRY(job_block(j, frame, with, b, &at, &end, checksums + first + i));
			TRY(open_block(j, k, frame, b, at, end, w, block + i, with->fault));
			TRY(open_codes(k, &q, block + i, 0, block[i].m, 1, w, &code, with->fault));
		}
		row = block->part->group_size;
		for (uint64_t i = 0; i < block->m; i += n) {
			n = MIN(row && row <= ROW_CHUNK ? row : rows_run((uint32_t)row, i, block->m), block->m - i);
			TRY(sum_row(k, &q, block, m, i, n, first > 0, first + m == count ? divide : 0, y + i,
				    with->fault));
		}
	}
	return CODEC_OK;
}
