/* delta_avx512.h - DELTA's loops over whole words of 64 values with AVX-512; see delta_loops.h. */
#include <immintrin.h>

#include "kernels.h"

static inline __attribute__((always_inline)) size_t differences_avx512(const void *a, const void *b, size_t n,
								       uint32_t item, uint64_t *changed, size_t *count)
{
	size_t i = 0;

	for (; i + 64 <= n; i += 64) {
		const char *p = (const char *)a + i * item, *r = (const char *)b + i * item;
		uint64_t word = 0;

		for (uint32_t v = 0; v < item; v++) {
			__m512i x = _mm512_loadu_si512(p + 64 * v), y = _mm512_loadu_si512(r + 64 * v);

			switch (item) {
			case 1: word = _mm512_cmpeq_epi8_mask(x, y); break;
			case 2: word |= (uint64_t)_mm512_cmpeq_epi16_mask(x, y) << 32 * v; break;
			case 4: word |= (uint64_t)_mm512_cmpeq_epi32_mask(x, y) << 16 * v; break;
			default: word |= (uint64_t)_mm512_cmpeq_epi64_mask(x, y) << 8 * v; break;
			}
		}
		changed[i / 64] = ~word;
		*count += (size_t)__builtin_popcountll(~word);
	}
	return i;
}

/* List the positions of the set bits of a mask, 8 words at a time. Fast if most words are 0. */
static inline size_t list_avx512(const uint64_t *bits, size_t words, uint32_t *at, size_t *count)
{
	uint8_t number[64];
	__m512i numbers;
	size_t j = 0;

	for (int i = 0; i < 64; i++)
		number[i] = (uint8_t)i;
	numbers = _mm512_loadu_si512(number);
	for (; j + 8 <= words; j += 8) {
		__m512i group = _mm512_loadu_si512(bits + j);

		for (uint32_t some = _mm512_test_epi64_mask(group, group); some; some &= some - 1) {
			size_t k = j + (size_t)__builtin_ctz(some), n = (size_t)__builtin_popcountll(bits[k]);
			__m512i places = _mm512_maskz_compress_epi8(bits[k], numbers);
			__m512i first = _mm512_set1_epi32((int)(64 * k));
			uint32_t *to = at + *count;

#define PUT_PLACES(i)                                                                                                  \
	_mm512_storeu_si512(to + 16 * (i),                                                                             \
			    _mm512_add_epi32(first, _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(places, i))))
			PUT_PLACES(0);
			if (n > 16) {
				PUT_PLACES(1);
				PUT_PLACES(2);
				PUT_PLACES(3);
			}
#undef PUT_PLACES
			*count += n;
		}
	}
	return j;
}

/* Extract the exponent fields of 64 values as bytes. */
static inline __attribute__((always_inline)) __m512i fields_avx512(const struct delta_kind *q, const char *p,
								   uint32_t item)
{
	const __m128i shift = _mm_cvtsi32_si128((int)q->mbits);
	const int last = (int)q->last;
	__m512i x[4];

	for (uint32_t v = 0; v < item; v++) {
		x[v] = _mm512_loadu_si512(p + 64 * v);
		x[v] = item == 4 ? _mm512_srl_epi32(x[v], shift) : _mm512_srl_epi16(x[v], shift);
	}
	if (item == 1)
		return _mm512_and_si512(x[0], _mm512_set1_epi8((char)last));
	if (item == 2) {
		const __m512i mask = _mm512_set1_epi16((short)last), order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);

		return _mm512_permutexvar_epi64(
			order, _mm512_packus_epi16(_mm512_and_si512(x[0], mask), _mm512_and_si512(x[1], mask)));
	}
	{
		const __m512i mask = _mm512_set1_epi32(last);
		__m128i y[4];

		for (int v = 0; v < 4; v++)
			y[v] = _mm512_cvtepi32_epi8(_mm512_and_si512(x[v], mask));
		return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_set_m128i(y[1], y[0])),
					  _mm256_set_m128i(y[3], y[2]), 1);
	}
}

/* Compute classes of values from exponents: exponent - scale, saturated to 0..255, halved and rounded up. */
static inline __attribute__((always_inline)) size_t classes_avx512(const struct delta_kind *q, const void *base,
								   size_t n, int scale, uint64_t *const *plane,
								   uint32_t *top, uint32_t item, uint64_t *sums,
								   const uint32_t *key)
{
	const __m512i less = _mm512_set1_epi8((char)(scale < 0 ? 0 : scale > 255 ? 255 : scale));
	const __m512i more = _mm512_set1_epi8((char)(scale < 0 ? -scale : 0));
	const __m512i zero = _mm512_setzero_si512(), one = _mm512_set1_epi8(1), two = _mm512_set1_epi8(2);
	const __m512i four = _mm512_set1_epi8(4), eight = _mm512_set1_epi8(8);
	uint64_t *p0 = plane[0], *p1 = plane[1], *p2 = plane[2], *p3 = plane[3];
	__m512i most = zero;
	uint8_t bytes[64];
	size_t i = 0;

	if (item == 8)
		return 0;
	for (; i + 64 <= n; i += 64) {
		const char *p = (const char *)base + i * item;
		__m512i c = _mm512_max_epu8(fields_avx512(q, p, item), one);

		for (uint32_t v = 0; v < item; v++)
			_mm_prefetch((const void *)((uintptr_t)p + DELTA_AHEAD + 64 * v), _MM_HINT_T0);
		c = _mm512_adds_epu8(_mm512_subs_epu8(c, less), more);
		c = _mm512_min_epu8(_mm512_avg_epu8(c, zero), eight);
		most = _mm512_max_epu8(most, c);
		p0[i / 64] = _mm512_test_epi8_mask(c, one);
		p1[i / 64] = _mm512_test_epi8_mask(c, two);
		p2[i / 64] = _mm512_test_epi8_mask(c, four);
		p3[i / 64] = _mm512_test_epi8_mask(c, eight);
		if (sums && (i + 64) * item % DELTA_CHUNK == 0)
			sums[i * item / DELTA_CHUNK] =
				chunk_sum_avx512((const uint8_t *)p + 64 * item - DELTA_CHUNK, key);
	}
	_mm512_storeu_si512(bytes, most);
	for (int b = 0; b < 64; b++)
		*top = bytes[b] > *top ? bytes[b] : *top;
	return i;
}

