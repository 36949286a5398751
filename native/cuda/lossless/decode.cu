/*
 * lossless/decode.cu - kernels that decode lossless frames, one block per warp. docs/spec/format.md, sections 3 and 6.
 *
 * A value is "live" if its byte in plane 0 is not 0. In a "pruned" region, planes 1 and above contain bytes of live
 * values only.
 */
#include "frame/decode.cuh"
#include "lossless/single.cuh"

/*
 * Selectors of __byte_perm, indexed by the mask of live values (plane 0 is not 0) among four: they move consecutive
 * bytes to the live values, and 0 to the other values.
 */
static __device__ const uint16_t SPREAD[16] = {0x4444, 0x4440, 0x4404, 0x4410, 0x4044, 0x4140, 0x4104, 0x4210,
					       0x0444, 0x1440, 0x1404, 0x2410, 0x1044, 0x2140, 0x2104, 0x3210};

/*
 * Live values (plane 0 is not 0) among a lane's four values: their mask, and the number of live values before these
 * four in the block.
 */
struct live_values {
	uint32_t mask, before;
};

/*
 * Find the live values among the lane's four values of the next row of 128. top: their bytes of plane 0. *seen: number
 * of live values in all earlier rows; updated.
 */
DEVICE live_values live_of(uint32_t top, uint32_t *seen, uint32_t lane)
{
	live_values l = {~equal_bytes(top, 0) & 15, *seen};
	uint32_t all;

	l.before += warp_scan(__popc(l.mask), lane, &all);
	*seen += all;
	return l;
}

/* Return a word in which the live values of l have consecutive bytes of `bytes`, and the other values 0. */
DEVICE uint32_t spread_bytes(uint32_t bytes, const live_values &l)
{
	return __byte_perm(bytes, 0, SPREAD[l.mask]);
}

/*
 * Read the bytes of a lane's four values from a plane that contains live values only and begins at bit `begin`. The
 * bytes of other values are 0.
 */
DEVICE uint32_t spread_quad(const bit_source &s, uint32_t begin, const live_values &l)
{
	return l.mask ? spread_bytes(window_at(s, begin + 8 * l.before), l) : 0;
}

/* Return the number of values in a block whose byte in plane 0 is not 0. top: bytes of plane 0; m: number of values. */
static __device__ uint32_t count_live(const uint32_t *top, uint32_t m, uint32_t lane)
{
	uint32_t count = 0;

	for (uint32_t r = 0; WIRE_ROW * r < m; r++)
		count += __popc(~equal_bytes(top[32 * r + lane], 0) & 15);
	return warp_sum(count);
}

/* Return true if a fixed plane's bytes are 0 for all of m values whose byte in plane 0 (top) is 0. */
static __device__ bool zero_under(const uint32_t *top, uint32_t m, const uint8_t *fixed, uint32_t lane)
{
	bool bad = false;

	for (uint32_t r = 0; WIRE_ROW * r < m; r++) {
		uint32_t n = there(r, lane, m), word = load_bytes(fixed + WIRE_ROW * r + 4 * lane, n);

		bad |= (equal_bytes(top[32 * r + lane], 0) & ~equal_bytes(word, 0) & ((1u << n) - 1)) != 0;
	}
	return !__any_sync(FULL, bad);
}

/*
 * Addresses and modes of a block's planes. Coded planes are decoded to scratch memory first, because they determine the
 * number of live values and where the next plane begins. The other planes are read from the frame when values are
 * merged.
 */
template <int SIZE> struct plane_places {
	/* address of the plane's first byte; mode ROWS: address of its runs, after the bitmap */
	const uint8_t *at[SIZE];
	uint32_t raw, same, runs; /* masks of planes in the region, by mode: RAW, CONSTANT, ROWS */
	bool pruned;              /* planes 1 and above, except fixed ones, contain live values only */
};

/*
 * Mode ROWS: return the size in bytes of the stored runs, which follow the plane's bitmap. k: bytes of the plane with
 * all runs. nbitmap: bytes of the bitmap.
 */
static __device__ uint32_t runs_nbytes(const uint8_t *bitmap, uint32_t nbitmap, uint32_t k, uint32_t lane)
{
	const uint32_t last = (k - 1) / WIRE_ROW;
	const uint32_t runs = warp_sum(lane < nbitmap ? (uint32_t)__popc(bitmap[lane]) : 0);

	return WIRE_ROW * runs - (bitmap[last / 8] >> last % 8 & 1 ? WIRE_ROW * (last + 1) - k : 0);
}

