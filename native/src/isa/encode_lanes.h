/* encode_lanes.h - the lane coder's encoding for vectors of 32-bit words, written once.
 *
 * Included by avx2.c and avx512.c, which define:
 *   V, NV                    a vector of words; how many hold the 32 lanes
 *   LANES                    words in a V
 *   LOAD STORE SET1          memory and constants
 *   ADD SUB OR AND           on words
 *   SHL SHR (v, counts)      by lane; a count above 31 (a negative one too) gives 0
 *   GT (a, b)                lanes where a > b, as MASK; signed
 *   KEEP (v)                 v & 31
 *   SELECT (mask, a, b)      mask ? a : b
 *   PUSH (end, v, mask)      store the masked lanes, in lane order, just below end; returns the new end
 *   CODES, codes_load (book) what a look-up of symbols needs
 *   codes_find (t, few, x, c, n, e)  the codes (right-justified) and lengths of the quads in x, one a word, and a bit
 *                            mask of the escaped symbols
 *   FEW (t)                  0, or which of the faster ways codes_find has for few symbols: it is told, as a constant
 */
#include "place.h"

/*
 * For vectors that are shorter (NEON) make V a pair of them, with LANES 8: a V's escapes are noted in whole words of 32
 * bits, at LANES / 8 of them a V, and simd_loops.h counts on it, too.
 */
_Static_assert(LANES >= 8, "the escapes of fewer than 8 lanes do not fill a word: make V a pair of vectors");
_Static_assert(NV *LANES == WIRE_LANES, "NV vectors hold the lanes");
_Static_assert(LANES <= LANES_SLACK, "whole vectors are stored, and loaded by decoders, where no word is due");

static inline __attribute__((always_inline)) uint32_t *encode_rows_by(const CODES *table, int few,
								      const uint8_t *symbol, size_t rows, uint32_t *end,
								      lanes *state, uint32_t *escaped,
								      const struct ahead *ahead)
{
	const size_t step = ahead_step(ahead, rows);
	V word[NV], part[NV], tail[NV];

	for (int v = 0; v < NV; v++)
		word[v] = part[v] = tail[v] = SET1(0);
	while (rows-- > 0) {
		ahead_fetch(ahead, step, rows);
		for (int v = NV - 1; v >= 0; v--) {
			V code, n, t, full;
			MASK m;

			codes_find(table, few, symbol + WIRE_ROW * rows + 4 * LANES * v, &code, &n,
				   escaped + 4 * rows + LANES / 8 * v);
			/* prepend n bits: what no longer fits beside 32 pushes the last word out */
			t = ADD(tail[v], n);
			m = GT(t, SET1(31));
			full = OR(part[v], SHL(code, tail[v]));
			end = PUSH(end, word[v], m);
			word[v] = SELECT(m, full, word[v]);
			part[v] = SELECT(m, SHR(code, SUB(SET1(32), tail[v])), full);
			tail[v] = KEEP(t);
		}
	}
	for (int v = 0; v < NV; v++) {
		STORE(state->word + LANES * v, word[v]);
		STORE(state->part + LANES * v, part[v]);
		STORE(state->tail + LANES * v, tail[v]);
	}
	return end;
}

static uint32_t *encode_lanes(const book_codes *book, const uint8_t *symbol, size_t rows, uint32_t *end, lanes *state,
			      uint32_t *escaped, const struct ahead *ahead)
{
	const CODES table = codes_load(book);

	switch (FEW(&table)) {
	case 1: return encode_rows_by(&table, 1, symbol, rows, end, state, escaped, ahead);
	case 2: return encode_rows_by(&table, 2, symbol, rows, end, state, escaped, ahead);
	default: return encode_rows_by(&table, 0, symbol, rows, end, state, escaped, ahead);
	}
}
