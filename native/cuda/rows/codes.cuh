/* rows/codes.cuh - rounding of values to codes, in groups of 8 that share a block of random bits. docs/encoder.md,
 * section 7.
 */
#ifndef CODEC_CUDA_ROWS_CODES_CUH
#define CODEC_CUDA_ROWS_CODES_CUH

#include "rows/scales.cuh"

#define WARP_STEP (8 * 32) /* values that a warp takes at once, 8 a lane */
#define TRITS_CHUNK (5 * WARP_STEP)

/*
 * Scale of a row in the forms that rounding needs. scale: of the row; with zero points half its range. below: value of
 * the code of negative numbers (SIGN), middle of the row (QUANTIZE with zero points). over: reciprocal of the scale,
 * where codes are rounded by multiplication.
 */
struct row_scale {
	float scale, below;
	struct over over;
};

/* Return a scale in these forms. */
DEVICE row_scale open_scale(struct row_kind q, float scale, float below)
{
	row_scale s = {scale, below, {1, 0}};

	if ((q.codec == WIRE_CODEC_QUANTIZE || q.codec == WIRE_CODEC_TERNARY) && scale > 0)
		s.over = round_over(scale, q.codec == WIRE_CODEC_TERNARY ? 65536 : 1);
	return s;
}

/* Return the scale of a part whose rows have none. */
DEVICE row_scale open_part(struct row_kind q, const codec_row_part *part)
{
	return open_scale(q, part->scale[0], round_sign_below(part->scale[q.variant == WIRE_SIGN_TWO_MEAN]));
}

/*
 * Properties of a block that hold for all of its values. The template parameter CODEC of this and other functions is
 * the view's codec.
 */
struct row_job {
	const codec_view *v;
	struct row_kind q;
	row_place p;
	const codec_source *source;
	struct philox key;
	bool random;
};

template <int CODEC> DEVICE row_job row_job_of(const codec_view *v, const row_place &p, const codec_source *source)
{
	struct row_kind q = kind_of(v);

	q.codec = CODEC; /* a constant for the compiler */
	return {v,
		q,
		p,
		source,
		{v->seed, (uint32_t)v->stream, (uint32_t)(v->stream >> 32)},
		q.codec == WIRE_CODEC_TERNARY || (v->options & WIRE_OPTION_STOCHASTIC) != 0};
}

/* Return the code of a value. x: its bits. h: 16 random bits; TERNARY may need more and then returns TERNARY_TIE. */
template <int CODEC> DEVICE uint32_t code_of(struct row_kind q, bool random, uint32_t x, const row_scale &s, uint32_t h)
{
	const bool e4m3 = !q.e5m2;

	if (CODEC == WIRE_CODEC_SIGN)
		return x <= ROUND_ABS;
	if (CODEC == WIRE_CODEC_TERNARY)
		return s.scale > 0 ? round_ternary_code(x, round_bits(s.scale), s.over, h) : 0;
	if (CODEC == WIRE_CODEC_FLOAT8)
		return round_float8_code(x, s.scale, q.max, e4m3 ? 3 : 2, e4m3 ? 7 : 15, random, h);
	if (CODEC == WIRE_CODEC_FLOAT4)
		return round_float4_code(x, s.scale, random, h);
	if (q.affine)
		return s.scale > 0 ? round_affine_code(round_float(x), q.levels, s.below, s.over, h) : 0;
	return s.scale > 0 ? round_level_code(x, q.odd, q.levels, s.over, h) : round_level_zero(q.odd, q.levels);
}

/* Set random bits to one half, which makes rounding deterministic. */
DEVICE void no_draws(uint32_t draws[4])
{
	for (int k = 0; k < 4; k++)
		draws[k] = 0x80008000;
}

/*
 * Decide codes of TERNARY that are TERNARY_TIE by the second 16 random bits of their values. i: index of the first of
 * four values.
 */
