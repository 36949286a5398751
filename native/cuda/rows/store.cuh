/*
 * rows/store.cuh - decode codes of 2, 4 or 8 bits, in whole rows of 128. This covers most tensors of quantize and
 * ternary. docs/spec/format.md, section 8.
 *
 * All codes must have been checked before. A value is the product of its row's scale and an entry of a table in shared
 * memory.
 */
#ifndef CODEC_CUDA_ROWS_STORE_CUH
#define CODEC_CUDA_ROWS_STORE_CUH

#include "rows/rows.cuh"

/* Return true if the only invalid code is the one with all bits set, which check_codes finds. */
DEVICE bool checks_words(struct row_kind q)
{
	return q.bits == 2 || q.bits == 4 || q.bits == 8;
}

/* Return true if a field of `bits` bits in a word has all bits set. */
DEVICE bool any_full(uint32_t x, uint32_t bits)
{
	x &= x >> 1;
	x &= bits > 2 ? x >> 2 : ~0u;
	x &= bits > 4 ? x >> 4 : ~0u;
	return x & (bits == 2 ? 0x55555555 : bits == 4 ? 0x11111111 : ONES);
}

/* TERNARY, QUANTIZE: check that nbytes bytes of codes contain no code with all bits set, if such a code is invalid. */
DEVICE bool check_codes(struct row_kind q, const uint8_t *codes, uint64_t nbytes, uint32_t lane)
{
	const uint32_t AT_ONCE = 4; /* number of words whose loads are in flight together */
	uint64_t i = lane;
	bool bad = false;

	if (q.codec == CODEC_QUANTIZE && !q.odd)
		return true;
	if ((uint64_t)codes % 4 == 0)
		for (; 4 * (i + 32 * (AT_ONCE - 1)) + 4 <= nbytes; i += 32 * AT_ONCE) {
			uint32_t x[AT_ONCE];

			for (uint32_t k = 0; k < AT_ONCE; k++)
				x[k] = global((const uint32_t *)codes)[i + 32 * k];
			for (uint32_t k = 0; k < AT_ONCE; k++)
				bad |= any_full(x[k], q.bits);
		}
	for (; 4 * i < nbytes; i += 32) {
		const uint64_t left = nbytes - 4 * i;

		bad |= any_full(load_bytes(codes + 4 * i, left < 4 ? (uint32_t)left : 4), q.bits);
	}
	return !__any_sync(FULL, bad);
}

/*
 * Return a and b, rounded to a dtype of 16 bits, in a word. Their magnitudes must not exceed the dtype's largest
 * number: the hardware rounds larger values to Inf, while round_to_bfloat16 and round_to_float16 return the largest
 * number.
 */
DEVICE uint32_t rounded_pair(uint32_t dtype, float a, float b)
{
#ifdef __CUDA_ARCH__
	uint32_t two;

	if (dtype == CODEC_BFLOAT16)
		asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(two) : "f"(a), "f"(b));
	else
		asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(two) : "f"(a), "f"(b));
	return two;
#else
	return bits_of_float(dtype, a) | bits_of_float(dtype, b) << 16;
#endif
}

/* Return the largest number of a dtype, as bits of float32. */
DEVICE uint32_t largest_of_dtype(uint32_t dtype)
{
	return dtype == CODEC_FLOAT32 ? ROUND_MAX : dtype == CODEC_BFLOAT16 ? 0x7f7f0000 : 0x477fe000;
}

/* Dequantize four values of a row, whose codes are the lower bits of x, and store them at `to`. */
template <int CODEC, int BITS>
DEVICE void store_quad_of(uint32_t x, float scale, const float *ratio, uint32_t dtype, uint8_t *to)
{
	float y[4];

	for (uint32_t k = 0; k < 4; k++) {
		const float r = ratio[x >> BITS * k & ((1u << BITS) - 1)];

		/* adding 0 changes only -0, to +0, as required if the row's scale is 0 */
		y[k] = CODEC == CODEC_TERNARY ? round_mul(r, scale) : __fmaf_rn(r, scale, 0.0f);
	}
	if (dtype == CODEC_FLOAT32)
		*(uint4 *)to = {round_bits(y[0]), round_bits(y[1]), round_bits(y[2]), round_bits(y[3])};
	else
		*(uint2 *)to = {rounded_pair(dtype, y[0], y[1]), rounded_pair(dtype, y[2], y[3])};
}

