/*
 * decode.c - decode a region to a block of values with truncated mantissas. Safe for any bytes: they give values or an
 * error.
 */
#include "truncate.h"

#define BAD(where, found, expected) return fault(f, CODEC_BAD_REGION, where, found, expected)

/* Return the number of trailing bits that are omitted from all fields, with per-bit granularity. */
static int tail_of(uint32_t head)
{
	return (int)(head >> WIRE_TAIL_AT & WIRE_TAIL);
}

static codec_status region_open(const struct job *j, struct block *o, codec_fault *f)
{
	int by_bit = (j->h.options & CODEC_OPTION_BITS) != 0;
	uint32_t known = WIRE_REGION_GAPS | 3 | (by_bit ? WIRE_TAIL << WIRE_TAIL_AT : 15 * WIRE_PIECE_ZERO);
	struct truncate_kind q;

	truncate_kind_of(&j->h, &q);
	if (o->head & ~known || (o->head & 3) == WIRE_MODE_ROWS || (by_bit && tail_of(o->head) > q.mbits + 1))
		BAD(o->at, o->head, known);
	if (j->h.variant == CODEC_LEVEL_CODING_SHARED)
		o->c.at += 4; /* skip the digest of the state */
	TRY(gaps_open(o, f));
	o->coded = (o->head & 3) == WIRE_MODE_CODED;
	return o->coded ? open_plane(&o->c, &o->top, f) : CODEC_OK;
}

/*
 * Read the literals of joint symbols, and split the pairs of exponent and level into lowered exponents, w->e, and
 * levels, w->level.
 */
static codec_status read_pairs(const struct job *j, const struct kernels *k, const struct truncate_kind *q,
			       struct block *o, uint64_t at, struct work *w, codec_fault *f)
{
	uint32_t base = truncate_base(&j->h), last = q->last, most = 4 * (last - base) + 3;
	uint8_t *symbol = o->top.symbol;
	uint64_t literal = at;

	k->pairs_of(symbol, o->present, (int)base, w->exponent);
	if (o->coded) {
		TRY(read_wide_literals(o->top.escaped, &o->c, w->exponent, o->present, f));
		FOR_ESCAPED (i, o->top.escaped, o->present) {
			uint16_t pair = w->exponent[i];

			if ((pair && pair < 4) || pair >> 2 > last)
				BAD(literal, pair, pair < 4 ? 4 : 4 * last + 3);
			symbol[i] = 0; /* replace the escape symbol, so that the checks below ignore it */
			literal += 2;
		}
	}
	if (k->below_four(symbol, o->present) || k->max_byte(symbol, o->present) > most)
		for (;; symbol++)
			if ((*symbol && *symbol < 4) || *symbol > most)
				BAD(at, *symbol, *symbol < 4 ? 4 : most);
	k->unjoin(w->exponent, o->present, w->e, w->level);
	return CODEC_OK;
}

/* Read the block's lowered exponents, and set *lowered to them (top.symbol or w->e). Read joint levels to w->level. */
static codec_status read_symbols(const struct job *j, const struct kernels *k, const struct truncate_kind *q,
				 struct block *o, struct work *w, uint8_t **lowered, codec_fault *f)
{
	int joint = j->h.variant == CODEC_LEVEL_CODING_CODED;
	uint8_t *symbol = o->top.symbol;
	struct cursor *c = &o->c;
	uint64_t at = c->at, i; /* offset for codec_fault; coded symbols lie before it, except literals */

	switch (o->head & 3) {
	case WIRE_MODE_CODED:
		TRY(close_plane(j->lookup, c, &o->top, o->present, f));
		if (!joint)
			TRY(read_literals(o->top.escaped, c, symbol, o->present, f));
		break;
	case WIRE_MODE_RAW:
		if (joint || c->end - c->at < o->present)
			BAD(c->at, c->end - c->at, o->present);
		memcpy(symbol, c->frame + c->at, o->present);
		c->at += o->present;
		break;
	default:
		if (c->end == c->at)
			BAD(c->at, 0, 1);
		memset(symbol, c->frame[c->at++], o->present);
	}
	*lowered = joint ? w->e : symbol;
	if (joint)
		return read_pairs(j, k, q, o, at, w, f);
	if (k->max_byte(symbol, o->present) <= q->last)
		return CODEC_OK;
	i = first_above(symbol, o->present, (uint8_t)q->last);
	BAD(at + ((o->head & 3) == WIRE_MODE_RAW ? i : 0), symbol[i], q->last);
}

