/*
 * rows_avx2.h - loops of row_loops.h that need shuffles, in 256-bit vectors, and operations that simd_loops.h requires.
 *
 * Each loop processes the first values and returns their number; the portable loops process the rest.
 */
#ifndef CODEC_ROWS_AVX2_H
#define CODEC_ROWS_AVX2_H

#include <immintrin.h>

#include "nontemporal_avx2.h"

/* Return the largest of eight signed 32-bit words. */
static inline int32_t largest_avx2(__m256i v)
{
	__m128i four = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
	__m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));

	return _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}

/* Restore the order of 32-bit words after packs instructions have interleaved 128-bit halves. */
static inline __m256i in_order(__m256i v)
{
	return _mm256_permutevar8x32_epi32(v, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

/* Vectorized scale_fold. */
static inline float fold_avx2(const float *lane)
{
	__m256 a = _mm256_add_ps(_mm256_loadu_ps(lane), _mm256_loadu_ps(lane + 16));
	__m256 b = _mm256_add_ps(_mm256_loadu_ps(lane + 8), _mm256_loadu_ps(lane + 24));
	__m128 four, two;

	a = _mm256_add_ps(a, b);
	four = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
	two = _mm_add_ps(four, _mm_movehl_ps(four, four));
	return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
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

static inline size_t sign_values_avx2(const uint8_t *bits, size_t n, float negative, float positive, int how,
				      float_any *y)
{
	const __m256i count = _mm256_setr_epi32(7, 6, 5, 4, 3, 2, 1, 0);
	const __m256 p = _mm256_set1_ps(positive), q = _mm256_set1_ps(negative);
	size_t i = 0;

	for (; i + 32 <= n; i += 32) {
		uint32_t word = load32(bits + i / 8);

		for (int k = 0; k < 4; k++) { /* shift each value's bit to the top of its lane, where blendv tests it */
			__m256i v = _mm256_set1_epi32((int)(word << (24 - 8 * k)));
			__m256 x = _mm256_blendv_ps(q, p, _mm256_castsi256_ps(_mm256_sllv_epi32(v, count)));
			float_any *there = y + i + 8 * k;

			x = how == SIGNS_ADD ? _mm256_add_ps(_mm256_loadu_ps(there), x) : x;
			put256(how == SIGNS_NONTEMPORAL, there, _mm256_castps_si256(x));
		}
	}
	return i;
}

static inline size_t sign_sums_avx2(const struct signs *s, size_t count, size_t n, int more, int how, float by,
				    float_any *y)
{
	const __m256i places = _mm256_setr_epi32(7, 6, 5, 4, 3, 2, 1, 0);
	const __m256 factor = _mm256_set1_ps(by);
	size_t i = 0;

	for (; i + 32 <= n; i += 32) {
		__m256 sum[4];

		for (int k = 0; k < 4; k++)
			sum[k] = more ? _mm256_loadu_ps(y + i + 8 * k) : _mm256_setzero_ps();
		for (size_t f = 0; f < count; f++) {
			const __m256 p = _mm256_set1_ps(s[f].positive), q = _mm256_set1_ps(s[f].negative);
			uint32_t word = load32(s[f].bits + i / 8);

			for (int k = 0; k < 4; k++) {
				__m256i v = _mm256_set1_epi32((int)(word << (24 - 8 * k)));
				__m256 x = _mm256_blendv_ps(q, p, _mm256_castsi256_ps(_mm256_sllv_epi32(v, places)));

				sum[k] = f || more ? _mm256_add_ps(sum[k], x) : x;
			}
		}
		for (int k = 0; k < 4; k++)
			_mm256_storeu_ps(y + i + 8 * k, how == SETTLE_TIMES  ? _mm256_mul_ps(sum[k], factor)
							: how == SETTLE_OVER ? _mm256_div_ps(sum[k], factor)
									     : sum[k]);
	}
	return i;
}

/* Vectorized bits_squeeze and bits_spread, on four 64-bit words. */
static inline __m256i squeeze_avx2(__m256i x, int bits)
{
	for (int half = 8; half < 64; half *= 2) {
		__m256i low =
			_mm256_set1_epi64x((long long)(~0ull / ((1ull << half) + 1))); /* every other `half` bits */

		x = _mm256_or_si256(_mm256_and_si256(low, x),
				    _mm256_srli_epi64(_mm256_andnot_si256(low, x), half / 8 * (8 - bits)));
	}
	return x;
}

static inline __m256i spread_avx2(__m256i x, int bits)
{
	for (int half = 32; half >= 8; half /= 2) {
		const long long every = (long long)(half == 32 ? 1 : ~0ull / ((1ull << 2 * half) - 1));
		__m256i low = _mm256_set1_epi64x(every * ((1ll << half / 8 * bits) - 1));

		x = _mm256_or_si256(
			_mm256_and_si256(low, x),
			_mm256_and_si256(_mm256_slli_epi64(low, half), _mm256_slli_epi64(x, half / 8 * (8 - bits))));
	}
	return x;
}

static inline size_t pack_any_avx2(const uint8_t *code, size_t n, int bits, uint8_t *dst)
{
	uint8_t order[16];
	__m256i close;
	size_t i = 0;

	for (int k = 0; k < 16; k++)
		order[k] = (uint8_t)(k < 2 * bits ? k % bits + k / bits * 8 : 0x80);
	close = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)order));
	for (; i + 160 <= n; i += 32, dst += 4 * bits) { /* while dst has room for full 16-byte stores */
		__m256i x = squeeze_avx2(_mm256_loadu_si256((const __m256i *)(code + i)), bits);

		x = _mm256_shuffle_epi8(x, close);
		_mm_storeu_si128((__m128i *)dst, _mm256_castsi256_si128(x));
		_mm_storeu_si128((__m128i *)(dst + 2 * bits), _mm256_extracti128_si256(x, 1));
	}
	return i;
}

