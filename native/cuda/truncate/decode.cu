/* truncate/decode.cu - kernel that decodes Truncate frames, one block per warp. docs/spec/format.md, section 9. */
#include "coder/gaps.cuh"
#include "frame/decode.cuh"
#include "truncate/fields.cuh"

/*
 * Set *p to the address of the next nbits bits of the region, and move the cursor past their last byte. Return false if
 * fewer bits are left, or if the unused bits of the last byte are not 0.
 */
DEVICE bool take_bits(cursor *c, uint64_t nbits, const uint8_t **p)
{
	uint64_t nbytes = (nbits + 7) / 8;

	*p = here(c);
	if (left(c) < nbytes || (nbits % 8 && here(c)[nbytes - 1] >> nbits % 8))
		return false;
	c->at += nbytes;
	return true;
}

/* Replace the escapes in a row of 128 pairs by literals of two bytes. Return false if there are too few literals. */
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

/*
 * Read the lane's symbols of row r (128 of m values): lowered exponents, and levels if they are coded together with
 * exponents. Set o->bad if a symbol is invalid.
 */
DEVICE void symbol_row(const job *j, const cut_kind &q, plane *o, uint32_t r, uint32_t m, cursor *c, uint32_t e[4],
		       uint32_t levels[4], uint32_t lane)
{
	uint32_t escapes = 0, symbol[4];
	uint16_t pairs[4];

	for (uint32_t k = 0; k < 4; k++)
		levels[k] = 0;
	if (j->v.variant != CODEC_LEVEL_CODING_CODED) {
		unpack(plane_row(o, r, c, lane), e);
		for (uint32_t k = 0; k < 4; k++)
			o->bad |= e[k] > q.last;
		return;
	}
	if (o->mode == WIRE_MODE_CODED) /* literals are two bytes wide, so they are read separately */
		unpack(keep_bytes(decode_row(&o->coder, o->by, o->table, r, m, lane, &escapes, &o->bad),
				  there(r, lane, m)),
		       symbol);
	else
		unpack(plane_row(o, r, c, lane), symbol);
	for (uint32_t k = 0; k < 4; k++) {
		uint32_t s = symbol[k];

		pairs[k] = bits_symbol_pair((uint8_t)s, (int)q.base);
		o->bad |= !(escapes >> k & 1) && ((s && s < 4) || s > 4 * (q.last - q.base) + 3);
	}
	if (__any_sync(FULL, escapes != 0) && !take_wide_literals(c, pairs, escapes, lane))
		o->bad = true;
	for (uint32_t k = 0; k < 4; k++) {
		o->bad |= (pairs[k] && pairs[k] < 4) || pairs[k] >> 2 > q.last;
		e[k] = pairs[k] >> 2;
		levels[k] = pairs[k] & 3;
	}
}

/* Add the scale model's offsets to n exponents, then move `o` forward by 128 values. */
DEVICE void raise_exponents(const job *j, const cut_kind &q, place *o, uint32_t e[4], uint32_t n)
{
	uint2 offsets = {0, 0};

	if (n)
		offsets = quad_offsets(j, o, n, WIRE_CIRCLE(1u << q.octave_log2));
	for (uint32_t k = 0; k < 4; k++)
		e[k] = lower_exponent(e[k], q.last - (offset_in(offsets, k) >> q.octave_log2), q.last);
}

/*
 * Parameters from which the cuts of a block's values are computed, unless the region contains levels. The cut of a
 * value is its level or, with per-bit granularity, its number of dropped bits.
 */
struct cutting {
	const uint8_t *exponents; /* exponents of the metric A for the block; NULL: levels are not shared */
	int guard;
	uint32_t fixed; /* level of all values, if levels are neither shared nor in the region */
	bool by_bit;
};