/* Raise the lowered exponents of m values by the scale model's offsets, into w->e, possibly in place. */
static void raise_exponents(const struct job *j, const struct kernels *k, const struct truncate_kind *q, uint64_t first,
			    uint64_t m, const uint8_t *lowered, struct work *w)
{
	int shift = truncate_shift(q);
	uint64_t n;

	if (!j->model.nsegments && lowered != w->e)
		memcpy(w->e, lowered, m);
	for (uint64_t i = 0; i < m && j->model.nsegments; i += n) {
		n = MIN(OFFSETS, m - i);
		model_offsets(j, k, NULL, first + i, n, w->offset);
		k->raise_exponents(lowered + i, w->offset, (uint8_t)q->last, shift, n, w->e + i);
	}
}

/* Consume nbits bits at the cursor, rounded up to whole bytes, and check that the padding of the last byte is 0. */
static codec_status take_bits(struct cursor *c, uint64_t nbits, const uint8_t **bytes, uint64_t *nbytes, codec_fault *f)
{
	*nbytes = (nbits + 7) / 8;
	*bytes = c->frame + c->at;
	if (c->end - c->at < *nbytes)
		BAD(c->at, c->end - c->at, *nbytes);
	c->at += *nbytes;
	if (nbits % 8 && c->frame[c->at - 1] >> nbits % 8)
		BAD(c->at - 1, c->frame[c->at - 1], 0);
	return CODEC_OK;
}

/* Consume n codes of `bits` bits at the cursor, and unpack them to `code` unless that is NULL. */
static codec_status take_codes(struct cursor *c, const struct kernels *k, uint64_t n, int bits, uint8_t *code,
			       codec_fault *f)
{
	const uint8_t *src;
	uint64_t nbytes;

	TRY(take_bits(c, n * (uint64_t)bits, &src, &nbytes, f));
	if (code)
		k->unpack_codes(src, n, bits, code);
	return CODEC_OK;
}

static codec_status read_levels(const struct job *j, const struct kernels *k, const codec_context *with,
				const struct truncate_kind *q, struct cursor *c, uint32_t digest, uint64_t first,
				uint64_t m, struct work *w, codec_fault *f)
{
	const codec_metric *t = with->metric;
	uint64_t at = c->at, count;

	switch (j->h.variant) {
	case CODEC_LEVEL_CODING_SHARED:
		truncate_reference(&t, k, first, m, w->ea);
		if (digest != (uint32_t)k->digest(w->ea, m, WIRE_SEED_STATE))
			return fault(f, CODEC_OTHER_STATE, at, digest, (uint32_t)k->digest(w->ea, m, WIRE_SEED_STATE));
		return truncate_drops(j, k, with, q, first, m, w->e, w->ea, w->drop);
	case CODEC_LEVEL_CODING_FIXED: return truncate_drops(j, k, with, q, first, m, w->e, NULL, w->drop);
	case CODEC_LEVEL_CODING_PLANE:
		count = k->count(w->e, 1, m);
		TRY(take_codes(c, k, count, 2, w->symbol, f));
		k->unprune(w->e, 1, w->symbol, m, w->level);
		break;
	default: break;
	}
	k->drops_at(q, w->level, m, w->drop);
	if (k->drops_under(w->e, w->drop, m,
			   (uint8_t)q->last)) /* error: dropping bits of a NaN could turn it into Inf */
		BAD(at, 1, 0);
	return CODEC_OK;
}

/*
 * Read the signs and mantissas of the m values of a block: as fields to w->fields, or as pieces to w->piece, where the
 * pieces of consecutive values are contiguous. `checking`: only check them.
 */
