/*
 * family.h - tables of the functions that differ between codecs. Code that opens, processes and closes jobs calls them
 * through the table and does not depend on a codec.
 */
#ifndef CODEC_FAMILY_H
#define CODEC_FAMILY_H

#include "header.h"

struct job;
struct source;
struct work;
struct cursor;
struct codec_range;

/* Functions of codecs that build frames the same way. A member may be NULL only where its comment says so. */
struct family {
	int is_rows; /* 1: row codecs, whose values share scales, and whose blocks depend on rows and parts */

	int never_stored; /* 1: only empty tensors are stored raw, so the residual can be written with the blocks */

	int is_delta; /* 1: values are encoded against a base; no tensor is stored, and a frame may have no blocks */

	int whole_octaves; /* 1: the scale model changes exponents only, by offsets of whole octaves */

	/* params_ask: convert a spec to header fields. */
	codec_status (*params_ask)(const codec_spec *s, struct header *h);
	/*
	 * Return the byte offset in the header's params of the first invalid value, or -1. The limits in WIRE_CODECS
	 * were checked before. NULL: no further checks.
	 */
	int (*params_fault)(const struct header *h);
	/*
	 * Check the remaining header fields of a frame in blocks. header_check_size checks that a frame of this size
	 * can hold n values; NULL: 8 bytes per block suffice.
	 */
	codec_status (*header_check)(const struct header *h, codec_fault *f);
	codec_status (*header_check_size)(const struct header *h, codec_fault *f);

	/*
	 * State that the caller supplies, such as a metric; NULL: the family needs none. check_state checks that the
	 * caller supplied the state that encoding or decoding needs. reads returns 1 if a memory range that will be
	 * written overlaps state that will be read. `in_place`: the range may be exactly a state array, each of whose
	 * values is read before it is written.
	 */
	codec_status (*check_state)(const struct header *h, const codec_context *with, int encoding);
	int (*reads)(const struct header *h, const codec_context *with, int encoding, const void *out, uint64_t nbytes,
		     int in_place);

	/* Return the CODEC_SYMBOLS_* that agreed codebooks must code; NULL: the family uses no agreed codebooks. */
	uint8_t (*symbols)(const struct header *h);

	/*
	 * bound: return the size in bytes of the largest frame for any segments; bound_segments: for the given
	 * segments; NULL: the largest frame is a stored one. job_nbytes: return the bytes needed after struct job.
	 * opens_with_work: return 1 if opening an encode job needs a work buffer; NULL: never.
	 */
	uint64_t (*bound)(const struct header *h);
	uint64_t (*bound_segments)(const struct header *h, const codec_context *with);
	uint64_t (*job_nbytes)(const struct header *h);
	int (*opens_with_work)(const struct header *h);
	/*
	 * work_nbytes: return the size in bytes of the family's additional work buffers; then lay them out from *p on.
	 * NULL: none.
	 */
	uint64_t (*work_nbytes)(const struct header *h);
	void (*work_place)(const struct header *h, char **p, struct work *w);
	/* Return an upper bound of a block's region, in bytes. */
	uint64_t (*region_bound)(const struct job *j);

	/*
	 * The part of the side section after the codebooks: return its size in bytes, write it, and read it from
	 * frame[at, end). *used: offset of the end of the bytes read.
	 */
	uint64_t (*side_nbytes)(const struct job *j);
	void (*side_write)(const struct job *j, uint8_t *dst);
	codec_status (*side_read)(const uint8_t *frame, uint64_t at, uint64_t end, struct job *j, uint64_t *used,
				  codec_fault *f);

