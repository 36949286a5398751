/* nontemporal_avx2.h - non-temporal (streaming) stores. */
#ifndef CODEC_NONTEMPORAL_AVX2_H
#define CODEC_NONTEMPORAL_AVX2_H

#include <immintrin.h>

#include "kernels.h"

/*
 * Store a vector. A non-temporal store is done as two stores of 16 bytes, because malloc guarantees only 16-byte
 * alignment. call_leave orders non-temporal stores before later stores.
 */
static inline void put256(int nontemporal, void *p, __m256i v)
{
	if (nontemporal) {
		_mm_stream_si128((__m128i *)p, _mm256_castsi256_si128(v));
		_mm_stream_si128((__m128i *)p + 1, _mm256_extracti128_si256(v, 1));
	} else {
		_mm256_storeu_si256((__m256i *)p, v);
	}
}

#endif
