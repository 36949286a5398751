/*
 * frame/preprocess.cu - kernel that runs before encoding or decoding. It computes arrays with one entry per value:
 * sums of tensor and residual (error feedback), and exponents of a metric's A (Truncate). It also validates levels.
 */
#include "common/values.cuh"
#include "frame/encode.cuh"

/*
 * Metric of values [first, end), a parameter group: terms and state as in codec_metric; v, m: NULL if the metric does
 * not use them. a: for a user-defined metric, the values of A from value `first` on; else NULL.
 */
struct codec_group {
	uint64_t first, end;
	const float *a;
	const uint8_t *theta, *v, *m;
	uint32_t theta_dtype, v_dtype, m_dtype;
	float theta_term, theta_v_term, v_term, eps, m_term;
};

/* Arguments for one tensor of n values. Pointers to arrays that are not needed are NULL. */
struct codec_preprocessing {
	uint64_t n;
	const uint8_t *values; /* error feedback: the tensor */
	const float *residual; /* error feedback: the residual to add */
	float *sums;           /* output: sums of tensor and residual, as float32 */
	uint8_t *rounded;      /* output: sums rounded to the tensor's dtype */
	const codec_group *groups;
	uint8_t *exponents; /* output: biased exponents of the metric A, one byte per value */
	const uint8_t *levels;
	uint32_t dtype, reserved;
	codec_written *out; /* out->fault becomes CODEC_BAD_ARGUMENT if a level is not 0 to 3 */
};

/*
 * Round a sum to the tensor's dtype, to nearest even. A finite sum is clamped to the largest finite value; Inf stays
 * Inf.
 */
DEVICE uint32_t rounded_sum(uint32_t dtype, float sum)
{
	uint32_t u = round_bits(sum), inf = dtype == CODEC_FLOAT16 ? 0x7c00 : 0x7f80;

	if (dtype == CODEC_FLOAT32)
		return u;
	return (u & ROUND_ABS) == ROUND_INF ? (u >> 16 & 0x8000) | inf : bits_of_float(dtype, sum);
}

/* Error feedback: add the residual to n <= 4 values from value i on. */
DEVICE_CALL void sums_some(const codec_preprocessing &b, uint64_t i, uint32_t n)
{
	const codec_source source = {b.values, NULL, NULL};

	for (uint32_t k = 0; k < n; k++, i++) {
		float sum = round_plus(value_at(b.dtype, &source, i), b.residual[i]);
		uint32_t x = rounded_sum(b.dtype, sum);

		b.sums[i] = sum;
		if (b.dtype == CODEC_FLOAT32)
			((uint32_t *)b.rounded)[i] = x;
		else
			((uint16_t *)b.rounded)[i] = (uint16_t)x;
	}
}

/*
 * Error feedback: add the residual to values i to i + 3, by vector loads and stores. All arrays are aligned: see
 * in_quads.
 */
DEVICE void sums_four(const codec_preprocessing &b, uint64_t i)
{
	const codec_source source = {b.values, NULL, NULL}, residual = {NULL, b.residual, NULL};
	uint32_t x[4], y[4];

	values_at_quads<4>(b.dtype, &source, i, x);
	values_at_quads<4>(b.dtype, &residual, i, y);
	for (int k = 0; k < 4; k++) {
		float sum = round_plus(round_float(x[k]), round_float(y[k]));

		x[k] = round_bits(sum);
		y[k] = rounded_sum(b.dtype, sum);
	}
	*(uint4 *)(global(b.sums) + i) = {x[0], x[1], x[2], x[3]};
	if (b.dtype == CODEC_FLOAT32)
		*(uint4 *)(global((uint32_t *)b.rounded) + i) = {y[0], y[1], y[2], y[3]};
	else
		*(uint2 *)(global((uint16_t *)b.rounded) + i) = {y[0] | y[1] << 16, y[2] | y[3] << 16};
}

/*
 * Return the factor of theta in the metric A. `v`: second moment of the value in the optimizer's state.
 * docs/spec/encoder.md, section 8.1.
 */
DEVICE float factor_of(const codec_group &g, float v)
{
	float root = round_sqrt(round_mul(g.v_term, v));

	return round_add(round_mul(round_add(root, g.eps), g.theta_v_term), g.theta_term);
}

