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

#undef UNPACK_FIELDS
#define SPLIT_PIECES split_pieces_avx512
#define JOIN_PIECES join_pieces_avx512
#define UNPACK_FIELDS unpack_fields_avx512

#endif
