/* before.cu - what comes before a tensor is encoded: sums under error feedback, exponents of a metric's A, levels. */
#include "sink.cuh"
#include "written.cuh"

/* A metric's terms and its state, as codec_metric has them; v, m: NULL where it does not look at them. */
struct codec_terms {
	const uint8_t *theta, *v, *m;
	uint32_t theta_dtype, v_dtype, m_dtype;
	float theta_term, theta_v_term, v_term, eps, m_term;
};

/* A sum in the tensor's dtype: to nearest even, and at most its largest number. */
DEVICE uint32_t rounded_sum(uint32_t dtype, float sum)
{
	uint32_t u = round_bits(sum), inf = dtype == WIRE_FLOAT16 ? 0x7c00 : 0x7f80;

	if (dtype == WIRE_FLOAT32)
		return u;
	return (u & ROUND_ABS) == ROUND_INF ? (u >> 16 & 0x8000) | inf : bits_of_float(dtype, sum);
}

/* n values and what is owed, added: `sums`, and the same rounded to the dtype (NULL: nobody wants to know). */
extern "C" __global__ void add_feedback(uint32_t dtype, const uint8_t *values, const float *owed, uint64_t n,
					float *sums, uint8_t *rounded)
{
	const codec_source source = {values, NULL, NULL};

	for (uint64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (uint64_t)gridDim.x * blockDim.x) {
		float sum = round_plus(value_at(dtype, &source, i), owed[i]);

		sums[i] = sum;
		if (rounded && dtype == WIRE_FLOAT32)
			((uint32_t *)rounded)[i] = round_bits(sum);
		else if (rounded)
			((uint16_t *)rounded)[i] = (uint16_t)rounded_sum(dtype, sum);
	}
}

/* Exponents of A for values [first, end), of docs/format.md, section 9. */
extern "C" __global__ void metric_exponents(const codec_terms t, uint64_t first, uint64_t end, uint8_t *exponents)
{
	const codec_source theta = {t.theta, NULL, NULL}, v = {t.v, NULL, NULL}, m = {t.m, NULL, NULL};

	for (uint64_t i = first + blockIdx.x * blockDim.x + threadIdx.x; i < end;
	     i += (uint64_t)gridDim.x * blockDim.x) {
		float factor = t.theta_term, a;

		if (t.v) {
			float root = round_sqrt(round_mul(t.v_term, value_at(t.v_dtype, &v, i)));

			factor = round_add(round_mul(round_add(root, t.eps), t.theta_v_term), t.theta_term);
		}
		a = round_mul(value_at(t.theta_dtype, &theta, i), factor);
		exponents[i] = round_exponent(t.m ? round_weighted(a, t.m_term, value_at(t.m_dtype, &m, i)) : a);
	}
}

/* And of values of A, where a metric is its user's. */
extern "C" __global__ void value_exponents(const float *a, uint64_t n, uint8_t *exponents)
{
	for (uint64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (uint64_t)gridDim.x * blockDim.x)
		exponents[i] = round_exponent(a[i]);
}

/* Are n levels in range? Else out->fault says that an argument is wrong. */
extern "C" __global__ void check_levels(const uint8_t *levels, uint64_t n, codec_written *out)
{
	bool bad = false;

	for (uint64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (uint64_t)gridDim.x * blockDim.x)
		bad |= levels[i] > 3;
	if (__any_sync(FULL, bad) && threadIdx.x % 32 == 0)
		atomicMax(&out->fault, (uint32_t)CODEC_BAD_ARGUMENT);
}
