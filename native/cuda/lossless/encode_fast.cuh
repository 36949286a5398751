/*
 * lossless/encode_fast.cuh - encode whole rows of 128 floats if regions contain only a coded plane 0, as in nearly all
 * large tensors. docs/spec/encoder.md, section 6.
 *
 * The loop has few instructions and 80 registers, so that 24 warps are resident on a multiprocessor and hide each
 * other's latencies.
 */
#ifndef CODEC_CUDA_LOSSLESS_ENCODE_FAST_CUH
#define CODEC_CUDA_LOSSLESS_ENCODE_FAST_CUH

#include "coder/encode.cuh"
#include "common/checksum.cuh"
#include "frame/encode.cuh"
#include "lossless/fast.cuh"
#include "lossless/split.cuh"

/*
 * Number of words of a coded plane that a warp buffers in shared memory: enough for a block of 16,384 values at 2.7
 * bits per symbol. When the buffer is full, its words are moved to scratch memory.
 */
#define NEAR_WORDS 1536

/* Tables of a CTA, and words of its warps, in shared memory. key: keys of checksums. */
template <int SIZE> struct fast_codes {
	uint32_t codes[SIZE * 256], key[WIRE_CHUNK_WORDS], words[WARPS][NEAR_WORDS];
};

/*
 * Write the literals of a row of 128 symbols before the `nliterals` literals of later rows, as put_literals does.
 * Return the number of literals of this and all later rows.
 */
static __device__ __noinline__ uint32_t put_rare(uint8_t *literals, uint32_t nliterals, uint32_t quad, uint32_t a,
						 uint32_t b, uint32_t c, uint32_t d, uint32_t lane)
{
	const uint32_t below = (1u << lane) - 1;
	uint32_t escapes = (a & CODE_ESCAPED ? 1 : 0) | (b & CODE_ESCAPED ? 2 : 0) | (c & CODE_ESCAPED ? 4 : 0) |
			   (d & CODE_ESCAPED ? 8 : 0);
	const uint32_t count = __popc(escapes), bit0 = __ballot_sync(FULL, count & 1);
	const uint32_t bit1 = __ballot_sync(FULL, count & 2), bit2 = __ballot_sync(FULL, count & 4);
	uint32_t at = __popc(bit0 & below) + 2 * __popc(bit1 & below) + 4 * __popc(bit2 & below);

	nliterals += __popc(bit0) + 2 * __popc(bit1) + 4 * __popc(bit2);
	at += PLANE_ROOM - nliterals;
	for (; escapes; escapes &= escapes - 1)
		literals[at++] = (uint8_t)(quad >> 8 * (__ffs((int)escapes) - 1));
	return nliterals;
}

/* Move a warp's nwords words, which end at `near` in shared memory, to global memory, where they end at `far`. */
DEVICE void move_words(const uint32_t *near, uint32_t *far, uint32_t nwords, uint32_t lane)
{
	__syncwarp();
#pragma unroll 1
	for (uint32_t i = 1 + lane; i <= nwords; i += 32)
		*(global(far) - i) = *(near - i);
	__syncwarp();
}

/* Return the code table's entry of the symbol in bits 7 to 14 of x. All other bits of x must be 0. */
DEVICE uint32_t fast_code(const uint32_t *codes, uint32_t x)
{
	return *(const uint32_t *)((const uint8_t *)codes + (x >> 5));
}

/*
 * Split four values: store the upper 16 bits of each in `half`, two per word, and the words of planes 2 and above in
 * the last argument.
 */
DEVICE void fast_halves(uint2 x, uint32_t half[2], uint32_t *)
{
	half[0] = x.x, half[1] = x.y;
}
DEVICE void fast_halves(uint4 x, uint32_t half[2], uint32_t *plane)
{
	const uint32_t low[2] = {__byte_perm(x.x, x.y, 0x5410), __byte_perm(x.z, x.w, 0x5410)};

	half[0] = __byte_perm(x.x, x.y, 0x7632), half[1] = __byte_perm(x.z, x.w, 0x7632);
	plane[0] = __byte_perm(low[0], low[1], 0x7531);
	plane[1] = __byte_perm(low[0], low[1], 0x6420);
}

/*
 * Encode `chunks` whole chunks of CHUNK_ROWS rows, from the last one to the first, write planes 1 and above, and finish
 * the chunks' checksums. values, plane1: end of the values and of plane 1; further planes follow at intervals of
 * `stride` bytes. first: index of the first chunk in the block. o: position in the scale model of the lane's four
 * values in the last row, if there are offsets; not updated. A lane's four values must lie within one row of their
 * part. grain: see offset_of_row. whole: true if these are all rows of the block; then the words remain in shared
 * memory if they fit, see s->near.
 */
