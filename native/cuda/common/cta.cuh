/* common/cta.cuh - what all threads of a CUDA block, a team (blocks are a frame's), find out together; teams that wait
 * for others.
 *
 * Work that follows from other work is numbered behind it, and teams draw numbers in order. Whoever waits for what has
 * a smaller number waits for teams that run already, so that none waits for ever however few run at once.
 */
#ifndef CODEC_CUDA_COMMON_CTA_CUH
#define CODEC_CUDA_COMMON_CTA_CUH

#include "common/warp.cuh"

#define CTA_THREADS 256 /* threads */
#define CTA_WARPS (CTA_THREADS / 32)

/* Of all threads, to all. */
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

/* The largest, to all. */
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

/* Sum of x over the threads below; over all of them to *total. */
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

/* What thread 0 has. */
DEVICE_CALL uint32_t cta_broadcast(uint32_t x)
{
	__shared__ uint32_t shared;

	__syncthreads();
	if (threadIdx.x == 0)
		shared = x;
	__syncthreads();
	return shared;
}

/* The next number that no team has drawn. */
DEVICE_CALL uint32_t cta_next_task(uint32_t *ticket)
{
	return cta_broadcast(threadIdx.x == 0 ? atomicAdd(ticket, 1u) : 0);
}

/* What all threads have written comes before what thread 0 writes next, for other teams, too: of what it has only seen
 * at the barrier by a fence of its own.
 */
DEVICE void cta_fence()
{
	__threadfence();
	__syncthreads();
	if (threadIdx.x == 0)
		__threadfence();
}

/* Is this the last of so many teams that are done with something? It sees all that they have written. */
DEVICE_CALL bool cta_is_last(uint32_t *done, uint32_t teams)
{
	cta_fence();
	uint32_t last = cta_broadcast(threadIdx.x == 0 && atomicAdd(done, 1u) == teams - 1);

	__threadfence();
	return last;
}

/* Tell those who wait that all is written. */
DEVICE_CALL void cta_signal(volatile uint32_t *flag)
{
	cta_fence();
	if (threadIdx.x == 0)
		*flag = 1;
}

DEVICE_CALL void cta_wait(const volatile uint32_t *flag)
{
	while (threadIdx.x == 0 && !*flag)
		;
	__threadfence();
	__syncthreads();
}

#endif
