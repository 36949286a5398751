/* decode.c - a region, whatever it holds, to a block of values with cut mantissas. */
#include "truncate.h"

#define BAD(where, found, expected) return fault(f, CODEC_BAD_REGION, where, found, expected)

/* The block's lowered exponents to w->e; joint levels to w->level. */
static codec_status read_symbols(const struct job *j, const struct kernels *k, uint32_t mode, struct cursor *c,
				 uint64_t m, struct work *w, codec_fault *f)
{
	int joint = j->h.variant == WIRE_LEVELS_CODED;
	uint32_t base = truncate_base(&j->h), last = j->h.dtype == CODEC_FLOAT16 ? 31 : 255;

	switch (mode) {
	case WIRE_MODE_CODED:
		TRY(decode_plane(j->lookup, k, w, c, m, w->symbol, f));
		if (!joint)
			TRY(read_literals(w->top[0].escaped, c, w->symbol, m, f));
		break;
	case WIRE_MODE_RAW:
		if (joint || c->end - c->at < m)
			BAD(c->at, c->end - c->at, m);
		memcpy(w->symbol, c->frame + c->at, m);
		c->at += m;
		break;
	default:
		if (c->end == c->at)
			BAD(c->at, 0, 1);
		memset(w->symbol, c->frame[c->at++], m);
	}
	if (!joint) {
		if (k->max_byte(w->symbol, m) > last)
			BAD(c->at, k->max_byte(w->symbol, m), last);
		memcpy(w->e, w->symbol, m);
		return CODEC_OK;
	}
	k->pairs_of(w->symbol, m, (int)base, w->exponent);
	if (mode == WIRE_MODE_CODED) {
		TRY(read_wide_literals(w->top[0].escaped, c, w->exponent, m, f));
		FOR_ESCAPED (i, w->top[0].escaped, m) {
			uint16_t pair = w->exponent[i];

			if ((pair && pair < 4) || pair >> 2 > last)
				BAD(c->at, pair, 4);
			w->symbol[i] = 0; /* whatever the escape was */
		}
	}
	if (k->below_four(w->symbol, m) || k->max_byte(w->symbol, m) > 4 * (last - base) + 3)
		BAD(c->at, k->below_four(w->symbol, m), 0);
	k->unjoin(w->exponent, m, w->e, w->level);
	return CODEC_OK;
}

/* Exponents as they are, from lowered ones. */
static void raise_exponents(const struct job *j, const struct kernels *k, const struct truncate_kind *q, uint64_t first,
			    uint64_t m, struct work *w)
{
	int shift = q->mbits == 10 ? 10 : 7;
	uint64_t n;

	for (uint64_t i = 0; i < m && j->model.nsegments; i += n) {
		n = MIN(OFFSETS, m - i);
		model_offsets(j, k, NULL, first + i, n, w->offset);
		k->raise_exponents(w->e + i, w->offset, (uint8_t)q->last, shift, n, w->e + i);
	}
}

/* Bytes for n codes of `bits` bits at the cursor, the rest of the last byte 0; to `code`, unless that is NULL. */
static codec_status take_codes(struct cursor *c, const struct kernels *k, uint64_t n, int bits, uint8_t *code,
			       codec_fault *f)
{
	uint64_t nbits = n * (uint64_t)bits, nbytes = (nbits + 7) / 8;

	if (c->end - c->at < nbytes)
		BAD(c->at, c->end - c->at, nbytes);
	if (nbits % 8 && c->frame[c->at + nbytes - 1] >> nbits % 8)
		BAD(c->at + nbytes - 1, c->frame[c->at + nbytes - 1], 0);
	if (code)
		k->unpack_codes(c->frame + c->at, n, bits, code);
	c->at += nbytes;
	return CODEC_OK;
}

static codec_status read_levels(const struct job *j, const struct kernels *k, const codec_context *with,
				const struct truncate_kind *q, struct cursor *c, uint32_t digest, uint64_t first,
				uint64_t m, struct work *w, codec_fault *f)
{
	uint64_t at = c->at, count;

	switch (j->h.variant) {
	case WIRE_LEVELS_SHARED:
		truncate_reference(with, k, first, m, w->ea);
		if (digest != (uint32_t)k->digest(w->ea, m, WIRE_SEED_STATE))
			return fault(f, CODEC_OTHER_STATE, at, digest, (uint32_t)k->digest(w->ea, m, WIRE_SEED_STATE));
		return truncate_drops(j, k, with, q, first, m, w->e, w->ea, w->drop);
	case WIRE_LEVELS_FIXED: return truncate_drops(j, k, with, q, first, m, w->e, NULL, w->drop);
	case WIRE_LEVELS_PLANE:
		count = k->count(w->e, 1, m);
		TRY(take_codes(c, k, count, 2, w->symbol, f));
		k->unprune(w->e, 1, w->symbol, m, w->level);
		break;
	default: break;
	}
	k->drops_at(q, w->level, m, w->drop);
	if (k->drops_under(w->e, w->drop, m, (uint8_t)q->last)) /* a NaN would be Inf */
		BAD(at, 1, 0);
	return CODEC_OK;
}

