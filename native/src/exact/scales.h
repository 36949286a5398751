/*
 * scales.h - codecs whose values share scales: read params, derive rows, parts, blocks and their sizes, and compute
 * scales from the largest magnitude or from sums. C, C++ and NVRTC. docs/spec/format.md, section 8.
 */
#ifndef CODEC_SCALES_H
#define CODEC_SCALES_H

#include "round.h"
#include "wire.h"

#define ROW_ASKED_LAST 0xffffffffu /* row length in a spec only, never in a frame: rows follow the shape */
#define ROW_FLAT 1024              /* values per row of a tensor of rank 1 */
#define ROW_LEAST 64               /* trailing dimensions are joined until a row has this many values */

/* Quantization of values that share a scale. */
struct row_kind {
	uint8_t codec, variant, options, dtype;
	uint8_t entropy, odd; /* odd: QUANTIZE, odd number of levels */
	uint8_t affine;       /* QUANTIZE: rows store their smallest and largest value (zero points) */
	uint8_t bits;         /* number of bits per code in the frame; 0: five codes per byte */
	uint8_t e5m2;         /* FLOAT8: elements are e5m2, not e4m3 */
	uint8_t scale_most;   /* largest valid byte of a stored row scale; 0: scales are float32 */
	float max;            /* FLOAT8: largest finite value */
	int levels;           /* QUANTIZE: largest code (even) or largest magnitude of a level (odd) */
};

/* Return the row_kind that a header's params and dtype specify. For codecs without rows only `entropy` is set, to 0. */
BITS_FN struct row_kind row_kind_of(uint32_t codec, uint32_t variant, uint32_t options, uint32_t bits, uint32_t dtype)
{
	struct row_kind q = {
		(uint8_t)codec, (uint8_t)variant, (uint8_t)options, (uint8_t)dtype, 0, 0, 0, 8, 0, 0, 0, 0};

	if (codec == CODEC_SIGN) {
		q.bits = 1;
	} else if (codec == CODEC_TERNARY) {
		q.bits = variant == CODEC_TERNARY_2BIT ? 2 : 0;
		q.entropy = variant == CODEC_TERNARY_ENTROPY;
	} else if (codec == CODEC_FLOAT8) {
		q.e5m2 = variant == CODEC_E5M2 || variant == CODEC_MXFP8_E5M2;
		q.max = q.e5m2 ? 57344.0f : 448.0f;
		if (variant >= CODEC_MXFP8_E4M3)
			q.scale_most = q.e5m2 ? WIRE_MAX_MXFP8_E5M2 : WIRE_MAX_MXFP8_E4M3;
		q.entropy = (options & CODEC_OPTION_ENTROPY) != 0;
	} else if (codec == CODEC_FLOAT4) {
		q.bits = 4;
		q.scale_most = variant == CODEC_FLOAT4_MXFP4 ? WIRE_MAX_MXFP4 : WIRE_MAX_NVFP4;
	} else if (codec == CODEC_QUANTIZE) {
		q.bits = (uint8_t)bits;
		q.odd = variant == CODEC_LEVELS_ODD;
		q.affine = variant == CODEC_LEVELS_AFFINE;
		q.levels = q.odd ? (1 << (bits - 1)) - 1 : (1 << bits) - 1;
	}
	return q;
}

/* Return 1 for MX formats, in which 32 values share a scale of type e8m0 (a power of two). */
BITS_FN int row_is_mx(struct row_kind q)
{
	return q.scale_most > WIRE_MAX_NVFP4;
}

/* `row` below is the number of values that share a scale; 0: all values of a part share one. */

/* Return 1 if the format allows this row length. */
BITS_FN int row_allowed(struct row_kind q, uint32_t row)
{
	uint32_t most = q.entropy ? WIRE_ROW_BLOCK : WIRE_MAX_ROW;

	if (q.codec == CODEC_TERNARY)
		return row == 0;
	if (q.scale_most)
		return row == (row_is_mx(q) ? 32u : 16u);
	return row <= most && (row || q.codec == CODEC_SIGN);
}

/* Return the row length of a tensor or part of this shape if the spec requests `asked`. */
BITS_FN uint32_t row_in_use(struct row_kind q, uint32_t asked, uint32_t rank, const uint64_t *shape)
{
	uint64_t row = asked;

	if (asked == ROW_ASKED_LAST) {
		row = rank > 1 ? 1 : ROW_FLAT;
		for (uint32_t i = rank; rank > 1 && i > 0 && row < ROW_LEAST; i--)
			row *= shape[i - 1];
		if (row > WIRE_MAX_ROW)
			row = ROW_FLAT;
	}
	return (uint32_t)(q.entropy && row > WIRE_ROW_BLOCK ? ROW_FLAT : row);
}