/*
 * Combine the planes of class numbers to a mask of the values in one class. Class 8 is the only class with bit 3; other
 * classes follow from bits 0 to 2.
 */
#define MEMBERS_OF(class_)                                                                                             \
	case class_: return _mm512_ternarylogic_epi64(LOWER(2), LOWER(1), LOWER(0), 1 << (class_))
static inline
	__attribute__((always_inline)) __m512i members_of(const struct delta_buffers *b, size_t j, uint32_t class_)
{
#define LOWER(p) _mm512_loadu_si512(b->plane[p] + j)
	switch (class_) {
	case 0:
		return _mm512_andnot_si512(LOWER(3), _mm512_ternarylogic_epi64(LOWER(2), LOWER(1), LOWER(0), 1));
		MEMBERS_OF(1);
		MEMBERS_OF(2);
		MEMBERS_OF(3);
		MEMBERS_OF(4);
		MEMBERS_OF(5);
		MEMBERS_OF(6);
		MEMBERS_OF(7);
	default: return LOWER(3);
	}
#undef LOWER
}

/*
 * Compute the mask of the values in a class, 8 words at a time, and the number of these values before each word; three
 * shifts and adds compute the prefix sums of 8 words. Return the number of words processed, and set *total to the
 * number of values in the class.
 */
static inline __attribute__((always_inline)) size_t members_avx512_as(const struct delta_buffers *b, size_t words,
								      uint32_t class_, uint32_t *total)
{
	const __m512i zero = _mm512_setzero_si512(), last = _mm512_set1_epi64(7);
	__m512i before = zero;
	size_t j = 0;

	for (; j + 8 <= words; j += 8) {
		__m512i member = members_of(b, j, class_), count = _mm512_popcnt_epi64(member), sum;

		_mm512_storeu_si512(b->member + j, member);
		sum = _mm512_add_epi64(count, _mm512_alignr_epi64(count, zero, 7));
		sum = _mm512_add_epi64(sum, _mm512_alignr_epi64(sum, zero, 6));
		sum = _mm512_add_epi64(sum, _mm512_alignr_epi64(sum, zero, 4));
		_mm256_storeu_si256((__m256i *)(b->before + j),
				    _mm512_cvtepi64_epi32(_mm512_add_epi64(before, _mm512_sub_epi64(sum, count))));
		before = _mm512_add_epi64(before, _mm512_permutexvar_epi64(last, sum));
	}
	*total = (uint32_t)_mm_cvtsi128_si64(_mm512_castsi512_si128(before));
	return j;
}

static inline size_t members_avx512(const struct delta_buffers *b, size_t words, uint32_t class_, uint32_t *total)
{
	switch (class_) { /* class_ is a compile-time constant in each loop */
	case 0: return members_avx512_as(b, words, 0, total);
	case 1: return members_avx512_as(b, words, 1, total);
	case 2: return members_avx512_as(b, words, 2, total);
	case 3: return members_avx512_as(b, words, 3, total);
	case 4: return members_avx512_as(b, words, 4, total);
	case 5: return members_avx512_as(b, words, 5, total);
	case 6: return members_avx512_as(b, words, 6, total);
	case 7: return members_avx512_as(b, words, 7, total);
	default: return members_avx512_as(b, words, 8, total);
	}
}

/* Find the word of a mask that contains member `number`. Compare 64 words per branch, which may be mispredicted. */
static inline size_t find_word_avx512(const uint32_t *before, size_t from, uint32_t number)
{
	const __m512i than = _mm512_set1_epi32((int)number);

	for (;; from += 64) {
		uint64_t more = 0;

		for (int i = 0; i < 4; i++)
			more |= (uint64_t)_mm512_cmpgt_epi32_mask(_mm512_loadu_si512(before + from + 16 * i + 1), than)
				<< 16 * i;
		if (__builtin_expect(more != 0, 1))
			return from + (size_t)__builtin_ctzll(more);
	}
}

#define DIFFERENCES_FIRST(a, b, n, item, changed, count) differences_avx512(a, b, n, item, changed, count)
#define LIST_FIRST(changed, words, at, count) list_avx512(changed, words, at, count)
#define CLASSES_FIRST(q, base, n, scale, plane, top, item, sums)                                                       \
	classes_avx512(q, base, n, scale, plane, top, item, sums, CHECKSUM_KEY)
#define MEMBERS_FIRST(b, words, class_, total) members_avx512(b, words, class_, total)
#define FIND_WORD find_word_avx512
