/* truncate/encode.cuh - values to regions with cut mantissas: a warp does a block. docs/encoder.md, section 8. */
#ifndef CODEC_CUDA_TRUNCATE_ENCODE_CUH
#define CODEC_CUDA_TRUNCATE_ENCODE_CUH

#include "coder/encode.cuh"
#include "frame/encode.cuh"
#include "coder/fit.cuh"
#include "truncate/truncate.cuh"

/* Planes of a warp's memory: symbols, pairs (2). Values are cut twice rather than kept: that is more memory to move. */
#define CUT_PLANES 3

/* How values are cut. */
struct cutter {
	cut_kind q;
	uint32_t dtype, fixed;
	bool nearest, by_bit, shares;
	int guard;
	const uint8_t *values;             /* of the tensor */
	const uint8_t *exponents, *levels; /* of A; or levels that were asked for; or NULL, both */
};

DEVICE cutter cutter_of(const codec_view *v, const codec_source *source, const codec_cuts &by)
{
	const cut_kind q = cut_kind_of(v->dtype);
	const bool given = v->variant == WIRE_LEVELS_FIXED || by.levels;

	return {q,
		v->dtype,
		v->bits & 3,
		!(v->options & WIRE_OPTION_CUT),
		(v->options & WIRE_OPTION_BITS) != 0,
		v->variant == WIRE_LEVELS_SHARED,
		guard_of(q, *v),
		source->values,
		given ? NULL : by.exponents,
		by.levels};
}

/* A lane's values, cut: patterns, exponents, levels or by bit what was dropped. */
struct cut_quad {
	uint32_t x[4], e[4], cuts[4];
};

/* What values with these exponents are cut by; n of them, from value i of the tensor on. */
DEVICE void cuts_asked(const cutter &c, uint64_t i, uint32_t n, const uint32_t e[4], uint32_t cuts[4])
{
	if (c.exponents)
		return shared_cuts(c.q, c.by_bit, c.guard, e, load_bytes(c.exponents + i, n), cuts);
	uint32_t levels = c.levels ? load_bytes(c.levels + i, n) : c.fixed * ONES;

	for (uint32_t k = 0; k < 4; k++)
		cuts[k] = e[k] == c.q.last ? 0 : byte_of(levels, k) & 3;
}

/* Values i to i + n - 1, at most four. */
DEVICE cut_quad cut_values(const cutter &c, uint64_t i, uint32_t n)
{
	cut_quad cut;
	uint64_t wide[4];
	uint32_t carried = 0;

	if (c.dtype == WIRE_FLOAT32)
		load_quad<4>(global(c.values) + 4 * i, n, wide);
	else
		load_quad<2>(global(c.values) + 2 * i, n, wide);
	for (uint32_t k = 0; k < 4; k++) {
		cut.x[k] = (uint32_t)wide[k];
		cut.e[k] = cut.x[k] >> c.q.mbits & c.q.last;
	}
	cuts_asked(c, i, n, cut.e, cut.cuts);
	for (uint32_t k = 0; k < 4; k++) {
		uint32_t drop = c.by_bit ? cut.cuts[k] : drop_of(c.q, cut.cuts[k]), e = cut.e[k];

		cut.x[k] = round_truncate(cut.x[k], drop, c.nearest, c.q.mbits, c.q.last);
		cut.e[k] = cut.x[k] >> c.q.mbits & c.q.last;
		carried |= e ^ cut.e[k];
	}
	/* a receiver that works levels out has the new exponents */
	if (c.shares && carried)
		cuts_asked(c, i, n, cut.e, cut.cuts);
	return cut;
}

/* Of all values of a block: which bits fields have, and how many values keep each piece. */
struct cut_sums {
	kept_sums kept;
	uint32_t bits; /* by bit: that are kept */
	uint32_t any;
};

/* What a value's field keeps of it, and where it was cut off zeros. */
DEVICE uint32_t kept_field(const cutter &c, const cut_quad &cut, uint32_t k)
{
	return bits_field(cut.x[k], (int)c.q.mbits, (int)c.q.sign);
}

