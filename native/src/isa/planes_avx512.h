/*
 * planes_avx512.h - split values into byte planes, merge them, and compute the checksum, in 512-bit vectors.
 *
 * Loops stop at a multiple of 32 values; the portable loops of plane_loops.h process the rest.
 */
#ifndef CODEC_PLANES_AVX512_H
#define CODEC_PLANES_AVX512_H

#include <immintrin.h>

#include "kernels.h"

#define LOAD256(p) _mm256_loadu_si256((const __m256i *)(p))
#define STORE256(p, v) _mm256_storeu_si256((__m256i *)(p), v)

/* Return mask ? a : b for each bit. */
static inline __m512i select512(__m512i mask, __m512i a, __m512i b)
{
	return _mm512_ternarylogic_epi32(mask, a, b, 0xca);
}

/* Return the mask of 16-bit lanes whose pattern is at least 128: the patterns that the scale model changes. */
static inline __mmask32 moving512(__m512i x)
{
	return _mm512_test_epi16_mask(x, _mm512_set1_epi16(0x7f80));
}

/* Vectorized bits_turn and bits_unturn, for the two top bytes of 32 floats. */
static inline __m512i turn512(__m512i x, __m512i offset)
{
	const __m512i mantissa = _mm512_set1_epi16(0x7f), circle = _mm512_set1_epi16(WIRE_CIRCLE(128));
	__m512i p = _mm512_and_si512(x, _mm512_set1_epi16(0x7fff)), u, low;
	__mmask32 moves = moving512(x), below;

	u = _mm512_mask_sub_epi16(p, moves, p, offset);
	below = _mm512_mask_cmplt_epi16_mask(moves, u, _mm512_set1_epi16(128));
	u = _mm512_mask_add_epi16(u, below, u, circle);
	low = select512(mantissa, u, _mm512_srli_epi16(x, 8));
	return select512(_mm512_set1_epi16((short)0xff00), _mm512_slli_epi16(u, 1), low);
}

static inline __m512i unturn512(__m512i y, __m512i offset)
{
	const __m512i mantissa = _mm512_set1_epi16(0x7f), circle = _mm512_set1_epi16(WIRE_CIRCLE(128));
	__m512i u = select512(mantissa, y, _mm512_srli_epi16(y, 1)), p;

	p = _mm512_mask_add_epi16(u, moving512(u), u, offset);
	p = _mm512_mask_sub_epi16(p, _mm512_movepi16_mask(p), p, circle);
	return select512(_mm512_set1_epi16((short)0x8000), _mm512_slli_epi16(y, 8), p);
}

/*
 * Byte orders for permutes. PLANAR512 gathers the lower bytes of 16-bit words, then the upper bytes; WORDS512 is the
 * inverse. PAIRED: order of 16-bit words in which values k and 16 + k share a 32-bit word. QUARTERS: 64-bit lanes are
 * in the order 0 4 1 5 2 6 3 7, which unpacking to 32 bits undoes.
 */
static const uint8_t PLANAR512[64] = {
	0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 34, 36, 38, 40, 42,
	44, 46, 48, 50, 52, 54, 56, 58, 60, 62, 1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23,
	25, 27, 29, 31, 33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63,
};
static const uint8_t PLANAR_PAIRED512[64] = {
	0,  4,  8,  12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60, 2,  6,  10, 14, 18, 22,
	26, 30, 34, 38, 42, 46, 50, 54, 58, 62, 1,  5,  9,  13, 17, 21, 25, 29, 33, 37, 41, 45,
	49, 53, 57, 61, 3,  7,  11, 15, 19, 23, 27, 31, 35, 39, 43, 47, 51, 55, 59, 63,
};
static const uint8_t WORDS512[64] = {
	0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
	11, 43, 12, 44, 13, 45, 14, 46, 15, 47, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53,
	22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63,
};
static const uint8_t WORDS_QUARTERS512[64] = {
	0,  32, 1,  33, 2,  34, 3,  35, 16, 48, 17, 49, 18, 50, 19, 51, 4,  36, 5,  37, 6,  38,
	7,  39, 20, 52, 21, 53, 22, 54, 23, 55, 8,  40, 9,  41, 10, 42, 11, 43, 24, 56, 25, 57,
	26, 58, 27, 59, 12, 44, 13, 45, 14, 46, 15, 47, 28, 60, 29, 61, 30, 62, 31, 63,
};
static const uint8_t PAIRED512[64] = {
	0,  1,  32, 33, 2,  3,  34, 35, 4,  5,  36, 37, 6,  7,  38, 39, 8,  9,  40, 41, 10, 11,
	42, 43, 12, 13, 44, 45, 14, 15, 46, 47, 16, 17, 48, 49, 18, 19, 50, 51, 20, 21, 52, 53,
	22, 23, 54, 55, 24, 25, 56, 57, 26, 27, 58, 59, 28, 29, 60, 61, 30, 31, 62, 63,
};

