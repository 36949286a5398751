/*
 * delta.h - DELTA: ranks, exponents and classes of single values, and the encoder's choice of scale. C, C++ and NVRTC.
 *
 * A value is the w = 8 * item bits of a number, right-justified in 64 bits. The *rank* of a value is its index among
 * all bit patterns of its dtype in ascending order of value, modulo 2^w. Neighbours differ by 1, also -0 and +0; NaN
 * patterns have ranks, too. A *step* is the difference of two ranks, modulo 2^w. docs/spec/format.md, section 10.
 */
#ifndef CODEC_DELTA_H
#define CODEC_DELTA_H

#include "bits.h"
#include "wire.h"

struct delta_kind {
	uint32_t item;  /* bytes per value */
	uint32_t mbits; /* number of mantissa bits, which lie below the exponent field */
	uint32_t last;  /* largest exponent field; 0: the dtype has no exponents */
};

BITS_FN struct delta_kind delta_kind_of(uint32_t dtype, uint32_t item)
{
	struct delta_kind q = {0, 0, 0};

	q.item = item;
	switch (dtype) {
	case 1: q.mbits = 23, q.last = 255; break;  /* float32 */
	case 2: q.mbits = 52, q.last = 2047; break; /* float64 */
	case 3: q.mbits = 7, q.last = 255; break;   /* bfloat16 */
	case 4: q.mbits = 10, q.last = 31; break;   /* float16 */
	case 5:
	case 7: q.mbits = 3, q.last = 15; break; /* float8_e4m3fn, e4m3fnuz */
	case 6:
	case 8: q.mbits = 2, q.last = 31; break; /* float8_e5m2, e5m2fnuz */
	default: break;
	}
	return q;
}

/* Return a mask of the bits of a value of `item` bytes. */
BITS_FN uint64_t delta_mask(uint32_t item)
{
	return ~0ull >> (64 - 8 * item);
}

/* Return the rank of a float's bits, or the float's bits of a rank: the function is its own inverse. */
BITS_FN uint64_t delta_rank(uint64_t x, uint32_t item)
{
	uint64_t sign = x >> (8 * item - 1) & 1;

	return x ^ (delta_mask(item) >> 1 & (0 - sign));
}

/* Return the step from one value to another, rank(to) - rank(from). */
BITS_FN uint64_t delta_step(const struct delta_kind *q, uint64_t from, uint64_t to)
{
	if (q->last) {
		from = delta_rank(from, q->item);
		to = delta_rank(to, q->item);
	}
	return (to - from) & delta_mask(q->item);
}

/* Return the value that lies `step` ranks above `from`. */
BITS_FN uint64_t delta_apply(const struct delta_kind *q, uint64_t from, uint64_t step)
{
	if (!q->last)
		return (from + step) & delta_mask(q->item);
	return delta_rank((delta_rank(from, q->item) + step) & delta_mask(q->item), q->item);
}

/* Return 1 if a step is negative: its top bit, of 8 * item, is set. */
BITS_FN uint32_t delta_negative(uint64_t step, uint32_t item)
{
	return (uint32_t)(step >> (8 * item - 1) & 1);
}

/* Return the magnitude of a step of w = 8 * item bits, at most 2^(w - 1). */
BITS_FN uint64_t delta_magnitude(uint64_t step, uint32_t item)
{
	return delta_negative(step, item) ? (0 - step) & delta_mask(item) : step;
}

/* Map steps 0, -1, 1, -2, ... to 0, 1, 2, 3, ..., and back. */
BITS_FN uint64_t delta_zigzag(uint64_t step, uint32_t item)
{
	return (step << 1 ^ (0 - (uint64_t)delta_negative(step, item))) & delta_mask(item);
}

BITS_FN uint64_t delta_unzigzag(uint64_t z, uint32_t item)
{
	return (z >> 1 ^ (0 - (z & 1))) & delta_mask(item);
}

/* Return a value's exponent field, or 1 if the field is 0, because subnormals have the spacing of exponent 1. */
BITS_FN uint32_t delta_exponent(const struct delta_kind *q, uint64_t x)
{
	uint32_t e = (uint32_t)(x >> q->mbits) & q->last;

	return e ? e : 1;
}

