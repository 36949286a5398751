/*
 * lossless/decode_fast.cuh - kernel that decodes floats of two and four bytes whose regions contain only plane 0, one
 * block per warp, as in nearly all large tensors. decode_lossless decodes the same frames, more slowly; the host
 * chooses between the kernels.
 *
 * The loop over whole rows of 128 values has few instructions and registers, so that 32 warps (24 for float32) are
 * resident on a multiprocessor and hide each other's latencies. docs/spec/format.md, sections 3, 5.2 and 7.
 */
#ifndef CODEC_CUDA_LOSSLESS_DECODE_FAST_CUH
#define CODEC_CUDA_LOSSLESS_DECODE_FAST_CUH

#include "coder/model.cuh"
#include "coder/plane.cuh"
#include "common/checksum.cuh"
#include "frame/decode.cuh"
#include "lossless/fast.cuh"
#include "lossless/single.cuh"

#define FAST_BITS 13 /* number of bits of an index into the table of symbol pairs */
/*
 * flags of an entry of that table. FAST_RARE: a symbol is the escape, or FAST_LONG is set, too: both codes together are
 * longer than FAST_BITS
 */
#define FAST_RARE 64u
#define FAST_LONG 0x8000u

/*
 * Tables of a CTA in shared memory. pair: indexed by the next FAST_BITS bits; an entry has two symbols, and in bits 0
 * to 4 the total length of their codes in bits. single: indexed by the next 8 bits; an entry has one symbol, and the
 * length of its code from bit 8 on. key: keys of checksums.
 */
struct fast_tables {
	uint32_t pair[1 << FAST_BITS], key[WIRE_CHUNK_WORDS], single[256], escape;
};

/* Return an entry of the table of symbol pairs, with symbol a in bits 7 to 14 and symbol b in bits 23 to 30. */
DEVICE uint32_t fast_entry(uint32_t a, uint32_t b)
{
	return a << 7 | b << 23;
}

/* Fill the tables from the decoding table of plane 0. Called by all threads of the CTA. */
DEVICE void fill_fast(fast_tables *to, const uint8_t *table)
{
	const uint8_t *length = table + TABLE_LENGTHS;
	const uint32_t escape = table[TABLE_ESCAPE], mask = (1u << FAST_BITS) - 1;

	for (uint32_t i = threadIdx.x; i < WIRE_CHUNK_WORDS; i += blockDim.x)
		to->key[i] = CHECKSUM_KEY[i];
	for (uint32_t i = threadIdx.x; i < 256; i += blockDim.x)
		to->single[i] = table[i] | (uint32_t)length[i] << 8;
	for (uint32_t i = threadIdx.x; i <= mask; i += blockDim.x) {
		uint32_t top = i >> (FAST_BITS - 8), next = (i << length[top] & mask) >> (FAST_BITS - 8);
		uint32_t a = table[top], b = table[next], n = (uint32_t)length[top] + length[next];
		uint32_t rare = a == escape || b == escape ? FAST_RARE : 0;

		to->pair[i] = n > FAST_BITS ? FAST_LONG | FAST_RARE : fast_entry(a, b) | rare | n;
	}
	if (threadIdx.x == 0)
		to->escape = escape;
	__syncthreads();
}

/*
 * State of a lane after read_rare has decoded a row of 128 symbols. count: number of literals that all lanes together
 * have consumed.
 */
struct fast_row {
	uint32_t a, b;         /* table entries with the lane's four symbols, escapes replaced by literals */
	uint32_t high, low, n; /* see read_fast */
	uint32_t count;
};

/*
 * Decode a row of 128 symbols in which some lane has an escape, or two codes that are too long for the table of pairs.
 * a, b: the lane's entries. literals: `left` bytes of literals; if the row needs more, its symbols are undefined.
 */
