/* encode_rows.cuh - sign, ternary, float8, float4, quantize: a warp does a block. docs/encoder.md, section 7. */
#ifndef CODEC_ENCODE_ROWS_CUH
#define CODEC_ENCODE_ROWS_CUH

#include "encode_coder.cuh"
#include "encoding.cuh"
#include "rows.cuh"

/* Do quads of values, from a multiple of four on, lie at multiples of their size? */
DEVICE bool in_quads(uint32_t dtype, const codec_source *s)
{
	return s->sums ? (uint64_t)s->sums % 16 == 0 : (uint64_t)s->values % (dtype == WIRE_FLOAT32 ? 16 : 8) == 0;
}

/* The bits, as float32, of four of them. */
DEVICE void load_four(uint32_t dtype, const codec_source *s, uint64_t i, uint32_t *x)
{
	if (s->sums || dtype == WIRE_FLOAT32) {
		uint4 w = *(const uint4 *)(global(s->sums ? s->sums : (const float *)s->values) + i);

		x[0] = w.x, x[1] = w.y, x[2] = w.z, x[3] = w.w;
		return;
	}
	uint2 w = *(const uint2 *)(global((const uint16_t *)s->values) + i);

	x[0] = round_bits(float_of(dtype, w.x & 0xffff)), x[1] = round_bits(float_of(dtype, w.x >> 16));
	x[2] = round_bits(float_of(dtype, w.y & 0xffff)), x[3] = round_bits(float_of(dtype, w.y >> 16));
}

/* The bits of the largest |x| of n values, those from `limit` on left out. */
static __device__ uint32_t largest(uint32_t dtype, const codec_source *source, uint64_t first, uint32_t n,
				   uint32_t limit, uint32_t lane)
{
	uint32_t most = 0, i = 0;
	auto add = [&](uint32_t x) {
		uint32_t a = x & ROUND_ABS;

		most = a < limit && a > most ? a : most;
	};

	if (first % 4 == 0 && in_quads(dtype, source))
#pragma unroll 2
		for (; i + WIRE_ROW <= n; i += WIRE_ROW) {
			uint32_t x[4];

			load_four(dtype, source, first + i + 4 * lane, x);
			for (int k = 0; k < 4; k++)
				add(x[k]);
		}
	for (i += lane; i < n; i += 32)
		add(round_bits(value_at(dtype, source, first + i)));
	return warp_max(most);
}

/* Sums of at most WIRE_TREE values, as docs/encoder.md, section 7.2, has them: in 32 lanes, which are folded by halves.
 */
static __device__ codec_row_sums sums_of(const codec_view *v, const codec_source *source, uint64_t first, uint32_t n,
					 uint32_t lane)
{
	bool squares = (v->codec == WIRE_CODEC_SIGN && v->variant == WIRE_SIGN_L2) || v->clip > 0;
	bool by_sign = v->codec == WIRE_CODEC_SIGN && v->variant == WIRE_SIGN_TWO_MEAN;
	codec_row_sums out = {{0, 0}, 0, 0};
	double s = 0, t = 0;
	float a = 0, b = 0;

	for (uint32_t i = lane; i < n; i += 32) {
		float x = value_at(v->dtype, source, first + i), ax = round_float(round_bits(x) & ROUND_ABS);
		bool below = by_sign && round_bits(x) > ROUND_ABS;

		out.max = round_bits(ax) > out.max ? round_bits(ax) : out.max;
		if (squares) {
			s = round_add64(s, round_mul64((double)x, (double)x));
			t = round_add64(t, (double)x);
		} else {
			a = round_add(a, below ? 0.0f : ax);
			b = round_add(b, below ? ax : 0.0f);
		}
		out.negative += below;
	}
	for (int by = 16; by; by /= 2) {
		s = round_add64(s, __shfl_down_sync(FULL, s, by));
		t = round_add64(t, __shfl_down_sync(FULL, t, by));
		a = round_add(a, __shfl_down_sync(FULL, a, by));
		b = round_add(b, __shfl_down_sync(FULL, b, by));
	}
	out.sum[0] = __shfl_sync(FULL, squares ? s : (double)a, 0);
	out.sum[1] = __shfl_sync(FULL, squares ? t : (double)b, 0);
	out.negative = warp_sum(out.negative);
	out.max = warp_max(out.max);
	return out;
}

