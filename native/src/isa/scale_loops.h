/*
 * scale_loops.h - loops without intrinsics that convert values to float32 and back, and compute maxima, sums and signs
 * of rows. Included by row_loops.h.
 */
#include "kernels.h"

/* Defaults of vectorized parts: see row_loops.h. */
#ifndef ABS_MAX
#define FROM_BFLOAT16(src, n, x) 0
#define TO_BFLOAT16(x, n, dst) 0
#define FROM_FLOAT16(src, n, x) 0
#define TO_FLOAT16(x, n, dst) 0
#define ABS_MAX(x, n, most) 0
#define EXTREMES(x, n, low, high) 0
#define ABS_MAX_OF_32(x, n, max) 0
#define ROW_SUMS(by_sign, x, n, bits, sums) 0
#endif

static void to_float_bfloat16(const void *src, size_t n, float *restrict x)
{
	for (size_t i = FROM_BFLOAT16(src, n, x); i < n; i++)
		x[i] = round_float(round_from_bfloat16(native16(src, i)));
}

static void from_float_bfloat16(const float *x, size_t n, void *dst)
{
	char *restrict d = dst;

	for (size_t i = TO_BFLOAT16(x, n, dst); i < n; i++) {
		uint16_t y = round_to_bfloat16(round_bits(x[i]));

		memcpy(d + 2 * i, &y, 2);
	}
}

static void to_float_float16(const void *src, size_t n, float *restrict x)
{
	for (size_t i = FROM_FLOAT16(src, n, x); i < n; i++)
		x[i] = round_float(round_from_float16(native16(src, i)));
}

static void from_float_float16(const float *x, size_t n, void *dst)
{
	char *restrict d = dst;

	for (size_t i = TO_FLOAT16(x, n, dst); i < n; i++) {
		uint16_t y = round_to_float16(round_bits(x[i]));

		memcpy(d + 2 * i, &y, 2);
	}
}

static void abs_max(const float_any *x, size_t n, size_t row, uint32_t limit, uint32_t *max)
{
	size_t done = row == 32 && limit > ROUND_ABS ? ABS_MAX_OF_32(x, n, max) : 0;

	max += done / row;
	for (size_t at = done; at < n; at += row) {
		size_t m = n - at < row ? n - at : row;
		int32_t most = 0; /* signed, because SSE2 has no unsigned comparison */

		for (size_t i = limit > ROUND_ABS ? ABS_MAX(x + at, m, &most) : 0; i < m; i++) {
			int32_t a = (int32_t)(round_bits(x[at + i]) & ROUND_ABS);

			a = (uint32_t)a < limit ? a : 0;
			most = a > most ? a : most;
		}
		*max++ = (uint32_t)most;
	}
}

static int extremes(const float_any *x, size_t n, size_t row, float *low, float *high)
{
	const int32_t inf = (int32_t)ROUND_INF;
	int nonfinite = 0;

	for (size_t at = 0; at < n; at += row) {
		size_t m = n - at < row ? n - at : row;
		int32_t least = INT32_MAX, most = INT32_MIN;

		for (size_t i = EXTREMES(x + at, m, &least, &most); i < m; i++) {
			int32_t a = round_ordered(round_bits(x[at + i]));

			least = a < least ? a : least;
			most = a > most ? a : most;
		}
		nonfinite |= most >= inf || least <= ~inf;
		*low++ = round_float((uint32_t)round_ordered((uint32_t)least));
		*high++ = round_float((uint32_t)round_ordered((uint32_t)most));
	}
	return nonfinite;
}

static inline void add_squares(const float_any *x, size_t n, struct row_lanes *sums)
{
	for (size_t l = 0; l < n; l++) {
		int32_t magnitude = (int32_t)(round_bits(x[l]) & ROUND_ABS);

		sums->max[l] = magnitude > sums->max[l] ? magnitude : sums->max[l];
		sums->s[l] = round_add64(sums->s[l], round_mul64((double)x[l], (double)x[l]));
		sums->t[l] = round_add64(sums->t[l], (double)x[l]);
	}
}

