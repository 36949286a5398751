/* frame/preprocess.cu - what must be known of values before they are encoded or decoded: sums under error feedback,
 * exponents of a metric's A, whether levels are levels. One launch for all of it.
 */
#include "common/values.cuh"
#include "frame/encode.cuh"

/*
 * The metric of values [first, end): its terms and its state, as codec_metric has them; v, m: NULL where it does not
 * look at them. Or values of A, the first of them a[0], where it is its user's.
 */
struct codec_group {
	uint64_t first, end;
	const float *a;
	const uint8_t *theta, *v, *m;
	uint32_t theta_dtype, v_dtype, m_dtype;
	float theta_term, theta_v_term, v_term, eps, m_term;
};

/* Of n values; pointers are NULL where nothing of the kind is wanted. */
struct codec_preprocessing {
	uint64_t n;
	const uint8_t *values; /* under feedback: the tensor's, */
	const float *residual; /* what is added to them, */
	float *sums;           /* the sums, */
	uint8_t *rounded;      /* and these in the tensor's dtype */
	const codec_group *groups;
	uint8_t *exponents; /* of A */
	const uint8_t *levels;
	uint32_t dtype, reserved;
	codec_written *out; /* whose fault says that levels are none */
};

/* A sum in the tensor's dtype: to nearest even, and at most its largest number. */
DEVICE uint32_t rounded_sum(uint32_t dtype, float sum)
{
	uint32_t u = round_bits(sum), inf = dtype == WIRE_FLOAT16 ? 0x7c00 : 0x7f80;

	if (dtype == WIRE_FLOAT32)
		return u;
	return (u & ROUND_ABS) == ROUND_INF ? (u >> 16 & 0x8000) | inf : bits_of_float(dtype, sum);
}

/* Values i to i + n - 1, at most four. */
DEVICE_CALL void sums_some(const codec_preprocessing &b, uint64_t i, uint32_t n)
{
	const codec_source source = {b.values, NULL, NULL};

	for (uint32_t k = 0; k < n; k++, i++) {
		float sum = round_plus(value_at(b.dtype, &source, i), b.residual[i]);
		uint32_t x = rounded_sum(b.dtype, sum);

		b.sums[i] = sum;
		if (b.dtype == WIRE_FLOAT32)
			((uint32_t *)b.rounded)[i] = x;
		else
			((uint16_t *)b.rounded)[i] = (uint16_t)x;
	}
}

/* The same of four that lie in quads, as all do that are made here. */
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
	if (b.dtype == WIRE_FLOAT32)
		*(uint4 *)(global((uint32_t *)b.rounded) + i) = {y[0], y[1], y[2], y[3]};
	else
		*(uint2 *)(global((uint16_t *)b.rounded) + i) = {y[0] | y[1] << 16, y[2] | y[3] << 16};
}

/* Whatever A's factor of theta does not depend on theta for; `v`: of the state. docs/format.md, section 9. */
DEVICE float factor_of(const codec_group &g, float v)
{
	float root = round_sqrt(round_mul(g.v_term, v));

	return round_add(round_mul(round_add(root, g.eps), g.theta_v_term), g.theta_term);
}

/* Exponents of A of values i to i + n - 1, whose groups are g and those behind it. */
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

/* Is all of the state in quads? */
DEVICE bool state_in_quads(const codec_group &g)
{
	const codec_source theta = {g.theta, NULL, NULL}, v = {g.v, NULL, NULL}, m = {g.m, NULL, NULL};

	return !g.a && in_quads(g.theta_dtype, &theta) && in_quads(g.v_dtype, &v) && in_quads(g.m_dtype, &m);
}

/* The same of four values of one group whose state is in quads. */
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
