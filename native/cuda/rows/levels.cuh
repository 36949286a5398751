/*
 * rows/levels.cuh - encode quantize with 2, 4 or 8 bits, without zero points and residual, in rows of 64, 128 or a
 * multiple of 256 values. This covers most tensors of quantize. docs/spec/encoder.md, section 7.
 *
 * A step encodes 256 values, 8 per lane. A value's position among the levels is rounded by float additions in
 * round-toward-zero mode, and codes are packed as bytes of words. Rows whose scale is below 2^-60 are rare;
 * put_group_slowly encodes them again.
 */
#ifndef CODEC_CUDA_ROWS_LEVELS_CUH
#define CODEC_CUDA_ROWS_LEVELS_CUH

#include "rows/draws.cuh"

/*
 * Scale of a row, as two factors with which level_of computes a value's position among the levels. by: reciprocal of
 * the largest magnitude, or 1. times: 0 in rows of zeros, so that their codes are round_level_zero.
 */
struct level_scale {
	float by, times;
};

template <bool ODD> DEVICE level_scale level_scale_of(float levels, uint32_t max)
{
	const float times = ODD ? levels : round_mul(levels, 0.5f);

	return {round_div(1, round_float(max ? max : round_bits(1.0f))), max ? times : 0.0f};
}

/* Return true if a row's largest magnitude `max` is not 0, but so small that round_over needs two factors. */
DEVICE bool is_tiny(uint32_t max)
{
	return max - 1 < round_bits(0x1p-60f) - 1;
}

/*
 * Return the code of value x, or with ODD levels the magnitude of its level. WIDE: the result is in the lower bits.
 * Otherwise the result has at most 4 bits and begins at bit 17; the other bits are undefined. draws: half `k` has the
 * value's 16 random bits.
 *
 * round_place adds floor(2^17 place) and 2 h + 1 as integers. The float sum here has the same integer part, because its
 * last bit has a weight of at most 2^-17 and the sum is rounded toward zero.
 */
template <bool ODD, bool WIDE> DEVICE uint32_t level_of(uint32_t x, const level_scale &s, uint32_t draws, uint32_t k)
{
	const float ratio = round_mul(round_float(ODD ? x & ROUND_ABS : x), s.by);
	const float place = round_mul(ODD ? ratio : round_add(ratio, 1.0f), s.times);
	const uint32_t h = k ? draws & 0xffff0000 : draws << 16;

	if (!WIDE) /* the last bit of floats from 64 to 128 has the weight 2^-17 */
		return round_bits(__fadd_rz(place, 64 + 0x1p-17f)) + (h >> 15);
	const float more = round_float((h >> 9) + round_bits(1 + 0x1p-17f)); /* 1 + (2 h + 1) / 2^17 */

	return round_bits(__fadd_rz(__fadd_rz(place, more), 0x1p23f - 1));
}

/* Return byte `byte` of each of four words. */
DEVICE uint32_t bytes_of_four(uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t byte)
{
	const uint32_t two = byte * 0x11 + 0x40;

	return __byte_perm(__byte_perm(a, b, two), __byte_perm(c, d, two), 0x5410);
}

/*
 * ODD levels: return the codes of four values, given the magnitudes of their levels, one per byte. x: the values, from
 * which the signs are taken.
 */
DEVICE uint32_t signed_levels(uint32_t magnitudes, uint32_t levels, const uint32_t *x, uint32_t apart)
{
	const uint32_t below = sign_bytes(x[0], x[apart], x[2 * apart], x[3 * apart]);

	return ((levels + magnitudes) & ~below) | ((levels - magnitudes) & below);
}

