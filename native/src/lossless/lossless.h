/*
 * lossless.h - LOSSLESS: stores blocks of values as byte planes, some of them entropy-coded. docs/spec/format.md,
 * section 6.
 */
#ifndef CODEC_LOSSLESS_H
#define CODEC_LOSSLESS_H

#include "coder/block.h"
#include "coder/codebook.h"
#include "coder/gaps.h"
#include "coder/model.h"
#include "coder/sink.h"
#include "frame/head.h"

/*
 * Encode block b of src into w->region, which has room for region_bound bytes. Returns the region's size in bytes. Also
 * write the block's part of the fixed planes to their sections of the frame dst, and set *planes_digest to the digest
 * of that part.
 */
uint64_t encode_block(struct job *j, const struct kernels *k, const struct source *src, uint8_t *dst, uint64_t b,
		      struct work *w, uint64_t *planes_digest);

extern const struct block_steps lossless_steps;

uint64_t lossless_region_bound(const struct job *j);
codec_status lossless_begin(struct job *j, const codec_spec *s, const codec_context *with);
uint64_t lossless_sample(struct job *j, const struct kernels *k, const struct source *src, const codec_context *with);
void lossless_scan(struct job *j, const struct kernels *k, const struct source *src, uint64_t first, uint64_t count);
codec_status lossless_choose(struct job *j, const struct kernels *k, const struct source *src,
			     const codec_context *with);
codec_status lossless_encode_block(struct job *j, const struct kernels *k, const codec_context *with,
				   const struct source *src, uint64_t b, uint8_t *frame, struct work *w,
				   uint64_t *digest, uint64_t *nbytes);

codec_status lossless_decode_blocks(const uint8_t *frame, const codec_tensor *dst, const codec_context *with,
				    const struct job *j, codec_range *range, struct work *w);

#endif
