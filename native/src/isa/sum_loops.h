/*
 * sum_loops.h - loops without intrinsics that add, subtract, scale and compare float32 values. Included by row_loops.h.
 */
#include "kernels.h"

/* Defaults of vectorized parts: see row_loops.h. */
#ifndef PLUS
#define PLUS(minus, x, e, n, sum) 0
#define SETTLE(how, x, n, by, dst, most) 0
#define SETTLE_ALIGN 4
#endif
#ifndef SIGN_SUMS
#define SIGN_SUMS(s, count, n, more, how, by, y) 0
#endif

static void plus(const float_any *x, const float_any *e, size_t n, float_any *sum)
{
	for (size_t i = PLUS(0, x, e, n, sum); i < n; i++)
		sum[i] = round_plus(x[i], e[i]);
}

static void minus(const float_any *x, const float_any *e, size_t n, float *difference)
{
	for (size_t i = PLUS(1, x, e, n, difference); i < n; i++)
		difference[i] = round_plus(x[i], -e[i]);
}

static void subtract(const float_any *x, const float *y, size_t n, float_any *r)
{
	for (size_t i = 0; i < n; i++)
		r[i] = round_minus(x[i], y[i]);
}

static void add(const float *y, size_t n, float weight, float_any *out)
{
	for (size_t i = 0; i < n; i++)
		out[i] = round_weighted(out[i], weight, y[i]);
}

static void multiply(float_any *out, size_t n, float by)
{
	for (size_t i = 0; i < n; i++)
		out[i] = round_mul(out[i], by);
}

/* Return 1 if `by` is a power of two: multiplying by 1 / by then equals dividing by it, and is faster. */
static inline int has_inverse(float by)
{
	return !(round_bits(by) & 0x7fffff);
}

static void divide(float_any *out, size_t n, float by)
{
	if (has_inverse(by)) {
		multiply(out, n, round_div(1, by));
		return;
	}
	for (size_t i = 0; i < n; i++)
		out[i] = round_div(out[i], by);
}

static void maximum(const float *y, size_t n, float_any *out)
{
	for (size_t i = 0; i < n; i++)
		out[i] = round_larger(out[i], y[i]);
}

/* Return x, x * by or x / by, as `how` (SETTLE_*) specifies. */
static inline float settled(int how, float x, float by)
{
	return how == SETTLE_TIMES ? round_mul(x, by) : how == SETTLE_OVER ? round_div(x, by) : x;
}

static inline void sum_signs(const struct signs *s, size_t count, size_t n, int more, int how, float by, float_any *y)
{
	for (size_t i = SIGN_SUMS(s, count, n, more, how, by, y); i < n; i++) {
		float sum = y[i];

		for (size_t f = 0; f < count; f++) {
			float x = s[f].bits[i / 8] >> i % 8 & 1 ? s[f].positive : s[f].negative;

			sum = f || more ? round_add(sum, x) : x;
		}
		y[i] = settled(how, sum, by);
	}
}

static void sign_sums(const struct signs *s, size_t count, size_t n, int more, float by, float_any *y)
{
	if (!(by > 0))
		sum_signs(s, count, n, more, SETTLE_AS_IS, by, y);
	else if (has_inverse(by))
		sum_signs(s, count, n, more, SETTLE_TIMES, round_div(1, by), y);
	else
		sum_signs(s, count, n, more, SETTLE_OVER, by, y);
}

static inline uint32_t settle_how(int how, const float_any *x, size_t n, float by, float_any *dst)
{
	size_t behind = (uintptr_t)dst % SETTLE_ALIGN, lead = behind ? (SETTLE_ALIGN - behind) / sizeof *dst : 0;
	int32_t most = 0;

	if (behind % sizeof *dst) /* dst is not aligned to 4 bytes, so no element is aligned for non-temporal stores */
		lead = n;
	for (size_t i = 0; i < n; i++) {
		if (i == lead)
			i += SETTLE(how, x + i, n - i, by, dst + i, &most);
		if (i < n) {
			float y = settled(how, x[i], by);
			int32_t a = (int32_t)(round_bits(y) & ROUND_ABS);

			dst[i] = y;
			most = a > most ? a : most;
		}
	}
	return (uint32_t)most;
}

static uint32_t settle(const float_any *x, size_t n, float by, float_any *dst)
{
	if (!(by > 0))
		return settle_how(SETTLE_AS_IS, x, n, by, dst);
	return has_inverse(by) ? settle_how(SETTLE_TIMES, x, n, round_div(1, by), dst)
			       : settle_how(SETTLE_OVER, x, n, by, dst);
}
