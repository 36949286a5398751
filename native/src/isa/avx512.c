/* avx512.c - the loops for AVX-512 F, BW, VL, DQ, VBMI and VBMI2. */
#include <immintrin.h>

#include "planes_avx512.h"
#include "rows_avx512.h"

#define V __m512i
#define BYTES __m512i
#define MASK __mmask16
#define NV 2
#define STREAMS 2
#define LANES 16
#define LOAD(p) _mm512_loadu_si512(p)
#define STORE(p, v) _mm512_storeu_si512(p, v)
#define SET1(x) _mm512_set1_epi32(x)
#define ADD _mm512_add_epi32
#define SUB _mm512_sub_epi32
#define OR _mm512_or_si512
#define AND _mm512_and_si512
#define SHL _mm512_sllv_epi32
#define SHR _mm512_srlv_epi32
#define NEG(v) _mm512_movepi32_mask(v)
#define KEEP(v) AND(v, SET1(31))
#define SELECT(m, a, b) _mm512_mask_blend_epi32(m, b, a)
#define COUNT(m) (size_t)__builtin_popcount(m)
#define ADD_BYTES _mm512_add_epi8

/* for simd_loops.h */
#define F __m512
#define SETF _mm512_set1_ps
#define LOADF _mm512_loadu_ps
#define STOREF _mm512_storeu_ps
#define AS_F _mm512_castsi512_ps
#define AS_V _mm512_castps_si512
#define ADDF _mm512_add_ps
#define MULF _mm512_mul_ps
#define DIVF _mm512_div_ps
#define MINF _mm512_min_ps
#define FMA _mm512_fmadd_ps
#define FNMA _mm512_fnmadd_ps
#define TRUNC _mm512_cvttps_epi32
#define FLOAT _mm512_cvtepi32_ps
#define SLL _mm512_slli_epi32
#define SRL _mm512_srli_epi32
#define SRA _mm512_srai_epi32
#define XOR _mm512_xor_si512
#define XOR3(a, b, c) _mm512_ternarylogic_epi32(a, b, c, 0x96)
#define MIN _mm512_min_epi32
#define MAX _mm512_max_epi32
#define GT _mm512_cmpgt_epi32_mask
#define EQ _mm512_cmpeq_epi32_mask
#define EITHER(a, b) ((__mmask16)((a) | (b)))
#define MULU _mm512_mul_epu32
#define ADDQ _mm512_add_epi64
#define SRLQ _mm512_srli_epi64
#define SETQ _mm512_set1_epi64
#define SEQUENCE _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7)
#define UNPACKLOQ _mm512_unpacklo_epi64
#define UNPACKHIQ _mm512_unpackhi_epi64
#define ODD_WORDS(a, b) _mm512_mask_shuffle_epi32(a, 0xaaaa, b, 0xa0)
#define WIDEN8(p) _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(p)))
#define WIDEN16(p) _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(p)))
#define FROM_HALVES(p) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p)))
#define TO_HALVES(p, v) _mm256_storeu_si256((__m256i *)(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT))
#define STORE16(p, v) _mm256_storeu_si256((__m256i *)(p), _mm512_cvtepi32_epi16(v))
#define NARROW narrow_avx512
#define TABLE __m512
#define TABLE_LOAD(x, by) _mm512_mul_ps(_mm512_loadu_ps(x), by)
#define TABLE_FIND(t, c, few) ((void)(few), _mm512_permutexvar_ps(c, t))
#define CHAINS 4

static inline uint32_t *PUSH(uint32_t *end, __m512i v, __mmask16 m)
{
	unsigned n = (unsigned)__builtin_popcount(m);

	/* compressing into memory is microcoded on some CPUs; a masked store is not */
	end -= n;
	_mm512_mask_storeu_epi32(end, (__mmask16)((1u << n) - 1), _mm512_maskz_compress_epi32(m, v));
	return end;
}

static inline __m512i PULL(const uint8_t *p, __mmask16 m)
{
	return _mm512_maskz_expand_epi32(m, _mm512_loadu_si512(p));
}

/* A table of 256 bytes in four registers: two 128-byte permutes and a blend on bit 7. */
struct bytes256 {
	__m512i part[4];
};

static inline struct bytes256 bytes256_load(const uint8_t *p)
{
	struct bytes256 t;

	for (int i = 0; i < 4; i++)
		t.part[i] = _mm512_loadu_si512(p + 64 * i);
	return t;
}

static inline __m512i bytes256_find(const struct bytes256 *t, __m512i x)
{
	__m512i low = _mm512_permutex2var_epi8(t->part[0], x, t->part[1]);
	__m512i high = _mm512_permutex2var_epi8(t->part[2], x, t->part[3]);

	return _mm512_mask_blend_epi8(_mm512_movepi8_mask(x), low, high);
}

struct pair {
	struct bytes256 a, b;
};

#define CODES struct pair
#define LOOKUP struct pair

static inline CODES codes_load(const book_codes *book)
{
	return (CODES){bytes256_load(book->code), bytes256_load(book->length)};
}

static inline LOOKUP lookup_load(const book_lookup *book)
{
	return (LOOKUP){bytes256_load(book->symbol), bytes256_load(book->length)};
}

