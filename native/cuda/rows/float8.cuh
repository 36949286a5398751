/*
 * rows/float8.cuh - encode float8 without random bits or residual, in rows of 32 to 256 or more than 256 values. This
 * covers most tensors of float8. docs/spec/encoder.md, section 7.
 *
 * In rows of more than 256 values, the loop loads 8 times 128 values at once. Rows of 32 to 256 values, which include
 * those of MXFP8, are encoded in steps of 256 values, 8 per lane, so that 4 to 32 lanes share a row.
 */
#ifndef CODEC_CUDA_ROWS_FLOAT8_CUH
#define CODEC_CUDA_ROWS_FLOAT8_CUH

#include "rows/groups.cuh"

/* Return the codes of four finite values, one per byte. */
template <bool E4M3> DEVICE uint32_t float8_codes(const row_job &r, const uint32_t x[4], float scale)
{
#if __CUDA_ARCH__ >= 890
	return convert_to_float8(E4M3, x, scale);
#else
	return code_four<CODEC_FLOAT8>(r, false, 0, x, {scale, 0, {1, 0}}, 0x80008000, 0x80008000);
#endif
}

/*
 * Write the codes of a row of n values, a multiple of 128, that begins at value `first` of `values`. next: distance in
 * bytes to the next row, which is prefetched into the L2 cache; 0: do not prefetch.
 */
template <bool E4M3>
DEVICE void put_float8_codes(const row_job &r, const uint8_t *values, uint32_t dtype, uint64_t first, uint32_t n,
			     float scale, uint32_t next, uint32_t *to, uint32_t lane)
{
	const uint32_t AT_ONCE = 8; /* rows of 128 values whose loads are in flight together */
	const codec_source source = {values, NULL, NULL};
	const uint32_t nbytes = dtype == CODEC_FLOAT32 ? 4 : 2;
	uint32_t i = 0;

	to = global(to) + lane;
	for (; i + AT_ONCE * WIRE_ROW <= n; i += AT_ONCE * WIRE_ROW) {
		uint32_t x[4 * AT_ONCE];

		values_at_rows<AT_ONCE>(dtype, &source, first + i + 4 * lane, x);
		if (next && lane < AT_ONCE * nbytes)
			prefetch(values + nbytes * (first + i) + next + LINE_NBYTES * lane);
		for (uint32_t k = 0; k < AT_ONCE; k++)
			to[i / 4 + 32 * k] = float8_codes<E4M3>(r, x + 4 * k, scale);
	}
	for (; i < n; i += WIRE_ROW) {
		uint32_t x[4];

		values_at_rows<1>(dtype, &source, first + i + 4 * lane, x);
		to[i / 4] = float8_codes<E4M3>(r, x, scale);
	}
}

/* Parameters of the loop over rows of 32 to 256 values. */
struct float8_loop {
	codec_source source;
	uint32_t dtype, nbytes;
	uint64_t first; /* index in the tensor of the block's first value */
	uint32_t row_log2, end;
	/* MXFP8: number added to the bits of a row's largest magnitude before the mantissa is cut off; see scale_mx */
	uint32_t more;
	uint32_t scale_most;  /* MXFP8: largest valid stored scale */
	float given;          /* scale that the spec gives; 0: compute scales */
	uint8_t *scales, *to; /* outputs: scales of the block's rows; codes */
};

/*
 * Return the stored bits of a row's scale, computed from its largest magnitude `max`, and set *factor to the factor by
 * which values are multiplied.
 */
template <bool MX, bool E4M3>
DEVICE uint32_t small_row_scale(const row_job &r, const float8_loop &c, uint32_t max, float *factor)
{
	if (!MX) {
		*factor = scale_float8(r.q, max, c.given);
		return round_bits(*factor);
	}
	const uint32_t last = E4M3 ? 8 : 15, exponent = (max + c.more) >> 23;
	const uint32_t above = exponent > last ? exponent - last : 0,
		       stored = above < c.scale_most ? above : c.scale_most;

	*factor = round_float((254 - stored) << 23);
	return stored;
}

/*
 * Encode N steps of 256 values from value i of the block on. Return the largest magnitude in the rows that this lane
 * shares.
 */
