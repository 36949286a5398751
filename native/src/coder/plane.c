/*
 * plane.c - encode and decode a plane of bytes with the lane coder. docs/spec/format.md, section 7.
 *
 * Layout of a coded plane:
 *
 *   u16 words | 32 x 5 bits of tail lengths | tails | padding to 4 bytes | words | literals of escapes
 *
 * The first 32 words are the lanes' first words. Trailing zero words are omitted.
 */
#include "plane.h"

#define BAD(where, found, expected) return fault(f, CODEC_BAD_REGION, where, found, expected)

/*
 * Pack 32 fields, field l of width[l] bits (width NULL: 5 bits each), at p, most significant bit first. Return the end
 * of the packed bytes. unpack_bits is the inverse.
 */
static uint8_t *pack_bits(uint8_t *p, const uint32_t *field, const uint32_t *width)
{
	uint64_t bits = 0;
	uint32_t have = 0;

	for (int l = 0; l < WIRE_LANES; l++) {
		uint32_t n = width ? width[l] : 5;

		bits |= (uint64_t)field[l] << (64 - n - have) % 64 & (0 - (uint64_t)(n > 0));
		have += n;
		if (have >= 32) {
			store32(p, __builtin_bswap32((uint32_t)(bits >> 32)));
			p += 4;
			bits <<= 32;
			have -= 32;
		}
	}
	for (uint32_t i = 0; i < have; i += 8, bits <<= 8)
		*p++ = (uint8_t)(bits >> 56);
	return p;
}

/* Return the byte offset of the words in a coded plane whose tails have `tail_bits` bits in total. */
static uint64_t words_at(uint64_t tail_bits)
{
	return (STATE_NBYTES + (tail_bits + 7) / 8 + 3) / 4 * 4;
}

/*
 * Finish encoding a plane. Each lane's bit sequence begins with 32 bits and a tail of 0 to 31 bits. Store the 32 bits
 * of each lane before the words at `first`, leave the tail in s->part, and set *tail_bits to the total size of the
 * tails in bits. Return the address of the stored words.
 */
static uint32_t *take_state(lanes *s, uint32_t *first, uint64_t *tail_bits)
{
	first -= WIRE_LANES;
	*tail_bits = 0;
	for (int l = 0; l < WIRE_LANES; l++) {
		uint32_t t = s->tail[l];
		uint64_t lane = (uint64_t)s->part[l] << 32 | s->word[l];

		first[l] = (uint32_t)(lane >> t);
		s->part[l] = (uint32_t)(lane & ((1ull << t) - 1));
		*tail_bits += t;
	}
	return first;
}

/*
 * Write the literals of escaped values to dst, which has `room` bytes. Returns the literals' size in bytes, or
 * UINT64_MAX if they do not fit.
 */
static uint64_t put_literals(const uint32_t *escaped, uint64_t m, const struct literals *from, uint64_t room,
			     uint8_t *dst)
{
	uint64_t n = 0, nbytes = from->wide ? 2 : 1;

	FOR_ESCAPED (i, escaped, m) {
		if (room - n < nbytes)
			return UINT64_MAX;
		if (from->wide)
			store16(dst + n, from->wide[i]);
		else
			dst[n] = from->byte[i];
		n += nbytes;
	}
	return n;
}

uint64_t encode_plane(const book_codes *codes, const struct kernels *k, struct work *w, uint8_t *symbol, uint64_t m,
		      struct literals from, uint64_t most, uint8_t *dst)
{
	uint64_t rows = padded(m) / WIRE_ROW, nwords, tail_bits, size, nliterals;
	lanes *s = w->top[0].state;
	uint32_t *first;
	uint8_t *p;

	memset(symbol + m, codes->pad, rows * WIRE_ROW - m);
	first = k->encode_lanes(codes, symbol, rows, w->words_end, s, w->top[0].escaped, &w->ahead);
	first = take_state(s, first, &tail_bits);
	nwords = (uint64_t)(w->words_end - first);
	while (nwords && first[nwords - 1] == 0)
		nwords--;
	size = words_at(tail_bits) + 4 * nwords;
	if (size > most)
		return 0;
	store16(dst, (uint32_t)nwords);
	p = pack_bits(dst + 2, s->tail, NULL);
	p = pack_bits(p, s->part, s->tail);
	while ((p - dst) % 4)
		*p++ = 0;
#if CODEC_BIG_ENDIAN
	for (uint64_t i = 0; i < nwords; i++)
		store32(p + 4 * i, first[i]);
#else
	memcpy(p, first, 4 * nwords);
#endif
	nliterals = put_literals(w->top[0].escaped, m, &from, most - size, dst + size);
	return nliterals == UINT64_MAX ? 0 : size + nliterals;
}

/* Unpack the fields that pack_bits wrote. 8 bytes after the fields must be readable. */
static void unpack_bits(const uint8_t *p, uint32_t *field, const uint32_t *width)
{
	uint64_t bits = 0;
	uint32_t have = 0;

	for (int l = 0; l < WIRE_LANES; l++) {
		uint32_t n = width ? width[l] : 5;

		if (have < 32) { /* a branch is cheap either way; a loop would be mispredicted */
			bits |= (uint64_t)__builtin_bswap32(load32(p)) << (32 - have);
			p += 4;
			have += 32;
		}
		field[l] = n ? (uint32_t)(bits >> (64 - n)) : 0;
		bits <<= n;
		have -= n;
	}
}

