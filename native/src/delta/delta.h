/*
 * delta.h - DELTA: the changes of a tensor against a base that encoder and decoder both have. docs/spec/format.md,
 * section 10.
 *
 * The side section has digests of the base and of the result. A job sums up both block by block. A decoder computes
 * both before it writes values: a chunk's checksum sum is linear in its words, so the sums of the result follow from
 * the sums of the base and the list of changes.
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

/* Return the index of the first value of block b, and set *m to the block's number of values. */
static inline uint64_t delta_span(const struct header *h, uint64_t b, uint64_t *m)
{
	*m = MIN(h->block, h->n - b * h->block);
	return b * h->block;
}

static inline uint64_t delta_raw_nbytes(const struct header *h, uint64_t m)
{
	return ALIGN8(4 + m * dtype_of(h->dtype)->nbytes);
}

/* Return log2 of the number of values in a block, from a frame's header or an encoder's spec. */
uint8_t delta_block_log2(const struct header *h);

/*
 * Return the number of chunks whose sums kernels compute directly from values in memory: whole chunks, if this machine
 * is little-endian.
 */
static inline uint64_t delta_whole_chunks(uint64_t nbytes)
{
	return CODEC_BIG_ENDIAN ? 0 : nbytes / DELTA_CHUNK;
}

/* Compute the sums of the chunks of `nbytes` bytes, the last one padded with zeros. `item`: bytes per value. */
void delta_sums(const struct kernels *k, const void *values, uint64_t nbytes, uint64_t item, uint64_t *sums);
/* Return the contribution to a digest of `nbytes` bytes from chunk `first` on, given the sums of their chunks. */
uint64_t delta_digest_of(const uint64_t *sums, uint64_t nbytes, uint64_t first);
/* Return the contribution of bytes [at, end) of a tensor to its digest. `at` is a multiple of DELTA_CHUNK. */
uint64_t delta_digest(const struct kernels *k, const void *values, uint64_t at, uint64_t end, uint64_t item);

/*
 * Set a block's state, after its contribution to the digests is recorded and before its values are written.
 * delta_check_base computes the base's digest while other threads decode blocks, possibly in place. If a block's state
 * is set, delta_check_base therefore reads the block's record, not its values.
 */
void delta_set_state(struct delta_block *block, uint32_t state);
codec_status delta_check_base(const struct job *j, const codec_context *with);

/*
 * delta_close: compare the sums of all blocks' contributions with the digests in the frame. For a frame without blocks,
 * whose result equals the base, delta_open compares the base's digest, and delta_copy writes the base's values.
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

/* Return 1 if no block of an encoded tensor has changes: the tensor equals the base. */
int delta_is_unchanged(const struct job *j);

/*
 * A decode job has one array of changes, with room for one change per DELTA_LIST_SHARE values. The changes of a range
 * of blocks are contiguous and begin at index delta_list_first(range's first block), so that little memory is touched
 * if few values change. delta_list_at sets *list to the part of the array from an index on.
 */
uint64_t delta_list_first(const struct job *j, uint64_t b);
void delta_list_at(const struct job *j, uint64_t index, struct delta_list *list);

/* codec_decode_changes: copy the lists of all blocks of a job, with indices in the tensor. */
codec_status delta_changes(const struct job *j, uint32_t *at, char *values, uint64_t room, size_t *count);

#endif
