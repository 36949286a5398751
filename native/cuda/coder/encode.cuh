/*
 * coder/encode.cuh - entropy-code planes, four symbols per lane at a time. Lane i of a warp writes lane i of the
 * format's interleaved coder. docs/spec/format.md, section 7.
 */
#ifndef CODEC_CUDA_CODER_ENCODE_CUH
#define CODEC_CUDA_CODER_ENCODE_CUH

#include "exact/choose.h"
#include "coder/plane.cuh"

/* Upper bound of the number of words in a coded plane, including the first word of each lane. */
#define WORDS_ROOM ((1u << WIRE_MAX_BLOCK_LOG2) / 4 + 2 * WIRE_LANES)

/* Pad a region of `at` bytes with zeros to a multiple of WIRE_ALIGN bytes. Return the padded size in bytes. */
DEVICE uint32_t end_region(uint8_t *region, uint32_t at, uint32_t lane)
{
	uint32_t size = (at + WIRE_ALIGN - 1) / WIRE_ALIGN * WIRE_ALIGN;

	if (at + lane < size)
		region[at + lane] = 0;
	__syncwarp();
	return size;
}

/* Store x as a little-endian word at any address. Called by one warp. */
DEVICE void put32(uint8_t *to, uint32_t x, uint32_t lane)
{
	if (lane < 4)
		to[lane] = (uint8_t)(x >> 8 * lane);
}

/*
 * Entry of a code table: the code, left-justified; CODE_ESCAPED if the symbol is escaped; the code's length in bits in
 * bits 0 to 3.
 */
#define CODE_ESCAPED (3u << 16)
#define CODE_LENGTH(entry) ((entry) & 15)

/* Return the CTA's job in shared memory, and fill code tables for `planes` planes at `codes` in shared memory. */
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
 * State of a lane that encodes a plane. Rows of 128 symbols are encoded from the last to the first, and bits are
 * prepended, so that the decoder reads them in order. Words and literals are written from the end of their buffers
 * downwards. near: end of the words if all of them lie in shared memory, with room for WIRE_LANES more words before
 * them; else NULL. wide: true if literals have two bytes.
 */
struct coding {
	/* high:low has the lane's bits, right-justified; the decoder reads the highest bit first */
	uint32_t low, high;
	uint32_t more; /* number of these bits minus 32 */
	const uint32_t *codes;
	uint32_t *words, *near, nwords;
	uint8_t *literals;
	uint32_t nliterals;
	bool wide;
};

/*
 * Begin to encode plane p. words: buffer for WORDS_ROOM words. literals: buffer for PLANE_ROOM literals. If `wide`, the
 * buffer contains the literals of all symbols on entry, two bytes each; each row is read before output can overwrite
 * it.
 */
DEVICE coding begin_plane(const job *j, uint32_t p, uint32_t *words, uint8_t *literals, bool wide)
{
	return {0, 0, 0, j->codes + 256 * p, words, NULL, 0, literals, 0, wide};
}

/*
 * Write the literals of the escaped symbols in row r (128 symbols). escapes: mask of the lane's symbols that are
 * escaped.
 */
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

/*
 * Prepend the codes of the lane's four symbols of row r (128 symbols). n: how many of the four exist; the others are
 * padding, which has no literals. Must be called with descending r.
 */