DEVICE_CALL uint32_t break_ties(struct philox key, struct over over, uint64_t i, uint32_t codes, uint4 x)
{
	const uint32_t bits[4] = {x.x, x.y, x.z, x.w};

	for (int k = 0; k < 4; k++)
		if ((codes >> 8 * k & 255) == TERNARY_TIE) {
			uint32_t code = round_ternary_settled(bits[k], over, philox_half(key, i + k, 1));

			codes ^= (TERNARY_TIE ^ code) << 8 * k;
		}
	return codes;
}

/* Check that a quad holds NaN or Inf. x: bits. */
DEVICE bool any_nonfinite(const uint32_t x[4])
{
	uint32_t most = __vimax3_u32(x[0] & ROUND_ABS, x[1] & ROUND_ABS, x[2] & ROUND_ABS);

	return __vimax3_u32(most, x[3] & ROUND_ABS, 0) >= ROUND_INF;
}

#if __CUDA_ARCH__ >= 890 /* GPUs that convert to FLOAT8 in hardware */
/* Return round_float8_code of four finite values, rounded to nearest. */
DEVICE uint32_t convert_to_float8(bool e4m3, const uint32_t x[4], float scale)
{
	uint16_t low, high;
	float y[4];

	for (int k = 0; k < 4; k++)
		y[k] = round_mul(round_float(x[k]), scale);
	if (e4m3)
		asm("cvt.rn.satfinite.e4m3x2.f32 %0, %3, %2;\n\tcvt.rn.satfinite.e4m3x2.f32 %1, %5, %4;"
		    : "=h"(low), "=h"(high)
		    : "f"(y[0]), "f"(y[1]), "f"(y[2]), "f"(y[3]));
	else
		asm("cvt.rn.satfinite.e5m2x2.f32 %0, %3, %2;\n\tcvt.rn.satfinite.e5m2x2.f32 %1, %5, %4;"
		    : "=h"(low), "=h"(high)
		    : "f"(y[0]), "f"(y[1]), "f"(y[2]), "f"(y[3]));
	return low | (uint32_t)high << 16;
}
#endif

/*
 * Return codes of four values, a byte each. i: index of the first one in the tensor. draws, more: 16 random bits for
 * each value.
 */
template <int CODEC>
DEVICE uint32_t code_four(const row_job &r, bool random, uint64_t i, const uint32_t x[4], const row_scale &s,
			  uint32_t draws, uint32_t more)
{
	uint32_t codes = 0;

#if __CUDA_ARCH__ >= 890
	/* a tensor with NaN or Inf has no frame, unless they are propagated */
	if (CODEC == WIRE_CODEC_FLOAT8 && !random && !(r.v->options & WIRE_OPTION_PROPAGATE && any_nonfinite(x)))
		return convert_to_float8(!r.q.e5m2, x, s.scale);
#endif
	for (int k = 0; k < 4; k++) {
		uint32_t h = (k < 2 ? draws : more) >> 16 * (k % 2) & 0xffff;

		codes |= code_of<CODEC>(r.q, random, x[k], s, h) << 8 * k;
	}
	if (CODEC == WIRE_CODEC_TERNARY && (codes & codes >> 1 & ONES))
		codes = break_ties(r.key, s.over, i, codes, {x[0], x[1], x[2], x[3]});
	return codes;
}

/* Write the residuals of n <= 4 values of one row: values less their dequantized codes. ratio: see code_ratio. */
template <int CODEC>
DEVICE_CALL void put_residual(float *residual, struct row_kind q, uint32_t n, uint4 x, uint32_t codes, row_scale s,
			      const float *ratio)
{
	const uint32_t bits[4] = {x.x, x.y, x.z, x.w}, dtype = q.dtype;
	uint64_t left[4];

	for (uint32_t k = 0; k < 4; k++) {
		uint32_t code = codes >> 8 * k & 255;
		float y = CODEC == WIRE_CODEC_SIGN ? (code ? s.scale : s.below)
						   : dequantize<CODEC>(q, shared(ratio)[code], s.scale, s.below);

		y = float_of(dtype, bits_of_float(dtype, y));
		left[k] = round_bits(round_minus(round_float(bits[k]), y));
	}
	store_quad<4>((uint8_t *)residual, n, left);
}

