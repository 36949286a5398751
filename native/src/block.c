/* block.c - one block of values to its region, and back.
 *
 * Region: head (u32), then the planes that are not fixed, by mode: coded, raw, rows, constant; a gap of less than 8
 * zero bytes; escapes, read downwards from the end. A coded plane is
 *   u16 words | 32 x 5 bits of tail lengths | tails | padding to 4 bytes | words
 * whose first 32 words are the lanes' first ones. Trailing zero words are left out.
 */
#include "core.h"

/* Results larger than this go past the caches, which they would only sweep out: a third of the memory traffic less. */
#define STREAM_NBYTES (8u << 20)

#define STATE_NBYTES 22 /* u16 and 32 x 5 bits */

static uint64_t padded(uint64_t n)
{
	return (n + WIRE_ROW - 1) / WIRE_ROW * WIRE_ROW;
}

static uint64_t largest_block(uint64_t n)
{
	return padded(MIN(n, 1u << WIRE_MAX_BLOCK_LOG2));
}

/* Most bytes of a coded plane: every value escaped under codes of 8 bits. */
static uint64_t coded_bound(uint64_t m, int literal_nbytes)
{
	return STATE_NBYTES + 4 * WIRE_LANES + 4 * WIRE_LANES + 8 + padded(m) * (uint64_t)(1 + literal_nbytes);
}

static uint64_t region_room(const struct dtype *d, uint64_t m)
{
	return ALIGN8(16 + m * d->nbytes + coded_bound(m, 2) + 64);
}

static uint64_t words_room(uint64_t m)
{
	return LANES_SLACK + WIRE_LANES + padded(m) / 4 + 16;
}

uint64_t work_nbytes(const struct dtype *d, uint64_t n)
{
	uint64_t m = largest_block(n);

	return 64 + 2 * (sizeof(lanes) + m / 8 + m + 64 + 16) + 4 * words_room(m) +
	       (uint64_t)(d->nbytes + 1) * (m + 64) + (d->form == FORM_FLOAT8 ? 2 * m + 64 : 0) + region_room(d, m) +
	       (uint64_t)(d->nbytes + 2) * m + 64;
}

static void *take(char **p, uint64_t nbytes)
{
	void *here = *p;

	*p += ALIGN8(nbytes);
	return here;
}

void work_place(const struct dtype *d, uint64_t n, void *memory, struct work *w)
{
	uint64_t m = largest_block(n);
	char *p = (char *)ALIGN8((uintptr_t)memory);

	for (int i = 0; i < 2; i++) {
		w->top[i].state = take(&p, sizeof(lanes));
		w->top[i].escaped = take(&p, m / 8);
		w->top[i].symbol = take(&p, m + 64);
	}
	w->words = take(&p, 4 * words_room(m));
	w->words_end = w->words + words_room(m) - 16;
	w->plane[0] = w->top[0].symbol;
	for (int i = 1; i < d->nbytes; i++)
		w->plane[i] = take(&p, m + 64);
	w->symbol = take(&p, m + 64);
	w->offset = take(&p, m + 64);
	w->exponent = d->form == FORM_FLOAT8 ? take(&p, 2 * m + 64) : NULL;
	w->region = take(&p, region_room(d, m));
	w->escapes = take(&p, (uint64_t)(d->nbytes + 2) * m);
}

static int literal_nbytes(const struct dtype *d, int plane)
{
	return d->form == FORM_FLOAT8 && plane == 0 ? 2 : 1;
}

uint64_t region_bound(const struct header *h)
{
	const struct dtype *d = dtype_of(h->dtype);
	uint64_t m = MIN(h->n, h->block), nbytes = 4;

	for (int p = 0; p < d->nbytes; p++)
		if (!(h->fixed >> p & 1))
			nbytes += literal_nbytes(d, p) == 2 ? coded_bound(m, 2) : m;
	return ALIGN8(nbytes);
}

