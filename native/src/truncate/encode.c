/*
 * encode.c - encode a block of values into its region: symbols, levels, pieces of mantissas.
 *
 * Region: head (u32); with shared levels a digest (u32); the symbols' plane; with level coding "plane" the levels; the
 * pieces of signs and mantissas, most significant piece first; fewer than 8 zero bytes of padding.
 */
#include "truncate.h"

/*
 * Prefetch a part of the next tile of values. Called between the steps of the current tile, so that memory is not idle
 * while these compute.
 */
static void prefetch(const struct truncate_kind *q, struct ahead *next)
{
	size_t n = MIN(next->n,
		       4 * TRUNCATE_TILE / (q->by_bit ? 4 : 8)); /* 4 (by_bit) or 8 calls prefetch a tile of float32 */

	for (size_t c = 0; c < next->count; c++, next->at[c - 1] += n)
		for (size_t i = 0; i < n; i += 64)
			__builtin_prefetch((const void *)(next->at[c] + i));
	next->n -= n;
}

/*
 * Write the residual of values [first, first + n), at most a tile. y: the truncated values; sums: for float32, the
 * values before, perhaps in `buffer`.
 */
static void leave(const struct job *j, const struct kernels *k, const struct source *src, uint64_t first, uint64_t n,
		  const void *sums, const uint32_t *y, float *residual, float buffer[TRUNCATE_TILE])
{
	const codec_tensor dst = {.dtype = CODEC_FLOAT32, .data = residual, .nbytes = sizeof(float) * j->h.n};
	const struct sink sink = {.into = SINK_RESIDUAL, .dst = &dst, .src = src};

	if (j->h.dtype == CODEC_FLOAT32) {
		k->subtract(sums, (const float *)y, n, (float_any *)residual + first);
		return;
	}
	for (uint64_t i = 0, m; i < n; i += m) {
		void *halves = buffer + 512;

		m = MIN(512, n - i);
		k->store_patterns(y + i, m, 2, halves);
		sink_put(k, &sink, first + i, m, (const float *)load_floats(k, j->h.dtype, halves, 0, m, buffer));
	}
}

static int needs_reference(const struct job *j, const codec_context *with)
{
	return j->h.variant != CODEC_LEVEL_CODING_FIXED && !with->levels;
}

/*
 * Truncate values [at, at + n) of a block, at most one tile. `first`: index of the block's first value. Compute the
 * exponents after rounding, the number of bits dropped from each value and, unless w->residual is NULL, the residual.
 */
static codec_status cut(const struct job *j, const struct kernels *k, const codec_context *with,
			const struct truncate_kind *q, const struct source *src, uint64_t first, uint64_t at,
			uint64_t n, struct work *w)
{
	const struct dtype *d = dtype_of(j->h.dtype);
	uint8_t *e = w->e + at, *ea = w->ea + at, *drop = w->drop + at;
	uint32_t *x = w->patterns + at;
	float buffer[TRUNCATE_TILE];
	const void *sums;

	first += at;
	sums = load_native(k, src, first, n, buffer);
	k->load_patterns(sums, n, d->nbytes, x);
	k->exponents(x, n, q->mbits, q->last, e);
	prefetch(q, &w->ahead);
	if (needs_reference(j, with))
		truncate_reference(&w->metric, k, first, n, ea);
	prefetch(q, &w->ahead);
	TRY(truncate_drops(j, k, with, q, first, n, e, ea, drop));
	prefetch(q, &w->ahead);
	k->truncate(q, drop, !(j->h.options & CODEC_OPTION_CUT), n, x, e);
	if (w->residual)
		leave(j, k, src, first, n, sums, x, w->residual, buffer);
	/*
	 * With shared levels, a decoder computes the numbers of dropped bits from the exponents after rounding, so
	 * compute `drop` again. Where rounding changed an exponent, the mantissa is 0, so any number of its bits may be
	 * dropped.
	 */
	return j->h.variant == CODEC_LEVEL_CODING_SHARED ? truncate_drops(j, k, with, q, first, n, e, ea, drop)
							 : CODEC_OK;
}

/*
 * Compute the symbols of n values and, with joint levels, their pairs of exponent and level in w->exponent. Return the
 * number of values without a symbol.
 */
