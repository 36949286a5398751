/*
 * decode.c - decode a block's kept values, and store or accumulate them. Safe for any bytes: they give values or an
 * error.
 */
#include "topk.h"

#define BAD(where, found, expected) return fault(f, CODEC_BAD_REGION, where, found, expected)

/*
 * Check that the scales of a block are finite and not negative, and that no chunk's lowest level exceeds its highest.
 * `each`: number of scales per chunk.
 */
static codec_status check_scales(const uint8_t *frame, uint64_t at, uint64_t nbytes, uint32_t each, codec_fault *f)
{
	for (uint64_t i = at; i < at + nbytes; i += 2) {
		uint32_t scale = load16(frame + i), least = 0;

		if (scale >= ROUND_INF >> 16)
			BAD(i, scale, (ROUND_INF >> 16) - 1);
		if (each == 2 && (i - at) % 4)
			least = load16(frame + i - 2);
		if (scale < least)
			BAD(i, scale, least);
	}
	return CODEC_OK;
}

/* Kept values of a chunk: positions in w->at, codes in w->code_of. */
struct chunk {
	uint64_t first, n; /* index of the first value, number of values */
	uint32_t kept;     /* number of kept values; 0: all values are 0 */
	struct topk_range range;
};

/* Store the kept values of a chunk at their positions in y; if `adds`, add weight * value to y instead. */
static void scatter(const struct topk_kind *q, const struct chunk *c, const struct work *w, int adds, float weight,
		    float_any *y)
{
	int steps = topk_steps(q->bits);

	for (uint32_t i = 0; i < c->kept; i++) {
		float v = topk_value(w->code_of[i], c->range.low, c->range.high, steps, q->dtype);

		y[w->at[i]] = adds ? round_weighted(y[w->at[i]], weight, v) : v;
	}
}

/* Store or accumulate all values of a chunk. w->x must contain zeros only, and again does on return. */
static void put_chunk(const struct kernels *k, const struct topk_kind *q, const struct chunk *c,
		      const struct sink *sink, struct work *w)
{
	int adds = sink->into == CODEC_INTO_ADD && !(sink->divide > 0), stores = !adds && sink->into != CODEC_INTO_ADD;
	float_any *there = sink->dst->dtype == CODEC_FLOAT32 ? (float_any *)sink->dst->data + c->first : NULL;

	if (there && adds) {
		scatter(q, c, w, 1, sink->weight, there);
		return;
	}
	if (there && stores && sink->into != CODEC_INTO_MAX && !sink->nontemporal && !(sink->divide > 0)) {
		memset(there, 0, 4 * c->n);
		scatter(q, c, w, 0, 1, there);
		return;
	}
	scatter(q, c, w, 0, 1, (float_any *)w->x);
	sink_put(k, sink, c->first, c->n, w->x);
	for (uint32_t i = 0; i < c->kept; i++)
		w->x[w->at[i]] = 0;
}

static codec_status decode_block(const struct job *j, const struct kernels *k, const uint8_t *frame, uint64_t b,
				 uint64_t at, uint64_t end, const struct sink *sink, struct work *w, codec_fault *f)
{
	const struct topk_kind q = topk_kind(&j->h);
	uint64_t m, first = topk_span(&j->h, b, &m), chunk = 1ull << q.chunk_log2;
	uint64_t scales = topk_scales_nbytes(&q, m);
	struct bit_reader r = {frame + at + scales, end - at - scales, 0};

	if (end - at < scales)
		BAD(at, end - at, ALIGN8(scales));
	TRY(check_scales(frame, at, scales, topk_scales(q.bits), f));
	for (uint64_t i = 0; i < m; i += chunk) {
		struct chunk c = {first + i, MIN(chunk, m - i), 0, topk_range_at(&q, frame + at, i / chunk)};
		uint32_t kept = c.range.high > 0 ? topk_kept(&q, c.n) : 0;

		if (kept && !topk_read(&q, &r, c.n, kept, w->at, w->code_of))
			BAD(at + scales, i, c.n);
		c.kept = kept;
		if (sink->into != SINK_NONE)
			put_chunk(k, &q, &c, sink, w);
	}
	if (!stream_ends(&r))
		BAD(end - 8, r.at, 8 * r.nbytes);
	return CODEC_OK;
}

codec_status topk_decode_blocks(const uint8_t *frame, const codec_tensor *dst, const codec_context *with,
				const struct job *j, codec_range *range, struct work *w)
{
	const struct sink sink = {.into = dst ? (int)with->into : SINK_NONE,
				  .weight = with->weight,
				  .divide = with->divide,
				  .nontemporal = dst && is_nontemporal(with, dst),
				  .dst = dst};

	memset(w->x, 0, 4 * MIN(j->h.n, 1ull << (j->h.group_size >> WIRE_TOPK_CHUNK_AT)));
	for (uint64_t b = range->first; b < range->first + range->count; b++) {
		uint64_t at, end;

		TRY(job_block(j, frame, with, b, &at, &end, &range->checksum));
		TRY(decode_block(j, kernels_for(with), frame, b, at, end, &sink, w, with->fault));
	}
	return CODEC_OK;
}
