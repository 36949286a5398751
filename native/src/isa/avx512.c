/* avx512.c - kernels for AVX-512 F, BW, VL, DQ, VBMI, VBMI2 and VPOPCNTDQ. */
#include <immintrin.h>

#include "planes_avx512.h"
#include "rows_avx512.h"
#include "delta_avx512.h"
#include "truncate_avx512.h"

#define V __m512i
#define MASK __mmask16
#define NV 2
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
#define KEEP(v) AND(v, SET1(31))
#define SELECT(m, a, b) _mm512_mask_blend_epi32(m, b, a)

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
#define LEAST least_avx512
#define LARGEST largest_avx512
#define GT _mm512_cmpgt_epi32_mask
#define EQ _mm512_cmpeq_epi32_mask
#define EITHER(a, b) ((__mmask16)((a) | (b)))
#define MULU _mm512_mul_epu32
#define ADDQ _mm512_add_epi64
#define SRLQ _mm512_srli_epi64
#define SHLQ _mm512_sllv_epi64
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
#define SIGNS _mm512_movepi32_mask
#define MASK_BITS (unsigned)
#define SETTLE_ALIGN 64
#define PUT_NONTEMPORAL(p, v) put512(1, p, v)
#define CHAINS 4

static inline size_t count_avx512(const uint8_t *e, uint8_t least, size_t n, size_t *m)
{
	size_t i = 0, some = 0;

	for (; i + 64 <= n; i += 64)
		some += (size_t)__builtin_popcountll(
			_mm512_cmpge_epu8_mask(_mm512_loadu_si512(e + i), _mm512_set1_epi8((char)least)));
	*m = some;
	return i;
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

#define COUNT_LEAST count_avx512
#define PRUNE prune_avx512
#define UNPRUNE unprune_avx512

#include "encode_lanes_avx512.h"
#include "encode_lanes.h"
#include "decode_lanes_avx512.h"
#include "simd_loops.h"
#include "plane_loops.h"
#include "row_loops.h"
#include "truncate_loops.h"
#include "delta_loops.h"
#include "topk_loops.h"

const struct kernels kernels_avx512 = {.name = "avx512",
				       .encode_lanes = encode_lanes,
				       .decode_lanes = decode_lanes,
				       KERNEL_LOOPS,
				       ROW_LOOPS,
				       TRUNCATE_LOOPS,
				       DELTA_LOOPS,
				       TOPK_LOOPS};
