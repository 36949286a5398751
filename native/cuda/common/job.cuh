/* common/job.cuh - a job on the device: the codec_view from the C library, and the arrays to which the view refers. */
#ifndef CODEC_CUDA_COMMON_JOB_CUH
#define CODEC_CUDA_COMMON_JOB_CUH

#include "common/warp.cuh"

/* A job on the device: its view, and `memory`, the base address of the view's arrays. */
struct job {
	codec_view v;
	const uint8_t *memory;
	/*
	 * encoding: code tables in shared memory, 256 entries per plane (share_coding in coder/encode.cuh); else NULL
	 */
	const uint32_t *codes;
};

/* Copy *from to *to, which is in shared memory. Called by all threads of the CTA. sizeof(T) is a multiple of 8. */
template <class T> DEVICE void share(T *to, const T *from)
{
	for (uint32_t i = threadIdx.x; i < sizeof(T) / sizeof(uint64_t); i += blockDim.x)
		((uint64_t *)to)[i] = ((const uint64_t *)from)[i];
	__syncthreads();
}

/* Copy the view of the CTA's job to shared memory, and return the job. */
DEVICE const job &share_job(const codec_view *view, const uint8_t *memory, const uint32_t *codes = NULL)
{
	__shared__ job j;

	if (threadIdx.x == 0)
		j.memory = memory, j.codes = codes;
	share(&j.v, view);
	return j;
}

/* Position in a region: bytes frame[at, end) are still to be read. All lanes of a warp hold the same cursor. */
struct cursor {
	const uint8_t *frame;
	uint64_t at, end;
};

DEVICE uint64_t left(const cursor *c)
{
	return c->end - c->at;
}

DEVICE const uint8_t *here(const cursor *c)
{
	return c->frame + c->at;
}

DEVICE codec_model_part *model_parts(const codec_view *v, const uint8_t *memory)
{
	return (codec_model_part *)(memory + v->model_parts.at);
}

DEVICE codec_row_part *row_parts(const codec_view *v, const uint8_t *memory)
{
	return (codec_row_part *)(memory + v->row_parts.at);
}

/* Layout of the decoding tables of one codebook, in bytes: see codec_view.tables. */
#define TABLE_NBYTES 514
#define TABLE_LENGTHS 256
#define TABLE_ESCAPE 512
#define TABLE_PAD 513

DEVICE const uint8_t *table_of(const job *j, uint32_t p)
{
	return j->memory + j->v.tables.at + TABLE_NBYTES * p;
}

/*
 * Return the part that contains position `place`: the last of `count` parts that begins at or before it, by binary
 * search. `begins`: member of PART that stores where the part begins; these ascend from 0.
 */
template <class PART, class NUMBER>
DEVICE const PART *part_at(const PART *part, uint64_t count, NUMBER PART::*begins, uint64_t place)
{
	uint64_t low = 0, high = count;

	while (high - low > 1) {
		uint64_t middle = (low + high) / 2;

		if (part[middle].*begins <= place)
			low = middle;
		else
			high = middle;
	}
	return part + low;
}

DEVICE uint64_t block_values(const codec_view *v, uint64_t b)
{
	uint64_t first = b * v->block_nvalues;

	return v->n - first < v->block_nvalues ? v->n - first : v->block_nvalues;
}

/* Set *c to the region of block b. CODEC_BAD_DIRECTORY: directory entries do not ascend, or lie outside the frame. */
DEVICE codec_status open_region(const codec_view *v, const uint8_t *frame, uint64_t b, cursor *c)
{
	const uint8_t *entry = frame + v->directory_offset + WIRE_DIRECTORY_ENTRY * b;

	c->frame = frame;
	c->at = b ? (uint64_t)WIRE_ALIGN * load32(entry - WIRE_DIRECTORY_ENTRY) : v->regions_offset;
	c->end = (uint64_t)WIRE_ALIGN * load32(entry);
	return c->at < v->regions_offset || c->end <= c->at || c->end > v->frame_nbytes ? CODEC_BAD_DIRECTORY
											: CODEC_OK;
}

/* Check that a region ends with fewer than WIRE_ALIGN bytes of padding, which are all 0. */
DEVICE codec_status close_region(const cursor *c, uint32_t lane)
{
	bool bad = left(c) >= WIRE_ALIGN || (lane < left(c) && here(c)[lane]);

	return __any_sync(FULL, bad) ? CODEC_BAD_REGION : CODEC_OK;
}

#endif
