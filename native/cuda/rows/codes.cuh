/*
 * rows/codes.cuh - round values to codes, in groups of 8 values that share a Philox block of random bits.
 * docs/spec/encoder.md, section 7.
 */
#ifndef CODEC_CUDA_ROWS_CODES_CUH
#define CODEC_CUDA_ROWS_CODES_CUH

#include "rows/scales.cuh"

#define WARP_STEP (8 * 32) /* number of values that a warp encodes in one step, 8 per lane */
#define TRITS_CHUNK (5 * WARP_STEP)

/*
 * Scale of a row in the forms that rounding needs. scale: the row's scale; with zero points, half its range. below:
 * decoded value of negative numbers (SIGN); midpoint of the row's range (QUANTIZE with zero points). over: reciprocal
 * of the scale, for codecs that multiply instead of dividing.
 */
struct row_scale {
	float scale, below;
	struct over over;
};

/* Convert a row's scale to a row_scale. */
DEVICE row_scale open_scale(struct row_kind q, float scale, float below)
{
	row_scale s = {scale, below, {1, 0}};

	if ((q.codec == CODEC_QUANTIZE || q.codec == CODEC_TERNARY) && scale > 0)
		s.over = round_over(scale, q.codec == CODEC_TERNARY ? 65536 : 1);
	return s;
}

/* Return the row_scale of a part whose rows have no scales. */
DEVICE row_scale open_part(struct row_kind q, const codec_row_part *part)
{
	return open_scale(q, part->scale[0], round_sign_below(part->scale[q.variant == CODEC_SIGN_TWO_MEAN]));
}

/*
 * Parameters for encoding the values of a block. In functions of this file, the template parameter CODEC is the view's
 * codec.
 */
struct row_job {
	const codec_view *v;
	struct row_kind q;
	row_place p;
	codec_source source;
	struct philox key;
	bool random;
};

template <int CODEC> DEVICE row_job row_job_of(const codec_view *v, const row_place &p, const codec_source *source)
{
	const struct row_kind q = kind_for<CODEC>(kind_of(v));

	return {v,
		q,
		p,
		*source,
		{v->seed, (uint32_t)v->stream, (uint32_t)(v->stream >> 32)},
		q.codec == CODEC_TERNARY || (v->options & CODEC_OPTION_STOCHASTIC) != 0};
}

/* Return a copy of r in which the fields that CODEC determines are compile-time constants. */
template <int CODEC> DEVICE row_job copy_of(const row_job &r)
{
	return {r.v, kind_for<CODEC>(r.q), r.p, r.source, r.key, r.random};
}

/*
 * Return the code of a value. x: bits of the value, as float32. h: 16 random bits. TERNARY: return TERNARY_TIE if more
 * random bits must decide.
 */
template <int CODEC> DEVICE uint32_t code_of(struct row_kind q, bool random, uint32_t x, const row_scale &s, uint32_t h)
{
	const bool e4m3 = !q.e5m2;

	if (CODEC == CODEC_SIGN)
		return x <= ROUND_ABS;
	if (CODEC == CODEC_TERNARY)
		return s.scale > 0 ? round_ternary_code(x, round_bits(s.scale), s.over, h) : 0;
	if (CODEC == CODEC_FLOAT8)
		return round_float8_code(x, s.scale, q.max, e4m3 ? 3 : 2, e4m3 ? 7 : 15, random, h);
	if (CODEC == CODEC_FLOAT4)
		return round_float4_code(x, s.scale, random, h);
	if (CODEC == QUANTIZE_AFFINE)
		return s.scale > 0 ? round_affine_code(round_float(x), q.levels, s.below, s.over, h) : 0;
	return s.scale > 0 ? round_level_code(x, q.odd, q.levels, s.over, h) : round_level_zero(q.odd, q.levels);
}

/* Set the random bits to one half (0x8000), which makes rounding deterministic. */
DEVICE void no_draws(uint32_t draws[4])
{
	for (int k = 0; k < 4; k++)
		draws[k] = 0x80008000;
}

/*
 * TERNARY: replace each code that is TERNARY_TIE by the code that the value's second 16 random bits decide. i: index in
 * the tensor of the first of four values. x: bits of the values.
 */
DEVICE_CALL uint32_t break_ties(struct philox key, struct over over, uint64_t i, uint32_t codes, uint4 x)
{
	const uint32_t bits[4] = {x.x, x.y, x.z, x.w};

	for (int k = 0; k < 4; k++)
		if ((codes >> 8 * k & 255) == TERNARY_TIE) {
			uint32_t code = round_ternary_settled(bits[k], over, philox_half(key, i + k, 1));

			codes ^= (TERNARY_TIE ^ code) << 8 * k;
		}
	return codes;
}

/* Return true if one of four values is NaN or Inf. x: bits of the values. */
DEVICE bool any_nonfinite(const uint32_t x[4])
{
	uint32_t most = __vimax3_u32(x[0] & ROUND_ABS, x[1] & ROUND_ABS, x[2] & ROUND_ABS);

	return __vimax3_u32(most, x[3] & ROUND_ABS, 0) >= ROUND_INF;
}

