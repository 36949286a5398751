/* coder/encode.cuh - a plane through the coder: a lane of the coder is a lane of a warp. docs/format.md, section 7. */
#ifndef CODEC_CUDA_CODER_ENCODE_CUH
#define CODEC_CUDA_CODER_ENCODE_CUH

#include "exact/choose.h"
#include "coder/plane.cuh"

/* Words that k symbols become at most, each lane's first one included. */
#define WORDS_ROOM ((1u << WIRE_MAX_BLOCK_LOG2) / 4 + 2 * WIRE_LANES)

/* Bytes between memory at any addresses, words of where they go at a time. */
static __device__ void copy_bytes(uint8_t *to, const uint8_t *from, uint64_t n, uint32_t lane)
{
	uint64_t skip = (4 - (uint64_t)to % 4) % 4, whole = n > skip ? (n - skip) / 4 : 0;
	uint32_t *words = global((uint32_t *)(to + skip));

	for (uint64_t i = lane; i < whole; i += 32)
		words[i] = load32(global(from) + skip + 4 * i);
	if (lane < skip && lane < n)
		to[lane] = from[lane];
	for (uint64_t i = skip + 4 * whole + lane; i < n; i += 32)
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

/* A symbol's code, on top of a word; whether it is an escape; how many bits the code has. */
#define CODE_ESCAPED (3u << 16)
#define CODE_LENGTH(entry) ((entry) & 15)

/* The job that a block of threads has to do, with such codes for `planes` planes, which are in shared memory, too. */
DEVICE const job &share_coding(const codec_view *view, const uint8_t *memory, uint32_t *codes, uint32_t planes)
{
	const job &j = share_job(view, memory, codes);

	for (uint32_t i = threadIdx.x; i < 256 * planes; i += blockDim.x)
		if (j.v.coded >> i / 256 & 1) {
			const uint8_t *table = table_of(&j, i / 256);

			uint32_t length = table[TABLE_LENGTHS + i % 256];

			codes[i] = (uint32_t)table[i % 256] << (32 - (length & 15)) | (length >> 7) * CODE_ESCAPED |
				   (length & 15);
		}
	__syncthreads();
	return j;
}

/*
 * A plane that is being coded, a warp's, the last row first. What comes out goes down from the end of its memory: words
 * that lanes give away, and literals, which are two bytes if they are `wide`.
 */
struct coding {
	uint32_t low, high; /* the lane's bits, the next ones to be decoded on top, right-justified */
	uint32_t more;      /* by how many they are more than 32: its lower five bits */
	const uint32_t *codes;
	uint32_t *words, nwords;
	uint8_t *literals;
	uint32_t nliterals;
	bool wide;
};

/*
 * `words`: memory for WORDS_ROOM; `literals`: for PLANE_ROOM of them. Wide ones are there, one a symbol, and make room
 * as their rows are coded.
 */
DEVICE coding begin_plane(const job *j, uint32_t p, uint32_t *words, uint8_t *literals, bool wide)
{
	return {0, 0, 0, j->codes + 256 * p, words, 0, literals, 0, wide};
}

/* Literals of row r, of the first n of a lane's four symbols. */
DEVICE void put_literals(coding *s, uint32_t quad, uint32_t escapes, uint32_t r, uint32_t lane)
{
	uint32_t total, value[4], at = warp_scan(__popc(escapes), lane, &total);
	uint16_t *wide = (uint16_t *)s->literals;

	for (uint32_t i = 0; i < 4; i++)
		value[i] = s->wide && escapes >> i & 1 ? wide[WIRE_ROW * r + 4 * lane + i] : quad >> 8 * i;
	__syncwarp();
	s->nliterals += total;
	at += PLANE_ROOM - s->nliterals;
	for (uint32_t i = 0; i < 4; i++)
		if (!(escapes >> i & 1))
			continue;
		else if (s->wide)
			wide[at++] = (uint16_t)value[i];
		else
			s->literals[at++] = (uint8_t)value[i];
}

/* Four symbols in front of the lane's bits; n of them count, of row r. Rows are coded the last one first. */
DEVICE void code_quad(coding *s, uint32_t quad, uint32_t r, uint32_t n, uint32_t lane)
{
	const uint32_t *codes = shared(s->codes);
	uint32_t a = codes[__byte_perm(quad, 0, 0x4440)], b = codes[__byte_perm(quad, 0, 0x4441)];
	uint32_t c = codes[__byte_perm(quad, 0, 0x4442)], d = codes[__byte_perm(quad, 0, 0x4443)];
	/* shifts by entries take their lower five bits; a code comes down from the top */
	uint32_t four = __funnelshift_l(a, 0, a), more = s->more + a + b + c + d;

	four = __funnelshift_l(b, four, b);
	four = __funnelshift_l(c, four, c);
	four = __funnelshift_l(d, four, d);

	uint32_t next = s->high | __funnelshift_l(0, four, s->more), over = __funnelshift_l(four, 0, s->more);
	bool gives = (int)((more ^ s->more) << 26) < 0;
	uint32_t giving = __ballot_sync(FULL, gives);

	s->nwords += __popc(giving);
	if (gives)
		global(s->words)[WORDS_ROOM - s->nwords + __popc(giving & ((1u << lane) - 1))] = s->low;
	s->low = gives ? next : s->low;
	s->high = gives ? over : next;
	s->more = more;
	if (__any_sync(FULL, ((a | b | c | d) & CODE_ESCAPED) != 0))
		put_literals(s, quad,
			     ((a & CODE_ESCAPED ? 1 : 0) | (b & CODE_ESCAPED ? 2 : 0) | (c & CODE_ESCAPED ? 4 : 0) |
			      (d & CODE_ESCAPED ? 8 : 0)) &
				     ((1u << n) - 1),
			     r, lane);
}

/* The first n of four symbols, and in place of the others those that are there for coding. */
DEVICE uint32_t filled(uint32_t quad, uint32_t n, uint32_t pad)
{
	return n < 4 ? keep_bytes(quad, n) | (pad & ~keep_bytes(FULL, n)) : quad;
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
 * A plane all of whose symbols have been coded. Returns how many bytes it takes, which go to place(bytes); or 0 if they
 * are more than `most`, or have no place.
 */
template <class G> static __device__ uint32_t end_plane(const coding &s, uint32_t most, G place, uint32_t lane)
{
	uint32_t t = s.more & 31, sum, some, from = warp_scan(t, lane, &sum), nwords = s.nwords + WIRE_LANES;
	uint32_t *words = s.words + WORDS_ROOM - nwords, width = s.wide ? 2 : 1;
	uint32_t size = (STATE_NBYTES + (sum + 7) / 8 + 3) / 4 * 4;

	words[lane] = __funnelshift_r(s.low, s.high, t);
	__syncwarp();
	do { /* zeros at the end are left out */
		some = __ballot_sync(FULL, lane < nwords && words[nwords - 1 - lane] != 0);
		nwords -= some ? (uint32_t)__ffs((int)some) - 1 : nwords < 32 ? nwords : 32;
	} while (!some && nwords);
	uint32_t nbytes = size + 4 * nwords + width * s.nliterals;
	uint8_t *out = nbytes <= most ? place(nbytes) : NULL;

	if (!out)
		return 0;
	for (uint32_t i = STATE_NBYTES + (sum + 7) / 8 + lane; i < size; i += 32)
		out[i] = 0;
	if (lane < 2)
		out[lane] = (uint8_t)(nwords >> 8 * lane);
	put_tails(out, t, s.low & ((1u << t) - 1), from, sum, lane);
	copy_bytes(out + size, (const uint8_t *)words, 4 * nwords, lane);
	copy_bytes(out + size + 4 * nwords, s.literals + width * (PLANE_ROOM - s.nliterals), width * s.nliterals, lane);
	return nbytes;
}

/* All of a plane of k symbols that are in memory. */
DEVICE_CALL uint32_t encode_plane(const job *j, uint32_t p, const uint32_t *symbol, uint32_t k, uint32_t most,
				  uint32_t *words, uint8_t *literals, bool wide, uint8_t *out, uint32_t lane)
{
	const uint32_t pad = table_of(j, p)[TABLE_PAD] * ONES;
	coding s = begin_plane(j, p, words, literals, wide);

	for (uint32_t r = (k + WIRE_ROW - 1) / WIRE_ROW; r-- > 0;) {
		uint32_t n = there(r, lane, k), quad = symbol[32 * r + lane];

		code_quad(&s, filled(quad, n, pad), r, n, lane);
	}
	return end_plane(s, most, [&](uint32_t) { return out; }, lane);
}

#endif
