/*
 * plan.c - make plans: libcodec plans the job of a tensor without its values, and the plan stores a copy of the job's
 * arrays that kernels read.
 */
#include "plan.h"

#include <stdlib.h>
#include <string.h>

#include "exact/scales.h"

#define TABLES_NBYTES (WIRE_MAX_PLANES * 514) /* size of the array codec_view.tables */

static uint64_t min64(uint64_t a, uint64_t b)
{
	return a < b ? a : b;
}

static uint64_t max64(uint64_t a, uint64_t b)
{
	return a > b ? a : b;
}

/* Append an array of a job to the plan's image (the arrays to upload), and set a->at to its offset in the image. */
static void keep_array(codec_cuda_plan *p, const uint8_t *job, codec_array *a)
{
	uint64_t nbytes = a->count * a->itemsize;

	memcpy(p->image + p->image_nbytes, job + a->at, nbytes);
	a->at = p->image_nbytes;
	p->image_nbytes += align16(nbytes);
}

/* Set a->at to the next free offset in the memory that kernels fill, and reserve the array's bytes there. */
static void make_array(codec_cuda_plan *p, codec_array *a)
{
	a->at = p->made_nbytes;
	p->made_nbytes += align16(a->count * a->itemsize);
}

/* Copy the view of a planned job, and the arrays that kernels read, to the plan. */
static int take_job(codec_cuda_plan *p, const uint8_t *job)
{
	codec_view *v = &p->view;

	v->struct_nbytes = sizeof *v;
	TRY(codec_job_view(job, v));
	p->image = calloc(1, align16(v->model_parts.count * v->model_parts.itemsize) +
				     align16(v->row_parts.count * v->row_parts.itemsize) + 16);
	if (!p->image)
		return CODEC_CUDA_NO_MEMORY;
	keep_array(p, job, &v->model_parts);
	keep_array(p, job, &v->row_parts);
	v->offsets.itemsize = sizeof(uint16_t); /* in the library's own jobs, offsets have one byte each */
	make_array(p, &v->offsets);
	make_array(p, &v->row_sums);
	make_array(p, &v->lengths);
	make_array(p, &v->tables);
	p->nblocks = v->nblocks;
	p->nparts = v->model_parts.count;
	return CODEC_OK;
}

codec_view plan_view(const codec_cuda_plan *p, uint64_t memory, uint64_t made, uint64_t stream)
{
	codec_view v = p->view;

	v.offsets.at += made - memory;
	v.row_sums.at += made - memory;
	v.lengths.at += made - memory;
	v.tables.at += made - memory;
	v.stream = stream;
	return v;
}

/* Return the size in bytes of a unit of kernel k's scratch memory. */
static uint64_t unit_nbytes(const codec_cuda_device *d, uint32_t k, const codec_scratch_units *s)
{
	return s->times * d->sizes[k][s->index] + s->more;
}

/*
 * Return an upper bound of the bytes of a decode job's arrays, for n values: tables, parts, and offsets of rows and
 * columns.
 */
static uint64_t memory_nbytes(uint64_t n)
{
	uint64_t part = max64(sizeof(codec_model_part) + 2 * sizeof(uint16_t), sizeof(codec_row_part));

	return align16(TABLES_NBYTES + WIRE_MAX_ROW_PARTS(n) * part + (n / 32 + 64) * sizeof(uint16_t));
}

/* Plan the job of a tensor like `like`. */
static int plan_job(codec_cuda_plan *p, const codec_spec *spec, const codec_tensor *like, const codec_context *with)
{
	size_t job_nbytes, work_nbytes, head_nbytes;
	codec_plan plan;
	uint8_t *job;
	int status;

	TRY(codec_job_nbytes(spec, like, &job_nbytes, &work_nbytes));
	if (!(job = calloc(1, job_nbytes)))
		return CODEC_CUDA_NO_MEMORY;
	status = codec_encode_plan(spec, like, with, job, job_nbytes, &plan);
	if (!status)
		status = codec_encode_head(job, p->head, CODEC_HEADER_NBYTES, &head_nbytes);
	p->launch.struct_nbytes = sizeof p->launch;
	if (!status)
		status = codec_job_launch(job, &p->launch);
	if (!status)
		status = take_job(p, job);
	free(job);
	TRY(status);
	p->head_nbytes = align16(head_nbytes);
	p->encode_each = unit_nbytes(p->device, p->launch.encode, &p->launch.encode_scratch);
	p->decode_each = unit_nbytes(p->device, p->launch.decode, &p->launch.decode_scratch);
	return CODEC_OK;
}

