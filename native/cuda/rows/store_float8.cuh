/*
 * rows/store_float8.cuh - decode codes of float8, in whole rows of 128. This covers most tensors of float8.
 * docs/spec/format.md, section 8.
 */
#ifndef CODEC_CUDA_ROWS_STORE_FLOAT8_CUH
#define CODEC_CUDA_ROWS_STORE_FLOAT8_CUH

#include "rows/store.cuh"

/* Round four values to a dtype of 16 bits, and return their bits. */
DEVICE uint2 halves_of(uint32_t dtype, const float y[4])
{
	uint32_t u[4];

	for (uint32_t k = 0; k < 4; k++)
		u[k] = dtype == CODEC_BFLOAT16 ? round_to_bfloat16(round_bits(y[k]))
					       : round_to_float16(round_bits(y[k]));
	return {u[0] | u[1] << 16, u[2] | u[3] << 16};
}

/*
 * FLOAT8: dequantize and store N rows of 128 values that share a scale. quad: the lane's four codes of each row. to:
 * destination of the first row. Return false, without storing anything, if a code is NaN or Inf.
 */
template <bool E4M3, int N>
DEVICE bool store_float8(const uint32_t quad[N], float scale, float inverse, uint8_t *to, uint32_t dtype, uint32_t lane)
{
	uint32_t special = 0;

	for (uint32_t k = 0; k < N; k++)
		special |= any_special(E4M3, quad[k]);
	if (special)
		return false;
	for (uint32_t k = 0; k < N; k++) {
		float y[4];

		float8_ratios(E4M3, quad[k], y);
		for (uint32_t l = 0; l < 4; l++)
			y[l] = divide_float8(y[l], scale, inverse);
		if (dtype == CODEC_FLOAT32)
			global((uint4 *)to)[32 * k + lane] = {round_bits(y[0]), round_bits(y[1]), round_bits(y[2]),
							      round_bits(y[3])};
		else
			global((uint2 *)to)[32 * k + lane] = halves_of(dtype, y);
	}
	return true;
}

/* Scale of a row of float8. inverse: the factor by which codes are multiplied (MX), or float8_inverse of the scale. */
struct opened_scale {
	float scale, inverse;
};

/*
 * Read the scale of row i. Set *bad if the scale is invalid. The result's inverse is 0 if the row needs walk_code,
 * because the largest codes may exceed the dtype's range or float8_inverse is 0.
 */
template <bool MX, bool E4M3>
DEVICE opened_scale open_small(struct row_kind q, const uint8_t *scales, uint32_t i, uint32_t dtype, uint32_t *bad)
{
	if (MX) { /* with scales above 2^7 (E4M3) or 1 (E5M2) the largest codes exceed float16 */
		const uint32_t stored = scales[i], most = dtype == CODEC_FLOAT16 ? (E4M3 ? 134u : 127u) : q.scale_most;

		*bad |= stored > q.scale_most;
		return {0, stored > most ? 0 : round_float(stored ? stored << 23 : 1u << 22)};
	}
	const uint32_t stored = ((const uint32_t *)scales)[i];

	*bad |= !stored || stored >= ROUND_INF;
	return {round_float(stored), float8_inverse(round_float(stored))};
}

/* Dequantize and store the lane's four values of a row of 128. quad: their codes. */
template <bool MX, bool E4M3>
DEVICE void store_small_quad(uint32_t quad, const opened_scale &s, uint8_t *to, uint32_t dtype)
{
	float y[4];

	float8_ratios(E4M3, quad, y);
	for (uint32_t k = 0; k < 4; k++)
		y[k] = MX ? round_mul(y[k], s.inverse) : divide_float8(y[k], s.scale, s.inverse);
	if (dtype == CODEC_FLOAT32)
		*(uint4 *)to = {round_bits(y[0]), round_bits(y[1]), round_bits(y[2]), round_bits(y[3])};
	else if (MX)
		*(uint2 *)to = {rounded_pair(dtype, y[0], y[1]), rounded_pair(dtype, y[2], y[3])};
	else
		*(uint2 *)to = halves_of(dtype, y);
}