/* Compute the cuts (levels, or numbers of dropped bits) of the lane's values in row r (128 of m values). */
DEVICE void cuts_of(const cut_kind &q, const cutting &cut, uint32_t r, uint32_t m, const uint32_t e[4],
		    uint32_t cuts[4], uint32_t lane)
{
	if (cut.exponents) {
		uint32_t ea4 = load_bytes(cut.exponents + WIRE_ROW * r + 4 * lane, there(r, lane, m));

		return shared_cuts(q, cut.by_bit, cut.guard, e, ea4, cuts);
	}
	for (uint32_t k = 0; k < 4; k++)
		cuts[k] = e[k] == q.last ? 0 : cut.fixed;
}

/* Return true if one of four values is Inf or NaN and has a level other than 0, which is invalid. */
DEVICE bool cuts_last(const cut_kind &q, const uint32_t e[4], const uint32_t levels[4])
{
	bool bad = false;

	for (uint32_t k = 0; k < 4; k++)
		bad |= levels[k] && e[k] == q.last;
	return bad;
}

/* Store n <= 4 values from value i on, or combine them with the destination. x: bits of the values. */
DEVICE_CALL void put_patterns(const codec_sink *sink, uint32_t dtype, uint64_t i, uint32_t n, uint4 x)
{
	const uint64_t wide[4] = {x.x, x.y, x.z, x.w};

	if (dtype == CODEC_FLOAT32)
		put_quad<4>(sink, dtype, i, n, wide);
	else
		put_quad<2>(sink, dtype, i, n, wide);
}

/* Description of a block, read from its region's head. */
struct cut_block {
	cut_kind q;
	cutting cut;
	uint32_t m, rows; /* number of values; number of rows of 128 values */
	uint32_t most; /* number of bits of a field that may be non-zero in the block; lower bits are 0 in all fields */
	uint32_t mode; /* mode of the plane of symbols */
	uint32_t left_out;      /* mask of pieces that are 0 in all values */
	bool sends, plane_sent; /* sends: the region contains levels; plane_sent: the levels are in a separate plane */
	uint32_t *e, *w;        /* scratch memory with four values per word: e: exponents; w: levels */
};

/* Read the head of a region of m values. Returns false if it is invalid. */
template <uint32_t DTYPE>
DEVICE bool open_cut(const codec_view &v, uint32_t head, const uint8_t *exponents, uint32_t m, uint8_t *scratch,
		     cut_block *o)
{
	const cut_kind q = cut_kind_of(DTYPE);
	const bool by_bit = (v.options & CODEC_OPTION_BITS) != 0, coded = v.variant == CODEC_LEVEL_CODING_CODED;
	const uint32_t total = q.mbits + 1, tail = by_bit ? head >> WIRE_TAIL_AT & WIRE_TAIL : 0;

	*o = {q,
	      {exponents, guard_of(q, v), v.bits & 3, by_bit},
	      m,
	      (m + WIRE_ROW - 1) / WIRE_ROW,
	      total - tail,
	      head & 3,
	      by_bit ? 0 : head / WIRE_PIECE_ZERO & 15,
	      coded || v.variant == CODEC_LEVEL_CODING_PLANE,
	      v.variant == CODEC_LEVEL_CODING_PLANE,
	      global((uint32_t *)scratch),
	      global((uint32_t *)(scratch + PLANE_ROOM))};
	return !(head & ~(WIRE_REGION_GAPS | 3 | (by_bit ? WIRE_TAIL << WIRE_TAIL_AT : 15 * WIRE_PIECE_ZERO)) ||
		 o->mode == WIRE_MODE_ROWS || tail > total || (coded && o->mode == WIRE_MODE_RAW));
}

/* Totals over a block's values. */
struct cut_totals {
	kept_sums kept; /* for each piece, the number of values that keep it */
	uint32_t bits;  /* CODEC_OPTION_BITS: number of mantissa bits that the values of this lane keep */
};

/*
 * Read the symbols of a block: write exponents, and levels if they are coded together with exponents, to scratch
 * memory. present: quad rows in the region; the exponents of the others are 0.
 */
