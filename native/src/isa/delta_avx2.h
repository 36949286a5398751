/* delta_avx2.h - DELTA's loops over whole words of 64 values with AVX2; see delta_loops.h. */
#include <immintrin.h>

#include "kernels.h"

/* Return a mask whose bit i is bit 7 of byte i of 64 bytes. */
static inline uint64_t bits_avx2(__m256i low, __m256i high)
{
	return (uint32_t)_mm256_movemask_epi8(low) | (uint64_t)(uint32_t)_mm256_movemask_epi8(high) << 32;
}

/* Pack 64 values of 16 bits (each -1, or 0 to 127) to bytes, in order. */
static inline void pack16_avx2(const __m256i x[4], __m256i y[2])
{
	for (int i = 0; i < 2; i++)
		y[i] = _mm256_permute4x64_epi64(_mm256_packs_epi16(x[2 * i], x[2 * i + 1]), 0xd8);
}

/* Pack 64 values of 32 bits, each in the range of int16, to 16 bits, in order. */
static inline void pack32_avx2(const __m256i x[8], __m256i y[4])
{
	for (int i = 0; i < 4; i++)
		y[i] = _mm256_permute4x64_epi64(_mm256_packs_epi32(x[2 * i], x[2 * i + 1]), 0xd8);
}

/* Compare 64 values of `item` bytes: return a mask whose bit i is set if values i of a and b are equal. */
static inline __attribute__((always_inline)) uint64_t equal_avx2(const char *a, const char *b, uint32_t item)
{
	__m256i x[16], y[8], z[4], w[2];
	uint64_t bits = 0;

#define PAIR(i) _mm256_loadu_si256((const __m256i *)(a + 32 * (i))), _mm256_loadu_si256((const __m256i *)(b + 32 * (i)))
	for (uint32_t i = 0; i < 2 * item; i++)
		switch (item) {
		case 1: w[i] = _mm256_cmpeq_epi8(PAIR(i)); break;
		case 2: z[i] = _mm256_cmpeq_epi16(PAIR(i)); break;
		case 4: y[i] = _mm256_cmpeq_epi32(PAIR(i)); break;
		default: x[i] = _mm256_cmpeq_epi64(PAIR(i)); break;
		}
#undef PAIR
	if (item == 8) {
		for (int i = 0; i < 16; i++)
			bits |= (uint64_t)(uint32_t)_mm256_movemask_pd(_mm256_castsi256_pd(x[i])) << 4 * i;
		return bits;
	}
	if (item == 4)
		pack32_avx2(y, z);
	if (item >= 2)
		pack16_avx2(z, w);
	return bits_avx2(w[0], w[1]);
}

static inline __attribute__((always_inline)) size_t differences_avx2(const void *a, const void *b, size_t n,
								     uint32_t item, uint64_t *changed, size_t *count)
{
	size_t i = 0;

	for (; i + 64 <= n; i += 64) {
		uint64_t word = ~equal_avx2((const char *)a + i * item, (const char *)b + i * item, item);

		changed[i / 64] = word;
		*count += (size_t)_mm_popcnt_u64(word);
	}
	return i;
}

/* Extract the exponent fields of 64 values as bytes. */
static inline __attribute__((always_inline)) void fields_avx2(const struct delta_kind *q, const char *p, uint32_t item,
							      __m256i e[2])
{
	const __m128i shift = _mm_cvtsi32_si128((int)q->mbits);
	const int last = (int)q->last;
	__m256i y[8], z[4];

#define AT(i) _mm256_loadu_si256((const __m256i *)(p + 32 * (i)))
	for (uint32_t i = 0; i < 2 * item; i++)
		switch (item) {
		case 1: e[i] = _mm256_and_si256(_mm256_srl_epi16(AT(i), shift), _mm256_set1_epi8((char)last)); break;
		case 2: z[i] = _mm256_and_si256(_mm256_srl_epi16(AT(i), shift), _mm256_set1_epi16((short)last)); break;
		default: y[i] = _mm256_and_si256(_mm256_srl_epi32(AT(i), shift), _mm256_set1_epi32(last)); break;
		}
#undef AT
	if (item == 4)
		pack32_avx2(y, z);
	for (int i = 0; i < 2 && item >= 2; i++)
		e[i] = _mm256_permute4x64_epi64(_mm256_packus_epi16(z[2 * i], z[2 * i + 1]), 0xd8);
}

