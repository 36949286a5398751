/*
 * rows/ternary.cuh - encode ternary with 2 bits and without residual. docs/spec/encoder.md, section 7.
 *
 * A step encodes 256 values, 8 per lane. Most codes follow from comparing the value's random bits with the integer part
 * of |x| / scale * 2^16. In about 1 step of 128, this does not decide every code; put_group_slowly then encodes the
 * groups of that step again.
 */
#ifndef CODEC_CUDA_ROWS_TERNARY_CUH
#define CODEC_CUDA_ROWS_TERNARY_CUH

#include "rows/draws.cuh"

/*
 * Codes of 8 values, 2 bits each. sure: false if a code may be wrong, so that put_group_slowly must encode the values.
 */
struct ternary_codes {
	uint32_t packed;
	bool sure;
};

/*
 * Return the codes of 8 values, computed from the first 16 random bits of each. by: result of round_over for a scale s
 * of at least 2^-60.
 *
 * round_ternary_code compares the random bits h with the integer part of the rounded product of |x| and `by`. That
 * integer part equals `part`, the integer part of the exact product, or part + 1. If h is neither `part` nor part + 1,
 * comparing h with `part` gives the same code. This holds also if |x| is at least s, since the exact product is then
 * larger than 65535.
 */
DEVICE ternary_codes code_ternary(const uint32_t x[8], float by, const uint32_t draws[4])
{
	uint32_t bits = 0, least = ~0u;

	for (int k = 7; k >= 0; k--) {
		const uint32_t part = round_bits(__fmaf_rz(round_float(x[k] & ROUND_ABS), by, 0x1p23f));
		const uint32_t h = k % 2 ? draws[k / 2] >> 16 : draws[k / 2] & 0xffff;
		const uint32_t over =
			h - part + round_bits(0x1p23f); /* negative: the code is not 0; 0 and 1: uncertain */

		least = over < least ? over : least;
		bits = __funnelshift_l(over, bits, 1);
		bits = __funnelshift_l(x[k], bits, 1);
	}
	const uint32_t kept = bits >> 1 & 0x5555, positive = kept & ~bits, negative = kept & bits;

	return {positive + 2 * negative, least > 1};
}

/*
 * Write the codes of a block's values, in pairs of steps of 256 values. Does nothing if the options or the alignment
 * require put_groups. The result's `most` is the largest magnitude, computed only if `given`: the spec gives the scale,
 * and check_above compares.
 */
DEVICE groups_put put_ternary_steps(const row_job &r, uint8_t *to, bool given, uint32_t lane)
{
	const uint32_t AT_ONCE = 2; /* number of steps whose loads are in flight together */
	const codec_source source = {global(r.source.values), NULL, NULL};
	const uint32_t dtype = r.v->dtype, nbytes = dtype == CODEC_FLOAT32 ? 4 : 2,
		       whole = r.p.m / (AT_ONCE * WARP_STEP) * (AT_ONCE * WARP_STEP);
	const uint64_t first = r.p.first;
	const float scale = r.p.part->scale[0];
	uint32_t most = 0;

	if (r.q.bits != 2 || scale < 0x1p-60f || r.source.sums || r.source.residual || first % 8 || (uint64_t)to % 2 ||
	    !in_quads(dtype, &source) || !draws_share_high(first, r.p.m))
		return {0, 0, CODEC_OK};
	const float by = round_over(scale, 65536).by;
	const group_draws key = group_draws_of(r.key, (uint32_t)(first / 8 >> 32));

	to = global(to);
	for (uint32_t i = 0; i < whole; i += AT_ONCE * WARP_STEP) {
		const uint32_t next = i + 2 * AT_ONCE * WARP_STEP;
		uint32_t x[8 * AT_ONCE];

		values_at_groups<AT_ONCE>(dtype, &source, first + i + 8 * lane, x);
		if (next + AT_ONCE * WARP_STEP <= whole && lane < AT_ONCE * WARP_STEP / LINE_NBYTES * nbytes)
			prefetch(source.values + nbytes * (first + next) + LINE_NBYTES * lane);
		if (given)
			most = largest_of<8 * AT_ONCE>(most, x, ~0u);
		for (uint32_t k = 0; k < AT_ONCE; k++) {
			const uint32_t mine = i + k * WARP_STEP + 8 * lane;
			uint32_t draws[4];

			draw_group(key, (uint32_t)((first + mine) / 8), draws);
			const ternary_codes codes = code_ternary(x + 8 * k, by, draws);

			if (__any_sync(FULL, !codes.sure))
				put_group_slowly<CODEC_TERNARY>(r, mine, scale, to + mine / 4);
			else
				*(uint16_t *)(to + mine / 4) = (uint16_t)codes.packed;
		}
	}
	return {whole, most, CODEC_OK};
}

#endif
