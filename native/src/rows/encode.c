/* encode.c - encode a block of values as codes and scales. */
#include "rows.h"

/* TERNARY: replace each TERNARY_TIE in `code` by the code that the value's second random number decides. s: scale. */
static void resolve_ties(const struct job *j, const float_any *x, uint64_t first, uint64_t n, float s, uint8_t *code)
{
	const struct over over = round_over(s, 65536);
	uint8_t *tie = code;

	while ((tie = memchr(tie, TERNARY_TIE, (size_t)(code + n - tie)))) {
		uint64_t i = (uint64_t)(tie - code);

		*tie = round_ternary_settled(round_bits(x[i]), over, philox_half(j->key, first + i, 1));
	}
}

static const uint16_t *random_bits(const struct job *j, const struct kernels *k, uint64_t first, uint64_t n,
				   struct work *w)
{
	uint64_t block = first / 8;

	k->halves(j->key, block, (first + n + 7) / 8 - block, w->half);
	return w->half + first % 8;
}

/*
 * Return the error to report for a value above the caller's scale: CODEC_NONFINITE if any value of the tensor is NaN or
 * Inf, else CODEC_BAD_SCALE.
 */
static codec_status scale_error(const struct job *j, const struct kernels *k, const struct source *src, float *buffer)
{
	for (uint64_t i = 0; i < j->h.n; i += ROW_CHUNK) {
		uint64_t n = MIN(ROW_CHUNK, j->h.n - i);
		uint32_t max;

		k->abs_max(load_values(k, src, i, n, buffer), n, n, ROUND_ABS + 1, &max);
		if (max >= ROUND_INF)
			return CODEC_NONFINITE;
	}
	return CODEC_BAD_SCALE;
}

/*
 * Compute the codes, one byte each, of values [i, i + n) of a block of part p, and store the scales of rows that begin
 * in that range.
 */
static codec_status encode_run(const struct job *j, const struct kernels *k, const struct row_kind *q,
			       const struct part *p, const struct source *src, uint64_t first, uint64_t i, uint64_t n,
			       uint64_t m, struct work *w, uint8_t *stored, uint8_t *code)
{
	int random = q->codec == CODEC_TERNARY || j->h.options & CODEC_OPTION_STOCHASTIC;
	const uint16_t *h = random ? random_bits(j, k, first + i, n, w) : NULL;
	const float_any *x;
	int above;

	if (p->group_size > ROW_CHUNK && i % p->group_size == 0)
		TRY(rows_long_scale(j, k, q, p, src, first + i, MIN(p->group_size, m - i), w,
				    stored + i / p->group_size * row_scale_nbytes(*q)));
	x = load_values(k, src, first + i, n, w->x);
	if (p->group_size && p->group_size <= ROW_CHUNK)
		TRY(rows_scales(j, k, q, p, x, n, w, stored + i / p->group_size * row_scale_nbytes(*q)));
	else if (!p->group_size)
		*w->scale = p->scale[0];
	above = k->encode_rows(q, x, n, p->group_size && p->group_size <= ROW_CHUNK ? p->group_size : n, w->scale,
			       w->scale_below, h, code);
	if (above && j->scale > 0 && !(j->clip > 0))
		return scale_error(j, k, src, w->x);
	if (q->codec == CODEC_TERNARY)
		resolve_ties(j, x, first + i, n, *w->scale, code);
	return CODEC_OK;
}

/* Compute the codes of the m values of a block, and pack them at dst. */
static codec_status encode_codes(const struct job *j, const struct kernels *k, const struct part *p,
				 const struct source *src, uint64_t first, uint64_t m, struct work *w, uint8_t *stored,
				 uint8_t *dst)
{
	uint64_t tile = p->group_size && p->group_size <= WIRE_ROW_BLOCK ? m : ROW_TILE;
	const struct row_kind q = header_kind(&j->h);

	if (q.codec == CODEC_SIGN) {
		int together =
			j->blocks_scan || (p->group_size && p->group_size % 8 == 0); /* sign bits with the sums */

		if (p->group_size)
			TRY(rows_sign_scales(j, k, src, first, m, p->group_size, stored, together ? dst : NULL));
		else if (together)
			rows_scan_signs(j, k, src, p, first, m, dst);
		for (uint64_t i = together ? m : 0; i < m; i += ROW_CHUNK) {
			uint64_t n = MIN(ROW_CHUNK, m - i);

			k->sign_bits(load_values(k, src, first + i, n, w->x), n, dst + i / 8);
		}
		return CODEC_OK;
	}
	for (uint64_t t = 0; t < m; t += tile) {
		uint64_t end = MIN(t + tile, m), n;
		uint8_t *code = q.bits == 8 ? dst + t : w->code;

		for (uint64_t i = t; i < end; i += n) {
			n = rows_run(p->group_size, i, end);
			TRY(encode_run(j, k, &q, p, src, first, i, n, m, w, stored, code + i - t));
		}
		if (q.bits == 8)
			continue;
		if (q.bits)
			k->pack_codes(w->code, end - t, q.bits, dst + t * q.bits / 8);
		else
			k->pack_trits(w->code, end - t, dst + t / 5);
	}
	return CODEC_OK;
}

