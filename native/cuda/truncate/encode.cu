/* truncate/encode.cu - kernel that encodes blocks of Truncate frames. */
#include "frame/encode.cuh"
#include "truncate/encode.cuh"

/*
 * Bytes of scratch memory per warp; the host reads this symbol. [0]: if levels are stored separately from symbols; [1]:
 * if levels are coded together with exponents.
 */
extern "C" __device__ const uint64_t encode_truncate_nbytes[] = {CUT_ROOM(0), CUT_ROOM(1)};

/*
 * Kernel: encode the blocks of Truncate frames, as encode_lossless does, and write residuals. The residual must not be
 * one of the source's input arrays.
 */
extern "C" __global__ void __launch_bounds__(32 * WARPS, 4) encode_truncate(const codec_encoding *encodings)
{
	const codec_encoding &e = encoding_of(encodings);
	const codec_source source = e.source;
	uint32_t lane = threadIdx.x % 32;
	__shared__ uint32_t codes[256];
	__shared__ uint32_t rings[WARPS][RING_WORDS * (PIECES + 1)];
	const job &j = share_coding(e.view, e.memory, codes, 1);

	if (blockIdx.x * WARPS >= useful_warps(e.scratch, e.scratch.each, e.warps))
		return;
	for (uint32_t i = lane; i < RING_WORDS * (PIECES + 1); i += 32)
		rings[threadIdx.x / 32][i] = 0;
	__syncwarp();
	const taken_units unit = take_units(e.scratch, e.scratch.each, lane);

	for (uint64_t b; (b = next_block(e.out, lane)) < j.v.nblocks;)
		if (j.v.dtype == CODEC_FLOAT32)
			write_cut<CODEC_FLOAT32>(e, &j, &source, b, unit.memory, rings[threadIdx.x / 32], lane);
		else if (j.v.dtype == CODEC_BFLOAT16)
			write_cut<CODEC_BFLOAT16>(e, &j, &source, b, unit.memory, rings[threadIdx.x / 32], lane);
		else
			write_cut<CODEC_FLOAT16>(e, &j, &source, b, unit.memory, rings[threadIdx.x / 32], lane);
	give_units(e.scratch, unit, lane);
}
