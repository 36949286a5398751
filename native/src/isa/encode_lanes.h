/*
 * encode_lanes.h - encode with the lane coder in vectors of 32-bit words; common to all instruction sets.
 *
 * Included by avx2.c and avx512.c, which define:
 *   - V, NV: a vector of words; number of vectors for the 32 lanes
 *   - LANES: words in a V
 *   - LOAD STORE SET1: load and store a V; a V of equal words
 *   - ADD SUB OR AND: on words
 *   - SHL SHR (v, counts): by lane; counts above 31 and negative counts give 0
 *   - GT (a, b): lanes where a > b, as MASK; signed
 *   - KEEP (v): v & 31
 *   - SELECT (mask, a, b): mask ? a : b
 *   - PUSH (end, v, mask): store the masked lanes, in lane order, just below end; returns the new end
 *   - CODES, codes_load (book): tables to look up symbols
 *   - codes_find (t, few, x, c, n, e): look up the four symbols per lane at x: their codes together (right-justified)
 *     to c, the total length to n, one per lane, and a mask of the escaped symbols to e
 *   - FEW (t): `few` for codes_find, a constant in each call: 0, or the number of a faster variant of codes_find for
 *     books with few codes
 */
#include "place.h"

/*
 * The mask of escapes is stored in whole words of 32 bits, LANES / 8 words per V, so LANES must be at least 8. For
 * shorter vectors (NEON) let V be a pair of vectors. simd_loops.h relies on this, too.
 */
_Static_assert(LANES >= 8, "the escapes of fewer than 8 lanes do not fill a word: make V a pair of vectors");
_Static_assert(NV *LANES == WIRE_LANES, "NV vectors hold the lanes");
_Static_assert(LANES <= LANES_SLACK, "whole vectors are stored and loaded beyond the words");

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
			/*
			 * prepend the n bits of the codes to the lane; if `part` then exceeds 32 bits, `word` is
			 * complete: store it and continue with `part`
			 */
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
