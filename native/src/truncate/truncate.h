/*
 * truncate.h - TRUNCATE: exponents coded by the lane coder, mantissas truncated by levels. format.md, section 9.
 */
#ifndef CODEC_TRUNCATE_H
#define CODEC_TRUNCATE_H

#include "coder/block.h"
#include "coder/codebook.h"
#include "coder/gaps.h"
#include "coder/model.h"
#include "coder/sink.h"
#include "frame/head.h"

#define TRUNCATE_PIECES 4
#define TRUNCATE_TILE 1024 /* number of values processed at once; intermediate results fit the first-level cache */

void truncate_kind_of(const struct header *h, struct truncate_kind *q);

/*
 * Return the right shift that extracts the exponent from a pattern of the scale model, which is the 15 bits below the
 * sign.
 */
static inline int truncate_shift(const struct truncate_kind *q)
{
	return q->mbits + 15 - q->sign;
}

static inline uint32_t truncate_base(const struct header *h)
{
	return h->dtype == CODEC_FLOAT16 ? 0 : WIRE_JOINT_BASE;
}

/* Return the metric of value `first`, searching from the metric t of an earlier value. */
static inline const codec_metric *truncate_metric(const codec_metric *t, uint64_t first)
{
	while (t->until && t->until <= first)
		t = t->next;
	return t;
}

/*
 * Compute the exponents of the metric A for values [first, first + n), at most a block. *t is the metric of an earlier
 * value, and is set to the metric of the last of these values, so that the list of metrics, which may be as long as the
 * tensor, is traversed only once.
 */
void truncate_reference(const codec_metric **t, const struct kernels *k, uint64_t first, uint64_t n, uint8_t *ea);
codec_status truncate_drops(const struct job *j, const struct kernels *k, const codec_context *with,
			    const struct truncate_kind *q, uint64_t first, uint64_t n, const uint8_t *e,
			    const uint8_t *ea, uint8_t *drop);
codec_status truncate_check_state(const struct header *h, const codec_context *with, int encoding);
int8_t truncate_guard(const struct header *h, const codec_metric *metric);
int truncate_reads(const struct header *h, const codec_context *with, int encoding, const void *out, uint64_t nbytes,
		   int in_place);

int truncate_opens_with_work(const struct header *h);
uint64_t truncate_work_nbytes(const struct header *h);
void truncate_work_place(const struct header *h, char **p, struct work *w);
uint64_t truncate_region_bound(const struct job *j);
codec_status truncate_begin(struct job *j, const codec_spec *s, const codec_context *with);
codec_status truncate_choose(struct job *j, const struct kernels *k, const struct source *src,
			     const codec_context *with);
codec_status truncate_encode_block(struct job *j, const struct kernels *k, const codec_context *with,
				   const struct source *src, uint64_t b, uint8_t *frame, struct work *w,
				   uint64_t *digest, uint64_t *nbytes);
codec_status truncate_leave(const struct job *j, const struct kernels *k, const codec_context *with,
			    const struct source *src, void *work);
codec_status truncate_decode_blocks(const uint8_t *frame, const codec_tensor *dst, const codec_context *with,
				    const struct job *j, codec_range *range, struct work *w);

#endif
