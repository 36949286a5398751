/*
 * scan.c - compute the scale of a row or of a whole part, from the largest magnitude or from means.
 *
 * The order of additions is fixed: WIRE_TREE values are added in float32 lanes, and the results pairwise in float64.
 */
#include <math.h>

#include "rows.h"

#define PIECE 1024 /* number of values converted to float32 at once */

/*
 * Binary trees that add the sums of pieces pairwise. [0]: sums of |x| or x^2; [1]: of |x| over negative values, or of
 * x.
 */
struct pairs {
	double sum[2][64];
	uint64_t count;
};

static void pairs_push(struct pairs *p, const double sum[2])
{
	for (int i = 0; i < 2; i++)
		scale_push(p->sum[i], p->count, sum[i]);
	p->count++;
}

static void pairs_total(const struct pairs *p, double total[2])
{
	for (int i = 0; i < 2; i++)
		total[i] = scale_total(p->sum[i], p->count);
}

/*
 * Compute the largest magnitude and the sums (ROW_SUM_*) of n <= WIRE_TREE values and, unless `bits` is NULL, their
 * sign bits.
 */
static void scan(int kind, const struct kernels *k, const struct source *src, uint64_t first, uint64_t n, uint8_t *bits,
		 struct row_sums *out)
{
	struct row_lanes sums;
	float buffer[PIECE];

	for (uint64_t i = 0; i < n; i += PIECE) {
		uint64_t m = MIN(PIECE, n - i);
		const float_any *x = load_values(k, src, first + i, m, buffer);

		k->row_sums(kind, x, m, i == 0, bits ? bits + i / 8 : NULL, &sums);
	}
	k->row_fold(kind, &sums, out);
}

static int sums_kind(const struct header *h, int clips)
{
	if (h->codec == CODEC_SIGN)
		return h->variant == CODEC_SIGN_L1   ? ROW_SUM_ABS
		       : h->variant == CODEC_SIGN_L2 ? ROW_SUM_SQUARES
						     : ROW_SUM_SIGNS;
	return clips ? ROW_SUM_SQUARES : ROW_SUM_ABS;
}

/* Return the number of pieces of WIRE_TREE values to scan before blocks can be encoded. */
uint64_t rows_scan_count(const struct job *j)
{
	int given = j->h.codec == CODEC_TERNARY && j->scale > 0 && !(j->clip > 0);

	if (j->residual && j->verify_first)
		return j->nsums;
	return row_part_scaled(header_kind(&j->h), job_parts(j)->group_size) && !given ? j->nsums : 0;
}

void rows_scan(struct job *j, const struct kernels *k, const struct source *src, uint64_t first, uint64_t count)
{
	struct row_sums *out = job_sums(j) + first;
	const struct part *p = job_parts(j), *last = p + j->nparts - 1;
	int kind = sums_kind(&j->h, j->clip > 0);

	while (p < last && p[1].first_sum <= first)
		p++;
	for (uint64_t i = first; i < first + count; i++, out++) {
		uint64_t at;

		if (p < last && p[1].first_sum <= i)
			p++;
		at = (i - p->first_sum) * WIRE_TREE;
		scan(kind, k, src, p->start + at, MIN(WIRE_TREE, p->count - at), NULL, out);
	}
}

/*
 * Return 1 if encoding the blocks can replace the scan: for SIGN, whose codes do not depend on the scale, unless a
 * residual is written, which does.
 */
int rows_blocks_can_scan(const struct job *j)
{
	return j->h.codec == CODEC_SIGN && !j->residual;
}

/* Compute the sums for the part's scale, and the sign bits, of n values of a block from value `first` on. */
void rows_scan_signs(const struct job *j, const struct kernels *k, const struct source *src, const struct part *p,
		     uint64_t first, uint64_t n, uint8_t *bits)
{
	struct row_sums *out = job_sums(j) + p->first_sum + (first - p->start) / WIRE_TREE;

	for (uint64_t i = 0; i < n; i += WIRE_TREE)
		scan(sums_kind(&j->h, 0), k, src, first + i, MIN(WIRE_TREE, n - i), bits + i / 8, out++);
}

/*
 * Compute the scales of all parts after all pieces were scanned. CODEC_NONFINITE takes precedence over CODEC_BAD_SCALE.
 */
