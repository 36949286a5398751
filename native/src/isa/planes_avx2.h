/*
 * planes_avx2.h - split values into byte planes, merge them, and compute the checksum, in 256-bit vectors.
 *
 * Loops stop at a multiple of 32 values; the portable loops of plane_loops.h process the rest.
 */
#ifndef CODEC_PLANES_AVX2_H
#define CODEC_PLANES_AVX2_H

#include <immintrin.h>

#include "nontemporal_avx2.h"

#define LOAD256(p) _mm256_loadu_si256((const __m256i *)(p))
#define STORE256(p, v) _mm256_storeu_si256((__m256i *)(p), v)

/*
 * Vectorized bits_turn and bits_unturn, for the two top bytes of 16 floats. They subtract an offset modulo n =
 * CIRCLE256: if the difference d is negative, n must be added. As unsigned words, the correct result is min(d, d + n).
 */
#define CIRCLE256 _mm256_set1_epi16(WIRE_CIRCLE(128))

static inline __m256i lower256(__m256i x, __m256i offset)
{
	const __m256i zero = _mm256_set1_epi16(128);
	__m256i p = _mm256_and_si256(x, _mm256_set1_epi16(0x7fff)), q = _mm256_sub_epi16(p, zero);
	__m256i d = _mm256_sub_epi16(q, offset), u = _mm256_min_epu16(d, _mm256_add_epi16(d, CIRCLE256));

	return _mm256_blendv_epi8(_mm256_add_epi16(u, zero), p, _mm256_srai_epi16(q, 15));
}

static inline __m256i raise256(__m256i u, __m256i offset)
{
	const __m256i zero = _mm256_set1_epi16(128), past_end = _mm256_set1_epi16((short)(0x8000 | 128));
	__m256i s = _mm256_add_epi16(u, _mm256_andnot_si256(_mm256_cmpgt_epi16(zero, u), offset));

	return _mm256_add_epi16(s, _mm256_and_si256(_mm256_srai_epi16(s, 15), past_end));
}

/*
 * Compute planes 0 (*high) and 1 (*low) of the 32 values in a and b. The results are in the order of
 * _mm256_packus_epi16.
 */
static inline void turn256(__m256i a, __m256i b, __m256i offset_a, __m256i offset_b, __m256i *high, __m256i *low)
{
	const __m256i mantissa = _mm256_set1_epi16(0x7f), sign = _mm256_set1_epi16(0x80);
	__m256i u = lower256(a, offset_a), v = lower256(b, offset_b);

	*high = _mm256_packus_epi16(_mm256_srli_epi16(u, 7), _mm256_srli_epi16(v, 7));
	u = _mm256_or_si256(_mm256_and_si256(u, mantissa), _mm256_and_si256(_mm256_srli_epi16(a, 8), sign));
	v = _mm256_or_si256(_mm256_and_si256(v, mantissa), _mm256_and_si256(_mm256_srli_epi16(b, 8), sign));
	*low = _mm256_packus_epi16(u, v);
}

/*
 * Compute the upper 16 bits of 16 floats from y, which has the byte of plane 0 in the upper half of each word and the
 * byte of plane 1 in the lower half.
 */
static inline __m256i unturn256(__m256i y, __m256i offset)
{
	const __m256i mantissa = _mm256_set1_epi16(0x7f), sign = _mm256_set1_epi16((short)0x8000);
	__m256i u =
		_mm256_or_si256(_mm256_and_si256(y, mantissa), _mm256_andnot_si256(mantissa, _mm256_srli_epi16(y, 1)));

	return _mm256_or_si256(raise256(u, offset), _mm256_and_si256(_mm256_slli_epi16(y, 8), sign));
}

static inline void stream_avx2(uint8_t *dst, const uint8_t *src, size_t n)
{
	size_t i = (16 - (uintptr_t)dst % 16) % 16;

	i = i < n ? i : n;
	memcpy(dst, src, i);
	for (; i + 64 <= n; i += 64) {
		put256(1, dst + i, LOAD256(src + i));
		put256(1, dst + i + 32, LOAD256(src + i + 32));
	}
	memcpy(dst + i, src + i, n - i);
}

