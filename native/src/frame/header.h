/* header.h - a frame's header in memory, and values derived from it. */
#ifndef CODEC_HEADER_H
#define CODEC_HEADER_H

#include "dtype.h"
#include "shape.h"

struct header {
	uint8_t codec, dtype, rank, layout, block_log2, fixed, coded, halved, flags;
	uint8_t variant, options, bits, max_code_length; /* variant: model or level coding; bits: TRUNCATE's level */
	int8_t guard;                                    /* TRUNCATE: guard in use */
	uint32_t group_size; /* row codecs: values per scale (until parts are cut: as requested); 0: parts, or stored */
	uint64_t shape[CODEC_MAX_RANK];
	uint64_t frame_nbytes, checksum;
	/* derived by header_derive */
	uint64_t n, block, nblocks;
	uint64_t side_at, side_nbytes, directory_at, planes_at, plane_stride, regions_at;
};

static inline struct row_kind header_kind(const struct header *h)
{
	return row_kind_of(h->codec, h->variant, h->options, h->bits, h->dtype);
}

codec_status header_derive(struct header *h);

uint64_t stored_nbytes(const struct header *h);
codec_status header_store(struct header *h, const struct header *asked);

#endif
