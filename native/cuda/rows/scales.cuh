/* rows/scales.cuh - compute the scales of rows. docs/spec/encoder.md, section 7. */
#ifndef CODEC_CUDA_ROWS_SCALES_CUH
#define CODEC_CUDA_ROWS_SCALES_CUH

#include "rows/rows.cuh"

/*
 * Return the larger of `most` and the magnitude of x, as bits of float32. A magnitude of `limit` or above is ignored.
 */
DEVICE uint32_t larger(uint32_t most, uint32_t x, uint32_t limit)
{
	uint32_t a = x & ROUND_ABS;

	return a < limit && a > most ? a : most;
}

/* Return larger(most, x, ~0u), except that a NaN may become another NaN. One float instruction compares magnitudes. */
DEVICE uint32_t larger_magnitude(uint32_t most, uint32_t x)
{
#ifdef __CUDA_ARCH__
	float y;

	asm("{.reg .f32 a;\n\tabs.f32 a, %2;\n\tmax.NaN.f32 %0, %1, a;}"
	    : "=f"(y)
	    : "f"(round_float(most)), "f"(round_float(x)));
	return round_bits(y);
#else
	return larger(most, x, ~0u);
#endif
}

/* Return the largest of `most` and the magnitudes of N values below `limit`, as larger() does. */
template <int N> DEVICE uint32_t largest_of(uint32_t most, const uint32_t *x, uint32_t limit)
{
	if (limit == ~0u)
		for (int k = 0; k < N; k++)
			most = larger_magnitude(most, x[k]);
	else
		for (int k = 0; k < N; k++)
			most = larger(most, x[k], limit);
	return most;
}

/*
 * Return the largest magnitude of n values, as bits of float32. Magnitudes of `limit` and above are ignored. Called by
 * one warp.
 */
DEVICE uint32_t largest(uint32_t dtype, const codec_source *source, uint64_t first, uint32_t n, uint32_t limit,
			uint32_t lane)
{
	const uint32_t AT_ONCE = 8; /* rows of 128 values whose loads are in flight together */
	uint32_t most = 0, i = 0;

	if (first % 4 == 0 && in_quads(dtype, source)) {
		for (; i + AT_ONCE * WIRE_ROW <= n; i += AT_ONCE * WIRE_ROW) {
			uint32_t x[4 * AT_ONCE];

			values_at_rows<AT_ONCE>(dtype, source, first + i + 4 * lane, x);
			most = largest_of<4 * AT_ONCE>(most, x, limit);
		}
		for (; i + WIRE_ROW <= n; i += WIRE_ROW) {
			uint32_t x[4];

			values_at_rows<1>(dtype, source, first + i + 4 * lane, x);
			most = largest_of<4>(most, x, limit);
		}
	}
	for (i += lane; i < n; i += 32)
		most = larger(most, round_bits(value_at(dtype, source, first + i)), limit);
	return warp_max(most);
}

/*
 * Kinds of sums: of magnitudes; of the magnitudes of positive and of negative values separately; of values and of
 * their squares.
 */
enum summing { SUM_ABS, SUM_BY_SIGN, SUM_SQUARES };

DEVICE summing summing_of(const codec_view *v)
{
	if (v->clip > 0 || (v->codec == CODEC_SIGN && v->variant == CODEC_SIGN_L2))
		return SUM_SQUARES;
	return v->codec == CODEC_SIGN && v->variant == CODEC_SIGN_TWO_MEAN ? SUM_BY_SIGN : SUM_ABS;
}