	/*
	 * Encode. begin: set the fields that spec and shape determine, and j->nscans, the number of pieces to scan, in
	 * any order. The layout remains "stored" if the tensor will be stored raw. choose: set all fields before the
	 * directory that depend on values, except sizes.
	 */
	codec_status (*begin)(struct job *j, const codec_spec *s, const codec_context *with);
	/* Cut the tensor into the scale model's parts, as `choose` would. NULL: `begin` has cut all parts. */
	void (*cut)(struct job *j, const codec_context *with);
	/* Prepare `choose`, and return j->nscans if that depends on the values. NULL: `begin` has set it. */
	uint64_t (*sample)(struct job *j, const struct kernels *k, const struct source *src, const codec_context *with);
	void (*scan)(struct job *j, const struct kernels *k, const struct source *src, uint64_t first, uint64_t count);
	codec_status (*choose)(struct job *j, const struct kernels *k, const struct source *src,
			       const codec_context *with);
	/*
	 * Save a pass over the tensor if one call encodes all blocks. blocks_can_scan: return 1 if encoding blocks does
	 * not need the scan's results; NULL: never. encode_block then also scans (j->blocks_scan is 1), `choose` skips
	 * the fields that depend on the scan, and `scanned` sets them after the last block.
	 */
	int (*blocks_can_scan)(const struct job *j);
	codec_status (*scanned)(struct job *j);
	/*
	 * Encode block b to w->region, which has room for region_bound bytes, and set *nbytes to the region's size.
	 * Write the block's part of the fixed planes to their sections of the frame, and set *digest to the digest of
	 * that part, or 0.
	 */
	codec_status (*encode_block)(struct job *j, const struct kernels *k, const codec_context *with,
				     const struct source *src, uint64_t b, uint8_t *frame, struct work *w,
				     uint64_t *digest, uint64_t *nbytes);
	/* Codecs that are never stored: write the residual of block b, which was just encoded to `region`. */
	codec_status (*block_leave)(const struct job *j, const struct kernels *k, const struct source *src,
				    const uint8_t *region, uint64_t b, float *residual, struct work *w);
	/*
	 * Codecs that are never stored: return an upper bound in bytes of the regions of blocks [first, first + count);
	 * exact for row codecs without an entropy stage.
	 */
	uint64_t (*regions_bound)(const struct job *j, uint64_t first, uint64_t count);
	/* Write the residual, unless it was written with the blocks. NULL: the codec is lossless. */
	codec_status (*leave)(const struct job *j, const struct kernels *k, const codec_context *with,
			      const struct source *src, void *work);

	/*
	 * Decode a range of blocks to dst, or only check them if dst is NULL. Add the blocks' checksums to
	 * range->checksum.
	 */
	codec_status (*decode_blocks)(const uint8_t *frame, const codec_tensor *dst, const codec_context *with,
				      const struct job *j, struct codec_range *range, struct work *w);
};

/* Defined by the families, in layers above this one. */
extern const struct family lossless_family, rows_family, truncate_family, delta_family, topk_family;

struct codec {
	const struct family *family;
	uint32_t dtypes; /* bit d: the codec accepts dtype d */
	uint8_t nvariants;
	uint8_t options; /* CODEC_OPTION_* that the codec accepts */
	uint8_t max_bits;
	uint8_t least_max_code_length; /* smallest valid max_code_length; 0: the codec has no such parameter */
};

/* Entries by codec number; entry 0 is empty. */
#define PLUS_ONE(...) +1
enum { NCODECS = 1 WIRE_CODECS(PLUS_ONE) };
#undef PLUS_ONE
extern const struct codec codecs[NCODECS];

/* Return the codec's entry, or NULL if there is no such codec. */
static inline const struct codec *codec_of(uint32_t id)
{
	return id < NCODECS && codecs[id].family ? codecs + id : NULL;
}

int codec_takes(uint32_t id, uint32_t dtype);

/* Return the bits CODEC_TRAIT_* of a header's codec and params. */
uint32_t header_traits(const struct header *h);

/* Return the offset in params of the first value that the format forbids, or -1. */
int params_fault(const struct header *h);
/* Range of TRUNCATE's guard in a spec. CODEC_OPTION_CUT adds 1 to the guard, and the sum must fit a signed byte. */
#define LEAST_GUARD (-128)
#define MOST_GUARD 126
void params_spec(const struct header *h, codec_spec *s);

/* Return the family of a header whose codec has been checked to exist. */
static inline const struct family *family_of(const struct header *h)
{
	return codec_of(h->codec)->family;
}

static inline int codec_is_rows(uint32_t id)
{
	return codec_of(id)->family->is_rows;
}

static inline int codec_is_delta(uint32_t id)
{
	return codec_of(id)->family->is_delta;
}

static inline int codec_never_stored(uint32_t id)
{
	return codec_of(id)->family->never_stored;
}

/* Return 1 if the codec stores tensors raw when their frame would be larger than the tensor. */
static inline int codec_may_store(uint32_t id)
{
	return !codec_never_stored(id) && !codec_is_delta(id);
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
