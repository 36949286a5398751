/* truncate_avx2.h - loops of truncate_loops.h that pack and unpack bits, in 256-bit vectors. */
#ifndef CODEC_TRUNCATE_AVX2_H
#define CODEC_TRUNCATE_AVX2_H

#include <immintrin.h>

#include "kernels.h"

/* Return the inclusive prefix sums of 8 bytes, one per byte. The sums must be at most 255. */
static inline uint64_t running_sums(const uint8_t *p)
{
	return load64(p) * 0x0101010101010101;
}

/*
 * Unpack fields of at most 24 bits: each 128-bit half of a vector unpacks 4 fields, and each lane loads the four bytes
 * in which its field begins.
 */
static inline size_t unpack_fields_avx2(const uint8_t *src, size_t nbytes, const uint8_t *width, size_t n, int total,
					uint32_t *f, size_t *bit)
{
	const __m256i spread = _mm256_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12, 0, 0, 0, 0, 4, 4, 4,
						4, 8, 8, 8, 8, 12, 12, 12, 12);
	const __m256i bytes = _mm256_set1_epi32(0x03020100), all = _mm256_set1_epi32(32);
	const __m128i above = _mm_cvtsi32_si128(32 - total);
	size_t i = 0, at = 0;

	/* the fields of the second half begin at most 12 bytes after `at`, and 16 bytes are read there */
	for (; i + 8 <= n && at / 8 + 32 <= nbytes; i += 8) {
		uint64_t sums = running_sums(width + i), half = sums >> 24 & 255;
		const uint8_t *p = src + at / 8, *q = src + (at + half) / 8;
		__m256i w = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(width + i))), start, index, x;

		/* start bit of each field, counted from the byte in which its half begins */
		start = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)(sums << 8)));
		start = _mm256_sub_epi32(start, _mm256_setr_m128i(_mm_set1_epi32(-(int)(at % 8)),
								  _mm_set1_epi32((int)half - (int)((at + half) % 8))));
		index = _mm256_shuffle_epi8(_mm256_srli_epi32(start, 3), spread);
		x = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)p)),
					    _mm_loadu_si128((const __m128i *)q), 1);
		x = _mm256_shuffle_epi8(x, _mm256_add_epi8(index, bytes));
		x = _mm256_srlv_epi32(x, _mm256_and_si256(start, _mm256_set1_epi32(7)));
		x = _mm256_sllv_epi32(x, _mm256_sub_epi32(all, w));
		_mm256_storeu_si256((__m256i *)(f + i), _mm256_srl_epi32(x, above));
		at += sums >> 56;
	}
	*bit = at;
	return i;
}

#define UNPACK_FIELDS unpack_fields_avx2

#endif
