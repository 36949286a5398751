/*
 * row_loops.h - loops without intrinsics for codecs of rows, compiled once per instruction set.
 *
 * Included by scalar.c, avx2.c and avx512.c like plane_loops.h. `row` values share scale[0], the next ones scale[1],
 * and so on; the last row may be shorter. Values are float32; round.h has the functions on single words.
 */
#include "kernels.h"

/* Defaults of vectorized parts, which process the first values of a loop and return their number: 0 without vectors. */
#ifndef ABS_MAX
#define FROM_BFLOAT16(src, n, x) 0
#define TO_BFLOAT16(x, n, dst) 0
#define FROM_FLOAT16(src, n, x) 0
#define TO_FLOAT16(x, n, dst) 0
#define ABS_MAX(x, n, most) 0
#define EXTREMES(x, n, low, high) 0
#define ABS_MAX_OF_32(x, n, max) 0
#define PLUS(minus, x, e, n, sum) 0
#define ROW_SUMS(by_sign, x, n, bits, sums) 0
#define SETTLE(how, x, n, by, dst, most) 0
#define SETTLE_ALIGN 4
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
	for (int l = 0; l < WIRE_LANES; l++) { /* a loop instead of memset, since rows may be short */
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
#define SIGN_VALUES(bits, n, negative, positive, how, y) 0
#define SIGN_SUMS(s, count, n, more, how, by, y) 0
#endif

/* Set bit i % 8 of byte i / 8 if the sign bit of x[i] is clear. Bits after the last value are 0. */
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

/* Add value i to lane i % 32. n is a multiple of 32, except for the last values. */
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

static inline void put_signs(const uint8_t *bits, size_t from, size_t n, float negative, float positive, int how,
			     float_any *y)
{
	for (size_t i = from % 8 ? 0 : SIGN_VALUES(bits + from / 8, n, negative, positive, how, y); i < n; i++) {
		float x = bits[(from + i) / 8] >> (from + i) % 8 & 1 ? positive : negative;

		y[i] = how == SIGNS_ADD ? round_add(y[i], x) : x;
	}
}

/* Dequantize signs from value `from` of the bits on. `from` is a multiple of 8 if rows are. */
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

/* Generate word 0 of nblocks blocks, as halves in element order. */
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

/* Compute codes 0, 1, 2 for 0, 1, -1, or TERNARY_TIE if the second draw decides. Returns 1 if a value exceeds s > 0. */
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

/* Compute FLOAT8's codes of n values in rows of `row`, a constant of the caller; 0: one row. */
static inline void float8_run(uint32_t mbits, uint32_t bias, float max, const float_any *x, size_t n, size_t row,
			      const float *scale, const uint16_t *h, int finite, uint8_t *restrict code)
{
	for (size_t i = FLOAT8_CODES(mbits, bias, max, x, n, row, scale, h, finite, code); i < n; i++)
		code[i] = round_float8_code(round_bits(x[i]), scale[row ? i / row : 0], max, mbits, bias, h != NULL,
					    h ? h[i] : 0);
}

/* Constant parameters let the compiler specialize the loops. */
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
	/* scalar code for scales so small that a quotient could overflow */
	for (size_t i = scale < 0x1p-111f ? 0 : FLOAT8_VALUES(mbits, bias, last, code, n, scale, y); i < n; i++)
		y[i] = round_float8_value(code[i], scale, mbits, bias, last);
}

/* Compute values of MXFP8's rows of 32. Scales are powers of two that give finite values. */
static inline void mx_values(uint32_t mbits, uint32_t bias, uint32_t last, const uint8_t *code, size_t n,
			     const float *scale, float_any *y)
{
	for (size_t i = MX_VALUES(mbits, bias, last, code, n, scale, y); i < n; i++)
		y[i] = round_float8_value(code[i], scale[i / 32], mbits, bias, last);
}

/* Compute the dequantized values before scaling, for codes of at most 4 bits. */
static void ratios(const struct row_kind *q, float ratio[16])
{
	for (uint32_t c = 0; c < 16; c++)
		switch (q->codec) {
		case WIRE_CODEC_TERNARY: ratio[c] = round_ternary_ratio(c); break;
		case WIRE_CODEC_FLOAT4: ratio[c] = round_float4_ratio(c); break;
		default: ratio[c] = round_level(round_level_of(c, q->odd, q->levels), (float)q->levels, 1);
		}
}

static inline void table_values(int few, const uint8_t *code, size_t n, const float ratio[16], float scale,
				float_any *y)
{
	/* FLOAT4: 6 times a larger scale would overflow */
	for (size_t i = scale > 0x1p125f ? 0 : TABLE_VALUES(few, code, n, ratio, scale, y); i < n; i++)
		y[i] = round_scaled(ratio[code[i] & 15], scale);
}

