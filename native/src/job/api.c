/* api.c - functions that codec_encode and codec_decode share: argument checks, sizes, status messages. */
#include "api.h"

const char *codec_strerror(codec_status status)
{
	switch (status) {
	case CODEC_OK: return "success";
	case CODEC_BAD_ARGUMENT: return "an argument is missing or out of range";
	case CODEC_BAD_SPEC: return "the codec does not exist, or does not accept these parameters";
	case CODEC_BAD_DTYPE: return "the codec does not accept this dtype";
	case CODEC_BAD_SHAPE: return "the shape has more than 8 dimensions, or too many values";
	case CODEC_BAD_SEGMENTS: return "segments overlap, are not in ascending order, or lie outside of the tensor";
	case CODEC_BAD_CODEBOOK:
		return "the codebook is malformed, its id does not match, or it was made for other symbols";
	case CODEC_SHAPE_MISMATCH: return "dtype or shape of the destination differ from those of the frame";
	case CODEC_NONFINITE: return "the tensor holds NaN or Inf, which this codec cannot encode";
	case CODEC_BAD_SCALE: return "the given scale is smaller than the largest magnitude in the tensor";
	case CODEC_ROUNDED_SCALE: return "the given scale is 0 or Inf in the tensor's dtype";
	case CODEC_SHORT_OUTPUT: return "the output buffer is too small";
	case CODEC_SHORT_SCRATCH: return "the scratch buffer is too small";
	case CODEC_TRUNCATED: return "the frame is truncated";
	case CODEC_TRAILING: return "bytes follow the end of the frame";
	case CODEC_BAD_MAGIC: return "not a codec frame";
	case CODEC_BAD_HEADER: return "the header has a value that the format forbids";
	case CODEC_BAD_SIDE: return "the scale model or a codebook is malformed";
	case CODEC_BAD_DIRECTORY: return "the directory is malformed";
	case CODEC_BAD_REGION: return "a block is malformed";
	case CODEC_CHECKSUM: return "the checksum does not match";
	case CODEC_UNSUPPORTED: return "the frame needs a later version of this library";
	case CODEC_LIMIT: return "the tensor is larger than max_nbytes, or its frame larger than the format allows";
	case CODEC_MISSING_STATE: return "the codec needs a metric with the optimizer's state, or levels";
	case CODEC_OTHER_STATE:
		return "the frame was encoded with an optimizer state that differs from the supplied one";
	case CODEC_MISSING_BASE: return "the frame holds the difference from a base tensor: the base must be supplied";
	case CODEC_OTHER_BASE: return "the base is not the tensor against which the frame was encoded";
	case CODEC_ALREADY_APPLIED: return "already applied: the base equals the frame's result";
	case CODEC_UNKNOWN_CODEBOOK: return "the frame names a codebook that was not supplied";
	}
	return "unknown status";
}

uint32_t codec_abi_version(void)
{
	return CODEC_ABI_VERSION;
}

/*
 * Copy a caller's struct. A newer caller's struct may be longer; fields that an older caller's struct lacks are read as
 * 0. The struct must have all fields of ABI version 1, which are all fields so far.
 */
#define READ_STRUCT(copy, given)                                                                                       \
	do {                                                                                                           \
		memset(&(copy), 0, sizeof(copy));                                                                      \
		if (!(given) || (given)->struct_nbytes < sizeof(copy))                                                 \
			return CODEC_BAD_ARGUMENT;                                                                     \
		memcpy(&(copy), (given), sizeof(copy));                                                                \
	} while (0)

codec_status context_read(const codec_context *with, codec_context *copy)
{
	if (!with) {
		memset(copy, 0, sizeof *copy);
		return CODEC_OK;
	}
	READ_STRUCT(*copy, with);
	if (copy->flags & ~(CODEC_ALLOW_SLACK | CODEC_VERIFY_FIRST | CODEC_CHECK_ONLY | CODEC_NO_CHECKSUM |
			    CODEC_FEEDBACK | CODEC_NONTEMPORAL | CODEC_FINITE | CODEC_DIFFERENCE) ||
	    copy->into > CODEC_INTO_SCALE_CODES || !(copy->divide >= 0 && copy->divide < INFINITY) ||
	    (copy->nsegments && !copy->segments) || (copy->ncodebooks && !copy->codebooks) || !kernels_for(copy))
		return CODEC_BAD_ARGUMENT;
	return CODEC_OK;
}

