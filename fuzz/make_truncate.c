/*
 * make_truncate.c - generate TRUNCATE frames, with the state that shared levels need: docs/spec/format.md, section 9.
 */
#include <math.h>

#include "maker.h"

enum { LEVELS, OPTIONS, LEVEL, CAP, GUARD };

/*
 * Constants of a dtype: mantissa bits, exponent bias, largest exponent, base of joint symbols, bits dropped per level,
 * bits per piece.
 */
static const struct cut {
	int p, bias, last, base, drop[4], width[4];
} CUTS[] = {
	[CODEC_FLOAT32] = {23, 127, 255, 96, {0, 6, 12, 18}, {6, 6, 6, 6}},
	[CODEC_BFLOAT16] = {7, 127, 255, 96, {0, 2, 4, 6}, {2, 2, 2, 2}},
	[CODEC_FLOAT16] = {10, 15, 31, 0, {0, 3, 5, 8}, {3, 3, 2, 3}},
};

void pick_truncate_params(struct maker *m)
{
	uint8_t *p = m->g->params;

	p[CAP] = (uint8_t)between(&m->s, 2, 8);
	p[LEVELS] = (uint8_t)below(&m->s, 4);
	p[LEVEL] = p[LEVELS] == CODEC_LEVEL_CODING_FIXED ? (uint8_t)below(&m->s, 4) : 0;
	p[OPTIONS] = below(&m->s, 2) ? CODEC_OPTION_CUT : 0;
	p[OPTIONS] |= p[LEVELS] == CODEC_LEVEL_CODING_SHARED && below(&m->s, 2) ? CODEC_OPTION_BITS : 0;
	p[GUARD] = (uint8_t)(p[LEVELS] == CODEC_LEVEL_CODING_FIXED ? 128
			     : one_in(&m->s, 4)                    ? below(&m->s, 256)
								   : between(&m->s, 120, 130));
}

static float float_of(uint32_t u)
{
	float x;

	memcpy(&x, &u, 4);
	return x;
}

/* Generate a state array of random floats, mostly near 1, and store the values as float32 in `wide`, too. */
static void state_make(struct maker *m, codec_tensor *t, float *wide)
{
	static const uint32_t DTYPES[] = {CODEC_FLOAT32, CODEC_BFLOAT16, CODEC_FLOAT16};
	uint64_t n = m->g->n, odd = noise(&m->s) % 200;
	int spread = (int)below(&m->s, 40);

	t->struct_nbytes = sizeof *t;
	t->dtype = DTYPES[below(&m->s, 3)];
	t->rank = 1;
	t->shape[0] = n;
	t->nbytes = n * (t->dtype == CODEC_FLOAT32 ? 4 : 2);
	t->data = malloc(t->nbytes);
	for (uint64_t i = 0; i < n; i++) {
		uint64_t x = noise(&m->s);
		uint32_t e = 127 + (uint32_t)(x >> 40) % (uint32_t)(2 * spread + 1) - (uint32_t)spread;
		uint32_t u = e << 23 | (uint32_t)(x & 0x807fffff);

		if (odd < 20 && x >> 60 == 0)
			u = (uint32_t)(x >> 8); /* any bits, including Inf and NaN */
		if (t->dtype == CODEC_FLOAT32) {
			memcpy((char *)t->data + 4 * i, &u, 4);
		} else if (t->dtype == CODEC_BFLOAT16) {
			u &= 0xffff0000;
			memcpy((char *)t->data + 2 * i, &(uint16_t){(uint16_t)(u >> 16)}, 2);
		} else { /* numbers within float16's range */
			e = e < 113 ? 113 : e > 142 ? 142 : e;
			u = (u & 0x807fe000) | e << 23;
			memcpy((char *)t->data + 2 * i,
			       &(uint16_t){(uint16_t)((u >> 16 & 0x8000) | (e - 112) << 10 | (u >> 13 & 0x3ff))}, 2);
		}
		wide[i] = float_of(u);
	}
}