/* Entropy stage: build the codebook from the counts of the bytes of codes in a sample of blocks. */
static void choose_bytes(struct job *j, const uint32_t counts[256])
{
	book_from_counts(j->books, counts, WIRE_MAX_CODE_LENGTH);
	book_to_codes(j->books, j->codes);
	j->h.coded = 1;
}

/* Compute the bytes of codes of block b, *n bytes, in w->plane[0]. The block's scales are discarded. */
codec_status rows_codes(const struct job *j, const struct kernels *k, const struct source *src, uint64_t b, uint64_t *n,
			struct work *w)
{
	struct place at = rows_place(j, b);

	*n = row_codes_nbytes(header_kind(&j->h), at.n);
	return encode_codes(j, k, at.part, src, at.first, at.n, w, w->region, w->plane[0]);
}

codec_status rows_encode_block(struct job *j, const struct kernels *k, const codec_context *with,
			       const struct source *src, uint64_t b, uint8_t *frame, struct work *w, uint64_t *digest,
			       uint64_t *nbytes)
{
	const struct row_kind q = header_kind(&j->h);
	struct place at = rows_place(j, b);
	uint64_t ncodes = row_codes_nbytes(q, at.n);
	uint8_t *codes = w->region + at.nscales;

	(void)with, (void)frame, (void)digest;
	TRY(encode_codes(j, k, at.part, src, at.first, at.n, w, w->region, q.entropy ? w->plane[0] : codes));
	if (q.entropy)
		ncodes = encode_bytes(j, k, w, ncodes, codes);
	*nbytes = ALIGN8(at.nscales + ncodes);
	memset(codes + ncodes, 0, *nbytes - at.nscales - ncodes);
	return CODEC_OK;
}

/* Begin encoding: cut the parts, and count the pieces to scan. */
codec_status rows_begin(struct job *j, const codec_spec *s, const codec_context *with)
{
	if (with->ncodebooks)
		return CODEC_BAD_ARGUMENT;
	j->residual = with->residual ? RESIDUAL_WITH_BLOCKS : RESIDUAL_NONE;
	if (!j->h.n) {
		j->h.group_size = 0;
		return CODEC_OK;
	}
	j->h.layout = WIRE_LAYOUT_BLOCKS;
	j->key = (struct philox){s->seed, (uint32_t)with->stream, (uint32_t)(with->stream >> 32)};
	j->scale = j->h.codec == CODEC_TERNARY ? scale_in_dtype(s->scale, j->h.dtype) : s->scale;
	if (s->scale > 0 && scale_lost(header_kind(&j->h), s->scale))
		return CODEC_ROUNDED_SCALE;
	if (s->options & CODEC_OPTION_ZERO_SCALE)
		j->scale = -1; /* the caller's scale is 0: any value but 0 is an error, which the scan finds */
	j->clip = s->clip;
	rows_cut(j, with);
	j->nscans = rows_scan_count(j);
	return CODEC_OK;
}

/* Entropy stage: build the codebook from the codes in a sample of blocks. */
static codec_status sample_codes(struct job *j, const struct kernels *k, const struct source *src)
{
	uint64_t take = choose_code_blocks(j->h.nblocks);
	uint32_t counts[256] = {0};
	struct work w;

	work_place(&j->h, (char *)j + j->work_at, &w);

	for (uint64_t i = 0; i < take; i++) {
		uint64_t n;

		TRY(rows_codes(j, k, src, choose_even(i, take, j->h.nblocks), &n, &w));
		for (uint64_t v = 0; v < n; v++)
			counts[w.plane[0][v]]++;
	}
	choose_bytes(j, counts);
	return CODEC_OK;
}

codec_status rows_choose(struct job *j, const struct kernels *k, const struct source *src, const codec_context *with)
{
	(void)with;
	if (j->blocks_scan)
		return CODEC_OK;
	TRY(rows_finish(j));
	return header_kind(&j->h).entropy ? sample_codes(j, k, src) : CODEC_OK;
}

codec_status rows_leave(const struct job *j, const struct kernels *k, const codec_context *with,
			const struct source *src, void *work)
{
	struct work w;

	if (j->residual != RESIDUAL_LAST)
		return CODEC_OK;
	work_place(&j->h, work, &w);
	for (uint64_t b = 0; b < j->h.nblocks; b++) {
		uint64_t n;

		TRY(rows_codes(j, k, src, b, &n, &w));
		TRY(rows_residual(j, k, src, w.region, b, with->residual, &w));
	}
	return CODEC_OK;
}