/*
 * Read position in planes of mode ROWS, in which runs of 128 zeros are omitted; lane p holds the position of plane p.
 * run: index of the current run, equal in all lanes. before: number of runs before it that are stored. bits: bit 0 is
 * set if the current run is stored, bit 1 if the next one is.
 */
struct run_place {
	uint32_t run, before, bits;
};

/* Mode ROWS: return the bits of runs `run` and run + 1 in the bitmap of stored runs. */
DEVICE uint32_t run_bits(const uint8_t *bitmap, uint32_t nbitmap, uint32_t run)
{
	const uint32_t next = run + 1;

	return (bitmap[run / 8] >> run % 8 & 1) | (next / 8 < nbitmap ? bitmap[next / 8] >> next % 8 << 1 & 2 : 0);
}

/* Read n bytes of plane p, which has mode ROWS, from byte i on. at: address of the plane's stored runs. */
static __device__ __noinline__ uint32_t bytes_of_runs(const uint8_t *at, run_place place, uint32_t p, uint32_t i,
						      uint32_t n)
{
	const uint32_t bits = __shfl_sync(FULL, place.bits, (int)p), before = __shfl_sync(FULL, place.before, (int)p);
	uint32_t word = 0;

	for (uint32_t k = 0; k < n; k++, i++) {
		const uint32_t second = i / WIRE_ROW - place.run;

		if (bits >> second & 1)
			word |= (uint32_t)at[WIRE_ROW * (before + (second & bits)) + i % WIRE_ROW] << 8 * k;
	}
	return word;
}

/*
 * Advance the position to run `run`, which is the current run or the next one. k: bytes of a plane of mode ROWS with
 * all runs.
 */
template <int SIZE>
DEVICE void move_to_run(run_place *o, const plane_places<SIZE> &from, uint32_t run, uint32_t k, uint32_t lane)
{
	const uint32_t nbitmap = ((k + WIRE_ROW - 1) / WIRE_ROW + 7) / 8;
	const uint8_t *at = NULL;

	o->before += run != o->run ? o->bits & 1 : 0;
	o->run = run;
	for (uint32_t p = 0; p < SIZE; p++)
		at = p == lane ? from.at[p] : at;
	o->bits = from.runs >> lane & 1 && WIRE_ROW * run < k ? run_bits(at - nbitmap, nbitmap, run) : 0;
}

/*
 * Find all planes of a region of m values, and decode coded planes to scratch memory. Set *k to the number of bytes of
 * each plane from plane 1 on: the number of live values if the region is pruned, else m.
 */
template <int SIZE>
DEVICE codec_status find_planes(const job *j, uint64_t first, uint32_t m, uint32_t head, cursor *c, const pairs &by,
				uint8_t *scratch, plane_places<SIZE> *o, uint32_t *k, uint32_t lane)
{
	const codec_view &v = j->v;
	const uint8_t *section = c->frame + v.planes_offset + first;
	codec_status status = CODEC_OK;

	*k = m;
	*o = {{}, 0, 0, 0, (head & WIRE_REGION_PRUNED) != 0};
	for (uint32_t p = 0; p < SIZE; p++) {
		o->at[p] = section;
		section += v.fixed >> p & 1 ? v.plane_stride : 0;
	}
	for (uint32_t p = 0; p < SIZE && status == CODEC_OK; p++) {
		const uint32_t mode = head >> 2 * p & 3;

		if (v.fixed >> p & 1)
			continue;
		o->at[p] = here(c);
		if (mode == WIRE_MODE_CODED) {
			o->at[p] = scratch;
			status = read_plane(j, p, mode, by, *k, (uint32_t *)scratch, c, lane);
			scratch += PLANE_ROOM;
		} else {
			plane raw;

			status = plane_open(&raw, j, p, mode, by, *k, c, lane);
			o->raw |= (uint32_t)(mode == WIRE_MODE_RAW) << p;
			o->same |= (uint32_t)(mode == WIRE_MODE_CONSTANT) << p;
			o->runs |= (uint32_t)(mode == WIRE_MODE_ROWS) << p;
		}
		if (mode == WIRE_MODE_ROWS && status == CODEC_OK) {
			const uint32_t nbitmap = (uint32_t)(here(c) - o->at[p]);
			const uint32_t nbytes = runs_nbytes(o->at[p], nbitmap, *k, lane);

			if (left(c) < nbytes)
				return CODEC_BAD_REGION;
			o->at[p] += nbitmap;
			c->at += nbytes;
		}
		if (p || !o->pruned || status != CODEC_OK)
			continue;
		const uint32_t *top = (const uint32_t *)o->at[0];

		*k = count_live(top, m, lane);
		for (int f = 1; f < SIZE; f++)
			if (v.fixed >> f & 1 && !zero_under(top, m, o->at[f], lane))
				status = CODEC_BAD_REGION;
		if (!*k)
			status = CODEC_BAD_REGION;
	}
	return status;
}