/*
 * Decode and store 8 rows of 128 values at a time, of a block of m values. EACH: the codec's rows have 64 to 512
 * values, a power of two, so that the 8 rows of 128 have several scales; else they have one scale. Return the number of
 * rows of 128 decoded, fewer than all if a scale needs walk_code. Set *bad if a scale is invalid.
 */
template <int CODEC, int BITS, bool EACH>
DEVICE uint32_t store_rows_of(const row_walk &w, uint32_t m, uint8_t *to, uint32_t dtype, uint32_t *bad, uint32_t lane)
{
	const uint32_t AT_ONCE = 8, row_log2 = EACH ? 31 - (uint32_t)__clz((int)w.row) : 0,
		       most = largest_of_dtype(dtype);
	const float *ratio = shared(w.ratio);
	const uint8_t *codes = global(w.codes), *scales = global(w.scales);
	uint32_t r = 0, end = w.row ? 0 : ~0u, scale[AT_ONCE];
	const uint32_t size = dtype == CODEC_FLOAT32 ? 4 : 2;

	scale[0] = round_bits(w.scale);
	to = global(to) + size * 4 * lane;
	for (; WIRE_ROW * (r + AT_ONCE) <= m; r += AT_ONCE) {
		uint32_t x[AT_ONCE], worst;

		for (uint32_t k = 0; k < AT_ONCE; k++)
			x[k] = BITS == 8   ? ((const uint32_t *)codes)[32 * (r + k) + lane]
			       : BITS == 4 ? ((const uint16_t *)codes)[32 * (r + k) + lane]
					   : codes[32 * (r + k) + lane];
		if (EACH) {
			for (uint32_t k = 0; k < AT_ONCE; k++)
				scale[k] = ((const uint32_t *)scales)[(WIRE_ROW * (r + k) + 4 * lane) >> row_log2];
		} else if (WIRE_ROW * r >= end) {
			scale[0] = ((const uint32_t *)scales)[WIRE_ROW * r / w.row];
			end = WIRE_ROW * r + w.row;
		}
		/* prefetch the codes of the rows after the next ones */
		if (WIRE_ROW * (r + 3 * AT_ONCE) <= m && lane < AT_ONCE * BITS / 8)
			prefetch(codes + WIRE_ROW * (r + 2 * AT_ONCE) * BITS / 8 + LINE_NBYTES * lane);
		worst = scale[0];
		for (uint32_t k = 1; k < AT_ONCE && EACH; k++)
			worst = scale[k] > worst ? scale[k] : worst;
		*bad |= worst >= ROUND_INF;
		if (__any_sync(FULL, worst > most))
			break;
		for (uint32_t k = 0; k < AT_ONCE; k++) {
			const float s = round_float(scale[EACH ? k : 0]);

			if (dtype == CODEC_FLOAT32)
				store_quad_of<CODEC, BITS>(x[k], s, ratio, CODEC_FLOAT32, to + 4 * WIRE_ROW * (r + k));
			else
				store_quad_of<CODEC, BITS>(x[k], s, ratio, dtype, to + 2 * WIRE_ROW * (r + k));
		}
	}
	return r;
}

template <int CODEC, int BITS>
DEVICE uint32_t store_rows_by(const row_walk &w, uint32_t m, uint8_t *to, uint32_t dtype, uint32_t *bad, uint32_t lane)
{
	if (CODEC == CODEC_QUANTIZE && (w.row == 64 || w.row == 128 || w.row == 256 || w.row == 512))
		return store_rows_of<CODEC, BITS, true>(w, m, to, dtype, bad, lane);
	return w.row % (8 * WIRE_ROW) ? 0 : store_rows_of<CODEC, BITS, false>(w, m, to, dtype, bad, lane);
}

/*
 * Decode and store as many whole rows of 128 values, of a block of m values, as the loops support, 8 at a time. to:
 * address, a multiple of the size of four values. Return the number of rows decoded. Set *bad if a scale is invalid.
 */
template <int CODEC>
DEVICE uint32_t store_whole_rows(struct row_kind q, const row_walk &w, uint32_t m, uint8_t *to, uint32_t dtype,
				 uint32_t *bad, uint32_t lane)
{
	if ((uint64_t)w.codes % 4 || (uint64_t)w.scales % 4 || !checks_words(q))
		return 0;
	if (q.bits == 2)
		return store_rows_by<CODEC, 2>(w, m, to, dtype, bad, lane);
	if (CODEC == CODEC_TERNARY)
		return 0;
	return q.bits == 4 ? store_rows_by<CODEC, 4>(w, m, to, dtype, bad, lane)
			   : store_rows_by<CODEC, 8>(w, m, to, dtype, bad, lane);
}

#endif
