/*
 * topk.h - TOPK: keeps the values of largest magnitude of each chunk. docs/spec/format.md, section 11.
 *
 * A block is a whole number of chunks, encoded as one bit stream. The residual is written with the blocks. An earlier
 * pass over the tensor rejects NaN and Inf before any of the residual is written.
 */
#ifndef CODEC_TOPK_FAMILY_H
#define CODEC_TOPK_FAMILY_H

#include "coder/sink.h"
#include "coder/work.h"
#include "isa/bit_stream.h"

static inline struct topk_kind topk_kind(const struct header *h)
{
	return topk_kind_of(h->group_size, h->bits, h->dtype);
}

/* Return the index of the first value of block b, and set *m to the block's number of values. */
static inline uint64_t topk_span(const struct header *h, uint64_t b, uint64_t *m)
{
	*m = MIN(h->block, h->n - b * h->block);
	return b * h->block;
}

/* Return the array of the largest magnitude of each block, as a bit pattern, which topk_scan has computed. */
static inline uint32_t *topk_maxima(const struct job *j)
{
	return (uint32_t *)((char *)j + j->parts_at);
}

/* Magnitudes of a chunk's lowest and highest level; the highest is 0 if the chunk has no codes. */
struct topk_range {
	float low, high;
};

/* Read the scales of chunk c, which must be valid. */
static inline struct topk_range topk_range_at(const struct topk_kind *q, const uint8_t *scales, uint64_t c)
{
	uint32_t n = topk_scales(q->bits);
	const uint8_t *p = scales + 2 * n * c;

	return (struct topk_range){round_float(round_from_bfloat16(load16(p))),
				   round_float(round_from_bfloat16(load16(p + 2 * (n - 1))))};
}

/*
 * Read the positions and codes of the `count` kept values of the next chunk, of n values, from a bit stream. Return 0
 * if they are invalid.
 */
static inline int topk_read(const struct topk_kind *q, struct bit_reader *r, uint64_t n, uint32_t count, uint32_t *at,
			    uint32_t *code)
{
	uint64_t next = 0;
	uint32_t bad = 0;

	for (uint32_t i = 0; i < count; i++) {
		next += read_rice(r, q->rice_k, WIRE_RICE_GAP_BITS, &bad);
		if (next >= n)
			return 0;
		at[i] = (uint32_t)next++;
		code[i] = (uint32_t)read_bits(r, q->bits);
	}
	return !bad && r->at <= 8 * r->nbytes;
}

/*
 * select.c: list the positions of the `kept` largest magnitudes of n values x, ascending. *guess is a threshold near
 * which to search; it is updated for the next call.
 */
codec_status topk_select(const struct kernels *k, const float_any *x, uint64_t n, uint64_t kept, uint32_t *guess,
			 struct work *w);

codec_status topk_begin(struct job *j, const codec_spec *s, const codec_context *with);
void topk_scan(struct job *j, const struct kernels *k, const struct source *src, uint64_t first, uint64_t count);
codec_status topk_choose(struct job *j, const struct kernels *k, const struct source *src, const codec_context *with);
codec_status topk_encode_block(struct job *j, const struct kernels *k, const codec_context *with,
			       const struct source *src, uint64_t b, uint8_t *frame, struct work *w, uint64_t *digest,
			       uint64_t *nbytes);
codec_status topk_residual(const struct job *j, const struct kernels *k, const struct source *src,
			   const uint8_t *region, uint64_t b, float *residual, struct work *w);
codec_status topk_leave(const struct job *j, const struct kernels *k, const codec_context *with,
			const struct source *src, void *work);
codec_status topk_decode_blocks(const uint8_t *frame, const codec_tensor *dst, const codec_context *with,
				const struct job *j, codec_range *range, struct work *w);

#endif
