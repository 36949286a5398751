/*
 * common/cta.cuh - reductions over a CTA, and synchronization between CTAs. A CTA is a CUDA thread block; In
 * native/cuda, "block" means a block of values in a frame.
 *
 * All functions are called by all CTA_THREADS threads of a CTA, and include the barriers that they need.
 *
 * The work on a frame is divided into numbered tasks, which CTAs claim in order (cta_next_task). A task waits only for
 * tasks with smaller numbers, which resident CTAs have already claimed. So there is no deadlock, however few CTAs are
 * resident at once.
 */
#ifndef CODEC_CUDA_COMMON_CTA_CUH
#define CODEC_CUDA_COMMON_CTA_CUH

#include "common/warp.cuh"

#define CTA_THREADS 256 /* threads of a CTA */
#define CTA_WARPS (CTA_THREADS / 32)

/* Return the sum of x over all threads of the CTA. */
DEVICE_CALL uint64_t cta_sum(uint64_t x)
{
	__shared__ uint64_t sums[CTA_WARPS];
	uint64_t sum = 0;

	x = warp_sum(x);
	__syncthreads();
	if (threadIdx.x % 32 == 0)
		sums[threadIdx.x / 32] = x;
	__syncthreads();
	for (int i = 0; i < CTA_WARPS; i++)
		sum += sums[i];
	return sum;
}

/* Return the largest x of all threads of the CTA. */
DEVICE_CALL uint32_t cta_max(uint32_t x)
{
	__shared__ uint32_t most[CTA_WARPS];

	x = warp_max(x);
	__syncthreads();
	if (threadIdx.x % 32 == 0)
		most[threadIdx.x / 32] = x;
	__syncthreads();
	return warp_max(most[threadIdx.x % CTA_WARPS]);
}

/*
 * Return the exclusive prefix sum of x over threads of the CTA (the sum over threads with a smaller index). Set *total
 * to the sum over all threads.
 */
DEVICE_CALL uint64_t cta_scan(uint32_t x, uint64_t *total)
{
	__shared__ uint32_t sums[CTA_WARPS];
	uint64_t before = 0;
	uint32_t warp = threadIdx.x / 32, all, mine = warp_scan(x, threadIdx.x % 32, &all);

	__syncthreads();
	if (threadIdx.x % 32 == 0)
		sums[warp] = all;
	__syncthreads();
	*total = 0;
	for (uint32_t i = 0; i < CTA_WARPS; i++) {
		before += i < warp ? sums[i] : 0;
		*total += sums[i];
	}
	return before + mine;
}

/* Return the x of thread 0 to all threads of the CTA. */
DEVICE_CALL uint32_t cta_broadcast(uint32_t x)
{
	__shared__ uint32_t shared;

	__syncthreads();
	if (threadIdx.x == 0)
		shared = x;
	__syncthreads();
	return shared;
}

/*
 * Claim the next task that no CTA has claimed, and return its number. `ticket`: counter in global memory, 0 before the
 * launch.
 */
DEVICE_CALL uint32_t cta_next_task(uint32_t *ticket)
{
	return cta_broadcast(threadIdx.x == 0 ? atomicAdd(ticket, 1u) : 0);
}

/*
 * Release fence, device scope: writes of all threads of the CTA become visible to other CTAs before thread 0's next
 * write. The barrier orders these writes before the fence of thread 0, and fences are cumulative.
 */
DEVICE void cta_release()
{
	__syncthreads();
	if (threadIdx.x == 0)
		device_fence();
}

/*
 * Count this CTA as finished in *done. Return true in the CTA that finishes last, of `ctas` CTAs; the writes of all
 * other CTAs are then visible to it.
 */
DEVICE_CALL bool cta_is_last(uint32_t *done, uint32_t ctas)
{
	uint32_t last = 0;

	cta_release();
	if (threadIdx.x == 0) {
		last = atomicAdd(done, 1u) == ctas - 1;
		device_fence(); /* acquire fence for all threads, since cta_broadcast has a barrier */
	}
	return cta_broadcast(last);
}

/*
 * Set a flag in global memory for which other CTAs wait. All earlier writes of this CTA become visible to these CTAs.
 */
DEVICE_CALL void cta_signal(volatile uint32_t *flag)
{
	cta_release();
	if (threadIdx.x == 0)
		*flag = 1;
}

/* Wait until another CTA has set `flag` with cta_signal. */
DEVICE_CALL void cta_wait(const volatile uint32_t *flag)
{
	while (threadIdx.x == 0 && !*flag)
		;
	if (threadIdx.x == 0)
		device_fence();
	__syncthreads();
}

#endif
