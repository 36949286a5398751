/*
 * delta/encode.cuh - encode the changes of a block by a warp. docs/spec/format.md and docs/spec/encoder.md, section 10.
 *
 * A warp reads a block three times: to compare it with the base, to compute the size of its region, and to write the
 * region. The bit position of each code is a prefix sum over lanes, so that lanes write the codes of a row of 32 values
 * at once.
 */
#ifndef CODEC_CUDA_DELTA_ENCODE_CUH
#define CODEC_CUDA_DELTA_ENCODE_CUH

#include "delta/put.cuh"

/*
 * Compare a block of n values with the base. Return the number of changes, and the block's contributions to the digests
 * of base and result in *base and *result.
 */
template <int SIZE>
DEVICE uint32_t compare_block(const delta_pair &p, uint64_t n, uint64_t *base, uint64_t *result, uint32_t lane)
{
	const uint64_t chunk = p.first * SIZE / (4 * WIRE_CHUNK_WORDS);
	uint32_t changes = 0;

	*base = *result = 0;
	for (uint32_t c = 0; c < chunks_of((uint64_t)p.m * SIZE); c++) {
		*base += digest_chunk(p.base, n * SIZE, WIRE_SEED_VALUES, chunk + c, lane);
		*result += digest_chunk(p.values, n * SIZE, WIRE_SEED_VALUES, chunk + c, lane);
	}
	for (uint32_t i = lane; i < p.m; i += 32)
		changes += load_value<SIZE>(p.base, p.first + i) != load_value<SIZE>(p.values, p.first + i);
	return warp_sum(changes);
}

/* Compute the histogram `bins` of a block: values and changes per exponent. */
template <int SIZE> DEVICE void fill_bins(const delta_pair &p, exponent_bin *bins, uint32_t lane)
{
	for (uint32_t e = lane; e <= p.q.last; e += 32)
		bins[e] = {0, 0, 0};
	__syncwarp();
	for (uint32_t i = lane; i < p.m; i += 32) {
		const uint64_t x = load_value<SIZE>(p.base, p.first + i), y = load_value<SIZE>(p.values, p.first + i);
		exponent_bin *bin = bins + delta_exponent(&p.q, x);

		if (i % DELTA_SAMPLE == 0)
			atomicAdd(&bin->values, 1u);
		if (x == y)
			continue;
		const uint64_t size = step_size<SIZE>(p.q, x, y);

		atomicAdd(&bin->codes, codes_of(size));
		atomicAdd(&bin->total, (unsigned long long)(size < DELTA_TOTAL ? size : DELTA_TOTAL));
	}
	__syncwarp();
}

/*
 * Add up the sizes of a block's codes under `scale`; choose_mode computes the size of the region in each mode from
 * these sums. gap_k: Rice parameter of the gaps of patches.
 */
template <int SIZE>
DEVICE delta_sums sum_block(const delta_pair &p, int scale, uint32_t gap_k, uint32_t *top, uint32_t lane)
{
	delta_sums s = {0, 0, 0, 0};
	uint64_t small = 0;
	uint32_t most = 0;

	walk_rows<SIZE>(
		p, scale,
		[&](const delta_row &r) {
			const uint32_t changed = __ballot_sync(FULL, r.changed);
			uint32_t nbits = 0, codes = 0;

			most = r.there && r.class_ > most ? r.class_ : most;
			if (r.there && !r.class_ && scale != NO_SCALE)
				small += rice_nbits(small_code<SIZE>(p.q, r), small_k<SIZE>(p.q, r, scale), 8 * SIZE);
			if (r.changed) {
				const uint64_t size = step_size<SIZE>(p.q, r.x, r.y);

				s.gaps += rice_nbits(r.patch_gap, gap_k, WIRE_RICE_GAP_BITS);
				s.patches += 1 + gamma_nbits(size);
				codes = codes_of(size);
				nbits = r.class_ ? change_nbits<SIZE>(p.q, r) : 0;
			}
			for (uint32_t left = scale == NO_SCALE ? 0 : changed; left; left &= left - 1) {
				const uint32_t from = (uint32_t)__ffs((int)left) - 1;
				const uint32_t class_ = __shfl_sync(FULL, r.class_, from);
				const uint32_t more = __shfl_sync(FULL, nbits, from),
					       some = __shfl_sync(FULL, codes, from);

				s.bits += lane && lane == class_ ? more : 0;
				s.codes += lane && lane == class_ ? some : 0;
			}
		},
		lane);
	small = warp_sum(small);
	*top = warp_max(most);
	s.gaps = warp_sum(s.gaps);
	s.patches = warp_sum(s.patches);
	if (lane && lane <= *top)
		s.bits += gamma_nbits(s.codes + 1);
	s.bits = lane ? s.bits : small;
	return s;
}

