/*
 * encode.c - encode a block of values into its region: a head (u32), then the planes that are not fixed, in ascending
 * order.
 */
#include "lossless.h"

/*
 * Return 1 if entropy coding saves enough bytes of plane i, which has n bytes. The estimate uses one in 8 rows of 128
 * bytes. Not used for the plane of exponents.
 */
static int plane_pays(const struct job *j, int i, const uint8_t *plane, uint64_t n)
{
	int raw = WIRE_RAW_BITS(j->h.halved, i, dtype_of(j->h.dtype)->nbytes);
	uint64_t cost = 0, count = 0;
	uint8_t price[256]; /* size in bits of the code and the literal of each byte's symbol */

	for (int x = 0; x < 256; x++) {
		uint8_t length = j->codes[i].length[bits_symbol((uint8_t)x, raw)];

		price[x] = (uint8_t)((length & 15) + (length & 0x80) / 16);
	}
	for (uint64_t r = 0; r < n; r += CHOOSE_BLOCK_STRIDE * WIRE_ROW)
		for (uint64_t v = r; v < MIN(n, r + WIRE_ROW); v++, count++)
			cost += price[plane[v]];
	return choose_saves(cost, count, (uint64_t)(8 - raw));
}

/*
 * If zeros are frequent and all values with exponent 0 are +0, remove them from the planes that are not fixed. Return
 * the number of values removed.
 */
static uint64_t prune_zeros(const struct header *h, const struct kernels *k, uint8_t *const *plane, int nplanes,
			    uint64_t m)
{
	uint64_t nzeros = m - k->count(plane[0], 1, m);

	if (!choose_prunes(nzeros, m))
		return 0;
	for (int p = 1; p < nplanes; p++)
		if (k->under_zeros(plane[0], plane[p], m))
			return 0;
	for (int p = 1; p < nplanes; p++)
		if (!(h->fixed >> p & 1))
			k->prune(plane[0], 1, plane[p], m, plane[p]);
	return nzeros;
}

static void split_block(const struct job *j, const struct kernels *k, const struct work *w, const char *values,
			uint64_t first, uint64_t m, uint8_t *const *plane)
{
	const struct dtype *d = dtype_of(j->h.dtype);
	uint64_t n;

	if (!d->octave || (d->nbytes == 1 && !j->model.nsegments)) {
		k->split[d->octave ? FORM_BYTES1 : d->form](values, m, NULL, plane);
		return;
	}
	for (uint64_t i = 0; i < m; i += n, values += n * d->nbytes) {
		uint8_t *at[WIRE_MAX_PLANES];

		n = MIN(OFFSETS, m - i);
		for (int p = 0; p < d->nbytes; p++)
			at[p] = plane[p] + i;
		model_offsets(j, k, &w->fitted, first + i, n, w->offset);
		k->split[d->form](values, n, w->offset, at);
	}
}

/*
 * Set plane[i], the destination of plane i when values are split. Fixed planes are written directly to their sections
 * of the frame, or to w->plane if non-temporal stores copy them to the frame later.
 */
static void place_planes(const struct header *h, uint8_t *section, int stream, struct work *w, uint8_t **plane)
{
	for (int i = 0; i < dtype_of(h->dtype)->nbytes; i++) {
		plane[i] = w->plane[i];
		if (!(h->fixed >> i & 1))
			continue;
		if (!stream)
			plane[i] = section;
		section += h->plane_stride;
	}
}

/*
 * After the split into planes, store and pad the block's part of the fixed planes, and return the digest of that part.
 */
static uint64_t put_fixed(const struct header *h, const struct kernels *k, uint8_t *section, int stream, uint64_t first,
			  uint64_t m, uint8_t *const *plane)
{
	uint64_t digest = 0;

	for (int i = 0; i < WIRE_MAX_PLANES; i++) {
		if (!(h->fixed >> i & 1))
			continue;
		digest += k->digest(plane[i], m, WIRE_SEED_PLANE + (uint32_t)i);
		if (stream)
			k->stream(section, plane[i], m);
		if (first + m == h->n)
			memset(section + m, 0, h->plane_stride - h->n);
		section += h->plane_stride;
	}
	return digest;
}

/*
 * Encode plane i of n bytes with its codebook, and store it at p. Return the size in bytes, or 0 if that would not be
 * below n.
 */
static uint64_t put_coded(const struct job *j, const struct kernels *k, struct work *w, int i, uint8_t *plane,
			  uint64_t n, uint8_t *p)
{
	const book_codes *codes = &j->codes[i];
	const struct dtype *d = dtype_of(j->h.dtype);
	int exponent = i == 0 && dtype_has_top(d), raw = WIRE_RAW_BITS(j->h.halved, i, d->nbytes);
	uint64_t got, most = choose_coded_most(n, raw);

	if (!(j->h.coded >> i & 1) || (!exponent && !plane_pays(j, i, plane, n)))
		return 0;
	if (!raw)
		return encode_plane(codes, k, w, plane, n, (struct literals){.byte = plane}, most, p);
	if (raw == 4)
		k->halve(plane, n, w->symbol, w->raw);
	else
		k->take_bits(plane, n, raw, w->symbol, w->raw);
	got = encode_plane(codes, k, w, w->symbol, n, (struct literals){.byte = w->symbol}, most, p);
	if (!got)
		return 0;
	if (raw == 4)
		memcpy(p + got, w->raw, choose_raw_nbytes(n, raw));
	else
		k->pack_codes(w->raw, n, raw, p + got);
	return got + choose_raw_nbytes(n, raw);
}

