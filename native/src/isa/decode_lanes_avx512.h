/*
 * decode_lanes_avx512.h - decode the lane coder with byte permutations, two streams at once; see decode_lanes_avx2.h.
 *
 * Included by avx512.c, which defines the vector operations.
 */
#include "bytes_avx512.h"
#include "place.h"

/*
 * Decoding tables. Looking up a code's length is on the critical path. The next 7 bits determine the length, since
 * codes of 8 bits come in pairs that differ only in the last bit. The next 6 bits suffice unless a code of 7 bits is
 * adjacent to two codes of 8 bits. 6 bits also determine the symbols of codes of at most 6 bits. If few values are
 * rare, longer codes begin with two ones, and one more permute looks up their symbols.
 */
struct lookup512 {
	struct bytes256 symbol;
	__m512i length[2], top_length, top_symbol, last_symbol;
	__m512i escape;
	int few;
};

static inline struct lookup512 lookup512_load(const book_lookup *book)
{
	struct lookup512 t = {.symbol = bytes256_load(book->symbol)};
	uint8_t symbol[64], length[64], by_two[128];
	__mmask64 alike = ~(__mmask64)0;

	for (int k = 3; k >= 0; k--) {
		__m512i x = t.symbol.part[k], n = _mm512_loadu_si512(book->length + 64 * k);

		_mm_storeu_si128((__m128i *)(symbol + 16 * k), _mm512_cvtepi32_epi8(x));
		_mm_storeu_si128((__m128i *)(length + 16 * k), _mm512_cvtepi32_epi8(n));
		_mm256_storeu_si256((__m256i *)(by_two + 32 * k), _mm512_cvtepi16_epi8(n));
	}
	t.length[0] = _mm512_loadu_si512(by_two);
	t.length[1] = _mm512_loadu_si512(by_two + 64);
	t.top_symbol = _mm512_loadu_si512(symbol);
	t.top_length = _mm512_loadu_si512(length);
	t.last_symbol = t.symbol.part[3];
	for (int k = 0; k < 2; k++) { /* swap adjacent bytes */
		__m512i turned = OR(_mm512_slli_epi16(t.length[k], 8), _mm512_srli_epi16(t.length[k], 8));

		alike &= _mm512_cmpeq_epi8_mask(t.length[k], turned);
	}
	t.few = book->length[191] <= 6 && !~alike; /* lengths ascend with the index */
	t.escape = _mm512_set1_epi8((char)book->escape);
	return t;
}

static inline __m512i lookup512_length(const struct lookup512 *t, int few, __m512i x)
{
	/* permutes use only the lower 6 or 7 bits of each byte */
	return few ? _mm512_permutexvar_epi8(_mm512_srli_epi16(x, 2), t->top_length)
		   : _mm512_permutex2var_epi8(t->length[0], _mm512_srli_epi16(x, 1), t->length[1]);
}

static inline __m512i lookup512_symbol(const struct lookup512 *t, int few, __m512i x)
{
	if (few)
		return _mm512_mask_permutexvar_epi8(_mm512_permutexvar_epi8(_mm512_srli_epi16(x, 2), t->top_symbol),
						    _mm512_cmpge_epu8_mask(x, _mm512_set1_epi8((char)192)), x,
						    t->last_symbol);
	return bytes256_find(&t->symbol, x);
}

/*
 * Combine the upper (or lower) parts of the words of two vectors, the parts of b below the parts of a: bytes of 16-bit
 * words, or halves of 32-bit words. These functions use a masked byte shuffle. The variants named _soon use a shift and
 * a select, which have lower latency.
 */
static inline __m512i upper_bytes(__m512i a, __m512i b)
{
	const __m128i down = _mm_setr_epi8(1, 1, 3, 3, 5, 5, 7, 7, 9, 9, 11, 11, 13, 13, 15, 15);

	return _mm512_mask_shuffle_epi8(a, 0x5555555555555555, b, _mm512_broadcast_i32x4(down));
}

