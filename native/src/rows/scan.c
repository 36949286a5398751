/* scan.c - scales: the largest magnitude or a mean, of a row or of a whole part.
 *
 * Means have one order of additions: float32 lanes over WIRE_TREE values, then pairs in float64.
 */
#include <math.h>

#include "rows.h"

#define PIECE 1024 /* values widened at once */

/* Pairwise sums of a sequence: neighbours are added, then neighbouring pairs, and so on; the last may stay alone. */
struct pairs {
	double sum[64][2];
	uint64_t count;
};

static void pairs_push(struct pairs *p, const double sum[2])
{
	double a = sum[0], b = sum[1];
	int level = 0;

	for (uint64_t bits = p->count; bits & 1; bits >>= 1, level++) {
		a = p->sum[level][0] + a;
		b = p->sum[level][1] + b;
	}
	p->sum[level][0] = a;
	p->sum[level][1] = b;
	p->count++;
}

static void pairs_total(const struct pairs *p, double total[2])
{
	int first = 1;

	total[0] = total[1] = 0;
	for (int level = 0; level < 64; level++)
		if (p->count >> level & 1) {
			total[0] = first ? p->sum[level][0] : p->sum[level][0] + total[0];
			total[1] = first ? p->sum[level][1] : p->sum[level][1] + total[1];
			first = 0;
		}
}

/* Lanes to their sums: folded by halves. */
static void fold(int kind, struct row_lanes *l, struct row_sums *out)
{
	for (int w = 16; w; w /= 2)
		for (int i = 0; i < w; i++) {
			l->a[i] += l->a[i + w];
			l->b[i] += l->b[i + w];
			l->s[i] += l->s[i + w];
			l->t[i] += l->t[i + w];
			l->max[i] = MAX(l->max[i], l->max[i + w]);
		}
	out->sum[0] = kind == ROW_SUM_SQUARES ? l->s[0] : (double)l->a[0];
	out->sum[1] = kind == ROW_SUM_SQUARES ? l->t[0] : (double)l->b[0];
	out->negative = l->negative;
	out->max = (uint32_t)l->max[0];
}

/* Largest magnitude of at most WIRE_TREE values, and their sums. */
static void scan(int kind, const struct kernels *k, const struct source *src, uint64_t first, uint64_t n,
		 struct row_sums *out)
{
	struct row_lanes sums;
	float buffer[PIECE];

	memset(&sums, 0, sizeof sums);
	for (uint64_t i = 0; i < n; i += PIECE) {
		uint64_t m = MIN(PIECE, n - i);
		const float_any *x = load_values(k, src, first + i, m, buffer);

		k->row_sums(kind, x, m, &sums);
	}
	fold(kind, &sums, out);
}

/* Rounded once; sums may have overflown, but no scale lies beyond the dtype's range. */
static float as_scale(const struct header *h, double x)
{
	double most = h->dtype == CODEC_FLOAT16 ? 65504 : h->dtype == CODEC_BFLOAT16 ? 0x1.fep127 : 0x1.fffffep127;

	return (float)(x < most ? x : most);
}

static int sums_kind(const struct header *h, int clips)
{
	if (h->codec == CODEC_SIGN)
		return h->variant == WIRE_SIGN_L1   ? ROW_SUM_ABS
		       : h->variant == WIRE_SIGN_L2 ? ROW_SUM_SQUARES
						    : ROW_SUM_SIGNS;
	return clips ? ROW_SUM_SQUARES : ROW_SUM_ABS;
}

/* Sign's scales from sums over n values. */
static void sign_scale(const struct header *h, const double total[2], uint64_t negative, uint64_t n, float scale[2])
{
	scale[1] = 0;
	switch (h->variant) {
	case WIRE_SIGN_L1: scale[0] = as_scale(h, total[0] / (double)n); break;
	case WIRE_SIGN_L2: scale[0] = as_scale(h, sqrt(total[0] / (double)n)); break;
	default:
		scale[0] = as_scale(h, n > negative ? total[0] / (double)(n - negative) : 0);
		scale[1] = as_scale(h, negative ? total[1] / (double)negative : 0);
	}
}

/* How many pieces of WIRE_TREE values must be scanned before blocks can be encoded. */
uint64_t rows_scan_count(const struct job *j)
{
	int given = j->h.codec == CODEC_TERNARY && j->scale > 0 && !(j->clip > 0);

	return j->residual || (rows_part_scaled(&j->h, job_parts(j)->row) && !given) ? j->nsums : 0;
}

codec_status rows_scan(struct job *j, const struct kernels *k, const struct source *src, uint64_t first, uint64_t count)
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
		scan(kind, k, src, p->start + at, MIN(WIRE_TREE, p->count - at), out);
	}
	return CODEC_OK;
}

