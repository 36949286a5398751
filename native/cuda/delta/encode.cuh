/* delta/encode.cuh - encode the changes of a block by a warp. docs/format.md and docs/encoder.md, section 10.
 *
 * A warp reads a block three times: to compare it with the base, to compute the size of its region, and to write it.
 * The place of each code follows from sums over lanes, so lanes write codes of a row of 32 values at once.
 */
#ifndef CODEC_CUDA_DELTA_ENCODE_CUH
#define CODEC_CUDA_DELTA_ENCODE_CUH

#include "common/bit_stream.cuh"
#include "delta/choose.cuh"
#include "frame/encode.cuh"

/* Block to be encoded, and the base's block. */
struct delta_pair {
	delta_kind q;
	const uint8_t *base, *values;
	uint64_t first; /* index of the first value */
	uint32_t m;
};

/* Sums over a block. Lane r has those of class r in bits; other lanes 0. */
struct delta_sums {
	uint64_t bits, codes;   /* of the lane's class */
	uint64_t gaps, patches; /* of all changes: bits of gaps, and of signs and sizes of steps */
};

/* Row of 32 values, one a lane. */
struct delta_row {
	uint64_t x, y;
	uint32_t i; /* index in the block */
	bool there, changed;
	uint32_t class_, gap; /* gap: to the last change in the class, as its code says; of changed values */
	uint32_t patch_gap;   /* values since the change before */
};

/* Return the size of a step. */
template <int SIZE> DEVICE uint64_t step_size(const delta_kind &q, uint64_t x, uint64_t y)
{
	return delta_magnitude(delta_step(&q, x, y), SIZE);
}

DEVICE uint32_t codes_of(uint64_t size)
{
	return size <= WIRE_DELTA_MORE ? (uint32_t)size : WIRE_DELTA_MORE + 1;
}

DEVICE uint32_t gamma_nbits(uint64_t x)
{
	return 2 * delta_length(x) - 1;
}

/* Return the size in bits of the codes of a change in a class above 0. */
template <int SIZE> DEVICE uint32_t change_nbits(const delta_kind &q, const delta_row &r)
{
	const uint64_t size = step_size<SIZE>(q, r.x, r.y);
	const uint32_t k = delta_class_k(r.class_);

	return rice_nbits(r.gap, k, WIRE_RICE_GAP_BITS) + 1 + (codes_of(size) - 1) * (k + 1) +
	       (size > WIRE_DELTA_MORE ? gamma_nbits(size - WIRE_DELTA_MORE) : 0);
}

/* Return the Rice parameter and the number of a small value's code. */
template <int SIZE> DEVICE uint32_t small_k(const delta_kind &q, const delta_row &r, int scale)
{
	return delta_small_k(delta_exponent(&q, r.x), scale, SIZE);
}

template <int SIZE> DEVICE uint64_t small_code(const delta_kind &q, const delta_row &r)
{
	return delta_zigzag(delta_step(&q, r.x, r.y), SIZE);
}

/* Return the highest set bit of x below bit `lane`; -1: there is none. */
DEVICE int last_below(uint32_t x, uint32_t lane)
{
	return 31 - __clz((int)(x & ((1u << lane) - 1)));
}

/*
 * Pass all rows of a block to f(row), called by all lanes. Classes are those under `scale`; with NO_SCALE all values
 * have class 0, and only patch_gap is computed.
 */
template <int SIZE, class F> DEVICE void walk_rows(const delta_pair &p, int scale, F f, uint32_t lane)
{
	uint32_t members = 0, since = 0; /* members of class `lane` since its last change; values since a change */

	for (uint32_t from = 0; from < p.m; from += 32) {
		delta_row r = {0, 0, from + lane, from + lane < p.m, false, 0, 0, 0};

		if (r.there) {
			r.x = load_value<SIZE>(p.base, p.first + r.i);
			r.y = load_value<SIZE>(p.values, p.first + r.i);
			r.changed = r.x != r.y;
			r.class_ = scale == NO_SCALE ? 0 : delta_class(delta_exponent(&p.q, r.x), scale);
		}
		const uint32_t changed = __ballot_sync(FULL, r.changed), n = p.m - from < 32 ? p.m - from : 32;
		const int before = last_below(changed, lane);

		r.patch_gap = before < 0 ? since + lane : lane - 1 - (uint32_t)before;
		since = changed ? n - 1 - (31 - (uint32_t)__clz((int)changed)) : since + n;
		if (scale != NO_SCALE) {
			uint32_t mine = 0; /* lane r: the members of class r */

			for (uint32_t c = 1; c <= WIRE_DELTA_CLASSES; c++) {
				uint32_t mask = __ballot_sync(FULL, r.there && r.class_ == c);

				mine = lane == c ? mask : mine;
			}
			const uint32_t own = __shfl_sync(FULL, mine, r.class_),
				       had = __shfl_sync(FULL, members, r.class_);
			const int last = last_below(changed & own, lane);
			const uint32_t ranks = own & ((1u << lane) - 1) & (last < 0 ? FULL : ~(FULL >> (31 - last)));

			r.gap = (uint32_t)__popc(ranks) + 1 + (last < 0 ? had : 0);
			const uint32_t some = changed & mine;

			members = some ? (uint32_t)__popc(mine & ~(FULL >> __clz((int)some)))
				       : members + (uint32_t)__popc(mine);
		}
		f(r);
	}
}

/* Compare a block with the base: returns the number of changes, and the parts of both digests. */
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

/* Count a block's exponents and changes to `bins`. */
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