static inline __m512i lower_bytes(__m512i a, __m512i b)
{
	const __m128i up = _mm_setr_epi8(0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10, 12, 12, 14, 14);

	return _mm512_mask_shuffle_epi8(b, 0xaaaaaaaaaaaaaaaa, a, _mm512_broadcast_i32x4(up));
}

static inline __m512i upper_halves(__m512i a, __m512i b)
{
	const __m128i down = _mm_setr_epi8(2, 3, 2, 3, 6, 7, 6, 7, 10, 11, 10, 11, 14, 15, 14, 15);

	return _mm512_mask_shuffle_epi8(a, 0x3333333333333333, b, _mm512_broadcast_i32x4(down));
}

static inline __m512i lower_halves(__m512i a, __m512i b)
{
	const __m128i up = _mm_setr_epi8(0, 1, 0, 1, 4, 5, 4, 5, 8, 9, 8, 9, 12, 13, 12, 13);

	return _mm512_mask_shuffle_epi8(b, 0xcccccccccccccccc, a, _mm512_broadcast_i32x4(up));
}

static inline __m512i upper_bytes_soon(__m512i a, __m512i b)
{
	return _mm512_ternarylogic_epi32(_mm512_srli_epi16(b, 8), a, _mm512_set1_epi16((short)0xff00), 0xd8);
}

static inline __m512i upper_halves_soon(__m512i a, __m512i b)
{
	return _mm512_ternarylogic_epi32(_mm512_srli_epi32(b, 16), a, SET1((int)0xffff0000), 0xd8);
}

/*
 * Expand bytes to words. Two streams are decoded together to hide latency: vectors 0 and 1 hold the 32 words of the
 * first, vectors 2 and 3 the words of the second. One-byte quantities of all 64 lanes are in a single vector: its word
 * i has the bytes for word i of vectors 2, 0, 3, 1, lowest byte first. Bits above the lowest byte of each resulting
 * word are unspecified.
 */
static inline void by_word(__m512i bytes, __m512i v[4])
{
	v[2] = bytes;
	v[0] = _mm512_srli_epi32(bytes, 8);
	v[3] = _mm512_srli_epi32(bytes, 16);
	v[1] = _mm512_srli_epi32(bytes, 24);
}

/*
 * Store the four symbols of each lane, in lane order, for both streams, and set the bits of symbols that are escapes.
 */
static inline void store_quads(const struct lookup512 *table, const __m512i symbol[4], struct stream *const stream[2],
			       size_t r)
{
	__m512i low[2], high[2], quad[4];

	for (int k = 0; k < 2; k++) {
		low[k] = lower_bytes(symbol[2 * k + 1], symbol[2 * k]);
		high[k] = upper_bytes(symbol[2 * k + 1], symbol[2 * k]);
	}
	quad[0] = lower_halves(high[1], high[0]);
	quad[1] = upper_halves(high[1], high[0]);
	quad[2] = lower_halves(low[1], low[0]);
	quad[3] = upper_halves(low[1], low[0]);
	for (int v = 0; v < 4; v++) {
		__mmask64 escaped = _mm512_cmpeq_epi8_mask(quad[v], table->escape);

		STORE(stream[v / 2]->symbol + WIRE_ROW * r + 64 * (v % 2), quad[v]);
		memcpy(stream[v / 2]->escaped + 4 * r + 2 * (v % 2), &escaped, 8);
	}
}

