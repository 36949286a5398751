/*
 * row_loops.h - loops without intrinsics for row codecs, compiled once per instruction set; includes scale_loops.h,
 * pack_loops.h and sum_loops.h.
 *
 * Included by scalar.c, avx2.c and avx512.c, like plane_loops.h. The first `row` values share scale[0], the next `row`
 * values scale[1], and so on; the last row may be shorter. Values are float32; exact/round.h has the functions for
 * single values.
 */
#include "kernels.h"
#include "scale_loops.h"

/*
 * Defaults for instruction sets without vectorized parts. A vectorized part processes the first values of a loop and
 * returns their number; the default returns 0.
 */
#ifndef HALVES
#define HALVES(key, block, nblocks, h) 0
#define TERNARY_CODES(x, n, s, h, code, most) 0
#define FLOAT8_CODES(mbits, bias, max, x, n, row, scale, h, finite, code) ((void)(finite), (size_t)0)
#define FLOAT4_CODES(x, n, row, scale, h, code) 0
#define LEVEL_CODES(odd, x, n, amax, levels, h, code) 0
#define LEVEL_VALUES(code, n, amax, odd, levels, y) 0
#define AFFINE_CODES(x, n, half, middle, levels, h, code) 0
#define AFFINE_VALUES(code, n, half, middle, levels, y) 0
#define AFFINE_TABLE(ratio, half, middle, value) 0
#define TABLE_VALUES(few, code, n, ratio, scale, y) ((void)(few), (size_t)0)
#define FLOAT8_VALUES(mbits, bias, last, code, n, scale, y) 0
#define MX_VALUES(mbits, bias, last, code, n, scale, y) 0
#endif
#ifndef SIGN_VALUES
#define SIGN_VALUES(bits, n, negative, positive, how, y) 0
#endif

static inline void put_signs(const uint8_t *bits, size_t from, size_t n, float negative, float positive, int how,
			     float_any *y)
{
	for (size_t i = from % 8 ? 0 : SIGN_VALUES(bits + from / 8, n, negative, positive, how, y); i < n; i++) {
		float x = bits[(from + i) / 8] >> (from + i) % 8 & 1 ? positive : negative;

		y[i] = how == SIGNS_ADD ? round_add(y[i], x) : x;
	}
}

/* SIGN: dequantize n sign bits from bit `from` on. `from` is a multiple of 8 if the row length is. */
static void sign_values(const uint8_t *bits, size_t from, size_t n, float negative, float positive, int how,
			float_any *y)
{
	if (how == SIGNS_ADD) /* a constant `how` lets the compiler specialize the loop */
		put_signs(bits, from, n, negative, positive, SIGNS_ADD, y);
	else if (how == SIGNS_NONTEMPORAL)
		put_signs(bits, from, n, negative, positive, SIGNS_NONTEMPORAL, y);
	else
		put_signs(bits, from, n, negative, positive, SIGNS_STORE, y);
}

/*
 * Generate the first random bits (word 0) of nblocks Philox blocks: eight 16-bit numbers per block, in element order.
 */
static void halves(struct philox key, uint64_t block, size_t nblocks, uint16_t *restrict h)
{
	for (size_t b = HALVES(key, block, nblocks, h); b < nblocks; b++) {
		uint32_t c[4];

		philox_block(key, block + b, 0, c);
		for (int i = 0; i < 4; i++) {
			h[8 * b + 2 * i] = (uint16_t)c[i];
			h[8 * b + 2 * i + 1] = (uint16_t)(c[i] >> 16);
		}
	}
}

/*
 * TERNARY: compute the codes 0, 1, 2 for 0, s, -s, or TERNARY_TIE if the second random number decides. Return 1 if |x|
 * exceeds the scale s > 0 for any value.
 */
static int ternary_run(const float_any *x, size_t n, float s, const uint16_t *h, uint8_t *restrict code)
{
	const struct over over = round_over(s, 65536);
	const uint32_t top = round_bits(s);
	int32_t most = 0;

	for (size_t i = TERNARY_CODES(x, n, s, h, code, &most); i < n; i++) {
		uint32_t u = round_bits(x[i]);
		int32_t a = (int32_t)(u & ROUND_ABS);

		most = a > most ? a : most;
		code[i] = round_ternary_code(u, top, over, h[i]);
	}
	return most > (int32_t)top;
}

/* Compute FLOAT8's codes of n values in rows of `row` values, a compile-time constant of the caller; 0: one row. */
static inline void float8_run(uint32_t mbits, uint32_t bias, float max, const float_any *x, size_t n, size_t row,
			      const float *scale, const uint16_t *h, int finite, uint8_t *restrict code)
{
	for (size_t i = FLOAT8_CODES(mbits, bias, max, x, n, row, scale, h, finite, code); i < n; i++)
		code[i] = round_float8_code(round_bits(x[i]), scale[row ? i / row : 0], max, mbits, bias, h != NULL,
					    h ? h[i] : 0);
}