/* n fields of these widths at the cursor, to `fields`, unless that is NULL. */
static codec_status unpack_widths(struct cursor *c, const uint8_t *widths, uint64_t n, int nbits, uint32_t *fields,
				  codec_fault *f)
{
	const uint8_t *src = c->frame + c->at;
	uint8_t tail[24] = {0};
	uint64_t total = 0, nbytes, last;

	for (uint64_t i = 0; i < n; i++)
		total += widths[i];
	nbytes = (total + 7) / 8;
	if (c->end - c->at < nbytes)
		BAD(c->at, c->end - c->at, nbytes);
	c->at += nbytes;
	if (total % 8 && c->frame[c->at - 1] >> total % 8)
		BAD(c->at - 1, c->frame[c->at - 1], 0);
	if (!fields)
		return CODEC_OK;
	last = nbytes - MIN(nbytes, 16); /* where 8 bytes cannot be read any more they are read from a copy */
	memcpy(tail, src + last, nbytes - last);
	for (uint64_t i = 0, bit = 0; i < n; i++) {
		const uint8_t *p = bit / 8 + 8 <= nbytes ? src + bit / 8 : tail + (bit / 8 - last);
		uint32_t width = widths[i];

		fields[i] = (uint32_t)(load64(p) >> bit % 8 & ((1u << width) - 1)) << (nbits - (int)width);
		bit += width;
	}
	return CODEC_OK;
}

/* What the block's values keep: fields to w->fields, or pieces to w->piece, one after the other; or only its checks. */
static codec_status read_pieces(const struct kernels *k, const struct truncate_kind *q, struct cursor *c, uint32_t head,
				uint64_t m, int checking, struct work *w, codec_fault *f)
{
	int total = q->mbits + 1, tail = q->by_bit ? (int)(head >> WIRE_TAIL_AT) : 0;
	uint8_t least = 0;

	k->widths(w->e, w->drop, m, total, total - tail, w->width);
	if (q->by_bit)
		return unpack_widths(c, w->width, m, total, checking ? NULL : w->fields, f);
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

/* The values' patterns to w->patterns. */
static void put_together(const struct kernels *k, const struct truncate_kind *q, uint64_t m, struct work *w)
{
	uint8_t piece[TRUNCATE_PIECES][TRUNCATE_TILE];
	const uint8_t *const pieces[] = {piece[0], piece[1], piece[2], piece[3]};
	uint64_t count[TRUNCATE_PIECES] = {0}, n;

	if (q->by_bit) {
		k->assemble(q, w->fields, w->e, m, w->patterns);
		return;
	}
	for (uint64_t at = 0; at < m; at += n) {
		uint8_t least = 0;

		n = MIN(TRUNCATE_TILE, m - at);
		for (int i = 0; i < TRUNCATE_PIECES; i++) {
			least = (uint8_t)(least + q->width[i]);
			count[i] += k->unprune(w->width + at, least, w->piece[i] + count[i], n, piece[i]);
		}
		k->join_pieces(q, pieces, w->e + at, n, w->patterns + at);
	}
}

/* Block b, whose region is frame[at, end), to `values`; NULL: only its checks. */
codec_status truncate_decode_block(const struct job *j, const struct kernels *k, const codec_context *with,
				   const uint8_t *frame, uint64_t b, uint64_t at, uint64_t end, char *values,
				   struct work *w)
{
	uint64_t first = b * j->h.block, m = MIN(j->h.block, j->h.n - first);
	uint32_t head = load32(frame + at),
		 known = 3 | (j->h.options & WIRE_OPTION_BITS ? 31u << WIRE_TAIL_AT : 15 * WIRE_PIECE_ZERO);
	struct cursor c = {frame, at + 4, end};
	codec_fault *f = with->fault;
	struct truncate_kind q;
	uint32_t digest = 0;

	truncate_kind_of(&j->h, &q);
	w->ahead.count = 0;
	if (head & ~known || (head & 3) == WIRE_MODE_ROWS || (q.by_bit && (int)(head >> WIRE_TAIL_AT) > q.mbits + 1))
		BAD(at, head, known);
	if (j->h.variant == WIRE_LEVELS_SHARED) {
		digest = load32(frame + c.at);
		c.at += 4;
	}
	TRY(read_symbols(j, k, head & 3, &c, m, w, f));
	raise_exponents(j, k, &q, first, m, w);
	TRY(read_levels(j, k, with, &q, &c, digest, first, m, w, f));
	TRY(read_pieces(k, &q, &c, head, m, !values, w, f));
	TRY(close_region(&c, f));
	if (!values)
		return CODEC_OK;
	put_together(k, &q, m, w);
	k->store_patterns(w->patterns, m, dtype_of(j->h.dtype)->nbytes, values);
	return CODEC_OK;
}

codec_status truncate_decode_blocks(const uint8_t *frame, const codec_tensor *dst, const codec_context *with,
				    const struct job *j, uint64_t first, uint64_t count, uint64_t *seal, struct work *w)
{
	const struct kernels *k = kernels_for(with);

	for (uint64_t b = first; b < first + count; b++) {
		uint64_t at, end, from = b * j->h.block, m = MIN(j->h.block, j->h.n - from);
		char *values = !dst ? NULL
			       : with->into == CODEC_INTO_STORE
				       ? (char *)dst->data + from * dtype_of(j->h.dtype)->nbytes
				       : w->values;

		TRY(job_block(j, frame, with, b, &at, &end, seal));
		TRY(truncate_decode_block(j, k, with, frame, b, at, end, values, w));
		if (dst && with->into != CODEC_INTO_STORE)
			sink_values(k, j->h.dtype, values, 0, from, m, with, dst);
	}
	return CODEC_OK;
}
