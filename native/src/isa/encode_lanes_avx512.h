/* encode_lanes_avx512.h - PUSH and codes_find of encode_lanes.h, with byte permutations. Included by avx512.c. */
#include "bytes_avx512.h"

static inline uint32_t *PUSH(uint32_t *end, __m512i v, __mmask16 m)
{
	unsigned n = (unsigned)__builtin_popcount(m);

	/* compressing into memory is microcoded on some CPUs; a masked store is not */
	end -= n;
	_mm512_mask_storeu_epi32(end, (__mmask16)((1u << n) - 1), _mm512_maskz_compress_epi32(m, v));
	return end;
}

/*
 * Tables of codes. In most books only a few adjacent byte values, and perhaps 0, have codes. One permute in a window of
 * 64 values then suffices, and all values outside the window are escapes.
 */
struct codes512 {
	struct bytes256 code, length;
	__m512i base, near_code, near_length, escape_code, escape_length, zero_code, zero_length;
	int few; /* 1: all byte values with a code are in the window; 2: in the window, or are 0 */
};

#define CODES struct codes512
#define FEW(t) (t)->few

/* Return the 64 bytes from p[first] on, where p has 256 bytes; bytes past the end of p are p[beyond]. */
static inline __m512i window512(const uint8_t *p, int first, int beyond)
{
	__mmask64 there = ~0ull >> (first > 192 ? first - 192 : 0);

	return _mm512_mask_loadu_epi8(_mm512_set1_epi8((char)p[beyond]), there, p + first);
}

static inline CODES codes_load(const book_codes *book)
{
	int first = 0, last = 0, escape = book->escape;
	CODES t = {.code = bytes256_load(book->code), .length = bytes256_load(book->length)};
	uint64_t coded[4];

	for (int k = 0; k < 4; k++)
		coded[k] = ~(uint64_t)_mm512_movepi8_mask(t.length.part[k]);
	coded[0] &= ~1ull;
	for (int k = 3; k >= 0; k--)
		first = coded[k] ? 64 * k + __builtin_ctzll(coded[k]) : first;
	for (int k = 0; k < 4; k++)
		last = coded[k] ? 64 * k + 63 - __builtin_clzll(coded[k]) : last;
	if (last - first >= 64)
		return t;
	t.few = book->length[0] & 0x80 || first == 0 ? 1 : 2;
	t.near_code = window512(book->code, first, escape);
	t.near_length = window512(book->length, first, escape);
	t.base = _mm512_set1_epi8((char)first);
	t.escape_code = _mm512_set1_epi8((char)book->code[escape]);
	t.escape_length = _mm512_set1_epi8((char)book->length[escape]);
	t.zero_code = _mm512_set1_epi8((char)book->code[0]);
	t.zero_length = _mm512_set1_epi8((char)book->length[0]);
	return t;
}

static inline void codes_find(const CODES *t, int few, const uint8_t *symbol, __m512i *code, __m512i *length,
			      uint32_t *escaped)
{
	__m512i x = _mm512_loadu_si512(symbol), c, n, c2, n2;
	__mmask64 esc;

	if (few) {
		__m512i y = _mm512_sub_epi8(x, t->base);
		__mmask64 near = _mm512_cmplt_epu8_mask(y, _mm512_set1_epi8(64));

		c = _mm512_mask_permutexvar_epi8(t->escape_code, near, y, t->near_code);
		n = _mm512_mask_permutexvar_epi8(t->escape_length, near, y, t->near_length);
		if (few == 2) {
			__mmask64 zero = _mm512_cmpeq_epi8_mask(x, _mm512_setzero_si512());

			c = _mm512_mask_mov_epi8(c, zero, t->zero_code);
			n = _mm512_mask_mov_epi8(n, zero, t->zero_length);
		}
	} else {
		c = bytes256_find(&t->code, x);
		n = bytes256_find(&t->length, x);
	}
	esc = _mm512_movepi8_mask(n);
	memcpy(escaped, &esc, 8);
	n = AND(n, _mm512_set1_epi8(15));
	c2 = OR(_mm512_sllv_epi16(AND(c, _mm512_set1_epi16(255)), _mm512_srli_epi16(n, 8)), _mm512_srli_epi16(c, 8));
	n2 = _mm512_maddubs_epi16(n, _mm512_set1_epi8(1));
	*length = _mm512_madd_epi16(n2, _mm512_set1_epi16(1));
	*code = OR(SHL(AND(c2, SET1(0xffff)), _mm512_srli_epi32(n2, 16)), _mm512_srli_epi32(c2, 16));
}
