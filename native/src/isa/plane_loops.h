/* plane_loops.h - the loops that need no intrinsics, compiled once for each instruction set.
 *
 * Included by scalar.c, avx2.c, avx512.c, whose compiler flags say what the vectorizer may use. Memory is read with
 * memcpy-like loads, so tensors and frames may lie at any address.
 */
#include "kernels.h"

static inline uint16_t native16(const void *p, size_t i)
{
	uint16_t x;

	memcpy(&x, (const char *)p + 2 * i, 2);
	return x;
}

static inline uint32_t native32(const void *p, size_t i)
{
	uint32_t x;

	memcpy(&x, (const char *)p + 4 * i, 4);
	return x;
}

static inline uint64_t native64(const void *p, size_t i)
{
	uint64_t x;

	memcpy(&x, (const char *)p + 8 * i, 8);
	return x;
}

static void split_bytes1(const void *src, size_t n, const uint16_t *offset, uint8_t *const *plane)
{
	(void)offset;
	memcpy(plane[0], src, n);
}

static void merge_bytes1(const uint8_t *const *plane, size_t n, const uint16_t *offset, void *dst, int past)
{
	(void)offset, (void)past;
	memcpy(dst, plane[0], n);
}

/* An instruction set may do the first values of a plane loop, or a whole chunk of the checksum, in its own way. */
#ifndef SPLIT2_FIRST
#define SPLIT2_FIRST(src, n, offset, plane) 0
#define MERGE2_FIRST(plane, n, offset, dst, past) ((void)(past), 0)
#define SPLIT4_FIRST(src, n, offset, plane) 0
#define MERGE4_FIRST(plane, n, offset, dst, past) ((void)(past), 0)
#endif

#define FLOAT_ZERO 128 /* of FLOAT2 and FLOAT4 */

/* The two top bytes of a float, turned and lowered, and back. */
static inline uint16_t turn(uint16_t x, uint16_t offset)
{
	uint16_t u = bits_lower(x & 0x7fff, offset, FLOAT_ZERO);

	return (uint16_t)(u << 1 & 0xff00) | (x >> 8 & 0x80) | (u & 0x7f);
}

static inline uint16_t unturn(uint16_t y, uint16_t offset)
{
	uint16_t u = (uint16_t)((y >> 1 & 0x7f80) | (y & 0x7f));

	return (uint16_t)((y & 0x80) << 8) | bits_raise(u, offset, FLOAT_ZERO);
}

static inline void split2(const void *src, size_t n, const uint16_t *offset, uint8_t *const *plane)
{
	uint8_t *restrict p0 = plane[0], *restrict p1 = plane[1];

	for (size_t i = SPLIT2_FIRST(src, n, offset, plane); i < n; i++) {
		uint16_t x = native16(src, i), y = offset ? turn(x, offset[i]) : x;

		p0[i] = (uint8_t)(y >> 8);
		p1[i] = (uint8_t)y;
	}
}

static inline void merge2(const uint8_t *const *plane, size_t n, const uint16_t *offset, void *dst, int past)
{
	const uint8_t *p0 = plane[0], *p1 = plane[1];
	char *restrict d = dst;

	for (size_t i = MERGE2_FIRST(plane, n, offset, dst, past); i < n; i++) {
		uint16_t y = (uint16_t)(p0[i] << 8 | p1[i]), x = offset ? unturn(y, offset[i]) : y;

		memcpy(d + 2 * i, &x, 2);
	}
}

static inline void split4(const void *src, size_t n, const uint16_t *offset, uint8_t *const *plane)
{
	uint8_t *restrict p0 = plane[0], *restrict p1 = plane[1], *restrict p2 = plane[2], *restrict p3 = plane[3];
	size_t done = SPLIT4_FIRST(src, n, offset, plane);

	for (size_t i = done; i < n; i++) {
		uint16_t high = (uint16_t)(native32(src, i) >> 16), y = offset ? turn(high, offset[i]) : high;

		p0[i] = (uint8_t)(y >> 8);
		p1[i] = (uint8_t)y;
	}
	for (size_t i = done; i < n; i++) { /* apart: a loop with so many pointers stays scalar */
		uint32_t x = native32(src, i);

		p2[i] = (uint8_t)(x >> 8);
		p3[i] = (uint8_t)x;
	}
}

static inline void merge4(const uint8_t *const *plane, size_t n, const uint16_t *offset, void *dst, int past)
{
	const uint8_t *p0 = plane[0], *p1 = plane[1], *p2 = plane[2], *p3 = plane[3];
	char *restrict d = dst;

	for (size_t i = MERGE4_FIRST(plane, n, offset, dst, past); i < n; i++) {
		uint16_t y = (uint16_t)(p0[i] << 8 | p1[i]), high = offset ? unturn(y, offset[i]) : y;
		uint32_t x = (uint32_t)high << 16 | (uint32_t)p2[i] << 8 | p3[i];

		memcpy(d + 4 * i, &x, 4);
	}
}