codec_status open_plane(struct cursor *c, struct stream *s, codec_fault *f)
{
	uint64_t nwords, start = c->at;
	uint8_t bits[4 * WIRE_LANES + 16];
	lanes *state = s->state;
	uint32_t sum = 0;

	if (c->end - c->at < STATE_NBYTES)
		BAD(c->at, c->end - c->at, STATE_NBYTES);
	nwords = load16(c->frame + c->at);
	memcpy(bits, c->frame + start + 2, STATE_NBYTES - 2);
	memset(bits + STATE_NBYTES - 2, 0, 8);
	unpack_bits(bits, state->tail, NULL);
	for (int l = 0; l < WIRE_LANES; l++)
		sum += state->tail[l];
	c->at += STATE_NBYTES + (sum + 7) / 8;
	if (c->at > c->end)
		BAD(start, c->at, c->end);
	memcpy(bits, c->frame + start + STATE_NBYTES, (sum + 7) / 8);
	memset(bits + (sum + 7) / 8, 0, 8);
	unpack_bits(bits, state->part, state->tail);
	for (int l = 0; l < WIRE_LANES; l++)
		state->part[l] = state->tail[l] ? state->part[l] << (32 - state->tail[l]) : 0;
	if (sum % 8 && (uint8_t)(bits[sum / 8] << sum % 8))
		BAD(c->at - 1, bits[sum / 8], 0);
	for (; (c->at - start) % 4; c->at++)
		if (c->at >= c->end || c->frame[c->at])
			BAD(c->at, 1, 0);
	if (nwords > (c->end - c->at) / 4)
		BAD(start, nwords, (c->end - c->at) / 4);
	if (nwords && load32(c->frame + c->at + 4 * (nwords - 1)) == 0)
		BAD(c->at + 4 * (nwords - 1), 0, 1);
	for (uint64_t l = 0; l < WIRE_LANES; l++)
		state->word[l] = l < nwords ? load32(c->frame + c->at + 4 * l) : 0;
	c->at += 4 * nwords;
	s->nwords = nwords - MIN(nwords, WIRE_LANES);
	s->words = c->frame + c->at - 4 * s->nwords;
	return CODEC_OK;
}

codec_status close_plane(const book_lookup *lookup, const struct cursor *c, const struct stream *s, uint64_t m,
			 codec_fault *f)
{
	if (!s->good)
		BAD(c->at, s->nwords, m);
	for (uint64_t i = m; i < padded(m); i++)
		if (s->symbol[i] != lookup->pad)
			BAD(c->at, s->symbol[i], lookup->pad);
	return CODEC_OK;
}

codec_status read_literals(const uint32_t *escaped, struct cursor *c, uint8_t *symbol, uint64_t m, codec_fault *f)
{
	FOR_ESCAPED (i, escaped, m) {
		if (c->at >= c->end)
			BAD(c->end, 0, 1);
		symbol[i] = c->frame[c->at++];
	}
	return CODEC_OK;
}

codec_status read_wide_literals(const uint32_t *escaped, struct cursor *c, uint16_t *literal, uint64_t m,
				codec_fault *f)
{
	FOR_ESCAPED (i, escaped, m) {
		if (c->end - c->at < 2)
			BAD(c->at, c->end - c->at, 2);
		literal[i] = load16(c->frame + c->at);
		c->at += 2;
	}
	return CODEC_OK;
}

codec_status decode_plane(const book_lookup *lookup, const struct kernels *k, struct work *w, struct cursor *c,
			  uint64_t m, uint8_t *symbol, codec_fault *f)
{
	struct stream s = w->top[0];

	s.symbol = symbol;
	TRY(open_plane(c, &s, f));
	k->decode_lanes(lookup, &s, NULL, padded(m) / WIRE_ROW, &w->ahead);
	return close_plane(lookup, c, &s, m, f);
}

codec_status close_region(const struct cursor *c, codec_fault *f)
{
	if (c->end - c->at >= WIRE_ALIGN)
		BAD(c->at, c->end - c->at, WIRE_ALIGN - 1);
	for (uint64_t i = c->at; i < c->end; i++)
		if (c->frame[i])
			BAD(i, c->frame[i], 0);
	return CODEC_OK;
}

uint64_t encode_bytes(const struct job *j, const struct kernels *k, struct work *w, uint64_t n, uint8_t *dst)
{
	uint64_t got = 0;

	w->ahead.count = 0;
	if (is_constant(w->plane[0], n)) {
		store32(dst, WIRE_MODE_CONSTANT);
		dst[4] = w->plane[0][0];
		return 5;
	}
	if (n >= WIRE_MIN_CODED)
		got = encode_plane(j->codes, k, w, w->plane[0], n, (struct literals){.byte = w->plane[0]}, n - 1,
				   dst + 4);
	store32(dst, got ? WIRE_MODE_CODED : WIRE_MODE_RAW);
	if (!got)
		memcpy(dst + 4, w->plane[0], got = n);
	return 4 + got;
}

codec_status decode_bytes(const struct job *j, const struct kernels *k, struct work *w, struct cursor *c, uint64_t n,
			  const uint8_t **bytes, codec_fault *f)
{
	uint32_t mode = load32(c->frame + c->at);

	c->at += 4;
	w->ahead.count = 0;
	*bytes = w->symbol;
	switch (mode) {
	case WIRE_MODE_CODED:
		TRY(decode_plane(j->lookup, k, w, c, n, w->symbol, f));
		return read_literals(w->top[0].escaped, c, w->symbol, n, f);
	case WIRE_MODE_RAW:
		if (c->end - c->at < n)
			BAD(c->at, c->end - c->at, n);
		*bytes = c->frame + c->at;
		c->at += n;
		return CODEC_OK;
	case WIRE_MODE_CONSTANT:
		if (c->end == c->at)
			BAD(c->at, 0, 1);
		memset(w->symbol, c->frame[c->at++], n);
		return CODEC_OK;
	default: BAD(c->at - 4, mode, WIRE_MODE_CODED);
	}
}
