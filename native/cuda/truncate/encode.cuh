/* truncate/encode.cuh - encode blocks of Truncate frames, one block per warp. docs/spec/encoder.md, section 8. */
#ifndef CODEC_CUDA_TRUNCATE_ENCODE_CUH
#define CODEC_CUDA_TRUNCATE_ENCODE_CUH

#include "coder/encode.cuh"
#include "coder/gaps.cuh"
#include "frame/encode.cuh"
#include "coder/fit.cuh"
#include "truncate/cut.cuh"
#include "truncate/rings.cuh"

/*
 * Bytes of scratch memory per warp: symbols, then literals (joint: two bytes each), then words. Bits of values are
 * dropped twice, since storing the results of the first pass would need more memory traffic.
 */
#define CUT_ROOM(joint) ((1 + 1 + (joint)) * PLANE_ROOM + 4 * WORDS_ROOM)

/* Sums over a block's values: for each piece of the fields, the number of values that keep it; OR of all fields. */
struct cut_sums {
	kept_sums kept;
	uint32_t bits; /* total mantissa bits kept; only with per-bit granularity */
	uint32_t any;
};

/* Return the mantissa field of value k, with bits that are not kept set to 0. */
DEVICE uint32_t kept_field(const cutter &c, const cut_quad &cut, uint32_t k)
{
	return bits_field(cut.x[k], (int)c.q.mbits, (int)c.q.sign);
}

/*
 * Symbols of a lane's four values. pair: exponents and levels (bits_pair), if levels are coded together with exponents.
 * outside: mask of values whose pair has no symbol.
 */
struct cut_symbols {
	uint32_t quad, outside;
	uint32_t pair[2]; /* 16 bits each */
};

/* Compute the symbols of n values. o: position of the first value in the scale model; advanced by 128 values. */
DEVICE cut_symbols symbols_of(const job *j, const cutter &c, place *o, uint32_t n, const cut_quad &cut)
{
	const uint32_t octave = 1u << c.q.octave_log2;
	cut_symbols s = {0, 0, {0}};
	uint2 offsets = {0, 0};

	if (c.model && n)
		offsets = quad_offsets(j, o, n, WIRE_CIRCLE(octave));
	for (uint32_t k = 0; k < 4; k++) {
		const uint32_t lowered = lower_exponent(cut.e[k], offset_in(offsets, k) >> c.q.octave_log2, c.q.last);

		if (c.joint) { /* as bits_pair and bits_pair_symbol do */
			const uint32_t pair = lowered ? lowered << 2 | cut.cuts[k] : 0, symbol = pair - 4 * c.q.base;
			const bool inside = pair && symbol - 4 < 252;

			s.outside |= (uint32_t)(pair && !inside) << k;
			s.quad |= (inside ? symbol : 0) << 8 * k;
			s.pair[k / 2] |= pair << 16 * (k % 2);
		} else {
			s.quad |= lowered << 8 * k;
		}
	}
	return s;
}

/* Buffers in the scratch memory of a warp. */
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
 * Write the symbols of a block of m values in the mode that needs fewest bytes, to the address that place(nbytes)
 * returns for nbytes bytes. If place() returns NULL, write nothing. Symbols that are coded together with levels are
 * never raw. Return the mode.
 */
template <class G>
DEVICE uint32_t put_symbols(const job *j, uint32_t m, bool constant, const cut_memory &to, G place, uint32_t lane)
{
	const bool joint = j->v.variant == CODEC_LEVEL_CODING_CODED;
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

/*
 * Drop bits of the m values of a block. Write symbols to scratch memory, and write residuals. Set *present to the quad
 * rows whose symbols are written: if some quad rows are not empty, those. Set *constant to true if all these symbols
 * are equal.
 */
DEVICE cut_sums cut_rows(const job *j, const cutter &c, const codec_source *source, uint64_t first, uint32_t m,
			 const cut_memory &to, quad_rows *present, bool *constant, uint32_t lane)
{
	const uint32_t escape = c.joint ? table_of(j, 0)[TABLE_ESCAPE] : 0;
	uint2 *pairs = global((uint2 *)to.pairs);
	uint32_t *symbol = global(to.symbol), differ = 0, first4 = 0;
	cut_sums sums = {{0, 0}, 0, 0};
	uint32_t written = 0; /* number of quad rows */
	place o = {};

	*present = {0, 0, false};
	if (c.model)
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
		if (!any_bit<4>(cut.e))
			continue;
		if (lane == r / 32)
			present->rows |= 1u << r % 32;
		present->kept += m - WIRE_ROW * r < WIRE_ROW ? m - WIRE_ROW * r : WIRE_ROW;
		for (uint32_t k = 0; k < 4; k++)
			sums.any |= kept_field(c, cut, k);
		if (c.by_bit)
			for (uint32_t k = 0; k < 4; k++)
				sums.bits += bits_kept(c.q, cut.e[k], cut.cuts[k], ~0u);
		else
			add_kept(&sums.kept, kept_by(cut.e, cut.cuts));
		if (c.joint)
			pairs[32 * written + lane] = {s.pair[0], s.pair[1]};
		if (s.outside)
			for (uint32_t k = 0; k < 4; k++)
				quad |= s.outside >> k & 1 ? escape << 8 * k : 0;
		symbol[32 * written + lane] = quad;
		first4 = written ? first4 : __shfl_sync(FULL, quad & 255, 0) * ONES;
		differ |= s.outside | keep_bytes(quad ^ first4, n);
		written++;
	}
	if (!written)
		symbol[lane] = 0;
	present->any = written && present->kept < m;
	present->kept = written ? present->kept : m;
	*constant = !__any_sync(FULL, differ != 0);
	__syncwarp();
	return sums;
}

