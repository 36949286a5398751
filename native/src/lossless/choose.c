/* choose.c - choose which planes are coded and which are raw in every block, and their codebooks. */
#include "lossless.h"

static codec_status choose_planes(const codec_context *with, struct job *j, const struct sample *s)
{
	const struct dtype *d = dtype_of(j->h.dtype);
	int has_zeros = dtype_has_top(d) && choose_prunes(s->nzeros, s->nvalues);

	for (int p = 0; p < d->nbytes; p++) {
		struct choose_sample sample = {.exponent = p == 0 && dtype_has_top(d),
					       .float8 = dtype_is_float8(d),
					       .constant = s->is_constant >> p & 1,
					       .by_block = has_zeros || s->has_zero_run >> p & 1};
		int bit = 1 << p, what, raw;

		if (sample.exponent && with->ncodebooks) {
			TRY(codebook_load(with->codebooks, &j->h, j->books));
			j->codebook_id = with->codebooks->id;
			sample.given = 1;
		}
		what = choose_plane(s->counts[p], sample, j->h.n, j->h.max_code_length, j->books + p, &raw);
		j->h.fixed |= (uint8_t)(what == CHOOSE_FIXED ? bit : 0);
		if (what != CHOOSE_CODED)
			continue;
		j->h.halved |= (uint8_t)WIRE_HALVED(raw, p);
		j->h.coded |= (uint8_t)bit;
		book_to_codes(j->books + p, j->codes + p);
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

/* Choose the scale model, how each plane is stored (CHOOSE_*), and codebooks, from a sample of the tensor. */
codec_status lossless_choose(struct job *j, const struct kernels *k, const struct source *src,
			     const codec_context *with)
{
	model_choose(src, with, k, j, &j->sample);
	return choose_planes(with, j, &j->sample);
}
