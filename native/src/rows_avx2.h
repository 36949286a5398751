/* rows_avx2.h - loops of row_loops.h that no compiler makes well, in 256-bit vectors: for AVX2 and above.
 *
 * Each does the first values and returns how many; the portable ones do the rest.
 */
#ifndef CODEC_ROWS_AVX2_H
#define CODEC_ROWS_AVX2_H

#include <immintrin.h>

#include "kernels.h"

/* Bytes of two halves interleaved by packs, back in order. */
static inline __m256i in_order(__m256i v)
{
	return _mm256_permutevar8x32_epi32(v, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

static inline size_t sign_bits_avx2(const float_any *x, size_t n, uint8_t *bits)
{
	size_t i = 0;

	for (; i + 32 <= n; i += 32) {
		const __m256i *p = (const __m256i *)(x + i);
		__m256i a = _mm256_packs_epi32(_mm256_loadu_si256(p), _mm256_loadu_si256(p + 1));
		__m256i b = _mm256_packs_epi32(_mm256_loadu_si256(p + 2), _mm256_loadu_si256(p + 3));
		uint32_t negative = (uint32_t)_mm256_movemask_epi8(in_order(_mm256_packs_epi16(a, b)));

		store32(bits + i / 8, ~negative);
	}
	return i;
}

static inline size_t sign_values_avx2(const uint8_t *bits, size_t n, float negative, float positive, float_any *y)
{
	const __m256i count = _mm256_setr_epi32(7, 6, 5, 4, 3, 2, 1, 0);
	const __m256 p = _mm256_set1_ps(positive), q = _mm256_set1_ps(negative);
	size_t i = 0;

	for (; i + 32 <= n; i += 32) {
		uint32_t word = load32(bits + i / 8);

		for (int k = 0; k < 4; k++) { /* each bit on top of its lane in turn, where blendv looks */
			__m256i v = _mm256_set1_epi32((int)(word << (24 - 8 * k)));

			_mm256_storeu_ps(y + i + 8 * k,
					 _mm256_blendv_ps(q, p, _mm256_castsi256_ps(_mm256_sllv_epi32(v, count))));
		}
	}
	return i;
}

/* a * b for each of 8 words: lower and upper halves of the products. */
static inline void multiply_wide(__m256i a, __m256i b, __m256i *lo, __m256i *hi)
{
	__m256i even = _mm256_mul_epu32(a, b), odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), b);

	*lo = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
	*hi = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
}