/* Return 1 if the frame stores scales for each part, in addition to or in place of scales per row. */
BITS_FN int row_part_scaled(struct row_kind q, uint32_t row)
{
	return row == 0 || q.scale_most == WIRE_MAX_NVFP4;
}

BITS_FN uint64_t row_count(uint32_t row, uint64_t n)
{
	return row ? (n + row - 1) / row : 0;
}

/* Return the number of values per block: a multiple of `row`; if row is 0, a constant. */

BITS_FN uint64_t row_block(struct row_kind q, uint32_t row)
{
	if (!row)
		return q.bits ? WIRE_ROW_BLOCK : WIRE_TRITS_BLOCK;
	return row <= WIRE_ROW_BLOCK ? WIRE_ROW_BLOCK / row * row : row;
}

/* Return the number of blocks in a part of n values. */
BITS_FN uint64_t row_nblocks(struct row_kind q, uint32_t row, uint64_t n)
{
	uint64_t block = row_block(q, row);

	return (n + block - 1) / block;
}

/* Return the number of values in block b of a part of n values. The block's first value is b * row_block. */
BITS_FN uint64_t row_block_n(struct row_kind q, uint32_t row, uint64_t n, uint64_t b)
{
	uint64_t block = row_block(q, row), left = n - b * block;

	return left < block ? left : block;
}

/* Sizes in bytes: scales of one row; codes of m values; upper bound of a region of m values. */

BITS_FN uint64_t row_scale_nbytes(struct row_kind q)
{
	if (q.scale_most)
		return 1;
	if (q.affine)
		return q.dtype == CODEC_FLOAT32 ? 8 : 4;
	return q.codec == CODEC_SIGN && q.variant == CODEC_SIGN_TWO_MEAN ? 8 : 4;
}

BITS_FN uint64_t row_codes_nbytes(struct row_kind q, uint64_t m)
{
	return q.bits ? (m * q.bits + 7) / 8 : (m + 4) / 5;
}

BITS_FN uint64_t row_region_nbytes(struct row_kind q, uint32_t row, uint64_t m)
{
	uint64_t nbytes = row_count(row, m) * row_scale_nbytes(q) + (q.entropy ? 4 : 0) + row_codes_nbytes(q, m);

	return (nbytes + WIRE_ALIGN - 1) / WIRE_ALIGN * WIRE_ALIGN;
}

/*
 * Sums, for means: up to WIRE_TREE values are added in 32 float32 lanes, and the lanes are folded by halves. The
 * results are added in float64 as a binary tree: neighbours, then neighbouring pairs, and so on.
 */
BITS_FN float scale_fold(float *lane)
{
	for (int w = WIRE_LANES / 2; w; w /= 2)
		for (int i = 0; i < w; i++)
			lane[i] = round_add(lane[i], lane[i + w]);
	return lane[0];
}

BITS_FN double scale_fold64(double *lane)
{
	for (int w = WIRE_LANES / 2; w; w /= 2)
		for (int i = 0; i < w; i++)
			lane[i] = round_add64(lane[i], lane[i + w]);
	return lane[0];
}

/* Add a sum to a binary tree of `count` sums. For each set bit i of `count`, level[i] is the total of 2^i sums. */
BITS_FN void scale_push(double *level, uint64_t count, double sum)
{
	int i = 0;

	for (; count >> i & 1; i++)
		sum = round_add64(level[i], sum);
	level[i] = sum;
}

/* Return the total of a tree of `count` sums. If `count` is no power of two, the last sums have no neighbours. */
BITS_FN double scale_total(const double *level, uint64_t count)
{
	double total = 0;
	int some = 0;

	for (int i = 0; i < 64; i++)
		if (count >> i & 1) {
			total = some ? round_add64(level[i], total) : level[i];
			some = 1;
		}
	return total;
}

/* Round a mean or root x to float32, clamped to the dtype's largest finite value, because sums may have overflowed. */
BITS_FN float scale_of_sum(double x, uint32_t dtype)
{
	double most = dtype == CODEC_FLOAT16 ? 65504.0 : dtype == CODEC_BFLOAT16 ? 0x1.fep127 : 0x1.fffffep127;

	return round_to_float(x < most ? x : most);
}

BITS_FN float scale_mean(double total, uint64_t n, uint32_t dtype)
{
	return n ? scale_of_sum(round_div64(total, (double)n), dtype) : 0.0f;
}

