/* planes_avx2.h - values to byte planes and back, and the checksum, in 256-bit vectors: for AVX2 and above.
 *
 * Loops stop at a multiple of 32 values; the portable ones of loops.h do the rest.
 */
#ifndef CODEC_PLANES_AVX2_H
#define CODEC_PLANES_AVX2_H

#include <immintrin.h>

#include "kernels.h"

#define LOAD256(p) _mm256_loadu_si256((const __m256i *)(p))
#define STORE256(p, v) _mm256_storeu_si256((__m256i *)(p), v)

static inline __m256i and8(__m256i v, int mask)
{
	return _mm256_and_si256(v, _mm256_set1_epi8((char)mask));
}

/* The two top bytes of 32 floats: sign and 7 bits of exponent | 1 of exponent and 7 of mantissa, to
 * exponent | sign and 7 of mantissa; and back. */
static inline void turn_bytes(__m256i *high, __m256i *low)
{
	__m256i h = *high, l = *low;

	*high = _mm256_or_si256(and8(_mm256_slli_epi16(h, 1), 0xfe), and8(_mm256_srli_epi16(l, 7), 1));
	*low = _mm256_or_si256(and8(h, 0x80), and8(l, 0x7f));
}

static inline void unturn_bytes(__m256i *high, __m256i *low)
{
	__m256i e = *high, s = *low;

	*high = _mm256_or_si256(and8(s, 0x80), and8(_mm256_srli_epi16(e, 1), 0x7f));
	*low = _mm256_or_si256(and8(_mm256_slli_epi16(e, 7), 0x80), and8(s, 0x7f));
}

/* Store past the caches, in the halves that malloc's alignment allows, or as usual. */
static inline void put256(int past, void *p, __m256i v)
{
	if (past) {
		_mm_stream_si128((__m128i *)p, _mm256_castsi256_si128(v));
		_mm_stream_si128((__m128i *)p + 1, _mm256_extracti128_si256(v, 1));
	} else {
		STORE256(p, v);
	}
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
	_mm_sfence();
}

static inline size_t split2_avx2(const void *src, size_t n, uint8_t *const *plane, int turn)
{
	const char *p = src;
	size_t i = 0;

	for (; i + 32 <= n; i += 32) {
		__m256i a = LOAD256(p + 2 * i), b = LOAD256(p + 2 * i + 32), byte = _mm256_set1_epi16(255);
		__m256i high = _mm256_packus_epi16(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8));
		__m256i low = _mm256_packus_epi16(_mm256_and_si256(a, byte), _mm256_and_si256(b, byte));

		if (turn)
			turn_bytes(&high, &low);
		STORE256(plane[0] + i, _mm256_permute4x64_epi64(high, 0xd8));
		STORE256(plane[1] + i, _mm256_permute4x64_epi64(low, 0xd8));
	}
	return i;
}

static inline size_t merge2_avx2(const uint8_t *const *plane, size_t n, void *dst, int turn, int past)
{
	char *p = dst;
	size_t i = 0;

	past = past && (uintptr_t)p % 16 == 0;

	for (; i + 32 <= n; i += 32) {
		__m256i high = _mm256_permute4x64_epi64(LOAD256(plane[0] + i), 0xd8);
		__m256i low = _mm256_permute4x64_epi64(LOAD256(plane[1] + i), 0xd8);

		if (turn)
			unturn_bytes(&high, &low);
		put256(past, p + 2 * i, _mm256_unpacklo_epi8(low, high));
		put256(past, p + 2 * i + 32, _mm256_unpackhi_epi8(low, high));
	}
	if (past)
		_mm_sfence();
	return i;
}

static inline size_t split4_avx2(const void *src, size_t n, uint8_t *const *plane, int turn)
{
	/* bytes of a kind together in each half, then across the halves: 8 bytes of each kind */
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
		if (turn)
			turn_bytes(&b[3], &b[2]);
		for (int k = 0; k < 4; k++)
			STORE256(plane[k] + i, b[3 - k]);
	}
	return i;
}