/* Pack 8 codes, a byte each, to q.bits bits each. */
DEVICE uint64_t pack_group(struct row_kind q, uint32_t low, uint32_t high)
{
	uint64_t codes = low | (uint64_t)high << 32;

	return q.bits && q.bits < 8 ? bits_squeeze(codes, q.bits) : codes;
}

/* Store the first n <= 8 bytes of x; n = 2, 4 or 8 aligned bytes take one store. */
DEVICE void put_bytes(uint8_t *to, uint64_t x, uint32_t n)
{
	if (n == 8 && (uint64_t)to % 8 == 0)
		*(uint64_t *)to = x;
	else if (n == 4 && (uint64_t)to % 4 == 0)
		*(uint32_t *)to = (uint32_t)x;
	else if (n == 2 && (uint64_t)to % 2 == 0)
		*(uint16_t *)to = (uint16_t)x;
	else
		for (uint32_t k = 0; k < n; k++, x >>= 8)
			to[k] = (uint8_t)x;
}

/* Pack TRITS_CHUNK codes of TERNARY, five a byte. Each lane makes 8 bytes. */
DEVICE_CALL void pack_trits(const uint8_t *codes, uint8_t *to, uint32_t lane)
{
	uint64_t packed = 0;

	__syncwarp();
	codes += 40 * lane;
	for (int k = 0; k < 8; k++, codes += 5)
		packed |= (uint64_t)bits_trits(codes[0], codes[1], codes[2], codes[3], codes[4]) << 8 * k;
	put_bytes(to + 8 * lane, packed, 8);
	__syncwarp();
}

/*
 * Encode values of a block from value `from` on, one at a time: for any rows, sizes and alignment. Packed codes go to
 * `to`, which has nbytes bytes. `warps` warps share the values. Returns the bits of the lane's largest magnitude.
 */