/* Round a scale to the dtype, in which TERNARY must represent the decoded values 0, scale and -scale. */
BITS_FN float scale_in_dtype(float x, uint32_t dtype)
{
	if (dtype == CODEC_BFLOAT16)
		return round_float(round_from_bfloat16(round_to_bfloat16(round_bits(x))));
	if (dtype == CODEC_FLOAT16)
		return round_float(round_from_float16(round_to_float16(round_bits(x))));
	return x;
}

/*
 * Round a scale to the dtype, upwards if possible, because values above the scale would saturate and be biased. Only
 * tensors plus a residual need this: their largest magnitude may not be a value of the dtype.
 */
BITS_FN float scale_above(float x, uint32_t dtype)
{
	float y = scale_in_dtype(x, dtype);
	uint32_t half = dtype == CODEC_FLOAT16 ? round_to_float16(round_bits(x)) : round_to_bfloat16(round_bits(x));

	if (y >= x || half == (dtype == CODEC_FLOAT16 ? 0x7bffu : 0x7f7fu))
		return y;
	half++;
	return round_float(dtype == CODEC_FLOAT16 ? round_from_float16((uint16_t)half)
						  : round_from_bfloat16((uint16_t)half));
}

/*
 * Return 1 if the caller's scale x is 0 or Inf in float32 or, for TERNARY, in the tensor's dtype. Conversions clamp
 * instead of returning Inf, so compare with the rounding limits.
 */
BITS_FN int scale_lost(struct row_kind q, float x)
{
	uint32_t inf = ROUND_INF;

	if (q.codec == CODEC_TERNARY && q.dtype == CODEC_BFLOAT16)
		inf = 0x7f7f8000; /* half a unit above bfloat16's largest value */
	if (q.codec == CODEC_TERNARY && q.dtype == CODEC_FLOAT16)
		inf = 0x477ff000; /* 65520, half a unit above float16's largest value */
	return round_bits(x) >= inf || (q.codec == CODEC_TERNARY && !(scale_in_dtype(x, q.dtype) > 0));
}

/*
 * Functions that compute scales of a row or part of n values. `max`: bit pattern of the largest magnitude. `given`:
 * scale from the spec; 0 or less: none.
 */

/* SIGN: compute scale[0], the scale of all values. two_mean: scale[0] is for positive values, scale[1] for negative. */
BITS_FN void scale_sign(struct row_kind q, const double *total, uint64_t negative, uint64_t n, float *scale)
{
	scale[1] = 0;
	if (q.variant == CODEC_SIGN_L1) {
		scale[0] = scale_mean(total[0], n, q.dtype);
	} else if (q.variant == CODEC_SIGN_L2) {
		scale[0] = scale_of_sum(round_sqrt64(round_div64(total[0], (double)n)), q.dtype);
	} else {
		scale[0] = scale_mean(total[0], n - negative, q.dtype);
		scale[1] = scale_mean(total[1], negative, q.dtype);
	}
}

/* TERNARY: return the scale. With clipping, `total` holds the sums of x^2 and of x. */
BITS_FN float scale_ternary(struct row_kind q, uint32_t max, float given, float clip, const double *total, uint64_t n)
{
	float s = given > 0 ? given : scale_above(round_float(max), q.dtype), limit;
	double mean, variance;

	if (!(clip > 0))
		return s;
	mean = round_div64(total[1], (double)n);
	variance = round_sub64(round_div64(total[0], (double)n), round_mul64(mean, mean));
	limit = scale_of_sum(round_mul64((double)clip, round_sqrt64(variance > 0 ? variance : 0)), q.dtype);
	limit = scale_in_dtype(limit, q.dtype);
	return s < limit ? s : limit;
}

/* TERNARY: return 1 if the largest magnitude exceeds the caller's scale, without clipping. given -1: the scale 0. */
BITS_FN int scale_exceeded(uint32_t max, float given, float clip)
{
	return (given > 0 && !(clip > 0) && round_bits(given) < max) || (given < 0 && max > 0);
}

/* FLOAT8: return the factor by which values are multiplied before they are rounded to codes. */
BITS_FN float scale_float8(struct row_kind q, uint32_t max, float given)
{
	float scale = given > 0 ? given : round_div(q.max, round_float(max));

	return round_bits(scale) < ROUND_INF ? scale : 1.0f;
}

/*
 * QUANTIZE with zero points: half a row's range, and its midpoint. `stored`: the row's smallest value (lower half of
 * the bytes) and largest value (upper half), both in the frame's dtype.
 */
