/*
 * rows/rows.cuh - codes, scales and values of the row codecs: sign, ternary, float8, float4 and quantize. format.md,
 * section 8.
 *
 * Values of a row share a scale. All rows of a part have the same length, group_size values; group_size 0: all values
 * of the part share a scale.
 */
#ifndef CODEC_CUDA_ROWS_ROWS_CUH
#define CODEC_CUDA_ROWS_ROWS_CUH

#include "exact/scales.h"
#include "coder/plane.cuh"
#include "common/checksum.cuh"
#include "common/values.cuh"

/* Position of a block: its part, the index of its first value in the tensor, and its number of values. */
struct row_place {
	const codec_row_part *part;
	uint64_t first;
	uint32_t m;
};

DEVICE struct row_kind kind_of(const codec_view *v)
{
	return row_kind_of(v->codec, v->variant, v->options, v->bits, v->dtype);
}

/*
 * Value of the template parameter CODEC for kernels that encode or add up QUANTIZE with zero points, which are
 * compiled separately. For all other frames, and in decode_rows, CODEC is the frame's codec.
 */
#define QUANTIZE_AFFINE (CODEC_QUANTIZE + 16)

constexpr bool is_quantize(int codec)
{
	return codec == CODEC_QUANTIZE || codec == QUANTIZE_AFFINE;
}

/* Return a copy of q in which the fields that CODEC determines are compile-time constants. Not used by decode_rows. */
template <int CODEC> DEVICE struct row_kind kind_for(struct row_kind q)
{
	q.codec = is_quantize(CODEC) ? CODEC_QUANTIZE : CODEC;
	q.affine = CODEC == QUANTIZE_AFFINE;
	return q;
}

/* Return true if codes are entropy-coded. The result is a compile-time constant for most codecs. */
template <int CODEC> DEVICE bool is_entropy_coded(struct row_kind q)
{
	return (CODEC == CODEC_TERNARY || CODEC == CODEC_FLOAT8) && q.entropy;
}

static __device__ row_place row_place_of(const job *j, struct row_kind q, uint64_t b)
{
	const codec_row_part *part =
		part_at(row_parts(&j->v, j->memory), j->v.row_parts.count, &codec_row_part::first_block, b);

	b -= part->first_block;
	return {part, part->start + b * row_block(q, part->group_size),
		(uint32_t)row_block_n(q, part->group_size, part->count, b)};
}

/*
 * Read the scale of a row, stored at p, into *scale. SIGN: set *scale and *below to the decoded values of positive and
 * of negative numbers. QUANTIZE with zero points: set them to half the row's range and its midpoint. Return false if
 * the scale is invalid.
 */
DEVICE bool read_scale(struct row_kind q, const codec_row_part *part, const uint8_t *p, float *scale, float *below)
{
	uint32_t u = 0, w = 0;

	if (q.scale_most) {
		*scale = scale_byte_value(q, *p, part->scale[0]);
		return *p <= q.scale_most && round_bits(*scale) < ROUND_INF;
	}
	if (q.affine) {
		struct row_ends ends;
		const uint64_t high = q.dtype == CODEC_FLOAT32 ? load32(p + 4) : 0;
		const bool valid = scale_open_ends(load32(p) | high << 32, q.dtype, &ends);

		*scale = ends.half;
		*below = ends.middle;
		return valid;
	}
	u = w = load32(p);
	if (q.codec == CODEC_SIGN && q.variant == CODEC_SIGN_TWO_MEAN)
		w = load32(p + 4);
	*scale = round_float(u);
	*below = round_sign_below(round_float(w));
	return u < ROUND_INF && w < ROUND_INF && (u || q.codec != CODEC_FLOAT8);
}

/* Read n codes of TERNARY, packed five per byte, from code i on. Returns one code per byte. */
DEVICE_CALL uint32_t read_trits(const uint8_t *codes, uint32_t i, uint32_t n)
{
	uint32_t quad = 0;

	for (uint32_t k = 0; k < n; k++) {
		uint32_t byte = codes[(i + k) / 5];

		for (uint32_t after = 4 - (i + k) % 5; after; after--)
			byte = bits_third(byte);
		quad |= (byte - 3 * bits_third(byte)) << 8 * k;
	}
	return quad;
}

/* Read n codes of any width `bits`, from code i on. Return one code per byte. */
DEVICE_CALL uint32_t read_odd_bits(const uint8_t *codes, uint32_t bits, uint32_t i, uint32_t n)
{
	/* i is a multiple of 4, so `bit` is bit 0 or 4 of a byte, and four codes lie within four bytes */
	uint64_t bit = (uint64_t)i * bits;
	uint32_t at = (uint32_t)bit % 8, x = load_bytes(codes + bit / 8, (at + n * bits + 7) / 8);

	return keep_bytes((uint32_t)bits_spread(x >> at & ((1ull << 4 * bits) - 1), (int)bits), n);
}