static __device__ __noinline__ fast_row read_rare(const fast_tables *tables, uint32_t a, uint32_t b, uint32_t high,
						  uint32_t low, uint32_t n, const uint8_t *literals, uint32_t left,
						  uint32_t lane)
{
	const fast_tables *t = shared(tables);
	uint64_t bits = (uint64_t)high << 32 | low;
	uint32_t quad = 0, by = (a & 31) + (b & 31);

	if ((a | b) & FAST_LONG) {
		for (int k = 0; k < 32; k += 8) {
			uint32_t symbol = t->single[bits >> 56];

			quad |= (symbol & 255) << k;
			bits <<= symbol >> 8;
			n -= symbol >> 8;
		}
	} else {
		quad = __byte_perm(a >> 7, b >> 7, 0x6420);
		bits <<= by;
		n -= by;
	}
	const uint32_t below = (1u << lane) - 1;
	uint32_t escapes = equal_bytes(quad, t->escape), total = __popc(__ballot_sync(FULL, escapes != 0)), at = 0;

	/* rare case: more than one escape in the row */
	if (total > 1 || __any_sync(FULL, (escapes & (escapes - 1)) != 0)) {
		const uint32_t count = __popc(escapes), bit0 = __ballot_sync(FULL, count & 1);
		const uint32_t bit1 = __ballot_sync(FULL, count & 2), bit2 = __ballot_sync(FULL, count & 4);

		at = __popc(bit0 & below) + 2 * __popc(bit1 & below) + 4 * __popc(bit2 & below);
		total = __popc(bit0) + 2 * __popc(bit1) + 4 * __popc(bit2);
	}
	for (; escapes && total <= left; escapes &= escapes - 1) {
		const uint32_t shift = 8 * ((uint32_t)__ffs((int)escapes) - 1);

		quad = (quad & ~(255u << shift)) | (uint32_t)*global(literals + at++) << shift;
	}
	return {fast_entry(quad & 255, quad >> 8 & 255),
		fast_entry(quad >> 16 & 255, quad >> 24),
		(uint32_t)(bits >> 32),
		(uint32_t)bits,
		n,
		total};
}

/*
 * Merge the upper 16 bits of two values from planes 0 and 1. entry: their symbols. x: each value's byte of plane 1,
 * twice. by: offsets, see turn_pair.
 */
template <fast_offsets KIND> DEVICE uint32_t fast_pair(uint32_t entry, uint32_t x, uint32_t by)
{
	const uint32_t symbols = entry & FAST_SYMBOLS, both = symbols | (x & ~FAST_SYMBOLS);

	if (KIND == FAST_NO_OFFSETS)
		return both;
	/*
	 * `symbols` may be passed as turn_pair's `upper`: its halves are 0 exactly where bits 7 to 14 of the patterns
	 * are
	 */
	return turn_pair(both & 0x7fff7fff, symbols, by) | (x & 0x80008000);
}

/*
 * Merge four values from planes into words in memory order. a, b: table entries with their symbols. plane: words of
 * planes 1 and above. by: offsets, see turn_pair.
 */
template <int SIZE, fast_offsets KIND>
DEVICE typename fast_quad<SIZE>::words fast_values(uint32_t a, uint32_t b, const uint32_t *plane, const uint32_t *by)
{
	const uint32_t top[2] = {fast_pair<KIND>(a, __byte_perm(plane[0], 0, 0x1100), by[0]),
				 fast_pair<KIND>(b, __byte_perm(plane[0], 0, 0x3322), by[1])};

	if constexpr (SIZE == 2) {
		return {top[0], top[1]};
	} else {
		const uint32_t low[2] = {__byte_perm(plane[2], plane[1], 0x5140),
					 __byte_perm(plane[2], plane[1], 0x7362)};

		return {__byte_perm(low[0], top[0], 0x5410), __byte_perm(low[0], top[0], 0x7632),
			__byte_perm(low[1], top[1], 0x5410), __byte_perm(low[1], top[1], 0x7632)};
	}
}

/*
 * Decode `chunks` whole chunks of CHUNK_ROWS rows, and finish the chunks' checksums. plane1: address of plane 1;
 * further fixed planes follow at intervals of `stride` bytes. to: destination of values; NULL: only check them. first:
 * index of the first chunk in the block. o: position of the lane's first four values in the scale model, if there are
 * offsets; not updated. A lane's four values must lie within one row of their part. grain: see offset_of_row. sums:
 * checksum of each fixed plane.
 */
