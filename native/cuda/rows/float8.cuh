/* rows/float8.cuh - encoding of float8 without random bits or residual, in rows of at least 128 values: most tensors of
 * float8. docs/spec/encoder.md, section 7.
 *
 * The loop over a row's codes loads 8 times 128 values at once, and has few instructions.
 */
#ifndef CODEC_CUDA_ROWS_FLOAT8_CUH
#define CODEC_CUDA_ROWS_FLOAT8_CUH

#include "rows/groups.cuh"

/* Return the codes of four finite values. */
template <bool E4M3> DEVICE uint32_t float8_codes(const row_job &r, const uint32_t x[4], float scale)
{
#if __CUDA_ARCH__ >= 890
	return convert_to_float8(E4M3, x, scale);
#else
	return code_four<WIRE_CODEC_FLOAT8>(r, false, 0, x, {scale, 0, {1, 0}}, 0x80008000, 0x80008000);
#endif
}

/*
 * Write the codes of a row of n values, a multiple of 128, from value `first` of `values` on. next: bytes from the row
 * to the next one, which is brought to the L2 cache; 0: there is none.
 */
template <bool E4M3>
DEVICE void put_float8_codes(const row_job &r, const uint8_t *values, uint32_t dtype, uint64_t first, uint32_t n,
			     float scale, uint32_t next, uint32_t *to, uint32_t lane)
{
	const uint32_t AT_ONCE = 8; /* rows of 128 values whose loads are in flight together */
	const codec_source source = {values, NULL, NULL};
	const uint32_t nbytes = dtype == WIRE_FLOAT32 ? 4 : 2;
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

/*
 * Write scales and codes of a block's whole rows. Does nothing if the rows, the options or the memory need put_groups.
 */
DEVICE groups_put put_float8_rows(const row_job &r, uint8_t *scales, uint8_t *to, uint32_t lane)
{
	const codec_source &s = r.source;
	const uint8_t *values = s.values;
	const uint32_t dtype = r.v->dtype, nbytes = dtype == WIRE_FLOAT32 ? 4 : 2;
	const uint32_t row = r.p.part->group_size, whole = row ? r.p.m / row * row : 0;
	uint32_t bad = 0;

	if (!row || row % WIRE_ROW || WARP_STEP % row == 0 || r.random || s.sums || s.residual ||
	    r.v->options & WIRE_OPTION_PROPAGATE || r.p.first % 4 || (uint64_t)to % 4 || !in_quads(dtype, &s))
		return {0, 0, CODEC_OK};
	for (uint32_t i = 0; i < whole; i += row, scales += row_scale_nbytes(r.q)) {
		const uint64_t first = r.p.first + i;
		const uint32_t next = i + 2 * row <= whole ? nbytes * row : 0;
		const scaled found =
			put_scale_here<WIRE_CODEC_FLOAT8>(r.v, r.q, r.p.part, &s, first, row, scales, lane);
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
