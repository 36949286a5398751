/* past_avx2.h - stores past the caches. */
#ifndef CODEC_PAST_AVX2_H
#define CODEC_PAST_AVX2_H

#include <immintrin.h>

#include "kernels.h"

/* Store past the caches, in the halves that malloc's alignment allows, or as usual. call_leave puts such stores in
 * order. */
static inline void put256(int past, void *p, __m256i v)
{
	if (past) {
		_mm_stream_si128((__m128i *)p, _mm256_castsi256_si128(v));
		_mm_stream_si128((__m128i *)p + 1, _mm256_extracti128_si256(v, 1));
	} else {
		_mm256_storeu_si256((__m256i *)p, v);
	}
}

#endif
