/* rows.cuh - sign, ternary, float8, float4, quantize: a warp does a block. docs/format.md, section 8. */
#ifndef CODEC_ROWS_CUH
#define CODEC_ROWS_CUH

#include "exact/scales.h"
#include "planes.cuh"
#include "seal.cuh"
#include "sink.cuh"

/* A block: the part it belongs to, its first value, how many it has. */
struct row_place {
	const codec_row_part *part;
	uint64_t first;
	uint32_t m;
};

DEVICE struct row_kind kind_of(const codec_view *v)
{
	return row_kind_of(v->codec, v->variant, v->options, v->bits, v->dtype);
}

static __device__ row_place row_place_of(const job *j, struct row_kind q, uint64_t b)
{
	const codec_row_part *part =
		part_at(row_parts(&j->v, j->memory), j->v.row_parts.count, &codec_row_part::first_block, b);

	b -= part->first_block;
	return {part, part->start + b * row_block(q, part->row), (uint32_t)row_block_n(q, part->row, part->count, b)};
}

/* What values of a row go by: their scale or, of signs, what positive and negative values are. False: not allowed. */
DEVICE bool read_scale(struct row_kind q, const codec_row_part *part, const uint8_t *p, float *scale, float *below)
{
	uint32_t u = 0, w = 0;

	if (q.codec == WIRE_CODEC_FLOAT4) {
		*scale = scale_float4_value(q, *p, part->scale[0]);
		return *p <= (q.variant == WIRE_FLOAT4_MXFP4 ? WIRE_MAX_MXFP4 : WIRE_MAX_NVFP4) &&
		       round_bits(*scale) < ROUND_INF;
	}
	u = w = load32(p);
	if (q.codec == WIRE_CODEC_SIGN && q.variant == WIRE_SIGN_TWO_MEAN)
		w = load32(p + 4);
	*scale = round_float(u);
	*below = round_sign_below(round_float(w));
	return u < ROUND_INF && w < ROUND_INF && (u || q.codec != WIRE_CODEC_FLOAT8);
}

/* Codes i to i + n - 1, a byte each; i is a multiple of 4. Of what is in memory from `codes` on `room` bytes are there.
 */
DEVICE uint32_t read_codes(struct row_kind q, const uint8_t *codes, uint64_t room, uint64_t i, uint32_t n)
{
	uint32_t quad = 0;

	if (q.bits == 8)
		return load_bytes(codes + i, n);
	if (!q.bits) {
		for (uint32_t k = 0; k < n; k++) {
			uint32_t byte = codes[(i + k) / 5];

			for (uint32_t after = 4 - (uint32_t)((i + k) % 5); after; after--)
				byte = bits_third(byte);
			quad |= (byte - 3 * bits_third(byte)) << 8 * k;
		}
		return quad;
	}
	uint64_t bit = i * q.bits; /* of a byte bit 0 or 4: so all are in four bytes */
	uint32_t x = load_bytes(codes + bit / 8, room - bit / 8 < 4 ? (uint32_t)(room - bit / 8) : 4);

	return keep_bytes((uint32_t)bits_spread(x >> bit % 8 & ((1ull << 4 * q.bits) - 1), q.bits), n);
}

/* Do codes only say what they can? Of a quad; of all together, by one lane. */
DEVICE bool allowed_codes(struct row_kind q, uint32_t quad, uint32_t n)
{
	uint32_t most = q.codec == WIRE_CODEC_TERNARY    ? 2
			: q.codec == WIRE_CODEC_QUANTIZE ? (q.odd ? 2 * q.levels : q.levels)
							 : 255;

	for (uint32_t k = 0; k < n; k++)
		if ((quad >> 8 * k & 255) > most)
			return false;
	return true;
}

DEVICE bool allowed_end(struct row_kind q, const uint8_t *codes, uint64_t nbytes, uint64_t m)
{
	uint32_t last = codes[nbytes - 1], missing = (uint32_t)(5 * nbytes - m);

	if (q.bits)
		return m * q.bits % 8 == 0 || last >> m * q.bits % 8 == 0;
	for (; missing; missing--, last = bits_third(last))
		if (last != 3 * bits_third(last))
			return false;
	return true;
}

