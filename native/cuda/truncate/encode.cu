/* truncate/encode.cu - kernel that encodes blocks of Truncate frames. */
#include "frame/encode.cuh"
#include "truncate/encode.cuh"

/* Bytes of scratch memory for a warp, read by the host; memory for the largest region follows. */
#define CUT_ROOM (CUT_PLANES * PLANE_ROOM + 4 * WORDS_ROOM)
extern "C" __device__ const uint64_t encode_truncate_nbytes[] = {CUT_ROOM};

/* Encode blocks, as encode_lossless does, and write residuals. The residual must not be an array of the source. */
extern "C" __global__ void __launch_bounds__(32 * WARPS, 4) encode_truncate(const codec_encoding *encodings)
{
	const codec_encoding &e = encoding_of(encodings);
	const codec_source source = e.source;
	uint32_t lane = threadIdx.x % 32;
	__shared__ uint32_t codes[256];
	const job &j = share_coding(e.view, e.memory, codes, 1);
	uint8_t *scratch = scratch_of(e), *region = scratch + CUT_ROOM;

	if (blockIdx.x * WARPS >= e.warps)
		return;
	for (uint64_t b; (b = next_block(e.out, lane)) < j.v.nblocks;) {
		uint32_t size = write_cut(&j, e.memory, &source, e.by, b, scratch, region, lane);

		put_region(&j.v, e, b, region, size, 0, lane);
	}
}
