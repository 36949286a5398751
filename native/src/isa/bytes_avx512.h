/* bytes_avx512.h - look up 64 bytes at a time in tables of 256 bytes. */
#ifndef CODEC_BYTES_AVX512_H
#define CODEC_BYTES_AVX512_H

#include <immintrin.h>

#include "kernels.h"

/* Table of 256 bytes in four registers: two permutes of 128 bytes each, blended by bit 7. */
struct bytes256 {
	__m512i part[4];
};

static inline struct bytes256 bytes256_load(const uint8_t *p)
{
	struct bytes256 t;

	for (int i = 0; i < 4; i++)
		t.part[i] = _mm512_loadu_si512(p + 64 * i);
	return t;
}

static inline __m512i bytes256_find(const struct bytes256 *t, __m512i x)
{
	__m512i low = _mm512_permutex2var_epi8(t->part[0], x, t->part[1]);
	__m512i high = _mm512_permutex2var_epi8(t->part[2], x, t->part[3]);

	return _mm512_mask_blend_epi8(_mm512_movepi8_mask(x), low, high);
}

#endif
