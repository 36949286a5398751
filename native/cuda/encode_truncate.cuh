/* encode_truncate.cuh - values to regions with cut mantissas: a warp does a block. docs/encoder.md, section 8. */
#ifndef CODEC_ENCODE_TRUNCATE_CUH
#define CODEC_ENCODE_TRUNCATE_CUH

#include "encode_coder.cuh"
#include "encoding.cuh"
#include "fit.cuh"
#include "truncate.cuh"

/* Planes of a warp's memory: exponents, bits dropped, symbols, patterns (4), pairs (2). */
#define CUT_PLANES 9

/* Bits to a region that is 0 there, from bit `bit` on; 32 of them at most. */
DEVICE void or_bits(uint8_t *region, uint64_t bit, uint32_t x)
{
	uint32_t *word = (uint32_t *)region + bit / 32;
	uint64_t both = (uint64_t)x << bit % 32;

	if ((uint32_t)both)
		atomicOr(word, (uint32_t)both);
	if (both >> 32)
		atomicOr(word + 1, (uint32_t)(both >> 32));
}

/* nbytes from `at` on, and what is left of the last word. */
static __device__ void clear_bytes(uint8_t *region, uint32_t at, uint64_t nbytes, uint32_t lane)
{
	for (uint64_t i = at + lane; i < (at + nbytes + 3) / 4 * 4; i += 32)
		region[i] = 0;
	__syncwarp();
}

/* How many bits a value with this exponent may lose. */
DEVICE uint32_t drop_of(const codec_view *v, const cut_kind &q, uint8_t e, const codec_cuts &by, uint64_t i)
{
	short guard = (short)(v->guard + 127 - (int)q.bias);

	if (v->variant == WIRE_LEVELS_FIXED || by.levels)
		return e == q.last ? 0 : q.drop[(by.levels ? by.levels[i] : v->bits) & 3];
	if (v->options & WIRE_OPTION_BITS)
		return round_drop_bits(e, by.exponents[i], (uint8_t)q.last, guard, (uint8_t)q.mbits);
	return round_drop_level(e, by.exponents[i], (uint8_t)q.last, guard, q.drop[1], q.drop[2], q.drop[3]);
}

/* Cut a block's values: patterns, their exponents, bits dropped. What is cut off goes where the source says. */
static __device__ void cut_values(const codec_view *v, const cut_kind &q, const codec_source *source,
				  const codec_cuts &by, uint64_t first, uint32_t m, uint32_t *e, uint32_t *drops,
				  uint32_t *patterns, uint32_t lane)
{
	for (uint32_t r = 0; WIRE_ROW * r < m; r++) {
		uint32_t exponent4 = 0, drop4 = 0;

		for (uint32_t k = 0; k < there(r, lane, m); k++) {
			uint64_t i = first + WIRE_ROW * r + 4 * lane + k;
			uint32_t x = v->dtype == WIRE_FLOAT32 ? ((const uint32_t *)source->values)[i]
							      : ((const uint16_t *)source->values)[i];
			uint32_t drop = drop_of(v, q, (uint8_t)(x >> q.mbits & q.last), by, i);

			x = round_truncate(x, drop, !(v->options & WIRE_OPTION_CUT), q.mbits, q.last);
			uint8_t exponent = (uint8_t)(x >> q.mbits & q.last);

			/* a receiver that works levels out has the new exponents */
			if (v->variant == WIRE_LEVELS_SHARED)
				drop = drop_of(v, q, exponent, by, i);
			patterns[WIRE_ROW * r + 4 * lane + k] = x;
			if (source->residual)
				source->residual[i] = round_minus(value_at(v->dtype, source, i), float_of(v->dtype, x));
			exponent4 |= (uint32_t)exponent << 8 * k;
			drop4 |= drop << 8 * k;
		}
		e[32 * r + lane] = exponent4;
		drops[32 * r + lane] = drop4;
	}
	__syncwarp();
}

DEVICE uint32_t level_of(const cut_kind &q, uint32_t drop)
{
	return round_level_of_drop((uint8_t)drop, q.drop[1], q.drop[2], q.drop[3]);
}

/*
 * Symbols of a lane's values of row r, and with joint levels their pairs; *o is its first value's place, or that of the
 * row's after it. *outside: those whose pair has no symbol, which are 0.
 */
