/*
 * delta.h - DELTA: the changes of a tensor against a base that both sides hold. docs/spec/format.md, section 10.
 *
 * The side section has digests of the base's and of the result's values. A job sums them up block by block, and a
 * decoder knows both before it writes: the sums of the result's chunks follow from those of the base and from the list
 * of changes, because they are linear in the words.
 */
#ifndef CODEC_DELTA_FAMILY_H
#define CODEC_DELTA_FAMILY_H

#include "coder/sink.h"
#include "coder/work.h"
#include "frame/frame.h"

#define DELTA_LIST_SHARE 8 /* a block gets a list of changes if at most one value in DELTA_LIST_SHARE changes */

static inline struct delta_kind delta_kind(const struct header *h)
{
	return delta_kind_of(h->dtype, dtype_of(h->dtype)->nbytes);
}

/* Get the number of the first value of block b, and the number of its values. */
static inline uint64_t delta_span(const struct header *h, uint64_t b, uint64_t *m)
{
	*m = MIN(h->block, h->n - b * h->block);
	return b * h->block;
}

static inline uint64_t delta_raw_nbytes(const struct header *h, uint64_t m)
{
	return ALIGN8(4 + m * dtype_of(h->dtype)->nbytes);
}

/* Return log2 of the values in a block, from a frame's header or an encoder's spec. */
uint8_t delta_block_log2(const struct header *h);

/* Return the number of chunks whose sums kernels compute from values in memory. */
static inline uint64_t delta_whole_chunks(uint64_t nbytes)
{
	return CODEC_BIG_ENDIAN ? 0 : nbytes / DELTA_CHUNK;
}

/* Compute the sums of the chunks of `nbytes` bytes, the last one padded with zeros. `item`: bytes per value. */
void delta_sums(const struct kernels *k, const void *values, uint64_t nbytes, uint64_t item, uint64_t *sums);
/* Return the contribution to a digest of `nbytes` bytes from chunk `first` on, given the sums of their chunks. */
uint64_t delta_digest_of(const uint64_t *sums, uint64_t nbytes, uint64_t first);
/* Return what bytes [at, end) of a tensor add to its digest; `at` is a multiple of DELTA_CHUNK. */
uint64_t delta_digest(const struct kernels *k, const void *values, uint64_t at, uint64_t end, uint64_t item);

/*
 * Set the state of a block whose part of the digests is recorded, before its values are written. delta_check_base
 * compares the base's digest with the frame's while blocks are decoded, maybe in place: the record of a block with a
 * state counts, not its values.
 */
void delta_set_state(struct delta_block *block, uint32_t state);
codec_status delta_check_base(const struct job *j, const codec_context *with);

/*
 * Compare the digests of a decode job's blocks with the frame's. delta_open does that for a frame without blocks, whose
 * base must have the digest of the frame. delta_copy writes its values.
 */
codec_status delta_close(const struct job *j, const codec_context *with);
codec_status delta_open(const struct job *j, const codec_context *with);
void delta_copy(const struct job *j, const codec_context *with, const codec_tensor *dst);

codec_status delta_begin(struct job *j, const codec_spec *s, const codec_context *with);
codec_status delta_choose(struct job *j, const struct kernels *k, const struct source *src, const codec_context *with);
codec_status delta_encode_block(struct job *j, const struct kernels *k, const codec_context *with,
				const struct source *src, uint64_t b, uint8_t *frame, struct work *w, uint64_t *digest,
				uint64_t *nbytes);
codec_status delta_decode_blocks(const uint8_t *frame, const codec_tensor *dst, const codec_context *with,
				 const struct job *j, codec_range *range, struct work *w);

/* Return 1 if no block of an encoded tensor has changes. */
int delta_is_unchanged(const struct job *j);

/*
 * The list of changes of a decode job has room for one in DELTA_LIST_SHARE values. Those of a range of blocks begin at
 * delta_list_first of its first block, and follow each other, so that little memory is touched where few values change.
 * delta_list_at gets the list that begins at an index.
 */
uint64_t delta_list_first(const struct job *j, uint64_t b);
void delta_list_at(const struct job *j, uint64_t index, struct delta_list *list);

#endif
