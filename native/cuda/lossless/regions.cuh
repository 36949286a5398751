/*
 * lossless/regions.cuh - encode blocks with any combination of planes in their regions.
 * docs/spec/encoder.md, sections 4.2 and 6.
 *
 * A value is "live" if its byte in plane 0 is not 0. A region is "pruned" if its planes 1 and above contain bytes of
 * live values only.
 *
 * A block's values are read once to encode plane 0 and to choose how the other planes are stored, once for each other
 * plane with a codebook, and once to write planes that are not coded to the frame.
 */
#ifndef CODEC_CUDA_LOSSLESS_REGIONS_CUH
#define CODEC_CUDA_LOSSLESS_REGIONS_CUH

#include "coder/encode.cuh"
#include "common/checksum.cuh"
#include "frame/encode.cuh"
#include "lossless/planes.cuh"
#include "lossless/split.cuh"

/*
 * Scratch memory of a warp: literals and words of the plane that is being encoded. If planes other than a float's plane
 * 0 are coded, the symbols of one plane follow, and then coded planes that wait to be written to the frame.
 */
#define CODER_NBYTES (PLANE_ROOM + 4 * WORDS_ROOM)
#define WAITING_NBYTES (1u << WIRE_MAX_BLOCK_LOG2)
static_assert(PLANE_ROOM + WAITING_NBYTES <= CODER_NBYTES, "a unit for each other plane");

/* Return the mask of planes with a codebook, except plane 0 of floats. */
DEVICE uint32_t other_coded(const codec_view &v)
{
	return v.coded & ~(has_top(v.dtype) ? 1u : 0u);
}

/* Return the bytes of scratch memory that a warp needs to encode lossless blocks. */
DEVICE uint64_t scratch_nbytes(const codec_view &v)
{
	return CODER_NBYTES * (1 + (uint64_t)__popc(other_coded(v)));
}

/* Return true if coding a plane of k bytes saves enough bytes, estimated from a sample of the bytes. */
static __device__ bool plane_pays(const job *j, uint32_t p, const uint32_t *plane, uint32_t k, uint32_t lane)
{
	const uint32_t *codes = j->codes + 256 * p;
	const int raw = raw_bits_of(&j->v, p);
	uint32_t cost = 0, count = 0;

	for (uint32_t r = 0; WIRE_ROW * r < k; r += CHOOSE_BLOCK_STRIDE)
		for (uint32_t i = 0; i < there(r, lane, k); i++) {
			uint32_t entry = codes[bits_symbol((uint8_t)(plane[32 * r + lane] >> 8 * i), raw)];

			cost += CODE_LENGTH(entry) + (entry & CODE_ESCAPED ? 8 : 0);
			count++;
		}
	return choose_saves(warp_sum(cost), warp_sum(count), (uint64_t)(8 - raw));
}

/* Properties of a block's planes without empty quad rows, which split_values computes. */
template <int SIZE> struct split_block {
	quad_rows present; /* quad rows in the region */
	common same[SIZE]; /* OR and AND of the bytes of live values; for plane 0, of all values */
	uint32_t runs;     /* mask of planes that may have a run of 128 zeros, or a shorter run at the end */
	uint32_t zeros;    /* number of values whose byte in plane 0 is 0 */
	uint32_t under;    /* not 0 if a value whose byte in plane 0 is 0 has a non-zero byte in another plane */
};

/*
 * Split m values from value `first` on into planes, from the last row of 128 to the first. Fixed planes are written to
 * their sections of the frame. If plane 0 is coded (`top`), its symbols are passed to the coder. Empty quad rows are
 * left out, unless there are fixed planes or all quad rows are empty. chunks: memory for the
 * checksums of chunks of fixed planes, 32 per plane; lane i holds the checksum of chunk i. at: position in the scale
 * model of the lane's last four values, see offsets_back; NULL: there are no offsets.
 */