template <int SIZE, fast_offsets KIND>
DEVICE void read_fast(const fast_tables *t, plane *top, const uint8_t *plane1, uint64_t stride, uint8_t *to,
		      uint32_t first, uint32_t chunks, const place &o, uint32_t grain, cursor *c, digest *sums,
		      uint32_t lane)
{
	typedef typename fast_quad<SIZE>::words quad;
	const uint32_t *words = global((const uint32_t *)top->coder.words);
	const uint8_t *from = global(plane1) + 4 * lane;
	/* volatile, so that the compiler does not keep eight keys in eight registers */
	const volatile uint32_t *key = t->key + lane;
	quad *out = KIND == FAST_CHECK ? NULL : global((quad *)to) + lane;
	const uint32_t nwords = top->coder.nwords, below = opaque((1u << lane) - 1);
	const uint32_t AHEAD = SIZE == 2 ? 4 : 2;
	/* bit reservoir: the upper n bits (32 to 63) of high:low, followed by zeros. n is stored modulo 64 */
	const uint32_t mark = (uint32_t)__ffs((int)top->coder.bits) - 1;
	uint32_t high = (uint32_t)(top->coder.bits >> 32), low = (uint32_t)top->coder.bits & ~(1u << mark),
		 n = 63 - mark;
	uint32_t taken = top->coder.taken, length = o.length, column = o.column, row = o.row;
	const uint16_t *cols = global(o.cols);
	uint32_t on = o.offset * 0x10001, by[2] = {0, 0}; /* on: base + row offset, in both halves */

	if (KIND == FAST_ONE_OFFSET)
		by[0] = by[1] = on;
	for (uint32_t chunk = 0; chunk < chunks; chunk++) {
		uint32_t word[AHEAD][SIZE - 1];
		auto fetch = [&](uint32_t k) {
			for (int p = 1; p < SIZE; p++)
				word[k % AHEAD][p - 1] =
					load_once((const uint32_t *)(from + (p - 1) * stride + WIRE_ROW * k));
		};

#pragma unroll
		for (uint32_t k = 0; k < AHEAD; k++)
			fetch(k);
		if (chunk + 1 < chunks && lane < CHUNK_ROWS * (SIZE - 1))
			prefetch(from + CHUNK_ROWS * WIRE_ROW + lane / CHUNK_ROWS * stride +
				 (LINE_NBYTES * (lane % CHUNK_ROWS) - 4 * lane));
		if (lane < 4 && taken + 64 + 32 * lane < nwords)
			prefetch(words + taken + 64 + 32 * lane);
#pragma unroll
		for (uint32_t k = 0; k < CHUNK_ROWS; k++) {
			uint32_t plane[SIZE - 1];

			for (int p = 1; p < SIZE; p++) {
				plane[p - 1] = word[k % AHEAD][p - 1];
				sums[p].sum += (uint64_t)plane[p - 1] * key[32 * k];
			}
			if (k + AHEAD < CHUNK_ROWS)
				fetch(k + AHEAD);
			/* shifts use only the lower five bits of an entry, which are the codes' length */
			uint32_t a = t->pair[high >> (32 - FAST_BITS)];
			uint32_t b = t->pair[__funnelshift_l(low, high, a) >> (32 - FAST_BITS)];

			if (__any_sync(FULL, opaque((a | b) & FAST_RARE) != 0)) {
				fast_row x = read_rare(t, a, b, high, low, n, here(c), (uint32_t)left(c), lane);

				a = x.a, b = x.b, high = x.high, low = x.low, n = x.n;
				top->bad |= x.count > (uint32_t)left(c);
				c->at += x.count > (uint32_t)left(c) ? 0 : x.count;
			} else {
				const uint32_t both = a + b;

				high = __funnelshift_l(low, high, both);
				low = __funnelshift_l(0, low, both);
				n -= both;
			}
			const uint2 four = KIND == FAST_OFFSETS ? columns_at(cols + column) : uint2{0, 0};
			/* refill: append the next words to the reservoirs of lanes with fewer than 32 bits */
			const bool takes = !opaque(n & 32);
			const uint32_t taking = __ballot_sync(FULL, takes);
			const uint32_t at = taken + __popc(taking & below);
			uint32_t next = 0;

			if (takes & (at < nwords))
				next = *global(words + at);
			high |= __funnelshift_r(next, 0, n);
			low |= __funnelshift_r(0, next, n);
			n |= 32;
			taken += __popc(taking);
			if (KIND == FAST_OFFSETS) {
				by[0] = once_round_pair(on + four.x, WIRE_CIRCLE(128));
				by[1] = once_round_pair(on + four.y, WIRE_CIRCLE(128));
				column += WIRE_ROW;
				if (column >= length && (k + 1 < CHUNK_ROWS || chunk + 1 < chunks)) {
					/* the loop runs at most twice, since rows of a part have at least 64 values */
					column -= length, row++;
					if (column >= length)
						column -= length, row++;
					on = 0x10001 * offset_of_row(o.part, o.rows, row, grain, WIRE_CIRCLE(128));
				}
			}
			if (KIND != FAST_CHECK)
				store_once(out + 32 * k, fast_values<SIZE, KIND>(a, b, plane, by));
		}
		for (int p = 1; p < SIZE; p++)
			digest_end_chunk(&sums[p], first + chunk, lane);
		from += WIRE_ROW * CHUNK_ROWS;
		out += KIND == FAST_CHECK ? 0 : 32 * CHUNK_ROWS;
	}
	top->coder.bits = (uint64_t)high << 32 | low | 1ull << (63 - (n & 63));
	top->coder.taken = taken;
}