/* User-defined metric function. A damaged header may claim more values than exist; A is 0 for these. */
static void user_a(void *data, uint64_t first, uint64_t n, float *a)
{
	const struct grammar *g = data;

	for (uint64_t i = 0; i < n; i++)
		a[i] = first + i < g->n ? g->a[first + i] : 0;
}

static float term(struct maker *m)
{
	static const float TERMS[] = {0, 1, -1, 0.5f, 100, 1e-3f, 3.1415927f, 1e10f, 1e-10f, 1e38f};

	return TERMS[below(&m->s, sizeof TERMS / sizeof *TERMS)];
}

/* Generate a list of up to three metrics, and the exponents of A. */
static void metric_make(struct maker *m)
{
	struct grammar *g = m->g;
	float *theta = malloc(4 * g->n), *v = malloc(4 * g->n), *mean = malloc(4 * g->n);
	uint64_t ngroups = 1 + below(&m->s, g->n < 3 ? 1 : 3), from = 0;

	g->has_metric = 1;
	g->ea = malloc(g->n);
	g->a = malloc(4 * g->n);
	state_make(m, &g->theta, theta);
	state_make(m, &g->v, v);
	state_make(m, &g->m, mean);
	for (uint64_t i = 0; i < g->n; i++)
		g->a[i] = theta[i] * v[i];
	for (uint64_t i = 0; i < ngroups; i++) {
		codec_metric *t = g->metric + i;
		uint64_t until = i + 1 < ngroups ? between(&m->s, from + 1, g->n - (ngroups - 1 - i)) : g->n;
		int user = one_in(&m->s, 3);

		*t = (codec_metric){.struct_nbytes = sizeof *t, .theta_term = term(m), .theta_v_term = term(m)};
		t->v_term = fabsf(term(m));
		t->eps = fabsf(term(m));
		t->m_term = term(m);
		t->theta = &g->theta;
		t->v = below(&m->s, 2) ? &g->v : NULL;
		t->m = below(&m->s, 2) ? &g->m : NULL;
		t->until = i + 1 < ngroups ? until : 0;
		t->next = i + 1 < ngroups ? t + 1 : NULL;
		if (user) {
			t->user = user_a;
			t->data = g;
		}
		for (uint64_t k = from; k < until; k++) {
			float factor = t->theta_term, a;
			uint32_t u;

			if (t->v) {
				factor = t->v_term * v[k];
				factor = sqrtf(factor) + t->eps;
				factor = factor * t->theta_v_term;
				factor = factor + t->theta_term;
			}
			a = theta[k] * factor;
			if (t->m) {
				float last = t->m_term * mean[k];

				a = a + last;
			}
			a = user ? g->a[k] : a;
			memcpy(&u, &a, 4);
			u &= 0x7fffffff;
			g->ea[k] = (uint8_t)(u > 0x7f800000 ? 0 : u >> 23);
		}
		from = until;
	}
	free(theta);
	free(v);
	free(mean);
}

/* State of packing fields of different widths; each byte is filled from its lowest bit. */
struct packed {
	struct bytes *b;
	uint32_t have;
};

static void put_field(struct packed *to, uint64_t x, int width)
{
	for (int i = 0; i < width; i++, to->have++) {
		if (to->have % 8 == 0)
			put_zeros(to->b, 1);
		to->b->p[to->b->n - 1] |= (uint8_t)((x >> i & 1) << to->have % 8);
	}
}

static void end_fields(struct maker *m, const struct packed *to)
{
	if (to->have % 8 && slip(m))
		to->b->p[to->b->n - 1] |= 0x80;
}

static int raised(const struct maker *m, uint64_t at, int e)
{
	int octave = (int)m->octave, zero = (int)m->zero;

	if (!m->raise || e * octave < zero)
		return e;
	return (zero + (e * octave - zero + m->raise[at]) % (WIRE_PATTERNS - zero)) / octave;
}

