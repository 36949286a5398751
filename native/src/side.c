/* side.c - the side section: exponent window, codebooks, scale model. Chosen, written, read. */
#include "rows.h"

/*
 * Low bytes of sums of products are even too often: a book of bytes with codes of at most 8 bits cannot say so, a book
 * of their low nibbles can. Is that cheaper than *cost bits? Then it takes the place of *b.
 */
static int halve(const uint32_t counts[256], int cap, uint64_t total, uint64_t *cost, codebook *b)
{
	uint32_t low[256] = {0};
	uint64_t halved;
	codebook nibbles;

	for (int i = 0; i < 256; i++)
		low[i & 15] += counts[i];
	book_from_counts(&nibbles, low, cap);
	halved = book_cost(&nibbles, low, 8) + 4 * total;
	if (halved >= *cost)
		return 0;
	*cost = halved;
	*b = nibbles;
	return 1;
}

/* Which planes are coded, which are raw in every block, and the codebooks. */
codec_status choose_planes(const codec_context *with, struct job *j, const struct sample *s)
{
	const struct dtype *d = dtype_of(j->h.dtype);
	/* a plane that could be constant or have runs of zeros, or lose zeros, stays in the regions */
	int has_zeros = d->octave && 64 * s->nzeros >= s->nvalues;

	for (int p = 0; p < d->nbytes; p++) {
		const uint32_t *counts = s->counts[p];
		int exponent = p == 0 && d->octave, literal = exponent && d->form == FORM_FLOAT8 ? 16 : 8;
		codebook *b = j->books + p;
		uint64_t total = 0, cost = UINT64_MAX / 100;

		for (int i = 0; i < 256; i++)
			total += counts[i];
		if (exponent && with->ncodebooks) {
			TRY(codebook_load(with->codebooks, &j->h, b));
			j->codebook_id = with->codebooks->id;
			cost = book_cost(b, counts, literal);
		} else if (exponent || (!(s->is_constant >> p & 1) && !near_uniform(counts, 256))) {
			book_from_counts(b, counts, j->h.cap);
			cost = book_cost(b, counts, literal);
			if (!exponent && halve(counts, j->h.cap, total, &cost, b))
				j->h.halved |= (uint8_t)(1 << p);
		}
		/* a gain below 2% is not worth the time, nor surer than the sample */
		if ((exponent && d->form == FORM_FLOAT8) || 100 * cost < 98 * 8 * total) {
			j->h.coded |= (uint8_t)(1 << p);
			book_to_codes(b, j->codes + p);
			continue;
		}
		j->h.halved &= (uint8_t)~(1 << p);
		if (!has_zeros && !(s->is_constant >> p & 1) && !(s->has_zero_run >> p & 1))
			j->h.fixed |= (uint8_t)(1 << p);
	}
	if (!(j->h.coded & 1))
		j->model.nsegments = j->codebook_id = 0;
	j->h.flags = (uint8_t)((j->codebook_id ? WIRE_FLAG_PRIOR : 0) | (j->model.nsegments ? WIRE_FLAG_SEGMENTS : 0) |
			       (d->form == FORM_FLOAT8 ? WIRE_FLAG_WINDOW : 0));
	return CODEC_OK;
}

/* TRUNCATE's book, from the caller or the sample. */
codec_status choose_symbols(const codec_context *with, struct job *j)
{
	if (with->ncodebooks) {
		TRY(codebook_load(with->codebooks, &j->h, j->books));
		j->codebook_id = with->codebooks->id;
	} else {
		book_from_counts(j->books, j->sample.counts[0], j->h.cap);
	}
	book_to_codes(j->books, j->codes);
	j->h.coded = 1;
	j->h.flags = (uint8_t)((j->codebook_id ? WIRE_FLAG_PRIOR : 0) | (j->model.nsegments ? WIRE_FLAG_SEGMENTS : 0));
	return CODEC_OK;
}

