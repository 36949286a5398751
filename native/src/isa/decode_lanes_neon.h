/*
 * decode_lanes_neon.h - decode the lane coder with byte permutations; see decode_lanes_avx512.h, whose tables it uses.
 *
 * A byte of a quantity such as the length of a code is in lane order in two vectors of 16 lanes. Words of the lanes are
 * in eight vectors.
 */
#include "bytes_neon.h"
#include "place.h"

struct lookup_neon {
	const uint8_t *symbol;    /* of the next 8 bits */
	uint8x16x4_t length[2];   /* of the next 7 bits */
	uint8x16x4_t top_length;  /* of the next 6 bits, which suffice if `few` */
	uint8x16x4_t top_symbol;  /* of the next 6 bits, for codes of at most 6 bits */
	uint8x16x4_t last_symbol; /* of the next 8 bits, if the first two are ones */
	uint8x16_t escape;
	int few;
};

static inline struct lookup_neon lookup_load(const book_lookup *book)
{
	struct lookup_neon t = {.symbol = book->symbol, .escape = vdupq_n_u8(book->escape)};
	uint8_t length[128], top_length[64], top_symbol[64];
	int alike = 1;

	for (int i = 0; i < 128; i++)
		length[i] = book->length[2 * i];
	for (int i = 0; i < 64; i++) {
		top_length[i] = book->length[4 * i];
		top_symbol[i] = book->symbol[4 * i];
		alike &= length[2 * i] == length[2 * i + 1];
	}
	t.length[0] = bytes64_load(length);
	t.length[1] = bytes64_load(length + 64);
	t.top_length = bytes64_load(top_length);
	t.top_symbol = bytes64_load(top_symbol);
	t.last_symbol = bytes64_load(book->symbol + 192);
	t.few = book->length[191] <= 6 && alike; /* lengths ascend with the index */
	return t;
}

static inline uint8x16_t lookup_length(const struct lookup_neon *t, int few, uint8x16_t x)
{
	uint8x16_t i = vshrq_n_u8(x, 1);

	if (few)
		return vqtbl4q_u8(t->top_length, vshrq_n_u8(x, 2));
	return vqtbx4q_u8(vqtbl4q_u8(t->length[0], i), t->length[1], vsubq_u8(i, vdupq_n_u8(64)));
}

static inline uint8x16_t lookup_symbol(const struct lookup_neon *t, int few, uint8x16_t x)
{
	if (few)
		return vqtbx4q_u8(vqtbl4q_u8(t->top_symbol, vshrq_n_u8(x, 2)), t->last_symbol,
				  vsubq_u8(x, vdupq_n_u8(192)));
	return bytes256_find(t->symbol, x);
}

/* Return the upper bytes of 16 words of 16 bits. */
static inline uint8x16_t upper_bytes(uint16x8_t a, uint16x8_t b)
{
	return vuzp2q_u8(vreinterpretq_u8_u16(a), vreinterpretq_u8_u16(b));
}

/*
 * Decode the next two codes of 16 lanes, whose words are `word`: at most 16 bits, the upper halves of the words. Return
 * the length of both codes together.
 */
static inline __attribute__((always_inline)) uint8x16_t two_codes(const struct lookup_neon *t, int few,
								  const uint32x4_t word[4], uint8x16_t symbol[2])
{
	uint16x8_t a = vuzp2q_u16(vreinterpretq_u16_u32(word[0]), vreinterpretq_u16_u32(word[1]));
	uint16x8_t b = vuzp2q_u16(vreinterpretq_u16_u32(word[2]), vreinterpretq_u16_u32(word[3]));
	uint8x16_t x = upper_bytes(a, b), n = lookup_length(t, few, x);

	symbol[0] = lookup_symbol(t, few, x);
	a = vshlq_u16(a, vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(n))));
	b = vshlq_u16(b, vreinterpretq_s16_u16(vmovl_high_u8(n)));
	x = upper_bytes(a, b);
	symbol[1] = lookup_symbol(t, few, x);
	return vaddq_u8(n, lookup_length(t, few, x));
}

/* Return a mask with the bits of the four symbols of each of 16 lanes that are `escape`. */
static inline uint8x8_t escapes_neon(const uint8x16_t symbol[4], uint8x16_t escape)
{
	uint8x16_t bits = vandq_u8(vceqq_u8(symbol[0], escape), vdupq_n_u8(1));
	uint16x8_t pairs;

	for (int k = 1; k < 4; k++)
		bits = vorrq_u8(bits, vandq_u8(vceqq_u8(symbol[k], escape), vdupq_n_u8((uint8_t)(1 << k))));
	pairs = vreinterpretq_u16_u8(bits);
	return vmovn_u16(vorrq_u16(pairs, vshrq_n_u16(pairs, 4)));
}