DEVICE void code_quad(coding *s, uint32_t quad, uint32_t r, uint32_t n, uint32_t lane)
{
	const uint32_t *codes = shared(s->codes);
	uint32_t a = codes[__byte_perm(quad, 0, 0x4440)], b = codes[__byte_perm(quad, 0, 0x4441)];
	uint32_t c = codes[__byte_perm(quad, 0, 0x4442)], d = codes[__byte_perm(quad, 0, 0x4443)];
	/*
	 * shifts use only the lower five bits of an entry, which are the code's length; funnel shifts prepend the
	 * left-justified codes
	 */
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

/* Return the four symbols of a quad, with all but the first n replaced by the padding symbol. */
DEVICE uint32_t filled(uint32_t quad, uint32_t n, uint32_t pad)
{
	return n < 4 ? keep_bytes(quad, n) | (pad & ~keep_bytes(FULL, n)) : quad;
}

/*
 * Write the head of a coded plane after its first two bytes: tail lengths, then tails. t, tail: length in bits and
 * value of this lane's tail. from: total bits of the tails of lower lanes. sum: total bits of all tails.
 */
static __device__ void put_tails(uint8_t *p, uint32_t t, uint32_t tail, uint32_t from, uint32_t sum, uint32_t lane)
{
	for (uint32_t k = 0; k < 5 + (sum + 31) / 32;
	     k++) { /* word k: words 0 to 4 contain lengths, later words tails */
		int over = (int)(32 * (k < 5 ? k + 1 : k - 4)) - (int)(k < 5 ? 5 * lane + 5 : from + t);
		uint32_t field = k < 5 ? t : tail, part = 0;

		if (over > -32 && over < 32)
			part = over < 0 ? field >> -over : field << over;
		part = __reduce_or_sync(FULL, part);
		if (lane < 4 && (k < 5 || 4 * (k - 5) + lane < (sum + 7) / 8))
			p[2 + 4 * k + lane] = (uint8_t)(part >> (24 - 8 * lane));
	}
}

/* Sizes of a coded plane, in bits, words and bytes. */
struct coded_sizes {
	uint32_t sum, from;      /* total bits of all tails, and of the tails of lower lanes */
	uint32_t nwords, nbytes; /* number of words to write (zeros at the end are omitted); size of the plane */
};

/* Return the number of bytes of a coded plane before its words. sum: total bits of all tails. */
DEVICE uint32_t lead_nbytes(uint32_t sum)
{
	return (STATE_NBYTES + (sum + 7) / 8 + 3) / 4 * 4;
}

/*
 * Return the address of a plane's words. The first WIRE_LANES words are reserved for bits that are still in the lanes'
 * registers.
 */
DEVICE uint32_t *words_of(const coding &s)
{
	return (s.near ? s.near : s.words + WORDS_ROOM) - (s.nwords + WIRE_LANES);
}

/* Finish a plane after all its rows were encoded. Return its sizes. */
static __device__ coded_sizes close_plane(const coding &s, uint32_t lane)
{
	coded_sizes o;
	uint32_t t = s.more & 31, some, nwords = s.nwords + WIRE_LANES, *words = words_of(s);

	o.from = warp_scan(t, lane, &o.sum);
	words[lane] = __funnelshift_r(s.low, s.high, t);
	__syncwarp();
	do { /* omit words at the end that are 0 */
		some = __ballot_sync(FULL, lane < nwords && words[nwords - 1 - lane] != 0);
		nwords -= some ? (uint32_t)__ffs((int)some) - 1 : nwords < 32 ? nwords : 32;
	} while (!some && nwords);
	o.nwords = nwords;
	o.nbytes = lead_nbytes(o.sum) + 4 * nwords + (s.wide ? 2 : 1) * s.nliterals;
	return o;
}

/* Write a plane that close_plane has finished to `out`, at any address. */
static __device__ void write_plane(const coding &s, const coded_sizes &o, uint8_t *out, uint32_t lane)
{
	const uint32_t t = s.more & 31, width = s.wide ? 2 : 1, size = lead_nbytes(o.sum);

	for (uint32_t i = STATE_NBYTES + (o.sum + 7) / 8 + lane; i < size; i += 32)
		out[i] = 0;
	if (lane < 2)
		out[lane] = (uint8_t)(o.nwords >> 8 * lane);
	put_tails(out, t, s.low & ((1u << t) - 1), o.from, o.sum, lane);
	copy_bytes<false>(out + size, (const uint8_t *)words_of(s), 4 * o.nwords, lane);
	copy_bytes(out + size + 4 * o.nwords, s.literals + width * (PLANE_ROOM - s.nliterals), width * s.nliterals,
		   lane);
}

/*
 * Finish a plane after all its rows were encoded, and write its nbytes bytes to the address that place(nbytes) returns.
 * Return nbytes; 0 if nbytes is more than `most`, or place() returns NULL.
 */
template <class G> static __device__ uint32_t end_plane(const coding &s, uint32_t most, G place, uint32_t lane)
{
	const coded_sizes o = close_plane(s, lane);
	uint8_t *out = o.nbytes <= most ? place(o.nbytes) : NULL;

	if (!out)
		return 0;
	write_plane(s, o, out, lane);
	return o.nbytes;
}

/* Encode all rows of a plane of k symbols, and return the state for end_plane. Arguments: see begin_plane. */
static __device__ coding code_rows(const job *j, uint32_t p, const uint32_t *symbol, uint32_t k, uint32_t *words,
				   uint8_t *literals, bool wide, uint32_t lane)
{
	const uint32_t pad = table_of(j, p)[TABLE_PAD] * ONES;
	coding s = begin_plane(j, p, words, literals, wide);

	for (uint32_t r = (k + WIRE_ROW - 1) / WIRE_ROW; r-- > 0;) {
		uint32_t n = there(r, lane, k), quad = symbol[32 * r + lane];

		code_quad(&s, filled(quad, n, pad), r, n, lane);
	}
	return s;
}

/* Encode a plane of k symbols. Return the number of bytes written to `out`; 0 if it would be more than `most`. */
DEVICE_CALL uint32_t encode_plane(const job *j, uint32_t p, const uint32_t *symbol, uint32_t k, uint32_t most,
				  uint32_t *words, uint8_t *literals, bool wide, uint8_t *out, uint32_t lane)
{
	return end_plane(
		code_rows(j, p, symbol, k, words, literals, wide, lane), most, [&](uint32_t) { return out; }, lane);
}

#endif
