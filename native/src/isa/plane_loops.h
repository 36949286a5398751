/*
 * plane_loops.h - loops without intrinsics over planes, compiled once per instruction set.
 *
 * Included by scalar.c, avx2.c, avx512.c and neon.c, whose compiler flags enable the vectorizer's instructions. Loads
 * and stores allow unaligned addresses, because tensors and frames may lie at any address.
 *
 * One file: the loops that split values into planes stand beside those that merge them.
 */
#include "kernels.h"

static void split_bytes1(const void *src, size_t n, const uint16_t *offset, uint8_t *const *plane)
{
	(void)offset;
	memcpy(plane[0], src, n);
}

static void merge_bytes1(const uint8_t *const *plane, size_t n, const uint16_t *offset, void *dst, int nontemporal)
{
	(void)offset, (void)nontemporal;
	memcpy(dst, plane[0], n);
}

static void copy(uint8_t *dst, const uint8_t *src, size_t n)
{
	memcpy(dst, src, n);
}

#ifndef STREAM
#define STREAM copy
#endif

/*
 * Defaults for instruction sets without vectorized parts. An instruction set may define *_FIRST, which processes the
 * first values of a loop and returns their number, and a function that computes the checksum's sum of one chunk of 1
 * KiB.
 */
#ifndef SPLIT2_FIRST
#define SPLIT2_FIRST(src, n, offset, plane) 0
#define MERGE2_FIRST(plane, n, offset, dst, nontemporal) ((void)(nontemporal), 0)
#define SPLIT4_FIRST(src, n, offset, plane) 0
#define MERGE4_FIRST(plane, n, offset, dst, nontemporal) ((void)(nontemporal), 0)
#endif

static inline void split2(const void *src, size_t n, const uint16_t *offset, uint8_t *const *plane)
{
	uint8_t *restrict p0 = plane[0], *restrict p1 = plane[1];

	for (size_t i = SPLIT2_FIRST(src, n, offset, plane); i < n; i++) {
		uint16_t x = native16(src, i), y = offset ? bits_turn(x, offset[i], FORM_SHIFT) : x;

		p0[i] = (uint8_t)(y >> 8);
		p1[i] = (uint8_t)y;
	}
}

static inline void merge2(const uint8_t *const *plane, size_t n, const uint16_t *offset, void *dst, int nontemporal)
{
	const uint8_t *p0 = plane[0], *p1 = plane[1];
	char *restrict d = dst;

	for (size_t i = MERGE2_FIRST(plane, n, offset, dst, nontemporal); i < n; i++) {
		uint16_t y = (uint16_t)(p0[i] << 8 | p1[i]), x = offset ? bits_unturn(y, offset[i], FORM_SHIFT) : y;

		memcpy(d + 2 * i, &x, 2);
	}
}

static inline void split4(const void *src, size_t n, const uint16_t *offset, uint8_t *const *plane)
{
	uint8_t *restrict p0 = plane[0], *restrict p1 = plane[1], *restrict p2 = plane[2], *restrict p3 = plane[3];
	size_t done = SPLIT4_FIRST(src, n, offset, plane);

	for (size_t i = done; i < n; i++) {
		uint16_t high = (uint16_t)(native32(src, i) >> 16),
			 y = offset ? bits_turn(high, offset[i], FORM_SHIFT) : high;

		p0[i] = (uint8_t)(y >> 8);
		p1[i] = (uint8_t)y;
	}
	for (size_t i = done; i < n; i++) { /* separate: with more pointers, it is not vectorized */
		uint32_t x = native32(src, i);

		p2[i] = (uint8_t)(x >> 8);
		p3[i] = (uint8_t)x;
	}
}

static inline void merge4(const uint8_t *const *plane, size_t n, const uint16_t *offset, void *dst, int nontemporal)
{
	const uint8_t *p0 = plane[0], *p1 = plane[1], *p2 = plane[2], *p3 = plane[3];
	char *restrict d = dst;

	for (size_t i = MERGE4_FIRST(plane, n, offset, dst, nontemporal); i < n; i++) {
		uint16_t y = (uint16_t)(p0[i] << 8 | p1[i]), high = offset ? bits_unturn(y, offset[i], FORM_SHIFT) : y;
		uint32_t x = (uint32_t)high << 16 | (uint32_t)p2[i] << 8 | p3[i];

		memcpy(d + 4 * i, &x, 4);
	}
}

/*
 * Number of 8-byte values per tile. A tile's 4-byte halves, in the first-level cache, are processed by the loops for
 * 4-byte values.
 */
#define SPLIT8_TILE 256