/* The parts' scales, after all was scanned. */
codec_status rows_finish(struct job *j)
{
	struct row_sums *s = job_sums(j);
	int clips = j->clip > 0, scanned = rows_scan_count(j) != 0;

	for (uint64_t i = 0; i < j->nparts; i++) {
		struct part *p = job_parts(j) + i;
		uint64_t count = (p->count + WIRE_TREE - 1) / WIRE_TREE, negative = 0;
		struct pairs pairs = {.count = 0};
		uint32_t max = 0;
		double total[2];

		for (uint64_t t = 0; scanned && t < count; t++, s++) {
			max = MAX(max, s->max);
			pairs_push(&pairs, s->sum);
			negative += s->negative;
		}
		if (max >= ROUND_INF && !(j->h.options & WIRE_OPTION_PROPAGATE))
			return CODEC_NONFINITE;
		if (!rows_part_scaled(&j->h, p->row))
			continue;
		pairs_total(&pairs, total);
		switch (j->h.codec) {
		case CODEC_SIGN: sign_scale(&j->h, total, negative, p->count, p->scale); break;
		case CODEC_TERNARY:
			p->scale[0] = j->scale > 0 ? j->scale : rows_raise_scale(&j->h, round_float(max));
			if (clips) {
				double n = (double)p->count, mean = total[1] / n;
				double variance = total[0] / n - mean * mean;
				float limit = as_scale(&j->h, (double)j->clip * sqrt(variance > 0 ? variance : 0));

				limit = rows_round_scale(&j->h, limit);
				p->scale[0] = p->scale[0] < limit ? p->scale[0] : limit;
			} else if (scanned && j->scale > 0 && round_bits(p->scale[0]) < max) {
				return CODEC_BAD_SCALE;
			}
			break;
		default: p->scale[0] = round_float(max) / (6 * 448);
		}
	}
	return CODEC_OK;
}

static codec_status sign_row(const struct header *h, const struct kernels *k, const struct source *src, uint64_t first,
			     uint64_t n, float scale[2])
{
	struct pairs pairs = {.count = 0};
	uint64_t negative = 0;
	double total[2];

	for (uint64_t i = 0; i < n; i += WIRE_TREE) {
		struct row_sums sums;

		scan(sums_kind(h, 0), k, src, first + i, MIN(WIRE_TREE, n - i), &sums);
		if (sums.max >= ROUND_INF)
			return CODEC_NONFINITE;
		if (n <= WIRE_TREE) { /* what one pair alone adds up to */
			sign_scale(h, sums.sum, sums.negative, n, scale);
			return CODEC_OK;
		}
		pairs_push(&pairs, sums.sum);
		negative += sums.negative;
	}
	pairs_total(&pairs, total);
	sign_scale(h, total, negative, n, scale);
	return CODEC_OK;
}

/* What values are multiplied by (FLOAT8), divided by (FLOAT4) or compared with; and the bytes that say so. */
static float scale_of(const struct job *j, const struct row_kind *q, const struct part *p, uint32_t max,
		      uint8_t *stored)
{
	/* what saturates is not unbiased */
	int unbiased = (j->h.options & WIRE_OPTION_STOCHASTIC) != 0;
	float scale, amax = round_float(max);

	switch (q->codec) {
	case CODEC_FLOAT8:
		scale = j->scale > 0 ? j->scale : q->max / amax;
		scale = round_bits(scale) < ROUND_INF ? scale : 1;
		break;
	case CODEC_FLOAT4:
		if (q->variant == WIRE_FLOAT4_MXFP4) {
			uint32_t e = max >> 23; /* amax comes to lie in [4, 8), or not above 6 */

			e += unbiased && (max & 0x7fffff) > 0x400000;
			*stored = (uint8_t)(e > 2 ? MIN(e - 2, 252) : 0); /* 4 and 6 times it are finite */
		} else {
			amax = p->scale[0] > 0 ? amax / 6 / p->scale[0] : 0;
			*stored = (uint8_t)round_small_nearest(round_bits(amax < 448 ? amax : 448), 3, 7);
			*stored += unbiased && *stored < 126 && round_float(round_small_value(*stored, 3, 7)) < amax;
		}
		return rows_small_scale(q, p, *stored);
	default: scale = amax;
	}
	store32(stored, round_bits(scale));
	return scale;
}

/* SIGN's scales of the rows of values [first, first + n), as they stand in the region. */
codec_status rows_sign_scales(const struct job *j, const struct kernels *k, const struct source *src, uint64_t first,
			      uint64_t n, uint32_t row, uint8_t *stored)
{
	int nbytes = rows_scale_nbytes(&j->h);

	for (uint64_t i = 0; i < n; i += row, stored += nbytes) {
		float s[2];

		TRY(sign_row(&j->h, k, src, first + i, MIN(row, n - i), s));
		for (int t = 0; t < nbytes / 4; t++)
			store32(stored + 4 * t, round_bits(s[t]));
	}
	return CODEC_OK;
}

/* Scales of the n values of whole rows at x: to w->scale and to the region. */
codec_status rows_scales(const struct job *j, const struct kernels *k, const struct row_kind *q, const struct part *p,
			 const float_any *x, uint64_t n, struct work *w, uint8_t *stored)
{
	uint32_t limit = j->h.options & WIRE_OPTION_PROPAGATE ? ROUND_INF : ROUND_ABS + 1;
	int nbytes = rows_scale_nbytes(&j->h);
	uint64_t nrows = (n + p->row - 1) / p->row;

	k->abs_max(x, n, p->row, limit, w->max);
	for (uint64_t r = 0; r < nrows; r++, stored += nbytes) {
		if (w->max[r] >= ROUND_INF)
			return CODEC_NONFINITE;
		w->scale[r] = scale_of(j, q, p, w->max[r], stored);
	}
	return CODEC_OK;
}

/* The same for one row that is longer than a chunk. */
codec_status rows_long_scale(const struct job *j, const struct kernels *k, const struct row_kind *q,
			     const struct part *p, const struct source *src, uint64_t first, uint64_t n, struct work *w,
			     uint8_t *stored)
{
	uint32_t limit = j->h.options & WIRE_OPTION_PROPAGATE ? ROUND_INF : ROUND_ABS + 1, max = 0, some;

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