/* Bit indices in the region at which levels and each piece begin. */
struct cut_places {
	uint32_t levels, piece[PIECES];
	uint32_t left_out; /* mask of pieces that are not written */
};

/*
 * Write the pieces of the fields of m values and, if `levels`, the values' levels. rings: RING_WORDS words in shared
 * memory for each piece and for levels, which are 0 before and after the call. In the region, the words in which a
 * stream begins or ends must have been cleared.
 */
DEVICE void put_pieces(const cutter &c, uint64_t first, uint32_t m, const cut_places &at, bool levels, uint8_t *region,
		       uint32_t *rings, uint32_t lane)
{
	bit_ring piece[PIECES], level = bit_ring_of(rings + RING_WORDS * PIECES, at.levels);

	for (uint32_t i = 0; i < PIECES; i++)
		piece[i] = bit_ring_of(rings + RING_WORDS * i, at.piece[i]);
	for (uint32_t r = 0; WIRE_ROW * r < m; r++) {
		const cut_quad cut = cut_values(c, first + WIRE_ROW * r + 4 * lane, there(r, lane, m));
		/* by: rotations that move the pieces of each value to their bit positions in the streams */
		uint32_t field[4], by[4], count = 0, width = piece_rotations(c.q);

		for (uint32_t k = 0; k < 4; k++) {
			uint32_t kept = kept_of(cut.e[k], cut.cuts[k]);

			field[k] = kept_field(c, cut, k);
			by[k] = width;
			width += kept & c.q.widths;
			count += kept & ONES;
		}
		uint32_t all, rank = warp_scan(count, lane, &all);

		if (levels) {
			uint32_t bits = 0, at = 0;

			for (uint32_t k = 0; k < 4; k++)
				if (cut.e[k]) {
					bits |= cut.cuts[k] << at;
					at += 2;
				}
			ring_bits(level, 2 * byte_of(rank, 0), bits);
		}
		for (uint32_t i = 0; i < PIECES; i++) {
			const uint32_t mask = piece_mask(c.q, i);
			uint32_t bits = 0;

			for (uint32_t k = 0; k < 4; k++) { /* bits of a field that are not kept are 0 */
				const uint32_t mine = field[k] & mask;

				bits |= __funnelshift_l(mine, mine, byte_of(by[k], i));
			}
			if (!(at.left_out >> i & 1))
				ring_bits(piece[i], byte_of(c.q.widths, i) * byte_of(rank, i), bits);
		}
		__syncwarp();
		if (levels)
			move_ring(&level, 2 * byte_of(all, 0), region, lane);
		for (uint32_t i = 0; i < PIECES; i++)
			if (!(at.left_out >> i & 1))
				move_ring(piece + i, byte_of(c.q.widths, i) * byte_of(all, i), region, lane);
		__syncwarp();
	}
	if (levels)
		end_ring(level, region, lane);
	for (uint32_t i = 0; i < PIECES; i++)
		end_ring(piece[i], region, lane);
	__syncwarp();
}

/* Per-bit granularity: write the fields of m values, at most `most` bits of each, to the region from bit `at` on. */
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

/* Return how many bits put_bits writes for m values. */
DEVICE_CALL uint32_t count_bits(cutter c, uint64_t first, uint32_t m, uint32_t most, uint32_t lane)
{
	uint32_t bits = 0;

	for (uint32_t r = 0; WIRE_ROW * r < m; r++) {
		const cut_quad cut = cut_values(c, first + WIRE_ROW * r + 4 * lane, there(r, lane, m));

		for (uint32_t k = 0; k < 4; k++)
			bits += bits_kept(c.q, cut.e[k], cut.cuts[k], most);
	}
	return warp_sum(bits);
}