/* What a code is worth. */
template <int CODEC> DEVICE float code_value(struct row_kind q, uint32_t code, float scale, float below)
{
	if (CODEC == WIRE_CODEC_SIGN)
		return code ? scale : below;
	if (CODEC == WIRE_CODEC_TERNARY)
		return round_scaled(round_ternary_ratio(code), scale);
	if (CODEC == WIRE_CODEC_FLOAT8)
		return q.variant == WIRE_FLOAT8_E4M3FN ? round_float8_value(code, scale, 3, 7, 0x7e)
						       : round_float8_value(code, scale, 2, 15, 0x7b);
	if (CODEC == WIRE_CODEC_FLOAT4)
		return round_scaled(round_float4_ratio(code), scale);
	return round_level(round_level_of(code, q.odd, q.levels), (float)q.levels, scale);
}

/* A block's scales and codes, and what the values go by that are read from it, one quad after the other. */
struct row_walk {
	const codec_row_part *part;
	const uint8_t *scales, *codes;
	uint64_t room; /* bytes from `codes` on that may be read */
	float scale, below;
	uint64_t end; /* of the row whose scale that is */
};

DEVICE row_walk walk_rows(struct row_kind q, const codec_row_part *part, const uint8_t *scales, const uint8_t *codes,
			  uint64_t room, bool unscaled)
{
	float below = round_sign_below(part->scale[q.variant == WIRE_SIGN_TWO_MEAN]);

	return {part, scales, codes, room, unscaled ? 1 : part->scale[0], below, 0};
}

/* Values i to i + n - 1 of a block, at most four; i ascends. False: they are none. */
template <int CODEC> DEVICE bool walk_quad(struct row_kind q, row_walk *w, uint32_t i, uint32_t n, float y[4])
{
	uint32_t quad = n ? read_codes(q, w->codes, w->room, i, n) : 0, row = w->part->row;
	bool good = allowed_codes(q, quad, n);

	for (uint32_t k = 0; k < 4; k++) {
		if (k < n && row && i + k >= w->end) {
			uint64_t at = (i + k) / row;

			good &= read_scale(q, w->part, w->scales + at * row_scale_nbytes(q), &w->scale, &w->below);
			w->end = (at + 1) * row;
		}
		y[k] = code_value<CODEC>(q, quad >> 8 * k & 255, w->scale, w->below);
	}
	return good;
}

/* A region's values. `scratch` is memory for the bytes of its codes, where they come out of the coder. */
template <int CODEC>
static __device__ codec_status read_rows(const job *j, uint64_t b, cursor c, const pairs &by, uint8_t *scratch,
					 const codec_sink *sink, uint32_t lane)
{
	const struct row_kind q = kind_of(&j->v);
	const row_place p = row_place_of(j, q, b);
	uint64_t nscales = row_count(p.part->row, p.m) * row_scale_nbytes(q), ncodes = row_codes_nbytes(q, p.m);
	const uint8_t *scales = here(&c), *codes = scales + nscales;
	uint64_t room = q.entropy ? ncodes : left(&c) - nscales;
	codec_status status = CODEC_OK;
	bool bad = false;

	if (q.entropy) {
		if (left(&c) < nscales + 4)
			return CODEC_BAD_REGION;
		uint32_t mode = load32(codes);

		if (mode > WIRE_MODE_CODED)
			return CODEC_BAD_REGION;
		c.at += nscales + 4;
		status = read_plane(j, 0, mode, by, (uint32_t)ncodes, (uint32_t *)scratch, &c, lane);
		codes = scratch;
	} else {
		if (left(&c) < nscales + ncodes)
			return CODEC_BAD_REGION;
		c.at += nscales + ncodes;
	}
	if (status == CODEC_OK)
		status = close_region(&c, lane);
	if (status != CODEC_OK)
		return status;
	if (lane == 0)
		bad = !allowed_end(q, codes, ncodes, p.m);
	for (uint64_t i = lane; i < ncodes && !q.bits; i += 32)
		bad |= codes[i] > 242;

	row_walk w = walk_rows(q, p.part, scales, codes, room, sink->unscaled);

	for (uint32_t r = 0; (uint64_t)WIRE_ROW * r < p.m; r++) {
		uint32_t n = there(r, lane, p.m), i = WIRE_ROW * r + 4 * lane;
		float y[4];

		bad |= !walk_quad<CODEC>(q, &w, i, n, y);
		if (sink->data && !bad)
			put_values(sink, j->v.dtype, p.first + i, n, y, p.part->scale[0]);
	}
	return __any_sync(FULL, bad) ? CODEC_BAD_REGION : CODEC_OK;
}

#endif