/* Write the codes of 8 values, packed to BITS bits each. levels: code of level 0 in each byte (ODD). */
template <int BITS, bool ODD>
DEVICE void put_levels(const uint32_t x[8], const level_scale &s, const uint32_t draws[4], uint32_t levels, uint8_t *to)
{
	const uint32_t fields = BITS == 4 ? 0x0f0f0f0f : 0x03030303;
	uint32_t z[8];

	for (uint32_t k = 0; k < 8; k++)
		z[k] = level_of<ODD, BITS == 8>(x[k], s, draws[k / 2], k % 2);
	if (BITS == 8) {
		for (uint32_t k = 0; k < 2; k++) {
			const uint32_t four = bytes_of_four(z[4 * k], z[4 * k + 1], z[4 * k + 2], z[4 * k + 3], 0);

			((uint32_t *)to)[k] = ODD ? signed_levels(four, levels, x + 4 * k, 1) : four;
		}
		return;
	}
	/* codes of the values with even and with odd index; in each byte, the code begins at bit 1 */
	uint32_t even = bytes_of_four(z[0], z[2], z[4], z[6], 2), odd = bytes_of_four(z[1], z[3], z[5], z[7], 2);

	if (ODD) {
		even = signed_levels(even >> 1 & fields, levels, x, 2);
		odd = signed_levels(odd >> 1 & fields, levels, x + 1, 2);
		even |= odd << BITS;
	} else {
		even = (even >> 1 & fields) | (odd << (BITS - 1) & fields << BITS);
	}
	if (BITS == 4) {
		*(uint32_t *)to = even;
	} else {
		even |= even >> 4;
		*(uint16_t *)to = (uint16_t)__byte_perm(even, 0, 0x4420);
	}
}

/* Parameters of the loops over a block's values. */
struct level_loop {
	codec_source source;
	uint32_t dtype, nbytes;
	uint64_t first; /* index in the tensor of the block's first value */
	float levels;   /* largest code; with ODD levels, largest magnitude of a level */
	uint32_t zero;  /* ODD levels: code of level 0 in each byte */
	/*
	 * log2 of the number of values per row, if the step that encodes a row also computes its scale; 0: rows are
	 * longer
	 */
	uint32_t row_log2;
	uint32_t end;         /* number of values of the block to encode */
	uint8_t *scales, *to; /* outputs: scales of the block's rows; packed codes */
	group_draws draws;
	bool random;
};

/*
 * A lane's results of the loop over small rows. worst: largest magnitude, as bits of float32. tiny: bit i is set if
 * step 2 i or 2 i + 1 has a row that put_group_slowly must encode after the loop; a call within the loop would make the
 * compiler spill registers.
 */
struct level_rows {
	uint32_t worst, tiny;
};

static_assert(WIRE_ROW_BLOCK <= 32 * 2 * WARP_STEP, "a bit of `tiny` for two steps");

/*
 * Encode N steps of 256 values from value i of the block on. Long rows: s is the scale of the values' row. Small rows:
 * compute the scales here, and update *rows.
 */
template <int BITS, bool ODD, int N>
DEVICE void put_level_steps(const level_loop &c, uint32_t i, level_scale s, level_rows *rows, uint32_t lane)
{
	const uint64_t e = c.first + i + 8 * lane;
	const uint32_t lanes = 1u << c.row_log2 >> 3, next = i + 2 * N * WARP_STEP;
	uint32_t x[8 * N];

	values_at_groups<N>(c.dtype, &c.source, e, x);
	if (next + N * WARP_STEP <= c.end && lane < N * WARP_STEP / LINE_NBYTES * c.nbytes)
		prefetch(c.source.values + c.nbytes * (c.first + next) + LINE_NBYTES * lane);
#pragma unroll
	for (uint32_t k = 0; k < N; k++) {
		const uint32_t mine = i + k * WARP_STEP + 8 * lane;
		uint8_t *to = c.to + mine / 8 * BITS;
		uint32_t draws[4];

		if (c.row_log2) {
			const uint32_t max = largest_of_row(largest_of<8>(0, x + 8 * k, ~0u), c.row_log2);

			rows->worst = max > rows->worst ? max : rows->worst;
			rows->tiny |= (uint32_t)is_tiny(max) << i / (2 * WARP_STEP);
			if ((lane & (lanes - 1)) == 0)
				*(uint32_t *)(c.scales + 4 * (mine >> c.row_log2)) = max;
			s = level_scale_of<ODD>(c.levels, max);
		}
		no_draws(draws);
		if (c.random)
			draw_group(c.draws, (uint32_t)((e + k * WARP_STEP) / 8), draws);
		put_levels<BITS, ODD>(x + 8 * k, s, draws, c.zero, to);
	}
}

/* Encode values i to end - 1 of the block in steps of 256. Arguments: see put_level_steps. */
template <int BITS, bool ODD>
DEVICE void put_level_run(const level_loop &c, uint32_t i, uint32_t end, level_scale s, level_rows *rows, uint32_t lane)
{
	for (; i + 2 * WARP_STEP <= end; i += 2 * WARP_STEP)
		put_level_steps<BITS, ODD, 2>(c, i, s, rows, lane);
	if (i < end)
		put_level_steps<BITS, ODD, 1>(c, i, s, rows, lane);
}