/* Convert a spec to the params of a header, and check them; the header's other fields become 0. */
static codec_status params_request(const codec_spec *s, struct header *h)
{
	memset(h, 0, sizeof *h);
	if (!codec_of(s->codec))
		return CODEC_BAD_SPEC;
	h->codec = (uint8_t)s->codec;
	TRY(family_of(h)->params_ask(s, h));
	return params_fault(h) < 0 ? CODEC_OK : CODEC_BAD_SPEC;
}

codec_status codec_traits(const codec_spec *spec, uint32_t *traits)
{
	struct header h;
	codec_spec s;

	READ_STRUCT(s, spec);
	if (!traits)
		return CODEC_BAD_ARGUMENT;
	TRY(params_request(&s, &h));
	*traits = header_traits(&h);
	return CODEC_OK;
}

/* Check a spec and a tensor, and set *h to the header of their frame, except the sizes of sections. */
codec_status request(const codec_spec *spec, const codec_tensor *like, int with_data, struct header *h,
		     codec_tensor *copy)
{
	codec_spec s;

	READ_STRUCT(s, spec);
	READ_STRUCT(*copy, like);
	TRY(params_request(&s, h));
	if (!codec_takes(h->codec, copy->dtype))
		return CODEC_BAD_DTYPE;
	if (copy->rank > CODEC_MAX_RANK)
		return CODEC_BAD_SHAPE;
	h->dtype = (uint8_t)copy->dtype;
	h->rank = (uint8_t)copy->rank;
	memcpy(h->shape, copy->shape, sizeof(uint64_t) * h->rank);
	TRY(header_derive(h));
	if (with_data && (copy->nbytes != h->n * dtype_of(h->dtype)->nbytes || (copy->nbytes && !copy->data)))
		return CODEC_BAD_ARGUMENT;
	return CODEC_OK;
}

/*
 * Return 1 if opening a job needs a work buffer. The job's memory then includes a work buffer, which one-call functions
 * use for all blocks.
 */
static int job_works(const struct header *h, uint32_t kind)
{
	return kind == JOB_ENCODE && family_of(h)->opens_with_work && family_of(h)->opens_with_work(h);
}

void *job_work(const struct job *j, void *scratch)
{
	return job_works(&j->h, j->kind) ? (char *)j + j->work_at : (char *)scratch + job_room(&j->h, j->kind);
}

/* Return the size in bytes of a job (encode or decode, the larger) plus one work buffer. */
uint64_t job_scratch(const struct header *h)
{
	return job_room(h, JOB_DECODE) + work_nbytes(h);
}

uint64_t job_room(const struct header *h, uint32_t kind)
{
	uint64_t nbytes = ALIGN8(sizeof(struct job)) + 8;

	return nbytes + family_of(h)->job_nbytes(h) + (job_works(h, kind) ? work_nbytes(h) : 0);
}

codec_status codec_bound(const codec_spec *spec, const codec_tensor *like, size_t *nbytes)
{
	struct header h;
	codec_tensor t;

	if (!nbytes)
		return CODEC_BAD_ARGUMENT;
	TRY(request(spec, like, 0, &h, &t));
	*nbytes = family_of(&h)->bound ? family_of(&h)->bound(&h) : stored_nbytes(&h);
	return CODEC_OK;
}

codec_status codec_bound_segments(const codec_spec *spec, const codec_tensor *like, const codec_segment *segments,
				  uint64_t nsegments, size_t *nbytes)
{
	const codec_context with = {.segments = segments, .nsegments = nsegments};
	struct header h;
	codec_tensor t;

	if (!nbytes || (nsegments && !segments))
		return CODEC_BAD_ARGUMENT;
	TRY(request(spec, like, 0, &h, &t));
	TRY(segments_check(&with, h.n));
	*nbytes = family_of(&h)->bound_segments ? family_of(&h)->bound_segments(&h, &with) : stored_nbytes(&h);
	return CODEC_OK;
}

codec_status codec_encode_room(const codec_spec *spec, const codec_tensor *like, size_t *nbytes)
{
	struct header h;
	codec_tensor t;

	TRY(codec_bound(spec, like, nbytes));
	TRY(request(spec, like, 0, &h, &t));
	*nbytes += region_gaps(&h);
	return CODEC_OK;
}

