/* lossless/decode.cu - kernels that decode lossless frames, one block a warp. docs/spec/format.md, sections 3 and 6.
 *
 * A value is live if its byte in plane 0 is not 0. Planes of a pruned region hold bytes of live values only.
 */
#include "frame/decode.cuh"
#include "lossless/single.cuh"

/*
 * Selectors of __byte_perm that move consecutive bytes to live values of a quad, and 0 to others, by the mask of live
 * values.
 */
static __device__ const uint16_t SPREAD[16] = {0x4444, 0x4440, 0x4404, 0x4410, 0x4044, 0x4140, 0x4104, 0x4210,
					       0x0444, 0x1440, 0x1404, 0x2410, 0x1044, 0x2140, 0x2104, 0x3210};

/* Live values of a lane's quad: a mask, and the number of live values before them in the block. */
struct live_values {
	uint32_t mask, before;
};

/* Return the live values of the next row. top: word of plane 0. *seen: live values of all rows so far. */
DEVICE live_values live_of(uint32_t top, uint32_t *seen, uint32_t lane)
{
	live_values l = {~equal_bytes(top, 0) & 15, *seen};
	uint32_t all;

	l.before += warp_scan(__popc(l.mask), lane, &all);
	*seen += all;
	return l;
}

/* Read a quad's bytes in a plane of live values only, which begins at bit `begin`. Other values have 0. */
DEVICE uint32_t spread_quad(const bit_source &s, uint32_t begin, const live_values &l)
{
	return l.mask ? __byte_perm(window_at(s, begin + 8 * l.before), 0, SPREAD[l.mask]) : 0;
}

/*
 * Read a quad's bytes in the planes of live values only in `apart`, see spread_quad. at: their addresses. All loads are
 * in flight together.
 */
template <int SIZE>
DEVICE void spread_quads(const bit_source &s, const uint8_t *const *at, uint32_t apart, const live_values &l,
			 uint32_t *word)
{
	uint32_t begin[SIZE], low[SIZE], high[SIZE];
	bool whole = true;

	for (int p = 1; p < SIZE; p++) {
		begin[p] = apart >> p & 1 ? bit_of(s, at[p]) + 8 * l.before : 0;
		whole &= begin[p] / 32 + 2 <= s.whole;
	}
	if (!whole) {
		for (int p = 1; p < SIZE; p++)
			if (apart >> p & 1)
				word[p] = spread_quad(s, bit_of(s, at[p]), l);
		return;
	}
	for (int p = 1; p < SIZE; p++) {
		low[p] = global(s.words)[begin[p] / 32];
		high[p] = global(s.words)[begin[p] / 32 + 1];
	}
	for (int p = 1; p < SIZE; p++)
		if (apart >> p & 1)
			word[p] = __byte_perm(__funnelshift_r(low[p], high[p], begin[p] % 32), 0, SPREAD[l.mask]);
}

/* Spread a plane of live values only, at `kept`, to all m values. */
static __device__ void spread(const uint32_t *top, uint32_t m, const uint8_t *kept, uint32_t *plane, uint32_t lane)
{
	uint32_t seen = 0;

	for (uint32_t r = 0; WIRE_ROW * r < m; r++) {
		live_values l = live_of(top[32 * r + lane], &seen, lane);
		uint32_t quad = load_bytes(kept + l.before, __popc(l.mask));

		plane[32 * r + lane] = __byte_perm(quad, 0, SPREAD[l.mask]);
	}
	__syncwarp();
}

/* Return the number of live values of a block. */
static __device__ uint32_t count_live(const uint32_t *top, uint32_t m, uint32_t lane)
{
	uint32_t count = 0;

	for (uint32_t r = 0; WIRE_ROW * r < m; r++)
		count += __popc(~equal_bytes(top[32 * r + lane], 0) & 15);
	return warp_sum(count);
}

/* Check that a fixed plane is 0 where plane 0 is 0. */
static __device__ bool zero_under(const uint32_t *top, uint32_t m, const uint8_t *fixed, uint32_t lane)
{
	bool bad = false;

	for (uint32_t r = 0; WIRE_ROW * r < m; r++) {
		uint32_t n = there(r, lane, m), word = load_bytes(fixed + WIRE_ROW * r + 4 * lane, n);

		bad |= (equal_bytes(top[32 * r + lane], 0) & ~equal_bytes(word, 0) & ((1u << n) - 1)) != 0;
	}
	return !__any_sync(FULL, bad);
}

/* Places from which planes of a block are read. */
template <int SIZE> struct plane_places {
	const uint8_t *at[SIZE]; /* address of the plane; NULL: it is in scratch memory */
	uint32_t apart;          /* mask of planes at at[] that hold live values only */
};

