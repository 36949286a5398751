/* header.c - derive section offsets and sizes from a header's fields. */
#include "header.h"

/* Derive n, nblocks and the sections' offsets. Nothing overflows: a frame of 2^60 values needs less than 2^64 bytes. */
codec_status header_derive(struct header *h)
{
	const struct dtype *d = dtype_of(h->dtype);
	uint64_t rows = h->nblocks;

	TRY(shape_product(h->rank, h->shape, &h->n));
	h->side_at = WIRE_AT_SHAPE + 8 * (uint64_t)h->rank;
	h->directory_at = h->planes_at = h->regions_at = h->side_at + h->side_nbytes;
	h->block = h->nblocks = h->plane_stride = 0;
	if (h->layout == WIRE_LAYOUT_STORED)
		return CODEC_OK;
	if (h->block_log2) { /* otherwise blocks follow rows and parts, and nblocks is a header field */
		h->block = 1ull << h->block_log2;
		h->nblocks = (h->n + h->block - 1) / h->block;
	} else {
		h->nblocks = rows;
	}
	h->planes_at += WIRE_DIRECTORY_ENTRY * h->nblocks;
	h->plane_stride = ALIGN8(h->n);
	h->regions_at =
		h->planes_at + h->plane_stride * (uint64_t)__builtin_popcount(h->fixed & ((1u << d->nbytes) - 1));
	return CODEC_OK;
}

uint64_t stored_nbytes(const struct header *h)
{
	return WIRE_AT_SHAPE + 8 * (uint64_t)h->rank + h->n * dtype_of(h->dtype)->nbytes;
}

/* Set *h to the header of a stored frame. Its fields are those that the spec requests, which are in *asked. */
codec_status header_store(struct header *h, const struct header *asked)
{
	*h = *asked;
	h->layout = WIRE_LAYOUT_STORED;
	h->block_log2 = 0;
	return header_derive(h);
}