#if __CUDA_ARCH__ >= 890 /* GPUs that convert to FLOAT8 in hardware */
/* Return round_float8_code of four finite values, rounded to nearest, one code per byte. */
DEVICE uint32_t convert_to_float8(bool e4m3, const uint32_t x[4], float scale)
{
	uint16_t low, high;
	float y[4];

	for (int k = 0; k < 4; k++)
		y[k] = round_mul(round_float(x[k]), scale);
	if (e4m3)
		asm("cvt.rn.satfinite.e4m3x2.f32 %0, %3, %2;\n\tcvt.rn.satfinite.e4m3x2.f32 %1, %5, %4;"
		    : "=h"(low), "=h"(high)
		    : "f"(y[0]), "f"(y[1]), "f"(y[2]), "f"(y[3]));
	else
		asm("cvt.rn.satfinite.e5m2x2.f32 %0, %3, %2;\n\tcvt.rn.satfinite.e5m2x2.f32 %1, %5, %4;"
		    : "=h"(low), "=h"(high)
		    : "f"(y[0]), "f"(y[1]), "f"(y[2]), "f"(y[3]));
	return low | (uint32_t)high << 16;
}
#endif

/*
 * Return the codes of four values, one per byte. i: index in the tensor of the first value. draws: 16 random bits for
 * each of the first two values; more: for each of the last two.
 */
template <int CODEC>
DEVICE uint32_t code_four(const row_job &r, bool random, uint64_t i, const uint32_t x[4], const row_scale &s,
			  uint32_t draws, uint32_t more)
{
	uint32_t codes = 0;

#if __CUDA_ARCH__ >= 890
	/*
	 * convert_to_float8 requires finite values; without CODEC_OPTION_PROPAGATE, a tensor with NaN or Inf is
	 * rejected anyway
	 */
	if (CODEC == CODEC_FLOAT8 && !random && !(r.v->options & CODEC_OPTION_PROPAGATE && any_nonfinite(x)))
		return convert_to_float8(!r.q.e5m2, x, s.scale);
#endif
	for (int k = 0; k < 4; k++) {
		uint32_t h = (k < 2 ? draws : more) >> 16 * (k % 2) & 0xffff;

		codes |= code_of<CODEC>(r.q, random, x[k], s, h) << 8 * k;
	}
	if (CODEC == CODEC_TERNARY && (codes & codes >> 1 & ONES))
		codes = break_ties(r.key, s.over, i, codes, {x[0], x[1], x[2], x[3]});
	return codes;
}

/*
 * Write the residuals (value - dequantized code) of n <= 4 values of one row. ratio: table of code_ratio for all
 * codes.
 */
template <int CODEC>
DEVICE_CALL void put_residual(float *residual, struct row_kind q, uint32_t n, uint4 x, uint32_t codes, row_scale s,
			      const float *ratio)
{
	const uint32_t bits[4] = {x.x, x.y, x.z, x.w}, dtype = q.dtype;
	uint64_t left[4];

	for (uint32_t k = 0; k < 4; k++) {
		uint32_t code = codes >> 8 * k & 255;
		float y = CODEC == CODEC_SIGN ? (code ? s.scale : s.below)
					      : dequantize<CODEC>(q, shared(ratio)[code], s.scale, s.below);

		y = float_of(dtype, bits_of_float(dtype, y));
		left[k] = round_bits(round_minus(round_float(bits[k]), y));
	}
	store_quad<4>((uint8_t *)residual, n, left);
}

/* Pack 8 codes, given as one per byte, to q.bits bits each. */
DEVICE uint64_t pack_group(struct row_kind q, uint32_t low, uint32_t high)
{
	uint64_t codes = low | (uint64_t)high << 32;

	return q.bits && q.bits < 8 ? bits_squeeze(codes, q.bits) : codes;
}

/* Store the first n <= 8 bytes of x. If n is 2, 4 or 8 and `to` is aligned, one store is enough. */
DEVICE void put_bytes(uint8_t *to, uint64_t x, uint32_t n)
{
	if (n == 8 && (uint64_t)to % 8 == 0)
		*(uint64_t *)to = x;
	else if (n == 4 && (uint64_t)to % 4 == 0)
		*(uint32_t *)to = (uint32_t)x;
	else if (n == 2 && (uint64_t)to % 2 == 0)
		*(uint16_t *)to = (uint16_t)x;
	else
		for (uint32_t k = 0; k < n; k++, x >>= 8)
			to[k] = (uint8_t)x;
}

/* TERNARY: pack TRITS_CHUNK codes, five per byte. Each lane writes 8 bytes. */
DEVICE_CALL void pack_trits(const uint8_t *codes, uint8_t *to, uint32_t lane)
{
	uint64_t packed = 0;

	__syncwarp();
	codes += 40 * lane;
	for (int k = 0; k < 8; k++, codes += 5)
		packed |= (uint64_t)bits_trits(codes[0], codes[1], codes[2], codes[3], codes[4]) << 8 * k;
	put_bytes(to + 8 * lane, packed, 8);
	__syncwarp();
}

/*
 * Compute the codes of 8 values x of one row, one per byte. e: index in the tensor of the first value, a multiple of 8.
 */
template <int CODEC>
DEVICE void code_group(const row_job &r, uint64_t e, const uint32_t x[8], const row_scale &s, uint32_t codes[2])
{
	uint32_t draws[4];

	no_draws(draws);
	if (r.random)
		philox_block(r.key, e / 8, 0, draws);
	/*
	 * Deterministic and stochastic rounding are compiled separately, since the choice is constant for a tensor.
	 * Some codecs support only one of them.
	 */
	if (CODEC == CODEC_TERNARY || is_quantize(CODEC) || !r.random)
		for (int k = 0; k < 2; k++)
			codes[k] = code_four<CODEC>(r, CODEC == CODEC_TERNARY, e + 4 * k, x + 4 * k, s, draws[2 * k],
						    draws[2 * k + 1]);
	else
		for (int k = 0; k < 2; k++)
			codes[k] = code_four<CODEC>(r, true, e + 4 * k, x + 4 * k, s, draws[2 * k], draws[2 * k + 1]);
}

#endif