/*
 * Store the bitmap at p, then the runs of 128 bytes of the plane whose bit in the bitmap is set. Return the number of
 * bytes stored.
 */
static uint64_t put_rows(const uint8_t *plane, uint64_t n, const uint8_t *bitmap, uint64_t nbitmap, uint8_t *p)
{
	uint8_t *to = p + nbitmap;

	memcpy(p, bitmap, nbitmap);
	for (uint64_t r = 0; r * WIRE_ROW < n; r++)
		if (bitmap[r / 8] >> r % 8 & 1) {
			uint64_t run = MIN(WIRE_ROW, n - r * WIRE_ROW);

			memcpy(to, plane + r * WIRE_ROW, run);
			to += run;
		}
	return (uint64_t)(to - p);
}

/* Store plane i of n values at p, in the mode that needs fewest bytes. Return the number of bytes stored. */
static uint64_t put_plane(const struct job *j, const struct kernels *k, struct work *w, int i, uint8_t *plane,
			  uint64_t n, uint8_t *p, uint32_t *mode)
{
	uint64_t nbitmap = (padded(n) / WIRE_ROW + 7) / 8, got = 0, runs = 0;
	uint8_t bitmap[(1 << WIRE_MAX_BLOCK_LOG2) / WIRE_ROW / 8];
	int constant = is_constant(plane, n);

	if (!constant)
		got = put_coded(j, k, w, i, plane, n, p);
	if (!constant && !got)
		runs = k->rows(plane, n, bitmap);
	*mode = choose_mode(n, constant, got, nbitmap, runs);
	switch (*mode) {
	case WIRE_MODE_CONSTANT: *p = plane[0]; return 1;
	case WIRE_MODE_CODED: return got;
	case WIRE_MODE_ROWS: return put_rows(plane, n, bitmap, nbitmap, p);
	default: memcpy(p, plane, n); return n;
	}
}

uint64_t encode_block(struct job *j, const struct kernels *k, const struct source *src, uint8_t *dst, uint64_t b,
		      struct work *w, uint64_t *planes_digest)
{
	const struct header *h = &j->h;
	const struct dtype *d = dtype_of(h->dtype);
	uint64_t first = b * h->block, m = MIN(h->block, h->n - first), count = m, size;
	const char *values = (const char *)src->data + first * d->nbytes;
	uint8_t *plane[WIRE_MAX_PLANES], *p = w->region + 4, *section = dst + h->planes_at + first;
	uint8_t bitmap[GAPS_NBYTES];
	int all = (1 << d->nbytes) - 1, stream = src->nbytes >= CODEC_UNCACHED_NBYTES;
	uint32_t head = 0;

	place_planes(h, section, stream, w, plane);
	model_fit(src, k, j, first, m, &w->fitted);
	split_block(j, k, w, values, first, m, plane);
	w->ahead = (struct ahead){{(uintptr_t)values + h->block * d->nbytes}, m * d->nbytes, 1};
	*planes_digest = put_fixed(h, k, section, stream, first, m, plane);
	if (!h->fixed)
		count = gaps_find(values, m, d->nbytes, bitmap);
	if (count < m) {
		head |= WIRE_REGION_GAPS;
		p += gaps_put(bitmap, m, p);
		for (int i = 0; i < d->nbytes; i++)
			gaps_pack(bitmap, plane[i], m, 1);
		m = count;
	}
	for (int i = 0; i < d->nbytes; i++) {
		uint32_t mode;

		if (h->fixed >> i & 1)
			continue;
		p += put_plane(j, k, w, i, plane[i], i ? count : m, p, &mode);
		head |= mode << 2 * i;
		if (i == 0 && mode == WIRE_MODE_CODED && dtype_has_top(d) && (h->fixed | 1) != all)
			count -= prune_zeros(h, k, plane, d->nbytes, m);
	}
	if (count < m)
		head |= WIRE_REGION_PRUNED;
	store32(w->region, head);
	for (size = (uint64_t)(p - w->region); size % WIRE_ALIGN; size++)
		*p++ = 0;
	return size;
}

codec_status lossless_encode_block(struct job *j, const struct kernels *k, const codec_context *with,
				   const struct source *src, uint64_t b, uint8_t *frame, struct work *w,
				   uint64_t *digest, uint64_t *nbytes)
{
	(void)with;
	*nbytes = encode_block(j, k, src, frame, b, w, digest);
	return CODEC_OK;
}

/*
 * Return an upper bound of the size in bytes of a region: head, bitmap of gaps, all planes that are not fixed, raw,
 * 8-byte aligned.
 */
uint64_t lossless_region_bound(const struct job *j)
{
	uint64_t m = MIN(j->h.n, j->h.block), nplanes = dtype_of(j->h.dtype)->nbytes;

	return ALIGN8(4 + (j->h.fixed ? 0 : WIRE_GAPS_NBYTES(m)) +
		      m * (nplanes - (uint64_t)__builtin_popcount(j->h.fixed)));
}
