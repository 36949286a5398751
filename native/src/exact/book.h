/*
 * book.h - length-limited Huffman codebooks: build code lengths from counts and codes from lengths; serialize books. C,
 * C++ and NVRTC.
 *
 * A book (codebook) assigns a byte value a code of 1..max_code_length bits or no code, and always contains an escape
 * code. All arithmetic is on integers, and ties are resolved by symbol, so equal counts give equal books on every
 * engine.
 */
#ifndef CODEC_BOOK_H
#define CODEC_BOOK_H

#include "bits.h"
#include "wire.h"

#define BOOK_MAX_NBYTES (3 + 128)

/*
 * Code lengths in bits, by byte value. 0: the value has no code and is escaped. length[256]: length of the escape code.
 */
typedef struct codebook {
	uint8_t length[257];
} codebook;

/* Encoding table: codes by byte value. Values without a code have the escape code. */
typedef struct book_codes {
	uint8_t code[256];
	uint8_t length[256]; /* bits 0..6: code length in bits; bit 7: the value is escaped */
	uint8_t escape;      /* largest value without a code, which marks escapes in decoded symbols */
	uint8_t pad;         /* value of the first canonical code; pads the symbols to a multiple of 128 */
} book_codes;

/* Decoding table, indexed by the next 8 bits of a lane. */
typedef struct book_lookup {
	uint8_t symbol[256];
	uint8_t length[256];
	uint8_t escape;
	uint8_t pad;
} book_lookup;

/* Return 1 if a byte value that occurs `count` times among `total` gets a code. Rarer values are cheaper as escapes. */
BITS_FN int book_keeps(uint32_t count, uint64_t total)
{
	return 1280 * (uint64_t)count > total;
}

/* Leaves of the Huffman tree, sorted by (weight, symbol). The escape comes after leaves of equal weight. */
typedef struct book_leaves {
	uint32_t weight[257];
	uint16_t symbol[257];
	int n;
} book_leaves;

BITS_LARGE_FN void book_add_leaf(book_leaves *t, uint32_t weight, int symbol)
{
	int j = t->n++;

	weight = weight ? weight : 1;
	for (; j > 0 && t->weight[j - 1] > weight; j--) {
		t->weight[j] = t->weight[j - 1];
		t->symbol[j] = t->symbol[j - 1];
	}
	t->weight[j] = weight;
	t->symbol[j] = (uint16_t)symbol;
}

/* Remove the lightest leaf; among leaves of equal weight, the one with the largest symbol. */
BITS_LARGE_FN void book_drop_leaf(book_leaves *t)
{
	int j = 0;

	while (j + 1 < t->n && t->weight[j + 1] == t->weight[0])
		j++;
	for (t->n--; j < t->n; j++) {
		t->weight[j] = t->weight[j + 1];
		t->symbol[j] = t->symbol[j + 1];
	}
}

/*
 * Compute the leaves' code lengths, at most `max_code_length` bits, by package-merge (Larmore and Hirschberg 1990). Of
 * a leaf and a package of equal weight, the leaf comes first. The sum of all weights is below 2^24, so that every sum
 * fits 32 bits.
 */
BITS_LARGE_FN void book_merge(codebook *b, const book_leaves *t, int max_code_length)
{
	uint8_t is_leaf[WIRE_MAX_CODE_LENGTH][514];
	uint32_t a[514], c[514], *prev = a, *next = c;
	int nprev = 0, take = 2 * t->n - 2;

	for (int l = 0; l < max_code_length; l++) {
		int npacks = nprev / 2, i = 0, p = 0, n = 0;
		uint32_t *swap;

		while (i < t->n || p < npacks) {
			uint32_t w = p < npacks ? prev[2 * p] + prev[2 * p + 1] : 0;

			if (p >= npacks || (i < t->n && t->weight[i] <= w)) {
				next[n] = t->weight[i++];
				is_leaf[l][n++] = 1;
			} else {
				next[n] = w;
				is_leaf[l][n++] = 0;
				p++;
			}
		}
		swap = prev;
		prev = next;
		next = swap;
		nprev = n;
	}
	for (int l = max_code_length - 1; l >= 0; l--) {
		int leaves = 0;

		for (int i = 0; i < take; i++)
			leaves += is_leaf[l][i];
		for (int i = 0; i < leaves; i++)
			b->length[t->symbol[i]]++;
		take = 2 * (take - leaves);
	}
}

