/* work.h - sizes and layout of one thread's work buffers. */
#ifndef CODEC_WORK_H
#define CODEC_WORK_H

#include "job.h"

#define STATE_NBYTES 22 /* bytes of a coded plane before the tails: u16 number of words, 32 x 5 bits of lengths */

static inline uint64_t padded(uint64_t n)
{
	return (n + WIRE_ROW - 1) / WIRE_ROW * WIRE_ROW;
}

/*
 * Row codecs: number of values processed at once, a multiple of 40. These values, their codes and their random bits
 * together fit the first-level cache.
 */
#define ROW_CHUNK 2560

/*
 * Work buffers of one thread. work_place lays them out in the caller's memory. m: number of values of a block, rounded
 * up to a multiple of 128.
 */
struct work {
	uint8_t *plane[WIRE_MAX_PLANES]; /* m + 64 bytes each: kernels may read or write 64 more bytes than they use */
	uint8_t *symbol, *raw;           /* m + 64 bytes each: symbols and raw bits of a plane */
	uint8_t *region;  /* encode: the block's region; points into the frame if region_bound bytes are free there */
	uint16_t *offset; /* scale model's offsets of OFFSETS values */
	struct fitted fitted; /* encode: row offsets of the block */
	/* Row codecs: values, scales and random bits of ROW_CHUNK values; codes of a tile. */
	float *x, *y, *scale, *scale_below;
	uint32_t *max;
	uint16_t *half;
	uint8_t *code;
	/*
	 * TOPK: positions and values of candidates; codes read from the frame; threshold at which the next search
	 * begins; size in bytes of the block's bit stream.
	 */
	uint32_t *at, *code_of, guess;
	float *candidate;
	uint64_t stream_nbytes;
	/*
	 * TRUNCATE, one element per value: joint symbols; patterns; fields or pieces of fields; exponents, exponents of
	 * the metric A, number of bits dropped, number of bits kept; levels.
	 */
	uint16_t *exponent;
	uint32_t *patterns, *fields;
	uint8_t *piece[4], *e, *ea, *drop, *width, *level;
	const codec_metric *metric; /* TRUNCATE: metric at which the search for the next value's metric begins */
	float *residual;            /* TRUNCATE, encode: residual of the tensor; NULL: the block does not write it */
	char *values; /* decode: buffer for a block that is not decoded straight into dst; same memory as `region` */
	uint32_t *words, *words_end;
	struct delta_buffers delta; /* DELTA; decoded changes are listed in delta.at and values */
	uint64_t *sums[2];          /* DELTA: sums that checksum_of_chunk mixes, per chunk: [0] base, [1] result */
	struct stream top[2];       /* buffers for plane 0 of two blocks; plane[0] is the first block's */
	struct ahead ahead;
};

/* Return the number of values of the largest block of a tensor of n values, rounded up to a multiple of 128. */
uint64_t largest_block(uint64_t n);
/*
 * Return an upper bound of the size in bytes of a coded plane of m symbols: every symbol is an escape code of 8 bits,
 * with a literal of two bytes.
 */
uint64_t coded_bound(uint64_t m);
/* Return the buffer size in bytes for a region of m values, all of whose bytes may be coded and escaped. */
uint64_t region_room(const struct dtype *d, uint64_t m);
/* Allocate nbytes at *p: return *p, and advance it to the next cache line after them. */
void *work_take(char **p, uint64_t nbytes);
uint64_t work_nbytes(const struct header *h);
void work_place(const struct header *h, void *memory, struct work *w);
/* Return an upper bound of the size in bytes of a block's region; encoding a block writes no more bytes. */
uint64_t region_bound(const struct job *j);
uint64_t region_gaps(const struct header *h);

#endif