/* SIGN: scales of a row of n values, to 4 or 8 bytes. */
static __device__ codec_status put_sign_scale(const codec_view *v, struct row_kind q, const codec_source *source,
					      uint64_t first, uint64_t n, uint8_t *to, uint32_t lane)
{
	double level[2][64], total[2];
	uint64_t npieces = 0, negative = 0;
	float scale[2];

	for (uint64_t i = 0; i < n; i += WIRE_TREE, npieces++) {
		codec_row_sums some =
			sums_of(v, source, first + i, n - i < WIRE_TREE ? (uint32_t)(n - i) : WIRE_TREE, lane);

		if (some.max >= ROUND_INF)
			return CODEC_NONFINITE;
		scale_push(level[0], npieces, some.sum[0]);
		scale_push(level[1], npieces, some.sum[1]);
		negative += some.negative;
	}
	total[0] = scale_total(level[0], npieces);
	total[1] = scale_total(level[1], npieces);
	scale_sign(q, total, negative, n, scale);
	if (lane < row_scale_nbytes(q))
		to[lane] = (uint8_t)(round_bits(scale[lane / 4]) >> 8 * (lane % 4));
	return CODEC_OK;
}

/* The scales of a block's rows: of each so many warps do a share. */
static __device__ codec_status put_scales(const codec_view *v, struct row_kind q, const row_place &p,
					  const codec_source *source, uint8_t *to, uint32_t warp, uint32_t warps,
					  uint32_t lane)
{
	uint32_t row = p.part->row, limit = v->options & WIRE_OPTION_PROPAGATE ? ROUND_INF : ~0u;
	uint32_t each = (uint32_t)row_scale_nbytes(q);

	to += each * warp;
	for (uint64_t i = (uint64_t)row * warp; row && i < p.m; i += (uint64_t)row * warps, to += each * warps) {
		uint32_t n = p.m - i < row ? (uint32_t)(p.m - i) : row, max, bits;

		if (q.codec == WIRE_CODEC_SIGN) {
			codec_status status = put_sign_scale(v, q, source, p.first + i, n, to, lane);

			if (status != CODEC_OK)
				return status;
			continue;
		}
		max = largest(v->dtype, source, p.first + i, n, limit, lane);
		if (max >= ROUND_INF)
			return CODEC_NONFINITE;
		bits = q.codec == WIRE_CODEC_FLOAT4   ? scale_float4(q, max, p.part->scale[0])
		       : q.codec == WIRE_CODEC_FLOAT8 ? round_bits(scale_float8(q, max, v->scale))
						      : max;
		if (lane < each)
			to[lane] = (uint8_t)(bits >> 8 * lane);
	}
	__syncwarp();
	return CODEC_OK;
}

/* What codes of a row go by, and what they are worth. */
struct row_scale {
	float scale, below;
	struct over over;
};

DEVICE row_scale open_scale(struct row_kind q, const codec_row_part *part, const uint8_t *p)
{
	row_scale s = {0, 0, {1, 0}};

	read_scale(q, part, p, &s.scale, &s.below);
	if (q.codec == WIRE_CODEC_QUANTIZE && s.scale > 0)
		s.over = round_over(s.scale, 1);
	return s;
}

