/* scalar.c - the loops for any CPU: plain C, and the reference for the others. */
#include "kernels.h"

static uint32_t *encode_lanes(const book_codes *book, const uint8_t *symbol, size_t rows, uint32_t *end, lanes *state,
			      uint32_t *escaped, const struct ahead *ahead)
{
	uint64_t bits[WIRE_LANES] = {0};
	uint32_t nbits[WIRE_LANES];
	uint16_t row[256]; /* code | length << 8, bit 15: escaped */

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
			/* a branch on the reservoir mispredicts: store always, keep what is due */
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

static void decode_stream(const book_lookup *book, struct stream *s, size_t rows)
{
	const uint8_t *p = s->words, *end = p + 4 * s->nwords;
	uint8_t last[4 * 2 * WIRE_LANES];
	uint64_t bits[WIRE_LANES], all = 0;
	uint32_t nbits[WIRE_LANES];
	uint16_t next[256]; /* symbol | length << 8 */
	int in_last = 0;

	for (int i = 0; i < 256; i++)
		next[i] = (uint16_t)(book->symbol[i] | book->length[i] << 8);
	for (int l = 0; l < WIRE_LANES; l++) {
		bits[l] = (uint64_t)s->state->word[l] << 32 | s->state->part[l];
		nbits[l] = 32 + s->state->tail[l];
	}
	for (size_t r = 0; r < rows; r++) {
		if (__builtin_expect(end - p < 4 * WIRE_LANES, 0)) {
			if (!in_last) {
				size_t left = (size_t)(end - p);

				memset(last, 0, sizeof last);
				memcpy(last, p, left);
				p = last;
				end = p + left;
				in_last = 1;
			}
			p = p > end ? end : p; /* zeros from here on */
		}
		for (int l = 0; l < WIRE_LANES; l++) {
			uint64_t x = bits[l];
			uint32_t a, b, c, d, n, have, due;

			a = next[x >> 56];
			x <<= a >> 8;
			b = next[x >> 56];
			x <<= b >> 8;
			c = next[x >> 56];
			x <<= c >> 8;
			d = next[x >> 56];
			x <<= d >> 8;
			n = (a >> 8) + (b >> 8) + (c >> 8) + (d >> 8);
			have = nbits[l] - n;
			due = have < 32;
			x |= (uint64_t)(load32(p) & (0 - due)) << ((32 - have) & 63);
			p += 4 * due;
			bits[l] = x;
			nbits[l] = have + 32 * due;
			store32(s->symbol + WIRE_ROW * r + 4 * l,
				(a & 255) | (b & 255) << 8 | (c & 255) << 16 | (d & 255) << 24);
		}
	}
	for (size_t i = 0; i < 4 * rows; i++) {
		uint32_t m = 0;

		for (int j = 0; j < 32; j++)
			m |= (uint32_t)(s->symbol[32 * i + j] == book->escape) << j;
		s->escaped[i] = m;
	}
	for (int l = 0; l < WIRE_LANES; l++)
		all |= bits[l] | (nbits[l] ^ 32);
	s->good = all == 0 && p >= end;
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

const struct kernels kernels_scalar = {.name = "scalar",
				       .encode_lanes = encode_lanes,
				       .decode_lanes = decode_lanes,
				       KERNEL_LOOPS,
				       ROW_LOOPS,
				       TRUNCATE_LOOPS};
