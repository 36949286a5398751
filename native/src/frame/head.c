/* head.c - read, check and write the bytes of a header. No other file accesses header fields in a frame. */
#include "head.h"

#define BAD(at, found, expected) return fault(f, CODEC_BAD_HEADER, at, found, expected)

/*
 * Copy the header's bytes to `b`, padded with zeros, and check the fields that determine its length. Each byte of the
 * frame is read only once, so that bytes that another thread changes cannot pass the checks.
 */
static codec_status take_bytes(const uint8_t *frame, size_t nbytes, uint8_t b[CODEC_HEADER_NBYTES], codec_fault *f)
{
	memset(b, 0, CODEC_HEADER_NBYTES);
	if (nbytes < 4)
		return fault(f, CODEC_TRUNCATED, 0, nbytes, WIRE_AT_SHAPE);
	memcpy(b, frame, MIN(nbytes, CODEC_HEADER_NBYTES));
	if (load32(b) != WIRE_MAGIC)
		return fault(f, CODEC_BAD_MAGIC, 0, load32(b), WIRE_MAGIC);
	if (nbytes < WIRE_AT_SHAPE)
		return fault(f, CODEC_TRUNCATED, 0, nbytes, WIRE_AT_SHAPE);
	if (b[WIRE_AT_VERSION] != CODEC_FORMAT_VERSION)
		return fault(f, CODEC_UNSUPPORTED, WIRE_AT_VERSION, b[WIRE_AT_VERSION], CODEC_FORMAT_VERSION);
	if (!codec_of(b[WIRE_AT_CODEC]))
		return fault(f, CODEC_UNSUPPORTED, WIRE_AT_CODEC, b[WIRE_AT_CODEC], CODEC_LOSSLESS);
	if (!codec_takes(b[WIRE_AT_CODEC], b[WIRE_AT_DTYPE]))
		BAD(WIRE_AT_DTYPE, b[WIRE_AT_DTYPE], 0);
	if (b[WIRE_AT_RANK] > CODEC_MAX_RANK)
		BAD(WIRE_AT_RANK, b[WIRE_AT_RANK], CODEC_MAX_RANK);
	if (nbytes < WIRE_AT_SHAPE + 8 * (size_t)b[WIRE_AT_RANK])
		return fault(f, CODEC_TRUNCATED, 0, nbytes, WIRE_AT_SHAPE + 8 * (uint64_t)b[WIRE_AT_RANK]);
	for (int i = WIRE_AT_RESERVED; i < WIRE_AT_NBLOCKS; i++)
		if (b[i])
			BAD((uint64_t)i, b[i], 0);
	return CODEC_OK;
}

/* The header's record: reader and writer of its params, then of all of its fields. Its bound: */
_Static_assert(CODEC_HEADER_NBYTES == WIRE_AT_SHAPE + 8 * CODEC_MAX_RANK, "the largest header");

static void params_read(struct header *h, const uint8_t *params)
{
	h->variant = params[WIRE_PARAM_VARIANT];
	h->options = params[WIRE_PARAM_OPTIONS];
	h->bits = params[WIRE_PARAM_BITS];
	h->max_code_length = params[WIRE_PARAM_MAX_CODE_LENGTH];
	if (h->codec == CODEC_TRUNCATE)
		h->guard = (int8_t)(params[WIRE_PARAM_GROUP_SIZE] - WIRE_GUARD);
	else if (codec_is_rows(h->codec) || h->codec == CODEC_TOPK)
		h->group_size = load32(params + WIRE_PARAM_GROUP_SIZE);
}

static void params_write(const struct header *h, uint8_t *params)
{
	params[WIRE_PARAM_VARIANT] = h->variant;
	params[WIRE_PARAM_OPTIONS] = h->options;
	params[WIRE_PARAM_BITS] = h->bits;
	params[WIRE_PARAM_MAX_CODE_LENGTH] = h->max_code_length;
	store32(params + WIRE_PARAM_GROUP_SIZE,
		h->codec == CODEC_TRUNCATE ? (uint32_t)(h->guard + WIRE_GUARD) : h->group_size);
}

static void take_fields(const uint8_t b[CODEC_HEADER_NBYTES], struct header *h)
{
	h->codec = b[WIRE_AT_CODEC];
	h->dtype = b[WIRE_AT_DTYPE];
	h->rank = b[WIRE_AT_RANK];
	h->layout = b[WIRE_AT_LAYOUT];
	h->block_log2 = b[WIRE_AT_BLOCK_LOG2];
	h->fixed = b[WIRE_AT_FIXED];
	h->coded = b[WIRE_AT_CODED];
	h->side_nbytes = load32(b + WIRE_AT_SIDE_NBYTES);
	h->frame_nbytes = load64(b + WIRE_AT_FRAME_NBYTES);
	h->checksum = load64(b + WIRE_AT_CHECKSUM);
	h->flags = b[WIRE_AT_FLAGS];
	h->halved = b[WIRE_AT_HALVED];
	h->nblocks = load32(b + WIRE_AT_NBLOCKS);
	for (int i = 0; i < h->rank; i++)
		h->shape[i] = load64(b + WIRE_AT_SHAPE + 8 * i);
	params_read(h, b + WIRE_AT_PARAMS);
}