static __device__ uint32_t symbol_quad(const job *j, const cut_kind &q, place *o, uint32_t r, uint32_t m, uint32_t e4,
				       uint32_t drop4, uint16_t *pairs, uint32_t *outside, uint32_t lane)
{
	bool joint = j->v.variant == WIRE_LEVELS_CODED, model = j->v.model_parts.count > 0;
	uint32_t n = there(r, lane, m), quad = 0;
	uint16_t offset[4] = {0};

	*outside = 0;
	if (model && n)
		quad_offsets(j, o, n, (int)q.octave / 8, WIRE_CIRCLE((int)q.octave), offset);
	for (uint32_t k = 0; k < n; k++) {
		uint8_t lowered = (uint8_t)(e4 >> 8 * k);

		lowered = bits_lower_exponent(lowered, (uint8_t)(offset[k] / q.octave), (uint8_t)q.last);
		uint16_t pair = bits_pair(lowered, (uint8_t)level_of(q, drop4 >> 8 * k & 255));
		uint16_t one = joint ? bits_pair_symbol(pair, (int)q.base) : lowered;

		pairs[k] = pair;
		*outside |= (uint32_t)(joint && pair && !one) << k;
		quad |= (uint32_t)one << 8 * k;
	}
	return quad;
}

/* Symbols, in the mode that serves them best: bytes at `out`. */
static __device__ uint32_t put_symbols(const job *j, const cut_kind &q, uint64_t first, uint32_t m, const uint32_t *e,
				       const uint32_t *drops, uint32_t *symbol, uint16_t *pairs, uint32_t *words,
				       uint8_t *out, uint32_t *mode, uint32_t lane)
{
	bool joint = j->v.variant == WIRE_LEVELS_CODED, outside = false;
	uint32_t differ = 0, first4 = 0, got;
	place o = {};

	if (j->v.model_parts.count)
		o = place_at(j, first + (4 * lane < m ? 4 * lane : 0));
	for (uint32_t r = 0; WIRE_ROW * r < m; r++) {
		uint32_t none, quad = symbol_quad(j, q, &o, r, m, e[32 * r + lane], drops[32 * r + lane],
						  pairs + WIRE_ROW * r + 4 * lane, &none, lane);

		for (uint32_t k = 0; k < 4; k++)
			quad |= none >> k & 1 ? (uint32_t)table_of(j, 0)[TABLE_ESCAPE] << 8 * k : 0;
		outside |= none != 0;
		symbol[32 * r + lane] = quad;
		first4 = r ? first4 : __shfl_sync(FULL, quad & 255, 0) * ONES;
		differ |= keep_bytes(quad ^ first4, there(r, lane, m));
	}
	__syncwarp();
	if (!__any_sync(FULL, differ != 0 || outside)) {
		*mode = WIRE_MODE_CONSTANT;
		if (lane == 0)
			out[0] = (uint8_t)first4;
		return 1;
	}
	*mode = WIRE_MODE_CODED; /* joint ones are never raw */
	got = encode_plane(j, 0, symbol, m, joint ? ~0u : m - 1, words, (uint8_t *)pairs, joint, out, lane);
	if (got)
		return got;
	*mode = WIRE_MODE_RAW;
	copy_bytes(out, (const uint8_t *)symbol, m, lane);
	return m;
}

/* Two bits for each value that is not 0: bytes. */
static __device__ uint32_t put_levels(const cut_kind &q, uint32_t m, const uint32_t *e, const uint32_t *drops,
				      uint8_t *region, uint32_t at, uint32_t lane)
{
	uint32_t seen = 0, total;

	clear_bytes(region, at, (m + 3) / 4, lane);
	for (uint32_t r = 0; WIRE_ROW * r < m; r++) {
		uint32_t live = ~equal_bytes(e[32 * r + lane], 0) & 15;
		uint32_t mine = seen + warp_scan(__popc(live), lane, &total);

		seen += total;
		for (uint32_t k = 0; k < 4; k++)
			if (live >> k & 1)
				or_bits(region, 8ull * at + 2 * mine++,
					level_of(q, drops[32 * r + lane] >> 8 * k & 255));
	}
	__syncwarp();
	return (seen + 3) / 4;
}

