/* past_avx2.h - non-temporal (streaming) stores. */
#ifndef CODEC_PAST_AVX2_H
#define CODEC_PAST_AVX2_H

#include <immintrin.h>

#include "kernels.h"

/*
 * Store a vector; past: with non-temporal stores, in halves of 16 bytes because malloc guarantees no more alignment.
 * call_leave orders these stores.
 */
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