/* Running sums over the values of one lane. */
template <summing HOW> struct lane_sums {
	codec_row_sums out = {{0, 0}, 0, 0};
	double s = 0, t = 0;
	float a = 0, b = 0;
	uint32_t kept = 0;

	/*
	 * Add value 32 * k + lane of a run of 1,024 values; x is 0 if it does not exist (`there` is false). SIGNS: also
	 * collect the codes of SIGN for the 32 values of step k, one per lane, as a word: a bit is 1 if the value
	 * exists and its sign bit is 0. Lane k keeps the word in `kept`. Only k == lane is tested, so callers may
	 * subtract the same number from both.
	 */
	template <bool SIGNS> __device__ __forceinline__ void add(float x, bool there, uint32_t k, uint32_t lane)
	{
		uint32_t u = round_bits(x);
		float ax = round_float(u & ROUND_ABS);
		bool below = HOW == SUM_BY_SIGN && u > ROUND_ABS;

		out.max = round_bits(ax) > out.max ? round_bits(ax) : out.max;
		if (HOW == SUM_SQUARES) {
			s = round_add64(s, round_mul64((double)x, (double)x));
			t = round_add64(t, (double)x);
		} else {
			a = round_add(a, below ? 0.0f : ax);
			b = HOW == SUM_BY_SIGN ? round_add(b, below ? ax : 0.0f) : 0.0f;
		}
		out.negative += below;
		if (SIGNS) {
			uint32_t signs = __ballot_sync(FULL, there && u <= ROUND_ABS);

			kept = k == lane ? signs : kept;
		}
	}
};

template <summing HOW, bool SIGNS>
DEVICE codec_row_sums sums_how(uint32_t dtype, const codec_source *source, uint64_t first, uint32_t n, uint32_t *words,
			       uint32_t lane)
{
	const int AT_ONCE = HOW == SUM_ABS ? 16 : 8; /* number of values that a lane loads together */
	lane_sums<HOW> sums;
	uint32_t i = 0;

	for (; i + 32 * 32 <= n; i += 32 * 32) {
#pragma unroll 1
		for (uint32_t k = 0; k < 32; k += AT_ONCE) {
			float x[AT_ONCE];

			values_each_32<AT_ONCE>(dtype, source, first + i + 32 * k + lane, x);
			for (uint32_t l = 0; l < AT_ONCE; l++)
				sums.template add<SIGNS>(x[l], true, l, lane - k);
		}
		if (SIGNS && words)
			global(words)[i / 32 + lane] = sums.kept;
	}
#pragma unroll 1
	for (uint32_t k = 0; i + 32 * k < n; k++) {
		uint32_t at = i + 32 * k + lane;

		sums.template add<SIGNS>(at < n ? value_at(dtype, source, first + at) : 0, at < n, k, lane);
	}
	if (SIGNS && words && i + 32 * lane < n)
		global(words)[i / 32 + lane] = sums.kept;
	codec_row_sums out = sums.out;

	for (int by = 16; by; by /= 2) {
		sums.s = round_add64(sums.s, __shfl_down_sync(FULL, sums.s, by));
		sums.t = round_add64(sums.t, __shfl_down_sync(FULL, sums.t, by));
		sums.a = round_add(sums.a, __shfl_down_sync(FULL, sums.a, by));
		sums.b = round_add(sums.b, __shfl_down_sync(FULL, sums.b, by));
	}
	out.sum[0] = __shfl_sync(FULL, HOW == SUM_SQUARES ? sums.s : (double)sums.a, 0);
	out.sum[1] = __shfl_sync(FULL, HOW == SUM_SQUARES ? sums.t : (double)sums.b, 0);
	out.negative = warp_sum(out.negative);
	out.max = warp_max(out.max);
	return out;
}

/*
 * Return the sums of n values, at most WIRE_TREE, added in the order of encoder.md, section 7.2: each lane sums up its
 * values, then the 32 lanes' sums are added in a binary tree. SIGNS: also write the codes of SIGN to `words`, unless
 * NULL. Called by one warp.
 */
template <bool SIGNS>
DEVICE_CALL codec_row_sums sums_of(const codec_view *v, const codec_source *source, uint64_t first, uint32_t n,
				   uint32_t *words, uint32_t lane)
{
	switch (summing_of(v)) {
	case SUM_ABS: return sums_how<SUM_ABS, SIGNS>(v->dtype, source, first, n, words, lane);
	case SUM_BY_SIGN: return sums_how<SUM_BY_SIGN, SIGNS>(v->dtype, source, first, n, words, lane);
	default: return sums_how<SUM_SQUARES, SIGNS>(v->dtype, source, first, n, words, lane);
	}
}

/* Scale of a row, or the status if the row has NaN or Inf. below: see row_scale. */
struct scaled {
	codec_status status;
	float scale, below;
};

/*
 * SIGN: return the sums of a row of n > WIRE_TREE values, added in the order of scale_push and scale_total. Lane l
 * stores the sums of 2^l pieces of WIRE_TREE values, since an array in each lane would be in local memory.
 */
