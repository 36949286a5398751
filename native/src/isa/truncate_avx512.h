/* truncate_avx512.h - loops of truncate_loops.h that pack and unpack bits, in 512-bit vectors. */
#ifndef CODEC_TRUNCATE_AVX512_H
#define CODEC_TRUNCATE_AVX512_H

#include "truncate_avx2.h"

/*
 * Unpack fields of at most 24 bits: a vector unpacks 16 fields, and each lane loads the four bytes in which its field
 * begins.
 */
static inline size_t unpack_fields_avx512(const uint8_t *src, size_t nbytes, const uint8_t *width, size_t n, int total,
					  uint32_t *f, size_t *bit)
{
	const __m512i bytes = _mm512_set1_epi32(0x03020100), all = _mm512_set1_epi32(32);
	const __m128i above = _mm_cvtsi32_si128(32 - total);
	size_t i = 0, at = 0;

	for (; i + 16 <= n && at / 8 + 64 <= nbytes; i += 16) {
		uint64_t low = running_sums(width + i), high = running_sums(width + i + 8);
		__m512i start = _mm512_cvtepu8_epi32(_mm_set_epi64x((long long)(high << 8), (long long)(low << 8)));
		__m512i w = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(width + i))), index, x;

		start = _mm512_add_epi32(start, _mm512_set1_epi32((int)(at % 8)));
		start = _mm512_mask_add_epi32(start, 0xff00, start, _mm512_set1_epi32((int)(low >> 56)));
		index = _mm512_mullo_epi32(_mm512_srli_epi32(start, 3), _mm512_set1_epi32(0x01010101));
		x = _mm512_permutexvar_epi8(_mm512_add_epi32(index, bytes), _mm512_loadu_si512(src + at / 8));
		x = _mm512_srlv_epi32(x, _mm512_and_si512(start, _mm512_set1_epi32(7)));
		x = _mm512_sllv_epi32(x, _mm512_sub_epi32(all, w));
		_mm512_storeu_si512(f + i, _mm512_srl_epi32(x, above));
		at += (low >> 56) + (high >> 56);
	}
	*bit = at;
	return i;
}

/* Four fields of at most 15 bits in each 64-bit lane, one after the other, and their numbers of bits in total. */
struct quads_avx512 {
	__m512i bits, count;
};

/* Return a non-zero value if a lane of v, each at most 112, exceeds 56. */
static inline uint32_t exceed_56(__m512i v)
{
	return _mm512_test_epi32_mask(_mm512_add_epi64(v, _mm512_set1_epi64(7)), _mm512_set1_epi64(64));
}

/* Move the upper half of each lane of v down to the end of its lower half, which has n bits. */
#define CLOSE_GAPS(size, v, n)                                                                                         \
	_mm512_or_si512(_mm512_and_si512(v, _mm512_set1_epi64(size == 32 ? 0x0000ffff0000ffff : 0xffffffff)),          \
			_mm512_sllv_epi##size(_mm512_srli_epi##size(v, size / 2), n))

/* Merge the kept bits of the fields of 32 patterns. Clear *fits if one has more than 15, or a lane more than 56. */
static inline struct quads_avx512 quads_avx512(const struct truncate_kind *q, const uint32_t *x, const uint8_t *width,
					       int *fits)
{
	const __m512i uppers =
		_mm512_setr_epi32(0x030001, 0x070005, 0x0b0009, 0x0f000d, 0x130011, 0x170015, 0x1b0019, 0x1f001d,
				  0x230021, 0x270025, 0x2b0029, 0x2f002d, 0x330031, 0x370035, 0x3b0039, 0x3f003d);
	const __m512i mantissa = _mm512_set1_epi32(0x7fffffff);
	const __m128i to_sign = _mm_cvtsi32_si128(31 - q->sign), to_mantissa = _mm_cvtsi32_si128(31 - q->mbits);
	__m512i w = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)width)), v[2], first;
	struct quads_avx512 to;

	for (int i = 0; i < 2; i++) { /* fields at the upper ends of their lanes */
		__m512i u = _mm512_loadu_si512(x + 16 * i);

		v[i] = _mm512_ternarylogic_epi32(mantissa, _mm512_sll_epi32(u, to_mantissa),
						 _mm512_sll_epi32(u, to_sign), 0xca);
	}
	to.bits = _mm512_permutex2var_epi16(v[0], uppers, v[1]);
	to.bits = _mm512_srlv_epi16(to.bits, _mm512_sub_epi16(_mm512_set1_epi16(16), w));
	to.bits = CLOSE_GAPS(32, to.bits, _mm512_and_si512(w, _mm512_set1_epi32(0xffff)));
	to.count = _mm512_madd_epi16(w, _mm512_set1_epi16(1));
	first = _mm512_and_si512(to.count, _mm512_set1_epi64(0xffffffff));
	to.bits = CLOSE_GAPS(64, to.bits, first);
	to.count = _mm512_add_epi64(first, _mm512_srli_epi64(to.count, 32));
	*fits &= !(_mm512_test_epi32_mask(w, _mm512_set1_epi16(16)) | exceed_56(to.count));
	return to;
}