/*
 * Store the lower bytes of all 16-bit words of v and w at a, and the upper bytes at b. `order` is a PLANAR byte order.
 */
static inline void put_planes512(__m512i v, __m512i w, const uint8_t *order, uint8_t *a, uint8_t *b)
{
	v = _mm512_permutexvar_epi8(_mm512_loadu_si512(order), v);
	w = _mm512_permutexvar_epi8(_mm512_loadu_si512(order), w);
	_mm512_storeu_si512(a, _mm512_shuffle_i64x2(v, w, 0x44));
	_mm512_storeu_si512(b, _mm512_shuffle_i64x2(v, w, 0xee));
}

/* Return 16-bit words whose lower bytes are from a and whose upper bytes are from b. */
static inline __m512i get_planes512(const uint8_t *a, const uint8_t *b, const uint8_t *order)
{
	return _mm512_permutexvar_epi8(_mm512_loadu_si512(order),
				       _mm512_inserti64x4(_mm512_castsi256_si512(LOAD256(a)), LOAD256(b), 1));
}

static inline size_t split2_avx512(const void *src, size_t n, const uint16_t *offset, uint8_t *const *plane)
{
	const char *p = src;
	size_t i = 0;

	for (; i + 64 <= n; i += 64) {
		__m512i x = _mm512_loadu_si512(p + 2 * i), y = _mm512_loadu_si512(p + 2 * i + 64);

		if (offset) {
			x = turn512(x, _mm512_loadu_si512(offset + i));
			y = turn512(y, _mm512_loadu_si512(offset + i + 32));
		}
		put_planes512(x, y, PLANAR512, plane[1] + i, plane[0] + i);
	}
	return i;
}

static inline size_t split4_avx512(const void *src, size_t n, const uint16_t *offset, uint8_t *const *plane)
{
	const __m512i upper = _mm512_set1_epi32((int)0xffff0000);
	const char *p = src;
	size_t i = 0;

	for (; i + 64 <= n; i += 64) {
		__m512i high[2], low[2];

		for (int k = 0; k < 2; k++) {
			__m512i a = _mm512_loadu_si512(p + 4 * i + 128 * k);
			__m512i b = _mm512_loadu_si512(p + 4 * i + 128 * k + 64);

			high[k] = select512(upper, b, _mm512_srli_epi32(a, 16));
			low[k] = select512(upper, _mm512_slli_epi32(b, 16), a);
			if (offset)
				high[k] = turn512(high[k],
						  _mm512_permutexvar_epi8(_mm512_loadu_si512(PAIRED512),
									  _mm512_loadu_si512(offset + i + 32 * k)));
		}
		put_planes512(high[0], high[1], PLANAR_PAIRED512, plane[1] + i, plane[0] + i);
		put_planes512(low[0], low[1], PLANAR_PAIRED512, plane[3] + i, plane[2] + i);
	}
	return i;
}

/* Store a vector. A non-temporal store needs a whole cache line. */
static inline void put512(int nontemporal, void *p, __m512i v)
{
	if (nontemporal)
		_mm512_stream_si512((__m512i *)p, v);
	else
		_mm512_storeu_si512(p, v);
}

/*
 * Return the number of values of `width` bytes before the first cache-line boundary in dst. The caller stores these
 * values with one normal vector store, whose other bytes are stored again later. Clear *nontemporal if dst contains no
 * whole cache line.
 */
static inline size_t before_line(const void *dst, size_t width, size_t n, int *nontemporal)
{
	size_t nbytes = (64 - (uintptr_t)dst % 64) % 64;

	*nontemporal = *nontemporal && nbytes % width == 0 && n >= 64;
	return *nontemporal ? nbytes / width : 0;
}