/*
 * Compute FLOAT8's codes. Each call of float8_run has constant parameters, so that the compiler specializes its loop.
 */
static inline void float8_codes(int e5m2, const float_any *x, size_t n, size_t row, const float *scale,
				const uint16_t *h, int finite, uint8_t *restrict code)
{
	if (e5m2)
		h ? float8_run(2, 15, 57344, x, n, row, scale, h, finite, code)
		  : float8_run(2, 15, 57344, x, n, row, scale, NULL, finite, code);
	else
		h ? float8_run(3, 7, 448, x, n, row, scale, h, finite, code)
		  : float8_run(3, 7, 448, x, n, row, scale, NULL, finite, code);
}

static inline void float8_values(uint32_t mbits, uint32_t bias, uint32_t last, const uint8_t *code, size_t n,
				 float scale, float_any *restrict y)
{
	/* if the scale is so small that a quotient could overflow, only the scalar loop is used */
	for (size_t i = scale < 0x1p-111f ? 0 : FLOAT8_VALUES(mbits, bias, last, code, n, scale, y); i < n; i++)
		y[i] = round_float8_value(code[i], scale, mbits, bias, last);
}

/* MXFP8: dequantize n codes in rows of 32. Scales are powers of two that give finite values. */
static inline void mx_values(uint32_t mbits, uint32_t bias, uint32_t last, const uint8_t *code, size_t n,
			     const float *scale, float_any *y)
{
	for (size_t i = MX_VALUES(mbits, bias, last, code, n, scale, y); i < n; i++)
		y[i] = round_float8_value(code[i], scale[i / 32], mbits, bias, last);
}

/* Compute, for each code of at most 4 bits, the dequantized value before scaling. */
static void ratios(const struct row_kind *q, float ratio[16])
{
	for (uint32_t c = 0; c < 16; c++)
		switch (q->codec) {
		case CODEC_TERNARY: ratio[c] = round_ternary_ratio(c); break;
		case CODEC_FLOAT4: ratio[c] = round_float4_ratio(c); break;
		default: ratio[c] = round_level(round_level_of(c, q->odd, q->levels), (float)q->levels, 1);
		}
}

static inline void table_values(int few, const uint8_t *code, size_t n, const float ratio[16], float scale,
				float_any *y)
{
	/* with larger scales only the scalar loop is used, because FLOAT4's 6 * scale would overflow */
	for (size_t i = scale > 0x1p125f ? 0 : TABLE_VALUES(few, code, n, ratio, scale, y); i < n; i++)
		y[i] = round_scaled(ratio[code[i] & 15], scale);
}

/*
 * Compute FLOAT4's codes, with the sign at bit 3. scale[r] is the divisor of the values of row r, 0 for a row of zeros.
 */
static inline void float4_run(const float_any *x, size_t n, size_t row, const float *scale, const uint16_t *h,
			      uint8_t *restrict code)
{
	for (size_t i = FLOAT4_CODES(x, n, row, scale, h, code); i < n; i++)
		code[i] = round_float4_code(round_bits(x[i]), scale[i / row], h != NULL, h ? h[i] : 0);
}

/* Compute QUANTIZE's codes of a row whose largest magnitude is amax > 0. */
static inline void level_run(int odd, const float_any *x, size_t n, float amax, int levels, const uint16_t *h,
			     uint8_t *restrict code)
{
	const struct over over = round_over(amax, 1);

	for (size_t i = LEVEL_CODES(odd, x, n, amax, levels, h, code); i < n; i++)
		code[i] = round_level_code(round_bits(x[i]), odd, levels, over, h ? h[i] : 0x8000);
}

static void level_values(const uint8_t *code, size_t n, float amax, int odd, int levels, float_any *y)
{
	for (size_t i = LEVEL_VALUES(code, n, amax, odd, levels, y); i < n; i++)
		y[i] = round_level(round_level_of(code[i], odd, levels), (float)levels, amax);
}

/* Compute QUANTIZE's codes of a row with a zero point: `half` > 0 is half its range, `middle` the midpoint. */
static inline void affine_run(const float_any *x, size_t n, float half, float middle, int levels, const uint16_t *h,
			      uint8_t *restrict code)
{
	const struct over over = round_over(half, 1);

	for (size_t i = AFFINE_CODES(x, n, half, middle, levels, h, code); i < n; i++)
		code[i] = round_affine_code(x[i], levels, middle, over, h ? h[i] : 0x8000);
}

static void affine_values(const uint8_t *code, size_t n, float half, float middle, int levels, float_any *y)
{
	for (size_t i = AFFINE_VALUES(code, n, half, middle, levels, y); i < n; i++)
		y[i] = round_affine(round_level(round_level_of(code[i], 0, levels), (float)levels, 1), half, middle);
}

/*
 * QUANTIZE with zero points: dequantize codes of at most 4 bits with a table of 16 values, computed for the row from
 * `ratio`.
 */
