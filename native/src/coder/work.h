/* work.h - one thread's buffers: how large, and what lies where. */
#ifndef CODEC_WORK_H
#define CODEC_WORK_H

#include "job.h"

#define STATE_NBYTES 22 /* u16 and 32 x 5 bits */

static inline uint64_t padded(uint64_t n)
{
	return (n + WIRE_ROW - 1) / WIRE_ROW * WIRE_ROW;
}

/* Codecs of rows: values worked on at once: they, their codes and random halves fit the first-level cache. A multiple
 * of 40. */
#define ROW_CHUNK 2560

/* All in memory of the caller's, which work_place cuts up: m bytes are a block's values, padded to quad rows. */
struct work {
	uint8_t *plane[WIRE_MAX_PLANES]; /* m + 64 bytes each: 64 more than they hold may be read or written */
	uint8_t *symbol, *high;          /* m + 64, m / 2 + 64: a plane on its way from or to its place */
	uint8_t *region;                 /* encode: the block's; where it is to lie, if it surely fits there */
	uint16_t *offset;                /* of OFFSETS values */
	struct fitted fitted;            /* encode: of the block */
	/* codecs of rows: a chunk's values, scales and draws; codes of a tile */
	float *x, *y, *scale, *scale_below;
	uint32_t *max;
	uint16_t *half;
	uint8_t *code;
	/* TRUNCATE: coded levels with their exponents; patterns, fields or their pieces; exponents, those of A, bits
	 * dropped, kept; levels */
	uint16_t *exponent;
	uint32_t *patterns, *fields;
	uint8_t *piece[4], *e, *ea, *drop, *width, *level;
	const codec_metric *metric; /* of the values that come next, or of some before them */
	char *values; /* of a block that is not decoded into its tensor: lies where encoding has its region */
	uint32_t *words, *words_end;
	struct stream top[2]; /* memory for plane 0 of two blocks; plane[0] is the first's */
	struct ahead ahead;
};

/* Values of the largest block of n, padded to quad rows. */
uint64_t largest_block(uint64_t n);
/* Room for a region of m values, all of whose bytes may be coded, and all escaped. */
uint64_t region_room(const struct dtype *d, uint64_t m);
/* nbytes at *p, which moves behind them. */
void *work_take(char **p, uint64_t nbytes);
uint64_t work_nbytes(const struct header *h);
void work_place(const struct header *h, void *memory, struct work *w);
/* Most bytes that a block's region takes, and that encoding it writes. */
uint64_t region_bound(const struct job *j);
uint64_t region_gaps(const struct header *h);

#endif
