/* topk/encode.cu - kernels that encode blocks of TopK's frames. */
#include "topk/small.cuh"

/*
 * Kernel: search a tensor for NaN and Inf, before encode_topk changes the residual. Grid: (CTAs, frames); threads check
 * values in a grid-stride loop. If v.row_sums is empty, no search is needed.
 */
extern "C" __global__ void __launch_bounds__(CTA_THREADS) choose_topk(const codec_encoding *encodings)
{
	const codec_encoding &e = encodings[blockIdx.y];
	const uint32_t dtype = e.view->dtype;
	const uint64_t n = e.view->row_sums.count ? e.view->n : 0;
	bool bad = false;

	for (uint64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (uint64_t)gridDim.x * blockDim.x)
		bad |= (round_bits(value_at(dtype, &e.source, i)) & ROUND_ABS) >= ROUND_INF;
	if (__any_sync(FULL, bad) && threadIdx.x % 32 == 0)
		atomicMax(&e.out->fault, (uint32_t)CODEC_NONFINITE);
}

/*
 * Kernel: encode blocks, each by one CTA. Grid: (CTAs, frames). A CTA acquires scratch memory for the largest region.
 * If choose_topk has set out->fault, nothing is written.
 */
extern "C" __global__ void __launch_bounds__(CTA_THREADS, 4) encode_topk(const codec_encoding *encodings)
{
	__shared__ topk_room room;
	__shared__ taken_units unit;
	const codec_encoding &e = encoding_of(encodings);
	const codec_view &v = share_job(e.view, e.memory).v;
	const topk_kind q = kind_of_topk(v);
	const uint32_t lane = threadIdx.x % 32;

	if (WARPS * blockIdx.x >= e.warps || cta_broadcast(threadIdx.x == 0 ? *(volatile uint32_t *)&e.out->fault : 0))
		return;
	if (threadIdx.x < 32)
		unit = take_units(e.scratch, topk_region_nbytes(&q, v.n < v.block_nvalues ? v.n : v.block_nvalues),
				  lane);
	__syncthreads();
	uint32_t guess = 0;

	for (uint64_t b; (b = cta_next_task(&e.out->ticket)) < v.nblocks;) {
		uint32_t size = WIRE_ALIGN;

		clear_region(v, b, unit.memory);
		const codec_status status = write_chunks(e, v, b, unit.memory, &room, &guess, &size);

		__syncthreads();
		if (threadIdx.x == 0 && status != CODEC_OK)
			atomicMax(&e.out->fault, (uint32_t)status);
		if (threadIdx.x < 32)
			put_region(&v, e, b, unit.memory, size, lane);
	}
	if (threadIdx.x < 32)
		give_units(e.scratch, unit, lane);
}