static void affine_table_values(int few, const uint8_t *code, size_t n, const float ratio[16], float half, float middle,
				float_any *y)
{
	float value[16];

	for (int c = AFFINE_TABLE(ratio, half, middle, value); c < 16; c++)
		value[c] = round_affine(ratio[c], half, middle);
	table_values(few, code, n, value, 1, y);
}

static int encode_rows(const struct row_kind *q, const float_any *x, size_t n, size_t row, const float *scale,
		       const float *middle, const uint16_t *h, uint8_t *code)
{
	int above = 0,
	    finite = !(q->options & CODEC_OPTION_PROPAGATE); /* without PROPAGATE, NaN and Inf were rejected before */

	if (q->codec == CODEC_FLOAT4) { /* rows are short: a loop per row would be slow */
		h ? float4_run(x, n, row, scale, h, code) : float4_run(x, n, row, scale, NULL, code);
		return 0;
	}
	if (q->codec == CODEC_FLOAT8 && row == 32) {
		float8_codes(q->e5m2, x, n, 32, scale, h, finite, code);
		return 0;
	}
	for (size_t at = 0, i = 0; at < n; at += row, scale++, i++) {
		size_t m = n - at < row ? n - at : row;
		const uint16_t *r = h ? h + at : NULL;
		const float_any *p = x + at;
		uint8_t *c = code + at;

		switch (q->codec) {
		case CODEC_FLOAT8: float8_codes(q->e5m2, p, m, 0, scale, r, finite, c); break;
		case CODEC_TERNARY:
			if (*scale > 0)
				above |= ternary_run(p, m, *scale, r, c);
			else
				memset(c, 0, m);
			break;
		default:
			if (!(*scale > 0))
				memset(c, round_level_zero(q->odd, q->levels), m);
			else if (q->affine)
				r ? affine_run(p, m, *scale, middle[i], q->levels, r, c)
				  : affine_run(p, m, *scale, middle[i], q->levels, NULL, c);
			else if (q->odd)
				r ? level_run(1, p, m, *scale, q->levels, r, c)
				  : level_run(1, p, m, *scale, q->levels, NULL, c);
			else
				r ? level_run(0, p, m, *scale, q->levels, r, c)
				  : level_run(0, p, m, *scale, q->levels, NULL, c);
		}
	}
	return above;
}

static void decode_rows(const struct row_kind *q, const uint8_t *code, size_t n, size_t row, const float *scale,
			const float *middle, float_any *y)
{
	int tabled = q->codec != CODEC_FLOAT8 && q->bits <= 4, few = q->bits < 4;
	float ratio[16];

	if (q->codec == CODEC_FLOAT8 && row_is_mx(*q)) {
		q->e5m2 ? mx_values(2, 15, 0x7b, code, n, scale, y) : mx_values(3, 7, 0x7e, code, n, scale, y);
		return;
	}
	if (tabled)
		ratios(q, ratio);
	for (size_t at = 0, i = 0; at < n; at += row, scale++, i++) {
		size_t m = n - at < row ? n - at : row;

		if (q->affine && tabled)
			few ? affine_table_values(1, code + at, m, ratio, *scale, middle[i], y + at)
			    : affine_table_values(0, code + at, m, ratio, *scale, middle[i], y + at);
		else if (q->affine)
			affine_values(code + at, m, *scale, middle[i], q->levels, y + at);
		else if (q->codec == CODEC_QUANTIZE && !(*scale > 0))
			memset(y + at, 0, 4 * m);
		else if (tabled && few)
			table_values(1, code + at, m, ratio, *scale, y + at);
		else if (tabled)
			table_values(0, code + at, m, ratio, *scale, y + at);
		else if (q->codec == CODEC_QUANTIZE)
			level_values(code + at, m, *scale, q->odd, q->levels, y + at);
		else if (!q->e5m2)
			float8_values(3, 7, 0x7e, code + at, m, *scale, y + at);
		else
			float8_values(2, 15, 0x7b, code + at, m, *scale, y + at);
	}
}

#include "pack_loops.h"
#include "sum_loops.h"

#define ROW_LOOPS                                                                                                      \
	.to_float = {to_float_bfloat16, to_float_float16}, .from_float = {from_float_bfloat16, from_float_float16},    \
	.abs_max = abs_max, .extremes = extremes, .row_sums = row_sums, .row_fold = row_fold, .sign_bits = sign_bits,  \
	.sign_values = sign_values, .sign_sums = sign_sums, .halves = halves, .encode_rows = encode_rows,              \
	.decode_rows = decode_rows, .pack_codes = pack_codes, .unpack_codes = unpack_codes, .pack_trits = pack_trits,  \
	.unpack_trits = unpack_trits, .max_byte = max_byte, .sum_codes = sum_codes, .plus = plus, .minus = minus,      \
	.subtract = subtract, .add = add, .multiply = multiply, .divide = divide, .maximum = maximum, .settle = settle
