/*
 * truncate.c - functions that encoding and decoding TRUNCATE share: properties of dtypes, and the numbers of bits that
 * a metric allows to drop.
 */
#include "truncate.h"

void truncate_kind_of(const struct header *h, struct truncate_kind *q)
{
	static const struct truncate_kind KINDS[] = {
		{23, 31, 127, 255, 0, 0, WIRE_DROPS_FLOAT32, WIRE_PIECES_FLOAT32},
		{7, 15, 127, 255, 0, 0, WIRE_DROPS_BFLOAT16, WIRE_PIECES_BFLOAT16},
		{10, 15, 15, 31, 0, 0, WIRE_DROPS_FLOAT16, WIRE_PIECES_FLOAT16},
	};

	*q = KINDS[h->dtype == CODEC_FLOAT32 ? 0 : h->dtype == CODEC_BFLOAT16 ? 1 : 2];
	q->guard = h->guard;
	q->by_bit = (h->options & CODEC_OPTION_BITS) != 0;
}

static codec_status check_metric(const struct header *h, const codec_metric *t)
{
	const codec_tensor *state[3];

	if (t->struct_nbytes < sizeof *t || t->reserved ||
	    (t->theta_dtype && !codec_takes(CODEC_TRUNCATE, t->theta_dtype)))
		return CODEC_BAD_ARGUMENT;
	if (t->user)
		return CODEC_OK;
	state[0] = t->theta;
	state[1] = t->v;
	state[2] = t->m;
	if (!t->theta)
		return CODEC_MISSING_STATE;
	for (int i = 0; i < 3; i++)
		if (state[i] && (state[i]->struct_nbytes < sizeof *state[i] || !state[i]->data ||
				 !codec_takes(CODEC_TRUNCATE, state[i]->dtype) ||
				 state[i]->nbytes != h->n * dtype_of(state[i]->dtype)->nbytes))
			return CODEC_BAD_ARGUMENT;
	return CODEC_OK;
}

/*
 * Return 1 if levels are computed from a metric or given by the caller; 0 if the frame contains them or all values have
 * the same level.
 */
static int needs_state(const struct header *h, int encoding)
{
	return encoding ? h->variant != CODEC_LEVEL_CODING_FIXED
			: h->layout == WIRE_LAYOUT_BLOCKS && h->variant == CODEC_LEVEL_CODING_SHARED;
}

/* Check that the caller supplied metrics whose state arrays have the tensor's size and accepted dtypes. */
codec_status truncate_check_state(const struct header *h, const codec_context *with, int encoding)
{
	uint64_t from = 0;

	if (!needs_state(h, encoding))
		return CODEC_OK;
	if (with->levels) /* only encoders accept levels from the caller, and only if the frame contains them */
		return encoding && h->variant != CODEC_LEVEL_CODING_SHARED ? CODEC_OK : CODEC_BAD_ARGUMENT;
	if (!with->metric)
		return CODEC_MISSING_STATE;
	for (const codec_metric *t = with->metric; t; from = t->until, t = t->until ? t->next : NULL) {
		TRY(check_metric(h, t));
		if (t->until && (t->until <= from || !t->next))
			return CODEC_BAD_ARGUMENT;
	}
	return CODEC_OK;
}

/* Return the number of mantissa bits of float32, bfloat16 or float16. */
static int mantissa_bits(uint32_t dtype)
{
	const struct header h = {.codec = CODEC_TRUNCATE, .dtype = (uint8_t)dtype};
	struct truncate_kind q;

	truncate_kind_of(&h, &q);
	return q.mbits;
}

uint32_t codec_mantissa_bits(uint32_t dtype)
{
	return codec_takes(CODEC_TRUNCATE, dtype) ? (uint32_t)mantissa_bits(dtype) : 0;
}

uint32_t codec_level_bits(uint32_t dtype, uint32_t level)
{
	const struct header h = {.codec = CODEC_TRUNCATE, .dtype = (uint8_t)dtype};
	struct truncate_kind q;

	if (level > 3 || !codec_takes(CODEC_TRUNCATE, dtype))
		return 0;
	truncate_kind_of(&h, &q);
	return q.drop[level];
}

/*
 * Return the guard corrected for dtypes: if parameters have more mantissa bits than the gradient, more bits must be
 * kept. All parameter groups use the header's guard, computed from the dtype with the most mantissa bits.
 */
int8_t truncate_guard(const struct header *h, const codec_metric *metric)
{
	int theta = 0;

	for (const codec_metric *t = metric; t; t = t->until ? t->next : NULL) {
		uint32_t dtype = t->theta_dtype ? t->theta_dtype : t->theta ? t->theta->dtype : CODEC_FLOAT32;

		theta = MAX(theta, mantissa_bits(dtype));
	}
	return (int8_t)choose_guard(h->guard, theta, mantissa_bits(h->dtype));
}

