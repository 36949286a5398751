/* scalar.c - kernels in plain C, for any CPU; reference for the other kernels. */
#include "kernels.h"

static uint32_t *encode_lanes(const book_codes *book, const uint8_t *symbol, size_t rows, uint32_t *end, lanes *state,
			      uint32_t *escaped, const struct ahead *ahead)
{
	uint64_t bits[WIRE_LANES] = {0};
	uint32_t nbits[WIRE_LANES];
	uint16_t row[256]; /* by symbol: code | length << 8; bit 15: escaped */

	(void)ahead;
	for (int i = 0; i < 256; i++)
		row[i] = (uint16_t)(book->code[i] | book->length[i] << 8);
	for (int l = 0; l < WIRE_LANES; l++)
		nbits[l] = 32;
	while (rows-- > 0) {
		uint32_t esc[4] = {0};

		for (int l = WIRE_LANES - 1; l >= 0; l--) {
			const uint8_t *s = symbol + WIRE_ROW * rows + 4 * l;
			uint32_t a = row[s[0]], b = row[s[1]], c = row[s[2]], d = row[s[3]];
			uint32_t nb = b >> 8 & 15, nc = c >> 8 & 15, nd = d >> 8 & 15;
			uint32_t high = (a & 255) << nb | (b & 255), low = (c & 255) << nd | (d & 255);
			uint32_t n = nb + nc + nd;
			uint64_t quad = (uint64_t)high << (nc + nd) | low;
			uint64_t x = bits[l];
			uint32_t have = nbits[l], due;

			if (__builtin_expect((a | b | c | d) & 0x8000, 0))
				esc[l / 8] |= (a >> 15 | b >> 15 << 1 | c >> 15 << 2 | d >> 15 << 3) << 4 * (l % 8);
			/* always store, but advance `end` only if a word is complete: a branch would be mispredicted */
			n += a >> 8 & 15;
			due = have + n >= 64;
			end[-1] = (uint32_t)x;
			end -= due;
			x >>= 32 * due;
			have -= 32 * due;
			bits[l] = quad << have | x;
			nbits[l] = have + n;
		}
		memcpy(escaped + 4 * rows, esc, sizeof esc);
	}
	for (int l = 0; l < WIRE_LANES; l++) {
		state->word[l] = (uint32_t)bits[l];
		state->part[l] = (uint32_t)(bits[l] >> 32);
		state->tail[l] = nbits[l] - 32;
	}
	return end;
}

/* Read position in a stream's words, followed by zeros. */
struct source {
	const uint8_t *p, *end;
	uint8_t last[4 * 2 * WIRE_LANES];
	int in_last;
};

/* Make 32 words readable at w->p, the maximum that a row of 128 symbols consumes. */
static inline void source_row(struct source *w)
{
	if (__builtin_expect(w->end - w->p >= 4 * WIRE_LANES, 1))
		return;
	if (!w->in_last) {
		size_t left = (size_t)(w->end - w->p);

		memset(w->last, 0, sizeof w->last);
		memcpy(w->last, w->p, left);
		w->p = w->last;
		w->end = w->p + left;
		w->in_last = 1;
	}
	w->p = w->p > w->end ? w->end : w->p; /* stay at the stream's end, where only zeros follow */
}

/*
 * Consume n bits of a lane, and append a word from p if fewer than 32 bits remain. x holds up to 64 bits of the lane;
 * `used` is the number of consumed bits minus 1, 0 to 31.
 */
#define TAKE(x, n, used, p)                                                                                            \
	do {                                                                                                           \
		uint32_t used_ = (used) + (n), due_ = used_ >> 5 & 1;                                                  \
                                                                                                                       \
		(used) = used_ &= 31;                                                                                  \
		(x) |= (uint64_t)(load32(p) & (0 - due_)) << 1 << used_;                                               \
		(p) += 4 * due_;                                                                                       \
	} while (0)

/*
 * Entries of the table of pairs: first symbol << 16 | second symbol << 24 | bits of both codes. If a pair is longer
 * than PAIR_BITS, the entry has only the first symbol, and PAIR_LONG is set.
 */
#define PAIR_LONG 64u
#define PAIRS_ROWS 24 /* for fewer rows, building the table takes longer than it saves */

static void pairs_make(const book_lookup *book, struct symbol_pairs *pairs)
{
	uint32_t *at = pairs->at;

	for (uint32_t i = 0, last = 0; i < 256;) {
		uint32_t l = book->length[i], r = PAIR_BITS - l, n = 1u << r;
		uint32_t first = (uint32_t)book->symbol[i] << 16;

		if (l == last) { /* copy the entries of the preceding code, and change the symbol in them */
			uint32_t more = first - ((uint32_t)book->symbol[i - 1] << 16);

			for (uint32_t j = 0; j < n; j++)
				at[j] = at[(ptrdiff_t)j - (ptrdiff_t)n] + more;
		} else {
			for (uint32_t j = 0; j < n; j++) {
				uint32_t k = r < 8 ? j << (8 - r) : j >> (r - 8), m = book->length[k];

				at[j] = first + l + (m > r ? PAIR_LONG : (uint32_t)book->symbol[k] << 24 | m);
			}
		}
		last = l;
		at += n;
		i += 256u >> l;
	}
	pairs->of = book;
}

