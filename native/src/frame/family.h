/* family.h - what differs between codecs, as tables: whoever opens, does and closes a job asks them and names no codec.
 */
#ifndef CODEC_FAMILY_H
#define CODEC_FAMILY_H

#include "header.h"

struct job;
struct source;
struct work;
struct cursor;

/* Codecs whose frames are made in one way. */
struct family {
	int is_rows; /* values share scales: blocks follow rows and parts, and nothing but an empty tensor is stored */

	int whole_octaves; /* the scale model moves exponents alone, under offsets of whole octaves */

	/* params.c. What is asked for, as header fields; and what the table of codecs does not say of params. */
	codec_status (*params_ask)(const codec_spec *s, struct header *h);
	/* Where in params the first value stands that the format forbids; -1 if none does. */
	int (*params_fault)(const struct header *h);
	/* The header's other fields, of a frame in blocks; and can it hold so many values (NULL: 8 bytes a block can)?
	 */
	codec_status (*header_check)(const struct header *h, codec_fault *f);
	codec_status (*header_check_size)(const struct header *h, codec_fault *f);

	/*
	 * State that is given besides a tensor or frame (NULL: these have none). Is it there as encoding or decoding
	 * needs it? Is memory read that will be written? `in_place`: that may be an array of state itself, where each
	 * value is written once, and after it was read.
	 */
	codec_status (*check_state)(const struct header *h, const codec_context *with, int encoding);
	int (*reads)(const struct header *h, const codec_context *with, int encoding, const void *out, uint64_t nbytes,
		     int in_place);

	/* What is coded, of CODEC_SYMBOLS_*; NULL: nothing that a codebook could be agreed upon for. */
	uint8_t (*symbols)(const struct header *h);

	/* The largest frame; NULL: a stored one. Bytes behind a job. Does encoding open with a thread's buffer? */
	uint64_t (*bound)(const struct header *h);
	uint64_t (*job_nbytes)(const struct header *h);
	int (*opens_with_work)(const struct header *h);
	/* A thread's buffers beside the coder's, and their places from *p on. NULL: none. */
	uint64_t (*work_nbytes)(const struct header *h);
	void (*work_place)(const struct header *h, char **p, struct work *w);
	/* Most bytes that one block's region takes. */
	uint64_t (*region_bound)(const struct job *j);

	/* The side section behind codebooks: its size, itself, and itself read from frame[at, end) up to *used. */
	uint64_t (*side_nbytes)(const struct job *j);
	void (*side_write)(const struct job *j, uint8_t *dst);
	codec_status (*side_read)(const uint8_t *frame, uint64_t at, uint64_t end, struct job *j, uint64_t *used,
				  codec_fault *f);

	/*
	 * Encoding: what follows from spec and shape; the layout stays that of stored frames if the tensor is to be
	 * stored, and j->nscans pieces of it must then be scanned, in any order. What follows from values: all but
	 * sizes of what precedes the directory.
	 */
	codec_status (*begin)(struct job *j, const codec_spec *s, const codec_context *with);
	/* The scale model's parts, as choose will cut them; NULL: begin has cut all parts that there are. */
	void (*cut)(struct job *j, const codec_context *with);
	void (*scan)(struct job *j, const struct kernels *k, const struct source *src, uint64_t first, uint64_t count);
	codec_status (*choose)(struct job *j, const struct kernels *k, const struct source *src,
			       const codec_context *with);
	/*
	 * One pass instead of two, where one call does all blocks: are they the same whatever a scan finds? Then they
	 * scan, j->blocks_scan says so, choose leaves out what follows from it, and that comes last.
	 */
	int (*blocks_can_scan)(const struct job *j);
	codec_status (*scanned)(struct job *j);
	/*
	 * Block b to w->region, which has room for region_bound bytes; *nbytes of them are used. Planes that are fixed
	 * go to their sections of the frame; *digest is theirs, or 0.
	 */
	codec_status (*encode_block)(struct job *j, const struct kernels *k, const codec_context *with,
				     const struct source *src, uint64_t b, uint8_t *frame, struct work *w,
				     uint64_t *digest, uint64_t *nbytes);
	/* Codecs of rows: what block b, just encoded at frame[at], leaves of the tensor. */
	codec_status (*block_leave)(const struct job *j, const struct kernels *k, const struct source *src,
				    const uint8_t *frame, uint64_t b, uint64_t at, float *residual, struct work *w);
	/* Codecs of rows: most bytes of these blocks' regions; without an entropy stage, all that there can be. */
	uint64_t (*regions_bound)(const struct job *j, uint64_t first, uint64_t count);
	/* What is left of the tensor, unless that was written with the blocks. NULL: nothing is lost. */
	codec_status (*leave)(const struct job *j, const struct kernels *k, const codec_context *with,
			      const struct source *src, void *work);

	/* Blocks [first, first + count) to dst; NULL: through all checks. Their seals are added to *seal. */
	codec_status (*decode_blocks)(const uint8_t *frame, const codec_tensor *dst, const codec_context *with,
				      const struct job *j, uint64_t first, uint64_t count, uint64_t *seal,
				      struct work *w);
};

/* Defined by the families, which stand above. */
extern const struct family lossless_family, rows_family, truncate_family;

struct codec {
	const struct family *family;
	uint32_t dtypes; /* bit d: takes dtype d */
	uint8_t nvariants;
	uint8_t options; /* those it knows */
	uint8_t max_bits;
	uint8_t min_cap; /* 0: has none */
};

extern const struct codec codecs[CODEC_TRUNCATE + 1];

/* NULL: there is no such codec. */
static inline const struct codec *codec_of(uint32_t id)
{
	return id < sizeof codecs / sizeof *codecs && codecs[id].family ? codecs + id : NULL;
}

int codec_takes(uint32_t id, uint32_t dtype);

/* Where in params the first value stands that the format forbids; -1 if none does. */
int params_fault(const struct header *h);
/* TRUNCATE's guard as it may be asked for: with one more for CODEC_OPTION_CUT it fits its byte. */
#define LEAST_GUARD (-128)
#define MOST_GUARD 126
void params_spec(const struct header *h, codec_spec *s);

/* Of a header whose codec there is. */
static inline const struct family *family_of(const struct header *h)
{
	return codec_of(h->codec)->family;
}

static inline int codec_is_rows(uint32_t id)
{
	return codec_of(id)->family->is_rows;
}

static inline codec_status family_check_state(const struct header *h, const codec_context *with, int encoding)
{
	return family_of(h)->check_state ? family_of(h)->check_state(h, with, encoding) : CODEC_OK;
}

static inline int family_reads(const struct header *h, const codec_context *with, int encoding, const void *out,
			       uint64_t nbytes, int in_place)
{
	return family_of(h)->reads && family_of(h)->reads(h, with, encoding, out, nbytes, in_place);
}

#endif