/* Return 1 if the output overlaps the state arrays from which levels are computed. */
int truncate_reads(const struct header *h, const codec_context *with, int encoding, const void *out, uint64_t nbytes,
		   int in_place)
{
	if (!needs_state(h, encoding))
		return 0;
	if (with->levels)
		return spans_overlap(out, nbytes, with->levels, h->n);
	for (const codec_metric *t = with->metric; t; t = t->until ? t->next : NULL) {
		const codec_tensor *state[] = {t->theta, t->v, t->m};

		for (int i = 0; i < 3 && !t->user; i++)
			if (state[i] && !(in_place && state[i]->data == out && state[i]->nbytes == nbytes) &&
			    spans_overlap(out, nbytes, state[i]->data, state[i]->nbytes))
				return 1;
	}
	return 0;
}

static const float_any *load_state(const struct kernels *k, const codec_tensor *t, uint64_t first, uint64_t n,
				   float *buffer)
{
	return load_floats(k, t->dtype, t->data, first, n, buffer);
}

void truncate_reference(const codec_metric **from, const struct kernels *k, uint64_t first, uint64_t n, uint8_t *ea)
{
	float a[512], b[512], c[512];

	for (uint64_t i = 0, m; i < n; i += m) {
		const codec_metric *t = *from = truncate_metric(*from, first + i);

		m = MIN(512, n - i);
		m = t->until ? MIN(m, t->until - first - i) : m;
		if (t->user) {
			t->user(t->data, first + i, m, a);
			k->exponents_of(a, m, ea + i);
		} else {
			const struct metric_terms terms = {t->theta_term, t->theta_v_term, t->v_term, t->eps,
							   t->m_term};

			k->metric_exponents(&terms, load_state(k, t->theta, first + i, m, a),
					    t->v ? load_state(k, t->v, first + i, m, b) : NULL,
					    t->m ? load_state(k, t->m, first + i, m, c) : NULL, m, ea + i);
		}
	}
}

/*
 * Compute the number of bits to drop from each of values [first, first + n). e: exponents of the values; ea: exponents
 * of the metric A, from truncate_reference.
 */
codec_status truncate_drops(const struct job *j, const struct kernels *k, const codec_context *with,
			    const struct truncate_kind *q, uint64_t first, uint64_t n, const uint8_t *e,
			    const uint8_t *ea, uint8_t *drop)
{
	if (j->h.variant == CODEC_LEVEL_CODING_FIXED) {
		for (uint64_t i = 0; i < n; i++)
			drop[i] = e[i] == q->last ? 0 : q->drop[j->h.bits];
	} else if (with->levels) {
		if (k->max_byte(with->levels + first, n) > 3)
			return CODEC_BAD_ARGUMENT;
		for (uint64_t i = 0; i < n; i++)
			drop[i] = e[i] == q->last ? 0 : q->drop[with->levels[first + i]];
	} else {
		k->drops_of(q, e, ea, n, drop);
	}
	return CODEC_OK;
}

/* Return 1 if opening an encode job needs a work buffer, in which sampled values are truncated. */
int truncate_opens_with_work(const struct header *h)
{
	(void)h;
	return 1;
}

uint64_t truncate_work_nbytes(const struct header *h)
{
	uint64_t m = largest_block(h->n);

	return 6 * m + 9 * (m + 64) + 64;
}

void truncate_work_place(const struct header *h, char **p, struct work *w)
{
	uint64_t m = largest_block(h->n);

	w->residual = NULL;
	w->exponent = work_take(p, 2 * m + 64);
	w->patterns = work_take(p, 4 * m);
	for (int i = 0; i < TRUNCATE_PIECES; i++)
		w->piece[i] = work_take(p, m + 64);
	w->fields = (uint32_t *)w->piece[0];
	w->e = work_take(p, m + 64);
	w->ea = work_take(p, m + 64);
	w->drop = work_take(p, m + 64);
	w->width = work_take(p, m + 64);
	w->level = work_take(p, m + 64);
}

uint64_t truncate_region_bound(const struct job *j)
{
	uint64_t m = padded(MIN(j->h.n, j->h.block)), nbytes = 8 + GAPS_NBYTES + 64; /* loops may write 64 more */
	struct truncate_kind q;

	truncate_kind_of(&j->h, &q);
	nbytes += j->h.variant == CODEC_LEVEL_CODING_CODED ? coded_bound(m) : m;
	nbytes += j->h.variant == CODEC_LEVEL_CODING_PLANE ? m / 4 : 0;
	return ALIGN8(nbytes + m * (uint64_t)(q.mbits + 1) / 8);
}
