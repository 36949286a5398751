/* decode_lanes.h - the lane coder's decoding for vectors of 32-bit words, written once.
 *
 * Included by avx2.c (AVX-512 has a loop of its own), which defines, besides what encode_lanes.h asks for:
 *   NEG (v)                  lanes that are negative, as MASK
 *   PULL (p, mask)           spread the words at p over the masked lanes, 0 elsewhere
 *   COUNT (mask)             lanes in a mask
 *   LOOKUP, lookup_load      what a look-up of the next 8 bits needs
 *   BYTES                    a vector with a byte for each lane
 *   TOP (v[NV])              the top byte of every lane
 *   lookup_find (t, x, s, n) their symbols and lengths, as BYTES
 *   ADD_BYTES, WIDEN (b, v)  lengths to words, in the order of TOP
 *   store_quads (s[4], esc, dst, escaped)  interleave the four symbols of a lane, store, note escapes
 */
#include "place.h"

static inline int all_zero(const V *word, const V *part, const V *tail)
{
	uint32_t any[LANES];
	V all = SET1(0);

	for (int v = 0; v < NV; v++)
		all = OR(all, OR(word[v], OR(part[v], tail[v])));
	STORE(any, all);
	for (int i = 1; i < LANES; i++)
		any[0] |= any[i];
	return any[0] == 0;
}

static void decode_stream(const LOOKUP *table, uint8_t escape, struct stream *stream, size_t rows,
			  const struct ahead *ahead)
{
	const size_t step = ahead_step(ahead, rows);
	const lanes *state = stream->state;
	V word[NV], part[NV], tail[NV];
	struct place at;

	place_begin(&at, stream);
	for (int v = 0; v < NV; v++) {
		word[v] = LOAD(state->word + LANES * v);
		part[v] = LOAD(state->part + LANES * v);
		tail[v] = LOAD(state->tail + LANES * v);
	}
	for (size_t r = 0; r < rows; r++) {
		BYTES symbol[4], n, total;
		V next[NV], w[NV];

		ahead_fetch(ahead, step, r);
		place_row(&at);
		for (int v = 0; v < NV; v++)
			next[v] = word[v];
		lookup_find(table, TOP(next), &symbol[0], &total);
		n = total;
		for (int k = 1; k < 4; k++) {
			WIDEN(n, w);
			for (int v = 0; v < NV; v++)
				next[v] = SHL(next[v], w[v]);
			lookup_find(table, TOP(next), &symbol[k], &n);
			total = ADD_BYTES(total, n);
		}
		store_quads(symbol, escape, stream->symbol + WIRE_ROW * r, stream->escaped + 4 * r);
		WIDEN(total, w);
		for (int v = 0; v < NV; v++) {
			V left = SUB(tail[v], w[v]), fresh;
			MASK m = NEG(left);

			tail[v] = KEEP(left); /* where a word comes, as many of its bits are left */
			fresh = PULL(at.p, m);
			at.p += 4 * COUNT(m);
			word[v] = OR(OR(SHL(word[v], w[v]), SHR(part[v], SUB(SET1(32), w[v]))), SHR(fresh, tail[v]));
			part[v] = OR(SHL(part[v], w[v]), SHL(fresh, SUB(SET1(32), tail[v])));
		}
	}
	stream->good = all_zero(word, part, tail) && at.p >= at.end;
}

static void decode_lanes(const book_lookup *book, struct stream *a, struct stream *b, size_t rows,
			 const struct ahead *ahead)
{
	const LOOKUP table = lookup_load(book);

	decode_stream(&table, book->escape, a, rows, ahead);
	if (b)
		decode_stream(&table, book->escape, b, rows, ahead);
}
