/* avx2.c - kernels for AVX2, FMA, F16C and BMI2. */
#include <immintrin.h>

#include "planes_avx2.h"
#include "rows_avx2.h"
#include "delta_avx2.h"
#include "truncate_avx2.h"
#include "permute_avx2.h"

#define V __m256i
#define MASK __m256i
#define NV 4
#define LANES 8
#define LOAD(p) _mm256_loadu_si256((const __m256i *)(p))
#define STORE(p, v) _mm256_storeu_si256((__m256i *)(p), v)
#define SET1(x) _mm256_set1_epi32(x)
#define ADD _mm256_add_epi32
#define SUB _mm256_sub_epi32
#define OR _mm256_or_si256
#define AND _mm256_and_si256
#define SHL _mm256_sllv_epi32
#define SHR _mm256_srlv_epi32
#define KEEP(v) AND(v, SET1(31))
#define SELECT(m, a, b) _mm256_blendv_epi8(b, a, m)

/* for simd_loops.h */
#define F __m256
#define SETF _mm256_set1_ps
#define LOADF _mm256_loadu_ps
#define STOREF _mm256_storeu_ps
#define AS_F _mm256_castsi256_ps
#define AS_V _mm256_castps_si256
#define ADDF _mm256_add_ps
#define MULF _mm256_mul_ps
#define DIVF _mm256_div_ps
#define MINF _mm256_min_ps
#define FMA _mm256_fmadd_ps
#define FNMA _mm256_fnmadd_ps
#define TRUNC _mm256_cvttps_epi32
#define FLOAT _mm256_cvtepi32_ps
#define SLL _mm256_slli_epi32
#define SRL _mm256_srli_epi32
#define SRA _mm256_srai_epi32
#define XOR _mm256_xor_si256
#define XOR3(a, b, c) XOR(a, XOR(b, c))
#define MIN _mm256_min_epi32
#define MAX _mm256_max_epi32
#define LEAST least_avx2
#define LARGEST largest_avx2
#define GT _mm256_cmpgt_epi32
#define EQ _mm256_cmpeq_epi32
#define EITHER OR
#define MULU _mm256_mul_epu32
#define ADDQ _mm256_add_epi64
#define SRLQ _mm256_srli_epi64
#define SHLQ _mm256_sllv_epi64
#define SETQ _mm256_set1_epi64x
#define SEQUENCE _mm256_setr_epi64x(0, 2, 1, 3)
#define UNPACKLOQ _mm256_unpacklo_epi64
#define UNPACKHIQ _mm256_unpackhi_epi64
#define ODD_WORDS(a, b) _mm256_blend_epi32(a, _mm256_slli_epi64(b, 32), 0xaa)
#define WIDEN8(p) _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p)))
#define WIDEN16(p) _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p)))
#define FROM_HALVES(p) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p)))
#define TO_HALVES(p, v) _mm_storeu_si128((__m128i *)(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT))
#define STORE16(p, v)                                                                                                  \
	_mm_storeu_si128((__m128i *)(p), _mm_packus_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1)))
#define NARROW narrow_avx2
#define TABLE struct table_avx2
#define TABLE_LOAD table_avx2
#define TABLE_FIND table_find_avx2
#define SIGNS bits_of
#define MASK_BITS bits_of
#define SETTLE_ALIGN 16
#define PUT_NONTEMPORAL(p, v) put256(1, p, v)
#define CHAINS 3

static inline unsigned bits_of(__m256i mask)
{
	return (unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(mask));
}

static inline __m256i permutation(const uint64_t *table, unsigned mask)
{
	return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(table + mask)));
}

static inline uint32_t *PUSH(uint32_t *end, __m256i v, __m256i mask)
{
	unsigned m = bits_of(mask);

	/*
	 * the permutation packs the masked words against the top of the vector, just below `end`; the next call
	 * overwrites the other words stored here
	 */
	STORE(end - 8, _mm256_permutevar8x32_epi32(v, permutation(COMPRESS, m)));
	return end - __builtin_popcount(m);
}

/*
 * Two tables of 256 bytes, each 16 rows of 16 bytes, looked up with pshufb at the same 32 indices. The high nibble of
 * an index selects the row. In a codebook's tables most rows are constant (no code, or a code of at most 4 bits): one
 * look-up by high nibble serves all constant rows. Each other row needs one more look-up.
 */
struct pair {
	__m256i by_row[2];
	__m256i row[16][2];
	__m256i high[16]; /* vector r: every byte is r << 4 */
	int nrows;
};

static inline struct pair pair_load(const uint8_t *a, const uint8_t *b)
{
	struct pair t;
	uint8_t by_row[2][16];

	t.nrows = 0;
	for (int r = 0; r < 16; r++) {
		const uint8_t *x = a + 16 * r, *y = b + 16 * r;

		if (memcmp(x, x + 1, 15) == 0 && memcmp(y, y + 1, 15) == 0) {
			by_row[0][r] = *x;
			by_row[1][r] = *y;
			continue;
		}
		by_row[0][r] = by_row[1][r] = 0;
		t.row[t.nrows][0] = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)x));
		t.row[t.nrows][1] = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)y));
		t.high[t.nrows++] = _mm256_set1_epi8((char)(r << 4));
	}
	for (int i = 0; i < 2; i++)
		t.by_row[i] = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)by_row[i]));
	return t;
}

