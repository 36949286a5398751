/*
 * store.cu - kernel that writes bytes from its arguments to device memory.
 *
 * A launch copies its arguments immediately, also when the launch is captured in a CUDA graph. So the caller's host
 * memory need not outlive the call, and need not be pinned.
 */
#include "kernels/layout.cuh"

/* Kernel: write up to STORED_NBYTES bytes to device memory. Grid: 1. */
extern "C" __global__ void __launch_bounds__(256) store_bytes(const stored_bytes s)
{
	for (uint32_t i = threadIdx.x; i < s.nbytes / 8; i += blockDim.x)
		((uint64_t *)s.to)[i] = s.words[i];
}