template <int SIZE>
DEVICE void split_values(const codec_encoding &e, const job *j, uint64_t first, uint32_t m, bool top, coding *s,
			 uint64_t *chunks, place *at, split_block<SIZE> *o, uint32_t lane)
{
	const codec_view &v = j->v;
	const bool prunable = has_top(v.dtype);
	const uint32_t zero = zero_of(&v);
	const uint8_t *values = e.source.values + SIZE * first;
	digest sums[SIZE];
	uint32_t seen = 0; /* number of quad rows that are not empty */

	o->present = {0, 0, false};
	o->runs = o->zeros = 0;
	for (int p = 0; p < SIZE; p++) {
		sums[p] = {0, 0};
		o->same[p] = {0, FULL};
	}
#pragma unroll 1
	for (uint32_t r = (m + WIRE_ROW - 1) / WIRE_ROW; r-- > 0;) {
		uint32_t n = there(r, lane, m), word[SIZE], i = WIRE_ROW * r + 4 * lane, others = 0;
		uint64_t section = v.planes_offset;
		uint2 offsets = {0, 0};

		if (r % CHUNK_ROWS == CHUNK_ROWS - 1 && r >= CHUNK_ROWS)
			prefetch_rows<SIZE>(values + SIZE * (WIRE_ROW * (r + 1 - 2 * CHUNK_ROWS)), lane);
		if (at && n)
			offsets = offsets_back(j, at, n, r, circle_for<SIZE>(&v));
		split_row<SIZE>(values, r, n, zero, offsets, lane, word);
		if (!v.fixed && !any_bit<SIZE>(word))
			continue;
		if (lane == r / 32)
			o->present.rows |= 1u << r % 32;
		o->present.kept += m - WIRE_ROW * r < WIRE_ROW ? m - WIRE_ROW * r : WIRE_ROW;
		for (int p = 0; p < SIZE; p++) {
			others |= p ? word[p] : 0;
			if (!(v.fixed >> p & 1))
				continue;
			digest_word(&sums[p], word[p], r, lane);
			if (r % CHUNK_ROWS == 0) {
				digest_end_chunk(&sums[p], lane, lane);
				if (r / CHUNK_ROWS == lane)
					chunks[32 * p + lane] = sums[p].mine;
			}
			put_fixed(&v, e.frame, section, first + i, word[p]);
			section += v.plane_stride;
		}
		const uint32_t some = keep_bytes(FULL, n), live = prunable ? ~equal_mask(word[0], 0) : some;
		const uint32_t none = equal_bytes(word[0], 0) & ((1u << n) - 1);

		note_live_bytes<SIZE>(word, live, o->same, &o->runs);
		o->same[0].all &= word[0] | ~some;
		if (!seen++)
			o->runs |= may_end_in_zeros<SIZE>(word, live, n, o->present.kept, lane);
		o->zeros += __popc(none);
		o->runs |= (none & ~equal_bytes(others, 0)) << 8; /* bits 8 and up temporarily hold `under` */
		if (top)
			code_quad(s, n < 4 ? filled(word[0], n, table_of(j, 0)[TABLE_PAD] * ONES) : word[0], r, n,
				  lane);
	}
	__syncwarp();
	o->present.any = o->present.kept && o->present.kept < m;
	o->present.kept = o->present.kept ? o->present.kept : m;
	o->zeros = (uint32_t)warp_sum(o->zeros);
	o->under = __any_sync(FULL, o->runs >> 8 != 0);
}

/* Set the mode of plane p in the region's head, and the plane's size in bytes. */
DEVICE void set_plane(region_plan *o, uint32_t p, uint32_t mode, uint32_t nbytes, uint32_t lane)
{
	o->head = (o->head & ~(3u << 2 * p)) | mode << 2 * p;
	if (lane == p)
		o->nbytes = nbytes;
}

/*
 * Finish plane p after all its rows were encoded. The plane remains in the coder's memory if it has at most `most`
 * bytes.
 */
DEVICE void end_coded(region_plan *o, uint32_t p, const coding &s, uint32_t most, uint32_t more, uint32_t lane)
{
	o->sizes = close_plane(s, lane);
	o->coded_nbytes = o->sizes.nbytes <= most ? o->sizes.nbytes + more : 0;
	o->low = s.low, o->more = s.more, o->nwords = s.nwords, o->nliterals = s.nliterals;
	o->p = p;
	if (o->coded_nbytes)
		set_plane(o, p, WIRE_MODE_CODED, o->coded_nbytes, lane);
}