static inline void split8(const void *src, size_t n, const uint16_t *offset, uint8_t *const *plane)
{
	for (size_t from = 0, m; from < n; from += m) {
		uint32_t high[SPLIT8_TILE], low[SPLIT8_TILE];
		uint8_t *at[8];

		m = n - from < SPLIT8_TILE ? n - from : SPLIT8_TILE;
		for (size_t i = 0; i < m; i++) {
			uint64_t x = native64(src, from + i);

			high[i] = (uint32_t)(x >> 32);
			low[i] = (uint32_t)x;
		}
		for (int p = 0; p < 8; p++)
			at[p] = plane[p] + from;
		split4(high, m, NULL, at);
		split4(low, m, NULL, at + 4);
		for (size_t i = 0; offset && i < m; i++) {
			uint16_t y = bits_turn((uint16_t)(at[0][i] << 8 | at[1][i]), offset[from + i], FORM_SHIFT64);

			at[0][i] = (uint8_t)(y >> 8);
			at[1][i] = (uint8_t)y;
		}
	}
}

static inline void merge8(const uint8_t *const *plane, size_t n, const uint16_t *offset, void *dst, int nontemporal)
{
	for (size_t from = 0, m; from < n; from += m) {
		uint8_t first[SPLIT8_TILE], second[SPLIT8_TILE];
		uint32_t high[SPLIT8_TILE], low[SPLIT8_TILE];
		const uint8_t *at[8];
		uint64_t x[SPLIT8_TILE];

		m = n - from < SPLIT8_TILE ? n - from : SPLIT8_TILE;
		for (int p = 0; p < 8; p++)
			at[p] = plane[p] + from;
		for (size_t i = 0; offset && i < m; i++) {
			uint16_t y = (uint16_t)(at[0][i] << 8 | at[1][i]);

			y = bits_unturn(y, offset[from + i], FORM_SHIFT64);
			first[i] = (uint8_t)(y >> 8);
			second[i] = (uint8_t)y;
		}
		at[0] = offset ? first : at[0];
		at[1] = offset ? second : at[1];
		merge4(at, m, NULL, high, 0);
		merge4(at + 4, m, NULL, low, 0);
		for (size_t i = 0; i < m; i++)
			x[i] = (uint64_t)high[i] << 32 | low[i];
		(nontemporal ? STREAM : copy)((uint8_t *)dst + 8 * from, (const uint8_t *)x, 8 * m);
	}
}

#define PLANES(form, width, with)                                                                                      \
	static void split_##form(const void *src, size_t n, const uint16_t *offset, uint8_t *const *plane)             \
	{                                                                                                              \
		(void)offset;                                                                                          \
		split##width(src, n, with, plane);                                                                     \
	}                                                                                                              \
	static void merge_##form(const uint8_t *const *plane, size_t n, const uint16_t *offset, void *dst,             \
				 int nontemporal)                                                                      \
	{                                                                                                              \
		(void)offset;                                                                                          \
		merge##width(plane, n, with, dst, nontemporal);                                                        \
	}
PLANES(bytes2, 2, NULL)
PLANES(float2, 2, offset)
PLANES(bytes4, 4, NULL)
PLANES(float4, 4, offset)
PLANES(bytes8, 8, NULL)
PLANES(float8, 8, offset)
#undef PLANES

/*
 * Lower the patterns of n bytes of float8. offset: multiples of 256, so that bytes can be subtracted as bits_lower
 * subtracts words.
 */
static inline void split1(const uint8_t *restrict x, size_t n, const uint16_t *restrict offset, uint8_t zero,
			  uint8_t *restrict y)
{
	for (size_t i = 0; i < n; i++) {
		uint8_t p = x[i] & 127, d = (uint8_t)(p - zero - (offset[i] >> 8)), moves = (uint8_t)-(p >= zero);
		uint8_t u = (uint8_t)((d & 127) + (zero & (uint8_t)((d >> 7) - 1)));

		y[i] = x[i] ^ ((p ^ u) & moves);
	}
}

static inline void merge1(const uint8_t *restrict y, size_t n, const uint16_t *restrict offset, uint8_t zero,
			  uint8_t *restrict x)
{
	for (size_t i = 0; i < n; i++) {
		uint8_t u = y[i] & 127, s = (uint8_t)(u + (offset[i] >> 8)), moves = (uint8_t)-(u >= zero);
		uint8_t p = (uint8_t)((s & 127) + (zero & (uint8_t)-(s >> 7)));

		x[i] = y[i] ^ ((u ^ p) & moves);
	}
}

#define PLANES8(form, zero)                                                                                            \
	static void split_##form(const void *src, size_t n, const uint16_t *offset, uint8_t *const *plane)             \
	{                                                                                                              \
		split1(src, n, offset, zero, plane[0]);                                                                \
	}                                                                                                              \
	static void merge_##form(const uint8_t *const *plane, size_t n, const uint16_t *offset, void *dst,             \
				 int nontemporal)                                                                      \
	{                                                                                                              \
		(void)nontemporal;                                                                                     \
		merge1(plane[0], n, offset, zero, dst);                                                                \
	}
