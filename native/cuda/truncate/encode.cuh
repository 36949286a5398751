/* truncate/encode.cuh - encoding of blocks of Truncate frames, one block a warp. docs/encoder.md, section 8. */
#ifndef CODEC_CUDA_TRUNCATE_ENCODE_CUH
#define CODEC_CUDA_TRUNCATE_ENCODE_CUH

#include "coder/encode.cuh"
#include "frame/encode.cuh"
#include "coder/fit.cuh"
#include "truncate/truncate.cuh"

/*
 * Bytes of scratch memory for a warp: symbols, then literals or, of two bytes each, pairs of symbol and level, then
 * words. Values are cut twice, since storing cut values would move more memory.
 */
#define CUT_ROOM(joint) ((1 + 1 + (joint)) * PLANE_ROOM + 4 * WORDS_ROOM)

/* Parameters of the cut of a tensor's values. */
struct cutter {
	cut_kind q;
	uint32_t dtype, fixed;
	bool nearest, by_bit, shares;
	int guard;
	const uint8_t *values;             /* the tensor */
	const uint8_t *exponents, *levels; /* exponents of A; given levels; NULL if not used */
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

/* A lane's values after the cut: patterns, exponents, cuts (levels; by bit: numbers of bits dropped). */
struct cut_quad {
	uint32_t x[4], e[4], cuts[4];
};

/* Compute the cuts of n values from value i on, whose exponents are e. */
DEVICE void cuts_asked(const cutter &c, uint64_t i, uint32_t n, const uint32_t e[4], uint32_t cuts[4])
{
	if (c.exponents)
		return shared_cuts(c.q, c.by_bit, c.guard, e, load_bytes(c.exponents + i, n), cuts);
	uint32_t levels = c.levels ? load_bytes(c.levels + i, n) : c.fixed * ONES;

	for (uint32_t k = 0; k < 4; k++)
		cuts[k] = e[k] == c.q.last ? 0 : byte_of(levels, k) & 3;
}

/* Cut n <= 4 values from value i on. */
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
	/* Decoders compute shared levels from the exponents after rounding. */
	if (c.shares && carried)
		cuts_asked(c, i, n, cut.e, cut.cuts);
	return cut;
}

/* Sums over a block's values: number of values that keep each piece, OR of all fields. */
struct cut_sums {
	kept_sums kept;
	uint32_t bits; /* mantissa bits kept, in total; with per-bit granularity only */
	uint32_t any;
};

/* Return the field of value k; bits that are not kept are 0. */
DEVICE uint32_t kept_field(const cutter &c, const cut_quad &cut, uint32_t k)
{
	return bits_field(cut.x[k], (int)c.q.mbits, (int)c.q.sign);
}

/*
 * Symbols of a lane's values of a row; pair: symbols and levels, if levels are coded with them; outside: mask of values
 * whose pair has no symbol.
 */
struct cut_symbols {
	uint32_t quad, outside;
	uint16_t pair[4];
};

/* Compute symbols of n values. o: position of the first value in the model; moves on by a row. */
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

/* Scratch memory of a warp. */
struct cut_memory {
	uint32_t *symbol;
	uint16_t *pairs;
	uint32_t *words;
};

DEVICE cut_memory cut_memory_of(uint8_t *scratch, bool joint)
{
	return {(uint32_t *)scratch, (uint16_t *)(scratch + PLANE_ROOM),
		(uint32_t *)(scratch + CUT_ROOM(joint) - 4 * WORDS_ROOM)};
}

/*
 * Write a block's symbols, in the mode that takes least space, to the address that place(nbytes) returns for their
 * nbytes bytes; NULL: nowhere. Symbols with levels are never raw. Returns the mode.
 */