/* Return the class of a value under scale S: 0 for small values, 1 to 8 for successive pairs of exponents above S. */
BITS_FN uint32_t delta_class(uint32_t exponent, int scale)
{
	int above = (int)exponent - scale;

	if (above <= 0)
		return 0;
	return above >= 2 * WIRE_DELTA_CLASSES ? WIRE_DELTA_CLASSES : (uint32_t)(above + 1) / 2;
}

/* Return the Rice parameter for the step of a value of class 0. */
BITS_FN uint32_t delta_small_k(uint32_t exponent, int scale, uint32_t item)
{
	uint32_t below = (uint32_t)(scale - (int)exponent), most = 8 * item - 2;

	return below < most ? below : most;
}

/* Return the Rice parameter for the gaps between the changes of the values of one class. */
BITS_FN uint32_t delta_class_k(uint32_t class_)
{
	return 2 * class_;
}

/* Return the largest useful scale S: above it, all values are small and their Rice parameters are at the limit. */
BITS_FN int delta_most_scale(const struct delta_kind *q)
{
	return (int)q->last + 8 * (int)q->item - 2;
}

#define DELTA_SAMPLE 31          /* every 31st value is counted; prime, so that samples do not stay in one column */
#define DELTA_TOTAL (1ull << 40) /* limit of a step's magnitude in sums */

/* Encoder: statistics of the values of a block that have the same exponent. */
struct delta_bin {
	uint32_t exponent;
	uint32_t values; /* number of sampled values */
	uint64_t codes;  /* sum over changes of the smaller of magnitude and WIRE_DELTA_MORE + 1 */
	uint64_t total;  /* sum over changes of the smaller of magnitude and DELTA_TOTAL */
};

/* Return an estimate of a block's coded size in bits under scale S, from bins sorted by exponent. */
BITS_FN uint64_t delta_cost(const struct delta_bin *bin, uint32_t nbins, int scale, uint32_t item)
{
	uint64_t cost = 0;
	uint32_t i = 0;

	for (; i < nbins && (int)bin[i].exponent <= scale; i++) {
		uint32_t k = delta_small_k(bin[i].exponent, scale, item);

		cost += (uint64_t)DELTA_SAMPLE * bin[i].values * (k + 1) + (2 * bin[i].total >> k);
	}
	while (i < nbins) {
		uint32_t class_ = delta_class(bin[i].exponent, scale), k = delta_class_k(class_);
		uint64_t values = 0, codes = 0;

		for (; i < nbins && delta_class(bin[i].exponent, scale) == class_; i++) {
			values += bin[i].values;
			codes += bin[i].codes;
		}
		cost += codes * (k + 2) + (DELTA_SAMPLE * values >> k);
	}
	return cost;
}

/* Return the scale of least cost, the smallest if several cost the same. Search in steps of 8, then around the best.
 */
BITS_LARGE_FN int delta_scale(const struct delta_kind *q, const struct delta_bin *bin, uint32_t nbins)
{
	int low = (int)bin[0].exponent - WIRE_DELTA_BIAS, best, middle;
	int high = (int)bin[nbins - 1].exponent + 8 * (int)q->item - 2;
	uint64_t least = ~0ull;

	low = low < -WIRE_DELTA_BIAS ? -WIRE_DELTA_BIAS : low;
	best = low;
	for (int scale = low; scale <= high; scale += 8) {
		uint64_t cost = delta_cost(bin, nbins, scale, q->item);

		if (cost < least) {
			least = cost;
			best = scale;
		}
	}
	middle = best;
	least = ~0ull;
	for (int scale = middle - 7 < low ? low : middle - 7; scale <= middle + 7 && scale <= high; scale++) {
		uint64_t cost = delta_cost(bin, nbins, scale, q->item);

		if (cost < least) {
			least = cost;
			best = scale;
		}
	}
	return best;
}

/* Return the bit length of x; 0 for 0. */
BITS_FN uint32_t delta_length(uint64_t x)
{
	uint32_t n = 0;

	for (; x >> 8; x >>= 8)
		n += 8;
	for (; x; x >>= 1)
		n++;
	return n;
}

/* Return the Rice parameter for gaps if `changes` of m values change: floor(log2(2 m / (3 changes))), at least 0. */
BITS_FN uint32_t delta_gap_k(uint64_t m, uint64_t changes)
{
	uint32_t k = 0;

	while (k < WIRE_DELTA_MAX_GAP_K && 3 * changes << (k + 1) <= 2 * m)
		k++;
	return k;
}

#endif