template <bool MX, bool E4M3, int N>
DEVICE uint32_t put_float8_steps(const row_job &r, const float8_loop &c, uint32_t i, uint32_t lane)
{
	const uint32_t lanes = 1u << c.row_log2 >> 3, next = i + 2 * N * WARP_STEP;
	uint32_t x[8 * N], worst = 0;

	values_at_groups<N>(c.dtype, &c.source, c.first + i + 8 * lane, x);
	if (next + N * WARP_STEP <= c.end && lane < N * WARP_STEP / LINE_NBYTES * c.nbytes)
		prefetch(c.source.values + c.nbytes * (c.first + next) + LINE_NBYTES * lane);
#pragma unroll
	for (uint32_t k = 0; k < N; k++) {
		const uint32_t mine = i + k * WARP_STEP + 8 * lane, *y = x + 8 * k;
		const uint32_t own = largest_of<8>(0, y, ~0u),
			       max = MX ? largest_of_lanes(own, 4) : largest_of_row(own, c.row_log2);
		float factor;
		const uint32_t stored = small_row_scale<MX, E4M3>(r, c, max, &factor);

		worst = max > worst ? max : worst;
		if ((lane & (lanes - 1)) == 0 && MX)
			c.scales[mine >> 5] = (uint8_t)stored;
		else if ((lane & (lanes - 1)) == 0)
			*(uint32_t *)(c.scales + 4 * (mine >> c.row_log2)) = stored;
		*(uint2 *)(c.to + mine) = {float8_codes<E4M3>(r, y, factor), float8_codes<E4M3>(r, y + 4, factor)};
	}
	return worst;
}

template <bool MX, bool E4M3> DEVICE groups_put put_small_rows(const row_job &r, const float8_loop &c, uint32_t lane)
{
	uint32_t worst = 0, i = 0;

	for (; i + 2 * WARP_STEP <= c.end; i += 2 * WARP_STEP) {
		const uint32_t max = put_float8_steps<MX, E4M3, 2>(r, c, i, lane);

		worst = max > worst ? max : worst;
	}
	if (i < c.end) {
		const uint32_t max = put_float8_steps<MX, E4M3, 1>(r, c, i, lane);

		worst = max > worst ? max : worst;
	}
	return {c.end, 0, __any_sync(FULL, worst >= ROUND_INF) ? CODEC_NONFINITE : CODEC_OK};
}

/* Write scales and codes of a block's rows of 32 (MXFP8), 64, 128 or 256 values, as many rows as fill whole steps. */
DEVICE groups_put put_small_rows(const row_job &r, uint8_t *scales, uint8_t *to, uint32_t lane)
{
	const uint32_t dtype = r.v->dtype, row = r.p.part->group_size;
	const float8_loop c = {{global(r.source.values), NULL, NULL},
			       dtype,
			       dtype == CODEC_FLOAT32 ? 4u : 2u,
			       r.p.first,
			       31 - (uint32_t)__clz((int)row),
			       r.p.m / WARP_STEP * WARP_STEP,
			       /* mantissas above 1.75 then carry into the exponent */
			       scale_rounds_up(r.q) ? 0x1fffffu : 0u,
			       r.q.scale_most,
			       r.v->scale,
			       global(scales),
			       global(to)};

	if (r.p.first % 8 || (uint64_t)to % 8)
		return {0, 0, CODEC_OK};
	if (r.q.scale_most)
		return r.q.e5m2 ? put_small_rows<true, false>(r, c, lane) : put_small_rows<true, true>(r, c, lane);
	return r.q.e5m2 ? put_small_rows<false, false>(r, c, lane) : put_small_rows<false, true>(r, c, lane);
}

/*
 * Write scales and codes of a block's whole rows. Does nothing if the row size, the options or the alignment require
 * put_groups.
 */
DEVICE groups_put put_float8_rows(const row_job &r, uint8_t *scales, uint8_t *to, uint32_t lane)
{
	const codec_source &s = r.source;
	const uint8_t *values = s.values;
	const uint32_t dtype = r.v->dtype, nbytes = dtype == CODEC_FLOAT32 ? 4 : 2;
	const uint32_t row = r.p.part->group_size, whole = row ? r.p.m / row * row : 0;
	uint32_t bad = 0;

	if (!row || r.random || s.sums || s.residual || r.v->options & CODEC_OPTION_PROPAGATE || !in_quads(dtype, &s))
		return {0, 0, CODEC_OK};
	if (r.q.scale_most || row == 64 || row == 128 || row == WARP_STEP)
		return put_small_rows(r, scales, to, lane);
	if (row % WIRE_ROW || r.p.first % 4 || (uint64_t)to % 4)
		return {0, 0, CODEC_OK};
	for (uint32_t i = 0; i < whole; i += row, scales += row_scale_nbytes(r.q)) {
		const uint64_t first = r.p.first + i;
		const uint32_t next = i + 2 * row <= whole ? nbytes * row : 0;
		const scaled found = put_scale_here<CODEC_FLOAT8>(r.v, r.q, r.p.part, &s, first, row, scales, lane);
		uint32_t *codes = (uint32_t *)(to + i);

		bad |= found.status != CODEC_OK;
		if (!r.q.e5m2)
			put_float8_codes<true>(r, values, dtype, first, row, found.scale, next, codes, lane);
		else
			put_float8_codes<false>(r, values, dtype, first, row, found.scale, next, codes, lane);
	}
	return {whole, 0, __any_sync(FULL, bad != 0) ? CODEC_NONFINITE : CODEC_OK};
}

#endif
