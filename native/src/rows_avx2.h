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

/*
 * Eight blocks of Philox at a time: the even ones and the odd ones, each in the lower halves of 64-bit lanes, where
 * products come out. What is in the upper halves does not matter. Counters must not carry into their upper word.
 */
struct philox4 {
	__m256i c0, c1, c2, c3;
};

static inline void philox_round(struct philox4 *p, __m256i k0, __m256i k1)
{
	__m256i a = _mm256_mul_epu32(p->c0, _mm256_set1_epi64x(PHILOX_M0));
	__m256i b = _mm256_mul_epu32(p->c2, _mm256_set1_epi64x(PHILOX_M1));

	p->c0 = _mm256_xor_si256(_mm256_srli_epi64(b, 32), _mm256_xor_si256(p->c1, k0));
	p->c2 = _mm256_xor_si256(_mm256_srli_epi64(a, 32), _mm256_xor_si256(p->c3, k1));
	p->c1 = b;
	p->c3 = a;
}

static inline __m256i both(__m256i even, __m256i odd)
{
	return _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
}

static inline size_t halves_avx2(struct philox key, uint64_t block, size_t nblocks, uint16_t *h)
{
	const __m256i zero = _mm256_setzero_si256(), c3 = _mm256_set1_epi64x(key.stream_high);
	size_t b = 0;

	for (; b + 8 <= nblocks && (uint32_t)(block + b) <= UINT32_MAX - 8; b += 8) {
		__m256i first = _mm256_set1_epi64x((uint32_t)(block + b));
		__m256i c1 = _mm256_set1_epi64x((long long)((block + b) >> 32)), w0, w1, w2, w3, t0, t1, t2, t3;
		struct philox4 even = {_mm256_add_epi64(first, _mm256_setr_epi64x(0, 2, 4, 6)), c1, zero, c3};
		struct philox4 odd = {_mm256_add_epi64(first, _mm256_setr_epi64x(1, 3, 5, 7)), c1, zero, c3};
		uint32_t k0 = key.seed, k1 = key.stream;

		for (int r = 0; r < PHILOX_ROUNDS; r++, k0 += PHILOX_W0, k1 += PHILOX_W1) {
			__m256i v0 = _mm256_set1_epi64x(k0), v1 = _mm256_set1_epi64x(k1);

			philox_round(&even, v0, v1);
			philox_round(&odd, v0, v1);
		}
		w0 = both(even.c0, odd.c0);
		w1 = both(even.c1, odd.c1);
		w2 = both(even.c2, odd.c2);
		w3 = both(even.c3, odd.c3);
		t0 = _mm256_unpacklo_epi32(w0, w1);
		t1 = _mm256_unpacklo_epi32(w2, w3);
		t2 = _mm256_unpackhi_epi32(w0, w1);
		t3 = _mm256_unpackhi_epi32(w2, w3);
		w0 = _mm256_unpacklo_epi64(t0, t1); /* blocks 0 and 4 */
		w1 = _mm256_unpackhi_epi64(t0, t1); /* 1 and 5 */
		w2 = _mm256_unpacklo_epi64(t2, t3);
		w3 = _mm256_unpackhi_epi64(t2, t3);
		_mm256_storeu_si256((__m256i *)(h + 8 * b), _mm256_permute2x128_si256(w0, w1, 0x20));
		_mm256_storeu_si256((__m256i *)(h + 8 * b + 16), _mm256_permute2x128_si256(w2, w3, 0x20));
		_mm256_storeu_si256((__m256i *)(h + 8 * b + 32), _mm256_permute2x128_si256(w0, w1, 0x31));
		_mm256_storeu_si256((__m256i *)(h + 8 * b + 48), _mm256_permute2x128_si256(w2, w3, 0x31));
	}
	return b;
}

