/*
 * decode_lanes_avx2.h - decode the lane coder in 256-bit vectors, or only check it without computing symbols.
 *
 * Included by avx2.c, which defines the vector operations. Four vectors hold the 32-bit words of 32 lanes. One-byte
 * quantities of the 32 lanes, such as code lengths, are in a single vector: its word i has the bytes for word i of
 * vectors 3, 1, 2 and 0, lowest byte first. In this order, two vectors of 16-bit values hold the top bits of all lanes,
 * and only shifts are needed to move bytes to words and back.
 */
#include "place.h"

/*
 * Decoding table of 256 entries, indexed by the next 8 bits, for books in which codes that begin below binary 11000000
 * have at most 4 bits, and codes that begin below 11110000 at most 6. So the first 192 entries are equal in groups of
 * 16, and the next 48 in groups of 4. An entry is computed as the sum of three look-ups in tables of 16 bytes; in
 * by_four and `last`, entry 0 is 0.
 */
struct sums {
	__m256i by_sixteen, by_four, last;
};

static inline struct sums sums_load(const uint8_t *of)
{
	uint8_t a[16], b[16], c[16];

	for (int i = 0; i < 16; i++) {
		a[i] = of[i < 12 ? 16 * i : 192];
		b[i] = (uint8_t)(of[192 + 4 * i] - of[192]);
		c[i] = (uint8_t)(of[240 + i] - of[240 + i / 4 * 4]);
	}
	return (struct sums){_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)a)),
			     _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)b)),
			     _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)c))};
}

struct lookup {
	struct sums length, symbol;
	struct pair both; /* tables for any book */
	int few;          /* 1: the book's code lengths allow struct sums */
	__m256i escape;
};

static inline struct lookup lookup_load(const book_lookup *book)
{
	struct lookup t;

	t.few = book->length[191] <= 4 && book->length[239] <= 6; /* lengths ascend with the index */
	if (t.few) {
		t.length = sums_load(book->length);
		t.symbol = sums_load(book->symbol);
	} else {
		t.both = pair_load(book->symbol, book->length);
	}
	t.escape = _mm256_set1_epi8((char)book->escape);
	return t;
}

struct where {
	__m256i by_sixteen, by_four, last;
};

static inline __m256i sum_at(const struct sums *t, const struct where *i)
{
	return _mm256_add_epi8(_mm256_add_epi8(_mm256_shuffle_epi8(t->by_sixteen, i->by_sixteen),
					       _mm256_shuffle_epi8(t->by_four, i->by_four)),
			       _mm256_shuffle_epi8(t->last, i->last));
}

/*
 * For each byte of x, find the code with which its bits begin: return the code's length, and set *symbol, unless NULL,
 * to its symbol.
 */
static inline __attribute__((always_inline)) __m256i find_codes(const struct lookup *t, int few, __m256i x,
								__m256i *symbol)
{
	__m256i length;

	if (few) {
		struct where i = {
			AND(_mm256_srli_epi16(x, 4), _mm256_set1_epi8(15)),
			_mm256_subs_epu8(AND(_mm256_srli_epi16(x, 2), _mm256_set1_epi8(63)), _mm256_set1_epi8(48)),
			_mm256_subs_epu8(x, _mm256_set1_epi8((char)240))};

		*symbol = sum_at(&t->symbol, &i);
		return sum_at(&t->length, &i);
	}
	pair_find(&t->both, x, symbol, &length);
	return length;
}

/* Expand one-byte quantities of all lanes to the words of four vectors. */
static inline void by_word(__m256i bytes, __m256i v[NV])
{
	const __m256i low = SET1(255);

	v[0] = SRL(bytes, 24);
	v[1] = AND(SRL(bytes, 8), low);
	v[2] = AND(SRL(bytes, 16), low);
	v[3] = AND(bytes, low);
}

/* Combine 16-bit halves: return the upper halves of a's words, and below them the upper halves of b's words. */
static inline __m256i upper_halves(__m256i a, __m256i b)
{
	return _mm256_blend_epi16(SRL(b, 16), a, 0xaa);
}

