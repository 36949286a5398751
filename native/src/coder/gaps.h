/* gaps.h - leave empty quad rows, whose values are all 0, out of a block's planes. docs/spec/format.md, section 6. */
#ifndef CODEC_GAPS_H
#define CODEC_GAPS_H

#include "block.h"

/* Return 1 if all of nbytes bytes are 0. */
static inline int is_zero(const void *p, uint64_t nbytes)
{
	return *(const uint8_t *)p == 0 && is_constant(p, nbytes);
}

/*
 * Find the empty quad rows of m values of `size` bytes: set bit q of `bitmap` for each other quad row q, and return the
 * number of values in these. Return m if no quad row is empty, or if all are. The block then has no gaps.
 */
uint64_t gaps_find(const void *values, uint64_t m, uint64_t size, uint8_t bitmap[GAPS_NBYTES]);
/* Move the values of quad rows whose bit is 1 together. m values of `size` bytes, in place. */
void gaps_pack(const uint8_t *bitmap, void *values, uint64_t m, uint64_t size);
/* Store the bitmap of a block of m values at p. Return the size in bytes. */
uint64_t gaps_put(const uint8_t *bitmap, uint64_t m, uint8_t *p);

/* Read the bitmap at the cursor of block o, if the block has gaps, and set o->present. */
codec_status gaps_open(struct block *o, codec_fault *f);
/* Move o->present bytes at p to the positions of their values, and set the bytes of empty quad rows to 0, in place. */
void gaps_expand(const struct block *o, uint8_t *p);

#endif
