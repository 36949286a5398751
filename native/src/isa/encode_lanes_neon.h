/*
 * encode_lanes_neon.h - what encode_lanes.h needs, with byte permutations. Included by neon.c. A V is a pair of vectors
 * of four words.
 */
#include "bytes_neon.h"

typedef uint32x4x2_t V;
#define MASK V
#define NV 4
#define LANES 8

static inline V LOAD(const uint32_t *p)
{
	return (V){{vld1q_u32(p), vld1q_u32(p + 4)}};
}

static inline void STORE(uint32_t *p, V v)
{
	vst1q_u32(p, v.val[0]);
	vst1q_u32(p + 4, v.val[1]);
}

static inline V SET1(uint32_t x)
{
	return (V){{vdupq_n_u32(x), vdupq_n_u32(x)}};
}

#define PAIRWISE(name, function)                                                                                       \
	static inline V name(V a, V b)                                                                                 \
	{                                                                                                              \
		return (V){{function(a.val[0], b.val[0]), function(a.val[1], b.val[1])}};                              \
	}
PAIRWISE(ADD, vaddq_u32)
PAIRWISE(SUB, vsubq_u32)
PAIRWISE(OR, vorrq_u32)
PAIRWISE(AND, vandq_u32)
PAIRWISE(SHL, shift_left)
PAIRWISE(SHR, shift_right)
PAIRWISE(GT, vcgtq_u32)
#undef PAIRWISE
#define KEEP(v) AND(v, SET1(31))

static inline V SELECT(V m, V a, V b)
{
	return (V){{vbslq_u32(m.val[0], a.val[0], b.val[0]), vbslq_u32(m.val[1], a.val[1], b.val[1])}};
}

static inline uint32_t *push_neon(uint32_t *end, uint32x4_t v, uint32_t m)
{
	vst1q_u8((uint8_t *)(end - 4), vqtbl1q_u8(vreinterpretq_u8_u32(v), vld1q_u8(COMPRESS[m])));
	return end - MASKED_NBYTES[m] / 4;
}

static inline uint32_t *PUSH(uint32_t *end, V v, V m)
{
	static const uint32_t BITS[8] = {1, 2, 4, 8, 16, 32, 64, 128};
	uint32_t bits =
		vaddvq_u32(vorrq_u32(vandq_u32(m.val[0], vld1q_u32(BITS)), vandq_u32(m.val[1], vld1q_u32(BITS + 4))));

	end = push_neon(end, v.val[1], bits >> 4);
	return push_neon(end, v.val[0], bits & 15);
}

/*
 * Tables of codes, as in encode_lanes_avx512.h: in most books only a few adjacent byte values, and perhaps 0, have
 * codes. One lookup in a window of 64 values then suffices, and all values outside the window are escapes.
 */
struct codes_neon {
	const book_codes *book;
	uint8x16x4_t near_code, near_length;
	uint8x16_t base, escape_code, escape_length, zero_code, zero_length;
	int few; /* 1: all byte values with a code are in the window; 2: in the window, or are 0 */
};

#define CODES struct codes_neon
#define FEW(t) (t)->few

/* Return the 64 bytes from p[first] on, where p has 256 bytes; bytes past the end of p are p[beyond]. */
static inline uint8x16x4_t window_neon(const uint8_t *p, int first, int beyond)
{
	size_t there = first > 192 ? (size_t)(256 - first) : 64;
	uint8_t window[64];

	memset(window, p[beyond], sizeof window);
	memcpy(window, p + first, there);
	return bytes64_load(window);
}

static inline CODES codes_load(const book_codes *book)
{
	int first = 256, last = 0, escape = book->escape;
	CODES t = {.book = book};

	for (int i = 255; i > 0; i--)
		first = book->length[i] & 0x80 ? first : i;
	for (int i = 1; i < 256; i++)
		last = book->length[i] & 0x80 ? last : i;
	if (first == 256)
		first = last = 0;
	if (last - first >= 64)
		return t;
	t.few = book->length[0] & 0x80 || first == 0 ? 1 : 2;
	t.near_code = window_neon(book->code, first, escape);
	t.near_length = window_neon(book->length, first, escape);
	t.base = vdupq_n_u8((uint8_t)first);
	t.escape_code = vdupq_n_u8(book->code[escape]);
	t.escape_length = vdupq_n_u8(book->length[escape]);
	t.zero_code = vdupq_n_u8(book->code[0]);
	t.zero_length = vdupq_n_u8(book->length[0]);
	return t;
}

static inline void find_neon(const CODES *t, int few, uint8x16_t x, uint8x16_t *code, uint8x16_t *length)
{
	uint8x16_t y = vsubq_u8(x, few ? t->base : x);

	if (!few) {
		*code = bytes256_find(t->book->code, x);
		*length = bytes256_find(t->book->length, x);
		return;
	}
	*code = vqtbx4q_u8(t->escape_code, t->near_code, y);
	*length = vqtbx4q_u8(t->escape_length, t->near_length, y);
	if (few == 2) {
		uint8x16_t zero = vceqzq_u8(x);

		*code = vbslq_u8(zero, t->zero_code, *code);
		*length = vbslq_u8(zero, t->zero_length, *length);
	}
}

static inline void codes_find(const CODES *t, int few, const uint8_t *symbol, V *code, V *length, uint32_t *escaped)
{
	uint8x16_t c[2], n[2];

	for (int i = 0; i < 2; i++)
		find_neon(t, few, vld1q_u8(symbol + 16 * i), c + i, n + i);
	*escaped = top_bits(n[0], n[1]);
	for (int i = 0; i < 2; i++) {
		uint16x8_t pair, pair_length;
		uint32x4_t quad;

		/* the first symbol of a pair is the lower byte, and its code precedes that of the second */
		n[i] = vandq_u8(n[i], vdupq_n_u8(15));
		pair = vreinterpretq_u16_u8(c[i]);
		pair = vorrq_u16(vshlq_u16(vandq_u16(pair, vdupq_n_u16(255)),
					   vreinterpretq_s16_u16(vshrq_n_u16(vreinterpretq_u16_u8(n[i]), 8))),
				 vshrq_n_u16(pair, 8));
		pair_length = vpaddlq_u8(n[i]);
		quad = vreinterpretq_u32_u16(pair);
		code->val[i] = vorrq_u32(shift_left(vandq_u32(quad, vdupq_n_u32(0xffff)),
						    vshrq_n_u32(vreinterpretq_u32_u16(pair_length), 16)),
					 vshrq_n_u32(quad, 16));
		length->val[i] = vpaddlq_u16(pair_length);
	}
}