/* Codes of 2 and 4 bits: neighbours meet in sums of products, and part again by masks. */
static inline size_t pack_codes_avx2(const uint8_t *code, size_t n, int bits, uint8_t *dst)
{
	const __m256i pairs = _mm256_set1_epi16(bits == 2 ? 4 << 8 | 1 : 16 << 8 | 1);
	const __m256i quads = _mm256_set1_epi32(16 << 16 | 1);
	size_t i = 0;

	if (bits != 2 && bits != 4)
		return 0;
	for (; i + 64 <= n; i += 64) {
		__m256i a = _mm256_maddubs_epi16(_mm256_loadu_si256((const __m256i *)(code + i)), pairs);
		__m256i b = _mm256_maddubs_epi16(_mm256_loadu_si256((const __m256i *)(code + i + 32)), pairs);

		if (bits == 2) { /* a byte in each 32-bit lane, then in order */
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
		return 0;
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

static inline size_t float8_values_avx2(uint32_t mbits, uint32_t bias, uint32_t last, const uint8_t *code, size_t n,
					float scale, float_any *y)
{
	const int shift = 23 - (int)mbits;
	const __m256i normal = _mm256_set1_epi32((int)(127 - bias) << 23),
		      least = _mm256_set1_epi32((int)(128 - bias) << 23);
	const __m256i magnitude = _mm256_set1_epi32(0x7f), first = _mm256_set1_epi32((1 << mbits) - 1);
	const __m256i end = _mm256_set1_epi32((int)last), nan = _mm256_set1_epi32(0x7fc00000);
	const __m256 by = _mm256_set1_ps(scale);
	size_t i = 0;

	for (; i + 8 <= n; i += 8) {
		__m256i c = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(code + i)));
		__m256i a = _mm256_and_si256(c, magnitude), bits = _mm256_slli_epi32(a, shift);
		__m256i sign = _mm256_slli_epi32(_mm256_andnot_si256(magnitude, c), 24);
		__m256 small =
			_mm256_sub_ps(_mm256_castsi256_ps(_mm256_add_epi32(bits, least)), _mm256_castsi256_ps(least));
		__m256 v = _mm256_blendv_ps(small, _mm256_castsi256_ps(_mm256_add_epi32(bits, normal)),
					    _mm256_castsi256_ps(_mm256_cmpgt_epi32(a, first)));

		v = _mm256_div_ps(v, by);
		v = _mm256_blendv_ps(v, _mm256_castsi256_ps(nan), _mm256_castsi256_ps(_mm256_cmpgt_epi32(a, end)));
		_mm256_storeu_ps(y + i, _mm256_or_ps(v, _mm256_castsi256_ps(sign)));
	}
	return i;
}

/* 16 values in two registers, looked up by the low three bits, then chosen by the fourth. */
static inline size_t table_values_avx2(const uint8_t *code, size_t n, const float ratio[16], float scale, float_any *y)
{
	const __m256 by = _mm256_set1_ps(scale);
	const __m256 lo = _mm256_mul_ps(_mm256_loadu_ps(ratio), by), hi = _mm256_mul_ps(_mm256_loadu_ps(ratio + 8), by);
	size_t i = 0;

	for (; i + 8 <= n; i += 8) {
		__m256i c = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(code + i)));

		_mm256_storeu_ps(y + i,
				 _mm256_blendv_ps(_mm256_permutevar8x32_ps(lo, c), _mm256_permutevar8x32_ps(hi, c),
						  _mm256_castsi256_ps(_mm256_slli_epi32(c, 28))));
	}
	return i;
}

/* The largest magnitude of a multiple of 32 values. */
static inline size_t abs_max_avx2(const float_any *x, size_t n, int32_t *most)
{
	const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
	__m256i m[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()};
	int32_t lane[8];
	size_t i = 0;

	for (; i + 32 <= n; i += 32)
		for (int k = 0; k < 4; k++)
			m[k] = _mm256_max_epi32(
				m[k],
				_mm256_and_si256(magnitude, _mm256_loadu_si256((const __m256i *)(x + i + 8 * k))));
	_mm256_storeu_si256((__m256i *)lane,
			    _mm256_max_epi32(_mm256_max_epi32(m[0], m[1]), _mm256_max_epi32(m[2], m[3])));
	for (int k = 0; k < 8; k++)
		*most = lane[k] > *most ? lane[k] : *most;
	return i;
}

/* 32 numbers below 256 as bytes, in order. */
static inline __m256i narrow_bytes(__m256i a, __m256i b, __m256i c, __m256i d)
{
	return in_order(_mm256_packus_epi16(_mm256_packus_epi32(a, b), _mm256_packus_epi32(c, d)));
}