static inline void pair_find(const struct pair *t, __m256i x, __m256i *a, __m256i *b)
{
	__m256i high = AND(_mm256_srli_epi16(x, 4), _mm256_set1_epi8(15));

	*a = _mm256_shuffle_epi8(t->by_row[0], high);
	*b = _mm256_shuffle_epi8(t->by_row[1], high);
	for (int r = 0; r < t->nrows; r++) {
		/* if an index is not in row r, the saturated sum has bit 7 set, so that pshufb gives 0 */
		__m256i i = _mm256_adds_epu8(_mm256_xor_si256(x, t->high[r]), _mm256_set1_epi8(0x70));

		*a = OR(*a, _mm256_shuffle_epi8(t->row[r][0], i));
		*b = OR(*b, _mm256_shuffle_epi8(t->row[r][1], i));
	}
}

#define CODES struct pair
#define FEW(t) 0

static inline CODES codes_load(const book_codes *book)
{
	return pair_load(book->code, book->length);
}

static inline void codes_find(const CODES *t, int few, const uint8_t *symbol, __m256i *code, __m256i *length,
			      uint32_t *escaped)
{
	/* table of 2^(n - 1), indexed by n: AVX2 has no 16-bit shift by a variable count, so multiply */
	const __m256i power =
		_mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 2, 4, 8, 16, 32, 64, (char)128, 0, 0, 0, 0, 0, 0, 0));
	__m256i c, n, p, c2, n2;

	(void)few;
	pair_find(t, LOAD(symbol), &c, &n);
	*escaped = (uint32_t)_mm256_movemask_epi8(n);
	n = AND(n, _mm256_set1_epi8(15));
	p = _mm256_srli_epi16(_mm256_shuffle_epi8(power, n), 8);
	c2 = _mm256_mullo_epi16(AND(c, _mm256_set1_epi16(255)), _mm256_add_epi16(p, p));
	c2 = OR(c2, _mm256_srli_epi16(c, 8));
	n2 = _mm256_maddubs_epi16(n, _mm256_set1_epi8(1));
	*length = _mm256_madd_epi16(n2, _mm256_set1_epi16(1));
	*code = OR(SHL(AND(c2, SET1(0xffff)), _mm256_srli_epi32(n2, 16)), _mm256_srli_epi32(c2, 16));
}

static inline __m256i at_least(__m256i v, __m256i floor)
{
	return _mm256_cmpeq_epi8(_mm256_max_epu8(v, floor), v);
}

/*
 * Pack the bytes p[i] with e[i] >= least: 8 bytes at a time with the COMPRESS permutations, or 32 at a time if all or
 * none are packed. Return the number of bytes read, and set *m to the number of bytes packed.
 */
static inline size_t prune_avx2(const uint8_t *e, uint8_t least, const uint8_t *p, size_t n, uint8_t *dst, size_t *m)
{
	const __m256i floor = _mm256_set1_epi8((char)least);
	size_t i = 0, at = 0;

	for (; i + 32 <= n; i += 32) {
		uint32_t mask = (uint32_t)_mm256_movemask_epi8(at_least(LOAD(e + i), floor));

		if (mask == UINT32_MAX) {
			STORE(dst + at, LOAD(p + i));
			at += 32;
			continue;
		}
		if (!mask)
			continue;
		for (size_t b = 0; b < 32; b += 8, mask >>= 8) {
			unsigned count = (unsigned)__builtin_popcount(mask & 255);
			__m128i x = _mm_loadl_epi64((const __m128i *)(p + i + b));
			__m128i order = _mm_loadl_epi64((const __m128i *)(COMPRESS + (mask & 255)));

			/*
			 * COMPRESS packed `count` bytes against the top; the shift moves them down. If count is 0, the
			 * next store overwrites this one
			 */
			store64(dst + at,
				(uint64_t)_mm_cvtsi128_si64(_mm_shuffle_epi8(x, order)) >> (8 * (8 - count) & 63));
			at += count;
		}
	}
	*m = at;
	return i;
}

static inline size_t unprune_avx2(const uint8_t *e, uint8_t least, const uint8_t *p, size_t n, uint8_t *dst, size_t *m)
{
	const __m256i floor = _mm256_set1_epi8((char)least);
	size_t i = 0, at = 0;

	for (; i + 32 <= n; i += 32) {
		__m256i some = at_least(LOAD(e + i), floor);
		uint32_t mask = (uint32_t)_mm256_movemask_epi8(some);
		uint64_t keep[4];

		if (mask == UINT32_MAX || !mask) {
			STORE(dst + i, AND(some, LOAD(p + at)));
			at += mask & 32;
			continue;
		}
		STORE(keep, some);
		for (size_t b = 0; b < 32; b += 8, mask >>= 8) {
			__m128i x = _mm_loadl_epi64((const __m128i *)(p + at));
			__m128i order = _mm_loadl_epi64((const __m128i *)(EXPAND + (mask & 255)));

			store64(dst + i + b, (uint64_t)_mm_cvtsi128_si64(_mm_shuffle_epi8(x, order)) & keep[b / 8]);
			at += (size_t)__builtin_popcount(mask & 255);
		}
	}
	*m = at;
	return i;
}

#define PRUNE prune_avx2
#define UNPRUNE unprune_avx2

#include "encode_lanes.h"
#include "decode_lanes_avx2.h"
#include "simd_loops.h"
#include "plane_loops.h"
#include "row_loops.h"
#include "truncate_loops.h"
#include "delta_loops.h"
#include "topk_loops.h"

const struct kernels kernels_avx2 = {.name = "avx2",
				     .encode_lanes = encode_lanes,
				     .decode_lanes = decode_lanes,
				     KERNEL_LOOPS,
				     ROW_LOOPS,
				     TRUNCATE_LOOPS,
				     DELTA_LOOPS,
				     TOPK_LOOPS};