#define PLANES(form, width, with)                                                                                      \
	static void split_##form(const void *src, size_t n, const uint16_t *offset, uint8_t *const *plane)             \
	{                                                                                                              \
		(void)offset;                                                                                          \
		split##width(src, n, with, plane);                                                                     \
	}                                                                                                              \
	static void merge_##form(const uint8_t *const *plane, size_t n, const uint16_t *offset, void *dst, int past)   \
	{                                                                                                              \
		(void)offset;                                                                                          \
		merge##width(plane, n, with, dst, past);                                                               \
	}
PLANES(bytes2, 2, NULL)
PLANES(float2, 2, offset)
PLANES(bytes4, 4, NULL)
PLANES(float4, 4, offset)
#undef PLANES

static void split_bytes8(const void *src, size_t n, const uint16_t *offset, uint8_t *const *plane)
{
	(void)offset;
	for (int p = 0; p < 8; p++) {
		uint8_t *restrict out = plane[p];

		for (size_t i = 0; i < n; i++)
			out[i] = (uint8_t)(native64(src, i) >> (56 - 8 * p));
	}
}

static void merge_bytes8(const uint8_t *const *plane, size_t n, const uint16_t *offset, void *dst, int past)
{
	char *restrict d = dst;

	(void)offset, (void)past;
	for (size_t i = 0; i < n; i++) {
		uint64_t x = 0;

		for (int p = 0; p < 8; p++)
			x |= (uint64_t)plane[p][i] << (56 - 8 * p);
		memcpy(d + 8 * i, &x, 8);
	}
}

static void split_float8(const void *src, size_t n, const uint16_t *offset, uint8_t *const *plane)
{
	(void)offset;
	for (int p = 2; p < 8; p++) {
		uint8_t *restrict out = plane[p];

		for (size_t i = 0; i < n; i++)
			out[i] = (uint8_t)(native64(src, i) >> (56 - 8 * p));
	}
	for (size_t i = 0; i < n; i++)
		plane[1][i] = (uint8_t)(native64(src, i) >> 59 & 0x10);
}

static void merge_float8(const uint8_t *const *plane, size_t n, const uint16_t *offset, void *dst, int past)
{
	char *restrict d = dst;

	(void)offset, (void)past;
	for (size_t i = 0; i < n; i++) {
		uint64_t x = (uint64_t)(plane[1][i] & 0x10) << 59;

		for (int p = 2; p < 8; p++)
			x |= (uint64_t)plane[p][i] << (56 - 8 * p);
		memcpy(d + 8 * i, &x, 8);
	}
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

static void raise(const uint16_t *u, const uint16_t *offset, uint16_t zero, size_t n, uint16_t *p)
{
	for (size_t i = 0; i < n; i++)
		p[i] = bits_raise(u[i], offset[i], zero);
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

static const uint32_t SEAL_KEY[WIRE_CHUNK_WORDS + 1] = {SEAL_KEYS}; /* one more: vectors read ahead */

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
		total += seal_chunk(CHUNK_SUM(src, SEAL_KEY), seed, c);
	if (rest) {
		uint64_t sum = 0;
		size_t i = 0;

		for (; i < rest / 4; i++)
			sum += (uint64_t)load32(src + 4 * i) * SEAL_KEY[i];
		if (rest % 4) {
			uint8_t last[4] = {0};

			memcpy(last, src + 4 * i, rest % 4);
			sum += (uint64_t)load32(last) * SEAL_KEY[i];
		}
		total += seal_chunk(sum, seed, nchunks);
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

static size_t count(const uint8_t *e, uint8_t least, size_t n)
{
	size_t total = 0;

	for (size_t i = 0; i < n; i += 128) { /* byte counters that cannot overflow */
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

#ifndef STREAM
#define STREAM stream
static void stream(uint8_t *dst, const uint8_t *src, size_t n)
{
	memcpy(dst, src, n);
}
#endif

#define KERNEL_LOOPS                                                                                                   \
	.split = {split_bytes1, split_bytes2, split_bytes4, split_bytes8, split_float2, split_float4, split_float8},   \
	.merge = {merge_bytes1, merge_bytes2, merge_bytes4, merge_bytes8, merge_float2, merge_float4, merge_float8},   \
	.patterns = {[FORM_FLOAT2] = patterns_float2, patterns_float4, patterns_float8}, .stream = STREAM, .sum = sum, \
	.columns = columns, .lower = lower, .raise = raise, .offsets = offsets, .halve = halve, .unhalve = unhalve,    \
	.digest = digest, .count = count, .under_zeros = under_zeros, .prune = prune, .unprune = unprune, .rows = rows
