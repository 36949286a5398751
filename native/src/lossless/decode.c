/* decode.c - decode a region to a block of values. Safe for any bytes: they give values or an error. */
#include "lossless.h"

#define BAD(where, found, expected) return fault(f, CODEC_BAD_REGION, where, found, expected)

/* Read the `raw` raw bits of each of n values, and join them with the symbols in `symbol`. */
static codec_status read_raw_bits(struct cursor *c, const struct kernels *k, int raw, uint8_t *symbol, uint64_t n,
				  struct work *w, codec_fault *f)
{
	const uint8_t *from = c->frame + c->at;
	uint64_t nbytes = choose_raw_nbytes(n, raw), used = n * (uint64_t)raw % 8;
	uint8_t any = 0;

	if (c->end - c->at < nbytes)
		BAD(c->at, c->end - c->at, nbytes);
	for (uint64_t i = 0; i < n; i++)
		any |= symbol[i];
	if (any > 255 >> raw)
		BAD(c->at, any, 255 >> raw);
	if (used && from[nbytes - 1] >> used)
		BAD(c->at + nbytes - 1, from[nbytes - 1], (1 << used) - 1);
	if (raw == 4) {
		k->unhalve(symbol, from, n);
	} else {
		k->unpack_codes(from, n, raw, w->raw);
		k->join_bits(symbol, w->raw, raw, n);
	}
	c->at += nbytes;
	return CODEC_OK;
}

/* Read a plane in mode ROWS: a bitmap, then the runs that are not all zero. */
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
	uint32_t known = WIRE_REGION_PRUNED | (h->fixed ? 0 : WIRE_REGION_GAPS) | ((1u << 2 * d->nbytes) - 1);

	if (head & ~known)
		BAD(at, head, known);
	for (int i = 0; i < d->nbytes; i++) {
		mode[i] = head >> 2 * i & 3;
		if (h->fixed >> i & 1 ? mode[i] != 0 : mode[i] == WIRE_MODE_CODED && !(h->coded >> i & 1))
			BAD(at, head, h->coded);
	}
	if (head & WIRE_REGION_PRUNED && (!dtype_has_top(d) || mode[0] != WIRE_MODE_CODED))
		BAD(at, head, WIRE_MODE_CODED);
	return CODEC_OK;
}

/*
 * A check stores the symbols of plane 0 in the job's memory for them. If the block was checked before, set o->kept, and
 * continue in the region after the plane's literals.
 */
static codec_status open_kept(const struct job *j, struct block *o, codec_fault *f)
{
	uint64_t nbytes = job_kept_nbytes(j)[o->b];

	if (o->checks) {
		o->top.symbol = job_kept_symbols(j, o->b);
	} else if (nbytes) {
		if (nbytes > o->c.end - o->at) /* the frame was changed after the check */
			BAD(o->at, o->c.end - o->at, nbytes);
		o->top.symbol = job_kept_symbols(j, o->b);
		o->c.at = o->at + nbytes;
		o->coded = 0;
		o->kept = 1;
	}
	return CODEC_OK;
}

static codec_status block_open(const struct job *j, struct block *o, codec_fault *f)
{
	TRY(read_head(&j->h, dtype_of(j->h.dtype), o->head, o->at, o->mode, f));
	TRY(gaps_open(o, f));
	o->coded = !(j->h.fixed & 1) && o->mode[0] == WIRE_MODE_CODED;
	if (!o->coded)
		return CODEC_OK;
	if (j->kept_at)
		TRY(open_kept(j, o, f));
	return o->kept ? CODEC_OK : open_plane(&o->c, &o->top, f);
}

/* Set *ahead to the fixed planes of the `count` blocks after block o, to prefetch them. */
static void block_ahead(const struct job *j, const struct block *o, size_t count, struct ahead *ahead)
{
	uintptr_t section = (uintptr_t)o->c.frame + j->h.planes_at + (o->b + count) * j->h.block;

	ahead->n = j->h.block * count;
	ahead->count = (size_t)__builtin_popcount(j->h.fixed);
	for (size_t i = 0; i < ahead->count; i++)
		ahead->at[i] = section + i * j->h.plane_stride;
}

static void merge_block(const struct job *j, const struct kernels *k, const struct work *w, const uint8_t **plane,
			uint64_t first, uint64_t m, char *values, int nontemporal)
{
	const struct dtype *d = dtype_of(j->h.dtype);
	uint64_t n;

	if (!d->octave || (d->nbytes == 1 && !j->model.nsegments)) {
		k->merge[d->octave ? FORM_BYTES1 : d->form](plane, m, NULL, values, nontemporal);
		return;
	}
	for (uint64_t i = 0; i < m; i += n, values += n * d->nbytes) {
		const uint8_t *at[WIRE_MAX_PLANES];

		n = MIN(OFFSETS, m - i);
		for (int p = 0; p < d->nbytes; p++)
			at[p] = plane[p] + i;
		model_offsets(j, k, NULL, first + i, n, w->offset);
		k->merge[d->form](at, n, w->offset, values, nontemporal);
	}
}