/* Write the coded plane in the coder's memory to `out`, followed by its raw bits. */
DEVICE_CALL void put_coded(const job *j, const region_plan *o, uint8_t *scratch, uint8_t *out, uint32_t lane)
{
	const uint8_t *symbols = scratch + CODER_NBYTES;
	const uint32_t k = o->p ? o->k : o->top, half = (k + 1) / 2, at = o->sizes.nbytes;
	const int raw = raw_bits_of(&j->v, o->p);
	coding s = begin_plane(j, o->p, (uint32_t *)(scratch + PLANE_ROOM), scratch, false);

	s.low = o->low, s.more = o->more, s.nwords = o->nwords, s.nliterals = o->nliterals;
	write_plane(s, o->sizes, out, lane);
	if (raw == 4)
		for (uint32_t i = lane; i < half; i += 32)
			out[at + i] = (uint8_t)(symbols[i] >> 4 | (half + i < k ? symbols[half + i] & 0xf0 : 0));
	else if (raw)
		for (uint32_t i = lane; i < choose_raw_nbytes(k, raw); i += 32) {
			const uint32_t each = 8 / (uint32_t)raw, first = each * i;
			uint32_t byte = 0;

			for (uint32_t b = 0; b < each && first + b < k; b++)
				byte |= (uint32_t)bits_raw(symbols[first + b], raw) << (uint32_t)raw * b;
			out[at + i] = (uint8_t)byte;
		}
	__syncwarp();
}

/*
 * Read a block's values for the first time (split_values), and decide whether plane 0 is coded and whether the region
 * is pruned.
 */
template <int SIZE>
DEVICE_CALL void plan_region(const codec_encoding &e, const job *j, uint32_t coded, uint8_t *scratch, uint32_t *room,
			     uint32_t lane)
{
	region_plan *o = plan_of<SIZE>(room, lane);
	uint64_t *sums = (uint64_t *)room; /* shares memory with the buffers of put_raw */
	const codec_view &v = j->v;
	const uint32_t planes = ~v.fixed & ((1u << SIZE) - 1), m = o->m;
	const uint32_t chunks = (m + WIRE_ROW * CHUNK_ROWS - 1) / (WIRE_ROW * CHUNK_ROWS);
	const bool prunable = has_top(v.dtype), top = prunable && coded & 1;
	/* masks of planes: equal: bytes of live values are all equal; zero: all bytes are 0 */
	uint32_t equal = 0, zero = 0;
	coding s = begin_plane(j, 0, (uint32_t *)(scratch + PLANE_ROOM), scratch, false);
	split_block<SIZE> q;

	if (v.model_parts.count)
		o->at = last_place(j, o->first, m, lane);
	split_values<SIZE>(e, j, o->first, m, top, &s, sums, v.model_parts.count ? &o->at : NULL, &q, lane);
	const uint32_t kept = q.present.kept;

	o->rows = q.present.rows;
	o->top = kept;
	o->head |= q.present.any ? WIRE_REGION_GAPS : 0;
	o->k = kept;
	for (uint32_t p = 0; p < SIZE; p++) {
		const uint32_t value = any_byte(q.same[p].some);

		if (lane == p)
			o->value = value;
		equal |= (uint32_t)!differs(q.same[p]) << p;
		zero |= (uint32_t)!value << p;
		if (v.fixed >> p & 1)
			o->checksum += warp_sum(
				lane < chunks ? checksum_of_chunk(sums[32 * p + lane], WIRE_SEED_PLANE + p, lane)
					      : (uint64_t)0);
	}
	if (top && !(equal & 1))
		end_coded(o, 0, s, (uint32_t)choose_coded_most(kept, 0), 0, lane);
	if (o->coded_nbytes && !q.under && planes & ~1u && choose_prunes(q.zeros, kept)) {
		o->head |= WIRE_REGION_PRUNED;
		o->k = kept - q.zeros;
	}
	/*
	 * constant: planes whose bytes are all equal; unknown: planes that may be constant or may have runs of zeros,
	 * which is not known yet
	 */
	uint32_t constant = equal, unknown = q.runs | (prunable ? 1 : 0);

	if (prunable && q.zeros && o->k == kept) { /* the planes also contain bytes of values that are not live */
		constant &= q.under ? 1 : zero | 1;
		unknown |= q.under ? equal : 0;
	}
	o->constant = constant;
	o->unknown = unknown & planes & ~constant & ~(o->coded_nbytes ? 1u : 0u);
}

