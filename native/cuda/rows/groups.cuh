/* rows/groups.cuh - encode the values of blocks singly, or in groups of 8 values of one row. encoder.md, section 7. */
#ifndef CODEC_CUDA_ROWS_GROUPS_CUH
#define CODEC_CUDA_ROWS_GROUPS_CUH

#include "rows/codes.cuh"

/*
 * Encode the values of a block from value `from` on, one at a time, for any row length, code width and alignment.
 * Packed codes are written to `to`, nbytes bytes. `warps` warps share the values. Return the largest magnitude of this
 * lane's values, as bits of float32.
 */
template <int CODEC>
DEVICE_CALL uint32_t put_codes(const row_job &r, const uint8_t *scales, const float *ratio, uint8_t *to,
			       uint64_t nbytes, uint64_t from, uint32_t warp, uint32_t warps, uint32_t lane)
{
	const uint32_t row = r.p.part->group_size, each = (uint32_t)row_scale_nbytes(r.q), per = r.q.bits ? 8 : 5;
	row_scale s = open_part(r.q, r.p.part);
	/* end: index after the row to which scale s belongs; drawn: number of the Philox block in `draws` */
	uint64_t end = 0, drawn = ~0ull;
	uint32_t draws[4], most = 0;

	no_draws(draws);
	for (uint64_t i = from + per * (32 * warp + lane); i < r.p.m; i += 32 * per * warps) {
		uint32_t n = r.p.m - i < per ? (uint32_t)(r.p.m - i) : per, codes[2] = {0, 0}, trits = 0;

#pragma unroll 1
		for (uint32_t k = 0; k < per; k++) {
			uint64_t e = r.p.first + i + k;
			uint32_t code = 0;

			if (k < n) {
				const uint32_t x = round_bits(value_at(r.v->dtype, &r.source, e));

				if (row && i + k >= end) {
					uint64_t at = (i + k) / row;
					float scale = 0, below = 0;

					read_scale(r.q, r.p.part, scales + at * each, &scale, &below);
					s = open_scale(r.q, scale, below);
					end = (at + 1) * row;
				}
				if (r.random && e / 8 != drawn) {
					drawn = e / 8;
					philox_block(r.key, drawn, 0, draws);
				}
				most = larger(most, x, ~0u);
				code = code_of<CODEC>(r.q, r.random, x, s, draws[e / 2 % 4] >> 16 * (e % 2) & 0xffff);
				if (CODEC == CODEC_TERNARY && code == TERNARY_TIE)
					code = break_ties(r.key, s.over, e, code, {x, 0, 0, 0}) & 255;
				if (r.source.residual)
					put_residual<CODEC>(r.source.residual + e, r.q, 1, {x, 0, 0, 0}, code, s,
							    ratio);
			}
			codes[k / 4] |= code << 8 * (k % 4);
			trits = 3 * trits + code;
		}
		const uint64_t at = r.q.bits ? i / 8 * r.q.bits : i / 5, left = nbytes - at;
		const uint32_t bytes = r.q.bits ? r.q.bits : 1;

		put_bytes(to + at, r.q.bits ? pack_group(r.q, codes[0], codes[1]) : trits,
			  left < bytes ? (uint32_t)left : bytes);
	}
	__syncwarp();
	return most;
}

/* Return the maximum of `most` over the `lanes` lanes that share a row. */
DEVICE uint32_t largest_of_lanes(uint32_t most, uint32_t lanes)
{
	for (uint32_t by = 1; by < lanes; by *= 2) {
		uint32_t other = __shfl_xor_sync(FULL, most, by);

		most = other > most ? other : most;
	}
	return most;
}

/* Return the largest magnitude of a row of 64, 128 or 256 values. most: largest magnitude of the lane's 8 values. */
DEVICE uint32_t largest_of_row(uint32_t most, uint32_t row_log2)
{
	auto larger_of_other = [&](uint32_t by) {
		const uint32_t other = __shfl_xor_sync(FULL, most, by);

		most = other > most ? other : most;
	};

	larger_of_other(1);
	larger_of_other(2);
	larger_of_other(4);
	if (row_log2 > 6)
		larger_of_other(8);
	if (row_log2 > 7)
		larger_of_other(16);
	return most;
}

/*
 * Compute and store the scale of a row that row / 8 lanes share, 8 values per lane. most: largest magnitude of the
 * lane's 8 values. mine: index in the block of the first of these values.
 */
DEVICE row_scale scale_of_lanes(const row_job &r, uint32_t most, uint32_t mine, uint8_t *scales, uint32_t *bad)
{
	const uint32_t row = r.p.part->group_size, each = (uint32_t)row_scale_nbytes(r.q), row_log2 = 31 - __clz(row);
	const uint32_t max = largest_of_lanes(most, row / 8), bits = scale_bits(r.q, r.v, r.p.part, max);

	*bad |= max >= ROUND_INF;
	if (mine << (32 - row_log2) == 0)
		put_bytes(scales + (mine >> row_log2) * each, bits, each);
	return open_scale(r.q, scale_of_bits(r.q, r.p.part, bits).scale, 0);
}

/* Version of scale_of_lanes for QUANTIZE with zero points. x: the lane's 8 values. */
DEVICE row_scale ends_of_lanes(const row_job &r, const uint32_t x[8], uint32_t mine, uint8_t *scales, uint32_t *bad)
{
	const uint32_t row = r.p.part->group_size, each = (uint32_t)row_scale_nbytes(r.q), row_log2 = 31 - __clz(row);
	extremes e = no_values();

	for (int k = 0; k < 8; k++)
		extend(&e, x[k]);
	e = extremes_of_lanes(e, row / 8);
	*bad |= is_nonfinite(e);
	const row_ends ends = ends_of(e, r.q.dtype);

	if (mine << (32 - row_log2) == 0)
		put_bytes(scales + (mine >> row_log2) * each, ends.stored, each);
	return open_scale(r.q, ends.half, ends.middle);
}

