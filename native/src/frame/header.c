/* header.c - the header: read, checked, written. */
#include "header.h"

#include "rows/rows.h"

/* Places of the sections. Room for everything that a frame of 2^60 values needs below 2^64. */
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
	if (!codec_is_rows(h->codec)) { /* else blocks follow rows and parts */
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

#define BAD(at, found, expected) return fault(f, CODEC_BAD_HEADER, at, found, expected)

codec_status header_read(const uint8_t *frame, size_t nbytes, struct header *h, codec_fault *f)
{
	uint8_t b[WIRE_MAX_HEADER], params[8];
	const struct dtype *d;
	uint32_t planes;
	uint64_t least, nblocks;

	memset(h, 0, sizeof *h);
	memset(b, 0, sizeof b);
	if (nbytes < 4)
		return fault(f, CODEC_TRUNCATED, 0, nbytes, WIRE_AT_SHAPE);
	memcpy(b, frame, MIN(nbytes, sizeof b)); /* read once */
	if (load32(b) != WIRE_MAGIC)
		return fault(f, CODEC_BAD_MAGIC, 0, load32(b), WIRE_MAGIC);
	if (nbytes < WIRE_AT_SHAPE)
		return fault(f, CODEC_TRUNCATED, 0, nbytes, WIRE_AT_SHAPE);
	if (b[WIRE_AT_VERSION] != WIRE_VERSION)
		return fault(f, CODEC_UNSUPPORTED, WIRE_AT_VERSION, b[WIRE_AT_VERSION], WIRE_VERSION);
	if (!codec_known(b[WIRE_AT_CODEC]))
		return fault(f, CODEC_UNSUPPORTED, WIRE_AT_CODEC, b[WIRE_AT_CODEC], WIRE_CODEC_LOSSLESS);
	h->codec = b[WIRE_AT_CODEC];
	h->dtype = b[WIRE_AT_DTYPE];
	d = dtype_of(h->dtype);
	if (!d || !codec_takes(h->codec, h->dtype))
		BAD(WIRE_AT_DTYPE, h->dtype, 0);
	h->rank = b[WIRE_AT_RANK];
	if (h->rank > WIRE_MAX_RANK)
		BAD(WIRE_AT_RANK, h->rank, WIRE_MAX_RANK);
	if (nbytes < WIRE_AT_SHAPE + 8 * (size_t)h->rank)
		return fault(f, CODEC_TRUNCATED, 0, nbytes, WIRE_AT_SHAPE + 8 * (uint64_t)h->rank);
	for (int i = 0; i < h->rank; i++)
		h->shape[i] = load64(b + WIRE_AT_SHAPE + 8 * i);
	h->layout = b[WIRE_AT_LAYOUT];
	h->block_log2 = b[WIRE_AT_BLOCK_LOG2];
	h->fixed = b[WIRE_AT_FIXED];
	h->coded = b[WIRE_AT_CODED];
	h->side_nbytes = load32(b + WIRE_AT_SIDE_NBYTES);
	h->frame_nbytes = load64(b + WIRE_AT_FRAME_NBYTES);
	h->checksum = load64(b + WIRE_AT_CHECKSUM);
	params_read(h, b + WIRE_AT_PARAMS);
	if (params_fault(h) >= 0)
		BAD(WIRE_AT_PARAMS + (uint64_t)params_fault(h), b[WIRE_AT_PARAMS + params_fault(h)], 0);
	params_write(h, params);
	for (int i = 0; i < 8; i++)
		if (b[WIRE_AT_PARAMS + i] != params[i])
			BAD((uint64_t)(WIRE_AT_PARAMS + i), b[WIRE_AT_PARAMS + i], params[i]);
	h->flags = b[WIRE_AT_FLAGS];
	if (h->flags & ~WIRE_FLAGS_KNOWN)
		BAD(WIRE_AT_FLAGS, h->flags, WIRE_FLAGS_KNOWN);
	nblocks = h->nblocks = load32(b + WIRE_AT_NBLOCKS);
	h->halved = b[WIRE_AT_HALVED];
	for (int i = WIRE_AT_RESERVED; i < WIRE_AT_NBLOCKS; i++)
		if (b[i])
			BAD((uint64_t)i, b[i], 0);
	planes = (1u << d->nbytes) - 1;
	if (h->layout == WIRE_LAYOUT_STORED) {
		for (int i = WIRE_AT_BLOCK_LOG2; i < WIRE_AT_FRAME_NBYTES; i++)
			if (b[i])
				BAD((uint64_t)i, b[i], 0);
		if (h->flags || h->halved)
			BAD(WIRE_AT_FLAGS, h->flags, 0);
		if (h->row)
			BAD(WIRE_AT_PARAMS + WIRE_ROW_NVALUES, h->row, 0);
	} else if (h->layout != WIRE_LAYOUT_BLOCKS) {
		BAD(WIRE_AT_LAYOUT, h->layout, WIRE_LAYOUT_BLOCKS);
	} else if (codec_is_rows(h->codec)) {
		if (h->block_log2 || h->fixed || h->halved)
			BAD(WIRE_AT_BLOCK_LOG2, h->block_log2, 0);
		if (h->coded != rows_entropy(h))
			BAD(WIRE_AT_CODED, h->coded, (uint64_t)rows_entropy(h));
		if (h->side_nbytes % WIRE_ALIGN)
			BAD(WIRE_AT_SIDE_NBYTES, h->side_nbytes, 0);
		if (h->flags & ~WIRE_FLAG_SEGMENTS)
			BAD(WIRE_AT_FLAGS, h->flags, WIRE_FLAG_SEGMENTS);
		if (h->flags ? h->row != 0 : !row_allowed(h, h->row)) /* of parts, each says its own */
			BAD(WIRE_AT_PARAMS + WIRE_ROW_NVALUES, h->row, 0);
	} else if (h->codec == CODEC_TRUNCATE) {
		if (h->block_log2 < WIRE_MIN_BLOCK_LOG2 || h->block_log2 > WIRE_MAX_BLOCK_LOG2)
			BAD(WIRE_AT_BLOCK_LOG2, h->block_log2, WIRE_MAX_BLOCK_LOG2);
		if (h->fixed || h->coded != 1 || h->halved)
			BAD(WIRE_AT_CODED, h->coded, 1);
		if (h->side_nbytes % WIRE_ALIGN)
			BAD(WIRE_AT_SIDE_NBYTES, h->side_nbytes, 0);
		if (h->flags & ~(WIRE_FLAG_PRIOR | WIRE_FLAG_SEGMENTS))
			BAD(WIRE_AT_FLAGS, h->flags, WIRE_FLAG_PRIOR | WIRE_FLAG_SEGMENTS);
	} else {
		if (h->block_log2 < WIRE_MIN_BLOCK_LOG2 || h->block_log2 > WIRE_MAX_BLOCK_LOG2)
			BAD(WIRE_AT_BLOCK_LOG2, h->block_log2, WIRE_MAX_BLOCK_LOG2);
		if (h->fixed & ~planes)
			BAD(WIRE_AT_FIXED, h->fixed, planes);
		if (h->coded & (~planes | h->fixed))
			BAD(WIRE_AT_CODED, h->coded, planes & ~(uint32_t)h->fixed);
		if (h->halved & (~h->coded | (d->octave != 0)))
			BAD(WIRE_AT_HALVED, h->halved, h->coded);
		if (h->side_nbytes % WIRE_ALIGN)
			BAD(WIRE_AT_SIDE_NBYTES, h->side_nbytes, 0);
		if (h->flags & (WIRE_FLAG_PRIOR | WIRE_FLAG_SEGMENTS) && (!(h->coded & 1) || !d->octave))
			BAD(WIRE_AT_FLAGS, h->flags, 0);
		if (!(h->flags & WIRE_FLAG_WINDOW) != (d->form != FORM_FLOAT8))
			BAD(WIRE_AT_FLAGS, h->flags, d->form == FORM_FLOAT8 ? WIRE_FLAG_WINDOW : 0);
		if (d->form == FORM_FLOAT8 && !(h->coded & 1))
			BAD(WIRE_AT_CODED, h->coded, 1);
	}
	if (header_derive(h) != CODEC_OK)
		BAD(WIRE_AT_SHAPE, h->shape[0], 0);
	if (h->layout == WIRE_LAYOUT_BLOCKS && h->n == 0)
		BAD(WIRE_AT_LAYOUT, h->layout, WIRE_LAYOUT_STORED);
	if (h->layout == WIRE_LAYOUT_STORED && codec_is_rows(h->codec) && h->n)
		BAD(WIRE_AT_LAYOUT, h->layout, WIRE_LAYOUT_BLOCKS);
	if (nblocks != h->nblocks || h->nblocks > h->n)
		BAD(WIRE_AT_NBLOCKS, nblocks, MIN(h->nblocks, h->n));
	if (h->layout == WIRE_LAYOUT_STORED) {
		least = h->side_at + h->n * d->nbytes;
		if (h->frame_nbytes != least)
			BAD(WIRE_AT_FRAME_NBYTES, h->frame_nbytes, least);
	} else {
		least = h->regions_at + WIRE_ALIGN * h->nblocks;
		/* before anyone allocates: can so many values be in so many bytes? */
		if (codec_is_rows(h->codec) && !rows_entropy(h))
			least = MAX(least, h->regions_at + rows_codes_nbytes(h, h->n));
		if (codec_is_rows(h->codec) && h->n / WIRE_TRITS_BLOCK > h->nblocks && rows_entropy(h))
			BAD(WIRE_AT_NBLOCKS, h->nblocks, h->n / WIRE_TRITS_BLOCK);
		if (h->frame_nbytes < least || h->frame_nbytes % WIRE_ALIGN)
			BAD(WIRE_AT_FRAME_NBYTES, h->frame_nbytes, least);
		if (h->frame_nbytes / WIRE_ALIGN > UINT32_MAX)
			return fault(f, CODEC_LIMIT, WIRE_AT_FRAME_NBYTES, h->frame_nbytes,
				     (uint64_t)WIRE_ALIGN * UINT32_MAX);
	}
	return CODEC_OK;
}

void header_write(const struct header *h, uint8_t *frame)
{
	memset(frame, 0, WIRE_AT_SHAPE);
	store32(frame, WIRE_MAGIC);
	frame[WIRE_AT_VERSION] = WIRE_VERSION;
	frame[WIRE_AT_CODEC] = h->codec;
	frame[WIRE_AT_DTYPE] = h->dtype;
	frame[WIRE_AT_RANK] = h->rank;
	frame[WIRE_AT_LAYOUT] = h->layout;
	frame[WIRE_AT_BLOCK_LOG2] = h->block_log2;
	frame[WIRE_AT_FIXED] = h->fixed;
	frame[WIRE_AT_CODED] = h->coded;
	store32(frame + WIRE_AT_SIDE_NBYTES, (uint32_t)h->side_nbytes);
	store64(frame + WIRE_AT_FRAME_NBYTES, h->frame_nbytes);
	store64(frame + WIRE_AT_CHECKSUM, h->checksum);
	params_write(h, frame + WIRE_AT_PARAMS);
	frame[WIRE_AT_FLAGS] = h->flags;
	store32(frame + WIRE_AT_NBLOCKS, (uint32_t)h->nblocks);
	frame[WIRE_AT_HALVED] = h->halved;
	for (int i = 0; i < h->rank; i++)
		store64(frame + WIRE_AT_SHAPE + 8 * i, h->shape[i]);
}

/* The header's and side section's part of the checksum. */
uint64_t header_seal(const struct header *h, const struct kernels *k, const uint8_t *side)
{
	uint8_t image[WIRE_MAX_HEADER];
	struct header copy = *h;

	copy.checksum = 0;
	header_write(&copy, image);
	return k->digest(image, h->side_at, WIRE_SEED_HEADER) + k->digest(side, h->side_nbytes, WIRE_SEED_SIDE);
}