/*
 * Build the codebook for symbols that occur counts[i] times. Counts are halved until their sum is below 2^24. At most
 * 2^max_code_length - 1 values get codes, because one of the 2^max_code_length codes is the escape's.
 */
BITS_LARGE_FN void book_from_counts(codebook *b, const uint32_t counts[256], int max_code_length)
{
	book_leaves t;
	uint64_t total = 0, kept = 0;
	int shift = 0;

	t.n = 0;
	for (int i = 0; i < 257; i++)
		b->length[i] = 0;
	for (int i = 0; i < 256; i++)
		total += counts[i];
	while (total >> shift >= 1u << 24)
		shift++;
	for (int i = 0; i < 256; i += 4) {
		if (!(counts[i] | counts[i + 1] | counts[i + 2] | counts[i + 3])) /* most values have count 0 */
			continue;
		for (int k = i; k < i + 4; k++)
			if (book_keeps(counts[k], total))
				book_add_leaf(&t, counts[k] >> shift, k);
	}
	while (t.n > (1 << max_code_length) - 1)
		book_drop_leaf(&t);
	if (t.n == 0) /* all counts are 0: only value 0 gets a code */
		book_add_leaf(&t, 1, 0);
	for (int i = 0; i < t.n; i++)
		kept += counts[t.symbol[i]];
	book_add_leaf(&t, (uint32_t)((total - kept) >> shift), WIRE_ESCAPE);
	book_merge(b, &t, max_code_length);
}

/* Return a non-zero number if any of eight byte values has a code, given their code lengths. */
BITS_FN int book_any(const uint8_t length[8])
{
	uint8_t any = 0;

	for (int i = 0; i < 8; i++)
		any |= length[i];
	return any;
}

/*
 * List the byte values that have codes, in ascending order, and return their number. Functions loop over this list,
 * because most byte values have no code.
 */
BITS_LARGE_FN int book_values(const codebook *b, uint8_t value[256])
{
	int n = 0;

	for (int i = 0; i < 256; i += 8) {
		if (!book_any(b->length + i))
			continue;
		for (int k = i; k < i + 8; k++) {
			value[n] = (uint8_t)k;
			n += b->length[k] != 0;
		}
	}
	return n;
}

/* Return 1 if the book is valid: an escape, at least one value, no code above 8 bits, and a Kraft sum of exactly 1. */
BITS_LARGE_FN int book_valid(const codebook *b)
{
	uint8_t value[256], escape = b->length[WIRE_ESCAPE];
	int n = book_values(b, value);
	uint32_t kraft = 256u >> (escape & 15);

	for (int k = 0; k < n; k++) {
		if (b->length[value[k]] > WIRE_MAX_CODE_LENGTH)
			return 0;
		kraft += 256u >> b->length[value[k]];
	}
	return escape && escape <= WIRE_MAX_CODE_LENGTH && n && n < 256 && kraft == 256;
}

/* Return the largest byte value without a code, which marks escapes among decoded symbols. */
BITS_FN uint8_t book_escape(const codebook *b)
{
	int i = 255;

	while (i && b->length[i])
		i--;
	return (uint8_t)i;
}

/*
 * Compute next[l], the first code of l bits, for n byte values with codes and the escape. Codes are canonical, most
 * significant bit first: ordered by length, then by value. The escape is the last code of its length l: next[l + 1] / 2
 * - 1.
 */
BITS_LARGE_FN void book_first_codes(const codebook *b, const uint8_t *value, int n,
				    uint32_t next[WIRE_MAX_CODE_LENGTH + 2])
{
	uint32_t count[WIRE_MAX_CODE_LENGTH + 1] = {0};

	for (int k = 0; k < n; k++)
		count[b->length[value[k]]]++;
	count[b->length[WIRE_ESCAPE]]++;
	next[1] = 0;
	for (int l = 1; l <= WIRE_MAX_CODE_LENGTH; l++)
		next[l + 1] = (next[l] + count[l]) << 1;
}

BITS_LARGE_FN void book_to_codes(const codebook *b, book_codes *t)
{
	uint32_t next[WIRE_MAX_CODE_LENGTH + 2];
	uint8_t value[256], escape;
	int n = book_values(b, value), length = b->length[WIRE_ESCAPE];

	book_first_codes(b, value, n, next);
	escape = (uint8_t)(next[length + 1] / 2 - 1);
	for (int i = 0; i < 256; i++) {
		t->code[i] = escape;
		t->length[i] = (uint8_t)(0x80 | length);
	}
	t->escape = t->pad = book_escape(b);
	for (int k = 0; k < n; k++) {
		int i = value[k], l = b->length[i];
		uint32_t code = next[l]++;

		if (code == 0)
			t->pad = (uint8_t)i;
		t->code[i] = (uint8_t)code;
		t->length[i] = (uint8_t)l;
	}
}