static inline size_t unpack_any_avx2(const uint8_t *src, size_t n, int bits, uint8_t *code)
{
	uint8_t order[16];
	__m256i apart;
	size_t i = 0;

	for (int k = 0; k < 16; k++)
		order[k] = (uint8_t)(k % 8 < bits ? k / 8 * bits + k % 8 : 0x80);
	apart = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)order));
	for (; i + 160 <= n; i += 32, src += 4 * bits) {
		__m256i x = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)src)),
						    _mm_loadu_si128((const __m128i *)(src + 2 * bits)), 1);

		x = spread_avx2(_mm256_shuffle_epi8(x, apart), bits);
		_mm256_storeu_si256((__m256i *)(code + i), x);
	}
	return i;
}

/* Pack codes of 2 and 4 bits with multiply-add instructions. Other widths use pack_any_avx2. */
static inline size_t pack_codes_avx2(const uint8_t *code, size_t n, int bits, uint8_t *dst)
{
	const __m256i pairs = _mm256_set1_epi16(bits == 2 ? 4 << 8 | 1 : 16 << 8 | 1);
	const __m256i quads = _mm256_set1_epi32(16 << 16 | 1);
	size_t i = 0;

	if (bits != 2 && bits != 4)
		return pack_any_avx2(code, n, bits, dst);
	for (; i + 64 <= n; i += 64) {
		__m256i a = _mm256_maddubs_epi16(_mm256_loadu_si256((const __m256i *)(code + i)), pairs);
		__m256i b = _mm256_maddubs_epi16(_mm256_loadu_si256((const __m256i *)(code + i + 32)), pairs);

		if (bits == 2) { /* the products give one byte per 32-bit lane; the order is restored afterwards */
			a = _mm256_packs_epi32(_mm256_madd_epi16(a, quads), _mm256_madd_epi16(b, quads));
			a = _mm256_permute4x64_epi64(a, 0xd8);
			_mm_storeu_si128((__m128i *)(dst + i / 4),
					 _mm_packus_epi16(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1)));
		} else {
			a = _mm256_permute4x64_epi64(_mm256_packus_epi16(a, b), 0xd8);
			_mm256_storeu_si256((__m256i *)(dst + i / 2), a);
		}
	}
	return i;
}

static inline void part(__m128i v, int bits, __m128i *lo, __m128i *hi)
{
	const __m128i mask = _mm_set1_epi8((char)(bits == 2 ? 3 : 15));
	__m128i even = _mm_and_si128(v, mask), odd = _mm_and_si128(_mm_srli_epi16(v, bits), mask);

	*lo = _mm_unpacklo_epi8(even, odd);
	*hi = _mm_unpackhi_epi8(even, odd);
}