/*
 * Compute the exponents of the metric A for n <= 4 values from value i on. g: the parameter group that contains value
 * i; the groups of later values follow it.
 */
DEVICE_CALL void exponents_some(const codec_preprocessing &b, const codec_group *g, uint64_t i, uint32_t n)
{
	for (uint32_t k = 0; k < n; k++, i++) {
		while (i >= g->end)
			g++;
		const codec_source theta = {g->theta, NULL, NULL}, v = {g->v, NULL, NULL}, m = {g->m, NULL, NULL};
		float a;

		if (g->a) {
			a = g->a[i - g->first];
		} else {
			a = round_mul(value_at(g->theta_dtype, &theta, i),
				      g->v ? factor_of(*g, value_at(g->v_dtype, &v, i)) : g->theta_term);
			a = g->m ? round_weighted(a, g->m_term, value_at(g->m_dtype, &m, i)) : a;
		}
		b.exponents[i] = round_exponent(a);
	}
}

/* Return true if all arrays of a parameter group's state are aligned for vector loads. */
DEVICE bool state_in_quads(const codec_group &g)
{
	const codec_source theta = {g.theta, NULL, NULL}, v = {g.v, NULL, NULL}, m = {g.m, NULL, NULL};

	return !g.a && in_quads(g.theta_dtype, &theta) && in_quads(g.v_dtype, &v) && in_quads(g.m_dtype, &m);
}

/*
 * Compute the exponents of A for values i to i + 3 of one parameter group, by vector loads. state_in_quads() must be
 * true.
 */
DEVICE void exponents_four(const codec_preprocessing &b, const codec_group &g, uint64_t i)
{
	const codec_source theta = {g.theta, NULL, NULL}, v = {g.v, NULL, NULL}, m = {g.m, NULL, NULL};
	uint32_t x[3][4], exponents = 0;

	values_at_quads<4>(g.theta_dtype, &theta, i, x[0]);
	if (g.v)
		values_at_quads<4>(g.v_dtype, &v, i, x[1]);
	if (g.m)
		values_at_quads<4>(g.m_dtype, &m, i, x[2]);
	for (int k = 0; k < 4; k++) {
		float a = round_mul(round_float(x[0][k]), g.v ? factor_of(g, round_float(x[1][k])) : g.theta_term);

		a = g.m ? round_weighted(a, g.m_term, round_float(x[2][k])) : a;
		exponents |= (uint32_t)round_exponent(a) << 8 * k;
	}
	*(uint32_t *)(global(b.exponents) + i) = exponents;
}

/*
 * Kernel: compute the outputs that codec_preprocessing requests. Grid: (CTAs, tensors); threads process groups of four
 * values in a grid-stride loop.
 */
extern "C" __global__ void __launch_bounds__(256, 4) preprocess(const codec_preprocessing *tensors)
{
	__shared__ codec_preprocessing b;
	bool bad = false;

	share(&b, tensors + blockIdx.y);
	const codec_source values = {b.values, NULL, NULL}, residual = {NULL, b.residual, NULL};
	const bool sums_in_quads = in_quads(b.dtype, &values) && in_quads(b.dtype, &residual);
	const codec_group *g = b.groups;
	const uint64_t step = 4ull * gridDim.x * blockDim.x;

	for (uint64_t i = 4 * ((uint64_t)blockIdx.x * blockDim.x + threadIdx.x); i < b.n; i += step) {
		const uint32_t n = b.n - i < 4 ? (uint32_t)(b.n - i) : 4;

		if (b.residual && n == 4 && sums_in_quads)
			sums_four(b, i);
		else if (b.residual)
			sums_some(b, i, n);
		while (g && i >= g->end)
			g++;
		if (g && n == 4 && i + 4 <= g->end && state_in_quads(*g))
			exponents_four(b, *g, i);
		else if (g)
			exponents_some(b, g, i, n);
		for (uint32_t k = 0; b.levels && k < n; k++)
			bad |= b.levels[i + k] > 3;
	}
	if (__any_sync(FULL, bad) && threadIdx.x % 32 == 0)
		atomicMax(&b.out->fault, (uint32_t)CODEC_BAD_ARGUMENT);
}