BITS_LARGE_FN void book_to_lookup(const codebook *b, book_lookup *t)
{
	uint32_t next[WIRE_MAX_CODE_LENGTH + 2];
	uint8_t value[257];
	int n = book_values(b, value);

	book_first_codes(b, value, n, next);
	value[n] = t->escape = book_escape(b);
	for (int k = 0; k <= n; k++) {
		int l = b->length[k < n ? value[k] : WIRE_ESCAPE];
		uint32_t first = next[l]++ << (8 - l);

		for (uint32_t j = first; j < first + (256u >> l); j++) {
			t->symbol[j] = value[k];
			t->length[j] = (uint8_t)l;
		}
	}
	t->pad = t->symbol[0];
}

/*
 * Return the coded size in bits of symbols, of which symbol i occurs counts[i] times. An escaped symbol adds a literal
 * of `literal` bits.
 */
BITS_LARGE_FN uint64_t book_cost(const codebook *b, const uint32_t counts[256], int literal)
{
	uint32_t escape = (uint32_t)(b->length[WIRE_ESCAPE] + literal);
	uint64_t bits = 0;

	for (int i = 0; i < 256; i++) /* branch-free, so that compilers vectorize it */
		bits += (uint64_t)counts[i] * (b->length[i] + (escape & (0u - !b->length[i])));
	return bits;
}

/*
 * Find the smallest and largest non-zero byte value with a code. If only value 0 has a code, *first is 1 and *last 0.
 */
BITS_LARGE_FN void book_span(const codebook *b, int *first, int *last)
{
	int lo = 1, hi = 255;

	while (hi > 8 && !book_any(b->length + hi - 7))
		hi -= 8;
	while (hi && !b->length[hi])
		hi--;
	while (lo + 8 <= hi && !book_any(b->length + lo))
		lo += 8;
	while (lo < hi && !b->length[lo])
		lo++;
	*first = lo;
	*last = hi;
}

/* Return the size of the packed book in bytes. */
BITS_LARGE_FN int book_nbytes(const codebook *b)
{
	int first, last;

	book_span(b, &first, &last);
	return 3 + (last - first + 2) / 2;
}

/*
 * Pack a book: a byte with the code length of the escape in its low nibble, and of value 0 in its high nibble; the
 * bytes `first` and `last` of book_span; then one nibble, a code length, per value in first..last. Return the size in
 * bytes.
 */
BITS_LARGE_FN int book_pack(const codebook *b, uint8_t *dst)
{
	int first, last, n = 3;

	book_span(b, &first, &last);
	dst[0] = (uint8_t)(b->length[WIRE_ESCAPE] | b->length[0] << 4);
	dst[1] = (uint8_t)first;
	dst[2] = (uint8_t)last;
	for (int i = first; i <= last; i++)
		if ((i - first) % 2)
			dst[n - 1] |= (uint8_t)(b->length[i] << 4);
		else
			dst[n++] = b->length[i];
	return n;
}

/*
 * Unpack a book. Return the number of bytes read, or 0 if the bytes are not a valid book. Each book has exactly one
 * encoding: if only value 0 has a code, bytes `first` and `last` must be 1 and 0.
 */
BITS_LARGE_FN int book_unpack(codebook *b, const uint8_t *src, uint64_t nbytes)
{
	int first, last, n = 3;

	if (nbytes < 3)
		return 0;
	first = src[1];
	last = src[2];
	if (first < 1 || (last < first && (first > 1 || last > 0)) || nbytes < (uint64_t)(3 + (last - first + 2) / 2))
		return 0;
	for (int i = 0; i < 257; i++)
		b->length[i] = 0;
	for (int i = first; i <= last; i += 2) {
		b->length[i] = src[n] & 15;
		if (i < last)
			b->length[i + 1] = src[n] >> 4;
		else if (src[n] >> 4)
			return 0;
		n++;
	}
	if (last && (!b->length[first] || !b->length[last]))
		return 0;
	b->length[0] = src[0] >> 4;
	b->length[WIRE_ESCAPE] = src[0] & 15;
	return book_valid(b) ? n : 0;
}

#endif