DEVICE codec_status read_symbols(const job *j, const cut_block &o, const quad_rows &present, uint64_t first, cursor *c,
				 const pairs &by, cut_totals *totals, bool *bad, uint32_t lane)
{
	const bool model = j->v.model_parts.count > 0;
	uint32_t next = 0; /* number of the row among those in the region */
	place at = {};
	plane symbols;

	if (model)
		at = place_at(j, first + (4 * lane < o.m ? 4 * lane : 0));
	codec_status status = plane_open(&symbols, j, 0, o.mode, by, present.kept, c, lane);

	if (status != CODEC_OK)
		return status;
	for (uint32_t r = 0; r < o.rows; r++) {
		uint32_t exponents[4] = {0}, levels[4] = {0};

		if (has_row(present, r))
			symbol_row(j, o.q, &symbols, next++, present.kept, c, exponents, levels, lane);
		if (model)
			raise_exponents(j, o.q, &at, exponents, there(r, lane, o.m));
		o.e[32 * r + lane] = pack(exponents);
		if (o.sends)
			o.w[32 * r + lane] = pack(levels);
		else
			cuts_of(o.q, o.cut, r, o.m, exponents, levels, lane);
		*bad |= o.sends && cuts_last(o.q, exponents, levels);
		if (!o.cut.by_bit)
			add_kept(&totals->kept, kept_by(exponents, levels));
		else
			for (uint32_t k = 0; k < 4; k++)
				totals->bits += bits_kept(o.q, exponents[k], levels[k], o.most);
	}
	return plane_close(&symbols);
}

/*
 * Read levels from their separate plane to scratch memory. count: number of levels, one per value whose exponent is not
 * 0. Return false if the plane has fewer.
 */
DEVICE bool read_levels(const cut_block &o, const bit_source &source, uint32_t count, cursor *c, kept_sums *kept,
			bool *bad, uint32_t lane)
{
	const uint8_t *begin;

	if (!take_bits(c, 2ull * count, &begin))
		return false;
	uint32_t bit = bit_of(source, begin);

	*kept = {0, 0};
	for (uint32_t r = 0; r < o.rows; r++) {
		uint32_t exponents[4], levels[4];

		unpack(o.e[32 * r + lane], exponents);
		levels_sent(source, &bit, exponents, levels, lane);
		o.w[32 * r + lane] = pack(levels);
		add_kept(kept, kept_by(exponents, levels));
		*bad |= cuts_last(o.q, exponents, levels);
	}
	*kept = warp_sum(*kept);
	return true;
}

/* Compute the bit index at which each piece of the fields begins. Return false if a piece is incomplete. */
DEVICE bool find_pieces(const cut_block &o, const bit_source &source, const cut_totals &totals, cursor *c, pieces *p)
{
	*p = {{0}, o.left_out};
	for (uint32_t i = 0; i < (o.cut.by_bit ? 1 : PIECES); i++) {
		uint64_t n = o.cut.by_bit ? warp_sum(totals.bits) : byte_of(o.q.widths, i) * sum_of(totals.kept, i);
		const uint8_t *begin = here(c);

		if (!(p->left_out >> i & 1) && !take_bits(c, n, &begin))
			return false;
		p->bit[i] = bit_of(source, begin);
	}
	return true;
}

/*
 * Rebuild the values of a block from their exponents, cuts (level, or number of dropped bits) and mantissa fields, and
 * write them to the sink.
 */
DEVICE void put_cut(const cut_block &o, const bit_source &source, pieces p, uint32_t dtype, uint64_t first,
		    const codec_sink *sink, uint32_t lane)
{
	const bool stores = sink->into == CODEC_INTO_STORE &&
			    (uint64_t)sink->data % (dtype == CODEC_FLOAT32 ? sizeof(uint4) : sizeof(uint2)) == 0;

	for (uint32_t r = 0; r < o.rows; r++) {
		const uint64_t i = first + WIRE_ROW * r + 4 * lane;
		const uint32_t n = there(r, lane, o.m);
		uint32_t exponents[4], cuts[4], field[4] = {0};

		unpack(o.e[32 * r + lane], exponents);
		if (o.sends)
			unpack(o.w[32 * r + lane], cuts);
		else
			cuts_of(o.q, o.cut, r, o.m, exponents, cuts, lane);
		if (o.cut.by_bit)
			bit_fields(o.q, source, &p, exponents, cuts, o.most, field, lane);
		else
			piece_fields(o.q, source, &p, exponents, cuts, field, lane);
		for (uint32_t k = 0; k < 4; k++)
			field[k] = bits_pattern(field[k], (uint8_t)exponents[k], (int)o.q.mbits, (int)o.q.sign);
		if (n < 4 || !stores)
			put_patterns(sink, dtype, i, n, {field[0], field[1], field[2], field[3]});
		else if (dtype == CODEC_FLOAT32)
			global((uint4 *)sink->data)[i / 4] = {field[0], field[1], field[2], field[3]};
		else
			global((uint2 *)sink->data)[i / 4] = {field[0] | field[1] << 16, field[2] | field[3] << 16};
	}
}