template <int BITS>
DEVICE void put_level_run(const level_loop &c, bool odd, uint32_t i, uint32_t end, uint32_t max, level_rows *rows,
			  uint32_t lane)
{
	if (odd)
		put_level_run<BITS, true>(c, i, end, level_scale_of<true>(c.levels, max), rows, lane);
	else
		put_level_run<BITS, false>(c, i, end, level_scale_of<false>(c.levels, max), rows, lane);
}

/* Encode the steps of small rows whose bits in `tiny` are set. */
DEVICE void put_tiny_rows(const row_job &r, const level_loop &c, uint32_t tiny, uint32_t lane)
{
	__syncwarp(); /* make the scales that other lanes have stored visible */
	for (uint32_t i = 0; i < 32 && tiny >> i; i++)
		for (uint32_t k = 2 * i; tiny >> i & 1 && k < 2 * i + 2 && k * WARP_STEP < c.end; k++) {
			const uint32_t mine = k * WARP_STEP + 8 * lane;
			const float scale = round_float(*(const uint32_t *)(c.scales + 4 * (mine >> c.row_log2)));

			put_group_slowly<CODEC_QUANTIZE>(r, mine, scale, c.to + mine / 8 * r.q.bits);
		}
}

/*
 * Write scales and codes of a block's whole rows. Does nothing if the row size, the options or the alignment require
 * put_groups.
 */
DEVICE groups_put put_level_rows(const row_job &r, uint8_t *scales, uint8_t *to, uint32_t lane)
{
	const codec_source &s = r.source;
	const uint32_t dtype = r.v->dtype, row = r.p.part->group_size, bits = r.q.bits, step = row % WARP_STEP;
	const bool small = row == 64 || row == 128 || row == WARP_STEP;
	const level_loop c = {{global(s.values), NULL, NULL},
			      dtype,
			      dtype == CODEC_FLOAT32 ? 4u : 2u,
			      r.p.first,
			      (float)r.q.levels,
			      (uint32_t)r.q.levels * ONES,
			      !small       ? 0u
			      : row == 64  ? 6u
			      : row == 128 ? 7u
					   : 8u,
			      r.p.m / (small ? WARP_STEP : row) * (small ? WARP_STEP : row),
			      global(scales),
			      global(to),
			      group_draws_of(r.key, (uint32_t)(r.p.first / 8 >> 32)),
			      r.random};
	const struct row_kind q = kind_for<CODEC_QUANTIZE>(r.q);
	level_rows rows = {0, 0};

	if ((!small && step) || (bits != 2 && bits != 4 && bits != 8) || s.sums || s.residual || r.p.first % 8 ||
	    (uint64_t)scales % 4 || !in_quads(dtype, &s) || !draws_share_high(r.p.first, r.p.m))
		return {0, 0, CODEC_OK};
	for (uint32_t i = 0, end; i < c.end; i = end) {
		uint32_t max = 0;

		end = small ? c.end : i + row;
		if (!small) {
			const scaled found = put_scale_here<CODEC_QUANTIZE>(r.v, q, r.p.part, &c.source, c.first + i,
									    row, c.scales + i / row * 4, lane);

			max = found.status == CODEC_OK ? round_bits(found.scale) : ROUND_INF;
			rows.worst = max > rows.worst ? max : rows.worst;
		}
		if (is_tiny(max))
			for (uint32_t k = i; k < end; k += WARP_STEP)
				put_group_slowly<CODEC_QUANTIZE>(r, k + 8 * lane, round_float(max),
								 c.to + (k / 8 + lane) * bits);
		else if (bits == 4)
			put_level_run<4>(c, q.odd, i, end, max, &rows, lane);
		else if (bits == 2)
			put_level_run<2>(c, q.odd, i, end, max, &rows, lane);
		else
			put_level_run<8>(c, q.odd, i, end, max, &rows, lane);
	}
	put_tiny_rows(r, c, __reduce_or_sync(FULL, rows.tiny), lane);
	return {c.end, 0, __any_sync(FULL, rows.worst >= ROUND_INF) ? CODEC_NONFINITE : CODEC_OK};
}

#endif