/* Read the bytes of the lane's n values in row r (128 values) from plane p, which contains all values. */
template <int SIZE>
DEVICE uint32_t whole_quad(const plane_places<SIZE> &from, uint32_t p, const run_place &run, uint32_t r, uint32_t n,
			   uint32_t lane)
{
	const uint32_t i = WIRE_ROW * r + 4 * lane;

	if (from.same >> p & 1)
		return keep_bytes(from.at[p][0] * ONES, n);
	return from.runs >> p & 1 ? bytes_of_runs(from.at[p], run, p, i, n) : load_bytes(from.at[p] + i, n);
}

/*
 * Read the bytes of a lane's four values from all planes that contain live values only: all planes except plane 0 and
 * the planes in the mask `fixed`. Loads of raw planes are in flight together.
 */
template <int SIZE>
DEVICE void spread_quads(const bit_source &s, const plane_places<SIZE> &from, uint32_t fixed, const run_place &run,
			 const live_values &l, uint32_t *word)
{
	uint32_t begin[SIZE], low[SIZE], high[SIZE];
	bool whole = true;

	for (int p = 1; p < SIZE; p++) {
		begin[p] = from.raw >> p & 1 ? bit_of(s, from.at[p]) + 8 * l.before : 0;
		whole &= begin[p] / 32 + 2 <= s.whole;
	}
	for (int p = 1; p < SIZE && whole; p++) {
		low[p] = global(s.words)[begin[p] / 32];
		high[p] = global(s.words)[begin[p] / 32 + 1];
	}
	for (int p = 1; p < SIZE; p++)
		if (from.raw >> p & 1)
			word[p] = whole ? spread_bytes(__funnelshift_r(low[p], high[p], begin[p] % 32), l)
					: spread_quad(s, bit_of(s, from.at[p]), l);
		else if (from.same >> p & 1)
			word[p] = spread_bytes(from.at[p][0] * ONES, l);
		else if (from.runs >> p & 1)
			word[p] = spread_bytes(bytes_of_runs(from.at[p], run, p, l.before, __popc(l.mask)), l);
		/* scratch memory extends past the plane's end, so whole words may be read */
		else if (!(fixed >> p & 1))
			word[p] = spread_bytes(load32(from.at[p] + l.before), l);
}

/*
 * Merge all planes of a block, and store the values. Add the checksums of fixed planes to *checksum. k: see
 * find_planes. present: quad rows in the region; the others are 0.
 */