codec_status codec_job_nbytes(const codec_spec *spec, const codec_tensor *like, size_t *job_nbytes, size_t *work)
{
	struct header h;
	codec_tensor t;

	if (!job_nbytes || !work)
		return CODEC_BAD_ARGUMENT;
	TRY(request(spec, like, 0, &h, &t));
	*job_nbytes = job_room(&h, JOB_ENCODE);
	*work = work_nbytes(&h);
	return CODEC_OK;
}

codec_status codec_scratch(const codec_spec *spec, const codec_tensor *like, size_t *nbytes)
{
	struct header h;
	codec_tensor t;

	if (!nbytes)
		return CODEC_BAD_ARGUMENT;
	TRY(request(spec, like, 0, &h, &t));
	*nbytes = job_scratch(&h);
	return CODEC_OK;
}

codec_status codec_keep_nbytes(const codec_info *info, size_t *nbytes)
{
	codec_info i;

	READ_STRUCT(i, info);
	if (!nbytes)
		return CODEC_BAD_ARGUMENT;
	*nbytes = kept_nbytes(i.spec.codec, i.n, i.block_nvalues, i.nblocks);
	return CODEC_OK;
}

/* Return 1 if all blocks of *range exist in a frame with this header. */
int has_blocks(const struct header *h, const codec_range *range)
{
	return range->first <= h->nblocks && range->count <= h->nblocks - range->first;
}

/* Return the job at `memory` if its kind (JOB_ENCODE or JOB_DECODE) and state are the given ones, else NULL. */
struct job *job_at(const void *memory, uint32_t kind, uint32_t state)
{
	struct job *j = job_place((void *)memory);

	return memory && j->kind == kind && j->state == state ? j : NULL;
}

codec_status job_open(void *memory, size_t nbytes, const struct header *h, uint32_t kind, struct job **out)
{
	struct job *j = job_place(memory);

	if (!memory || nbytes < job_room(h, kind))
		return CODEC_SHORT_SCRATCH;
	memset(j, 0, offsetof(struct job, sample)); /* later members are large, and written before they are read */
	j->kind = kind;
	j->h = *h;
	j->model.segments_at = ALIGN8(sizeof *j);
	j->model.offsets_at = j->model.segments_at;
	j->parts_at = ALIGN8(sizeof *j);
	j->sums_at = j->parts_at + WIRE_MAX_ROW_PARTS(h->n) * sizeof(struct part);
	j->work_at = j->parts_at + family_of(h)->job_nbytes(h);
	*out = j;
	return CODEC_OK;
}

void job_plan(struct job *j, codec_plan *plan)
{
	j->plan = (codec_plan){.nblocks = j->h.nblocks,
			       .nscans = j->nscans,
			       .job_nbytes = job_room(&j->h, j->kind),
			       .work_nbytes = work_nbytes(&j->h),
			       .region_bound = region_bound(j),
			       .regions_at = j->h.regions_at};
	if (plan)
		*plan = j->plan;
}

codec_status codec_digest(const codec_tensor *tensor, uint64_t first, uint64_t count, uint64_t *digest)
{
	const struct kernels *k = kernels_for(NULL);
	uint64_t chunks, n, item;
	codec_tensor t;

	READ_STRUCT(t, tensor);
	if (!digest || (t.nbytes && !t.data))
		return CODEC_BAD_ARGUMENT;
	if (!dtype_of(t.dtype))
		return CODEC_BAD_DTYPE;
	if (t.rank > CODEC_MAX_RANK)
		return CODEC_BAD_SHAPE;
	item = dtype_of(t.dtype)->nbytes;
	TRY(shape_product(t.rank, t.shape, &n));
	if (t.nbytes != n * item)
		return CODEC_BAD_ARGUMENT;
	chunks = (t.nbytes + DELTA_CHUNK - 1) / DELTA_CHUNK;
	first = MIN(first, chunks);
	count = MIN(count, chunks - first);
	*digest = delta_digest(k, t.data, DELTA_CHUNK * first, MIN(t.nbytes, DELTA_CHUNK * (first + count)), item);
	return CODEC_OK;
}