static inline void merge2_32(const uint8_t *const *plane, size_t i, const uint16_t *offset, char *dst, int nontemporal)
{
	__m512i y = get_planes512(plane[1] + i, plane[0] + i, WORDS512);

	put512(nontemporal, dst + 2 * i, offset ? unturn512(y, _mm512_loadu_si512(offset + i)) : y);
}

static inline size_t merge2_avx512(const uint8_t *const *plane, size_t n, const uint16_t *offset, void *dst,
				   int nontemporal)
{
	size_t i = before_line(dst, 2, n, &nontemporal);

	if (i)
		merge2_32(plane, 0, offset, dst, 0);
	for (; i + 32 <= n; i += 32)
		merge2_32(plane, i, offset, dst, nontemporal);
	return i;
}

static inline void merge4_32(const uint8_t *const *plane, size_t i, const uint16_t *offset, char *dst, int nontemporal)
{
	const __m512i quarters = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
	__m512i high = get_planes512(plane[1] + i, plane[0] + i, WORDS_QUARTERS512);
	__m512i low = get_planes512(plane[3] + i, plane[2] + i, WORDS_QUARTERS512);

	if (offset)
		high = unturn512(high, _mm512_permutexvar_epi64(quarters, _mm512_loadu_si512(offset + i)));
	put512(nontemporal, dst + 4 * i, _mm512_unpacklo_epi16(low, high));
	put512(nontemporal, dst + 4 * i + 64, _mm512_unpackhi_epi16(low, high));
}

static inline size_t merge4_avx512(const uint8_t *const *plane, size_t n, const uint16_t *offset, void *dst,
				   int nontemporal)
{
	size_t i = before_line(dst, 4, n, &nontemporal);

	if (i)
		merge4_32(plane, 0, offset, dst, 0);
	for (; i + 32 <= n; i += 32)
		merge4_32(plane, i, offset, dst, nontemporal);
	return i;
}

static inline void stream_avx512(uint8_t *dst, const uint8_t *src, size_t n)
{
	size_t i = (64 - (uintptr_t)dst % 64) % 64;

	i = i < n ? i : n;
	memcpy(dst, src, i);
	for (; i + 64 <= n; i += 64)
		put512(1, dst + i, _mm512_loadu_si512(src + i));
	memcpy(dst + i, src + i, n - i);
}

/* Return sum(word[i] * key[i]) over a chunk of 1 KiB. key[WIRE_CHUNK_WORDS] is read and ignored. */
static inline uint64_t chunk_sum_avx512(const uint8_t *src, const uint32_t *key)
{
	__m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
	__m256i h;
	__m128i s;

	for (int i = 0; i < WIRE_CHUNK_WORDS; i += 32) {
		__m512i v = _mm512_loadu_si512(src + 4 * i), w = _mm512_loadu_si512(src + 4 * i + 64);

		/*
		 * multiply even words by even keys; shuffle odd words down, and multiply by keys loaded from one word
		 * further
		 */
		a = _mm512_add_epi64(a, _mm512_mul_epu32(v, _mm512_loadu_si512(key + i)));
		b = _mm512_add_epi64(b,
				     _mm512_mul_epu32(_mm512_shuffle_epi32(v, 0xf5), _mm512_loadu_si512(key + i + 1)));
		c = _mm512_add_epi64(c, _mm512_mul_epu32(w, _mm512_loadu_si512(key + i + 16)));
		d = _mm512_add_epi64(d,
				     _mm512_mul_epu32(_mm512_shuffle_epi32(w, 0xf5), _mm512_loadu_si512(key + i + 17)));
	}
	a = _mm512_add_epi64(_mm512_add_epi64(a, b), _mm512_add_epi64(c, d));
	h = _mm256_add_epi64(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1));
	s = _mm_add_epi64(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
	return (uint64_t)_mm_cvtsi128_si64(s) + (uint64_t)_mm_extract_epi64(s, 1);
}

#define SPLIT2_FIRST split2_avx512
#define MERGE2_FIRST merge2_avx512
#define SPLIT4_FIRST split4_avx512
#define MERGE4_FIRST merge4_avx512
#define STREAM stream_avx512
#define CHUNK_SUM chunk_sum_avx512

#endif