/*
 * Decode four symbols from the top bits of *x, one at a time; the first symbol is the lowest byte of the result.
 * Advance *x past their bits, and set *n to the number of these bits.
 */
static inline uint32_t quad_of(const book_lookup *book, uint64_t *x, uint32_t *n)
{
	uint32_t quad = 0;

	*n = 0;
	for (int i = 0; i < 4; i++) {
		uint32_t k = (uint32_t)(*x >> 56), l = book->length[k];

		quad |= (uint32_t)book->symbol[k] << 8 * i;
		*x <<= l;
		*n += l;
	}
	return quad;
}

/*
 * Decode `rows` rows of 128 symbols, four per lane. pair: decoding table of symbol pairs; NULL: decode one symbol at a
 * time.
 */
static inline void decode_quad_rows(const book_lookup *book, const uint32_t *pair, struct source *w, uint64_t *bits,
				    uint32_t *used, size_t rows, uint8_t *symbol)
{
	for (; rows > 0; rows--, symbol += WIRE_ROW) {
		const uint8_t *p;

		source_row(w);
		p = w->p;
		for (int l = 0; l < WIRE_LANES; l++) {
			uint64_t x = bits[l], y = x;
			uint32_t quad = 0, n = PAIR_LONG;

			if (pair) {
				uint32_t a = pair[x >> (64 - PAIR_BITS)], b;

				y = x << (a & 63);
				b = pair[y >> (64 - PAIR_BITS)];
				y <<= b & 63;
				n = a + b;
				quad = a >> 16 | (b & 0xffff0000);
			}
			if (__builtin_expect(n & (3 * PAIR_LONG),
					     0)) { /* one or both pairs are longer than PAIR_BITS */
				y = x;
				quad = quad_of(book, &y, &n);
			}
			TAKE(y, n, used[l], p);
			bits[l] = y;
			store32(symbol + 4 * l, quad);
		}
		w->p = p;
	}
}

/* Return a mask with bit i set if p[i] is v, for i in 0..31. */
static inline uint32_t equal_bytes(const uint8_t *p, uint8_t v)
{
	const uint64_t low = 0x7f7f7f7f7f7f7f7full;
	uint32_t mask = 0;

	for (int i = 0; i < 4; i++) {
		uint64_t d = load64(p + 8 * i) ^ 0x0101010101010101ull * v;
		uint64_t is = ~(((d & low) + low) | d | low) >> 7; /* 1 in bytes that are 0 */

		mask |= (uint32_t)(is * 0x0102040810204080ull >> 56) << 8 * i;
	}
	return mask;
}

static void decode_stream(const book_lookup *book, struct stream *s, size_t rows)
{
	struct source w = {.p = s->words, .end = s->words + 4 * s->nwords};
	uint64_t bits[WIRE_LANES], all = 0;
	uint32_t used[WIRE_LANES];

	for (int l = 0; l < WIRE_LANES; l++) {
		bits[l] = (uint64_t)s->state->word[l] << 32 | s->state->part[l];
		used[l] = 31 - s->state->tail[l];
	}
	if (s->pairs->of != book && rows >= PAIRS_ROWS)
		pairs_make(book, s->pairs);
	if (s->pairs->of == book)
		decode_quad_rows(book, s->pairs->at, &w, bits, used, rows, s->symbol);
	else
		decode_quad_rows(book, NULL, &w, bits, used, rows, s->symbol);
	for (size_t r = 0; r < rows; r++) {
		const uint8_t *row = s->symbol + WIRE_ROW * r, escape = book->escape;
		uint8_t any = 0;

		for (int i = 0; i < WIRE_ROW; i++)
			any |= (uint8_t)(row[i] == escape);
		for (int i = 0; i < WIRE_ROW / 32; i++)
			s->escaped[4 * r + (size_t)i] = any ? equal_bytes(row + 32 * i, escape) : 0;
	}
	for (int l = 0; l < WIRE_LANES; l++)
		all |= bits[l] | (used[l] ^ 31);
	s->good = all == 0 && w.p >= w.end;
}

static void decode_lanes(const book_lookup *book, struct stream *a, struct stream *b, size_t rows,
			 const struct ahead *ahead)
{
	(void)ahead;
	decode_stream(book, a, rows);
	if (b)
		decode_stream(book, b, rows);
}

#include "plane_loops.h"
#include "row_loops.h"
#include "truncate_loops.h"
#include "delta_loops.h"
#include "topk_loops.h"

const struct kernels kernels_scalar = {.name = "scalar",
				       .encode_lanes = encode_lanes,
				       .decode_lanes = decode_lanes,
				       KERNEL_LOOPS,
				       ROW_LOOPS,
				       TRUNCATE_LOOPS,
				       DELTA_LOOPS,
				       TOPK_LOOPS};