template <class G>
DEVICE uint32_t put_symbols(const job *j, uint32_t m, bool constant, const cut_memory &to, G place, uint32_t lane)
{
	const bool joint = j->v.variant == WIRE_LEVELS_CODED;
	bool placed = false;
	auto place_coded = [&](uint32_t nbytes) {
		placed = true;
		return place(nbytes);
	};

	if (!constant)
		end_plane(code_rows(j, 0, to.symbol, m, to.words, (uint8_t *)to.pairs, joint, lane),
			  joint ? ~0u : m - 1, place_coded, lane);
	if (placed)
		return WIRE_MODE_CODED;
	uint8_t *out = place(constant ? 1 : m);

	if (out)
		copy_bytes(out, (const uint8_t *)to.symbol, constant ? 1 : m, lane);
	return constant ? WIRE_MODE_CONSTANT : WIRE_MODE_RAW;
}

/* Cut all rows of a block: writes symbols to scratch memory, and residuals. *constant: all symbols are equal. */
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

/* Clear bytes from to end - 1 of a region, and the rest of the last word. */
DEVICE void clear_bytes(uint8_t *region, uint32_t from, uint32_t end, uint32_t lane)
{
	uint32_t *word = global((uint32_t *)region);

	if (from % 4 && lane < 4 - from % 4)
		region[from + lane] = 0;
	for (uint32_t i = (from + 3) / 4 + lane; i < (end + 3) / 4; i += 32)
		word[i] = 0;
	__syncwarp();
}

/* Indices of the first bits of levels and pieces in the region. */
struct cut_places {
	uint32_t levels, piece[PIECES];
	uint32_t left_out; /* mask of pieces that are not written */
};

/* Write pieces of all values and, if `levels`, their levels. */
DEVICE void put_pieces(const cutter &c, uint64_t first, uint32_t m, cut_places to, bool levels, uint8_t *region,
		       uint32_t lane)
{
	for (uint32_t r = 0; WIRE_ROW * r < m; r++) {
		const cut_quad cut = cut_values(c, first + WIRE_ROW * r + 4 * lane, there(r, lane, m));
		/* width, by: bits of the lane's earlier values in each piece, a byte each */
		uint32_t field[4], by[4], count = 0, width = 0;

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

			/* bits that are not kept are 0 */
			for (uint32_t k = 0; k < 4; k++)
				bits |= (field[k] >> shift & ((1u << width) - 1)) << byte_of(by[k], i);
			if (!(to.left_out >> i & 1))
				or_bits(region, to.piece[i] + width * byte_of(rank, i), bits);
			to.piece[i] += width * byte_of(all, i);
		}
	}
	__syncwarp();
}

/* Write fields by bit from bit `at` on, at most `most` bits of each. */
DEVICE void put_bits(const cutter &c, uint64_t first, uint32_t m, uint32_t at, uint32_t most, uint8_t *region,
		     uint32_t lane)
{
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
}

/* Return how many bits put_bits writes for all values. */
DEVICE_CALL uint32_t count_bits(const cutter &c, uint64_t first, uint32_t m, uint32_t most, uint32_t lane)
{
	uint32_t bits = 0;

	for (uint32_t r = 0; WIRE_ROW * r < m; r++) {
		const cut_quad cut = cut_values(c, first + WIRE_ROW * r + 4 * lane, there(r, lane, m));

		for (uint32_t k = 0; k < 4; k++)
			bits += bits_kept(c.q, cut.e[k], cut.cuts[k], most);
	}
	return warp_sum(bits);
}

/* Layout of a region behind its symbols: levels and pieces, or fields by bit. Places are bits from the symbols' end. */
struct cut_layout {
	uint32_t head;  /* bits of the region's head */
	uint32_t most;  /* by bit: most bits of a field */
	uint32_t bytes; /* in total */
	cut_places places;
};

/* Lay out fields by bit. Gradients that were computed in a narrower dtype end in zeros, which are left out. */
DEVICE void lay_out_bits(const cutter &c, uint64_t first, uint32_t m, const cut_sums &sums, cut_layout *to,
			 uint32_t lane)
{
	const uint32_t total = c.q.mbits + 1, tail = (uint32_t)__ffs((int)(sums.any | 1u << total)) - 1;
	uint32_t bits = warp_sum(sums.bits);

	if (tail) /* sums.bits has the zeros, too */
		bits = count_bits(c, first, m, total - tail, lane);
	to->head = tail << WIRE_TAIL_AT;
	to->most = total - tail;
	to->bytes = (bits + 7) / 8;
}

