/*
 * delta/choose.cuh - choose the scale of a block from a histogram of exponents, as native/src/exact/delta.h does. Each
 * lane computes the cost of a different scale. docs/spec/encoder.md, section 10.
 */
#ifndef CODEC_CUDA_DELTA_CHOOSE_CUH
#define CODEC_CUDA_DELTA_CHOOSE_CUH

#include "delta/delta.cuh"

/* scale of blocks that do not use classes (patches): all values count as class 0 */
#define NO_SCALE 0x7fffffff

/* Bin of one exponent in a block's histogram, in scratch memory. Members: see delta_bin. */
struct exponent_bin {
	uint32_t values, codes;
	unsigned long long total;
};

/*
 * Return an estimate of a block's coded size in bits under a scale, as delta_cost does, from the bins of exponents
 * `low` to `high`. Exponents without values or changes contribute 0.
 */
DEVICE_CALL uint64_t cost_of(const exponent_bin *bins, int low, int high, int scale, uint32_t item)
{
	uint64_t cost = 0;
	int e = low;

	for (; e <= high && e <= scale; e++) {
		const exponent_bin b = bins[e];
		const uint32_t k = delta_small_k((uint32_t)e, scale, item);

		cost += (uint64_t)DELTA_SAMPLE * b.values * (k + 1) + (2 * b.total >> k);
	}
	while (e <= high) {
		const uint32_t class_ = delta_class((uint32_t)e, scale), k = delta_class_k(class_);
		uint64_t values = 0, codes = 0;

		for (; e <= high && delta_class((uint32_t)e, scale) == class_; e++) {
			values += bins[e].values;
			codes += bins[e].codes;
		}
		cost += codes * (k + 2) + (DELTA_SAMPLE * values >> k);
	}
	return cost;
}

/* Return the scale of least cost over all lanes; of equal costs, the smallest scale. */
DEVICE int least_scale(uint64_t cost, int scale)
{
	for (uint32_t by = 16; by; by /= 2) {
		const uint64_t other = __shfl_xor_sync(FULL, cost, by);
		const int their = __shfl_xor_sync(FULL, scale, by);
		const bool less = other < cost || (other == cost && their < scale);

		cost = less ? other : cost;
		scale = less ? their : scale;
	}
	return scale;
}

/* Return the scale of least cost among first, first + step, ... up to last. Lanes try scales round-robin. */
DEVICE int best_scale(const exponent_bin *bins, int low, int high, int first, int last, int step, uint32_t item,
		      uint32_t lane)
{
	uint64_t least = ~0ull;
	int best = NO_SCALE;

	for (int scale = first + step * (int)lane; scale <= last; scale += 32 * step) {
		const uint64_t cost = cost_of(bins, low, high, scale, item);

		if (cost < least) {
			least = cost;
			best = scale;
		}
	}
	return least_scale(least, best);
}

/* Choose the scale of a block from its bins, as delta_scale does. */
DEVICE int choose_scale(const delta_kind &q, const exponent_bin *bins, uint32_t lane)
{
	uint32_t low = ~0u, high = 0;

	for (uint32_t e = 1 + lane; e <= q.last; e += 32)
		if (bins[e].values || bins[e].codes) {
			low = e < low ? e : low;
			high = e;
		}
	high = warp_max(high);
	low = ~warp_max(~low);
	const int first = (int)low - WIRE_DELTA_BIAS > -WIRE_DELTA_BIAS ? (int)low - WIRE_DELTA_BIAS : -WIRE_DELTA_BIAS;
	const int last = (int)high + 8 * (int)q.item - 2;
	const int middle = best_scale(bins, (int)low, (int)high, first, last, 8, q.item, lane);
	const int from = middle - 7 < first ? first : middle - 7, to = middle + 7 > last ? last : middle + 7;

	return best_scale(bins, (int)low, (int)high, from, to, 1, q.item, lane);
}

#endif
