/* truncate.cuh - values with cut mantissas: a warp does a block. docs/format.md, section 9. */
#ifndef CODEC_TRUNCATE_CUH
#define CODEC_TRUNCATE_CUH

#include "model.cuh"
#include "planes.cuh"
#include "seal.cuh"
#include "sink.cuh"

#define PIECES 4

/* What follows from the dtype. */
struct cut_kind {
	uint32_t mbits, sign; /* bits of mantissa; place of the sign */
	uint32_t bias, last;  /* of exponents: `last` is Inf's */
	uint32_t octave, base;
	uint8_t drop[4];  /* bits dropped at each level */
	uint8_t width[4]; /* of the pieces that fields are cut into, from the top */
};

DEVICE cut_kind cut_kind_of(uint32_t dtype)
{
	if (dtype == WIRE_FLOAT32)
		return {23, 31, 127, 255, 128, WIRE_JOINT_BASE, WIRE_DROPS_FLOAT32, WIRE_PIECES_FLOAT32};
	if (dtype == WIRE_BFLOAT16)
		return {7, 15, 127, 255, 128, WIRE_JOINT_BASE, WIRE_DROPS_BFLOAT16, WIRE_PIECES_BFLOAT16};
	return {10, 15, 15, 31, 1024, 0, WIRE_DROPS_FLOAT16, WIRE_PIECES_FLOAT16};
}

/* Width bits, 32 at most, from bit `bit` on of nbytes bytes; those behind them are 0. */
DEVICE uint32_t read_bits(const uint8_t *p, uint64_t bit, uint32_t width, uint64_t nbytes)
{
	uint64_t x = 0;

	for (uint32_t k = 0; 8 * k < bit % 8 + width && bit / 8 + k < nbytes; k++)
		x |= (uint64_t)p[bit / 8 + k] << 8 * k;
	return (uint32_t)(x >> bit % 8 & ((1ull << width) - 1));
}

/* The cursor behind nbits bits, which begin at *p; false: they are not there, or the last byte's others not 0. */
DEVICE bool take_bits(cursor *c, uint64_t nbits, const uint8_t **p)
{
	uint64_t nbytes = (nbits + 7) / 8;

	*p = here(c);
	if (left(c) < nbytes || (nbits % 8 && here(c)[nbytes - 1] >> nbits % 8))
		return false;
	c->at += nbytes;
	return true;
}

/* Literals of two bytes, for a row's escapes. */
DEVICE bool take_wide_literals(cursor *c, uint16_t *pairs, uint32_t escapes, uint32_t lane)
{
	uint32_t total, at = warp_scan(__popc(escapes), lane, &total);

	if (left(c) < 2ull * total)
		return false;
	for (uint32_t i = 0; i < 4; i++)
		if (escapes >> i & 1) {
			pairs[i] = (uint16_t)(here(c)[2 * at] | here(c)[2 * at + 1] << 8);
			at++;
		}
	c->at += 2ull * total;
	return true;
}

/* Lowered exponents and, if they are coded with them, levels: a byte each, four in a word, row by row. */
static __device__ codec_status read_symbols(const job *j, const cut_kind &q, uint32_t mode, const pairs &by, uint32_t m,
					    cursor *c, uint32_t *e, uint32_t *level, uint32_t lane)
{
	bool joint = j->v.variant == WIRE_LEVELS_CODED;
	codec_status status;
	plane o;

	if (joint && mode == WIRE_MODE_RAW)
		return CODEC_BAD_REGION;
	status = plane_open(&o, j, 0, mode, by, m, c, lane);
	for (uint32_t r = 0; status == CODEC_OK && WIRE_ROW * r < m; r++) {
		uint32_t escapes = 0, quad, exponents = 0, levels = 0;
		uint16_t pairs[4];

		if (!joint) {
			quad = plane_row(&o, r, c, lane);
			for (int k = 0; k < 32; k += 8)
				o.bad |= (quad >> k & 255) > q.last;
			e[32 * r + lane] = quad;
			continue;
		}
		if (mode == WIRE_MODE_CODED) /* literals are wider than symbols */
			quad = keep_bytes(decode_row(&o.coder, o.by, o.table, r, m, lane, &escapes, &o.bad),
					  there(r, lane, m));
		else
			quad = plane_row(&o, r, c, lane);
		for (int k = 0; k < 4; k++) {
			uint32_t s = quad >> 8 * k & 255;

			pairs[k] = bits_symbol_pair((uint8_t)s, (int)q.base);
			o.bad |= !(escapes >> k & 1) && ((s && s < 4) || s > 4 * (q.last - q.base) + 3);
		}
		if (__any_sync(FULL, escapes != 0) && !take_wide_literals(c, pairs, escapes, lane))
			return CODEC_BAD_REGION;
		for (int k = 0; k < 4; k++) {
			o.bad |= (pairs[k] && pairs[k] < 4) || pairs[k] >> 2 > q.last;
			exponents |= (uint32_t)(pairs[k] >> 2) << 8 * k;
			levels |= (uint32_t)(pairs[k] & 3) << 8 * k;
		}
		e[32 * r + lane] = exponents;
		level[32 * r + lane] = levels;
	}
	return status == CODEC_OK ? plane_close(&o) : status;
}