template <int SIZE, fast_offsets KIND>
DEVICE void code_fast(fast_codes<SIZE> *t, const uint8_t *values, uint8_t *plane1, uint64_t stride, uint32_t first,
		      uint32_t chunks, bool whole, const place &o, uint32_t grain, coding *s, digest *sums,
		      common *same, uint32_t lane)
{
	typedef typename fast_quad<SIZE>::words quad;
	const int AHEAD = SIZE == 2 ? 4 : 2;
	const quad *from = global((const quad *)values) + lane;
	uint32_t *to = global((uint32_t *)plane1) + lane;
	/* volatile, so that the compiler does not keep eight keys in eight registers */
	const volatile uint32_t *key = t->key + lane;
	uint32_t *const words = t->words[0]; /* words of all warps */
	/* index of the end of this warp's buffer; the buffered words begin at index `begin` */
	const uint32_t end = NEAR_WORDS * (threadIdx.x / 32 + 1);
	uint32_t begin = opaque(end);
	const uint32_t below = opaque((1u << lane) - 1), circles = 2 * WIRE_CIRCLE(128) * 0x10001u;
	uint32_t low = s->low, high = s->high, more = s->more, nliterals = s->nliterals;
	uint32_t some = 0, all = FULL, by[2] = {0, 0};
	uint32_t length = o.length, column = o.column, row = o.row;
	uint32_t back = circles - o.offset * 0x10001; /* two circles - (base + row offset), in both halves */
	const uint16_t *cols = global(o.cols);
	uint32_t moved = s->nwords; /* number of words in scratch memory; the remaining words are in shared memory */
	/* column offsets of the next row's values */
	uint2 four = KIND == FAST_OFFSETS ? columns_at(cols + column) : uint2{0, 0};
	quad next[AHEAD];

	if (KIND == FAST_ONE_OFFSET)
		by[0] = by[1] = once_round_pair(back, WIRE_CIRCLE(128));
#pragma unroll
	for (int k = 0; k < AHEAD; k++) /* rows CHUNK_ROWS - 1 - k of the last chunk */
		next[(CHUNK_ROWS - 1 - k) % AHEAD] = load_once(from - 32 * (k + 1));
	for (uint32_t chunk = chunks; chunk-- > 0;) {
		if (end - begin + 32 * (CHUNK_ROWS + 1) > NEAR_WORDS) { /* end_plane appends 32 words */
			move_words(words + end, s->words + WORDS_ROOM - moved, end - begin, lane);
			moved += end - begin;
			begin = end;
		}
		from -= 32 * CHUNK_ROWS;
		to -= 32 * CHUNK_ROWS;
		if (chunk && lane < SIZE * CHUNK_ROWS)
			prefetch((const uint8_t *)(from - 32 * CHUNK_ROWS - lane) + LINE_NBYTES * lane);
#pragma unroll
		for (uint32_t k = CHUNK_ROWS; k-- > 0;) {
			uint32_t w[2], plane[SIZE]; /* upper 16 bits of four values; bytes of planes from 1 on */

			fast_halves(next[k % AHEAD], w, plane + 1);
			uint32_t u[2] = {w[0], w[1]};

			if (k >= AHEAD || chunk)
				next[k % AHEAD] = load_once(from + 32 * ((int)k - AHEAD));
			if (KIND == FAST_OFFSETS) {
				by[0] = once_round_pair(back - four.x, WIRE_CIRCLE(128));
				by[1] = once_round_pair(back - four.y, WIRE_CIRCLE(128));
				if (k || chunk) {
					if (column < WIRE_ROW) {
						column += length,
							row--; /* at most twice: rows have at least 64 values */
						if (column < WIRE_ROW)
							column += length, row--;
						back = circles - 0x10001 * offset_of_row(o.part, o.rows, row, grain,
											 WIRE_CIRCLE(128));
					}
					column -= WIRE_ROW;
					four = columns_at(cols + column);
				}
			}
			for (int h = 0; h < 2 && KIND != FAST_NO_OFFSETS; h++)
				u[h] = turn_pair(w[h] & 0x7fff7fff, w[h] & FAST_SYMBOLS, by[h]);
			plane[0] = (__byte_perm(u[0], u[1], 0x6420) & 0x7f7f7f7f) |
				   (__byte_perm(w[0], w[1], 0x7531) & 0x80808080);
			for (int p = 1; p < SIZE; p++) {
				store_once(to + (p - 1) * (stride / 4) + 32 * k, plane[p - 1]);
				sums[p].sum += (uint64_t)plane[p - 1] * key[32 * k];
			}
			some |= u[0] | u[1], all &= u[0] & u[1];

			const uint32_t a = fast_code(t->codes, u[0] & 0x7f80),
				       b = fast_code(t->codes, (u[0] & 0x7f800000) >> 16);
			const uint32_t c = fast_code(t->codes, u[1] & 0x7f80),
				       d = fast_code(t->codes, (u[1] & 0x7f800000) >> 16);
			/* shifts use the lower five bits of an entry, see code_quad */
			const uint32_t after = opaque(more + a + b + c + d);
			uint32_t four = __funnelshift_l(a, 0, a);

			four = __funnelshift_l(b, four, b);
			four = __funnelshift_l(c, four, c);
			four = __funnelshift_l(d, four, d);

			const uint32_t longer = high | __funnelshift_l(0, four, more),
				       over = __funnelshift_l(four, 0, more);
			const bool gives = opaque((after ^ more) & 32) != 0;
			const uint32_t giving = __ballot_sync(FULL, gives);

			begin -= __popc(giving);
			if (gives)
				words[begin + __popc(giving & below)] = low;
			low = gives ? longer : low;
			high = gives ? over : longer;
			more = after;
			if (__any_sync(FULL, ((a | b | c | d) & CODE_ESCAPED) != 0))
				nliterals = put_rare(s->literals, nliterals,
						     __byte_perm(u[0] + u[0], u[1] + u[1], 0x7531), a, b, c, d, lane);
		}
		for (int p = 1; p < SIZE; p++)
			digest_end_chunk(&sums[p], first + chunk, lane);
	}
	if (moved || !whole) {
		move_words(words + end, s->words + WORDS_ROOM - moved, end - begin, lane);
		s->near = NULL;
	} else {
		s->near = words + end;
	}
	s->low = low, s->high = high, s->more = more, s->nwords = moved + end - begin, s->nliterals = nliterals;
	same->some |= __byte_perm(some + some, 0, 0x3131);
	same->all &= __byte_perm(all + all, 0, 0x3131);
}

#endif
