/*
 * rows_avx512.h - loops of row_loops.h that 512-bit vectors, masks and permutes of 16 words make faster than
 * rows_avx2.h.
 */
#ifndef CODEC_ROWS_AVX512_H
#define CODEC_ROWS_AVX512_H

#include "rows_avx2.h"

static inline size_t sign_bits_avx512(const float_any *x, size_t n, uint8_t *bits)
{
	size_t i = 0;

	for (; i + 32 <= n; i += 32) {
		uint32_t low = _mm512_movepi32_mask(_mm512_loadu_si512(x + i));
		uint32_t high = _mm512_movepi32_mask(_mm512_loadu_si512(x + i + 16));

		store32(bits + i / 8, ~(low | high << 16));
	}
	return i;
}

static inline __m512 signs_at(const uint8_t *bits, size_t i, __m512 negative, __m512 positive)
{
	unsigned shift = i % 8, third = bits[i / 8 + (shift ? 2 : 0)]; /* 16 bits span 3 bytes */

	return _mm512_mask_blend_ps((__mmask16)((load16(bits + i / 8) | third << 16) >> shift), negative, positive);
}

/*
 * Store the dequantized values of sign bits with non-temporal stores only, because a normal store that waits for its
 * cache line would delay the others. If a row ends within a cache line, its part of the line is stored in groups of
 * four values.
 */
static inline size_t sign_values_nontemporal(const uint8_t *bits, size_t n, float negative, float positive,
					     float_any *y)
{
	const __m512 p = _mm512_set1_ps(positive), q = _mm512_set1_ps(negative);
	size_t i = 0;

	while (i + 4 <= n) {
		if ((uintptr_t)(y + i) % 64 == 0 && i + 16 <= n) {
			_mm512_stream_si512((__m512i *)(y + i), _mm512_castps_si512(signs_at(bits, i, q, p)));
			i += 16;
		} else {
			__mmask16 four = (__mmask16)(bits[i / 8] >> i % 8);

			_mm_stream_ps((float *)y + i, _mm512_castps512_ps128(_mm512_mask_blend_ps(four, q, p)));
			i += 4;
		}
	}
	return i;
}

static inline size_t sign_values_avx512(const uint8_t *bits, size_t n, float negative, float positive, int how,
					float_any *y)
{
	const __m512 p = _mm512_set1_ps(positive), q = _mm512_set1_ps(negative);
	size_t i = 0;

	if (how == SIGNS_NONTEMPORAL)
		return sign_values_nontemporal(bits, n, negative, positive, y);
	for (; i + 16 <= n; i += 16) {
		__m512 x = signs_at(bits, i, q, p);

		_mm512_storeu_ps(y + i, how == SIGNS_ADD ? _mm512_add_ps(_mm512_loadu_ps(y + i), x) : x);
	}
	return i;
}

/* SIGN: add the dequantized values of all frames, for nv vectors of values from value i on. */
static inline void sign_sum_avx512(int nv, const struct signs *s, size_t count, size_t i, int more, int how, float by,
				   float_any *y)
{
	const __m512 factor = _mm512_set1_ps(by);
	__m512 sum[4];

	for (int k = 0; k < nv; k++)
		sum[k] = more ? _mm512_loadu_ps(y + i + 16 * k) : _mm512_setzero_ps();
	for (size_t f = 0; f < count; f++) {
		const __m512 p = _mm512_set1_ps(s[f].positive), q = _mm512_set1_ps(s[f].negative);
		uint64_t word = nv == 4 ? load64(s[f].bits + i / 8) : load16(s[f].bits + i / 8);

		for (int k = 0; k < nv; k++) {
			__m512 x = _mm512_mask_blend_ps((__mmask16)(word >> 16 * k), q, p);

			sum[k] = f || more ? _mm512_add_ps(sum[k], x) : x;
		}
	}
	for (int k = 0; k < nv; k++)
		_mm512_storeu_ps(y + i + 16 * k, how == SETTLE_TIMES  ? _mm512_mul_ps(sum[k], factor)
						 : how == SETTLE_OVER ? _mm512_div_ps(sum[k], factor)
								      : sum[k]);
}

