/* delta/encode.cu - kernel that encodes blocks of Delta frames. */
#include "delta/encode.cuh"

/*
 * Bytes of scratch memory per warp, which holds a histogram of exponents; indexed by log2 of a value's size in bytes.
 * The host reads this symbol.
 */
#define BINS_NBYTES(exponents) ((exponents) * sizeof(exponent_bin))
extern "C" __device__ const uint64_t encode_delta_nbytes[] = {BINS_NBYTES(32), BINS_NBYTES(256), BINS_NBYTES(256),
							      BINS_NBYTES(2048)};

/* Kernel: encode blocks of values of SIZE bytes against the base. Grid: (CTAs, frames). */
template <int SIZE> __global__ void __launch_bounds__(32 * WARPS, 4) encode_delta(const codec_encoding *encodings)
{
	const codec_encoding &e = encoding_of(encodings);
	const codec_view &v = share_job(e.view, e.memory).v;
	const uint32_t lane = threadIdx.x % 32;

	if (blockIdx.x * WARPS >= useful_warps(e.scratch, e.scratch.each, e.warps))
		return;
	const taken_units unit = take_units(e.scratch, e.scratch.each, lane);

	for (uint64_t b; (b = next_block(e.out, lane)) < v.nblocks;)
		write_delta<SIZE>(e, v, b, (exponent_bin *)unit.memory, lane);
	give_units(e.scratch, unit, lane);
}