/* Decode a row of 16 of the 32 lanes: shift out the bits of four codes, and append words at p. Return the new p. */
static inline __attribute__((always_inline)) const uint8_t *decode_half(const struct lookup_neon *t, int few,
									uint32x4_t word[4], uint32x4_t part[4],
									uint8x16_t *tail, const uint8_t *p,
									uint8_t *symbols, uint32_t *escaped)
{
	uint8x16_t total = vdupq_n_u8(0), left;
	uint32x4_t count[4];
	uint8x16x4_t symbol;
	uint32_t due;

	for (int k = 0; k < 4; k += 2) {
		uint8x16_t n = two_codes(t, few, word, symbol.val + k);

		total = vaddq_u8(total, n);
		by_word(n, count);
		for (int v = 0; v < 4; v++) {
			int32x4_t c = vreinterpretq_s32_u32(count[v]);

			word[v] = vorrq_u32(vshlq_u32(word[v], c), vshlq_u32(part[v], vsubq_s32(c, vdupq_n_s32(32))));
			part[v] = vshlq_u32(part[v], c);
		}
	}
	/* a lane whose `left` is negative consumes a new word, after `tail` bits */
	left = vsubq_u8(*tail, total);
	*tail = vandq_u8(left, vdupq_n_u8(31));
	due = top_bits(left, left);
	by_word(*tail, count);
	for (int v = 0; v < 4; v++) {
		uint32_t m = due >> 4 * v & 15;
		uint32x4_t fresh = vreinterpretq_u32_u8(vqtbl1q_u8(vld1q_u8(p), vld1q_u8(EXPAND[m])));

		p += MASKED_NBYTES[m];
		word[v] = vorrq_u32(word[v], shift_right(fresh, count[v]));
		part[v] = vorrq_u32(part[v], shift_left(fresh, vsubq_u32(vdupq_n_u32(32), count[v])));
	}
	vst4q_u8(symbols, symbol);
	vst1_u8((uint8_t *)escaped, escapes_neon(symbol.val, t->escape));
	return p;
}

static inline __attribute__((always_inline)) void decode_by(const struct lookup_neon *t, int few, struct stream *s,
							    size_t rows, const struct ahead *ahead)
{
	const size_t step = ahead_step(ahead, rows);
	uint32x4_t word[8], part[8], all;
	uint8x16_t tail[2];
	uint8_t tails[WIRE_LANES];
	struct place at;

	for (int l = 0; l < WIRE_LANES; l++)
		tails[l] = (uint8_t)s->state->tail[l];
	for (int v = 0; v < 8; v++) {
		word[v] = vld1q_u32(s->state->word + 4 * v);
		part[v] = vld1q_u32(s->state->part + 4 * v);
	}
	tail[0] = vld1q_u8(tails);
	tail[1] = vld1q_u8(tails + 16);
	place_begin(&at, s);
	for (size_t r = 0; r < rows; r++) {
		uint8_t *symbol = s->symbol + WIRE_ROW * r;
		uint32_t *escaped = s->escaped + 4 * r;

		ahead_fetch(ahead, step, r);
		place_row(&at);
		at.p = decode_half(t, few, word, part, tail, at.p, symbol, escaped);
		at.p = decode_half(t, few, word + 4, part + 4, tail + 1, at.p, symbol + 64, escaped + 2);
	}
	all = vreinterpretq_u32_u8(vorrq_u8(tail[0], tail[1]));
	for (int v = 0; v < 8; v++)
		all = vorrq_u32(all, vorrq_u32(word[v], part[v]));
	s->good = vmaxvq_u32(all) == 0 && at.p >= at.end;
}

/* Eight vectors of words hide the latency of lookups within a stream, so that two streams gain nothing together. */
static void decode_lanes(const book_lookup *book, struct stream *a, struct stream *b, size_t rows,
			 const struct ahead *ahead)
{
	const struct lookup_neon table = lookup_load(book);
	static const struct ahead nothing;

	for (struct stream *s = a; s; s = s == a ? b : NULL, ahead = &nothing)
		if (table.few)
			decode_by(&table, 1, s, rows, ahead);
		else
			decode_by(&table, 0, s, rows, ahead);
}
