/* frame/check_finite.cu - check that the float32 result of a reduction is finite. */
#include "codec/codec.h"
#include "exact/round.h"
#include "common/warp.cuh"

/*
 * Set *found, which is 0 before the launch, to CODEC_NONFINITE if one of n values is NaN or Inf. Any grid: a
 * grid-stride loop.
 */
extern "C" __global__ void __launch_bounds__(256) check_finite(const uint32_t *x, uint64_t n, uint32_t *found)
{
	bool bad = false;

	for (uint64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (uint64_t)gridDim.x * blockDim.x)
		bad |= (x[i] & ROUND_ABS) >= ROUND_INF;
	if (__any_sync(FULL, bad) && threadIdx.x % 32 == 0)
		atomicMax(found, (uint32_t)CODEC_NONFINITE);
}