/*
 * Decode block b, whose region is at cursor c. scratch: memory for two planes. exponents: exponents of the metric A for
 * all values of the tensor; used if levels are shared.
 */
template <uint32_t DTYPE>
DEVICE codec_status read_cut(const job *j, uint64_t b, cursor c, const pairs &by, uint8_t *scratch,
			     const uint8_t *exponents, const codec_sink *sink, uint32_t lane)
{
	const codec_view &v = j->v;
	const uint64_t first = b * v.block_nvalues;
	const bool shares = v.variant == CODEC_LEVEL_CODING_SHARED;
	cut_totals totals = {{0, 0}, 0};
	uint32_t sent = 0;
	bool bad = false;
	quad_rows present;
	cut_block o;
	pieces p;

	if (!open_cut<DTYPE>(v, load32(here(&c)), shares ? exponents + first : NULL, (uint32_t)block_values(&v, b),
			     scratch, &o))
		return CODEC_BAD_REGION;
	const bit_source source = bits_from(&c);
	const uint32_t head = load32(here(&c));

	c.at += 4;
	if (shares) {
		if (left(&c) < 4)
			return CODEC_BAD_REGION;
		sent = load32(here(&c));
		c.at += 4;
	}
	codec_status status = read_gaps(&c, head, o.m, &present, lane);

	if (status == CODEC_OK)
		status = read_symbols(j, o, present, first, &c, by, &totals, &bad, lane);
	if (status != CODEC_OK)
		return status;
	if (shares && sent != (uint32_t)digest_bytes(o.cut.exponents, o.m, WIRE_SEED_STATE, lane))
		return CODEC_OTHER_STATE;
	totals.kept = warp_sum(totals.kept);
	if (o.plane_sent && !read_levels(o, source, sum_of(totals.kept, 0), &c, &totals.kept, &bad, lane))
		return CODEC_BAD_REGION;
	if (__any_sync(FULL, bad) || !find_pieces(o, source, totals, &c, &p))
		return CODEC_BAD_REGION;
	status = close_region(&c, lane);
	if (status == CODEC_OK && sink->data)
		put_cut(o, source, p, DTYPE, first, sink, lane);
	return status;
}

/* Bytes of scratch memory per warp; the host reads this symbol. */
extern "C" __device__ const uint64_t decode_truncate_nbytes[] = {2 * PLANE_ROOM};

/* Kernel: decode the blocks of Truncate frames. Grid: (CTAs, frames). */
extern "C" __global__ void __launch_bounds__(32 * WARPS, 4) decode_truncate(const codec_decoding *decodings)
{
	decode_blocks<13>(decodings, 0,
			  [](const codec_decoding &d, const job *j, uint64_t b, cursor c, const pairs &by,
			     uint8_t *mine, uint32_t lane, uint64_t *) {
				  if (j->v.dtype == CODEC_FLOAT32)
					  return read_cut<CODEC_FLOAT32>(j, b, c, by, mine, d.exponents, &d.sink, lane);
				  if (j->v.dtype == CODEC_BFLOAT16)
					  return read_cut<CODEC_BFLOAT16>(j, b, c, by, mine, d.exponents, &d.sink,
									  lane);
				  return read_cut<CODEC_FLOAT16>(j, b, c, by, mine, d.exponents, &d.sink, lane);
			  });
}
