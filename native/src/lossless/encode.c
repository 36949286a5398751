/* encode.c - one block of values to its region.
 *
 * Region: head (u32), then the planes that are not fixed, by mode: coded, raw, rows, constant; a gap of less than 8
 * zero bytes; escapes, read downwards from the end. A coded plane is
 *   u16 words | 32 x 5 bits of tail lengths | tails | padding to 4 bytes | words
 * whose first 32 words are the lanes' first ones. Trailing zero words are left out.
 */
#include "lossless.h"

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
static uint8_t *plane_symbols(const struct job *j, struct work *w, int i, uint64_t n, uint64_t outside)
{
	if (!outside && padded(n) == n)
		return w->plane[i];
	memcpy(w->symbol, w->plane[i], n);
	for (uint64_t v = 0; outside && v < n; v++)
		if (w->exponent[v] && !w->plane[0][v])
			w->symbol[v] = j->codes[i].escape;
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
	uint64_t nzeros = m - k->count(plane[0], 1, m);

	if (64 * nzeros < m)
		return 0;
	for (int p = 1; p < nplanes; p++)
		if (k->under_zeros(plane[0], plane[p], m))
			return 0;
	for (int p = 1; p < nplanes; p++)
		if (!(h->fixed >> p & 1))
			k->prune(plane[0], 1, plane[p], m, plane[p]);
	return nzeros;
}

/* The exponents of float64: planes 0 and 1 without the sign. Returns how many lie outside of the window. */
static uint64_t split_exponents(const struct job *j, const struct kernels *k, const struct work *w, const char *values,
				uint64_t m, uint8_t *const *plane, uint16_t *exponent)
{
	uint64_t outside = 0;

	k->patterns[FORM_FLOAT8](values, m, exponent);
	k->lower(exponent, w->offset, WIRE_ZERO64, m, exponent);
	for (uint64_t i = 0; i < m; i++) {
		plane[1][i] |= exponent[i] & 15;
		exponent[i] >>= 4;
		outside += !bits_window64(exponent[i], j->model.window, plane[0] + i);
	}
	return outside;
}

/* Values to planes; returns how many exponents of float64 lie outside of the window. */
static uint64_t split_block(const struct job *j, const struct kernels *k, const struct work *w, const char *values,
			    uint64_t first, uint64_t m, uint8_t *const *plane)
{
	const struct dtype *d = dtype_of(j->h.dtype);
	uint64_t outside = 0, n;

	if (!d->octave) {
		k->split[d->form](values, m, NULL, plane);
		return 0;
	}
	for (uint64_t i = 0; i < m; i += n, values += n * d->nbytes) {
		uint8_t *at[WIRE_MAX_PLANES];

		n = MIN(OFFSETS, m - i);
		for (int p = 0; p < d->nbytes; p++)
			at[p] = plane[p] + i;
		model_offsets(j, k, first + i, n, w->offset);
		k->split[d->form](values, n, w->offset, at);
		if (d->form == FORM_FLOAT8)
			outside += split_exponents(j, k, w, values, n, at, w->exponent + i);
	}
	return outside;
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
	outside = split_block(j, k, w, values, first, m, plane);
	w->ahead = (struct ahead){(uintptr_t)values + h->block * d->nbytes, 0, m * d->nbytes, 1};
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
			k->halve(plane[i], n, w->symbol, w->high);
			got = encode_plane(&j->codes[i], k, w, w->symbol, n, w->symbol, NULL, n / 2, p,
					   w->escapes + nescapes, &nescapes);
		} else if (h->coded & ~h->halved & 1 << i && ((i == 0 && d->octave) || plane_pays(j, i, plane[i], n))) {
			got = encode_plane(&j->codes[i], k, w, plane_symbols(j, w, i, n, i ? 0 : outside), n, plane[i],
					   wide ? w->exponent : NULL, wide ? UINT64_MAX : n, p, w->escapes + nescapes,
					   &nescapes);
		}
		if (got) {
			mode[i] = WIRE_MODE_CODED;
			p += got;
			if (h->halved >> i & 1) {
				memcpy(p, w->high, (n + 1) / 2);
				p += (n + 1) / 2;
			}
		} else {
			kept = k->rows(plane[i], n, bitmap);
			mode[i] = kept + (padded(n) / WIRE_ROW + 7) / 8 < n ? WIRE_MODE_ROWS : WIRE_MODE_RAW;
		}
		if (i == 0 && got && d->octave && (h->fixed | 1) != all && !outside)
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