/* Symbols of a lane's values of a row, and with joint levels their pairs; `outside`: those whose pair has no symbol. */
struct cut_symbols {
	uint32_t quad, outside;
	uint16_t pair[4];
};

/* *o is the first value's place, or that of the row's after it. */
DEVICE cut_symbols symbols_of(const job *j, const cutter &c, place *o, uint32_t n, const cut_quad &cut)
{
	const bool joint = j->v.variant == WIRE_LEVELS_CODED;
	const uint32_t octave = 1u << c.q.octave_log2;
	cut_symbols s = {0, 0, {0}};
	uint16_t offset[4] = {0};

	if (j->v.model_parts.count && n)
		quad_offsets(j, o, n, (int)octave / 8, WIRE_CIRCLE((int)octave), offset);
	for (uint32_t k = 0; k < 4; k++) {
		uint8_t lowered = bits_lower_exponent((uint8_t)cut.e[k], (uint8_t)(offset[k] >> c.q.octave_log2),
						      (uint8_t)c.q.last);

		if (joint) {
			s.pair[k] = bits_pair(lowered, (uint8_t)cut.cuts[k]);
			uint32_t one = bits_pair_symbol(s.pair[k], (int)c.q.base);

			s.outside |= (uint32_t)(s.pair[k] && !one) << k;
			s.quad |= one << 8 * k;
		} else {
			s.quad |= (uint32_t)lowered << 8 * k;
		}
	}
	return s;
}

/* Memory of a warp. */
struct cut_memory {
	uint32_t *symbol;
	uint16_t *pairs;
	uint32_t *words;
};

DEVICE cut_memory cut_memory_of(uint8_t *scratch)
{
	return {(uint32_t *)scratch, (uint16_t *)(scratch + PLANE_ROOM),
		(uint32_t *)(scratch + CUT_PLANES * PLANE_ROOM)};
}

/* Symbols of a block, in the mode that serves them best: bytes at `out`. */
DEVICE_CALL uint32_t put_symbols(const job *j, uint32_t m, bool constant, const cut_memory &to, uint8_t *out,
				 uint32_t *mode, uint32_t lane)
{
	const bool joint = j->v.variant == WIRE_LEVELS_CODED;

	if (constant) {
		*mode = WIRE_MODE_CONSTANT;
		if (lane == 0)
			out[0] = (uint8_t)to.symbol[0];
		return 1;
	}
	*mode = WIRE_MODE_CODED; /* joint ones are never raw */
	uint32_t got =
		encode_plane(j, 0, to.symbol, m, joint ? ~0u : m - 1, to.words, (uint8_t *)to.pairs, joint, out, lane);

	if (got)
		return got;
	*mode = WIRE_MODE_RAW;
	copy_bytes(out, (const uint8_t *)to.symbol, m, lane);
	return m;
}

