/* encode_coder.cuh - a plane through the coder: a lane of the coder is a lane of a warp. docs/format.md, section 7. */
#ifndef CODEC_ENCODE_CODER_CUH
#define CODEC_ENCODE_CODER_CUH

#include "exact/choose.h"
#include "planes.cuh"

/* Words that k symbols become at most, each lane's first one included. */
#define WORDS_ROOM ((1u << WIRE_MAX_BLOCK_LOG2) / 4 + 2 * WIRE_LANES)

/* Bytes between memory at any addresses. */
static __device__ void copy_bytes(uint8_t *to, const uint8_t *from, uint64_t n, uint32_t lane)
{
	for (uint64_t i = lane; i < n; i += 32)
		to[i] = from[i];
}

/* A region of `at` bytes filled up with zeros: its size. */
DEVICE uint32_t end_region(uint8_t *region, uint32_t at, uint32_t lane)
{
	uint32_t size = (at + WIRE_ALIGN - 1) / WIRE_ALIGN * WIRE_ALIGN;

	if (at + lane < size)
		region[at + lane] = 0;
	__syncwarp();
	return size;
}

/* A word at the beginning of a region or of what it holds. */
DEVICE void put32(uint8_t *to, uint32_t x, uint32_t lane)
{
	if (lane < 4)
		to[lane] = (uint8_t)(x >> 8 * lane);
}

/* Escapes among a quad, by the lengths of codes, whose bit 7 says so. */
DEVICE uint32_t escapes_of(const uint8_t *table, uint32_t quad, uint32_t n)
{
	uint32_t some = 0;

	for (uint32_t i = 0; i < n; i++)
		some |= (uint32_t)table[TABLE_LENGTHS + (quad >> 8 * i & 255)] >> 7 << i;
	return some;
}

/* A lane's bits, the next ones to be decoded on top, 32 to 63 of them, right-justified. */
struct coding {
	uint64_t bits;
	uint32_t have;
};

/* Four symbols in front of the lane's bits. The words that lanes give away go below words[*at]. */
DEVICE void encode_quad(const uint8_t *table, uint32_t quad, coding *s, uint32_t *words, uint32_t *at, uint32_t lane)
{
	const uint8_t *length = table + TABLE_LENGTHS;
	uint32_t a = quad & 255, b = quad >> 8 & 255, c = quad >> 16 & 255, d = quad >> 24;
	uint32_t lb = length[b] & 15, ld = length[d] & 15, lower = (length[c] & 15) + ld;
	uint32_t n = (length[a] & 15) + lb + lower;
	uint32_t codes = ((uint32_t)table[a] << lb | table[b]) << lower | (uint32_t)table[c] << ld | table[d];
	uint32_t giving = __ballot_sync(FULL, s->have + n >= 64);

	*at -= __popc(giving);
	if (giving >> lane & 1) {
		words[*at + __popc(giving & ((1u << lane) - 1))] = (uint32_t)s->bits;
		s->bits >>= 32;
		s->have -= 32;
	}
	s->bits |= (uint64_t)codes << s->have;
	s->have += n;
}

/* Bits before the words, from the second byte on: tails' lengths, tails. */
static __device__ void put_tails(uint8_t *p, uint32_t t, uint32_t tail, uint32_t from, uint32_t sum, uint32_t lane)
{
	for (uint32_t k = 0; k < 5 + (sum + 31) / 32; k++) { /* words from the top: 5 of lengths, then those of tails */
		int over = (int)(32 * (k < 5 ? k + 1 : k - 4)) - (int)(k < 5 ? 5 * lane + 5 : from + t);
		uint32_t field = k < 5 ? t : tail, part = 0;

		if (over > -32 && over < 32)
			part = over < 0 ? field >> -over : field << over;
		part = __reduce_or_sync(FULL, part);
		if (lane < 4 && (k < 5 || 4 * (k - 5) + lane < (sum + 7) / 8))
			p[2 + 4 * k + lane] = (uint8_t)(part >> (24 - 8 * lane));
	}
}

/*
 * Code k symbols of plane p, in memory for whole rows, to `out`; literals are symbols' bytes. Returns how many bytes
 * that takes, or 0 if more than `most`, and then writes nothing. `words`: memory for WORDS_ROOM.
 */
static __device__ uint32_t encode_plane(const job *j, uint32_t p, const uint32_t *symbol, uint32_t k, uint32_t most,
					const uint16_t *wide, uint32_t *words, uint8_t *out, uint32_t lane)
{
	const uint8_t *table = table_of(j, p);
	uint32_t rows = (k + WIRE_ROW - 1) / WIRE_ROW, at = WORDS_ROOM, nliterals = 0, nwords, sum, some, size;
	coding s = {0, 32};

	for (uint32_t r = rows; r-- > 0;) {
		uint32_t n = there(r, lane, k), quad = symbol[32 * r + lane];

		nliterals += __popc(escapes_of(table, quad, n));
		quad = n < 4 ? keep_bytes(quad, n) | (table[TABLE_PAD] * ONES & ~keep_bytes(FULL, n)) : quad;
		encode_quad(table, quad, &s, words, &at, lane);
	}
	uint32_t t = s.have - 32, from = warp_scan(t, lane, &sum);

	at -= WIRE_LANES;
	words[at + lane] = (uint32_t)(s.bits >> t);
	__syncwarp();
	nwords = WORDS_ROOM - at;
	do { /* zeros at the end are left out */
		some = __ballot_sync(FULL, lane < nwords && words[at + nwords - 1 - lane] != 0);
		nwords -= some ? (uint32_t)__ffs((int)some) - 1 : nwords < 32 ? nwords : 32;
	} while (!some && nwords);
	nliterals = (uint32_t)warp_sum(nliterals) * (wide ? 2 : 1);
	size = (STATE_NBYTES + (sum + 7) / 8 + 3) / 4 * 4;
	if (size + 4 * nwords + nliterals > most)
		return 0;
	for (uint32_t i = STATE_NBYTES + (sum + 7) / 8 + lane; i < size; i += 32)
		out[i] = 0;
	if (lane < 2)
		out[lane] = (uint8_t)(nwords >> 8 * lane);
	put_tails(out, t, (uint32_t)(s.bits & ((1ull << t) - 1)), from, sum, lane);
	copy_bytes(out + size, (const uint8_t *)(words + at), 4 * nwords, lane);
	size += 4 * nwords;
	for (uint32_t r = 0; nliterals && r < rows; r++) {
		uint32_t quad = symbol[32 * r + lane], mine = escapes_of(table, quad, there(r, lane, k));

		if (!__any_sync(FULL, mine != 0))
			continue;
		uint32_t before = warp_scan(__popc(mine), lane, &some);
		uint8_t *to = out + size + before * (wide ? 2 : 1);

		for (uint32_t i = 0; i < 4; i++) {
			if (!(mine >> i & 1))
				continue;
			if (wide) {
				uint16_t literal = wide[WIRE_ROW * r + 4 * lane + i];

				*to++ = (uint8_t)literal;
				*to++ = (uint8_t)(literal >> 8);
			} else {
				*to++ = (uint8_t)(quad >> 8 * i);
			}
		}
		size += some * (wide ? 2 : 1);
	}
	return size;
}

#endif
