/*
 * coder/decode.cuh - decode coded planes, four symbols per lane at a time. Lane i of a warp decodes lane i of the
 * format's interleaved coder. docs/spec/format.md, section 7.
 */
#ifndef CODEC_CUDA_CODER_DECODE_CUH
#define CODEC_CUDA_CODER_DECODE_CUH

#include "common/job.cuh"

#define STATE_NBYTES 22 /* bytes of a coded plane's head: u16 number of words, 32 tail lengths of 5 bits */

/*
 * Decoding table of plane `plane`, shared by all warps of the CTA. It is indexed by the next `nbits` bits, and an
 * entry has two symbols. The entry's low bits: total length of both codes in bits. Bits 16 to 31: both symbols. LONG is
 * set if both codes together are longer than nbits; then the entry has only the first symbol. ESCAPED is set if one of
 * the symbols is the escape.
 */
#define LONG 64u
#define ESCAPED (3u << 7)
struct pairs {
	uint32_t *entry;
	uint32_t nbits, plane;
};

/*
 * Fill a decoding table of symbol pairs from the plane's table of single symbols (common/job.cuh). Called by all
 * threads of the CTA.
 */
DEVICE void fill_pairs(const pairs &to, const uint8_t *table)
{
	const uint8_t *length = table + TABLE_LENGTHS;
	uint32_t escape = table[TABLE_ESCAPE];

	for (uint32_t i = threadIdx.x; i < 1u << to.nbits; i += blockDim.x) {
		uint32_t top = i >> (to.nbits - 8), first = length[top];
		uint32_t next = (i << first & ((1u << to.nbits) - 1)) >> (to.nbits - 8), n = first + length[next];

		uint32_t a = table[top], b = table[next], some = a == escape || b == escape ? ESCAPED : 0;

		to.entry[i] = n <= to.nbits ? a << 16 | b << 24 | some | n : a << 16 | LONG | first;
	}
}

/*
 * State of a lane that decodes a plane. `bits`: the lane's bit reservoir: 32 to 63 bits at the upper end, then a 1 that
 * marks their end, then zeros.
 */
struct coded {
	uint64_t bits;
	const uint8_t *words; /* address of the plane's words, equal in all lanes */
	uint32_t nwords, taken;
};

/*
 * Read the head of a coded plane at the cursor, initialize the reservoirs of all lanes, and move the cursor past the
 * words.
 */
static __device__ codec_status open_plane(cursor *c, coded *s, uint32_t lane)
{
	const uint8_t *p = here(c);
	uint32_t bit = 5 * lane, sum, from, nbytes, bad = 0;
	uint64_t tail = 0;

	if (left(c) < STATE_NBYTES)
		return CODEC_BAD_REGION;
	s->nwords = p[0] | p[1] << 8;
	s->taken = WIRE_LANES;
	/* the tail length's five bits, which may extend into the next byte */
	uint32_t two = (uint32_t)p[2 + bit / 8] << 8 | (bit % 8 > 3 ? p[3 + bit / 8] : 0);
	uint32_t t = two >> (11 - bit % 8) & 31;

	from = warp_scan(t, lane, &sum);
	nbytes = STATE_NBYTES + (sum + 7) / 8;
	if (left(c) < nbytes)
		return CODEC_BAD_REGION;
	for (uint32_t k = STATE_NBYTES + from / 8; k < STATE_NBYTES + from / 8 + 5;
	     k++) /* a tail has up to 31 bits, and begins at any bit of a byte */
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

/* Four symbols that a lane has decoded, and the lane's bit reservoir after them. */
struct symbols {
	uint64_t bits;
	uint32_t quad;
	uint32_t escaped; /* not 0: one of the symbols is the escape */
};

/* Decode four symbols with one table look-up each. */
DEVICE_CALL symbols decode_singly(const uint8_t *table, uint64_t bits)
{
	symbols s = {bits, 0, ESCAPED};

	for (int k = 0; k < 32; k += 8) {
		uint32_t top = (uint32_t)(s.bits >> 56);

		s.quad |= (uint32_t)table[top] << k;
		s.bits <<= table[TABLE_LENGTHS + top];
	}
	return s;
}

/* Decode four symbols with two look-ups in the table of pairs. */
DEVICE symbols decode_pairs(const pairs &by, const uint8_t *table, uint64_t bits)
{
	uint32_t high = (uint32_t)(bits >> 32),
		 low = (uint32_t)bits; /* shifts use only the lower five bits of an entry: a number of bits */
	const uint32_t *pair = shared(by.entry);
	uint32_t a = pair[high >> (32 - by.nbits)];
	uint32_t high2 = __funnelshift_l(low, high, a), low2 = __funnelshift_l(0, low, a);
	uint32_t b = pair[high2 >> (32 - by.nbits)];

	if ((a | b) & LONG)
		return decode_singly(table, bits);
	return {(uint64_t)__funnelshift_l(low2, high2, b) << 32 | __funnelshift_l(0, low2, b),
		__byte_perm(a, b, 0x7632), (a | b) & ESCAPED};
}

/*
 * Append the next words of the plane to the reservoirs of lanes with fewer than 32 bits, one word each. These are the
 * lanes whose end mark is in the upper half of `bits`; the word is inserted before the mark.
 */
DEVICE void refill(coded *s, uint32_t lane)
{
	uint32_t high = (uint32_t)(s->bits >> 32), low = (uint32_t)s->bits;
	uint32_t taking = __ballot_sync(FULL, low == 0), place = s->taken + __popc(taking & ((1u << lane) - 1));
	/* the bit that marks the reservoir's end, if the lane needs a word; otherwise 0 */
	uint32_t mark = low ? 0 : high & (0 - high);
	uint32_t word = mark && place < s->nwords ? load32(s->words + 4ull * place) : 0;

	s->bits = ((uint64_t)(high ^ mark) << 32 | (low | mark)) + 2 * ((uint64_t)mark * word);
	s->taken += __popc(taking);
}

/* Return how many of the lane's four values in row `row` (128 values) exist in a plane of k values: 0 to 4. */
DEVICE uint32_t there(uint32_t row, uint32_t lane, uint32_t k)
{
	uint32_t i = WIRE_ROW * row + 4 * lane;

	return i >= k ? 0 : k - i < 4 ? k - i : 4;
}

/*
 * Decode the lane's four symbols of row `row` (128 symbols) of a plane of k symbols. by: table of symbol pairs; NULL:
 * decode symbols singly. *escapes: output, mask of the symbols (other than padding) that are the escape. *bad is set if
 * a symbol after the k-th is not the padding symbol.
 */
DEVICE uint32_t decode_row(coded *s, const pairs *by, const uint8_t *table, uint32_t row, uint32_t k, uint32_t lane,
			   uint32_t *escapes, bool *bad)
{
	symbols of = by ? decode_pairs(*by, table, s->bits) : decode_singly(table, s->bits);
	uint32_t mine = (1u << there(row, lane, k)) - 1;

	s->bits = of.bits;
	refill(s, lane);
	*bad |= (equal_bytes(of.quad, table[TABLE_PAD]) | mine) != 15;
	*escapes = equal_bytes(of.quad, table[TABLE_ESCAPE]) & mine;
	return of.quad;
}

/* Return true if, after the last row, the plane's words are consumed and the lane's reservoir has exactly 32 zeros. */
DEVICE bool ends_well(const coded *s)
{
	return s->bits == 1ull << 31 && s->taken >= s->nwords;
}

#endif