static inline size_t unpack_codes_avx2(const uint8_t *src, size_t n, int bits, uint8_t *code)
{
	size_t i = 0;

	if (bits != 2 && bits != 4)
		return unpack_any_avx2(src, n, bits, code);
	for (; i + 64 <= n; i += 64)
		for (size_t half = 0; half < (bits == 2 ? 1 : 2); half++) {
			__m128i v = _mm_loadu_si128((const __m128i *)(src + i * (size_t)bits / 8 + 16 * half)), w[2],
				y[4];
			uint8_t *to = code + i + 32 * half;

			part(v, 4, w, w + 1);
			if (bits == 4) {
				_mm_storeu_si128((__m128i *)to, w[0]);
				_mm_storeu_si128((__m128i *)to + 1, w[1]);
				continue;
			}
			part(w[0], 2, y, y + 1);
			part(w[1], 2, y + 2, y + 3);
			for (int k = 0; k < 4; k++)
				_mm_storeu_si128((__m128i *)to + k, y[k]);
		}
	return i;
}

/*
 * TERNARY: pack 30 codes into six bytes at a time, 15 codes per 128-bit half, shuffled to match the weights of
 * multiply-add instructions. One code after the last is read, and one byte after the last is written.
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
 * TERNARY: unpack 15 codes from 3 bytes at a time. Digit k of byte b is floor(3 * f), where f = b * 3^k / 243 mod 1,
 * scaled by 2^16. ceil(2^16 / 243) = 270 is precise enough for all 243 values of b. One code after the last is written.
 */
static inline size_t unpack_trits_avx2(const uint8_t *src, size_t n, uint8_t *code)
{
	/* source byte of each 16-bit word: 0, 0, 0, 0, 0, 1, 1, 1 in one half, 1, 1, 2, 2, 2, 2, 2, - in the other */
	const __m256i take = _mm256_setr_epi8(0, -1, 0, -1, 0, -1, 0, -1, 0, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 2,
					      -1, 2, -1, 2, -1, 2, -1, 2, -1, -1, -1);
	/*
	 * byte * 270 * 3^k mod 2^16 is the fraction after k digits, scaled by 2^16; the upper 16 bits of 3 * fraction
	 * are digit k
	 *
	 */
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

/* Table of 16 floats in two vectors: look up bits 0 to 2 of the index in both, then select one by bit 3. */
struct table_avx2 {
	__m256 low, high;
};

static inline struct table_avx2 table_avx2(const float x[16], __m256 by)
{
	return (struct table_avx2){_mm256_mul_ps(_mm256_loadu_ps(x), by), _mm256_mul_ps(_mm256_loadu_ps(x + 8), by)};
}

static inline __m256 table_find_avx2(struct table_avx2 t, __m256i c, int few)
{
	__m256 low = _mm256_permutevar8x32_ps(t.low, c);

	return few ? low
		   : _mm256_blendv_ps(low, _mm256_permutevar8x32_ps(t.high, c),
				      _mm256_castsi256_ps(_mm256_slli_epi32(c, 28)));
}

/* Return the smallest of eight signed 32-bit words. */
static inline int32_t least_avx2(__m256i v)
{
	__m128i m = _mm_min_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));

	m = _mm_min_epi32(m, _mm_shuffle_epi32(m, 0x4e));
	return _mm_cvtsi128_si32(_mm_min_epi32(m, _mm_shuffle_epi32(m, 0xb1)));
}

/* Store the words of four vectors, numbers below 256, as bytes, in order. */
static inline void narrow_avx2(uint8_t *p, const __m256i v[4])
{
	__m256i a = _mm256_packus_epi32(v[0], v[1]), b = _mm256_packus_epi32(v[2], v[3]);

	_mm256_storeu_si256((__m256i *)p, in_order(_mm256_packus_epi16(a, b)));
}

#define FOLD fold_avx2
#define SIGN_BITS sign_bits_avx2
#define SIGN_VALUES sign_values_avx2
#define SIGN_SUMS sign_sums_avx2
#define PACK_CODES pack_codes_avx2
#define UNPACK_CODES unpack_codes_avx2
#define PACK_TRITS pack_trits_avx2
#define UNPACK_TRITS unpack_trits_avx2

#endif