/* Choose modes and sizes of planes as if none of them were coded, except plane 0 if it is already coded. */
template <int SIZE> DEVICE void choose_modes(const job *j, region_plan *o, uint32_t lane)
{
	const uint32_t planes = ~j->v.fixed & ((1u << SIZE) - 1) & ~(o->coded_nbytes ? 1u : 0u);

#pragma unroll 1
	for (uint32_t p = 0; p < SIZE; p++) {
		if (!(planes >> p & 1))
			continue;
		const uint32_t k = p ? o->k : o->top, nbitmap = bitmap_nbytes(k);
		const uint32_t kept = o->unknown >> p & 1 ? kept_nbytes(o->kept, p, k, lane) : k;
		const uint32_t mode = choose_mode(k, (int)(o->constant >> p & 1), 0, nbitmap, kept);

		set_plane(o, p, mode,
			  mode == WIRE_MODE_CONSTANT ? 1
			  : mode == WIRE_MODE_RAW    ? k
						     : nbitmap + kept,
			  lane);
	}
	o->coded &= planes & ~o->constant;
}

/* Encode plane p, whose symbols are in scratch memory, if a sample of the symbols predicts that this saves bytes. */
DEVICE_CALL void code_plane(const job *j, uint32_t p, uint8_t *scratch, region_plan *o, uint32_t lane)
{
	const uint32_t k = p ? o->k : o->top;
	const uint32_t *symbols = (const uint32_t *)(scratch + CODER_NBYTES);
	const int raw = raw_bits_of(&j->v, p);
	uint32_t *kept = (uint32_t *)scratch;

	if (!plane_pays(j, p, symbols, k, lane))
		return;
	for (uint32_t r = 0; raw && WIRE_ROW * r < k; r++) /* bits_symbol of four bytes */
		kept[32 * r + lane] = symbols[32 * r + lane] >> (raw == 2) & (255u >> raw) * ONES;
	__syncwarp();
	end_coded(o, p,
		  code_rows(j, p, raw ? kept : symbols, k, (uint32_t *)(scratch + PLANE_ROOM), scratch, false, lane),
		  (uint32_t)choose_coded_most(k, raw), (uint32_t)choose_raw_nbytes(k, raw), lane);
}

/*
 * Encode the planes in the mask o->coded. The coded planes wait in scratch memory until they are written, except the
 * last one, which remains in the coder's memory.
 */
template <int SIZE>
DEVICE void code_others(const codec_encoding &e, const job *j, uint8_t *scratch, uint32_t *room, region_plan *o,
			uint32_t lane)
{
	uint8_t *symbols = scratch + CODER_NBYTES, *waiting = symbols + PLANE_ROOM;

#pragma unroll 1
	for (uint32_t p = 0; p < SIZE; p++) {
		if (!(o->coded >> p & 1))
			continue;
		if (o->coded_nbytes) { /* move the previous coded plane out of the coder's memory */
			put_coded(j, o, scratch, waiting + WAITING_NBYTES * o->nwaiting++, lane);
			if (lane == o->p)
				o->waiting = o->nwaiting;
			o->coded_nbytes = 0;
		}
		o->to = symbols;
		put_raw<SIZE>(j, e.source.values, 1u << p, room, lane);
		code_plane(j, p, scratch, o, lane);
	}
}