/* Compute the sums of a block, from which the size of its region in each mode follows. gap_k: parameter of patches. */
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

DEVICE uint32_t put_gamma(uint8_t *stream, uint32_t bit, uint64_t x)
{
	const uint32_t t = delta_length(x) - 1;

	or_bits(stream, bit + t, 1);
	or_stream(stream, bit + t + 1, x & ((1ull << t) - 1));
	return bit + 2 * t + 1;
}

/* Write the codes of a change in a class above 0. */
template <int SIZE> DEVICE void put_change(const delta_kind &q, const delta_row &r, uint8_t *stream, uint32_t bit)
{
	const uint64_t step = delta_step(&q, r.x, r.y), size = delta_magnitude(step, SIZE);
	const uint32_t k = delta_class_k(r.class_);

	bit = put_rice(stream, bit, r.gap, k, WIRE_RICE_GAP_BITS);
	or_bits(stream, bit++, delta_negative(step, SIZE));
	for (uint32_t i = 1; i < codes_of(size); i++, bit += k + 1)
		or_bits(stream, bit, 1);
	if (size > WIRE_DELTA_MORE)
		put_gamma(stream, bit, size - WIRE_DELTA_MORE);
}

/* Write steps of a dtype with exponents to a stream of zeros. s: from sum_block. */
template <int SIZE>
DEVICE void put_steps(const delta_pair &p, int scale, const delta_sums &s, uint32_t top, uint8_t *stream, uint32_t lane)
{
	uint32_t all, at = warp_scan((uint32_t)s.bits, lane, &all); /* lane r: position of class r */

	if (lane && lane <= top)
		at = put_gamma(stream, at, s.codes + 1);
	walk_rows<SIZE>(
		p, scale,
		[&](const delta_row &r) {
			const bool small = r.there && !r.class_;
			const uint32_t k = small ? small_k<SIZE>(p.q, r, scale) : 0;
			const uint64_t code = small ? small_code<SIZE>(p.q, r) : 0;
			uint32_t nbits = small ? rice_nbits(code, k, 8 * SIZE) : 0, place = 0;

			if (__any_sync(FULL, small)) {
				const uint32_t rank = warp_scan(nbits, lane, &all), from = __shfl_sync(FULL, at, 0);

				if (small)
					put_rice(stream, from + rank, code, k, 8 * SIZE);
				at += lane ? 0 : all;
			}
			nbits = r.changed && r.class_ ? change_nbits<SIZE>(p.q, r) : 0;
			for (uint32_t left = __ballot_sync(FULL, nbits != 0); left; left &= left - 1) {
				const uint32_t from = (uint32_t)__ffs((int)left) - 1;
				const uint32_t class_ = __shfl_sync(FULL, r.class_, from);
				const uint32_t here = __shfl_sync(FULL, at, class_),
					       more = __shfl_sync(FULL, nbits, from);

				place = lane == from ? here : place;
				at += lane == class_ ? more : 0;
			}
			if (nbits)
				put_change<SIZE>(p.q, r, stream, place);
		},
		lane);
}

/* Write patches to a stream of zeros, or (`steps`) steps of a dtype without exponents. */
template <int SIZE>
DEVICE void put_patches(const delta_pair &p, uint32_t gap_k, bool steps, uint8_t *stream, uint32_t lane)
{
	uint32_t at = 0, all;

	walk_rows<SIZE>(
		p, NO_SCALE,
		[&](const delta_row &r) {
			const uint64_t step = delta_step(&p.q, r.x, r.y), size = delta_magnitude(step, SIZE);
			uint32_t nbits = 0;

			if (!__any_sync(FULL, r.changed))
				return;
			if (r.changed)
				nbits = rice_nbits(r.patch_gap, gap_k, WIRE_RICE_GAP_BITS) +
					(steps ? 1 + gamma_nbits(size) : 8 * SIZE);
			uint32_t bit = at + warp_scan(nbits, lane, &all);

			at += all;
			if (!r.changed)
				return;
			bit = put_rice(stream, bit, r.patch_gap, gap_k, WIRE_RICE_GAP_BITS);
			if (!steps) {
				or_stream(stream, bit, r.x ^ r.y);
				return;
			}
			or_bits(stream, bit, delta_negative(step, SIZE));
			put_gamma(stream, bit + 1, size);
		},
		lane);
}

/* Copy a block's values to a multiple of 4. */
template <int SIZE> DEVICE void put_raw(const delta_pair &p, uint8_t *to, uint32_t lane)
{
	const uint8_t *from = p.values + p.first * SIZE;
	const uint32_t nbytes = p.m * SIZE;

	for (uint32_t k = 4 * lane; k < nbytes; k += 128) {
		const uint32_t n = nbytes - k < 4 ? nbytes - k : 4, word = load_bytes(from + k, n);

		if (n == 4)
			*(uint32_t *)(to + k) = word;
		for (uint32_t i = 0; i < n && n < 4; i++)
			to[k + i] = (uint8_t)(word >> 8 * i);
	}
}

/* Region of a block with changes: its head, and the size of what follows. */
struct delta_region {
	uint32_t mode, field, nbytes;
};

/* Choose the smallest mode of a block. */
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

/* Fill a region with zeros, but for its head. */
DEVICE void open_delta(uint8_t *region, uint32_t size, uint32_t head, uint32_t lane)
{
	for (uint32_t i = lane; i < size / 4; i += 32)
		((uint32_t *)region)[i] = i ? 0 : head;
	__syncwarp();
}

/* Encode block b. Nothing is written behind the frame's capacity. bins: scratch memory. */
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
