/*
 * delta_loops.h - loops of DELTA, compiled once per instruction set: differences, classes, bit streams.
 *
 * Included by scalar.c, avx2.c and avx512.c, after plane_loops.h. Functions that take `item`, the bytes per value, are
 * inlined with a constant.
 */
#include "bit_stream.h"

#define DELTA_WORDS(n) (((n) + 63) / 64)
#define BY_ITEM(item, call) ((item) == 1 ? call(1) : (item) == 2 ? call(2) : (item) == 4 ? call(4) : call(8))
/*
 * Call a loop that is compiled separately for each dtype with exponents, except 8-bit dtypes, so that *q is a constant.
 */
static const struct delta_kind FLOAT32_KIND = {4, 23, 255}, FLOAT64_KIND = {8, 52, 2047}, BFLOAT16_KIND = {2, 7, 255},
			       FLOAT16_KIND = {2, 10, 31};
#define BY_KIND(q, call)                                                                                               \
	((q)->item == 1    ? call(q, 1)                                                                                \
	 : (q)->item == 4  ? call(&FLOAT32_KIND, 4)                                                                    \
	 : (q)->item == 8  ? call(&FLOAT64_KIND, 8)                                                                    \
	 : (q)->mbits == 7 ? call(&BFLOAT16_KIND, 2)                                                                   \
			   : call(&FLOAT16_KIND, 2))
/* Prefetch distance, in changes: a list is not in order of position, and the tensor may be in no cache. */
#define PUT_AHEAD 32

ALWAYS uint64_t delta_load(const void *p, size_t i, uint32_t item)
{
	uint64_t x = 0;

	switch (item) {
	case 1: return ((const uint8_t *)p)[i];
	case 2: return native16(p, i);
	case 4: return native32(p, i);
	default: memcpy(&x, (const char *)p + 8 * i, 8); return x;
	}
}

ALWAYS void delta_store(void *p, size_t i, uint32_t item, uint64_t x)
{
	uint8_t x1 = (uint8_t)x;
	uint16_t x2 = (uint16_t)x;
	uint32_t x4 = (uint32_t)x;

	switch (item) {
	case 1: memcpy((char *)p + i, &x1, 1); break;
	case 2: memcpy((char *)p + 2 * i, &x2, 2); break;
	case 4: memcpy((char *)p + 4 * i, &x4, 4); break;
	default: memcpy((char *)p + 8 * i, &x, 8); break;
	}
}

/* Add the effect of a block's changes to the checksum sums of its chunks. The block begins at the start of a chunk. */
ALWAYS void change_sums_as(const void *base, const struct delta_list *list, uint64_t *sums, uint32_t item)
{
	for (size_t c = 0; c < list->count; c++) {
		uint64_t x = delta_load(base, list->at[c], item), y = delta_load(list->value, c, item);
		size_t byte = (size_t)list->at[c] * item, word = byte / 4 % WIRE_CHUNK_WORDS;
		uint64_t *sum = sums + byte / (DELTA_CHUNK);
		uint32_t shift = item < 4 ? 8 * (byte & 3) : 0;

		if (item == 8) {
			*sum += ((y & 0xffffffffu) - (x & 0xffffffffu)) * CHECKSUM_KEY[word];
			*sum += ((y >> 32) - (x >> 32)) * CHECKSUM_KEY[word + 1];
		} else {
			*sum += ((y << shift) - (x << shift)) * CHECKSUM_KEY[word];
		}
	}
}

static void change_sums(const void *base, const struct delta_list *list, uint32_t item, uint64_t *sums)
{
#define CHANGE_SUMS(item) change_sums_as(base, list, sums, item)
	BY_ITEM(item, CHANGE_SUMS);
}

ALWAYS void put_changes_as(const struct delta_list *list, void *dst, uint32_t item)
{
	for (size_t c = 0; c < list->count; c++) {
		if (c + PUT_AHEAD < list->count)
			__builtin_prefetch((const char *)dst + (size_t)list->at[c + PUT_AHEAD] * item, 1);
		delta_store(dst, list->at[c], item, delta_load(list->value, c, item));
	}
}

static void put_changes(const struct delta_list *list, uint32_t item, void *dst)
{
#define PUT_CHANGES(item) put_changes_as(list, dst, item)
	BY_ITEM(item, PUT_CHANGES);
}

static void chunk_sums(const uint8_t *src, size_t n, uint64_t *sums)
{
	for (size_t c = 0; c < n; c++)
		sums[c] = CHUNK_SUM(src + DELTA_CHUNK * c, CHECKSUM_KEY);
}

/*
 * Vectorized loops of an instruction set process the first values, in groups of 64. DIFFERENCES_FIRST and CLASSES_FIRST
 * return the number of processed values; LIST_FIRST and MEMBERS_FIRST return that of processed words of 64 values. By
 * default, no values are processed.
 */
#ifndef DIFFERENCES_FIRST
#define DIFFERENCES_FIRST(a, b, n, item, changed, count) 0
#endif
#ifndef LIST_FIRST
#define LIST_FIRST(changed, words, at, count) 0
#endif
#ifndef CLASSES_FIRST
#define CLASSES_FIRST(q, base, n, scale, plane, top, item, sums) 0
#endif
#ifndef MEMBERS_FIRST
#define MEMBERS_FIRST(b, words, class_, total) 0
#endif
/* Return the first j from `from` on with before[j + 1] > number; `before` ascends, and has such a j. */
#ifndef FIND_WORD
static inline size_t FIND_WORD(const uint32_t *before, size_t from, uint32_t number)
{
	while (before[from + 1] <= number)
		from++;
	return from;
}
#endif