/* Check that fixed planes have byte 0 for pruned values (values +0, omitted from the other planes). */
static codec_status check_pruned(const struct job *j, const struct kernels *k, const struct block *o,
				 const uint8_t *const *plane, codec_fault *f)
{
	for (int p = 1; p < WIRE_MAX_PLANES; p++)
		if (j->h.fixed >> p & 1 && k->under_zeros(o->top.symbol, plane[p], o->m))
			BAD((uint64_t)(plane[p] - o->c.frame), k->under_zeros(o->top.symbol, plane[p], o->m), 0);
	return CODEC_OK;
}

/* Read plane i of n values, which has mode CODED, to `out`. The lane decoder has already decoded plane 0. */
static codec_status read_coded(const struct job *j, const struct kernels *k, struct block *o, int i, uint64_t n,
			       uint8_t *out, struct work *w, codec_fault *f)
{
	int raw = WIRE_RAW_BITS(j->h.halved, i, dtype_of(j->h.dtype)->nbytes);
	struct cursor *c = &o->c;

	if (i)
		TRY(decode_plane(&j->lookup[i], k, w, c, n, out, f));
	else
		TRY(close_plane(j->lookup, c, &o->top, n, f));
	TRY(read_literals(i ? w->top[0].escaped : o->top.escaped, c, out, n, f));
	return raw ? read_raw_bits(c, k, raw, out, n, w, f) : CODEC_OK;
}

/* Read plane i of n values. Set *got to the address of its bytes: in the frame if they are raw, else `out`. */
static codec_status read_plane(const struct job *j, const struct kernels *k, struct block *o, int i, uint64_t n,
			       uint8_t *out, const uint8_t **got, struct work *w, codec_fault *f)
{
	struct cursor *c = &o->c;

	*got = out;
	if (!i && o->kept)
		return CODEC_OK;
	switch (o->mode[i]) {
	case WIRE_MODE_CODED: return read_coded(j, k, o, i, n, out, w, f);
	case WIRE_MODE_ROWS: return read_rows(c, out, n, f);
	case WIRE_MODE_RAW:
		if (c->end - c->at < n)
			BAD(c->at, c->end - c->at, n);
		*got = c->frame + c->at;
		c->at += n;
		return CODEC_OK;
	default:
		if (c->end == c->at)
			BAD(c->at, 0, 1);
		memset(out, c->frame[c->at++], n);
		return CODEC_OK;
	}
}

static codec_status block_close(const struct job *j, const struct kernels *k, const codec_context *with,
				struct block *o, char *values, int nontemporal, struct work *w)
{
	const struct header *h = &j->h;
	const struct dtype *d = dtype_of(h->dtype);
	uint64_t first = o->b * h->block, m = o->present, count = m;
	const uint8_t *plane[WIRE_MAX_PLANES], *section = o->c.frame + h->planes_at;
	int pruning = (o->head & WIRE_REGION_PRUNED) != 0;
	uint8_t *top = o->top.symbol;
	uint64_t top_nbytes = 0;
	codec_fault *f = with->fault;

	for (int i = 0; i < d->nbytes; i++)
		if (h->fixed >> i & 1) {
			plane[i] = section + first;
			section += h->plane_stride;
		}
	for (int i = 0; i < d->nbytes; i++) {
		if (h->fixed >> i & 1)
			continue;
		if (i == 0 || !pruning) {
			TRY(read_plane(j, k, o, i, m, i ? w->plane[i] : top, plane + i, w, f));
		} else {
			TRY(read_plane(j, k, o, i, count, w->symbol, plane + i, w, f));
			/* copy the plane: unprune reads past its end, which may be the end of the frame */
			if (plane[i] != w->symbol)
				memcpy(w->symbol, plane[i], count);
			k->unprune(top, 1, w->symbol, m, w->plane[i]);
			plane[i] = w->plane[i];
		}
		if (i == 0)
			top_nbytes = o->c.at - o->at;
		if (i == 0 && pruning) {
			count = k->count(top, 1, m);
			if (!count)
				BAD(o->c.at, 0, 1);
			TRY(check_pruned(j, k, o, plane, f));
		}
	}
	TRY(close_region(&o->c, f));
	if (o->checks && o->coded && j->kept_at)
		job_kept_nbytes(j)[o->b] = top_nbytes;
	if (!values)
		return CODEC_OK;
	for (int i = 0; o->gaps && i < d->nbytes; i++) {
		uint8_t *own = i ? w->plane[i] : o->kept ? w->plane[0] : top;

		if (plane[i] != own) /* a raw plane in the frame, or symbols that a check has kept */
			plane[i] = memcpy(own, plane[i], m);
		gaps_expand(o, own);
	}
	merge_block(j, k, w, plane, first, o->m, values, nontemporal);
	return CODEC_OK;
}

const struct block_steps lossless_steps = {block_open, block_ahead, block_close};

codec_status lossless_decode_blocks(const uint8_t *frame, const codec_tensor *dst, const codec_context *with,
				    const struct job *j, codec_range *range, struct work *w)
{
	return decode_in_pairs(&lossless_steps, frame, dst, with, j, range, w);
}