static uint64_t symbols(const struct job *j, const struct kernels *k, const struct truncate_kind *q, uint64_t first,
			uint64_t n, struct work *w, uint8_t *symbol)
{
	int shift = truncate_shift(q), joint = j->h.variant == CODEC_LEVEL_CODING_CODED;
	uint8_t *lowered = joint ? w->ea : symbol; /* reuses w->ea: the exponents of A are no longer needed */
	uint64_t m;

	for (uint64_t i = 0; i < n; i += m) {
		m = MIN(OFFSETS, n - i);
		if (!j->model.nsegments) {
			memcpy(lowered + i, w->e + i, m);
			continue;
		}
		model_offsets(j, k, &w->fitted, first + i, m, w->offset);
		k->lower_exponents(w->e + i, w->offset, (uint8_t)q->last, shift, m, lowered + i);
	}
	if (!joint)
		return 0;
	k->levels_of(q, w->drop, n, w->level);
	return k->join(lowered, w->level, n, (int)truncate_base(&j->h), w->exponent, symbol);
}

#define NEAR 64

/*
 * Find the metrics of NEAR evenly spaced values. Sampled rows are not in order, so the search for a row's metric starts
 * from the nearest of these values.
 */
static void metrics_near(const struct job *j, const codec_context *with, uint64_t each, const codec_metric *near[NEAR])
{
	near[0] = with->metric;
	for (uint64_t i = 1; i < NEAR; i++)
		near[i] = needs_reference(j, with) ? truncate_metric(near[i - 1], i * each) : NULL;
}

/* Count the symbols, after truncation, in a sample of rows of 128 values. */
static codec_status count_symbols(struct job *j, const struct kernels *k, const struct source *src,
				  const codec_context *with)
{
	uint64_t nrows = (j->h.n + WIRE_ROW - 1) / WIRE_ROW, stride = choose_stride(nrows),
		 take = (nrows + stride - 1) / stride;
	uint64_t each = j->h.n / NEAR + 1;
	const codec_metric *near[NEAR];
	struct truncate_kind q;
	struct work w;

	truncate_kind_of(&j->h, &q);
	work_place(&j->h, (char *)j + j->work_at, &w);
	metrics_near(j, with, each, near);
	memset(j->sample.counts[0], 0, sizeof j->sample.counts[0]);
	for (uint64_t r = 0; r < take; r++) {
		uint64_t first = WIRE_ROW * choose_spread(r, take, nrows), n = MIN(WIRE_ROW, j->h.n - first);

		w.metric = near[first / each];
		TRY(cut(j, k, with, &q, src, first, 0, n, &w));
		model_fit(src, k, j, first, n, &w.fitted);
		symbols(j, k, &q, first, n, &w, w.plane[0]);
		if (is_zero(w.e, n)) /* blocks leave out rows of zeros */
			continue;
		for (uint64_t i = 0; i < n; i++)
			j->sample.counts[0][w.plane[0][i]]++;
	}
	return CODEC_OK;
}

/* Set the frame's codebook: the agreed codebook, or else one built from the counts of sampled symbols. */
static codec_status choose_symbols(const codec_context *with, struct job *j)
{
	if (with->ncodebooks) {
		TRY(codebook_load(with->codebooks, &j->h, j->books));
		j->codebook_id = with->codebooks->id;
	} else {
		book_from_counts(j->books, j->sample.counts[0], j->h.max_code_length);
	}
	book_to_codes(j->books, j->codes);
	j->h.coded = 1;
	j->h.flags = (uint8_t)((j->codebook_id ? WIRE_FLAG_PRIOR : 0) | (j->model.nsegments ? WIRE_FLAG_SEGMENTS : 0));
	return CODEC_OK;
}

/* Begin encoding, and add the correction for dtypes to the header's guard. */
codec_status truncate_begin(struct job *j, const codec_spec *s, const codec_context *with)
{
	(void)s;
	if (j->h.variant != CODEC_LEVEL_CODING_FIXED && !with->levels)
		j->h.guard = truncate_guard(&j->h, with->metric);
	return model_begin(j, with);
}