static inline uint64_t escaped_bits(const uint32_t *escaped, uint64_t word, uint64_t m)
{
	uint64_t bits = escaped[2 * word] | (uint64_t)escaped[2 * word + 1] << 32;

	return 64 * word + 64 > m ? bits & ((1ull << m % 64) - 1) : bits;
}

/* Escaped positions below m, in order. */
#define FOR_ESCAPED(i, escaped, m)                                                                                     \
	for (uint64_t word_ = 0; word_ < ((m) + 63) / 64; word_++)                                                     \
		for (uint64_t bits_ = escaped_bits(escaped, word_, m), i;                                              \
		     bits_ && (i = 64 * word_ + (uint64_t)__builtin_ctzll(bits_), 1); bits_ &= bits_ - 1)

/*
 * 32 fields of width[l] bits (NULL: 5), first one on top. Writing may overhang by 8 bytes; reading takes the fields
 * from a buffer with as many behind them.
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
	store32(p, __builtin_bswap32((uint32_t)(bits >> 32)));
	return p + (have + 7) / 8;
}

static void unpack_bits(const uint8_t *p, uint32_t *field, const uint32_t *width)
{
	uint64_t bits = 0;
	uint32_t have = 0;

	for (int l = 0; l < WIRE_LANES; l++) {
		uint32_t n = width ? width[l] : 5;

		if (have < 32) { /* taken or not, it costs the same: no loop to mispredict */
			bits |= (uint64_t)__builtin_bswap32(load32(p)) << (32 - have);
			p += 4;
			have += 32;
		}
		field[l] = n ? (uint32_t)(bits >> (64 - n)) : 0;
		bits <<= n;
		have -= n;
	}
}

/*
 * Code m symbols; literals come from `literal` (or exponent, if two bytes each). Returns the bytes stored at dst, and
 * below *top the escapes; 0 if that would take `most` bytes or more.
 */
uint64_t encode_plane(const book_codes *codes, const struct kernels *k, struct work *w, uint8_t *symbol, uint64_t m,
		      const uint8_t *literal, const uint16_t *exponent, uint64_t most, uint8_t *dst, uint8_t *escapes,
		      uint64_t *nescapes)
{
	uint64_t rows = padded(m) / WIRE_ROW, nwords, at = 0, size;
	uint32_t *first;
	uint8_t *p = dst + 2;
	lanes *s = w->top[0].state;

	memset(symbol + m, codes->pad, rows * WIRE_ROW - m);
	first = k->encode_lanes(codes, symbol, rows, w->words_end, s, w->top[0].escaped, &w->ahead);
	first -= WIRE_LANES;
	for (int l = 0; l < WIRE_LANES; l++) { /* the lane's first 32 bits, and the tail that follows them */
		uint32_t t = s->tail[l];
		uint64_t lane = (uint64_t)s->part[l] << 32 | s->word[l];

		first[l] = (uint32_t)(lane >> t);
		s->part[l] = (uint32_t)(lane & ((1ull << t) - 1));
	}
	nwords = (uint64_t)(w->words_end - first);
	while (nwords && first[nwords - 1] == 0)
		nwords--;
	if (STATE_NBYTES + 4 * nwords >= most)
		return 0;
	p = pack_bits(p, s->tail, NULL);
	p = pack_bits(p, s->part, s->tail);
	store16(dst, (uint32_t)nwords);
	size = (uint64_t)(p - dst);
	while (size % 4)
		dst[size++] = 0;
	if (size + 4 * nwords >= most)
		return 0;
#if CODEC_BIG_ENDIAN
	for (uint64_t i = 0; i < nwords; i++)
		store32(dst + size + 4 * i, first[i]);
#else
	memcpy(dst + size, first, 4 * nwords);
#endif
	size += 4 * nwords;
	FOR_ESCAPED (i, w->top[0].escaped, m) {
		if (exponent) {
			store16(escapes + at, exponent[i]);
			at += 2;
		} else {
			escapes[at++] = literal[i];
		}
	}
	if (size + at >= most)
		return 0;
	*nescapes += at;
	return size;
}

