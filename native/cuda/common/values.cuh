/* common/values.cuh - read values to be encoded (codec_source), and store decoded values (codec_sink). */
#ifndef CODEC_CUDA_COMMON_VALUES_CUH
#define CODEC_CUDA_COMMON_VALUES_CUH

#include "exact/round.h"
#include "common/warp.cuh"

/*
 * Destination of decoded values: fields of codec_context that concern it, and `data`, the address of the tensor, a
 * multiple of the size of a value; NULL: values are checked but not stored.
 */
struct codec_sink {
	uint8_t *data;
	uint32_t into;
	float weight, divide;
	uint32_t unscaled, rescale;
};

/* Return the value of `dtype` with bit pattern x, as float32. */
DEVICE float float_of(uint32_t dtype, uint32_t x)
{
	return round_float(dtype == CODEC_FLOAT32    ? x
			   : dtype == CODEC_BFLOAT16 ? round_from_bfloat16((uint16_t)x)
						     : round_from_float16((uint16_t)x));
}

/* Round y to `dtype`, and return its bits. */
DEVICE uint32_t bits_of_float(uint32_t dtype, float y)
{
	uint32_t u = round_bits(y);

	return dtype == CODEC_FLOAT32 ? u : dtype == CODEC_BFLOAT16 ? round_to_bfloat16(u) : round_to_float16(u);
}

/* Tensor to be encoded. All arrays have one entry per value of the tensor. */
struct codec_source {
	/*
	 * the tensor, aligned to the size of a value; with error feedback: `sums` below, rounded to the tensor's dtype
	 */
	const uint8_t *values;
	const float *sums; /* with error feedback: tensor + residual as float32; otherwise NULL */
	float *residual;   /* output: residual (encoded value minus decoded value); NULL: not written */
};

/* Return value i of the source as float32. */
DEVICE float value_at(uint32_t dtype, const codec_source *s, uint64_t i)
{
	return s->sums                  ? s->sums[i]
	       : dtype == CODEC_FLOAT32 ? ((const float *)s->values)[i]
					: float_of(dtype, ((const uint16_t *)s->values)[i]);
}

/* Return true if each group of 4 values that begins at an index divisible by 4 is aligned for one vector load. */
DEVICE bool in_quads(uint32_t dtype, const codec_source *s)
{
	return s->sums ? (uint64_t)s->sums % 16 == 0 : (uint64_t)s->values % (dtype == CODEC_FLOAT32 ? 16 : 8) == 0;
}

/*
 * Load N quads (groups of 4 values) as bits of float32: PER adjacent quads from value i on, PER quads from value i +
 * apart on, and so on. i and `apart` are multiples of 4, and in_quads() must be true. All loads are in flight together.
 */
template <int N, int PER>
DEVICE void load_quads(uint32_t dtype, const codec_source *s, uint64_t i, uint32_t apart, uint32_t x[4 * N])
{
	if (s->sums || dtype == CODEC_FLOAT32) {
		const uint4 *from = (const uint4 *)(global(s->sums ? s->sums : (const float *)s->values) + i);

		for (int k = 0; k < N; k++) {
			uint4 w = from[k / PER * (apart / 4) + k % PER];

			x[4 * k] = w.x, x[4 * k + 1] = w.y, x[4 * k + 2] = w.z, x[4 * k + 3] = w.w;
		}
		return;
	}
	const uint2 *from = (const uint2 *)(global((const uint16_t *)s->values) + i);

	for (int k = 0; k < N; k++) {
		uint2 w = from[k / PER * (apart / 4) + k % PER];

		x[4 * k] = w.x & 0xffff, x[4 * k + 1] = w.x >> 16, x[4 * k + 2] = w.y & 0xffff,
		      x[4 * k + 3] = w.y >> 16;
	}
	if (dtype == CODEC_BFLOAT16) /* one branch on the dtype for all values, not one per value */
		for (int k = 0; k < 4 * N; k++)
			x[k] = round_from_bfloat16((uint16_t)x[k]);
	else
		for (int k = 0; k < 4 * N; k++)
			x[k] = round_from_float16((uint16_t)x[k]);
}