static inline size_t merge4_avx2(const uint8_t *const *plane, size_t n, void *dst, int turn, int past)
{
	char *p = dst;
	size_t i = 0;

	past = past && (uintptr_t)p % 16 == 0;

	for (; i + 32 <= n; i += 32) {
		__m256i b[4], low, high, lowh, highh, v[4];

		for (int k = 0; k < 4; k++)
			b[k] = LOAD256(plane[3 - k] + i);
		if (turn)
			unturn_bytes(&b[3], &b[2]);
		low = _mm256_unpacklo_epi8(b[0], b[1]);
		lowh = _mm256_unpackhi_epi8(b[0], b[1]);
		high = _mm256_unpacklo_epi8(b[2], b[3]);
		highh = _mm256_unpackhi_epi8(b[2], b[3]);
		v[0] = _mm256_unpacklo_epi16(low, high);
		v[1] = _mm256_unpackhi_epi16(low, high);
		v[2] = _mm256_unpacklo_epi16(lowh, highh);
		v[3] = _mm256_unpackhi_epi16(lowh, highh);
		put256(past, p + 4 * i, _mm256_permute2x128_si256(v[0], v[1], 0x20));
		put256(past, p + 4 * i + 32, _mm256_permute2x128_si256(v[2], v[3], 0x20));
		put256(past, p + 4 * i + 64, _mm256_permute2x128_si256(v[0], v[1], 0x31));
		put256(past, p + 4 * i + 96, _mm256_permute2x128_si256(v[2], v[3], 0x31));
	}
	if (past)
		_mm_sfence();
	return i;
}

/* sum(word[i] * key[i]) over a whole chunk; key[WIRE_CHUNK_WORDS] is read and ignored. */
static inline uint64_t chunk_sum_avx2(const uint8_t *src, const uint32_t *key)
{
	__m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
	__m128i s;

	for (int i = 0; i < WIRE_CHUNK_WORDS; i += 16) {
		__m256i v = LOAD256(src + 4 * i), w = LOAD256(src + 4 * i + 32);

		/* even words meet even keys; odd words, shifted down, the keys read one word further on */
		a = _mm256_add_epi64(a, _mm256_mul_epu32(v, LOAD256(key + i)));
		b = _mm256_add_epi64(b, _mm256_mul_epu32(_mm256_srli_epi64(v, 32), LOAD256(key + i + 1)));
		c = _mm256_add_epi64(c, _mm256_mul_epu32(w, LOAD256(key + i + 8)));
		d = _mm256_add_epi64(d, _mm256_mul_epu32(_mm256_srli_epi64(w, 32), LOAD256(key + i + 9)));
	}
	a = _mm256_add_epi64(_mm256_add_epi64(a, b), _mm256_add_epi64(c, d));
	s = _mm_add_epi64(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
	return (uint64_t)_mm_cvtsi128_si64(s) + (uint64_t)_mm_extract_epi64(s, 1);
}

static inline void sum_avx2(const uint8_t *e, size_t n, uint32_t *total, uint32_t *count)
{
	const __m256i zero = _mm256_setzero_si256();
	__m256i t = zero, c = zero;
	uint64_t sums[4], zeros[4];
	size_t i = 0;

	for (; i + 32 <= n; i += 32) {
		__m256i v = LOAD256(e + i);

		t = _mm256_add_epi64(t, _mm256_sad_epu8(v, zero));
		c = _mm256_add_epi64(c, _mm256_sad_epu8(and8(_mm256_cmpeq_epi8(v, zero), 1), zero));
	}
	STORE256(sums, t);
	STORE256(zeros, c);
	*total = (uint32_t)(sums[0] + sums[1] + sums[2] + sums[3]);
	*count = (uint32_t)(i - zeros[0] - zeros[1] - zeros[2] - zeros[3]);
	for (; i < n; i++) {
		*total += e[i];
		*count += e[i] != 0;
	}
}

#define SUM sum_avx2
#define SPLIT2_FIRST split2_avx2
#define MERGE2_FIRST merge2_avx2
#define SPLIT4_FIRST split4_avx2
#define MERGE4_FIRST merge4_avx2
#define STREAM stream_avx2
#define CHUNK_SUM chunk_sum_avx2

#endif