DEVICE_CALL codec_row_sums sums_of_pieces(const codec_view *v, const codec_source *source, uint64_t first, uint32_t n,
					  uint32_t *words, uint32_t lane)
{
	codec_row_sums all = {{0, 0}, 0, 0};
	double level[2] = {0, 0};
	uint32_t npieces = 0; /* number of pieces, less than 2^32 / WIRE_TREE */
	bool lowest = true;

	for (uint64_t i = 0; i < n; i += WIRE_TREE, npieces++) {
		uint32_t count = n - i < WIRE_TREE ? (uint32_t)(n - i) : WIRE_TREE;
		codec_row_sums some = sums_of<true>(v, source, first + i, count, words ? words + i / 32 : NULL, lane);

		for (int k = 0; k < 2; k++) {
			double x = some.sum[k];
			uint32_t l = 0;

			for (; npieces >> l & 1; l++)
				x = round_add64(__shfl_sync(FULL, level[k], (int)l), x);
			level[k] = l == lane ? x : level[k];
		}
		all.negative += some.negative;
		all.max = some.max > all.max ? some.max : all.max;
	}
	for (uint32_t l = 0; npieces >> l; l++) {
		if (!(npieces >> l & 1))
			continue;
		for (int k = 0; k < 2; k++) {
			double x = __shfl_sync(FULL, level[k], (int)l);

			all.sum[k] = lowest ? x : round_add64(x, all.sum[k]);
		}
		lowest = false;
	}
	return all;
}

/*
 * SIGN: compute the scales of a row of n values and store them, 4 or 8 bytes, at `to`; also write the row's codes to
 * `words`, unless NULL.
 */
DEVICE_CALL scaled put_sign_row(const codec_view *v, struct row_kind q, const codec_source *source, uint64_t first,
				uint32_t n, uint8_t *to, uint32_t *words, uint32_t lane)
{
	codec_row_sums sums = n <= WIRE_TREE ? sums_of<true>(v, source, first, n, words, lane)
					     : sums_of_pieces(v, source, first, n, words, lane);
	float scale[2];

	if (sums.max >= ROUND_INF)
		return {CODEC_NONFINITE, 0, 0};
	scale_sign(q, sums.sum, sums.negative, n, scale);
	if (lane < row_scale_nbytes(q))
		to[lane] = (uint8_t)(round_bits(lane < 4 ? scale[0] : scale[1]) >> 8 * (lane % 4));
	return {CODEC_OK, scale[0], round_sign_below(q.variant == CODEC_SIGN_TWO_MEAN ? scale[1] : scale[0])};
}

/* Compute a row's stored scale from its largest magnitude `max`. Not for SIGN, whose scales are computed from sums. */
DEVICE uint32_t scale_bits(struct row_kind q, const codec_view *v, const codec_row_part *part, uint32_t max)
{
	return q.scale_most              ? scale_byte(q, max, part->scale[0])
	       : q.codec == CODEC_FLOAT8 ? round_bits(scale_float8(q, max, v->scale))
					 : max;
}

/* Convert a row's stored scale, `bits`, to the scale for rounding. */
DEVICE scaled scale_of_bits(struct row_kind q, const codec_row_part *part, uint32_t bits)
{
	if (q.scale_most)
		return {CODEC_OK, scale_byte_value(q, bits, part->scale[0]), 0};
	return {CODEC_OK, round_float(bits), 0};
}

/* QUANTIZE with zero points: smallest and largest value of a row, as integers with the same order (round_ordered). */
struct extremes {
	int32_t low, high;
};

DEVICE extremes no_values()
{
	return {0x7fffffff, -0x7fffffff - 1};
}

DEVICE void extend(extremes *e, uint32_t x)
{
	const int32_t a = round_ordered(x);

	e->low = a < e->low ? a : e->low;
	e->high = a > e->high ? a : e->high;
}

/* Return the smallest and largest value over `lanes` neighbouring lanes; `lanes` is a power of two. */
DEVICE extremes extremes_of_lanes(extremes e, uint32_t lanes)
{
	for (uint32_t by = 1; by < lanes; by *= 2) {
		const int32_t low = __shfl_xor_sync(FULL, e.low, by), high = __shfl_xor_sync(FULL, e.high, by);

		e.low = low < e.low ? low : e.low;
		e.high = high > e.high ? high : e.high;
	}
	return e;
}