/* Return the four nibbles of a 16-bit number, one per byte. */
DEVICE uint32_t spread_nibbles(uint32_t x)
{
	x = (x | x << 8) & 0x00ff00ff;
	return (x | x << 4) & 0x0f0f0f0f;
}

/* Read n <= 4 codes from code i on. Returns one code per byte. i is a multiple of 4. codes: any address. */
template <int CODEC> DEVICE uint32_t read_codes(struct row_kind q, const uint8_t *codes, uint32_t i, uint32_t n)
{
	const bool any = is_quantize(CODEC);

	codes = global(codes);
	if (CODEC == CODEC_FLOAT8 || (any && q.bits == 8))
		return load_bytes(codes + i, n);
	if (CODEC == CODEC_FLOAT4 || (any && q.bits == 4)) {
		codes += i / 2;
		return keep_bytes(spread_nibbles(codes[0] | (n > 2 ? codes[1] << 8 : 0)), n);
	}
	if (CODEC == CODEC_SIGN || (any && q.bits == 1))
		return keep_bytes(((codes[i / 8] >> i % 8 & 15) * 0x204081) & 0x01010101, n);
	if (q.bits == 2) {
		uint32_t quad = codes[i / 4];

		quad = (quad | quad << 12) & 0x000f000f;
		return keep_bytes((quad | quad << 6) & 0x03030303, n);
	}
	return any ? read_odd_bits(codes, q.bits, i, n) : read_trits(codes, i, n);
}

/* Check that unused bits or digits of the last byte of codes are 0. Called by one lane. */
DEVICE bool allowed_end(struct row_kind q, const uint8_t *codes, uint64_t nbytes, uint64_t m)
{
	uint32_t last = codes[nbytes - 1], missing = (uint32_t)(5 * nbytes - m);

	if (q.bits)
		return m * q.bits % 8 == 0 || last >> m * q.bits % 8 == 0;
	for (; missing; missing--, last = bits_third(last))
		if (last != 3 * bits_third(last))
			return false;
	return true;
}

/* Return the dequantized value of `code` before scaling; NaN if the code is invalid. */
template <int CODEC> DEVICE float code_ratio(struct row_kind q, uint32_t code)
{
	const float none = round_float(0x7fc00000);
	uint32_t a = code & 127;

	if (CODEC == CODEC_TERNARY)
		return code > 2 ? none : round_ternary_ratio(code);
	if (CODEC == CODEC_FLOAT8) {
		bool e4m3 = !q.e5m2;
		uint32_t u = a > (e4m3 ? 0x7e : 0x7b) ? round_bits(none)
			     : e4m3                   ? round_small_value(a, 3, 7)
						      : round_small_value(a, 2, 15);

		return round_float(u | (code & 128) << 24);
	}
	if (CODEC == CODEC_FLOAT4)
		return round_float4_ratio(code);
	return code > (q.odd ? 2u * q.levels : q.levels)
		       ? none
		       : round_div((float)round_level_of(code, q.odd, q.levels), (float)q.levels);
}

/*
 * Return the dequantized value of a code. ratio: the code's value before scaling (code_ratio). below: midpoint of the
 * row's range (QUANTIZE with zero points).
 */
template <int CODEC> DEVICE float dequantize(struct row_kind q, float ratio, float scale, float below)
{
	if (CODEC == CODEC_FLOAT8) {
		uint32_t u = round_bits(ratio), a = u & ROUND_ABS, v = round_bits(round_div(round_float(a), scale));

		v = v < ROUND_MAX ? v : ROUND_MAX;
		return round_float((a > ROUND_INF ? a : v) | (u & ~ROUND_ABS));
	}
	if (is_quantize(CODEC) && q.affine)
		return round_affine(ratio, scale, below);
	if (CODEC == CODEC_QUANTIZE)
		return scale > 0 ? round_mul(scale, ratio) : 0.0f;
	return round_scaled(ratio, scale);
}

/*
 * FLOAT8: return the reciprocal of a scale, for divide_float8; 0 if a quotient or its error could exceed the range of
 * float32.
 */
DEVICE float float8_inverse(float scale)
{
	return scale > 0x1p-100f && scale < 0x1p100f ? round_div(1, scale) : 0;
}

/* Return true if one of four FLOAT8 codes, given as a word, is NaN, or Inf of E5M2. */
DEVICE bool any_special(bool e4m3, uint32_t quad)
{
	return ((quad & 0x7f7f7f7f) + (e4m3 ? 1 : 4) * ONES) & 0x80808080;
}