/* What values keep of their fields: pieces, or bit by bit. Bytes; and what the head says of it. */
static __device__ uint32_t put_pieces(const cut_kind &q, bool by_bit, uint32_t m, const uint32_t *e,
				      const uint32_t *drops, const uint32_t *patterns, uint8_t *region, uint32_t at,
				      uint32_t *head, uint32_t lane)
{
	uint32_t total = q.mbits + 1, any = 0, begin = at, ends = 0, tail = 0;

	for (uint32_t i = lane; by_bit && i < m; i += 32)
		any |= bits_field(patterns[i], (int)q.mbits, (int)q.sign);
	if (by_bit) { /* gradients made in a narrower type than theirs end in zeros */
		tail = (uint32_t)__ffs((int)(__reduce_or_sync(FULL, any) | 1u << total)) - 1;
		*head |= tail << WIRE_TAIL_AT;
	}
	for (int i = 0; i < (by_bit ? 1 : PIECES); i++) {
		uint32_t width = q.width[i], seen = 0, some = 0;

		ends += width;
		for (int pass = 0; pass < 2; pass++) { /* is a piece 0 in all that have it? Then write it */
			uint32_t nbits = 0;

			if (pass && !by_bit && seen && !__reduce_or_sync(FULL, some)) {
				*head |= WIRE_PIECE_ZERO << i;
				break;
			}
			if (pass)
				clear_bytes(region, at, (seen + 7) / 8, lane);
			for (uint32_t r = 0; WIRE_ROW * r < m; r++) {
				uint32_t bits[4], mine = 0, all;

				for (uint32_t k = 0; k < 4; k++) {
					uint32_t drop = drops[32 * r + lane] >> 8 * k & 255, keeps = total - drop;

					keeps = keeps < total - tail ? keeps : total - tail;
					if (!(e[32 * r + lane] >> 8 * k & 255))
						keeps = 0;
					bits[k] = by_bit ? keeps : keeps >= ends ? width : 0;
					mine += bits[k];
				}
				uint32_t to = nbits + warp_scan(mine, lane, &all);

				nbits += all;
				for (uint32_t k = 0; k < 4; k++) {
					if (!bits[k])
						continue;
					uint32_t field = bits_field(patterns[WIRE_ROW * r + 4 * lane + k], (int)q.mbits,
								    (int)q.sign);

					field = by_bit ? field >> (total - bits[k])
						       : field >> (total - ends) & ((1u << width) - 1);
					some |= field;
					if (pass)
						or_bits(region, 8ull * at + to, field);
					to += bits[k];
				}
			}
			seen = nbits;
			if (pass)
				at += (nbits + 7) / 8;
		}
		__syncwarp();
	}
	return at - begin;
}

/* Block b to a region: its size. */
static __device__ uint32_t write_cut(const job *j, uint8_t *memory, const codec_source *source, const codec_cuts &by,
				     uint64_t b, uint8_t *scratch, uint8_t *region, uint32_t lane)
{
	const codec_view &v = j->v;
	const cut_kind q = cut_kind_of(v.dtype);
	uint64_t first = b * v.block_nvalues;
	uint32_t m = (uint32_t)block_values(&v, b), at = 4, head;
	uint32_t *e = (uint32_t *)scratch, *drops = (uint32_t *)(scratch + PLANE_ROOM);
	uint32_t *symbol = (uint32_t *)(scratch + 2 * PLANE_ROOM), *patterns = (uint32_t *)(scratch + 3 * PLANE_ROOM);
	uint16_t *pairs = (uint16_t *)(scratch + 7 * PLANE_ROOM);
	uint32_t *words = (uint32_t *)(scratch + CUT_PLANES * PLANE_ROOM);

	cut_values(&v, q, source, by, first, m, e, drops, patterns, lane);
	if (v.variant == WIRE_LEVELS_SHARED) {
		uint32_t found = (uint32_t)digest_bytes(by.exponents + first, m, WIRE_SEED_STATE, lane);

		put32(region + at, found, lane);
		at += 4;
	}
	if (v.model_parts.count)
		fit_rows(j, memory, source->values, v.dtype == WIRE_FLOAT32 ? 4 : 2, (int)q.octave, q.octave, first, m,
			 lane);
	at += put_symbols(j, q, first, m, e, drops, symbol, pairs, words, region + at, &head, lane);
	__syncwarp();
	if (v.variant == WIRE_LEVELS_PLANE)
		at += put_levels(q, m, e, drops, region, at, lane);
	at += put_pieces(q, v.options & WIRE_OPTION_BITS, m, e, drops, patterns, region, at, &head, lane);
	put32(region, head, lane);
	return end_region(region, at, lane);
}

#endif