/*
 * Layout of the part of a region after its symbols: levels and pieces or, if the granularity is per bit, fields.
 * Positions are in bits, relative to the symbols' end.
 */
struct cut_layout {
	uint32_t head;  /* flags for the region's head */
	uint32_t most;  /* per-bit granularity: maximum number of bits written per field */
	uint32_t bytes; /* total bytes of the region after its symbols */
	cut_places places;
};

/*
 * Lay out the fields of m values, with per-bit granularity. Values that were computed in a narrower dtype end in zero
 * bits, which are omitted.
 */
DEVICE void lay_out_bits(const cutter &c, uint64_t first, uint32_t m, const cut_sums &sums, cut_layout *to,
			 uint32_t lane)
{
	const uint32_t total = c.q.mbits + 1, tail = (uint32_t)__ffs((int)(sums.any | 1u << total)) - 1;
	uint32_t bits = warp_sum(sums.bits);

	if (tail) /* sums.bits includes the zero bits, so count again */
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
 * Encode block b. The region is written to the frame as soon as its size is known. Nothing is written past the frame's
 * capacity.
 */
template <uint32_t DTYPE>
DEVICE_CALL void write_cut(const codec_encoding &e, const job *j, const codec_source *source, uint64_t b,
			   uint8_t *scratch, uint32_t *rings, uint32_t lane)
{
	const codec_view &v = j->v;
	const cutter c = cutter_of(&v, source, e.by, DTYPE);
	const cut_memory to = cut_memory_of(scratch, v.variant == CODEC_LEVEL_CODING_CODED);
	const bool levels = v.variant == CODEC_LEVEL_CODING_PLANE;
	const uint64_t first = b * v.block_nvalues;
	const uint32_t m = (uint32_t)block_values(&v, b);
	const uint32_t start = c.shares ? 8 : 4; /* byte offset in the region at which the bitmap or symbols begin */
	uint32_t end = 0, size = 0; /* end: bytes of the symbols; size: bytes of the region, 0 until it is known */
	uint64_t at = 0, checksum = 0;
	cut_layout l = {};
	quad_rows present;
	bool constant;

	if (v.model_parts.count)
		fit_rows(j, e.memory, c.values, c.dtype == CODEC_FLOAT32 ? 4 : 2, 1 << c.q.octave_log2,
			 1u << c.q.octave_log2, first, m, lane);
	cut_sums sums = cut_rows(j, c, source, first, m, to, &present, &constant, lane);
	const uint32_t nbitmap = present.any ? WIRE_GAPS_NBYTES(m) : 0;

	sums.any = __reduce_or_sync(FULL, sums.any);
	if (c.by_bit)
		lay_out_bits(c, first, m, sums, &l, lane);
	else
		lay_out_pieces(c, levels, sums, &l);
	auto place_for = [&](uint32_t nbytes) -> uint8_t * {
		end = start + nbitmap + nbytes;
		size = (end + l.bytes + WIRE_ALIGN - 1) / WIRE_ALIGN * WIRE_ALIGN;
		at = v.regions_offset + look_back(e.places, b, size, lane);
		return at + size <= e.capacity ? e.frame + at + start + nbitmap : NULL;
	};
	l.head |= put_symbols(j, present.kept, constant, to, place_for, lane);
	l.head |= present.any ? WIRE_REGION_GAPS : 0;
	if (at + size <= e.capacity) {
		uint8_t *region = e.frame + at;

		__syncwarp();
		put32(region, l.head, lane);
		if (present.any)
			put_gaps(present.rows, m, region + start, lane);
		if (c.shares)
			put32(region + 4, (uint32_t)digest_bytes(c.exponents + first, m, WIRE_SEED_STATE, lane), lane);
		if (c.by_bit) {
			clear_bytes(region, end, end + l.bytes, lane);
			put_bits(c, first, m, 8 * end, l.most, region, lane);
		} else {
			l.places.levels = 8 * end;
			for (uint32_t i = 0; i < PIECES; i++) {
				l.places.piece[i] += 8 * end;
				clear_word(region, end, l.places.piece[i] / 8, lane);
			}
			clear_word(region, end, end, lane);
			clear_word(region, end, end + l.bytes, lane);
			__syncwarp();
			put_pieces(c, first, m, l.places, levels, region, shared(rings), lane);
		}
		end_region(region, end + l.bytes, lane);
		checksum = checksum_of_block(digest_bytes(region, size, WIRE_SEED_REGION, lane), b);
	}
	put_entry(&v, e, b, at + size, checksum, lane);
}

#endif