static inline size_t split2_avx2(const void *src, size_t n, const uint16_t *offset, uint8_t *const *plane)
{
	const char *p = src;
	size_t i = 0;

	for (; i + 32 <= n; i += 32) {
		__m256i a = LOAD256(p + 2 * i), b = LOAD256(p + 2 * i + 32), byte = _mm256_set1_epi16(255), high, low;

		if (offset) {
			turn256(a, b, LOAD256(offset + i), LOAD256(offset + i + 16), &high, &low);
		} else {
			high = _mm256_packus_epi16(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8));
			low = _mm256_packus_epi16(_mm256_and_si256(a, byte), _mm256_and_si256(b, byte));
		}
		STORE256(plane[0] + i, _mm256_permute4x64_epi64(high, 0xd8));
		STORE256(plane[1] + i, _mm256_permute4x64_epi64(low, 0xd8));
	}
	return i;
}

static inline size_t merge2_avx2(const uint8_t *const *plane, size_t n, const uint16_t *offset, void *dst,
				 int nontemporal)
{
	char *p = dst;
	size_t i = 0;

	nontemporal = nontemporal && (uintptr_t)p % 16 == 0;

	for (; i + 32 <= n; i += 32) {
		__m256i high = _mm256_permute4x64_epi64(LOAD256(plane[0] + i), 0xd8);
		__m256i low = _mm256_permute4x64_epi64(LOAD256(plane[1] + i), 0xd8);
		__m256i a = _mm256_unpacklo_epi8(low, high), b = _mm256_unpackhi_epi8(low, high);

		put256(nontemporal, p + 2 * i, offset ? unturn256(a, LOAD256(offset + i)) : a);
		put256(nontemporal, p + 2 * i + 32, offset ? unturn256(b, LOAD256(offset + i + 16)) : b);
	}
	return i;
}

/* Load 32 offsets in the order of values after unpacklo and unpackhi: 0..7 and 16..23, 8..15 and 24..31. */
static inline void offsets_unpacked(const uint16_t *offset, __m256i *lo, __m256i *hi)
{
	__m256i a = LOAD256(offset), b = LOAD256(offset + 16);

	*lo = _mm256_permute2x128_si256(a, b, 0x20);
	*hi = _mm256_permute2x128_si256(a, b, 0x31);
}

static inline size_t split4_avx2(const void *src, size_t n, const uint16_t *offset, uint8_t *const *plane)
{
	/*
	 * byte order in each 128-bit half: byte 0 of its four values, then byte 1 of each, and so on; then the halves
	 * are joined to groups of 8 equal bytes
	 */
	const __m256i kinds =
		_mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
	const __m256i halves = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
	const char *p = src;
	size_t i = 0;

	for (; i + 32 <= n; i += 32) {
		__m256i v[4], lo01, hi01, lo23, hi23, b[4];

		for (int k = 0; k < 4; k++)
			v[k] = _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(LOAD256(p + 4 * i + 32 * k), kinds),
							   halves);
		lo01 = _mm256_unpacklo_epi64(v[0], v[1]); /* bytes 0 | bytes 2 */
		hi01 = _mm256_unpackhi_epi64(v[0], v[1]); /* bytes 1 | bytes 3 */
		lo23 = _mm256_unpacklo_epi64(v[2], v[3]);
		hi23 = _mm256_unpackhi_epi64(v[2], v[3]);
		b[0] = _mm256_permute2x128_si256(lo01, lo23, 0x20);
		b[2] = _mm256_permute2x128_si256(lo01, lo23, 0x31);
		b[1] = _mm256_permute2x128_si256(hi01, hi23, 0x20);
		b[3] = _mm256_permute2x128_si256(hi01, hi23, 0x31);
		if (offset) {
			__m256i lo, hi;

			offsets_unpacked(offset + i, &lo, &hi);
			turn256(_mm256_unpacklo_epi8(b[2], b[3]), _mm256_unpackhi_epi8(b[2], b[3]), lo, hi, &b[3],
				&b[2]);
		}
		for (int k = 0; k < 4; k++)
			STORE256(plane[k] + i, b[3 - k]);
	}
	return i;
}