codec_status truncate_choose(struct job *j, const struct kernels *k, const struct source *src,
			     const codec_context *with)
{
	model_choose(src, with, k, j, &j->sample);
	TRY(count_symbols(j, k, src, with));
	return choose_symbols(with, j);
}

/* For each piece i of the fields, append piece i of values [at, at + n) to the count[i] pieces of earlier values. */
static void take_pieces(const struct kernels *k, const struct truncate_kind *q, uint64_t at, uint64_t n, struct work *w,
			uint64_t count[TRUNCATE_PIECES])
{
	uint8_t piece[TRUNCATE_PIECES][TRUNCATE_TILE];
	uint8_t *const pieces[] = {piece[0], piece[1], piece[2], piece[3]}, least = 0;

	k->widths(w->e + at, w->drop + at, n, q->mbits + 1, q->mbits + 1, w->width + at);
	k->split_pieces(q, w->patterns + at, n, pieces);
	for (int i = 0; i < TRUNCATE_PIECES; i++) {
		prefetch(q, &w->ahead);
		least = (uint8_t)(least + q->width[i]);
		count[i] += k->prune(w->width + at, least, piece[i], n, w->piece[i] + count[i]);
	}
}

static uint8_t *put_pieces(const struct kernels *k, const struct truncate_kind *q, struct work *w, uint64_t m,
			   const uint64_t count[TRUNCATE_PIECES], uint8_t *p, uint32_t *head)
{
	if (q->by_bit) {
		/* omit trailing bits that are 0 in all values, as in gradients computed in a narrower dtype */
		int total = q->mbits + 1;
		uint32_t any = bits_field(k->any_bits(w->patterns, m), q->mbits, q->sign);
		int tail = __builtin_ctz(any | 1u << total);
		uint64_t nbits = k->widths(w->e, w->drop, m, total, total - tail, w->width);

		k->pack_fields(q, w->patterns, w->width, m, p);
		*head |= (uint32_t)tail << WIRE_TAIL_AT;
		return p + (nbits + 7) / 8;
	}
	for (int i = 0; i < TRUNCATE_PIECES; i++) {
		if (count[i] && k->max_byte(w->piece[i], count[i]) == 0) {
			*head |= WIRE_PIECE_ZERO << i;
			continue;
		}
		k->pack_codes(w->piece[i], count[i], q->width[i], p);
		p += (count[i] * q->width[i] + 7) / 8;
	}
	return p;
}

/* Store the symbols of a block of m values at p in the smallest mode. Return the size in bytes. */
static uint64_t put_symbols(const struct job *j, const struct kernels *k, const struct truncate_kind *q, uint64_t first,
			    uint64_t m, struct work *w, uint8_t *p, uint32_t *head)
{
	uint64_t outside = symbols(j, k, q, first, m, w, w->plane[0]), got, most, present;
	struct literals from = {.byte = w->plane[0]};
	uint8_t bitmap[GAPS_NBYTES], *start = p;

	*head = 0;
	present = gaps_find(w->e, m, 1, bitmap);
	if (present < m) {
		*head = WIRE_REGION_GAPS;
		p += gaps_put(bitmap, m, p);
		gaps_pack(bitmap, w->plane[0], m, 1);
		if (j->h.variant == CODEC_LEVEL_CODING_CODED)
			gaps_pack(bitmap, w->exponent, m, 2);
		m = present;
	}
	most = m - 1;
	if (is_constant(w->plane[0], m) && !outside) {
		*head |= WIRE_MODE_CONSTANT;
		*p = w->plane[0][0];
		return (uint64_t)(p + 1 - start);
	}
	for (uint64_t i = 0; outside && i < m; i++)
		if (w->exponent[i] && !w->plane[0][i])
			w->plane[0][i] = j->codes->escape;
	if (j->h.variant == CODEC_LEVEL_CODING_CODED) { /* joint symbols are never raw */
		from.wide = w->exponent;
		most = UINT64_MAX;
	}
	got = encode_plane(j->codes, k, w, w->plane[0], m, from, most, p);
	*head |= got ? WIRE_MODE_CODED : WIRE_MODE_RAW;
	if (!got)
		memcpy(p, w->plane[0], got = m);
	return (uint64_t)(p - start) + got;
}

