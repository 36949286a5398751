/* encode.c - encode the values of largest magnitude of each chunk of a block. */
#include "topk.h"

codec_status topk_begin(struct job *j, const codec_spec *s, const codec_context *with)
{
	uint32_t log2 = j->h.group_size >> WIRE_TOPK_CHUNK_AT;

	if (with->ncodebooks)
		return CODEC_BAD_ARGUMENT;
	j->residual = with->residual ? RESIDUAL_WITH_BLOCKS : RESIDUAL_NONE;
	if (!j->h.n) {
		j->h.group_size = 0;
		return CODEC_OK;
	}
	while (log2 < WIRE_TOPK_MAX_BLOCK_LOG2 && 1ull << log2 < j->h.n)
		log2++;
	j->h.block_log2 = (uint8_t)log2;
	j->h.layout = WIRE_LAYOUT_BLOCKS;
	j->key = (struct philox){s->seed, (uint32_t)with->stream, (uint32_t)(with->stream >> 32)};
	TRY(header_derive(&j->h));
	j->nscans = j->residual && j->verify_first ? j->h.nblocks : 0;
	return CODEC_OK;
}

#define PIECE 1024 /* number of values converted to float32 at once */

/* Compute the largest magnitude of each of blocks [first, first + count), and store it in the job. */
void topk_scan(struct job *j, const struct kernels *k, const struct source *src, uint64_t first, uint64_t count)
{
	float buffer[PIECE];

	for (uint64_t b = first; b < first + count; b++) {
		uint64_t m, at = topk_span(&j->h, b, &m);
		uint32_t most = 0, max;

		for (uint64_t i = 0, n; i < m; i += n) {
			n = MIN(PIECE, m - i);
			k->abs_max(load_values(k, src, at + i, n, buffer), n, n, ROUND_ABS + 1, &max);
			most = MAX(most, max);
		}
		topk_maxima(j)[b] = most;
	}
}

codec_status topk_choose(struct job *j, const struct kernels *k, const struct source *src, const codec_context *with)
{
	(void)k, (void)src, (void)with;
	for (uint64_t b = 0; b < j->nscans; b++)
		if (topk_maxima(j)[b] >= ROUND_INF)
			return CODEC_NONFINITE;
	return CODEC_OK;
}

/* Store the scales of a chunk's `kept` values: their mean magnitude, or their smallest and largest magnitude. */
static void put_scales(const struct topk_kind *q, const float *value, uint64_t kept, uint8_t *dst)
{
	uint32_t least = ROUND_INF, most = 0;
	double sum = 0;

	if (q->bits == 1) {
		for (uint64_t i = 0; i < kept; i++)
			sum = round_add64(sum, (double)fabsf(value[i]));
		store16(dst, round_to_bfloat16(round_bits(round_to_float(round_div64(sum, (double)kept)))));
		return;
	}
	for (uint64_t i = 0; i < kept; i++) {
		uint32_t key = round_bits(value[i]) & ROUND_ABS;

		least = MIN(least, key);
		most = MAX(most, key);
	}
	store16(dst, round_to_bfloat16(least));
	store16(dst + 2, round_to_bfloat16(most));
}

/* Append the codes of a chunk's `kept` values to a bit stream. The chunk begins at value `first`. */
static void put_codes(const struct job *j, const struct topk_kind *q, struct topk_range range, uint64_t first,
		      uint64_t kept, const struct work *w, struct bit_writer *to)
{
	int random = j->h.options & CODEC_OPTION_STOCHASTIC, steps = topk_steps(q->bits);
	uint32_t next = 0;

	for (uint64_t i = 0; i < kept; i++) {
		uint32_t at = w->at[i], x = round_bits(w->candidate[i]), h = 0x8000;

		if (random)
			h = philox_half(j->key, first + at, 0);
		put_rice(to, at - next, q->rice_k, WIRE_RICE_GAP_BITS);
		put_bits(to, x >> 31 | topk_level(round_float(x & ROUND_ABS), range.low, range.high, steps, h) << 1,
			 q->bits);
		next = at + 1;
	}
}

codec_status topk_encode_block(struct job *j, const struct kernels *k, const codec_context *with,
			       const struct source *src, uint64_t b, uint8_t *frame, struct work *w, uint64_t *digest,
			       uint64_t *nbytes)
{
	const struct topk_kind q = topk_kind(&j->h);
	uint64_t m, first = topk_span(&j->h, b, &m), chunk = 1ull << q.chunk_log2;
	uint64_t scales = topk_scales_nbytes(&q, m), each = 2 * topk_scales(q.bits);
	struct bit_writer to = {0, 0, 0, w->region + scales, w->region + family_of(&j->h)->regions_bound(j, b, 1)};

	(void)with, (void)frame, (void)digest;
	for (uint64_t c = 0; c * chunk < m; c++) {
		uint64_t at = first + c * chunk, n = MIN(chunk, m - c * chunk), kept = topk_kept(&q, n);
		const float_any *x = load_values(k, src, at, n, w->x);
		struct topk_range range;

		TRY(topk_select(k, x, n, kept, &w->guess, w));
		put_scales(&q, w->candidate, kept, w->region + c * each);
		range = topk_range_at(&q, w->region, c);
		if (range.high > 0)
			put_codes(j, &q, range, at, kept, w, &to);
	}
	w->stream_nbytes = close_bits(&to, w->region + scales);
	*nbytes = scales + w->stream_nbytes;
	while (*nbytes % WIRE_ALIGN)
		w->region[(*nbytes)++] = 0;
	return CODEC_OK;
}

/* Write the residual of block b, which was just encoded to `region`: encoded values minus decoded values. */
codec_status topk_residual(const struct job *j, const struct kernels *k, const struct source *src,
			   const uint8_t *region, uint64_t b, float *residual, struct work *w)
{
	const struct topk_kind q = topk_kind(&j->h);
	uint64_t m, first = topk_span(&j->h, b, &m), chunk = 1ull << q.chunk_log2;
	uint64_t scales = topk_scales_nbytes(&q, m);
	struct bit_reader r = {region + scales, w->stream_nbytes, 0};

	for (uint64_t c = 0; c * chunk < m; c++) {
		uint64_t from = first + c * chunk, n = MIN(chunk, m - c * chunk), kept = topk_kept(&q, n);
		const struct topk_range range = topk_range_at(&q, region, c);
		const float_any *x = load_values(k, src, from, n, w->x);
		float_any *to = (float_any *)residual + from;

		if (to != x) /* the residual may be the tensor */
			memcpy(to, x, 4 * n);
		if (!(range.high > 0) || !topk_read(&q, &r, n, (uint32_t)kept, w->at, w->code_of))
			continue;
		for (uint64_t i = 0; i < kept; i++)
			to[w->at[i]] = round_sub(to[w->at[i]], topk_value(w->code_of[i], range.low, range.high,
									  topk_steps(q.bits), q.dtype));
	}
	return CODEC_OK;
}

codec_status topk_leave(const struct job *j, const struct kernels *k, const codec_context *with,
			const struct source *src, void *work)
{
	struct job *own = (struct job *)j;
	struct work w;

	if (j->residual != RESIDUAL_LAST)
		return CODEC_OK;
	work_place(&j->h, work, &w);
	for (uint64_t b = 0; b < j->h.nblocks; b++) {
		uint64_t digest, nbytes;

		TRY(topk_encode_block(own, k, with, src, b, NULL, &w, &digest, &nbytes));
		TRY(topk_residual(j, k, src, w.region, b, with->residual, &w));
	}
	return CODEC_OK;
}