static inline void add_magnitudes(int by_sign, const float_any *x, size_t n, struct row_lanes *sums)
{
	for (size_t l = 0; l < n; l++) {
		uint32_t u = round_bits(x[l]), minus = by_sign ? 0 - (u >> 31) : 0;
		int32_t magnitude = (int32_t)(u & ROUND_ABS);

		sums->max[l] = magnitude > sums->max[l] ? magnitude : sums->max[l];
		sums->a[l] = round_add(sums->a[l], round_float(u & ROUND_ABS & ~minus));
		sums->b[l] = round_add(sums->b[l], round_float(u & ROUND_ABS & minus));
		sums->negative += minus & 1;
	}
}

static inline void clear_lanes(int kind, struct row_lanes *sums)
{
	if (kind == ROW_SUM_SQUARES) {
		memset(sums, 0, sizeof *sums);
		return;
	}
	for (int l = 0; l < WIRE_LANES; l++) { /* a loop is faster than memset for short rows */
		sums->a[l] = sums->b[l] = 0;
		sums->max[l] = 0;
	}
	sums->negative = 0;
}

#ifndef FOLD
#define FOLD scale_fold
#endif

static void row_fold(int kind, struct row_lanes *l, struct row_sums *out)
{
	int32_t max = 0;

	for (int i = 0; i < WIRE_LANES; i++)
		max = l->max[i] > max ? l->max[i] : max;
	out->max = (uint32_t)max;
	out->negative = l->negative;
	switch (kind) {
	case ROW_SUM_SQUARES:
		out->sum[0] = scale_fold64(l->s);
		out->sum[1] = scale_fold64(l->t);
		break;
	case ROW_SUM_SIGNS:
		out->sum[0] = (double)FOLD(l->a);
		out->sum[1] = (double)FOLD(l->b);
		break;
	default: out->sum[0] = (double)FOLD(l->a); out->sum[1] = 0;
	}
}

#ifndef SIGN_BITS
#define SIGN_BITS(x, n, bits) 0
#endif

/* Set bit i % 8 of byte i / 8 if the sign bit of x[i] is 0. Bits after the last value are 0. */
static void sign_bits(const float_any *x, size_t n, uint8_t *bits)
{
	for (size_t i = SIGN_BITS(x, n, bits); i < n; i += 8) {
		size_t m = n - i < 8 ? n - i : 8;
		uint32_t byte = 0;

		for (size_t l = 0; l < m; l++)
			byte |= (uint32_t)(~round_bits(x[i + l]) >> 31) << l;
		bits[i / 8] = (uint8_t)byte;
	}
}

/* Add x[i] to the sums of lane i % 32. n is a multiple of 32, except in the last call of a row. */
static void row_sums(int kind, const float_any *x, size_t n, int first, uint8_t *bits, struct row_lanes *sums)
{
	size_t i = 0, signs = 0;

	if (first)
		clear_lanes(kind, sums);
	switch (kind) {
	case ROW_SUM_ABS:
		for (i = signs = ROW_SUMS(0, x, n, bits, sums); i + 32 <= n; i += 32)
			add_magnitudes(0, x + i, 32, sums);
		add_magnitudes(0, x + i, n - i, sums);
		break;
	case ROW_SUM_SIGNS:
		for (i = signs = ROW_SUMS(1, x, n, bits, sums); i + 32 <= n; i += 32)
			add_magnitudes(1, x + i, 32, sums);
		add_magnitudes(1, x + i, n - i, sums);
		break;
	default:
		for (; i + 32 <= n; i += 32)
			add_squares(x + i, 32, sums);
		add_squares(x + i, n - i, sums);
	}
	if (bits)
		sign_bits(x + signs, n - signs, bits + signs / 8);
}
