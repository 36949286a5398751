/* shapes.c - number of values in the shapes of tensors and of segments. */
#include "shape.h"

/*
 * Set *n to the product of the dimensions. Reject products of 2^60 and more. A dimension of 0 makes *n 0; the product
 * of the other dimensions must be below 2^60 nevertheless, because callers that allocate such a tensor may compute that
 * product.
 */
codec_status shape_product(uint32_t rank, const uint64_t *shape, uint64_t *n)
{
	uint64_t product = 1;
	int zero = 0;

	if (rank > CODEC_MAX_RANK)
		return CODEC_BAD_SHAPE;
	for (uint32_t i = 0; i < rank; i++) {
		zero |= shape[i] == 0;
		if (__builtin_mul_overflow(product, shape[i] ? shape[i] : 1, &product) || product >> 60)
			return CODEC_BAD_SHAPE;
	}
	*n = zero ? 0 : product;
	return CODEC_OK;
}

/* Return the number of values of a segment that segments_check has accepted. */
uint64_t segment_count(const codec_segment *s)
{
	uint64_t count = 0;

	shape_product(s->rank, s->shape, &count);
	return count;
}

/* Check that segments are ascending, do not overlap and lie within n values. */
codec_status segments_check(const codec_context *with, uint64_t n)
{
	uint64_t end = 0, count;

	for (uint64_t i = 0; i < with->nsegments; i++) {
		const codec_segment *s = with->segments + i;

		if (s->reserved || shape_product(s->rank, s->shape, &count) != CODEC_OK || s->offset < end ||
		    s->offset > n || count > n - s->offset)
			return CODEC_BAD_SEGMENTS;
		end = s->offset + count;
	}
	return CODEC_OK;
}