static inline size_t merge4_avx2(const uint8_t *const *plane, size_t n, const uint16_t *offset, void *dst,
				 int nontemporal)
{
	char *p = dst;
	size_t i = 0;

	nontemporal = nontemporal && (uintptr_t)p % 16 == 0;

	for (; i + 32 <= n; i += 32) {
		__m256i b[4], low, high, lowh, highh, v[4];

		for (int k = 0; k < 4; k++)
			b[k] = LOAD256(plane[3 - k] + i);
		low = _mm256_unpacklo_epi8(b[0], b[1]);
		lowh = _mm256_unpackhi_epi8(b[0], b[1]);
		high = _mm256_unpacklo_epi8(b[2], b[3]);
		highh = _mm256_unpackhi_epi8(b[2], b[3]);
		if (offset) {
			__m256i lo, hi;

			offsets_unpacked(offset + i, &lo, &hi);
			high = unturn256(high, lo);
			highh = unturn256(highh, hi);
		}
		v[0] = _mm256_unpacklo_epi16(low, high);
		v[1] = _mm256_unpackhi_epi16(low, high);
		v[2] = _mm256_unpacklo_epi16(lowh, highh);
		v[3] = _mm256_unpackhi_epi16(lowh, highh);
		put256(nontemporal, p + 4 * i, _mm256_permute2x128_si256(v[0], v[1], 0x20));
		put256(nontemporal, p + 4 * i + 32, _mm256_permute2x128_si256(v[2], v[3], 0x20));
		put256(nontemporal, p + 4 * i + 64, _mm256_permute2x128_si256(v[0], v[1], 0x31));
		put256(nontemporal, p + 4 * i + 96, _mm256_permute2x128_si256(v[2], v[3], 0x31));
	}
	return i;
}

/* Return sum(word[i] * key[i]) over a chunk of 1 KiB. key[WIRE_CHUNK_WORDS] is read and ignored. */
static inline uint64_t chunk_sum_avx2(const uint8_t *src, const uint32_t *key)
{
	__m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
	__m128i s;

	for (int i = 0; i < WIRE_CHUNK_WORDS; i += 16) {
		__m256i v = LOAD256(src + 4 * i), w = LOAD256(src + 4 * i + 32);

		/*
		 * multiply even words by even keys; shuffle odd words down, and multiply by keys loaded from one word
		 * further
		 */
		a = _mm256_add_epi64(a, _mm256_mul_epu32(v, LOAD256(key + i)));
		b = _mm256_add_epi64(b, _mm256_mul_epu32(_mm256_shuffle_epi32(v, 0xf5), LOAD256(key + i + 1)));
		c = _mm256_add_epi64(c, _mm256_mul_epu32(w, LOAD256(key + i + 8)));
		d = _mm256_add_epi64(d, _mm256_mul_epu32(_mm256_shuffle_epi32(w, 0xf5), LOAD256(key + i + 9)));
	}
	a = _mm256_add_epi64(_mm256_add_epi64(a, b), _mm256_add_epi64(c, d));
	s = _mm_add_epi64(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
	return (uint64_t)_mm_cvtsi128_si64(s) + (uint64_t)_mm_extract_epi64(s, 1);
}

#define SPLIT2_FIRST split2_avx2
#define MERGE2_FIRST merge2_avx2
#define SPLIT4_FIRST split4_avx2
#define MERGE4_FIRST merge4_avx2
#define STREAM stream_avx2
#define CHUNK_SUM chunk_sum_avx2

#endif
