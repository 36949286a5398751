/* plan.h - all that a spec and a shape determine: the job that kernels complete, and sizes of device memory. */
#ifndef CODEC_CUDA_PLAN_H
#define CODEC_CUDA_PLAN_H

#include "codec/codec_engine.h"
#include "device.h"

struct codec_cuda_plan {
	const codec_cuda_device *device;
	uint32_t codec, dtype, rank, itemsize;
	uint64_t shape[CODEC_MAX_RANK];
	uint64_t n, nbytes; /* values and bytes of the tensor */
	uint64_t bound;
	int entropy;      /* codecs of rows: 1 if codes are entropy-coded */
	int needs_levels; /* TRUNCATE */

	/* Encoding. Without blocks the tensor is stored whatever its values are, and only CLOSE_FRAME is launched. */
	uint64_t nblocks, nparts;
	enum kernel choose, encode; /* equal: blocks choose for themselves */
	int scales_last;            /* SCALE_ROWS makes the scales after all blocks; not if there is a residual */
	uint64_t encode_each;       /* bytes of a unit of scratch memory; 0: none is needed */
	uint64_t encode_units;      /* for each warp, so that all run at once */
	uint64_t encode_most;       /* maximum for a warp of any tensor of this shape; then fewer run at once */
	uint64_t choice_nbytes;     /* size of a codec_choice with its parts */
	codec_view view;            /* arrays: offsets in `image`, or in the memory that kernels fill */
	uint64_t made_nbytes;       /* size of that memory: offsets, row_sums, lengths, tables */
	uint64_t head_nbytes, image_nbytes;
	uint8_t head[(CODEC_HEADER_NBYTES + 15) / 16 * 16];
	uint8_t *image; /* arrays that kernels read */

	/* Decoding. */
	enum kernel decode, decode_fast; /* decode_fast: LOSSLESS of floats, where frames may suit it; else `decode` */
	uint64_t decode_each, decode_units; /* bytes of a unit; maximum for a warp */
	uint64_t memory_nbytes;             /* size of the arrays of any frame */
};

/* Round up to a multiple of 16. */
static inline uint64_t align16(uint64_t n)
{
	return (n + 15) / 16 * 16;
}

/* Units of scratch memory that the warps of all tensors of a call share: see native/cuda/common/scratch.cuh. */
struct scratch {
	uint64_t each, warp_units; /* bytes of a unit; maximum of units for a warp */
	uint64_t count;
};

/* Make units large enough for a tensor: `each` bytes, at most warp_units for a warp. each is 0: it needs none. */
void scratch_need(struct scratch *s, uint64_t each, uint64_t warp_units);

/* Set the number of units for launches that use at most `wanted` units at once. With fewer of them, warps wait. */
void scratch_limit(struct scratch *s, uint64_t wanted);

/* Return the bytes of the bits that say which units are taken, which must be 0 before a call's first launch. */
uint64_t scratch_taken_nbytes(const struct scratch *s);

/* Return the view for a job whose arrays lie at `memory`, and those that kernels fill at `made`, a higher address. */
codec_view plan_view(const codec_cuda_plan *p, uint64_t memory, uint64_t made, uint64_t stream);

/* Return the CTAs that a kernel of blocks needs for nblocks blocks: at most as many as are resident at once. */
uint32_t plan_ctas(const codec_cuda_plan *p, enum kernel k, uint64_t nblocks);

/*
 * Return the CTAs for one tensor of a batch, whose tensors need `all` CTAs together: its share of the resident ones, at
 * least 1.
 */
uint32_t share_ctas(const codec_cuda_device *d, enum kernel k, uint32_t ctas, uint64_t all);

#define NCLASSES 32

/* Return the class of a number of CTAs, 0 to NCLASSES - 1: tensors of a class differ at most by a factor of two. */
static inline int class_of(uint32_t ctas)
{
	int class = 0;

	for (; ctas > 1; ctas >>= 1)
		class ++;
	return class;
}

/* Return the CTAs of a kernel whose threads process n values in strides, four at a time. */
uint32_t elementwise_ctas(const codec_cuda_device *d, uint64_t n);

#endif
