/* topk/topk.cuh - parameters of TopK's frames, and scales of chunks. docs/spec/format.md, section 11. */
#ifndef CODEC_CUDA_TOPK_TOPK_CUH
#define CODEC_CUDA_TOPK_TOPK_CUH

#include "exact/topk.h"
#include "common/job.cuh"

DEVICE topk_kind kind_of_topk(const codec_view &v)
{
	return topk_kind_of(v.group_size, v.bits, v.dtype);
}

/* Range of a chunk: magnitudes of its lowest and highest level. `high` is 0 if the chunk has no codes. */
struct topk_range {
	float low, high;
};

/*
 * Return the range of a chunk from its scales, which are bits of bfloat16. Frames with 1 bit per value store one scale
 * per chunk.
 */
DEVICE topk_range range_of(uint32_t low, uint32_t high)
{
	return {round_float(round_from_bfloat16((uint16_t)low)), round_float(round_from_bfloat16((uint16_t)high))};
}

#endif
