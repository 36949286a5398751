/*
 * plan.h - settings and sizes that follow from a spec and a shape: the job that kernels complete, and sizes of device
 * memory.
 */
#ifndef CODEC_CUDA_PLAN_H
#define CODEC_CUDA_PLAN_H

#include "codec/codec_engine.h"
#include "device.h"

struct codec_cuda_plan {
	const codec_cuda_device *device;
	uint32_t codec, dtype, rank, itemsize;
	uint64_t shape[CODEC_MAX_RANK];
	uint64_t n, nbytes; /* number of values, and bytes, of the tensor */
	uint64_t bound;
	int entropy;      /* row codecs: 1 if codes are entropy-coded */
	int needs_levels; /* TRUNCATE: 1 if encoding needs the level of each value */

	/*
	 * Encoding. If nblocks is 0, the tensor is stored uncompressed whatever its values are, and only CLOSE_FRAME
	 * is launched.
	 */
	uint64_t nblocks, nparts;
	codec_launch launch;    /* kernels that encode the tensor, and that decode its frames */
	uint64_t encode_each;   /* size of a unit of scratch memory in bytes; 0: none is needed */
	uint64_t choice_nbytes; /* bytes of a codec_choice and of one codec_part_found per part */
	codec_view view;        /* arrays are given by their offsets in `image`, or in the memory that kernels fill */
	uint64_t made_nbytes;   /* bytes of the memory that kernels fill: offsets, row_sums, lengths, tables */
	uint64_t head_nbytes, image_nbytes;
	uint8_t head[(CODEC_HEADER_NBYTES + 15) / 16 * 16];
	uint8_t *image; /* contents of the arrays that kernels read */

	/* Decoding. */
	uint64_t decode_each;   /* size of a unit of scratch memory in bytes; 0: none is needed */
	uint64_t memory_nbytes; /* upper bound in bytes of the arrays of a frame's job */
};

/* Round up to a multiple of 16. */
static inline uint64_t align16(uint64_t n)
{
	return (n + 15) / 16 * 16;
}

/* Units of scratch memory that the warps of all tensors of a call share: see native/cuda/common/scratch.cuh. */
struct scratch {
	uint64_t each, warp_units; /* size of a unit in bytes; maximum number of units per warp */
	uint64_t count;
};

/*
 * Account for a tensor whose warps need `warp_units` units of `each` bytes: raise s->each and s->warp_units to at least
 * these. each 0: the tensor needs no scratch memory.
 */
void scratch_need(struct scratch *s, uint64_t each, uint64_t warp_units);

/*
 * Set the number of units. `wanted`: maximum number of units that a launch uses at once. If the limit on scratch memory
 * allows only fewer units, warps wait for free units.
 */
void scratch_limit(struct scratch *s, uint64_t wanted);

/* Return the size in bytes of the bit mask of units in use, which must be 0 before a call's first launch. */
uint64_t scratch_taken_nbytes(const struct scratch *s);

/*
 * Return the view for a job whose arrays lie at address `memory`; arrays that kernels fill lie at `made`, a higher
 * address.
 */
codec_view plan_view(const codec_cuda_plan *p, uint64_t memory, uint64_t made, uint64_t stream);

/* Return the number of CTAs of a kernel that a GPU runs at once. */
uint64_t resident_ctas(const codec_cuda_device *d, uint32_t k);

/*
 * Return the number of CTAs of a kernel that encodes or decodes the plan's blocks: at most as many as are resident at
 * once.
 */
uint32_t plan_ctas(const codec_cuda_plan *p, uint32_t k);

/*
 * Return the number of CTAs of kernel k for a tensor that needs `ctas` CTAs, in a call whose tensors need `all` CTAs
 * together: the tensor's share of the CTAs that are resident at once, at least 1.
 */
uint32_t share_ctas(const codec_cuda_device *d, uint32_t k, uint32_t ctas, uint64_t all);

#define NCLASSES 32

/*
 * Return the class of a number of CTAs, 0 to NCLASSES - 1. Numbers of the same class differ at most by a factor of
 * two.
 */
static inline int class_of(uint32_t ctas)
{
	int class = 0;

	for (; ctas > 1; ctas >>= 1)
		class ++;
	return class;
}

/*
 * Return the number of CTAs for a kernel whose threads process n values in a grid-stride loop, four values at a time.
 */
uint32_t elementwise_ctas(const codec_cuda_device *d, uint64_t n);

#endif