PLANES8(e4m3, 8)
PLANES8(e5m2, 4)
#undef PLANES8

static void patterns_float1(const void *src, size_t n, uint16_t *restrict p)
{
	const uint8_t *x = src;

	for (size_t i = 0; i < n; i++)
		p[i] = (uint16_t)((x[i] & 127) << 8);
}

static void patterns_float2(const void *src, size_t n, uint16_t *restrict p)
{
	for (size_t i = 0; i < n; i++)
		p[i] = native16(src, i) & 0x7fff;
}

static void patterns_float4(const void *src, size_t n, uint16_t *restrict p)
{
	for (size_t i = 0; i < n; i++)
		p[i] = (uint16_t)(native32(src, i) >> 16 & 0x7fff);
}

static void patterns_float8(const void *src, size_t n, uint16_t *restrict p)
{
	for (size_t i = 0; i < n; i++)
		p[i] = (uint16_t)(native64(src, i) >> 48 & 0x7fff);
}

static void lower(const uint16_t *p, const uint16_t *offset, uint16_t zero, size_t n, uint16_t *u)
{
	for (size_t i = 0; i < n; i++)
		u[i] = bits_lower(p[i], offset[i], zero);
}

static void offsets(const int8_t *cols, int start, int grain, uint16_t zero, size_t n, uint16_t *restrict offset)
{
	int16_t s = (int16_t)start, g = (int16_t)grain, circle = (int16_t)WIRE_CIRCLE(zero);

	for (size_t i = 0; i < n; i++) {
		int16_t t = (int16_t)(s + (int16_t)(g * cols[i]));

		offset[i] = (uint16_t)(t + (t < 0 ? circle : 0));
	}
}

static void sum(const uint16_t *p, size_t n, uint16_t zero, uint32_t *total, uint32_t *count)
{
	uint32_t t = 0, c = 0;

	for (size_t i = 0; i < n; i++) {
		uint32_t some = p[i] >= zero;

		t += p[i] & (0 - some);
		c += some;
	}
	*total = t;
	*count = c;
}

static void columns(const uint16_t *p, int row, uint16_t zero, size_t n, struct columns *sums)
{
	int32_t *restrict total = sums->total, *restrict count = sums->count;

	for (size_t i = 0; i < n; i++) {
		int32_t some = -(p[i] >= zero);

		total[i] += (p[i] - row) & some;
		count[i] -= some;
	}
}

static const uint32_t CHECKSUM_KEY[WIRE_CHUNK_WORDS + 1] = {CHECKSUM_KEYS}; /* extra key: read, not used */

#ifndef CHUNK_SUM
static inline uint64_t CHUNK_SUM(const uint8_t *src, const uint32_t *key)
{
	uint64_t sum = 0;

	for (size_t i = 0; i < WIRE_CHUNK_WORDS; i++)
		sum += (uint64_t)load32(src + 4 * i) * key[i];
	return sum;
}
#endif

static uint64_t digest(const uint8_t *src, size_t nbytes, uint32_t seed)
{
	uint64_t total = 0;
	size_t nchunks = nbytes / (4 * WIRE_CHUNK_WORDS), rest = nbytes % (4 * WIRE_CHUNK_WORDS);

	for (size_t c = 0; c < nchunks; c++, src += 4 * WIRE_CHUNK_WORDS)
		total += checksum_of_chunk(CHUNK_SUM(src, CHECKSUM_KEY), seed, c);
	if (rest) {
		uint64_t sum = 0;
		size_t i = 0;

		for (; i < rest / 4; i++)
			sum += (uint64_t)load32(src + 4 * i) * CHECKSUM_KEY[i];
		if (rest % 4) {
			uint8_t last[4] = {0};

			memcpy(last, src + 4 * i, rest % 4);
			sum += (uint64_t)load32(last) * CHECKSUM_KEY[i];
		}
		total += checksum_of_chunk(sum, seed, nchunks);
	}
	return total;
}

static void halve(const uint8_t *p, size_t n, uint8_t *restrict symbol, uint8_t *restrict high)
{
	size_t half = (n + 1) / 2;

	for (size_t i = 0; i < n; i++)
		symbol[i] = p[i] & 15;
	for (size_t i = 0; i < n - half; i++)
		high[i] = (uint8_t)(p[i] >> 4 | (p[half + i] & 0xf0));
	if (n % 2)
		high[half - 1] = p[half - 1] >> 4;
}

