/*
 * delta/rows.cuh - iterate over a block and its base in rows of 32 values, one per lane, and compute the sizes of
 * codes.
 */
#ifndef CODEC_CUDA_DELTA_ROWS_CUH
#define CODEC_CUDA_DELTA_ROWS_CUH

#include "common/bit_stream.cuh"
#include "delta/choose.cuh"
#include "frame/encode.cuh"

/* Block to be encoded, and the same block of the base. */
struct delta_pair {
	delta_kind q;
	const uint8_t *base, *values;
	uint64_t first; /* index of the first value */
	uint32_t m;
};

/* Sums over a block. `bits` and `codes` in lane r are those of class r; 0 in lanes above the last class. */
struct delta_sums {
	uint64_t bits, codes;   /* size in bits, and number, of the codes of the lane's class */
	uint64_t gaps, patches; /* total bits over all changes: of their gaps (gaps), and of signs and sizes of steps
				   (patches) */
};

/* A lane's value in a row of 32 values. */
struct delta_row {
	uint64_t x, y;
	uint32_t i; /* index of the value in the block */
	bool there, changed;
	/*
	 * class of the value; if the value has changed, gap: number of values of its class since the last change in the
	 * class
	 */
	uint32_t class_, gap;
	uint32_t patch_gap; /* number of values of the block since the last change */
};

/* Return the magnitude of the step from value x to value y. */
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

/* Return the size in bits of the codes of a change of a value in a class above 0. */
template <int SIZE> DEVICE uint32_t change_nbits(const delta_kind &q, const delta_row &r)
{
	const uint64_t size = step_size<SIZE>(q, r.x, r.y);
	const uint32_t k = delta_class_k(r.class_);

	return rice_nbits(r.gap, k, WIRE_RICE_GAP_BITS) + 1 + (codes_of(size) - 1) * (k + 1) +
	       (size > WIRE_DELTA_MORE ? gamma_nbits(size - WIRE_DELTA_MORE) : 0);
}

/* Return the Rice parameter for a value of class 0. small_code returns the number to which the Rice code applies. */
template <int SIZE> DEVICE uint32_t small_k(const delta_kind &q, const delta_row &r, int scale)
{
	return delta_small_k(delta_exponent(&q, r.x), scale, SIZE);
}

template <int SIZE> DEVICE uint64_t small_code(const delta_kind &q, const delta_row &r)
{
	return delta_zigzag(delta_step(&q, r.x, r.y), SIZE);
}

/* Return the index of the highest set bit of x below bit `lane`; -1 if there is none. */
DEVICE int last_below(uint32_t x, uint32_t lane)
{
	return 31 - __clz((int)(x & ((1u << lane) - 1)));
}

/*
 * Call f(row), in all lanes, for each row of 32 values of a block. Classes are computed with `scale`. With NO_SCALE all
 * values have class 0, and patch_gap is computed but `gap` is not.
 */
template <int SIZE, class F> DEVICE void walk_rows(const delta_pair &p, int scale, F f, uint32_t lane)
{
	/*
	 * members: number of values of class `lane` since the last change in that class; since: number of values since
	 * the last change
	 */
	uint32_t members = 0, since = 0;

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
			uint32_t mine = 0; /* lane r: mask of the row's values in class r */

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

#endif