static int is_constant(const uint8_t *p, uint64_t n)
{
	return n < 2 || (p[0] == p[n - 1] && memcmp(p, p + 1, n - 1) == 0);
}

/* Would coding plane i of a block save 2%? From every 8th quad row; an exponent is not asked. */
static int plane_pays(const struct job *j, int i, const uint8_t *plane, uint64_t n)
{
	int is_halved = j->h.halved >> i & 1, raw = is_halved ? 4 : 8;
	const book_codes *codes = &j->codes[i];
	uint64_t cost = 0, count = 0;

	for (uint64_t r = 0; r < n; r += 8 * WIRE_ROW)
		for (uint64_t v = r; v < MIN(n, r + WIRE_ROW); v++, count++) {
			uint8_t length = codes->length[is_halved ? plane[v] & 15 : plane[v]];

			cost += (length & 15) + (length & 0x80) / 16;
		}
	return 100 * cost < 98 * (uint64_t)raw * count;
}

/* Symbols of plane i, ready to be coded. Plane 0 of float64 has exponents that no byte holds: they are escaped. */
static uint8_t *plane_symbols(const struct job *j, const struct kernels *k, struct work *w, int i, uint64_t first,
			      uint64_t n, uint64_t outside)
{
	uint8_t escape = j->codes[i].escape;

	if (i == 0 && j->model.nsegments) {
		model_offsets(j, k, first, n, w->offset);
		k->symbols(w->plane[0], w->offset, escape, n, w->symbol);
	} else if (outside || padded(n) > n) {
		memcpy(w->symbol, w->plane[i], n);
	} else {
		return w->plane[i];
	}
	for (uint64_t v = 0; outside && v < n; v++)
		if (w->exponent[v] && !w->plane[0][v])
			w->symbol[v] = escape;
	return w->symbol;
}

static uint8_t *put_rows(const struct kernels *k, const uint8_t *plane, uint64_t n, uint8_t *p)
{
	uint8_t *bitmap = p;

	k->rows(plane, n, bitmap);
	p += (padded(n) / WIRE_ROW + 7) / 8;
	for (uint64_t r = 0; r * WIRE_ROW < n; r++)
		if (bitmap[r / 8] >> r % 8 & 1) {
			uint64_t run = MIN(WIRE_ROW, n - r * WIRE_ROW);

			memcpy(p, plane + r * WIRE_ROW, run);
			p += run;
		}
	return p;
}

/*
 * Where every value with exponent 0 is +0, and they are many, the other planes need not hold them: returns how many
 * were taken out of the planes that are not fixed.
 */
static uint64_t prune_zeros(const struct header *h, const struct kernels *k, uint8_t *const *plane, int nplanes,
			    uint64_t m)
{
	uint64_t nzeros = k->zeros(plane[0], m);

	if (64 * nzeros < m)
		return 0;
	for (int p = 1; p < nplanes; p++)
		if (k->under_zeros(plane[0], plane[p], m))
			return 0;
	for (int p = 1; p < nplanes; p++)
		if (!(h->fixed >> p & 1))
			k->prune(plane[0], plane[p], m, plane[p]);
	return nzeros;
}

/* Values to planes; returns how many exponents of float64 lie outside of the window. */
static uint64_t split_block(const struct job *j, const struct kernels *k, const char *values, uint64_t m,
			    uint8_t *const *plane, uint16_t *exponent)
{
	const struct dtype *d = dtype_of(j->h.dtype);

	k->split[d->form](values, m, plane);
	if (d->form != FORM_FLOAT8)
		return 0;
	for (uint64_t i = 0; i < m; i++) {
		uint64_t x;

		memcpy(&x, values + 8 * i, 8);
		exponent[i] = (uint16_t)(x >> 52 & 0x7ff);
	}
	return k->top_float8(values, m, j->model.window, plane[0]);
}

/*
 * Fill w->region; returns its size. Planes that are fixed go to their sections of the frame dst; their digest is
 * *planes_digest.
 */