static inline size_t sign_sums_avx512(const struct signs *s, size_t count, size_t n, int more, int how, float by,
				      float_any *y)
{
	size_t i = 0;

	for (; i + 64 <= n; i += 64)
		sign_sum_avx512(4, s, count, i, more, how, by, y);
	for (; i + 16 <= n; i += 16)
		sign_sum_avx512(1, s, count, i, more, how, by, y);
	return i;
}

/*
 * Pack codes: in each 64-bit lane, combine 8 codes to pairs, then to groups of 4, then to one number; then pack the
 * used bytes of all lanes. Loads and stores have 64 bytes; the loop condition guarantees that so many exist.
 */
static inline size_t pack_codes_avx512(const uint8_t *code, size_t n, int bits, uint8_t *dst)
{
	const __m512i pairs = _mm512_set1_epi16((short)(1 | 256 << bits));
	const __m512i quads = _mm512_set1_epi32(1 | 65536 << 2 * bits);
	const __m512i low = _mm512_set1_epi64((1ll << 4 * bits) - 1);
	const __mmask64 bytes = ((1u << bits) - 1) * 0x0101010101010101u;
	const __m128i gap = _mm_cvtsi32_si128(32 - 4 * bits);
	size_t i = 0;

	if (bits == 4 || bits == 7) /* 4 bits: a pair is a whole byte; 7 bits: the multiplier exceeds a signed byte */
		return pack_codes_avx2(code, n, bits, dst);
	for (; (n - i) * (size_t)bits >= 512; i += 64) {
		__m512i x = _mm512_madd_epi16(_mm512_maddubs_epi16(_mm512_loadu_si512(code + i), pairs), quads);

		x = _mm512_ternarylogic_epi64(low, x, _mm512_srl_epi64(x, gap), 0xca);
		_mm512_storeu_si512(dst + i / 8 * (size_t)bits, _mm512_maskz_compress_epi8(bytes, x));
	}
	return i;
}

static inline size_t unpack_codes_avx512(const uint8_t *src, size_t n, int bits, uint8_t *code)
{
	const __m512i places = _mm512_set1_epi64(0x0706050403020100 * bits),
		      mask = _mm512_set1_epi8((char)((1 << bits) - 1));
	const __mmask64 bytes = ((1u << bits) - 1) * 0x0101010101010101u;
	size_t i = 0;

	for (; (n - i) * (size_t)bits >= 512; i += 64) {
		__m512i x = _mm512_maskz_expand_epi8(bytes, _mm512_loadu_si512(src + i / 8 * (size_t)bits));

		_mm512_storeu_si512(code + i, _mm512_and_si512(_mm512_multishift_epi64_epi8(places, x), mask));
	}
	return i;
}

static inline int32_t least_avx512(__m512i v)
{
	return least_avx2(_mm256_min_epi32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1)));
}

static inline int32_t largest_avx512(__m512i v)
{
	return largest_avx2(_mm256_max_epi32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1)));
}

static inline void narrow_avx512(uint8_t *p, const __m512i v[4])
{
	const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
	__m512i a = _mm512_packus_epi32(v[0], v[1]), b = _mm512_packus_epi32(v[2], v[3]);

	_mm512_storeu_si512(p, _mm512_permutexvar_epi32(order, _mm512_packus_epi16(a, b)));
}

#undef SIGN_BITS
#undef SIGN_VALUES
#undef SIGN_SUMS
#undef PACK_CODES
#undef UNPACK_CODES
#define SIGN_BITS sign_bits_avx512
#define SIGN_VALUES sign_values_avx512
#define SIGN_SUMS sign_sums_avx512
#define PACK_CODES pack_codes_avx512
#define UNPACK_CODES unpack_codes_avx512

#endif
