/* lanes.h - the lane coder for vectors of 32-bit words, written once.
 *
 * Included by avx2.c and avx512.c, which define:
 *   V, NV                    a vector of words; how many hold the 32 lanes
 *   LANES                    words in a V
 *   LOAD STORE SET1          memory and constants
 *   ADD SUB OR AND           on words
 *   SHL SHR (v, counts)      by lane; a count above 31 (a negative one too) gives 0
 *   NEG (v), GT (a, b)       lanes that are negative, or where a > b, as MASK; signed
 *   KEEP (v)                 v & 31
 *   SELECT (mask, a, b)      mask ? a : b
 *   PUSH (end, v, mask)      store the masked lanes, in lane order, just below end; returns the new end
 *   PULL (p, mask)           spread the words at p over the masked lanes, 0 elsewhere
 *   COUNT (mask)             lanes in a mask
 *   CODES, codes_load (book) what a look-up of symbols needs
 *   codes_find (t, few, x, c, n, e)  the codes (right-justified) and lengths of the quads in x, one a word, and a bit
 *                            mask of the escaped symbols
 *   FEW (t)                  0, or which of the faster ways codes_find has for few symbols: it is told, as a constant
 * and, unless LANES_DECODE says that decode_lanes is its own,
 *   LOOKUP, lookup_load      what a look-up of the next 8 bits needs
 *   BYTES                    a vector with a byte for each lane
 *   TOP (v[NV])              the top byte of every lane
 *   lookup_find (t, x, s, n) their symbols and lengths, as BYTES
 *   ADD_BYTES, WIDEN (b, v)  lengths to words, in the order of TOP
 *   store_quads (s[4], esc, dst, escaped)  interleave the four symbols of a lane, store, note escapes
 */

/*
 * For vectors that are shorter (NEON) make V a pair of them, with LANES 8: a V's escapes are noted in whole words of 32
 * bits, at LANES / 8 of them a V, and simd_loops.h counts on it, too.
 */
_Static_assert(LANES >= 8, "the escapes of fewer than 8 lanes do not fill a word: make V a pair of vectors");
_Static_assert(NV *LANES == WIRE_LANES, "NV vectors hold the lanes");
_Static_assert(LANES <= LANES_SLACK, "PUSH may write, and PULL read, a whole vector where no word is due");

/* Reads past the last word come from here: a row takes at most 32 words, a vector may look LANES_SLACK ahead. */
struct tail {
	uint8_t bytes[4 * (WIRE_LANES + 2 * LANES_SLACK)];
};

/* Bytes of each piece to fetch in a row: whole cache lines. */
static inline size_t ahead_step(const struct ahead *ahead, size_t rows)
{
	return rows ? (ahead->n + 64 * rows - 1) / (64 * rows) * 64 : 0;
}

static inline void ahead_fetch(const struct ahead *ahead, size_t step, size_t row)
{
	for (size_t c = 0; c < ahead->count; c++)
		for (size_t i = 0; i < step; i += 64)
			__builtin_prefetch((const void *)(ahead->at + c * ahead->stride + row * step + i));
}

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

/* A stream's place in its words. */
struct place {
	const uint8_t *p, *end;
	struct tail last;
	int in_last;
};

static inline void place_begin(struct place *at, const struct stream *s)
{
	at->p = s->words;
	at->end = at->p + 4 * s->nwords;
	at->in_last = 0;
}

/* What a row may take, and a vector read behind that. */
#define PLACE_LEAST (4 * (WIRE_LANES + LANES_SLACK))

static inline void place_row(struct place *at)
{
	if (__builtin_expect(at->end - at->p >= PLACE_LEAST, 1))
		return;
	if (!at->in_last) {
		size_t left = (size_t)(at->end - at->p);

		memset(&at->last, 0, sizeof at->last);
		memcpy(at->last.bytes, at->p, left);
		at->p = at->last.bytes;
		at->end = at->p + left;
		at->in_last = 1;
	}
	at->p = at->p > at->end ? at->end : at->p; /* zeros from here on */
}

#ifndef LANES_DECODE
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
#endif