uint64_t encode_block(const struct job *j, const struct kernels *k, const codec_tensor *src, uint8_t *dst, uint64_t b,
		      struct work *w, uint64_t *planes_digest)
{
	const struct header *h = &j->h;
	const struct dtype *d = dtype_of(h->dtype);
	uint64_t first = b * h->block, m = MIN(h->block, h->n - first), count = m, nescapes = 0, outside, size, gap;
	const char *values = (const char *)src->data + first * d->nbytes;
	uint8_t *plane[WIRE_MAX_PLANES], *p = w->region + 4, *section = dst + h->planes_at + first;
	int mode[WIRE_MAX_PLANES], all = (1 << d->nbytes) - 1, stream = src->nbytes >= STREAM_NBYTES;
	uint32_t head = 0;
	uint64_t nfixed = 0;

	for (int i = 0; i < d->nbytes; i++) {
		plane[i] = w->plane[i];
		if (h->fixed >> i & 1 && !stream)
			plane[i] = section + nfixed * h->plane_stride;
		nfixed += h->fixed >> i & 1;
	}
	outside = split_block(j, k, values, m, plane, w->exponent);
	w->ahead = (struct ahead){values + h->block * d->nbytes, 0, m * d->nbytes, 1};
	*planes_digest = 0;
	for (int i = 0; i < d->nbytes; i++)
		if (h->fixed >> i & 1) {
			*planes_digest += k->digest(plane[i], m, WIRE_SEED_PLANE + (uint32_t)i);
			if (stream)
				k->stream(section, plane[i], m);
			if (first + m == h->n)
				memset(section + m, 0, h->plane_stride - h->n);
			section += h->plane_stride;
		}

	for (int i = 0; i < d->nbytes; i++) {
		uint64_t n = i ? count : m, got = 0, kept;
		uint8_t bitmap[(1 << WIRE_MAX_BLOCK_LOG2) / WIRE_ROW / 8];
		int wide = d->form == FORM_FLOAT8 && i == 0;

		mode[i] = -1;
		if (h->fixed >> i & 1)
			continue;
		if (is_constant(plane[i], n) && !(i == 0 && outside)) {
			mode[i] = WIRE_MODE_CONSTANT;
			continue;
		}
		if (h->halved >> i & 1 && plane_pays(j, i, plane[i], n)) {
			k->halve(plane[i], n, w->symbol, w->offset);
			got = encode_plane(&j->codes[i], k, w, w->symbol, n, w->symbol, NULL, n / 2, p,
					   w->escapes + nescapes, &nescapes);
		} else if (h->coded & ~h->halved & 1 << i && ((i == 0 && d->step) || plane_pays(j, i, plane[i], n))) {
			got = encode_plane(&j->codes[i], k, w, plane_symbols(j, k, w, i, first, n, i ? 0 : outside), n,
					   plane[i], wide ? w->exponent : NULL, wide ? UINT64_MAX : n, p,
					   w->escapes + nescapes, &nescapes);
		}
		if (got) {
			mode[i] = WIRE_MODE_CODED;
			p += got;
			if (h->halved >> i & 1) {
				memcpy(p, w->offset, (n + 1) / 2);
				p += (n + 1) / 2;
			}
		} else {
			kept = k->rows(plane[i], n, bitmap);
			mode[i] = kept + (padded(n) / WIRE_ROW + 7) / 8 < n ? WIRE_MODE_ROWS : WIRE_MODE_RAW;
		}
		if (i == 0 && got && d->step && (h->fixed | 1) != all && !outside)
			count -= prune_zeros(h, k, plane, d->nbytes, m);
	}
	if (count < m)
		head |= WIRE_REGION_PRUNED;
	for (int i = 0; i < d->nbytes; i++)
		if (mode[i] == WIRE_MODE_RAW) {
			memcpy(p, plane[i], i ? count : m);
			p += i ? count : m;
		}
	for (int i = 0; i < d->nbytes; i++)
		if (mode[i] == WIRE_MODE_ROWS)
			p = put_rows(k, plane[i], i ? count : m, p);
	for (int i = 0; i < d->nbytes; i++) {
		if (mode[i] == WIRE_MODE_CONSTANT)
			*p++ = (i ? count : m) ? plane[i][0] : 0;
		if (mode[i] > 0)
			head |= (uint32_t)mode[i] << 2 * i;
	}
	store32(w->region, head);
	size = (uint64_t)(p - w->region) + nescapes;
	gap = ALIGN8(size) - size;
	memset(p, 0, gap);
	p += gap;
	for (uint64_t i = 0; i < nescapes; i++)
		p[i] = w->escapes[nescapes - 1 - i];
	return size + gap;
}