static void unhalve(uint8_t *restrict symbol, const uint8_t *restrict high, size_t n)
{
	size_t half = (n + 1) / 2;

	for (size_t i = 0; i < half; i++)
		symbol[i] = (uint8_t)(symbol[i] | high[i] << 4);
	for (size_t i = half; i < n; i++)
		symbol[i] = (uint8_t)(symbol[i] | (high[i - half] & 0xf0));
}

static void take_bits(const uint8_t *p, size_t n, int raw, uint8_t *restrict symbol, uint8_t *restrict bits)
{
	if (raw == 1) /* a constant `raw` in each loop lets the compiler vectorize it well */
		for (size_t i = 0; i < n; i++)
			symbol[i] = bits_symbol(p[i], 1), bits[i] = bits_raw(p[i], 1);
	else
		for (size_t i = 0; i < n; i++)
			symbol[i] = bits_symbol(p[i], 2), bits[i] = bits_raw(p[i], 2);
}

static void join_bits(uint8_t *restrict symbol, const uint8_t *restrict bits, int raw, size_t n)
{
	if (raw == 1)
		for (size_t i = 0; i < n; i++)
			symbol[i] = bits_with_raw(symbol[i], bits[i], 1);
	else
		for (size_t i = 0; i < n; i++)
			symbol[i] = bits_with_raw(symbol[i], bits[i], 2);
}

#ifndef COUNT_LEAST
#define COUNT_LEAST(e, least, n, m) 0
#endif

static size_t count(const uint8_t *e, uint8_t least, size_t n)
{
	size_t total = 0;

	for (size_t i = COUNT_LEAST(e, least, n, &total); i < n;
	     i += 128) { /* counts of 128 values do not overflow a byte */
		size_t end = i + 128 < n ? i + 128 : n;
		uint8_t some = 0;

		for (size_t k = i; k < end; k++)
			some = (uint8_t)(some + (e[k] >= least));
		total += some;
	}
	return total;
}

static uint8_t under_zeros(const uint8_t *e, const uint8_t *p, size_t n)
{
	uint8_t bits = 0;

	for (size_t i = 0; i < n; i++)
		bits |= (uint8_t)(p[i] & (uint8_t)-(e[i] == 0));
	return bits;
}

#ifndef PRUNE
#define PRUNE(e, least, p, n, dst, m) 0
#define UNPRUNE(e, least, p, n, dst, m) 0
#endif

static size_t prune(const uint8_t *e, uint8_t least, const uint8_t *p, size_t n, uint8_t *dst)
{
	size_t m = 0;

	for (size_t i = PRUNE(e, least, p, n, dst, &m); i < n; i++) {
		dst[m] = p[i];
		m += e[i] >= least;
	}
	return m;
}

static size_t unprune(const uint8_t *e, uint8_t least, const uint8_t *p, size_t n, uint8_t *restrict dst)
{
	size_t m = 0;

	for (size_t i = UNPRUNE(e, least, p, n, dst, &m); i < n; i++) {
		uint8_t keep = e[i] >= least;

		dst[i] = keep ? p[m] : 0;
		m += keep;
	}
	return m;
}

static size_t rows(const uint8_t *p, size_t n, uint8_t *bitmap)
{
	size_t kept = 0;

	memset(bitmap, 0, (n + 8 * WIRE_ROW - 1) / (8 * WIRE_ROW));
	for (size_t r = 0; r * WIRE_ROW < n; r++) {
		size_t m = n - r * WIRE_ROW < WIRE_ROW ? n - r * WIRE_ROW : WIRE_ROW;
		uint8_t any = 0;

		for (size_t i = 0; i < m; i++)
			any |= p[r * WIRE_ROW + i];
		if (any) {
			bitmap[r / 8] |= (uint8_t)(1 << r % 8);
			kept += m;
		}
	}
	return kept;
}

#define KERNEL_LOOPS                                                                                                   \
	.split = {split_bytes1, split_bytes2, split_bytes4, split_bytes8, split_float2,                                \
		  split_float4, split_float8, split_e4m3,   split_e5m2},                                               \
	.merge = {merge_bytes1, merge_bytes2, merge_bytes4, merge_bytes8, merge_float2,                                \
		  merge_float4, merge_float8, merge_e4m3,   merge_e5m2},                                               \
	.patterns = {[FORM_FLOAT2] = patterns_float2,                                                                  \
		     patterns_float4,                                                                                  \
		     patterns_float8,                                                                                  \
		     patterns_float1,                                                                                  \
		     patterns_float1},                                                                                 \
	.stream = STREAM, .sum = sum, .columns = columns, .lower = lower, .offsets = offsets, .halve = halve,          \
	.unhalve = unhalve, .take_bits = take_bits, .join_bits = join_bits, .digest = digest, .count = count,          \
	.under_zeros = under_zeros, .prune = prune, .unprune = unprune, .rows = rows
