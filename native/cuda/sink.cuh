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

/*
 * Values i to i + n - 1, at most four, their bits, to where they go; other than into a tensor of its own dtype floats
 * that codecs 2 to 7 take.
 */
template <int SIZE>
DEVICE void put_quad(const codec_sink *s, uint32_t dtype, uint64_t i, uint32_t n, const uint64_t x[4])
{
	if (s->into == CODEC_INTO_STORE || SIZE > 4)
		return store_quad<SIZE>(s->data + SIZE * i, n, x);
	for (uint32_t k = 0; k < n; k++)
		put_float(s, i + k, float_of(dtype, (uint32_t)x[k]), 0);
}

/* Float32 that were decoded to values i to i + n - 1, at most four, of a tensor of a frame's dtype, or of float32, into
 * which they then go rounded.
 */
DEVICE void put_values(const codec_sink *s, uint32_t dtype, uint64_t i, uint32_t n, const float y[4], float scale)
{
	uint64_t x[4];

	if (s->into != CODEC_INTO_STORE) {
		for (uint32_t k = 0; k < n; k++)
			put_float(s, i + k, s->unscaled ? y[k] : float_of(dtype, bits_of_float(dtype, y[k])), scale);
		return;
	}
	for (uint32_t k = 0; k < 4; k++)
		x[k] = bits_of_float(dtype, y[k]);
	if (dtype == WIRE_FLOAT32)
		store_quad<4>(s->data + 4 * i, n, x);
	else
		store_quad<2>(s->data + 2 * i, n, x);
}

#endif