/* Combine bytes: return the upper bytes of a's 16-bit halves, and below them the upper bytes of b's halves. */
static inline __m256i upper_bytes(__m256i a, __m256i b)
{
	return OR(AND(a, _mm256_set1_epi16((short)0xff00)), _mm256_srli_epi16(b, 8));
}

/*
 * Loop over the streams, unrolled: a few instructions of each stream alternate, to hide latency. Alternating whole rows
 * of 128 symbols would not, because waiting instructions would fill the CPU's scheduler.
 */
#define EACH_STREAM for (int s = 0; s < count; s++)

/*
 * Decode the next two codes of all lanes: the top bits of each lane's word. *bits is the length of both codes together.
 */
static inline __attribute__((always_inline)) void two_codes(const struct lookup *t, int few, int count,
							    const __m256i word[2][NV], __m256i *const symbol[2],
							    __m256i bits[2])
{
	/* table of 2^(n - 1), indexed by n: AVX2 has no 16-bit shift by a variable count, so multiply */
	const __m256i power =
		_mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 2, 4, 8, 16, 32, 64, (char)128, 0, 0, 0, 0, 0, 0, 0));
	__m256i a[2], b[2], x[2], by[2];

	EACH_STREAM
	{
		a[s] = upper_halves(word[s][0], word[s][1]);
		b[s] = upper_halves(word[s][2], word[s][3]);
		x[s] = upper_bytes(a[s], b[s]);
	}
	EACH_STREAM bits[s] = find_codes(t, few, x[s], symbol[s]);
	EACH_STREAM
	{
		by[s] = _mm256_shuffle_epi8(power, bits[s]);
		a[s] = _mm256_mullo_epi16(_mm256_add_epi16(a[s], a[s]), _mm256_srli_epi16(by[s], 8));
		b[s] = _mm256_mullo_epi16(_mm256_add_epi16(b[s], b[s]), AND(by[s], _mm256_set1_epi16(255)));
	}
	EACH_STREAM x[s] = upper_bytes(a[s], b[s]);
	EACH_STREAM bits[s] = _mm256_add_epi8(bits[s], find_codes(t, few, x[s], symbol[s] + 1));
}

/* Store the four symbols of each lane at dst, in lane order, and set the bits of symbols that are escapes. */
static inline void store_quads(const __m256i s[4], __m256i escape, uint8_t *dst, uint32_t *escaped)
{
	const __m256i upper = _mm256_set1_epi16((short)0xff00);
	__m256i low[2], high[2], quad[NV];

	for (int k = 0; k < 2; k++) {
		low[k] = _mm256_blendv_epi8(s[2 * k], _mm256_slli_epi16(s[2 * k + 1], 8), upper);
		high[k] = _mm256_blendv_epi8(_mm256_srli_epi16(s[2 * k], 8), s[2 * k + 1], upper);
	}
	quad[0] = upper_halves(high[1], high[0]);
	quad[1] = _mm256_blend_epi16(high[0], SLL(high[1], 16), 0xaa);
	quad[2] = upper_halves(low[1], low[0]);
	quad[3] = _mm256_blend_epi16(low[0], SLL(low[1], 16), 0xaa);
	for (int v = 0; v < NV; v++) {
		STORE(dst + 32 * v, quad[v]);
		escaped[v] = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(quad[v], escape));
	}
}

struct decoding {
	struct stream *stream;
	struct place at;
	__m256i word[NV], part[NV], tail;
};

static inline void decoding_begin(struct decoding *d, struct stream *s)
{
	__m256i tail[NV];

	d->stream = s;
	place_begin(&d->at, s);
	for (int v = 0; v < NV; v++) {
		d->word[v] = LOAD(s->state->word + LANES * v);
		d->part[v] = LOAD(s->state->part + LANES * v);
		tail[v] = LOAD(s->state->tail + LANES * v);
	}
	d->tail = OR(OR(SLL(tail[0], 24), SLL(tail[2], 16)), OR(SLL(tail[1], 8), tail[3]));
}