/*
 * Merge fields to runs of four or eight, of at most 56 bits. Return the number of runs, or 0 if a field is too long, or
 * n is not a multiple of 64.
 */
static inline size_t field_runs_avx512(const struct truncate_kind *q, const uint32_t *x, const uint8_t *width, size_t n,
				       uint64_t *run, uint64_t *nbits)
{
	const __m512i even = _mm512_setr_epi64(0, 2, 4, 6, 8, 10, 12, 14);
	const __m512i odd = _mm512_setr_epi64(1, 3, 5, 7, 9, 11, 13, 15);
	size_t count = 0;
	int fits = 1;

	for (size_t i = 0; n % 64 == 0 && i < n; i += 64) {
		struct quads_avx512 a = quads_avx512(q, x + i, width + i, &fits);
		struct quads_avx512 b = quads_avx512(q, x + i + 32, width + i + 32, &fits);
		__m512i first = _mm512_permutex2var_epi64(a.count, even, b.count);
		__m512i second = _mm512_permutex2var_epi64(a.count, odd, b.count);
		__m512i both = _mm512_add_epi64(first, second);

		if (!fits)
			return 0;
		if (exceed_56(both)) {
			_mm512_storeu_si512(run + count, a.bits);
			_mm512_storeu_si512(run + count + 8, b.bits);
			_mm512_storeu_si512(nbits + count, a.count);
			_mm512_storeu_si512(nbits + count + 8, b.count);
			count += 16;
			continue;
		}
		second = _mm512_sllv_epi64(_mm512_permutex2var_epi64(a.bits, odd, b.bits), first);
		first = _mm512_permutex2var_epi64(a.bits, even, b.bits);
		_mm512_storeu_si512(run + count, _mm512_or_si512(first, second));
		_mm512_storeu_si512(nbits + count, both);
		count += 8;
	}
	return count;
}

/* Return the byte permutation that gathers byte 0 of 16 words, then bytes 1, 2 and 3 of the words; or the inverse. */
static inline __m512i byte_order_avx512(int inverse)
{
	const __m512i across = _mm512_setr_epi32(0x0c080400, 0x1c181410, 0x2c282420, 0x3c383430, 0x0d090501, 0x1d191511,
						 0x2d292521, 0x3d393531, 0x0e0a0602, 0x1e1a1612, 0x2e2a2622, 0x3e3a3632,
						 0x0f0b0703, 0x1f1b1713, 0x2f2b2723, 0x3f3b3733);
	const __m512i along = _mm512_setr_epi32(0x30201000, 0x31211101, 0x32221202, 0x33231303, 0x34241404, 0x35251505,
						0x36261606, 0x37271707, 0x38281808, 0x39291909, 0x3a2a1a0a, 0x3b2b1b0b,
						0x3c2c1c0c, 0x3d2d1d0d, 0x3e2e1e0e, 0x3f2f1f0f);

	return inverse ? along : across;
}