/* Write the symbols of n values of the block that begins at value `first`. Store the values' exponents in e, and joint
 * levels in `level`. */
static void put_symbols(struct maker *m, const struct cut *q, uint32_t mode, uint64_t first, size_t n, int *e,
			int *level)
{
	int joint = m->g->params[LEVELS] == CODEC_LEVEL_CODING_CODED;

	switch (mode) {
	case WIRE_MODE_CODED: draw(m, m->book, n, joint ? 4 * (uint32_t)q->last + 4 : (uint32_t)q->last + 1); break;
	case WIRE_MODE_RAW:
		for (size_t i = 0; i < n; i++)
			m->symbol[i] = m->plane[i] = (uint8_t)(noise(&m->s) % (uint64_t)(q->last + 1));
		break;
	default:
		m->symbol[0] =
			(uint16_t)below(&m->s, joint ? 4 * (uint64_t)(q->last - q->base) + 4 : (uint64_t)q->last + 1) &
			255;
		if (joint)
			m->symbol[0] &= m->symbol[0] < 4 ? 0 : 0xfc;
		for (size_t i = 1; i < n; i++)
			m->symbol[i] = m->symbol[0];
	}
	for (size_t i = 0; i < n; i++) {
		int escaped = mode == WIRE_MODE_CODED && m->symbol[i] == ESCAPE;
		int s = escaped ? m->literal[i] : m->symbol[i];

		if (escaped && joint && s < 4 && !slip(m))
			s = m->literal[i] = 0;
		e[i] = s;
		level[i] = 0;
		if (joint) {
			level[i] = s & 3;
			e[i] = s < 4 ? 0 : (s >> 2) + (escaped ? 0 : q->base);
			if (level[i] && raised(m, first + m->at[i], e[i]) == q->last &&
			    !slip(m)) { /* Inf and NaN have level 0 */
				level[i] = 0;
				m->symbol[i] = ESCAPE;
				m->literal[i] = (uint16_t)(4 * e[i]);
			}
		}
		e[i] = raised(m, first + m->at[i], e[i]);
	}
	if (mode == WIRE_MODE_CODED)
		put_coded(m, m->book, n, joint ? 2 : 1);
	else if (mode == WIRE_MODE_RAW)
		put_raw(&m->out, m->plane, n);
	else
		put(m, m->symbol[0], 1);
}

/* Return the number of bits dropped from a value with exponent e, if the metric A has the exponent `a`. */
static int slack_drops(const struct cut *q, int e, int a, int guard, int by_bit)
{
	int d = (a - 127) - (e - q->bias) - guard, k = 0;

	if (a == 0 || e == q->last)
		return 0;
	if (a == 255)
		d = 1000;
	if (by_bit)
		return d < 0 ? 0 : d > q->p ? q->p : d;
	for (int i = 1; i < 4; i++)
		k = q->drop[i] <= d ? q->drop[i] : k;
	return k;
}