static inline __attribute__((always_inline)) void decode_two(const struct lookup512 *table, int few,
							     struct stream *const stream[2], size_t rows,
							     const struct ahead *ahead)
{
	const __m512i zero = _mm512_setzero_si512();
	const size_t step = ahead_step(ahead, rows);
	__m512i word[4], part[4], tails[4], tail;
	struct place at[2];
	const uint8_t *p[2]; /* copies of at[].p, kept in registers */

	for (int v = 0; v < 4; v++) {
		const lanes *state = stream[v / 2]->state;

		word[v] = LOAD(state->word + LANES * (v % 2));
		part[v] = LOAD(state->part + LANES * (v % 2));
		tails[v] = LOAD(state->tail + LANES * (v % 2));
	}
	tail = OR(OR(tails[2], _mm512_slli_epi32(tails[0], 8)),
		  OR(_mm512_slli_epi32(tails[3], 16), _mm512_slli_epi32(tails[1], 24)));
	for (int s = 0; s < 2; s++) {
		place_begin(at + s, stream[s]);
		p[s] = at[s].p;
	}
	for (size_t r = 0; r < rows; r++) {
		__m512i symbol[4], total = zero, left, count[4];
		__mmask16 m[4];

		ahead_fetch(ahead, step, r);
		for (int s = 0; s < 2; s++)
			if (__builtin_expect(at[s].end - p[s] < PLACE_LEAST, 0)) {
				at[s].p = p[s];
				place_row(at + s);
				p[s] = at[s].p;
			}
		for (int k = 0; k < 4; k += 2) { /* two codes have at most 16 bits: the upper half of a word */
			__m512i a = upper_halves_soon(word[1], word[0]), b = upper_halves_soon(word[3], word[2]);
			__m512i x = upper_bytes_soon(a, b), n, n2;

			n = lookup512_length(table, few, x);
			symbol[k] = lookup512_symbol(table, few, x);
			a = _mm512_sllv_epi16(a, _mm512_srli_epi16(n, 8));
			b = _mm512_sllv_epi16(b, AND(n, _mm512_set1_epi16(255)));
			x = upper_bytes_soon(a, b);
			n2 = lookup512_length(table, few, x);
			symbol[k + 1] = lookup512_symbol(table, few, x);
			n = _mm512_add_epi8(n, n2);
			total = _mm512_add_epi8(total, n);
			by_word(n, count);
			for (int v = 0; v < 4; v++) { /* shifts are by at most 16; shift counts are taken mod 32 */
				word[v] = _mm512_shldv_epi32(word[v], part[v], count[v]);
				part[v] = _mm512_shldv_epi32(part[v], zero, count[v]);
			}
		}
		/*
		 * A lane whose `left` is negative consumes a new word; `tail` is then the number of the lane's bits
		 * beyond the first 32.
		 */
		left = _mm512_sub_epi8(tail, total);
		tail = AND(left, _mm512_set1_epi8(31));
		m[1] = _mm512_movepi32_mask(left);
		m[3] = _mm512_movepi32_mask(_mm512_slli_epi32(left, 8));
		m[0] = _mm512_movepi32_mask(_mm512_slli_epi32(left, 16));
		m[2] = _mm512_movepi32_mask(_mm512_slli_epi32(left, 24));
		by_word(tail, count);
		for (int v = 0; v < 4; v++) {
			__m512i fresh = _mm512_maskz_expand_epi32(m[v], _mm512_loadu_si512(p[v / 2]));

			p[v / 2] += 4 * (size_t)(unsigned)__builtin_popcount(m[v]);
			word[v] = OR(word[v], _mm512_shrdv_epi32(fresh, zero, count[v]));
			part[v] = OR(part[v], _mm512_shrdv_epi32(zero, fresh, count[v]));
		}
		store_quads(table, symbol, stream, r);
	}
	by_word(tail, tails);
	for (int s = 0; s < 2; s++) {
		__m512i all = OR(OR(word[2 * s], word[2 * s + 1]), OR(part[2 * s], part[2 * s + 1]));

		all = OR(all, AND(OR(tails[2 * s], tails[2 * s + 1]), SET1(255)));
		stream[s]->good = _mm512_test_epi32_mask(all, all) == 0 && p[s] >= at[s].end;
	}
}

static void decode_lanes(const book_lookup *book, struct stream *a, struct stream *b, size_t rows,
			 const struct ahead *ahead)
{
	const struct lookup512 table = lookup512_load(book);
	struct stream *const both[] = {a, b ? b : a}; /* a single stream is decoded twice, into the same bytes */

	if (table.few)
		decode_two(&table, 1, both, rows, ahead);
	else
		decode_two(&table, 0, both, rows, ahead);
}