/* round_small_nearest of clamped products, and the sign. */
static inline __m256i float8_avx2(__m256i x, __m256 scale, __m256 max, int mbits, int bias)
{
	const int shift = 23 - mbits;
	const __m256i magnitude = _mm256_set1_epi32(0x7fffffff), one = _mm256_set1_epi32(1);
	const __m256i half = _mm256_set1_epi32((1 << (shift - 1)) - 1 - ((127 - bias) << 23));
	const __m256i step = _mm256_set1_epi32((127 + 24 - bias - mbits) << 23);
	const __m256i least = _mm256_set1_epi32(((128 - bias) << 23) - 1);
	__m256 y = _mm256_min_ps(_mm256_mul_ps(_mm256_castsi256_ps(_mm256_and_si256(x, magnitude)), scale), max);
	__m256i a = _mm256_castps_si256(y);
	__m256i even = _mm256_and_si256(_mm256_srli_epi32(a, shift), one);
	__m256i normal = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(a, half), even), shift);
	__m256i small = _mm256_sub_epi32(_mm256_castps_si256(_mm256_add_ps(y, _mm256_castsi256_ps(step))), step);
	__m256i c = _mm256_blendv_epi8(small, normal, _mm256_cmpgt_epi32(a, least));

	return _mm256_or_si256(c, _mm256_slli_epi32(_mm256_srli_epi32(x, 31), 7));
}

/* Bytes ahead that are fetched while values of a row already seen are coded: otherwise memory would idle. */
#define AHEAD 16384

/* Values must be finite. */
static inline size_t float8_codes_avx2(uint32_t mbits, uint32_t bias, float max, const float_any *x, size_t n,
				       float scale, uint8_t *code)
{
	const __m256 by = _mm256_set1_ps(scale), most = _mm256_set1_ps(max);
	size_t i = 0;

	for (; i + 32 <= n; i += 32) {
		__m256i c[4];

		_mm_prefetch((const char *)(x + i) + AHEAD, _MM_HINT_T1);
		_mm_prefetch((const char *)(x + i) + AHEAD + 64, _MM_HINT_T1);
		for (int k = 0; k < 4; k++)
			c[k] = float8_avx2(_mm256_loadu_si256((const __m256i *)(x + i + 8 * k)), by, most, (int)mbits,
					   (int)bias);
		_mm256_storeu_si256((__m256i *)(code + i), narrow_bytes(c[0], c[1], c[2], c[3]));
	}
	return i;
}

/* round_place of 8 values; h: their draws, or NULL. */
static inline __m256i place_avx2(__m256 place, const uint16_t *h)
{
	__m256 scaled = _mm256_add_ps(_mm256_mul_ps(place, _mm256_set1_ps(65536)), _mm256_set1_ps(0.5f));
	__m256i draw = h ? _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)h)) : _mm256_set1_epi32(0x8000);

	return _mm256_srli_epi32(_mm256_add_epi32(_mm256_cvttps_epi32(scaled), draw), 16);
}

static inline size_t even_codes_avx2(const float_any *x, size_t n, float amax, int levels, const uint16_t *h,
				     uint8_t *code)
{
	const __m256 by = _mm256_set1_ps(amax), one = _mm256_set1_ps(1), half = _mm256_set1_ps((float)levels * 0.5f);
	size_t i = 0;

	for (; i + 32 <= n; i += 32) {
		__m256i c[4];

		_mm_prefetch((const char *)(x + i) + AHEAD, _MM_HINT_T1);
		_mm_prefetch((const char *)(x + i) + AHEAD + 64, _MM_HINT_T1);
		for (int k = 0; k < 4; k++) {
			__m256 q = _mm256_add_ps(_mm256_div_ps(_mm256_loadu_ps(x + i + 8 * k), by), one);

			c[k] = place_avx2(_mm256_mul_ps(q, half), h ? h + i + 8 * k : NULL);
		}
		_mm256_storeu_si256((__m256i *)(code + i), narrow_bytes(c[0], c[1], c[2], c[3]));
	}
	return i;
}

#define ABS_MAX abs_max_avx2
#define FLOAT8_CODES float8_codes_avx2
#define EVEN_CODES even_codes_avx2
#define FLOAT8_VALUES float8_values_avx2
#define TABLE_VALUES table_values_avx2
#define SIGN_BITS sign_bits_avx2
#define SIGN_VALUES sign_values_avx2
#define HALVES halves_avx2
#define PACK_CODES pack_codes_avx2
#define UNPACK_CODES unpack_codes_avx2
#define PACK_TRITS pack_trits_avx2
#define UNPACK_TRITS unpack_trits_avx2

#endif
