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

static void merge_bytes1(const uint8_t *const *plane, size_t n, void *dst)
{
	memcpy(dst, plane[0], n);
}

#define SPLIT2(name, turn)                                                                                             \
	static void name(const void *src, size_t n, uint8_t *const *plane)                                             \
	{                                                                                                              \
		uint8_t *restrict p0 = plane[0], *restrict p1 = plane[1];                                              \
                                                                                                                       \
		for (size_t i = 0; i < n; i++) {                                                                       \
			uint16_t y = turn(native16(src, i));                                                           \
                                                                                                                       \
			p0[i] = (uint8_t)(y >> 8);                                                                     \
			p1[i] = (uint8_t)y;                                                                            \
		}                                                                                                      \
	}
#define MERGE2(name, unturn)                                                                                           \
	static void name(const uint8_t *const *plane, size_t n, void *dst)                                             \
	{                                                                                                              \
		const uint8_t *p0 = plane[0], *p1 = plane[1];                                                          \
		char *restrict d = dst;                                                                                \
                                                                                                                       \
		for (size_t i = 0; i < n; i++) {                                                                       \
			uint16_t x = unturn((uint16_t)(p0[i] << 8 | p1[i]));                                           \
                                                                                                                       \
			memcpy(d + 2 * i, &x, 2);                                                                      \
		}                                                                                                      \
	}
#define SPLIT4(name, turn)                                                                                             \
	static void name(const void *src, size_t n, uint8_t *const *plane)                                             \
	{                                                                                                              \
		uint8_t *restrict p0 = plane[0], *restrict p1 = plane[1];                                              \
		uint8_t *restrict p2 = plane[2], *restrict p3 = plane[3];                                              \
                                                                                                                       \
		for (size_t i = 0; i < n; i++) {                                                                       \
			uint32_t y = turn(native32(src, i));                                                           \
                                                                                                                       \
			p0[i] = (uint8_t)(y >> 24);                                                                    \
			p1[i] = (uint8_t)(y >> 16);                                                                    \
			p2[i] = (uint8_t)(y >> 8);                                                                     \
			p3[i] = (uint8_t)y;                                                                            \
		}                                                                                                      \
	}
#define MERGE4(name, unturn)                                                                                           \
	static void name(const uint8_t *const *plane, size_t n, void *dst)                                             \
	{                                                                                                              \
		const uint8_t *p0 = plane[0], *p1 = plane[1], *p2 = plane[2], *p3 = plane[3];                          \
		char *restrict d = dst;                                                                                \
                                                                                                                       \
		for (size_t i = 0; i < n; i++) {                                                                       \
			uint32_t x = unturn((uint32_t)p0[i] << 24 | (uint32_t)p1[i] << 16 | (uint32_t)p2[i] << 8 |     \
					    p3[i]);                                                                    \
                                                                                                                       \
			memcpy(d + 4 * i, &x, 4);                                                                      \
		}                                                                                                      \
	}
#define SAME(x) (x)
SPLIT2(split_bytes2, SAME)
MERGE2(merge_bytes2, SAME)
SPLIT2(split_float2, bits_turn16)
MERGE2(merge_float2, bits_unturn16)
SPLIT4(split_bytes4, SAME)
MERGE4(merge_bytes4, SAME)
#ifndef HAVE_FLOAT4
SPLIT4(split_float4, bits_turn32)
MERGE4(merge_float4, bits_unturn32)
#endif
#undef SAME
#undef SPLIT2
#undef MERGE2
#undef SPLIT4
#undef MERGE4

static void split_bytes8(const void *src, size_t n, uint8_t *const *plane)
{
	for (int p = 0; p < 8; p++) {
		uint8_t *restrict out = plane[p];

		for (size_t i = 0; i < n; i++)
			out[i] = (uint8_t)(native64(src, i) >> (56 - 8 * p));
	}
}

static void merge_bytes8(const uint8_t *const *plane, size_t n, void *dst)
{
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
static void merge_float8(const uint8_t *const *plane, size_t n, void *dst)
{
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

static void columns(const uint8_t *e, uint8_t offset, size_t n, int16_t *restrict total, int16_t *restrict count)
{
	for (size_t i = 0; i < n; i++) {
		total[i] = (int16_t)(total[i] + (e[i] ? e[i] - offset : 0));
		count[i] = (int16_t)(count[i] + (e[i] != 0));
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

static void offsets(const uint8_t *cols, uint8_t row, size_t n, uint8_t *restrict offset)
{
	for (size_t i = 0; i < n; i++)
		offset[i] = (uint8_t)(cols[i] + row);
}

static const uint32_t SEAL_KEY[WIRE_CHUNK_WORDS] = {SEAL_KEYS};

static uint64_t digest(const uint8_t *src, size_t nbytes, uint32_t seed)
{
	uint64_t total = 0;
	size_t nchunks = nbytes / (4 * WIRE_CHUNK_WORDS), rest = nbytes % (4 * WIRE_CHUNK_WORDS);

	for (size_t c = 0; c < nchunks; c++, src += 4 * WIRE_CHUNK_WORDS) {
		uint64_t sum = 0;

		for (size_t i = 0; i < WIRE_CHUNK_WORDS; i++)
			sum += (uint64_t)load32(src + 4 * i) * SEAL_KEY[i];
		total += seal_chunk(sum, seed, c);
	}
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

static size_t zeros(const uint8_t *e, const uint8_t *const *plane, int nplanes, size_t n, uint8_t *rest)
{
	size_t count = 0;
	uint8_t bits = 0;

	for (size_t i = 0; i < n; i++)
		count += e[i] == 0;
	if (count)
		for (int p = 1; p < nplanes; p++)
			for (size_t i = 0; i < n; i++)
				bits |= e[i] == 0 ? plane[p][i] : 0;
	*rest = bits;
	return count;
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

#define KERNEL_LOOPS                                                                                                   \
	.split = {split_bytes1, split_bytes2, split_bytes4, split_bytes8, split_float2, split_float4, split_float8},   \
	.merge = {merge_bytes1, merge_bytes2, merge_bytes4, merge_bytes8, merge_float2, merge_float4, merge_float8},   \
	.top = {top_bytes1, top_bytes2, top_bytes4, top_bytes8, top_float2, top_float4, NULL},                         \
	.top_float8 = top_float8, .sum = sum, .columns = columns, .symbols = symbols, .unsymbols = unsymbols, .offsets = offsets, .digest = digest, .zeros = zeros,              \
	.prune = prune, .unprune = unprune, .rows = rows