/* Eight blocks of Philox at a time, a register a word. Their counters must not carry into the upper half. */
static inline size_t halves_avx2(struct philox key, uint64_t block, size_t nblocks, uint16_t *h)
{
	const __m256i m0 = _mm256_set1_epi32((int)PHILOX_M0), m1 = _mm256_set1_epi32((int)PHILOX_M1);
	size_t b = 0;

	for (; b + 8 <= nblocks && (uint32_t)(block + b) <= UINT32_MAX - 8; b += 8) {
		__m256i c0 = _mm256_add_epi32(_mm256_set1_epi32((int)(uint32_t)(block + b)),
					      _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
		__m256i c1 = _mm256_set1_epi32((int)((block + b) >> 32)), c2 = _mm256_setzero_si256();
		__m256i c3 = _mm256_set1_epi32((int)key.stream_high), t0, t1, t2, t3;
		uint32_t k0 = key.seed, k1 = key.stream;

		for (int r = 0; r < PHILOX_ROUNDS; r++, k0 += PHILOX_W0, k1 += PHILOX_W1) {
			__m256i lo0, hi0, lo1, hi1;

			multiply_wide(c0, m0, &lo0, &hi0);
			multiply_wide(c2, m1, &lo1, &hi1);
			c0 = _mm256_xor_si256(_mm256_xor_si256(hi1, c1), _mm256_set1_epi32((int)k0));
			c2 = _mm256_xor_si256(_mm256_xor_si256(hi0, c3), _mm256_set1_epi32((int)k1));
			c1 = lo1;
			c3 = lo0;
		}
		t0 = _mm256_unpacklo_epi32(c0, c1);
		t1 = _mm256_unpacklo_epi32(c2, c3);
		t2 = _mm256_unpackhi_epi32(c0, c1);
		t3 = _mm256_unpackhi_epi32(c2, c3);
		c0 = _mm256_unpacklo_epi64(t0, t1); /* blocks 0 and 4 */
		c1 = _mm256_unpackhi_epi64(t0, t1); /* 1 and 5 */
		c2 = _mm256_unpacklo_epi64(t2, t3);
		c3 = _mm256_unpackhi_epi64(t2, t3);
		_mm256_storeu_si256((__m256i *)(h + 8 * b), _mm256_permute2x128_si256(c0, c1, 0x20));
		_mm256_storeu_si256((__m256i *)(h + 8 * b + 16), _mm256_permute2x128_si256(c2, c3, 0x20));
		_mm256_storeu_si256((__m256i *)(h + 8 * b + 32), _mm256_permute2x128_si256(c0, c1, 0x31));
		_mm256_storeu_si256((__m256i *)(h + 8 * b + 48), _mm256_permute2x128_si256(c2, c3, 0x31));
	}
	return b;
}

/*
 * Six bytes from 30 codes at a time: 15 in each half, dealt so that pairs meet their weights. Reads 2 codes more, and
 * writes 2 bytes more.
 */
static inline size_t pack_trits_avx2(const uint8_t *code, size_t n, uint8_t *dst)
{
	const __m256i first =
		_mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 2, 3, 5, 6, 7, 8, 10, 11, 12, 13, -1, -1, -1, -1));
	const __m256i last = _mm256_broadcastsi128_si256(
		_mm_setr_epi8(4, -1, -1, -1, 9, -1, -1, -1, 14, -1, -1, -1, -1, -1, -1, -1));
	const __m256i weight = _mm256_set1_epi32(3 << 24 | 9 << 16 | 27 << 8 | 81);
	const __m256i gather =
		_mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1));
	size_t i = 0;

	for (; i + 48 <= n; i += 30) {
		__m256i c =
			_mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(code + i))),
						_mm_loadu_si128((const __m128i *)(code + i + 15)), 1);
		__m256i sum = _mm256_maddubs_epi16(_mm256_shuffle_epi8(c, first), weight);

		sum = _mm256_madd_epi16(sum, _mm256_set1_epi16(1));
		sum = _mm256_shuffle_epi8(_mm256_add_epi32(sum, _mm256_shuffle_epi8(c, last)), gather);
		store32(dst + i / 5, (uint32_t)_mm256_extract_epi32(sum, 0));
		store32(dst + i / 5 + 3, (uint32_t)_mm256_extract_epi32(sum, 4));
	}
	return i;
}

/*
 * And back, 3 bytes in each half: b * 3^k / 243 as a fraction of 2^16 gives each digit on top. ceil(2^16 / 243) = 270
 * is near enough for 243 numerators. Writes 2 codes more.
 */
static inline size_t unpack_trits_avx2(const uint8_t *src, size_t n, uint8_t *code)
{
	/* words: bytes 0, 0, 0, 0, 0, 1, 1, 1 and 1, 1, 2, 2, 2, 2, 2, - */
	const __m256i take = _mm256_setr_epi8(0, -1, 0, -1, 0, -1, 0, -1, 0, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 2,
					      -1, 2, -1, 2, -1, 2, -1, 2, -1, -1, -1);
	/* byte * 270 * 3^k mod 2^16 is the fraction after k digits: its digit is the upper half of three times that */
	const __m256i scale = _mm256_setr_epi16(270, 810, 2430, 7290, 21870, 270, 810, 2430, 7290, 21870, 270, 810,
						2430, 7290, 21870, 0);
	size_t i = 0;

	for (; i + 48 <= n; i += 15, src += 3) {
		__m256i b = _mm256_shuffle_epi8(_mm256_set1_epi32((int)load32(src)), take);
		__m256i digit = _mm256_mulhi_epu16(_mm256_mullo_epi16(b, scale), _mm256_set1_epi16(3));

		_mm_storeu_si128((__m128i *)(code + i),
				 _mm_packus_epi16(_mm256_castsi256_si128(digit), _mm256_extracti128_si256(digit, 1)));
	}
	return i;
}

#define SIGN_BITS sign_bits_avx2
#define SIGN_VALUES sign_values_avx2
#define HALVES halves_avx2
#define PACK_TRITS pack_trits_avx2
#define UNPACK_TRITS unpack_trits_avx2

#endif