/*
 * Result of put_groups. done: number of values encoded. most (TERNARY, small rows): largest magnitude of the lane's
 * values, as bits of float32.
 */
struct groups_put {
	uint32_t done, most;
	codec_status status;
};

/*
 * Version of put_groups for one codec and one kind of rows. SMALL: a few lanes share a row and exchange their largest
 * magnitudes. Otherwise a row is read twice: first to compute its scale, and then, from caches, to encode it.
 */
template <int CODEC, bool SMALL>
DEVICE groups_put put_groups_of(const row_job &given, uint8_t *scales, const float *ratio, uint8_t *to, uint8_t *chunk,
				uint32_t lane)
{
	/* a copy in registers, since the compiler must assume that stores change shared memory */
	const row_job r = copy_of<CODEC>(given);
	const codec_view *v = r.v;
	const struct row_kind q = r.q;
	const codec_row_part *part = r.p.part;
	const codec_source *source = &r.source;
	const uint32_t row = part->group_size, limit = limit_of(v);
	const uint32_t unit = SMALL ? WARP_STEP : row ? row : q.bits ? 8 : TRITS_CHUNK;
	const uint32_t dtype = v->dtype;
	const uint32_t whole = r.p.m / unit * unit, nbytes = source->sums || dtype == CODEC_FLOAT32 ? 4 : 2;
	uint32_t end = row ? 0 : whole, bad = 0, most = 0;
	row_scale s = open_part(q, part);

	scales = global(scales);
	to = global(to);
	uint32_t next[8] = {0}; /* prefetched: the lane's next 8 values */

	if (8 * lane < whole)
		values_at_quads<8>(dtype, source, r.p.first + 8 * lane, next);
	for (uint32_t i = 0, after; i < whole; i = after) {
		if (SMALL) {
			end = whole;
		} else if (i == end) {
			scaled found = put_scale<CODEC>(v, q, part, &given.source, r.p.first + i, row, scales, lane);

			bad |= found.status != CODEC_OK;
			s = open_scale(q, found.scale, found.below);
			scales += row_scale_nbytes(q);
			end += row;
		}
		const uint32_t mine = i + 8 * lane;
		const uint64_t e = r.p.first + mine;
		uint32_t x[8], codes[2];

		after = end - i < WARP_STEP ? end : i + WARP_STEP;
		if (!SMALL && row && i + row + WARP_STEP <= whole && lane < WARP_STEP / LINE_NBYTES * nbytes)
			prefetch((const uint8_t *)(source->sums ? (const void *)source->sums : source->values) +
				 nbytes * (r.p.first + i + row) + LINE_NBYTES * lane);
		for (int k = 0; k < 8; k++)
			x[k] = next[k], next[k] = 0;
		if (after + 8 * lane < whole)
			values_at_quads<8>(dtype, source, r.p.first + after + 8 * lane, next);
		if (SMALL && CODEC == QUANTIZE_AFFINE) {
			s = ends_of_lanes(r, x, mine, scales, &bad);
		} else if (SMALL || CODEC == CODEC_TERNARY) {
			uint32_t max = 0;

			for (int k = 0; k < 8; k++)
				max = larger(max, x[k], limit);
			most = max > most ? max : most;
			if (SMALL)
				s = scale_of_lanes(r, max, mine, scales, &bad);
		}
		code_group<CODEC>(r, e, x, s, codes);
		if (source->residual && mine < end)
			for (int k = 0; k < 2; k++)
				put_residual<CODEC>(source->residual + e + 4 * k, q, 4,
						    {x[4 * k], x[4 * k + 1], x[4 * k + 2], x[4 * k + 3]}, codes[k], s,
						    ratio);
		if (q.bits) {
			if (mine < end)
				put_bytes(to + mine / 8 * q.bits, pack_group(q, codes[0], codes[1]), q.bits);
		} else {
			put_bytes(chunk + mine % TRITS_CHUNK, pack_group(q, codes[0], codes[1]), 8);
			if ((i + WARP_STEP) % TRITS_CHUNK == 0)
				pack_trits(chunk, to + (i + WARP_STEP - TRITS_CHUNK) / 5, lane);
		}
	}
	return {whole, most, __any_sync(FULL, bad != 0) ? CODEC_NONFINITE : CODEC_OK};
}

/*
 * Write the scales and codes of a block's values as far as each group of 8 lies within one row, which holds for all
 * values of most tensors. Global memory is read once. chunk: scratch memory of TRITS_CHUNK bytes.
 */
template <int CODEC>
DEVICE groups_put put_groups(const row_job &r, uint8_t *scales, const float *ratio, uint8_t *to, uint8_t *chunk,
			     uint32_t lane)
{
	const uint32_t row = r.p.part->group_size;

	if (row % 8 || r.p.first % 8 || !in_quads(r.v->dtype, &r.source))
		return {0, 0, CODEC_OK};
	if (CODEC != CODEC_TERNARY && row && WARP_STEP % row == 0)
		return put_groups_of<CODEC, true>(r, scales, ratio, to, chunk, lane);
	return put_groups_of<CODEC, false>(r, scales, ratio, to, chunk, lane);
}

#endif
