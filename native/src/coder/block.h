/* block.h - decode blocks in order, two of them per call of the lane decoder. */
#ifndef CODEC_BLOCK_H
#define CODEC_BLOCK_H

#include "plane.h"

#define GAPS_NBYTES WIRE_GAPS_NBYTES(1 << WIRE_MAX_BLOCK_LOG2) /* size of the bitmap of the largest block */

/* State of a block while it is decoded. */
struct block {
	struct cursor c;
	struct stream top; /* if `coded`: plane that the lane decoder decodes together with one of another block */
	uint64_t b, m, at; /* block index, number of values, offset of the region in the frame */
	uint64_t present;  /* number of values whose bytes are in the region; m without gaps */
	uint32_t head;
	int gaps; /* 1: the block has gaps; `bitmap` tells which quad rows are in the region */
	uint8_t bitmap[GAPS_NBYTES];
	uint8_t mode[WIRE_MAX_PLANES];
	int coded;
	int checks; /* 1: the block is only checked */
	int kept;   /* 1: `top` has the plane's symbols and literals already, which a check has kept */
};

/*
 * Steps of decoding a block. `open` reads the block's region up to the coded plane `top`, the lane decoder then decodes
 * `top` of one or two blocks, and `close` decodes the rest of the region. Two blocks may be open: each has its own
 * buffers for `top`, but they share the work buffers w.
 */
struct block_steps {
	/* Read the block's region up to plane `top`; block_begin was called before. */
	codec_status (*open)(const struct job *j, struct block *o, codec_fault *f);
	/* Set *ahead to the memory to prefetch for the blocks after the `count` open ones. NULL: no prefetch. */
	void (*ahead)(const struct job *j, const struct block *o, size_t count, struct ahead *ahead);
	/* Decode the values, with non-temporal stores if `nontemporal` is 1. values is NULL: only check the block. */
	codec_status (*close)(const struct job *j, const struct kernels *k, const codec_context *with, struct block *o,
			      char *values, int nontemporal, struct work *w);
};

/*
 * Initialize *o for block b, whose region is frame[at, end), at least 8 bytes. `top` has the buffers for plane `top`.
 */
void block_begin(const struct job *j, const uint8_t *frame, uint64_t b, uint64_t at, uint64_t end,
		 const struct stream *top, struct block *o);
void block_decode_top(const struct job *j, const struct kernels *k, struct block *o, size_t count,
		      const struct ahead *ahead);
/*
 * Decode a range of blocks, or check them if dst is NULL. Add the blocks' checksums to range->checksum. If several
 * blocks are faulty, report the first one.
 */
codec_status decode_in_pairs(const struct block_steps *steps, const uint8_t *frame, const codec_tensor *dst,
			     const codec_context *with, const struct job *j, codec_range *range, struct work *w);

#endif