void header_write(const struct header *h, uint8_t *frame)
{
	memset(frame, 0, WIRE_AT_SHAPE);
	store32(frame, WIRE_MAGIC);
	frame[WIRE_AT_VERSION] = CODEC_FORMAT_VERSION;
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

/* Check that params are in range, and 0 where the codec has no parameter. */
static codec_status check_params(const struct header *h, const uint8_t *given, codec_fault *f)
{
	uint8_t params[WIRE_PARAMS_NBYTES];
	int at = params_fault(h);

	if (at >= 0)
		BAD(WIRE_AT_PARAMS + (uint64_t)at, given[at], 0);
	params_write(h, params);
	for (int i = 0; i < WIRE_PARAMS_NBYTES; i++)
		if (given[i] != params[i])
			BAD((uint64_t)(WIRE_AT_PARAMS + i), given[i], params[i]);
	return CODEC_OK;
}

static codec_status check_stored(const struct header *h, codec_fault *f)
{
	if (h->block_log2 || h->fixed || h->coded || h->side_nbytes)
		BAD(WIRE_AT_BLOCK_LOG2, h->block_log2, 0);
	if (h->flags || h->halved)
		BAD(WIRE_AT_FLAGS, h->flags, 0);
	if (h->group_size)
		BAD(WIRE_AT_PARAMS + WIRE_PARAM_GROUP_SIZE, h->group_size, 0);
	return CODEC_OK;
}

codec_status header_check_blocks(const struct header *h, codec_fault *f)
{
	if (h->block_log2 < WIRE_MIN_BLOCK_LOG2 || h->block_log2 > WIRE_MAX_BLOCK_LOG2)
		BAD(WIRE_AT_BLOCK_LOG2, h->block_log2, WIRE_MAX_BLOCK_LOG2);
	return CODEC_OK;
}

/* Check that the header's fields are consistent, before sizes are computed from them. */
static codec_status check_fields(const struct header *h, codec_fault *f)
{
	if (h->flags & ~WIRE_FLAGS_KNOWN)
		BAD(WIRE_AT_FLAGS, h->flags, WIRE_FLAGS_KNOWN);
	if (h->layout > WIRE_LAYOUT_BLOCKS)
		BAD(WIRE_AT_LAYOUT, h->layout, WIRE_LAYOUT_BLOCKS);
	if (h->side_nbytes % WIRE_ALIGN)
		BAD(WIRE_AT_SIDE_NBYTES, h->side_nbytes, 0);
	return h->layout == WIRE_LAYOUT_STORED ? check_stored(h, f) : family_of(h)->header_check(h, f);
}

/* Check that `frame_nbytes` bytes can hold h->n values, before a caller allocates memory for them. */
static codec_status check_sizes(const struct header *h, uint64_t nblocks, codec_fault *f)
{
	uint64_t least = h->regions_at + WIRE_ALIGN * h->nblocks;

	if (h->layout == WIRE_LAYOUT_STORED ? codec_is_delta(h->codec) || (codec_never_stored(h->codec) && h->n)
					    : !codec_is_delta(h->codec) && !h->n)
		BAD(WIRE_AT_LAYOUT, h->layout, !h->layout);
	if (nblocks != h->nblocks || h->nblocks > h->n)
		BAD(WIRE_AT_NBLOCKS, nblocks, MIN(h->nblocks, h->n));
	if (h->layout == WIRE_LAYOUT_STORED && h->frame_nbytes != stored_nbytes(h))
		BAD(WIRE_AT_FRAME_NBYTES, h->frame_nbytes, stored_nbytes(h));
	if (h->layout == WIRE_LAYOUT_STORED)
		return CODEC_OK;
	if (h->frame_nbytes < least || h->frame_nbytes % WIRE_ALIGN)
		BAD(WIRE_AT_FRAME_NBYTES, h->frame_nbytes, least);
	if (family_of(h)->header_check_size)
		TRY(family_of(h)->header_check_size(h, f));
	if (h->frame_nbytes / WIRE_ALIGN > UINT32_MAX)
		return fault(f, CODEC_LIMIT, WIRE_AT_FRAME_NBYTES, h->frame_nbytes, (uint64_t)WIRE_ALIGN * UINT32_MAX);
	return CODEC_OK;
}

codec_status header_read(const uint8_t *frame, size_t nbytes, struct header *h, codec_fault *f)
{
	uint8_t b[CODEC_HEADER_NBYTES];
	uint64_t nblocks;

	memset(h, 0, sizeof *h);
	TRY(take_bytes(frame, nbytes, b, f));
	take_fields(b, h);
	nblocks = h->nblocks;
	TRY(check_params(h, b + WIRE_AT_PARAMS, f));
	TRY(check_fields(h, f));
	if (header_derive(h) != CODEC_OK)
		BAD(WIRE_AT_SHAPE, h->shape[0], 0);
	return check_sizes(h, nblocks, f);
}

/* Return the contribution of header and side section to the frame's checksum. */
uint64_t head_checksum(const struct header *h, const struct kernels *k, const uint8_t *side)
{
	uint8_t image[CODEC_HEADER_NBYTES];
	struct header copy = *h;

	copy.checksum = 0;
	header_write(&copy, image);
	return k->digest(image, h->side_at, WIRE_SEED_HEADER) + k->digest(side, h->side_nbytes, WIRE_SEED_SIDE);
}
