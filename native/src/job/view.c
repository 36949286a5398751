/* view.c - describe a job as plain data, for engines with their own kernels. */
#include "api.h"

#define SAME(ours, theirs, field)                                                                                      \
	_Static_assert(offsetof(struct ours, field) == offsetof(theirs, field) &&                                      \
			       sizeof(((struct ours *)0)->field) == sizeof(((theirs *)0)->field),                      \
		       #field)

SAME(segment, codec_model_part, start);
SAME(segment, codec_model_part, count);
SAME(segment, codec_model_part, row);
SAME(segment, codec_model_part, nibbles_at);
SAME(segment, codec_model_part, base);
SAME(segment, codec_model_part, mean);
SAME(segment, codec_model_part, kind);
SAME(segment, codec_model_part, shifts);
_Static_assert(sizeof(struct segment) == sizeof(codec_model_part), "a part of the scale model");
SAME(part, codec_row_part, start);
SAME(part, codec_row_part, count);
SAME(part, codec_row_part, first_block);
SAME(part, codec_row_part, first_sum);
SAME(part, codec_row_part, group_size);
SAME(part, codec_row_part, scale);
_Static_assert(sizeof(struct part) == sizeof(codec_row_part), "a part of a frame whose values share scales");
SAME(row_sums, codec_row_sums, sum);
SAME(row_sums, codec_row_sums, negative);
SAME(row_sums, codec_row_sums, max);
_Static_assert(sizeof(struct row_sums) == sizeof(codec_row_sums), "sums of a scan");
SAME(delta_block, codec_delta_block, base);
SAME(delta_block, codec_delta_block, result);
SAME(delta_block, codec_delta_block, changes);
SAME(delta_block, codec_delta_block, state);
_Static_assert(sizeof(struct delta_block) == sizeof(codec_delta_block), "digests of a block");
_Static_assert(sizeof(codebook) == 257 && sizeof(book_codes) == 514 && sizeof(book_lookup) == 514, "tables of bytes");

const struct job *any_job(const void *memory)
{
	const struct job *j = job_place((void *)memory);

	return memory && (j->kind == JOB_ENCODE || j->kind == JOB_DECODE) ? j : NULL;
}

/* Describe an array of a job by its offset from the start of the job's memory. */
static codec_array array_of(const struct job *j, const void *memory, uint64_t at, uint64_t count, uint64_t itemsize)
{
	return (codec_array){at + (uint64_t)((const char *)j - (const char *)memory), count, itemsize};
}

static void view_header(const struct header *h, codec_view *v)
{
	v->codec = h->codec;
	v->dtype = h->dtype;
	v->layout = h->layout;
	v->variant = h->variant;
	v->options = h->options;
	v->bits = h->bits;
	v->group_size = h->group_size;
	v->guard = h->guard;
	v->flags = h->flags;
	v->fixed = h->fixed;
	v->coded = h->coded;
	v->halved = h->halved;
	v->n = h->n;
	v->block_nvalues = h->block;
	v->nblocks = h->nblocks;
	v->frame_nbytes = h->frame_nbytes;
	v->side_offset = h->side_at;
	v->side_nbytes = h->side_nbytes;
	v->directory_offset = h->directory_at;
	v->planes_offset = h->planes_at;
	v->plane_stride = h->plane_stride;
	v->regions_offset = h->regions_at;
}

codec_status codec_job_view(const void *job, codec_view *view)
{
	const struct job *j = any_job(job);
	int rows, encoding;
	codec_view v;

	if (!j || !view || view->struct_nbytes < sizeof(uint32_t))
		return CODEC_BAD_ARGUMENT;
	memset(&v, 0, sizeof v);
	v.struct_nbytes = view->struct_nbytes;
	rows = codec_is_rows(j->h.codec);
	encoding = j->kind == JOB_ENCODE;
	view_header(&j->h, &v);
	v.encoding = (uint32_t)encoding;
	v.seed = j->key.seed;
	v.stream = j->key.stream | (uint64_t)j->key.stream_high << 32;
	v.scale = j->scale;
	v.clip = j->clip;
	v.max_code_length = j->h.max_code_length;
	v.codebook_id = j->codebook_id;
	v.traits = header_traits(&j->h);
	v.lengths = array_of(j, job, offsetof(struct job, books), WIRE_MAX_PLANES, sizeof(codebook));
	v.tables = array_of(j, job, encoding ? offsetof(struct job, codes) : offsetof(struct job, lookup),
			    WIRE_MAX_PLANES, sizeof(book_codes));
	v.model_parts = array_of(j, job, j->model.segments_at, rows ? 0 : j->model.nsegments, sizeof(struct segment));
	v.offsets = array_of(j, job, j->model.offsets_at, rows ? 0 : 2 * j->model.nibbles, sizeof(int8_t));
	v.row_parts = array_of(j, job, j->parts_at, j->nparts, sizeof(struct part));
	v.row_sums = array_of(j, job, j->sums_at, rows ? j->nscans : 0, sizeof(struct row_sums));
	if (codec_is_delta(j->h.codec))
		v.row_sums = array_of(j, job, j->parts_at, j->h.nblocks, sizeof(struct delta_block));
	if (j->h.codec == CODEC_TOPK)
		v.row_sums = array_of(j, job, j->parts_at, j->nscans, sizeof(uint32_t));
	memcpy(view, &v, MIN(view->struct_nbytes, sizeof v));
	return CODEC_OK;
}

/*
 * Open an encode job without the tensor's values: cut the parts, which depend on shapes only, and load an agreed
 * codebook.
 */
static codec_status encode_plan(const codec_spec *spec, const codec_tensor *like, const codec_context *with,
				void *memory, size_t job_nbytes, struct job **out)
{
	struct header h;
	codec_tensor t;
	codec_spec s;
	struct job *j;

	TRY(request(spec, like, 0, &h, &t));
	memcpy(&s, spec, sizeof s);
	TRY(segments_check(with, h.n));
	if (!codec_is_delta(h.codec)) /* a plan needs no base */
		TRY(family_check_state(&h, with, 1));
	TRY(job_open(memory, job_nbytes, &h, JOB_ENCODE, &j));
	memset(&j->sample, 0, sizeof *j - offsetof(struct job, sample)); /* the engine sets these members */
	j->verify_first = (with->flags & CODEC_VERIFY_FIRST) != 0;
	TRY(family_of(&h)->begin(j, &s, with));
	if (j->h.layout == WIRE_LAYOUT_BLOCKS && family_of(&h)->cut)
		family_of(&h)->cut(j, with);
	if (j->h.layout == WIRE_LAYOUT_BLOCKS && with->ncodebooks) {
		TRY(codebook_load(with->codebooks, &h, j->books));
		book_to_codes(j->books, j->codes);
		j->codebook_id = with->codebooks->id;
	}
	TRY(header_derive(&j->h));
	j->state = JOB_PLANNED;
	*out = j;
	return CODEC_OK;
}

codec_status codec_encode_plan(const codec_spec *spec, const codec_tensor *like, const codec_context *with, void *job,
			       size_t job_nbytes, codec_plan *plan)
{
	codec_status status;
	codec_context c;
	uint64_t saved;
	struct job *j;

	TRY(context_read(with, &c));
	saved = call_enter();
	status = encode_plan(spec, like, &c, job, job_nbytes, &j);
	call_leave(saved);
	TRY(status);
	job_plan(j, plan);
	return CODEC_OK;
}

/*
 * Return the encode job if its header can be written, because it is planned or ready, else NULL. In a planned job,
 * fields that depend on values may be unset.
 */
static const struct job *head_job(const void *job)
{
	const struct job *j = job_at(job, JOB_ENCODE, JOB_PLANNED);

	return j ? j : job_at(job, JOB_ENCODE, JOB_READY);
}

codec_status codec_encode_head(const void *job, void *head, size_t capacity, size_t *written)
{
	const struct job *j = head_job(job);

	if (!j || !head || !written || (!j->h.nblocks && j->state == JOB_READY))
		return CODEC_BAD_ARGUMENT;
	*written = 0;
	if (j->state == JOB_PLANNED) {
		if (capacity < j->h.side_at)
			return CODEC_SHORT_OUTPUT;
		header_write(&j->h, head);
		*written = j->h.side_at;
		return CODEC_OK;
	}
	if (capacity < j->h.directory_at)
		return CODEC_SHORT_OUTPUT;
	head_write(j, 0, 0, head);
	*written = j->h.directory_at;
	return CODEC_OK;
}

codec_status codec_encode_final_head(const void *job, uint64_t frame_nbytes, uint64_t checksum, void *head,
				     size_t head_nbytes)
{
	const struct job *j = job_at(job, JOB_ENCODE, JOB_READY);

	if (!j || !head || !j->h.nblocks || head_nbytes < j->h.directory_at || frame_nbytes % WIRE_ALIGN ||
	    frame_nbytes < j->h.regions_at)
		return CODEC_BAD_ARGUMENT;
	head_write(j, frame_nbytes, checksum, head);
	return CODEC_OK;
}