/* Load N (4 or 8) values from value i on as bits of float32. See load_quads. */
template <int N> DEVICE void values_at_quads(uint32_t dtype, const codec_source *s, uint64_t i, uint32_t x[N])
{
	load_quads<N / 4, N / 4>(dtype, s, i, 4, x);
}

/* Load the lane's 4 values of each of N rows of 128 values; i: index of the first of them. See load_quads. */
template <int N> DEVICE void values_at_rows(uint32_t dtype, const codec_source *s, uint64_t i, uint32_t x[4 * N])
{
	load_quads<N, 1>(dtype, s, i, WIRE_ROW, x);
}

/* Load the lane's 8 values of each of N runs of 256 values; i: index of the first of them. See load_quads. */
template <int N> DEVICE void values_at_groups(uint32_t dtype, const codec_source *s, uint64_t i, uint32_t x[8 * N])
{
	load_quads<2 * N, 2>(dtype, s, i, 256, x);
}

/* Load the N values with index i, i + 32, i + 64, ... as float32. */
template <int N> DEVICE void values_each_32(uint32_t dtype, const codec_source *s, uint64_t i, float x[N])
{
	if (s->sums || dtype == CODEC_FLOAT32) {
		const float *from = global(s->sums ? s->sums : (const float *)s->values) + i;

		for (int k = 0; k < N; k++)
			x[k] = from[32 * k];
		return;
	}
	const uint16_t *from = global((const uint16_t *)s->values) + i;

	for (int k = 0; k < N; k++)
		x[k] = round_float(from[32 * k]);
	for (int k = 0; k < N; k++)
		x[k] = float_of(dtype, round_bits(x[k]));
}

/*
 * Return the result of combining a decoded value y with the destination's value `before`, according to s->into and
 * s->divide. `scale`: scale of the value's part, used if s->rescale is set.
 */
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

/*
 * Load n <= 4 values of a float32 destination, from value i on, to combine them with decoded values. If the sink's
 * operation ignores them, set x to 0 instead.
 */
DEVICE void load_floats(const codec_sink *s, uint64_t i, uint32_t n, float x[4])
{
	uint64_t words[4] = {0};

	if (s->into != CODEC_INTO_FLOAT32)
		load_quad<4>(s->data + 4 * i, n, words);
	for (uint32_t k = 0; k < 4; k++)
		x[k] = round_float((uint32_t)words[k]);
}

/* Store n <= 4 float32 values to the destination from value i on. */
DEVICE void store_floats(const codec_sink *s, uint64_t i, uint32_t n, const float x[4])
{
	const uint64_t words[4] = {round_bits(x[0]), round_bits(x[1]), round_bits(x[2]), round_bits(x[3])};

	store_quad<4>(s->data + 4 * i, n, words);
}

/* Combine n <= 4 decoded values with values i to i + n - 1 of a float32 destination, see put_float. */
DEVICE void put_floats(const codec_sink *s, uint64_t i, uint32_t n, const float y[4], float scale)
{
	float x[4];

	load_floats(s, i, n, x);
	for (uint32_t k = 0; k < 4; k++)
		x[k] = put_float(s, x[k], y[k], scale);
	store_floats(s, i, n, x);
}

/*
 * Store n <= 4 decoded values from value i on. x: bits of the values in the frame's dtype. If s->into is not
 * CODEC_INTO_STORE, that dtype must be a float, and the values are combined with a float32 destination.
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

/* Round a decoded float32 value to the frame's dtype, unless the sink requests unscaled values. */
DEVICE float decoded_float(const codec_sink *s, uint32_t dtype, float y)
{
	return s->unscaled ? y : float_of(dtype, bits_of_float(dtype, y));
}

/*
 * Store n <= 4 decoded float32 values from value i on: rounded to the frame's dtype, or combined with a float32
 * destination.
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
	if (dtype == CODEC_FLOAT32)
		store_quad<4>(s->data + 4 * i, n, x);
	else
		store_quad<2>(s->data + 2 * i, n, x);
}

#endif