/* Find all planes of a region of m values. Planes that are not raw are read to scratch memory. */
template <int SIZE>
DEVICE codec_status find_planes(const job *j, uint64_t first, uint32_t m, uint32_t head, cursor *c, const pairs &by,
				uint8_t *scratch, plane_places<SIZE> *o, uint32_t lane)
{
	const codec_view &v = j->v;
	const bool pruned = head & WIRE_REGION_PRUNED;
	const uint32_t *top = (const uint32_t *)scratch;
	uint8_t *some = scratch + planes_in_regions(v, SIZE) * PLANE_ROOM; /* plane of live values only */
	const uint8_t *section = c->frame + v.planes_offset + first;
	codec_status status = CODEC_OK;
	uint32_t k = m;

	o->apart = 0;
	for (uint32_t p = 0; p < SIZE; p++) {
		o->at[p] = v.fixed >> p & 1 ? section : NULL;
		section += v.fixed >> p & 1 ? v.plane_stride : 0;
	}
	for (uint32_t p = 0; p < SIZE && status == CODEC_OK; p++) {
		uint32_t *to = (uint32_t *)(scratch + p * PLANE_ROOM), mode = head >> 2 * p & 3;

		if (v.fixed >> p & 1)
			continue;
		if (p && mode == WIRE_MODE_RAW) {
			if (left(c) < k)
				return CODEC_BAD_REGION;
			o->at[p] = here(c);
			o->apart |= (uint32_t)pruned << p;
			c->at += k;
			continue;
		}
		status = read_plane(j, p, mode, by, k, p && pruned ? (uint32_t *)some : to, c, lane);
		if (status != CODEC_OK || !pruned)
			continue;
		if (p) {
			spread(top, m, some, to, lane);
			continue;
		}
		k = count_live(top, m, lane);
		for (int f = 1; f < SIZE; f++)
			if (v.fixed >> f & 1 && !zero_under(top, m, o->at[f], lane))
				status = CODEC_BAD_REGION;
		if (!k)
			status = CODEC_BAD_REGION;
	}
	return status;
}

/* Merge all planes of a block, and store its values. Adds checksums of fixed planes to *checksum. */
template <int SIZE>
DEVICE void merge_planes(const job *j, const plane_places<SIZE> &from, const bit_source &source, uint64_t first,
			 uint32_t m, const uint8_t *scratch, const codec_sink *sink, uint64_t *checksum, uint32_t lane)
{
	const codec_view &v = j->v;
	const uint32_t rows = (m + WIRE_ROW - 1) / WIRE_ROW, *top = (const uint32_t *)scratch;
	digest sums[SIZE] = {};
	place o = {};

	if (v.model_parts.count)
		o = place_at(j, first + (4 * lane < m ? 4 * lane : 0));
	uint32_t seen = 0, next = from.apart ? top[lane] : 0; /* word of plane 0 of the next row */

	for (uint32_t r = 0; r < rows; r++) {
		uint32_t n = there(r, lane, m), word[SIZE];

		if (from.apart) {
			const live_values l = live_of(next, &seen, lane);

			if (r + 1 < rows)
				next = top[32 * (r + 1) + lane];
			spread_quads<SIZE>(source, from.at, from.apart, l, word);
		}
		for (int p = 0; p < SIZE; p++) {
			const uint8_t *at = from.at[p];

			if (!at) {
				word[p] = ((const uint32_t *)(scratch + p * PLANE_ROOM))[32 * r + lane];
				continue;
			}
			if (!(from.apart >> p & 1))
				word[p] = load_bytes(at + WIRE_ROW * r + 4 * lane, n);
			if (!(v.fixed >> p & 1))
				continue;
			digest_word(&sums[p], word[p], r, lane);
			if (r % CHUNK_ROWS == CHUNK_ROWS - 1 || r + 1 == rows)
				digest_end_chunk(&sums[p], r / CHUNK_ROWS, lane);
		}
		put_row<SIZE>(j, first, r, n, word, &o, sink, lane);
	}
	for (int p = 0; p < SIZE; p++)
		if (v.fixed >> p & 1)
			*checksum += digest_sum(&sums[p], 0, (rows + CHUNK_ROWS - 1) / CHUNK_ROWS, WIRE_SEED_PLANE + p,
						lane);
}

/* Decode a region with any planes. scratch: see lossless_scratch_nbytes. */
template <int SIZE>
DEVICE codec_status read_planes(const job *j, uint64_t b, uint32_t head, cursor c, const pairs &by, uint8_t *scratch,
				const codec_sink *sink, uint64_t *checksum, uint32_t lane)
{
	const uint64_t first = b * j->v.block_nvalues;
	const uint32_t m = (uint32_t)block_values(&j->v, b);
	const bit_source source = bits_from(&c);
	plane_places<SIZE> from;
	codec_status status = find_planes<SIZE>(j, first, m, head, &c, by, scratch, &from, lane);

	if (status != CODEC_OK)
		return status;
	merge_planes<SIZE>(j, from, source, first, m, scratch, sink, checksum, lane);
	return close_region(&c, lane);
}

/* Decode block b, whose region is at the cursor. Adds checksums of its parts of fixed planes to *checksum. */
template <int SIZE>
DEVICE codec_status read_block(const job *j, uint64_t b, cursor c, const pairs &by, uint8_t *scratch,
			       const codec_sink *sink, uint64_t *checksum, uint32_t lane)
{
	const uint32_t head = load32(here(&c));
	codec_status status = check_head(&j->v, head, SIZE);

	c.at += 4;
	if (status != CODEC_OK)
		return status;
	if (!holds_plane_0_only(j->v, SIZE))
		return read_planes<SIZE>(j, b, head, c, by, scratch, sink, checksum, lane);
	return read_single_plane<SIZE>(
		j, b, head, c, by, sink, checksum, lane,
		[](plane *, const uint8_t *, digest *, cursor *, place *, uint32_t) { return 0u; });
}

/* Bytes of a unit of scratch memory, read by the host: a plane. A warp takes lossless_scratch_nbytes bytes. */
extern "C" __device__ const uint64_t decode_lossless_nbytes[] = {PLANE_ROOM};

/* Decode blocks. Grid: (CTAs, frames). */
template <int SIZE>
__global__ void __launch_bounds__(32 * WARPS, SIZE > 4 ? 3 : 4) decode_lossless(const codec_decoding *decodings)
{
	decode_blocks<13>(decodings, SIZE,
			  [](const codec_decoding &d, const job *j, uint64_t b, cursor c, const pairs &by,
			     uint8_t *mine, uint32_t lane, uint64_t *checksum) {
				  return read_block<SIZE>(j, b, c, by, mine, &d.sink, checksum, lane);
			  });
}
