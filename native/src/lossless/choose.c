/* choose.c - choose which planes are coded and which are raw in every block, and their codebooks. */
#include "lossless.h"

static struct choose_sample sample_of(const struct dtype *d, const struct sample *s, int p)
{
	int has_zeros = s->has_empty_row || (dtype_has_top(d) && choose_prunes(s->nzeros, s->nvalues));

	return (struct choose_sample){.exponent = p == 0 && dtype_has_top(d),
				      .float8 = dtype_is_float8(d),
				      .constant = s->is_constant >> p & 1,
				      .by_block = has_zeros || s->has_zero_run >> p & 1};
}

/* Choose how the plane of a float8 tensor with a scale model is stored, and drop the model unless it pays. */
static struct choose_result choose_float8(struct job *j, const struct sample *s)
{
	const struct dtype *d = dtype_of(j->h.dtype);
	struct choose_result after, before;
	codebook without;

	after = choose_plane(s->counts[0], sample_of(d, s, 0), j->h.n, j->h.max_code_length, j->books);
	before = choose_plane(s->counts[1], sample_of(d, s, 1), j->h.n, j->h.max_code_length, &without);
	if (choose_model8(before, after, model_side_nbytes(j), choose_total(s->counts[0]), j->h.n,
			  model_asked(&j->h) == CODEC_MODEL_SEPARABLE))
		return after;
	j->model.nsegments = 0;
	j->books[0] = without;
	return before;
}

static codec_status choose_planes(const codec_context *with, struct job *j, const struct sample *s)
{
	const struct dtype *d = dtype_of(j->h.dtype);

	for (int p = 0; p < d->nbytes; p++) {
		struct choose_sample sample = sample_of(d, s, p);
		struct choose_result got;
		int bit = 1 << p;

		if (sample.exponent && with->ncodebooks) {
			TRY(codebook_load(with->codebooks, &j->h, j->books));
			j->codebook_id = with->codebooks->id;
			sample.given = 1;
		}
		if (sample.float8 && j->model.nsegments)
			got = choose_float8(j, s);
		else
			got = choose_plane(s->counts[p], sample, j->h.n, j->h.max_code_length, j->books + p);
		j->h.fixed |= (uint8_t)(got.what == CHOOSE_FIXED ? bit : 0);
		if (got.what != CHOOSE_CODED)
			continue;
		j->h.halved |= (uint8_t)WIRE_HALVED(got.raw, p);
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

uint64_t lossless_sample(struct job *j, const struct kernels *k, const struct source *src, const codec_context *with)
{
	return model_sample(src, with, k, j, &j->sample);
}

void lossless_scan(struct job *j, const struct kernels *k, const struct source *src, uint64_t first, uint64_t count)
{
	model_scan(src, k, j, first, count, &j->sample);
}

/* Choose the scale model, how each plane is stored (CHOOSE_*), and codebooks, from a sample of the tensor. */
codec_status lossless_choose(struct job *j, const struct kernels *k, const struct source *src,
			     const codec_context *with)
{
	if (with->ncodebooks) /* fails before the sample is changed, so that the step may be repeated */
		TRY(codebook_load(with->codebooks, &j->h, j->books));
	model_choose(src, with, k, j, &j->sample);
	return choose_planes(with, j, &j->sample);
}