/* Compute the values of four finite FLOAT8 codes, given as a word, before scaling. */
DEVICE void float8_ratios(bool e4m3, uint32_t quad, float y[4])
{
#if __CUDA_ARCH__ >= 890
	uint32_t two[2];

	for (uint32_t h = 0; h < 2; h++) {
		uint16_t codes = (uint16_t)(quad >> 16 * h), low, high;

		if (e4m3)
			asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(two[h]) : "h"(codes));
		else
			asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(two[h]) : "h"(codes));
		low = (uint16_t)two[h], high = (uint16_t)(two[h] >> 16);
		asm("cvt.f32.f16 %0, %1;" : "=f"(y[2 * h]) : "h"(low));
		asm("cvt.f32.f16 %0, %1;" : "=f"(y[2 * h + 1]) : "h"(high));
	}
#else
	for (uint32_t k = 0; k < 4; k++) {
		uint32_t code = quad >> 8 * k & 255;

		y[k] = round_float((e4m3 ? round_small_value(code & 127, 3, 7) : round_small_value(code & 127, 2, 15)) |
				   (code & 128) << 24);
	}
#endif
}

/*
 * FLOAT8: divide a code's value by a scale. inverse: float8_inverse of the scale. The remainder of ratio * inverse is
 * computed exactly, and corrects the product to the correctly rounded quotient. This was checked for all mantissas of
 * codes and scales.
 */
DEVICE float divide_float8(float ratio, float scale, float inverse)
{
	float product = round_mul(ratio, inverse);
	float quotient = __fmaf_rn(__fmaf_rn(-product, scale, ratio), inverse, product);

	return round_float(round_bits(quotient) | (round_bits(ratio) & ~ROUND_ABS)); /* -0 */
}

/* Fill a table of code_ratio for all codes in shared memory. Called by all threads of the CTA. */
template <int CODEC> DEVICE void fill_ratios(const codec_view *v, float *ratio)
{
	for (uint32_t code = threadIdx.x; code < 256 && CODEC != CODEC_SIGN; code += blockDim.x)
		ratio[code] = code_ratio<CODEC>(kind_of(v), code);
	__syncthreads();
}

/* State of reading a block's values in order: the block's scales and codes, and the scale of the current row. */
struct row_walk {
	const codec_row_part *part;
	const uint8_t *scales, *codes;
	const float *ratio;
	uint32_t row, end; /* row: number of values per row; end: index in the block after the current row */
	float scale, below;
};

DEVICE row_walk walk_rows(struct row_kind q, const codec_row_part *part, const uint8_t *scales, const uint8_t *codes,
			  const float *ratio, bool unscaled)
{
	float below = round_sign_below(part->scale[q.variant == CODEC_SIGN_TWO_MEAN]);

	return {part, scales, codes, ratio, part->group_size, part->group_size ? 0 : ~0u, unscaled ? 1 : part->scale[0],
		below};
}

/* Scale of a row, and index in the block after the row. wrong: not 0 if the scale is invalid. */
struct opened_row {
	float scale, below;
	uint32_t end, wrong;
};

/* Return the scale of the row that holds value i of a block. */
DEVICE_CALL opened_row open_row(struct row_kind q, const codec_row_part *part, const uint8_t *scales, uint32_t i)
{
	uint32_t at = i / part->group_size;
	uint64_t end = (at + 1ull) * part->group_size;
	opened_row o = {0, 0, end < ~0u ? (uint32_t)end : ~0u, 0};

	o.wrong = !read_scale(q, part, scales + (uint64_t)at * row_scale_nbytes(q), &o.scale, &o.below);
	return o;
}

/*
 * Make the row of value i the current row, and read its scale. Return a nonzero number if the row's scale is invalid.
 */
DEVICE uint32_t walk_on(struct row_kind q, row_walk *w, uint32_t i)
{
	if (i < w->end)
		return 0;
	opened_row o = open_row(q, w->part, w->scales, i);

	w->scale = o.scale, w->below = o.below, w->end = o.end;
	return o.wrong;
}

/* Set *y to the dequantized value of a code in the current row. Return a nonzero number if the code is invalid. */
template <int CODEC> DEVICE uint32_t walk_code(struct row_kind q, const row_walk &w, uint32_t code, float *y)
{
	if (CODEC == CODEC_SIGN) {
		*y = code ? w.scale : w.below;
		return 0;
	}
	float ratio = shared(w.ratio)[code];

	*y = dequantize<CODEC>(q, ratio, w.scale, w.below);
	return (CODEC == CODEC_TERNARY || is_quantize(CODEC)) && ratio != ratio;
}

/* Dequantize n <= 4 values from value i of the block on, which may lie in several rows. */
template <int CODEC> DEVICE uint32_t walk_quad(struct row_kind q, row_walk *w, uint32_t i, uint32_t n, float y[4])
{
	uint32_t wrong = 0, quad = n ? read_codes<CODEC>(q, w->codes, i, n) : 0;

	for (uint32_t k = 0; k < 4; k++) {
		y[k] = 0;
		if (k < n) {
			wrong |= walk_on(q, w, i + k);
			wrong |= walk_code<CODEC>(q, *w, quad >> 8 * k & 255, &y[k]);
		}
	}
	return wrong;
}

#endif