/*
 * Decode and store 1,024 values at a time, as 8 rows of 128, of a block of m values. They have 1,024 >> row_log2
 * scales, at most 32: each lane reads one scale, and lanes exchange them. Return the number of rows of 128 decoded,
 * fewer than all if a scale needs walk_code or if *bad is set.
 */
template <bool MX, bool E4M3>
DEVICE uint32_t store_small_of(struct row_kind q, const row_walk &w, uint32_t m, uint8_t *to, uint32_t dtype,
			       uint32_t *bad, uint32_t lane)
{
	const uint32_t AT_ONCE = 8, row_log2 = MX ? 5 : 31 - (uint32_t)__clz((int)w.row),
		       rows = AT_ONCE * WIRE_ROW >> row_log2, size = dtype == CODEC_FLOAT32 ? 4 : 2;
	const uint8_t *scales = global(w.scales);
	const uint32_t *codes = global((const uint32_t *)w.codes) + lane;
	uint32_t r = 0;

	to = global(to) + size * 4 * lane;
	for (; WIRE_ROW * (r + AT_ONCE) <= m; r += AT_ONCE) {
		const opened_scale own =
			open_small<MX, E4M3>(q, scales, (WIRE_ROW * r >> row_log2) + lane % rows, dtype, bad);
		uint32_t quad[AT_ONCE];
		bool special = *bad || !(own.inverse > 0);

		for (uint32_t k = 0; k < AT_ONCE; k++)
			quad[k] = codes[32 * (r + k)];
		/* prefetch the codes of the rows after the next ones */
		if (WIRE_ROW * (r + 3 * AT_ONCE) <= m && lane < AT_ONCE)
			prefetch(w.codes + WIRE_ROW * (r + 2 * AT_ONCE) + LINE_NBYTES * lane);
		for (uint32_t k = 0; k < AT_ONCE; k++)
			special |= any_special(E4M3, quad[k]);
		if (__any_sync(FULL, special))
			break;
#pragma unroll
		for (uint32_t k = 0; k < AT_ONCE; k++) {
			const int from = (int)((WIRE_ROW * k + 4 * lane) >> row_log2);
			const opened_scale s = {MX ? 0 : __shfl_sync(FULL, own.scale, from),
						__shfl_sync(FULL, own.inverse, from)};

			if (dtype == CODEC_FLOAT32)
				store_small_quad<MX, E4M3>(quad[k], s, to + 4 * WIRE_ROW * (r + k), CODEC_FLOAT32);
			else
				store_small_quad<MX, E4M3>(quad[k], s, to + 2 * WIRE_ROW * (r + k), dtype);
		}
	}
	return r;
}

/*
 * If rows of float8 have 32 (MXFP8) or 64 to 512 values, decode and store as many whole rows of 128 values, of a block
 * of m values, as the loops support. to: a multiple of the size of four values; NULL: only check. Return the number of
 * rows of 128 decoded. Set *bad if a scale is invalid.
 */
DEVICE uint32_t store_small_rows(struct row_kind q, const row_walk &w, uint32_t m, uint8_t *to, uint32_t dtype,
				 uint32_t *bad, uint32_t lane)
{
	if (q.scale_most && !to) { /* all codes are valid, so checking a frame reads only scales */
		for (uint32_t i = lane; i < m / WIRE_ROW * 4; i += 32)
			*bad |= w.scales[i] > q.scale_most;
		return m / WIRE_ROW;
	}
	if (!to || (uint64_t)w.codes % 4)
		return 0;
	if (q.scale_most)
		return q.e5m2 ? store_small_of<true, false>(q, w, m, to, dtype, bad, lane)
			      : store_small_of<true, true>(q, w, m, to, dtype, bad, lane);
	if ((w.row != 64 && w.row != 128 && w.row != 256 && w.row != 512) || (uint64_t)w.scales % 4)
		return 0;
	return q.e5m2 ? store_small_of<false, false>(q, w, m, to, dtype, bad, lane)
		      : store_small_of<false, true>(q, w, m, to, dtype, bad, lane);
}

#endif