codec_status rows_finish(struct job *j)
{
	const struct row_kind q = header_kind(&j->h);
	struct row_sums *s = job_sums(j);
	int scanned = rows_scan_count(j) != 0, above = 0;

	for (struct part *p = job_parts(j); p < job_parts(j) + j->nparts; p++) {
		uint64_t count = (p->count + WIRE_TREE - 1) / WIRE_TREE, negative = 0;
		struct pairs pairs = {.count = 0};
		uint32_t max = 0;
		double total[2];

		for (uint64_t t = 0; scanned && t < count; t++, s++) {
			max = MAX(max, s->max);
			pairs_push(&pairs, s->sum);
			negative += s->negative;
		}
		if (max >= ROUND_INF && !(q.options & CODEC_OPTION_PROPAGATE))
			return CODEC_NONFINITE;
		if (!row_part_scaled(q, p->group_size))
			continue;
		pairs_total(&pairs, total);
		switch (q.codec) {
		case CODEC_SIGN: scale_sign(q, total, negative, p->count, p->scale); break;
		case CODEC_TERNARY:
			p->scale[0] = scale_ternary(q, max, j->scale, j->clip, total, p->count);
			above |= scanned && scale_exceeded(max, j->scale, j->clip);
			break;
		default: p->scale[0] = scale_nvfp4(max);
		}
	}
	return above ? CODEC_BAD_SCALE : CODEC_OK;
}

static codec_status sign_row(struct row_kind q, int kind, const struct kernels *k, const struct source *src,
			     uint64_t first, uint64_t n, uint8_t *bits, float scale[2])
{
	struct pairs pairs = {.count = 0};
	uint64_t negative = 0;
	double total[2];

	for (uint64_t i = 0; i < n; i += WIRE_TREE) {
		struct row_sums sums;

		scan(kind, k, src, first + i, MIN(WIRE_TREE, n - i), bits ? bits + i / 8 : NULL, &sums);
		if (sums.max >= ROUND_INF)
			return CODEC_NONFINITE;
		if (n <= WIRE_TREE) { /* a single piece: the sums need no tree */
			scale_sign(q, sums.sum, sums.negative, n, scale);
			return CODEC_OK;
		}
		pairs_push(&pairs, sums.sum);
		negative += sums.negative;
	}
	pairs_total(&pairs, total);
	scale_sign(q, total, negative, n, scale);
	return CODEC_OK;
}

/*
 * Compute a row's scale from its largest magnitude, and store it. Return the factor (FLOAT8) or divisor of the row's
 * values.
 */
static float scale_of(const struct job *j, const struct row_kind *q, const struct part *p, uint32_t max,
		      uint8_t *stored)
{
	float scale = round_float(max);

	if (q->scale_most) {
		*stored = scale_byte(*q, max, p->scale[0]);
		return scale_byte_value(*q, *stored, p->scale[0]);
	}
	if (q->codec == CODEC_FLOAT8)
		scale = scale_float8(*q, max, j->scale);
	store32(stored, round_bits(scale));
	return scale;
}

/* SIGN: store the scales of the rows in values [first, first + n) and, unless `bits` is NULL, the values' sign bits. */
codec_status rows_sign_scales(const struct job *j, const struct kernels *k, const struct source *src, uint64_t first,
			      uint64_t n, uint32_t row, uint8_t *stored, uint8_t *bits)
{
	const struct row_kind q = header_kind(&j->h);
	uint64_t nbytes = row_scale_nbytes(q);
	int kind = sums_kind(&j->h, 0);

	for (uint64_t i = 0; i < n; i += row, stored += nbytes) {
		float s[2];

		TRY(sign_row(q, kind, k, src, first + i, MIN(row, n - i), bits ? bits + i / 8 : NULL, s));
		for (uint64_t t = 0; t < nbytes / 4; t++)
			store32(stored + 4 * t, round_bits(s[t]));
	}
	return CODEC_OK;
}

/*
 * QUANTIZE with zero points: store a row's smallest and largest value, which are passed in *scale and *middle, and set
 * *scale to half the row's range and *middle to its midpoint.
 */
static void store_ends(const struct row_kind *q, float *scale, float *middle, uint8_t *stored)
{
	const struct row_ends ends = scale_ends(*scale, *middle, q->dtype);

	if (q->dtype == CODEC_FLOAT32)
		store64(stored, ends.stored);
	else
		store32(stored, (uint32_t)ends.stored);
	*scale = ends.half;
	*middle = ends.middle;
}

