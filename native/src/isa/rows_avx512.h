/* rows_avx512.h - loops of row_loops.h where 512-bit vectors, masks and permutations of 16 do better than rows_avx2.h.
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

static inline size_t sign_values_avx512(const uint8_t *bits, size_t n, float negative, float positive, float_any *y)
{
	const __m512 p = _mm512_set1_ps(positive), q = _mm512_set1_ps(negative);
	size_t i = 0;

	for (; i + 16 <= n; i += 16)
		_mm512_storeu_ps(y + i, _mm512_mask_blend_ps(load16(bits + i / 8), q, p));
	return i;
}

static inline void narrow_avx512(uint8_t *p, const __m512i v[4])
{
	const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
	__m512i a = _mm512_packus_epi32(v[0], v[1]), b = _mm512_packus_epi32(v[2], v[3]);

	_mm512_storeu_si512(p, _mm512_permutexvar_epi32(order, _mm512_packus_epi16(a, b)));
}

#undef SIGN_BITS
#undef SIGN_VALUES
#define SIGN_BITS sign_bits_avx512
#define SIGN_VALUES sign_values_avx512

#endif
