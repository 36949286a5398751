/* loops.h - the loops that need no intrinsics, compiled once for each instruction set.
 *
 * Included by isa_*.c, whose compiler flags say what the vectorizer may use. Memory is read with memcpy-like loads,
 * so tensors and frames may lie at any address.
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

static void split_bytes1(const void *src, size_t n, uint8_t *const *plane)
{
	memcpy(plane[0], src, n);
}

static void merge_bytes1(const uint8_t *const *plane, size_t n, void *dst, int stream)
{
	(void)stream;
	memcpy(dst, plane[0], n);
}

/* An instruction set may do the first values of a plane loop, or a whole chunk of the checksum, in its own way. */
#ifndef SPLIT2_FIRST
#define SPLIT2_FIRST(src, n, plane, turn) 0
#define MERGE2_FIRST(plane, n, dst, turn, stream) ((void)(stream), 0)
#define SPLIT4_FIRST(src, n, plane, turn) 0
#define MERGE4_FIRST(plane, n, dst, turn, stream) ((void)(stream), 0)
#endif

static inline void split2(const void *src, size_t n, uint8_t *const *plane, int turn)
{
	uint8_t *restrict p0 = plane[0], *restrict p1 = plane[1];

	for (size_t i = SPLIT2_FIRST(src, n, plane, turn); i < n; i++) {
		uint16_t x = native16(src, i), y = turn ? bits_turn16(x) : x;

		p0[i] = (uint8_t)(y >> 8);
		p1[i] = (uint8_t)y;
	}
}

static inline void merge2(const uint8_t *const *plane, size_t n, void *dst, int turn, int stream)
{
	const uint8_t *p0 = plane[0], *p1 = plane[1];
	char *restrict d = dst;

	for (size_t i = MERGE2_FIRST(plane, n, dst, turn, stream); i < n; i++) {
		uint16_t y = (uint16_t)(p0[i] << 8 | p1[i]), x = turn ? bits_unturn16(y) : y;

		memcpy(d + 2 * i, &x, 2);
	}
}

static inline void split4(const void *src, size_t n, uint8_t *const *plane, int turn)
{
	uint8_t *restrict p0 = plane[0], *restrict p1 = plane[1], *restrict p2 = plane[2], *restrict p3 = plane[3];

	for (size_t i = SPLIT4_FIRST(src, n, plane, turn); i < n; i++) {
		uint32_t x = native32(src, i), y = turn ? bits_turn32(x) : x;

		p0[i] = (uint8_t)(y >> 24);
		p1[i] = (uint8_t)(y >> 16);
		p2[i] = (uint8_t)(y >> 8);
		p3[i] = (uint8_t)y;
	}
}

static inline void merge4(const uint8_t *const *plane, size_t n, void *dst, int turn, int stream)
{
	const uint8_t *p0 = plane[0], *p1 = plane[1], *p2 = plane[2], *p3 = plane[3];
	char *restrict d = dst;

	for (size_t i = MERGE4_FIRST(plane, n, dst, turn, stream); i < n; i++) {
		uint32_t y = (uint32_t)p0[i] << 24 | (uint32_t)p1[i] << 16 | (uint32_t)p2[i] << 8 | p3[i];
		uint32_t x = turn ? bits_unturn32(y) : y;

		memcpy(d + 4 * i, &x, 4);
	}
}

#define PLANES(form, width, turn)                                                                                      \
	static void split_##form(const void *src, size_t n, uint8_t *const *plane)                                     \
	{                                                                                                              \
		split##width(src, n, plane, turn);                                                                     \
	}                                                                                                              \
	static void merge_##form(const uint8_t *const *plane, size_t n, void *dst, int stream)                         \
	{                                                                                                              \
		merge##width(plane, n, dst, turn, stream);                                                             \
	}
PLANES(bytes2, 2, 0)
PLANES(float2, 2, 1)
PLANES(bytes4, 4, 0)
PLANES(float4, 4, 1)
#undef PLANES

static void split_bytes8(const void *src, size_t n, uint8_t *const *plane)
{
	for (int p = 0; p < 8; p++) {
		uint8_t *restrict out = plane[p];

		for (size_t i = 0; i < n; i++)
			out[i] = (uint8_t)(native64(src, i) >> (56 - 8 * p));
	}
}

static void merge_bytes8(const uint8_t *const *plane, size_t n, void *dst, int stream)
{
	(void)stream;
	char *restrict d = dst;

	for (size_t i = 0; i < n; i++) {
		uint64_t x = 0;

		for (int p = 0; p < 8; p++)
			x |= (uint64_t)plane[p][i] << (56 - 8 * p);
		memcpy(d + 8 * i, &x, 8);
	}
}

static void split_float8(const void *src, size_t n, uint8_t *const *plane)
{
	for (int p = 2; p < 8; p++) {
		uint8_t *restrict out = plane[p];

		for (size_t i = 0; i < n; i++)
			out[i] = (uint8_t)(native64(src, i) >> (56 - 8 * p));
	}
	for (size_t i = 0; i < n; i++) {
		uint64_t x = native64(src, i);

		plane[1][i] = (uint8_t)((x >> 59 & 0x10) | (x >> 48 & 0x0f));
	}
}

/* All but the exponent, which the caller adds: escapes do not fit a byte. */
static void merge_float8(const uint8_t *const *plane, size_t n, void *dst, int stream)
{
	(void)stream;
	char *restrict d = dst;

	for (size_t i = 0; i < n; i++) {
		uint64_t x = (uint64_t)(plane[1][i] & 0x10) << 59 | (uint64_t)(plane[1][i] & 0x0f) << 48;

		for (int p = 2; p < 8; p++)
			x |= (uint64_t)plane[p][i] << (56 - 8 * p);
		memcpy(d + 8 * i, &x, 8);
	}
}