static void put_region(struct maker *m, const struct cut *q, uint32_t b)
{
	static int e[BLOCK], level[BLOCK], k[BLOCK];
	const uint8_t *params = m->g->params;
	uint64_t first = (uint64_t)b << m->block_log2, left = m->g->n - first, block = 1ull << m->block_log2;
	size_t n = (size_t)(left < block ? left : block), kept;
	int gaps = n > WIRE_ROW && one_in(&m->s, 3);
	int by_bit = params[OPTIONS] & CODEC_OPTION_BITS, sent = params[LEVELS];
	uint32_t mode, head, rest = (uint32_t)q->p + 1, tail;
	struct packed fields = {&m->out, 0};

	mode = below(&m->s, 3) ? WIRE_MODE_CODED : (uint32_t)below(&m->s, sent == CODEC_LEVEL_CODING_CODED ? 1 : 2);
	tail = by_bit && one_in(&m->s, 2) ? (uint32_t)below(&m->s, (uint64_t)q->p + 2) : 0;
	head = by_bit ? tail << WIRE_TAIL_AT : one_in(&m->s, 2) ? (uint32_t)below(&m->s, 16) << 8 : 0;
	put(m, mode | head | (gaps ? WIRE_REGION_GAPS : 0), 4);
	if (sent == CODEC_LEVEL_CODING_SHARED)
		put(m, digest(m->g->ea + first, n, 0x500) & 0xffffffff, 4);
	kept = put_gaps(m, n, gaps);
	put_symbols(m, q, mode, first, kept, e, level);
	for (size_t i = n; i-- > 0;) { /* move exponents and levels to their values */
		int has = kept && m->at[kept - 1] == i;

		kept -= (size_t)has;
		e[i] = has ? e[kept] : 0;
		level[i] = has ? level[kept] : 0;
	}
	for (size_t i = 0; i < n; i++) {
		if (sent == CODEC_LEVEL_CODING_PLANE) {
			level[i] = e[i] == q->last ? slip(m) : (int)(noise(&m->s) & 3);
			if (!e[i])
				continue;
			put_field(&fields, (uint64_t)level[i], 2);
		} else if (sent == CODEC_LEVEL_CODING_FIXED) {
			level[i] = e[i] == q->last ? 0 : params[LEVEL];
		}
	}
	end_fields(m, &fields);
	for (size_t i = 0; i < n; i++)
		k[i] = sent == CODEC_LEVEL_CODING_SHARED
			       ? slack_drops(q, e[i], m->g->ea[first + i], params[GUARD] - 128, by_bit)
			       : q->drop[level[i]];
	if (by_bit) {
		fields.have = 0;
		for (size_t i = 0; i < n; i++)
			if (e[i])
				put_field(&fields, noise(&m->s), q->p + 1 - (k[i] > (int)tail ? k[i] : (int)tail));
		end_fields(m, &fields);
	}
	for (int piece = 0; piece < 4 && !by_bit; piece++) {
		rest -= (uint32_t)q->width[piece];
		fields.have = 0;
		if (head >> (8 + piece) & 1)
			continue;
		for (size_t i = 0; i < n; i++)
			if (e[i] && k[i] <= (int)rest)
				put_field(&fields, noise(&m->s), q->width[piece]);
		end_fields(m, &fields);
	}
	end_region(m, b);
}

void make_truncate(struct maker *m)
{
	const struct cut *q = CUTS + m->g->dtype;
	int joint = m->g->params[LEVELS] == CODEC_LEVEL_CODING_CODED, lowest = 0, highest = q->last;

	m->zero = q->last == 31 ? 1024 : 128;
	m->octave = m->zero;
	m->coded = 1;
	m->block_log2 = (uint8_t)between(&m->s, WIRE_MIN_BLOCK_LOG2, below(&m->s, 3) ? 10 : WIRE_MAX_BLOCK_LOG2);
	m->nblocks = (uint32_t)((m->g->n + (1ull << m->block_log2) - 1) >> m->block_log2);
	if (m->g->params[LEVELS] == CODEC_LEVEL_CODING_SHARED)
		metric_make(m);
	if (joint) { /* symbols 1..3 are invalid */
		lowest = 4;
		highest = q->last == 31 ? 127 : 255;
	} else if (highest == 255 && below(&m->s, 2)) {
		lowest = 100;
		highest = 140;
	}
	if (slip(m)) {
		lowest = 0;
		highest = 255;
	}
	book_make(m, m->book, lowest, highest, 1);
	if (one_in(&m->s, 4))
		put_prior(m, m->book, joint ? q->last == 31 ? 3 : 2 : 1);
	else
		book_put(m, m->book);
	if (below(&m->s, 4)) {
		m->flags |= WIRE_FLAG_SEGMENTS;
		put_scale_model(m, 1);
	}
	put_gap(m);
	m->directory_at = m->out.n;
	put_zeros(&m->out, WIRE_DIRECTORY_ENTRY * m->nblocks);
	for (uint32_t b = 0; b < m->nblocks; b++)
		put_region(m, q, b);
}