/* Set the memory to prefetch to values [first, first + n), their residual and the state arrays of their metric. */
static void next_tile(const struct job *j, const codec_context *with, const struct source *src, uint64_t first,
		      uint64_t n, struct work *w)
{
	const codec_metric *t = needs_reference(j, with) ? truncate_metric(w->metric, first) : NULL;
	size_t size = dtype_of(j->h.dtype)->nbytes;
	struct ahead *next = &w->ahead;

	*next = (struct ahead){{(uintptr_t)src->data + first * size}, n * size, 1};
	if (src->error) {
		next->at[next->count++] = (uintptr_t)(src->error + first);
		next->n = n * sizeof(float);
	}
	for (int i = 0; i < 3 && t && !t->user; i++) {
		const codec_tensor *s = i == 0 ? t->theta : i == 1 ? t->v : t->m;

		if (!s)
			continue;
		size = dtype_of(s->dtype)->nbytes;
		next->at[next->count++] = (uintptr_t)s->data + first * size;
		next->n = MAX(next->n, n * size);
	}
}

/* Encode block b into w->region. On return, w->patterns has the values that a decoder returns. */
codec_status truncate_encode_block(struct job *j, const struct kernels *k, const codec_context *with,
				   const struct source *src, uint64_t b, uint8_t *frame, struct work *w,
				   uint64_t *digest, uint64_t *nbytes)
{
	uint64_t first = b * j->h.block, m = MIN(j->h.block, j->h.n - first), got;
	uint64_t count[TRUNCATE_PIECES] = {0};
	struct truncate_kind q;
	uint8_t *p = w->region + 4;
	uint32_t head;

	(void)frame, (void)digest;
	truncate_kind_of(&j->h, &q);
	w->metric = with->metric;
	model_fit(src, k, j, first, m, &w->fitted); /* before values are overwritten: the residual may be the tensor */
	for (uint64_t at = 0; at < m; at += TRUNCATE_TILE) {
		uint64_t n = MIN(TRUNCATE_TILE, m - at);

		next_tile(j, with, src, first + at + n, n, w);
		TRY(cut(j, k, with, &q, src, first, at, n, w));
		prefetch(&q, &w->ahead);
		if (!q.by_bit)
			take_pieces(k, &q, at, n, w, count);
	}
	w->ahead.count = 0;
	if (j->h.variant == CODEC_LEVEL_CODING_SHARED) {
		store32(p, (uint32_t)k->digest(w->ea, m, WIRE_SEED_STATE));
		p += 4;
	}
	p += put_symbols(j, k, &q, first, m, w, p, &head);
	if (j->h.variant == CODEC_LEVEL_CODING_PLANE) {
		k->levels_of(&q, w->drop, m, w->symbol);
		got = k->prune(w->e, 1, w->symbol, m, w->symbol);
		k->pack_codes(w->symbol, got, 2, p);
		p += (got + 3) / 4;
	}
	p = put_pieces(k, &q, w, m, count, p, &head);
	store32(w->region, head);
	for (*nbytes = (uint64_t)(p - w->region); *nbytes % WIRE_ALIGN; ++*nbytes)
		*p++ = 0;
	return CODEC_OK;
}

/*
 * Write the residual of the values whose blocks did not. This truncates the values a second time, after all steps that
 * can fail.
 */
codec_status truncate_leave(const struct job *j, const struct kernels *k, const codec_context *with,
			    const struct source *src, void *work)
{
	uint64_t end = MIN(j->h.n, (j->h.nblocks - j->nleft) * j->h.block);
	struct truncate_kind q;
	struct work w;

	(void)work; /* not used: the job has a work buffer */
	truncate_kind_of(&j->h, &q);
	work_place(&j->h, (char *)j + j->work_at, &w);
	w.metric = with->metric;
	w.residual = with->residual;
	for (uint64_t first = 0, n; first < end; first += n) {
		n = MIN(TRUNCATE_TILE, end - first);
		next_tile(j, with, src, first + n, MIN(TRUNCATE_TILE, end - first - n), &w);
		TRY(cut(j, k, with, &q, src, first, 0, n, &w));
	}
	return CODEC_OK;
}