/* All rows of a block: symbols to memory; *constant: all are the first one. */
DEVICE cut_sums cut_rows(const job *j, const cutter &c, const codec_source *source, uint64_t first, uint32_t m,
			 const cut_memory &to, bool *constant, uint32_t lane)
{
	const bool joint = j->v.variant == WIRE_LEVELS_CODED;
	uint32_t differ = 0, first4 = 0;
	cut_sums sums = {{0, 0}, 0, 0};
	place o = {};

	if (j->v.model_parts.count)
		o = place_at(j, first + (4 * lane < m ? 4 * lane : 0));
	for (uint32_t r = 0; WIRE_ROW * r < m; r++) {
		const uint32_t n = there(r, lane, m);
		const uint64_t i = first + WIRE_ROW * r + 4 * lane;
		const cut_quad cut = cut_values(c, i, n);
		const cut_symbols s = symbols_of(j, c, &o, n, cut);
		uint32_t quad = s.quad;

		if (source->residual)
			for (uint32_t k = 0; k < 4; k++)
				if (k < n)
					source->residual[i + k] = round_minus(value_at(c.dtype, source, i + k),
									      float_of(c.dtype, cut.x[k]));
		for (uint32_t k = 0; k < 4; k++)
			sums.any |= kept_field(c, cut, k);
		if (c.by_bit)
			for (uint32_t k = 0; k < 4; k++)
				sums.bits += bits_kept(c.q, cut.e[k], cut.cuts[k], ~0u);
		else
			add_kept(&sums.kept, kept_by(cut.e, cut.cuts));
		for (uint32_t k = 0; k < 4 && joint; k++) {
			to.pairs[WIRE_ROW * r + 4 * lane + k] = s.pair[k];
			quad |= s.outside >> k & 1 ? (uint32_t)table_of(j, 0)[TABLE_ESCAPE] << 8 * k : 0;
		}
		to.symbol[32 * r + lane] = quad;
		first4 = r ? first4 : __shfl_sync(FULL, quad & 255, 0) * ONES;
		differ |= s.outside | keep_bytes(quad ^ first4, n);
	}
	*constant = !__any_sync(FULL, differ != 0);
	__syncwarp();
	return sums;
}

/* Bits to a region that is 0 there, from bit `bit` on; 32 of them at most. */
DEVICE void or_bits(uint8_t *region, uint64_t bit, uint32_t x)
{
	uint32_t *word = global((uint32_t *)region) + bit / 32;
	uint32_t low = x << bit % 32, high = __funnelshift_l(x, 0, (uint32_t)(bit % 32));

	if (low)
		atomicOr(word, low);
	if (high)
		atomicOr(word + 1, high);
}

/* Bytes from..end of a region, and what is left of the last word, become 0. */
DEVICE void clear_bytes(uint8_t *region, uint32_t from, uint32_t end, uint32_t lane)
{
	uint32_t *word = global((uint32_t *)region);

	if (from % 4 && lane < 4 - from % 4)
		region[from + lane] = 0;
	for (uint32_t i = (from + 3) / 4 + lane; i < (end + 3) / 4; i += 32)
		word[i] = 0;
	__syncwarp();
}

/* Where levels and pieces begin, in bits of the region. */
struct cut_places {
	uint32_t levels, piece[PIECES];
	uint32_t left_out; /* pieces, a bit each */
};

/* Levels, if they are sent apart, and pieces of all rows. */
DEVICE void put_pieces(const cutter &c, uint64_t first, uint32_t m, cut_places to, bool levels, uint8_t *region,
		       uint32_t lane)
{
	for (uint32_t r = 0; WIRE_ROW * r < m; r++) {
		const cut_quad cut = cut_values(c, first + WIRE_ROW * r + 4 * lane, there(r, lane, m));
		uint32_t field[4], by[4], count = 0, width = 0; /* bits of a piece that values before have, by piece */

		for (uint32_t k = 0; k < 4; k++) {
			uint32_t kept = kept_of(cut.e[k], cut.cuts[k]);

			field[k] = kept_field(c, cut, k);
			by[k] = width;
			width += kept & c.q.widths;
			count += kept & ONES;
		}
		uint32_t all, rank = warp_scan(count, lane, &all), ends = 0;

		if (levels) {
			uint32_t bits = 0, at = 0;

			for (uint32_t k = 0; k < 4; k++)
				if (cut.e[k]) {
					bits |= cut.cuts[k] << at;
					at += 2;
				}
			or_bits(region, to.levels + 2 * byte_of(rank, 0), bits);
			to.levels += 2 * byte_of(all, 0);
		}
		for (uint32_t i = 0; i < PIECES; i++) {
			uint32_t width = byte_of(c.q.widths, i), shift = c.q.mbits + 1 - (ends += width), bits = 0;

			/* what is not kept has been cut off: 0 */
			for (uint32_t k = 0; k < 4; k++)
				bits |= (field[k] >> shift & ((1u << width) - 1)) << byte_of(by[k], i);
			if (!(to.left_out >> i & 1))
				or_bits(region, to.piece[i] + width * byte_of(rank, i), bits);
			to.piece[i] += width * byte_of(all, i);
		}
	}
	__syncwarp();
}

