/* coder.cuh - coded planes: a lane of the coder is a lane of a warp. docs/format.md, section 7. */
#ifndef CODEC_CODER_CUH
#define CODEC_CODER_CUH

#include "job.cuh"

#define STATE_NBYTES 22 /* u16 and 32 x 5 bits */

/*
 * Two symbols at a look-up, by the next 12 bits: symbols in the upper half, bits of both; or, where these are more, the
 * first's, and LONG. Made by all threads of a block, for all of its warps.
 */
#define PAIR_BITS 12
#define LONG 64u

DEVICE void fill_pairs(uint32_t *pair, const uint8_t *table)
{
	const uint8_t *length = table + TABLE_LENGTHS;

	for (uint32_t i = threadIdx.x; i < 1u << PAIR_BITS; i += blockDim.x) {
		uint32_t top = i >> (PAIR_BITS - 8), first = length[top];
		uint32_t next = (i << first & ((1u << PAIR_BITS) - 1)) >> (PAIR_BITS - 8), n = first + length[next];

		pair[i] = n <= PAIR_BITS ? (uint32_t)table[top] << 16 | (uint32_t)table[next] << 24 | n
					 : (uint32_t)table[top] << 16 | first | LONG;
	}
}

/* A coded plane on its way: the lane's next bits on top, 32 to 63 of them, a 1 that marks their end, and zeros. */
struct coded {
	uint64_t bits;
	const uint8_t *words; /* of the plane */
	uint32_t nwords, taken;
};

/* Words and lanes' states of the coded plane that begins at the cursor, which moves behind the words. */
static __device__ codec_status open_plane(cursor *c, coded *s, uint32_t lane)
{
	const uint8_t *p = here(c);
	uint32_t bit = 5 * lane, sum, from, nbytes, bad = 0;
	uint64_t tail = 0;

	if (left(c) < STATE_NBYTES)
		return CODEC_BAD_REGION;
	s->nwords = p[0] | p[1] << 8;
	s->taken = WIRE_LANES;
	/* five bits from the top; they end in the next byte if they do not end in this one */
	uint32_t two = (uint32_t)p[2 + bit / 8] << 8 | (bit % 8 > 3 ? p[3 + bit / 8] : 0);
	uint32_t t = two >> (11 - bit % 8) & 31;

	from = warp_scan(t, lane, &sum);
	nbytes = STATE_NBYTES + (sum + 7) / 8;
	if (left(c) < nbytes)
		return CODEC_BAD_REGION;
	for (uint32_t k = STATE_NBYTES + from / 8; k < STATE_NBYTES + from / 8 + 5; k++) /* 31 bits, from bit 7 on */
		tail = tail << 8 | (k < nbytes ? p[k] : 0);
	tail = t ? tail << (24 + from % 8) >> (64 - t) : 0;
	if (sum % 8)
		bad = (uint8_t)(p[nbytes - 1] << sum % 8);
	for (; nbytes % 4; nbytes++)
		if (nbytes >= left(c) || p[nbytes])
			return CODEC_BAD_REGION;
	if (bad || s->nwords > (left(c) - nbytes) / 4)
		return CODEC_BAD_REGION;
	s->words = p + nbytes;
	c->at += nbytes + 4 * s->nwords;
	if (s->nwords && !load32(s->words + 4 * (s->nwords - 1)))
		return CODEC_BAD_REGION;
	s->bits = (uint64_t)(lane < s->nwords ? load32(s->words + 4 * lane) : 0) << 32;
	s->bits |= (2 * tail + 1) << (31 - t);
	return CODEC_OK;
}

/* Four symbols of the lane. Without pairs one at a time. */
DEVICE uint32_t decode_quad(const uint32_t *pair, const uint8_t *table, uint64_t *bits)
{
	uint64_t x = *bits, y;

	if (pair) {
		uint32_t a = pair[x >> (64 - PAIR_BITS)], b;

		y = x << (a & 63);
		b = pair[y >> (64 - PAIR_BITS)];
		if (!((a | b) & LONG)) {
			*bits = y << (b & 63);
			return a >> 16 | (b & 0xffff0000u);
		}
	}
	uint32_t quad = 0;

	for (int k = 0; k < 32; k += 8) {
		uint32_t top = (uint32_t)(x >> 56);

		quad |= (uint32_t)table[top] << k;
		x <<= table[TABLE_LENGTHS + top];
	}
	*bits = x;
	return quad;
}

/* The next word to lanes that have fewer than 32 bits left. */
DEVICE void refill(coded *s, uint32_t lane)
{
	/* then the mark is bit 32 + d: the word goes where it is, and the mark to d */
	bool takes = (uint32_t)s->bits == 0;
	uint32_t taking = __ballot_sync(FULL, takes), place = s->taken + __popc(taking & ((1u << lane) - 1));

	if (takes) {
		uint32_t mark = (uint32_t)(s->bits >> 32),
			 word = place < s->nwords ? load32(s->words + 4ull * place) : 0;

		mark &= 0 - mark;
		s->bits += (uint64_t)mark * word * 2 + mark - ((uint64_t)mark << 32);
	}
	s->taken += __popc(taking);
}

/* How many of the four values of a lane and row are there, of k. */
DEVICE uint32_t there(uint32_t row, uint32_t lane, uint32_t k)
{
	uint32_t i = WIRE_ROW * row + 4 * lane;

	return i >= k ? 0 : k - i < 4 ? k - i : 4;
}

/*
 * The symbols of the next row, of k in all; *escapes: those that are there and are the escape. What stands in place of
 * values from k on is compared with what it must be: *bad.
 */
DEVICE uint32_t decode_row(coded *s, const uint32_t *pair, const uint8_t *table, uint32_t row, uint32_t k,
			   uint32_t lane, uint32_t *escapes, bool *bad)
{
	uint32_t quad = decode_quad(pair, table, &s->bits), mine = (1u << there(row, lane, k)) - 1;

	refill(s, lane);
	*bad |= (equal_bytes(quad, table[TABLE_PAD]) | mine) != 15;
	*escapes = equal_bytes(quad, table[TABLE_ESCAPE]) & mine;
	return quad;
}

/* After the last row: is nothing left over? */
DEVICE bool ends_well(const coded *s)
{
	return s->bits == 1ull << 31 && s->taken >= s->nwords;
}

#endif