static inline __attribute__((always_inline)) void decode_row(const struct lookup *t, int few, int count,
							     struct decoding d[2], size_t r)
{
	__m256i symbol[2][4], bits[2], total[2], left[2], next[2][NV], n[2][NV], c[2][NV];
	__m256i *const first[2] = {symbol[0], symbol[1]}, *const last[2] = {symbol[0] + 2, symbol[1] + 2};

	EACH_STREAM
	for (int v = 0; v < NV; v++)
		next[s][v] = d[s].word[v];
	two_codes(t, few, count, next, first, bits);
	EACH_STREAM
	{
		by_word(bits[s], n[s]);
		for (int v = 0; v < NV; v++)
			next[s][v] = SHL(next[s][v], n[s][v]);
		total[s] = bits[s];
	}
	two_codes(t, few, count, next, last, bits);
	/*
	 * `left` is the number of a lane's bits beyond 32. If it is negative, the lane consumes a new word, and c =
	 * left + 32 bits of that word lie beyond the lane's first 32 bits. In other lanes c is at least 32, so shifts
	 * by c or by 31 - c give 0.
	 */
	EACH_STREAM
	{
		total[s] = _mm256_add_epi8(total[s], bits[s]);
		left[s] = _mm256_sub_epi8(d[s].tail, total[s]);
		d[s].tail = AND(left[s], _mm256_set1_epi8(31));
		by_word(total[s], n[s]);
		by_word(_mm256_add_epi8(left[s], _mm256_set1_epi8(32)), c[s]);
	}
	EACH_STREAM place_row(&d[s].at);
	for (int v = 0; v < NV; v++)
		EACH_STREAM
		{
			unsigned due = bits_of(SLL(left[s], v == 0 ? 0 : v == 1 ? 16 : v == 2 ? 8 : 24));
			__m256i fresh = _mm256_permutevar8x32_epi32(LOAD(d[s].at.p), permutation(EXPAND, due));
			__m256i *word = &d[s].word[v], *part = &d[s].part[v];

			d[s].at.p += 4 * (size_t)(unsigned)__builtin_popcount(due);
			*word = OR(OR(SHL(*word, n[s][v]), SHR(*part, SUB(SET1(32), n[s][v]))), SHR(fresh, c[s][v]));
			*part = OR(SHL(*part, n[s][v]), SHL(ADD(fresh, fresh), SUB(SET1(31), c[s][v])));
		}
	EACH_STREAM
	store_quads(symbol[s], t->escape, d[s].stream->symbol + WIRE_ROW * r, d[s].stream->escaped + 4 * r);
}

static inline void decoding_end(const struct decoding *d)
{
	__m256i all = d->tail;

	for (int v = 0; v < NV; v++)
		all = OR(all, OR(d->word[v], d->part[v]));
	d->stream->good = _mm256_testz_si256(all, all) && d->at.p >= d->at.end;
}

static inline __attribute__((always_inline)) void decode_by(const struct lookup *t, int few, int count,
							    struct stream *const streams[2], size_t rows,
							    const struct ahead *ahead)
{
	const size_t step = ahead_step(ahead, rows);
	struct decoding d[2];

	EACH_STREAM decoding_begin(d + s, streams[s]);
	for (size_t r = 0; r < rows; r++) {
		ahead_fetch(ahead, step, r);
		decode_row(t, few, count, d, r);
	}
	EACH_STREAM decoding_end(d + s);
}

static inline __attribute__((always_inline)) void
decode_some(const book_lookup *book, int count, struct stream *const streams[2], size_t rows, const struct ahead *ahead)
{
	const struct lookup table = lookup_load(book);

	if (table.few)
		decode_by(&table, 1, count, streams, rows, ahead);
	else
		decode_by(&table, 0, count, streams, rows, ahead);
}

static void decode_lanes(const book_lookup *book, struct stream *a, struct stream *b, size_t rows,
			 const struct ahead *ahead)
{
	struct stream *const streams[] = {a, b};

	if (b)
		decode_some(book, 2, streams, rows, ahead);
	else
		decode_some(book, 1, streams, rows, ahead);
}