/* The same bit by bit, `most` of each field at most: how many bits in all. */
DEVICE uint32_t put_bits(const cutter &c, uint64_t first, uint32_t m, uint32_t at, uint32_t most, uint8_t *region,
			 uint32_t lane)
{
	const uint32_t begin = at;

	for (uint32_t r = 0; WIRE_ROW * r < m; r++) {
		const cut_quad cut = cut_values(c, first + WIRE_ROW * r + 4 * lane, there(r, lane, m));
		uint32_t mine = 0, all, keeps[4];

		for (uint32_t k = 0; k < 4; k++)
			mine += keeps[k] = bits_kept(c.q, cut.e[k], cut.cuts[k], most);
		uint32_t bit = at + warp_scan(mine, lane, &all);

		for (uint32_t k = 0; k < 4; k++) {
			or_bits(region, bit, kept_field(c, cut, k) >> (c.q.mbits + 1 - keeps[k]));
			bit += keeps[k];
		}
		at += all;
	}
	__syncwarp();
	return at - begin;
}

/* Block b to a region: its size. */
DEVICE uint32_t write_cut(const job *j, uint8_t *memory, const codec_source *source, const codec_cuts &by, uint64_t b,
			  uint8_t *scratch, uint8_t *region, uint32_t lane)
{
	const codec_view &v = j->v;
	const cutter c = cutter_of(&v, source, by);
	const cut_memory to = cut_memory_of(scratch);
	const uint64_t first = b * v.block_nvalues;
	const uint32_t m = (uint32_t)block_values(&v, b), total = c.q.mbits + 1;
	uint32_t at = 4, head;
	bool constant;

	if (v.model_parts.count)
		fit_rows(j, memory, c.values, c.dtype == WIRE_FLOAT32 ? 4 : 2, 1 << c.q.octave_log2,
			 1u << c.q.octave_log2, first, m, lane);
	if (c.shares) {
		put32(region + at, (uint32_t)digest_bytes(c.exponents + first, m, WIRE_SEED_STATE, lane), lane);
		at += 4;
	}
	cut_sums sums = cut_rows(j, c, source, first, m, to, &constant, lane);

	at += put_symbols(j, m, constant, to, region + at, &head, lane);
	__syncwarp();
	sums.any = __reduce_or_sync(FULL, sums.any);
	if (c.by_bit) { /* gradients made in a narrower type than theirs end in zeros */
		uint32_t tail = (uint32_t)__ffs((int)(sums.any | 1u << total)) - 1;

		head |= tail << WIRE_TAIL_AT;
		clear_bytes(region, at, at + (warp_sum(sums.bits) + 7) / 8, lane);
		at += (put_bits(c, first, m, 8 * at, total - tail, region, lane) + 7) / 8;
	} else {
		const bool levels = v.variant == WIRE_LEVELS_PLANE;
		const kept_sums kept = warp_sum(sums.kept);
		cut_places places = {8 * at, {0}, 0};
		uint32_t from = at, ends = 0;

		at += levels ? (2 * sum_of(kept, 0) + 7) / 8 : 0;
		for (uint32_t i = 0; i < PIECES; i++) {
			uint32_t width = byte_of(c.q.widths, i), count = sum_of(kept, i),
				 shift = total - (ends += width);
			bool zero = count && !(sums.any >> shift & ((1u << width) - 1));

			places.piece[i] = 8 * at;
			places.left_out |= (uint32_t)zero << i;
			at += zero ? 0 : (width * count + 7) / 8;
		}
		head |= WIRE_PIECE_ZERO * places.left_out;
		clear_bytes(region, from, at, lane);
		put_pieces(c, first, m, places, levels, region, lane);
	}
	put32(region, head, lane);
	return end_region(region, at, lane);
}

#endif