/* Compute classes of values from exponents: exponent - scale, saturated to 0..255, halved and rounded up. */
static inline __attribute__((always_inline)) size_t classes_avx2(const struct delta_kind *q, const void *base, size_t n,
								 int scale, uint64_t *const *plane, uint32_t *top,
								 uint32_t item, uint64_t *sums, const uint32_t *key)
{
	const __m256i less = _mm256_set1_epi8((char)(scale < 0 ? 0 : scale > 255 ? 255 : scale));
	const __m256i more = _mm256_set1_epi8((char)(scale < 0 ? -scale : 0));
	const __m256i zero = _mm256_setzero_si256(), one = _mm256_set1_epi8(1), eight = _mm256_set1_epi8(8);
	uint64_t *p0 = plane[0], *p1 = plane[1], *p2 = plane[2], *p3 = plane[3];
	__m256i most = zero;
	uint8_t bytes[32];
	size_t i = 0;

	if (item == 8)
		return 0;
	for (; i + 64 <= n; i += 64) {
		const char *p = (const char *)base + i * item;
		size_t j = i / 64;
		__m256i c[2];

		fields_avx2(q, p, item, c);
		for (uint32_t v = 0; v < item; v++)
			_mm_prefetch((const void *)((uintptr_t)p + DELTA_AHEAD + 64 * v), _MM_HINT_T0);
		for (int h = 0; h < 2; h++) {
			c[h] = _mm256_adds_epu8(_mm256_subs_epu8(_mm256_max_epu8(c[h], one), less), more);
			c[h] = _mm256_min_epu8(_mm256_avg_epu8(c[h], zero), eight);
			most = _mm256_max_epu8(most, c[h]);
		}
		p0[j] = bits_avx2(_mm256_slli_epi16(c[0], 7), _mm256_slli_epi16(c[1], 7));
		p1[j] = bits_avx2(_mm256_slli_epi16(c[0], 6), _mm256_slli_epi16(c[1], 6));
		p2[j] = bits_avx2(_mm256_slli_epi16(c[0], 5), _mm256_slli_epi16(c[1], 5));
		p3[j] = bits_avx2(_mm256_slli_epi16(c[0], 4), _mm256_slli_epi16(c[1], 4));
		if (sums && (i + 64) * item % DELTA_CHUNK == 0)
			sums[i * item / DELTA_CHUNK] =
				chunk_sum_avx2((const uint8_t *)p + 64 * item - DELTA_CHUNK, key);
	}
	_mm256_storeu_si256((__m256i *)bytes, most);
	for (int b = 0; b < 32; b++)
		*top = bytes[b] > *top ? bytes[b] : *top;
	return i;
}

/*
 * Find the word of a mask that contains member `number`, given the counts of members before each word, which are below
 * 2^31. Compare 32 counts per branch, because the distance is unpredictable and a branch may be mispredicted.
 */
static inline size_t find_word_avx2(const uint32_t *before, size_t from, uint32_t number)
{
	const __m256i than = _mm256_set1_epi32((int)number);

	for (;; from += 32) {
		unsigned more = 0;

		for (int i = 0; i < 4; i++) {
			__m256i x = _mm256_loadu_si256((const __m256i *)(before + from + 8 * i + 1));

			more |= (unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(x, than))) << 8 * i;
		}
		if (__builtin_expect(more != 0, 1))
			return from + (size_t)__builtin_ctz(more);
	}
}

#define DIFFERENCES_FIRST(a, b, n, item, changed, count) differences_avx2(a, b, n, item, changed, count)
#define CLASSES_FIRST(q, base, n, scale, plane, top, item, sums)                                                       \
	classes_avx2(q, base, n, scale, plane, top, item, sums, CHECKSUM_KEY)
#define FIND_WORD find_word_avx2