static int make_plan(codec_cuda_plan *p, const codec_spec *spec, codec_tensor *like, const codec_context *with)
{
	size_t bound;

	TRY(codec_bound_segments(spec, like, with->segments, with->nsegments, &bound));
	p->bound = bound;
	p->codec = spec->codec;
	p->dtype = like->dtype;
	p->rank = like->rank;
	p->itemsize = codec_dtype_nbytes(like->dtype);
	p->n = 1;
	for (uint32_t i = 0; i < like->rank; i++)
		p->n *= p->shape[i] = like->shape[i];
	p->nbytes = like->nbytes = p->n * p->itemsize;
	p->entropy = p->codec >= CODEC_SIGN && p->codec <= CODEC_QUANTIZE &&
		     row_kind_of(spec->codec, spec->variant, spec->options, 8, like->dtype).entropy;
	TRY(plan_job(p, spec, like, with));
	p->choice_nbytes = p->device->choose[0] + max64(p->nparts, 1) * p->device->choose[1];
	p->memory_nbytes = memory_nbytes(p->n);
	return CODEC_OK;
}

int codec_cuda_plan_open(const codec_cuda_device *device, const codec_spec *spec, const codec_tensor *like,
			 const codec_segment *segments, uint64_t nsegments, codec_cuda_plan **plan)
{
	/* placeholder for codec_context.levels: planning requires a non-NULL pointer, and does not read it */
	static const uint8_t not_read[1];
	codec_context with = {.struct_nbytes = sizeof with, .segments = segments, .nsegments = nsegments};
	codec_cuda_plan *p;
	codec_tensor t;
	int status;

	if (!plan)
		return CODEC_BAD_ARGUMENT;
	*plan = NULL;
	if (!device || !spec || spec->struct_nbytes < sizeof *spec || !like || like->struct_nbytes < sizeof *like)
		return CODEC_BAD_ARGUMENT;
	if (!(p = calloc(1, sizeof *p)))
		return CODEC_CUDA_NO_MEMORY;
	p->device = device;
	if (spec->codec == CODEC_TRUNCATE && spec->variant != CODEC_LEVEL_CODING_FIXED) {
		p->needs_levels = 1;
		with.levels = not_read;
	}
	t = *like;
	t.data = NULL;
	status = spec->codec == CODEC_TRUNCATE && spec->variant == CODEC_LEVEL_CODING_SHARED
			 ? CODEC_UNSUPPORTED
			 : make_plan(p, spec, &t, &with);
	if (status) {
		codec_cuda_plan_close(p);
		return status;
	}
	*plan = p;
	return CODEC_OK;
}

void codec_cuda_plan_close(codec_cuda_plan *p)
{
	if (p)
		free(p->image);
	free(p);
}

uint64_t codec_cuda_bound(const codec_cuda_plan *p)
{
	return p ? p->bound : 0;
}

void scratch_need(struct scratch *s, uint64_t each, uint64_t warp_units)
{
	if (!each)
		return;
	s->each = max64(s->each, align16(each));
	s->warp_units = max64(s->warp_units, warp_units);
}

void scratch_limit(struct scratch *s, uint64_t wanted)
{
	s->count = s->each ? max64(min64(wanted, MAX_SCRATCH / s->each), s->warp_units) : 0;
}

uint64_t scratch_taken_nbytes(const struct scratch *s)
{
	return align16((s->count + 31) / 32 * 4);
}

uint64_t resident_ctas(const codec_cuda_device *d, uint32_t k)
{
	return (uint64_t)codec_kernel_at(k)->resident * d->processors;
}

uint32_t plan_ctas(const codec_cuda_plan *p, uint32_t k)
{
	uint64_t each = codec_kernel_at(k)->blocks;

	return (uint32_t)max64(1, min64((p->nblocks + each - 1) / each, resident_ctas(p->device, k)));
}

uint32_t share_ctas(const codec_cuda_device *d, uint32_t k, uint32_t ctas, uint64_t all)
{
	uint64_t most = resident_ctas(d, k);

	return (uint32_t)(all <= most ? ctas : max64(1, ctas * most / all));
}

uint32_t elementwise_ctas(const codec_cuda_device *d, uint64_t n)
{
	return (uint32_t)max64(1, min64((n + ELEMENTWISE_VALUES - 1) / ELEMENTWISE_VALUES,
					ELEMENTWISE_BLOCKS * (uint64_t)d->processors));
}
