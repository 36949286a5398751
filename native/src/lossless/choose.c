/* choose.c - which planes are coded, which are raw in every block, and their codebooks. */
#include "lossless.h"

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
static codec_status choose_planes(const codec_context *with, struct job *j, const struct sample *s)
{
	const struct dtype *d = dtype_of(j->h.dtype);
	/* a plane that could be constant or have runs of zeros, or lose zeros, stays in the regions */
	int has_zeros = d->octave && 64 * s->nzeros >= s->nvalues;

	for (int p = 0; p < d->nbytes; p++) {
		const uint32_t *counts = s->counts[p];
		int exponent = p == 0 && d->octave;
		codebook *b = j->books + p;
		uint64_t total = 0, cost = UINT64_MAX / 100;

		for (int i = 0; i < 256; i++)
			total += counts[i];
		if (exponent && with->ncodebooks) {
			TRY(codebook_load(with->codebooks, &j->h, b));
			j->codebook_id = with->codebooks->id;
			cost = book_cost(b, counts, 8);
		} else if (exponent || (!(s->is_constant >> p & 1) && !near_uniform(counts, 256))) {
			book_from_counts(b, counts, j->h.cap);
			cost = book_cost(b, counts, 8);
			if (!exponent && halve(counts, j->h.cap, total, &cost, b))
				j->h.halved |= (uint8_t)(1 << p);
		}
		/* a gain below 2% is not worth the time, nor surer than the sample */
		if (100 * cost < 98 * 8 * total) {
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
	j->h.flags = (uint8_t)((j->codebook_id ? WIRE_FLAG_PRIOR : 0) | (j->model.nsegments ? WIRE_FLAG_SEGMENTS : 0));
	return CODEC_OK;
}

codec_status lossless_begin(struct job *j, const codec_spec *s, const codec_context *with)
{
	(void)s;
	return model_begin(j, with);
}

/* Model, planes and codebooks, from a sample. */
codec_status lossless_choose(struct job *j, const struct kernels *k, const struct source *src,
			     const codec_context *with)
{
	model_choose(src, with, k, j, &j->sample);
	return choose_planes(with, j, &j->sample);
}