static codec_status read_pieces(const struct kernels *k, const struct truncate_kind *q, struct cursor *c, uint32_t head,
				uint64_t m, int checking, struct work *w, codec_fault *f)
{
	int total = q->mbits + 1, tail = q->by_bit ? tail_of(head) : 0;
	uint64_t nbits = k->widths(w->e, w->drop, m, total, total - tail, w->width), nbytes;
	const uint8_t *src;
	uint8_t least = 0;

	if (q->by_bit) {
		TRY(take_bits(c, nbits, &src, &nbytes, f));
		if (!checking)
			k->unpack_fields(src, nbytes, w->width, m, total, w->fields);
		return CODEC_OK;
	}
	for (int i = 0; i < TRUNCATE_PIECES; i++) {
		least = (uint8_t)(least + q->width[i]);
		if (head & WIRE_PIECE_ZERO << i)
			memset(w->piece[i], 0, m);
		else
			TRY(take_codes(c, k, k->count(w->width, least, m), q->width[i], checking ? NULL : w->piece[i],
				       f));
	}
	return CODEC_OK;
}

/* Assemble the bit patterns x of m values from exponents and from fields or pieces. */
static void assemble_patterns(const struct kernels *k, const struct truncate_kind *q, uint64_t m, struct work *w,
			      uint32_t *x)
{
	uint8_t piece[TRUNCATE_PIECES][TRUNCATE_TILE];
	const uint8_t *const pieces[] = {piece[0], piece[1], piece[2], piece[3]};
	uint64_t count[TRUNCATE_PIECES] = {0}, n;

	if (q->by_bit) {
		k->assemble(q, w->fields, w->e, m, x);
		return;
	}
	for (uint64_t at = 0; at < m; at += n) {
		uint8_t least = 0;

		n = MIN(TRUNCATE_TILE, m - at);
		for (int i = 0; i < TRUNCATE_PIECES; i++) {
			least = (uint8_t)(least + q->width[i]);
			count[i] += k->unprune(w->width + at, least, w->piece[i] + count[i], n, piece[i]);
		}
		k->join_pieces(q, pieces, w->e + at, n, x + at);
	}
}

static codec_status region_close(const struct job *j, const struct kernels *k, const codec_context *with,
				 struct block *o, char *values, int nontemporal, struct work *w)
{
	uint32_t nbytes = dtype_of(j->h.dtype)->nbytes,
		 digest = load32(o->c.frame + o->at + 4); /* used with shared levels only */
	uint64_t first = o->b * j->h.block, m = o->m;
	codec_fault *f = with->fault;
	struct truncate_kind q;
	uint8_t *lowered;

	truncate_kind_of(&j->h, &q);
	TRY(read_symbols(j, k, &q, o, w, &lowered, f));
	if (o->gaps) {
		gaps_expand(o, lowered);
		if (j->h.variant == CODEC_LEVEL_CODING_CODED)
			gaps_expand(o, w->level);
	}
	raise_exponents(j, k, &q, first, m, lowered, w);
	TRY(read_levels(j, k, with, &q, &o->c, digest, first, m, w, f));
	TRY(read_pieces(k, &q, &o->c, o->head, m, !values, w, f));
	TRY(close_region(&o->c, f));
	if (!values)
		return CODEC_OK;
	if (nbytes == 4 && !nontemporal && (uintptr_t)values % 4 == 0) {
		assemble_patterns(k, &q, m, w, (uint32_t *)(void *)values);
		return CODEC_OK;
	}
	assemble_patterns(k, &q, m, w, w->patterns);
	if (nontemporal && nbytes == 4) {
		k->stream((uint8_t *)values, (const uint8_t *)w->patterns, 4 * m);
	} else if (nontemporal) { /* the fields are no longer needed, so their memory is reused */
		k->store_patterns(w->patterns, m, (int)nbytes, w->fields);
		k->stream((uint8_t *)values, (const uint8_t *)w->fields, nbytes * m);
	} else {
		k->store_patterns(w->patterns, m, (int)nbytes, values);
	}
	return CODEC_OK;
}

static const struct block_steps STEPS = {region_open, NULL, region_close};

codec_status truncate_decode_blocks(const uint8_t *frame, const codec_tensor *dst, const codec_context *with,
				    const struct job *j, codec_range *range, struct work *w)
{
	return decode_in_pairs(&STEPS, frame, dst, with, j, range, w);
}