#define BAD(where, found, expected) return fault(f, CODEC_BAD_REGION, where, found, expected)

/* Read a coded plane up to its words' end: s gets the words and the lanes' first state. */
static codec_status open_plane(struct cursor *c, struct stream *s, codec_fault *f)
{
	uint64_t nwords, start = c->at;
	uint8_t bits[4 * WIRE_LANES + 16];
	lanes *state = s->state;
	uint32_t sum = 0;

	if (c->end - c->at < STATE_NBYTES)
		BAD(c->at, c->end - c->at, STATE_NBYTES);
	nwords = load16(c->frame + c->at);
	memcpy(bits, c->frame + start + 2, STATE_NBYTES - 2);
	unpack_bits(bits, state->tail, NULL);
	for (int l = 0; l < WIRE_LANES; l++)
		sum += state->tail[l];
	c->at += STATE_NBYTES + (sum + 7) / 8;
	if (c->at > c->end)
		BAD(start, c->at, c->end);
	memcpy(bits, c->frame + start + STATE_NBYTES, (sum + 7) / 8);
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

/* After its rows were decoded: nothing may be left over, and the last row is filled up as it must be. */
static codec_status close_plane(const book_lookup *lookup, const struct cursor *c, const struct stream *s, uint64_t m,
				codec_fault *f)
{
	if (!s->good)
		BAD(c->at, s->nwords, m);
	for (uint64_t i = m; i < padded(m); i++)
		if (s->symbol[i] != lookup->pad)
			BAD(c->at, s->symbol[i], lookup->pad);
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

/* The exponents of float64 from plane 0 and its escapes; e becomes 0 exactly where the exponent is. */
static codec_status read_exponents(const struct job *j, struct work *w, struct cursor *c, uint8_t *e,
				   const uint32_t *escaped, uint64_t m, codec_fault *f)
{
	for (uint64_t i = 0; i < m; i++)
		w->exponent[i] = e[i] ? (uint16_t)(e[i] + j->model.window - 128) & 0x7ff : 0;
	if (!escaped)
		return CODEC_OK;
	FOR_ESCAPED (i, escaped, m) {
		if (c->end - c->at < 2)
			BAD(c->end, c->end - c->at, 2);
		c->end -= 2;
		w->exponent[i] = (uint16_t)(c->frame[c->end + 1] | c->frame[c->end] << 8);
		if (w->exponent[i] > 0x7ff)
			BAD(c->end, w->exponent[i], 0x7ff);
		e[i] = w->exponent[i] != 0;
	}
	return CODEC_OK;
}

codec_status read_escapes(const uint32_t *escaped, struct cursor *c, uint8_t *out, uint64_t n, codec_fault *f)
{
	FOR_ESCAPED (i, escaped, n) {
		if (c->end <= c->at)
			BAD(c->end, 0, 1);
		out[i] = c->frame[--c->end];
	}
	return CODEC_OK;
}

/* The high nibbles that belong to n low ones. */
static codec_status read_high(struct cursor *c, const struct kernels *k, uint8_t *low, uint64_t n, codec_fault *f)
{
	const uint8_t *high = c->frame + c->at;
	uint64_t nbytes = (n + 1) / 2;
	uint8_t any = 0;

	if (c->end - c->at < nbytes)
		BAD(c->at, c->end - c->at, nbytes);
	for (uint64_t i = 0; i < n; i++)
		any |= low[i];
	if (any > 15)
		BAD(c->end, any, 15);
	if (n % 2 && high[nbytes - 1] > 15)
		BAD(c->at + nbytes - 1, high[nbytes - 1], 15);
	k->unhalve(low, high, n);
	c->at += nbytes;
	return CODEC_OK;
}

/* A plane in mode rows. */
static codec_status read_rows(struct cursor *c, uint8_t *out, uint64_t n, codec_fault *f)
{
	uint64_t nrows = padded(n) / WIRE_ROW, nbitmap = (nrows + 7) / 8;
	const uint8_t *bitmap = c->frame + c->at;

	if (c->end - c->at < nbitmap)
		BAD(c->at, c->end - c->at, nbitmap);
	if (nrows % 8 && bitmap[nbitmap - 1] >> nrows % 8)
		BAD(c->at + nbitmap - 1, bitmap[nbitmap - 1], 0);
	c->at += nbitmap;
	for (uint64_t r = 0; r < nrows; r++, out += WIRE_ROW) {
		uint64_t run = MIN(WIRE_ROW, n - r * WIRE_ROW);

		if (!(bitmap[r / 8] >> r % 8 & 1)) {
			memset(out, 0, run);
			continue;
		}
		if (c->end - c->at < run)
			BAD(c->at, c->end - c->at, run);
		memcpy(out, c->frame + c->at, run);
		c->at += run;
	}
	return CODEC_OK;
}

static codec_status read_head(const struct header *h, const struct dtype *d, uint32_t head, uint64_t at, uint8_t *mode,
			      codec_fault *f)
{
	uint32_t known = WIRE_REGION_PRUNED | ((1u << 2 * d->nbytes) - 1);

	if (head & ~known)
		BAD(at, head, known);
	for (int i = 0; i < d->nbytes; i++) {
		mode[i] = head >> 2 * i & 3;
		if (h->fixed >> i & 1 ? mode[i] != 0 : mode[i] == WIRE_MODE_CODED && !(h->coded >> i & 1))
			BAD(at, head, h->coded);
	}
	if (head & WIRE_REGION_PRUNED && (!d->step || mode[0] != WIRE_MODE_CODED))
		BAD(at, head, WIRE_MODE_CODED);
	if (d->form == FORM_FLOAT8 && mode[0] != WIRE_MODE_CODED && mode[0] != WIRE_MODE_CONSTANT)
		BAD(at, head, WIRE_MODE_CODED);
	return CODEC_OK;
}

/* Begin with the region frame[at, end), at least 8 bytes, of block b: all up to the coder's loop for plane 0. */
codec_status block_open(const struct job *j, const uint8_t *frame, uint64_t b, uint64_t at, uint64_t end,
			const struct stream *top, struct block *o, codec_fault *f)
{
	o->b = b;
	o->m = MIN(j->h.block, j->h.n - b * j->h.block);
	o->head = load32(frame + at);
	o->c = (struct cursor){frame, at + 4, end};
	o->top = *top;
	TRY(read_head(&j->h, dtype_of(j->h.dtype), o->head, at, o->mode, f));
	if (!(j->h.fixed & 1) && o->mode[0] == WIRE_MODE_CODED)
		return open_plane(&o->c, &o->top, f);
	return CODEC_OK;
}

/* The coder's loop for plane 0 of one or two blocks. */
void block_decode_top(const struct job *j, const struct kernels *k, struct block *o, int count, struct work *w)
{
	const uint8_t *section = o->c.frame + j->h.planes_at + (o->b + (uint64_t)count) * j->h.block;
	int coded[2] = {0, 0};

	w->ahead = (struct ahead){section, j->h.plane_stride, j->h.block * (uint64_t)count,
				  (size_t)__builtin_popcount(j->h.fixed)};
	for (int i = 0; i < count; i++)
		coded[i] = !(j->h.fixed & 1) && o[i].mode[0] == WIRE_MODE_CODED;
	if (coded[0] && coded[1] && padded(o[0].m) == padded(o[1].m)) {
		k->decode_lanes(j->lookup, &o[0].top, &o[1].top, padded(o->m) / WIRE_ROW, &w->ahead);
		return;
	}
	for (int i = 0; i < count; i++)
		if (coded[i])
			k->decode_lanes(j->lookup, &o[i].top, NULL, padded(o[i].m) / WIRE_ROW, &w->ahead);
}

/* The rest: the block's values in dst. */
codec_status block_close(const struct job *j, const struct kernels *k, struct block *o, codec_tensor *dst,
			 struct work *w, codec_fault *f)
{
	static const uint8_t ORDER[] = {WIRE_MODE_CODED, WIRE_MODE_RAW, WIRE_MODE_ROWS, WIRE_MODE_CONSTANT};
	const struct header *h = &j->h;
	const struct dtype *d = dtype_of(h->dtype);
	uint64_t first = o->b * h->block, m = o->m, count = m;
	const uint8_t *plane[WIRE_MAX_PLANES], *section = o->c.frame + h->planes_at;
	char *values = (char *)dst->data + first * d->nbytes;
	int pruning = (o->head & WIRE_REGION_PRUNED) != 0, wide = d->form == FORM_FLOAT8;
	uint8_t *top = o->top.symbol;
	struct cursor *c = &o->c;

	w->ahead.count = 0;
	for (int i = 0; i < d->nbytes; i++)
		if (h->fixed >> i & 1) {
			plane[i] = section + first;
			section += h->plane_stride;
		}
	for (int pass = 0; pass < 4; pass++)
		for (int i = 0; i < d->nbytes; i++) {
			uint8_t *out = i == 0 ? top : pruning ? w->symbol : w->plane[i];
			const uint8_t *got = out;
			uint64_t n = i ? count : m;

			if (h->fixed >> i & 1 || o->mode[i] != ORDER[pass])
				continue;
			switch (o->mode[i]) {
			case WIRE_MODE_CODED:
				if (i == 0) {
					TRY(close_plane(j->lookup, c, &o->top, m, f));
					if (j->model.nsegments) {
						model_offsets(j, k, first, m, w->offset);
						k->unsymbols(out, w->offset, m, out);
					}
					if (wide)
						TRY(read_exponents(j, w, c, out, o->top.escaped, m, f));
				} else {
					TRY(decode_plane(&j->lookup[i], k, w, c, n, out, f));
				}
				if (i || !wide)
					TRY(read_escapes(i ? w->top[0].escaped : o->top.escaped, c, out, n, f));
				if (h->halved >> i & 1)
					TRY(read_high(c, k, out, n, f));
				break;
			case WIRE_MODE_RAW:
				if (c->end - c->at < n)
					BAD(c->at, c->end - c->at, n);
				got = c->frame + c->at;
				c->at += n;
				break;
			case WIRE_MODE_ROWS: TRY(read_rows(c, out, n, f)); break;
			default:
				if (c->end - c->at < 1)
					BAD(c->at, 0, 1);
				memset(out, c->frame[c->at++], n);
				if (wide && i == 0)
					TRY(read_exponents(j, w, c, out, NULL, m, f));
			}
			if (i == 0 && pruning)
				count = m - k->zeros(top, m);
			if (i && pruning) {
				k->unprune(top, got, m, w->plane[i]);
				got = w->plane[i];
			}
			plane[i] = got;
		}
	if (c->end - c->at >= WIRE_ALIGN)
		BAD(c->at, c->end - c->at, WIRE_ALIGN - 1);
	for (; c->at < c->end; c->at++)
		if (c->frame[c->at])
			BAD(c->at, c->frame[c->at], 0);
	k->merge[d->form](plane, m, values, dst->nbytes >= STREAM_NBYTES);
	if (wide)
		for (uint64_t i = 0; i < m; i++) {
			uint64_t x;

			memcpy(&x, values + 8 * i, 8);
			x |= (uint64_t)w->exponent[i] << 52;
			memcpy(values + 8 * i, &x, 8);
		}
	return CODEC_OK;
}