static void top_bytes2(const void *src, size_t n, uint8_t *restrict e)
{
	for (size_t i = 0; i < n; i++)
		e[i] = (uint8_t)(native16(src, i) >> 8);
}

static void top_bytes4(const void *src, size_t n, uint8_t *restrict e)
{
	for (size_t i = 0; i < n; i++)
		e[i] = (uint8_t)(native32(src, i) >> 24);
}

static void top_bytes8(const void *src, size_t n, uint8_t *restrict e)
{
	for (size_t i = 0; i < n; i++)
		e[i] = (uint8_t)(native64(src, i) >> 56);
}

static void top_bytes1(const void *src, size_t n, uint8_t *e)
{
	memcpy(e, src, n);
}

static void top_float2(const void *src, size_t n, uint8_t *restrict e)
{
	for (size_t i = 0; i < n; i++)
		e[i] = (uint8_t)(native16(src, i) >> 7);
}

static void top_float4(const void *src, size_t n, uint8_t *restrict e)
{
	for (size_t i = 0; i < n; i++)
		e[i] = (uint8_t)(native32(src, i) >> 23);
}

static size_t top_float8(const void *src, size_t n, uint32_t window, uint8_t *restrict e)
{
	size_t outside = 0;

	for (size_t i = 0; i < n; i++)
		outside += !bits_window64(native64(src, i) >> 52 & 0x7ff, window, e + i);
	return outside;
}

#ifndef SUM
#define SUM sum
static void sum(const uint8_t *e, size_t n, uint32_t *total, uint32_t *count)
{
	uint32_t t = 0, c = 0;

	for (size_t i = 0; i < n; i++) {
		t += e[i];
		c += e[i] != 0;
	}
	*total = t;
	*count = c;
}
#endif

static void columns(const uint8_t *e, uint8_t whole, uint8_t part, size_t n, struct columns *sums)
{
	int16_t *restrict total = sums->total, *restrict parts = sums->parts, *restrict count = sums->count;

	for (size_t i = 0; i < n; i++) {
		int16_t some = (int16_t)-(e[i] != 0);

		total[i] = (int16_t)(total[i] + ((e[i] - whole) & some));
		parts[i] = (int16_t)(parts[i] + (part & some));
		count[i] = (int16_t)(count[i] - some);
	}
}

static void symbols(const uint8_t *e, const uint8_t *offset, uint8_t escape, size_t n, uint8_t *restrict symbol)
{
	for (size_t i = 0; i < n; i++)
		symbol[i] = bits_symbol(e[i], offset[i], escape);
}

static void unsymbols(const uint8_t *symbol, const uint8_t *offset, size_t n, uint8_t *e)
{
	for (size_t i = 0; i < n; i++)
		e[i] = bits_unsymbol(symbol[i], offset[i]);
}

static void offsets(const int8_t *cols, int quarters, int step, size_t n, uint8_t *restrict offset)
{
	/* in bytes: the quarters of the row that are not whole meet the column's, 128 up so that they are not negative
	 */
	uint8_t part = (uint8_t)((quarters & 3) + 128), whole = (uint8_t)((quarters >> 2) - 32);

	if (step == 1)
		for (size_t i = 0; i < n; i++)
			offset[i] = (uint8_t)(((uint8_t)(cols[i] + part) >> 2) + whole);
	else
		for (size_t i = 0; i < n; i++)
			offset[i] = (uint8_t)(step * (((uint8_t)(cols[i] + part) >> 2) + whole));
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

static size_t zeros(const uint8_t *e, size_t n)
{
	size_t count = 0;

	for (size_t i = 0; i < n; i += 128) { /* byte counters that cannot overflow */
		size_t end = i + 128 < n ? i + 128 : n;
		uint8_t some = 0;

		for (size_t k = i; k < end; k++)
			some = (uint8_t)(some + (e[k] == 0));
		count += some;
	}
	return count;
}

static uint8_t under_zeros(const uint8_t *e, const uint8_t *p, size_t n)
{
	uint8_t bits = 0;

	for (size_t i = 0; i < n; i++)
		bits |= (uint8_t)(p[i] & (uint8_t)-(e[i] == 0));
	return bits;
}

static size_t prune(const uint8_t *e, const uint8_t *p, size_t n, uint8_t *dst)
{
	size_t m = 0;

	for (size_t i = 0; i < n; i++) {
		dst[m] = p[i];
		m += e[i] != 0;
	}
	return m;
}

static void unprune(const uint8_t *e, const uint8_t *p, size_t n, uint8_t *restrict dst)
{
	for (size_t i = 0, m = 0; i < n; i++) {
		uint8_t keep = e[i] != 0;

		dst[i] = keep ? p[m] : 0;
		m += keep;
	}
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
	.top = {top_bytes1, top_bytes2, top_bytes4, top_bytes8, top_float2, top_float4, NULL}, .stream = STREAM,       \
	.top_float8 = top_float8, .sum = SUM, .columns = columns, .symbols = symbols, .unsymbols = unsymbols,          \
	.offsets = offsets, .halve = halve, .unhalve = unhalve, .digest = digest, .zeros = zeros,                      \
	.under_zeros = under_zeros, .prune = prune, .unprune = unprune, .rows = rows