/* Version of rows_scales for QUANTIZE with zero points. The midpoints of rows are stored in w->scale_below. */
static codec_status affine_scales(const struct kernels *k, const struct row_kind *q, const struct part *p,
				  const float_any *x, uint64_t n, struct work *w, uint8_t *stored)
{
	uint64_t nbytes = row_scale_nbytes(*q), nrows = row_count(p->group_size, n);

	if (k->extremes(x, n, p->group_size, w->scale, w->scale_below))
		return CODEC_NONFINITE;
	for (uint64_t r = 0; r < nrows; r++, stored += nbytes)
		store_ends(q, w->scale + r, w->scale_below + r, stored);
	return CODEC_OK;
}

/*
 * Compute the scales of MXFP8's rows. This is a specialized loop of rows_scales: with 32 values per row, the general
 * loop over rows would take as long as the loop over values.
 */
static codec_status mx_scales(const struct row_kind q, const uint32_t *max, uint64_t nrows, float *scale,
			      uint8_t *stored)
{
	int up = scale_rounds_up(q);
	uint32_t most = 0;

	for (uint64_t r = 0; r < nrows; r++) {
		most = MAX(most, max[r]);
		stored[r] = scale_mx(q, max[r], up);
		scale[r] = scale_byte_value(q, stored[r], 0);
	}
	return most >= ROUND_INF ? CODEC_NONFINITE : CODEC_OK;
}

/*
 * Compute the scales of the rows in the n values at x, all of them whole. Store the scales in the region at `stored`,
 * and the factors or divisors that encoding uses in w->scale.
 */
codec_status rows_scales(const struct job *j, const struct kernels *k, const struct row_kind *q, const struct part *p,
			 const float_any *x, uint64_t n, struct work *w, uint8_t *stored)
{
	uint32_t limit = j->h.options & CODEC_OPTION_PROPAGATE ? ROUND_INF : ROUND_ABS + 1;
	uint64_t nbytes = row_scale_nbytes(*q), nrows = row_count(p->group_size, n);

	if (q->affine)
		return affine_scales(k, q, p, x, n, w, stored);
	k->abs_max(x, n, p->group_size, limit, w->max);
	if (q->codec == CODEC_FLOAT8 && row_is_mx(*q))
		return mx_scales(*q, w->max, nrows, w->scale, stored);
	for (uint64_t r = 0; r < nrows; r++, stored += nbytes) {
		if (w->max[r] >= ROUND_INF)
			return CODEC_NONFINITE;
		w->scale[r] = scale_of(j, q, p, w->max[r], stored);
	}
	return CODEC_OK;
}

/* Version of rows_long_scale for QUANTIZE with zero points. The row's midpoint is stored in *w->scale_below. */
static codec_status affine_long_scale(const struct kernels *k, const struct row_kind *q, const struct source *src,
				      uint64_t first, uint64_t n, struct work *w, uint8_t *stored)
{
	float low, high;

	for (uint64_t at = 0; at < n; at += ROW_CHUNK) {
		uint64_t c = MIN(ROW_CHUNK, n - at);

		if (k->extremes(load_values(k, src, first + at, c, w->x), c, c, &low, &high))
			return CODEC_NONFINITE;
		*w->scale = at && *w->scale < low ? *w->scale : low;
		*w->scale_below = at && *w->scale_below > high ? *w->scale_below : high;
	}
	store_ends(q, w->scale, w->scale_below, stored);
	return CODEC_OK;
}

/* Compute and store the scale of one row of n values, which is longer than ROW_CHUNK. */
codec_status rows_long_scale(const struct job *j, const struct kernels *k, const struct row_kind *q,
			     const struct part *p, const struct source *src, uint64_t first, uint64_t n, struct work *w,
			     uint8_t *stored)
{
	uint32_t limit = j->h.options & CODEC_OPTION_PROPAGATE ? ROUND_INF : ROUND_ABS + 1, max = 0, some;

	if (q->affine)
		return affine_long_scale(k, q, src, first, n, w, stored);
	for (uint64_t at = 0; at < n; at += ROW_CHUNK) {
		uint64_t c = MIN(ROW_CHUNK, n - at);

		k->abs_max(load_values(k, src, first + at, c, w->x), c, c, limit, &some);
		max = MAX(max, some);
	}
	if (max >= ROUND_INF)
		return CODEC_NONFINITE;
	*w->scale = scale_of(j, q, p, max, stored);
	return CODEC_OK;
}