/* Transpose the 128-bit quarters of four vectors, as a 4 x 4 matrix. */
static inline void quarters_avx512(__m512i v[4])
{
	__m512i a = _mm512_shuffle_i64x2(v[0], v[1], 0x44), b = _mm512_shuffle_i64x2(v[0], v[1], 0xee);
	__m512i c = _mm512_shuffle_i64x2(v[2], v[3], 0x44), d = _mm512_shuffle_i64x2(v[2], v[3], 0xee);

	v[0] = _mm512_shuffle_i64x2(a, c, 0x88);
	v[1] = _mm512_shuffle_i64x2(a, c, 0xdd);
	v[2] = _mm512_shuffle_i64x2(b, d, 0x88);
	v[3] = _mm512_shuffle_i64x2(b, d, 0xdd);
}

/* Return a vector in which every 32-bit word has the bytes a, b, c, d, where a is the lowest. */
static inline __m512i of_pieces(uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
	return _mm512_set1_epi32((int)(a | b << 8 | c << 16 | d << 24));
}

static inline size_t split_pieces_avx512(const struct truncate_kind *q, const uint32_t *x, size_t n,
					 uint8_t *const piece[4])
{
	const uint32_t to_c = q->width[3], to_b = to_c + q->width[2], to_a = to_b + q->width[1];
	const __m512i odd = _mm512_set1_epi64(0x2020202000000000);
	const __m512i places = _mm512_or_si512(of_pieces(to_a, to_b, to_c, 0), odd);
	const __m512i mask = of_pieces((1u << q->width[0]) - 1, (1u << q->width[1]) - 1, (1u << q->width[2]) - 1,
				       (1u << q->width[3]) - 1);
	const __m512i mantissa = _mm512_set1_epi32((1 << q->mbits) - 1), order = byte_order_avx512(0);
	const __m128i sign = _mm_cvtsi32_si128(q->sign - q->mbits);
	size_t i = 0;

	for (; i + 64 <= n; i += 64) {
		__m512i v[4];

		for (int k = 0; k < 4; k++) {
			__m512i u = _mm512_loadu_si512(x + i + 16 * k);

			u = _mm512_ternarylogic_epi32(mantissa, u, _mm512_srl_epi32(u, sign), 0xca);
			u = _mm512_and_si512(_mm512_multishift_epi64_epi8(places, u), mask);
			v[k] = _mm512_permutexvar_epi8(order, u);
		}
		quarters_avx512(v);
		for (int k = 0; k < 4; k++)
			_mm512_storeu_si512(piece[k] + i, v[k]);
	}
	return i;
}

static inline size_t join_pieces_avx512(const struct truncate_kind *q, const uint8_t *const piece[4], const uint8_t *e,
					size_t n, uint32_t *x)
{
	const __m512i pairs = of_pieces(1u << q->width[1], 1, 1u << q->width[3], 1);
	const __m512i quads = _mm512_set1_epi32(1 << (q->width[2] + q->width[3]) | 65536);
	const __m512i mantissa = _mm512_set1_epi32((1 << q->mbits) - 1), order = byte_order_avx512(1);
	const __m128i mbits = _mm_cvtsi32_si128(q->mbits), sign = _mm_cvtsi32_si128(q->sign);
	size_t i = 0;

	for (; i + 64 <= n; i += 64) {
		__m512i v[4];

		for (int k = 0; k < 4; k++)
			v[k] = _mm512_loadu_si512(piece[k] + i);
		quarters_avx512(v);
		for (int k = 0; k < 4; k++) {
			__m512i f = _mm512_permutexvar_epi8(order, v[k]), u;
			__m512i exponent = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(e + i + 16 * k)));

			f = _mm512_madd_epi16(_mm512_maddubs_epi16(f, pairs), quads);
			u = _mm512_or_si512(_mm512_sll_epi32(_mm512_srl_epi32(f, mbits), sign),
					    _mm512_sll_epi32(exponent, mbits));
			u = _mm512_ternarylogic_epi32(mantissa, f, u, 0xca);
			_mm512_storeu_si512(x + i + 16 * k,
					    _mm512_maskz_mov_epi32(_mm512_test_epi32_mask(exponent, exponent), u));
		}
	}
	return i;
}

#define FIELD_RUNS field_runs_avx512
#undef UNPACK_FIELDS
#define SPLIT_PIECES split_pieces_avx512
#define JOIN_PIECES join_pieces_avx512
#define UNPACK_FIELDS unpack_fields_avx512

#endif