template <int SIZE>
DEVICE void merge_planes(const job *j, const plane_places<SIZE> &from, const bit_source &source, uint64_t first,
			 uint32_t m, uint32_t k, const quad_rows &present, const codec_sink *sink, uint64_t *checksum,
			 uint32_t lane)
{
	const codec_view &v = j->v;
	const uint32_t rows = (m + WIRE_ROW - 1) / WIRE_ROW, kept = (present.kept + WIRE_ROW - 1) / WIRE_ROW;
	const uint32_t *top = (const uint32_t *)from.at[0];
	digest sums[SIZE] = {};
	run_place run = {0, 0, 0};
	place o = {};

	if (v.model_parts.count)
		o = place_at(j, first + (4 * lane < m ? 4 * lane : 0));
	uint32_t seen = 0, next = from.pruned ? top[lane] : 0; /* next: the lane's word of plane 0 in the next row */

	/* r: row of the block; i: the row's number among those in the region */
	for (uint32_t r = 0, i = 0; r < rows; r++) {
		uint32_t n = there(r, lane, m), word[SIZE] = {};

		if (!has_row(present, r)) {
			put_row<SIZE>(j, first, r, n, word, &o, sink, lane);
			continue;
		}
		if (from.runs)
			move_to_run(&run, from, from.pruned ? seen / WIRE_ROW : i, k, lane);
		if (from.pruned) {
			const live_values l = live_of(word[0] = next, &seen, lane);

			if (i + 1 < kept)
				next = top[32 * (i + 1) + lane];
			spread_quads<SIZE>(source, from, v.fixed, run, l, word);
		}
		for (int p = 0; p < SIZE; p++) {
			const bool fixed = v.fixed >> p & 1;

			if (fixed || !from.pruned)
				word[p] = whole_quad<SIZE>(from, p, run, i, n, lane);
			if (!fixed)
				continue;
			digest_word(&sums[p], word[p], r, lane);
			if (r % CHUNK_ROWS == CHUNK_ROWS - 1 || r + 1 == rows)
				digest_end_chunk(&sums[p], r / CHUNK_ROWS, lane);
		}
		put_row<SIZE>(j, first, r, n, word, &o, sink, lane);
		i++;
	}
	for (int p = 0; p < SIZE; p++)
		if (v.fixed >> p & 1)
			*checksum += digest_sum(&sums[p], 0, (rows + CHUNK_ROWS - 1) / CHUNK_ROWS, WIRE_SEED_PLANE + p,
						lane);
}

/* Decode block b, whose region may have any combination of planes. scratch: lossless_scratch_nbytes() bytes. */
template <int SIZE>
DEVICE codec_status read_planes(const job *j, uint64_t b, uint32_t head, cursor c, const pairs &by, uint8_t *scratch,
				const codec_sink *sink, uint64_t *checksum, uint32_t lane)
{
	const uint64_t first = b * j->v.block_nvalues;
	const uint32_t m = (uint32_t)block_values(&j->v, b);
	const bit_source source = bits_from(&c);
	plane_places<SIZE> from;
	quad_rows present;
	uint32_t k;
	codec_status status = read_gaps(&c, head, m, &present, lane);

	if (status == CODEC_OK)
		status = find_planes<SIZE>(j, first, present.kept, head, &c, by, scratch, &from, &k, lane);
	if (status != CODEC_OK)
		return status;
	merge_planes<SIZE>(j, from, source, first, m, k, present, sink, checksum, lane);
	return close_region(&c, lane);
}

/* Decode block b, whose region is at cursor c. Add the checksums of the block's parts of fixed planes to *checksum. */
template <int SIZE>
DEVICE codec_status read_block(const job *j, uint64_t b, cursor c, const pairs &by, uint8_t *scratch,
			       const codec_sink *sink, uint64_t *checksum, uint32_t lane)
{
	const uint32_t head = load32(here(&c));
	codec_status status = check_head(&j->v, head, SIZE);

	c.at += 4;
	if (status != CODEC_OK)
		return status;
	if (!WIRE_ONLY_PLANE_0(j->v.fixed, j->v.halved, SIZE))
		return read_planes<SIZE>(j, b, head, c, by, scratch, sink, checksum, lane);
	return read_single_plane<SIZE>(
		j, b, head, c, by, sink, checksum, lane,
		[](plane *, const uint8_t *, digest *, cursor *, place *, uint32_t) { return 0u; });
}

/*
 * Size in bytes of a unit of scratch memory, which stores one plane; the host reads this symbol. A warp acquires
 * lossless_scratch_nbytes() bytes.
 */
extern "C" __device__ const uint64_t decode_lossless_nbytes[] = {PLANE_ROOM};

/* Kernel: decode the blocks of lossless frames. SIZE: bytes per value. Grid: (CTAs, frames). */
template <int SIZE>
__global__ void __launch_bounds__(32 * WARPS, SIZE > 4 ? 3 : 4) decode_lossless(const codec_decoding *decodings)
{
	decode_blocks<13>(decodings, SIZE,
			  [](const codec_decoding &d, const job *j, uint64_t b, cursor c, const pairs &by,
			     uint8_t *mine, uint32_t lane, uint64_t *checksum) {
				  return read_block<SIZE>(j, b, c, by, mine, &d.sink, checksum, lane);
			  });
}