/* The code of value i of the tensor; h: its first draw. */
DEVICE uint8_t code_of(const codec_view *v, struct row_kind q, struct philox key, uint64_t i, uint32_t x,
		       const row_scale &s, uint32_t h)
{
	bool random = v->options & WIRE_OPTION_STOCHASTIC;

	switch (q.codec) {
	case WIRE_CODEC_SIGN: return x <= ROUND_ABS;
	case WIRE_CODEC_TERNARY: {
		uint8_t code = s.scale > 0 ? round_ternary_code(x, round_bits(s.scale), s.over, h) : 0;

		return code == TERNARY_TIE ? round_ternary_settled(x, s.over, philox_half(key, i, 1)) : code;
	}
	case WIRE_CODEC_FLOAT8:
		return q.variant == WIRE_FLOAT8_E4M3FN ? round_float8_code(x, s.scale, 448.0f, 3, 7, random, h)
						       : round_float8_code(x, s.scale, 57344.0f, 2, 15, random, h);
	case WIRE_CODEC_FLOAT4: return round_float4_code(x, s.scale, random, h);
	default:
		return s.scale > 0 ? round_level_code(x, q.odd, q.levels, s.over, random ? h : 0x8000)
				   : round_level_zero(q.odd, q.levels);
	}
}

/* The value that a decoder will see. */
DEVICE float decoded(const codec_view *v, struct row_kind q, uint32_t code, const row_scale &s)
{
	float y = q.codec == WIRE_CODEC_SIGN ? (code ? s.scale : s.below)
		  : q.codec == WIRE_CODEC_TERNARY
			  ? code_worth<WIRE_CODEC_TERNARY>(code_ratio<WIRE_CODEC_TERNARY>(q, code), s.scale)
		  : q.codec == WIRE_CODEC_FLOAT8
			  ? code_worth<WIRE_CODEC_FLOAT8>(code_ratio<WIRE_CODEC_FLOAT8>(q, code), s.scale)
		  : q.codec == WIRE_CODEC_FLOAT4
			  ? code_worth<WIRE_CODEC_FLOAT4>(code_ratio<WIRE_CODEC_FLOAT4>(q, code), s.scale)
			  : code_worth<WIRE_CODEC_QUANTIZE>(code_ratio<WIRE_CODEC_QUANTIZE>(q, code), s.scale);

	return float_of(v->dtype, bits_of_float(v->dtype, y));
}

/*
 * Codes of a block, packed, to nbytes bytes, or a share of them: 8 values of a lane become as many bytes as a code has
 * bits; or 5 of them one, in base 3.
 */
static __device__ codec_status put_codes(const codec_view *v, struct row_kind q, const row_place &p,
					 const codec_source *source, const uint8_t *scales, uint8_t *to,
					 uint64_t nbytes, uint32_t warp, uint32_t warps, uint32_t lane)
{
	const struct philox key = {v->seed, (uint32_t)v->stream, (uint32_t)(v->stream >> 32)};
	uint32_t row = p.part->row, each = (uint32_t)row_scale_nbytes(q), per = q.bits ? 8 : 5,
		 bytes = q.bits ? q.bits : 1;
	bool random = q.codec == WIRE_CODEC_TERNARY || v->options & WIRE_OPTION_STOCHASTIC;
	row_scale s = {p.part->scale[0], round_sign_below(p.part->scale[q.variant == WIRE_SIGN_TWO_MEAN]), {1, 0}};
	uint64_t end = 0, drawn = ~0ull; /* of the row whose scale that is; the block of draws */
	uint32_t draws[4], most = 0;

	if (q.codec == WIRE_CODEC_TERNARY && s.scale > 0)
		s.over = round_over(s.scale, 65536);
	for (uint64_t i = per * (32 * warp + lane); i < p.m; i += 32 * per * warps) {
		uint32_t n = p.m - i < per ? (uint32_t)(p.m - i) : per, trits = 0;
		uint64_t codes = 0, at = i / per * bytes;

		for (uint32_t k = 0; k < per; k++) {
			uint64_t e = p.first + i + k;
			uint8_t code = 0;

			if (k < n) {
				uint32_t x = round_bits(value_at(v->dtype, source, e)), h = 0;

				if (row && i + k >= end) {
					uint64_t r = (i + k) / row;

					s = open_scale(q, p.part, scales + r * each);
					end = (r + 1) * row;
				}
				if (random && e / 8 != drawn) {
					drawn = e / 8;
					philox_block(key, drawn, 0, draws);
				}
				if (random)
					h = draws[e / 2 % 4] >> 16 * (e % 2) & 0xffff;
				most = (x & ROUND_ABS) > most ? x & ROUND_ABS : most;
				code = code_of(v, q, key, e, x, s, h);
				if (source->residual)
					source->residual[e] = round_minus(round_float(x), decoded(v, q, code, s));
			}
			codes |= (uint64_t)code << 8 * (k % 8);
			trits = 3 * trits + code;
		}
		codes = q.bits ? bits_squeeze(codes, q.bits) : trits;
		for (uint32_t k = 0; k < bytes && at + k < nbytes; k++)
			to[at + k] = (uint8_t)(codes >> 8 * k);
	}
	/* a scale that was given may be smaller than a value */
	bool given = q.codec == WIRE_CODEC_TERNARY && v->scale > 0 && !(v->clip > 0) && s.scale > 0;
	bool above = __any_sync(FULL, given && most > round_bits(s.scale));

	__syncwarp();
	if (!above)
		return CODEC_OK;
	return __any_sync(FULL, most >= ROUND_INF) ? CODEC_NONFINITE : CODEC_BAD_SCALE;
}