/* Return the bytes of a region before its planes: the head, and the bitmap if the block has gaps. */
DEVICE uint32_t lead_of(const region_plan *o)
{
	return 4 + (has_gaps(o) ? WIRE_GAPS_NBYTES(o->m) : 0);
}

/* Write a planned region's head, bitmap, padding, and constant and coded planes to `out` in the frame. */
template <int SIZE> DEVICE void put_planes(const job *j, uint8_t *scratch, region_plan *o, uint8_t *out, uint32_t lane)
{
	const uint8_t *waiting = scratch + CODER_NBYTES + PLANE_ROOM;
	uint32_t total;

	o->to = out + lead_of(o) + warp_scan(o->nbytes, lane, &total);
	put32(out, o->head, lane);
	if (has_gaps(o))
		put_gaps(o->rows, o->m, out + 4, lane);
	end_region(out, lead_of(o) + total, lane);
#pragma unroll 1
	for (uint32_t p = 0; p < SIZE; p++) {
		const uint32_t mode = o->head >> 2 * p & 3, nbytes = __shfl_sync(FULL, o->nbytes, (int)p);
		const uint32_t number = __shfl_sync(FULL, o->waiting, (int)p);
		uint8_t *plane = (uint8_t *)__shfl_sync(FULL, (uint64_t)o->to, (int)p);

		if (mode == WIRE_MODE_CONSTANT && nbytes && lane == p)
			*plane = (uint8_t)o->value;
		if (number)
			copy_bytes(plane, waiting + WAITING_NBYTES * (number - 1), nbytes, lane);
		else if (mode == WIRE_MODE_CODED)
			put_coded(j, o, scratch, plane, lane);
	}
	__syncwarp();
}

/* Return the mask of planes whose mode is `mode`. */
template <int SIZE> DEVICE uint32_t planes_in_mode(const region_plan *o, uint32_t mode)
{
	uint32_t planes = 0;

	for (uint32_t p = 0; p < SIZE; p++)
		planes |= (uint32_t)((o->head >> 2 * p & 3) == mode) << p;
	return planes;
}

/*
 * Encode block b: write its region, its directory entry, and its parts of fixed planes. coded: mask of planes to encode
 * if that saves bytes. scratch: scratch_nbytes() bytes. room: ROOM_WORDS(SIZE) words of the warp's shared memory.
 */
template <int SIZE>
DEVICE void write_block(const codec_encoding &e, const job *j, uint64_t b, uint32_t coded, uint8_t *scratch,
			uint32_t *room, uint32_t lane)
{
	const codec_view &v = j->v;
	region_plan *o = plan_of<SIZE>(room, lane);

	*o = {};
	o->first = b * v.block_nvalues;
	o->m = o->k = (uint32_t)block_values(&v, b);
	o->coded = coded & other_coded(v);
	plan_region<SIZE>(e, j, coded, scratch, room, lane);
	if (o->unknown)
		find_runs<SIZE>(j, e.source.values, room, lane);
	choose_modes<SIZE>(j, o, lane);
	code_others<SIZE>(e, j, scratch, room, o, lane);

	const uint32_t size = (lead_of(o) + warp_sum(o->nbytes) + WIRE_ALIGN - 1) / WIRE_ALIGN * WIRE_ALIGN;
	const uint64_t at = v.regions_offset + look_back(e.places, b, size, lane);

	if (at + size <= e.capacity) {
		put_planes<SIZE>(j, scratch, o, e.frame + at, lane);
		if (planes_in_mode<SIZE>(o, WIRE_MODE_RAW))
			put_raw<SIZE>(j, e.source.values, planes_in_mode<SIZE>(o, WIRE_MODE_RAW), room, lane);
		if (planes_in_mode<SIZE>(o, WIRE_MODE_ROWS))
			put_runs<SIZE>(j, e.source.values, planes_in_mode<SIZE>(o, WIRE_MODE_ROWS), room, lane);
		o->checksum += digest_bytes(e.frame + at, size, WIRE_SEED_REGION, lane);
	}
	put_entry(&v, e, b, at + size, checksum_of_block(o->checksum, b), lane);
}

#endif