/* Return true if a row has NaN or Inf. */
DEVICE bool is_nonfinite(extremes e)
{
	return e.high >= (int32_t)ROUND_INF || e.low <= ~(int32_t)ROUND_INF;
}

/* QUANTIZE with zero points: return half a row's range and its midpoint, and the row's ends as stored bits. */
DEVICE row_ends ends_of(extremes e, uint32_t dtype)
{
	return scale_ends(round_float((uint32_t)round_ordered((uint32_t)e.low)),
			  round_float((uint32_t)round_ordered((uint32_t)e.high)), dtype);
}

/* Version of put_scale for QUANTIZE with zero points: store a row's smallest and largest value. */
DEVICE_CALL scaled put_ends(struct row_kind q, const codec_source *source, uint64_t first, uint32_t n, uint8_t *to,
			    uint32_t lane)
{
	extremes e = no_values();

	for (uint32_t i = lane; i < n; i += 32)
		extend(&e, round_bits(value_at(q.dtype, source, first + i)));
	e = extremes_of_lanes(e, 32);
	if (is_nonfinite(e))
		return {CODEC_NONFINITE, 0, 0};
	const row_ends ends = ends_of(e, q.dtype);

	if (lane < row_scale_nbytes(q))
		to[lane] = (uint8_t)(ends.stored >> 8 * lane);
	return {CODEC_OK, ends.half, ends.middle};
}

/*
 * Return the smallest magnitude, as bits of float32, that scales ignore: Inf if NaN and Inf are propagated; ~0: no
 * magnitude is ignored.
 */
DEVICE uint32_t limit_of(const codec_view *v)
{
	return v->options & CODEC_OPTION_PROPAGATE ? ROUND_INF : ~0u;
}

/*
 * Compute the scale of a row of n values and store it at `to`. Called by one warp. Inlined version of put_scale: in a
 * function that is not inlined, each load takes two more instructions to read its memory descriptor.
 */
template <int CODEC>
DEVICE scaled put_scale_here(const codec_view *v, struct row_kind q, const codec_row_part *part,
			     const codec_source *source, uint64_t first, uint32_t n, uint8_t *to, uint32_t lane)
{
	if (CODEC == CODEC_SIGN)
		return put_sign_row(v, q, source, first, n, to, NULL, lane);
	if (CODEC == QUANTIZE_AFFINE)
		return put_ends(q, source, first, n, to, lane);
	uint32_t max = largest(v->dtype, source, first, n, limit_of(v), lane);

	if (max >= ROUND_INF)
		return {CODEC_NONFINITE, 0, 0};
	uint32_t bits = scale_bits(q, v, part, max);

	if (lane < row_scale_nbytes(q))
		to[lane] = (uint8_t)(bits >> 8 * lane);
	return scale_of_bits(q, part, bits);
}

template <int CODEC>
DEVICE_CALL scaled put_scale(const codec_view *v, struct row_kind q, const codec_row_part *part,
			     const codec_source *source, uint64_t first, uint32_t n, uint8_t *to, uint32_t lane)
{
	return put_scale_here<CODEC>(v, q, part, source, first, n, to, lane);
}

/*
 * Compute and store the scales of a block's rows, from the row that begins at value `from` on. `warps` warps process
 * rows round-robin.
 */
template <int CODEC>
DEVICE codec_status put_scales(const codec_view *v, struct row_kind q, const row_place &p, const codec_source *source,
			       uint8_t *to, uint64_t from, uint32_t warp, uint32_t warps, uint32_t lane)
{
	uint32_t row = p.part->group_size;
	uint64_t each = row_scale_nbytes(q);

	for (uint64_t i = row ? from / row + warp : 0; row && i * row < p.m; i += warps) {
		uint64_t left = p.m - i * row;
		scaled s = put_scale<CODEC>(v, q, p.part, source, p.first + i * row, left < row ? (uint32_t)left : row,
					    to + each * i, lane);

		if (s.status != CODEC_OK)
			return s.status;
	}
	__syncwarp();
	return CODEC_OK;
}

#endif