/* Compute FLOAT4's codes, with the sign at bit 3. scale is the divisor of a row's values, 0 for a row of zeros. */
static inline void float4_run(const float_any *x, size_t n, size_t row, const float *scale, const uint16_t *h,
			      uint8_t *restrict code)
{
	for (size_t i = FLOAT4_CODES(x, n, row, scale, h, code); i < n; i++)
		code[i] = round_float4_code(round_bits(x[i]), scale[i / row], h != NULL, h ? h[i] : 0);
}

/* Compute QUANTIZE's codes; amax > 0. */
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

/* Compute QUANTIZE's codes of a row with a zero point; half > 0. */
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

/* Dequantize codes of at most 4 bits: a table of the row's values, from that of all rows. */
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
	    finite = !(q->options & WIRE_OPTION_PROPAGATE); /* without PROPAGATE, NaN and Inf were rejected before */

	if (q->codec == WIRE_CODEC_FLOAT4) { /* rows are short, so that a loop per row would be slow */
		h ? float4_run(x, n, row, scale, h, code) : float4_run(x, n, row, scale, NULL, code);
		return 0;
	}
	if (q->codec == WIRE_CODEC_FLOAT8 && row == 32) {
		float8_codes(q->e5m2, x, n, 32, scale, h, finite, code);
		return 0;
	}
	for (size_t at = 0, i = 0; at < n; at += row, scale++, i++) {
		size_t m = n - at < row ? n - at : row;
		const uint16_t *r = h ? h + at : NULL;
		const float_any *p = x + at;
		uint8_t *c = code + at;

		switch (q->codec) {
		case WIRE_CODEC_FLOAT8: float8_codes(q->e5m2, p, m, 0, scale, r, finite, c); break;
		case WIRE_CODEC_TERNARY:
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
	int tabled = q->codec != WIRE_CODEC_FLOAT8 && q->bits <= 4, few = q->bits < 4;
	float ratio[16];

	if (q->codec == WIRE_CODEC_FLOAT8 && row_is_mx(*q)) {
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
		else if (q->codec == WIRE_CODEC_QUANTIZE && !(*scale > 0))
			memset(y + at, 0, 4 * m);
		else if (tabled && few)
			table_values(1, code + at, m, ratio, *scale, y + at);
		else if (tabled)
			table_values(0, code + at, m, ratio, *scale, y + at);
		else if (q->codec == WIRE_CODEC_QUANTIZE)
			level_values(code + at, m, *scale, q->odd, q->levels, y + at);
		else if (!q->e5m2)
			float8_values(3, 7, 0x7e, code + at, m, *scale, y + at);
		else
			float8_values(2, 15, 0x7b, code + at, m, *scale, y + at);
	}
}

#ifndef PACK_CODES
#define PACK_CODES(code, n, bits, dst) 0
#define UNPACK_CODES(src, n, bits, code) 0
#endif

static inline void pack_bits_of(const uint8_t *code, size_t n, int bits, uint8_t *dst)
{
	size_t i = PACK_CODES(code, n, bits, dst);

	dst += i / 8 * (size_t)bits;
	for (; i + 8 <= n; i += 8, dst += bits) {
		uint64_t x = bits_squeeze(load64(code + i), bits);

		if (n - i >= 72) { /* dst has room for 8 bytes */
			store64(dst, x);
		} else {
			uint8_t last[8];

			store64(last, x);
			memcpy(dst, last, (size_t)bits);
		}
	}
	if (i < n) {
		uint8_t last[8] = {0};

		memcpy(last, code + i, n - i);
		store64(last, bits_squeeze(load64(last), bits));
		memcpy(dst, last, (n - i) * (size_t)bits / 8 + ((n - i) * (size_t)bits % 8 != 0));
	}
}

static inline void unpack_bits_of(const uint8_t *src, size_t n, int bits, uint8_t *code)
{
	size_t i = UNPACK_CODES(src, n, bits, code);

	src += i / 8 * (size_t)bits;
	for (; i + 8 <= n; i += 8, src += bits) {
		uint8_t last[8] = {0};

		if (n - i >= 72) {
			store64(code + i, bits_spread(load64(src), bits));
		} else {
			memcpy(last, src, (size_t)bits);
			store64(code + i, bits_spread(load64(last), bits));
		}
	}
	if (i < n) {
		uint8_t last[8] = {0};

		memcpy(last, src, (n - i) * (size_t)bits / 8 + ((n - i) * (size_t)bits % 8 != 0));
		store64(last, bits_spread(load64(last), bits));
		memcpy(code + i, last, n - i);
	}
}

static void pack_codes(const uint8_t *code, size_t n, int bits, uint8_t *dst)
{
	switch (bits) { /* constant `bits` lets the compiler specialize the loops */
	case 1: pack_bits_of(code, n, 1, dst); break;
	case 2: pack_bits_of(code, n, 2, dst); break;
	case 3: pack_bits_of(code, n, 3, dst); break;
	case 4: pack_bits_of(code, n, 4, dst); break;
	case 5: pack_bits_of(code, n, 5, dst); break;
	case 6: pack_bits_of(code, n, 6, dst); break;
	case 7: pack_bits_of(code, n, 7, dst); break;
	default: memcpy(dst, code, n);
	}
}

static void unpack_codes(const uint8_t *src, size_t n, int bits, uint8_t *code)
{
	switch (bits) {
	case 1: unpack_bits_of(src, n, 1, code); break;
	case 2: unpack_bits_of(src, n, 2, code); break;
	case 3: unpack_bits_of(src, n, 3, code); break;
	case 4: unpack_bits_of(src, n, 4, code); break;
	case 5: unpack_bits_of(src, n, 5, code); break;
	case 6: unpack_bits_of(src, n, 6, code); break;
	case 7: unpack_bits_of(src, n, 7, code); break;
	default: memcpy(code, src, n);
	}
}

#ifndef PACK_TRITS
#define PACK_TRITS(code, n, dst) 0
#define UNPACK_TRITS(src, n, code) 0
#endif

/* Pack five codes 0..2 per byte, the first most significant; missing codes are 0. */
static void pack_trits(const uint8_t *code, size_t n, uint8_t *dst)
{
	size_t i = PACK_TRITS(code, n, dst);

	dst += i / 5;
	for (; i + 5 <= n; i += 5)
		*dst++ = bits_trits(code[i], code[i + 1], code[i + 2], code[i + 3], code[i + 4]);
	if (i < n) {
		uint8_t last[5] = {0};

		memcpy(last, code + i, n - i);
		*dst = bits_trits(last[0], last[1], last[2], last[3], last[4]);
	}
}

static void unpack_trits(const uint8_t *src, size_t n, uint8_t *restrict code)
{
	size_t done = UNPACK_TRITS(src, n, code);

	src += done / 5;
	for (size_t i = done; i < n; i += 5, src++) {
		uint32_t b = *src;
		uint8_t five[5];

		for (int k = 4; k >= 0; k--) {
			uint32_t third = bits_third(b);

			five[k] = (uint8_t)(b - 3 * third);
			b = third;
		}
		memcpy(code + i, five, n - i < 5 ? n - i : 5);
	}
}

static uint8_t max_byte(const uint8_t *p, size_t n)
{
	uint8_t most = 0;

	for (size_t i = 0; i < n; i++)
		most = p[i] > most ? p[i] : most;
	return most;
}

/* Return the integer of a ternary code: 0, 1, 2 give 0, 1, -1. */
static inline int unit_of(uint8_t code)
{
	return (code & 1) - (code >> 1);
}

static inline void sum_int8(const uint8_t *code, size_t n, int more, int8_t *y)
{
	for (size_t i = 0; i < n; i++)
		y[i] = (int8_t)((more ? y[i] : 0) + unit_of(code[i]));
}

static inline void sum_int16(const uint8_t *code, size_t n, int more, int16_any *y)
{
	for (size_t i = 0; i < n; i++)
		y[i] = (int16_t)((more ? y[i] : 0) + unit_of(code[i]));
}

static inline void sum_int32(const uint8_t *code, size_t n, int more, int32_any *y)
{
	for (size_t i = 0; i < n; i++)
		y[i] = (int32_t)((uint32_t)(more ? y[i] : 0) + (uint32_t)unit_of(code[i]));
}

static void sum_codes(const uint8_t *code, size_t n, int more, size_t nbytes, void *y)
{
	if (nbytes == 1)
		more ? sum_int8(code, n, 1, y) : sum_int8(code, n, 0, y);
	else if (nbytes == 2)
		more ? sum_int16(code, n, 1, y) : sum_int16(code, n, 0, y);
	else
		more ? sum_int32(code, n, 1, y) : sum_int32(code, n, 0, y);
}

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

/* Return 1 if `by` is a power of two: multiplying by its inverse is then exact division, and faster. */
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

/* Apply the final operation to a result. */
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

	if (behind % sizeof *dst) /* dst is not float-aligned, so no element reaches the alignment */
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

#define ROW_LOOPS                                                                                                      \
	.to_float = {to_float_bfloat16, to_float_float16}, .from_float = {from_float_bfloat16, from_float_float16},    \
	.abs_max = abs_max, .extremes = extremes, .row_sums = row_sums, .row_fold = row_fold, .sign_bits = sign_bits,  \
	.sign_values = sign_values, .sign_sums = sign_sums, .halves = halves, .encode_rows = encode_rows,              \
	.decode_rows = decode_rows, .pack_codes = pack_codes, .unpack_codes = unpack_codes, .pack_trits = pack_trits,  \
	.unpack_trits = unpack_trits, .max_byte = max_byte, .sum_codes = sum_codes, .plus = plus, .minus = minus,      \
	.subtract = subtract, .add = add, .multiply = multiply, .divide = divide, .maximum = maximum, .settle = settle