static inline void codes_find(const CODES *t, const uint8_t *symbol, __m512i *code, __m512i *length, uint32_t *escaped)
{
	__m512i x = _mm512_loadu_si512(symbol);
	__m512i c = bytes256_find(&t->a, x), n = bytes256_find(&t->b, x);
	__mmask64 esc = _mm512_movepi8_mask(n);
	__m512i c2, n2;

	escaped[0] = (uint32_t)esc;
	escaped[1] = (uint32_t)(esc >> 32);
	n = AND(n, _mm512_set1_epi8(15));
	c2 = OR(_mm512_sllv_epi16(AND(c, _mm512_set1_epi16(255)), _mm512_srli_epi16(n, 8)), _mm512_srli_epi16(c, 8));
	n2 = _mm512_maddubs_epi16(n, _mm512_set1_epi8(1));
	*length = _mm512_madd_epi16(n2, _mm512_set1_epi16(1));
	*code = OR(SHL(AND(c2, SET1(0xffff)), _mm512_srli_epi32(n2, 16)), _mm512_srli_epi32(c2, 16));
}

static inline __m512i TOP(const __m512i v[STREAMS * NV])
{
	/* byte 3 of each word, of two vectors; the upper half of the index is not used */
	const __m512i top = _mm512_castsi256_si512(_mm256_setr_epi8(3, 7, 11, 15, 19, 23, 27, 31, 35, 39, 43, 47, 51,
								    55, 59, 63, 67, 71, 75, 79, 83, 87, 91, 95, 99, 103,
								    107, 111, 115, 119, 123, 127));

	return _mm512_inserti64x4(_mm512_permutex2var_epi8(v[0], top, v[1]),
				  _mm512_castsi512_si256(_mm512_permutex2var_epi8(v[2], top, v[3])), 1);
}

static inline void WIDEN(__m512i b, __m512i v[STREAMS * NV])
{
	v[0] = _mm512_cvtepu8_epi32(_mm512_castsi512_si128(b));
	v[1] = _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(b, 1));
	v[2] = _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(b, 2));
	v[3] = _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(b, 3));
}

static inline void lookup_find(const LOOKUP *t, __m512i x, __m512i *symbol, __m512i *length)
{
	*symbol = bytes256_find(&t->a, x);
	*length = bytes256_find(&t->b, x);
}

static inline void store_quads(const __m512i s[4], int stream, uint8_t escape, uint8_t *dst, uint32_t *escaped)
{
	const __m512i esc = _mm512_set1_epi8((char)escape);
	/* word i of the result: bytes i, 32 + i, 64 + i, 96 + i of a and b */
	const __m512i quad = _mm512_add_epi32(
		_mm512_set1_epi32(0x60402000),
		_mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
				   _mm512_set1_epi32(0x01010101)));
	__m512i a, b;

	if (stream == 0) {
		a = _mm512_inserti64x4(s[0], _mm512_castsi512_si256(s[1]), 1);
		b = _mm512_inserti64x4(s[2], _mm512_castsi512_si256(s[3]), 1);
	} else {
		a = _mm512_shuffle_i64x2(s[0], s[1], 0xee);
		b = _mm512_shuffle_i64x2(s[2], s[3], 0xee);
	}
	for (int v = 0; v < NV; v++) {
		__m512i q = _mm512_permutex2var_epi8(a, _mm512_add_epi8(quad, _mm512_set1_epi8((char)(16 * v))), b);
		__mmask64 m = _mm512_cmpeq_epi8_mask(q, esc);

		_mm512_storeu_si512(dst + 64 * v, q);
		escaped[2 * v] = (uint32_t)m;
		escaped[2 * v + 1] = (uint32_t)(m >> 32);
	}
}

static inline size_t prune_avx512(const uint8_t *e, uint8_t least, const uint8_t *p, size_t n, uint8_t *dst, size_t *m)
{
	size_t i = 0, at = 0;

	for (; i + 64 <= n; i += 64) {
		__mmask64 keep = _mm512_cmpge_epu8_mask(_mm512_loadu_si512(e + i), _mm512_set1_epi8((char)least));

		_mm512_storeu_si512(dst + at, _mm512_maskz_compress_epi8(keep, _mm512_loadu_si512(p + i)));
		at += (size_t)__builtin_popcountll(keep);
	}
	*m = at;
	return i;
}

static inline size_t unprune_avx512(const uint8_t *e, uint8_t least, const uint8_t *p, size_t n, uint8_t *dst,
				    size_t *m)
{
	size_t i = 0, at = 0;

	for (; i + 64 <= n; i += 64) {
		__mmask64 keep = _mm512_cmpge_epu8_mask(_mm512_loadu_si512(e + i), _mm512_set1_epi8((char)least));

		_mm512_storeu_si512(dst + i, _mm512_maskz_expand_epi8(keep, _mm512_loadu_si512(p + at)));
		at += (size_t)__builtin_popcountll(keep);
	}
	*m = at;
	return i;
}

#define PRUNE prune_avx512
#define UNPRUNE unprune_avx512

#include "lanes.h"
#include "simd_loops.h"
#include "plane_loops.h"
#include "row_loops.h"
#include "truncate_loops.h"

const struct kernels kernels_avx512 = {.name = "avx512",
				       .encode_lanes = encode_lanes,
				       .decode_lanes = decode_lanes,
				       KERNEL_LOOPS,
				       ROW_LOOPS,
				       TRUNCATE_LOOPS};