struct row_ends {
	float half, middle;
	uint64_t stored;
};

/* Read a row's smallest and largest value. Return 0 unless both are finite, in ascending order, and not -0. */
BITS_FN int scale_open_ends(uint64_t stored, uint32_t dtype, struct row_ends *ends)
{
	uint32_t width = dtype == CODEC_FLOAT32 ? 32 : 16, a = (uint32_t)stored, b = (uint32_t)(stored >> width);
	float low, high;

	if (dtype == CODEC_FLOAT16) {
		a = round_from_float16((uint16_t)a);
		b = round_from_float16((uint16_t)b);
	} else if (dtype == CODEC_BFLOAT16) {
		a = round_from_bfloat16((uint16_t)a);
		b = round_from_bfloat16((uint16_t)b);
	}
	low = round_float(a);
	high = round_float(b);
	ends->stored = stored;
	ends->half = round_half_range(low, high);
	ends->middle = round_middle(low, ends->half);
	return (a & ROUND_ABS) < ROUND_INF && (b & ROUND_ABS) < ROUND_INF && a != ~ROUND_ABS && b != ~ROUND_ABS &&
	       low <= high;
}

/* Round a row's smallest and largest value to the frame's dtype, -0 to +0. */
BITS_FN struct row_ends scale_ends(float low, float high, uint32_t dtype)
{
	uint32_t width = dtype == CODEC_FLOAT32 ? 32 : 16, minus_zero = 1u << (width - 1);
	uint32_t a = round_bits(low), b = round_bits(high);
	struct row_ends ends;

	if (dtype == CODEC_FLOAT16) {
		a = round_to_float16(a);
		b = round_to_float16(b);
	} else if (dtype == CODEC_BFLOAT16) {
		a = round_to_bfloat16(a);
		b = round_to_bfloat16(b);
	}
	a = a == minus_zero ? 0 : a;
	b = b == minus_zero ? 0 : b;
	scale_open_ends(a | (uint64_t)b << width, dtype, &ends);
	return ends;
}

/* NVFP4: return the scale of a part, given the bit pattern of its largest magnitude. */
BITS_FN float scale_nvfp4(uint32_t max)
{
	return round_div(round_float(max), 6 * 448.0f);
}

/*
 * MXFP4, MXFP8: return the exponent that stores a row's scale. The row's largest magnitude is scaled to the last octave
 * of the element type, where values above the largest element (1.5 or 1.75 times a power of two) saturate. `up`: choose
 * the scale so that none saturates.
 */
BITS_FN uint8_t scale_mx(struct row_kind q, uint32_t max, int up)
{
	uint32_t last = q.codec == CODEC_FLOAT4 ? 2 : q.e5m2 ? 15 : 8; /* log2 of the lower end of the last octave */
	uint32_t top = q.codec == CODEC_FLOAT4 ? 0x400000 : 0x600000;
	uint32_t stored = (max >> 23) + (up && (max & 0x7fffff) > top);

	stored = stored > last ? stored - last : 0;
	return (uint8_t)(stored < q.scale_most ? stored : q.scale_most);
}

/* Return 1 if stored scales are rounded up, so that no value saturates. */
BITS_FN int scale_rounds_up(struct row_kind q)
{
	return (q.options & (CODEC_OPTION_STOCHASTIC | CODEC_OPTION_RCEIL)) != 0;
}

/* Return the byte to store for the scale of a row with largest magnitude `max`. `part`: the part's scale. */
BITS_FN uint8_t scale_byte(struct row_kind q, uint32_t max, float part)
{
	int up = scale_rounds_up(q);
	uint32_t stored;
	float a;

	if (row_is_mx(q))
		return scale_mx(q, max, up);
	a = part > 0 ? round_div(round_div(round_float(max), 6.0f), part) : 0.0f;
	stored = round_small_nearest(round_bits(a < 448.0f ? a : 448.0f), 3, 7);
	return (uint8_t)(stored + (up && stored < WIRE_MAX_NVFP4 && round_float(round_small_value(stored, 3, 7)) < a));
}

/* Return a row's divisor (FLOAT4) or factor (FLOAT8), given its stored byte, at most q.scale_most. */
BITS_FN float scale_byte_value(struct row_kind q, uint32_t stored, float part)
{
	if (q.codec == CODEC_FLOAT8)
		return round_float((254 - stored) << 23);
	if (row_is_mx(q))
		return round_float(stored ? stored << 23 : 1u << 22);
	return round_mul(round_float(round_small_value(stored, 3, 7)), part);
}

#endif