ALWAYS size_t differences_as(const void *a, const void *b, size_t n, uint64_t *changed, uint32_t item)
{
	size_t count = 0;

	for (size_t i = DIFFERENCES_FIRST(a, b, n, item, changed, &count); i < n; i += 64) {
		size_t m = n - i < 64 ? n - i : 64;
		uint64_t word = 0;

		for (size_t k = 0; k < m; k++)
			word |= (uint64_t)(delta_load(a, i + k, item) != delta_load(b, i + k, item)) << k;
		changed[i / 64] = word;
		count += (size_t)__builtin_popcountll(word);
	}
	return count;
}

static size_t differences(const void *a, const void *b, size_t n, uint32_t item, uint64_t *changed)
{
#define DIFFERENCES(item) differences_as(a, b, n, changed, item)
	return BY_ITEM(item, DIFFERENCES);
}

ALWAYS size_t compare_chunks_as(const void *a, const void *b, size_t n, uint64_t *changed, uint64_t *sums_a,
				uint64_t *sums_b, uint32_t item)
{
	const size_t values = DELTA_CHUNK / item;
	size_t count = 0;

	for (size_t c = 0; c < n; c++) {
		const uint8_t *x = (const uint8_t *)a + DELTA_CHUNK * c, *y = (const uint8_t *)b + DELTA_CHUNK * c;

		count += differences_as(x, y, values, changed + values / 64 * c, item);
		sums_a[c] = CHUNK_SUM(x, CHECKSUM_KEY);
		sums_b[c] = CHUNK_SUM(y, CHECKSUM_KEY);
	}
	return count;
}

static size_t compare_chunks(const void *a, const void *b, size_t n, uint32_t item, uint64_t *changed, uint64_t *sums_a,
			     uint64_t *sums_b)
{
#define COMPARE_CHUNKS(item) compare_chunks_as(a, b, n, changed, sums_a, sums_b, item)
	return BY_ITEM(item, COMPARE_CHUNKS);
}

static size_t list_changes(const uint64_t *changed, size_t n, uint32_t *at)
{
	size_t count = 0;

	for (size_t j = LIST_FIRST(changed, DELTA_WORDS(n), at, &count); j < DELTA_WORDS(n); j++)
		for (uint64_t m = changed[j]; m; m &= m - 1)
			at[count++] = (uint32_t)(64 * j) + (uint32_t)__builtin_ctzll(m);
	return count;
}

/*
 * Compute the class of each value. sums: receives the checksum sums of the base's whole chunks, computed while they are
 * in the cache; NULL: not computed.
 */
ALWAYS uint32_t classes(const struct delta_kind *q, const void *base, size_t n, int scale, uint64_t *const *plane,
			uint64_t *sums, uint32_t item)
{
	uint32_t top = 0;
	size_t i = CLASSES_FIRST(q, base, n, scale, plane, &top, item, sums), whole = n * item / DELTA_CHUNK;

	if (sums)
		for (size_t c = i * item / DELTA_CHUNK; c < whole; c++)
			sums[c] = CHUNK_SUM((const uint8_t *)base + DELTA_CHUNK * c, CHECKSUM_KEY);
	for (; i < n; i += 64) {
		uint64_t word[DELTA_PLANES] = {0};
		size_t m = n - i < 64 ? n - i : 64;

		for (size_t k = 0; k < m; k++) {
			uint32_t r = delta_class(delta_exponent(q, delta_load(base, i + k, item)), scale);

			for (int p = 0; p < DELTA_PLANES; p++)
				word[p] |= (uint64_t)(r >> p & 1) << k;
			top = r > top ? r : top;
		}
		for (int p = 0; p < DELTA_PLANES; p++)
			plane[p][i / 64] = word[p];
	}
	return top;
}

/*
 * Compute b->member, the mask of the values in a class, and b->before, their number before each word. Class 8 is the
 * only class with bit 3 set.
 */
static void members(const struct delta_buffers *b, size_t n, uint32_t class_)
{
	const uint64_t x0 = class_ & 1 ? 0 : ~0ull, x1 = class_ & 2 ? 0 : ~0ull, x2 = class_ & 4 ? 0 : ~0ull;
	const uint64_t x3 = class_ & 8 ? 0 : ~0ull, *p0 = b->plane[0], *p1 = b->plane[1], *p2 = b->plane[2],
		       *p3 = b->plane[3];
	uint64_t *restrict member = b->member;
	uint32_t *restrict before = b->before, count = 0;
	size_t words = DELTA_WORDS(n), first = MEMBERS_FIRST(b, words - (n % 64 != 0), class_, &count), j;

	for (j = first; j < words; j++)
		member[j] = (p0[j] ^ x0) & (p1[j] ^ x1) & (p2[j] ^ x2) & (p3[j] ^ x3);
	if (n % 64)
		member[words - 1] &= (1ull << n % 64) - 1;
	for (j = first; j < words; j++) {
		before[j] = count;
		count += (uint32_t)__builtin_popcountll(member[j]);
	}
	for (j = 0; j < DELTA_SLACK; j++)
		before[words + j] = j ? INT32_MAX : count;
}

#include "delta_decode.h"
#include "delta_encode.h"

#define DELTA_LOOPS                                                                                                    \
	.chunk_sums = chunk_sums, .change_sums = change_sums, .put_changes = put_changes, .differences = differences,  \
	.compare_chunks = compare_chunks, .delta_decode = delta_decode, .delta_patches = delta_patches,                \
	.delta_encode = delta_encode, .delta_encode_patches = delta_encode_patches, .list_changes = list_changes
