/* block.h - blocks decoded one after the other, two of them through the coder's loop at once. */
#ifndef CODEC_BLOCK_H
#define CODEC_BLOCK_H

#include "plane.h"

/* A block being decoded. */
struct block {
	struct cursor c;
	struct stream top; /* the plane that goes through the coder's loop with another block's, if `coded` */
	uint64_t b, m, at; /* at: where its region begins */
	uint32_t head;
	uint8_t mode[WIRE_MAX_PLANES];
	int coded;
	int countable; /* to be checked, `top` need not be decoded: it is enough to know how many are escapes, */
	int counted;   /* which is all that there is now */
};

/*
 * Three steps: open reads up to the coder's loop for `top`, which then runs for one block or two at once, and close
 * does the rest. Two may be open, each with memory of its own for `top`; w is shared.
 */
struct block_steps {
	/* What block_begin has begun with, up to the loop. */
	codec_status (*open)(const struct job *j, struct block *o, codec_fault *f);
	/* What the blocks behind these will be read from, besides their regions; NULL: nothing. */
	void (*ahead)(const struct job *j, const struct block *o, size_t count, struct ahead *ahead);
	/* The block's values, past the caches if wanted; NULL: only its checks. */
	codec_status (*close)(const struct job *j, const struct kernels *k, const codec_context *with, struct block *o,
			      char *values, int past, struct work *w);
};

/* Block b, whose region is frame[at, end), at least 8 bytes, in memory of top's. */
void block_begin(const struct job *j, const uint8_t *frame, uint64_t b, uint64_t at, uint64_t end,
		 const struct stream *top, struct block *o);
void block_decode_top(const struct job *j, const struct kernels *k, struct block *o, size_t count,
		      const struct ahead *ahead);
/* Of several faults the first block's is found. */
codec_status decode_in_pairs(const struct block_steps *steps, const uint8_t *frame, const codec_tensor *dst,
			     const codec_context *with, const struct job *j, uint64_t first, uint64_t count,
			     uint64_t *seal, struct work *w);

#endif
