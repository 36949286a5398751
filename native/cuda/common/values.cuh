/* common/values.cuh - decoded values to where they go. */
#ifndef CODEC_CUDA_COMMON_VALUES_CUH
#define CODEC_CUDA_COMMON_VALUES_CUH

#include "exact/round.h"
#include "common/warp.cuh"

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

/* Do quads of values, from a multiple of four on, lie at multiples of their size? */
DEVICE bool in_quads(uint32_t dtype, const codec_source *s)
{
	return s->sums ? (uint64_t)s->sums % 16 == 0 : (uint64_t)s->values % (dtype == WIRE_FLOAT32 ? 16 : 8) == 0;
}

/* The bits, as float32, of N of them, 4 or 8. */
template <int N> DEVICE void values_at_quads(uint32_t dtype, const codec_source *s, uint64_t i, uint32_t x[N])
{
	if (s->sums || dtype == WIRE_FLOAT32) {
		const uint4 *from = (const uint4 *)(global(s->sums ? s->sums : (const float *)s->values) + i);

		for (int k = 0; k < N; k += 4) {
			uint4 w = from[k / 4];

			x[k] = w.x, x[k + 1] = w.y, x[k + 2] = w.z, x[k + 3] = w.w;
		}
		return;
	}
	const uint2 *from = (const uint2 *)(global((const uint16_t *)s->values) + i);

	for (int k = 0; k < N; k += 4) {
		uint2 w = from[k / 4];

		x[k] = w.x & 0xffff, x[k + 1] = w.x >> 16, x[k + 2] = w.y & 0xffff, x[k + 3] = w.y >> 16;
	}
	for (int k = 0; k < N; k++)
		x[k] = round_bits(float_of(dtype, x[k]));
}

/* What becomes of a float32 by y of a frame. `scale`: its part's. */
DEVICE float put_float(const codec_sink *s, float before, float y, float scale)
{
	if (s->into == CODEC_INTO_ADD)
		y = round_weighted(before, s->weight, y);
	else if (s->into == CODEC_INTO_MAX)
		y = round_larger(before, y);
	if (s->rescale)
		y = round_mul(y, scale);
	return s->divide > 0 ? round_div(y, s->divide) : y;
}

/* Values i to i + n - 1, at most four, of a float32 tensor, as far as anything depends on them. */
DEVICE void load_floats(const codec_sink *s, uint64_t i, uint32_t n, float x[4])
{
	uint64_t words[4] = {0};

	if (s->into != CODEC_INTO_FLOAT32)
		load_quad<4>(s->data + 4 * i, n, words);
	for (uint32_t k = 0; k < 4; k++)
		x[k] = round_float((uint32_t)words[k]);
}

DEVICE void store_floats(const codec_sink *s, uint64_t i, uint32_t n, const float x[4])
{
	const uint64_t words[4] = {round_bits(x[0]), round_bits(x[1]), round_bits(x[2]), round_bits(x[3])};

	store_quad<4>(s->data + 4 * i, n, words);
}

DEVICE void put_floats(const codec_sink *s, uint64_t i, uint32_t n, const float y[4], float scale)
{
	float x[4];

	load_floats(s, i, n, x);
	for (uint32_t k = 0; k < 4; k++)
		x[k] = put_float(s, x[k], y[k], scale);
	store_floats(s, i, n, x);
}

/*
 * Values i to i + n - 1, at most four, their bits, to where they go; other than into a tensor of its own dtype floats
 * that codecs 2 to 7 take.
 */
template <int SIZE>
DEVICE void put_quad(const codec_sink *s, uint32_t dtype, uint64_t i, uint32_t n, const uint64_t x[4])
{
	float y[4];

	if (s->into == CODEC_INTO_STORE || SIZE > 4)
		return store_quad<SIZE>(s->data + SIZE * i, n, x);
	for (uint32_t k = 0; k < 4; k++)
		y[k] = float_of(dtype, (uint32_t)x[k]);
	put_floats(s, i, n, y, 0);
}

/* Float32 that were decoded, as values of a frame's dtype, which are added and compared. */
DEVICE float decoded_float(const codec_sink *s, uint32_t dtype, float y)
{
	return s->unscaled ? y : float_of(dtype, bits_of_float(dtype, y));
}

/* Float32 that were decoded to values i to i + n - 1, at most four, of a tensor of a frame's dtype, or of float32, into
 * which they then go rounded.
 */
DEVICE void put_values(const codec_sink *s, uint32_t dtype, uint64_t i, uint32_t n, const float y[4], float scale)
{
	uint64_t x[4];
	float z[4];

	if (s->into != CODEC_INTO_STORE) {
		for (uint32_t k = 0; k < 4; k++)
			z[k] = decoded_float(s, dtype, y[k]);
		return put_floats(s, i, n, z, scale);
	}
	for (uint32_t k = 0; k < 4; k++)
		x[k] = bits_of_float(dtype, y[k]);
	if (dtype == WIRE_FLOAT32)
		store_quad<4>(s->data + 4 * i, n, x);
	else
		store_quad<2>(s->data + 2 * i, n, x);
}

#endif
