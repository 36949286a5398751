/* encode_coder.cuh - a plane through the coder: a lane of the coder is a lane of a warp. docs/format.md, section 7. */
#ifndef CODEC_ENCODE_CODER_CUH
#define CODEC_ENCODE_CODER_CUH

#include "exact/choose.h"
#include "planes.cuh"

/* Words that k symbols become at most, each lane's first one included. */
#define WORDS_ROOM ((1u << WIRE_MAX_BLOCK_LOG2) / 4 + 2 * WIRE_LANES)

/* Bytes between memory at any addresses; a word at a time where words are. */
static __device__ void copy_bytes(uint8_t *to, const uint8_t *from, uint64_t n, uint32_t lane)
{
	uint64_t whole = ((uint64_t)to | (uint64_t)from) % 4 ? 0 : n / 4;

	for (uint64_t i = lane; i < whole; i += 32)
		((uint32_t *)to)[i] = ((const uint32_t *)from)[i];
	for (uint64_t i = 4 * whole + lane; i < n; i += 32)
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

/* A symbol's code, whether it is an escape, bits of the code. */
#define CODE(entry) ((entry) >> 8)
#define CODE_ESCAPES(entry) ((entry) >> 7 & 1)
#define CODE_LENGTH(entry) ((entry) & 15)

/* The job that a block of threads has to do, with such codes for `planes` planes, which are in shared memory, too. */
DEVICE const job &share_coding(const codec_view *view, const uint8_t *memory, uint32_t *codes, uint32_t planes)
{
	const job &j = share_job(view, memory, codes);

	for (uint32_t i = threadIdx.x; i < 256 * planes; i += blockDim.x)
		if (j.v.coded >> i / 256 & 1) {
			const uint8_t *table = table_of(&j, i / 256);

			codes[i] = (uint32_t)table[i % 256] << 8 | table[TABLE_LENGTHS + i % 256];
		}
	__syncthreads();
	return j;
}

/* A lane's bits, the next ones to be decoded on top, 32 to 63 of them, right-justified. */
struct coding {
	uint64_t bits;
	uint32_t have;
};

/*
 * Four symbols in front of the lane's bits. The words that lanes give away go below words[*at]. Returns which of the
 * four are escapes.
 */
DEVICE uint32_t encode_quad(const uint32_t *codes, uint32_t quad, coding *s, uint32_t *words, uint32_t *at,
			    uint32_t lane)
{
	uint32_t a = codes[quad & 255], b = codes[quad >> 8 & 255], c = codes[quad >> 16 & 255], d = codes[quad >> 24];
	uint32_t lower = CODE_LENGTH(c) + CODE_LENGTH(d), n = CODE_LENGTH(a) + CODE_LENGTH(b) + lower;
	uint32_t upper = CODE(a) << CODE_LENGTH(b) | CODE(b), four = CODE(c) << CODE_LENGTH(d) | CODE(d);
	uint32_t giving = __ballot_sync(FULL, s->have + n >= 64);

	*at -= __popc(giving);
	if (giving >> lane & 1) {
		words[*at + __popc(giving & ((1u << lane) - 1))] = (uint32_t)s->bits;
		s->bits >>= 32;
		s->have -= 32;
	}
	s->bits |= (uint64_t)(upper << lower | four) << s->have;
	s->have += n;
	return CODE_ESCAPES(a) | CODE_ESCAPES(b) << 1 | CODE_ESCAPES(c) << 2 | CODE_ESCAPES(d) << 3;
}

/* The same, without coding them, of the first n. */
DEVICE uint32_t escapes_of(const uint32_t *codes, uint32_t quad, uint32_t n)
{
	uint32_t some = 0;

	for (uint32_t i = 0; i < n; i++)
		some |= CODE_ESCAPES(codes[quad >> 8 * i & 255]) << i;
	return some;
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
 * Code k symbols of plane p. They come from quad_of(r), four of row r, the last row first; `symbol`, memory for whole
 * rows, keeps those that have escapes: literals are symbols' bytes, or lie in `wide`. Returns how many bytes that
 * takes, which go to place(bytes); or 0 if they are more than `most`, or have no place. `words`: memory for WORDS_ROOM.
 */
template <class F, class G>
static __device__ uint32_t encode_quads(const job *j, uint32_t p, F quad_of, uint32_t *symbol, uint32_t k,
					uint32_t most, const uint16_t *wide, uint32_t *words, G place, uint32_t lane)
{
	const uint32_t *codes = j->codes + 256 * p, pad = table_of(j, p)[TABLE_PAD] * ONES;
	uint32_t rows = (k + WIRE_ROW - 1) / WIRE_ROW, at = WORDS_ROOM, nliterals = 0, nwords, sum, some, size;
	uint32_t kept = 0; /* bit i: row 32 i + lane */
	coding s = {0, 32};

	for (uint32_t r = rows; r-- > 0;) {
		uint32_t n = there(r, lane, k), quad = quad_of(r);
		uint32_t whole = n < 4 ? keep_bytes(quad, n) | (pad & ~keep_bytes(FULL, n)) : quad;
		uint32_t escapes = encode_quad(codes, whole, &s, words, &at, lane) & ((1u << n) - 1);

		nliterals += __popc(escapes);
		if (__any_sync(FULL, escapes != 0)) {
			symbol[32 * r + lane] = quad;
			kept |= (r % 32 == lane ? 1u : 0) << r / 32;
		}
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
	uint8_t *out = place(size + 4 * nwords + nliterals);

	if (!out)
		return 0;
	for (uint32_t i = STATE_NBYTES + (sum + 7) / 8 + lane; i < size; i += 32)
		out[i] = 0;
	if (lane < 2)
		out[lane] = (uint8_t)(nwords >> 8 * lane);
	put_tails(out, t, (uint32_t)(s.bits & ((1ull << t) - 1)), from, sum, lane);
	copy_bytes(out + size, (const uint8_t *)(words + at), 4 * nwords, lane);
	size += 4 * nwords;
	for (uint32_t r = 0; nliterals && r < rows; r++) {
		if (!(__shfl_sync(FULL, kept, (int)(r % 32)) >> r / 32 & 1))
			continue;
		uint32_t quad = symbol[32 * r + lane], mine = escapes_of(codes, quad, there(r, lane, k));
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

/* The same of symbols that are in memory. */
DEVICE_CALL uint32_t encode_plane(const job *j, uint32_t p, uint32_t *symbol, uint32_t k, uint32_t most,
				  const uint16_t *wide, uint32_t *words, uint8_t *out, uint32_t lane)
{
	return encode_quads(
		j, p, [&](uint32_t r) { return symbol[32 * r + lane]; }, symbol, k, most, wide, words,
		[&](uint32_t) { return out; }, lane);
}

#endif