/* Region of a block with changes: its head, and the size in bytes of the data after the head. */
struct delta_region {
	uint32_t mode, field, nbytes;
};

/* Choose the mode that gives the smallest region of a block. */
DEVICE delta_region choose_mode(const delta_pair &p, const delta_sums &s, int scale, uint32_t gap_k, uint32_t changes)
{
	const uint64_t room = (uint64_t)p.m * p.q.item, classes = warp_sum(s.bits);
	const uint64_t patches = (s.gaps + 8ull * p.q.item * changes + 7) / 8;
	const uint64_t steps = ((p.q.last ? classes : s.gaps + s.patches) + 7) / 8;
	delta_region r = {WIRE_DELTA_STEPS, p.q.last ? (uint32_t)(scale + WIRE_DELTA_BIAS) : gap_k, 0};
	uint64_t size = steps;

	if (patches < steps) {
		r.mode = WIRE_DELTA_PATCHES;
		r.field = gap_k;
		size = patches;
	}
	if ((4 + size + 7) / WIRE_ALIGN >= (4 + room + 7) / WIRE_ALIGN) {
		r.mode = WIRE_DELTA_RAW;
		r.field = 0;
		size = room;
	}
	r.nbytes = (uint32_t)size;
	return r;
}

/* Write a region's head, and fill the rest of the region with zeros. */
DEVICE void open_delta(uint8_t *region, uint32_t size, uint32_t head, uint32_t lane)
{
	for (uint32_t i = lane; i < size / 4; i += 32)
		((uint32_t *)region)[i] = i ? 0 : head;
	__syncwarp();
}

/*
 * Encode block b. Nothing is written past the frame's capacity. bins: scratch memory for the histogram of exponents.
 */
template <int SIZE>
DEVICE void write_delta(const codec_encoding &e, const codec_view &v, uint64_t b, exponent_bin *bins, uint32_t lane)
{
	const delta_pair p = {kind_of_delta<SIZE>(v.dtype), e.by.base, e.source.values, b * v.block_nvalues,
			      (uint32_t)block_values(&v, b)};
	delta_region r = {WIRE_DELTA_SAME, 0, 4};
	delta_sums s = {0, 0, 0, 0};
	uint64_t base, result;
	int scale = NO_SCALE;
	uint32_t gap_k = 0, top = 0;
	const uint32_t changes = compare_block<SIZE>(p, v.n, &base, &result, lane);

	if (lane == 0) {
		atomicAdd(&e.out->base, (unsigned long long)base);
		atomicAdd(&e.out->result, (unsigned long long)result);
		if (changes)
			atomicOr(&e.out->changed, 1u);
	}
	if (changes) {
		gap_k = delta_gap_k(p.m, changes);
		if (p.q.last) {
			fill_bins<SIZE>(p, bins, lane);
			scale = choose_scale(p.q, bins, lane);
		}
		s = sum_block<SIZE>(p, scale, gap_k, &top, lane);
		r = choose_mode(p, s, scale, gap_k, changes);
	}
	const uint32_t size = (4 + r.nbytes + WIRE_ALIGN - 1) / WIRE_ALIGN * WIRE_ALIGN;
	const uint64_t at = v.regions_offset + look_back(e.places, b, size, lane);
	uint64_t checksum = 0;

	if (at + size <= e.capacity) {
		uint8_t *region = e.frame + at, *stream = region + 4;

		open_delta(region, size,
			   changes ? r.mode | r.field << WIRE_DELTA_SCALE_AT | (changes - 1) << WIRE_DELTA_CHANGES_AT
				   : 0,
			   lane);
		if (r.mode == WIRE_DELTA_RAW)
			put_raw<SIZE>(p, stream, lane);
		else if (r.mode == WIRE_DELTA_STEPS && p.q.last)
			put_steps<SIZE>(p, scale, s, top, stream, lane);
		else if (changes)
			put_patches<SIZE>(p, gap_k, r.mode == WIRE_DELTA_STEPS, stream, lane);
		__syncwarp();
		checksum = checksum_of_block(digest_bytes(region, size, WIRE_SEED_REGION, lane), b);
	}
	put_entry(&v, e, b, at + size, checksum, lane);
}

#endif