template <int CODEC>
DEVICE_CALL uint32_t put_codes(row_job r, const uint8_t *scales, const float *ratio, uint8_t *to, uint64_t nbytes,
			       uint64_t from, uint32_t warp, uint32_t warps, uint32_t lane)
{
	const uint32_t row = r.p.part->group_size, each = (uint32_t)row_scale_nbytes(r.q), per = r.q.bits ? 8 : 5;
	row_scale s = open_part(r.q, r.p.part);
	uint64_t end = 0, drawn = ~0ull; /* end of the row that s is for; block of random bits that draws holds */
	uint32_t draws[4], most = 0;

	no_draws(draws);
	for (uint64_t i = from + per * (32 * warp + lane); i < r.p.m; i += 32 * per * warps) {
		uint32_t n = r.p.m - i < per ? (uint32_t)(r.p.m - i) : per, codes[2] = {0, 0}, trits = 0;

#pragma unroll 1
		for (uint32_t k = 0; k < per; k++) {
			uint64_t e = r.p.first + i + k;
			uint32_t code = 0;

			if (k < n) {
				const uint32_t x = round_bits(value_at(r.v->dtype, r.source, e));

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
				if (CODEC == WIRE_CODEC_TERNARY && code == TERNARY_TIE)
					code = break_ties(r.key, s.over, e, code, {x, 0, 0, 0}) & 255;
				if (r.source->residual)
					put_residual<CODEC>(r.source->residual + e, r.q, 1, {x, 0, 0, 0}, code, s,
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

/* Return the largest magnitude of the `lanes` lanes that share a row. */
DEVICE uint32_t largest_of_lanes(uint32_t most, uint32_t lanes)
{
	for (uint32_t by = 1; by < lanes; by *= 2) {
		uint32_t other = __shfl_xor_sync(FULL, most, by);

		most = other > most ? other : most;
	}
	return most;
}

/*
 * Compute the scale of a row that `row / 8` lanes share, and store it. most: largest magnitude of the lane's 8 values,
 * the first of which is value `mine` of the block.
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

/* QUANTIZE with zero points: do what scale_of_lanes does, from the lane's 8 values. */
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

/* Encode 8 values of one row. e: index of the first one in the tensor, a multiple of 8. */
template <int CODEC>
DEVICE void code_group(const row_job &r, uint64_t e, const uint32_t x[8], const row_scale &s, uint32_t codes[2])
{
	uint32_t draws[4];

	no_draws(draws);
	if (r.random)
		philox_block(r.key, e / 8, 0, draws);
	/*
	 * Deterministic and stochastic rounding have code of their own, since either is constant for a tensor. Some
	 * codecs have one only.
	 */
	if (CODEC == WIRE_CODEC_TERNARY || CODEC == WIRE_CODEC_QUANTIZE || !r.random)
		for (int k = 0; k < 2; k++)
			codes[k] = code_four<CODEC>(r, CODEC == WIRE_CODEC_TERNARY, e + 4 * k, x + 4 * k, s,
						    draws[2 * k], draws[2 * k + 1]);
	else
		for (int k = 0; k < 2; k++)
			codes[k] = code_four<CODEC>(r, true, e + 4 * k, x + 4 * k, s, draws[2 * k], draws[2 * k + 1]);
}

/* Result of put_groups. done: values encoded. most: bits of the lane's largest magnitude (TERNARY, small rows). */
struct groups_put {
	uint32_t done, most;
	codec_status status;
};

/*
 * put_groups for a codec and a kind of rows. SMALL: rows of a few lanes, which exchange their largest magnitudes; else
 * a row is read for its scale, and again for its codes while caches hold it.
 */
template <int CODEC, bool SMALL>
DEVICE groups_put put_groups_of(const row_job &r, uint8_t *scales, const float *ratio, uint8_t *to, uint8_t *chunk,
				uint32_t lane)
{
	const codec_view *v = r.v;
	const struct row_kind q = r.q;
	const codec_row_part *part = r.p.part;
	const codec_source copy = *r.source, *source = &copy; /* in registers: stores could change shared memory */
	const uint32_t row = part->group_size, limit = limit_of(v);
	const uint32_t unit = SMALL ? WARP_STEP : row ? row : q.bits ? 8 : TRITS_CHUNK;
	const uint32_t dtype = v->dtype;
	const uint32_t whole = r.p.m / unit * unit, nbytes = source->sums || dtype == WIRE_FLOAT32 ? 4 : 2;
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
			scaled found = put_scale<CODEC>(v, q, part, r.source, r.p.first + i, row, scales, lane);

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
		if (SMALL && CODEC == WIRE_CODEC_QUANTIZE && q.affine) {
			s = ends_of_lanes(r, x, mine, scales, &bad);
		} else if (SMALL || CODEC == WIRE_CODEC_TERNARY) {
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
 * Write scales and codes of a block's values, as many as form groups of 8 of one row each: all values of most tensors.
 * Memory is read once. chunk: memory for TRITS_CHUNK bytes.
 */
template <int CODEC>
DEVICE groups_put put_groups(const row_job &r, uint8_t *scales, const float *ratio, uint8_t *to, uint8_t *chunk,
			     uint32_t lane)
{
	const uint32_t row = r.p.part->group_size;

	if (row % 8 || r.p.first % 8 || !in_quads(r.v->dtype, r.source))
		return {0, 0, CODEC_OK};
	if (CODEC != WIRE_CODEC_TERNARY && row && WARP_STEP % row == 0)
		return put_groups_of<CODEC, true>(r, scales, ratio, to, chunk, lane);
	return put_groups_of<CODEC, false>(r, scales, ratio, to, chunk, lane);
}

#endif