/* No frame of this. What is wrong is a scale that is too small only if no value anywhere is NaN or Inf. */
DEVICE void refuse(codec_written *out, codec_status status)
{
	uint32_t old = atomicCAS(&out->fault, 0u, (uint32_t)status);

	if (old == CODEC_BAD_SCALE)
		atomicCAS(&out->fault, old, (uint32_t)status);
}

/* Block b to a region: its size to *size. `scratch`: memory for two planes and WORDS_ROOM. */
static __device__ codec_status write_rows(const job *j, const codec_source *source, uint64_t b, uint8_t *scratch,
					  uint8_t *region, uint32_t *size, uint32_t lane)
{
	const struct row_kind q = kind_of(&j->v);
	const row_place p = row_place_of(j, q, b);
	uint32_t nscales = (uint32_t)(row_count(p.part->row, p.m) * row_scale_nbytes(q));
	uint32_t ncodes = (uint32_t)row_codes_nbytes(q, p.m), at = nscales, got = 0, differ = 0;
	uint32_t *bytes = (uint32_t *)scratch, rows = (ncodes + WIRE_ROW - 1) / WIRE_ROW;
	codec_status status = put_scales(&j->v, q, p, source, region, 0, 1, lane);

	if (status == CODEC_OK)
		status = put_codes(&j->v, q, p, source, region, q.entropy ? scratch : region + at, ncodes, 0, 1, lane);
	if (status != CODEC_OK)
		return status;
	if (!q.entropy) {
		at += ncodes;
	} else {
		for (uint32_t r = 0; r < rows; r++)
			differ |= keep_bytes(bytes[32 * r + lane] ^ scratch[0] * ONES, there(r, lane, ncodes));
		bool constant = !__any_sync(FULL, differ != 0);

		if (!constant && ncodes >= WIRE_MIN_CODED)
			got = encode_plane(j, 0, bytes, ncodes, ncodes - 1, (uint32_t *)(scratch + 2 * PLANE_ROOM),
					   scratch + PLANE_ROOM, false, region + at + 4, lane);
		put32(region + at, constant ? WIRE_MODE_CONSTANT : got ? WIRE_MODE_CODED : WIRE_MODE_RAW, lane);
		if (!got)
			copy_bytes(region + at + 4, scratch, constant ? 1 : ncodes, lane);
		at += 4 + (constant ? 1 : got ? got : ncodes);
	}
	*size = end_region(region, at, lane);
	return CODEC_OK;
}

#endif
