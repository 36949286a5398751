/* sink.cuh - decoded values to where they go. */
#ifndef CODEC_SINK_CUH
#define CODEC_SINK_CUH

#include "exact/round.h"
#include "warp.cuh"

/* Fields as in codec_context. `data` lies at a multiple of a value's size; NULL: nothing is stored, only checked. */
struct codec_sink {
	uint8_t *data;
	uint32_t into;
	float weight, divide;
	uint32_t unscaled, rescale;
};

/* A frame's value, its bits, as float32. */
DEVICE float float_of(uint32_t dtype, uint32_t x)
{
	return round_float(dtype == WIRE_FLOAT32    ? x
			   : dtype == WIRE_BFLOAT16 ? round_from_bfloat16((uint16_t)x)
						    : round_from_float16((uint16_t)x));
}

DEVICE uint32_t bits_of_float(uint32_t dtype, float y)
{
	uint32_t u = round_bits(y);

	return dtype == WIRE_FLOAT32 ? u : dtype == WIRE_BFLOAT16 ? round_to_bfloat16(u) : round_to_float16(u);
}

/* What is encoded, and what is to be left of it; all of n values. */
struct codec_source {
	const uint8_t
		*values;   /* the tensor's, at a multiple of their size; under feedback sums, rounded to its dtype */
	const float *sums; /* under feedback: before they were rounded; else NULL */
	float *residual;   /* what decoding will miss; NULL: nobody wants to know */
};

/* Value i, as float32. */
DEVICE float value_at(uint32_t dtype, const codec_source *s, uint64_t i)
{
	return s->sums                 ? s->sums[i]
	       : dtype == WIRE_FLOAT32 ? ((const float *)s->values)[i]
				       : float_of(dtype, ((const uint16_t *)s->values)[i]);
}

/* To value i of a float32 tensor; y is the frame's. `scale`: its part's. */
DEVICE void put_float(const codec_sink *s, uint64_t i, float y, float scale)
{
	float *out = (float *)s->data + i;

	if (s->into == CODEC_INTO_ADD)
		y = round_weighted(*out, s->weight, y);
	else if (s->into == CODEC_INTO_MAX)
		y = round_larger(*out, y);
	if (s->rescale)
		y = round_mul(y, scale);
	*out = s->divide > 0 ? round_div(y, s->divide) : y;
}

/* A float32 that was decoded to value i of a tensor of a frame's dtype, or of float32, into which it then goes rounded.
 */
DEVICE void put_value(const codec_sink *s, uint32_t dtype, uint64_t i, float y, float scale)
{
	if (s->into == CODEC_INTO_STORE) {
		if (dtype == WIRE_FLOAT32)
			((float *)s->data)[i] = y;
		else
			((uint16_t *)s->data)[i] = (uint16_t)bits_of_float(dtype, y);
		return;
	}
	put_float(s, i, s->unscaled ? y : float_of(dtype, bits_of_float(dtype, y)), scale);
}

#endif
