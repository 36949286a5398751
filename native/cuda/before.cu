/* before.cu - what must be known of values before they are encoded or decoded: sums under error feedback, exponents of
 * a metric's A, whether levels are levels. One launch for all of it.
 */
#include "sink.cuh"
#include "encoding.cuh"

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
struct codec_before {
	uint64_t n;
	const uint8_t *values; /* under feedback: the tensor's, */
	const float *owed;     /* what is added to them, */
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

DEVICE void add_owed(const codec_before &b, uint64_t i)
{
	const codec_source source = {b.values, NULL, NULL};
	float sum = round_plus(value_at(b.dtype, &source, i), b.owed[i]);
	uint32_t x = rounded_sum(b.dtype, sum);

	b.sums[i] = sum;
	if (b.dtype == WIRE_FLOAT32)
		((uint32_t *)b.rounded)[i] = x;
	else
		((uint16_t *)b.rounded)[i] = (uint16_t)x;
}

/* A of value i, docs/format.md, section 9. */
DEVICE float metric_of(const codec_group &g, uint64_t i)
{
	const codec_source theta = {g.theta, NULL, NULL}, v = {g.v, NULL, NULL}, m = {g.m, NULL, NULL};
	float factor = g.theta_term, a;

	if (g.a)
		return g.a[i - g.first];
	if (g.v) {
		float root = round_sqrt(round_mul(g.v_term, value_at(g.v_dtype, &v, i)));

		factor = round_add(round_mul(round_add(root, g.eps), g.theta_v_term), g.theta_term);
	}
	a = round_mul(value_at(g.theta_dtype, &theta, i), factor);
	return g.m ? round_weighted(a, g.m_term, value_at(g.m_dtype, &m, i)) : a;
}

extern "C" __global__ void before(const codec_before *tensors)
{
	const codec_before &b = tensors[blockIdx.y];
	const codec_group *g = b.groups;
	bool bad = false;

	for (uint64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < b.n; i += (uint64_t)gridDim.x * blockDim.x) {
		if (b.owed)
			add_owed(b, i);
		while (g && i >= g->end)
			g++;
		if (g)
			b.exponents[i] = round_exponent(metric_of(*g, i));
		bad |= b.levels && b.levels[i] > 3;
	}
	if (__any_sync(FULL, bad) && threadIdx.x % 32 == 0)
		atomicMax(&b.out->fault, (uint32_t)CODEC_BAD_ARGUMENT);
}