/*
 * The read_chunks argument of read_single_plane: decode whole chunks of a block of m values from row r on, and return
 * the number of rows decoded; 0 if memory is not aligned.
 */
template <int SIZE>
DEVICE uint32_t read_fast_chunks(const job &j, const fast_tables *t, const codec_sink &sink, uint64_t first, uint32_t m,
				 plane *top, const uint8_t *fixed, digest *sums, cursor *c, place *o, uint32_t r,
				 uint32_t lane)
{
	const uint64_t aligned =
		(uint64_t)top->coder.words | (uint64_t)fixed | (uint64_t)sink.data / SIZE | j.v.plane_stride;
	const uint32_t grain = grain_of(&j.v);
	uint32_t chunks = (m / WIRE_ROW - r) / CHUNK_ROWS;
	fast_offsets kind = sink.data ? FAST_NO_OFFSETS : FAST_CHECK;

	if (r % CHUNK_ROWS || !chunks || top->mode != WIRE_MODE_CODED || aligned % 4)
		return 0;
	if (sink.data && j.v.model_parts.count) {
		kind = fast_offsets_of(*o);
		chunks = fast_chunks(*o, (o->left - 4) / WIRE_ROW + 1, chunks);
	}
	if (!chunks)
		return 0;
	if (kind == FAST_OFFSETS)
		add_columns(o);
	const uint8_t *plane1 = fixed + WIRE_ROW * r;
	uint8_t *to = sink.data ? sink.data + SIZE * (first + WIRE_ROW * r) : NULL;
	const uint64_t stride = j.v.plane_stride;

	if (kind == FAST_CHECK)
		read_fast<SIZE, FAST_CHECK>(t, top, plane1, stride, to, r / CHUNK_ROWS, chunks, *o, grain, c, sums,
					    lane);
	else if (kind == FAST_NO_OFFSETS)
		read_fast<SIZE, FAST_NO_OFFSETS>(t, top, plane1, stride, to, r / CHUNK_ROWS, chunks, *o, grain, c, sums,
						 lane);
	else if (kind == FAST_ONE_OFFSET)
		read_fast<SIZE, FAST_ONE_OFFSET>(t, top, plane1, stride, to, r / CHUNK_ROWS, chunks, *o, grain, c, sums,
						 lane);
	else
		read_fast<SIZE, FAST_OFFSETS>(t, top, plane1, stride, to, r / CHUNK_ROWS, chunks, *o, grain, c, sums,
					      lane);
	r += CHUNK_ROWS * chunks;
	if (j.v.model_parts.count && WIRE_ROW * r + 4 * lane < m)
		*o = place_at(&j, first + WIRE_ROW * r + 4 * lane);
	return CHUNK_ROWS * chunks;
}

/*
 * Number of warps per CTA, which share the tables. With two CTAs per multiprocessor, a thread has 64 registers (values
 * of 2 bytes) or 80 (4 bytes).
 */
#define FAST_WARPS(size) ((size) == 2 ? 16 : 12)

/* Kernel: decode blocks of floats of SIZE bytes, 2 or 4. The sink must be CODEC_INTO_STORE. Grid: (CTAs, frames). */
template <int SIZE>
__global__ void __launch_bounds__(32 * FAST_WARPS(SIZE), 2) decode_lossless_fast(const codec_decoding *decodings)
{
	__shared__ fast_tables tables;
	const codec_decoding &d = decoding_of(decodings);
	const job &j = share_job(d.view, d.memory);
	const pairs none = {NULL, 0, WIRE_MAX_PLANES};
	const uint32_t lane = threadIdx.x % 32, ctas = d.warps / FAST_WARPS(SIZE);

	if (blockIdx.x >= ctas)
		return;
	fill_fast(&tables, table_of(&j, 0));
	/* adjacent blocks go to different CTAs, so that few blocks occupy many multiprocessors */
	decode_blocks_by(
		d, j, SIZE, blockIdx.x + ctas * (threadIdx.x / 32), d.warps, lane,
		[&](uint64_t b, cursor c, uint64_t *checksum) {
			const uint64_t first = b * j.v.block_nvalues;
			const uint32_t head = load32(here(&c)), m = (uint32_t)block_values(&j.v, b);
			codec_status status = check_head(&j.v, head, SIZE);

			c.at += 4;
			if (status != CODEC_OK)
				return status;
			return read_single_plane<SIZE>(
				&j, b, head, c, none, &d.sink, checksum, lane,
				[&](plane *top, const uint8_t *fixed, digest *sums, cursor *at, place *o, uint32_t r) {
					return read_fast_chunks<SIZE>(j, &tables, d.sink, first, m, top, fixed, sums,
								      at, o, r, lane);
				});
		});
}

#endif