/* A book for the codes of a codec of rows, from counts of a sample. */
void choose_bytes(struct job *j, const uint32_t counts[256])
{
	book_from_counts(j->books, counts, WIRE_MAX_CAP);
	book_to_codes(j->books, j->codes);
	j->h.coded = 1;
}

/* Side section: exponent window, codebook id, codebooks, scale model. Returns its size; dst NULL: only that. */
uint64_t side_write(const struct job *j, uint8_t *dst)
{
	uint8_t packed[BOOK_MAX_NBYTES + 1];
	uint64_t at = 0;

	if (j->h.flags & WIRE_FLAG_WINDOW) {
		if (dst)
			store64(dst, j->model.window);
		at += 8;
	}
	if (j->h.flags & WIRE_FLAG_PRIOR) {
		if (dst)
			store64(dst + at, j->codebook_id);
		at += 8;
	}
	for (int p = 0; p < WIRE_MAX_PLANES; p++)
		if (j->h.coded >> p & 1 && !(p == 0 && j->h.flags & WIRE_FLAG_PRIOR)) {
			int n = book_pack(j->books + p, packed);

			if (dst)
				memcpy(dst + at, packed, (size_t)n);
			at += (uint64_t)n;
		}
	if (codec_is_rows(j->h.codec)) {
		if (dst)
			rows_write(j, dst + at);
		at += rows_side_nbytes(j);
	} else {
		if (dst)
			model_write(j, dst + at);
		at += model_side_nbytes(j);
	}
	if (dst)
		memset(dst + at, 0, ALIGN8(at) - at);
	return ALIGN8(at);
}

#define SIDE(where, found, expected) return fault(f, CODEC_BAD_SIDE, where, found, expected)

codec_status side_read(const uint8_t *frame, const codec_context *with, struct job *j)
{
	uint64_t at = j->h.side_at, end = at + j->h.side_nbytes;
	codec_fault *f = with->fault;

	if (j->h.flags & WIRE_FLAG_WINDOW) {
		uint64_t window = end - at < 8 ? UINT64_MAX : load64(frame + at);

		if (window > 0x7ff)
			SIDE(at, window, 0x7ff);
		j->model.window = (uint32_t)window;
		at += 8;
	}
	if (j->h.flags & WIRE_FLAG_PRIOR) {
		const codec_codebook *c = NULL;

		if (end - at < 8 || !load64(frame + at))
			SIDE(at, 0, 1);
		j->codebook_id = load64(frame + at);
		for (uint64_t i = 0; i < with->ncodebooks && !c; i++)
			if (with->codebooks[i].id == j->codebook_id)
				c = with->codebooks + i;
		if (!c)
			return fault(f, CODEC_UNKNOWN_CODEBOOK, at, j->codebook_id, 0);
		TRY(codebook_load(c, &j->h, j->books));
		at += 8;
	}
	for (int p = 0; p < WIRE_MAX_PLANES; p++) {
		if (!(j->h.coded >> p & 1))
			continue;
		if (!(p == 0 && j->h.flags & WIRE_FLAG_PRIOR)) {
			int n = book_unpack(j->books + p, frame + at, end - at);

			if (!n)
				SIDE(at, end - at, 0);
			for (int i = 16; i < 256 && j->h.halved >> p & 1; i++)
				if (j->books[p].length[i])
					SIDE(at, i, 15);
			at += (uint64_t)n;
		}
		book_to_lookup(j->books + p, j->lookup + p);
	}
	if (j->h.layout == WIRE_LAYOUT_BLOCKS && codec_is_rows(j->h.codec))
		TRY(rows_read(frame, at, end, j, &at, f));
	else if (j->h.flags & WIRE_FLAG_SEGMENTS)
		TRY(model_read(frame, at, end, j, &at, f));
	if (end - at >= WIRE_ALIGN)
		SIDE(at, end - at, WIRE_ALIGN - 1);
	for (; at < end; at++)
		if (frame[at])
			SIDE(at, frame[at], 0);
	return CODEC_OK;
}