/* Lay out levels and pieces. */
DEVICE void lay_out_pieces(const cutter &c, bool levels, const cut_sums &sums, cut_layout *to)
{
	const kept_sums kept = warp_sum(sums.kept);
	uint32_t ends = 0, at = levels ? (2 * sum_of(kept, 0) + 7) / 8 : 0;

	for (uint32_t i = 0; i < PIECES; i++) {
		uint32_t width = byte_of(c.q.widths, i), count = sum_of(kept, i),
			 shift = c.q.mbits + 1 - (ends += width);
		bool zero = count && !(sums.any >> shift & ((1u << width) - 1));

		to->places.piece[i] = 8 * at;
		to->places.left_out |= (uint32_t)zero << i;
		at += zero ? 0 : (width * count + 7) / 8;
	}
	to->head = WIRE_PIECE_ZERO * to->places.left_out;
	to->bytes = at;
}

/*
 * Encode block b. Its region is written to its place in the frame as soon as its size is known. Nothing is written
 * behind the frame's capacity.
 */
DEVICE void write_cut(const codec_encoding &e, const job *j, const codec_source *source, uint64_t b, uint8_t *scratch,
		      uint32_t lane)
{
	const codec_view &v = j->v;
	const cutter c = cutter_of(&v, source, e.by);
	const cut_memory to = cut_memory_of(scratch, v.variant == WIRE_LEVELS_CODED);
	const bool levels = v.variant == WIRE_LEVELS_PLANE;
	const uint64_t first = b * v.block_nvalues;
	const uint32_t m = (uint32_t)block_values(&v, b), start = c.shares ? 8 : 4; /* where symbols begin */
	uint32_t end = 0, size = 0;                                                 /* of the symbols; of the region */
	uint64_t at = 0, checksum = 0;
	cut_layout l = {};
	bool constant;

	if (v.model_parts.count)
		fit_rows(j, e.memory, c.values, c.dtype == WIRE_FLOAT32 ? 4 : 2, 1 << c.q.octave_log2,
			 1u << c.q.octave_log2, first, m, lane);
	cut_sums sums = cut_rows(j, c, source, first, m, to, &constant, lane);

	sums.any = __reduce_or_sync(FULL, sums.any);
	if (c.by_bit)
		lay_out_bits(c, first, m, sums, &l, lane);
	else
		lay_out_pieces(c, levels, sums, &l);
	auto place_for = [&](uint32_t nbytes) -> uint8_t * {
		end = start + nbytes;
		size = (end + l.bytes + WIRE_ALIGN - 1) / WIRE_ALIGN * WIRE_ALIGN;
		at = v.regions_offset + look_back(e.places, b, size, lane);
		return at + size <= e.capacity ? e.frame + at + start : NULL;
	};
	l.head |= put_symbols(j, m, constant, to, place_for, lane);
	if (at + size <= e.capacity) {
		uint8_t *region = e.frame + at;

		__syncwarp();
		put32(region, l.head, lane);
		if (c.shares)
			put32(region + 4, (uint32_t)digest_bytes(c.exponents + first, m, WIRE_SEED_STATE, lane), lane);
		clear_bytes(region, end, end + l.bytes, lane);
		if (c.by_bit) {
			put_bits(c, first, m, 8 * end, l.most, region, lane);
		} else {
			l.places.levels = 8 * end;
			for (uint32_t i = 0; i < PIECES; i++)
				l.places.piece[i] += 8 * end;
			put_pieces(c, first, m, l.places, levels, region, lane);
		}
		end_region(region, end + l.bytes, lane);
		checksum = checksum_of_block(digest_bytes(region, size, WIRE_SEED_REGION, lane), b);
	}
	put_entry(&v, e, b, at + size, checksum, lane);
}

#endif