/*
 * A region's values. `scratch`: memory for two planes. `exponents`: those of A for all values of the tensor, where
 * levels are shared.
 */
static __device__ codec_status read_cut(const job *j, uint64_t b, cursor c, const pairs &by, uint8_t *scratch,
					const uint8_t *exponents, const codec_sink *sink, uint32_t lane)
{
	const codec_view &v = j->v;
	const cut_kind q = cut_kind_of(v.dtype);
	uint64_t first = b * v.block_nvalues, nbits[PIECES] = {0};
	uint32_t m = (uint32_t)block_values(&v, b), rows = (m + WIRE_ROW - 1) / WIRE_ROW, head = load32(here(&c));
	uint32_t by_bit = v.options & WIRE_OPTION_BITS, total = q.mbits + 1, sent = 0;
	uint32_t tail = by_bit ? head >> WIRE_TAIL_AT & 31 : 0;
	uint32_t *e = (uint32_t *)scratch, *w = (uint32_t *)(scratch + PLANE_ROOM); /* exponents; levels, then widths */
	const uint8_t *levels = NULL, *piece[PIECES];
	codec_status status;
	bool bad = false;

	if (head & ~(3 | (by_bit ? 31u << WIRE_TAIL_AT : 15 * WIRE_PIECE_ZERO)) || (head & 3) == WIRE_MODE_ROWS ||
	    tail > total)
		return CODEC_BAD_REGION;
	c.at += 4;
	if (v.variant == WIRE_LEVELS_SHARED) {
		if (left(&c) < 4)
			return CODEC_BAD_REGION;
		sent = load32(here(&c));
		c.at += 4;
	}
	status = read_symbols(j, q, head & 3, by, m, &c, e, w, lane);
	if (status != CODEC_OK)
		return status;
	if (v.variant == WIRE_LEVELS_SHARED) {
		uint32_t found = (uint32_t)digest_bytes(exponents + first, m, WIRE_SEED_STATE, lane);

		if (sent != found)
			return CODEC_OTHER_STATE;
	}
	place o = {};

	if (v.model_parts.count)
		o = place_at(j, first + (4 * lane < m ? 4 * lane : 0));
	/* exponents as they are, where they were lowered */
	for (uint32_t r = 0; v.model_parts.count && r < rows; r++) {
		uint32_t n = there(r, lane, m), raised = 0;
		uint16_t offset[4];

		if (n)
			quad_offsets(j, &o, n, (int)q.octave / 8, WIRE_CIRCLE((int)q.octave), offset);
		for (uint32_t k = 0; k < n; k++)
			raised |= (uint32_t)bits_raise_exponent((uint8_t)(e[32 * r + lane] >> 8 * k),
								(uint8_t)(offset[k] / q.octave), (uint8_t)q.last)
				  << 8 * k;
		e[32 * r + lane] = raised;
	}
	if (v.variant == WIRE_LEVELS_PLANE) { /* two bits for each value that is not 0 */
		uint32_t live = 0;

		for (uint32_t r = 0; r < rows; r++)
			live += __popc(~equal_bytes(e[32 * r + lane], 0) & 15);
		if (!take_bits(&c, 2 * warp_sum(live), &levels))
			return CODEC_BAD_REGION;
	}
	/* how many bits each value keeps, and how many that are together */
	for (uint32_t r = 0, seen = 0; r < rows; r++) {
		uint32_t quad = e[32 * r + lane], level = w[32 * r + lane], ends, widths = 0, at, all;

		at = warp_scan(__popc(~equal_bytes(quad, 0) & 15), lane, &all) + seen;
		seen += all;
		for (int k = 0; k < 4; k++) {
			uint8_t exponent = (uint8_t)(quad >> 8 * k);
			uint32_t drop = 0, keeps, i = WIRE_ROW * r + 4 * lane + (uint32_t)k;

			if (!exponent || i >= m)
				continue;
			if (v.variant == WIRE_LEVELS_SHARED) {
				short guard = (short)(v.guard + 127 - (int)q.bias);

				drop = by_bit ? round_drop_bits(exponent, exponents[first + i], (uint8_t)q.last, guard,
								(uint8_t)q.mbits)
					      : round_drop_level(exponent, exponents[first + i], (uint8_t)q.last, guard,
								 q.drop[1], q.drop[2], q.drop[3]);
			} else if (v.variant == WIRE_LEVELS_FIXED) {
				drop = exponent == q.last ? 0 : q.drop[v.bits & 3];
			} else {
				uint32_t l = levels ? read_bits(levels, 2ull * at++, 2, ~0ull) : level >> 8 * k & 255;

				drop = q.drop[l & 3];
				bad |= drop && exponent == q.last; /* a NaN would be Inf */
			}
			keeps = total - drop < total - tail ? total - drop : total - tail;
			widths |= keeps << 8 * k;
			nbits[0] += by_bit ? keeps : 0;
			ends = 0;
			for (int i = 0; i < PIECES && !by_bit; i++) {
				ends += q.width[i];
				nbits[i] += keeps >= ends ? q.width[i] : 0;
			}
		}
		w[32 * r + lane] = widths;
	}
	if (__any_sync(FULL, bad))
		return CODEC_BAD_REGION;
	for (int i = 0; i < (by_bit ? 1 : PIECES); i++) {
		nbits[i] = warp_sum(nbits[i]);
		if (!by_bit && head & WIRE_PIECE_ZERO << i)
			piece[i] = NULL;
		else if (!take_bits(&c, nbits[i], &piece[i]))
			return CODEC_BAD_REGION;
	}
	status = close_region(&c, lane);
	if (status != CODEC_OK || !sink->data)
		return status;

	uint64_t at[PIECES] = {0}; /* bits of a piece that rows before have */

	for (uint32_t r = 0; r < rows; r++) {
		uint32_t quad = e[32 * r + lane], widths = w[32 * r + lane], field[4] = {0}, ends = 0, all;

		for (int i = 0; i < (by_bit ? 1 : PIECES); i++) {
			uint32_t mine = 0;

			ends += q.width[i];
			for (int k = 0; k < 32; k += 8)
				mine += by_bit ? widths >> k & 255 : (widths >> k & 255) >= ends ? q.width[i] : 0;
			uint64_t bit = at[i] + warp_scan(mine, lane, &all);

			at[i] += all;
			for (int k = 0; k < 4 && piece[i]; k++) {
				uint32_t keeps = widths >> 8 * k & 255, some = by_bit          ? keeps
									       : keeps >= ends ? q.width[i]
											       : 0;

				field[k] |= some ? read_bits(piece[i], bit, some, ~0ull)
							    << (by_bit ? total - keeps : total - ends)
						 : 0;
				bit += some;
			}
		}
		uint64_t i = first + WIRE_ROW * r + 4 * lane, x[4];

		for (uint32_t k = 0; k < 4; k++)
			x[k] = bits_pattern(field[k], (uint8_t)(quad >> 8 * k), (int)q.mbits, (int)q.sign);
		if (v.dtype == WIRE_FLOAT32)
			put_quad<4>(sink, v.dtype, i, there(r, lane, m), x);
		else
			put_quad<2>(sink, v.dtype, i, there(r, lane, m), x);
	}
	return CODEC_OK;
}

#endif
